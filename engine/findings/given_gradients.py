"""Gradients that were cleared inside an accumulation window: what its backwards gave is compared with what its end has."""

from __future__ import annotations

import weakref
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..authoring.functions import is_users, package_of
from ..core.events import Events
from ..distributed.sharded import local_part

if TYPE_CHECKING:
    from ..core.update import UpdateState
    from ..engine import Engine

__all__ = ["GivenGradients"]

_Seen = tuple[Tensor, int, Tensor | None, int]
"""A parameter, its version, its gradient and the version of this."""


class GivenGradients:
    """Counts how often the backwards of one window give each parameter a gradient.

    A gradient that was given and is not there at a later backward, or at the window's end, was cleared or moved aside by
    somebody; so were all of them, where they are zero. Who puts them back before the step has moved them aside.

    Args:
        engine: the engine.
        update: the update whose window has just begun.
    """

    def __init__(self, engine: Engine, update: UpdateState) -> None:
        self._engine = weakref.ref(engine)
        self._update = update.name
        # Gradients that are used as soon as they are there, by a step inside the backward, are cleared for a reason.
        self._parameters = [p for p in update.parameters if p.requires_grad and not p._post_accumulate_grad_hooks]
        self._times: Counter[Tensor] = Counter()
        self._now: set[Tensor] = set()  # which have a gradient of the current backward
        self._gone: set[Tensor] = set()  # which had one, and none before a later backward
        self._hooks: list[Any] = []
        self._after: dict[Tensor, tuple[Tensor | None, int]] = {}  # the gradients as the latest backward left them
        self._changed = False  # whether somebody has changed these before the end of the window
        self._nonzero = False  # whether a gradient was given that is not zero
        self._zeroed = False  # whether all were zero before a later backward
        self._cleared: list[_Seen] | None = None  # those of the end that lack a part
        self._emptied = False  # whether nothing is left of them

    def begin_backward(self) -> None:
        """Count what the backward gives that comes next."""
        self.end_backward()  # of a batch that was skipped, or of a backward that raised an error
        self._now.clear()
        trained = [one for one in self._parameters if one.requires_grad]  # since the window began, some may be frozen
        self._hooks = [one.register_hook(partial(self._look, one)) for one in trained]
        self._hooks += [one.register_post_accumulate_grad_hook(self._note) for one in trained]

    def end_backward(self) -> None:
        """Remove the hooks of this backward."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _look(self, parameter: Tensor, gradient: Tensor) -> None:
        engine = self._engine()
        if engine is not None:
            engine.findings.look(self._count, parameter, gradient)

    def _note(self, parameter: Tensor) -> None:
        self._after[parameter] = parameter.grad, _writes_of(parameter.grad)

    def _count(self, parameter: Tensor, gradient: Tensor) -> None:
        if not self._now:  # nothing of this backward was added yet
            self._zeroed = self._zeroed or self._are_zero()
        if parameter not in self._now:
            self._now.add(parameter)
            if self._times[parameter] and parameter.grad is None:
                self._gone.add(parameter)
            self._times[parameter] += 1
        self._nonzero = self._nonzero or (_is_plain(gradient) and bool(gradient.any()))

    def _are_zero(self) -> bool:
        """Whether the gradients that are there are zero, though others were added to them."""
        there = [p.grad for p in self._times if p.grad is not None]
        return self._nonzero and bool(there) and all(_is_plain(one) and not bool(one.any()) for one in there)

    def compare(self) -> None:
        """Compare at the end of the window, before its gradients are averaged."""
        if (engine := self._engine()) is not None:
            engine.findings.look(self._compare)

    def _compare(self) -> None:
        gone = self._gone | {p for p in self._times if p.grad is None}
        repeated = {p for p, times in self._times.items() if times > 1}
        self._emptied = bool(self._times) and (all(p.grad is None for p in self._times) or self._are_zero())
        if self._emptied or self._zeroed or (gone and repeated <= gone):
            self._changed = self._has_changed()
            self._cleared = [(p, p._version, p.grad, _writes_of(p.grad)) for p in self._times]

    def _has_changed(self) -> bool:
        """Whether a gradient is not as the latest backward that gave it left it."""
        return any(p.grad is not one or _writes_of(one) != writes for p, (one, writes) in self._after.items())

    def confirm(self) -> None:
        """Report after the step what was cleared, unless it came back before the step."""
        self.end_backward()
        if self._cleared is not None and (engine := self._engine()) is not None:
            engine.findings.look(self._report, engine, self._cleared)

    def _report(self, engine: Engine, cleared: list[_Seen]) -> None:
        if self._came_back(engine, cleared):
            return
        update = engine.find_update(self._update)
        engine.findings.report(
            "W16",
            f"gradients of update {update.name!r} were cleared inside an accumulation window of "
            f"{update.window.length} batches, so the step uses only the batches after this point",
            "do not call zero_grad(), because the engine clears the gradients after each step",
            key=update.name,
        )

    def _came_back(self, engine: Engine, cleared: list[_Seen]) -> bool:
        """Whether receivers, or an optimizer that holds gradients itself, may have used what was moved aside."""
        later = any(_has_users(engine, one) for one in (Events.GRADIENTS_READY, Events.OPTIMIZER_STEP_STARTED))
        if self._emptied:
            own = package_of(engine.find_update(self._update).optimizer) != "torch"  # it may hold their sum
            fills = later or own or engine.overrides.step is not None
            return _stepped(cleared) or (fills and any(_has_values(p.grad) for p, *_ in cleared))
        if self._changed and _has_users(engine, Events.BACKWARD_COMPLETED):  # that of the last backward put them back
            return True
        averaged = 1  # the division by the number of batches, in place
        changed = any(p.grad is not grad or _writes_of(p.grad) > version + averaged for p, _, grad, version in cleared)
        return changed and later


def _stepped(cleared: list[_Seen]) -> bool:
    """Whether a step has changed parameters that have no gradient."""
    return any(grad is None and p._version != before for p, before, grad, _ in cleared)


def _has_values(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(local_part(gradient).any())


def _has_users(engine: Engine, event: Events) -> bool:
    """Whether a function or handler of the user's receives an event."""
    return any(is_users(one.receiver) for one in engine.signal(event).connections)


def _writes_of(gradient: Tensor | None) -> int:
    return -1 if gradient is None else gradient._version


def _is_plain(gradient: Tensor) -> bool:
    """Whether a gradient is one to which others are added in place, and whose values can be read."""
    return (
        type(gradient) is Tensor
        and gradient.layout is torch.strided
        and not gradient.requires_grad
        and not gradient.is_meta
    )
