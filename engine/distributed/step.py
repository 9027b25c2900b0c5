"""The training step of several ranks, which make one step together: on the gradients of all, or on none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..core.recomputation import NO_WEIGHT, Recomputation, counted
from ..core.step import Step
from ..core.update import NO_GRADIENT, UpdateState
from ..core.window import ONE, Kept
from .notice import backward_beside

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["DistributedStep"]

_NO_BATCH = (None, None, 0, 1)


class _DistributedRecomputation(Recomputation):
    """A `Recomputation` on the gradients of all ranks."""

    step: DistributedStep

    def micro_steps(self, kept: list[Kept]) -> list[Any]:
        """As many on all ranks where a handler computes the gradients: it may have to agree with them, as often as they do."""
        step = self.step
        if step.overrides.gradients is None or not step.feed.has_data:
            return list(kept)
        return [*kept, *[_NO_BATCH] * (max(step.processes.gather(len(kept))) - len(kept))]

    def average(self, update: UpdateState, losses: list[Kept]) -> None:
        """As the step averages its gradients."""
        self.step.average(update)

    def mean_loss(self, window: list[Kept]) -> Tensor:
        """That of the windows of all ranks, since a line search has to go the same way on all of them."""
        window = counted(window)
        losses, weights = self.step.processes.sum(
            sum(float(loss * weight) for _, loss, weight, _ in window), sum(float(weight) for _, _, weight, _ in window)
        )
        return torch.tensor(losses / weights, dtype=torch.float64)


class DistributedStep(Step):
    """A `Step` on the gradients of all ranks: each gives notice beside its backward of what the others cannot know."""

    __slots__ = ("group", "processes")
    recomputation: ClassVar[type[Recomputation]] = _DistributedRecomputation

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.alone = False
        self.group = engine.group
        self.processes = engine.processes

    def closes(self, update: UpdateState, iteration: int) -> bool:
        """As `Step` does it; the gradients of a micro-step that closes the window are reduced."""
        closes = super().closes(update, iteration)
        update.sync_gradients, update.share = closes, ONE if self.state.batch is None else self.feed.share()
        return closes

    def backward(self, update: UpdateState) -> None:
        """The backward, beside the notice of this rank if its gradients are reduced."""
        beside = self.group.send_notice(update) if update.sync_gradients else None
        loss, inputs = self.weighted(update)
        if beside is None:
            loss.backward(inputs=inputs)
        else:
            backward_beside(loss, *beside, inputs=inputs)

    def average(self, update: UpdateState) -> None:
        """Let the window be that of all ranks: its gradients reduced, and divided by the weights of all."""
        group, window = self.group, update.window
        if not group.has_sent:  # no backward of this rank has closed the window
            group.send_notice(update, computed=True)
        if self.overrides.reduction is not None:
            self.overrides.reduction(self.engine, update)
        if not group.noticed(update):
            # All ranks have a gradient of every micro-step, and none counts more than another.
            if window.size != 1:
                window.divide(update.parameters, window.size)
            return
        own = float(window.held + window.extra_weight)
        held, weight, skipped, unknown = group.sum(
            window.held, own, update.skipped is not None, isinstance(window.extra_weight, Tensor)
        )
        if skipped:
            self._skip_on_all_ranks(update)
        elif held == 0:
            update.skip(NO_GRADIENT)
        elif weight == 0:
            # As in a single process, tensors that sum to zero are not detected; the gradients are zero then.
            if not unknown:
                update.skip(NO_WEIGHT)
        elif weight != self.processes.world_size:  # reduced gradients are a mean over the ranks, and so is this
            window.divide(update.parameters, weight / self.processes.world_size)

    def agree(self, update: UpdateState) -> None:
        """Skip the step on all ranks if one skips it."""
        if self.group.sync_skips and self.group.sum(update.skipped is not None)[0]:
            self._skip_on_all_ranks(update)

    def _skip_on_all_ranks(self, update: UpdateState) -> None:
        reasons = self.processes.gather(update.skipped)
        rank = next(rank for rank, reason in enumerate(reasons) if reason is not None)
        reason = reasons[rank]
        if update.can_skip:  # the same on all ranks, also where this one has another reason
            update.skipped = reason if all(one == reason for one in reasons) else f"{reason} (rank {rank})"
