"""Handlers that write files and were made, but are attached to no engine: what they should save is lost without a word.

Such a handler is reported as the process ends, if it was there when a run ended and was never attached.
"""

from __future__ import annotations

import atexit
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.handler import Handler, Made, made
from .reports import FindingWarning, finding

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["note_run", "report"]


_missed: list[Made] = []


def note_run(engine: Engine) -> None:
    """Note, as a run that trains ends, which handlers it might have had, and had none like it, such as a copy."""
    attached = [_settings_of(one) for one in engine.handlers.values()]
    found = [one for handler, one in made.items() if _settings_of(handler) not in attached]
    if not _missed and found:
        atexit.register(report)
    _missed.extend(one for one in found if one not in _missed)


def _settings_of(handler: Handler) -> tuple[Any, ...]:
    paths = {name: value for name, value in vars(handler).items() if isinstance(value, Path)}
    return type(handler), handler._arguments, paths


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
