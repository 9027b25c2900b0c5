"""LRScheduling against torch's schedulers in plain PyTorch loops: the same rates and the same weights."""

from __future__ import annotations

import importlib
import importlib.machinery
import math
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from signalfire import Engine, Events, FindingWarning, Phase, Update
from signalfire.handlers import GradientAccumulation, LRScheduling, cosine_with_warmup
from signalfire.handlers._common.joint_schedule import JointSchedule
from signalfire.handlers._common.torch_schedulers import with_total
from signalfire.testing import check_handler
from tests import kit
from tests.kit import assert_same, average_gradients, linear, windows

Batches = list[tuple[Tensor, Tensor]]
Factory = Callable[[Optimizer], Any]


def network() -> nn.Linear:
    return linear(5, 2)


batches = partial(kit.batches, targets=2)


class Unsized:
    """Data that can be iterated again but does not report its length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(batches())


def engine_of(model: nn.Module, *handlers: Any) -> tuple[Engine, list[float]]:
    """An engine, and the rates that its optimizer steps used."""
    update = Update.supervised(nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    engine = Engine(update, model=model, seed=0)
    engine.attach(*handlers)
    rates: list[float] = []

    @engine.on(Events.OPTIMIZER_STEP_STARTED)
    def note(engine: Engine) -> None:
        assert engine.state.update.optimizer is not None
        rates.append(engine.state.update.optimizer.param_groups[0]["lr"])

    return engine, rates


def plain_loop(
    factory: Factory, *, by: str = "step", epochs: int = 3, window: int = 1, stop_at: int | None = None
) -> tuple[nn.Linear, list[float]]:
    """The trained model, and the rates that the steps used."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = factory(optimizer)
    data, iterations = batches(), 0
    rates: list[float] = []
    for _ in range(epochs):
        for chunk in windows(data, window):
            if stop_at is not None and iterations + len(chunk) > stop_at:
                return model, rates
            for inputs, targets in chunk:
                nn.functional.mse_loss(model(inputs), targets).backward()
                iterations += 1
            average_gradients(model, len(chunk))
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
            if by == "step":
                scheduler.step()
        if by == "epoch":
            scheduler.step()
    return model, rates


def sequential(optimizer: Optimizer) -> SequentialLR:
    parts: list[Any] = [LinearLR(optimizer, start_factor=0.1, total_iters=4), ExponentialLR(optimizer, gamma=0.8)]
    return SequentialLR(optimizer, parts, milestones=[4])


@pytest.mark.filterwarnings("ignore:C06:signalfire.FindingWarning")
@pytest.mark.parametrize("every", ["1st", "1ep"])
@pytest.mark.parametrize(
    "factory",
    [
        partial(StepLR, step_size=2, gamma=0.5),
        partial(LambdaLR, lr_lambda=lambda count: 1 / (1 + count)),
        sequential,
        partial(OneCycleLR, max_lr=0.3, total_steps=18),
        partial(CosineAnnealingLR, T_max=9),
    ],
    ids=["StepLR", "LambdaLR", "SequentialLR", "OneCycleLR", "CosineAnnealingLR"],
)
def test_rates_and_weights_equal_a_plain_loop(factory: Factory, every: str) -> None:
    model = network()
    engine, rates = engine_of(model, LRScheduling(factory, every=every))
    engine.run(batches(), max_epochs=3)
    reference, expected = plain_loop(factory, by="step" if every == "1st" else "epoch")
    assert rates == expected
    assert len(set(rates)) > 1
    assert_same(model, reference)


def test_one_cycle_learns_the_total_of_its_steps() -> None:
    model = network()
    engine, rates = engine_of(model, LRScheduling(partial(OneCycleLR, max_lr=0.3)))
    engine.run(batches(), max_epochs=3)
    reference, expected = plain_loop(partial(OneCycleLR, max_lr=0.3, total_steps=18))
    assert rates == expected
    assert_same(model, reference)


@pytest.mark.parametrize("accumulation_first", [True, False])
def test_the_learned_total_counts_windows_and_not_batches(accumulation_first: bool) -> None:
    model = network()
    handlers: list[Any] = [GradientAccumulation(4), LRScheduling(partial(OneCycleLR, max_lr=0.3))]
    engine, rates = engine_of(model, *(handlers if accumulation_first else reversed(handlers)))
    engine.run(batches(), max_epochs=3)
    reference, expected = plain_loop(partial(OneCycleLR, max_lr=0.3, total_steps=6), window=4)
    assert rates == expected
    assert_same(model, reference)


def test_the_learned_total_follows_a_schedule_of_windows() -> None:
    handler = LRScheduling(partial(OneCycleLR, max_lr=0.3))
    engine, rates = engine_of(network(), GradientAccumulation({1: 1, 2: 4, 3: 6}), handler)
    engine.run(batches(), max_epochs=3)
    assert handler.total == len(rates) == 6 + 2 + 1


def test_the_learned_total_respects_max_iters() -> None:
    model = network()
    engine, rates = engine_of(model, LRScheduling(partial(OneCycleLR, max_lr=0.3)))
    engine.run(batches(), max_epochs=3, max_iters=14)
    reference, expected = plain_loop(partial(OneCycleLR, max_lr=0.3, total_steps=14), stop_at=14)
    assert rates == expected
    assert_same(model, reference)


def test_the_learned_total_respects_max_iters_that_end_inside_a_window() -> None:
    handler = LRScheduling(partial(OneCycleLR, max_lr=0.3))
    engine, rates = engine_of(network(), GradientAccumulation(4), handler)
    engine.run(batches(), max_iters=11)  # windows of 4 and 2, then 4; the fifth batch of epoch 2 stays in an open one
    assert handler.total == len(rates) == 3


def test_the_learned_total_of_unsized_data_is_max_iters() -> None:
    model = network()
    engine, rates = engine_of(model, LRScheduling(partial(OneCycleLR, max_lr=0.3)))
    engine.run(Unsized(), max_iters=9)
    reference, expected = plain_loop(partial(OneCycleLR, max_lr=0.3, total_steps=9), stop_at=9)
    assert rates == expected
    assert_same(model, reference)


def test_the_learned_total_respects_max_steps() -> None:
    handler = LRScheduling(partial(OneCycleLR, max_lr=0.3))
    engine, rates = engine_of(network(), GradientAccumulation(2), handler)
    engine.run(Unsized(), max_steps=5)
    assert handler.total == len(rates) == 5


def test_a_total_that_nobody_can_know_is_an_error_that_says_what_to_give() -> None:
    engine, _ = engine_of(network(), LRScheduling(partial(OneCycleLR, max_lr=0.3)))
    with pytest.raises(ValueError, match=r"OneCycleLR needs total_steps.*max_steps="):
        engine.run(Unsized(), max_epochs=2)
    assert engine.state.iteration == 0


def test_cosine_annealing_learns_its_half_period() -> None:
    model = network()
    engine, rates = engine_of(model, LRScheduling(partial(CosineAnnealingLR)))
    engine.run(batches(), max_epochs=3)
    reference, expected = plain_loop(partial(CosineAnnealingLR, T_max=18))
    assert rates == expected
    assert_same(model, reference)


def test_a_bare_class_is_a_factory() -> None:
    factory: Any = CosineAnnealingLR  # mypy sees that T_max is missing; it is learned
    engine, rates = engine_of(network(), LRScheduling(factory))
    engine.run(batches(), max_epochs=3)
    assert rates == plain_loop(partial(CosineAnnealingLR, T_max=18))[1]


def test_by_epochs_the_half_period_is_the_number_of_epochs() -> None:
    model = network()
    engine, rates = engine_of(model, LRScheduling(partial(CosineAnnealingLR), every="1ep"))
    engine.run(Unsized(), max_epochs=3)
    reference, expected = plain_loop(partial(CosineAnnealingLR, T_max=3), by="epoch")
    assert rates == expected
    assert_same(model, reference)


@pytest.mark.filterwarnings("ignore:C06:signalfire.FindingWarning")
def test_a_total_that_was_given_is_left_alone() -> None:
    for factory in (
        partial(OneCycleLR, max_lr=0.3, epochs=5, steps_per_epoch=6),
        partial(OneCycleLR, max_lr=0.3, total_steps=30),
    ):
        handler = LRScheduling(factory)
        engine, rates = engine_of(network(), handler)
        engine.run(batches(), max_epochs=3)
        assert rates == plain_loop(partial(OneCycleLR, max_lr=0.3, total_steps=30))[1]
        engine.run(batches(), max_epochs=5)  # up to what was given explicitly
        assert len(rates) == 30


def test_it_moves_once_for_each_window() -> None:
    factory = partial(ExponentialLR, gamma=0.9)
    model = network()
    engine, rates = engine_of(model, LRScheduling(factory), GradientAccumulation(4))
    engine.run(batches(), max_epochs=2)
    reference, expected = plain_loop(factory, epochs=2, window=4)
    assert rates == expected
    assert len(rates) == 4
    assert_same(model, reference)


def test_it_moves_every_few_steps_that_happened() -> None:
    engine, rates = engine_of(network(), LRScheduling(partial(ExponentialLR, gamma=0.5), every="3st"))

    @engine.on(Events.GRADIENTS_READY(once=2))
    def skip(engine: Engine) -> None:
        engine.state.update.skip("on purpose")

    engine.run(batches(), max_epochs=2)
    # OPTIMIZER_STEP_STARTED comes for the skipped step, too: 4 entries are 3 steps that happened.
    assert rates == [0.1] * 4 + [0.05] * 3 + [0.025] * 3 + [0.0125] * 2


def test_it_moves_every_few_epochs() -> None:
    engine, rates = engine_of(network(), LRScheduling(partial(ExponentialLR, gamma=0.5), every="2ep"))
    engine.run(batches(2), max_epochs=5)
    assert rates == [0.1] * 4 + [0.05] * 4 + [0.025] * 2


def test_skipped_steps_do_not_move_it() -> None:
    engine, rates = engine_of(network(), LRScheduling(partial(ExponentialLR, gamma=0.5)))

    @engine.on(Events.GRADIENTS_READY(once=[1, 3]))
    def skip(engine: Engine) -> None:
        engine.state.update.skip("on purpose")

    engine.run(batches(5), max_epochs=1)
    assert rates == [0.1, 0.1, 0.05, 0.05, 0.025]


SCORES = [5.0, 4.0, 4.5, 4.4, 4.3, 4.2, 3.0, 3.5]


def score(engine: Engine) -> None:
    engine.state.metrics["score"] = SCORES[engine.state.epoch - 1]


def test_plateau_follows_each_new_value_of_its_metric() -> None:
    engine, rates = engine_of(
        network(), LRScheduling(partial(ReduceLROnPlateau, mode="min", factor=0.5, patience=1), monitor="score")
    )
    engine.connect(Events.EPOCH_COMPLETED, score)
    engine.run(batches(2), max_epochs=8)

    optimizer = torch.optim.SGD(network().parameters(), lr=0.1, momentum=0.9)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    expected: list[float] = []
    for value in SCORES:
        expected += [optimizer.param_groups[0]["lr"]] * 2
        scheduler.step(value)
    assert rates == expected
    assert len(set(rates)) == 3


class Halving:
    """A scheduler of the user's own that follows a metric, in a direction that it knows itself."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.last = math.inf

    def step(self, value: float) -> None:
        if value >= self.last:
            self.optimizer.param_groups[0]["lr"] /= 2
        self.last = value

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last = state["last"]


@pytest.mark.parametrize("announced", [False, True])
def test_a_scheduler_of_ones_own_follows_a_metric_whose_direction_nobody_gives(announced: bool) -> None:
    engine, rates = engine_of(network(), LRScheduling(Halving, monitor="score"))
    if announced:
        engine.connect(Events.STARTED, lambda engine: engine.state.metrics.announce("user", ["score"]))
    engine.connect(Events.EPOCH_COMPLETED, score)
    engine.run(batches(2), max_epochs=8)
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    scheduler, expected = Halving(optimizer), []
    for value in SCORES:
        expected += [optimizer.param_groups[0]["lr"]] * 2
        scheduler.step(value)
    assert rates == expected
    assert len(set(rates)) == 2


def test_a_plateau_without_a_direction_names_what_takes_it() -> None:
    engine, _ = engine_of(network(), LRScheduling(ReduceLROnPlateau, monitor="score"))
    engine.connect(Events.EPOCH_COMPLETED, score)
    with pytest.raises(
        ValueError, match=r"LRScheduling monitors 'score'.*pass ReduceLROnPlateau mode='min' or mode='max'"
    ):
        engine.run(batches(2), max_epochs=1)


def test_reset_brings_back_the_rate_that_a_plateau_lowered_in_an_optimizer_that_was_given_built() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(Update.supervised(nn.functional.mse_loss, optimizer), model=model, seed=0)
    engine.attach(LRScheduling(partial(ReduceLROnPlateau, mode="min", factor=0.5, patience=1), monitor="score"))
    engine.connect(Events.EPOCH_COMPLETED, score)
    engine.run(batches(2), max_epochs=8)
    assert optimizer.param_groups[0]["lr"] < 0.1
    engine.reset()
    engine.run(batches(2), max_epochs=1)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_plateau_does_not_count_a_value_twice() -> None:
    engine, rates = engine_of(
        network(), LRScheduling(partial(ReduceLROnPlateau, mode="min", factor=0.5, patience=1), monitor="score")
    )
    engine.connect(Events.EPOCH_COMPLETED(every=3), score)
    engine.state.metrics["score"] = 1.0  # better than all that come
    engine.run(batches(2), max_epochs=8)
    assert rates == [0.1] * 12 + [0.05] * 4  # the values of epochs 3 and 6 are two bad ones: more than patience=1


def test_plateau_without_its_metric_is_an_error_that_names_those_there_are() -> None:
    engine, _ = engine_of(network(), LRScheduling(ReduceLROnPlateau, monitor="scores"))
    engine.connect(Events.EPOCH_COMPLETED, score)
    with pytest.raises(KeyError, match=r"'scores'.*Available metrics: score.*did you mean 'score'"):
        engine.run(batches(2), max_epochs=8)


def test_no_trace_is_left_on_the_optimizer() -> None:
    engine, _ = engine_of(network(), LRScheduling(partial(StepLR, step_size=1)))
    inside: list[bool] = []

    @engine.on(Events.ITERATION_COMPLETED)
    def look(engine: Engine) -> None:
        inside.append("step" in vars(engine.updates[0].optimizer))

    engine.run(batches(), max_epochs=1)
    assert inside == [False] * 6


def test_an_epoch_without_a_step_gives_no_warning() -> None:
    engine, rates = engine_of(network(), LRScheduling(partial(StepLR, step_size=1, gamma=0.5), every="1ep"))
    engine.connect(Events.GRADIENTS_READY(before=4), lambda engine: engine.state.update.skip("on purpose"))
    engine.run(batches(3), max_epochs=2)  # pytest turns torch's warning into an error
    assert rates == [0.1] * 3 + [0.05] * 3


@pytest.mark.filterwarnings("ignore:C06:signalfire.FindingWarning")
def test_a_run_that_continues_goes_on_with_the_schedule() -> None:
    factory = partial(OneCycleLR, max_lr=0.3, total_steps=18)
    model = network()
    engine, rates = engine_of(model, LRScheduling(factory))
    engine.run(batches(), max_epochs=1)
    engine.run(batches(), max_epochs=3)
    reference, expected = plain_loop(factory)
    assert rates == expected
    assert_same(model, reference)


def test_a_run_is_made_longer_by_a_total_from_the_first_run_on_or_begun_anew_with_its_weights() -> None:
    factory = cosine_with_warmup(warmup=2)
    engine, rates = engine_of(network(), LRScheduling(partial(factory, total_steps=18)))
    engine.run(batches(), max_epochs=2)
    engine.run(batches(), max_epochs=3)
    _, expected = plain_loop(partial(factory, total_steps=18))
    assert rates == expected
    longer, rates = engine_of(network(), LRScheduling(factory))
    longer.load_weights(engine.state_dict())
    assert_same(longer.model, engine.model)
    longer.run(batches(), max_epochs=3)
    assert rates == expected


def test_a_run_beyond_a_learned_total_is_refused_before_its_first_batch() -> None:
    engine, rates = engine_of(network(), LRScheduling(partial(OneCycleLR, max_lr=0.3)))
    engine.run(batches(), max_epochs=2)
    with pytest.raises(ValueError, match=r"built for 12 steps.*extends to 18.*reset\(\)"):
        engine.run(batches(), max_epochs=3)
    assert len(rates) == 12
    engine.reset()
    engine.run(batches(), max_epochs=3)
    assert rates[12:] == plain_loop(partial(OneCycleLR, max_lr=0.3, total_steps=18))[1]


def linear_decay(optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int) -> LambdaLR:
    """With the signature of Hugging Face's."""
    return LambdaLR(optimizer, lambda n: max(0.0, 1 - n / num_training_steps))


@pytest.mark.parametrize(
    ("factory", "way_out"),
    [
        (partial(linear_decay, num_warmup_steps=0), "partial(linear_decay, num_training_steps=...)"),
        (partial(partial(linear_decay), num_warmup_steps=0), "partial(linear_decay, num_training_steps=...)"),
        (
            lambda optimizer, t_initial: Counted(optimizer, t_initial, t_in_epochs=False),
            "partial(<lambda>, t_initial=...)",
        ),
        (CosineAnnealingLR, "partial(CosineAnnealingLR, T_max=...)"),
        (partial(OneCycleLR, max_lr=0.3), "partial(OneCycleLR, total_steps=...)"),
        (cosine_with_warmup(warmup=2), "partial(factory, total_steps=...)"),
    ],
    ids=["Hugging Face", "nested", "timm", "cosine", "one cycle", "with warm-up"],
)
def test_a_run_that_is_made_longer_names_the_argument_that_the_factory_takes(factory: Any, way_out: str) -> None:
    engine, rates = engine_of(network(), LRScheduling(factory))
    engine.run(batches(), max_epochs=2)
    with pytest.raises(ValueError, match=rf"extends to 18 steps; .*as in {re.escape(way_out)}\. To start"):
        engine.run(batches(), max_epochs=3)
    assert len(rates) == 12


def test_a_run_that_is_made_longer_names_each_of_several_factories_that_lacks_its_total() -> None:
    several = JointSchedule({"body": CosineAnnealingLR, "head": partial(StepLR, step_size=1)})
    assert with_total(several) == "'body': partial(CosineAnnealingLR, T_max=...)"
    assert with_total(partial(linear_decay, num_training_steps=5)) == "partial(linear_decay, num_training_steps=...)"


def test_a_saved_run_goes_on_bit_for_bit() -> None:
    for factory in (partial(OneCycleLR, max_lr=0.3), sequential, partial(LambdaLR, lr_lambda=lambda n: 0.9**n)):
        whole = network()
        engine, expected = engine_of(whole, LRScheduling(factory))
        saved: list[dict[str, Any]] = []
        engine.connect(
            Events.ITERATION_COMPLETED(once=8), lambda engine, saved=saved: saved.append(engine.state_dict())
        )
        engine.run(batches(), max_epochs=3)

        torch.manual_seed(99)
        model = nn.Linear(5, 2)
        other, rates = engine_of(model, LRScheduling(factory))
        other.load_state_dict(saved[0])
        other.run(batches(), max_epochs=3)
        assert rates == expected[8:]
        assert_same(model, whole)


def test_a_loaded_run_beyond_its_learned_total_is_refused_too() -> None:
    engine, _ = engine_of(network(), LRScheduling(partial(OneCycleLR, max_lr=0.3)))
    engine.run(batches(), max_epochs=2)
    other, rates = engine_of(network(), LRScheduling(partial(OneCycleLR, max_lr=0.3)))
    other.load_state_dict(engine.state_dict())
    with pytest.raises(ValueError, match=r"12 steps"):
        other.run(batches(), max_epochs=3)
    assert rates == []


def test_an_update_is_scheduled_by_its_name() -> None:
    models = {"a": nn.Linear(5, 2), "b": nn.Linear(5, 2)}

    def update(name: str) -> Update:
        def function(engine: Engine, batch: Any) -> Tensor:
            return nn.functional.mse_loss(models[name](batch[0]), batch[1])

        return Update.from_function(
            function,
            partial(torch.optim.SGD, lr=0.1),
            name=name,
            parameters=lambda engine: models[name].parameters(),
        )

    engine = Engine([update("a"), update("b")], model=models, seed=0)
    first, second = (
        LRScheduling(partial(ExponentialLR, gamma=0.5), update="a", name="first"),
        LRScheduling(partial(OneCycleLR, max_lr=0.3), update="b", name="second"),
    )
    engine.attach(first, second, GradientAccumulation(3, update="b"))
    engine.run(batches(), max_epochs=1)
    assert engine.find_update("a").optimizer.param_groups[0]["lr"] == 0.1 * 0.5**6  # type: ignore[union-attr]
    assert second.total == 2
    assert second.scheduler.optimizer is engine.find_update("b").optimizer
    with pytest.raises(KeyError, match="'c'"):
        engine.attach(LRScheduling(partial(StepLR, step_size=1), update="c"))


def test_every_parameter_group_is_scheduled() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    groups: list[dict[str, Any]] = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=1)
    engine = Engine(Update.supervised(nn.functional.mse_loss, optimizer), model=model, seed=0)
    engine.attach(LRScheduling(partial(ExponentialLR, gamma=0.5)))
    engine.run(batches(2), max_epochs=1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.25]


@pytest.mark.parametrize("way", ["without", "disabled", "detached"])
def test_switched_off_it_equals_a_plain_loop(way: str) -> None:
    model = network()
    handler = LRScheduling(partial(ExponentialLR, gamma=0.5))
    engine, rates = engine_of(model, handler)
    if way == "without":
        with engine.without("lr_scheduling"):
            engine.run(batches(), max_epochs=2)
    else:
        if way == "disabled":
            handler.enabled = False
        else:
            engine.detach(handler)
        engine.run(batches(), max_epochs=2)
    reference, expected = plain_loop(partial(ConstantLR, factor=1.0), epochs=2)
    assert rates == expected
    assert_same(model, reference)


def test_bad_arguments_are_refused() -> None:
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    with pytest.raises(TypeError, match="factory"):
        LRScheduling(StepLR(optimizer, step_size=1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="monitor="):
        LRScheduling(ReduceLROnPlateau)
    with pytest.raises(ValueError, match="monitor="):
        LRScheduling(partial(ReduceLROnPlateau, patience=2))
    with pytest.raises(ValueError, match="every="):
        LRScheduling(ReduceLROnPlateau, monitor="loss", every="1ep")
    for every in ("5it", "10min", "0st", "1.5ep", "often"):
        with pytest.raises(ValueError, match="every"):
            LRScheduling(partial(StepLR, step_size=1), every=every)


def test_a_factory_that_gives_no_scheduler_is_refused_before_the_first_batch() -> None:
    engine, rates = engine_of(network(), LRScheduling(lambda optimizer: 0.1))
    with pytest.raises(TypeError, match=r"returned 0\.1"):
        engine.run(batches(), max_epochs=1)
    assert rates == []


def test_a_monitor_goes_with_plateau_only() -> None:
    for handler, reported in (
        (
            LRScheduling(partial(StepLR, step_size=1), monitor="loss"),
            "monitor= is for schedulers that are stepped with a metric",
        ),
        (
            LRScheduling(lambda optimizer: ReduceLROnPlateau(optimizer)),
            "ReduceLROnPlateau, which is stepped with a metric; pass the name",
        ),
    ):
        engine, rates = engine_of(network(), handler)
        with pytest.raises(ValueError, match=reported):
            engine.run(batches(), max_epochs=1)
        assert rates == []


def test_attached_between_two_runs_it_learns_the_steps_that_are_to_come() -> None:
    engine, rates = engine_of(network())
    engine.run(batches(), max_epochs=2)
    handler = LRScheduling(partial(OneCycleLR, max_lr=0.3))
    engine.attach(handler)
    engine.run(batches(), max_epochs=3)
    assert handler.total == 6
    assert rates[12:] == plain_loop(partial(OneCycleLR, max_lr=0.3, total_steps=6), epochs=1)[1]


def test_switched_off_in_a_run_the_rate_stays_where_it_is() -> None:
    handler = LRScheduling(partial(ExponentialLR, gamma=0.5))
    engine, rates = engine_of(network(), handler)
    engine.connect(Events.ITERATION_COMPLETED(once=2), lambda engine: setattr(handler, "enabled", False))
    engine.run(batches(), max_epochs=1)
    assert rates == [0.1, 0.05] + [0.025] * 4


def test_a_saved_plateau_goes_on_with_what_it_has_seen() -> None:
    def build() -> tuple[Engine, list[float]]:
        handler = LRScheduling(partial(ReduceLROnPlateau, mode="min", factor=0.5, patience=1), monitor="score")
        engine, rates = engine_of(network(), handler)
        engine.connect(Events.EPOCH_COMPLETED, score)
        return engine, rates

    whole, expected = build()
    saved: list[dict[str, Any]] = []
    whole.connect(Events.ITERATION_COMPLETED(once=7), lambda engine: saved.append(engine.state_dict()))
    whole.run(batches(2), max_epochs=8)
    other, rates = build()
    other.load_state_dict(saved[0])
    other.run(batches(2), max_epochs=8)
    assert rates == expected[7:]


# ---- schedules without training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", ["1st", "2st", "1ep", "2ep"])
@pytest.mark.parametrize(
    "factory",
    [
        partial(StepLR, step_size=2, gamma=0.5),
        partial(LambdaLR, lr_lambda=lambda count: 1 / (1 + count)),
        sequential,
        partial(OneCycleLR, max_lr=0.3),
        partial(CosineAnnealingLR),
    ],
    ids=["StepLR", "LambdaLR", "SequentialLR", "OneCycleLR", "CosineAnnealingLR"],
)
@pytest.mark.filterwarnings("ignore:C06:signalfire.FindingWarning")
def test_the_rates_that_are_simulated_are_those_that_training_uses(factory: Factory, every: str) -> None:
    engine, rates = engine_of(network(), LRScheduling(factory, every=every), GradientAccumulation(2))
    engine.run(batches(), max_epochs=6)
    assert len(rates) == 18
    assert LRScheduling(factory, every=every).simulate(18, lr=0.1, epochs=6) == rates


def test_every_group_is_simulated_from_its_own_rate() -> None:
    handler = LRScheduling(partial(ExponentialLR, gamma=0.5))
    assert handler.simulate(3, lr=[0.1, 1.0]) == [[0.1, 0.05, 0.025], [1.0, 0.5, 0.25]]
    assert handler.simulate(2, lr=[0.1]) == [[0.1, 0.05]]


def test_a_plateau_is_simulated_with_the_values_of_its_metric() -> None:
    factory = partial(ReduceLROnPlateau, mode="min", factor=0.5, patience=1)
    engine, rates = engine_of(network(), LRScheduling(factory, monitor="score"))
    engine.connect(Events.EPOCH_COMPLETED, score)
    engine.run(batches(2), max_epochs=8)
    assert len(set(rates)) == 3
    assert LRScheduling(factory, monitor="score").simulate(16, lr=0.1, metric_values=SCORES) == rates
    # More values than steps: all of them are seen.
    assert len(LRScheduling(factory, monitor="score").simulate(3, lr=0.1, metric_values=SCORES)) == 3


def test_a_simulation_leaves_the_run_the_random_streams_and_the_optimizer_alone() -> None:
    def build() -> tuple[nn.Linear, LRScheduling, Engine, list[float]]:
        model, handler = network(), LRScheduling(partial(OneCycleLR, max_lr=0.3))
        return model, handler, *engine_of(model, handler)

    model, handler, engine, expected = build()
    engine.run(batches(), max_epochs=3)
    random = torch.get_rng_state()
    reference, handler, engine, rates = build()
    before = handler.state_dict()
    handler.simulate(7, lr=3.0)
    assert handler.state_dict() == before
    assert handler.scheduler is None
    engine.connect(Events.ITERATION_COMPLETED(once=4), lambda engine: handler.simulate(7, lr=3.0))
    engine.run(batches(), max_epochs=3)
    assert rates == expected
    assert_same(model, reference)
    assert torch.equal(torch.get_rng_state(), random)


def test_what_cannot_be_simulated_is_refused() -> None:
    steps, epochs = LRScheduling(partial(StepLR, step_size=1)), LRScheduling(partial(StepLR, step_size=1), every="1ep")
    plateau = LRScheduling(ReduceLROnPlateau, monitor="loss")
    for wrong in (0, -1, 2.5, True):
        kind = ValueError if type(wrong) is int else TypeError
        with pytest.raises(kind, match=rf"simulate\(steps={wrong}\)"):
            steps.simulate(wrong, lr=0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"simulate\(epochs=0\)"):
        epochs.simulate(4, lr=0.1, epochs=0)
    for count in (None, 3):
        with pytest.raises(ValueError, match=rf"epochs={count}\): this schedule is stepped at the end of each"):
            epochs.simulate(4, lr=0.1, epochs=count)
    with pytest.raises(ValueError, match=r"pass metric_values="):
        plateau.simulate(4, lr=0.1)
    with pytest.raises(ValueError, match=r"metric_values=\[1\.0\].*uses no metric"):
        steps.simulate(4, lr=0.1, metric_values=[1.0])


@pytest.mark.moderate
def test_a_schedule_is_drawn(tmp_path: Path) -> None:
    handler = LRScheduling(partial(OneCycleLR, max_lr=[0.3, 0.1]))
    handler.plot(tmp_path / "rates.png", 50, lr=[0.1, 0.1])
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
    LRScheduling(partial(StepLR, step_size=1), every="1ep").plot(tmp_path / "rates.svg", 6, lr=0.1, epochs=3)
    assert "<svg" in (tmp_path / "rates.svg").read_text()


def test_drawing_without_matplotlib_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"plot\(\) needs matplotlib \(pip install.*simulate\(\)"):
        LRScheduling(partial(StepLR, step_size=1)).plot(tmp_path / "rates.png", 6, lr=0.1)


# ---- schedulers that are passed the number of steps or epochs, as timm's are ------------------------------------------


class Counted:
    """A scheduler with the interface of timm's: each call says how many epochs or updates were made, and one of them acts."""

    def __init__(self, optimizer: Optimizer, t_initial: int, t_in_epochs: bool = True) -> None:
        self.optimizer = optimizer
        self.t_initial = t_initial
        self.t_in_epochs = t_in_epochs
        self.metric: float | None = None
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.base_values = [group["initial_lr"] for group in optimizer.param_groups]
        self._go(0)

    def _go(self, count: int) -> None:
        for group, base in zip(self.optimizer.param_groups, self.base_values, strict=True):
            group["lr"] = base * (1 + math.cos(math.pi * min(count / self.t_initial, 1))) / 2

    def step(self, epoch: int, metric: float | None = None) -> None:
        self.metric = metric
        if self.t_in_epochs:
            self._go(epoch)

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        self.metric = metric
        if not self.t_in_epochs:
            self._go(num_updates)

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "optimizer"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def timm_schedulers() -> ModuleType | None:
    """timm's schedulers if timm is installed. They need torch alone, though the package would import torchvision, too."""
    try:
        return importlib.import_module("timm.scheduler")
    except ImportError:
        pass
    spec = importlib.machinery.PathFinder.find_spec("timm")
    if spec is None:
        return None
    package = ModuleType("timm")
    package.__path__ = list(spec.submodule_search_locations or ())
    for name in [name for name in sys.modules if name.split(".")[0] == "timm"]:
        del sys.modules[name]
    sys.modules["timm"] = package
    try:
        return importlib.import_module("timm.scheduler")
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "timm"]:
            del sys.modules[name]


COUNTED: dict[str, Callable[..., Any]] = {"a stand-in": partial(Counted, t_initial=9)}
TIMM = timm_schedulers()
if TIMM is not None:
    COUNTED |= {
        "CosineLRScheduler": partial(
            TIMM.CosineLRScheduler, t_initial=4, lr_min=0.01, warmup_t=2, warmup_lr_init=0.02, warmup_prefix=True
        ),
        "CosineLRScheduler, cycles and noise": partial(
            TIMM.CosineLRScheduler, t_initial=2, cycle_limit=4, cycle_decay=0.5, noise_range_t=[1, 5]
        ),
        "MultiStepLRScheduler": partial(TIMM.MultiStepLRScheduler, decay_t=[2, 4], decay_rate=0.5),
        "PolyLRScheduler": partial(TIMM.PolyLRScheduler, t_initial=5, power=2.0),
        "StepLRScheduler": partial(TIMM.StepLRScheduler, decay_t=2, decay_rate=0.5, warmup_t=1),
        "TanhLRScheduler": partial(TIMM.TanhLRScheduler, t_initial=5),
    }
    if hasattr(TIMM, "WSDLRScheduler"):
        COUNTED["WSDLRScheduler"] = partial(TIMM.WSDLRScheduler, t_initial=5, decay_t=3, warmup_t=1)


def trained_as_timm_does(factory: Factory, *, epochs: int, window: int = 1) -> tuple[nn.Linear, list[float]]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = factory(optimizer)
    data, rates, updates = batches(), [], 0
    for epoch in range(epochs):
        for chunk in windows(data, window):
            for inputs, targets in chunk:
                nn.functional.mse_loss(model(inputs), targets).backward()
            average_gradients(model, len(chunk))
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
            scheduler.step_update(num_updates=updates)
        scheduler.step(epoch + 1)
    return model, rates


@pytest.mark.moderate
@pytest.mark.parametrize("every", ["1st", "1ep"])
@pytest.mark.parametrize("kind", COUNTED)
@pytest.mark.filterwarnings("ignore:W18")
def test_a_scheduler_that_gets_the_count_is_driven_as_in_its_own_loop(kind: str, every: str) -> None:
    factory = partial(COUNTED[kind], t_in_epochs=every == "1ep")
    for window in (1, 4):
        model = network()
        engine, rates = engine_of(model, LRScheduling(factory, every=every), GradientAccumulation(window))
        engine.run(batches(), max_epochs=7)
        reference, expected = trained_as_timm_does(factory, epochs=7, window=window)
        assert rates == expected
        assert len(set(rates)) > 2
        assert_same(model, reference)
        assert LRScheduling(factory, every=every).simulate(len(rates), lr=0.1, epochs=7) == rates


@pytest.mark.slow
@pytest.mark.parametrize("every", ["1st", "1ep"])
@pytest.mark.parametrize("kind", COUNTED)
@pytest.mark.filterwarnings("ignore:W18")
def test_a_scheduler_that_gets_the_count_goes_on_from_where_it_was_saved(kind: str, every: str) -> None:
    factory = partial(COUNTED[kind], t_in_epochs=every == "1ep")
    check_handler(lambda: engine_of(network())[0], lambda: LRScheduling(factory, every=every), batches(3), max_epochs=3)


def test_a_scheduler_that_gets_every_few_steps_knows_how_many_they_were() -> None:
    factory = partial(Counted, t_initial=12, t_in_epochs=False)
    engine, rates = engine_of(network(), LRScheduling(factory, every="3st"))
    engine.run(batches(), max_epochs=2)
    fine = LRScheduling(factory).simulate(12, lr=0.1)
    assert rates == [fine[step - step % 3] for step in range(12)]


def test_a_scheduler_that_counts_the_other_thing_is_refused_before_the_first_batch() -> None:
    for every, in_epochs, message in (
        ("1st", True, r"Counted counts epochs.*every='1step'.*t_in_epochs=False, or every='1ep'"),
        ("1ep", False, r"Counted counts steps.*every='1ep'.*t_in_epochs=True, or every='1step'"),
    ):
        engine, rates = engine_of(
            network(), LRScheduling(partial(Counted, t_initial=4, t_in_epochs=in_epochs), every=every)
        )
        with pytest.raises(ValueError, match=message):
            engine.run(batches(), max_epochs=1)
        assert rates == []


class CountedPlateau(Counted):
    """As timm's: it holds torch's, and what that has seen is not part of its state."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer, 1)
        self.lr_scheduler = ReduceLROnPlateau(optimizer)


@pytest.mark.parametrize("options", [{"every": "1ep"}, {"monitor": "score"}, {}], ids=["every", "monitor", "default"])
def test_a_plateau_that_does_not_save_what_it_has_seen_is_refused_with_one_way_out(options: dict[str, Any]) -> None:
    engine, rates = engine_of(network(), LRScheduling(CountedPlateau, **options))
    engine.connect(Events.EPOCH_COMPLETED, score)
    way_out = r"LRScheduling\(partial\(ReduceLROnPlateau, \.\.\.\), monitor=\.\.\.\)"
    with pytest.raises(ValueError, match=rf"CountedPlateau does not save its state; use torch's scheduler.*{way_out}"):
        engine.run(batches(), max_epochs=1)
    assert rates == []


def test_a_scheduler_that_is_refused_leaves_no_trace_on_the_optimizer() -> None:
    engine, _ = engine_of(network(), LRScheduling(partial(StepLR, step_size=1), monitor="loss"))
    for _ in range(2):  # and it is refused again
        with pytest.raises(ValueError, match="ReduceLROnPlateau"):
            engine.run(batches(), max_epochs=1)
        assert "step" not in vars(engine.updates[0].optimizer)


# ---- warm-up and plateau ------------------------------------------------------------------------------------------------


PLATEAU = partial(ReduceLROnPlateau, mode="min", factor=0.5, patience=0)
WARMUP = partial(LinearLR, start_factor=0.1, total_iters=8)
LINEAR = partial(LinearLR, start_factor=0.1, total_iters=6)


def warmed_up(*others: Any) -> tuple[Engine, list[float]]:
    engine = kit.build(kit.mlp(5, 8, 1), optimizer=partial(SGD, lr=0.2, momentum=0.9))
    rates: list[float] = []
    engine.connect(
        Events.OPTIMIZER_STEP_STARTED, lambda engine: rates.append(engine.updates[0].optimizer.param_groups[0]["lr"])
    )
    engine.attach(*others)
    return engine, rates


def scores(engine: Engine) -> None:
    engine.state.metrics["score"] = [5.0, 6.0, 4.0, 4.5, 4.6][engine.state.epoch - 1]


def with_warmup() -> tuple[Engine, list[float]]:
    engine, rates = warmed_up(LRScheduling(PLATEAU, monitor="score", warmup=WARMUP))
    engine.connect(Events.EPOCH_COMPLETED, scores, phase=Phase.PREPARE)
    return engine, rates


def test_a_warm_up_and_a_plateau_schedule_equal_a_plain_loop() -> None:
    engine, rates = with_warmup()
    engine.run(kit.batches(4), max_epochs=5)
    model = kit.mlp(5, 8, 1)
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.9)
    plateau, warmup, expected = PLATEAU(optimizer), WARMUP(optimizer), []
    for score in (5.0, 6.0, 4.0, 4.5, 4.6):
        for inputs, targets in kit.batches(4):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            warmup.step()
        plateau.step(score)
    assert rates == expected
    assert min(rates) == rates[0] == pytest.approx(0.02)
    assert rates[-1] == pytest.approx(0.05)  # halved twice, from the full rate
    assert_same(engine.model, model)
    handler = LRScheduling(PLATEAU, monitor="score", warmup=WARMUP)
    assert handler.simulate(20, lr=0.2, metric_values=[5.0, 6.0, 4.0, 4.5, 4.6]) == pytest.approx(rates)


@pytest.mark.parametrize("schedule", [LINEAR, None])
def test_after_a_step_those_who_record_see_the_rate_of_the_step(schedule: Any) -> None:
    """Also where they were connected after the schedule; control and saving see that of the next step."""
    options: dict[str, Any] = {} if schedule else {"monitor": "score", "warmup": WARMUP}
    engine, rates = warmed_up(LRScheduling(schedule or PLATEAU, **options))
    engine.connect(Events.EPOCH_COMPLETED, scores, phase=Phase.PREPARE)
    seen: dict[Phase, list[float]] = {Phase.RECORD: [], Phase.PERSIST: []}
    for phase, values in seen.items():
        engine.connect(
            Events.OPTIMIZER_STEP_COMPLETED,
            lambda engine, values=values: values.append(engine.updates[0].optimizer.param_groups[0]["lr"]),
            phase=phase,
            rank=-100 if phase is Phase.PERSIST else 0,
        )
    engine.run(kit.batches(4), max_epochs=2)
    assert seen[Phase.RECORD] == rates
    assert seen[Phase.PERSIST][:-1] == rates[1:]


@pytest.mark.parametrize("cut", [3, 8, 9, 13])
def test_a_warm_up_goes_on_in_a_resumed_run(cut: int) -> None:
    whole, rates = with_warmup()
    states: list[dict[str, Any]] = []
    whole.connect(Events.ITERATION_COMPLETED, lambda engine: states.append(engine.state_dict()), phase=Phase.PERSIST)
    whole.run(kit.batches(4), max_epochs=5)
    resumed, later = with_warmup()
    resumed.load_state_dict(states[cut - 1])
    resumed.run(kit.batches(4), max_epochs=5)
    assert later == rates[cut:]
    assert_same(resumed.model, whole.model)
    whole.reset()
    whole.model.load_state_dict(kit.mlp(5, 8, 1).state_dict())
    rates.clear()
    whole.run(kit.batches(4), max_epochs=1)
    assert rates[0] == pytest.approx(0.02)


def test_a_warm_up_of_another_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"LRScheduling\(warmup=.*SequentialLR"):
        LRScheduling(partial(StepLR, step_size=3), warmup=WARMUP)
    engine, _ = warmed_up(LRScheduling(PLATEAU, monitor="score", warmup=PLATEAU))
    engine.connect(Events.EPOCH_COMPLETED, scores, phase=Phase.PREPARE)
    with pytest.raises(TypeError, match=r"warmup= returned .*; expected a scheduler that is stepped after each"):
        engine.run(kit.batches(4), max_epochs=1)


# ---- resuming with another schedule ---------------------------------------------------------------------------------


def chained(then: Factory) -> Factory:
    return lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, total_iters=2), then(optimizer)], milestones=[2]
    )


REPLACED: dict[str, tuple[Factory, Factory, str]] = {
    "by one that needs other options": (
        partial(CosineAnnealingLR, T_max=20),
        partial(OneCycleLR, max_lr=0.1, total_steps=20),
        "was a CosineAnnealingLR when the state was saved, but is a OneCycleLR now; use the schedule of the saved run",
    ),
    "by one that takes any state": (
        lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step),
        partial(StepLR, step_size=2),
        "was a LambdaLR when the state was saved, but is a StepLR now",
    ),
    "in a part": (
        chained(partial(StepLR, step_size=2)),
        chained(partial(ExponentialLR, gamma=0.5)),
        r"was a SequentialLR\(LinearLR, StepLR\) when the state was saved, but is a SequentialLR\(LinearLR, ExponentialLR\) now",
    ),
}


@pytest.mark.parametrize("how", REPLACED)
@pytest.mark.filterwarnings("ignore:C06")  # the runs are shorter than their schedules
def test_a_schedule_of_another_class_is_refused_before_anything_is_changed(how: str) -> None:
    saved, here, message = REPLACED[how]
    first = plain_engine(LRScheduling(saved))
    first.run(batches(4), max_epochs=1)
    engine = plain_engine(LRScheduling(here))
    weights = {key: value.clone() for key, value in engine.model.state_dict().items()}
    engine.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=message):
        engine.run(batches(4), max_epochs=2)
    assert_same(dict(engine.model.state_dict()), weights)
    assert engine.updates[0].steps == engine.state.iteration == 0
    assert_same_rates(engine, plain_engine(LRScheduling(here)))


def plain_engine(handler: LRScheduling) -> Engine:
    engine = Engine(Update.supervised(nn.functional.mse_loss, partial(SGD, lr=0.1)), model=network(), seed=0)
    engine.attach(handler)
    return engine


def assert_same_rates(engine: Engine, other: Engine) -> None:
    """Both make a run with the same rates."""
    engine.snapshots.reset()
    found = []
    for one in (engine, other):
        rates: list[float] = []
        one.connect(
            Events.OPTIMIZER_STEP_STARTED,
            lambda engine, rates=rates: rates.append(engine.updates[0].optimizer.param_groups[0]["lr"]),
        )
        one.run(batches(4), max_epochs=1)
        found.append(rates)
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:C06")
def test_under_another_name_a_new_schedule_continues_a_saved_run() -> None:
    first = plain_engine(LRScheduling(partial(StepLR, step_size=1, gamma=0.5)))
    first.run(batches(4), max_epochs=1)
    engine = plain_engine(LRScheduling(partial(OneCycleLR, max_lr=0.1, total_steps=20), name="next"))
    engine.load_state_dict(first.state_dict(), allow=["lr_scheduling", "next"])
    engine.run(batches(4), max_epochs=2)
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    assert engine.updates[0].optimizer is not None
    assert engine.updates[0].optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def in_turns(size: int) -> Factory:
    return lambda optimizer: SequentialLR(optimizer, [LinearLR(optimizer), StepLR(optimizer, size)], milestones=[6])


@pytest.mark.filterwarnings("ignore:C06")
@pytest.mark.parametrize(
    "factory", [lambda size: lambda optimizer: StepLR(optimizer, size), in_turns], ids=["one", "parts"]
)
def test_arguments_inside_of_a_factory_that_the_state_replaces_are_reported(factory: Callable[[int], Factory]) -> None:
    first, _ = engine_of(network(), LRScheduling(factory(3)))
    first.run(batches(), max_epochs=1)
    other, rates = engine_of(network(), LRScheduling(factory(30)))
    other.load_state_dict(first.state_dict())
    with pytest.warns(
        FindingWarning, match="W32: .*step_size=30 of the StepLR is not used, because the saved state has step_size=3"
    ):
        other.run(batches(), max_epochs=2)
    same, expected = engine_of(network(), LRScheduling(factory(3)))
    same.load_state_dict(first.state_dict())
    same.run(batches(), max_epochs=2)
    assert rates == expected


def test_a_decorated_factory_may_fill_in_the_total() -> None:
    @wraps(cosine_of)
    def factory(optimizer: Optimizer) -> LRScheduler:
        return cosine_of(optimizer, total_steps=4)

    assert LRScheduling(factory).simulate(4, lr=1.0) == pytest.approx(LRScheduling(cosine_of).simulate(4, lr=1.0))


def cosine_of(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    return CosineAnnealingLR(optimizer, total_steps)
