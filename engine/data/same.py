"""Whether the data of a run is that of the run before, whose position then applies to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from .extent import extent_of

__all__ = ["same_data"]


def same_data(one: Any, other: Any) -> bool | None:
    """Whether two objects give the same batches; None where that is not known.

    Another object is the same data if it is a range or a list with equal batches, or a DataLoader whose samplers and dataset are
    the same: those objects, samplers of torch with equal options, equal tensors, or the same subset of one of these.
    """
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, Iterator) or extent_of(one) != extent_of(other):
        return False
    if isinstance(one, list | tuple | range):
        return _equal(one, other)
    if isinstance(one, DataLoader):
        pairs = [
            _same_order(one.sampler, other.sampler),
            _same_order(one.batch_sampler, other.batch_sampler),
            _same_function(one.collate_fn, other.collate_fn),
            _same_dataset(one.dataset, other.dataset),
        ]
        return False if False in pairs else None if None in pairs else True
    return None


_OPTIONS: dict[type, tuple[str, ...]] = {
    SequentialSampler: (),
    RandomSampler: ("replacement", "num_samples"),
    SubsetRandomSampler: ("indices",),
    WeightedRandomSampler: ("weights", "num_samples", "replacement"),
    DistributedSampler: ("num_replicas", "rank", "shuffle", "seed", "drop_last"),
    BatchSampler: ("batch_size", "drop_last"),
}
"""What decides the order of torch's samplers, besides the dataset and random numbers."""


def _same_order(one: Any, other: Any) -> bool | None:
    """Whether two samplers draw the same indices from the same random numbers."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple | range):
        return _equal(one, other)
    if (options := _OPTIONS.get(type(one))) is None:
        return None
    if not all(_equal(getattr(one, name), getattr(other, name)) for name in options):
        return False
    return _same_order(one.sampler, other.sampler) if type(one) is BatchSampler else True


def _same_function(one: Any, other: Any) -> bool | None:
    if one is other or getattr(one, "__code__", one) is getattr(other, "__code__", other):
        return True
    return None if type(one) is type(other) else False


def _same_dataset(one: Any, other: Any) -> bool | None:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) is TensorDataset:
        return _equal(one.tensors, other.tensors)
    if type(one) is Subset:
        return list(one.indices) == list(other.indices) and _same_dataset(one.dataset, other.dataset)
    return None


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are equal, bit for bit; what cannot be compared is not."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        is_alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        return is_alike and one.equal(other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return isinstance(one, bool | int | float | str | bytes | range) and bool(one == other)
