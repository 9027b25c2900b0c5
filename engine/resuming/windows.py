"""Open accumulation windows in the state of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ..core.blame import warn
from ..core.connection import Phase
from ..core.events import Events
from ..distributed.sharded import spread_like
from ..distributed.shards import OF_SHARDS, Shards

if TYPE_CHECKING:
    from ..core.update import UpdateState
    from ..engine import Engine

__all__ = ["OF_MICRO_STEPS", "put_window_back", "window_state"]

OF_MICRO_STEPS = (
    Events.FORWARD_STARTED,
    Events.FORWARD_COMPLETED,
    Events.LOSS_COMPUTED,
    Events.BACKWARD_STARTED,
    Events.BACKWARD_COMPLETED,
)
"""The events inside the computation of a micro-step."""
_MAKING_GRADIENTS = (Events.GET_BATCH_COMPLETED, Events.UPDATE_STARTED, *OF_MICRO_STEPS)


def window_state(engine: Engine, update: UpdateState, taken: Callable[[Any], Any]) -> dict[str, Any]:
    """The state of an open window; ``taken`` copies what the run changes later."""
    gradients = [taken(p.grad) for p in update.parameters]
    _check_reduced(update, gradients)
    _check_kept(update)
    state = update.window.state_dict()
    if state["kept"]:
        state["kept"] = [(_by_shard(engine, batch), *rest) for batch, *rest in state["kept"]]
    window = {key: taken(value) for key, value in state.items()}
    return window | {"gradients": gradients, "made_with": _changing_gradients(engine)}


def _by_shard(engine: Engine, batch: Any) -> Any:
    """A kept batch; of a step with shards, the batches of this process by their shards."""
    if not isinstance(batch, Shards) or engine.group.shards is None:
        return batch
    return {OF_SHARDS: {str(shard): own for shard, own in zip(engine.group.shards.own, batch, strict=True)}}


def _own_batches(engine: Engine, batch: Any) -> Any:
    """What `_by_shard` was given; of a step with shards, for the shards of this process."""
    if engine.group.shards is None or not isinstance(batch, Mapping) or set(batch) != {OF_SHARDS}:
        return batch
    own = Shards(batch[OF_SHARDS].get(str(shard)) for shard in engine.group.shards.own)
    own.prepared = True
    return own


def put_window_back(
    engine: Engine, update: UpdateState, window: Mapping[str, Any] | None, copied: Callable[[Any], Any]
) -> None:
    """Put an open window back in place, unless handlers that have made its gradients are missing."""
    if window is None:
        return
    if missing := sorted(set(window["made_with"]) - set(_changing_gradients(engine))):
        warn(
            f"the gradients in the open accumulation window of update {update.name!r} are discarded, because they "
            f"were computed with handlers that this run does not have: {', '.join(map(repr, missing))}",
        )
        return
    state = copied({key: window[key] for key in ("filled", "held", "extra_weight", "kept")})
    state["kept"] = state["kept"] and [(_own_batches(engine, batch), *rest) for batch, *rest in state["kept"]]
    update.window.load_state_dict(state)
    for parameter, gradient in zip(update.parameters, window["gradients"], strict=True):
        parameter.grad = None if gradient is None else spread_like(gradient.clone().to(parameter.device), parameter)


def _changing_gradients(engine: Engine) -> list[str]:
    """The handlers that influence gradients: those that change anything between the batch and the end of the backward."""
    connections = [one for event in _MAKING_GRADIENTS for one in engine.signal(event).connections]
    return sorted({one.owner for one in connections if one.owner is not None and one.phase < Phase.RECORD})


def _check_reduced(update: UpdateState, gradients: Sequence[Tensor | None]) -> None:
    """Raise RuntimeError for a window whose gradients are not accessible: those of a sharded model that was not reduced yet."""
    if update.window.held and not any(gradient is not None for gradient in gradients):
        raise RuntimeError(
            f"the open accumulation window of update {update.name!r} contains gradients that have not been reduced "
            "over the ranks yet, so it cannot be saved; save at the end of a window, such as at the end of an epoch, "
            "or reduce every batch with FullyShardedDataParallel(reduce_every_batch=True)"
        )


def _check_kept(update: UpdateState) -> None:
    """Raise TypeError for kept batches that ``torch.load(weights_only=True)`` would not accept."""
    for batch, *_ in update.window.kept or ():
        of_shards = batch if isinstance(batch, Shards) else [batch]
        if (found := _unsafe(list(of_shards))) is not None:
            raise TypeError(
                f"the open accumulation window of update {update.name!r} keeps batches that contain a "
                f"{type(found).__name__}, which torch.load(weights_only=True) rejects; build batches from tuples, "
                "lists and dicts, or save at the end of a window"
            )


def _unsafe(value: Any) -> Any:
    if type(value) in (tuple, list):
        return next((found for item in value if (found := _unsafe(item)) is not None), None)
    if type(value) is dict:
        return next((found for item in value.values() if (found := _unsafe(item)) is not None), None)
    return None if value is None or isinstance(value, Tensor | int | float | str | np.generic) else value
