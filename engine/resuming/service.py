"""The service of an engine by which its runs resume: from a loaded state, or where an error has ended the run before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.connection import Phase
from ..core.events import Events, Lifecycle
from ..core.handler import Service, on

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["Resuming"]

_FIRST, _LAST = -(10**9), 10**9


class Resuming(Service):
    """Calls `Snapshots` and `Unfinished` at the moments of a run."""

    essential = True

    def __init__(self) -> None:
        super().__init__(name="resuming")

    _was_loaded = False

    @on(Lifecycle.RUN_BEGAN)
    def begin_run(self, engine: Engine) -> None:
        """Let the run begin as if no weights were loaded yet."""
        engine.snapshots.drop()
        engine.snapshots.begin_run()
        self._was_loaded = False

    @on(Lifecycle.DATA_CHANGED)
    def forget_past(self, engine: Engine) -> None:
        """Forget earlier states: they are those of a run over other data."""
        engine.past.reset()

    @on(Events.MODEL_SETUP, phase=Phase.PREPARE, rank=_FIRST)
    def accept(self, engine: Engine) -> None:
        """From here on, a state may be loaded."""
        engine.snapshots.accept(True)

    @on(Events.MODEL_SETUP, phase=Phase.PERSIST, rank=_LAST)
    def refuse(self, engine: Engine) -> None:
        """From here on, it may not."""
        engine.snapshots.accept(False)

    @on(Lifecycle.LOADING)
    def load(self, engine: Engine) -> None:
        """Put a loaded state in place."""
        self._was_loaded = engine.snapshots.apply_loaded()

    @on(Lifecycle.CONTINUING)
    def ask_again(self, engine: Engine) -> None:
        """Ask again for what an error has kept from taking effect."""
        assert engine.current_run is not None
        engine.unfinished.begin_run()
        engine.current_run.completes = engine.unfinished.is_due

    @on(Lifecycle.READY)
    def announce(self, engine: Engine) -> None:
        """Emit that a state was loaded."""
        if self._was_loaded:
            engine.signals.emit(engine, Events.CHECKPOINT_LOADED)

    @on(Lifecycle.READY, rank=_LAST + 1)
    def complete(self, engine: Engine) -> None:
        """Complete an event that an error has cut short."""
        engine.unfinished.complete(Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED)

    @on(Lifecycle.EPOCH_BEGAN, rank=-1)
    def complete_start(self, engine: Engine, resumed: bool) -> None:
        """Complete the start of an epoch that is continued."""
        if resumed:
            engine.unfinished.complete(Events.EPOCH_STARTED)

    @on(Lifecycle.RUN_FAILED)
    def note_error(self, engine: Engine, error: BaseException, in_updates: bool, made: int) -> None:
        """Note what an error leaves undone."""
        engine.snapshots.accept(False)
        engine.unfinished.note(error, in_updates=in_updates, made=made)

    @on(Lifecycle.CLOSED)
    def end_run(self, engine: Engine) -> None:
        """Free what the run has kept."""
        engine.snapshots.end_run()
