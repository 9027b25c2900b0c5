"""Shards: a step that consists of a fixed number of parts, however many processes compute them.

What a rank has otherwise, such as its batch, its random numbers and its share, belongs to the shard. So a step of eight shards
is the same on one process, on two, and on eight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..authoring.batches import samples_in
from ..core.seeds import derived_seed
from .processes import Processes
from .watch import Watch

__all__ = ["OF_SHARDS", "Shards", "VirtualShards", "shard_seed"]

OF_SHARDS = "of_shards"
"""The entry of a handler's state that has a state for each shard, by number. A saved state has those of all processes."""


class Shards(list[Any]):
    """The batches of one step that this process computes, in the order of its shards; None for a shard without a batch.

    Attributes:
        prepared: Whether receivers of GET_BATCH_COMPLETED have prepared them.
    """

    prepared = False

    @property
    def batch_size(self) -> int:
        """The number of samples of all of them."""
        return sum(samples_in(batch) for batch in self if batch is not None)


class VirtualShards(Processes):
    """The shards of a step in place of the ranks, with regard to the data: `rank` is the shard that is computed.

    The largest power of two of processes that is not above the number of shards computes them, each as many consecutive ones; the
    others compute none.

    Args:
        processes: The ranks that train together.
        count: Number of shards, a power of two.

    Attributes:
        own: The shards that this process computes.
        readers: How many processes compute shards.
        each: How many shards each of them computes.
    """

    def __init__(self, processes: Processes, count: int) -> None:
        self.processes = processes
        self.world_size = count
        self.local_rank, self.timeout = processes.local_rank, processes.timeout
        self.readers = 1 << (min(processes.world_size, count).bit_length() - 1)
        self.each = count // self.readers
        first = processes.rank * self.each
        self.own = range(first, first + self.each) if processes.rank < self.readers else range(0)

    @property
    def distributed(self) -> bool:
        return True

    @property
    def is_rank_zero(self) -> bool:
        return self.processes.is_rank_zero

    def sum(self, *numbers: float) -> list[float]:
        """The sums over the processes, of what each has counted over its shards."""
        return self.processes.sum(*numbers)

    def any(self, flag: bool) -> bool:
        return self.processes.any(flag)

    def any_later(self, flag: bool) -> Callable[[], bool]:
        return self.processes.any_later(flag)

    def gather(self, value: Sequence[Any]) -> list[Any]:
        """What the shards have, in their order.

        Args:
            value: What the own shards have, one each.
        """
        return [one for several in self.processes.gather(list(value)) for one in several]

    def collect(self, value: Sequence[Any]) -> list[Any]:
        return [one for several in self.processes.collect(list(value)) for one in several]

    def broadcast(self, value: Any) -> Any:
        return self.processes.broadcast(value)

    def barrier(self) -> None:
        self.processes.barrier()

    def watch(self, where: Callable[[], str]) -> Watch | None:
        return self.processes.watch(where)

    def __repr__(self) -> str:
        return f"<{self.world_size} shards on {self.processes!r}>"


def shard_seed(seed: int, iteration: int, shard: int | None, place: int = 0, evaluation: int = 0) -> int:
    """The seed of the global generators for one shard of a step; for None, that for what follows the shards.

    Args:
        seed: The seed of the run.
        iteration: The iteration, counted from 1.
        shard: The shard, counted from 0.
        place: The place of the update in the plan of the iteration, counted from 0.
        evaluation: How often the step has computed its gradients before.
    """
    return derived_seed(seed, "shards", iteration, "step" if shard is None else shard, place, evaluation)
