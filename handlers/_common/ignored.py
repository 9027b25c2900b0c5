"""The class of targets that a loss ignores, such as padding: of torch's losses, and of functions and modules that call them."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import islice
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from signalfire.authoring import tensors_in
from signalfire.authoring.functions import codes_of, is_users, names_in, package_of

__all__ = ["IGNORED", "all_ignored", "ignored_class"]

IGNORED = -100
"""The class that torch's losses ignore by default."""

_NAME = "ignore_index"
_BETWEEN = {"CACHE", "EXTENDED_ARG", "NOP", "PRECALL"}
_VALUES = {"LOAD_CONST", "LOAD_SMALL_INT"}
_MOST = 100  # functions that are looked into


def ignored_class(function: Any) -> int:
    """The class that a loss ignores: its ``ignore_index``, or that of the losses that it calls; by default -100, as in torch.

    Example:
        >>> from torch.nn.functional import cross_entropy
        >>> ignored_class(cross_entropy), ignored_class(partial(cross_entropy, ignore_index=0))
        (-100, 0)
    """
    found = {one for one in _classes_in(function, set()) if type(one) is int}
    return found.pop() if len(found) == 1 else IGNORED


def all_ignored(target: Any, ignored: int) -> Tensor | None:
    """Whether all targets of a batch are the ignored class, on their device; None if they are not classes.

    Args:
        target: A tensor, or several in a tuple or mapping.
        ignored: The class.
    """
    targets = tensors_in(target)
    if not targets or not all(_are_classes(one) for one in targets):
        return None
    return (
        torch.stack([(one == ignored).all() for one in targets]).all()
        if len(targets) > 1
        else (targets[0] == ignored).all()
    )


def _are_classes(target: Tensor) -> bool:
    plain = type(target) is Tensor and target.layout is torch.strided and not target.is_nested
    return plain and target.dtype is torch.int64


def _classes_in(function: Any, seen: set[tuple[int, int]]) -> Iterator[Any]:
    """The classes that a function, a module or an object with ``__call__`` ignores, and those of what it names."""
    key = id(getattr(function, "__func__", function)), id(getattr(function, "__self__", None))
    if key in seen or len(seen) == _MOST:
        return
    seen.add(key)
    if isinstance(function, partial):
        yield from [function.keywords[_NAME]] if _NAME in function.keywords else _classes_in(function.func, seen)
    elif type(own := inspect.getattr_static(function, _NAME, None)) is int:
        yield own
    elif isinstance(function, torch.nn.Module):
        for part in function.modules():
            yield getattr(part, _NAME, None)
            yield from _classes_in_code(type(part).forward, part, seen)
    elif inspect.isroutine(function):
        yield from _classes_in_code(function, getattr(function, "__self__", None), seen)
    else:
        yield from _classes_in_code(type(function).__call__, function, seen)


def _classes_in_code(function: Any, owner: Any, seen: set[tuple[int, int]]) -> Iterator[Any]:
    """What the calls in a function's code pass as ``ignore_index``, and the classes of the losses that it names.

    Args:
        function: The function; those of torch have no classes but those that they are given.
        owner: The object that it is a method of, or None.
        seen: What has been looked into.
    """
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(plain, FunctionType) or not is_users(plain):
        return
    codes = codes_of(plain)
    named = _named_in(plain)
    if owner is not None and plain.__code__.co_varnames:
        named[plain.__code__.co_varnames[0]] = owner
    for code in codes:
        yield from _given_in(code, named)
    for value in (*named.values(), *_attributes(owner, names_in(plain))):
        if callable(value) and not isinstance(value, type) and _is_near(value, plain):
            yield from _classes_in(value, seen)


def _is_near(value: Any, function: FunctionType) -> bool:
    """Whether something is a loss of torch, or of the package that a function is of; those of libraries are not looked into."""
    return package_of(value) in ("torch", "functools", package_of(function))


def _attributes(owner: Any, names: set[str]) -> Iterator[Any]:
    """The attributes of an object with these names, and its methods; no property is called."""
    for name in names:
        value = inspect.getattr_static(owner, name, None)
        yield value.__get__(owner) if isinstance(value, FunctionType) else value


def _named_in(function: Any) -> dict[str, Any]:
    """What the names in a function stand for: globals, what it closes over, and the defaults of its parameters."""
    outside = inspect.getclosurevars(function)
    defaults = {name: one.default for name, one in inspect.signature(function).parameters.items()}
    return {**outside.globals, **outside.nonlocals, **defaults}


def _given_in(code: CodeType, named: Mapping[str, Any]) -> Iterator[Any]:
    """The values of the keyword in the calls of some code, as far as they can be read there."""
    steps = [one for one in dis.get_instructions(code) if one.opname not in _BETWEEN]
    for place, step in enumerate(steps):
        is_call = step.opname in ("KW_NAMES", "LOAD_CONST")  # or some other tuple, without the name
        keywords = code.co_consts[step.arg] if is_call and step.arg is not None else None
        if isinstance(keywords, tuple) and _NAME in keywords:
            after = len(keywords) - keywords.index(_NAME) - 1
            yield from islice(_loaded(steps[:place], named), after, after + 1)


def _loaded(steps: Sequence[dis.Instruction], named: Mapping[str, Any]) -> Iterator[Any]:
    """The values that the last instructions load, from the last: constants, known names, and attributes of these."""
    attributes: list[str] = []
    for step in reversed(steps):
        if step.opname == "LOAD_ATTR":
            attributes.insert(0, step.argval)
        elif step.opname.startswith("LOAD_"):
            value = step.argval if step.opname in _VALUES else named.get(step.argval)
            yield reduce(lambda item, name: getattr(item, name, None), attributes, value)
            attributes = []
        else:
            return
