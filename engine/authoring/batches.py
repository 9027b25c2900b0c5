"""The structure of a batch: tensors in nested tuples, lists, deques, mappings, named tuples and classes with known fields."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["field_names", "hidden_length", "map_leaves", "parts", "rebuilt", "samples_in", "tensors_in"]


def tensors_in(batch: Any) -> list[Tensor]:
    """All tensors in a batch, which is a tensor or nested containers."""
    if isinstance(batch, Tensor):
        return [batch]
    if batch.__class__ in _PAIRS:  # the usual case, without a search
        return [tensor for part in batch for tensor in tensors_in(part)]
    container = parts(batch)
    return [] if container is None else [tensor for part in container[0] for tensor in tensors_in(part)]


_PAIRS = (tuple, list)


def samples_in(batch: Any) -> int:
    """The number of samples in a batch.

    That is the batch's own ``num_graphs`` (PyTorch Geometric) or ``batch_size`` (TensorDict); the length of its first tensor in
    nested containers, 1 for a scalar; or the length of an object with ``__len__``. It is 1 if none of these exists, or if they
    cannot be read.
    """
    kind = batch.__class__
    try:
        if kind is dict:  # the usual cases, without a search
            for first in batch.values():
                if isinstance(first, Tensor):
                    shape = first.shape
                    return shape[0] if shape else 1
                break
        elif kind in _PAIRS and batch and isinstance(batch[0], Tensor):
            shape = batch[0].shape
            return shape[0] if shape else 1
    except RuntimeError:  # a nested tensor has no shape
        pass
    count = _count(batch)
    return 1 if count is None else count


def _count(item: Any) -> int | None:
    """The number of samples; None if it is not known, or if a class of the user raises an error when asked."""
    try:
        if isinstance(item, Tensor):
            if item.is_nested:
                return item.size(0)  # it has no shape
            return item.shape[0] if item.dim() else 1
        if item is None or isinstance(item, str | bytes | int | float | bool | type):
            return None
        if (own := _own_count(item)) is not None:
            return own
        if isinstance(item, PackedSequence):
            return int(item.batch_sizes[0])
        container = parts(item)
        if container is not None:
            return next((count for count in map(_count, container[0]) if count is not None), None)
        return len(item)
    except Exception:
        return None


def _own_count(item: Any) -> int | None:
    """The number of samples that an object has as an attribute; None without one."""
    for name in ("num_graphs", "batch_size"):
        own = getattr(item, name, None)
        own = own[0] if isinstance(own, torch.Size) and own else own
        if isinstance(own, int) and not isinstance(own, bool):
            return own
    return None


def hidden_length(batch: Any) -> int | None:
    """The length that the tensors of an object all have, if `samples_in` counts this object as one sample; None otherwise.

    It is not known where a class of the user raises an error when asked.
    """
    if _count(batch) is not None:
        return None
    try:
        container = parts(batch)
        items = [batch] if container is None else container[0]
        held = [value for item in items for value in getattr(item, "__dict__", {}).values()]
        lengths = {len(value) for value in held if isinstance(value, Tensor) and not value.is_nested and value.dim()}
    except Exception:
        return None
    return lengths.pop() if len(lengths) == 1 else None


def map_leaves(function: Callable[[Any], Any], batch: Any) -> Any:
    """A batch of the same structure with ``function(leaf)`` in place of every leaf.

    Containers are tuples, named tuples, lists, deques, mappings, dataclasses, namespaces, and the classes of attrs and pydantic.
    Anything else is a leaf, and so is anything with a ``to`` method, such as tensors and packed sequences.

    Example:
        >>> map_leaves(lambda number: number + 1, {"x": [1, 2], "y": (3,)})
        {'x': [2, 3], 'y': (4,)}
    """
    kind = batch.__class__
    if kind is tuple or kind is list:  # the usual cases, which cost the same
        return kind([function(part) if part.__class__ is Tensor else map_leaves(function, part) for part in batch])
    if kind is dict:
        return {
            key: function(part) if part.__class__ is Tensor else map_leaves(function, part)
            for key, part in batch.items()
        }
    if hasattr(batch, "to") or (container := parts(batch)) is None:
        return function(batch)
    held, remake = container
    return remake([map_leaves(function, part) for part in held])


def parts(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """The items of a container, and a function that builds a container of the same kind; None for anything else."""
    if isinstance(value, Mapping):
        return list(value.values()), lambda held: _mapping_like(value, held)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(value), lambda held: type(value)(*held)
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):  # torch.Size holds only numbers
        return list(value), type(value)
    if isinstance(value, deque):
        return list(value), lambda held: deque(held, value.maxlen)
    if (names := field_names(value)) is not None:
        return [getattr(value, name) for name in names], lambda held: _fields_like(value, names, held)
    if _has_stores(value):
        stored = value.to_dict()
        return list(stored.values()), lambda held: _graphs_like(value, stored, held)
    return None


def _has_stores(value: Any) -> bool:
    """Whether this is a graph of PyTorch Geometric, which is no mapping, and keeps its tensors in stores."""
    return not isinstance(value, type) and hasattr(type(value), "stores") and callable(getattr(value, "to_dict", None))


def _graphs_like(value: Any, stored: dict[str, Any], held: list[Any]) -> Any:
    new = copy.copy(value)
    for key, part in zip(stored, held, strict=True):
        new[key] = part
    return new


def field_names(value: Any) -> list[str] | None:
    """The names of an object's fields that have a value, if its class declares them."""
    declared = None if isinstance(value, type) else _declared(value)
    return None if declared is None else [name for name in declared if hasattr(value, name)]


def _declared(value: Any) -> list[str] | None:
    if is_dataclass(value):
        return [one.name for one in fields(value)]
    if isinstance(value, SimpleNamespace):
        return list(vars(value))
    for mark in ("__attrs_attrs__", "__pydantic_fields__"):  # a tuple of attributes with names, a mapping by name
        if (known := getattr(type(value), mark, None)) is not None:
            return [one if isinstance(one, str) else one.name for one in known]
    return None


def _mapping_like(value: Mapping[Any, Any], held: list[Any]) -> Any:
    new = copy.copy(value) if isinstance(value, MutableMapping) else {}
    for key, part in zip(value.keys(), held, strict=True):  # a TensorDict iterates over its rows
        new[key] = part
    return new


def _fields_like(value: Any, names: list[str], held: list[Any]) -> Any:
    new = copy.copy(value)
    for name, part in zip(names, held, strict=True):
        object.__setattr__(new, name, part)  # also of a frozen one
    return new


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """A container of the same kind with ``change(item)`` for every item; anything else is returned unchanged."""
    if (container := parts(value)) is None:
        return value
    held, remake = container
    return remake([change(part) for part in held])
