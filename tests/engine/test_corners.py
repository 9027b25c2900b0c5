"""Corners of a run in which something could be lost in silence: errors, loads, snapshots, odd compositions."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.wrappers import MinMaxMetric

from signalfire import Engine, EventEnum, Events, Handler, Interval, Phase, Update, on, seed_everything
from signalfire.handlers import (
    Average,
    Checkpoint,
    EarlyStopping,
    GradientClipping,
    History,
    LRScheduling,
    Metrics,
    MixedPrecision,
    Validation,
)
from signalfire.testing import fingerprint
from tests import kit
from tests.kit import build, evaluator_of, linear

Batch = tuple[Tensor, Tensor]


def make_data(batches: int = 10) -> list[Batch]:
    return kit.batches(batches, 3, 1, seed=0)


def make_engine() -> Engine:
    return build(linear(3, 1, seed=0))


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


# ---- snapshots ------------------------------------------------------------------------------------------------------


def iterations_in(folder: Path) -> dict[str, int]:
    return {file.name[-4:]: Checkpoint.load(file)["engine"]["iteration"] for file in sorted(folder.glob("it-*"))}


def test_no_file_holds_the_state_of_an_earlier_event(tmp_path: Path) -> None:
    engine = make_engine()
    at_end = Checkpoint(tmp_path, every=Events.COMPLETED, name="end", keep=9)
    engine.attach(at_end, Checkpoint(tmp_path, every="1it", keep=99, name="it"))
    engine.run(make_data(), max_iters=3)
    engine.run(make_data(), max_iters=6)
    assert iterations_in(tmp_path) == {f"{n:04d}": n for n in range(1, 7)}


def test_no_file_is_stale_after_an_error_in_its_event(tmp_path: Path) -> None:
    engine = make_engine()
    engine.attach(Checkpoint(tmp_path, every="1it", keep=99, name="it"))

    def fail(engine: Engine) -> None:
        raise LookupError

    with engine.connect(Events.ITERATION_COMPLETED(once=3), fail, phase=Phase.PERSIST), pytest.raises(LookupError):
        engine.run(make_data(), max_iters=6)
    engine.run(make_data(), max_iters=6)
    assert iterations_in(tmp_path) == {f"{n:04d}": n for n in range(1, 7)}


def test_a_snapshot_of_a_nested_event_is_not_that_of_the_event_around_it(tmp_path: Path) -> None:
    engine = make_engine()
    engine.attach(
        Validation(evaluator_of(engine.model), make_data(2)),
        Checkpoint(tmp_path, every=Events.EVALUATION_COMPLETED, name="inner"),
        Checkpoint(tmp_path, every="1ep", name="outer"),
        EarlyStopping("loss", patience=3),
    )
    engine.run(make_data(), max_epochs=1)
    (file,) = tmp_path.glob("outer-*")
    assert Checkpoint.load(file)["handlers"]["early_stopping"]["best"] is not None


def test_what_was_decided_before_an_error_is_written_as_the_run_continues(tmp_path: Path) -> None:
    engine = make_engine()
    engine.attach(Checkpoint(tmp_path, every="1ep", keep=9))

    def fail(engine: Engine) -> None:
        raise LookupError

    with engine.connect(Events.EPOCH_COMPLETED(once=2), fail, phase=Phase.CONTROL, rank=99), pytest.raises(LookupError):
        engine.run(make_data(2), max_epochs=3)
    engine.run(make_data(2), max_epochs=3)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "checkpoint-epoch0001-iter00000002",
        "checkpoint-epoch0002-iter00000004",
        "checkpoint-epoch0003-iter00000006",
    ]
    assert Checkpoint.load(tmp_path / "checkpoint-epoch0002-iter00000004")["engine"]["iteration"] == 4


def test_two_new_values_in_one_iteration_take_one_place_among_the_best(tmp_path: Path) -> None:
    engine = make_engine()
    best = Checkpoint(tmp_path, monitor="score", mode="max", keep=2)
    engine.attach(best)

    @engine.on(Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED)
    def score(engine: Engine) -> None:
        engine.state.metrics["score"] = engine.state.iteration

    engine.run(make_data(3), max_epochs=1)
    assert len({file for file, _ in best.kept}) == 2


# ---- loading --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:C01:signalfire.FindingWarning")
def test_a_load_that_failed_is_not_forgotten() -> None:
    first = make_engine()
    first.attach(EarlyStopping("loss"), Metrics(loss=Average()))
    first.run(make_data(2), max_iters=1)
    state = first.state_dict()
    second = make_engine()
    second.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(ValueError, match="early_stopping"):
            second.run(make_data(), max_epochs=2)
    assert second.state.iteration == 0
    second.reset()
    reported: list[str] = []
    second.connect(Events.CHECKPOINT_LOADED, lambda engine: reported.append("loaded"))
    second.run(make_data(), max_epochs=1)
    assert reported == [], "reset() lets go of the loaded state"


def test_shapes_that_do_not_fit_are_refused_before_any_module_is_changed() -> None:
    def build(width: int) -> Engine:
        torch.manual_seed(width)
        models = {"a": nn.Linear(3, 3), "b": nn.Linear(3, width)}
        update = Update.from_function(
            lambda engine, batch: engine.model["b"](engine.model["a"](batch[0])).sum(), torch.optim.SGD
        )
        return Engine(update, model=models)

    first, second = build(1), build(2)
    first.run(make_data(2), max_epochs=1)
    before = {name: value.clone() for name, value in second.model.state_dict().items()}
    second.load_state_dict(first.state_dict())
    with pytest.raises(
        ValueError,
        match=r"module 'b' differs in weight \(\[1, 3\] in the state, \[2, 3\] in the model\), bias.*WarmStart",
    ):
        second.run(make_data(2), max_epochs=2)
    assert all(torch.equal(before[name], value) for name, value in second.model.state_dict().items())
    with pytest.raises(ValueError, match="load a complete state"):
        second.load_state_dict({"format": 1})


def test_parameters_that_belong_to_no_module_are_saved_too() -> None:
    def build() -> tuple[Engine, nn.Parameter]:
        temperature = nn.Parameter(torch.ones(1))
        torch.manual_seed(0)
        model = nn.Linear(3, 1)

        def function(engine: Engine, batch: Batch) -> Tensor:
            return nn.functional.mse_loss(model(batch[0]) * temperature, batch[1])

        update = Update.from_function(
            function,
            partial(torch.optim.SGD, lr=0.1, momentum=0.9),
            parameters=lambda e: [*model.parameters(), temperature],
        )
        return Engine(update, model=model), temperature

    whole, whole_temperature = build()
    whole.run(make_data(6), max_epochs=1)
    cut, _ = build()
    cut.run(make_data(6), max_iters=3)
    resumed, temperature = build()
    resumed.load_state_dict(through_a_file(cut.state_dict()))
    resumed.run(make_data(6), max_epochs=1)
    assert torch.equal(temperature, whole_temperature)


def test_a_state_is_refused_from_the_moment_the_batch_is_there() -> None:
    for event in (Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED, Events.UPDATE_COMPLETED):
        engine = make_engine()
        engine.connect(event(once=2), lambda engine: engine.state_dict())
        with pytest.raises(RuntimeError, match="called inside an iteration"):
            engine.run(make_data(), max_epochs=1)


def test_a_handler_that_is_off_when_a_state_is_loaded_gets_it_when_it_takes_part_again() -> None:
    def build() -> Engine:
        engine = make_engine()
        engine.attach(LRScheduling(partial(StepLR, step_size=2, gamma=0.5)), MixedPrecision("fp16", init_scale=1.0))
        return engine

    first = build()
    first.run(make_data(4), max_epochs=1)
    second = build()
    second.load_state_dict(through_a_file(first.state_dict()))
    with second.without("lr_scheduling", "mixed_precision"):
        second.run(make_data(4), max_epochs=2)
        assert second.state_dict()["handlers"]["lr_scheduling"]["stepped"] == 4
    assert second.updates[0].optimizer is not None
    second.run(make_data(4), max_epochs=3)
    scheduling = second.handlers["lr_scheduling"]
    assert isinstance(scheduling, LRScheduling)
    assert scheduling.stepped == 8
    assert second.updates[0].optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4


def test_a_state_of_another_precision_is_refused_by_name() -> None:
    first = make_engine()
    first.attach(MixedPrecision("fp16"))
    first.run(make_data(2), max_epochs=1)
    second = make_engine()
    second.attach(MixedPrecision("bf16"))
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="'mixed_precision': the saved state has gradient scalers for"):
        second.run(make_data(2), max_epochs=2)


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_the_last_batch_of_an_epoch_is_known_in_that_epoch_alone() -> None:
    engine = make_engine()
    reported: list[tuple[str, bool]] = []
    for event in (Events.STARTED, Events.EPOCH_STARTED, Events.ITERATION_STARTED):
        engine.connect(event, lambda engine, event=event: reported.append((event.name, engine.feed.on_last_batch())))
    for last in (1, 2):
        engine.run(make_data(2), max_epochs=last)
    an_epoch = [("EPOCH_STARTED", False), ("ITERATION_STARTED", False), ("ITERATION_STARTED", True)]
    assert reported == [("STARTED", False), *an_epoch, ("STARTED", False), *an_epoch]


def test_a_plan_that_is_none_is_refused_and_not_taken_for_one_update() -> None:
    def nothing(engine: Engine, batch: Any) -> None:
        pass

    engine = Engine([Update.from_function(nothing, name=name) for name in ("one", "other")])
    engine.connect(Events.ITERATION_STARTED, lambda engine: setattr(engine.state, "plan", None))
    with pytest.raises(TypeError):
        engine.run([1])


def test_a_snapshot_taken_before_a_batch_is_not_that_of_its_iteration() -> None:
    engine = make_engine()
    taken: list[tuple[int, int]] = []

    def take(engine: Engine) -> None:
        taken.append((engine.state.iteration, engine.snapshots.take()["engine"]["iteration"]))

    for event in (Events.GET_BATCH_STARTED, Events.ITERATION_COMPLETED):
        engine.connect(event, take, phase=Phase.PERSIST)
    engine.run(make_data(2), max_epochs=1)
    assert taken == [(0, 0), (1, 1), (1, 1), (2, 2)]


@pytest.mark.parametrize("epoch", [1, 2])
def test_after_an_error_in_epoch_started_the_engine_goes_on(epoch: int) -> None:
    engine, plain = make_engine(), make_engine()

    def fail(engine: Engine) -> None:
        raise KeyboardInterrupt

    with engine.connect(Events.EPOCH_STARTED(once=epoch), fail), pytest.raises(KeyboardInterrupt):
        engine.run(make_data(3), max_epochs=3)
    engine.run(make_data(3), max_epochs=3)
    plain.run(make_data(3), max_epochs=3)
    assert torch.equal(engine.model.weight, plain.model.weight)


def test_a_state_taken_in_epoch_started_can_be_resumed() -> None:
    states: list[dict[str, Any]] = []
    whole = make_engine()
    whole.connect(Events.EPOCH_STARTED, lambda engine: states.append(engine.state_dict()), phase=Phase.PERSIST)
    seed_everything(0)
    whole.run(make_data(3), max_epochs=3)
    for state in states:
        resumed = make_engine()
        resumed.load_state_dict(through_a_file(state))
        resumed.run(make_data(3), max_epochs=3)
        assert fingerprint(resumed) == fingerprint(whole)


def test_a_region_that_cannot_be_left_does_not_swallow_an_interrupt() -> None:
    @contextmanager
    def stubborn() -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("it does not close")

    engine = make_engine()
    reported: list[str] = []
    engine.connect(Events.FORWARD_STARTED, lambda engine: engine.regions.enter(stubborn()))
    engine.connect(Events.INTERRUPTED, lambda engine: reported.append("interrupted"))

    def interrupt(engine: Engine) -> None:
        raise KeyboardInterrupt

    engine.connect(Events.FORWARD_COMPLETED, interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        engine.run(make_data(), max_epochs=1)
    assert reported == ["interrupted"]
    assert any("it does not close" in note for note in caught.value.__notes__)


def test_an_interrupt_in_the_cleanup_leaves_an_engine_that_can_run() -> None:
    engine = make_engine()

    def interrupt(engine: Engine) -> None:
        raise KeyboardInterrupt

    with engine.connect(Events.ENDED, interrupt), pytest.raises(KeyboardInterrupt):
        engine.run(make_data(3), max_epochs=1)
    assert engine.run(make_data(3), max_epochs=2).epoch == 2


# ---- data -----------------------------------------------------------------------------------------------------------


def test_an_iterator_goes_on_in_the_next_run_where_it_was() -> None:
    read: list[int] = []

    def stream() -> Iterator[Batch]:
        for number, batch in enumerate(make_data(9)):
            read.append(number)
            yield batch

    parts, whole = make_engine(), make_engine()
    batches = stream()
    parts.run(batches, max_iters=3)
    parts.run(batches, max_iters=6)
    assert read == list(range(6))
    whole.run(iter(make_data(9)), max_iters=6)
    assert torch.equal(parts.model.weight, whole.model.weight)


class Unsized:
    def __iter__(self) -> Iterator[Batch]:
        return iter(make_data(4))


@pytest.mark.moderate
@pytest.mark.parametrize("bounds", [{"max_steps": 8}, {"max_iters": 8}, {"max_epochs": 2}])
@pytest.mark.parametrize("data", [make_data(4), Unsized()], ids=["sized", "unsized"])
@pytest.mark.filterwarnings("ignore::signalfire.RereadingWarning")
def test_an_epochs_end_is_emitted_once_wherever_the_run_was_cut(bounds: dict[str, Any], data: Any) -> None:
    def build() -> tuple[Engine, History]:
        engine, history = make_engine(), History()
        engine.attach(Metrics(train_loss=Average()), history)
        return engine, history

    states: list[dict[str, Any]] = []
    whole, expected = build()
    whole.connect(Events.ITERATION_COMPLETED, lambda engine: states.append(engine.state_dict()), phase=Phase.PERSIST)
    whole.run(data, **bounds)
    assert len(expected["train_loss"]) == 2
    for state in states:
        resumed, history = build()
        resumed.load_state_dict(through_a_file(state))
        resumed.run(data, **bounds)
        assert history.records == expected.records, state["engine"]["iteration"]


# ---- compositions ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:W18")
def test_metrics_of_one_of_several_updates_have_to_say_which() -> None:
    models = {"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)}

    def update(name: str) -> Update:
        def function(engine: Engine, batch: Batch) -> Tensor:
            return nn.functional.mse_loss(models[name](batch[0]), batch[1]) + (name == "b")

        return Update.from_function(
            function, partial(torch.optim.SGD, lr=0.0), name=name, parameters=lambda engine: models[name].parameters()
        )

    engine = Engine([update("a"), update("b")], model=models)
    with pytest.raises(ValueError, match=r"several updates \(a, b\)"):
        engine.attach(Metrics(loss=Average()))
    engine.attach(Metrics(loss_b=Average(), update="b"))
    engine.run(make_data(1), max_epochs=1)
    x, y = make_data(1)[0]
    assert engine.state.metrics["loss_b"] == pytest.approx(nn.functional.mse_loss(models["b"](x), y).item() + 1)


def test_one_interval_event_serves_several_receivers() -> None:
    engine = make_engine()
    event = Interval.parse("2st").event()
    seen: dict[str, list[int]] = {"a": [], "b": []}
    engine.connect(event, lambda engine: seen["a"].append(engine.state.iteration))
    engine.connect(event, lambda engine: seen["b"].append(engine.state.iteration))
    engine.run(make_data(6), max_epochs=1)
    assert seen == {"a": [2, 4, 6], "b": [2, 4, 6]}


def test_a_schedule_follows_its_handler_to_another_engine() -> None:
    scheduling = LRScheduling(partial(StepLR, step_size=1, gamma=0.5))
    first, second = make_engine(), make_engine()
    with first.attach(scheduling):
        first.run(make_data(2), max_epochs=1)
    second.attach(scheduling)
    second.run(make_data(2), max_epochs=1)
    assert second.updates[0].optimizer is not None
    assert second.updates[0].optimizer.param_groups[0]["lr"] == 0.1 * 0.25


def test_reset_takes_the_rate_back_also_of_an_optimizer_that_was_given_built() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(Update.supervised(nn.functional.mse_loss, optimizer), model=model)
    engine.attach(LRScheduling(partial(StepLR, step_size=1, gamma=0.5)))
    for _ in range(2):
        engine.run(make_data(2), max_epochs=1)
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.25
        engine.reset()
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_two_catalogues_of_one_name_are_distinguished() -> None:
    class Mine(EventEnum):
        PING = "ping"

    other = EventEnum("Mine", {"PING": "other"})  # type: ignore[arg-type]
    namesake = EventEnum("Events", {"STARTED": "mine"})  # type: ignore[arg-type]
    engine = make_engine()
    engine.register_events(Mine)
    for catalogue in (other, namesake):
        with pytest.raises(ValueError, match="another registered class has this name; rename yours"):
            engine.register_events(catalogue)  # type: ignore[arg-type]


def test_an_evaluation_is_a_region_also_outside_a_run() -> None:
    engine = make_engine()
    left: list[str] = []

    @contextmanager
    def swapped() -> Iterator[None]:
        yield
        left.append("restored")

    engine.connect(Events.EVALUATION_STARTED, lambda engine: engine.regions.enter(swapped()))
    engine.connect(Events.EVALUATION_COMPLETED, lambda engine: left.append("completed"))
    engine.evaluate(evaluator_of(engine.model), make_data(2))
    assert left == ["restored", "completed"]


def test_an_evaluation_publishes_only_what_it_measured() -> None:
    engine = make_engine()
    evaluator = evaluator_of(engine.model)
    assert set(engine.evaluate(evaluator, make_data(3), prefix="val_")) == {"val_loss"}
    assert engine.evaluate(evaluator, make_data(3), max_iters=2) == {}, "an epoch that was cut short measures nothing"
    assert engine.state.metrics.serials == {"val_loss": 1}


def test_a_shuffling_loader_with_a_generator_of_its_own_validates_in_the_same_order_each_time() -> None:
    generator = torch.Generator().manual_seed(1)
    numbers: Any = list(range(20))
    loader: Any = torch.utils.data.DataLoader(numbers, batch_size=5, shuffle=True, generator=generator)
    orders: list[list[int]] = []
    evaluator = Engine(Update.prediction(lambda engine, batch: orders[-1].extend(batch.tolist())))
    engine = make_engine()
    for _ in range(2):
        orders.append([])
        engine.evaluate(evaluator, loader)
    assert orders[0] == orders[1]


@pytest.mark.moderate
def test_collections_and_wrappers_of_torchmetrics_are_measured_and_resumed() -> None:
    def build() -> Engine:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        engine = Engine(Update.supervised(nn.functional.cross_entropy, partial(torch.optim.SGD, lr=0.1)), model=model)
        both = MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)])
        engine.attach(Metrics(both=both, range=MinMaxMetric(MulticlassAccuracy(3))), History())
        return engine

    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(5, 3, generator=generator), torch.randint(3, (5,), generator=generator)) for _ in range(4)]
    states: list[dict[str, Any]] = []
    whole = build()
    whole.connect(Events.ITERATION_COMPLETED, lambda engine: states.append(engine.state_dict()), phase=Phase.PERSIST)
    whole.run(data, max_epochs=2)
    assert {"both/MulticlassAccuracy", "both/MulticlassF1Score", "range/raw", "range/max"} <= set(whole.state.metrics)
    for state in states[:-1]:
        resumed = build()
        resumed.load_state_dict(through_a_file(state))
        resumed.run(data, max_epochs=2)
        assert resumed.state.metrics["both/MulticlassF1Score"] == whole.state.metrics["both/MulticlassF1Score"]
        assert resumed.state.metrics["range/raw"] == whole.state.metrics["range/raw"]


def test_fp16_scaling_bears_a_window_in_which_no_parameter_had_a_gradient() -> None:
    model = nn.Linear(3, 1)
    free = nn.Parameter(torch.zeros(1))

    def function(engine: Engine, batch: Batch) -> Tensor:
        # In the first iteration, the loss has a graph, but none that reaches the optimizer's parameter.
        part = free if engine.state.iteration > 1 else model.weight.sum()
        return (part * batch[0].sum()).sum()

    update = Update.from_function(function, partial(torch.optim.SGD, lr=0.1), parameters=lambda engine: [free])
    engine = Engine(update, allow=["W92"])
    engine.attach(MixedPrecision("fp16"))
    engine.run(make_data(3), max_epochs=1)
    assert free.item() != 0


def test_if_several_toggles_wait_and_one_is_impossible_the_others_happen() -> None:
    engine = make_engine()
    history = History()
    engine.attach(GradientClipping(max_norm=1.0), history)

    @engine.on(Events.ITERATION_STARTED(once=1))
    def toggle(engine: Engine) -> None:
        engine.attach(GradientClipping(max_norm=2.0, name="second"))
        engine.detach(history)

    with pytest.raises(ValueError, match="both 'gradient_clipping' and 'second'"):
        engine.run(make_data(3), max_epochs=1)
    assert sorted(engine.handlers) == ["gradient_clipping"]
    assert not engine.has(history)


def test_a_handler_that_cannot_give_its_state_yet_is_not_half_attached() -> None:
    class Late(Handler):
        def state_dict(self) -> dict[str, Any]:
            return {"x": self.x}

        def load_state_dict(self, state: Any) -> None:
            self.x = state["x"]

        @on(Events.STARTED)
        def begin(self, engine: Engine) -> None:
            self.x = 1

    engine = make_engine()
    for _ in range(2):
        with pytest.raises(AttributeError):
            engine.attach(Late())
    assert engine.handlers == {}
