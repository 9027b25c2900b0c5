"""Random number generators that a data set, transform or sampler holds: their states belong to the position in the data."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .loading import generators_of, is_plain

__all__ = ["HeldGenerators", "draws_in_workers", "held_generators", "set_state", "state_of"]

_KINDS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_ATOMS = (str, bytes, int, float, bool, complex, np.ndarray, np.generic, Tensor, type(None), type, ModuleType)
_MOST_OBJECTS, _MOST_ITEMS, _DEPTH = 1000, 50, 8
_CALLED = ("__getitem__", "__getitems__", "__iter__", "__call__", "forward")


def held_generators(data: Any, *, fetching: bool = False) -> dict[str, Any]:
    """The generators that data holds by where they are, such as ``dataset.transform.rng``, apart from a DataLoader's own.

    Attributes, containers, closures and the globals that are named where samples are fetched are searched, up to a bounded depth.

    Args:
        data: The data, or None.
        fetching: Whether to leave out the samplers, so that only what draws while samples are fetched is found.
    """
    if is_plain(data) or isinstance(data, Iterator):
        return {}
    globals_ = (random.random.__self__, np.random.get_state.__self__, torch.default_generator)  # type: ignore[attr-defined]
    known = set(map(id, (*globals_, *generators_of(data))))
    found: dict[str, Any] = {}
    waiting = deque((where, item, 0) for where, item in _roots(data, fetching))
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_OBJECTS:
        where, item, depth = waiting.popleft()
        if isinstance(item, _ATOMS) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, _KINDS):
            if id(item) not in known:
                found[where] = item
        elif depth < _DEPTH:
            waiting += ((f"{where}{name}", inner, depth + 1) for name, inner in _inside(item))
    return found


def _roots(data: Any, fetching: bool) -> Iterator[tuple[str, Any]]:
    names = ("dataset", "collate_fn", *(() if fetching else ("sampler", "batch_sampler")))
    parts = [(name, part) for name in names if (part := getattr(data, name, None)) is not None]
    return iter(parts if isinstance(data, torch.utils.data.DataLoader) else [(type(data).__name__, data)])


def _inside(item: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, each with what is written to reach it."""
    if isinstance(item, Mapping):
        yield from ((f"[{key!r}]", inner) for key, inner in islice(item.items(), _MOST_ITEMS))
    elif isinstance(item, list | tuple | deque | set | frozenset):
        yield from ((f"[{place}]", inner) for place, inner in enumerate(islice(item, _MOST_ITEMS)))
    elif isinstance(item, partial):
        yield from ((f".{name}", getattr(item, name)) for name in ("func", "args", "keywords"))
    elif isinstance(item, MethodType | BuiltinMethodType):
        yield ".__self__", item.__self__
    elif isinstance(item, FunctionType):
        yield from _named_in(item)
    else:
        yield from ((f".{name}", inner) for name, inner in list(getattr(item, "__dict__", {}).items()))
        for kind in type(item).__mro__:
            yield from _inside_class(kind)


def _inside_class(kind: type) -> Iterator[tuple[str, Any]]:
    """The generators that a class holds, and its own functions that are called while samples are fetched."""
    own = vars(kind)
    yield from ((f".{name}", inner) for name, inner in list(own.items()) if isinstance(inner, _KINDS))
    if not kind.__module__.startswith(("torch.", "builtins")):
        called = (own[name] for name in _CALLED if isinstance(own.get(name), FunctionType))
        yield from ((f".{function.__name__}", function) for function in called)


def _named_in(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function closes over, and the generators among the globals that it names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f":{name}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    named = ((name, function.__globals__.get(name)) for name in function.__code__.co_names)
    yield from ((f":{name}", value) for name, value in named if isinstance(value, _KINDS))


def draws_in_workers(data: Any) -> bool:
    """Whether samples are fetched by worker processes, which get a copy of what the data holds."""
    workers = getattr(data, "num_workers", 0)
    return isinstance(workers, int) and workers > 0


class HeldGenerators:
    """The generators that data holds, and their states in a form that ``torch.load(weights_only=True)`` accepts."""

    def __init__(self, data: Any) -> None:
        self._found = held_generators(data)

    def __bool__(self) -> bool:
        return bool(self._found)

    def states(self) -> dict[str, Any]:
        """The states by where the generators are."""
        return {where: state_of(generator) for where, generator in self._found.items()}

    def put_back(self, states: Mapping[str, Any]) -> None:
        """Put back the states of those generators that are in the same place as when the states were taken."""
        for where, generator in self._found.items():
            if where in states:
                set_state(generator, states[where])


def state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return [version, np.array(words, "<u4").tobytes(), gauss]
    state = generator.get_state(legacy=False) if hasattr(generator, "get_state") else generator.bit_generator.state
    return _plain(state)


def set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        version, words, gauss = state
        generator.setstate((version, tuple(np.frombuffer(words, "<u4").tolist()), gauss))
    elif hasattr(generator, "set_state"):
        generator.set_state(_restored(state))
    else:
        generator.bit_generator.state = _restored(state)


def _plain(value: Any) -> Any:
    """NumPy's arrays and numbers in a state as plain values."""
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "bytes": value.tobytes()}
    if isinstance(value, np.generic):
        return value.item()
    return {key: _plain(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def _restored(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if set(value) == {"dtype", "bytes"}:
        return np.frombuffer(value["bytes"], value["dtype"]).copy()
    return {key: _restored(inner) for key, inner in value.items()}
