"""One micro-step: forward, loss, backward and, where it closes the window, the optimizer's step.

`Step.train` reads from the top for a single process; what several ranks add is in the functions at the end. The core acts,
handlers change how: they enter regions, transform values, skip the step, or override functions (`Overrides`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .bus import Bus
from .events import Events
from .explain import note_error
from .notice import backward_beside
from .signals import Signal, SignalGroup
from .streams import model_streams
from .update import NO_GRADIENT, Update, UpdateState, needs_closure
from .window import ONE, ZERO, Kept, clear_gradients, counts_nothing

if TYPE_CHECKING:
    from .distributed.processes import Processes
    from .engine import Engine

__all__ = ["IterationSignals", "Perform", "Step", "performer"]

Perform = Callable[[UpdateState, Any, int, bool], None]
"""Called with the update, the batch, the iteration, and whether any event of this iteration has receivers."""


def performer(engine: Engine, kind: type[Step]) -> Perform:
    """What performs an engine's updates; it is made once a run."""
    step = kind(engine)
    perform = step.train if engine.training else step.evaluate
    if engine.streams == "shared":
        return perform
    begin_stream = model_streams(engine)
    step.begin_stream = begin_stream

    def perform_in_stream(update: UpdateState, batch: Any, iteration: int, listened: bool) -> None:
        begin_stream(update, iteration)
        perform(update, batch, iteration, listened)

    return perform_in_stream


class Step:
    """The training step of an engine, and what it needs."""

    __slots__ = (
        "begin_stream",
        "boundary",
        "distributed",
        "engine",
        "feed",
        "group",
        "look",
        "one_update",
        "overrides",
        "regions",
        "signals",
        "state",
    )  # fmt: skip

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.state = engine.state
        self.signals = engine.iteration_signals
        self.regions = engine.regions
        self.overrides = engine.overrides
        self.boundary = engine.boundary
        self.feed = engine.feed
        self.group = engine.group
        self.distributed = engine.processes.distributed
        self.one_update = len(engine.updates) == 1
        self.begin_stream: Callable[[UpdateState, int], None] | None = None
        self.look: Any = None  # of the first steps of a run

    def train(self, update: UpdateState, batch: Any, iteration: int, listened: bool) -> None:
        """One micro-step: the gradients of this batch and, if they complete the window, the optimizer's step.

        The batch is read from the state: a receiver may have changed it, or a handler that overrides the gradients.
        """
        signals, regions, window = self.signals, self.regions, update.window
        outside = regions.depth
        try:
            if listened and signals.started.due <= iteration:
                signals.started.emit(self.engine, iteration)
            closes = (window.length == 1 and not self.distributed) or window.closes(
                self.feed, iteration, more=update.more
            )
            if self.distributed:
                update.sync_gradients, update.share = closes, ONE if self.state.batch is None else self.feed.share()
            if update.skipped is not None:
                update.output, update.raw_loss, update.weight = None, None, ONE
            elif self.overrides.gradients is None:
                self.compute_gradients(update, iteration, listened)
            else:
                self.let_compute(self.overrides.gradients, update, iteration, listened)
            if update.skipped is not None:
                update.discard()
            elif window.kept is not None and update.raw_loss is not None:
                window.keep(self.state.batch, update.backward_loss, update.share)
            if closes:
                self.close_window(update, iteration, listened)
            if listened and signals.completed.due <= iteration:
                signals.completed.emit(self.engine, iteration)
            if update.skipped is not None:
                self.boundary.wake()  # it forgets why the update was skipped
            update.can_skip = True
        except BaseException as error:
            regions.close(outside, error)
            raise
        if regions.depth > outside:
            regions.close(outside)

    def compute_gradients(self, update: UpdateState, iteration: int, listened: bool) -> None:
        """Forward, loss and backward of ``state.batch``; the gradients are added to those that the window holds."""
        batch, signals = self.state.batch, self.signals
        if batch is None and self.feed.has_data:
            update.output, update.raw_loss, update.weight = None, None, ONE
            return
        loss = self.compute_loss(update, batch, iteration, listened)
        if loss is None or update.skipped is not None or (update.weight is not ONE and counts_nothing(update.weight)):
            update.weight = ONE
            return
        outside = self.regions.depth
        try:
            if listened and signals.backward_started.due <= iteration:
                signals.backward_started.emit(self.engine, iteration)
            if self.distributed and update.sync_gradients:
                notice = self.group.send_notice(update)
                _backward(update, one_update=self.one_update, beside=notice)
            elif self.one_update and update.weight is ONE:
                update.backward_loss.backward()
            else:
                _backward(update, one_update=self.one_update)
            update.window.held += 1
            if listened and signals.backward_completed.due <= iteration:
                signals.backward_completed.emit(self.engine, iteration)
        except BaseException as error:
            self.regions.close(outside, error)
            note_error(error, "backward", self.engine, update)
            raise

    def let_compute(self, function: Callable[..., None], update: UpdateState, iteration: int, listened: bool) -> None:
        """Let a handler compute the gradients, with or without what it replaces."""
        function(self.engine, update, partial(self.compute_gradients, update, iteration, listened))

    def compute_loss(self, update: UpdateState, batch: Any, iteration: int, listened: bool) -> Tensor | None:
        """Forward and loss of a batch, inside the region that FORWARD_STARTED opens."""
        signals, regions = self.signals, self.regions
        outside = regions.depth
        part = "forward"
        try:
            if listened and signals.forward_started.due <= iteration:
                signals.forward_started.emit(self.engine, iteration)
            loss: Tensor | None
            if update.forward is None:
                loss = update.function(self.engine, batch)
            else:
                update.output = None  # the previous one goes before there is another
                update.output = output = update.forward(self.engine, batch)
                if listened and signals.forward_completed.due <= iteration:
                    signals.forward_completed.emit(self.engine, iteration)
                    output = update.output
                part = "loss"
                no_loss = output is None or update.loss_function is None
                loss = None if no_loss else update.loss_function(self.engine, output, batch)
            update.raw_loss = loss
            if loss is not None:
                update.backward_loss = loss
                if listened and signals.loss_computed.due <= iteration:
                    signals.loss_computed.emit(self.engine, iteration)
            if regions.depth > outside:
                regions.close(outside)
            return loss
        except BaseException as error:
            regions.close(outside, error)
            note_error(error, part, self.engine, update)
            raise

    def close_window(self, update: UpdateState, iteration: int, listened: bool) -> None:
        """The optimizer's step with the gradients that the window holds, unless it is skipped."""
        signals, window = self.signals, update.window
        if self.distributed:
            _average_over_ranks(self.engine, update)
        elif window.held == 0:
            update.skip(NO_GRADIENT)
        elif (window.held != 1 or window.extra_weight is not ZERO) and not window.average(update.parameters):
            update.skip("the weights of the window add up to zero")
        if update.skipped is None and listened and signals.gradients_ready.due <= iteration:
            signals.gradients_ready.emit(self.engine, iteration)
        if listened and signals.step_started.due <= iteration:
            signals.step_started.emit(self.engine, iteration)
        if self.distributed and self.group.sync_skips and self.group.sum(update.skipped is not None)[0]:
            _skip_on_all_ranks(self.engine, update)
        update.can_skip = False
        if update.skipped is None:
            if self.overrides.step is None and window.kept is None:
                assert update.optimizer is not None
                update.optimizer.step()
            else:
                self.special_step(update, iteration)
            if update.skipped is None:  # a further computation of the gradients may have skipped it
                update.steps += 1
        if listened and signals.step_completed.due <= iteration:
            signals.step_completed.emit(self.engine, iteration)
        window.discard(update.optimizer)

    def evaluate(self, update: UpdateState, batch: Any, iteration: int, listened: bool) -> None:
        """Forward and loss of a batch, for an engine that does not train."""
        signals, regions = self.signals, self.regions
        outside = regions.depth
        try:
            if listened:
                if signals.started.due <= iteration:
                    signals.started.emit(self.engine, iteration)
                batch = self.state.batch
            if update.skipped is not None or (batch is None and self.feed.has_data):
                update.output = update.raw_loss = None
            else:
                self.compute_loss(update, batch, iteration, listened)
            update.weight = ONE
            if listened and signals.completed.due <= iteration:
                signals.completed.emit(self.engine, iteration)
        except BaseException as error:
            regions.close(outside, error)
            raise
        if regions.depth > outside:
            regions.close(outside)
        if update.skipped is not None:
            self.boundary.wake()

    # ---- steps that compute their gradients more than once --------------------------------------------------------

    def special_step(self, update: UpdateState, iteration: int) -> None:
        """A step that a handler overrides, or that computes the gradients more than once."""
        assert update.optimizer is not None
        processes = self.engine.processes
        step: Callable[[], Any] = update.optimizer.step
        compute_again = partial(self.compute_again, update, iteration)
        update.again, refuse = compute_again, update.again
        if update.window.kept is not None and needs_closure(update.optimizer):
            losses = [_mean_loss(update.window.kept, processes)]

            def closure() -> Tensor:
                # The first evaluation is the one that was made to find out whether there is to be a step.
                return losses.pop() if losses else compute_again()

            step = partial(update.optimizer.step, closure)
        try:
            if self.overrides.step is None:
                step()
            else:
                self.overrides.step(self.engine, update, partial(_unless_skipped, update, step))
        finally:
            update.again = refuse
            update.evaluation = 0

    def compute_again(self, update: UpdateState, iteration: int) -> Tensor:
        """The window's gradients at the current weights, and its mean loss; output and reported loss stay as they were."""
        state, window = self.state, update.window
        assert window.kept is not None
        assert update.optimizer is not None
        micro_steps: list[Any] = list(window.kept)
        own = len(micro_steps)
        if self.distributed and self.overrides.gradients is not None and self.feed.has_data:
            # A handler that overrides the gradients may have to agree with the other ranks, as often as they do.
            micro_steps += [_NO_BATCH] * (max(self.engine.processes.gather(own)) - own)
        seen = state.batch, update.output, update.raw_loss, update.backward_loss, update.hidden
        window.held, window.extra_weight = 0, ZERO
        clear_gradients(update.optimizer)
        update.evaluation += 1
        update.can_skip = not needs_closure(update.optimizer)  # a closure is called within the step
        if self.begin_stream is not None:
            self.begin_stream(update, iteration)
        losses: list[Kept] = []
        with self.signals.without_recording():
            listened = self.signals.due <= iteration
            for place, (batch, _, weight, share) in enumerate(micro_steps, 1):
                state.batch = batch
                if self.distributed:
                    update.sync_gradients, update.share = place == own, share
                if self.overrides.gradients is None:
                    self.compute_gradients(update, iteration, listened)
                else:
                    compute = partial(self.compute_gradients, update, iteration, listened)
                    self.overrides.gradients(self.engine, update, compute)
                if update.raw_loss is not None:
                    losses.append((batch, update.backward_loss.detach(), weight, share))
            self._reduce_again(update, losses)
            if listened and self.signals.gradients_ready.due <= iteration:
                self.signals.gradients_ready.emit(self.engine, iteration)
        state.batch, update.output, update.raw_loss, update.backward_loss, update.hidden = seen
        update.can_skip = False
        return _mean_loss(losses, self.engine.processes)

    def _reduce_again(self, update: UpdateState, losses: list[Kept]) -> None:
        if self.distributed:
            _average_over_ranks(self.engine, update)
        elif not losses:
            raise RuntimeError(
                f"update {update.name!r} gave no loss in evaluation {update.evaluation} of a step, though it gave one in the "
                "first; forward and loss have to do the same each time that a step computes its gradients"
            )
        elif not update.window.average(update.parameters):
            update.skip("the weights of the window add up to zero")


def _unless_skipped(update: UpdateState, step: Callable[[], Any]) -> Any:
    """The optimizer's step, unless the gradients that were computed for it again have led to a skip."""
    return None if update.skipped is not None else step()


def _backward(update: UpdateState, *, one_update: bool, beside: tuple[Tensor, Tensor] | None = None) -> None:
    """The backward of a weighted loss, or of one of several updates, or beside the notice that its gradients carry."""
    loss, weight, window = update.backward_loss, update.weight, update.window
    if weight is not ONE:
        loss = loss * weight
        window.extra_weight = window.extra_weight + (weight - 1)
        update.weight = ONE
    # With several updates, each leaves gradients with its own parameters only: a generator's backward goes through the
    # discriminator without a trace there.
    inputs = None if one_update else [p for p in update.parameters if p.requires_grad]
    if beside is None:
        loss.backward(inputs=inputs)
    else:
        backward_beside(loss, *beside, inputs=inputs)


# ---- what several ranks add ---------------------------------------------------------------------------------------

_NO_BATCH = (None, None, 0, 1)


def _average_over_ranks(engine: Engine, update: UpdateState) -> None:
    """Let the window be that of all ranks: its gradients reduced, and divided by the weights of all; skipped if one skips it."""
    group, window = engine.group, update.window
    if not group.has_sent:  # no backward of this rank has closed the window
        group.send_notice(update, computed=True)
    if engine.overrides.reduction is not None:
        engine.overrides.reduction(engine, update)
    if not group.noticed(update):  # all ranks have a gradient of every micro-step, and none counts more than another
        if window.size != 1:
            window.divide(update.parameters, window.size)
        return
    own = float(window.held + window.extra_weight)
    held, weight, skipped, unknown = group.sum(
        window.held, own, update.skipped is not None, isinstance(window.extra_weight, Tensor)
    )
    if skipped:
        _skip_on_all_ranks(engine, update)
    elif held == 0:
        update.skip(NO_GRADIENT)
    elif weight == 0:
        # As in a single process, tensors that sum to zero are not detected; the gradients are zero then.
        if not unknown:
            update.skip("the weights of the window add up to zero")
    elif weight != engine.processes.world_size:  # reduced gradients are a mean over the ranks, and so is this
        window.divide(update.parameters, weight / engine.processes.world_size)


def _skip_on_all_ranks(engine: Engine, update: UpdateState) -> None:
    reasons = engine.processes.gather(update.skipped)
    rank = next(rank for rank, reason in enumerate(reasons) if reason is not None)
    reason = reasons[rank]
    if update.can_skip:  # the same on all ranks, also where this one has another reason
        update.skipped = reason if all(one == reason for one in reasons) else f"{reason} (rank {rank})"


def _mean_loss(window: list[Kept], processes: Processes) -> Tensor:
    """The mean loss of a window; with several ranks, that of all, since a line search has to go the same way on all of them."""
    window = [one for one in window if not counts_nothing(one[2])] or window[:1]
    if processes.distributed:
        losses, weights = processes.sum(
            sum(float(loss * weight) for _, loss, weight, _ in window), sum(float(weight) for _, _, weight, _ in window)
        )
        return torch.tensor(losses / weights, dtype=torch.float64)
    if len(window) == 1:
        return window[0][1]
    total = sum((weight for _, _, weight, _ in window), start=ZERO)
    mean: Tensor = torch.stack([loss * weight for _, loss, weight, _ in window]).sum() / total
    return mean


class IterationSignals(SignalGroup):
    """The signals of an iteration's events, up to the completion of its updates.

    Signals that these updates never emit are not in the group: they would stay due forever.
    """

    __slots__ = (
        "backward_completed", "backward_started", "batch_completed", "batch_started", "completed", "forward_completed",
        "forward_started", "gradients_ready", "iteration_started", "loss_computed", "started", "step_completed", "step_started",
    )  # fmt: skip

    def __init__(self, bus: Bus, updates: Iterable[Update], *, training: bool) -> None:
        self.batch_started = bus.of(Events.GET_BATCH_STARTED)
        self.batch_completed = bus.of(Events.GET_BATCH_COMPLETED)
        self.iteration_started = bus.of(Events.ITERATION_STARTED)
        self.started = bus.of(Events.UPDATE_STARTED)
        self.forward_started = bus.of(Events.FORWARD_STARTED)
        self.forward_completed = bus.of(Events.FORWARD_COMPLETED)
        self.loss_computed = bus.of(Events.LOSS_COMPUTED)
        self.backward_started = bus.of(Events.BACKWARD_STARTED)
        self.backward_completed = bus.of(Events.BACKWARD_COMPLETED)
        self.gradients_ready = bus.of(Events.GRADIENTS_READY)
        self.step_started = bus.of(Events.OPTIMIZER_STEP_STARTED)
        self.step_completed = bus.of(Events.OPTIMIZER_STEP_COMPLETED)
        self.completed = bus.of(Events.UPDATE_COMPLETED)
        never: list[Signal] = []
        if not training:
            never += [self.backward_started, self.backward_completed]
            never += [self.gradients_ready, self.step_started, self.step_completed]
        if all(update.forward is None for update in updates):
            never.append(self.forward_completed)
        if all(update.loss is None and update.function is None for update in updates):
            never.append(self.loss_computed)
        signals = [getattr(self, name) for name in self.__slots__]
        super().__init__(*(signal for signal in signals if signal not in never))
