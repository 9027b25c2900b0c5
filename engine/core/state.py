"""The state of a run: its position, bounds and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from .words import as_int, did_you_mean

if TYPE_CHECKING:
    from .update import UpdateState

__all__ = ["Direction", "MetricStore", "State", "as_number", "as_numbers"]

Direction = Literal["min", "max"]


class MetricStore(dict[str, Any]):
    """The latest value of every metric by name, and how often each was written.

    It is a dict: users' functions write ``state.metrics["accuracy"] = 0.9``. Handlers announce the metrics they write, so that
    no two of them write the same one and a misspelt name is detected.

    Attributes:
        serial: Number of values written, over all metrics.
        serials: Number of values written of each metric.
        owners: Announced metrics, and the name of the writer of each.
        unsaved: Announced metrics that are not saved, since they are measured of the machine and not of the training.
        evaluated: Metrics that an evaluation has measured, and not the training.
        directions: Metrics whose direction is known: "max" if greater is better, "min" if smaller is.
        listeners: Called as ``listener(name, value)`` at each write, for loggers.
        written: Of monitored metrics that no included handler writes, the iteration in which each was last written in this run.
        last_values: Metrics that the last evaluation has written in each batch, so that the value is perhaps of the last one.
        running: Functions that return a metric's value so far in the epoch, for displays; each call may synchronize.
        renamed: What metrics of the loaded state are called now: a validation's "loss" may have become "val_loss".
    """

    def __init__(self) -> None:
        super().__init__()
        self.serial = 0
        self.serials: dict[str, int] = {}
        self.owners: dict[str, str] = {}
        self.unsaved: set[str] = set()
        self.evaluated: set[str] = set()
        self.directions: dict[str, Direction] = {}
        self.listeners: list[Callable[[str, Any], None]] = []
        self.last_values: set[str] = set()
        self.written: dict[str, int] = {}
        self.running: dict[str, Callable[[], float | None]] = {}
        self.renamed: dict[str, str] = {}
        self._plain: dict[str, str] = {}  # names that are or were there, by their spelling without a slash

    def __setitem__(self, name: str, value: Any) -> None:
        count = self.serials.get(name, 0)
        if not count:
            if (other := self.under(name)) != name:
                raise ValueError(f"{name!r} and {other!r} are the same metric in monitors and logs; use only {other!r}")
            self._plain[name.replace("/", "_")] = name
        self.serial += 1
        self.serials[name] = count + 1
        if isinstance(value, Tensor):  # its memory may change later, and its graph would keep the batch alive
            value = value.detach().clone()
        elif isinstance(value, np.generic | np.ndarray):
            # scikit-learn returns such numbers; weights_only=True refuses to load them
            value = value.item() if value.ndim == 0 else value.copy()
        super().__setitem__(name, value)
        for listener in self.listeners:
            listener(name, value)

    def under(self, name: str) -> str:
        """The name under which a metric is written that is asked for as "val/loss" or "val_loss"; else the name itself."""
        if super().__contains__(name) or name in self.owners:
            return name
        other = self._plain.get(name.replace("/", "_"), name)
        return other if super().__contains__(other) or other in self.owners else name

    def __missing__(self, name: str) -> Any:
        if (other := self.under(name)) in self:
            return self[other]
        known = sorted({*self, *self.owners})
        if name in self.owners:
            raise KeyError(
                f"the metric {name!r} has no value yet: {self.owners[name]!r} writes it later, for example at the end "
                "of an epoch or after validation; read the metric at that point, or use metrics.get()"
            )
        there = ", ".join(f"{one} (by {self.owners[one]!r})" if one in self.owners else one for one in known)
        raise KeyError(
            f"there is no metric {name!r}; available metrics: "
            f"{there or 'none; attach Metrics or Validation'}{did_you_mean(name, known)}"
        )

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and super().__contains__(self.under(name)))

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name if super().__contains__(name) else self.under(name), default)

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
        """The metrics written since ``seen`` was copied from ``serials``, sorted by name."""
        return {name: self[name] for name in sorted(self) if self.serials[name] > seen.get(name, 0)}

    def numbers_since(self, seen: Mapping[str, int]) -> dict[str, float]:
        """`new_since` as floats, without values that are not one number, such as a confusion matrix."""
        return as_numbers(self.new_since(seen))

    def announce(
        self,
        owner: str,
        names: Iterable[str],
        directions: Mapping[str, Direction] | None = None,
        *,
        saved: bool = True,
        evaluated: bool = False,
    ) -> None:
        """Declare that ``owner`` will write these metrics.

        Args:
            owner: Name of the handler, or "user".
            names: Names of the metrics.
            directions: For metrics that have a direction, "max" if greater is better, "min" if smaller is: {"score": "max"}.
            saved: Whether checkpoints hold them. Speeds and the like are no part of a state that a resumed run repeats.
            evaluated: Whether they are measured in an evaluation.

        Raises:
            ValueError: if another owner announced one of them.
        """
        if isinstance(names, str):
            raise TypeError(f"announce({owner!r}, {names!r}): expected a list of names: [{names!r}]")
        for name in names:
            written = self.under(name)
            other = self.owners.get(written, owner)
            if other != owner or (written != name and written in self.owners):
                who = f"both {other!r} and {owner!r} write" if other != owner else f"{owner!r} also writes"
                same = "" if written == name else f", the same metric as {written!r}"
                raise ValueError(f"{who} the metric {name!r}{same}; rename one, as with Validation(prefix='test_')")
            self._plain[name.replace("/", "_")], self.owners[name] = name, owner
            if not saved:
                self.unsaved.add(name)
            if evaluated:
                self.evaluated.add(name)
        for name, direction in (directions or {}).items():
            if direction not in ("min", "max"):
                raise ValueError(
                    f"announce({owner!r}): the direction of {name!r} is {direction!r}; expected 'min' or 'max'"
                )
            self.directions[name] = direction

    def withdraw(self, owner: str) -> None:
        """Undo what ``owner`` announced."""
        withdrawn = {name for name, other in self.owners.items() if other == owner}
        self.owners = {name: other for name, other in self.owners.items() if other != owner}
        self.directions = {name: one for name, one in self.directions.items() if name not in withdrawn}
        self.unsaved -= withdrawn
        self.evaluated -= withdrawn

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # owners mean nothing outside this engine

    def clear(self) -> None:
        super().clear()
        self.serial, self.serials, self.evaluated = 0, {}, set()

    def state_dict(self) -> dict[str, Any]:
        return {
            "values": {name: value for name, value in sorted(self.items()) if name not in self.unsaved},
            "serials": {name: count for name, count in sorted(self.serials.items()) if name not in self.unsaved},
            "serial": self.serial - sum(self.serials.get(name, 0) for name in self.unsaved),
        } | ({"evaluated": sorted(self.evaluated - self.unsaved)} if self.evaluated else {})

    def load_state_dict(self, state: Mapping[str, Any], renamed: Mapping[str, str] | None = None) -> None:
        """Take the values of a state; ``renamed`` has what its metrics are called now."""
        self.clear()
        self.renamed = dict(renamed or {})
        now = self.renamed.get
        super().update({now(name, name): value for name, value in state["values"].items()})
        self.serials = {now(name, name): count for name, count in state["serials"].items()}
        self.serial = state["serial"]
        self.evaluated = {now(name, name) for name in state.get("evaluated", ())}
        self._plain |= {name.replace("/", "_"): name for name in self}


def as_number(value: Any) -> float | None:
    """A metric's value as a float; None if it is not one number. Synchronizes for a tensor on an accelerator."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def as_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Metrics' values as floats, sorted by name, without those that are not one number.

    Of each accelerator and dtype all tensors are read together, so that the host waits once and not once a metric.
    """
    together: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, value in values.items():
        there = isinstance(value, Tensor) and value.device.type not in ("cpu", "meta")
        if there and value.numel() == 1 and not value.is_complex():
            together.setdefault((value.device, value.dtype), {})[name] = value.detach().reshape(())
    read: dict[str, float] = {}
    for tensors in together.values():
        read |= zip(tensors, map(float, torch.stack(list(tensors.values())).tolist()), strict=True)
    numbers = {name: read[name] if name in read else as_number(values[name]) for name in sorted(values)}
    return {name: number for name, number in numbers.items() if number is not None}


_POSITION = ("epoch", "iteration", "epoch_start", "epoch_open", "stop_reason")


class State:
    """Position, bounds and metrics of a run. The engine counts; handlers may set batch, plan, metrics and bounds.

    Attributes:
        epoch: The current epoch, counted from 1; 0 before the first.
        iteration: The current iteration over all epochs, counted from 1; 0 before the first.
        completed: The last iteration whose updates were all made: equal to `iteration` from ITERATION_COMPLETED on.
        batch: The current batch; None if the run has no data, or if the batch is skipped.
        update: The current update, with its output, loss and skipped.
        plan: The updates of this iteration; a receiver of ITERATION_STARTED may replace it.
        metrics: The latest value of every metric.
        epoch_length: Number of iterations in an epoch; None while unknown (unsized data).
        max_epochs, max_iters, max_steps, max_seconds: The bounds of this run; None where there is none.
        planned: ``max_epochs`` and ``epoch_length`` of the run that this one is a trial of; None if it is none.
        min_epochs, min_iters: Bounds that delay a stop until both are reached.
        shard: The shard of the step whose batch is computed; 0 where a step has one.
        stop_reason: Why the run was stopped before its bounds; None if it was not.
        exception: The error that ends the run, for receivers of EXCEPTION_RAISED; None otherwise.
    """

    __slots__ = (
        "batch", "completed", "epoch", "epoch_length", "epoch_open", "epoch_start", "exception", "iteration", "max_epochs",
        "max_iters", "max_seconds", "max_steps", "metrics", "min_epochs", "min_iters", "plan", "planned", "shard", "stop_reason",
        "update",
    )  # fmt: skip

    def __init__(self, first: UpdateState) -> None:
        self.metrics = MetricStore()
        self.update = first
        self.plan: Sequence[UpdateState] = ()
        self.batch: Any = None
        self.shard = 0
        self.exception: BaseException | None = None
        self.epoch_length: int | None = None
        self.max_epochs: int | None = None
        self.max_iters: int | None = None
        self.max_steps: int | None = None
        self.max_seconds: float | None = None
        self.planned: tuple[int | None, int | None] | None = None
        self.min_epochs = 0
        self.min_iters = 0
        self.restart()

    def reset(self) -> None:
        """Return to before the first epoch, and clear the metrics."""
        self.restart()
        self.metrics.clear()

    def restart(self) -> None:
        """Return to before the first epoch."""
        self.epoch = 0
        self.iteration = 0
        self.completed = 0
        self.epoch_start = 0  # the iterations completed before this epoch
        self.epoch_open = False  # whether EPOCH_STARTED was emitted and EPOCH_COMPLETED was not yet
        self.stop_reason: str | None = None

    def set_bounds(
        self,
        training: bool,
        has_data: bool,
        max_epochs: int | None,
        max_iters: int | None,
        max_steps: int | None,
        seconds: float | None,
        min_epochs: int,
        min_iters: int,
        epoch_length: int | None,
    ) -> None:
        """Set the bounds of the next run; the arguments are those of `Engine.run`."""
        max_epochs, max_iters = _limit("max_epochs", max_epochs), _limit("max_iters", max_iters)
        max_steps, epoch_length = _limit("max_steps", max_steps), _limit("epoch_length", epoch_length)
        min_epochs = _least("min_epochs", min_epochs, max_epochs)
        min_iters = _least("min_iters", min_iters, max_iters)
        if not has_data and epoch_length is None and max_iters is None:
            raise ValueError("run(): no data was given; pass epoch_length=, or pass max_iters= for a single epoch")
        if max_epochs is max_iters is max_steps is seconds is None:
            if training:
                raise ValueError("run(): pass at least one of max_epochs, max_iters, max_steps and max_time")
            max_epochs = 1
        if not training and max_steps is not None:
            raise ValueError(
                f"run(max_steps={max_steps}): an engine that only evaluates runs no optimizer steps; omit max_steps"
            )
        self.planned = None
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

    def check_counts(self, epoch: int | None) -> None:
        """Raise ValueError if a receiver has changed the epoch, which was begun as this one, or the iteration."""
        if epoch not in (None, self.epoch):
            changed = f"state.epoch was changed from {epoch} to {self.epoch}"
        elif self.iteration != self.completed:
            changed = f"state.iteration was changed from {self.completed} to {self.iteration}"
        else:
            return
        raise ValueError(
            f"{changed}, but only the engine may change this counter; to end a run or an epoch, call "
            "engine.terminate() or terminate_epoch(); to restore an earlier state, call engine.snapshots.restore(state)"
        )

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name}={value}" for name, value in self.metrics.items())
        return f"State(epoch={self.epoch}, iteration={self.iteration}, metrics={{{metrics}}})"


def _limit(name: str, number: Any) -> int | None:
    """A bound of a run, as an int."""
    if (number := as_int(number)) is not None and (
        isinstance(number, bool) or not isinstance(number, int) or number < 1
    ):
        raise ValueError(f"run({name}={number!r}): expected an int of 1 or more, or None")
    return number


def _least(name: str, number: Any, largest: int | None) -> int:
    """What a run makes at least, as an int."""
    number = as_int(number)
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"run({name}={number!r}): expected an int of 0 or more")
    if largest is not None and number > largest:
        raise ValueError(f"run({name}={number}): expected at most {name.replace('min', 'max')}={largest}")
    return number
