"""DataLoaders, iterated from any batch on, and fetched so that random augmentation depends on the sample alone.

Two things make a DataLoader hard to resume: the batches before the position are read again, and what its workers draw depends
on how many they are and on what each of them fetched before. Here the *indices* are skipped, which costs nothing, and each
sample of a map-style dataset is fetched with the global generators seeded from (seed, number of the pass, index): a resumed
run, and one with another number of workers, gets the same samples. In the main process the generators' states are put back
after each batch, so that augmentation moves no dropout.
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

__all__ = ["SkippingLoader", "generators_of", "has_torchs_order", "is_plain", "note_share", "set_epochs", "skippable"]

T = TypeVar("T")


def skippable(data: Any) -> bool:
    """Whether batches can be skipped by index: those of a DataLoader over a map-style dataset that iterates as torch's."""
    return (
        isinstance(data, DataLoader)
        and type(data).__iter__ is DataLoader.__iter__
        and not isinstance(data.dataset, IterableDataset)
    )


def is_plain(data: Any) -> bool:
    """Whether data is a list or tuple of batches, or none at all: it draws nothing, and has no parts to ask or to tell."""
    return data is None or type(data) is list or type(data) is tuple


class SkippingLoader:
    """A DataLoader's twin, with the same dataset, samplers and options, that can begin at any batch.

    One twin serves a DataLoader for as long as it lives, so that persistent workers persist.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        batched = loader.batch_sampler is not None
        self.sampler = _From(loader.batch_sampler if batched else loader.sampler, batched=batched)
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
            _Seeded(loader.dataset) if draws else loader.dataset,
            collate_fn=_Collating(collate) if draws else collate,
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

    def iterate(
        self,
        seed: int,
        number: int,
        start: int = 0,
        *,
        at_once: bool = False,
        dealt: tuple[int, int] = (0, 1),
        limit: int | None = None,
        samples: int | None = None,
        shares: dict[int, float] | None = None,
    ) -> Iterator[Any]:
        """The batches of one pass from batch ``start`` on.

        Args:
            seed: what augmentation derives from.
            number: the number of the pass, which makes it differ from pass to pass.
            start: how many batches are skipped; of those that are dealt to this process.
            at_once: whether the order is drawn now, and not with the first batch, as it is by a DataLoader without workers.
            dealt: the rank of this process and the number of processes to which the batches are dealt in turn.
            limit: at most so many batches are dealt.
            samples: at most so many: those after them are the padding of a sampler.
            shares: where it is noted how much the batch of a turn counts, if those that are dealt in it have different sizes.
        """
        self.sampler.start, self.sampler.dealt, self.sampler.samples = start, dealt, samples
        self.sampler.limit, self.sampler.shares = limit, {} if shares is None else shares
        self.sampler.key = derived_seed(seed, "sample", number)
        if number == 0 or not self.loader.persistent_workers:
            # Where an iteration begins, or persistent workers, a DataLoader draws the seed of its workers. So that this happens
            # at the same passes in a resumed run, which starts its workers late, the twin draws it elsewhere, and this is as if.
            torch.empty((), dtype=torch.int64).random_(generator=self.own)
        self.generator.manual_seed(self.sampler.key)
        batches: Iterator[Any] = iter(self.loader)
        if start or at_once:
            self.sampler.drawing.skip(one_more=at_once)
        return batches


_TWINS: weakref.WeakKeyDictionary[DataLoader[Any], SkippingLoader] = weakref.WeakKeyDictionary()


class _From:
    """A sampler, or batch sampler, from a position on; its indices carry the key of the pass if fetches are to be seeded."""

    def __init__(self, sampler: Any, *, batched: bool) -> None:
        self.inner = sampler
        self.batched = batched
        self.keyed = False
        self.start = 0
        self.dealt = (0, 1)
        self.limit: int | None = None
        self.samples: int | None = None
        self.shares: dict[int, float] = {}
        self.key = 0

    def __iter__(self) -> Iterator[Any]:
        self.drawing = _Drawing(
            self.inner, self.start, self.dealt, self.limit, self.samples if self.batched else None, self.shares
        )
        if not self.keyed:
            return self.drawing
        key = self.key
        if self.batched:
            return ([(key, index) for index in indices] for indices in self.drawing)
        return ((key, index) for index in self.drawing)

    def __len__(self) -> int:
        return len(self.inner)


class _Drawing:
    """What a sampler draws, without the first ones, and without what is dealt to other processes."""

    def __init__(
        self,
        sampler: Any,
        start: int,
        dealt: tuple[int, int],
        limit: int | None,
        samples: int | None,
        shares: dict[int, float],
    ) -> None:
        self.sampler = sampler
        self.start = start
        self.rank, self.size = dealt
        self.limit = limit
        self.samples = samples
        self.shares = shares
        self.drawn: Iterator[Any] | None = None

    def skip(self, *, one_more: bool = False) -> Iterator[Any]:
        """Draw what is skipped: now, since a sampler draws its order when it is first asked for some of it."""
        if self.drawn is None:
            drawn = _to_the_end(self.sampler)
            drawn = drawn if self.samples is None else _first(self.samples, drawn)
            drawn = drawn if self.limit is None else islice(drawn, self.limit)
            for _ in range(self.start * self.size):
                next(drawn, None)
            if self.size > 1:
                drawn = self._deal(drawn)
            self.drawn = chain(list(islice(drawn, 1)), drawn) if one_more else drawn
        return self.drawn

    def _deal(self, drawn: Iterator[Any]) -> Iterator[Any]:
        for turn in count(self.start):
            hand = list(islice(drawn, self.size))
            sizes = [len(indices) if isinstance(indices, list | tuple) else 1 for indices in hand]
            if self.rank >= len(hand):
                return
            note_share(self.shares, turn, self.rank, sizes, self.size)
            yield hand[self.rank]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.drawn or self.skip())


def note_share(shares: dict[int, float], turn: int, rank: int, sizes: list[int], size: int) -> None:
    """Note how much the batch of a turn counts: more than 1 if it has more samples than the others that are dealt with it."""
    if rank < len(sizes) and (len(set(sizes)) > 1 or len(sizes) < size) and (together := sum(sizes)):
        shares[turn] = sizes[rank] * size / together


def _to_the_end(sampler: Any) -> Iterator[Any]:
    """What a sampler draws; with the last one it is drawn to its end.

    Some draw once more from their generator there, such as torch's RandomSampler. A loop over a DataLoader comes to that end,
    with workers even before it has the last batch; who only counts would have another order in the next epoch.
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


def _first(samples: int, batches: Any) -> Iterator[Any]:
    """Batches of indices, up to so many indices."""
    for indices in batches:
        if samples <= 0:
            return
        yield indices[:samples]
        samples -= len(indices)


class _Seeded(Dataset[Any]):
    """A dataset whose samples are fetched with generators that are seeded from the key of the pass and the index.

    To a ``worker_init_fn``, which finds it in ``get_worker_info().dataset``, it is the dataset itself.
    """

    def __init__(self, dataset: Any) -> None:
        vars(self)["dataset"] = dataset

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # while it is unpickled
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

    def __getitems__(self, items: list[tuple[int, Any]]) -> _Fetched:
        with _UnchangedStates() as states:
            if items and callable(whole := getattr(self.dataset, "__getitems__", None)):
                _seed(*items[0])  # the dataset fetches a batch at once: its first index stands for it
                samples = whole([index for _, index in items])
            else:
                samples = [self._fetch(item) for item in items]
            states.keep_for_collating()
        return _Fetched(samples, states)

    def _fetch(self, item: tuple[int, Any]) -> Any:
        _seed(*item)
        return self.dataset[item[1]]


class _Fetched(list[Any]):
    """The samples of a batch, and the states that the process's generators are to get back once they are collated."""

    def __init__(self, samples: Any, states: _UnchangedStates) -> None:
        super().__init__(samples)
        self.states = states


class _Collating:
    """A collate function whose draws go on from those of the batch's last sample."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        if not isinstance(samples, _Fetched):
            return self.collate(samples)  # without batches, each sample is converted
        try:
            return self.collate(list(samples))
        finally:
            samples.states.put_back()


class _UnchangedStates:
    """In the main process, puts the global generators back; a worker has them for itself."""

    def __init__(self) -> None:
        self.states: Any = None
        self.kept = False

    def __enter__(self) -> _UnchangedStates:
        if get_worker_info() is None:
            # NumPy's state takes 50 us to be read and as much to be set: another generator takes its place instead.
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
            python, numpy, torchs = self.states
            random.setstate(python)
            set_bit_generator(numpy)
            torch.default_generator.set_state(torchs)


def _seed(key: int, index: Any) -> None:
    reseed(mixed(key, index) if isinstance(index, int) else derived_seed(key, index))


def _draws_nothing(dataset: Any) -> bool:
    """Whether fetching is known to draw no random number, so that it need not be seeded."""
    if type(dataset) is Subset:
        return _draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_draws_nothing, dataset.datasets))
    if type(dataset) is StackDataset:
        parts = dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
        return all(map(_draws_nothing, parts))
    return type(dataset) in (TensorDataset, list, tuple)


_TORCHS_SAMPLERS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)

# ---- samplers ---------------------------------------------------------------------------------------------------------


def _samplers(data: Any) -> list[Any]:
    """The data itself, and what it draws its order from; that of all parts, of data that consists of several."""
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
    return _different(found)


def _different(parts: Iterable[T | None]) -> list[T]:
    """What there is, each object once."""
    return list({id(part): part for part in parts if part is not None}.values())


def generators_of(data: Any) -> list[torch.Generator]:
    """The generators of its own that data draws its order from: those of a DataLoader and its samplers."""
    found = _different(getattr(part, "generator", None) for part in _samplers(data))
    return [one for one in found if isinstance(one, torch.Generator)]


def set_epochs(data: Any, epochs: int | list[Any]) -> None:
    """Tell the parts that want to know it (``set_epoch``) which epoch begins, or what each was told before."""
    parts = [part for part in _samplers(data) if callable(getattr(part, "set_epoch", None))]
    for part, epoch in zip(parts, [epochs] * len(parts) if isinstance(epochs, int) else epochs, strict=True):
        if epoch is not None:
            part.set_epoch(epoch)


def has_torchs_order(loader: DataLoader[Any]) -> bool:
    """Whether a DataLoader's order comes from torch's own samplers, which draw from no other library's generators."""
    batches = loader.batch_sampler
    if batches is None:
        return type(loader.sampler) in _TORCHS_SAMPLERS
    return type(batches) is BatchSampler and type(batches.sampler) in _TORCHS_SAMPLERS


def epochs_of(data: Any) -> list[Any]:
    """Which epoch each part that wants to know it has been told."""
    parts = [part for part in _samplers(data) if callable(getattr(part, "set_epoch", None))]
    return [epoch if isinstance(epoch := getattr(part, "epoch", None), int) else None for part in parts]
