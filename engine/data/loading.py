"""DataLoaders that start at any batch, and whose random augmentation depends only on the sample.

Two things make a DataLoader hard to resume: the batches before the position are read again, and the random numbers of its
workers depend on their number and on what each fetched before. Here the *indices* are skipped, which costs nothing, and each
sample of a map-style dataset is fetched with the global generators seeded from (seed, number of the pass, index). So a resumed
run, and a run with another number of workers, gets the same samples. In the main process the states of the generators are
restored after each batch, so that augmentation does not change dropout.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain, count, islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

from ..authoring.randomness import derived_seed, random_state
from .extent import known_length
from .seeded import Collating, Keyed, Seeded, begin_worker

__all__ = [
    "SkippingLoader",
    "draws_at_random",
    "draws_nothing",
    "generators_of",
    "has_torch_order",
    "indices_from",
    "is_plain",
    "is_shuffled",
    "may_draw",
    "record_shares",
    "set_epochs",
    "skippable",
    "state_before_order",
]

T = TypeVar("T")


def skippable(data: Any) -> bool:
    """Whether batches can be skipped by index: for a DataLoader over a map-style dataset whose class iterates as torch's own."""
    return (
        isinstance(data, DataLoader)
        and not isinstance(data.dataset, IterableDataset)
        and not _iterates_by_itself(type(data), vars(data))
    )


_ITERATING = ("__iter__", "_get_iterator", "_index_sampler", "_auto_collation")
_PARTS = ("dataset", "sampler", "batch_sampler", "collate_fn", "generator", "worker_init_fn", "_iterator")


def _iterates_by_itself(kind: type[DataLoader[Any]], own: Mapping[str, Any]) -> bool:
    """Whether a class of DataLoaders, or an instance with these attributes, overrides how batches are made from indices."""
    overrides = any(getattr(kind, name) is not getattr(DataLoader, name) or name in own for name in _ITERATING)
    return overrides or any(isinstance(getattr(kind, name, None), property) for name in _PARTS)


def is_plain(data: Any) -> bool:
    """Whether data is a list or tuple of batches, or None: it draws no random numbers and has no samplers."""
    return data is None or type(data) is list or type(data) is tuple


class SkippingLoader:
    """Iterates a DataLoader from any batch on, with samples whose random numbers depend only on the pass and the sample.

    Iterators are made by the DataLoader itself. While it makes one, parts of it are replaced: its sampler by one that starts
    at an offset, and its dataset and collate function by ones that seed the global generators and hand on everything else. An
    attribute that is assigned between two passes takes effect with the second.

    There is one for each DataLoader during a run. It keeps the iterator of persistent workers apart from the DataLoader's own.
    """

    def __init__(self, loader: DataLoader[Any], *, seeded: bool = False) -> None:
        batched = loader.batch_sampler is not None
        self.sampler = _OffsetSampler(loader.batch_sampler if batched else loader.sampler, batched=batched)
        in_workers = loader.num_workers > 0 and loader.collate_fn not in (default_collate, default_convert)
        draws = seeded or in_workers or not draws_nothing(loader.dataset)
        self.seeded = None if not draws else Seeded(loader.dataset, workers=loader.num_workers)
        self.sampler.keyed = self.seeded is not None
        self.persistent: Any = None  # the iterator with persistent workers

    @classmethod
    def of(cls, loader: DataLoader[Any], *, seeded: bool = False) -> SkippingLoader:
        """The one of this DataLoader; ``seeded`` where also a collate function must not draw from the global generators."""
        own = _OWN.get(loader)
        if own is None or (seeded and own.seeded is None):
            own = _OWN[loader] = cls(loader, seeded=seeded)
        return own

    @staticmethod
    def forget(loader: DataLoader[Any]) -> None:
        """Free the one of a DataLoader, which ends its persistent workers."""
        _OWN.pop(loader, None)

    def iterate(
        self,
        loader: DataLoader[Any],
        seed: int,
        number: int,
        start: int = 0,
        *,
        at_once: bool = False,
        ranks: range = range(1),
        size: int = 1,
        limit: int | None = None,
        samples: int | None = None,
        round_shares: dict[int, float] | None = None,
    ) -> Iterator[Any]:
        """The batches of one pass, starting at batch ``start``.

        Args:
            loader: The DataLoader.
            seed: Seed of augmentation.
            number: Number of the pass; makes augmentation differ between passes.
            start: Number of batches to skip, out of those of this rank.
            at_once: Whether to draw the order now; a DataLoader without workers draws it with the first batch.
            ranks: The ranks whose batches are read, out of ``size``; batches are sharded round robin.
            size: Number of ranks.
            limit: Largest number of batches to shard over the ranks.
            samples: Largest number of samples; those after them are the padding of a sampler.
            round_shares: Receives the share of this rank's batch for each round whose batches differ in size.
        """
        samples = samples if self.sampler.batched else None
        self.sampler.wanted = _Wanted(start, ranks, size, limit, samples, {} if round_shares is None else round_shares)
        self.sampler.key = derived_seed(seed, "sample", number)
        if number == 0 and self.persistent is not None:
            _draw_as_workers_start(loader)  # which they have done already: the run has gone back to its first pass
        with _replaced(loader, self._parts(loader, number)):
            batches: Iterator[Any] = iter(loader)
            self.persistent = vars(loader)["_iterator"]
        if start or at_once:
            self.sampler.indices.skip(one_more=at_once)
        return batches

    def _parts(self, loader: DataLoader[Any], number: int) -> dict[str, Any]:
        """What is replaced in the DataLoader while it makes an iterator."""
        parts: dict[str, Any] = {"_iterator": self.persistent}
        parts["batch_sampler" if self.sampler.batched else "sampler"] = self.sampler
        if self.seeded is not None:
            init = partial(begin_worker, loader.worker_init_fn)
            parts |= {"dataset": self.seeded, "collate_fn": Collating(loader.collate_fn, self.seeded)}
            parts["worker_init_fn"] = init if loader.num_workers else loader.worker_init_fn
        if number > 0 and loader.persistent_workers:
            # The seed of workers is drawn as they start. Those of a resumed run start late: the order must not depend on it.
            parts["generator"] = torch.Generator().manual_seed(self.sampler.key)
        return parts


_OWN: weakref.WeakKeyDictionary[DataLoader[Any], SkippingLoader] = weakref.WeakKeyDictionary()


@contextmanager
def _replaced(loader: DataLoader[Any], parts: Mapping[str, Any]) -> Iterator[None]:
    """Replace attributes of a DataLoader for the block, past its ``__setattr__``, which refuses most of them."""
    attributes = vars(loader)
    before = {name: attributes[name] for name in parts}
    attributes.update(parts)
    try:
        yield
    finally:
        attributes.update(before)


def indices_from(loader: DataLoader[Any], number: int) -> Iterator[Any]:
    """The indices of the batches of a pass, in order, drawn from the generators as they are now; those that a batch has."""
    batched = loader.batch_sampler is not None
    sampler: Any = loader.batch_sampler if batched else loader.sampler
    drawn = iter(sampler)
    if number == 0 or not loader.persistent_workers:
        _draw_seed_of_workers(loader)
    if loader.num_workers:
        drawn = iter(sampler)  # as torch does, once the workers are there
    for indices in drawn:
        yield indices if batched else [indices]


def _draw_as_workers_start(loader: DataLoader[Any]) -> None:
    """Draw from the generators what torch draws before the order of a pass in which it starts workers."""
    iter(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
    _draw_seed_of_workers(loader)


def _draw_seed_of_workers(loader: DataLoader[Any]) -> None:
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


class _Wanted(NamedTuple):
    """Which of the indices that a sampler draws; see `SkippingLoader.iterate`."""

    start: int
    ranks: range
    size: int
    limit: int | None
    samples: int | None
    round_shares: dict[int, float]


class _OffsetSampler:
    """A sampler or batch sampler that starts at an offset; if fetches are seeded, indices are paired with the key of the pass."""

    def __init__(self, sampler: Any, *, batched: bool) -> None:
        self.inner = sampler
        self.batched = batched
        self.keyed = False
        self.wanted: _Wanted
        self.key = 0

    def __iter__(self) -> Iterator[Any]:
        self.indices = _ShardedIndices(self.inner, self.wanted)
        return map(partial(Keyed, self.key), self.indices) if self.keyed else self.indices

    def __len__(self) -> int:
        return len(self.inner)


class _ShardedIndices:
    """The indices that a sampler draws for this rank, without the skipped ones."""

    def __init__(self, sampler: Any, wanted: _Wanted) -> None:
        self.drawn_by_sampler = _until_exhausted(iter(sampler), known_length(sampler))
        self.wanted = wanted
        self.drawn: Iterator[Any] | None = None

    def skip(self, *, one_more: bool = False) -> Iterator[Any]:
        """Draw the skipped indices now, and the next one with ``one_more``: a sampler draws its order with its first index."""
        if self.drawn is None:
            drawn, wanted = self.drawn_by_sampler, self.wanted
            drawn = drawn if wanted.samples is None else _first_samples(wanted.samples, drawn)
            drawn = drawn if wanted.limit is None else islice(drawn, wanted.limit)
            for _ in range(wanted.start * wanted.size):
                next(drawn, None)
            if wanted.size > 1:
                drawn = self._every_round(drawn)
            self.drawn = chain(list(islice(drawn, 1)), drawn) if one_more else drawn
        return self.drawn

    def _every_round(self, drawn: Iterator[Any]) -> Iterator[Any]:
        start, ranks, size, *_, round_shares = self.wanted
        for index in count(start):
            group = list(islice(drawn, size))
            own = [rank for rank in ranks if rank < len(group)]
            if not own:
                return
            record_shares(round_shares, index, own, [*map(_size_of, group)], size)
            yield from (group[rank] for rank in own)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.drawn or self.skip())


def record_shares(
    round_shares: dict[int, float], index: int, ranks: Iterable[int], sizes: list[int], size: int
) -> None:
    """Record the shares of the batches of some ranks in a round, if sizes differ: relative to the mean over all ranks.

    The key of a share is the place of its batch in the data.
    """
    if (len(set(sizes)) > 1 or len(sizes) < size) and (total := sum(sizes)):
        round_shares |= {index * size + rank: sizes[rank] * size / total for rank in ranks if rank < len(sizes)}


def _size_of(indices: Any) -> int:
    """Number of samples that an item of a sampler stands for."""
    if isinstance(indices, slice):
        return len(range(*indices.indices(indices.stop or 0)))
    try:
        return len(indices)
    except TypeError:
        return 1


def _until_exhausted(drawn: Iterator[Any], length: int | None) -> Iterator[Any]:
    """The indices that a sampler draws; with the last one, the sampler itself is exhausted.

    Some samplers, such as torch's RandomSampler, draw from their generator once more after the last index. A loop over a
    DataLoader reaches that point, with workers even before it has the last batch; stopping at the last index would give the
    next epoch another order.
    """
    for taken, one in enumerate(drawn, 1):
        following = list(islice(drawn, 1)) if taken == length else []
        yield one
        yield from following


def _first_samples(samples: int, batches: Any) -> Iterator[Any]:
    """Batches of indices, up to ``samples`` indices in total."""
    for indices in batches:
        if samples <= 0:
            return
        yield indices if len(indices) <= samples else indices[:samples]
        samples -= len(indices)


def draws_at_random(data: Any) -> bool:
    """Whether fetching the first sample of a DataLoader in this run drew from a global generator, as augmentation does."""
    own = _OWN.get(data) if isinstance(data, DataLoader) else None
    return own is not None and own.seeded is not None and bool(own.seeded.drew)


def draws_nothing(dataset: Any) -> bool:
    """Whether fetching is known to draw no random numbers, so that it need not be seeded."""
    if type(dataset) is Subset:
        return draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(draws_nothing, dataset.datasets))
    if type(dataset) is StackDataset:
        parts = dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
        return all(map(draws_nothing, parts))
    return type(dataset) in (TensorDataset, list, tuple)


_TORCH_SAMPLERS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)

# ---- samplers ---------------------------------------------------------------------------------------------------------


def _samplers(data: Any) -> list[Any]:
    """The data and its samplers, recursively for data with ``parts``."""
    if is_plain(data):
        return []
    if (limited := getattr(data, "limited_data", None)) is not None:
        return _samplers(limited)
    batch_sampler = getattr(data, "batch_sampler", None)
    found = [data, getattr(data, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    found.append(getattr(data, "dataset", None))
    several = getattr(data, "parts", None)
    for part in several if isinstance(several, list) else ():
        found += _samplers(part)
    return _unique(found)


def _unique(parts: Iterable[T | None]) -> list[T]:
    """The objects without duplicates and None."""
    return list({id(part): part for part in parts if part is not None}.values())


def generators_of(data: Any, *, that_matter: bool = False) -> list[torch.Generator]:
    """The generators that data draws its order from, apart from the global ones: those of a DataLoader and its samplers.

    Args:
        data: The data.
        that_matter: Without those from which only the base seed of workers is drawn, where there are no workers.
    """
    parts = [one for one in _samplers(data) if not (that_matter and getattr(one, "num_workers", None) == 0)]
    found = _unique(getattr(part, "generator", None) for part in parts)
    return [one for one in found if isinstance(one, torch.Generator)]


def set_epochs(data: Any, epochs: int | list[Any], unknown: int | None = None) -> None:
    """Call ``set_epoch`` of the data and its samplers.

    Args:
        data: The data.
        epochs: One epoch for all, or the list that `epochs_of` returned.
        unknown: The epoch of those for which that list has None; they are left as they are by default.
    """
    parts = [part for part in _samplers(data) if callable(getattr(part, "set_epoch", None))]
    for part, epoch in zip(parts, [epochs] * len(parts) if isinstance(epochs, int) else epochs, strict=True):
        if (known := unknown if epoch is None else epoch) is not None:
            part.set_epoch(known)


def has_torch_order(loader: DataLoader[Any]) -> bool:
    """Whether a DataLoader uses torch's own samplers only, which draw from no other library's generators."""
    batches = loader.batch_sampler
    if batches is None:
        return type(loader.sampler) in _TORCH_SAMPLERS
    return type(batches) is BatchSampler and type(batches.sampler) in _TORCH_SAMPLERS


def may_draw(data: Any) -> bool:
    """Whether data may draw from the global generators between batches: DataLoaders with torch's collate functions do not."""
    return not (is_plain(data) or (skippable(data) and data.collate_fn in (default_collate, default_convert)))


def state_before_order(data: Any) -> dict[str, Any]:
    """The state of the global generators that the data may draw its order from: reading NumPy's takes 50 us."""
    if is_plain(data):
        return {}
    if skippable(data) and has_torch_order(data):
        return {"torch": torch.get_rng_state()}
    return random_state()


def is_shuffled(data: Any) -> bool:
    """Whether data, or a part of it, is known to be iterated in a random order: by one of torch's random samplers."""
    return any(
        isinstance(part, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)
        or (isinstance(part, DistributedSampler) and part.shuffle)
        for part in _samplers(data)
    )


def epochs_of(data: Any) -> list[Any]:
    """The current epoch of each sampler with ``set_epoch``; None where no attribute ``epoch`` is an int."""
    parts = [part for part in _samplers(data) if callable(getattr(part, "set_epoch", None))]
    return [epoch if isinstance(epoch := getattr(part, "epoch", None), int) else None for part in parts]
