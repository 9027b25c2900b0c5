"""DataLoaders that start at any batch, and whose random augmentation depends only on the sample.

Two things make a DataLoader hard to resume: the batches before the position are read again, and the random numbers of its
workers depend on their number and on what each fetched before. Here the *indices* are skipped, which costs nothing, and each
sample of a map-style dataset is fetched with the global generators seeded from (seed, number of the pass, index). So a resumed
run, and a run with another number of workers, gets the same samples. In the main process the states of the generators are
restored after each batch, so that augmentation does not change dropout.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, islice
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from ..randomness import derived_seed, mixed, reseed

__all__ = [
    "Collating",
    "Fetched",
    "Seeded",
    "SkippingLoader",
    "draws_at_random",
    "generators_of",
    "has_torch_order",
    "indices_from",
    "is_plain",
    "is_shuffled",
    "record_share",
    "set_epochs",
    "skippable",
]

T = TypeVar("T")


def skippable(data: Any) -> bool:
    """Whether batches can be skipped by index: for a DataLoader over a map-style dataset that does not override ``__iter__``."""
    return (
        isinstance(data, DataLoader)
        and type(data).__iter__ is DataLoader.__iter__
        and not isinstance(data.dataset, IterableDataset)
    )


def is_plain(data: Any) -> bool:
    """Whether data is a list or tuple of batches, or None: it draws no random numbers and has no samplers."""
    return data is None or type(data) is list or type(data) is tuple


class SkippingLoader:
    """A twin of a DataLoader, with the same dataset, samplers and options, that can start at any batch.

    Each DataLoader has one twin during a run, so that persistent workers persist.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        batched = loader.batch_sampler is not None
        self.sampler = _OffsetSampler(loader.batch_sampler if batched else loader.sampler, batched=batched)
        draws = not _draws_nothing(loader.dataset)
        if draws:
            self.sampler.keyed = True
        order: dict[str, Any] = (
            {"batch_sampler": self.sampler} if batched else {"sampler": self.sampler, "batch_size": None}
        )
        collate = loader.collate_fn
        self.own = loader.generator
        self.generator = torch.Generator()
        options = {
            name: getattr(loader, name)
            for name in ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
                         "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order")
            if hasattr(loader, name)
        }  # fmt: skip
        self.loader: DataLoader[Any] = DataLoader(
            Seeded(loader.dataset, workers=loader.num_workers) if draws else loader.dataset,
            collate_fn=Collating(collate) if draws else collate,
            generator=self.generator,
            **order,
            **options,
        )

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> SkippingLoader:
        """The twin of this DataLoader."""
        twin = _TWINS.get(loader)
        if twin is None:
            twin = _TWINS[loader] = cls(loader)
        return twin

    @staticmethod
    def forget(loader: DataLoader[Any]) -> None:
        """Free the twin of a DataLoader, which ends its persistent workers."""
        _TWINS.pop(loader, None)

    def iterate(
        self,
        seed: int,
        number: int,
        start: int = 0,
        *,
        at_once: bool = False,
        shard: tuple[int, int] = (0, 1),
        limit: int | None = None,
        samples: int | None = None,
        round_shares: dict[int, float] | None = None,
    ) -> Iterator[Any]:
        """The batches of one pass, starting at batch ``start``.

        Args:
            seed: Seed of augmentation.
            number: Number of the pass; makes augmentation differ between passes.
            start: Number of batches to skip, out of those of this rank.
            at_once: Whether to draw the order now; a DataLoader without workers draws it with the first batch.
            shard: Rank and world size; batches are sharded round robin.
            limit: Largest number of batches to shard over the ranks.
            samples: Largest number of samples; those after them are the padding of a sampler.
            round_shares: Receives the share of this rank's batch for each round whose batches differ in size.
        """
        self.sampler.start, self.sampler.shard, self.sampler.samples = start, shard, samples
        self.sampler.limit, self.sampler.round_shares = limit, {} if round_shares is None else round_shares
        self.sampler.key = derived_seed(seed, "sample", number)
        if number == 0 or not self.loader.persistent_workers:
            # A DataLoader draws the seed of its workers when iteration, or persistent workers, start. A resumed run starts its
            # workers late: so the twin draws that seed from `self.generator`, and this line draws from the DataLoader's.
            torch.empty((), dtype=torch.int64).random_(generator=self.own)
        self.generator.manual_seed(self.sampler.key)
        batches: Iterator[Any] = iter(self.loader)
        if start or at_once:
            self.sampler.indices.skip(one_more=at_once)
        return batches


_TWINS: weakref.WeakKeyDictionary[DataLoader[Any], SkippingLoader] = weakref.WeakKeyDictionary()


def indices_from(loader: DataLoader[Any], number: int) -> Iterator[Any]:
    """The indices of the batches of a pass, in order, drawn from the generators as they are now; those that a batch has."""
    batched = loader.batch_sampler is not None
    if number == 0 or not loader.persistent_workers:
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # as in `SkippingLoader.iterate`
    for drawn in _until_exhausted(loader.batch_sampler if batched else loader.sampler):
        yield drawn if batched else [drawn]


class _OffsetSampler:
    """A sampler or batch sampler that starts at an offset; if fetches are seeded, indices are paired with the key of the pass."""

    def __init__(self, sampler: Any, *, batched: bool) -> None:
        self.inner = sampler
        self.batched = batched
        self.keyed = False
        self.start = 0
        self.shard = (0, 1)
        self.limit: int | None = None
        self.samples: int | None = None
        self.round_shares: dict[int, float] = {}
        self.key = 0

    def __iter__(self) -> Iterator[Any]:
        self.indices = _ShardedIndices(
            self.inner, self.start, self.shard, self.limit, self.samples if self.batched else None, self.round_shares
        )
        if not self.keyed:
            return self.indices
        key = self.key
        if self.batched:
            return ([(key, index) for index in indices] for indices in self.indices)
        return ((key, index) for index in self.indices)

    def __len__(self) -> int:
        return len(self.inner)


class _ShardedIndices:
    """The indices that a sampler draws for this rank, without the skipped ones."""

    def __init__(
        self,
        sampler: Any,
        start: int,
        shard: tuple[int, int],
        limit: int | None,
        samples: int | None,
        round_shares: dict[int, float],
    ) -> None:
        self.sampler = sampler
        self.start = start
        self.rank, self.size = shard
        self.limit = limit
        self.samples = samples
        self.round_shares = round_shares
        self.drawn: Iterator[Any] | None = None

    def skip(self, *, one_more: bool = False) -> Iterator[Any]:
        """Draw the skipped indices now, and the next one with ``one_more``: a sampler draws its order with its first index."""
        if self.drawn is None:
            drawn = _until_exhausted(self.sampler)
            drawn = drawn if self.samples is None else _first_samples(self.samples, drawn)
            drawn = drawn if self.limit is None else islice(drawn, self.limit)
            for _ in range(self.start * self.size):
                next(drawn, None)
            if self.size > 1:
                drawn = self._every_round(drawn)
            self.drawn = chain(list(islice(drawn, 1)), drawn) if one_more else drawn
        return self.drawn

    def _every_round(self, drawn: Iterator[Any]) -> Iterator[Any]:
        for index in count(self.start):
            group = list(islice(drawn, self.size))
            sizes = [len(indices) if isinstance(indices, list | tuple) else 1 for indices in group]
            if self.rank >= len(group):
                return
            record_share(self.round_shares, index, self.rank, sizes, self.size)
            yield group[self.rank]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.drawn or self.skip())


def record_share(round_shares: dict[int, float], index: int, rank: int, sizes: list[int], size: int) -> None:
    """Record the share of this rank's batch in a round, if sizes differ: its size, relative to the mean over the ranks."""
    if rank < len(sizes) and (len(set(sizes)) > 1 or len(sizes) < size) and (total := sum(sizes)):
        round_shares[index] = sizes[rank] * size / total


def _until_exhausted(sampler: Any) -> Iterator[Any]:
    """The indices of a sampler; with the last one, the sampler itself is exhausted.

    Some samplers, such as torch's RandomSampler, draw from their generator once more after the last index. A loop over a
    DataLoader reaches that point, with workers even before it has the last batch; stopping at the last index would give the
    next epoch another order.
    """
    drawn = iter(sampler)
    try:
        length = len(sampler)
    except (TypeError, NotImplementedError):
        length = None
    for taken, one in enumerate(drawn, 1):
        following = list(islice(drawn, 1)) if taken == length else []
        yield one
        yield from following


def _first_samples(samples: int, batches: Any) -> Iterator[Any]:
    """Batches of indices, up to ``samples`` indices in total."""
    for indices in batches:
        if samples <= 0:
            return
        yield indices[:samples]
        samples -= len(indices)


class Seeded(Dataset[Any]):
    """A dataset that seeds the global generators from the key of the pass and the index before fetching each sample.

    It forwards attributes, since a ``worker_init_fn`` finds it in ``get_worker_info().dataset`` in place of the dataset.
    """

    def __init__(self, dataset: Any, workers: int = 0) -> None:
        drew = torch.zeros((), dtype=torch.bool)  # whether fetching the first sample drew from a global generator
        vars(self).update(dataset=dataset, drew=drew.share_memory_() if workers else drew, looked=False)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # during unpickling
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.dataset, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, item: tuple[int, Any]) -> Any:
        with _UnchangedStates():
            return self._fetch(item)

    def __getitems__(self, items: list[tuple[int, Any]]) -> Fetched:
        with _UnchangedStates() as states:
            if items and callable(whole := getattr(self.dataset, "__getitems__", None)):
                _seed(*items[0])  # the dataset fetches the whole batch: seed from its first index
                samples = whole([index for _, index in items])
            else:
                samples = [self._fetch(item) for item in items]
            states.keep_for_collating()
        return Fetched(samples, states)

    def _fetch(self, item: tuple[int, Any]) -> Any:
        _seed(*item)
        if self.looked:
            return self.dataset[item[1]]
        vars(self)["looked"] = True
        seeded, seed = _global_states(), torch.initial_seed()
        sample = self.dataset[item[1]]
        if torch.initial_seed() == seed and not all(map(_same, seeded, _global_states())):  # it does not seed by itself
            self.drew.fill_(True)
        return sample


class Fetched(list[Any]):
    """The samples of a batch, and the states of the global generators to restore after collating."""

    def __init__(self, samples: Any, states: _UnchangedStates) -> None:
        super().__init__(samples)
        self.states = states


class Collating:
    """A collate function that continues the random stream of the batch's last sample."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        if not isinstance(samples, Fetched):
            return self.collate(samples)  # without batching, each sample is converted
        try:
            return self.collate(list(samples))
        finally:
            samples.states.put_back()


class _UnchangedStates:
    """Restores the states of the global generators in the main process; workers need not."""

    def __init__(self) -> None:
        self.states: Any = None
        self.kept = False

    def __enter__(self) -> _UnchangedStates:
        if get_worker_info() is None:
            # Reading and setting NumPy's state takes 50 us each: replace its bit generator instead.
            self.states = random.getstate(), get_bit_generator(), torch.default_generator.get_state()
            set_bit_generator(np.random.MT19937(0))
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None or not self.kept:
            self.put_back()

    def keep_for_collating(self) -> None:
        self.kept = True

    def put_back(self) -> None:
        if self.states is not None:
            python, numpy_generator, torch_state = self.states
            random.setstate(python)
            set_bit_generator(numpy_generator)
            torch.default_generator.set_state(torch_state)


def _global_states() -> tuple[Any, ...]:
    return random.getstate(), torch.default_generator.get_state(), *tuple(np.random.get_state())[1:]


def _same(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray | torch.Tensor) else bool(one == other)


def _seed(key: int, index: Any) -> None:
    reseed(mixed(key, index) if isinstance(index, int) else derived_seed(key, index))


def draws_at_random(data: Any) -> bool:
    """Whether fetching the first sample of a DataLoader in this run drew from a global generator, as augmentation does."""
    twin = _TWINS.get(data) if isinstance(data, DataLoader) else None
    return twin is not None and isinstance(twin.loader.dataset, Seeded) and bool(twin.loader.dataset.drew)


def _draws_nothing(dataset: Any) -> bool:
    """Whether fetching is known to draw no random numbers, so that it need not be seeded."""
    if type(dataset) is Subset:
        return _draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_draws_nothing, dataset.datasets))
    if type(dataset) is StackDataset:
        parts = dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
        return all(map(_draws_nothing, parts))
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


def generators_of(data: Any) -> list[torch.Generator]:
    """The generators that data draws its order from, apart from the global ones: those of a DataLoader and its samplers."""
    found = _unique(getattr(part, "generator", None) for part in _samplers(data))
    return [one for one in found if isinstance(one, torch.Generator)]


def set_epochs(data: Any, epochs: int | list[Any]) -> None:
    """Call ``set_epoch`` of the data and its samplers: with one epoch for all, or with the list returned by `epochs_of`."""
    parts = [part for part in _samplers(data) if callable(getattr(part, "set_epoch", None))]
    for part, epoch in zip(parts, [epochs] * len(parts) if isinstance(epochs, int) else epochs, strict=True):
        if epoch is not None:
            part.set_epoch(epoch)


def has_torch_order(loader: DataLoader[Any]) -> bool:
    """Whether a DataLoader uses torch's own samplers only, which draw from no other library's generators."""
    batches = loader.batch_sampler
    if batches is None:
        return type(loader.sampler) in _TORCH_SAMPLERS
    return type(batches) is BatchSampler and type(batches.sampler) in _TORCH_SAMPLERS


def is_shuffled(data: Any) -> bool:
    """Whether data, or a part of it, is known to be iterated in a random order: by one of torch's random samplers."""
    return any(
        isinstance(part, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)
        or (isinstance(part, DistributedSampler) and part.shuffle)
        for part in _samplers(data)
    )


def epochs_of(data: Any) -> list[Any]:
    """The current epoch of each sampler with ``set_epoch``; None where it has none."""
    parts = [part for part in _samplers(data) if callable(getattr(part, "set_epoch", None))]
    return [epoch if isinstance(epoch := getattr(part, "epoch", None), int) else None for part in parts]
