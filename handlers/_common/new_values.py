"""New values of metrics, each with the position at which it was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from signalfire import Engine
from signalfire.core.state import as_numbers

__all__ = ["NewValues", "Record"]


class Record(NamedTuple):
    """Values of one point of the run, by name; ``step`` counts the first update's optimizer steps."""

    epoch: int
    iteration: int
    step: int
    values: dict[str, float]


class NewValues:
    """Collects what is written to ``state.metrics`` while a run lasts, without a receiver in each iteration.

    The values of one iteration are one record, and those of its epoch's end are another. If a metric is written several times in
    between, the last value counts. Tensors are converted only when the records are taken.

    Whether a value is the first of several in consecutive iterations shows only in the next iteration. Until then it is held
    back, unless it is an evaluation's.

    Args:
        every: For metrics that are written in consecutive iterations, only the values of every n-th iteration are collected. All
            values of other metrics are collected.

    Attributes:
        pending: The values written since the records were last taken.
        seen: How often each metric was written by then.
    """

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.seen: dict[str, int] = {}
        self._last: dict[str, int] = {}  # with `every`: the iteration in which each metric was last written
        self._passed: dict[str, bool] = {}  # whether the last value of each was not collected
        self._first: dict[str, int] = {}  # the iteration of a pending value that may be the first of several
        self._engine: Engine | None = None
        self.pending: dict[tuple[int, bool], tuple[int, int, int, dict[str, Any]]] = {}
        self._serial = -1

    def start(self, engine: Engine, *, keep_seen: bool = False) -> None:
        """Collect from now on; earlier values count as seen, unless ``keep_seen``."""
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
        """Whether a run is in progress."""
        return self._engine is not None

    def stop(self) -> None:
        """Collect no more."""
        if self._engine is not None and self._add in self._engine.state.metrics.listeners:
            self._engine.state.metrics.listeners.remove(self._add)
        self._engine, self.pending, self._first = None, {}, {}

    def skip(self, engine: Engine) -> None:
        """Take all values as seen."""
        self.pending, self._first = {}, {}
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
                follows = last == iteration - 1  # written in the iteration before as well
                if (first := self._first.pop(name, None)) is not None and follows:
                    self._drop(name, first)
                if follows and iteration % self.every:
                    self._passed[name] = True
                    return
                self._passed[name] = False
                if iteration % self.every and name not in state.metrics.evaluated:
                    self._first[name] = iteration
            elif self._passed[name]:
                return
        key = iteration, state.epoch_open
        if key not in self.pending:
            self.pending[key] = state.epoch, iteration, engine.updates[0].steps, {}
        if value.__class__ is not float and isinstance(value, Tensor):
            value = value.detach().clone()  # until the records are taken, it may be changed in place
        self.pending[key][3][name] = value

    def _drop(self, name: str, iteration: int) -> None:
        values = self.pending[iteration, True][3]
        del values[name]
        if not values:
            del self.pending[iteration, True]

    def take(self, engine: Engine, *, last: bool = False, earlier: bool = False) -> list[Record]:
        """The new values since the last call, in the order in which they were measured; names are sorted.

        Values that are not one number are left out. The steps of a record are those at its end.

        Args:
            engine: The engine that measured them.
            last: Whether the run ends, so nothing is held back.
            earlier: Whether to take only the values of earlier iterations.
        """
        metrics = engine.state.metrics
        if metrics.serial == self._serial and not self.pending:
            return []
        pending = self._take_pending(engine.state.iteration, last, earlier)
        taken = {name for *_, values in (*pending, *self.pending.values()) for name in values}
        if self._passed:
            taken |= {name for name, passed in self._passed.items() if passed}
        # From a loaded state, in which a value may have been new.
        others = {name: value for name, value in metrics.new_since(self.seen).items() if name not in taken}
        if others:
            pending.append((engine.state.epoch, engine.state.iteration, engine.updates[0].steps, others))
        self.seen, self._serial = dict(metrics.serials), metrics.serial
        records = (Record(epoch, at, step, as_numbers(values)) for epoch, at, step, values in pending)
        return [record for record in records if record.values]

    def _take_pending(self, now: int, last: bool, earlier: bool) -> list[tuple[int, int, int, dict[str, Any]]]:
        pending, self.pending = self.pending, {}
        taken = []
        for (at, is_open), (epoch, _, step, values) in pending.items():
            stay = {}
            if at == now and not last:
                stay = {
                    name: value
                    for name, value in values.items()
                    if earlier or (is_open and self._first.get(name) == at)
                }
            if stay:
                self.pending[at, is_open] = epoch, at, step, stay
            if go := {name: value for name, value in values.items() if name not in stay}:
                taken.append((epoch, at, step, go))
        self._first = {name: at for name, at in self._first.items() if at == now and not last}
        return taken

    def state_dict(self) -> dict[str, Any]:
        """How often each metric was seen, and which were written in the iteration that is complete."""
        state: dict[str, Any] = {"seen": dict(sorted(self.seen.items()))} if self.seen else {}
        if self._engine is not None and self._last:
            now = self._engine.state.iteration
            if recent := {name: self._passed[name] for name, last in sorted(self._last.items()) if last == now}:
                state["recent"] = {"iteration": now, "passed": recent}
                if held := self.pending.get((now, True)) if self._first else None:
                    epoch, _, step, values = held
                    state["recent"]["first"] = {"epoch": epoch, "step": step, "values": as_numbers(values)}
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.pending = {}
        self.seen, self._serial = dict(state.get("seen", {})), -1
        recent = state.get("recent", {"iteration": 0, "passed": {}})
        self._last = dict.fromkeys(recent["passed"], recent["iteration"])
        self._passed = dict(recent["passed"])
        self._first = {}
        if (first := recent.get("first")) is not None:
            iteration, values = recent["iteration"], dict(first["values"])
            self._first = dict.fromkeys(values, iteration)
            self.pending[iteration, True] = first["epoch"], iteration, first["step"], values
