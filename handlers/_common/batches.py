"""Batches, as several handlers need them: looked into, changed, and taken from data. Not a handler."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from signalfire import Handler

__all__ = ["changed", "check_data", "check_place", "tensor_at"]


# ---- a tensor of a batch, by its place -----------------------------------------------------------------------------------


def check_place(handler: Handler, argument: str, place: Any) -> int | str:
    """Check an argument that says where in a batch something is.

    Raises:
        TypeError: if it can be no place.
    """
    if isinstance(place, bool) or not isinstance(place, int | str):
        told = f"{type(handler).__name__}({argument}={place!r})"
        raise TypeError(f"{told}: it has to be a place in a tuple or a key of a dict")
    return place


def tensor_at(handler: Handler, batch: Any, argument: str) -> Tensor:
    """The tensor in a batch at the place that an attribute of the handler says.

    Raises:
        TypeError: if there is none with a first dimension.
    """
    place = getattr(handler, argument)
    try:
        part = batch[place] if isinstance(batch, tuple | list | dict) else None
    except (IndexError, KeyError, TypeError):
        part = None
    if not isinstance(part, Tensor) or part.dim() == 0:
        raise TypeError(
            f"{handler.name!r}: the batch ({type(batch).__name__}) has no tensor at {place!r}; "
            f"say where it is with {type(handler).__name__}({argument}=)"
        )
    return part


def changed(batch: Any, place: Any, value: Tensor) -> Any:
    """A copy of the batch with another tensor in this place."""
    if isinstance(batch, tuple):
        items = list(batch)
        items[place] = value
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    batch = copy.copy(batch)
    batch[place] = value
    return batch


# ---- data ----------------------------------------------------------------------------------------------------------------


def check_data(where: str, data: object) -> None:
    """Check data that a handler iterates several times.

    Args:
        where: the call with its argument, for the error.
        data: the data.

    Raises:
        TypeError: if it cannot be iterated, or only once.
    """
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise TypeError(f"{where}: it has to be iterable, such as a DataLoader or a list of batches")
    if isinstance(data, Iterator):
        raise TypeError(
            f"{where}: an iterator is used up by the first pass; give an iterable that starts anew each time, such as a list "
            "or a DataLoader"
        )
