"""Handlers that are found by their class, and those that join a running engine: errors and profiles name them as everywhere."""

from __future__ import annotations

import contextlib
import gc
import io
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD

from signalfire import Engine, Events, Handler, Phase, Update, on
from signalfire.acts import Override
from signalfire.distributed import Processes
from signalfire.evaluation import prepare_batch
from signalfire.handlers import EMA, DeviceTransfer, History, MicroBatching, Profiler


def make_engine(*handlers: Handler) -> Engine:
    torch.manual_seed(0)
    engine = Engine(Update.supervised(mse_loss, partial(SGD, lr=0.1)), model=nn.Linear(2, 1), seed=0)
    engine.attach(*handlers)
    return engine


def make_data(batches: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.ones(4, 2), torch.ones(4, 1)) for _ in range(batches)]


class Failing(Handler):
    """Fails at one of the events that it is called at when it joins or leaves a run."""

    def __init__(self, event: str) -> None:
        super().__init__()
        self.fails_at = event

    @on(Events.STARTED)
    def start(self, engine: Engine) -> None:
        if self.fails_at == "STARTED":
            raise LookupError("nothing there")

    @on(Events.EPOCH_STARTED)
    def start_epoch(self, engine: Engine) -> None:
        if self.fails_at == "EPOCH_STARTED":
            raise LookupError("nothing there")

    @on(Events.ENDED)
    def end(self, engine: Engine) -> None:
        if self.fails_at == "ENDED":
            raise LookupError("nothing there")


@pytest.mark.parametrize(("event", "method"), [("STARTED", "start"), ("EPOCH_STARTED", "start_epoch")])
def test_an_error_of_a_handler_that_joins_a_run_names_the_handler_and_the_event(event: str, method: str) -> None:
    engine = make_engine()
    engine.connect(Events.ITERATION_COMPLETED(once=2), lambda engine: engine.attach(Failing(event)))
    with pytest.raises(LookupError) as caught:
        engine.run(make_data(), max_epochs=1)
    assert f"raised by failing.{method} at Events.{event}, epoch 1, iteration 2" in caught.value.__notes__
    assert not engine.has("failing")


def test_an_error_of_a_handler_that_leaves_a_run_names_the_handler_and_the_event() -> None:
    engine = make_engine(Failing("ENDED"))
    engine.connect(Events.ITERATION_COMPLETED(once=2), lambda engine: engine.detach("failing"))
    with pytest.raises(LookupError) as caught:
        engine.run(make_data(), max_epochs=1)
    assert "raised by failing.end at Events.ENDED, epoch 1, iteration 2" in caught.value.__notes__
    assert not engine.has("failing")


def test_an_error_of_a_receiver_that_prepares_a_batch_for_a_handler_names_the_receiver() -> None:
    engine = make_engine()

    def fail(engine: Engine) -> None:
        raise LookupError

    engine.connect(Events.GET_BATCH_COMPLETED, fail, phase=Phase.PREPARE)
    with pytest.raises(LookupError) as caught:
        prepare_batch(engine, 1)
    assert caught.value.__notes__ == ["raised by fail at Events.GET_BATCH_COMPLETED, epoch 0, iteration 0"]
    assert engine.state.batch is None


class Watching(Handler):
    @on(Events.STARTED)
    def start(self, engine: Engine) -> None:
        pass

    @on(Events.LOSS_COMPUTED, phase=Phase.RECORD)
    def record_loss(self, engine: Engine) -> None:
        pass


def test_the_profiler_times_receivers_wherever_they_are_called_from() -> None:
    profiler = Profiler(file=io.StringIO())
    engine = make_engine(profiler, DeviceTransfer("cpu"), MicroBatching(pieces=2))
    engine.connect(Events.ITERATION_COMPLETED(once=1), lambda engine: engine.attach(Watching()))
    engine.connect(Events.ITERATION_COMPLETED(once=2), lambda engine: prepare_batch(engine, make_data()[0]))
    engine.run(make_data(), max_epochs=1)
    calls = {(one.name, one.event): one.calls for one in profiler.timings}
    assert calls["watching.start", "STARTED"] == 1, "a handler that joins"
    assert calls["watching.record_loss", "LOSS_COMPUTED"] == 2 * 2, "recorded after the attempt, piece by piece"
    move = next(
        count for (name, event), count in calls.items() if name.startswith("device_transfer") and "BATCH" in event
    )
    assert move == 3 + 1, "a batch that a handler prepares by itself"


def test_a_handler_is_found_by_its_class() -> None:
    history = History()
    engine = make_engine(history, EMA(0.9))
    assert engine.find(History) is history
    assert engine.find(EMA) is engine.handlers["ema"]


def test_what_is_not_there_is_not_found_and_what_is_there_is_listed() -> None:
    engine = make_engine(EMA(0.9))
    with pytest.raises(
        KeyError, match=r"find\(History\): no handler of this class is attached; there are: ema \(EMA\)"
    ):
        engine.find(History)


def test_of_two_handlers_of_a_class_none_is_taken_by_chance() -> None:
    engine = make_engine(History(name="first"), History(name="second"))
    with pytest.raises(KeyError, match=r"find\(History\): 2 handlers of this class are attached: 'first', 'second'"):
        engine.find(History)


def test_the_handlers_are_a_mapping_that_only_attach_and_detach_change() -> None:
    history = History()
    engine = make_engine(history)
    assert dict(engine.handlers) == {"history": history}
    assert list(engine.handlers.values()) == [history]
    handlers: Any = engine.handlers
    with pytest.raises(TypeError):
        handlers["other"] = History(name="other")


def test_what_a_handler_has_overridden_is_given_back_whatever_fails_meanwhile() -> None:
    class Joining(Handler):
        def attached(self, engine: Engine) -> None:
            engine.group.join(Processes(), by=self)
            engine.overrides.replace(Override.STEP, lambda engine, update, step: step(), by=self)
            engine.overrides.replace(Override.REDUCTION, lambda engine, update: None, by=self)
            engine.overrides.replace(Override.WINDOW, lambda epoch: 2, by=self)

    class OnRankZero(Handler):
        rank_zero_only = True

        def __init__(self) -> None:
            super().__init__()
            self.fails = False

        def attached(self, engine: Engine) -> None:
            if self.fails:
                raise LookupError("not again")

    joining, other = Joining(), OnRankZero()
    engine = make_engine(joining, other)
    other.enabled = False  # so that leaving the group connects it once more
    other.fails = True
    engine.detach(joining)
    assert engine.overrides.replaced() == {}
    assert engine.overrides.owned_by("joining") == set()


def test_a_run_inside_a_region_leaves_the_regions_as_they_were() -> None:
    trainer = make_engine()
    evaluator = Engine(trainer.updates[0].spec.evaluation(), model=trainer.model)
    runs: list[int] = []

    @evaluator.on(Events.STARTED)
    def train(engine: Engine) -> None:
        runs.append(trainer.run(make_data(), max_epochs=1).iteration)

    trainer.evaluate(evaluator, make_data())
    entered: list[str] = []
    region = contextlib.nullcontext("entered")
    trainer.connect(Events.STARTED, lambda engine: entered.append(engine.regions.enter(region)))
    trainer.run(make_data(), max_epochs=2)
    assert (runs, entered) == ([3], ["entered"])
    with pytest.raises(RuntimeError, match="no region is open outside a run"):
        trainer.regions.enter(contextlib.nullcontext())


def test_an_engine_with_separate_streams_is_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        engine = Engine(Update.supervised(mse_loss, partial(SGD, lr=0.1)), model=nn.Linear(2, 1), streams="separate")
        engine.run(make_data(), max_epochs=1)
        reference = weakref.ref(engine)
        del engine
        assert reference() is None
    finally:
        gc.enable()
