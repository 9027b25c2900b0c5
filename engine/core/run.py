"""One run: set-up, the loop, and cleaning up."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .blame import warn
from .boundary import discard_windows
from .events import Events, Lifecycle
from .loop import Loop
from .modes import Modes, set_modes
from .regions import note_problems
from .setup import build_optimizers, check_initialized, check_surroundings
from .words import as_int

if TYPE_CHECKING:
    from .kernel import Kernel

__all__ = ["Run"]


class Run:
    """One run of an engine.

    Args:
        engine: the engine; its state has the bounds.
        data: the batches, or None.
        epoch_length: iterations in an epoch; None for the data's own length.
        check: whether to check the composition if this is the engine's first run.
        given: the data before handlers changed it.

    Attributes:
        loop: its loop.
        running: whether handlers take part; False again once ENDED was emitted.
        over: whether no further iteration is made.
        checks: whether the composition is looked at.
        completes: whether it first completes an event of the run before.
    """

    def __init__(self, engine: Kernel, data: Any, epoch_length: int | None, *, check: bool, given: Any) -> None:
        engine.group.begin_run()
        self.engine = engine
        self.source = engine.feed.open(engine, data, as_int(epoch_length), given)
        self.running = False
        self.over = False
        self.checks = check
        self.completes = False
        self.loop = Loop(engine)

    def run(self) -> None:
        """Set up, iterate, clean up. An error leaves with the handler, event, epoch and iteration in its notes."""
        engine = self.engine
        check_surroundings(engine)
        engine.boundary.begin_run()
        engine.signals.notify(engine, Lifecycle.RUN_BEGAN)
        if not engine.training:
            engine.state.restart()
            engine.signals.forget_repeats()
        modes = Modes(engine.modules.values())
        error: BaseException | None = None
        self.running = True
        engine.regions.open()
        try:
            with torch.set_grad_enabled(engine.training):
                self.set_up()
                self.loop.iterate()
                self.over = True
                self.finish()
        except BaseException as caught:
            error, self.over = caught, True
            self.report(caught)
            raise
        finally:
            try:
                problems = self.clean_up(error, modes)
            finally:
                self.running = False
                engine.boundary.end_run()
            note_problems(problems, error)
            del error, problems

    def set_up(self) -> None:
        """Emit what comes before the first epoch, build the optimizers, and put a loaded state in place."""
        engine, state = self.engine, self.engine.state
        if not engine.feed.begin_run(self.source, training=engine.training):
            engine.signals.notify(engine, Lifecycle.DATA_CHANGED)
        set_modes(engine)
        engine.signals.rewind(engine)
        engine.signals.emit(engine, Events.MODEL_SETUP)
        check_initialized(engine, "run()")
        engine.signals.emit(engine, Events.OPTIMIZER_SETUP)
        build_optimizers(engine)
        engine.signals.notify(engine, Lifecycle.BUILT)
        for update in engine.updates:
            update.omitted_in = 0
            if update.window.filled == 0:
                update.discard()
        engine.signals.emit(engine, Events.STARTED)
        engine.signals.notify(engine, Lifecycle.LOADING)
        engine.handlers.give_held_states()
        engine.boundary.reconsider_stop()
        engine.signals.notify(engine, Lifecycle.CONTINUING)
        if engine.boundary.limit_reached() and not self.completes and not engine.feed.only_its_end_is_missing():
            warn(
                f"run(): nothing to do, because {engine.boundary.why_ended()} at epoch {state.epoch}, iteration "
                f"{state.iteration}. Pass larger bounds to continue, or call engine.reset() to start a new run",
            )
        engine.signals.notify(engine, Lifecycle.READY)
        ended = engine.boundary.stops and engine.feed.only_its_end_is_missing()
        if not ended:  # else a stop that was asked for in the last iteration waits for the end of its epoch
            self.loop.attend(together=engine.training and not state.epoch_open)
        engine.signals.notify(engine, Lifecycle.STARTING)

    def finish(self) -> None:
        """Emit what comes after the last epoch."""
        engine = self.engine
        engine.signals.notify(engine, Lifecycle.FINISHING)
        if engine.state.stop_reason is not None:
            engine.signals.emit(engine, Events.TERMINATED)
        engine.signals.emit(engine, Events.COMPLETED)

    def report(self, error: BaseException) -> None:
        """Emit EXCEPTION_RAISED or INTERRUPTED to all of its receivers, also if one of them fails."""
        engine, state = self.engine, self.engine.state
        in_updates = self.loop.in_updates
        self.loop.give_back_position()
        try:
            engine.signals.notify(engine, Lifecycle.RUN_FAILED, error, in_updates, self.loop.made)
        except BaseException as problem:
            note_problems([problem], error)
        if in_updates or not engine.group.alone:
            discard_windows(engine)
        for update in engine.updates:
            update.end_micro_step()
        if not getattr(error, "__notes__", None):
            begun = f"in epoch {state.epoch}, after the start of iteration {state.iteration}"
            error.add_note(begun if state.epoch else "before the first epoch")
        state.exception = error
        event = Events.INTERRUPTED if isinstance(error, KeyboardInterrupt) else Events.EXCEPTION_RAISED
        note_problems(engine.signal(event).emit_to_all(engine), error)

    def clean_up(self, error: BaseException | None, modes: Modes) -> list[BaseException]:
        """Put everything back; returns what goes wrong meanwhile, so that nothing is omitted."""
        engine, state = self.engine, self.engine.state
        problems = engine.signal(Events.ENDED).emit_to_all(engine)
        modes.put_back()
        self.running = False
        engine.feed.end_run(last=engine.training)
        for act in (partial(engine.regions.close_all, error), engine.handlers.settle):
            try:
                act()
            except BaseException as problem:
                problems.append(problem)
        if engine.training:
            state.iteration = state.completed  # an iteration that an error cut short was not made
        state.completed = state.iteration
        state.exception = state.batch = None
        try:
            engine.signals.notify(engine, Lifecycle.CLOSED)
        except BaseException as problem:
            problems.append(problem)
        for update in engine.updates:
            update.end_run(failed=error is not None)
        return problems
