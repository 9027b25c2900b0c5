"""Evaluations that functions make between the iterations: a model that is left in training mode is reported."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from ..authoring.functions import names_in
from ..core.connection import Connection, guarded
from ..core.events import Events
from ..core.part import Reference
from .dropout import is_compiled

if TYPE_CHECKING:
    from ..core.signals import Signal
    from ..engine import Engine

__all__ = ["look_at_forwards"]

_BETWEEN_ITERATIONS = (Events.STARTED, Events.EPOCH_STARTED, Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED)


def look_at_forwards(signal: Signal, connection: Connection) -> None:
    """Look at how a function calls the model in its first call; later calls cost nothing more."""
    if signal.event not in _BETWEEN_ITERATIONS:
        return
    receiver, plain, called = connection.receiver, connection.call, False
    own, of = weakref.ref(connection), weakref.ref(signal)  # they hold what follows

    def call(engine: Engine, **kwargs: Any) -> Any:
        nonlocal called
        connection, signal = own(), of()
        if called or connection is None or signal is None:
            return receiver(engine, **kwargs)
        called = True
        # A single call at STARTED is a look at shapes, or makes lazy layers; one that calls train() itself updates statistics.
        names, least = names_in(receiver), 2 if signal.event is Events.STARTED else 1
        meant = ("train" in names and "eval" not in names) or "reset_running_stats" in names
        with nullcontext() if meant else _looking(engine, f"{connection!r} at {signal.event}", least):
            returned = receiver(engine, **kwargs)
        connection.call = plain
        if connection.filter is None:  # a filtered one is called seldom
            signal.replan()
        return returned

    connection.call = call if connection.when is None else guarded(call, connection.when)


@contextmanager
def _looking(engine: Engine, who: str, least: int) -> Iterator[None]:
    """Look at how often parts of the model are called in a wrong mode, up to so many times."""
    hooks = []
    for root in engine.modules.values() if engine.training else ():
        # A forward may leave some parts out; those of a compiled model would be compiled again for a hook.
        differing = [one for one in root.named_modules() if isinstance(one[1], _DropoutNd | _NormBase)]
        for name, part in [("", root)] if is_compiled(engine) else differing:
            look = partial(_look, Reference(engine), who, _Calls(), least, name)
            hooks.append(part.register_forward_pre_hook(look))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Calls:
    """How often a part was called in a wrong mode; copied with the hooks of the model, as a count of itertools is not."""

    made = 0

    def enough(self, least: int) -> bool:
        """Count a call, and say whether there were so many."""
        self.made += 1
        return self.made >= least


def _look(reference: Reference, who: str, calls: _Calls, least: int, path: str, module: nn.Module, given: Any) -> None:
    if (engine := reference()) is None or torch.is_grad_enabled():
        return
    found = _differing(module) if any(root.training for root in engine.modules.values()) else None
    if found is not None and calls.enough(least):
        inner, statistics = found
        name = path or inner
        engine.remark(
            "W91",
            f"{who} calls the model without gradients, as an evaluation does, but in training mode, where {name!r} "
            "behaves differently",
            "attach Validation(data), or write `with engine.evaluating():` around the calls" + statistics,
            key=who,
        )


def _differing(module: nn.Module) -> tuple[str, str] | None:
    """The first part that behaves differently in training, and what to do instead if that is meant."""
    for name, part in module.named_modules():
        if _differs_in_training(part):
            meant = "; to update statistics on purpose, call model.train() first"
            return name, "" if isinstance(part, _DropoutNd) else meant
    return None


def _differs_in_training(part: nn.Module) -> bool:
    """Whether it drops something, or averages over the batch; not where ``update_bn`` makes new statistics."""
    if isinstance(part, _DropoutNd):
        return part.training and part.p > 0
    return isinstance(part, _NormBase) and part.training and part.track_running_stats and part.momentum is not None
