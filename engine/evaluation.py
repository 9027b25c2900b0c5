"""Running another engine inside this one, without a trace in this one's training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .connection import Phase
from .data.loading import generators_of
from .events import Events
from .randomness import unchanged_random_state
from .streams import begin_stream

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["evaluate", "prepare_batch"]


def evaluate(
    engine: Engine, evaluator: Engine, data: Iterable[Any] | None, *, prefix: str = "", **bounds: Any
) -> dict[str, Any]:
    """Run an evaluator on data, and store what it measures in the engine's metrics; see `Engine.evaluate`."""
    seen = dict(evaluator.state.metrics.serials)
    if engine.overrides.data is not None:
        data = engine.overrides.data(evaluator, data)
    was_dry, evaluator.dry_run = evaluator.dry_run, engine.dry_run or evaluator.dry_run
    was_with = evaluator.group.processes, evaluator.group.shard_policy
    evaluator.group.use(engine.group.processes, engine.group.shard_policy)
    if not evaluator.seed_given:
        evaluator.seed = engine.seed  # its data is drawn as in this run, also after a resume in another process
    try:
        with engine.regions.region(), evaluator.findings.within(engine):
            engine.signals.emit(engine, Events.EVALUATION_STARTED)
            with unchanged_random_state(*generators_of(data)):
                begin_stream(engine, "evaluation", engine.state.iteration)
                evaluator.run(data, **bounds)
    finally:
        evaluator.dry_run = was_dry
        evaluator.group.use(*was_with)
    measured = {prefix + name: value for name, value in evaluator.state.metrics.new_since(seen).items()}
    directions = evaluator.state.metrics.directions
    engine.state.metrics.directions.update(
        {prefix + name: one for name, one in directions.items() if prefix + name in measured}
    )
    engine.state.metrics.update(measured)
    engine.signals.emit(engine, Events.EVALUATION_COMPLETED)
    return measured


def prepare_batch(engine: Engine, batch: Any) -> Any:
    """The batch as the loop would pass it to an update: after the handlers that move or convert batches.

    For data that a handler reads by itself. It calls the receivers of GET_BATCH_COMPLETED in Phase.PREPARE that have no filter,
    and leaves ``state.batch`` as it is.
    """
    state = engine.state
    current, state.batch = state.batch, batch
    try:
        engine.signal(Events.GET_BATCH_COMPLETED).emit(engine, None, phases=(Phase.PREPARE,))
        return state.batch
    finally:
        state.batch = current
