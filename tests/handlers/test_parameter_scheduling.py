"""ParameterScheduling against plain PyTorch loops that set the fields of the parameter groups themselves."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

from signalfire import Engine, Events, Update, seed_everything
from signalfire.handlers import GradientAccumulation, LRScheduling, MixedPrecision, ParameterScheduling
from signalfire.testing import check_handler, fingerprint
from tests import kit
from tests.kit import assert_same, average_gradients, linear, quick, windows

Batches = list[tuple[Tensor, Tensor]]


def network() -> nn.Linear:
    return linear(5, 2)


def batches(count: int = 5) -> Batches:
    return kit.batches(count, targets=2)


SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1)
AdamW = partial(torch.optim.AdamW, lr=0.01)


def trainer_of(model: nn.Module, *handlers: Any, optimizer: Any = SGD) -> tuple[Engine, list[dict[str, Any]]]:
    """An engine, and the first parameter group as each of its optimizer steps found it."""
    engine = Engine(Update.supervised(nn.functional.mse_loss, optimizer), model=model, seed=0)
    engine.attach(*handlers)
    seen: list[dict[str, Any]] = []

    @engine.on(Events.OPTIMIZER_STEP_STARTED)
    def note(engine: Engine) -> None:
        assert engine.state.update.optimizer is not None
        group = engine.state.update.optimizer.param_groups[0]
        seen.append({key: value for key, value in group.items() if key != "params"})

    return engine, seen


def plain_loop(
    change: Callable[[dict[str, Any], int], None], *, by: str = "step", window: int = 1, optimizer: Any = SGD
) -> tuple[nn.Linear, list[dict[str, Any]]]:
    model, steps, seen = network(), 0, []
    made = optimizer(model.parameters())
    data = batches()
    for epoch in range(3):
        for chunk in windows(data, window):
            for inputs, targets in chunk:
                nn.functional.mse_loss(model(inputs), targets).backward()
            average_gradients(model, len(chunk))
            change(made.param_groups[0], steps if by == "step" else epoch)
            seen.append({key: value for key, value in made.param_groups[0].items() if key != "params"})
            made.step()
            made.zero_grad()
            steps += 1
    return model, seen


def set_decay(group: dict[str, Any], count: int) -> None:
    group["weight_decay"] = 0.5 * 0.9**count


def set_momentum(group: dict[str, Any], count: int) -> None:
    group["momentum"] = 0.5 if count < 2 else 0.95


def set_second_beta(group: dict[str, Any], count: int) -> None:
    group["betas"] = (group["betas"][0], 0.9 if count < 2 else 0.99)


def set_betas(group: dict[str, Any], count: int) -> None:
    group["betas"] = (0.5 + 0.02 * count, 0.9 + 0.004 * count)


def set_line(group: dict[str, Any], count: int) -> None:
    group["weight_decay"] = 0.2 + (0.0 - 0.2) * (count / 8) if count < 8 else 0.0


def set_every_third(group: dict[str, Any], count: int) -> None:
    group["weight_decay"] = 0.5 * 0.9 ** (count - count % 3)


Case = tuple[Callable[..., ParameterScheduling], Callable[[dict[str, Any], int], None], Any]
CASES: dict[str, Case] = {
    "a function": (partial(ParameterScheduling, "weight_decay", lambda n: 0.5 * 0.9**n), set_decay, SGD),
    "a mapping": (partial(ParameterScheduling, "momentum", {2: 0.95, 0: 0.5}), set_momentum, SGD),
    "one of the betas": (partial(ParameterScheduling, "betas", {0: 0.9, 2: 0.99}, index=1), set_second_beta, AdamW),
    "all betas": (
        partial(ParameterScheduling, "betas", lambda n: (0.5 + 0.02 * n, 0.9 + 0.004 * n)), set_betas, AdamW
    ),
    "a line": (
        partial(ParameterScheduling, "weight_decay", ParameterScheduling.linear(0.2, 0.0, over=8)), set_line, AdamW
    ),
}  # fmt: skip


@pytest.mark.parametrize("by", ["step", "epoch"])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_fields_and_weights_equal_a_plain_loop(case: str, by: str, window: int) -> None:
    make, change, optimizer = CASES[case]
    handler = make(every="1st" if by == "step" else "1ep")
    engine, seen = trainer_of(model := network(), GradientAccumulation(window), handler, optimizer=optimizer)
    engine.run(batches(), max_epochs=3)
    reference, expected = plain_loop(change, by=by, window=window, optimizer=optimizer)
    field = handler.field
    assert [group[field] for group in seen] == [group[field] for group in expected]
    assert len({group[field] for group in seen}) > 1
    assert_same(model, reference)


def test_it_moves_every_few_steps() -> None:
    handler = ParameterScheduling("weight_decay", lambda n: 0.5 * 0.9**n, every="3st")
    engine, _ = trainer_of(model := network(), handler)
    engine.run(batches(), max_epochs=3)
    assert_same(model, plain_loop(set_every_third)[0])


def test_the_whole_schedule_can_be_seen_without_training() -> None:
    cosine = ParameterScheduling.cosine(1.0, 3.0, over=4)
    assert [cosine(n) for n in range(6)] == pytest.approx([1, 2 - math.sqrt(0.5), 2, 2 + math.sqrt(0.5), 3, 3])
    assert [ParameterScheduling.linear(1, 3, over=4)(n) for n in range(6)] == [1, 1.5, 2, 2.5, 3, 3]
    mapping = ParameterScheduling("eps", {0: 1.0, 2: 2.0, 4: 3.0}).schedule
    assert [mapping(n) for n in range(6)] == [1, 1, 2, 2, 3, 3]


def test_skipped_steps_do_not_move_it() -> None:
    engine, seen = trainer_of(network(), ParameterScheduling("momentum", lambda n: n / 10))

    @engine.on(Events.GRADIENTS_READY(once=[1, 3]))
    def skip(engine: Engine) -> None:
        engine.state.update.skip("on purpose")

    engine.run(batches(), max_epochs=1)
    assert [group["momentum"] for group in seen] == [0.0, 0.0, 0.1, 0.1, 0.2]


def test_overflows_under_fp16_do_not_move_it() -> None:
    handlers = [MixedPrecision("fp16", init_scale=2.0**24), ParameterScheduling("momentum", lambda n: n / 100)]
    engine, seen = trainer_of(network(), *handlers)
    made: list[int] = []
    engine.connect(Events.OPTIMIZER_STEP_STARTED, lambda engine: made.append(engine.updates[0].steps))
    engine.run(batches(), max_epochs=3)
    assert 0 < made[-1] < 14
    assert [group["momentum"] for group in seen] == [steps / 100 for steps in made]


def test_chosen_groups_alone_are_scheduled() -> None:
    def groups(engine: Engine) -> list[dict[str, Any]]:
        return [{"params": [engine.model.weight]}, {"params": [engine.model.bias], "weight_decay": 0.0}]

    update = Update.supervised(nn.functional.mse_loss, SGD, parameters=groups)
    engine = Engine(update, model=network(), seed=0)
    engine.attach(ParameterScheduling("weight_decay", lambda n: 0.5 / (1 + n), groups=[0]))
    engine.run(batches(), max_epochs=1)
    optimizer = engine.updates[0].optimizer
    assert optimizer is not None
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5 / 6, 0.0]
    assert "initial_weight_decay" not in optimizer.param_groups[1]
    engine = Engine(update, model=network(), seed=0)
    engine.attach(ParameterScheduling("weight_decay", lambda n: 0.1, groups=[2]))
    with pytest.raises(ValueError, match=r"groups=\[2\], but the optimizer has 2"):
        engine.run(batches(), max_epochs=1)


@pytest.mark.slow
@pytest.mark.parametrize("every", ["1st", "2st", "1ep", "2ep"])
def test_a_saved_run_goes_on_bit_for_bit(every: str) -> None:
    def build() -> Engine:
        handler = ParameterScheduling("weight_decay", lambda n: 0.5 * 0.7**n, every=every)
        return trainer_of(network(), handler, GradientAccumulation(2))[0]

    engine, files = build(), []

    @engine.on(Events.ITERATION_COMPLETED)
    def save(engine: Engine) -> None:
        torch.save(engine.state_dict(), buffer := io.BytesIO())
        files.append(buffer.getvalue())

    engine.run(batches(), max_epochs=3)
    for file in files[:-1]:
        other = build()
        other.load_state_dict(torch.load(io.BytesIO(file), weights_only=True))
        other.run(batches(), max_epochs=3)
        assert fingerprint(other)["updates.main"] == fingerprint(engine)["updates.main"]
        assert_same(other.model, engine.model)


def test_a_run_that_continues_goes_on_with_the_schedule() -> None:
    engine, _ = trainer_of(model := network(), ParameterScheduling("weight_decay", lambda n: 0.5 * 0.9**n))
    engine.run(batches(), max_iters=7)
    engine.run(batches(), max_epochs=3)
    assert_same(model, plain_loop(set_decay)[0])


@pytest.mark.parametrize("built", [True, False])
def test_reset_begins_anew_from_the_optimizers_own_value(built: bool) -> None:
    model = network()
    optimizer = SGD(model.parameters()) if built else SGD
    handler = ParameterScheduling("weight_decay", lambda n: 0.5 * 0.9**n)
    engine, seen = trainer_of(model, handler, optimizer=optimizer)
    engine.run(batches(), max_epochs=1)
    engine.reset()
    with engine.without("parameter_scheduling"):
        engine.run(batches(), max_epochs=1)
    assert [group["weight_decay"] for group in seen[5:]] == [0.1] * 5
    engine.reset()
    engine.run(batches(), max_epochs=1)
    assert [group["weight_decay"] for group in seen[10:]] == [0.5 * 0.9**n for n in range(5)]


def test_an_update_is_scheduled_by_its_name() -> None:
    models = {"a": nn.Linear(5, 2), "b": nn.Linear(5, 2)}

    def update(name: str) -> Update:
        def function(engine: Engine, batch: Any) -> Tensor:
            return nn.functional.mse_loss(models[name](batch[0]), batch[1])

        return Update.from_function(function, SGD, name=name, parameters=lambda engine: models[name].parameters())

    engine = Engine([update("a"), update("b")], model=models, seed=0)
    engine.attach(
        ParameterScheduling("momentum", lambda n: 0.01 * n, update="a", name="first"),
        ParameterScheduling("momentum", lambda n: 0.02 * n, update="b", name="second"),
    )
    engine.run(batches(), max_epochs=1)
    found = [one.optimizer.param_groups[0]["momentum"] for one in engine.updates if one.optimizer is not None]
    assert found == [0.05, 0.1]
    with pytest.raises(KeyError, match="'c'"):
        engine.attach(ParameterScheduling("eps", {0: 1.0}, update="c"))


@pytest.mark.parametrize("first", [True, False])
def test_it_goes_with_a_schedule_of_the_rate(first: bool) -> None:
    handlers = [ParameterScheduling("momentum", lambda n: 0.01 * n), LRScheduling(partial(ExponentialLR, gamma=0.5))]
    engine, seen = trainer_of(network(), *(handlers if first else reversed(handlers)))
    engine.run(batches(3), max_epochs=1)
    assert [(group["momentum"], group["lr"]) for group in seen] == [(0.0, 0.05), (0.01, 0.025), (0.02, 0.0125)]


@pytest.mark.parametrize("first", [True, False])
def test_a_rate_schedule_that_cycles_the_same_field_is_refused(first: bool) -> None:
    def pair(**options: Any) -> list[Any]:
        return [ParameterScheduling("momentum", {0: 0.5}), LRScheduling(partial(OneCycleLR, max_lr=0.1, **options))]

    engine, seen = trainer_of(network(), *(pair() if first else reversed(pair())))
    with pytest.raises(ValueError, match=r"'parameter_scheduling': .*also sets 'momentum'.*cycle_momentum=False"):
        engine.run(batches(), max_epochs=1)
    assert seen == []
    engine, _ = trainer_of(network(), *pair(cycle_momentum=False))
    engine.run(batches(), max_epochs=1)


@pytest.mark.moderate
@pytest.mark.parametrize("every", quick(["1st", "2ep"], "1st"))
def test_it_keeps_the_promises_of_a_handler(every: str) -> None:
    def build() -> Engine:
        seed_everything(0)
        return trainer_of(network())[0]

    check_handler(
        build, lambda: ParameterScheduling("weight_decay", lambda n: 0.3 * 0.9**n, every=every), batches(), max_epochs=3
    )


@pytest.mark.parametrize(
    ("handler", "kind", "message"),
    [
        (
            lambda: ParameterScheduling("weight_decoy", {0: 1.0}),
            ValueError,
            "no field 'weight_decoy'; the fields are lr, mome",
        ),
        (
            lambda: ParameterScheduling("momentum", {0: 0.9}, index=1),
            ValueError,
            "index=1, but 'momentum' is a single value",
        ),
        (
            lambda: ParameterScheduling("momentum", {0: "high"}),
            TypeError,
            "returns 'high' for 'momentum', but the value in the optimizer is 0.9",
        ),
        (lambda: ParameterScheduling("momentum", lambda n: None), TypeError, "returns None for 'momentum'"),
        (
            lambda: ParameterScheduling("nesterov", {0: 1.0}),
            TypeError,
            "returns 1.0 for 'nesterov', but the value in the optimizer is False",
        ),
    ],
)
def test_what_does_not_fit_the_optimizer_is_refused_before_the_first_batch(
    handler: Callable[[], ParameterScheduling], kind: type[Exception], message: str
) -> None:
    engine, seen = trainer_of(network(), handler())
    with pytest.raises(kind, match=message):
        engine.run(batches(), max_epochs=1)
    assert seen == []


@pytest.mark.parametrize(("index", "value"), [(None, 0.9), (None, (0.9,)), (2, 0.9), (0, (0.9, 0.9))])
def test_what_does_not_fit_a_field_of_several_values_is_refused(index: int | None, value: Any) -> None:
    engine, _ = trainer_of(network(), ParameterScheduling("betas", {0: value}, index=index), optimizer=AdamW)
    with pytest.raises((TypeError, ValueError), match=r"'parameter_scheduling': .*'betas'"):
        engine.run(batches(), max_epochs=1)


def test_two_schedules_of_one_field_refuse_each_other() -> None:
    engine, _ = trainer_of(network(), ParameterScheduling("momentum", {0: 0.5}, name="one"))
    engine.attach(ParameterScheduling("weight_decay", {0: 0.5}, name="other_field"))
    with pytest.raises(ValueError, match="both 'one' and 'two' control the parameter group field 'momentum' of"):
        engine.attach(ParameterScheduling("momentum", {0: 0.5}, name="two"))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"field": 3}, TypeError, "field=3"),
        ({"field": "lr"}, ValueError, "field='lr'.*LRScheduling"),
        ({"field": "params"}, ValueError, "field='params'"),
        ({"schedule": 0.5}, TypeError, "schedule=0.5"),
        ({"schedule": {}}, ValueError, r"schedule=\{\}"),
        ({"schedule": {5: 0.5}}, ValueError, r"schedule=\{5: 0.5\}"),
        ({"schedule": {0: 0.5, 1.5: 0.1}}, ValueError, "1.5 is not a number of steps"),
        ({"every": "10it"}, ValueError, "every='10it'"),
        ({"every": Events.STARTED}, TypeError, "every=Events.STARTED"),
        ({"index": -1}, ValueError, "index=-1"),
        ({"groups": [0, "a"]}, TypeError, "groups='a'"),
        ({"groups": []}, ValueError, r"groups=\[\]"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=rf"ParameterScheduling\(.*{message}|{message}"):
        ParameterScheduling(**({"field": "momentum", "schedule": {0: 0.5}} | arguments))


@pytest.mark.parametrize("options", [{"start": math.nan}, {"end": "1"}, {"over": 0}, {"over": 2.5}], ids=str)
def test_bad_ramps_are_refused(options: dict[str, Any]) -> None:
    ((argument, value),) = options.items()
    kind = TypeError if value in ("1", 2.5) else ValueError
    with pytest.raises(kind, match=rf"ParameterScheduling.linear\({argument}="):
        ParameterScheduling.linear(**({"start": 0.0, "end": 1.0, "over": 3} | options))
