"""Running another engine inside this one, without a trace in this one's training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ..authoring.randomness import unchanged_random_state
from ..core.connection import Connection, Phase
from ..core.events import EventEnum, Events, Lifecycle
from ..core.handler import Handler
from ..core.modes import Modes
from ..data.first_batches import FirstBatches
from ..data.loading import generators_of
from ..data.source import DataError
from ..models.streams import begin_stream
from ..updates.optimizer_modes import weights_to_evaluate
from .empty_data import has_no_batch

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["check_evaluable", "evaluate", "evaluating", "inherited", "measure", "prepare_batch", "sanity_check"]


def evaluate(
    engine: Engine,
    evaluator: Engine,
    data: Iterable[Any] | None,
    *,
    prefix: str = "",
    inherit: bool = True,
    **bounds: Any,
) -> dict[str, Any]:
    """Run an evaluator on data, and store what it measures in the engine's metrics; see `Engine.evaluate`."""
    if getattr(evaluator, "training", True):
        raise ValueError(f"evaluate({evaluator!r}): the evaluator must not train; build it with update.evaluation()")
    seen = dict(evaluator.state.metrics.serials)
    data = _data_for(engine, evaluator, data)
    begun = engine.signal(Events.EVALUATION_STARTED)
    before = begun.fired
    try:
        with _as_part_of(engine, evaluator, inherit=inherit):
            engine.signals.emit(engine, Events.EVALUATION_STARTED)
            engine.signals.notify(engine, Lifecycle.EVALUATING, evaluator)
            with unchanged_random_state(*generators_of(data)):
                begin_stream(engine, "evaluation", engine.state.iteration)
                evaluator.run(data, **bounds)
    except BaseException:
        begun.fired = before  # only whole evaluations are counted
        raise
    measured = {prefix + name: value for name, value in evaluator.state.metrics.new_since(seen).items()}
    engine.signals.notify(engine, Lifecycle.EVALUATED, evaluator, measured, seen, prefix)
    directions = evaluator.state.metrics.directions
    engine.state.metrics.directions.update(
        {prefix + name: one for name, one in directions.items() if prefix + name in measured}
    )
    engine.state.metrics.evaluated.update(measured)
    engine.state.metrics.update(measured)
    engine.signals.emit(engine, Events.EVALUATION_COMPLETED)
    return measured


def measure(
    engine: Engine, evaluator: Engine, data: Iterable[Any], *, inherit: bool, averages: bool = True
) -> dict[str, Any]:
    """What `evaluate` measures, outside of a run, without an event or a metric in the engine, and as if it had not been.

    Args:
        engine, evaluator, data, inherit: as for `evaluate`.
        averages: whether handlers put their averages in place of the weights, and optimizers the weights of their eval mode.
    """
    metrics = evaluator.state.metrics
    before, seen = metrics.state_dict(), dict(metrics.serials)
    data = _data_for(engine, evaluator, data)
    try:
        with (
            _as_part_of(engine, evaluator, inherit=inherit, convert=averages),
            unchanged_random_state(*generators_of(data)),
        ):
            _prepare(engine, averages=averages)
            begin_stream(engine, "evaluation", engine.state.iteration)
            evaluator.run(data)
            return metrics.new_since(seen)
    finally:
        metrics.load_state_dict(before)


@contextmanager
def evaluating(engine: Engine) -> Iterator[None]:
    """The model as an evaluation would see it, for the ``with`` block; see `Engine.evaluating`."""
    modes = Modes(engine.modules.values())
    try:
        with (
            torch.no_grad(),
            _separate_casts(),
            weights_to_evaluate(engine),
            engine.regions.region(),
            engine.snapshots.evaluated_weights(),
            unchanged_random_state(),
        ):
            _prepare(engine, averages=True)
            for event, connection in inherited(engine):
                if event is Events.FORWARD_STARTED:
                    connection.receiver(engine)
            for root in engine.modules.values():
                root.eval()
            yield
    finally:
        modes.put_back()


def _prepare(engine: Engine, *, averages: bool) -> None:
    """Let handlers prepare an evaluation, of which users' functions do not hear.

    Args:
        engine: the engine.
        averages: whether they put averages in place of the weights.
    """
    for one in engine.signal(Events.EVALUATION_STARTED).connections:
        if one.phase is not Phase.PREPARE or one.filter is not None:
            continue
        handler = _handler_of(one)
        if handler is not None and (averages or not hasattr(handler, "in_place")):
            one.receiver(engine)


def sanity_check(engine: Engine, evaluator: Engine, data: Iterable[Any], batches: int, *, inherit: bool = True) -> None:
    """Run an evaluator on the first batches as `evaluate` would, write nothing, and discard what it measures."""
    metrics = evaluator.state.metrics
    before, was_dry, evaluator.dry_run = metrics.state_dict(), evaluator.dry_run, True
    data = FirstBatches(_data_for(engine, evaluator, data), batches)
    try:
        with _as_part_of(engine, evaluator, inherit=inherit), unchanged_random_state(*generators_of(data)):
            evaluator.run(data)
    finally:
        evaluator.dry_run = was_dry
        metrics.load_state_dict(before)


def check_evaluable(engine: Engine, evaluator: Engine, data: Any, where: str, *, reads: bool = False) -> None:
    """Raise the errors that an evaluation on this data would end with, as far as they show before its first batch.

    Args:
        engine: the engine that will evaluate, with the handlers that limit or replace data.
        evaluator: the evaluator.
        data: its data.
        where: what the error begins with.
        reads: whether data without a length is read up to its first batch, where this leaves no trace.

    Raises:
        DataError: for data of length 0, or without a batch.
        ValueError, TypeError: for data that a handler cannot limit.
    """
    if callable(getattr(data, "of_epoch", None)):
        return  # it is loaded for its epoch
    given, data = data, engine.overrides.data_of(evaluator, data)
    try:
        empty, shown = len(data) == 0, "it has length 0"
    except (TypeError, NotImplementedError):
        empty, shown = reads and not engine.processes.distributed and has_no_batch(data), "it yields no batch"
    if empty:
        kind = type(given).__name__
        raise DataError(f"{where}: the data ({kind}) is empty: {shown}; pass data with at least one batch")


def prepare_batch(engine: Engine, batch: Any) -> Any:
    """The batch as the loop would pass it to an update: after the handlers that move or convert batches.

    For data that a handler reads itself. It calls the receivers of GET_BATCH_COMPLETED in Phase.PREPARE that have no filter,
    and does not change ``state.batch``.
    """
    state = engine.state
    current, state.batch = state.batch, batch
    try:
        engine.signal(Events.GET_BATCH_COMPLETED).emit(engine, None, phases=(Phase.PREPARE,))
        return state.batch
    finally:
        state.batch = current


def _data_for(engine: Engine, evaluator: Engine, data: Any) -> Any:
    """The data that an evaluator iterates: of this epoch where it is reloaded, and as handlers limit or replace it."""
    of_pass = getattr(data, "of_pass", None)
    if callable(of_pass):
        data = of_pass(max(engine.state.epoch - 1, 0))
    return engine.overrides.data_of(evaluator, data)


@contextmanager
def _as_part_of(engine: Engine, evaluator: Engine, *, inherit: bool, convert: bool = True) -> Iterator[None]:
    """Let an evaluator run as a part of an engine: with its ranks, seed, findings, and what it inherits.

    Args:
        engine, evaluator, inherit: as for `evaluate`.
        convert: whether optimizers with an eval mode put its weights in place.
    """
    was_dry, evaluator.dry_run = evaluator.dry_run, engine.dry_run or evaluator.dry_run
    was_with = evaluator.group.processes, evaluator.group.shard_policy, evaluator.group.data
    evaluator.group.use(engine.group.processes, engine.group.shard_policy, engine.group.data)
    if not evaluator.seed_given:
        evaluator.seed = engine.seed  # its data is drawn as in this run, also after a resume in another process
    try:
        with (
            _separate_casts(),
            weights_to_evaluate(engine) if convert else nullcontext(),
            engine.regions.region(),
            engine.snapshots.evaluated_weights(),
            evaluator.findings.within(engine),
            ExitStack() as stack,
        ):
            for event, connection in inherited(engine, evaluator) if inherit else ():
                signal = evaluator.signal(event)
                signal.add(connection)
                stack.callback(signal.remove, connection)
            yield
    finally:
        evaluator.dry_run = was_dry
        evaluator.group.use(*was_with)


@contextmanager
def _separate_casts() -> Iterator[None]:
    """Within an autocast of the training, let neither it nor the evaluation use copies that the other has cast of the weights."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


# ---- what an evaluator inherits -----------------------------------------------------------------------------------


def inherited(engine: Engine, evaluator: Engine | None = None) -> list[tuple[EventEnum, Connection]]:
    """The receivers that an evaluator inherits while this engine runs it, because they prepare the training batches.

    These are the receivers of GET_BATCH_COMPLETED in Phase.PREPARE without a filter, and those of device and precision handlers
    at MODEL_SETUP and FORWARD_STARTED. A handler is not inherited if it only trains, or if the evaluator has an enabled handler
    of the same class or with the same override. A function is not inherited if it is also connected to the evaluator.

    Args:
        engine: the engine that evaluates.
        evaluator: the evaluator; None for what any evaluator would inherit.
    """
    found: list[tuple[EventEnum, Connection]] = []
    for event, phases in (
        (Events.MODEL_SETUP, (Phase.PREPARE,)),
        (Events.GET_BATCH_COMPLETED, (Phase.PREPARE,)),
        (Events.FORWARD_STARTED, tuple(Phase)),
    ):
        for one in engine.signal(event).connections:
            if one.phase not in phases or one.filter is not None:
                continue
            handler = _handler_of(one)
            if handler is not None and handler.trains:
                continue
            if event is not Events.GET_BATCH_COMPLETED and not _overridden_by(handler):
                continue
            if evaluator is None or not _has_its_own(evaluator, event, one, handler):
                found.append((event, Connection(one.receiver, one.phase, one.key[1], None, one.owner)))
    return found


def _handler_of(connection: Connection) -> Handler | None:
    """The handler whose method is connected; an evaluator may have inherited it, and is not the engine it is attached to."""
    handler = getattr(connection.receiver, "__self__", None)
    return handler if isinstance(handler, Handler) else None


def _overridden_by(handler: Handler | None) -> set[Any]:
    """Which of device and precision a handler overrides."""
    engine = None if handler is None else handler.engine
    return (
        set()
        if handler is None or engine is None
        else {one for one in engine.overrides.owned_by(handler) if getattr(one, "inherited", False)}
    )


def _has_its_own(evaluator: Engine, event: EventEnum, connection: Connection, handler: Handler | None) -> bool:
    if handler is None:
        return evaluator.signal(event).has(connection.receiver)
    own = [one for one in evaluator.handlers.values() if one.enabled]
    overridden = _overridden_by(handler)
    return any(one is handler or type(one) is type(handler) or overridden & _overridden_by(one) for one in own)
