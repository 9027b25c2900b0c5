"""One run: set-up, the loop, and cleaning up. `Loop.iterate` is the whole loop.

A batch on its way from the DataLoader to the optimizer step passes these stations, each of them once:

1. `data/loading.py`, `SkippingLoader`: fetches it at its index in the epoch, on the rank that it belongs to;
2. `data/source.py`, `Source`: the iterator over one pass of the data;
3. `loop.py`, `Loop.iterate`: reads it, ``state.batch = batch``;
4. `loop.py`, `Loop.emit_batch`: GET_BATCH_COMPLETED and ITERATION_STARTED, where handlers move, transform or split it;
5. `step.py`, `Step.train`: one micro-step, and whether it closes the accumulation window;
6. `step.py`, `Step.compute_loss`: the forward and the loss, which users write;
7. `step.py`, `Step.compute_gradients`: the backward, which adds to the gradients of the window;
8. `step.py`, `Step.close_window`: the average over the window, GRADIENTS_READY, and the optimizer's step;
9. `boundary.py`, `Boundary.attend`: the iteration is complete, and what had to wait for that is done.

Lists and other iterables skip the first station. Handlers that compute gradients in pieces, or more than once, repeat 5 to 7.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .blame import warn
from .boundary import discard_windows
from .checks import as_int
from .data.source import Source
from .data.streamed import END
from .events import Events
from .findings.check import report as report_composition
from .findings.data_checks import check_data, check_epoch, check_steps
from .findings.epoch_checks import EpochChecks
from .findings.evaluation_findings import (
    report_drawn_samples,
    report_dropped_samples,
    report_random_samples,
    report_raw_weights,
    report_training_mode,
)
from .findings.first_steps import FirstEvaluation, FirstStep
from .findings.late_scores import LateScores
from .findings.own_schedulers import OwnSchedulers
from .findings.own_weights import OwnLoads, watching_starts
from .findings.resumption import say_left_out
from .findings.unattached import note_run
from .modules import report_loss_parameters, report_wrapped
from .regions import note_problems
from .restore import Modes
from .setup import (
    build_optimizers,
    check_devices,
    check_initialised,
    check_modules,
    check_surroundings,
    check_windows,
    report_never_emitted,
    report_shared_parameters,
    report_untrained,
    set_modes,
)
from .step import Perform, performer
from .streams import batch_streams, begin_stream

if TYPE_CHECKING:
    from .engine import Engine
    from .signals import Signal
    from .update import UpdateState

__all__ = ["Loop"]

_AT_START = (
    report_untrained,
    report_shared_parameters,
    report_raw_weights,
    report_dropped_samples,
    report_drawn_samples,
    report_never_emitted,
    report_loss_parameters,
    report_wrapped,
    say_left_out,
)
"""What looks for mistakes once the optimizers are built."""


class Loop:
    """One run of an engine.

    Args:
        engine: the engine; its state has the bounds.
        data: the batches, or None.
        epoch_length: iterations in an epoch; None for the data's own length.
        check: whether to check the composition if this is the engine's first run.
        given: the data before handlers changed it.

    Attributes:
        running: whether handlers take part; False again once ENDED was emitted.
        over: whether no further iteration is made.
    """

    def __init__(self, engine: Engine, data: Any, epoch_length: int | None, *, check: bool, given: Any) -> None:
        run_id, engine.seed = engine.group.begin_run(engine.snapshots.run_id, engine.seed)
        engine.snapshots.begin_lineage(engine.snapshots.origin, run_id)
        self.engine = engine
        self.source: Source = engine.feed.open(
            data,
            as_int(epoch_length),
            seed=engine.seed,
            processes=engine.group.data,
            shard_policy=engine.group.shard_policy,
            training=engine.training,
            reseed=batch_streams(engine) if engine.streams == "separate" else None,
            given=given,
        )
        self.running = False
        self.over = False
        self.watching: list[OwnLoads | LateScores] = []  # until the run ends
        self._check = check
        self._updates_begun = True
        self._started = 0  # the last iteration for which ITERATION_STARTED was emitted
        self._epoch: int | None = None  # the last one that was begun here
        self._position: dict[str, Any] | None = None  # in the data, until an epoch continues there
        self._made = 0  # of several updates, how many were made in an iteration under way

    def run(self) -> None:
        """Set up, iterate, clean up. An error leaves with the handler, event, epoch and iteration in its notes."""
        engine = self.engine
        check_surroundings(engine)
        engine.boundary.begin_run()
        engine.findings.begin_run()
        engine.snapshots.drop()
        engine.snapshots.begin_run()
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
                self.iterate()
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

    # ---- the loop -------------------------------------------------------------------------------------------------

    def iterate(self) -> None:
        """The loop. One comparison per iteration finds whether any event in it has a receiver (``signals.due``), so a receiver
        that is connected during an iteration without receivers is first called in the next one."""
        engine = self.engine
        state, updates, boundary, feed = engine.state, engine.updates, engine.boundary, engine.feed
        signals, completed = engine.iteration_signals, engine.signal(Events.ITERATION_COMPLETED)
        perform, stops = performer(engine, FirstStep if engine.training else FirstEvaluation), boundary.stops
        first = updates[0]
        usual = updates if len(updates) == 1 else []  # several updates are never the usual plan
        batch: Any = None
        try:
            while not boundary.limit_reached() or feed.only_its_end_is_missing():
                batches, last = self.begin_epoch()
                for iteration in range(state.iteration + 1, last + 1):
                    plan: Sequence[UpdateState] = updates
                    listened = signals.due <= iteration
                    if listened and signals.batch_started.due <= iteration and feed.has_data:
                        signals.batch_started.emit(engine, iteration)
                        if boundary.cuts_now() and self.cuts(signals.batch_started):  # before a batch is read
                            break
                    try:
                        batch = next(batches)
                    except StopIteration:
                        batches, batch = self.next_pass(batches)
                        if batch is END:
                            signals.batch_started.repeats, signals.batch_started.askers = iteration, None
                            break
                    state.iteration, state.batch = iteration, batch
                    if listened:
                        plan = self.emit_batch(iteration)
                    if plan is usual and not stops:
                        perform(first, batch, iteration, listened)
                    elif not self.perform_plan(plan, perform, batch, listened):
                        break
                    state.completed = iteration
                    if completed.due <= iteration:
                        completed.emit(engine, iteration)
                        if completed.awaited and boundary.attend():
                            break
                self.end_epoch()
        except BaseException:
            if state.iteration != state.completed:  # this iteration is not made
                feed.give_back(batch)
            raise

    def emit_batch(self, iteration: int) -> Sequence[UpdateState]:
        """Emit what comes between a batch and the updates; returns the plan: the updates of this iteration."""
        engine, boundary = self.engine, self.engine.boundary
        signals, state = engine.iteration_signals, engine.state
        self._updates_begun = False
        if signals.batch_completed.due <= iteration and engine.feed.has_data:
            signals.batch_completed.emit(engine, iteration)
        plan: Sequence[UpdateState] = engine.updates
        if signals.iteration_started.due <= iteration and not (
            (boundary.stops or boundary.epoch_stop) and boundary.cuts_now()
        ):
            state.plan, self._started = engine.updates, iteration
            signals.iteration_started.emit(engine, iteration)
            plan = state.plan
        self._updates_begun = True
        return [*plan] if boundary.epoch_stop is not None else plan  # a list is not the usual plan

    def perform_plan(self, plan: Sequence[UpdateState], perform: Perform, batch: Any, listened: bool) -> bool:
        """Perform the updates of an iteration; a stop omits the remaining ones. Returns False if the epoch ends here.

        Args:
            plan: the updates.
            perform: what performs one.
            batch: the batch as it was read.
            listened: whether any event of the iteration has receivers.
        """
        engine, state, boundary = self.engine, self.engine.state, self.engine.boundary
        iteration = state.iteration
        if boundary.cuts_now():  # before any update: this iteration is not made
            state.iteration = state.completed
            signals = engine.iteration_signals
            begun = [signals.iteration_started] if self._started == iteration else []
            if self.cuts(signals.batch_started, signals.batch_completed, *begun):
                engine.feed.give_back(batch)
                return False
            state.iteration = iteration
        for update in engine.updates:
            update.omitted_in = iteration
        for update in plan:
            if boundary.stops_now():
                break
            state.update, update.omitted_in = update, 0
            perform(update, state.batch, iteration, listened)
            self._made += 1
        self._made = 0
        return True

    def cuts(self, *emitted: Signal) -> bool:
        """Whether a stop cuts an iteration before its updates. Its count comes again then, also in a run that resumes here, and
        the receivers that asked for the stop are not called for it again."""
        for signal in emitted:
            signal.repeat(self.engine.state.completed + 1)
        if self.engine.boundary.attend():
            return True
        for signal in emitted:
            signal.forget_repeats()
        return False

    @property
    def in_updates(self) -> bool:
        """Whether the updates of an iteration are under way, so that a stop skips the current one.

        With several ranks this is already true once the batch is read: the iteration is always made, and the stop waits until
        all ranks know of it.
        """
        state = self.engine.state
        return state.completed != state.iteration and (self._updates_begun or self.engine.processes.distributed)

    # ---- the parts of the loop ------------------------------------------------------------------------------------

    def set_up(self) -> None:
        """Emit what comes before the first epoch, build the optimizers, and put a loaded state in place."""
        engine, state = self.engine, self.engine.state
        if not engine.feed.begin_run(self.source, training=engine.training):
            engine.past.reset()  # its states are those of a run over other data
        set_modes(engine)
        engine.signals.rewind(engine)
        with engine.snapshots.accepting():
            engine.signals.emit(engine, Events.MODEL_SETUP)
        check_devices(engine)
        check_initialised(engine, "run()")
        engine.signals.emit(engine, Events.OPTIMIZER_SETUP)
        build_optimizers(engine)
        check_modules(engine)
        for look in _AT_START:
            engine.findings.look(look, engine)
        for update in engine.updates:
            update.omitted_in = 0
            if update.window.filled == 0:
                update.discard()
        with watching_starts(engine):
            engine.signals.emit(engine, Events.STARTED)
        was_loaded = engine.snapshots.apply_loaded()
        check_data(engine)
        engine.handlers.give_held_states()
        engine.boundary.reconsider_stop()
        engine.unfinished.begin_run()
        completes = engine.unfinished.is_due
        if engine.boundary.limit_reached() and not completes and not engine.feed.only_its_end_is_missing():
            warn(
                f"run(): nothing to do: {engine.boundary.why_ended()} at epoch {state.epoch}, iteration {state.iteration}. "
                "Give larger bounds to continue, or call engine.reset() to begin anew",
            )
        if was_loaded:
            engine.signals.emit(engine, Events.CHECKPOINT_LOADED)
        if self._check:
            report_composition(engine)
        engine.unfinished.complete(Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED)
        ended = engine.boundary.stops and engine.feed.only_its_end_is_missing()
        if not ended:  # else a stop that was asked for in the last iteration waits for the end of its epoch
            self._attend(together=engine.training and not state.epoch_open)
        self.checks = EpochChecks(engine)
        self.schedulers = OwnSchedulers(engine)
        self.watching = [OwnLoads(engine), LateScores(engine)]
        self.began = state.completed

    def begin_epoch(self) -> tuple[Iterator[Any], int]:
        """Begin the next epoch, or continue in an open one; returns its batches and its last iteration."""
        engine, state, boundary = self.engine, self.engine.state, self.engine.boundary
        if boundary.take_restored():
            self._epoch = None
        self.check_position()
        position, resumed = engine.feed.take_position(), state.epoch_open
        self._position = position
        if not resumed:
            boundary.take_epoch_stop()
            state.epoch += 1
            state.epoch_start = state.iteration
            state.epoch_open = True
        self._epoch = state.epoch
        for update in engine.updates:
            update.window.begin_epoch(state.epoch)
        check_windows(engine)
        if not resumed:
            engine.feed.announce_epoch()
        engine.feed.find_epoch_end()
        if not resumed:
            engine.signals.emit(engine, Events.EPOCH_STARTED)
            engine.feed.measure_again()
        else:
            engine.unfinished.complete(Events.EPOCH_STARTED)
        engine.findings.look(self.checks.begin_epoch)
        ahead = any(update.window.length > 1 for update in engine.updates)
        before_pass = partial(begin_stream, engine, "data", state.epoch, state.epoch_iteration)
        batches = engine.feed.batches(position, resumed=resumed, ahead=ahead, before_pass=before_pass)
        self._position = None
        if self._attend(together=False) or boundary.epoch_stop is not None or boundary.limit_reached():
            return batches, state.iteration  # only the epoch's end is left, if that
        ends = [end for end in (engine.feed.epoch_end, state.max_iters) if end]
        return batches, min(ends, default=sys.maxsize - 1)

    def next_pass(self, batches: Iterator[Any]) -> tuple[Iterator[Any], Any]:
        """What follows once the data gave no more batches: another pass with its first batch, or `END` where the epoch ends."""
        engine, state = self.engine, self.engine.state
        while engine.feed.starts_again():
            engine.signals.emit(engine, Events.DATA_EXHAUSTED)
            begin_stream(engine, "data", state.epoch, state.epoch_iteration)
            batches = engine.feed.begin_again()
            batch = next(batches, END)
            if batch is not END:
                return batches, batch
        length, given = self.source.length, state.epoch_iteration
        if length is not None and given != length:
            self.report_length(f"gave {given} batches")
        return batches, END

    def end_epoch(self) -> None:
        """Emit EPOCH_COMPLETED, unless the epoch is to be continued, or a state was put back in place."""
        engine, state, boundary = self.engine, self.engine.state, self.engine.boundary
        if boundary.take_restored():
            self._started, self._epoch = 0, None
            return
        self.check_position()
        together = engine.training and engine.processes.distributed
        if together and boundary.epoch_stop is None and not engine.feed.epoch_ended():
            self._attend(together=True)  # one rank may have ended the epoch in the last iteration
        stopped = state.stop_reason is not None
        if boundary.preempted or (stopped and (boundary.epoch_stop is not None or state.epoch_iteration == 0)):
            return
        if boundary.epoch_stop is None:
            if not engine.feed.epoch_ended():
                return
            if not engine.feed.read_to_end():
                self.report_length(f"gives more than {self.source.length} batches, which are not used")
        boundary.check_moves()
        if any(update.window.filled for update in engine.updates):  # omitted from the epoch's last plan
            discard_windows(engine)
        engine.findings.look(self.checks.end_epoch)
        check_epoch(engine, self.began)
        boundary.take_epoch_stop()
        state.epoch_open = False  # last: an interrupt before leaves the epoch to be ended by the next run
        engine.signals.emit(engine, Events.EPOCH_COMPLETED)
        self._attend(together=engine.training or not boundary.limit_reached())

    def _attend(self, *, together: bool) -> bool:
        """Attend to what was asked for outside of an iteration; True if the epoch does not continue.

        Args:
            together: whether several ranks agree here. They do not in an epoch, since the gradients of its first iteration carry
                what was asked for before it, nor as an evaluation begins or ends, which costs no collective.
        """
        boundary = self.engine.boundary
        if together:
            self.engine.group.agree()
        return boundary.is_awake and boundary.attend()

    def check_position(self) -> None:
        """Raise an error for a position that a receiver has set."""
        state = self.engine.state
        if self._epoch not in (None, state.epoch):
            changed = f"state.epoch was changed from {self._epoch} to {state.epoch}"
        elif state.iteration != state.completed:
            changed = f"state.iteration was changed from {state.completed} to {state.iteration}"
        else:
            return
        raise ValueError(
            f"{changed}: the engine alone counts; end a run or an epoch with engine.terminate() or terminate_epoch(), and "
            "return to an earlier state with engine.snapshots.restore(state)"
        )

    def report_length(self, what: str) -> None:
        """Report data that gives another number of batches than its length says."""
        data = self.source.data
        self.engine.findings.report(
            "W21",
            f"the data ({type(data).__name__}) has length {self.source.length}, but {what}",
            "correct its __len__, or give run() epoch_length=",
        )

    def finish(self) -> None:
        """Emit what comes after the last epoch."""
        engine = self.engine
        if engine.state.epoch_open:
            engine.findings.look(self.checks.end_epoch, whole=False)
        engine.findings.look(self.checks.finish)
        engine.findings.look(report_training_mode, engine)
        engine.findings.look(report_random_samples, engine)
        if engine.state.stop_reason is not None:
            engine.signals.emit(engine, Events.TERMINATED)
        else:
            engine.findings.look(check_steps, engine, self.began)
        engine.findings.look(self.schedulers.report)
        engine.signals.emit(engine, Events.COMPLETED)
        if engine.training:
            note_run()

    def report(self, error: BaseException) -> None:
        """Emit EXCEPTION_RAISED or INTERRUPTED to all of its receivers, also if one of them fails."""
        engine, state = self.engine, self.engine.state
        in_updates = state.completed != state.iteration and self._updates_begun
        if self._position is not None:
            engine.feed.position = self._position
        engine.unfinished.note(error, in_updates=in_updates, made=self._made)
        if not getattr(error, "__notes__", None):
            begun = f"in epoch {state.epoch}, after iteration {state.iteration} had begun"
            error.add_note(begun if state.epoch else "before the first epoch")
        state.exception = error
        event = Events.INTERRUPTED if isinstance(error, KeyboardInterrupt) else Events.EXCEPTION_RAISED
        note_problems(engine.signal(event).emit_to_all(engine), error)

    def clean_up(self, error: BaseException | None, modes: Modes) -> list[BaseException]:
        """Put everything back; returns what goes wrong meanwhile, so that nothing is omitted."""
        engine, state = self.engine, self.engine.state
        problems = engine.signal(Events.ENDED).emit_to_all(engine)
        modes.put_back()
        for one in self.watching:
            one.stop()
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
        engine.snapshots.end_run()
        for update in engine.updates:
            update.end_run(failed=error is not None)
        return problems
