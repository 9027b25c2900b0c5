"""GradientAccumulation against plain PyTorch loops: windows, their gradients, and where they end."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Update
from signalfire.handlers import GradientAccumulation, LabelSmoothing, NonFiniteGuard
from tests import kit
from tests.kit import assert_same, average_gradients, mlp, windows

VALUES = [torch.tensor(float(value)) for value in range(1, 11)]
Batches = list[tuple[Tensor, Tensor]]


class Unsized:
    """Data that can be iterated again but does not report its length."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = list(batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Weight(nn.Module):
    """A single number; its gradient under ``weight * value`` is the value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))


def times_weight(engine: Engine, batch: Any) -> Tensor:
    product: Tensor = engine.model.weight * batch
    return product


def counting_engine() -> tuple[Engine, list[float]]:
    """An engine whose window gradients are plain numbers, and the list in which they are noted."""
    engine = Engine(Update.from_function(times_weight, partial(torch.optim.SGD, lr=1.0)), model=Weight(), seed=0)
    gradients: list[float] = []

    @engine.on(Events.GRADIENTS_READY)
    def note(engine: Engine) -> None:
        gradients.append(engine.model.weight.grad.item())

    return engine, gradients


def network() -> nn.Sequential:
    return mlp(5, 8, 3, nn.Tanh())


def batches(sizes: Iterable[int]) -> Batches:
    return kit.batches(sizes, targets=(), classes=3)


def plain_loop(data: Batches, schedule: Mapping[int, int], epochs: int) -> nn.Sequential:
    """The loss of every batch is added up, and the sum's gradient divided once by the window's real length."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for epoch in range(1, epochs + 1):
        window = [n for start, n in schedule.items() if start <= epoch][-1]
        for chunk in windows(data, window):
            for inputs, targets in chunk:
                nn.functional.cross_entropy(model(inputs), targets).backward()
            average_gradients(model, len(chunk))
            optimizer.step()
            optimizer.zero_grad()
    return model


def trainer(model: nn.Module) -> Engine:
    update = Update.supervised(nn.functional.cross_entropy, partial(torch.optim.Adam, lr=0.05))
    return Engine(update, model=model, seed=0)


@pytest.mark.parametrize("data", [VALUES, Unsized(VALUES)], ids=["sized", "unsized"])
def test_a_short_last_window_is_averaged_over_its_real_length(data: Any) -> None:
    engine, gradients = counting_engine()
    engine.attach(GradientAccumulation(4))
    engine.run(data, max_epochs=1)
    assert gradients == [2.5, 6.5, 9.5]
    assert engine.updates[0].steps == 3
    assert engine.model.weight.item() == -(2.5 + 6.5 + 9.5)


@pytest.mark.parametrize("data", [VALUES, Unsized(VALUES)], ids=["sized", "unsized"])
def test_windows_do_not_straddle_epochs(data: Any) -> None:
    engine, gradients = counting_engine()
    engine.attach(GradientAccumulation(4))
    engine.run(data, max_epochs=3)
    assert gradients == [2.5, 6.5, 9.5] * 3


def test_windows_do_not_straddle_epochs_when_the_data_goes_on_across_them() -> None:
    engine, gradients = counting_engine()
    engine.attach(GradientAccumulation(4))
    engine.run(VALUES, max_epochs=2, epoch_length=5)
    assert gradients == [2.5, 5.0, 7.5, 10.0]


@pytest.mark.filterwarnings("ignore:C22:signalfire.FindingWarning")
def test_a_window_as_long_as_the_epoch_and_a_longer_one_both_step_once() -> None:
    for length in (10, 25):
        engine, gradients = counting_engine()
        engine.attach(GradientAccumulation(length))
        engine.run(VALUES, max_epochs=1)
        assert gradients == [5.5]


@pytest.mark.moderate
@pytest.mark.parametrize("unsized", [False, True])
@pytest.mark.parametrize("steps", [2, 3, 4])
def test_weights_equal_a_plain_loop(steps: int, unsized: bool) -> None:
    data = batches([4] * 9 + [2])
    model = network()
    engine = trainer(model)
    engine.attach(GradientAccumulation(steps))
    engine.run(Unsized(data) if unsized else data, max_epochs=3)
    assert_same(model, plain_loop(data, {1: steps}, 3))


def test_a_schedule_changes_the_window_from_its_epochs_on() -> None:
    engine, gradients = counting_engine()
    engine.attach(GradientAccumulation({1: 1, 2: 3}))
    engine.run(VALUES, max_epochs=3)
    assert gradients == [float(value) for value in range(1, 11)] + [2.0, 5.0, 8.0, 10.0] * 2


def test_a_schedule_equals_a_plain_loop() -> None:
    data = batches([4] * 7)
    model = network()
    engine = trainer(model)
    engine.attach(GradientAccumulation({1: 1, 2: 3}))
    engine.run(data, max_epochs=3)
    assert_same(model, plain_loop(data, {1: 1, 2: 3}, 3))


def test_a_schedule_that_begins_later_steps_every_batch_before() -> None:
    handler = GradientAccumulation({5: 4, 3: 2})
    assert [handler.window(epoch) for epoch in range(1, 7)] == [1, 1, 2, 2, 4, 4]


def test_a_weight_gives_the_gradient_of_the_weighted_mean() -> None:
    weights = {1.0: 3.0, 2.0: 1.0, 3.0: 4.0, 4.0: 6.0, 5.0: 2.0}
    engine, gradients = counting_engine()
    engine.attach(GradientAccumulation(3, weight=lambda engine: weights[engine.state.batch.item()]))
    engine.run(VALUES[:5], max_epochs=1)
    assert gradients == [(3 * 1 + 1 * 2 + 4 * 3) / 8, (6 * 4 + 2 * 5) / 8]


def test_a_weight_of_tokens_equals_a_plain_loop() -> None:
    data = batches([2, 8, 4, 1, 4])  # batch sizes serve as the tokens' numbers
    model = network()
    engine = trainer(model)
    engine.attach(GradientAccumulation(2, weight=lambda engine: len(engine.state.batch[0])))
    engine.run(data, max_epochs=2)

    reference = network()
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.05)
    for _ in range(2):
        for chunk in windows(data, 2):
            for inputs, targets in chunk:
                (nn.functional.cross_entropy(reference(inputs), targets) * len(inputs)).backward()
            for parameter in reference.parameters():
                assert parameter.grad is not None
                parameter.grad.div_(sum(len(inputs) for inputs, _ in chunk))
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, reference)


def test_a_weighted_window_equals_one_large_batch() -> None:
    data = batches([2, 6])
    model, large = network(), network()
    engine = Engine(
        Update.supervised(nn.functional.cross_entropy, partial(torch.optim.SGD, lr=0.5)), model=model, seed=0
    )
    engine.attach(GradientAccumulation(2, weight=lambda engine: len(engine.state.batch[0])))
    engine.run(data, max_epochs=1)
    optimizer = torch.optim.SGD(large.parameters(), lr=0.5)
    inputs, targets = torch.cat([data[0][0], data[1][0]]), torch.cat([data[0][1], data[1][1]])
    nn.functional.cross_entropy(large(inputs), targets).backward()
    optimizer.step()
    # Not bit-equal: one batch of 8 is summed in another order than batches of 2 and 6.
    for a, b in zip(model.parameters(), large.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_the_reported_loss_is_that_of_each_batch() -> None:
    data = batches([4] * 6)
    model = network()
    expected: list[float] = []
    reference = network()
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.05)
    for begin in range(0, 6, 3):
        for inputs, targets in data[begin : begin + 3]:
            loss = nn.functional.cross_entropy(reference(inputs), targets)
            expected.append(loss.item())
            loss.backward()
        for parameter in reference.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(3)
        optimizer.step()
        optimizer.zero_grad()

    engine = trainer(model)
    engine.attach(GradientAccumulation(3, weight=lambda engine: 7.0))
    reported: list[float] = []

    @engine.on(Events.ITERATION_COMPLETED)
    def note(engine: Engine) -> None:
        assert engine.state.update.loss is not None
        reported.append(engine.state.update.loss.item())

    engine.run(data, max_epochs=1)
    # Dividing 7 * (a + b + c) by 21 rounds otherwise than (a + b + c) / 3: the losses after the first step differ a little.
    assert reported[:3] == expected[:3]
    assert reported[3:] == pytest.approx(expected[3:], rel=1e-5)


def two_updates() -> tuple[Engine, dict[str, Weight]]:
    models = {"a": Weight(), "b": Weight()}

    def update(name: str) -> Update:
        def function(engine: Engine, batch: Any) -> Tensor:
            product: Tensor = models[name].weight * batch
            return product

        return Update.from_function(
            function,
            partial(torch.optim.SGD, lr=1.0),
            name=name,
            parameters=lambda engine: models[name].parameters(),
        )

    return Engine([update("a"), update("b")], model=models, seed=0), models


def test_one_update_of_two_accumulates() -> None:
    engine, models = two_updates()
    engine.attach(GradientAccumulation(4, update="b"))
    engine.run(VALUES, max_epochs=1)
    assert {update.name: update.steps for update in engine.updates} == {"a": 10, "b": 3}
    assert (models["a"].weight.item(), models["b"].weight.item()) == (-55.0, -18.5)


def test_a_weight_for_one_update_leaves_the_other_alone() -> None:
    engine, models = two_updates()
    engine.attach(GradientAccumulation(2, update="b", weight=lambda engine: engine.state.batch.item()))
    engine.run(VALUES[:2], max_epochs=1)
    assert models["a"].weight.item() == -3.0
    assert models["b"].weight.item() == pytest.approx(-(1 * 1 + 2 * 2) / 3)


def test_two_accumulations_for_different_updates_get_along() -> None:
    engine, _ = two_updates()
    engine.attach(GradientAccumulation(2, update="a", name="first"), GradientAccumulation(5, update="b", name="second"))
    engine.run(VALUES, max_epochs=1)
    assert [update.steps for update in engine.updates] == [5, 2]


def test_two_accumulations_for_the_same_update_are_refused_naming_both() -> None:
    engine, gradients = counting_engine()
    engine.attach(GradientAccumulation(4))
    with pytest.raises(ValueError, match=r"gradient_accumulation.*other|other.*gradient_accumulation"):
        engine.attach(GradientAccumulation(2, name="other"))
    assert list(engine.handlers) == ["gradient_accumulation"]
    engine.run(VALUES, max_epochs=1)
    assert gradients == [2.5, 6.5, 9.5]


def test_an_unknown_update_is_refused_when_attached() -> None:
    engine, gradients = counting_engine()
    with pytest.raises(KeyError, match="generator"):
        engine.attach(GradientAccumulation(2, update="generator"))
    engine.run(VALUES[:2], max_epochs=1)
    assert gradients == [1.0, 2.0]


@pytest.mark.parametrize(
    ("steps", "kind", "message"),
    [
        (0, ValueError, "steps=0"),
        (-1, ValueError, "steps=-1"),
        (1.5, TypeError, "steps=1.5"),
        (True, TypeError, "steps=True"),
        ("4", TypeError, "steps='4'"),
        ({}, ValueError, "steps={}"),
        ({0: 2}, ValueError, "steps: epoch=0"),
        ({1: 0}, ValueError, "steps[1]=0"),
        ({1: 2.0}, TypeError, "steps[1]=2.0"),
        ({"1": 2}, TypeError, "steps: epoch='1'"),
    ],
)
def test_bad_steps_are_refused(steps: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(f"GradientAccumulation({message})")):
        GradientAccumulation(steps)


def test_a_weight_that_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="weight"):
        GradientAccumulation(2, weight=3)  # type: ignore[arg-type]


def test_an_engine_that_only_evaluates_refuses_it() -> None:
    engine = Engine(Update.from_function(times_weight), model=Weight())
    with pytest.raises(ValueError, match="gradient_accumulation"):
        engine.attach(GradientAccumulation(2))


def test_detached_in_a_run_it_goes_at_the_end_of_the_open_window() -> None:
    engine, gradients = counting_engine()
    handler = GradientAccumulation(4)
    engine.attach(handler)

    @engine.on(Events.ITERATION_COMPLETED(once=2))
    def leave(engine: Engine) -> None:
        engine.detach(handler)

    engine.run(VALUES, max_epochs=1)
    assert gradients == [2.5, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]
    assert not engine.has("gradient_accumulation")


def test_attached_in_a_run_it_begins_with_a_whole_window() -> None:
    engine, gradients = counting_engine()

    @engine.on(Events.ITERATION_COMPLETED(once=3))
    def join(engine: Engine) -> None:
        engine.attach(GradientAccumulation(3))

    engine.run(VALUES, max_epochs=1)
    assert gradients == [1.0, 2.0, 3.0, 5.0, 8.0, 10.0]


def test_a_stop_inside_a_window_discards_it() -> None:
    engine, gradients = counting_engine()
    engine.attach(GradientAccumulation(4))

    @engine.on(Events.ITERATION_COMPLETED(once=6))
    def stop(engine: Engine) -> None:
        engine.terminate("enough")

    engine.run(VALUES, max_epochs=1)
    assert gradients == [2.5]
    assert engine.model.weight.item() == -2.5
    assert engine.model.weight.grad is None
    assert engine.updates[0].window.filled == 0


def test_an_epoch_ended_inside_a_window_discards_it() -> None:
    engine, gradients = counting_engine()
    engine.attach(GradientAccumulation(4))

    @engine.on(Events.ITERATION_COMPLETED(once=6))
    def end_epoch(engine: Engine) -> None:
        engine.terminate_epoch("enough")

    engine.run(VALUES, max_epochs=2)
    assert gradients == [2.5, 2.5, 6.5, 9.5]


def test_a_skipped_batch_discards_what_the_window_held() -> None:
    engine, gradients = counting_engine()
    engine.attach(GradientAccumulation(4))

    @engine.on(Events.LOSS_COMPUTED(once=2))
    def skip(engine: Engine) -> None:
        engine.state.update.skip("bad batch")

    engine.run(VALUES[:8], max_epochs=1)
    assert gradients == [3.5, 6.5]


@pytest.mark.parametrize("way", ["without", "disabled", "detached"])
def test_switched_off_it_equals_a_plain_loop(way: str) -> None:
    data = batches([4] * 5)
    model = network()
    engine = trainer(model)
    handler = GradientAccumulation(4, weight=lambda engine: 5.0)
    engine.attach(handler)
    if way == "without":
        with engine.without("gradient_accumulation"):
            engine.run(data, max_epochs=2)
    else:
        if way == "disabled":
            handler.enabled = False
        else:
            engine.detach(handler)
        engine.run(data, max_epochs=2)
    assert_same(model, plain_loop(data, {1: 1}, 2))
    assert not engine.signal(Events.LOSS_COMPUTED).receivers or way == "without"


def test_a_window_of_one_equals_a_plain_loop() -> None:
    data = batches([4] * 5)
    model = network()
    engine = trainer(model)
    engine.attach(GradientAccumulation(1))
    engine.run(data, max_epochs=2)
    assert_same(model, plain_loop(data, {1: 1}, 2))


def test_reading_unsized_data_ahead_does_not_change_what_the_model_draws() -> None:
    def drawn(handlers: list[GradientAccumulation], data: Any) -> list[Tensor]:
        engine, _ = counting_engine()
        engine.attach(*handlers)
        noise: list[Tensor] = []

        @engine.on(Events.FORWARD_STARTED)
        def draw(engine: Engine) -> None:
            noise.append(torch.rand(3))

        torch.manual_seed(5)
        engine.run(data, max_epochs=2)
        return noise

    class Drawing(Unsized):
        def __iter__(self) -> Iterator[Any]:
            for value in self.batches:
                yield value + torch.rand(())

    plain = drawn([], VALUES)
    ahead = drawn([GradientAccumulation(4)], Drawing(VALUES))
    assert all(torch.equal(a, b) for a, b in zip(plain, ahead, strict=True))


@pytest.mark.parametrize("data", [VALUES, Unsized(VALUES)], ids=["sized", "unsized"])
@pytest.mark.filterwarnings("ignore::signalfire.RereadingWarning")
def test_a_run_that_reaches_its_bounds_inside_a_window_continues_it(data: Any) -> None:
    engine, gradients = counting_engine()
    engine.attach(GradientAccumulation(4))
    for bound in (2, 3, 9):
        engine.run(data, max_iters=bound)
    engine.run(data, max_epochs=1)
    assert gradients == [2.5, 6.5, 9.5]


@pytest.mark.moderate
@pytest.mark.parametrize("unsized", [False, True])
@pytest.mark.parametrize("at", [1, 4, 5, 7])
@pytest.mark.filterwarnings("ignore::signalfire.RereadingWarning")
def test_a_run_saved_inside_a_window_goes_on_bit_for_bit(at: int, unsized: bool) -> None:
    data: Any = batches([4, 1, 7, 2, 4, 3, 5])
    data = Unsized(data) if unsized else data

    def build(model: nn.Module) -> Engine:
        engine = trainer(model)
        engine.attach(GradientAccumulation(3, weight=lambda engine: len(engine.state.batch[0])))
        return engine

    whole, model = network(), network()
    engine = build(whole)
    saved: list[dict[str, Any]] = []
    engine.connect(Events.ITERATION_COMPLETED(once=at), lambda engine: saved.append(engine.state_dict()))
    engine.run(data, max_epochs=2)
    other = build(model)
    other.load_state_dict(saved[0])
    other.run(data, max_epochs=2)
    assert other.updates[0].steps == engine.updates[0].steps == 6
    assert_same(model, whole)


def test_an_error_between_two_batches_of_a_window_leaves_it_open() -> None:
    engine, gradients = counting_engine()
    engine.attach(GradientAccumulation(4))

    def fail(engine: Engine) -> None:
        raise ArithmeticError("on purpose")

    connection = engine.connect(Events.ITERATION_COMPLETED(once=2), fail)
    with pytest.raises(ArithmeticError):
        engine.run(VALUES, max_epochs=1)
    connection.detach()
    engine.run(VALUES, max_epochs=1)  # continues with the third batch, in the same window
    assert gradients == [2.5, 6.5, 9.5]


def test_an_error_inside_a_window_discards_it_and_says_so() -> None:
    engine, gradients = counting_engine()
    engine.attach(GradientAccumulation(4))

    def fail(engine: Engine) -> None:
        raise ArithmeticError("on purpose")

    with engine.connect(Events.BACKWARD_COMPLETED(once=3), fail), pytest.raises(ArithmeticError):
        engine.run(VALUES, max_epochs=1)
    assert engine.model.weight.grad is None
    with pytest.warns(UserWarning, match="gradients of the earlier 2 batches in the accumulation window .* discarded"):
        engine.run(VALUES, max_epochs=1)  # makes the third batch again, in a new window
    assert gradients == [4.5, 8.5]


def test_a_weight_for_one_of_two_accumulating_updates_leaves_the_other_alone() -> None:
    engine, models = two_updates()
    engine.attach(
        GradientAccumulation(2, update="a", name="first"),
        GradientAccumulation(2, update="b", name="second", weight=lambda engine: engine.state.batch.item()),
    )
    engine.run(VALUES[:2], max_epochs=1)
    assert models["a"].weight.item() == -1.5
    assert models["b"].weight.item() == pytest.approx(-(1 * 1 + 2 * 2) / 3)


def test_a_weight_that_is_set_once_counts_once() -> None:
    engine, gradients = counting_engine()
    engine.attach(GradientAccumulation(2))
    engine.connect(Events.LOSS_COMPUTED(once=1), lambda engine: setattr(engine.state.update, "weight", 3.0))
    engine.run(VALUES[:2], max_epochs=1)
    assert gradients == [(3 * 1 + 2) / 4]


@pytest.mark.parametrize("order", [1, -1])
def test_a_weight_may_depend_on_the_loss_as_others_have_changed_it(order: int) -> None:
    seen: list[float] = []

    def weight(engine: Engine) -> float:
        assert engine.state.update.loss is not None
        seen.append(engine.state.update.loss.item())
        return 1.0

    data = [(torch.ones(2, 5), torch.tensor([0, 2]))] * 2
    engine = kit.build(network(), loss=nn.functional.cross_entropy)
    engine.attach(*[GradientAccumulation(2, weight=weight), LabelSmoothing(0.5)][::order])
    engine.run(data, max_epochs=1)
    smoothed = nn.functional.cross_entropy(network()(data[0][0]), data[0][1], label_smoothing=0.5)
    assert seen == [pytest.approx(smoothed.item()), pytest.approx(smoothed.item())]


@pytest.mark.parametrize("zero", [0, 0.0, torch.tensor(0)], ids=str)
def test_a_batch_of_weight_zero_adds_nothing_even_if_its_loss_is_nan(zero: Any) -> None:
    def masked_mean(engine: Engine, batch: tuple[float, Tensor]) -> Tensor:
        value, mask = batch
        return (engine.model.weight * value * mask).sum() / mask.sum()  # type: ignore[no-any-return]

    engine = Engine(Update.from_function(masked_mean, partial(torch.optim.SGD, lr=1.0)), model=Weight())

    def tokens(engine: Engine) -> Any:
        return engine.state.batch[1].sum().item() or zero

    engine.attach(GradientAccumulation(3, weight=tokens), NonFiniteGuard())
    empty = (7.0, torch.zeros(2))
    engine.run([(1.0, torch.ones(3)), empty, (5.0, torch.ones(1)), empty], max_epochs=1)
    assert engine.model.weight.item() == -(3 * 1 + 1 * 5) / 4
    assert engine.updates[0].steps == 1
