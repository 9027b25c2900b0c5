"""Samples of a map-style dataset whose random numbers depend only on the pass and the sample."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from operator import getitem
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch.utils.data import Dataset, get_worker_info

from ..authoring.randomness import derived_seed, mixed, reseed

__all__ = ["Collating", "Keyed", "Seeded", "begin_worker"]


class Keyed:
    """The index of a sample, or the indices of a batch, as the sampler gave them, with the key of the pass."""

    def __init__(self, key: int, index: Any) -> None:
        self.key = key
        self.index = index


class Seeded(Dataset[Any]):
    """A dataset that seeds the global generators from the key of the pass and the index before fetching each sample.

    It takes the indices as `Keyed`, and passes on the very objects that the sampler gave and that the dataset returns.
    """

    def __init__(self, dataset: Any, workers: int = 0) -> None:
        drew = torch.zeros((), dtype=torch.bool)  # whether fetching the first sample drew from a global generator
        self.dataset = dataset
        self.drew = drew.share_memory_() if workers else drew
        self.looked = False
        self.states: _UnchangedStates | None = None  # of a batch that is yet to be collated

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, item: Keyed) -> Any:
        with _UnchangedStates():
            return self._fetch(item.key, item.index)

    def __getitems__(self, items: Keyed) -> Any:
        return self.batch(items.key, items.index)

    def batch(self, key: int, indices: Any) -> Any:
        """The samples of a batch, as torch fetches them. The random stream of the last one goes on until `put_back`."""
        with _UnchangedStates() as states:
            if whole := getattr(self.dataset, "__getitems__", None):
                _seed(key, _first_of(indices))
                samples = self._watched(whole, indices)
            else:
                samples = [self._fetch(key, index) for index in indices]
            states.keep_for_collating()
        self.states = states
        return samples

    def put_back(self) -> None:
        """Restore the global generators as they were before the batch was fetched."""
        states, self.states = self.states, None
        if states is not None:
            states.put_back()

    def _fetch(self, key: int, index: Any) -> Any:
        _seed(key, index)
        return self.dataset[index] if self.looked else self._watched(partial(getitem, self.dataset), index)

    def _watched(self, fetch: Callable[[Any], Any], indices: Any) -> Any:
        """What a function fetches; of the first call, it is noted whether it drew from a global generator."""
        if self.looked:
            return fetch(indices)
        self.looked = True
        seeded, seed = _global_states(), torch.initial_seed()
        found = fetch(indices)
        if torch.initial_seed() == seed and not all(map(_same, seeded, _global_states())):  # it does not seed by itself
            self.drew.fill_(True)
        return found


class Collating:
    """A collate function that continues the random stream of the batch's last sample.

    Args:
        collate: The collate function.
        samples: The dataset that fetches the batches.
    """

    def __init__(self, collate: Callable[[Any], Any], samples: Seeded) -> None:
        self.collate = collate
        self.samples = samples

    def __call__(self, samples: Any) -> Any:
        try:
            return self.collate(samples)
        finally:
            self.samples.put_back()


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


def _first_of(indices: Any) -> Any:
    """What the fetch of a whole batch is seeded from."""
    if isinstance(indices, list | tuple | torch.Tensor | np.ndarray) and len(indices):
        return indices[0]
    return indices


def _seed(key: int, index: Any) -> None:
    if isinstance(index, torch.Tensor | np.ndarray | np.generic):
        index = index.tolist()  # the numbers, in whatever they come
    if isinstance(index, int):
        reseed(mixed(key, index))
    elif " at 0x" in str(index):
        reseed(derived_seed(key, type(index).__qualname__))  # its text is its address, which no other process has
    else:
        reseed(derived_seed(key, index))


def begin_worker(init: Callable[[int], Any] | None, worker: int) -> None:
    """Begin a worker process: ``get_worker_info().dataset`` is the user's dataset there."""
    info = get_worker_info()
    assert info is not None
    object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]  # its class is frozen
    if init is not None:
        init(worker)
