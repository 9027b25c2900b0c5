"""Updates, as several handlers need them: which ones are meant, and whether one made its step. Not a handler."""

from __future__ import annotations

from collections.abc import Sequence

from signalfire import Engine, Handler, Interval, UpdateState

__all__ = ["made_step", "only_update", "updates_meant"]


def updates_meant(engine: Engine, name: str | None) -> Sequence[UpdateState]:
    """The update of this name; all of them for None."""
    return engine.updates if name is None else (engine.find_update(name),)


def only_update(engine: Engine, name: str | None, *, by: Handler, does: str) -> UpdateState:
    """The update of this name; for None the engine's only one.

    Args:
        engine: the engine.
        name: the update's name.
        by: the handler that asks.
        does: what the update is or does there, for the error: "is measured".

    Raises:
        ValueError: if there are several to choose from.
    """
    if name is None and len(engine.updates) > 1:
        names = ", ".join(update.name for update in engine.updates)
        raise ValueError(f"{by.name!r}: there are several updates ({names}); say with update= which one {does}")
    return engine.find_update(name)


def made_step(engine: Engine, name: str | None, every: Interval) -> bool:
    """Whether the update at work is the one of this name, or for None the first, and made the last of so many steps."""
    update = engine.state.update
    meant = update is engine.updates[0] if name is None else update.name == name
    return meant and update.skipped is None and update.steps % int(every.value) == 0
