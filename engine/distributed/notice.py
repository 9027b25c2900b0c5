"""How a rank gives notice, once in a window, of what the others cannot know: a skip, a stop, a batch that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from .processes import Processes

if TYPE_CHECKING:
    from ..core.update import UpdateState

__all__ = ["Carrier", "SeparateCarrier", "backward_beside"]


class Carrier(Protocol):
    """Tells each rank whether any rank gives notice. Every rank sends once in a window, and receives once, after its backward."""

    def send(self, update: UpdateState, notice: bool) -> tuple[Tensor, Tensor] | None:
        """Send this rank's notice, before the backward that reduces the gradients.

        Returns:
            A leaf tensor and its gradient that the backward also starts from, if the notice travels with the gradients.
        """
        ...

    def receive(self, update: UpdateState) -> bool:
        """Whether any rank gave notice."""
        ...


class SeparateCarrier:
    """Carries notices by a small all-reduce of their own, which runs beside the backward: nobody waits for it there.

    For gradients that are not reduced in buckets of this process, as with FSDP, and for devices, where reading a gradient would
    wait for the device.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._answer: Callable[[], bool] | None = None

    def send(self, update: UpdateState, notice: bool) -> None:
        self._answer = self._processes.any_later(notice)

    def receive(self, update: UpdateState) -> bool:
        assert self._answer is not None
        return self._answer()


def backward_beside(loss: Tensor, notice: Tensor, value: Tensor, *, inputs: Sequence[Tensor] | None) -> None:
    """The backward of a loss, which gives a notice the gradient ``value`` on its way.

    Args:
        loss: the loss, a scalar.
        notice: a leaf tensor that the loss does not depend on.
        value: its gradient.
        inputs: the other tensors that get gradients; None for all.
    """
    inputs = () if inputs is None else (*inputs, notice)
    if type(loss) is not Tensor or loss.numel() != 1 or not loss.is_floating_point():
        torch.autograd.backward((loss, notice), (None, value), inputs=inputs or None)  # it knows what to do, or to say
    else:
        # What torch.autograd.backward calls once it has checked its arguments, which takes 7 % of a small model's iteration.
        _engine_run_backward(
            (loss, notice),
            (torch.ones_like(loss), value),
            False,
            False,
            inputs,
            allow_unreachable=True,
            accumulate_grad=True,
        )
