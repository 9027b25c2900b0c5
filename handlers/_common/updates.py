"""Helpers for updates: selection by name, whether an update has made its step, and what its loss takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import WeightedRandomSampler

from signalfire import Engine, Handler, Interval, UpdateState
from signalfire.authoring.functions import names_in
from signalfire.findings import Finding, finding

__all__ = [
    "is_balanced",
    "loss_of",
    "made_step",
    "only_update",
    "selected_updates",
    "sums_of_loss",
    "takes_logits",
    "targets_in",
]


def selected_updates(engine: Engine, name: str | None) -> Sequence[UpdateState]:
    """The update of this name, as a sequence of one; all updates for None."""
    return engine.updates if name is None else (engine.find_update(name),)


def only_update(engine: Engine, name: str | None, *, by: Handler, does: str) -> UpdateState:
    """The update of this name; for None the engine's only one.

    Args:
        engine: The engine.
        name: Name of the update.
        by: The handler, for the error.
        does: What the handler does with the update, for the error: "is measured".

    Raises:
        ValueError: If no name is given and the engine has several updates.
    """
    if name is None and len(engine.updates) > 1:
        names = ", ".join(update.name for update in engine.updates)
        raise ValueError(
            f"{by.name!r}: the engine has several updates ({names}); pass update= to choose the one that {does}"
        )
    return engine.find_update(name)


def made_step(engine: Engine, name: str | None, every: Interval) -> bool:
    """Whether the current update has this name (None: is the first), and its step was a multiple of ``every``."""
    update = engine.state.update
    meant = update is engine.updates[0] if name is None else update.name == name
    return meant and update.skipped is None and update.steps % int(every.value) == 0


def loss_of(update: UpdateState) -> Any:
    """The loss that a user gave."""
    return getattr(update.spec.loss, "loss", None) or update.spec.loss


def sums_of_loss(by: Handler, update: UpdateState) -> Iterator[Finding]:
    """Report that a handler averages a loss that is a sum over the batch, or that a class of the user's may sum."""
    loss = loss_of(update)
    if getattr(loss, "keywords", {}).get("reduction", getattr(loss, "reduction", None)) == "sum":
        of_torch = str(getattr(getattr(loss, "func", loss), "__module__", "")).startswith("torch.")
        yield finding(
            "W04",
            f"{by.name!r} averages the loss of update {update.name!r} over samples, but this loss "
            f"{'is' if of_torch else 'may be'} a sum over the batch (reduction='sum'), which grows with the batch size",
            "use reduction='mean'" if of_torch else "if it is a sum, divide the loss by the number of samples",
            [by.name],
            None if of_torch else "info",
        )


def takes_logits(loss: Any) -> bool:
    """Whether a loss is torch's binary cross entropy of logits, or a function that names it."""
    while isinstance(loss, partial):
        loss = loss.func
    logits = torch.nn.functional.binary_cross_entropy_with_logits
    if loss is logits or isinstance(loss, torch.nn.BCEWithLogitsLoss):
        return True
    function = type(loss).forward if isinstance(loss, torch.nn.Module) else loss
    return bool({logits.__name__, "BCEWithLogitsLoss"} & names_in(function))


def _weights_classes(loss: Any) -> bool:
    """Whether a loss has weights of classes, with which a smaller accuracy may be meant."""
    while isinstance(loss, partial):
        if loss.keywords.get("weight") is not None:
            return True
        loss = loss.func
    return getattr(loss, "weight", None) is not None


def is_balanced(trainer: Engine) -> bool:
    """Whether training compensates for classes of different sizes, by weights in its loss or by how samples are drawn."""
    sampler = getattr(trainer.feed.current.data, "sampler", None)
    return isinstance(sampler, WeightedRandomSampler) or any(_weights_classes(loss_of(one)) for one in trainer.updates)


def targets_in(update: UpdateState, batch: Any) -> Any:
    """The targets of a batch; None if their place is not known."""
    try:
        return update.target_in(batch)
    except Exception:  # as the loss has got its own, whatever is in the way is no problem of the run
        return None
