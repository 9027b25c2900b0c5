"""Early stopping: end the run when a metric has stopped improving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from signalfire import Engine, Events, Handler, Monitor, Phase, on

__all__ = ["EarlyStopping"]


class EarlyStopping(Handler):
    """Stops the run when the monitored metric has not improved for ``patience`` new values in a row.

    It acts once for each new value, whenever that comes. A stop that ``min_epochs`` or ``min_iters`` hold back is taken back
    if the metric recovers before it takes effect. NaN is never an improvement.

    Args:
        monitor: the metric's name in ``state.metrics``.
        mode: "min" if smaller is better, "max" if greater is.
        patience: the run stops at the patience-th new value in a row that is no improvement.
        min_delta: how much better than the best a value has to be to count as an improvement.
        relative: whether min_delta is a share of the best value's magnitude.

    Attributes:
        best: the best value so far; None before the first.
        waited: the values since the last improvement.

    Example:
        >>> EarlyStopping("accuracy", mode="max", patience=5).patience
        5
    """

    trains = True

    def __init__(
        self,
        monitor: str,
        *,
        mode: Literal["min", "max"] = "min",
        patience: int = 3,
        min_delta: float = 0.0,
        relative: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ValueError(f"EarlyStopping(patience={patience!r}): it has to be an int of 1 or more")
        self.monitor = Monitor("EarlyStopping", monitor, mode, min_delta=min_delta, relative=relative)
        self.patience = patience
        self.best: float | None = None
        self.waited = 0

    @on(Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED, phase=Phase.CONTROL)
    def judge(self, engine: Engine) -> None:
        """Look at the metric if it is new."""
        value = self.monitor.new_value(engine)
        if value is None:
            return
        if self.monitor.better(value, self.best):
            self.best, self.waited = value, 0
            engine.withdraw_termination(by=self.name)
            return
        self.waited += 1
        if self.waited >= self.patience:
            engine.terminate(
                f"{self.monitor.metric} has not improved on {self.best} for {self.waited} values", by=self.name
            )

    @on(Events.EPOCH_COMPLETED, phase=Phase.CONTROL)
    def require(self, engine: Engine) -> None:
        """Refuse a metric that does not exist."""
        self.monitor.require(engine)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "monitor": self.monitor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]
        self.monitor.load_state_dict(state["monitor"])
