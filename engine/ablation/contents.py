"""What an engine holds, thing by thing: two calls of ``build`` are compared by it, and a shared thing before and after a run."""

from __future__ import annotations

import enum
import functools
import hashlib
import os
import random
import re
import time
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from signalfire import Engine, Handler, Update
from signalfire.data.held_generators import state_of
from signalfire.resuming.changeable import ATOMS, GENERATORS

from .bytecode import instructions

__all__ = ["Content", "are_times", "contents", "digest_of", "joined"]

_MOST = 2**16  # elements of a tensor that are compared
_MOST_ITEMS, _MOST_THINGS = 1000, 20_000
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)
_OF_MODULES = frozenset(vars(nn.Module()))
_OF_HANDLERS = {"_arguments", "_initial", "_enabled", "_engine", "engine"}
_OF_LOADERS = ("batch_size", "drop_last", "num_workers", "dataset", "sampler", "batch_sampler", "generator")


class Content(NamedTuple):
    """A thing, and the plain values that it holds itself.

    Attributes:
        thing: The thing.
        values: The text of each value, by where it is, such as ``max_norm`` or ``milestones[0]``.
        containers: The lists, mappings and other containers that it holds, by where they are.
    """

    thing: Any
    values: dict[str, str]
    containers: dict[str, Any]


def contents(roots: Mapping[str, Any], *, through: tuple[type, ...] = (object,)) -> dict[str, Content]:
    """The things that can be reached from some, by how they are reached; nothing is read from a data set.

    Args:
        roots: What to begin with, by name.
        through: Classes of the things that are gone through, to what they hold; others are reached only.
    """
    found: dict[str, Content] = {}
    seen: set[int] = set()
    waiting = deque(roots.items())
    while waiting and len(found) < _MOST_THINGS:
        name, thing = waiting.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        content = found[name] = Content(thing, {"type": _name_of(type(thing))}, {})
        for key, value in _held_by(thing):
            held = [(joined(name, inner), one) for inner, one in _noted(content, key, value)]
            waiting += held if isinstance(thing, through) else ()
    return found


def joined(name: str, key: str) -> str:
    """Where a value is, by the name of the thing that holds it."""
    return f"{name}{key}" if key.startswith("[") or not key else f"{name}.{key}"


def _noted(content: Content, key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Note a plain value, and those in a container; yield the things of their own."""
    text = _text(value)
    if text is not None:
        content.values[key] = text
    elif type(value) in _CONTAINERS:
        content.containers[key] = value
        content.values[key] = f"a {type(value).__name__} of length {len(value)}"
        if len(value) <= _MOST_ITEMS:
            for place, one in _items(value):
                yield from _noted(content, f"{key}[{place}]", one)
    else:
        yield key, value


def _items(container: Any) -> list[tuple[str, Any]]:
    if isinstance(container, dict):
        return [
            (repr(key) if isinstance(key, ATOMS) else str(place), one)
            for place, (key, one) in enumerate(container.items())
        ]
    if isinstance(container, set | frozenset):
        return [(one, one) for one in sorted(repr(one) for one in container if isinstance(one, ATOMS))]
    return [(str(place), one) for place, one in enumerate(container)]


def _held_by(thing: Any) -> Iterable[tuple[str, Any]]:
    """What a thing holds, by name."""
    for kind, held in _HELD:
        if isinstance(thing, kind):
            return held(thing)
    return [("", thing)] if type(thing) in _CONTAINERS else list(getattr(thing, "__dict__", {}).items())


def _held_by_engine(engine: Engine) -> Iterator[tuple[str, Any]]:
    yield from (("streams", engine.streams), ("training", engine.training))
    yield from ((f"handler {name!r}", one) for name, one in engine.handlers.items())
    yield from ((f"update {one.name!r}", one.spec) for one in engine.updates)
    yield from ((f"module {name!r}", one) for name, one in engine.modules.items())


def _held_by_handler(handler: Handler) -> Iterator[tuple[str, Any]]:
    yield "enabled", handler.enabled
    yield from ((name, one) for name, one in vars(handler).items() if name not in _OF_HANDLERS)


def _held_by_module(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield "training", module.training
    yield from ((f"({name})", one) for name, one in (module._parameters | module._buffers).items())
    yield from module._modules.items()
    yield from ((name, one) for name, one in list(vars(module).items()) if name not in _OF_MODULES)


def _held_by_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    for place, group in enumerate(optimizer.param_groups):
        yield from ((f"group {place}: {name}", one) for name, one in group.items() if name != "params")


def _held_by_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = re.sub("0x[0-9a-f]+", "", repr(instructions(function.__code__)))  # without the addresses of inner functions
    yield "code", hashlib.sha256(code.encode()).hexdigest()
    yield from (("defaults", function.__defaults__), ("keyword defaults", function.__kwdefaults__))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"variable {name!r}", cell.cell_contents
        except ValueError:  # it is not set
            continue


_HELD: tuple[tuple[type, Callable[[Any], Iterable[tuple[str, Any]]]], ...] = (
    (Engine, _held_by_engine),
    (Handler, _held_by_handler),
    (nn.Module, _held_by_module),
    (torch.optim.Optimizer, _held_by_optimizer),
    (Update, lambda update: ((one.name, getattr(update, one.name)) for one in fields(update))),
    (DataLoader, lambda loader: ((name, getattr(loader, name)) for name in _OF_LOADERS)),
    (functools.partial, lambda one: (("func", one.func), ("args", one.args), ("keywords", one.keywords))),
    (types.MethodType, lambda one: (("func", one.__func__), ("self", one.__self__))),
    (types.FunctionType, _held_by_function),
)


def _text(value: Any) -> str | None:
    """The text of a plain value, or of what a tensor or an array holds; None for a thing with values of its own."""
    if isinstance(value, str) and os.path.isabs(value):
        return "a path"  # such as that of a temporary folder, whose name differs in each call
    if isinstance(value, (*ATOMS, enum.Enum, torch.dtype, torch.device, torch.Size, slice, range)):
        return repr(value)
    if isinstance(value, os.PathLike):
        return "a path"
    if isinstance(value, type):
        return _name_of(value)
    if isinstance(value, Tensor | np.ndarray):
        return f"{type(value).__name__} {tuple(value.shape)} {value.dtype} {digest_of([value])}"
    if isinstance(value, GENERATORS):
        name = "torch.Generator" if isinstance(value, torch.Generator) else "generator"
        return "a global generator" if _is_global(value) else f"a {name} {digest_of([state_of(value)])}"
    if isinstance(value, types.FunctionType | functools.partial | types.MethodType | nn.Module):
        return None
    return None if type(value) in _CONTAINERS or hasattr(value, "__dict__") else f"a {_name_of(type(value))}"


def _is_global(generator: Any) -> bool:
    known = (random.random.__self__, np.random.get_state.__self__, torch.default_generator)  # type: ignore[attr-defined]
    return any(generator is one for one in known)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def digest_of(values: list[Any]) -> str:
    """A digest of plain values and of the beginnings of tensors and arrays."""
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            found.update(f"{value.dtype} {value.shape}".encode() + value.ravel()[:_MOST].tobytes())
        elif type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_meta:
            part = value.detach().flatten()[:_MOST].cpu().contiguous()
            found.update(f"{part.dtype} {tuple(value.shape)}".encode())
            found.update(part.view(torch.uint8).numpy().tobytes() if part.numel() else b"")
        elif not isinstance(value, Tensor | np.ndarray):
            found.update(repr(value).encode())
    return found.hexdigest()[:16]


def _clocks() -> tuple[float, ...]:
    return time.time(), time.monotonic(), time.perf_counter()


_BEGAN = _clocks()


def are_times(*texts: str | None) -> bool:
    """Whether values are times at which runs were built, which some note."""
    try:
        numbers = [float(text or "") for text in texts]
    except ValueError:
        return False
    return any(
        all(began <= number / unit <= now for number in numbers)
        for began, now in zip(_BEGAN, _clocks(), strict=True)
        for unit in (1.0, 1e9)
    )
