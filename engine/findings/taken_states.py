"""What is looked at in the states that a run takes: whether they can be loaded, and what they lack."""

from __future__ import annotations

import io
import pickle
import pkgutil
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ..resuming.keys import UNSAVED
from ..resuming.saving import copied
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
            _report_unloadable(engine, state)

    def end_run(self) -> None:
        """Try a state of the next run again; the values stay those of this run until its first forward."""
        self._tried = False


def _report_unloadable(engine: Engine, state: Mapping[str, Any]) -> None:
    """Report what ``torch.load(weights_only=True)`` refuses in a state, with the place of the first such object.

    Args:
        engine: The engine.
        state: Its state; tensors are left out of what is tried.
    """
    content = io.BytesIO()
    try:
        written = {key: value for key, value in state.items() if key != UNSAVED}
        torch.save(copied(written, lambda tensor: torch.empty(0)), content)
    except (pickle.PicklingError, AttributeError, TypeError):
        return  # whoever writes the state gets this error
    content.seek(0)
    if refused := sorted(get_unsafe_globals_in_checkpoint(content)):
        engine.remark(
            "W47",
            f"the state holds a {_first_of(state, refused)}, which torch.load rejects, so no run can resume from this state",
            f"if you trust {', '.join(refused)}, pass it to torch.serialization.add_safe_globals before the run, and "
            "again before resuming"
            if _loads(content, refused)
            else "use only lists, tuples, dicts, numbers, strings and tensors",
            key="unloadable",
        )


def _first_of(state: Mapping[str, Any], refused: list[str]) -> str:
    """The first refused object of a state: its type and its place, or a type if the place is not found."""
    own = [name for name in refused if not name.startswith("builtins.")]  # of these, only the classes are refused
    found = (f"{kind} ({place})" for place, kind in _types(state) if kind in own)
    return next(found, (own or refused)[0])


def _loads(content: io.BytesIO, refused: list[str]) -> bool:
    """Whether a state can be loaded once these types are declared safe."""
    content.seek(0)
    with safe_globals([pkgutil.resolve_name(name) for name in refused]):
        try:
            torch.load(content, weights_only=True)
        except pickle.UnpicklingError:
            return False
    return True


def _types(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """The places in a state, and the types of what is there."""
    yield place, f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _types(item, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _types(item, f"{place}[{number}]")
