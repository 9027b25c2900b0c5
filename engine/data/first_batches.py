"""The first batches of data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["FirstBatches"]


class FirstBatches:
    """The first batches of data, read again in each iteration over it; it has a length if the data has one.

    Args:
        data: The data.
        count: Number of batches.
    """

    def __init__(self, data: Any, count: int) -> None:
        limited = isinstance(data, FirstBatches)
        self.data = data.data if limited else data
        self.count = min(count, data.count) if limited else count

    @property
    def limited_data(self) -> Any:
        """The unlimited data, whose samplers and generators are part of the position."""
        return self.data

    def __len__(self) -> int:
        return min(self.count, len(self.data))

    def __iter__(self) -> Iterator[Any]:
        return self.limited(iter(self.data), 0)

    def limited(self, batches: Iterator[Any] | None, start: int, count: int | None = None) -> Iterator[Any]:
        """The rest of an iterator that begins at batch ``start``, up to batch ``count``: that of the object by default."""
        count = self.count if count is None else count
        for taken in range(start + 1, count + 1):
            assert batches is not None
            try:
                batch = next(batches)
            except StopIteration:
                return
            if taken == count:
                batches = None  # stops a DataLoader's workers now, not when this generator is freed
            yield batch
