"""Handlers that write files and were made, but are attached to no engine: what they should save is lost without a word.

Such a handler is reported as the process ends, if it was there when a run ended and was never attached.
"""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from dataclasses import dataclass

from ..blame import place_of_user
from .reports import FindingWarning, finding

__all__ = ["note_attached", "note_made", "note_run", "report"]


@dataclass
class _Made:
    """A handler that was made: of which class, and by which line of the user's code."""

    kind: str
    file: str
    line: int
    process: int
    attached: bool = False


_made: weakref.WeakKeyDictionary[object, _Made] = weakref.WeakKeyDictionary()
_missed: list[_Made] = []


def note_made(handler: object) -> None:
    """Note a handler that writes files, as it is made."""
    _made[handler] = _Made(type(handler).__name__, *place_of_user(), os.getpid())


def note_attached(handler: object) -> None:
    """Note that a handler was attached; it is not looked at any more."""
    if (made := _made.pop(handler, None)) is not None:
        made.attached = True


def note_run() -> None:
    """Note, as a run that trains ends, which handlers it might have had."""
    if not _missed and _made:
        atexit.register(report)
    _missed.extend(made for made in _made.values() if made not in _missed)


def report() -> None:
    """Report the handlers that were there when a run ended and were never attached."""
    missed, _missed[:] = _missed[:], []
    for made in missed:
        if not made.attached and made.process == os.getpid():
            found = finding(
                "W39",
                f"a {made.kind} was made here and never attached to an engine, so that it has written nothing",
                "engine.attach(handler)",
            )
            warnings.warn_explicit(FindingWarning(found), None, made.file, made.line)
