"""The accumulation window: the micro-steps whose gradients make one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["ONE", "ZERO", "Kept", "Window", "clear_gradients", "counts_nothing"]

# CPython's small ints are single objects: `is` recognizes the usual case without comparing a tensor, which would synchronize.
ZERO, ONE = 0, 1

Kept = tuple[Any, Tensor, Any, float]
"""What a window was computed from, if that may have to be repeated: batch, mean loss, weight and share of a micro-step."""


class EpochEnd(Protocol):
    """What a window asks of the data: windows do not straddle epochs."""

    epoch_end: int
    """The epoch's last iteration; 0 while it is not known."""

    def on_last_batch(self) -> bool:
        """Whether the current batch is the epoch's last; for unsized data, one batch is read ahead to know."""
        ...


class Window:
    """The micro-steps whose gradients make one optimizer step; one micro-step without accumulation.

    Invariant: the parameters' ``grad`` is the gradient of the sum of weight x loss over those of the `filled` micro-steps that
    gave a gradient. There are `held` of them, and their weights add up to ``held + extra_weight``. Dividing by this sum once
    (`average`) is exact for every window: a short last one, and one whose weights are known only once it is complete.

    Attributes:
        length: the number of micro-steps over which gradients are accumulated in this epoch.
        length_of: the function of the epoch that a handler has put in place for the length; None without one.
        filled: how many micro-steps of the open window were made; 0 if none is open, and once the last one has begun.
        size: how many micro-steps the window has that was completed last.
        held: how many of them gave a gradient.
        extra_weight: by how much the sum of their weights exceeds `held`; an int or float, or a tensor on a device.
        kept: what the window was computed from, for steps that compute it again; None if none do.
        was_cleared: whether gradients of the epoch's first complete window were cleared before its end.
        was_emptied: whether none was left of them.
    """

    __slots__ = (
        "_checked", "extra_weight", "filled", "held", "kept", "length", "length_of", "size",
        "was_cleared", "was_emptied",
    )  # fmt: skip

    def __init__(self) -> None:
        self.length = 1
        self.length_of: Callable[[int], int] | None = None
        self.filled = 0
        self.size = 1
        self.held = 0
        self.extra_weight: Any = ZERO
        self.kept: list[Kept] | None = None
        self.was_cleared = self.was_emptied = False
        self._checked = True

    def closes(self, feed: EpochEnd, iteration: int, *, more: bool) -> bool:
        """Count a micro-step, before its forward; returns whether it completes the window.

        Args:
            feed: what knows the epoch's last batch.
            iteration: the current one.
            more: whether this iteration has further micro-steps, such as time chunks.
        """
        self.filled += 1
        if self.filled < self.length and (more or iteration < feed.epoch_end or not feed.on_last_batch()):
            return False
        self.size, self.filled = self.filled, 0
        return True

    def keep(self, batch: Any, loss: Any, share: float) -> None:
        """Remember what the micro-step that was just made was computed from."""
        assert self.kept is not None
        before = sum((weight for _, _, weight, _ in self.kept), start=ZERO)
        self.kept.append((batch, loss.detach(), self.held + self.extra_weight - before, share))

    def average(self, parameters: Sequence[Tensor], *, one_backward: bool = True) -> bool:
        """Make the gradients those of the weighted mean loss; False if the weights add up to zero.

        Args:
            parameters: those of the update.
            one_backward: whether a micro-step has one backward, and not one a piece.
        """
        if not self._checked and self.held > 1:
            self._checked, self.was_cleared = True, self._misses_gradients(parameters, one_backward)
        total = self.held + self.extra_weight
        if isinstance(total, Tensor):
            total = total + (
                total == 0
            )  # a sum of zero cannot be noticed without synchronizing; its gradients are zero
        elif total == 0:
            return False
        self.divide(parameters, total)
        return True

    def _misses_gradients(self, parameters: Sequence[Tensor], one_backward: bool) -> bool:
        """Whether no gradient was added to as often as there were micro-steps: torch adds in place, and counts that.

        Gradients that were set to zero in place were changed more often, and are still zero if no backward came after it.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            self.was_emptied = any(p.requires_grad for p in parameters)
            return self.was_emptied
        dense = [
            one for one in gradients if type(one) is Tensor and one.layout is torch.strided and not one.requires_grad
        ]
        if len(dense) < len(gradients):
            return False
        if max(one._version for one in dense) < self.held - 1:
            return True
        self.was_emptied = one_backward and self.was_zeroed(dense)
        return self.was_emptied

    def was_zeroed(self, gradients: Sequence[Tensor]) -> bool:
        """Whether these gradients are zero, and were changed more often than micro-steps have added to them."""
        changed = all(one._version >= self.held for one in gradients)
        return changed and not any(bool(one.any()) for one in gradients)

    def trust_gradients(self) -> None:
        """Do not look for cleared gradients in this epoch: they were replaced for a good reason."""
        self._checked = True

    def divide(self, parameters: Sequence[Tensor], total: Any) -> None:
        """Divide the gradients by a number."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:  # none, if somebody has cleared them
            torch._foreach_div_(gradients, total)

    def discard(self, optimizer: Optimizer | None) -> None:
        """Forget what the window holds; how far it is filled stays."""
        self.held = 0
        self.extra_weight = ZERO
        if self.kept:
            self.kept.clear()
        if optimizer is not None:
            clear_gradients(optimizer)

    def begin_epoch(self, epoch: int) -> None:
        """Take the length of this epoch."""
        self.length = 1 if self.length_of is None else self.length_of(epoch)
        self._checked, self.was_cleared, self.was_emptied = self.filled > 0, False, False

    def state_dict(self) -> dict[str, Any]:
        return {"filled": self.filled, "held": self.held, "extra_weight": self.extra_weight, "kept": self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave; the gradients are put back with the parameters."""
        self.filled, self.held, self.extra_weight = state["filled"], state["held"], state["extra_weight"]
        self.trust_gradients()
        if self.kept is not None:
            self.kept.extend(state["kept"])


def counts_nothing(weight: Any) -> bool:
    """Whether a weight is 0, so that a loss that is NaN, or its gradient, must not reach the window."""
    if isinstance(weight, Tensor) and (weight.device.type != "cpu" or weight.numel() != 1):
        return False  # reading it would synchronize; or it is an error, which comes with the product
    return bool(weight == 0)


def clear_gradients(optimizer: Optimizer) -> None:
    """What ``optimizer.zero_grad()`` does, unless the optimizer has one of its own.

    torch's opens a region for the profiler and one without compilation around it: 6 of the 150 us of a tiny step.
    """
    if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in optimizer.__dict__:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
