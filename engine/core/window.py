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


class Given(Protocol):
    """What counts the gradients that the backwards of a window give."""

    def begin_backward(self) -> None: ...

    def end_backward(self) -> None: ...

    def compare(self) -> None: ...

    def confirm(self) -> None: ...


class Window:
    """The micro-steps whose gradients form one optimizer step; a single micro-step without accumulation.

    Invariant: the parameters' ``grad`` is the gradient of the sum of weight x loss over those of the `filled` micro-steps that
    produced a gradient. There are `held` of them, and their weights add up to ``held + extra_weight``. Dividing by this sum
    once (`average`) is exact for every window, even a short last one or one whose weights are known only once it is complete.

    Attributes:
        length: the number of micro-steps over which gradients are accumulated in this epoch.
        length_of: a handler's function that returns the length for an epoch; None if there is none.
        filled: how many micro-steps of the open window are complete; 0 if none is open, and once the last one has begun.
        size: how many micro-steps the last completed window has.
        held: how many micro-steps produced a gradient.
        extra_weight: by how much the sum of their weights exceeds `held`; an int or float, or a tensor on a device.
        kept: what the window was computed from, for steps that compute it again; None if no step does.
        given: counts the gradients that its backward passes produce, in the first windows of a run; otherwise None.
    """

    __slots__ = (
        "extra_weight", "filled", "given", "held", "kept", "length", "length_of", "size",
    )  # fmt: skip

    def __init__(self) -> None:
        self.length = 1
        self.length_of: Callable[[int], int] | None = None
        self.filled = 0
        self.size = 1
        self.held = 0
        self.extra_weight: Any = ZERO
        self.kept: list[Kept] | None = None
        self.given: Given | None = None

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

    def average(self, parameters: Sequence[Tensor]) -> bool:
        """Make the gradients those of the weighted mean loss; False if the weights add up to zero."""
        if self.given is not None:
            self.given.compare()
        total = self.held + self.extra_weight
        if isinstance(total, Tensor):
            # A sum of zero cannot be noticed without synchronizing; its gradients are zero.
            total = total + (total == 0)
        elif total == 0:
            return False
        self.divide(parameters, total)
        return True

    def divide(self, parameters: Sequence[Tensor], total: Any) -> None:
        """Divide the gradients by a number."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:  # none, if somebody has cleared them
            torch._foreach_div_(gradients, total)

    def discard(self, optimizer: Optimizer | None) -> None:
        """Forget what the window holds; how far it is filled stays."""
        if self.given is not None:
            self.given.confirm()
            self.given = None
        self.held = 0
        self.extra_weight = ZERO
        if self.kept:
            self.kept.clear()
        if optimizer is not None:
            clear_gradients(optimizer)

    def begin_epoch(self, epoch: int) -> None:
        """Take the length of this epoch."""
        self.length = 1 if self.length_of is None else self.length_of(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"filled": self.filled, "held": self.held, "extra_weight": self.extra_weight, "kept": self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave; the gradients are put back with the parameters."""
        self.filled, self.held, self.extra_weight = state["filled"], state["held"], state["extra_weight"]
        self.given = None
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
