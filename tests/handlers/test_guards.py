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
    data = [(inputs.clone(), targets) for inputs, targets in [batches()[0]] * 6]
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


# ---- what looks like a mistake, and is none ------------------------------------------------------------------------------


def watched(update: Any, model: Any, data: Any, *receivers: tuple[Any, Callable[[Engine], object]]) -> Engine:
    """A run whose every iteration is looked at."""
    engine = Engine(update, model=model, seed=0)
    engine.attach(LOOK_ALWAYS())
    for event, receiver in receivers:
        engine.connect(event, receiver)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FindingWarning)
        engine.run(data, max_epochs=2, check=False)
    return engine


def of_guards(engine: Engine) -> list[str]:
    """The codes of what was found by a look."""
    return [one.code for one in engine.findings.of_run() if one.code.startswith("G") or one.code == "W09"]


CLASSES = partial(batches, targets=(), classes=3)


class Calling(torch.optim.SGD):
    """An optimizer whose step is another one of its base class."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def a_step_that_calls_that_of_the_base() -> Engine:
    SGD(linear(5, 1).parameters())  # from here on, torch hooks the steps of the base, too
    return watched(Update.supervised(mse_loss, partial(Calling, lr=0.1)), mlp(5, 8, 1), batches())


def weights_that_a_receiver_clips() -> Engine:
    model = linear(5, 1)

    def clip(engine: Engine) -> None:
        with torch.no_grad():
            model.weight.clamp_(0, 1e-3)

    return watched(Update.supervised(mse_loss, SGD), model, batches(), (Events.OPTIMIZER_STEP_COMPLETED, clip))


def a_body_whose_rate_is_zero() -> Engine:
    model = mlp(5, 8, 1)
    with torch.no_grad():
        model[1].weight.mul_(9)  # type: ignore[operator]
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[1].parameters(), "lr": 1e-3}]
    return watched(Update.supervised(mse_loss, torch.optim.SGD(groups)), model, batches())


def a_target_network_in_a_second_run() -> Engine:
    online, temperature = linear(5, 1), nn.Parameter(torch.ones(()))
    models = {"online": online, "target": copy.deepcopy(online)}

    def step(engine: Engine, batch: Any) -> Tensor:
        return mse_loss(online(batch[0]) * temperature, batch[1])

    update = Update.from_function(step, SGD, parameters=lambda engine: [*online.parameters(), temperature])
    engine = watched(update, models, batches())
    engine.run(batches(), max_epochs=3, check=False)
    return engine


def a_target_network_that_is_replaced() -> Engine:
    model = nn.ModuleDict({"online": linear(5, 1), "target": linear(5, 1)})

    def replace(engine: Engine) -> None:
        model["target"] = copy.deepcopy(model["online"])

    update = Update.from_function(
        lambda engine, batch: mse_loss(model["online"](batch[0]), batch[1]),
        SGD,
        parameters=lambda engine: engine.model["online"].parameters(),
    )
    return watched(update, model, batches(), (Events.ITERATION_COMPLETED(once=2), replace))


def a_temperature_that_waits_beside_a_head() -> Engine:
    model, temperature = mlp(5, 8, 1), nn.Parameter(torch.ones(()))
    optimizer = SGD([*model[1].parameters(), temperature])
    update = Update.from_function(lambda engine, batch: mse_loss(engine.model(batch[0]), batch[1]), optimizer)
    return watched(update, model, batches())


def a_model_that_acts_in_eval_mode_and_learns_in_train_mode() -> Engine:
    model = mlp(5, 8, 1, nn.Dropout(0.1))

    def step(engine: Engine, batch: Any) -> Tensor:
        loss = mse_loss(model.train()(batch[0]), batch[1])
        with torch.no_grad():
            model.eval()(batch[0])
        return loss

    return watched(
        Update.from_function(step, SGD), model, batches(), (Events.EPOCH_COMPLETED, lambda engine: model.train())
    )


def a_teacher_in_eval_mode_that_follows_its_student() -> Engine:
    models = {"student": mlp(5, 8, 1, nn.Dropout(0.1)), "teacher": mlp(5, 8, 1, nn.Dropout(0.1))}

    def step(engine: Engine, batch: Any) -> Tensor:
        models["teacher"].eval()
        with torch.no_grad():
            soft = models["teacher"](batch[0])
        return mse_loss(models["student"](batch[0]), soft)

    return watched(
        Update.from_function(step, SGD, parameters="student"),
        models,
        batches(),
        (Events.EPOCH_COMPLETED, lambda engine: models["teacher"].train()),
    )


def two_backwards_before_a_step_of_ones_own() -> Engine:
    models = {"critic": linear(5, 1), "actor": linear(5, 5)}
    own = SGD(models["critic"].parameters())

    def step(engine: Engine, batch: Any) -> Tensor:
        own.zero_grad()
        mse_loss(models["critic"](batch[0]), batch[1]).backward()
        mse_loss(models["critic"](models["actor"](batch[0]).detach()), batch[1]).backward()
        own.step()
        return models["critic"](models["actor"](batch[0])).square().mean()  # type: ignore[no-any-return]

    return watched(Update.from_function(step, SGD, parameters="actor"), models, batches())


def words_beside_equal_weights() -> Engine:
    data = [(["a" * length, "b"], torch.ones(2)) for length in range(1, 7)]

    def step(engine: Engine, batch: Any) -> Tensor:
        inputs = torch.tensor([[float(len(word))] for word in batch[0]])
        return (engine.model(inputs)[:, 0] * 1e-3 - batch[1]).square().mean()  # type: ignore[no-any-return]

    return watched(Update.from_function(step, SGD), linear(1, 1), data)


def labels_that_the_loss_groups() -> Engine:
    data = [(x, y + 3 * (torch.arange(len(y)) % 2)) for x, y in CLASSES()]
    return watched(Update.supervised(lambda output, label: cross_entropy(output, label % 3), SGD), linear(5, 3), data)


def labels_in_an_order() -> Engine:
    def loss(output: Tensor, label: Tensor) -> Tensor:
        above = (label[:, None] > torch.arange(2)).float()
        return nn.functional.binary_cross_entropy_with_logits(output, above)

    return watched(Update.supervised(loss, SGD), linear(5, 2), CLASSES())


def lengths_beside_tokens() -> Engine:
    data = [(torch.randint(0, 5, (4, length)), torch.full((4,), length)) for length in (3, 4, 5, 6)]
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))

    def step(engine: Engine, batch: Any) -> Tensor:
        return cross_entropy(engine.model(batch[0])[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())

    return watched(Update.from_function(step, SGD), model, data)


def a_batch_without_targets() -> Engine:
    data = CLASSES()
    data[2][1].fill_(-100)
    return watched(Update.supervised(cross_entropy, SGD), linear(5, 3), data)


def one_user_in_each_batch() -> Engine:
    data = [(torch.full((4,), user), torch.rand(4, 1)) for user in range(6)]
    return watched(Update.supervised(mse_loss, SGD), nn.Embedding(6, 1), data)


def losses_of_few_digits() -> Engine:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (1.0 + 1e-3 * output.mean()).bfloat16()

    return watched(Update.supervised(loss, SGD), linear(5, 1), batches())


def a_ratio_of_equal_probabilities() -> Engine:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - output.detach()).exp().mean()

    return watched(Update.supervised(loss, SGD), linear(5, 1), batches())


class Normed(nn.Module):
    """A body with batch statistics, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(linear(5, 8), nn.BatchNorm1d(8)), linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def a_critic_that_is_frozen_while_the_other_learns() -> Engine:
    models = {"critic": Normed(), "actor": linear(5, 5)}

    def critic(engine: Engine, batch: Any) -> Tensor:
        return mse_loss(models["critic"].requires_grad_(True)(batch[0]), batch[1])

    def actor(engine: Engine, batch: Any) -> Tensor:
        return models["critic"].requires_grad_(False)(models["actor"](batch[0])).square().mean()  # type: ignore[no-any-return]

    updates = [Update.from_function(one, SGD, name=one.__name__, parameters=one.__name__) for one in (critic, actor)]
    return watched(updates, models, batches())


def a_frozen_body_that_computes_in_eval_mode() -> Engine:
    model = Normed()
    model.body.requires_grad_(False)

    def step(engine: Engine, batch: Any) -> Tensor:
        features = model.body.eval()(batch[0])
        model.body.train()
        return mse_loss(model.head(features), batch[1])

    return watched(Update.from_function(step, SGD), model, batches())


def a_frozen_body_with_a_head_of_its_own() -> Engine:
    models = {"body": nn.Sequential(linear(5, 8), nn.LayerNorm(8), linear(8, 8)), "head": linear(8, 1)}
    for place in (0, 2):
        models["body"][place].requires_grad_(False)  # type: ignore[index]
    update = Update.from_function(lambda _, batch: mse_loss(models["head"](models["body"](batch[0])), batch[1]), SGD)
    return watched(update, models, batches())


MEANT = [
    a_step_that_calls_that_of_the_base,
    weights_that_a_receiver_clips,
    a_body_whose_rate_is_zero,
    a_target_network_in_a_second_run,
    a_target_network_that_is_replaced,
    a_temperature_that_waits_beside_a_head,
    a_model_that_acts_in_eval_mode_and_learns_in_train_mode,
    a_teacher_in_eval_mode_that_follows_its_student,
    two_backwards_before_a_step_of_ones_own,
    words_beside_equal_weights,
    labels_that_the_loss_groups,
    labels_in_an_order,
    lengths_beside_tokens,
    a_batch_without_targets,
    one_user_in_each_batch,
    losses_of_few_digits,
    a_ratio_of_equal_probabilities,
    a_critic_that_is_frozen_while_the_other_learns,
    a_frozen_body_that_computes_in_eval_mode,
    a_frozen_body_with_a_head_of_its_own,
]


@pytest.mark.parametrize("program", MEANT, ids=lambda program: program.__name__)
def test_what_looks_like_a_mistake_and_is_none(program: Callable[[], Engine]) -> None:
    assert not {*of_guards(program())} - {"G01"}  # information about what has no gradient yet


# ---- what was overlooked, and what is said -------------------------------------------------------------------------------


def two_optimizers(rate: float) -> tuple[nn.Module, Update]:
    model = mlp(5, 8, 1)
    optimizers = {"first": partial(torch.optim.SGD, lr=rate), "second": partial(torch.optim.Adam, lr=rate)}
    split = lambda engine: {"first": model[0].parameters(), "second": model[1].parameters()}  # noqa: E731
    return model, Update.supervised(mse_loss, optimizers, parameters=split)


def test_optimizers_that_step_together_are_looked_at_like_one() -> None:
    def step_one(engine: Engine) -> None:
        optimizers: Any = engine.optimizer
        optimizers.optimizers["second"].step()

    model, update = two_optimizers(0.1)
    assert of_guards(watched(update, model, batches())) == []
    model, update = two_optimizers(0.0)
    assert of_guards(watched(update, model, batches())) == ["G04"]
    model, update = two_optimizers(0.1)
    assert of_guards(watched(update, model, batches(), (Events.GRADIENTS_READY, step_one))) == ["G20"]


def test_a_step_of_ones_own_is_counted_once() -> None:
    def step(engine: Engine, batch: Any) -> None:
        mse_loss(engine.model(batch[0]), batch[1]).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    engine = watched(Update.from_function(step, SGD), linear(5, 1), batches())
    assert "was stepped 1 time in iteration 1" in engine.findings.of_run().of("G20")[0].sentence


def test_statistics_of_two_models_with_equal_names_are_told_apart() -> None:
    models = {"one": mlp(5, 8, 1, nn.BatchNorm1d(8)), "other": mlp(5, 8, 1, nn.BatchNorm1d(8))}

    def forward(engine: Engine, batch: Any) -> Tensor:
        return models["one"].train()(batch[0]) + models["other"](batch[0])  # type: ignore[no-any-return]

    engine = Engine(Update(forward), model=models, allow=["W57"])
    engine.attach(Guards())
    with pytest.warns(FindingWarning, match=r"G08: the running statistics of 'one\.1' change"):
        engine.run(batches())


def test_what_may_be_the_targets_is_not_called_the_inputs() -> None:
    data = [(torch.arange(4), torch.tensor([[1e5], [2e5], [3e5], [float("nan")]])) for _ in range(2)]
    data[0][1][3] = 4e5

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target.nan_to_num() / 1e5)

    found = watched(Update.supervised(loss, SGD), nn.Embedding(4, 1), data).findings.of_run()
    named = "the values of the first floating-point tensor in the batch"
    assert found.of("G13")[0].sentence.startswith(f"{named} are large")
    assert found.of("G14")[0].sentence.startswith(f"{named} in iteration 2 contain NaN")
