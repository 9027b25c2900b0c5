"""How the data of a run is shared out to the processes that train together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, count, islice, repeat
from typing import Any, Literal

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ..batches import samples_in
from ..distributed.processes import Processes
from .loading import SkippingLoader, note_share, skippable

__all__ = ["Manner", "agreed", "deal", "draws_as_it_is_read", "manner_of", "padding_left_out", "turns"]

Manner = Literal["all", "deal", "own"]
"""What a process takes of the data: all of it, alone; what it is dealt in turn; or all of it, since it is its own."""


def manner_of(data: Any, processes: Processes, shares: str) -> Manner:
    """How this data comes to several processes; see `Engine.join` for ``shares``.

    Raises:
        TypeError: for data of which nobody knows whether each process has its own.
    """
    if data is None or not processes.several:
        return "all"
    if shares != "auto":
        return "deal" if shares == "deal" else "own"
    if _sampler_of_rank(data) is not None:
        return "own"
    if skippable(data) or callable(getattr(data, "batches_from", None)) or _by_index(data):
        return "deal"
    raise TypeError(
        f"the data ({type(data).__name__}) cannot be shared out to {processes.size} processes by index: say "
        "shares='own' if each process has data of its own, or shares='deal' if all have the same, of which each takes its turn"
    )


def _by_index(data: Any) -> bool:
    return isinstance(data, Sequence) or (hasattr(data, "__len__") and not hasattr(type(data), "__iter__"))


def _sampler_of_rank(data: Any) -> Any:
    """A sampler that gives each process its own samples; None without one."""
    if isinstance(data, DataLoader):
        batch_sampler = data.batch_sampler
        for sampler in (data.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
            if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
                return sampler
    return None


def padding_left_out(data: Any) -> int | None:
    """How many samples a DistributedSampler gives to this process before it repeats some; None if it repeats none."""
    sampler = _sampler_of_rank(data)
    if type(sampler) is not DistributedSampler or sampler.drop_last:
        return None
    return len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))  # type: ignore[arg-type]


def turns(length: int, processes: Processes) -> int:
    """How often each process is dealt a batch, if there are ``length``; in the last turn some may go without."""
    return -(-length // processes.size)


def deal(
    data: Any,
    start: int,
    length: int | None,
    limit: int | None,
    processes: Processes,
    seed: int,
    number: int,
    shares: dict[int, float],
) -> Iterator[Any]:
    """The batches of this process from one of its turns on; None where it goes without.

    Args:
        data: what is dealt, the same in each process.
        start: the first turn.
        length: of the data; None if it does not tell.
        limit: how many of the batches are dealt; None for all.
        processes: to whom.
        seed: for a DataLoader, of what is drawn while samples are fetched.
        number: likewise, of the pass.
        shares: where it is noted how much the batch of a turn counts, if those of a turn have different sizes.
    """
    rank, size = processes.rank, processes.size
    mine: Iterator[Any]
    if length is None or not (skippable(data) or _picked(data)):
        begin = getattr(data, "batches_from", None)
        batches = begin(start * size) if callable(begin) else islice(iter(data), start * size, None)
        return _read(
            islice(batches, None if limit is None else max(0, limit - start * size)), start, rank, size, shares
        )
    length = length if limit is None else min(length, limit)
    if skippable(data):
        mine = SkippingLoader.of(data).iterate(
            seed, number, start, at_once=True, dealt=(rank, size), limit=limit, shares=shares
        )
    else:
        mine = (data[index] for index in range(start * size + rank, length, size))
    own = len(range(rank, length, size))
    return chain(mine, repeat(None, turns(length, processes) - max(start, own)))


def _picked(data: Any) -> bool:
    """Whether a process takes its batches by their indices, and sees no others."""
    return _by_index(data) and not isinstance(data, list | tuple) and not callable(getattr(data, "batches_from", None))


def draws_as_it_is_read(data: Any) -> bool:
    """Whether data may draw from random generators while all processes read all of it."""
    if skippable(data):
        return not _has_length(data)
    return not _by_index(data) and not callable(getattr(data, "batches_from", None))


def _has_length(data: Any) -> bool:
    try:
        len(data)
    except (TypeError, NotImplementedError):
        return False
    return True


def _read(batches: Iterator[Any], start: int, rank: int, size: int, shares: dict[int, float]) -> Iterator[Any]:
    for turn in count(start):
        hand = list(islice(batches, size))
        if not hand:
            return
        note_share(shares, turn, rank, [0 if batch is None else samples_in(batch) for batch in hand], size)
        yield hand[rank] if rank < len(hand) else None


def agreed(batches: Iterator[Any], processes: Processes) -> Iterator[Any]:
    """Batches of processes with data of their own, until that of all has ended; None where that of this one has."""
    end = object()
    while True:
        batch = next(batches, end)
        if not processes.any(batch is not end):
            return
        yield None if batch is end else batch
