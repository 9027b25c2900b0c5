"""The loop: `Loop.iterate` is the whole of it. The package's docstring follows a batch through it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from .boundary import discard_windows
from .events import Events, Lifecycle
from .feed import END
from .setup import check_windows
from .step import Perform

if TYPE_CHECKING:
    from .kernel import Kernel
    from .signals import Signal
    from .update import UpdateState

__all__ = ["Loop"]


class Loop:
    """The loop of a run of an engine, whose state has the bounds and whose feed has the data."""

    def __init__(self, engine: Kernel) -> None:
        self.engine = engine
        self.made = 0  # of several updates, how many were made in an iteration under way
        self._updates_begun = True
        self._started = 0  # the last iteration for which ITERATION_STARTED was emitted
        self._epoch: int | None = None  # the last one that was begun here
        self._position: Any = None  # in the data, until an epoch continues there

    # ---- the loop -------------------------------------------------------------------------------------------------

    def iterate(self) -> None:
        """The loop. One comparison per iteration finds whether any event in it has a receiver (``signals.due``), so a receiver
        that is connected during an iteration without receivers is first called in the next one."""
        engine = self.engine
        state, updates, boundary, feed = engine.state, engine.updates, engine.boundary, engine.feed
        signals, completed = engine.iteration_signals, engine.signal(Events.ITERATION_COMPLETED)
        step, stops = engine.group.step(engine), boundary.stops
        perform = step.train if engine.training else step.evaluate
        first = updates[0]
        usual = updates if len(updates) == 1 else []  # several updates are never the usual plan
        batch: Any = None
        try:
            while not boundary.limit_reached() or feed.only_its_end_is_missing():
                batches, last = self.begin_epoch()
                for iteration in range(state.iteration + 1, last + 1):
                    plan: Sequence[UpdateState] = updates
                    listened = signals.due <= iteration
                    if listened and signals.batch_started.due <= iteration and self.emit_before_batch(iteration):
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

    def emit_before_batch(self, iteration: int) -> bool:
        """Emit GET_BATCH_STARTED, if there is data; returns True if the epoch ends before a batch is read."""
        engine, signal = self.engine, self.engine.iteration_signals.batch_started
        if engine.feed.one_batch:
            signal.emit(engine, iteration)
        return engine.feed.one_batch and engine.boundary.cuts_now() and self.cuts(signal)

    def emit_batch(self, iteration: int) -> Sequence[UpdateState]:
        """Emit what comes between a batch and the updates; returns the plan: the updates of this iteration."""
        engine, boundary = self.engine, self.engine.boundary
        signals, state = engine.iteration_signals, engine.state
        self._updates_begun = False
        if signals.batch_completed.due <= iteration and engine.feed.one_batch:
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
        """Perform the updates of a plan on a batch; a stop omits the remaining ones. Returns False if the epoch ends here."""
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
            self.made += 1
        self.made = 0
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
        """Whether the updates of an iteration are under way."""
        state = self.engine.state
        return state.completed != state.iteration and self._updates_begun

    def to_skip(self) -> list[UpdateState]:
        """The updates whose steps a stop skips: the current one, and with several ranks all that they have to make after it."""
        engine, state = self.engine, self.engine.state
        begun, alone = self._updates_begun, engine.group.alone
        if state.completed == state.iteration or (alone and not begun):
            return []
        left = [one for one in engine.updates if not alone and (one.omitted_in == state.iteration or not begun)]
        return [state.update, *left] if begun else left

    def give_back_position(self) -> None:
        """Let the next run continue at a position at which an error kept this one from continuing."""
        if self._position is not None:
            self.engine.feed.position = self._position

    # ---- the parts of the loop ------------------------------------------------------------------------------------

    def begin_epoch(self) -> tuple[Iterator[Any], int]:
        """Begin the next epoch, or continue in an open one; returns its batches and its last iteration."""
        engine, state, boundary = self.engine, self.engine.state, self.engine.boundary
        if boundary.take_restored():
            self._epoch = None
        state.check_counts(self._epoch)
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
        engine.signals.notify(engine, Lifecycle.EPOCH_BEGAN, resumed)
        ahead = any(update.window.length > 1 for update in engine.updates)
        before_pass = partial(engine.signals.notify, engine, Lifecycle.PASS_BEGINS)
        batches = engine.feed.batches(position, resumed=resumed, ahead=ahead, before_pass=before_pass)
        self._position = None
        if self.attend(together=False) or boundary.epoch_stop is not None or boundary.limit_reached():
            return batches, state.iteration  # only the epoch's end is left, if that
        ends = [end for end in (engine.feed.epoch_end, state.max_iters) if end]
        return batches, min(ends, default=sys.maxsize - 1)

    def next_pass(self, batches: Iterator[Any]) -> tuple[Iterator[Any], Any]:
        """What follows once the data gave no more batches: another pass with its first batch, or `END` where the epoch ends."""
        engine = self.engine
        while engine.feed.starts_again():
            engine.signals.emit(engine, Events.DATA_EXHAUSTED)
            engine.signals.notify(engine, Lifecycle.PASS_BEGINS)
            batches = engine.feed.begin_again()
            batch = next(batches, END)
            if batch is not END:
                return batches, batch
        engine.signals.notify(engine, Lifecycle.DATA_ENDED, False)
        return batches, END

    def end_epoch(self) -> None:
        """Emit EPOCH_COMPLETED, unless the epoch is to be continued, or a state was put back in place."""
        engine, state, boundary = self.engine, self.engine.state, self.engine.boundary
        if boundary.take_restored():
            self._started, self._epoch = 0, None
            return
        state.check_counts(self._epoch)
        if not self.epoch_is_over():
            return
        if boundary.epoch_stop is None and not engine.feed.read_to_end():
            engine.signals.notify(engine, Lifecycle.DATA_ENDED, True)
        boundary.check_moves()
        if any(update.window.filled for update in engine.updates):  # omitted from the epoch's last plan
            discard_windows(engine)
        engine.signals.notify(engine, Lifecycle.EPOCH_ENDS)
        boundary.take_epoch_stop()
        state.epoch_open = False  # last: an interrupt before leaves the epoch to be ended by the next run
        engine.signals.emit(engine, Events.EPOCH_COMPLETED)
        self.attend(together=engine.training or not boundary.limit_reached())

    def epoch_is_over(self) -> bool:
        """Whether the epoch ends here; if not, the next run continues in it."""
        engine, state, boundary = self.engine, self.engine.state, self.engine.boundary
        together = engine.training and not engine.group.alone
        if together and boundary.epoch_stop is None and not engine.feed.epoch_ended():
            self.attend(together=True)  # one rank may have ended the epoch in the last iteration
        if boundary.preempted:
            return False
        if boundary.epoch_stop is None:
            return engine.feed.epoch_ended() and (state.stop_reason is None or state.epoch_iteration != 0)
        return state.stop_reason is None

    def attend(self, *, together: bool) -> bool:
        """Attend to what was asked for outside of an iteration; True if the epoch does not continue.

        Args:
            together: whether several ranks agree here. They do not in an epoch, since the gradients of its first iteration carry
                what was asked for before it, nor as an evaluation begins or ends, which costs no collective.
        """
        boundary = self.engine.boundary
        if together:
            self.engine.group.agree()
        return boundary.is_awake and boundary.attend()
