"""An iterator over data that reads ahead, and reports the position of data that keeps one."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from ..authoring.randomness import random_state, seed_everything, set_random_state, unchanged_random_state
from ..core.feed import END
from .held_generators import HeldGenerators

__all__ = ["END", "RereadingWarning", "Streamed", "inner", "is_own_iterator", "items", "keeps_position"]


class RereadingWarning(UserWarning):
    """The data is re-read from its start to reach the saved position: it supports neither skipping nor ``state_dict()``."""


class Streamed:
    """An iterator over data that can read ahead and report the position of the data.

    With a seed, the data has separate random streams, so that neither reading ahead nor returning to a position changes the
    random numbers of the model.

    Args:
        data: The data, whose position is asked for if it has one.
        seed: Seed of its separate streams; None for the global generators.
        begin: Begins the iteration.
        generators: Those that the data holds.

    Attributes:
        read: The batch read ahead, or END.
        before: Position of the data before reading ahead, for data with ``state_dict``.
    """

    def __init__(
        self,
        data: Any,
        seed: int | None,
        begin: Callable[[], Iterator[Any]],
        generators: HeldGenerators | None = None,
    ) -> None:
        self.read: list[Any] = []
        self.refused = False  # whether the data has a state_dict that raises
        self.generators = HeldGenerators(None) if generators is None else generators
        self.held: dict[str, Any] = {}  # the states of its generators before reading ahead
        self.before: dict[str, Any] | None = None
        self.data = inner(data)
        self.streams: dict[str, Any] | None = None
        if seed is not None:
            with unchanged_random_state():
                seed_everything(seed % 2**32)
                self.streams = random_state()
        self.iterator: Iterator[Any] = self._with_streams(begin)

    def place(self) -> dict[str, Any] | None:
        """Position and random streams of data with ``state_dict``; None, with a warning, if that raises an error."""
        if self.refused:
            return None
        try:
            return {"position": self._with_streams(self.data.state_dict), "streams": self.streams}
        except Exception as error:
            self.refused = True
            warnings.warn(
                f"the data ({type(self.data).__name__}) cannot save its position, because its state_dict() raised "
                f"{error!r}. A resumed run reads the batches of the epoch again",
                RereadingWarning,
                stacklevel=2,
            )
            return None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = self.read.pop() if self.read else self._with_streams(lambda: next(self.iterator, END))
        if batch is END:
            self.read = [END]
            raise StopIteration
        return batch

    def exhausted(self) -> bool:
        """Whether no batch is left; reads one ahead."""
        if not self.read:
            self.before = self.place() if keeps_position(self.data) else None
            self.held = self.generators.states()
            self.read.append(self._with_streams(lambda: next(self.iterator, END)))
        return self.read[0] is END

    def _with_streams(self, call: Callable[[], Any]) -> Any:
        if self.streams is None:
            return call()
        with unchanged_random_state():
            set_random_state(self.streams)
            result = call()
            self.streams = random_state()
        return result


def inner(data: Any) -> Any:
    """The data without a limit on its batches."""
    limited = getattr(data, "limited_data", None)
    return data if limited is None else limited


def is_own_iterator(data: Any) -> bool:
    """Whether data is an iterator of a class of its own, as DALI's loaders are, which may begin again once it has ended.

    Those of Python, and of torch's DataLoader, do not.
    """
    package = type(data).__module__.partition(".")[0]
    return isinstance(data, Iterator) and package not in {"torch", *sys.stdlib_module_names}


def keeps_position(data: Any) -> bool:
    """Whether data has a ``state_dict`` of its own, with the position in it."""
    return callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))


def items(data: Any, start: int) -> Iterator[Any]:
    """The items of data without ``__iter__``, starting at index ``start``, as `iter` would yield them."""
    for index in count(start):
        try:
            item = data[index]
        except IndexError:
            return
        yield item
