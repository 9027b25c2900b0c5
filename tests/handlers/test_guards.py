"""Guards: what is trained as it is meant raises no alarm, and is trained as without them. The mistakes are in tests/mistakes."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from signalfire import Engine, Events, FindingError, FindingWarning, Handler, Update, seed_everything
from signalfire.handlers import (
    EMA,
    SWA,
    AdaptiveGradientClipping,
    CutMix,
    DeviceTransfer,
    DistributedDataParallel,
    Freezing,
    FullyShardedDataParallel,
    GradientAccumulation,
    GradientClipping,
    GradientNoise,
    Guards,
    LabelSmoothing,
    LimitBatches,
    LRScheduling,
    MicroBatching,
    MixedPrecision,
    MixUp,
    NonFiniteGuard,
    OverfitBatches,
    SharpnessAwareMinimization,
    TruePrecision,
    Validation,
    cosine_with_warmup,
)
from signalfire.testing import check_handler
from tests.kit import SGD, assert_same, batches, build, evaluator_of, linear, mlp, quick, spread
from tests.processes import run_together
from tests.resume_recipes import RECIPES

LOOK_ALWAYS = partial(Guards, every="1it")


@pytest.fixture(autouse=True)
def no_finding_is_reported() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FindingWarning)
        yield


# ---- no false alarm, and no trace ---------------------------------------------------------------------------------------


@pytest.mark.moderate
@pytest.mark.parametrize("name", quick(RECIPES, *spread(RECIPES, len(RECIPES))))
def test_the_recipes_raise_no_alarm_and_end_as_without(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    ends = []
    for guards in ([], [LOOK_ALWAYS()]):
        seed_everything(0)
        folder = tmp_path / str(len(guards))
        folder.mkdir()
        engine = recipe.build(folder)
        engine.attach(*guards)
        engine.run(recipe.data(), **recipe.bounds)
        assert not [found for found in engine.findings.of_run() if found.severity == "warning"]
        ends.append((engine.state_dict()["modules"], torch.get_rng_state()))
    (one, stream), (other, same_stream) = ends
    assert torch.equal(stream, same_stream)
    for root in one:
        assert_same(one[root], other[root])


HANDLERS: dict[str, Callable[[], list[Handler]]] = {
    "accumulation": lambda: [GradientAccumulation(4)],
    "pieces": lambda: [MicroBatching(2)],
    "sharpness": lambda: [SharpnessAwareMinimization(0.05)],
    "fp16": lambda: [MixedPrecision("fp16", init_scale=2.0**40, growth_interval=3), GradientAccumulation(2)],
    "bf16": lambda: [MixedPrecision("bf16")],
    "fp64": lambda: [TruePrecision("fp64")],
    "clipping and noise": lambda: [GradientClipping(max_norm=0.1), GradientNoise(0.1), AdaptiveGradientClipping(0.01)],
    "gradual unfreezing": lambda: [Freezing({"0": 2, "1": 2})],
    "a frozen body": lambda: [Freezing(["0", "1"])],
    "averages": lambda: [EMA(0.5)],
    "averages of the end": lambda: [SWA(2, bn_data=batches(targets=(), classes=3))],
    "mixing": lambda: [MixUp(0.4), LabelSmoothing(0.1)],
    "one batch on purpose": lambda: [OverfitBatches(1)],
    "few batches": lambda: [LimitBatches(2)],
    "a schedule": lambda: [LRScheduling(cosine_with_warmup(warmup=2))],
    "a guard": lambda: [NonFiniteGuard(check="both"), DeviceTransfer("cpu")],
}


@pytest.mark.parametrize("name", HANDLERS)
@pytest.mark.parametrize("optimizer", [SGD, partial(torch.optim.Adam, lr=0.01)])
def test_handlers_that_change_the_training_raise_no_alarm(name: str, optimizer: Any) -> None:
    model = mlp(5, 8, 3, nn.BatchNorm1d(8), nn.Dropout(0.1))
    engine = build(model, LOOK_ALWAYS(), *HANDLERS[name](), loss=cross_entropy, optimizer=optimizer)
    engine.run(batches(targets=(), classes=3), max_epochs=3)
    assert not engine.findings.of_run().at_least("warning"), str(engine.findings.of_run())


def test_lbfgs_and_pictures_raise_no_alarm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    engine = build(model, LOOK_ALWAYS(), CutMix(), loss=cross_entropy, optimizer=partial(torch.optim.LBFGS, max_iter=2))
    engine.run(batches(inputs=(1, 4, 4), targets=(), classes=3), max_epochs=2)


def test_a_zero_initialised_last_layer_raises_no_alarm() -> None:
    model = mlp(5, 8, 3)
    nn.init.zeros_(model.get_parameter("1.weight"))
    nn.init.zeros_(model.get_parameter("1.bias"))
    build(model, LOOK_ALWAYS(), loss=cross_entropy).run(batches(targets=(), classes=3), max_epochs=2)


def test_adapters_over_a_frozen_base_raise_no_alarm() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.base, self.down, self.up, self.head = (
                nn.Linear(5, 8),
                nn.Linear(5, 2),
                nn.Linear(2, 8),
                nn.Linear(8, 1),
            )
            self.base.requires_grad_(False)
            self.head.requires_grad_(False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.base(x) + self.up(self.down(x)))  # type: ignore[no-any-return]

    build(Adapted(), LOOK_ALWAYS()).run(batches(), max_epochs=2)


def test_an_update_of_every_other_iteration_and_a_user_who_steps_a_network_well_raise_no_alarm() -> None:
    models = {"main": linear(5, 1), "side": linear(5, 1)}
    side = torch.optim.SGD(models["side"].parameters(), lr=0.01)

    def main(engine: Engine, batch: Any) -> Tensor:
        return mse_loss(engine.modules["main"](batch[0]), batch[1])

    engine = Engine(Update.from_function(main, SGD, parameters=lambda e: e.modules["main"].parameters()), model=models)
    engine.attach(LOOK_ALWAYS())

    @engine.on(Events.ITERATION_COMPLETED)
    def step_side(engine: Engine) -> None:
        x, y = engine.state.batch
        side.zero_grad(set_to_none=False)
        mse_loss(models["side"](x), y).backward()
        side.step()

    engine.run(batches(), max_epochs=2)


def test_an_evaluation_that_is_watched_raises_no_alarm_and_measures_the_same() -> None:
    model = mlp(5, 8, 1, nn.BatchNorm1d(8), nn.Dropout(0.5))
    evaluator = evaluator_of(model)
    evaluator.attach(Guards())
    engine = build(model, LOOK_ALWAYS(), Validation(evaluator, batches(3)))
    engine.run(batches(), max_epochs=2)
    plain_model = mlp(5, 8, 1, nn.BatchNorm1d(8), nn.Dropout(0.5))
    plain = build(plain_model, Validation(evaluator_of(plain_model), batches(3)))
    plain.run(batches(), max_epochs=2)
    assert engine.state.metrics["loss"] == plain.state.metrics["loss"]


@pytest.mark.moderate
def test_it_keeps_the_promises_of_a_handler() -> None:
    data = batches(3, targets=(), classes=3)
    make = lambda: build(mlp(5, 8, 3, nn.Dropout(0.2)), loss=cross_entropy)  # noqa: E731
    check_handler(make, LOOK_ALWAYS, data, max_epochs=2, changes_training=False)
    check_handler(make, Guards, data, max_epochs=2, changes_training=False)


def _in_two_processes(kind: str) -> tuple[list[str], list[Any]]:
    handler = DistributedDataParallel(timeout=60) if kind == "ddp" else FullyShardedDataParallel(timeout=60)
    engine = build(mlp(5, 8, 1), handler, LOOK_ALWAYS(), GradientAccumulation(2))
    engine.run(batches(8), max_epochs=2)
    return [str(found) for found in engine.findings.of_run()], [len(str(engine.state.iteration))]


@pytest.mark.moderate
@pytest.mark.parametrize("kind", quick(["ddp", "fsdp"], "ddp"))
def test_two_processes_raise_no_alarm(kind: str) -> None:
    assert run_together(_in_two_processes, 2, kind)[0][0] == []


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target[:, None]).square().mean()


@pytest.mark.parametrize("width", [1, 2, 3])
def test_numbers_that_no_loss_takes_for_classes_are_none(width: int) -> None:
    data = [(torch.randn(4, 5), torch.full((4,), length)) for length in (3, 5, 7, 9)]
    build(linear(5, width), LOOK_ALWAYS(), loss=squared, optimizer=partial(torch.optim.SGD, lr=1e-3)).run(
        data, max_epochs=1
    )


def test_a_class_that_the_loss_ignores_may_have_any_number() -> None:
    data = [(inputs, torch.tensor([0, 1, 250, 2])) for inputs, _ in batches(4)]
    build(linear(5, 3), LOOK_ALWAYS(), loss=partial(cross_entropy, ignore_index=250)).run(data, max_epochs=1)


def test_outputs_are_alike_until_the_first_step_where_the_last_layer_begins_with_zeros() -> None:
    model = mlp(5, 8, 3)
    for parameter in model[-1].parameters():
        nn.init.zeros_(parameter)
    build(model, GradientAccumulation(4), LOOK_ALWAYS(), loss=cross_entropy).run(
        batches(8, targets=(), classes=3), max_epochs=1
    )


# ---- what it is called with ---------------------------------------------------------------------------------------------


def test_a_code_can_stop_the_run_or_be_silenced() -> None:
    data = [batches()[0]] * 6
    with pytest.raises(FindingError, match="G11: the batch in iteration 3 is identical to the batches") as caught:
        build(mlp(5, 8, 1), Guards(error=["G11"])).run(data, max_epochs=1)
    assert caught.value.finding.severity == "error"
    build(mlp(5, 8, 1), Guards(error=["G11"]), allow=["G11"]).run(data, max_epochs=1)
    with pytest.raises(ValueError, match="'G99' is not a finding code"):
        Guards(error=["G99"])
    with pytest.raises(TypeError, match="a single string"):
        Guards(error="G11")  # a string is a sequence of strings
    with pytest.raises(ValueError, match="Guards"):
        Guards(every="2ep")


def test_it_looks_at_the_first_iterations_and_every_n_th_and_is_not_called_between() -> None:
    engine = build(mlp(5, 8, 1), Guards(every="10it"))
    listened = []

    @engine.on(Events.ITERATION_COMPLETED)
    def note(engine: Engine) -> None:
        if engine.signal(Events.LOSS_COMPUTED).connections:
            listened.append(engine.state.iteration)

    engine.run(batches(25), max_epochs=1)
    assert listened == [1, 2, 3, 10, 20]
    assert not engine.signal(Events.LOSS_COMPUTED).connections


@pytest.mark.moderate
def test_between_its_looks_an_iteration_makes_no_call_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    loop = importlib.import_module("loop")

    def variant(*handlers: Handler) -> Callable[[int], object]:
        engine = Engine(Update.supervised(mse_loss, SGD), model=loop.tiny_model(), allow=["G11"])
        engine.attach(*handlers)
        batch = loop.tiny_batch()
        return lambda n: engine.run([batch] * n, max_iters=engine.state.iteration + n)

    assert loop.calls(variant(Guards(every="100000it"))) == pytest.approx(loop.calls(variant()), abs=0.05)


def test_switched_off_in_a_run_nothing_of_it_stays() -> None:
    guards = LOOK_ALWAYS()
    engine = build(mlp(5, 8, 1), guards, GradientAccumulation(3))

    @engine.on(Events.ITERATION_COMPLETED(once=4))
    def switch_off(engine: Engine) -> None:
        guards.enabled = False

    @engine.on(Events.ITERATION_COMPLETED(once=7))
    def look(engine: Engine) -> None:
        assert not engine.signal(Events.LOSS_COMPUTED).connections

    engine.run(batches(9), max_epochs=1)


def test_a_reset_model_of_another_run_is_looked_at_anew() -> None:
    guards = LOOK_ALWAYS()
    engine = build(mlp(5, 8, 1), guards)
    engine.run(batches(), max_epochs=1)
    engine.reset()
    engine.run(batches(), max_epochs=1)
    other = build(copy.deepcopy(engine.model))
    engine.detach(guards)
    other.attach(guards)
    other.run(batches(), max_epochs=1)


def test_weights_that_have_converged_and_stay_are_no_finding() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(128, 8)
    data = [(inputs, inputs.sum(1, keepdim=True))]
    model = nn.Linear(8, 1)
    engine = build(model, Guards(every="1it"), optimizer=partial(torch.optim.LBFGS, lr=0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.run(data, max_epochs=10)
    assert (model.weight - 1).abs().max() < 1e-3
