"""New values of metrics, each with the position at which it was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from signalfire import Engine
from signalfire.state import as_numbers

__all__ = ["NewValues", "Record"]


class Record(NamedTuple):
    """Values of one point of the run, by name; ``step`` counts the first update's optimizer steps."""

    epoch: int
    iteration: int
    step: int
    values: dict[str, float]


class NewValues:
    """Collects what is written to ``state.metrics`` while a run lasts, without a receiver in each iteration.

    The values of one iteration make one record, those of its epoch's end another. Of a metric that is written several times
    in between, the last value counts. Tensors are converted only when the records are taken.

    Args:
        every: Of a metric that is written in consecutive iterations, only every n-th value is collected; all others are.

    Attributes:
        pending: What was written since the records were last taken.
        seen: How often each metric was written by then.
    """

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.seen: dict[str, int] = {}
        self._last: dict[str, int] = {}  # with `every`: the iteration in which each metric was last written
        self._passed: dict[str, bool] = {}  # whether the last value of each was not collected
        self._engine: Engine | None = None
        self.pending: dict[tuple[int, bool], tuple[int, int, int, dict[str, Any]]] = {}
        self._serial = -1

    def start(self, engine: Engine, *, keep_seen: bool = False) -> None:
        """Collect from now on; what was written before is taken as seen, unless ``keep_seen``."""
        self.stop()
        self._engine = engine
        self._serial = -1
        self._last = {name: last for name, last in self._last.items() if last <= engine.state.iteration}
        self._passed = {name: self._passed[name] for name in self._last}
        if not keep_seen:
            self.skip(engine)
        engine.state.metrics.listeners.append(self._add)

    @property
    def collects(self) -> bool:
        """Whether a run is under way."""
        return self._engine is not None

    def stop(self) -> None:
        """Collect no more."""
        if self._engine is not None and self._add in self._engine.state.metrics.listeners:
            self._engine.state.metrics.listeners.remove(self._add)
        self._engine, self.pending = None, {}

    def skip(self, engine: Engine) -> None:
        """Take all values as seen."""
        self.pending = {}
        self.seen = dict(engine.state.metrics.serials)

    def _add(self, name: str, value: Any) -> None:
        engine = self._engine
        assert engine is not None
        state = engine.state
        iteration = state.iteration
        if self.every > 1 and state.epoch_open:
            last = self._last.get(name, -1)
            if last != iteration:
                self._last[name] = iteration
                if last == iteration - 1 and iteration % self.every:  # written in the iteration before as well
                    self._passed[name] = True
                    return
                self._passed[name] = False
            elif self._passed[name]:
                return
        key = iteration, state.epoch_open
        if key not in self.pending:
            self.pending[key] = state.epoch, iteration, engine.updates[0].steps, {}
        if value.__class__ is not float and isinstance(value, Tensor):
            value = value.detach().clone()  # until the records are taken, it may be changed in place
        self.pending[key][3][name] = value

    def take(self, engine: Engine) -> list[Record]:
        """The new values since the last call, in the order in which they were measured; names are sorted.

        Values that are not one number are left out. The steps of a record are those at its end.
        """
        metrics = engine.state.metrics
        if metrics.serial == self._serial:
            return []
        pending, self.pending = list(self.pending.values()), {}
        taken = {name for *_, values in pending for name in values}
        if self._passed:
            taken |= {name for name, passed in self._passed.items() if passed}
        # From a loaded state, in which a value may have been new.
        others = {name: value for name, value in metrics.new_since(self.seen).items() if name not in taken}
        if others:
            pending.append((engine.state.epoch, engine.state.iteration, engine.updates[0].steps, others))
        self.seen, self._serial = dict(metrics.serials), metrics.serial
        records = (Record(epoch, at, step, as_numbers(values)) for epoch, at, step, values in pending)
        return [record for record in records if record.values]

    def state_dict(self) -> dict[str, Any]:
        """How often each metric was seen, and which were written in the iteration that is complete."""
        state: dict[str, Any] = {"seen": dict(sorted(self.seen.items()))} if self.seen else {}
        if self._engine is not None and self._last:
            now = self._engine.state.iteration
            if recent := {name: self._passed[name] for name, last in sorted(self._last.items()) if last == now}:
                state["recent"] = {"iteration": now, "passed": recent}
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.pending = {}
        self.seen, self._serial = dict(state.get("seen", {})), -1
        recent = state.get("recent", {"iteration": 0, "passed": {}})
        self._last = dict.fromkeys(recent["passed"], recent["iteration"])
        self._passed = dict(recent["passed"])
