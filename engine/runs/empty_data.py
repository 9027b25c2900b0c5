"""Data without a length that has no batch, which is known before a run trains for an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from types import FunctionType
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from ..authoring.randomness import unchanged_random_state
from ..data.loading import generators_of
from ..data.streamed import END, inner
from ..resuming.changeable import ATOMS, CONTAINERS, GENERATORS, attributes_of, unchanged_attributes

__all__ = ["has_no_batch"]


def has_no_batch(data: Any) -> bool:
    """Whether data without a length has no batch; it is read up to the first one, and put back as it was.

    Data that cannot be put back counts as data with batches: iterators, data with workers or with a position of its own, and
    what holds something else than numbers, texts, tensors and random generators, such as an open file.
    """
    data = inner(data)
    item = data.dataset if type(data) is DataLoader else data
    reads = not isinstance(data, Iterator) and not getattr(data, "num_workers", 0)
    if (
        not reads
        or callable(getattr(item, "load_state_dict", None))
        or not all(map(_is_plain, attributes_of(item).values()))
    ):
        return False
    with suppress(Exception), unchanged_random_state(*generators_of(data)), unchanged_attributes(item):
        return next(iter(data), END) is END
    return False


def _is_plain(value: Any) -> bool:
    """Whether a value can be put back as it was, also inside containers."""
    if isinstance(value, CONTAINERS):
        items = value.values() if isinstance(value, dict) else value
        return len(value) <= _MOST_ITEMS and all(map(_is_plain, items))
    return isinstance(value, (*ATOMS, *GENERATORS, range, Tensor, np.ndarray, type, FunctionType))


_MOST_ITEMS = 1000
