"""NonFiniteGuard against plain PyTorch loops that leave the bad steps out."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from signalfire import Engine, Events, FindingWarning, Update
from signalfire.handlers import (
    GradientAccumulation,
    GradientClipping,
    LRScheduling,
    MicroBatching,
    MixedPrecision,
    NonFiniteGuard,
)
from signalfire.testing import check_handler
from tests import kit
from tests.kit import average_gradients, mlp, quick, same, spread, windows

Batches = list[tuple[Tensor, Tensor]]
Adam = partial(torch.optim.Adam, lr=0.01)
CHECKS = ["gradients", "loss", "both"]

pytestmark = pytest.mark.filterwarnings("ignore:W19")


def network() -> nn.Sequential:
    return mlp(5, 8, 1, nn.BatchNorm1d(8), nn.Tanh())


def batches(*bad: int, count: int = 10, value: float = math.nan) -> Batches:
    """Batches of which those that are counted as bad have a target that is not finite."""
    data = kit.batches(count)
    for number in bad:
        data[number - 1][1][2] = value
    return data


def build(model: nn.Module | None = None) -> Engine:
    return kit.build(model or network(), optimizer=Adam)


def plain_loop(data: Batches, *, window: int = 1, max_norm: float | None = None, epochs: int = 2) -> nn.Sequential:
    """Every batch goes through the network; the steps of windows with a bad one are left out."""
    model = network()
    optimizer = Adam(model.parameters())
    for _ in range(epochs):
        for chunk in windows(data, window):
            for inputs, targets in chunk:
                nn.functional.mse_loss(model(inputs), targets).backward()
            average_gradients(model, len(chunk))
            if all(bool(targets.isfinite().all()) for _, targets in chunk):
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("check", CHECKS)
def test_a_bad_batch_discards_its_whole_window_and_the_next_is_clean(check: Any, window: int, value: float) -> None:
    # Of the windows 1-4, 5-8, 9-10 the second holds bad batches: its first, and one in its middle.
    data = batches(5, 7, value=value)
    engine = build()
    guard = NonFiniteGuard(check=check)
    engine.attach(guard, GradientAccumulation(window))
    engine.run(data, max_epochs=2)
    assert same(engine.model, plain_loop(data, window=window))
    assert all(bool(value.isfinite().all()) for value in engine.model.state_dict().values())
    assert engine.updates[0].steps == {1: 16, 4: 4}[window]
    assert guard.skipped == {"main": {1: 4, 4: 2}[window]}


@pytest.mark.parametrize("bad", [1, 4, 9, 10])
@pytest.mark.parametrize("check", CHECKS)
def test_wherever_in_its_window_the_bad_batch_is(check: Any, bad: int) -> None:
    data = batches(bad)
    engine = build()
    engine.attach(NonFiniteGuard(check=check), GradientAccumulation(4))
    engine.run(data, max_epochs=2)
    assert same(engine.model, plain_loop(data, window=4))


@pytest.mark.filterwarnings("ignore:W15")
def test_without_it_the_weights_are_lost() -> None:
    engine = build()
    engine.run(batches(5), max_epochs=1)
    assert not bool(engine.model[0].weight.isfinite().any())


@pytest.mark.moderate
@pytest.mark.filterwarnings("always:W19")
@pytest.mark.parametrize("window", [1, 4])
def test_it_warns_of_the_first_skipped_step_and_of_the_tenth_but_not_of_each(window: int) -> None:
    engine = build()
    guard = NonFiniteGuard()
    engine.attach(guard, GradientAccumulation(window))
    with pytest.warns(FindingWarning) as caught:
        engine.run(batches(*range(1, 11)), max_epochs=12)
    said = [str(one.message) for one in caught]
    counts = ["1 step", "10 steps", "100 steps"] if window == 1 else ["1 step", "10 steps"]
    assert len(said) == len(counts)
    for sentence, count in zip(said, counts, strict=True):
        assert sentence.startswith(
            f"W19: 'non_finite_guard' has skipped {count} of update 'main': the gradients are not finite"
        )
    assert "0.weight" in said[0]


@pytest.mark.filterwarnings("error:W19")
def test_it_says_nothing_where_nothing_is_skipped_and_where_the_run_ends_with_the_reason() -> None:
    engine = build()
    engine.attach(NonFiniteGuard())
    engine.run(batches(), max_epochs=1)
    engine = build()
    engine.attach(NonFiniteGuard(action="stop"))
    engine.run(batches(5), max_epochs=1)
    assert engine.state.iteration == 5


@pytest.mark.filterwarnings("ignore:C28")
def test_finite_gradients_whose_squares_overflow_are_fine() -> None:
    update = Update.from_function(
        lambda engine, batch: 1e30 * engine.model.weight.sum(), partial(torch.optim.SGD, lr=1e-31)
    )
    engine = Engine(update, model=nn.Linear(3, 1), seed=0)
    guard = NonFiniteGuard(action="raise")
    engine.attach(guard)
    engine.run(max_iters=3)
    assert engine.updates[0].steps == 3
    assert guard.skipped == {}


@pytest.mark.moderate
@pytest.mark.parametrize("guard_first", [True, False])
@pytest.mark.parametrize("check", CHECKS)
def test_with_clipping_and_a_schedule_that_follows_real_steps(check: Any, guard_first: bool) -> None:
    data = batches(2, 3, 8)
    engine = build()
    handlers = [
        NonFiniteGuard(check=check),
        GradientClipping(max_norm=0.1),
        LRScheduling(partial(StepLR, step_size=1000)),
    ]
    engine.attach(*(handlers if guard_first else reversed(handlers)))
    engine.run(data, max_epochs=2)
    assert same(engine.model, plain_loop(data, max_norm=0.1))
    schedule = handlers[2]
    assert isinstance(schedule, LRScheduling)
    assert schedule.scheduler.last_epoch == 14


def test_the_reason_names_the_parameters() -> None:
    engine = build()
    reasons: list[str | None] = []
    engine.connect(Events.OPTIMIZER_STEP_COMPLETED, lambda engine: reasons.append(engine.state.update.skipped))

    @engine.on(Events.GRADIENTS_READY(once=2))
    def spoil(engine: Engine) -> None:
        engine.model[3].weight.grad[0, 2] = math.inf

    @engine.on(Events.GRADIENTS_READY(once=3))
    def spoil_all(engine: Engine) -> None:
        for parameter in engine.model.parameters():
            parameter.grad[0] = math.nan

    engine.attach(NonFiniteGuard())
    engine.run(batches(count=3), max_epochs=1)
    assert reasons == [
        None,
        "the gradients are not finite in 3.weight",
        "the gradients are not finite in 0.weight, 0.bias, 1.weight, 1.bias, 3.weight and 1 more",
    ]


def test_of_several_modules_the_module_is_named_and_one_update_of_two_is_guarded() -> None:
    models = {"a": nn.Linear(2, 1, bias=False), "b": nn.Linear(2, 1, bias=False)}

    def update(name: str) -> Update:
        return Update.from_function(
            lambda engine, batch: models[name](batch).sum(),
            partial(torch.optim.SGD, lr=1.0),
            name=name,
            parameters=lambda engine: models[name].parameters(),
        )

    engine = Engine([update("a"), update("b")], model=models, seed=0)
    engine.attach(NonFiniteGuard(update="b", action="raise"))
    with pytest.raises(FloatingPointError, match=r"'non_finite_guard': update 'b': .* not finite in b\.weight"):
        engine.run([torch.full((1, 2), math.nan)], max_epochs=1)
    assert engine.updates[0].steps == 1
    with pytest.raises(KeyError, match="c"):
        engine.attach(NonFiniteGuard(update="c", name="other"))


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("check", CHECKS)
def test_it_stops_at_the_patience_th_bad_step_in_a_row(check: Any, window: int) -> None:
    # Bad steps: 2, then 4 and 5.
    bad = [2, 4, 5] if window == 1 else [3, 7, 10]
    data = batches(*bad, count=12)
    engine = build()
    guard = NonFiniteGuard(check=check, action="stop", patience=2)
    engine.attach(guard, GradientAccumulation(window))
    engine.run(data, max_epochs=2)
    assert engine.state.iteration == 5 * window
    assert engine.updates[0].steps == 2
    assert guard.skipped == {"main": 3}
    assert engine.state.stop_reason is not None
    assert "not finite" in engine.state.stop_reason
    assert engine.state.stop_reason.endswith("(2 steps in a row)")
    assert same(engine.model, plain_loop(data[: 5 * window], window=window, epochs=1))


@pytest.mark.parametrize(
    ("check", "message"),
    [
        ("gradients", "the gradients are not finite in 0.weight, "),
        ("loss", "the loss is not finite: nan in iteration 3, nan in iteration 4"),
        ("both", "the loss is not finite: nan in iteration 3, nan in iteration 4; the gradients are not finite in "),
    ],
)
def test_it_raises_and_names_the_iterations_of_the_loss(check: Any, message: str) -> None:
    engine = build()
    engine.attach(NonFiniteGuard(check=check, action="raise"), GradientAccumulation(5))
    with pytest.raises(FloatingPointError, match=f"update 'main': {message}"):
        engine.run(batches(3, 4), max_epochs=1)
    assert engine.updates[0].steps == 0


def test_a_stop_that_was_held_back_is_taken_back_when_the_gradients_recover() -> None:
    engine = build()
    engine.attach(NonFiniteGuard(action="stop"))
    data = batches(3)
    engine.run(data, max_epochs=1, min_iters=8)
    assert engine.state.iteration == 10
    assert engine.state.stop_reason is None
    assert same(engine.model, plain_loop(data, epochs=1))
    engine = build()
    engine.attach(NonFiniteGuard(action="stop"))
    engine.run(batches(3, 8), max_epochs=1, min_iters=8)
    assert engine.state.iteration == 8


@pytest.mark.moderate
@pytest.mark.parametrize("guard_first", [True, False])
@pytest.mark.parametrize("window", [1, 2])
def test_an_overflow_under_fp16_is_the_scalers_business(guard_first: bool, window: int) -> None:
    def run(*handlers: Any) -> Engine:
        engine = build()
        engine.attach(*handlers, GradientAccumulation(window))
        engine.run(batches(), max_epochs=2)
        return engine

    alone = run(MixedPrecision("fp16", init_scale=2.0**20))
    guard = NonFiniteGuard(check="both", action="raise")
    handlers = [guard, MixedPrecision("fp16", init_scale=2.0**20)]
    together = run(*(handlers if guard_first else reversed(handlers)))
    assert 0 < alone.updates[0].steps < 20 // window  # there were overflows, and steps
    assert same(alone.model, together.model)
    assert guard.skipped == {}


def test_under_fp16_a_bad_loss_is_seen_unscaled_and_counted() -> None:
    for guard_first in (True, False):
        engine = build()
        handlers = [
            NonFiniteGuard(check="both", action="stop", patience=2),
            MixedPrecision("fp16", init_scale=1024.0),
            GradientAccumulation(2),
        ]
        engine.attach(*(handlers if guard_first else reversed(handlers)))
        engine.run(batches(4, 5), max_epochs=1)
        assert engine.state.iteration == 6
        assert "nan in iteration 5" in (engine.state.stop_reason or "")
        assert engine.updates[0].steps == 1


@pytest.mark.parametrize("guard_first", [True, False])
def test_a_loss_that_is_infinite_only_when_scaled_is_not_counted(guard_first: bool) -> None:
    update = Update.from_function(
        lambda engine, batch: 1e36 * engine.model.weight.square().sum(), partial(torch.optim.SGD, lr=0.0)
    )
    engine = Engine(update, model=nn.Linear(2, 1), seed=0)
    nn.init.ones_(engine.model.weight)
    guard = NonFiniteGuard(check="loss", action="raise")
    handlers = [guard, MixedPrecision("fp16", init_scale=1024.0)]
    engine.attach(*(handlers if guard_first else reversed(handlers)))
    engine.run(max_iters=2)
    assert engine.updates[0].steps == 0
    assert guard.skipped == {}


def test_a_bad_loss_whose_part_of_the_window_was_discarded_by_another_is_forgotten() -> None:
    engine = build()
    guard = NonFiniteGuard(check="loss", action="raise")
    engine.attach(guard, GradientAccumulation(4))
    engine.connect(Events.LOSS_COMPUTED(once=2), lambda engine: engine.state.update.skip("for a test"))
    engine.run(batches(2, count=8), max_epochs=1)
    assert engine.updates[0].steps == 2
    assert guard.skipped == {}


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(0))


@pytest.mark.parametrize("halve", [True, False])
@pytest.mark.parametrize("window", [1, 2])
def test_a_bad_loss_in_any_piece_of_a_batch_is_seen(window: int, halve: bool) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        error = nn.functional.mse_loss(output, target)
        return error + math.inf if bool(target.max() > 50) else error  # the gradient is finite: only the loss shows it

    data = batches(count=4)
    data[2][1][0] = 100.0  # in the first piece of the third batch
    engine = Engine(Update.supervised(loss, Adam), model=network(), seed=0)
    guard = NonFiniteGuard(check="loss")
    engine.attach(guard, MicroBatching(2, halve_on_oom=halve), GradientAccumulation(window))
    engine.run(data, max_epochs=1)
    assert guard.skipped == {"main": 1}
    assert engine.updates[0].steps == 4 // window - 1


def test_sparse_and_empty_gradients() -> None:
    model: Any = nn.ModuleDict({"table": nn.Embedding(5, 2, sparse=True), "empty": Empty()})
    update = Update.from_function(
        lambda engine, batch: (model["table"](batch[0]) * batch[1]).sum() + model["empty"].weight.sum(),
        partial(torch.optim.SGD, lr=0.1),
    )
    engine = Engine(update, model=model, seed=0)
    guard = NonFiniteGuard()
    engine.attach(guard)
    reasons: list[str | None] = []
    engine.connect(Events.OPTIMIZER_STEP_COMPLETED, lambda engine: reasons.append(engine.state.update.skipped))
    engine.run([(torch.tensor([1, 1]), factor) for factor in (1.0, math.nan)], max_epochs=1)
    assert reasons == [None, "the gradients are not finite in table.weight"]


@pytest.mark.moderate
@pytest.mark.parametrize("check", spread(CHECKS, 1))
@pytest.mark.parametrize("window", quick([1, 3], 3))
@pytest.mark.filterwarnings("ignore:W15")
def test_it_keeps_the_promises_of_a_handler(check: Any, window: int) -> None:
    def make() -> Engine:
        engine = build()
        if window > 1:
            engine.attach(GradientAccumulation(window))
        return engine

    check_handler(make, lambda: NonFiniteGuard(check=check), batches(count=5), max_epochs=2, changes_training=False)
    # With bad batches the run without the guard is not finite, but still the same each time.
    check_handler(
        make, lambda: NonFiniteGuard(check=check, action="stop", patience=5), batches(2, count=5), max_epochs=2
    )


def test_patience_counts_on_after_a_resume() -> None:
    def make() -> Engine:
        engine = build()
        engine.attach(NonFiniteGuard(action="stop", patience=3))
        return engine

    data = batches(4, 5, 6)
    first, second = make(), make()
    first.run(data, max_iters=5)
    second.load_state_dict(first.state_dict())
    second.run(data, max_epochs=1)
    assert second.state.iteration == 6
    guard = second.handlers["non_finite_guard"]
    assert isinstance(guard, NonFiniteGuard)
    assert guard.skipped == {"main": 3}
    second.reset()
    assert guard.skipped == {}


def test_it_looks_once_for_each_window(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    for method in ("__bool__", "item", "__float__", "tolist"):
        original = getattr(Tensor, method)

        def counted(self: Tensor, original: Any = original) -> Any:
            looks.append(1)
            return original(self)

        monkeypatch.setattr(Tensor, method, counted)

    def run(*handlers: Any) -> int:
        looks.clear()
        engine = build()
        engine.attach(GradientAccumulation(4), *handlers)
        engine.run(batches(), max_epochs=1)
        return len(looks)

    assert run(NonFiniteGuard(check="both")) - run() == 3  # windows of 4, 4 and 2 batches
    # A scaler, which does not overflow here, looks at the same time.
    assert run(NonFiniteGuard(check="both"), MixedPrecision("fp16", init_scale=4.0)) - run() == 3


def test_two_on_one_update_refuse_each_other() -> None:
    engine = build()
    with pytest.raises(ValueError, match="both 'one' and 'two' control what happens to non-finite losses"):
        engine.attach(NonFiniteGuard(name="one"), NonFiniteGuard(name="two"))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"check": "weights"}, ValueError, "check='weights'"),
        ({"action": "ignore"}, ValueError, "action='ignore'"),
        ({"action": "stop", "patience": 0}, ValueError, "patience=0"),
        ({"action": "stop", "patience": 1.5}, TypeError, "patience=1.5"),
        ({"patience": 2}, ValueError, "patience=2"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=rf"NonFiniteGuard\({message}\)"):
        NonFiniteGuard(**options)
