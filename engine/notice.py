"""How a rank gives notice, once in a window, of what the others cannot know: a skip, a stop, a batch that it lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from .distributed.processes import Processes

if TYPE_CHECKING:
    from .update import UpdateState

__all__ = ["Carrier", "SeparateCarrier"]


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
