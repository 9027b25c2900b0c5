"""Helpers for batches: read and replace a tensor of a batch, and check data that is iterated several times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

from torch import Tensor

from signalfire import Engine, Handler
from signalfire.updates.places import PlaceError, described, value_at

__all__ = ["check_data", "check_place", "find_target", "tensor_at"]


# ---- a tensor of a batch, by its place -----------------------------------------------------------------------------------


def check_place(handler: Handler, argument: str, place: Any) -> int | str:
    """Check an argument that locates a tensor in a batch: an index, a key of a mapping, or the name of an attribute.

    Raises:
        TypeError: If it is neither an int nor a str.
    """
    if isinstance(place, bool) or not isinstance(place, int | str):
        where = f"{type(handler).__name__}({argument}={place!r})"
        raise TypeError(f"{where}: expected a tuple index, a mapping key or an attribute name")
    return place


def find_target(handler: Handler, engine: Engine, given: int | str | None) -> int | str:
    """Where the targets are in a batch: as given to the handler, or else to the first update, or the second element.

    Raises:
        ValueError: If the update finds them by a function, which cannot replace them.
    """
    place = given if given is not None else engine.updates[0].spec.target
    if callable(place):
        raise ValueError(
            f"{handler.name!r} cannot replace the targets, because update {engine.updates[0].name!r} uses a "
            f"function to find them; set {type(handler).__name__}(target=) to their index or key"
        )
    return 1 if place is None else place


def tensor_at(handler: Handler, batch: Any, argument: str) -> Tensor:
    """The tensor of a batch at the index, key or name in the handler's attribute ``argument``.

    Raises:
        TypeError: If there is no tensor with at least one dimension.
    """
    place = getattr(handler, argument)
    try:
        part = value_at(batch, place)
    except PlaceError:
        part = None
    if not isinstance(part, Tensor) or part.dim() == 0:
        raise TypeError(
            f"{handler.name!r}: the batch, {described(batch)}, has no tensor at {place!r}; set "
            f"{type(handler).__name__}({argument}=) to the index or key of a tensor"
        )
    return part


# ---- data ----------------------------------------------------------------------------------------------------------------


def check_data(call: str, data: object, end: str = ")") -> None:
    """Check data that a handler iterates several times.

    Args:
        call: The call, up to the value of its argument, for the error; data is shown only if it is wrong.
        data: The data.
        end: What follows the value.

    Raises:
        TypeError: If it is not data, or cannot be iterated more than once.
        ValueError: If it has a length of 0.
    """
    if isinstance(data, str | bytes) or (not isinstance(data, Iterable) and not hasattr(data, "__getitem__")):
        raise TypeError(f"{call}{data!r}{end}: expected an iterable, such as a DataLoader or a list of batches")
    if isinstance(data, Iterator):
        raise TypeError(
            f"{call}{data!r}{end}: an iterator is exhausted after one pass; pass an iterable that restarts each time, "
            "such as a list or a DataLoader"
        )
    if isinstance(data, Sized) and not _has_items(data):
        raise ValueError(f"{call}{data!r}{end}: the data is empty; pass at least one batch")


def _has_items(data: Sized) -> bool:
    try:
        return len(data) > 0
    except Exception:  # a DataLoader over data without a length
        return True
