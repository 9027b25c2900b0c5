"""Configurations as plain values, which files and loggers hold: of dataclasses, Namespace, OmegaConf, pydantic and attrs."""

from __future__ import annotations

import argparse
import datetime
import inspect
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from os import PathLike, fspath
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .batches import field_names

__all__ = ["fields_of", "plain_mapping", "plain_value"]

_ATOMS = (NoneType, bool, int, float, str)
_MOST = 1000  # numbers in an array; more are data


def plain_mapping(where: str, values: Any) -> dict[str, Any]:
    """A configuration as a dict of plain values by name.

    | given | becomes |
    |---|---|
    | mappings of any class; OmegaConf, resolved | a dict; keys that are numbers, bools, None or enums become strings |
    | dataclasses, attrs, pydantic, named tuples, ``SimpleNamespace``, ``argparse.Namespace`` | a dict of their fields |
    | tuples, sets (sorted), ranges, OmegaConf's ``ListConfig`` | a list |
    | NumPy's numbers and arrays, tensors, of at most 1,000 numbers | a number, or nested lists |
    | paths | a str |
    | enums | their value, if it is plain, else their name |
    | ``torch.dtype``, ``torch.device``, dates and times, time deltas | a str, ISO 8601 for times |
    | classes and functions | their qualified name |

    Args:
        where: the call with its argument, for the error.
        values: a mapping, or an object with fields.

    Raises:
        TypeError: for what is no configuration, and for a value that is not in the table, naming its place.

    Example:
        >>> from pathlib import Path
        >>> plain_mapping(
        ...     "f(config",
        ...     argparse.Namespace(sizes=(1, 2), folder=Path("runs"), rate=np.float64(0.5)),
        ... )
        {'sizes': [1, 2], 'folder': 'runs', 'rate': 0.5}
    """
    mapping = fields_of(values)
    if mapping is None:
        raise TypeError(
            f"{where}={values!r}): expected a mapping, or an object with fields, such as a dataclass, a "
            "Namespace, or an OmegaConf, pydantic or attrs object"
        )
    return _plain_items(where, mapping)


def plain_value(where: str, value: Any) -> Any:
    """A value as `plain_mapping` converts those of a configuration.

    Raises:
        TypeError: for a value that is not in its table.
    """
    if isinstance(value, (*_ATOMS, Enum)):
        return _plain_atom(value)
    if isinstance(value, np.generic):
        return plain_value(where, value.item())
    if isinstance(value, np.ndarray | Tensor):
        return _plain_array(where, value)
    if (text := _as_text(value)) is not None:
        return text
    if (mapping := fields_of(value)) is not None:
        return _plain_items(where, mapping)
    if isinstance(value, Set):
        return [plain_value(where, one) for one in sorted(value, key=repr)]
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain_value(f"{where}[{place}]", one) for place, one in enumerate(value)]
    raise TypeError(
        f"{where}={value!r}): a {type(value).__name__} is not a plain value; pass a str, a number, True, False, None, "
        "or a list or mapping of such values"
    )


def _plain_atom(value: Any) -> Any:
    if type(value) in _ATOMS:
        return value
    if isinstance(value, Enum):
        return value.value if type(value.value) in _ATOMS else value.name
    return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))  # of a subclass


def _plain_array(where: str, value: np.ndarray[Any, Any] | Tensor) -> Any:
    count = value.numel() if isinstance(value, Tensor) else value.size
    if count > _MOST:
        raise TypeError(
            f"{where}={type(value).__name__} of {count} numbers): this is data, not configuration; store its shape or "
            "name instead"
        )
    return value.tolist()


def _as_text(value: Any) -> str | None:
    """The text of a path, a dtype, a device, a time, a class or a function; None for anything else."""
    if isinstance(value, PathLike):
        path: str = fspath(value)
        return path
    if isinstance(value, torch.dtype | torch.device | datetime.timedelta):
        return str(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if inspect.isclass(value) or inspect.isfunction(value) or inspect.isbuiltin(value):
        return f"{value.__module__}.{value.__qualname__}"
    return None


def _plain_items(where: str, mapping: Mapping[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in mapping.items():
        name = plain_value(where, key)
        if not isinstance(name, _ATOMS):
            raise TypeError(f"{where}={mapping!r}): the key {key!r} is neither a string nor a number")
        name = str(name)
        if name in found:
            raise TypeError(f"{where}={mapping!r}): two keys become {name!r} when converted to str; rename one of them")
        found[name] = plain_value(f"{where}[{name!r}]", value)
    return found


def fields_of(value: Any) -> Mapping[Any, Any] | None:
    """The fields of a configuration by name; None for anything else."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, argparse.Namespace):
        return vars(value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        named: dict[str, Any] = value._asdict()
        return named
    names = field_names(value)
    return None if names is None else {name: getattr(value, name) for name in names}
