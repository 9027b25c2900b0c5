"""One micro-step: forward, loss, backward and, where it closes the window, the optimizer's step.

The core acts, handlers change how: they enter regions, transform values, skip the step, or override functions (`Overrides`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from .events import Lifecycle
from .recomputation import NO_WEIGHT, Recomputation
from .update import NO_GRADIENT, UpdateState
from .window import ONE, ZERO, counts_nothing

if TYPE_CHECKING:
    from .kernel import Kernel

__all__ = ["NO_WEIGHT", "Perform", "Step"]

Perform = Callable[[UpdateState, Any, int, bool], None]
"""Called with the update, the batch, the iteration, and whether any event of this iteration has receivers."""


class Step:
    """The training step of an engine, and what it needs."""

    recomputation: ClassVar[type[Recomputation]] = Recomputation
    __slots__ = (
        "alone",
        "boundary",
        "engine",
        "feed",
        "one_update",
        "overrides",
        "regions",
        "signals",
        "state",
    )  # fmt: skip

    def __init__(self, engine: Kernel) -> None:
        self.engine = engine
        self.state = engine.state
        self.signals = engine.iteration_signals
        self.regions = engine.regions
        self.overrides = engine.overrides
        self.boundary = engine.boundary
        self.feed = engine.feed
        self.alone = True  # whether nobody else has to agree: the usual step then needs no method of its own
        self.one_update = len(engine.updates) == 1

    def train(self, update: UpdateState, batch: Any, iteration: int, listened: bool) -> None:
        """One micro-step: the gradients of this batch and, if they complete the window, the optimizer's step.

        The batch is read from the state: a receiver may have changed it, or a handler that overrides the gradients.
        """
        signals, regions, window = self.signals, self.regions, update.window
        outside = regions.depth
        try:
            if listened and signals.started.due <= iteration:
                signals.started.emit(self.engine, iteration)
            if self.alone:
                closes = window.length == 1 or window.closes(self.feed, iteration, more=update.more)
            else:
                closes = self.closes(update, iteration)
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
            if self.alone and self.one_update and update.weight is ONE:
                update.backward_loss.backward()
            else:
                self.backward(update)
            update.window.held += 1
            if listened and signals.backward_completed.due <= iteration:
                signals.backward_completed.emit(self.engine, iteration)
        except BaseException as error:
            self.regions.close(outside, error)
            self.note(error, "backward", update)
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
            self.note(error, part, update)
            raise

    def close_window(self, update: UpdateState, iteration: int, listened: bool) -> None:
        """The optimizer's step with the gradients that the window holds, unless it is skipped."""
        signals, window = self.signals, update.window
        if not self.alone or window.held == 0:
            self.average(update)
        elif (window.held != 1 or window.extra_weight is not ZERO) and not window.average(update.parameters):
            update.skip(NO_WEIGHT)
        if update.skipped is None and listened and signals.gradients_ready.due <= iteration:
            signals.gradients_ready.emit(self.engine, iteration)
        if listened and signals.step_started.due <= iteration:
            signals.step_started.emit(self.engine, iteration)
        if not self.alone:
            self.agree(update)
        update.can_skip = False
        if update.skipped is None:
            if self.overrides.step is None and window.kept is None:
                assert update.optimizer is not None
                update.optimizer.step()
            else:
                self.recomputation(self).perform(update, iteration)
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

    def note(self, error: BaseException, part: str, update: UpdateState) -> None:
        """Add to the notes of an error where it was raised, and what rooms know of it."""
        state = self.state
        error.add_note(f"in the {part} of update {update.name!r}, epoch {state.epoch}, iteration {state.iteration}")
        if isinstance(error, Exception):
            self.engine.signals.notify(self.engine, Lifecycle.FAILED, error, part, update)

    # ---- what another kind of step does otherwise -----------------------------------------------------------------

    def closes(self, update: UpdateState, iteration: int) -> bool:
        """Whether this micro-step completes the window, which counts it."""
        return update.window.closes(self.feed, iteration, more=update.more)

    def backward(self, update: UpdateState) -> None:
        """The backward of a weighted loss, or of one of several updates."""
        loss, inputs = self.weighted(update)
        loss.backward(inputs=inputs)

    def weighted(self, update: UpdateState) -> tuple[Tensor, list[Tensor] | None]:
        """The loss with its weight, which the window counts, and the tensors that get gradients; None for all."""
        loss, weight, window = update.backward_loss, update.weight, update.window
        if weight is not ONE:
            loss = loss * weight
            window.extra_weight = window.extra_weight + (weight - 1)
            update.weight = ONE
        # With several updates, each leaves gradients with its own parameters only: a generator's backward goes through the
        # discriminator without a trace there.
        return loss, None if self.one_update else [p for p in update.parameters if p.requires_grad]

    def average(self, update: UpdateState) -> None:
        """Make the gradients of a complete window those of its mean loss; here there are none."""
        update.skip(NO_GRADIENT)

    def agree(self, update: UpdateState) -> None:
        """Agree with whom it concerns on whether the step is skipped."""
