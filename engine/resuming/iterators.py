"""Where an iterator is, such as an `itertools.count` that a forward draws from, and how it is put back.

Iterators of Python and itertools tell their position by ``__reduce__``, except for generators, and for those of itertools from
Python 3.14 on.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Hashable, Iterator
from typing import Any

from ..core.blame import warn

__all__ = ["Position", "is_iterator", "place_of"]

_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_MOST = 100  # items of a tuple that may be iterators; a longer one is data


def is_iterator(value: Any) -> bool:
    """Whether it is an iterator of Python or itertools, or a generator; other iterators are files or objects of the user."""
    return type(value).__module__ in ("builtins", "itertools") and isinstance(value, Iterator)


def place_of(iterator: Any) -> Hashable:
    """A hashable mark of the position of an iterator, which changes when it is advanced; None if its position is not known.

    Example:
        >>> steps = iter("abc")
        >>> before = place_of(steps)
        >>> before == place_of(steps), next(steps), before == place_of(steps)
        (True, 'a', False)
    """
    if isinstance(iterator, types.GeneratorType):
        if (frame := iterator.gi_frame) is None:
            return "ended"
        return frame.f_lasti, tuple(_mark(value) for value in frame.f_locals.values())
    try:
        return type(iterator).__name__, *map(_mark, _parts_of(iterator))
    except TypeError:
        return None


class Position:
    """Where an iterator is now.

    Args:
        iterator: An iterator of which `is_iterator` is true.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._place = place_of(iterator)
        self._copy = _copy_of(iterator)

    def restored(self) -> Any:
        """The iterator itself if it has not been advanced, else a copy at its earlier position, if there can be one.

        Warns:
            UserWarning: If it has been advanced, and cannot be put back.
        """
        if self._place == place_of(self._iterator):
            return self._iterator
        if self._copy is not None:
            return _copy_of(self._copy)
        name = getattr(self._iterator, "__qualname__", "")
        warn(
            f"the {type(self._iterator).__name__}{f' {name!r}' * bool(name)} that a module or function uses cannot go "
            "back: it continues from its current position, so the next iterations may differ. Count in an attribute "
            "instead, or use itertools.count()"
        )
        return self._iterator


def _parts_of(iterator: Any) -> tuple[Any, ...]:
    """What an iterator is made with and set to: a callable, its arguments, and a state where it has one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # since Python 3.12 for those of itertools
        return tuple(iterator.__reduce__())


def _mark(value: Any) -> Hashable:
    """A mark of a part, without what iterators do not change: their data and their functions."""
    if type(value) in (*_ATOMS, range):
        return repr(value)
    if is_iterator(value):
        return place_of(value)
    if isinstance(value, tuple) and len(value) <= _MOST:
        return tuple(map(_mark, value))
    return len(value) if isinstance(value, list) else type(value).__name__


def _copy_of(iterator: Any) -> Any:
    """An independent iterator at the same position, over the same data; None if there is no such iterator."""
    try:
        return _copied(iterator)
    except TypeError:
        return None


def _copied(iterator: Any) -> Any:
    make, arguments, *state = _parts_of(iterator)
    made = make(*map(_argument, arguments))
    for one in state:
        if one is not None:
            made.__setstate__(_own(one))
    return made


def _argument(value: Any) -> Any:
    """An argument of an iterator, which shares its data, and no iterator, also none of those that are chained."""
    if isinstance(value, tuple) and len(value) <= _MOST:
        return tuple(map(_argument, value))
    if not isinstance(value, Iterator):
        return value
    if not is_iterator(value):
        raise TypeError(f"{type(value).__name__} has no position")
    return _copied(value)


def _own(state: Any) -> Any:
    """A state that an iterator may change."""
    if isinstance(state, tuple):
        return tuple(map(_own, state))
    return list(state) if isinstance(state, list) else _argument(state)
