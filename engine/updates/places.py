"""Where things are in a batch or an output: an index, a key, an attribute, or a function that finds it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from ..authoring.batches import field_names

__all__ = ["Place", "PlaceError", "check_place", "described", "keyword_arguments", "value_at", "with_value_at"]

Place = int | str | Callable[[Any], Any]
"""An index into a sequence, a key of a mapping, the name of an attribute, or a function of the whole."""


class PlaceError(LookupError):
    """There is nothing at a place; the message says what there is."""


def check_place(where: str, place: Any) -> Any:
    """Check an argument that says where something is.

    Args:
        where: the call with its argument, for the error.
        place: its value; None is allowed.

    Raises:
        TypeError: for what is no int, str or function.
    """
    if isinstance(place, bool) or not (place is None or isinstance(place, int | str) or callable(place)):
        raise TypeError(
            f"{where}={place!r}: expected an index, a key or name, or a function of the batch or output, such as 'labels'"
        )
    return place


def value_at(value: Any, place: Place) -> Any:
    """What is at a place of a batch or an output.

    Args:
        value: a sequence, a mapping of any class, or an object with attributes.
        place: an index, a key, the name of an attribute, or a function that is called with the value.

    Raises:
        PlaceError: if there is nothing.

    Example:
        >>> value_at({"image": 1, "label": 2}, "label"), value_at((1, 2), 0), value_at((1, 2), max)
        (2, 1, 2)
    """
    if value.__class__ is not dict:  # a dict is the usual case
        if callable(place):
            return place(value)
        if isinstance(place, str) and not isinstance(value, Mapping):
            try:
                return getattr(value, place)
            except AttributeError:
                raise PlaceError(f"there is no {place!r} in {described(value)}") from None
        if isinstance(value, Tensor):  # an index would silently be that of a sample
            raise PlaceError(f"there is no {place!r} in {described(value)}")
        if isinstance(place, int) and isinstance(value, Mapping) and not isinstance(value, dict) and place not in value:
            # An index into a BatchEncoding is that of a sample; into an output of Hugging Face, a dict, that of a field.
            raise PlaceError(f"there is no {place!r} in {described(value)}")
    elif callable(place):
        return place(value)
    try:
        return value[place]
    except (LookupError, TypeError):
        raise PlaceError(f"there is no {place!r} in {described(value)}") from None


def with_value_at(value: Any, place: int | str, new: Any) -> Any:
    """A copy of a batch with something else at a place; the batch itself is not changed.

    Example:
        >>> with_value_at({"image": 1, "label": 2}, "image", 3)
        {'image': 3, 'label': 2}
    """
    if isinstance(value, tuple):
        if isinstance(place, str):
            return value._replace(**{place: new})  # type: ignore[attr-defined]
        items = list(value)
        items[place] = new
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return {**value, place: new}
    same = copy.copy(value)
    if isinstance(place, int) or isinstance(value, Mapping):
        same[place] = new
    elif field_names(value) is not None:
        object.__setattr__(same, place, new)  # also of a frozen one
    else:
        setattr(same, place, new)
    return same


def keyword_arguments(batch: Any) -> Mapping[str, Any] | None:
    """A batch as keyword arguments: a mapping as it is, the fields of an object by name; None for anything else.

    Example:
        >>> from types import SimpleNamespace
        >>> keyword_arguments(SimpleNamespace(x=1, y=2))
        {'x': 1, 'y': 2}
    """
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, tuple) and hasattr(batch, "_asdict"):
        named: dict[str, Any] = batch._asdict()
        return named
    if (names := field_names(batch)) is not None:
        return {name: getattr(batch, name) for name in names}
    to_dict = getattr(batch, "to_dict", None)  # PyTorch Geometric
    found = to_dict() if callable(to_dict) and not isinstance(batch, type) else None
    return found if isinstance(found, dict) else None


def described(value: Any) -> str:
    """A batch or an output for an error: its class, and what it has."""
    kind = type(value).__name__
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return f"a {kind} of length {len(value)}"
    named = keyword_arguments(value)
    return f"a {kind}" if named is None else f"a {kind} with {', '.join(map(repr, named.keys())) or 'nothing'}"
