"""Early stopping: end the run when a metric has stopped improving, is good enough, or is past help."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from signalfire import Engine, Events, Handler, Interval, Phase, on
from signalfire.acts import Override
from signalfire.checks import check_bool, check_int, check_number
from signalfire.interval import check_every
from signalfire.monitor import Monitor

from ._common.ranks import KEEP_BEST

__all__ = ["EarlyStopping"]


class EarlyStopping(Handler):
    """Stops the run when the monitored metric has not improved for ``patience`` new values in a row.

    It acts once for each new value, whenever that comes. A stop that ``min_epochs`` or ``min_iters`` hold back is decided anew
    with every value: it is taken back if the metric recovers before it takes effect. NaN is never an improvement.

    With ``restore_best``, the modules have the weights of the best value when the run is complete. A later `run` goes on from
    them, with optimizers, schedules and counters as they were at the end; to go on from the last weights, load a checkpoint.
    An error leaves the last weights in place.

    Args:
        monitor: the metric's name in ``state.metrics``.
        mode: "min" if smaller is better, "max" if greater is.
        patience: the run stops at the patience-th new value in a row that is no improvement.
        min_delta: how much better than the best a value has to be to count as an improvement.
        relative: whether min_delta is a share of the best value's magnitude.
        threshold: the run stops at a value that is at least this good.
        divergence: the run stops at a value that is worse than this.
        check_finite: whether the run stops at a value that is NaN or infinite.
        restore_best: whether the best value's weights are put back when the run is complete. They are kept as `Engine.weights`
            gives them, averages in place, and need memory for one more copy on the modules' devices.
        after: an amount of training, such as "5ep", "1000it" or "1000st", up to whose end values are left unjudged.

    Attributes:
        best: the best value so far; None before the first.
        waited: the values since the last improvement.

    Example:
        >>> EarlyStopping("accuracy", mode="max", patience=5, threshold=0.99).patience
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
        threshold: float | None = None,
        divergence: float | None = None,
        check_finite: bool = True,
        restore_best: bool = False,
        after: str | Interval | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.monitor = Monitor("EarlyStopping", monitor, mode, min_delta=min_delta, relative=relative)
        self.threshold = None if threshold is None else check_number(self, "threshold", threshold)
        self.divergence = None if divergence is None else check_number(self, "divergence", divergence)
        if threshold is not None and divergence is not None and self._worse(threshold, divergence):
            raise ValueError(
                f"EarlyStopping(threshold={threshold!r}, divergence={divergence!r}): with mode={mode!r} the threshold is "
                "worse than the divergence; exchange the two, or change the mode"
            )
        self.patience = check_int(self, "patience", patience)
        self.check_finite = check_bool(self, "check_finite", check_finite)
        self.after = None if after is None else check_every(self, after, argument="after", units=["ep", "it", "st"])
        check_bool(self, "restore_best", restore_best)
        self.keeping = Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED if restore_best else None
        self.restoring = Events.COMPLETED if restore_best else None
        self.best: float | None = None
        self.waited = 0
        self._weights: dict[str, Any] | None = None  # of the best value
        self._keep = False  # the best value came in this event

    def attached(self, engine: Engine) -> None:
        if self.restoring is not None:
            engine.overrides.claim(Override.FINAL_WEIGHTS, by=self)

    @on(Events.STARTED, phase=Phase.PREPARE)
    def begin(self, engine: Engine) -> None:
        """Weights that an error kept from being kept are not taken from a later event."""
        self._keep = False

    @on(Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED, phase=Phase.CONTROL)
    def judge(self, engine: Engine) -> None:
        """Look at the metric if it is new."""
        value = self.monitor.new_value(engine)
        if value is None or not self._begun(engine):
            return
        unusable = self.check_finite and not math.isfinite(value)
        if not unusable and self.monitor.better(value, self.best):
            self.best, self.waited = value, 0
            self._keep = self.keeping is not None
        else:
            self.waited += 1
        engine.boundary.withdraw(by=self.name)
        reason = self._reason(value, unusable)
        if reason is not None:
            engine.terminate(reason, by=self.name)

    def _begun(self, engine: Engine) -> bool:
        if self.after is None:
            return True
        position = {"ep": engine.state.epoch, "it": engine.state.iteration, "st": engine.updates[0].steps}
        return position[self.after.unit] > self.after.value

    def _reason(self, value: float, unusable: bool) -> str | None:
        """Why the run is to stop at this value; None if it is to go on."""
        metric = self.monitor.metric
        if unusable:
            return f"{metric} is {value}, which is not finite"
        if self.divergence is not None and self._worse(value, self.divergence):
            return f"{metric} is {value}, worse than the divergence of {self.divergence}"
        if self.threshold is not None and (value == self.threshold or self._worse(self.threshold, value)):
            return f"{metric} is {value}, which reaches the threshold of {self.threshold}"
        if self.waited >= self.patience:
            return f"{metric} has not improved on {self.best} for {self.waited} values"
        return None

    def _worse(self, value: float, than: float) -> bool:
        return value > than if self.monitor.mode == "min" else value < than

    @on("keeping", phase=Phase.PERSIST, rank=KEEP_BEST)
    def keep_best(self, engine: Engine) -> None:
        """Copy the weights if the best value came in this event."""
        if self._keep:
            self._keep = False
            self._weights = engine.weights()

    @on("restoring")
    def restore_best(self, engine: Engine) -> None:
        """Put the weights of the best value in place."""
        if self._weights is not None:
            engine.load_weights(self._weights)

    @on(Events.EPOCH_COMPLETED, phase=Phase.CONTROL)
    def require(self, engine: Engine) -> None:
        """Refuse a metric that does not exist."""
        self.monitor.require(engine)

    def state_dict(self) -> dict[str, Any]:
        state = {"best": self.best, "waited": self.waited, "monitor": self.monitor.state_dict()}
        return state if self.keeping is None else state | {"weights": self._weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]
        self._weights = state.get("weights") if self.keeping is not None else None
        self.monitor.load_state_dict(state["monitor"])
