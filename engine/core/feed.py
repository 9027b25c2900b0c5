"""The seam of the data: what the loop asks for, answered for plain iterables. `data.feed` answers for all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .state import State

__all__ = ["END", "PlainFeed"]


class _End:
    def __repr__(self) -> str:
        return "END"


END: Any = _End()
"""Returned in place of a batch when the data is exhausted; None is a batch to skip."""


class PlainFeed:
    """Gives the batches of an iterable, from its start in each epoch; it cannot resume inside of one.

    Attributes:
        has_data: whether the run has data. Without data, every batch is None.
        one_batch: whether an iteration reads one batch, whose events the loop emits; else the step emits those of several.
        epoch_end: the last iteration of the epoch; 0 while unknown.
        position: where an epoch resumes; here it does not.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.has_data = self.one_batch = False
        self.epoch_end = 0
        self.position: Any = None
        self._data: Any = None
        self._ended = False

    def open(self, engine: Any, data: Any, epoch_length: int | None, given: Any) -> Any:
        """Take the data of the next run."""
        if epoch_length is None and hasattr(data, "__len__"):
            epoch_length = len(data)
        self.has_data, self.one_batch, self.state.epoch_length = data is not None, data is not None, epoch_length
        return data

    def begin_run(self, source: Any, *, training: bool) -> bool:
        """Begin a run with what `open` has returned; returns whether its data is that of the run before."""
        self._data, self.epoch_end = source, 0
        return True

    def end_run(self, *, last: bool) -> None:
        """Let the data go."""
        self._data = None

    def take_position(self) -> Any:
        """The position of an earlier run; here there is none."""
        return None

    def announce_epoch(self) -> None:
        """Select the data of a new epoch."""

    def measure_again(self) -> None:
        """Read the epoch's length again, since receivers of EPOCH_STARTED may have changed the data."""

    def find_epoch_end(self) -> None:
        """Determine the last iteration of the epoch, if its length is known."""
        self.epoch_end = 0 if (length := self.state.epoch_length) is None else self.state.epoch_start + length

    def batches(self, position: Any, *, resumed: bool, ahead: bool, before_pass: Callable[[], None]) -> Iterator[Any]:
        """The batches of the epoch."""
        before_pass()
        return self.begin_again()

    def begin_again(self) -> Iterator[Any]:
        """Another pass over the data."""
        self._ended = False
        return self._pass() if self.has_data else repeat(None)

    def _pass(self) -> Iterator[Any]:
        yield from self._data
        self._ended = True

    def starts_again(self) -> bool:
        """Whether exhausted data starts again within the epoch."""
        return self.state.epoch_length is not None and self.state.epoch_iteration > 0

    def epoch_ended(self) -> bool:
        """Whether every batch of the epoch was used."""
        length = self.state.epoch_length
        return self._ended if length is None else self.state.epoch_iteration >= length

    def share(self) -> float:
        """The weight of this process's batch relative to those of the others."""
        return 1

    def on_last_batch(self) -> bool:
        """Whether the current batch is the epoch's last, as far as that is known."""
        return 0 < self.epoch_end <= self.state.iteration

    def read_to_end(self) -> bool:
        """Whether there is no further batch."""
        return True

    def give_back(self, batch: Any) -> None:
        """Let a batch of which no iteration was made come again: here each epoch reads the data from its start."""

    def only_its_end_is_missing(self) -> bool:
        """Whether a resumed epoch has no batches left."""
        return False

    def reset(self) -> None:
        """Forget earlier runs."""
