"""Handlers that are found by their class, and those that join a running engine: errors and profiles name them as everywhere."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import signalfire
from signalfire import Engine, Events, Handler, Phase, Update, on
from signalfire.core.overrides import Override
from signalfire.distributed import Processes
from signalfire.handlers import (
    EMA,
    Average,
    Checkpoint,
    DeviceTransfer,
    EarlyStopping,
    History,
    LRScheduling,
    Metrics,
    MicroBatching,
    MixedPrecision,
    Profiler,
)
from signalfire.runs.evaluation import prepare_batch
from signalfire.testing import fingerprint
from signalfire.tuning import find_learning_rate
from tests import kit


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
    assert not any(one.owner == "failing" for signal in engine.signals.all() for one in signal.connections)


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
    with pytest.raises(KeyError, match=r"find\(History\): no such handler is attached; attached handlers: ema \(EMA\)"):
        engine.find(History)


def test_who_looks_for_a_name_is_told_where_names_are() -> None:
    with pytest.raises(TypeError, match=r"find\('ema'\): expected a class.*engine\['ema'\]"):
        make_engine(EMA(0.9)).find("ema")  # type: ignore[arg-type]


def test_of_two_handlers_of_a_class_none_is_taken_by_chance() -> None:
    engine = make_engine(History(name="first"), History(name="second"))
    with pytest.raises(
        KeyError,
        match=r"find\(History\): 2 handlers of this class are attached: 'first', 'second'; choose one by name: engine\[name\]",
    ):
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


# ---- on one engine after another ------------------------------------------------------------------------------------


def folds(*handlers: Handler) -> list[Any]:
    """What each handler's state and the weights are after two engines in turn, as in cross-validation."""
    states = []
    for _ in range(2):
        engine = kit.build(kit.linear(5, 1), Metrics(loss=Average()))
        with engine.attach(*handlers):
            engine.run(kit.batches(3), max_epochs=3)
            states.append(fingerprint(engine))
    return states


@pytest.mark.parametrize(
    "make",
    [
        History,
        lambda: EMA(0.5),
        lambda: EarlyStopping("loss", patience=2, mode="min"),
        lambda: LRScheduling(partial(ReduceLROnPlateau, patience=0), monitor="loss"),
        lambda: LRScheduling(partial(StepLR, step_size=2)),
        lambda: MixedPrecision("fp16"),
    ],
    ids=["history", "ema", "early stopping", "plateau", "schedule", "fp16"],
)
def test_a_handler_that_moves_to_another_engine_begins_there_as_new(make: Any) -> None:
    first, second = folds(make())
    assert first == second


def test_a_checkpoint_that_moves_to_another_engine_knows_nothing_of_the_first_ones_best(tmp_path: Path) -> None:
    handler = Checkpoint(tmp_path, monitor="loss", mode="min")
    first, second = folds(handler)
    assert first == second


def test_a_handler_that_comes_back_to_its_engine_goes_on() -> None:
    history, engine = History(), kit.build(kit.linear(5, 1), Metrics(loss=Average()))
    engine.attach(history).detach()
    engine.attach(history)
    engine.run(kit.batches(3), max_epochs=1)
    engine.detach(history)
    engine.run(kit.batches(3), max_epochs=2)
    engine.attach(history)
    engine.run(kit.batches(3), max_epochs=3)
    assert [epoch for epoch, _, _ in history.records["loss"]] == [1, 3]
    engine.reset()
    assert not history.records, "as it was first attached"


def test_moving_a_schedule_leaves_the_rate_of_the_first_engine_as_it_is() -> None:
    schedule = LRScheduling(partial(StepLR, step_size=1))
    first, second = (kit.build(kit.linear(5, 1)) for _ in range(2))
    with first.attach(schedule):
        first.run(kit.batches(3), max_epochs=1)
    rates = [group["lr"] for group in first.updates[0].optimizer.param_groups]  # type: ignore[union-attr]
    with second.attach(schedule):
        second.run(kit.batches(3), max_epochs=1)
    assert [group["lr"] for group in first.updates[0].optimizer.param_groups] == rates  # type: ignore[union-attr]


def test_a_copy_of_a_handler_begins_as_new_too() -> None:
    history, engine = History(), kit.build(kit.linear(5, 1), Metrics(loss=Average()))
    engine.attach(history)
    engine.run(kit.batches(3), max_epochs=1)
    again = kit.build(kit.linear(5, 1), Metrics(loss=Average()), copy.deepcopy(history))
    again.run(kit.batches(3), max_epochs=1)
    assert len(again.find(History).records["loss"]) == 1


# ---- names, handles, blocks -----------------------------------------------------------------------------------------


def test_a_name_that_is_not_there_is_answered_with_those_that_are() -> None:
    engine = make_engine(History(), EMA())
    with pytest.raises(
        KeyError, match="no handler 'historry' is attached; attached handlers: history, ema; did you mean 'history'"
    ):
        engine.handlers["historry"]
    with pytest.raises(AttributeError, match=r"engine\['ema'\], or by its class, engine\[EMA\]"):
        engine.handlers.ema  # noqa: B018
    assert engine.handlers.get("historry") is None
    assert "ema" in engine.handlers


def test_handles_that_outlive_the_engine_keep_nothing_alive() -> None:
    engine = make_engine()
    history = History()
    handles = [engine.attach(history), engine.connect(Events.STARTED, lambda engine: None)]
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    for handle in handles:
        handle.detach()


def test_without_that_is_not_entered_is_reported_and_an_unknown_name_refused_at_once() -> None:
    engine = make_engine(EMA())
    with pytest.warns(signalfire.FindingWarning, match="W45.*'ema'.*it disabled nothing"):
        engine.without("ema")
    with pytest.raises(KeyError, match="no handler 'emma'"):
        engine.without("emma")
    block = engine.without("ema")
    with block:
        assert not engine.handlers["ema"].enabled
    del block
    assert engine.handlers["ema"].enabled


class Change(Handler):
    """Changes the first weights as an epoch ends; several of these do not commute, and have one phase and rank."""

    def __init__(self, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(name=name)
        self.change = change

    @on(Events.EPOCH_COMPLETED)
    def apply(self, engine: Engine) -> None:
        change_weights(engine.model, self.change)


def change_weights(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with torch.no_grad():
        weight = next(model.parameters())
        weight.copy_(change(weight))


def without_nested(engine: Engine) -> None:
    with engine.without("double"), engine.without("add", "square"):
        engine.wiring()


def toggled_in_another_order(engine: Engine) -> None:
    for name in ("square", "double", "add"):
        engine.handlers[name].enabled = False
    for name in ("add", "square", "double"):
        engine.handlers[name].enabled = True


def toggled_inside_a_run(engine: Engine) -> None:
    double = engine.handlers["double"]

    @engine.on(Events.ITERATION_COMPLETED(before=3))
    def toggle(engine: Engine) -> None:
        double.enabled = not double.enabled


def muted(engine: Engine) -> None:
    with engine.signal(Events.EPOCH_COMPLETED).muted(), engine.without("double", "add"):
        engine.handlers["square"].enabled = False
    engine.handlers["square"].enabled = True


def swept(engine: Engine) -> None:
    find_learning_rate(engine, make_data(4), steps=4, diverges=None)


def joined_by_another(engine: Engine) -> None:
    with engine.without("double"):
        engine.connect(Events.EPOCH_COMPLETED, lambda engine: change_weights(engine.model, torch.neg))
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: change_weights(engine.model, torch.neg))


@pytest.mark.parametrize(
    "toggle", [without_nested, toggled_in_another_order, toggled_inside_a_run, muted, swept, joined_by_another]
)
def test_handlers_that_were_disabled_run_in_their_order_of_before(toggle: Callable[[Engine], object]) -> None:
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "double": lambda weight: weight * 2,
        "add": lambda weight: weight + 1,
        "halve": lambda weight: weight / 2,
        "square": lambda weight: weight * weight,
    }
    engine = make_engine(Change("double", changes["double"]), Change("add", changes["add"]))
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: change_weights(engine.model, changes["halve"]))
    engine.attach(Change("square", changes["square"]))
    model = copy.deepcopy(engine.model)
    toggle(engine)
    engine.run(make_data(2), max_epochs=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    for x, y in make_data(2):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    for change in changes.values():
        change_weights(model, change)
    kit.assert_same(engine.model, model)


def test_a_handler_that_is_detached_and_attached_again_goes_to_the_end() -> None:
    first, second = Change("first", torch.neg), Change("second", torch.neg)
    engine = make_engine(first, second)
    engine.detach(first)
    engine.attach(first)
    assert [one.owner for one in engine.signal(Events.EPOCH_COMPLETED).connections] == ["second", "first"]


def test_own_events_are_known_once_a_handler_subscribes_to_them() -> None:
    class Own(signalfire.EventEnum):
        PING = "ping"

    class Listening(Handler):
        heard = 0

        @on(Own.PING)
        def listen(self, engine: Engine) -> None:
            self.heard += 1

    listening = Listening()
    engine = make_engine(listening)
    engine.fire(Own.PING)
    assert listening.heard == 1


def test_a_method_that_takes_no_engine_is_refused_also_where_it_would_join_later() -> None:
    class Wrong(Handler):
        when = None

        @on("when")
        def act(self) -> None: ...

    with pytest.raises(TypeError, match=r"Wrong\.act at when: .* cannot be called with only the engine"):
        make_engine(Wrong())
