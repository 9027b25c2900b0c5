"""What cannot be beside steps that consist of shards, since it would depend on which process computes which of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.events import Events
from ..core.overrides import Override

if TYPE_CHECKING:
    from ..core.connection import Connection
    from ..core.handler import Handler
    from ..engine import Engine

__all__ = ["OF_A_SHARD", "check_handlers", "functions_of_shards"]

OF_A_SHARD = (
    Events.GET_BATCH_STARTED,
    Events.GET_BATCH_COMPLETED,
    Events.FORWARD_STARTED,
    Events.FORWARD_COMPLETED,
    Events.LOSS_COMPUTED,
    Events.BACKWARD_STARTED,
    Events.BACKWARD_COMPLETED,
)
"""The events that are emitted once for each shard of a process."""

_OF_THE_STEP = (
    Events.UPDATE_STARTED,
    Events.UPDATE_COMPLETED,
    Events.ITERATION_STARTED,
    Events.GRADIENTS_READY,
    Events.OPTIMIZER_STEP_STARTED,
    Events.OPTIMIZER_STEP_COMPLETED,
    Events.ITERATION_COMPLETED,
)
_OF_ONE_BATCH = {"batch", "output"}


def check_handlers(engine: Engine) -> None:
    """Raise ValueError for a handler that has not declared what it does with shards."""
    for handler in engine.handlers.values():
        if not handler.enabled or getattr(handler, "by_shard", False):
            continue
        if (why := _reason(engine, handler)) is not None:
            raise ValueError(
                f"{handler.name!r} {why}, but in a step with shards, each shard has its own batch, held by the process "
                "that computes the shard. Detach the handler; or, if it carries no state from one shard to the next, "
                "set by_shard = True in its class"
            )


def _reason(engine: Engine, handler: Handler) -> str | None:
    """What a handler does that belongs to one shard; None if it does nothing of it."""
    if Override.GRADIENTS in engine.overrides.owned_by(handler):
        return "computes the gradients of a batch"
    for event in OF_A_SHARD:
        if any(one.owner == handler.name for one in engine.signal(event).connections):
            return f"acts at {event.name}"
    for event in _OF_THE_STEP if engine.training else ():
        for one in engine.signal(event).connections:
            if one.owner == handler.name and not _OF_ONE_BATCH.isdisjoint(one.reads or ()):
                return f"reads the batch or the output at {event.name}"
    return None


def functions_of_shards(engine: Engine) -> list[Connection]:
    """The connections of users' functions to events of a shard that come after its batch."""
    after_batch = OF_A_SHARD[OF_A_SHARD.index(Events.FORWARD_STARTED) :]
    connections = [one for event in after_batch for one in engine.signal(event).connections]
    return [one for one in connections if one.owner is None and one.is_foreign]
