"""What is looked at in the states that a run takes: whether they can be loaded, and what they lack."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from ..resuming.keys import UNSAVED
from .unloadable import report_unloadable
from .unsaved import lacking, marks_of
from .unsaved_handlers import lacking_of_handlers, marks_of_handlers

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["UnsavedValues"]


class UnsavedValues:
    """Compares the values that no state holds, as they are after the first forward of a run, with those at its states."""

    def __init__(self) -> None:
        self._marks: dict[str, Hashable] = {}
        self._tried = False  # whether a state of this run was found to be one that can be loaded

    def note(self, engine: Engine) -> None:
        """Note the values, after the first forward."""
        self._marks = marks_of(engine) | marks_of_handlers(engine)

    def look(self, engine: Engine, state: dict[str, Any], at_once: bool) -> None:
        """Look at a state that was taken, on rank 0; what it lacks is reported once it goes to a file."""
        if not engine.processes.is_rank_zero:
            return
        if self._marks:
            found = [*lacking(engine, self._marks), *lacking_of_handlers(engine, self._marks)]
            if at_once:
                for one in found:
                    engine.findings.add(one, key=UNSAVED)
            else:
                state[UNSAVED].lacking = found
        if engine.running and not self._tried:  # the states of a run hold the same kinds of objects
            self._tried = True
            report_unloadable(engine, state)

    def end_run(self) -> None:
        """Try a state of the next run again; the values stay those of this run until its first forward."""
        self._tried = False
