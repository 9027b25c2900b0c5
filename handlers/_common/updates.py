"""Helpers for updates: select them by name, and ask whether one made its step."""

from __future__ import annotations

from collections.abc import Sequence

from signalfire import Engine, Handler, Interval, UpdateState

__all__ = ["made_step", "only_update", "selected_updates"]


def selected_updates(engine: Engine, name: str | None) -> Sequence[UpdateState]:
    """The update of this name, as a sequence of one; all updates for None."""
    return engine.updates if name is None else (engine.find_update(name),)


def only_update(engine: Engine, name: str | None, *, by: Handler, does: str) -> UpdateState:
    """The update of this name; for None the engine's only one.

    Args:
        engine: The engine.
        name: Name of the update.
        by: The handler, for the error.
        does: What the handler does with the update, for the error: "is measured".

    Raises:
        ValueError: If no name is given and the engine has several updates.
    """
    if name is None and len(engine.updates) > 1:
        names = ", ".join(update.name for update in engine.updates)
        raise ValueError(f"{by.name!r}: the engine has several updates ({names}); give update=, the one that {does}")
    return engine.find_update(name)


def made_step(engine: Engine, name: str | None, every: Interval) -> bool:
    """Whether the current update has this name (None: is the first), and its step was a multiple of ``every``."""
    update = engine.state.update
    meant = update is engine.updates[0] if name is None else update.name == name
    return meant and update.skipped is None and update.steps % int(every.value) == 0
