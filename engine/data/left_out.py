"""The batches that a run leaves out, such as those around a spike of the loss that it went back behind."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any

from .streamed import END

__all__ = ["LeftOut"]


class LeftOut:
    """Which batches are left out: by the number of the pass over the data, and their index in it, both counted from 0.

    A batch that is left out is read and dropped: what was drawn for the others, such as their order and augmentation, stays as
    it was. Iterations are those of the batches that are used.

    Args:
        batches: Indices by pass.

    Example:
        >>> left_out = LeftOut({2: [1, 3]})
        >>> list(left_out.without(2, iter("abcdef"), 0)), left_out.read(2, 3)
        (['a', 'c', 'e', 'f'], 5)
    """

    def __init__(self, batches: Mapping[int, Iterable[int]] | None = None) -> None:
        self._by_pass = {int(number): sorted(set(indices)) for number, indices in (batches or {}).items()}

    def plus(self, places: Iterable[tuple[int, int]]) -> LeftOut:
        """These batches, and others, each given by its pass and index."""
        merged = {number: list(indices) for number, indices in self._by_pass.items()}
        for number, index in places:
            merged.setdefault(number, []).append(index)
        return LeftOut(merged)

    def count(self, number: int) -> int:
        """How many batches of a pass are left out."""
        return len(self._by_pass.get(number, ()))

    def read(self, number: int, used: int) -> int:
        """How many batches of a pass were read by the time that ``used`` of them were used."""
        for index in self._by_pass.get(number, ()) if used else ():
            if index >= used:
                break
            used += 1
        return used

    def used(self, number: int, read: int) -> int:
        """How many of the first ``read`` batches of a pass are used."""
        return read - bisect_left(self._by_pass.get(number, ()), read)

    def without(self, number: int, batches: Iterator[Any], start: int) -> Iterator[Any]:
        """The batches of a pass, of which the first has the index ``start``, but for those that are left out."""
        left_out = frozenset(self._by_pass.get(number, ()))
        return self._others(left_out, batches, start) if left_out else batches

    @staticmethod
    def _others(left_out: frozenset[int], batches: Iterator[Any], start: int) -> Iterator[Any]:
        for index in count(start):
            batch = next(batches, END)
            if batch is END:
                return
            if index not in left_out:
                yield batch

    def state_dict(self) -> dict[int, list[int]]:
        return {number: list(indices) for number, indices in sorted(self._by_pass.items())}
