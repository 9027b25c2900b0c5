"""The parts of an engine that decide what a run comes to: handlers, updates and modules."""

from __future__ import annotations

import functools
import hashlib
import os
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields

import torch

from signalfire import Engine, Handler, Update

from .contents import Content, are_times, contents

__all__ = ["digests_of_parts", "parts_of", "writes_or_shows"]

_NOT_ARGUMENTS = {"_enabled", "_initial"}
_MADE_OF_VALUES = (Update, functools.partial, types.FunctionType, types.MethodType, torch.optim.Optimizer)
"""What is the same in each call of build if its values are; other objects may count how often they are used."""

_COMPARED_ELSEWHERE = ("a generator ", "a torch.Generator ", "Tensor ", "Parameter ", "ndarray ")


def writes_or_shows(handler: Handler) -> bool:
    """Whether a handler writes files or shows something and has no effect on the training."""
    return handler.writes or handler.rank_zero_only


def parts_of(engine: Engine) -> dict[str, tuple[object, ...]]:
    """Each handler that affects the training, each update and each module, by what it is, with what it is made of."""
    found: dict[str, tuple[object, ...]] = {"options": (engine.streams, engine.training)}
    for name, handler in engine.handlers.items():
        if handler.enabled and not writes_or_shows(handler):
            found[f"handler {name!r}"] = (type(handler), _state(handler))
    for update in engine.updates:
        spec = update.spec
        found[f"update {update.name!r}"] = tuple(getattr(spec, one.name) for one in fields(spec))
    for name, module in engine.modules.items():
        found[f"module {name!r}"] = (module,)
    return found


def _state(handler: Handler) -> dict[str, object]:
    return {name: value for name, value in sorted(handler.__getstate__().items()) if name not in _NOT_ARGUMENTS}


def digests_of_parts(engine: Engine, run: object) -> dict[str, str]:
    """Digests of what ``build`` made, which are the same for all runs of a seed; of paths, generators and tensors there are none.

    Args:
        engine: The engine, before a variant changes it.
        run: The function that runs it.
    """
    updates = contents({f"update {one.name!r}": one.spec for one in engine.updates}, through=_MADE_OF_VALUES)
    runs = contents({"run": run}, through=(functools.partial, types.MethodType))
    return {
        "handlers": _digest(_of_handlers(engine)),
        "updates": _digest(_values_in(updates)),
        "run functions": _digest(_values_in(runs)),
    }


def _of_handlers(engine: Engine) -> Iterator[object]:
    for name, handler in sorted(engine.handlers.items()):
        if not writes_or_shows(handler):
            settings = {key: value for key, value in handler.settings().items() if not os.path.isabs(str(value))}
            yield name, type(handler).__qualname__, handler.enabled, settings


def _values_in(found: Mapping[str, Content]) -> Iterator[object]:
    for name, content in found.items():
        if isinstance(content.thing, _MADE_OF_VALUES):
            yield from ((name, key, text) for key, text in content.values.items() if not _varies(key, text))
        else:
            yield name, content.values["type"]


def _varies(key: str, text: str) -> bool:
    """Whether a value may be another one in each call, such as a time or what is recorded, or is compared elsewhere."""
    is_recorded = key.startswith("variable ") and ("[" in key or " of length " in text)
    return is_recorded or text.startswith(_COMPARED_ELSEWHERE) or are_times(text)


def _digest(values: Iterable[object]) -> str:
    return hashlib.sha256(repr(list(values)).encode()).hexdigest()[:16]
