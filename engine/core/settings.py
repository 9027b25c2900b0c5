"""The plain arguments that an object was made with, to be compared with those of the run that saved a state."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import torch

__all__ = ["check_arguments", "is_default", "plain_arguments"]

from .words import did_you_mean

_signature = lru_cache(maxsize=256)(inspect.signature)
_PLAIN = (type(None), bool, int, float, str)
_LONGEST = 100


def plain_arguments(kind: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor by name, defaults included, as far as a saved state can hold and compare them.

    Numbers, strings, dtypes and containers of them are; of a `functools.partial`, its function's name and arguments are. Other
    objects are left out, and so is ``name``.

    Example:
        >>> from signalfire.handlers import GradientClipping
        >>> plain_arguments(GradientClipping, (1.0,), {})
        {'max_norm': 1.0, 'max_value': None, 'norm_type': 2.0, 'update': None}
    """
    try:
        bound = _signature(kind).bind(*args, **kwargs)
    except (TypeError, ValueError):  # the constructor says better what is wrong
        return {}
    bound.apply_defaults()
    found = {name: _plain(value) for name, value in bound.arguments.items() if name != "name"}
    return {name: value for name, value in found.items() if value is not _OTHER}


def check_arguments(kind: type, given: Mapping[str, Any], other_names: Mapping[str, str]) -> None:
    """Raise TypeError for a keyword that a constructor does not take, saying which one may be meant.

    Args:
        kind: the class.
        given: the keyword arguments.
        other_names: what other libraries call an argument, and what it is here.
    """
    parameters = inspect.signature(kind, follow_wrapped=False).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    for name in given:
        if name not in parameters:
            hint = f"; use {other_names[name]}" if name in other_names else did_you_mean(name, parameters)
            raise TypeError(f"{kind.__name__}() got an unexpected keyword argument {name!r}{hint}")


def is_default(owner: object, name: str) -> bool:
    """Whether the constructor of an object has such an argument, and the attribute of that name has its default.

    Example:
        >>> from signalfire.handlers import EarlyStopping
        >>> (
        ...     is_default(EarlyStopping("loss"), "patience"),
        ...     is_default(EarlyStopping("loss", patience=9), "patience"),
        ... )
        (True, False)
    """
    argument = inspect.signature(type(owner)).parameters.get(name)
    return argument is not None and str(argument.default) == str(getattr(owner, name))


_OTHER = object()


def _plain(value: Any) -> Any:
    if isinstance(value, partial):
        return _plain({"function": getattr(value.func, "__qualname__", ""), "args": value.args, **value.keywords})
    if isinstance(value, torch.dtype):
        return str(value)
    if type(value) in (list, tuple):
        if len(value) > _LONGEST:  # data, rather than settings
            return _OTHER
        several = [_plain(one) for one in value]
        return _OTHER if any(one is _OTHER for one in several) else several
    if type(value) is dict:
        known = {str(key): _plain(one) for key, one in value.items()}
        return {key: one for key, one in known.items() if one is not _OTHER}
    return value if type(value) in _PLAIN else _OTHER
