"""The rules of `Engine.check` about users' functions that clip."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_

from signalfire import AnyEvent, Engine, EventEnum, Events, Update
from signalfire.handlers import AutoClip, GradientAccumulation, GradientClipping, Validation
from tests.kit import SGD, batches, build, linear


def clip(engine: Engine) -> None:
    clip_grad_norm_(engine.model.parameters(), 1.0)


def found(event: AnyEvent, *handlers: Any) -> list[str]:
    engine = build(linear(5, 1), *handlers)
    engine.connect(event, clip)
    return [one.code for one in engine.check(batches(), max_epochs=1) if one.code == "C26"]


@pytest.mark.parametrize(
    "event",
    [
        Events.ITERATION_STARTED,
        Events.LOSS_COMPUTED,
        Events.OPTIMIZER_STEP_COMPLETED(every=2),
        Events.ITERATION_COMPLETED,
        Events.EPOCH_COMPLETED,
    ],
)
def test_a_function_that_clips_where_there_are_no_gradients_is_found(event: AnyEvent) -> None:
    assert found(event) == ["C26"]


@pytest.mark.parametrize("event", [Events.BACKWARD_COMPLETED, Events.GRADIENTS_READY, Events.OPTIMIZER_STEP_STARTED])
def test_one_that_clips_those_of_the_step_is_not(event: AnyEvent) -> None:
    assert found(event) == []


def test_in_a_window_each_part_would_be_clipped() -> None:
    assert found(Events.BACKWARD_COMPLETED, GradientAccumulation(2)) == ["C26"]
    assert found(Events.BACKWARD_COMPLETED, GradientAccumulation(1)) == []
    assert found(Events.GRADIENTS_READY, GradientAccumulation(2)) == []


def measure(engine: Engine) -> None:
    engine.state.metrics["norm"] = float(clip_grad_norm_(engine.model.parameters(), float("inf")))


def test_a_bound_of_infinity_measures_and_does_not_clip() -> None:
    engine = build(linear(5, 1), GradientAccumulation(2), GradientClipping(max_norm=1.0))
    engine.connect(Events.BACKWARD_COMPLETED, measure)
    assert not engine.check(batches(), max_epochs=1).of("C26")
    assert not engine.check(batches(), max_epochs=1).of("C04")


class Side:
    """A tensor that is trained beside the model, by an optimizer of its own."""

    def __init__(self) -> None:
        self.scale = nn.Parameter(torch.ones(1))
        self.optimizer = torch.optim.SGD([self.scale], lr=0.1)


def test_an_optimizer_that_is_read_or_is_not_the_engines_is_not_stepped_beside_it() -> None:
    side, noted = Side(), list[Any]()

    def read(engine: Engine) -> None:
        step = engine.state.iteration
        noted.append((engine.updates[0].optimizer, step))

    def train_beside(engine: Engine) -> None:
        side.optimizer.step()

    engine = build(linear(5, 1))
    engine.connect(Events.ITERATION_COMPLETED, read)
    engine.connect(Events.ITERATION_COMPLETED, train_beside)
    assert not engine.check(batches(), max_epochs=1).of("W17")


class Probe:
    """Trains a layer of its own beside the model."""

    def __init__(self) -> None:
        self.layer = linear(5, 1)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)

    def fit(self, engine: Engine) -> None:
        self.layer(engine.state.batch[0]).mean().backward()
        self.optimizer.step()


def fit_a_new_one(engine: Engine) -> None:
    probe = Probe()
    probe.layer(engine.state.batch[0]).mean().backward()
    probe.optimizer.step()


class ProbeOf(Probe):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def fit_one_of_the_model(engine: Engine) -> None:
    probe = ProbeOf(engine.model)
    probe.optimizer.step()


optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def step_a_local_one(engine: Engine) -> None:
    rate = engine.optimizer.param_groups[0]["lr"]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=10 * rate)
    optimizer.step()


probes = {epoch: Probe() for epoch in range(3)}


def step_one_of_the_epoch(engine: Engine) -> None:
    probes[engine.state.epoch].optimizer.step()


def step(engine: Engine) -> None:
    engine.updates[0].optimizer.step()  # type: ignore[union-attr]


def step_all(engine: Engine) -> None:
    for update in engine.updates:
        update.optimizer.step()  # type: ignore[union-attr]


class Holder:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def step(self, engine: Engine) -> None:
        self.engine.updates[0].optimizer.step()  # type: ignore[union-attr]


def test_an_optimizer_beside_that_of_the_engine_may_be_stepped() -> None:
    engine = build(linear(5, 1))
    for function in (Probe().fit, fit_a_new_one, fit_one_of_the_model, step_one_of_the_epoch):
        with engine.connect(Events.ITERATION_COMPLETED, function):
            assert not engine.check(batches(), max_epochs=1).of("W17")
    for function in (step, step_all, Holder(engine).step):
        with engine.connect(Events.ITERATION_COMPLETED, function):
            assert len(engine.check(batches(), max_epochs=1).of("W17")) == 1


def own_loop(engine: Engine) -> None:
    loss = engine.model(torch.ones(1, 5)).sum()
    loss.backward()
    clip_grad_norm_(engine.model.parameters(), 1.0)


def clip_another(_: Engine) -> None:
    clip_grad_norm_(OTHER.parameters(), 1.0)


def measure_with_a_huge_bound(engine: Engine) -> None:
    engine.state.metrics["norm"] = float(clip_grad_norm_(engine.model.parameters(), 1e9))


OTHER = nn.Linear(2, 1)


@pytest.mark.parametrize("function", [own_loop, clip_another, measure_with_a_huge_bound])
def test_what_is_clipped_elsewhere_is_not_clipped_twice_or_too_early(function: Any) -> None:
    engine = build(linear(5, 1), GradientAccumulation(2), GradientClipping(max_norm=1.0))
    for event in (Events.EPOCH_COMPLETED, Events.BACKWARD_COMPLETED, Events.GRADIENTS_READY):
        engine.connect(event, function)
    assert {one.code for one in engine.check(batches(), max_epochs=1)}.isdisjoint({"C04", "C26"})


class Own(EventEnum):
    READY = "ready"


def test_an_event_of_the_users_may_come_where_gradients_are_ready() -> None:
    engine = build(linear(5, 1))
    engine.register_events(Own)
    engine.connect(Own.READY, clip)
    assert not engine.check(batches(), max_epochs=1).of("C26")


def test_a_handler_clips_one_of_two_networks_and_a_function_the_other() -> None:
    updates = [Update.supervised(nn.functional.mse_loss, SGD, parameters=name, name=name) for name in ("g", "d")]
    engine = Engine(updates, model={update.name: linear(5, 1) for update in updates})
    engine.attach(GradientClipping(max_norm=1.0, update="g"), AutoClip(update="d"))
    engine.connect(Events.GRADIENTS_READY, clip)
    assert {one.code for one in engine.check(batches(), max_epochs=1)}.isdisjoint({"C03", "C04"})


def test_a_local_variable_is_not_the_global_one_of_its_name() -> None:
    optimizer.param_groups[0]["params"] = list((model := linear(5, 1)).parameters())
    engine = Engine(Update.supervised(nn.functional.mse_loss, optimizer), model=model)
    engine.connect(Events.EPOCH_COMPLETED, step_a_local_one)
    assert not engine.check(batches(), max_epochs=1).of("W17")


def ramped(engine: Engine, output: Tensor, batch: Any) -> Tensor:
    return mse_loss(output, batch[1]) + engine.state.iteration / 100 * output.square().mean()


def printed(engine: Engine, output: Tensor, batch: Any) -> Tensor:
    loss = mse_loss(output, batch[1])
    if not loss.isfinite():
        raise RuntimeError(f"the loss of iteration {engine.state.iteration} is {loss}")
    return loss


def ramped_in_training(engine: Engine, output: Tensor, batch: Any) -> Tensor:
    weight = engine.state.iteration / 100 if engine.training else 1.0
    return mse_loss(output, batch[1]) + weight * output.square().mean()


class Task:
    """Reads the position of the trainer, and not of the engine that is passed to it."""

    state: Any = None

    def loss(self, engine: Engine, output: Tensor, batch: Any) -> Tensor:
        return mse_loss(output, batch[1]) + float(self.state.iteration) / 100 * output.square().mean()

    def wrong(self, engine: Engine, output: Tensor, batch: Any) -> Tensor:
        return mse_loss(output, batch[1]) + engine.state.iteration / 100 * output.square().mean()


@pytest.mark.parametrize(
    ("loss", "reported"),
    [(ramped, 1), (Task().wrong, 1), (printed, 0), (ramped_in_training, 0), (Task().loss, 0)],
)
def test_a_loss_that_shows_the_position_or_asks_for_the_mode_or_reads_that_of_the_trainer_is_right(
    loss: Any, reported: int
) -> None:
    update = Update(lambda engine, batch: engine.model(batch[0]), loss, SGD)
    engine = Engine(update, model=linear(5, 1), seed=0)
    engine.attach(Validation(batches(1)))
    found = engine.check(batches(), max_epochs=1).of("W65")
    assert len(found) == reported
    assert all("so it may compute a different loss" in one.sentence for one in found)
