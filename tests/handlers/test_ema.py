"""EMA against torch's AveragedModel in plain PyTorch loops: the same averages, and a training that does not notice."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import signal
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from signalfire import Engine, Events, FindingWarning, Phase, Update, seed_everything
from signalfire.handlers import (
    EMA,
    SWA,
    EarlyStopping,
    FastDevRun,
    GradientAccumulation,
    Lookahead,
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
    digest,
    evaluator_of,
    interruptible,
    mlp,
    spread,
    validation_loss,
    windows,
)

Batches = list[tuple[Tensor, Tensor]]


def network() -> nn.Sequential:
    return mlp(5, 8, 1, nn.BatchNorm1d(8), nn.Dropout(0.2))


trainer_of = partial(build, optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9))


def run(engine: Engine, **bounds: Any) -> Engine:
    seed_everything(1)
    engine.run(batches(), **({"max_epochs": 3} | bounds))
    return engine


def plain_loop(
    decay: float | Callable[[int], float] = 0.9, *, window: int = 1, every: int = 1, start: int = 0, gamma: float = 1.0
) -> tuple[nn.Module, nn.Module, list[float]]:
    """The trained model, its average, and the average's validation loss after every epoch."""
    model, steps, losses = network(), 0, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = ExponentialLR(optimizer, gamma)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay if isinstance(decay, float) else 0.5))
    seed_everything(1)
    data = batches()
    for _ in range(3):
        for chunk in windows(data, window):
            for inputs, targets in chunk:
                nn.functional.mse_loss(model(inputs), targets).backward()
            average_gradients(model, len(chunk))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            steps += 1
            if steps > start and steps % every == 0:
                if not isinstance(decay, float):
                    averaged.multi_avg_fn = get_ema_multi_avg_fn(decay(int(averaged.n_averaged)))
                averaged.update_parameters(model)
        losses.append(validation_loss(averaged.module))
    return model, averaged.module, losses


def three_averages() -> list[Any]:
    return [EMA(0.9, name="fast"), EMA(0.99, name="slow", evaluate=False), SWA(2, bn_batches=0, evaluate=False)]


@pytest.mark.moderate
@pytest.mark.filterwarnings("ignore:W55")
@pytest.mark.parametrize("order", [1, -1])
def test_several_averages_equal_those_of_a_plain_loop_and_one_is_evaluated(order: int) -> None:
    model = network()
    evaluator = evaluator_of(model)
    engine = trainer_of(model, *[*three_averages(), Validation(evaluator, batches(3))][::order])
    measured: list[float] = []
    engine.connect(Events.EVALUATION_COMPLETED, lambda engine: measured.append(engine.state.metrics["loss"]))
    run(engine)
    reference, fast, losses = plain_loop(0.9)
    _, slow, _ = plain_loop(0.99)
    assert_same(model, reference)
    assert measured == losses
    assert_same(engine.weights()["model"], fast.state_dict())
    averages = {"fast": fast, "slow": slow, "swa": averaged_epochs()}
    for name, expected in averages.items():
        with engine.handlers[name].in_place():  # type: ignore[attr-defined]
            for one, other in zip(model.parameters(), expected.parameters(), strict=True):
                assert torch.equal(one, other), name
    assert_same(model, reference)


def averaged_epochs() -> nn.Module:
    """The mean of the weights at the ends of the epochs from the second on."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    averaged = AveragedModel(model, multi_avg_fn=get_swa_multi_avg_fn())
    seed_everything(1)
    for epoch in (1, 2, 3):
        for inputs, targets in batches():
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        validation_loss(model)
        if epoch > 1:
            averaged.update_parameters(model)
    return averaged.module


@pytest.mark.filterwarnings("ignore:W55")
def test_several_averages_go_on_bit_for_bit_in_a_resumed_run() -> None:
    whole, states = trainer_of(network(), *three_averages()), []
    whole.connect(Events.ITERATION_COMPLETED, lambda engine: states.append(engine.state_dict()))
    run(whole)
    for state in states[2::5]:
        resumed = trainer_of(network(), *three_averages())
        resumed.load_state_dict(state)
        resumed.run(batches(), max_epochs=3)
        assert digest(resumed.state_dict()["handlers"]) == digest(whole.state_dict()["handlers"])


def test_two_averages_that_are_both_evaluated_are_refused_with_the_way_out() -> None:
    with pytest.raises(
        ValueError, match=r"both 'ema' and 'swa' .* detach one of the two, or set evaluate=False for one of them"
    ):
        trainer_of(network(), EMA(), SWA(2, bn_batches=0))
    with pytest.raises(RuntimeError, match=r"'ema': in_place\(\) needs the modules of an engine"), EMA().in_place():
        pass


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[Any]]] = {
    "plain": ({}, {}, []),
    "every third step": ({"every": 3}, {"every": 3}, []),
    "every third step, written as an interval": ({"every": "3st"}, {"every": 3}, []),
    "from a start on": ({"start": 7}, {"start": 7}, []),
    "warmed up": ({"decay": 0.6, "warmup": True}, {"decay": lambda n: min(0.6, (1 + n) / (10 + n))}, []),
    "accumulated": ({}, {"window": 4}, [lambda: GradientAccumulation(4)]),
    "scheduled": ({}, {"gamma": 0.8}, [lambda: LRScheduling(partial(ExponentialLR, gamma=0.8))]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ema_first", [True, False])
def test_averages_and_weights_equal_a_plain_loop(case: str, ema_first: bool) -> None:
    options, plain_options, others = CASES[case]
    handlers = [EMA(**({"decay": 0.9} | options)), *(make() for make in others)]
    model = network()
    engine = run(trainer_of(model, *(handlers if ema_first else reversed(handlers))))
    reference, average, _ = plain_loop(**plain_options)
    assert_same(model.state_dict(), reference.state_dict())
    assert_same(engine.weights()["model"], average.state_dict())
    assert not torch.equal(engine.weights()["model"]["0.weight"], model.state_dict()["0.weight"])
    assert_same(model.state_dict(), reference.state_dict())  # `weights` left them as they were


@pytest.mark.moderate
@pytest.mark.parametrize("ema_first", [True, False])
def test_a_validation_measures_the_averages_and_training_does_not_notice(ema_first: bool) -> None:
    model, losses = network(), []
    handlers = [EMA(0.9), Validation(evaluator_of(model), batches(3))]
    engine = trainer_of(model, *(handlers if ema_first else reversed(handlers)))
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: losses.append(engine.state.metrics["loss"]))
    run(engine)
    reference, _, expected = plain_loop()
    assert losses == expected
    assert losses[-1] != validation_loss(model)
    assert_same(model.state_dict(), reference.state_dict())
    plain = run(trainer_of(network()))
    assert fingerprint(plain, handlers=False)["updates.main"] == fingerprint(engine, handlers=False)["updates.main"]


@pytest.mark.moderate
@pytest.mark.parametrize("ema_first", [True, False])
def test_a_validation_right_after_a_step_measures_the_average_with_that_step(ema_first: bool) -> None:
    model, losses = network(), []
    handlers = [EMA(0.9), Validation(evaluator_of(model), batches(3), every=Events.OPTIMIZER_STEP_COMPLETED)]
    engine = trainer_of(model, *(handlers if ema_first else reversed(handlers)))
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: losses.append(engine.state.metrics["loss"]))
    run(engine)
    assert losses == plain_loop()[2]


def test_a_step_that_overflows_under_fp16_does_not_move_it() -> None:
    model = network()
    engine = run(trainer_of(model, MixedPrecision("fp16", init_scale=2.0**24), EMA(0.9)))

    reference, skipped = network(), 0
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    averaged = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    seed_everything(1)
    for _ in range(3):
        for inputs, targets in batches():
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.mse_loss(reference(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            optimizer.zero_grad()
            if scaler.get_scale() < before:
                skipped += 1
            else:
                averaged.update_parameters(reference)
    assert 0 < skipped < 18
    assert engine.updates[0].steps == int(averaged.n_averaged) == 18 - skipped
    assert_same(model.state_dict(), reference.state_dict())
    assert_same(engine.weights()["model"], averaged.module.state_dict())


@pytest.mark.parametrize("buffers", ["copy", "average"])
def test_integer_buffers_are_copied_and_others_as_asked(buffers: Any) -> None:
    model = network()
    engine = run(trainer_of(model, EMA(0.9, every=5, buffers=buffers)))  # updated after steps 5, 10 and 15 of 18
    exported = engine.weights()["model"]
    assert model.state_dict()["1.num_batches_tracked"] == 18
    assert exported["1.num_batches_tracked"] == 15
    assert exported["1.num_batches_tracked"].dtype == torch.int64

    seen: list[Tensor] = []
    again = trainer_of(network())
    again.connect(
        Events.ITERATION_COMPLETED(every=5),
        lambda engine: seen.append(engine.model.state_dict()["1.running_mean"].clone()),
    )
    run(again)
    expected = seen[2] if buffers == "copy" else torch.lerp(torch.lerp(seen[0], seen[1], 1 - 0.9), seen[2], 1 - 0.9)
    assert torch.equal(exported["1.running_mean"], expected)


def test_nothing_is_aliased() -> None:
    model = network()
    handler = EMA(0.5)
    engine = run(trainer_of(model, handler))
    own = {t.data_ptr() for t in model.state_dict().values()}
    for state in (handler.state_dict()["averages"], engine.weights()["model"]):
        assert not own & {t.data_ptr() for t in state.values()}
    saved = engine.state_dict()["handlers"]["ema"]["averages"]
    assert not {t.data_ptr() for t in saved.values()} & {
        t.data_ptr() for t in handler.state_dict()["averages"].values()
    }


def test_the_state_to_resume_from_holds_the_weights_and_the_averages() -> None:
    model = network()
    engine = run(trainer_of(model, EMA(0.9)))
    reference, average, _ = plain_loop()
    state = engine.state_dict()
    assert_same(state["modules"]["model"], reference.state_dict())
    assert state["handlers"]["ema"]["count"] == 18
    for name, value in average.state_dict().items():
        assert torch.equal(state["handlers"]["ema"]["averages"][f"model.{name}"], value), name


def test_averages_can_become_the_weights_after_training() -> None:
    model = network()
    engine = run(trainer_of(model, EMA(0.9)))
    engine.load_weights(engine.weights())
    assert_same(model.state_dict(), plain_loop()[1].state_dict())


def test_an_evaluation_after_the_run_sees_the_averages_too() -> None:
    model = network()
    engine = run(trainer_of(model, EMA(0.9)))
    assert engine.evaluate(evaluator_of(model), batches(3))["loss"] == plain_loop()[2][-1]
    assert_same(model.state_dict(), plain_loop()[0].state_dict())


@pytest.mark.filterwarnings("ignore:C18:signalfire.FindingWarning")
def test_before_the_first_average_the_weights_themselves_are_used() -> None:
    model = network()
    engine = trainer_of(model, EMA(0.9, start=1000))
    assert_same(engine.weights()["model"], network().state_dict())
    run(engine)
    assert_same(engine.weights()["model"], model.state_dict())


def test_the_weights_come_back_after_an_error_inside_a_validation() -> None:
    model = network()
    evaluator = evaluator_of(model)
    engine = trainer_of(model, EMA(0.9), Validation(evaluator, batches(3), every="8it"))
    inside: list[Tensor] = []

    @evaluator.on(Events.ITERATION_COMPLETED)
    def fail(evaluator: Engine) -> None:
        inside.append(model.state_dict()["0.weight"].clone())
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        run(engine)
    reference = run(trainer_of(network()), max_iters=8)
    assert_same(model.state_dict(), reference.model.state_dict())
    assert not torch.equal(inside[0], model.state_dict()["0.weight"])  # it was the average that was being measured


def test_nested_evaluations_and_exports_swap_once() -> None:
    model = network()
    outer, inner = evaluator_of(model), evaluator_of(model)
    engine = run(trainer_of(model, EMA(0.9)))
    raw, averages = copy.deepcopy(model.state_dict()), engine.weights()["model"]

    @outer.on(Events.ITERATION_COMPLETED)
    def nest(outer: Engine) -> None:
        engine.evaluate(inner, batches(1), prefix="inner_")
        assert_same(engine.weights()["model"], averages)
        assert_same(model.state_dict(), averages)

    engine.evaluate(outer, batches(3))
    assert_same(model.state_dict(), raw)


def test_an_evaluation_between_forward_and_backward_leaves_the_gradients_right() -> None:
    model = network()
    evaluator = evaluator_of(model)
    engine = trainer_of(model, EMA(0.9))
    engine.connect(Events.LOSS_COMPUTED(every=2), lambda engine: engine.evaluate(evaluator, batches(1)))
    run(engine)
    assert_same(model.state_dict(), plain_loop()[0].state_dict())


class Reassigning(nn.Module):
    """A module that puts a new tensor in the place of its buffer in every forward, in eval mode, too."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 1)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        output: Tensor = self.linear(x - self.mean)
        return output


def test_buffers_that_are_replaced_by_new_tensors_are_followed() -> None:
    torch.manual_seed(0)
    model = Reassigning()
    engine = trainer_of(model, EMA(0.9), Validation(evaluator_of(model), batches(3), every="4it"))
    run(engine)
    torch.manual_seed(0)
    plain = run(trainer_of(Reassigning()))
    assert_same(model.state_dict(), plain.model.state_dict())
    assert torch.equal(engine.weights()["model"]["mean"], model.mean)


def test_half_precision_weights_have_averages_in_float32() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 1).to(torch.bfloat16)
    data = [(x.bfloat16(), y.bfloat16()) for x, y in batches()]
    engine = trainer_of(model, handler := EMA(0.999), allow=["W55"])
    seen: list[Tensor] = []
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: seen.append(model.weight.detach().float().clone()))
    engine.run(data, max_epochs=3)
    expected = seen[0].clone()
    for weight in seen[1:]:
        expected.lerp_(weight, 1 - 0.999)
    assert torch.equal(handler.state_dict()["averages"]["model.weight"], expected)
    exported = engine.weights()["model"]["weight"]
    assert exported.dtype == torch.bfloat16
    assert torch.equal(exported, expected.bfloat16())


def test_a_model_that_is_converted_inside_the_run_is_followed_on() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 1)

    def forward(engine: Engine, batch: Any) -> Tensor:
        output: Tensor = model(batch[0].to(model.weight.dtype))
        return output.float()

    def loss(engine: Engine, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(output, batch[1])

    update = Update(forward, loss, partial(torch.optim.SGD, lr=0.1))
    engine = Engine(update, model=model, seed=0)
    engine.attach(handler := EMA(0.9))
    engine.connect(Events.ITERATION_COMPLETED(once=3), lambda engine: model.bfloat16())
    seen: list[Tensor] = []
    engine.connect(Events.OPTIMIZER_STEP_COMPLETED, lambda engine: seen.append(model.weight.detach().float().clone()))
    engine.run(batches(), max_epochs=3)
    expected = seen[0].clone()
    for weight in seen[1:]:
        expected.lerp_(weight, 1 - 0.9)
    assert torch.equal(handler.state_dict()["averages"]["model.weight"], expected)


def two_updates() -> tuple[dict[str, nn.Linear], Engine]:
    torch.manual_seed(0)
    models = {"a": nn.Linear(5, 1), "b": nn.Linear(5, 1)}

    def update(name: str) -> Update:
        def function(engine: Engine, batch: Any) -> Tensor:
            return nn.functional.mse_loss(models[name](batch[0]), batch[1])

        return Update.from_function(
            function, partial(torch.optim.SGD, lr=0.1), name=name, parameters=lambda engine: models[name].parameters()
        )

    return models, Engine([update("a"), update("b")], model=models, seed=0)


@pytest.mark.parametrize("chosen", [None, "a", "b"])
def test_with_several_updates_one_of_them_counts(chosen: str | None) -> None:
    models, engine = two_updates()
    engine.attach(handler := EMA(0.9, update=chosen))

    @engine.on(Events.GRADIENTS_READY(once=[2, 3]))
    def skip(engine: Engine) -> None:
        if engine.state.update.name == "b":
            engine.state.update.skip("on purpose")

    counts = []
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: counts.append(handler.count))
    engine.run(batches(), max_epochs=1)
    assert counts == ([1, 1, 1, 2, 3, 4] if chosen == "b" else [1, 2, 3, 4, 5, 6])
    exported = engine.weights()
    for name, model in models.items():  # all modules are averaged, whichever update counts
        assert not torch.equal(exported[name]["weight"], model.weight)


def test_a_saved_run_goes_on_bit_for_bit() -> None:
    whole = network()
    engine = trainer_of(whole, EMA(0.9, warmup=True, every=2), Validation(evaluator_of(whole), batches(3)))
    files: list[bytes] = []

    @engine.on(Events.ITERATION_COMPLETED(once=8))
    def save(engine: Engine) -> None:
        torch.save(engine.state_dict(), buffer := io.BytesIO())
        files.append(buffer.getvalue())

    run(engine)
    torch.manual_seed(99)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
    other = trainer_of(model, EMA(0.9, warmup=True, every=2), Validation(evaluator_of(model), batches(3)))
    other.load_state_dict(torch.load(io.BytesIO(files[0]), weights_only=True))
    run(other)
    assert fingerprint(other) == fingerprint(engine)
    assert_same(other.weights()["model"], engine.weights()["model"])


def test_averages_of_another_model_are_refused_by_name() -> None:
    handler = EMA(0.9)
    engine = trainer_of(network(), handler)
    handler.load_state_dict({"count": 1, "averages": {"model.weight": torch.zeros(3)}})
    with pytest.raises(ValueError, match=r"'ema': the saved averages do not match.*model\.0\.bias.*model\.weight"):
        run(engine)
    assert engine.state.iteration == 0


def test_reset_begins_with_a_new_average() -> None:
    model = network()
    engine = run(trainer_of(model, handler := EMA(0.9)))
    engine.reset()
    assert handler.count == 0
    model.load_state_dict(network().state_dict())
    run(engine)
    assert_same(engine.weights()["model"], plain_loop()[1].state_dict())


def test_a_run_that_continues_goes_on_with_the_average() -> None:
    engine = run(trainer_of(network(), EMA(0.9)), max_iters=8)
    engine.run(batches(), max_epochs=3)
    assert_same(engine.weights()["model"], plain_loop()[1].state_dict())


@pytest.mark.moderate
@pytest.mark.parametrize(
    "options", spread([{"start": 6}, {"warmup": True, "every": 2, "buffers": "average"}], 1), ids=str
)
def test_it_keeps_the_promises_of_a_handler(options: dict[str, Any]) -> None:
    check_handler(
        lambda: trainer_of(network()),
        lambda: EMA(0.9, **options),
        batches(5),
        changes_training=False,
        max_epochs=3,
        per_run=["_versions"],
    )


def test_switched_off_evaluation_sees_the_weights() -> None:
    model = network()
    engine = run(trainer_of(model, EMA(0.9)))
    with engine.without("ema"):
        assert engine.evaluate(evaluator_of(model), batches(3))["loss"] == validation_loss(model)
        assert_same(engine.weights()["model"], model.state_dict())


def test_a_copy_of_it_holds_nothing_of_the_model() -> None:
    engine = run(trainer_of(network(), handler := EMA(0.9)))
    engine.evaluate(evaluator_of(engine.model), batches(3))
    again = pickle.loads(file := pickle.dumps(handler))
    assert b"BatchNorm" not in file
    assert again.count == 18
    assert again.engine is None


def test_after_a_run_it_does_not_keep_the_model_alive() -> None:
    engine = run(trainer_of(network(), handler := EMA(0.9)))
    weight = weakref.ref(next(engine.model.parameters()))
    del engine
    gc.collect()
    assert weight() is None
    assert handler.count == 18


def test_two_averages_refuse_each_other() -> None:
    engine = trainer_of(network(), EMA(0.9, name="one"))
    with pytest.raises(ValueError, match="both 'one' and 'two' control the weights used for evaluation"):
        engine.attach(EMA(0.9, name="two"))
    with pytest.raises(KeyError, match="'c'"):
        trainer_of(network(), EMA(update="c"))
    with pytest.raises(ValueError, match="for training"):
        evaluator_of(network()).attach(EMA())


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"decay": 1.0}, ValueError),
        ({"decay": -0.1}, ValueError),
        ({"decay": float("nan")}, ValueError),
        ({"decay": "0.9"}, TypeError),
        ({"every": "1ep"}, ValueError),
        ({"every": 0}, ValueError),
        ({"every": True}, TypeError),
        ({"every": "0st"}, ValueError),
        ({"every": Events.EPOCH_COMPLETED}, TypeError),
        ({"start": -1}, ValueError),
        ({"start": 1.5}, TypeError),
        ({"warmup": 10}, TypeError),
        ({"buffers": "keep"}, ValueError),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(options: dict[str, Any], kind: type[Exception]) -> None:
    (argument,) = options
    with pytest.raises(kind, match=rf"EMA\({argument}="):
        EMA(**options)


def test_weights_that_are_put_in_place_are_used_until_the_next_average() -> None:
    model = network()
    engine = trainer_of(model, EMA(0.5))
    engine.run(batches(), max_epochs=1)
    averages = engine.weights()["model"]
    best = {
        name: tensor / 2 if tensor.is_floating_point() else tensor.clone()
        for name, tensor in model.state_dict().items()
    }
    engine.load_weights({"model": best})
    assert_same(engine.weights()["model"], best)
    resumed = trainer_of(network(), EMA(0.5))
    resumed.load_state_dict(engine.state_dict())
    engine.run(batches(), max_epochs=2)
    assert not torch.equal(engine.weights()["model"]["0.weight"], model.state_dict()["0.weight"]), "averages again"
    assert not torch.equal(engine.weights()["model"]["0.weight"], averages["0.weight"])
    resumed.run(batches(), max_epochs=2)
    assert_same(resumed.weights()["model"], engine.weights()["model"])


def test_the_best_weights_that_early_stopping_restores_are_those_that_are_evaluated() -> None:
    model = network()
    engine = trainer_of(model, EMA(0.9), EarlyStopping("m", mode="max", patience=2, restore_best=True))
    kept: dict[int, dict[str, Tensor]] = {}

    @engine.on(Events.EPOCH_COMPLETED, phase=Phase.PREPARE)
    def measure(engine: Engine) -> None:
        engine.state.metrics["m"] = float(-abs(engine.state.epoch - 2))
        kept[engine.state.epoch] = engine.weights()["model"]  # the averages: they are what the metric measures

    engine.run(batches(), max_epochs=9)
    assert engine.state.epoch == 4
    assert_same(model.state_dict(), kept[2])
    assert_same(engine.weights()["model"], kept[2])


@pytest.mark.parametrize(
    ("options", "epochs", "reported"),
    [
        ({"decay": 0.9999}, 3, True),
        ({"decay": 0.99}, 3, True),  # 0.99 ** 17 is 0.84
        ({"decay": 0.99}, 12, False),  # 0.99 ** 71 is 0.49
        ({"decay": 0.99, "every": 2}, 12, True),
        ({"decay": 0.99, "start": 10}, 12, True),
        ({"decay": 0.9999, "warmup": True}, 3, False),
        ({"decay": 0.9999, "start": 99}, 3, False),  # it never begins
        ({"decay": 0.9}, 1, False),  # so short a memory is meant for a short run
    ],
    ids=str,
)
def test_a_run_that_is_too_short_for_the_decay_is_reported(options: Any, epochs: int, reported: bool) -> None:
    engine = trainer_of(network(), EMA(**options), allow=["C18", "W55"])
    engine.run(batches(), max_epochs=epochs)
    allowed = build(network(), EMA(**options), allow=["C18"])
    if reported:
        with pytest.warns(FindingWarning, match=r"W55: EMA\(decay=.*warmup=True"):
            allowed.run(batches(), max_epochs=epochs)
    else:
        allowed.run(batches(), max_epochs=epochs)


def test_a_resumed_run_counts_the_averages_that_were_made() -> None:
    engine = build(network(), EMA(0.99), allow=["W55"])
    engine.run(batches(), max_epochs=11)
    state = engine.state_dict()
    resumed = build(network(), EMA(0.99))
    resumed.load_state_dict(state)
    resumed.run(batches(), max_epochs=13)  # 78 averages in all
    tried = build(network(), EMA(0.99), FastDevRun())
    tried.run(batches(), max_epochs=13)


class InterruptedCopies(TorchDispatchMode):
    """Sends Ctrl-C as a weight is about to be overwritten."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._foreach_copy_.default, torch.ops.aten.copy_.default):
            os.kill(os.getpid(), signal.SIGINT)
        return func(*args, **(kwargs or {}))


def evaluate_and_interrupt(engine: Engine, handler: Any, weights: str) -> None:
    with interruptible(), ExitStack() as stack, handler.in_place():
        assert digest(engine.model.state_dict()) != weights
        stack.enter_context(InterruptedCopies())  # type: ignore[no-untyped-call]  # until the weights are back


@pytest.mark.parametrize("make", [lambda: EMA(0.9), lambda: SWA(2, bn_batches=0), lambda: Lookahead(k=7)])
def test_ctrl_c_as_the_weights_come_back_waits_until_they_are(make: Callable[[], Any]) -> None:
    handler = make()
    engine = run(trainer_of(network(), handler))
    before = digest(engine.model.state_dict())
    with pytest.raises(KeyboardInterrupt):
        evaluate_and_interrupt(engine, handler, before)
    assert digest(engine.model.state_dict()) == before
    with handler.in_place():
        assert digest(engine.model.state_dict()) != before


@pytest.mark.parametrize(("start", "origin"), [(0, "initial weights"), (10, "weights after step 10")])
def test_an_average_that_is_hardly_moved_is_said_to_consist_of_what_it_began_with(start: int, origin: str) -> None:
    engine = trainer_of(network(), EMA(0.999, start=start))
    with pytest.warns(FindingWarning, match=f"W55: .*at the end of this run, 9.*% of the average .* the {origin};"):
        run(engine)
