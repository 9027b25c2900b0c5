"""Handlers that write files and were made, but are attached to no engine: what they should save is lost without a word.

Such a handler is reported as the process ends, if it was there when a run ended and was never attached.
"""

from __future__ import annotations

import atexit
import os
import warnings

from ..core.handler import Made, made
from .reports import FindingWarning, finding

__all__ = ["note_run", "report"]


_missed: list[Made] = []


def note_run() -> None:
    """Note, as a run that trains ends, which handlers it might have had."""
    if not _missed and made:
        atexit.register(report)
    _missed.extend(one for one in made.values() if one not in _missed)


def report() -> None:
    """Report the handlers that were there when a run ended and were never attached."""
    missed, _missed[:] = _missed[:], []
    for one in missed:
        if not one.attached and one.process == os.getpid():
            found = finding(
                "W39",
                f"a {one.kind} was created here but never attached to an engine, so it wrote nothing",
                "engine.attach(handler)",
            )
            warnings.warn_explicit(FindingWarning(found), None, one.file, one.line)
