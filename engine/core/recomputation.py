"""Steps that compute the gradients of their window more than once, as LBFGS and sharpness-aware minimization do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from .events import Lifecycle
from .update import UpdateState, needs_closure
from .window import ZERO, Kept, clear_gradients, counts_nothing

if TYPE_CHECKING:
    from .iteration import IterationSignals
    from .kernel import Kernel
    from .overrides import Overrides
    from .state import State

__all__ = ["NO_WEIGHT", "Recomputation", "TakenStep", "counted"]

NO_WEIGHT = "the loss weights in the window add up to zero"


class TakenStep(Protocol):
    """What a recomputation needs of the step that it takes."""

    engine: Kernel
    state: State
    signals: IterationSignals
    overrides: Overrides

    def compute_gradients(self, update: UpdateState, iteration: int, listened: bool) -> None: ...

    def let_compute(
        self, function: Callable[..., None], update: UpdateState, iteration: int, listened: bool
    ) -> None: ...


class Recomputation:
    """The optimizer's step where a handler overrides it, or where it computes the gradients of its window more than once.

    Args:
        step: the step whose window is complete.
    """

    def __init__(self, step: TakenStep) -> None:
        self.step = step

    def perform(self, update: UpdateState, iteration: int) -> None:
        """Make the step."""
        assert update.optimizer is not None
        engine, replaced = self.step.engine, self.step.overrides.step
        step: Callable[[], Any] = update.optimizer.step
        compute_again = partial(self.compute, update, iteration)
        update.again, refuse = compute_again, update.again
        if update.window.kept is not None and needs_closure(update.optimizer):
            losses = [self.mean_loss(update.window.kept)]

            def closure() -> Tensor:
                # The first evaluation is the one that was made to find out whether there is to be a step.
                return losses.pop() if losses else compute_again()

            step = partial(update.optimizer.step, closure)
        try:
            if replaced is None:
                step()
            else:
                replaced(engine, update, partial(_unless_skipped, update, step))
        finally:
            update.again = refuse
            update.evaluation = 0

    def compute(self, update: UpdateState, iteration: int) -> Tensor:
        """The window's gradients at the current weights, and its mean loss; output and reported loss stay as they were."""
        engine, state, window = self.step.engine, self.step.state, update.window
        signals, gradients = self.step.signals, self.step.overrides.gradients
        assert window.kept is not None
        assert update.optimizer is not None
        micro_steps, own = self.micro_steps(window.kept), len(window.kept)
        seen = state.batch, update.output, update.raw_loss, update.backward_loss, update.hidden
        window.held, window.extra_weight = 0, ZERO
        clear_gradients(update.optimizer)
        update.evaluation += 1
        update.can_skip = not needs_closure(update.optimizer)  # a closure is called within the step
        engine.signals.notify(engine, Lifecycle.RECOMPUTING, update, iteration)
        losses: list[Kept] = []
        with signals.without_recording():
            listened = signals.due <= iteration
            for place, (batch, _, weight, share) in enumerate(micro_steps, 1):
                state.batch = batch
                update.sync_gradients, update.share = place == own, share
                if gradients is None:
                    self.step.compute_gradients(update, iteration, listened)
                else:
                    self.step.let_compute(gradients, update, iteration, listened)
                if update.raw_loss is not None:
                    losses.append((batch, update.backward_loss.detach(), weight, share))
            self.average(update, losses)
            if listened and signals.gradients_ready.due <= iteration:
                signals.gradients_ready.emit(engine, iteration)
        state.batch, update.output, update.raw_loss, update.backward_loss, update.hidden = seen
        update.can_skip = False
        return self.mean_loss(losses)

    def micro_steps(self, kept: list[Kept]) -> list[Any]:
        """The micro-steps of a window whose gradients are computed again."""
        return list(kept)

    def average(self, update: UpdateState, losses: list[Kept]) -> None:
        """`average` of gradients that were computed again."""
        if not losses:
            raise RuntimeError(
                f"update {update.name!r} returned a loss at first, but none when the step recomputed the gradients "
                f"(recomputation {update.evaluation}); forward and loss must give the same result every time"
            )
        if not update.window.average(update.parameters):
            update.skip(NO_WEIGHT)

    def mean_loss(self, window: list[Kept]) -> Tensor:
        """The mean loss of a window."""
        window = counted(window)
        if len(window) == 1:
            return window[0][1]
        total = sum((weight for _, _, weight, _ in window), start=ZERO)
        mean: Tensor = torch.stack([loss * weight for _, loss, weight, _ in window]).sum() / total
        return mean


def counted(window: list[Kept]) -> list[Kept]:
    """The micro-steps of a window that count in its mean; the first one if none does."""
    return [one for one in window if not counts_nothing(one[2])] or window[:1]


def _unless_skipped(update: UpdateState, step: Callable[[], Any]) -> Any:
    """The optimizer's step, unless the gradients that were computed for it again have led to a skip."""
    return None if update.skipped is not None else step()
