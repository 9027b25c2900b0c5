"""What handlers of the user carry from one event to the next, such as a counter, and no saved state holds.

An attribute counts if a method reads it and stores it, as in ``self.count += 1``. What is only stored, such as the last loss, is
repeated by the resumed run; what another method sets back, such as a sum over an epoch, is missing inside an epoch only. What
is only added to a list is a record that the training does not depend on, and a clock has another value anyway.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator
from functools import lru_cache
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.handler import Handler
from ..core.words import listed
from ..resuming.changeable import GENERATORS
from .reports import Finding, finding
from .unsaved import Code, mark_of

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["lacking_of_handlers", "marks_of_handlers"]

_CONTAINERS = (list, tuple, dict, set)
_MISSING = object()
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
    """Marks of the attributes that handlers of the user carry along and do not save, by "handler attribute"."""
    found: dict[str, Hashable] = {}
    for name, handler in engine.handlers.items():
        kind: Any = type(handler)
        names = _names_of(kind) if handler.enabled and not handler.writes else _Names()
        for key in sorted(names.read | names.carried):
            value = vars(handler).get(key, inspect.getattr_static(kind, key, _MISSING))  # no property is called
            in_place = isinstance(value, (*_CONTAINERS, *GENERATORS))
            if key in (names.read if in_place else names.carried) and (mark := mark_of(value)) is not None:
                found[f"{name} {key}"] = mark
    return found


def lacking_of_handlers(engine: Engine, before: dict[str, Hashable]) -> Iterator[Finding]:
    """The finding, for each handler, that a saved state lacks what it has changed since the first forward.

    What was made meanwhile takes its place in ``before``.
    """
    now = marks_of_handlers(engine)
    before.update({place: now[place] for place, mark in before.items() if place in now and _is_made(mark, now[place])})
    changed = [place.partition(" ")[::2] for place, mark in before.items() if place in now and now[place] != mark]
    for name in dict.fromkeys(name for name, _ in changed):
        kind: Any = type(engine.handlers[name])
        set_back = () if engine.state.epoch_open else _names_of(kind).set_back
        own = [key for owner, key in changed if owner == name and key not in set_back]
        if own:
            yield finding(
                "W47",
                f"{name!r} changes {listed(f'self.{key}' for key in own)}, but its state_dict() does not return "
                "these values, so unless a method sets them again, a resumed run starts without these changes and may "
                "differ",
                f"return these values from {kind.__name__}.state_dict(), and restore them in load_state_dict(); allow "
                "W47 if the results do not depend on these values",
                [name],
            )


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
def _names_of(kind: type[Handler]) -> _Names:
    """What the user's classes carry along; nothing for a class that saves a state of its own."""
    own = [
        base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("signalfire", "builtins", "typing")
    ]
    if any("state_dict" in vars(base) for base in own):
        return _Names()
    methods = {
        name: method
        for base in reversed(own)
        for name, method in vars(base).items()
        if isinstance(method, FunctionType) and name != "__init__"
    }
    codes = [
        Code(one.__code__, of=_first_of(one)) for one in methods.values() if not _CLOCKS & {*one.__code__.co_names}
    ]
    return _Names(
        frozenset().union(*(one.first_read & one.stored for one in codes)),
        frozenset().union(*(one.read for one in codes)),
        frozenset().union(*(one.stored - one.first_read for one in codes)),
    )


def _first_of(method: FunctionType) -> str:
    """The name that a method gives its object."""
    return str((method.__code__.co_varnames or ("self",))[0])
