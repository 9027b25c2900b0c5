"""Whether the data of a run is that of the run before, whose position then applies to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from ..batches import tensors_in
from .extent import extent_of

__all__ = ["same_data"]


def same_data(one: Any, other: Any) -> bool | None:
    """Whether two objects give the same batches; None where that is not known.

    Another object is the same data if it is a range or a list with equal batches, or a DataLoader of equal extent whose dataset
    is the same: that object, equal tensors, or the same subset of one of these.
    """
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, Iterator) or extent_of(one) != extent_of(other):
        return False
    if isinstance(one, range):
        return one == other  # type: ignore[no-any-return]
    if isinstance(one, list | tuple):
        return all(_equal(tensors_in(one[place]), tensors_in(other[place])) for place in (0, -1)) if one else True
    if isinstance(one, DataLoader):
        return _same_dataset(one.dataset, other.dataset)
    return None


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


def _equal(some: Any, others: Any) -> bool:
    return len(some) == len(others) and all(map(_equal_tensors, some, others))


def _equal_tensors(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device and one.equal(other)
