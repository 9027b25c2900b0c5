"""What handlers of the user carry from one event to the next, such as a counter, and no saved state holds.

An attribute counts if a method reads it and stores it, as in ``self.count += 1``. What is only stored, such as the last loss, is
repeated by the resumed run; what another method sets back, such as a sum over an epoch, is missing inside an epoch only. What
is only added to a list is a record that the training does not depend on, and a clock has another value anyway.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Hashable, Iterator
from functools import lru_cache
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..authoring.functions import names_in
from ..core.handler import Handler
from ..core.words import listed
from ..resuming.changeable import GENERATORS
from .reports import Finding, finding
from .unsaved import Code, mark_of

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["lacking_of_handlers", "marks_of_handlers"]

_CONTAINERS = (list, tuple, dict, set, deque)
_MISSING = object()
_STATES = {"state_dict", "load_state_dict"}
_INDIRECT = {"__dict__", "vars", "getattr", "asdict", "copy", "deepcopy"}
"""Names with which a method may save all attributes."""
_CLOCKS = {"time", "perf_counter", "monotonic", "now"}


class _Names(NamedTuple):
    """Attributes of a class of handlers.

    Attributes:
        carried: Those that a method reads before it stores them.
        read: Those that a method reads, of which containers and generators change in place.
        set_back: Those that a method stores, or clears, and has not read before.
    """

    carried: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()
    set_back: frozenset[str] = frozenset()


def marks_of_handlers(engine: Engine) -> dict[str, Hashable]:
    """Marks of what handlers of the user carry along and do not save, by "handler attribute"."""
    found: dict[str, Hashable] = {}
    for name, handler in engine.handlers.items():
        if handler.enabled and not handler.writes:
            found |= {f"{name} {key}": mark for key, mark in _marks_in(handler)}
            for place, held in _held_by(handler):
                found |= {f"{name} {place}.{key}": mark for key, mark in _marks_in(held)}
    return found


def _marks_in(item: Any) -> Iterator[tuple[str, Hashable]]:
    """Marks of the attributes that an object carries along, by name."""
    kind: Any = type(item)
    names = _names_of(kind)
    for key in sorted(names.read | names.carried):
        value = vars(item).get(key, inspect.getattr_static(kind, key, _MISSING))  # no property is called
        in_place = isinstance(value, (*_CONTAINERS, *GENERATORS))
        if key in (names.read if in_place else names.carried) and (mark := mark_of(value)) is not None:
            yield key, mark


def _held_by(handler: Handler) -> Iterator[tuple[str, Any]]:
    """The objects that a handler made for itself, such as a meter, of classes in its own file; not those that it was given."""
    names = set().union(*(names_in(vars(base).get("__init__")) for base in type(handler).__mro__))
    for key, value in vars(handler).items():
        kind = type(value)
        own = kind.__module__ == type(handler).__module__ and kind.__name__ in names
        if own and hasattr(value, "__dict__") and not isinstance(value, Handler):
            yield key, value


def lacking_of_handlers(engine: Engine, before: dict[str, Hashable]) -> Iterator[Finding]:
    """The finding, for each handler, that a saved state lacks what it has changed since the first forward.

    What was made meanwhile takes its place in ``before``.
    """
    now = marks_of_handlers(engine)
    before.update({place: now[place] for place, mark in before.items() if place in now and _is_made(mark, now[place])})
    changed = [place.partition(" ")[::2] for place, mark in before.items() if place in now and now[place] != mark]
    for name in dict.fromkeys(name for name, _ in changed):
        kind: Any = type(engine.handlers[name])
        set_back = set() if engine.state.epoch_open else _set_back(engine.handlers[name])
        own = [key for owner, key in changed if owner == name and not {key, key.partition(".")[0]} & set_back]
        if own:
            yield finding(
                "W47",
                f"{name!r} changes {listed(f'self.{key}' for key in own)}, but its state_dict() does not return "
                "these values. Unless a method sets them again, a resumed run starts without these changes and may "
                "differ",
                f"return these values from {kind.__name__}.state_dict(), and restore them in load_state_dict(); allow "
                "W47 if the results do not depend on these values",
                [name],
            )


def _set_back(handler: Handler) -> set[str]:
    """The attributes that a method stores and has not read before, also those of an object that the handler holds."""
    kind: Any = type(handler)
    found = set(_names_of(kind).set_back)
    for place, held in _held_by(handler):
        kind = type(held)
        found |= {f"{place}.{key}" for key in _names_of(kind).set_back}
    return found


def _is_made(before: Any, now: Any) -> bool:
    """Whether a value was made once, as those of a cache are: it was None, or a dict or set that has lost and changed nothing."""
    if before == mark_of(None):
        return True
    if not isinstance(before, tuple) or before[0] != now[0] or before[0] not in ("dict", "set"):
        return False
    items = [
        set(zip(one[::2], one[1::2], strict=True)) if before[0] == "dict" else {*one} for one in (before[1], now[1])
    ]
    return items[0] <= items[1]


@lru_cache(maxsize=256)
def _names_of(kind: type) -> _Names:
    """What the user's classes carry along, without what their own states name; nothing where these may save anything."""
    methods = _methods_of(kind)
    saved = set().union(*(names_in(methods[name]) for name in _STATES & methods.keys()))
    if saved & (_INDIRECT | (methods.keys() - _STATES)):
        return _Names()
    others = [one for name, one in methods.items() if name not in _STATES]
    codes = [Code(one.__code__, of=_first_of(one)) for one in others if not _CLOCKS & {*one.__code__.co_names}]
    return _Names(
        frozenset().union(*(one.first_read & one.stored for one in codes)) - saved,
        frozenset().union(*(one.read for one in codes)) - saved,
        frozenset().union(*(one.stored - one.first_read for one in codes)),
    )


def _methods_of(kind: type) -> dict[str, FunctionType]:
    """The methods that classes of the user define, by name, but for ``__init__``."""
    own = [
        base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("signalfire", "builtins", "typing")
    ]
    defined = {name: method for base in reversed(own) for name, method in vars(base).items() if name != "__init__"}
    return {name: method for name, method in defined.items() if isinstance(method, FunctionType)}


def _first_of(method: FunctionType) -> str:
    """The name that a method gives its object."""
    return str((method.__code__.co_varnames or ("self",))[0])
