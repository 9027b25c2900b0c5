"""Putting back what a computation changed: buffers, train and eval modes, and all that a failed attempt at gradients leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..authoring.randomness import random_state, set_random_state
from ..core.events import Events
from ..core.modes import Modes, modules_of
from ..models.explain import is_out_of_memory
from ..resuming.changeable import restored

if TYPE_CHECKING:
    from ..core.update import UpdateState
    from ..engine import Engine

__all__ = ["Buffers", "Modes", "attempt"]


class Buffers:
    """The buffers of some modules, such as BatchNorm's running statistics, so that they can be restored.

    Args:
        roots: the modules; their submodules are included.
    """

    def __init__(self, roots: Iterable[nn.Module] = ()) -> None:
        self._places = [(module._buffers, key) for module in modules_of(roots) for key in module._buffers]

    def copies(self) -> list[tuple[Tensor, Tensor] | None]:
        """Each buffer with a copy of its values; None in place of a buffer that is None."""
        return [None if (buffer := own[key]) is None else (buffer, buffer.clone()) for own, key in self._places]

    def put_back(self, copies: list[tuple[Tensor, Tensor] | None]) -> None:
        """Restore the values and the tensor objects themselves, because a forward pass may have replaced them."""
        for (own, key), copy in zip(self._places, copies, strict=True):
            own[key] = None if copy is None else restored(*copy)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the buffers at the end of the ``with`` block."""
        copies = self.copies()
        try:
            yield
        finally:
            self.put_back(copies)


def attempt(engine: Engine, update: UpdateState, compute: Callable[[], None]) -> bool:
    """Compute gradients; if memory runs out, restore everything, emit UPDATE_RETRIED and return False.

    With several ranks, all fail if one does; ``compute`` must not reduce over the ranks (``update.sync_gradients``).

    The window's gradients, buffers, random states and the batch are restored. Regions that the failed attempt had entered are
    closed.
    """
    state, window = engine.state, update.window
    batch, held, extra_weight, hidden = state.batch, window.held, window.extra_weight, update.hidden
    weight = update.weight
    gradients = [None if p.grad is None else p.grad.clone() for p in update.parameters]
    buffers = Buffers(engine.modules.values())
    copies = buffers.copies()
    random = random_state()
    failed = False
    try:
        compute()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failed = True  # what the traceback holds has to be freed before anything is tried again
    if not engine.processes.any(failed):
        return True
    state.batch, window.held, window.extra_weight, update.hidden = batch, held, extra_weight, hidden
    update.weight = weight
    update.output = update.raw_loss = update.backward_loss = None
    for parameter, gradient in zip(update.parameters, gradients, strict=True):
        parameter.grad = gradient
    window.given = None  # these gradients are copies of those that were counted
    buffers.put_back(copies)
    set_random_state(random)
    engine.signals.emit(engine, Events.UPDATE_RETRIED)
    return False
