"""Sharding the data of a run over the ranks, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, count, islice, repeat
from typing import Any, Literal

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ..authoring.batches import samples_in
from ..authoring.randomness import derived_seed, reseed, unchanged_random_state
from ..distributed.processes import Processes
from ..distributed.shards import Shards, VirtualShards
from .extent import known_length
from .loading import SkippingLoader, may_draw, record_shares, skippable

__all__ = [
    "ShardPolicy",
    "draws_while_read",
    "rounds",
    "samples_without_padding",
    "shard",
    "shard_policy",
    "until_all_end",
]

ShardPolicy = Literal["all", "round_robin", "own"]
"""Shard policy: "all" in a single process; "round_robin" shards the same data round robin; "own" reads the rank's own data."""


def shard_policy(data: Any, processes: Processes, wanted: str) -> ShardPolicy:
    """The shard policy for this data; see `Group.join` for ``wanted``.

    Raises:
        TypeError: if ``wanted`` is "auto" and the data does not show whether each rank has its own.
    """
    if data is None or not processes.distributed:
        return "all"
    if isinstance(processes, VirtualShards) and _sampler_of_rank(data) is not None:
        raise ValueError(
            f"the data ({type(data).__name__}) has a sampler that splits the data over the ranks, but with shards, "
            "each process already reads only the batches of its own shards; omit the sampler"
        )
    if wanted != "auto":
        return "round_robin" if wanted == "round_robin" else "own"
    if _sampler_of_rank(data) is not None:
        return "own"
    if skippable(data) or callable(getattr(data, "batches_from", None)) or _is_indexable(data):
        return "round_robin"
    raise TypeError(
        f"the data ({type(data).__name__}) cannot be sharded over {processes.world_size} ranks by index; pass "
        "shard_policy='own' if each rank has its own data, or shard_policy='round_robin' if all ranks have the same "
        "data"
    )


def _is_indexable(data: Any) -> bool:
    return isinstance(data, Sequence) or (hasattr(data, "__len__") and not hasattr(type(data), "__iter__"))


def _sampler_of_rank(data: Any) -> Any:
    """The sampler that shards samples over the ranks, such as a DistributedSampler; None without one."""
    if isinstance(data, DataLoader):
        batch_sampler = data.batch_sampler
        for sampler in (data.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
            if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
                return sampler
    return None


def samples_without_padding(data: Any) -> int | None:
    """Number of samples that a DistributedSampler yields on this rank before it repeats some; None if it repeats none."""
    sampler = _sampler_of_rank(data)
    if type(sampler) is not DistributedSampler or sampler.drop_last:
        return None
    return len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))  # type: ignore[arg-type]


def rounds(length: int, processes: Processes) -> int:
    """Number of rounds of ``length`` batches sharded over the ranks; in the last round some ranks may have none."""
    return -(-length // processes.world_size)


def shard(
    data: Any,
    start: int,
    length: int | None,
    limit: int | None,
    processes: Processes,
    seed: int,
    number: int,
    round_shares: dict[int, float],
) -> Iterator[Any]:
    """Yields this rank's batches, starting at round ``start``; None in a last round that has no batch for this rank.

    Of `VirtualShards`, it yields the batches of a round that belong to this process, as `Shards`.

    Args:
        data: The data, the same on each rank.
        start: The first round.
        length: Length of the data; None if unknown.
        limit: Number of batches to shard; None for all.
        processes: The process group.
        seed: Seed of random numbers drawn while a DataLoader fetches samples.
        number: Number of the pass, part of that seed.
        round_shares: Receives the shares of this rank's batches for each round whose batches differ in size.
    """
    size, virtual = processes.world_size, isinstance(processes, VirtualShards)
    ranks = _own_ranks(processes)
    if length is None or not (skippable(data) or _reads_own_by_index(data)):
        several = _read_round_robin(_of_all(data, start * size, limit), start, ranks, size, round_shares)
        return map(Shards, several) if virtual else chain.from_iterable(several)
    length = length if limit is None else min(length, limit)
    if skippable(data) and ranks:
        mine = SkippingLoader.of(data, seeded=virtual and may_draw(data)).iterate(
            data, seed, number, start, at_once=True, ranks=ranks, size=size, limit=limit, round_shares=round_shares
        )
    else:
        mine = (_item(data, place, seed, number, seeded=virtual) for place in _places(ranks, size, start, length))
    if virtual:
        return _in_rounds(mine, ranks, size, range(start * size, length, size), length)
    own = len(range(ranks[0], length, size))
    return chain(mine, repeat(None, rounds(length, processes) - max(start, own)))


def _own_ranks(processes: Processes) -> range:
    """The ranks, or shards, whose batches this process reads."""
    if isinstance(processes, VirtualShards):
        return processes.own
    return range(processes.rank, processes.rank + 1)


def _item(data: Any, place: int, seed: int, number: int, *, seeded: bool) -> Any:
    """A batch that is read by its index; if ``seeded``, what it draws depends on its place alone."""
    if not seeded:
        return data[place]
    with unchanged_random_state():
        reseed(derived_seed(seed, "batch", number, place))
        return data[place]


def _places(ranks: range, size: int, start: int, length: int) -> Iterator[int]:
    """The places of the batches of some ranks, from a round on."""
    for first in range(start * size, length, size):
        yield from range(first + ranks.start, min(first + ranks.stop, length))


def _of_all(data: Any, first: int, limit: int | None) -> Iterator[Any]:
    """The batches of all ranks from the first one on, up to a limit that is counted from the beginning."""
    begin = getattr(data, "batches_from", None)
    batches = begin(first) if callable(begin) else islice(iter(data), first, None)
    return islice(batches, None if limit is None else max(0, limit - first))


def _in_rounds(mine: Iterator[Any], ranks: range, size: int, starts: range, length: int) -> Iterator[Shards]:
    """The batches of each round, which begins at these places of the data."""
    for start in starts:
        there = [start + rank < length for rank in ranks]
        own = list(islice(mine, sum(there)))
        if len(own) < sum(there):
            return
        yield Shards(own + [None] * (len(there) - len(own)))
    yield from map(Shards, zip(islice(mine, 1)))  # so that the data is read to its end; a batch too many is noticed


def _reads_own_by_index(data: Any) -> bool:
    """Whether a rank reads its own batches by index, and no others."""
    return (
        _is_indexable(data) and not isinstance(data, list | tuple) and not callable(getattr(data, "batches_from", None))
    )


def draws_while_read(data: Any) -> bool:
    """Whether data to be sharded is read by every rank in full, and may draw random numbers while it is read."""
    if skippable(data):
        return known_length(data) is None
    return not _is_indexable(data) and not callable(getattr(data, "batches_from", None))


def _read_round_robin(
    batches: Iterator[Any], start: int, ranks: range, size: int, round_shares: dict[int, float]
) -> Iterator[list[Any]]:
    for index in count(start):
        group = list(islice(batches, size))
        if not group:
            return
        record_shares(round_shares, index, ranks, [0 if batch is None else samples_in(batch) for batch in group], size)
        yield [group[rank] if rank < len(group) else None for rank in ranks]


def until_all_end(batches: Iterator[Any], processes: Processes) -> Iterator[Any]:
    """Yields this rank's own batches until the data of all ranks has ended; None after that of this rank has."""
    end = object()
    while True:
        batch = next(batches, end)
        if not processes.any(batch is not end):
            return
        yield None if batch is end else batch
