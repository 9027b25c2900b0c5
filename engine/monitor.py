"""A monitored metric: its new values, and whether they are improvements."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from .checks import check_bool, check_choice, check_number
from .state import as_number

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Monitor"]

Mode = Literal["min", "max"]


class Monitor:
    """Reports each new value of one metric once, and whether it is better than another value.

    NaN is never better than anything, and an equal value is not better.

    Args:
        handler: Class name of the handler, for errors.
        metric: Name of the metric in ``state.metrics``.
        mode: "min" if smaller is better, "max" if greater is.
        min_delta: Smallest difference that counts as an improvement; in units of the metric, or with ``relative`` as a fraction
            of the best value's magnitude, which also works for negative scores.
        relative: Whether min_delta is relative.
    """

    def __init__(
        self, handler: str, metric: str, mode: Mode, *, min_delta: float = 0.0, relative: bool = False
    ) -> None:
        if not isinstance(metric, str) or not metric:
            raise TypeError(f"{handler}: the monitored metric is {metric!r}; expected a name, such as 'accuracy'")
        self.handler = handler
        self.metric = metric
        self.mode = check_choice(handler, "mode", mode, ("min", "max"))
        self.min_delta = check_number(handler, "min_delta", min_delta, least=0)
        self.relative = check_bool(handler, "relative", relative)
        self.serial = 0  # of all metrics at the last call: one comparison shows that nothing is new
        self.seen = 0  # the serial of the metric's value that was last returned

    def new_value(self, engine: Engine) -> float | None:
        """The metric's value if it is new since the last call, else None."""
        metrics = engine.state.metrics
        if metrics.serial == self.serial:
            return None
        self.serial = metrics.serial
        serial = metrics.serials.get(self.metric, 0)
        if serial == self.seen:
            return None
        self.seen = serial
        value = metrics[self.metric]
        number = as_number(value)
        if number is None:
            shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
            raise TypeError(
                f"{self.handler}: the metric {self.metric!r} is a {type(value).__name__}{shape}; expected a single number"
            )
        return number

    def require(self, engine: Engine) -> None:
        """Raise KeyError if the metric was neither announced nor written; call it at the end of an epoch."""
        metrics = engine.state.metrics
        if self.metric in metrics or self.metric in metrics.owners:
            return
        there = sorted(set(metrics) | set(metrics.owners))
        close = difflib.get_close_matches(self.metric, there, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise KeyError(
            f"{self.handler} monitors {self.metric!r}, but no such metric was produced. "
            f"There are: {', '.join(there) or 'none; attach Metrics or Validation'}{hint}. If your function "
            "writes it less often than every epoch, announce it first: engine.state.metrics.announce('user', ['its_name'])"
        )

    def better(self, value: float, best: float | None) -> bool:
        """Whether ``value`` is better than ``best`` by more than min_delta; everything except NaN is better than None."""
        if math.isnan(value):
            return False
        if best is None or math.isnan(best):
            return True
        if self.min_delta == 0.0 or math.isinf(best):
            return value < best if self.mode == "min" else value > best
        margin = self.min_delta * abs(best) if self.relative else self.min_delta
        return value < best - margin if self.mode == "min" else value > best + margin

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]
        self.serial = -1  # check all metrics at the next call
