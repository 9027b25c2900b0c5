"""The stream of batches: sized, unsized, infinite or no data, with its position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from typing import Any

import torch

from .randomness import derived_seed, random_state, seed_everything, set_random_state, unchanged_random_state

__all__ = ["END", "DataError", "Source"]


class _End:
    def __repr__(self) -> str:
        return "END"


END: Any = _End()
"""What the iterator gives when the data is exhausted; None is a batch to be skipped."""


class DataError(ValueError):
    """The data is empty, shorter than it says, or cannot be iterated again."""


class Source:
    """One run's data, and how far it was read.

    Without an explicit epoch_length every epoch iterates the data anew. With one, the iteration goes on across epochs and
    starts again when the data is exhausted.

    Attributes:
        length: the data's own length, or None.
        continues: whether the iteration goes on across epochs.
        started_at: the run's iteration count when the data was last iterated anew.
    """

    def __init__(self, data: Any, epoch_length: int | None, seed: int) -> None:
        self.data = data
        self.length = _length_of(data)
        self.epoch_length = epoch_length if epoch_length is not None else self.length
        self.continues = epoch_length is not None and epoch_length != self.length
        self.seed = seed
        self.iterator: Iterator[Any] | None = None
        self.started_at = 0
        self.saved: dict[str, Any] = {}

    def begin(self, iteration: int, *, ahead: bool) -> Iterator[Any]:
        """Iterate the data anew; with ``ahead``, unsized data is read one batch ahead of its use."""
        self.started_at = iteration
        # What the order was drawn from, so that a resumed run can draw it again.
        self.saved = {
            "started_at": iteration,
            "ahead": ahead,
            "random": random_state(),
            "generator": self._generator_state(),
        }
        if self.data is None:
            iterator: Iterator[Any] = repeat(None)
        elif self.epoch_length is None:
            iterator = _Ahead(self.data, derived_seed(self.seed, "data", iteration) if ahead else None)
        else:
            iterator = iter(self.data)
        self.iterator = iterator
        return iterator

    def fits(self, saved: Mapping[str, Any], epoch_start: int) -> bool:
        """Whether a saved position is inside what is iterated now: data that starts anew in each epoch has that of its epoch."""
        return "random" in saved and (self.continues or saved["started_at"] == epoch_start)

    def adopt(self, other: Source) -> None:
        """Go on with an iterator that an earlier run has begun, and with what was read ahead of it: it cannot begin again."""
        self.iterator, self.started_at, self.saved = other.iterator, other.started_at, other.saved

    def resume(self, saved: Mapping[str, Any], iteration: int) -> Iterator[Any]:
        """Iterate as the saved run did, past the batches that it had taken."""
        set_random_state(saved["random"])
        self._set_generator(saved["generator"])
        iterator = self.begin(saved["started_at"], ahead=saved["ahead"])
        wanted = iteration - self.started_at
        for taken in range(wanted):
            if next(iterator, END) is END:
                raise DataError(
                    f"the run had taken {wanted} batches when it stopped, but this data ends after {taken}; "
                    "go on with the data of that run"
                )
        return iterator

    def state_dict(self) -> dict[str, Any]:
        return self.saved | {"generator_now": self._generator_state()}

    def go_on(self, saved: Mapping[str, Any]) -> None:
        """Let the next `begin` draw what it would have drawn in the saved run."""
        self._set_generator(saved["generator_now"])

    def _generator_state(self) -> Any:
        generator = getattr(self.data, "generator", None)  # a DataLoader's own
        return generator.get_state() if isinstance(generator, torch.Generator) else None

    def _set_generator(self, state: Any) -> None:
        if state is not None and isinstance(generator := getattr(self.data, "generator", None), torch.Generator):
            generator.set_state(state)

    def last(self) -> bool:
        """Whether unsized data ends after the current batch; reads one ahead to know."""
        return isinstance(self.iterator, _Ahead) and self.iterator.exhausted()

    def ended(self) -> bool:
        """As `last`, but what can be read only once is not read ahead: what was read would be lost."""
        if isinstance(self.data, Iterator):
            return isinstance(self.iterator, _Ahead) and self.iterator.read == [END]
        return self.last()


class _Ahead:
    """An iterator over unsized data that can be asked whether more is coming.

    With a seed, the data draws from random streams of its own, so that reading ahead does not change what the model draws.
    """

    def __init__(self, data: Any, seed: int | None) -> None:
        self.read: list[Any] = []
        self.streams: dict[str, Any] | None = None
        if seed is not None:
            with unchanged_random_state():
                seed_everything(seed % 2**32)
                self.streams = random_state()
        self.iterator: Iterator[Any] = self._with_streams(lambda: iter(data))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = self.read.pop() if self.read else self._with_streams(lambda: next(self.iterator, END))
        if batch is END:
            self.read = [END]
            raise StopIteration
        return batch

    def exhausted(self) -> bool:
        if not self.read:
            self.read.append(self._with_streams(lambda: next(self.iterator, END)))
        return self.read[0] is END

    def _with_streams(self, act: Callable[[], Any]) -> Any:
        if self.streams is None:
            return act()
        with unchanged_random_state():
            set_random_state(self.streams)
            result = act()
            self.streams = random_state()
        return result


def _length_of(data: Any) -> int | None:
    if data is None:
        return None
    try:
        iter_ = type(data).__iter__
    except AttributeError:
        iter_ = getattr(type(data), "__getitem__", None)
    if iter_ is None:
        raise TypeError(
            f"the data {data!r} cannot be iterated: give a DataLoader, a list of batches or another iterable, "
            "or None with epoch_length= for a run without data"
        )
    try:
        length = len(data)
    except (TypeError, NotImplementedError):  # an IterableDataset's loader has __len__ but refuses to tell
        return None
    if length == 0:
        raise DataError(f"the data ({type(data).__name__}) is empty: it has length 0")
    return length
