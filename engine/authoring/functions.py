"""The functions that an engine calls: whose they are, and what their code names."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import pairwise
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = [
    "called_by",
    "code_of",
    "codes_of",
    "held_by",
    "is_users",
    "may_log",
    "names_in",
    "names_reached",
    "package_of",
    "plain_function",
    "returns_none",
    "variables_of",
]

_JUMPS = {*dis.hasjrel, *dis.hasjabs}


def is_users(function: Any) -> bool:
    """Whether a function, or the class of a callable object, is neither of torch nor of this package.

    Example:
        >>> import torch
        >>> is_users(torch.nn.functional.mse_loss), is_users(max)
        (False, True)
    """
    function = getattr(function, "func", function)
    module = getattr(function, "__module__", None) or type(function).__module__
    return not str(module).startswith(("torch.", "signalfire."))


def package_of(thing: Any) -> str:
    """The name of the package that defines a class or a function, or the class of an object.

    Example:
        >>> import torch
        >>> package_of(torch.nn.Linear), package_of(torch.nn.functional.mse_loss), package_of(1.0)
        ('torch', 'torch', 'builtins')
    """
    return str(getattr(thing, "__module__", None) or type(thing).__module__).partition(".")[0]


def code_of(function: Any) -> CodeType | None:
    """The code of a function or a method; None for what has none, such as a builtin."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code if isinstance(code, CodeType) else None


def codes_of(*functions: Any) -> list[CodeType]:
    """The code of functions, and of those inside them."""
    codes = [code for one in functions if (code := code_of(one)) is not None]
    for one in codes:  # grows meanwhile
        codes += [inner for inner in one.co_consts if isinstance(inner, CodeType)]
    return codes


def names_in(function: Any) -> set[str]:
    """The names that a function uses, also in functions inside it."""
    return {name for one in codes_of(function) for name in one.co_names}


def variables_of(function: Any) -> dict[str, Any]:
    """The variables outside of a function that it uses, as far as they have a value; empty for what is no function."""
    own = _unwrapped(getattr(function, "__func__", function))
    if not isinstance(own, FunctionType):
        return {}
    found = {name: own.__globals__[name] for name in own.__code__.co_names if name in own.__globals__}
    for name, cell in zip(own.__code__.co_freevars, own.__closure__ or (), strict=True):
        with suppress(ValueError):  # it has no value yet
            found[name] = cell.cell_contents
    return found


def held_by(receiver: Any) -> list[Any]:
    """What a receiver holds: variables outside of it, arguments of a partial function, attributes of its object."""
    if isinstance(receiver, partial):
        return [*receiver.args, *receiver.keywords.values(), *held_by(receiver.func)]
    owner = None if isinstance(receiver, FunctionType) else getattr(receiver, "__self__", receiver)
    return [*getattr(owner, "__dict__", {}).values(), *variables_of(receiver).values()]


def plain_function(function: Any) -> Any:
    """The function behind a decorator, a partial function, a module or another object that can be called."""
    while isinstance(function, partial):
        function = function.func
    if code_of(function) is None and not isinstance(function, type):
        call = type(function).__call__ if callable(function) else function
        function = getattr(type(function), "forward", None) or call
    return _unwrapped(function)


def _unwrapped(function: Any) -> Any:
    """The function behind decorators; `inspect.unwrap` would ask objects that answer for every attribute."""
    while "__wrapped__" in getattr(function, "__dict__", {}):
        function = function.__dict__["__wrapped__"]
    return function


def names_reached(function: Any) -> set[str]:
    """The names that a function uses, and those of the user's functions that it calls.

    These are variables outside of it, such as helpers, functions of modules, and methods of its object and of others that it
    uses. Of a partial function, a module or another object that can be called, they are those of the function behind it.
    """
    own = plain_function(function)
    names, values = names_in(own), variables_of(own).values()
    places = [place for one in (getattr(function, "__self__", function), *values) for place in _definitions(one)]
    helpers = [*values, *(place[name] for place in places for name in names if name in place)]
    return names.union(*(names_in(one) for one in helpers if isinstance(one, FunctionType) and is_users(one)))


def _definitions(holder: Any) -> list[Mapping[str, Any]]:
    """What a module defines, or the classes of an object that are the user's."""
    if isinstance(holder, ModuleType):
        return [vars(holder)]
    return [vars(base) for base in type(holder).__mro__ if base.__module__ != "builtins" and is_users(base)]


def returns_none(function: Any) -> list[bool]:
    """Of each place at which a function returns, whether it is the constant None that it returns; empty for what has no code.

    Example:
        >>> (
        ...     returns_none(lambda batch: batch if len(batch) else None),
        ...     returns_none(lambda batch: None),
        ... )
        ([False, True], [True])
    """
    if (code := code_of(function)) is None or code.co_flags & inspect.CO_GENERATOR:
        return []
    steps = list(dis.get_instructions(code))
    ends = {one.offset for one in steps if one.opname == "RETURN_VALUE"}
    ends |= {one.offset for one in steps if one.opcode in _JUMPS and one.argval in ends}
    values = [one for one, after in pairwise(steps) if after.offset in ends]
    values += [one for one in steps if one.opname == "RETURN_CONST"]
    return [one.opname.endswith("_CONST") and one.argval is None for one in values]


def called_by(engine: Engine) -> Iterator[Any]:
    """The functions that an engine calls for its updates: steps, forwards and losses, and the forwards of its modules."""
    yield from _of_updates(engine)
    for update in engine.updates:
        if (loss := getattr(update.spec.loss, "loss", None)) is not None:  # of `Update.supervised`
            yield loss
    for root in engine.modules.values():
        forwards = (getattr(type(part), "forward", None) for part in root.modules())
        yield from (one for one in forwards if one is not None)  # those of scripted modules are hidden


def may_log(engine: Engine) -> bool:
    """Whether what an engine calls may write metrics: the user's steps and forwards, and losses and modules that name them."""
    if any(map(is_users, _of_updates(engine))):
        return True
    return any(is_users(one) and {"log", "metrics"} & names_reached(one) for one in called_by(engine))


def _of_updates(engine: Engine) -> Iterable[Any]:
    functions = (one for of in engine.updates for one in (of.spec.function, of.spec.forward, of.spec.loss))
    return (one for one in functions if one is not None)
