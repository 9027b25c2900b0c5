"""The first batches of data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..authoring.randomness import unchanged_random_state
from .held_generators import held_generators, set_state, state_of
from .loading import generators_of
from .streamed import END, inner

__all__ = ["FirstBatches", "has_no_batch"]


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


def has_no_batch(data: Any) -> bool:
    """Whether data without a length has no batch, which is read as if it had not been.

    The states of random generators are put back, and the attributes of the data and its data set. Data of which a batch cannot
    be read like this counts as data with batches: iterators and what holds one, data that keeps its own position, data with
    workers, and data that raises an error.
    """
    whole = inner(data)
    attributes = [vars(one) for one in (whole, getattr(whole, "dataset", None)) if hasattr(one, "__dict__")]
    if not _can_be_read_again(whole, attributes):
        return False
    before = [(one, dict(one)) for one in attributes]
    states = [(one, state_of(one)) for one in held_generators(whole).values()]
    try:
        with unchanged_random_state(*generators_of(whole)):
            return next(iter(data), END) is END
    except Exception:
        return False
    finally:
        for generator, state in states:
            set_state(generator, state)
        for own, former in before:
            own.clear()
            own.update(former)


def _can_be_read_again(data: Any, attributes: list[dict[str, Any]]) -> bool:
    if isinstance(data, Iterator) or any(isinstance(value, Iterator) for own in attributes for value in own.values()):
        return False
    keeping = (one for one in (data, getattr(data, "dataset", None)) if callable(getattr(one, "load_state_dict", None)))
    return not getattr(data, "num_workers", 0) and next(keeping, None) is None
