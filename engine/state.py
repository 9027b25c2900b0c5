"""What a run knows about itself: its position, its bounds, its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .interval import Interval

if TYPE_CHECKING:
    from .update import UpdateState

__all__ = ["MetricStore", "State", "as_number"]


class MetricStore(dict[str, Any]):
    """The latest value of every metric by name, and how often it was new.

    It is a dict: ``state.metrics["accuracy"] = 0.9`` is all that a user's function has to do. Handlers that produce metrics
    announce their names, so that two of them never write the same one, and a misspelt name is noticed.

    Attributes:
        serial: how many values were written altogether.
        serials: how many values of each metric were written; no order of writing shows in it.
        owners: the metrics that were announced, and who writes them.
        running: functions that give a metric's value so far within the epoch, for displays; each call may synchronise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.serial = 0
        self.serials: dict[str, int] = {}
        self.owners: dict[str, str] = {}
        self.running: dict[str, Callable[[], float | None]] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        self.serial += 1
        self.serials[name] = self.serials.get(name, 0) + 1
        # NumPy's numbers, which scikit-learn returns, could not be loaded safely from a checkpoint.
        super().__setitem__(name, value.item() if isinstance(value, np.generic) else value)

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def __ior__(self, other: Any) -> MetricStore:  # type: ignore[override, misc]
        self.update(other)
        return self

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def new_since(self, seen: Mapping[str, int]) -> dict[str, Any]:
        """The metrics, in the order of their names, that were written since ``serials`` was what ``seen`` is."""
        return {name: self[name] for name in sorted(self) if self.serials[name] > seen.get(name, 0)}

    def numbers_since(self, seen: Mapping[str, int]) -> dict[str, float]:
        """As `new_since`, as floats, without the values that are not one number, such as a confusion matrix."""
        numbers = {}
        for name, value in self.new_since(seen).items():
            if (number := as_number(value)) is not None:
                numbers[name] = number
        return numbers

    def announce(self, owner: str, names: Iterable[str]) -> None:
        """Say that ``owner`` will write these metrics.

        Raises:
            ValueError: if somebody else writes one of them.
        """
        for name in names:
            other = self.owners.setdefault(name, owner)
            if other != owner:
                raise ValueError(
                    f"both {other!r} and {owner!r} write the metric {name!r}; rename one of the two, "
                    "for example with Validation(prefix='val_')"
                )

    def withdraw(self, owner: str) -> None:
        """Take back what ``owner`` announced."""
        self.owners = {name: other for name, other in self.owners.items() if other != owner}

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # who wrote what means nothing elsewhere

    def clear(self) -> None:
        super().clear()
        self.serial = 0
        self.serials = {}

    def state_dict(self) -> dict[str, Any]:
        return {
            "values": dict(sorted(self.items())),
            "serials": dict(sorted(self.serials.items())),
            "serial": self.serial,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.clear()
        super().update(state["values"])
        self.serials = dict(state["serials"])
        self.serial = state["serial"]


def as_number(value: Any) -> float | None:
    """A metric's value as a float, or None if it is not one number; synchronises if it is a tensor on a device."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


_POSITION = ("epoch", "iteration", "epoch_start", "epoch_open", "stop_reason")


class State:
    """Where a run stands. Handlers read it; the engine moves it.

    Attributes:
        epoch: the current epoch, counted from 1; 0 before the first.
        iteration: the current iteration over all epochs, counted from 1; 0 before the first.
        completed: the last iteration whose updates were all made: `iteration` from ITERATION_COMPLETED on.
        batch: the current batch; None if the run has no data, or if the batch is to be skipped.
        update: the update at work, with its output, loss and skipped.
        plan: the updates of this iteration; a receiver of ITERATION_STARTED may replace it.
        metrics: the latest value of every metric.
        epoch_length: iterations in an epoch; None while it is not known (unsized data).
        max_epochs, max_iters, max_steps, max_seconds: the bounds of this run; None where there is none.
        min_epochs, min_iters: a stop is held back until both are reached.
        stop_reason: why the run was stopped before its bounds; None if it was not.
        exception: the error that is leaving the run, for the receivers of EXCEPTION_RAISED; None otherwise.
    """

    __slots__ = (
        "batch", "completed", "epoch", "epoch_length", "epoch_open", "epoch_start", "exception", "iteration", "max_epochs",
        "max_iters", "max_seconds", "max_steps", "metrics", "min_epochs", "min_iters", "plan", "stop_reason", "update",
    )  # fmt: skip

    def __init__(self, first: UpdateState) -> None:
        self.metrics = MetricStore()
        self.update = first
        self.plan: Sequence[UpdateState] = ()
        self.batch: Any = None
        self.exception: BaseException | None = None
        self.epoch_length: int | None = None
        self.max_epochs: int | None = None
        self.max_iters: int | None = None
        self.max_steps: int | None = None
        self.max_seconds: float | None = None
        self.min_epochs = 0
        self.min_iters = 0
        self.restart()

    def reset(self) -> None:
        """Back to before the first epoch, without metrics."""
        self.restart()
        self.metrics.clear()

    def restart(self) -> None:
        """Back to before the first epoch."""
        self.epoch = 0
        self.iteration = 0
        self.completed = 0
        self.epoch_start = 0  # the iterations that were completed when this epoch began
        self.epoch_open = False  # whether EPOCH_STARTED was told and EPOCH_COMPLETED not yet
        self.stop_reason: str | None = None

    def set_bounds(
        self,
        training: bool,
        has_data: bool,
        max_epochs: int | None,
        max_iters: int | None,
        max_steps: int | None,
        max_time: str | Interval | None,
        min_epochs: int,
        min_iters: int,
        epoch_length: int | None,
    ) -> None:
        """Take the bounds of the next run; the arguments are those of `Engine.run`."""
        numbers = {
            "max_epochs": max_epochs,
            "max_iters": max_iters,
            "max_steps": max_steps,
            "epoch_length": epoch_length,
        }
        for name, number in numbers.items():
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise ValueError(f"run({name}={number!r}): it has to be an int of 1 or more, or None")
        for name, number, largest in (("min_epochs", min_epochs, max_epochs), ("min_iters", min_iters, max_iters)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ValueError(f"run({name}={number!r}): it has to be an int of 0 or more")
            if largest is not None and number > largest:
                raise ValueError(f"run({name}={number}) is larger than {name.replace('min', 'max')}={largest}")
        seconds = None if max_time is None else _seconds(max_time)
        if not has_data and epoch_length is None and max_iters is None:
            raise ValueError("run(): without data, give epoch_length=, or max_iters= for a single epoch")
        if max_epochs is max_iters is max_steps is seconds is None:
            if training:
                raise ValueError("run(): give at least one of max_epochs, max_iters, max_steps and max_time")
            max_epochs = 1
        if not training and max_steps is not None:
            raise ValueError("run(max_steps=): an engine that evaluates makes no optimizer steps")
        self.max_epochs, self.max_iters, self.max_steps, self.max_seconds = max_epochs, max_iters, max_steps, seconds
        self.min_epochs, self.min_iters = min_epochs, min_iters

    def state_dict(self) -> dict[str, Any]:
        """The position of the run, without metrics and bounds."""
        return {key: getattr(self, key) for key in _POSITION}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for key in _POSITION:
            setattr(self, key, state[key])
        self.completed = self.iteration

    @property
    def epoch_iteration(self) -> int:
        """The current iteration within the epoch, counted from 1."""
        return self.iteration - self.epoch_start

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name}={value}" for name, value in self.metrics.items())
        return f"State(epoch={self.epoch}, iteration={self.iteration}, metrics={{{metrics}}})"


def _seconds(max_time: str | Interval) -> float:
    try:
        return Interval.parse(max_time).time("run(max_time)")
    except TypeError as error:
        raise TypeError(f"run(max_time={max_time!r}): {error}") from None
