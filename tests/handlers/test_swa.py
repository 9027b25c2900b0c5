"""SWA against torch's recipe (AveragedModel, SWALR, update_bn) in plain PyTorch loops."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, SequentialLR, StepLR
from torch.optim.swa_utils import SWALR, AveragedModel, get_swa_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, Update, allow, seed_everything
from signalfire.handlers import (
    EMA,
    SWA,
    GradientAccumulation,
    LRScheduling,
    MixedPrecision,
    Validation,
)
from signalfire.testing import check_handler, fingerprint
from tests.kit import (
    assert_same,
    average_gradients,
    batches,
    build,
    evaluator_of,
    mlp,
    needs_torch,
    validation_loss,
    windows,
)

Batches = list[tuple[Tensor, Tensor]]


def network(dropout: float = 0.2) -> nn.Sequential:
    return mlp(5, 8, 1, nn.BatchNorm1d(8), nn.Dropout(dropout))


trainer_of = partial(build, optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9))


def run(engine: Engine, **bounds: Any) -> Engine:
    seed_everything(1)
    engine.run(batches(), **({"max_epochs": 6} | bounds))
    return engine


def plain_loop(
    *, start: int = 3, every: int = 1, window: int = 1, lr: float | None = None, epochs: int = 6, **annealing: Any
) -> tuple[nn.Module, nn.Module, list[float], list[float]]:
    """The trained model, its average with its statistics, the rates of the epochs, the average's loss after each epoch."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    averaged = AveragedModel(model, multi_avg_fn=get_swa_multi_avg_fn())
    # Over 0 epochs, torch's takes effect when it is built: build it when averaging begins. Over more it makes no difference.
    begin_annealing = partial(SWALR, optimizer, swa_lr=lr or 1.0, **annealing)
    scheduler = begin_annealing() if lr is not None and annealing.get("anneal_epochs") != 0 else None
    rates, losses = [], []
    seed_everything(1)
    data = batches()
    for epoch in range(1, epochs + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        for chunk in windows(data, window):
            for inputs, targets in chunk:
                nn.functional.mse_loss(model(inputs), targets).backward()
            average_gradients(model, len(chunk))
            optimizer.step()
            optimizer.zero_grad()
        if epoch >= start:
            if (epoch - start) % every == 0:
                averaged.update_parameters(model)
            if lr is not None:
                scheduler = scheduler or begin_annealing()
                scheduler.step()
        losses.append(validation_loss(averaged.module if epoch >= start else model))
    update_bn(data, averaged)
    return model, averaged.module, rates, losses


CASES: dict[str, dict[str, Any]] = {
    "constant rate": {},
    "from the first epoch on": {"start": 1},
    "every second epoch": {"start": 2, "every": 2},
    "annealed by a cosine": {"lr": 0.08, "anneal_epochs": 2},
    "annealed linearly": {"lr": 0.01, "anneal_epochs": 3, "anneal_strategy": "linear"},
    "annealed at once": {"lr": 0.08, "anneal_epochs": 0},
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # of the plain loop that builds it late
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_average_rates_and_weights_equal_torchs_recipe(case: str, window: int) -> None:
    options = {"start": 3} | CASES[case]
    reference, average, expected, _ = plain_loop(**options, window=window)
    if "anneal_strategy" in options:
        options["anneal"] = options.pop("anneal_strategy")
    if "every" in options:
        options["every"] = f"{options['every']}ep"
    model, rates = network(), []
    engine = trainer_of(model, SWA(**options, bn_data=batches()), GradientAccumulation(window))

    @engine.on(Events.EPOCH_STARTED)
    def note(engine: Engine) -> None:
        assert engine.updates[0].optimizer is not None
        rates.append(engine.updates[0].optimizer.param_groups[0]["lr"])

    run(engine)
    assert rates == expected
    assert (len(set(rates)) > 1) == ("lr" in options)
    assert_same(model.state_dict(), reference.state_dict())
    assert_same(engine.weights()["model"], average.state_dict())
    assert not torch.equal(engine.weights()["model"]["1.running_mean"], model.state_dict()["1.running_mean"])


@pytest.mark.moderate
@pytest.mark.parametrize("swa_first", [True, False])
def test_a_validation_measures_the_average_and_training_does_not_notice(swa_first: bool) -> None:
    model, losses = network(), []
    handlers = [SWA(3, bn_data=batches()), Validation(evaluator_of(model), batches(3))]
    engine = trainer_of(model, *(handlers if swa_first else reversed(handlers)))
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: losses.append(engine.state.metrics["loss"]))
    run(engine)
    reference, _, _, expected = plain_loop()
    assert losses == expected
    assert_same(model.state_dict(), reference.state_dict())


def test_statistics_are_gathered_before_each_evaluation_if_asked_for() -> None:
    model, losses = network(), []
    engine = trainer_of(
        model,
        SWA(3, bn_data=batches(), bn_update="evaluation"),
        Validation(evaluator_of(model), batches(3), every="1ep"),
    )
    engine.connect(Events.EPOCH_COMPLETED(after=2), lambda engine: losses.append(engine.state.metrics["loss"]))
    run(engine)
    for epochs, loss in zip(range(3, 7), losses, strict=True):
        reference, average, _, _ = plain_loop(epochs=epochs)
        assert loss == validation_loss(average)
    assert_same(model.state_dict(), reference.state_dict())


@pytest.mark.moderate
@pytest.mark.parametrize("bn_update", ["end", "evaluation"])
def test_gathering_statistics_leaves_no_trace(bn_update: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.cat(both) for both in zip(*batches(), strict=True))
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True, generator=generator)
    model = network()
    model[3].eval()  # a mode of the user's own, before the run
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    norm.momentum = 0.3
    engine = trainer_of(model, SWA(2, bn_data=loader, bn_update=bn_update), Validation(evaluator_of(model), batches(2)))
    with allow("W52"):
        run(engine, max_epochs=4)
    assert norm.momentum == 0.3
    assert [module.training for module in model] == [True, True, True, False]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(0).get_state())
    assert engine.updates[0].steps == 24
    plain = trainer_of(other := network())
    assert isinstance(other[1], nn.BatchNorm1d)
    other[1].momentum = 0.3
    run(plain, max_epochs=4)
    ours, theirs = fingerprint(engine, handlers=False), fingerprint(plain, handlers=False)
    for part in ("modules.model", "updates.main", "random"):
        assert ours[part] == theirs[part], part


def test_inside_a_window_and_after_a_failed_pass_everything_is_as_before() -> None:
    model = network()
    broken: list[Any] = [*batches(2), (torch.zeros(4, 7), torch.zeros(4, 1))]
    engine = trainer_of(model, SWA(3, bn_data=broken))
    with pytest.raises(RuntimeError):
        run(engine)
    assert_same(model.state_dict(), plain_loop()[0].state_dict())
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.momentum == 0.1
    assert engine.regions.depth == 0


def test_a_part_of_the_data_is_enough_if_asked_for() -> None:
    engine = run(trainer_of(network(), SWA(3, bn_data=batches(), bn_batches=2)))
    plain_model = network()
    plain_model.load_state_dict(plain_loop()[1].state_dict())
    # The pass comes after the run, and its dropout continues at the position of the training's random stream.
    update_bn(batches(2), plain_model)
    exported = engine.weights()["model"]
    assert exported["1.num_batches_tracked"] == 2
    # BatchNorm stands in front of the dropout, so that its statistics do not depend on the masks.
    assert_same(exported, plain_model.state_dict())


def test_statistics_of_the_last_weights_are_kept_if_asked_for() -> None:
    model = network()
    engine = run(trainer_of(model, SWA(3, bn_batches=0)))
    exported = engine.weights()["model"]
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(exported[f"1.{name}"], model.state_dict()[f"1.{name}"])


def test_layers_in_eval_mode_keep_their_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm1d(5), network())
    engine = trainer_of(model, SWA(2, bn_data=batches()))
    engine.connect(Events.EPOCH_STARTED, lambda engine: model[0].eval())
    model.get_buffer("0.running_mean").fill_(0.25)
    model.get_buffer("0.num_batches_tracked").fill_(7)
    run(engine)
    exported = engine.weights()["model"]
    assert exported["0.num_batches_tracked"] == 7
    assert torch.equal(exported["0.running_mean"], torch.full((5,), 0.25))
    assert exported["1.1.num_batches_tracked"] == 6
    engine.handlers["swa"].update_bn(engine)  # type: ignore[attr-defined]
    assert_same(engine.weights()["model"], exported)


def test_statistics_can_be_gathered_after_the_run() -> None:
    model = network()
    engine = run(trainer_of(model, handler := SWA(3, bn_batches=0)))
    model.eval()
    handler.bn_batches = None
    handler.update_bn(engine, batches())
    _, average, _, _ = plain_loop()
    assert_same(engine.weights()["model"], average.state_dict())
    assert not any(module.training for module in model.modules())
    with pytest.raises(ValueError, match=r"update_bn\(\) needs training data"):
        handler.update_bn(engine)


def test_with_mixed_precision_a_function_and_dictionaries_as_batches() -> None:
    model = network()

    def step(engine: Engine, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])

    data = [{"x": x, "y": y} for x, y in batches()]
    engine = Engine(Update.from_function(step, partial(torch.optim.SGD, lr=0.05)), model=model, seed=0)
    engine.attach(SWA(2, bn_data=[*data, None]), MixedPrecision("bf16"))
    engine.run(data, max_epochs=3)
    average = network()
    average.load_state_dict(engine.weights()["model"])
    again = network()
    again.load_state_dict(average.state_dict())
    update_bn(batches(), again)
    assert_same(average.state_dict(), again.state_dict())


def test_the_rate_before_can_be_scheduled_with_torchs_own_annealing() -> None:
    def factory(optimizer: Optimizer) -> SequentialLR:
        parts: list[Any] = [ExponentialLR(optimizer, 0.8), SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)]
        return SequentialLR(optimizer, parts, milestones=[3])

    model, rates = network(), []
    engine = trainer_of(model, SWA(3, bn_data=batches()), LRScheduling(factory, every="1ep"))

    @engine.on(Events.EPOCH_STARTED)
    def note(engine: Engine) -> None:
        assert engine.updates[0].optimizer is not None
        rates.append(engine.updates[0].optimizer.param_groups[0]["lr"])

    run(engine)
    optimizer = torch.optim.SGD(network().parameters(), lr=0.05)
    scheduler, expected = factory(optimizer), []
    for _ in range(6):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == expected
    assert rates[-1] == 0.02


@pytest.mark.slow
def test_a_saved_run_goes_on_bit_for_bit_and_reset_begins_anew() -> None:
    def build() -> Engine:
        model = network()
        handler = SWA(2, lr=0.08, anneal_epochs=3, bn_data=batches(), bn_update="evaluation")
        return trainer_of(model, handler, Validation(evaluator_of(model), batches(3), every="4it"))

    engine, files = build(), []

    @engine.on(Events.ITERATION_COMPLETED(every=6))
    def save(engine: Engine) -> None:
        torch.save(engine.state_dict(), buffer := io.BytesIO())
        files.append(buffer.getvalue())

    run(engine)
    exported = engine.weights()["model"]
    for file in files:
        other = build()
        other.load_state_dict(torch.load(io.BytesIO(file), weights_only=True))
        run(other)
        assert fingerprint(other) == fingerprint(engine)
        assert_same(other.weights()["model"], exported)
    engine.reset()
    engine.model.load_state_dict(network().state_dict())
    run(engine)
    assert_same(engine.weights()["model"], exported)


def test_a_complete_run_that_is_loaded_has_its_statistics_already() -> None:
    engine = run(trainer_of(network(), SWA(2, bn_data=batches())))
    seen: list[int] = []

    class Counted(list[Any]):
        def __iter__(self) -> Any:
            seen.append(1)
            return super().__iter__()

    other = trainer_of(network(), SWA(2, bn_data=Counted(batches())))
    other.load_state_dict(engine.state_dict())
    with pytest.warns(UserWarning, match="nothing to do"):
        run(other)
    assert not seen
    assert_same(other.weights()["model"], engine.weights()["model"])


def test_reset_brings_back_the_rate_of_an_optimizer_that_was_given_built() -> None:
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine = Engine(Update.supervised(nn.functional.mse_loss, optimizer), model=model, seed=0)
    engine.attach(SWA(2, lr=0.01, anneal_epochs=2))
    run(engine)
    assert optimizer.param_groups[0]["lr"] == 0.01
    engine.reset()
    assert optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.filterwarnings("ignore:W32")
def test_a_saved_run_without_annealing_can_go_on_with_it() -> None:
    engine = run(trainer_of(network(), SWA(2, bn_data=batches())), max_epochs=3)
    other = trainer_of(network(), SWA(2, bn_data=batches(), lr=0.08, anneal_epochs=1))
    other.load_state_dict(engine.state_dict())
    run(other)
    optimizer = other.updates[0].optimizer
    assert optimizer is not None
    assert optimizer.param_groups[0]["lr"] == 0.08


def test_no_trace_is_left_on_the_optimizer() -> None:
    engine = run(trainer_of(network(), SWA(2, lr=0.08, bn_batches=0)))
    assert "step" not in vars(engine.updates[0].optimizer)


@needs_torch(2, 9, why="a state of SWALR without functions")
@pytest.mark.moderate
def test_annealing_it_keeps_the_promises_of_a_handler() -> None:
    check_handler(
        lambda: trainer_of(network()),
        lambda: SWA(2, bn_data=batches(), lr=0.08, anneal_epochs=2, bn_update="evaluation"),
        batches(5),
        per_run=["_versions"],
        max_epochs=3,
    )


def test_what_depends_on_an_order_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="both 'ema' and 'swa' control the weights used for evaluation"):
        trainer_of(network(), EMA(), SWA(2))
    with pytest.raises(ValueError, match=r"both 'swa' and 'lr_scheduling' .* the learning rate of update 'main'"):
        trainer_of(network(), SWA(2, lr=0.1), LRScheduling(partial(StepLR, step_size=1)))
    trainer_of(network(), SWA(2), LRScheduling(partial(StepLR, step_size=1)))


def test_batch_norm_without_data_is_refused_before_the_first_batch() -> None:
    engine = trainer_of(network(), SWA(2))
    with pytest.raises(ValueError, match=r"'swa': the model has 1 BatchNorm layer.*bn_data=.*bn_batches=0"):
        run(engine)
    assert engine.state.iteration == 0
    run(trainer_of(nn.Linear(5, 1), SWA(2)))
    with pytest.raises(ValueError, match=r"SWA\(bn_data=\[\]\): the data is empty"):
        run(trainer_of(network(), SWA(2, bn_data=[])))


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"start": 0}, ValueError),
        ({"start": 0.75}, TypeError),
        ({"every": "100it"}, ValueError),
        ({"every": Events.EPOCH_COMPLETED}, TypeError),
        ({"lr": 0.0}, ValueError),
        ({"lr": "0.1"}, TypeError),
        ({"anneal_epochs": -1}, ValueError),
        ({"anneal": "cosine"}, ValueError),
        ({"bn_data": 3}, TypeError),
        ({"bn_data": iter([1])}, TypeError),
        ({"bn_batches": -1}, ValueError),
        ({"bn_update": "always"}, ValueError),
    ],
    ids=lambda value: str(value).split(" at ")[0],
)
def test_bad_arguments_are_refused(options: dict[str, Any], kind: type[Exception]) -> None:
    (argument,) = options
    with pytest.raises(kind, match=rf"SWA\({argument}="):
        SWA(**({"start": 2} | options))
