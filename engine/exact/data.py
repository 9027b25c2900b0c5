"""Data whose position is saved and restored: order, batches read, and what samples draw."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

from ..authoring.randomness import check_seed, unchanged_random_state
from ..data.source import DataError, Source
from .random import restore_random_state

__all__ = ["ResumableData"]


class ResumableData:
    """Batches of a DataLoader, a list or another iterable, which can be saved after any batch and continue there.

    Iterated, it yields the batches of one pass. After `load_state_dict`, the first pass is the rest of the one that was saved, in
    the same order. A DataLoader over a map-style dataset skips what was read by index, with any number of workers, and fetches
    each sample with the global generators seeded by (seed, pass, index), so that its augmentation is the same in a resumed run.
    Other data is read again up to its place, unless it has ``state_dict()`` and ``load_state_dict()`` of its own.

    The global generators are left to the loop: save and restore them with `random_state`, since shuffling draws from them.

    Args:
        data: the data, which restarts each time that it is iterated.
        seed: seed of what samples draw.

    Attributes:
        epoch: number of passes that were completed.
        batch: number of batches that were yielded in this pass.

    Raises:
        ValueError: for data that is empty.
        TypeError: for an iterator, which has only one pass, and for what cannot be iterated.

    Example:
        >>> data = ResumableData([1, 2, 3, 4])
        >>> for number in data:
        ...     if number == 2:
        ...         state = data.state_dict()
        ...         break
        >>> again = ResumableData([1, 2, 3, 4])
        >>> again.load_state_dict(state)
        >>> list(again), list(again), again.epoch
        ([3, 4], [1, 2, 3, 4], 2)
    """

    def __init__(self, data: Iterable[Any], seed: int = 0) -> None:
        if isinstance(data, Iterator):
            raise TypeError(
                f"ResumableData({type(data).__name__}): an iterator can be read only once; pass the data itself, such "
                "as a DataLoader"
            )
        self._source = Source(data, None, check_seed("ResumableData", seed))
        self.epoch = 0
        self.batch = 0
        self._total = 0  # batches that were yielded in all passes
        self._loaded: Mapping[str, Any] | None = None
        self._random: Mapping[str, Any] | None = None

    def __len__(self) -> int:
        """The number of batches in a whole pass."""
        data = self._source.given
        if not isinstance(data, Sized):
            raise TypeError(f"object of type {type(data).__name__!r} has no len()")
        return len(data)

    def __iter__(self) -> Iterator[Any]:
        # Nothing is drawn before the first batch: some trainers call iter() once more, to see whether data can be iterated.
        for batch in self._begin():
            self.batch += 1
            self._total += 1
            yield batch
        if not self.batch:
            raise DataError(f"the data ({type(self._source.given).__name__}) yielded no batch")
        self.epoch, self.batch = self.epoch + 1, 0

    def _begin(self) -> Iterator[Any]:
        source, loaded, random = self._source, self._loaded, self._random
        self._loaded = self._random = None
        if random is not None:
            restore_random_state(random)
        if loaded is None and self.batch:  # the pass before was left by `break`
            self.epoch, self.batch = self.epoch + 1, 0
        source.announce(self.epoch)
        if loaded is not None and self.batch:
            with unchanged_random_state():
                return source.resume(loaded, self._total)
        if loaded is not None:
            with unchanged_random_state():
                source.prepare_next_pass(loaded, announced=False)
        return source.begin(self._total, self.epoch, ahead=False)

    def begin_with(self, random: Mapping[str, Any]) -> None:
        """Restore the global generators as the next pass begins, before its order is drawn.

        It is for trainers that draw between their last hook and the first batch; a plain loop calls `restore_random_state`.

        Args:
            random: what `random_state` returned.
        """
        self._random = random

    def state_dict(self) -> dict[str, Any]:
        """The position, which ``torch.load(weights_only=True)`` accepts."""
        position = self._source.state_dict() if self._loaded is None else dict(self._loaded)
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "total": self._total,
            "seed": self._source.seed,
            "data": position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned: the next pass is the rest of the saved one.

        Raises:
            ValueError: for what is no such state, and for data with another length or batch size.
        """
        if not isinstance(state, Mapping) or state.keys() != {"epoch", "batch", "total", "seed", "data"}:
            raise ValueError("ResumableData.load_state_dict(): expected a state from ResumableData.state_dict()")
        if state["batch"]:
            place = f"epoch {state['epoch'] + 1}, batch {state['batch']}"
            self._source.check_extent(state["data"], place)
        self.epoch, self.batch, self._total = state["epoch"], state["batch"], state["total"]
        self._source = Source(self._source.given, None, state["seed"], epoch=self.epoch)
        self._source.loaded = True
        self._loaded = state["data"] if "random" in state["data"] or state["total"] else None
