"""What functions return at the events where it may be meant to replace something."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from signalfire import Engine, Events, FindingWarning
from tests.kit import batches, build, mlp


def halve_loss(engine: Engine) -> Any:
    return engine.state.update.backward_loss / 2


def halve_batch(engine: Engine) -> Any:
    return tuple(one / 2 for one in engine.state.batch)


@pytest.mark.parametrize(
    ("event", "function"), [(Events.LOSS_COMPUTED, halve_loss), (Events.GET_BATCH_COMPLETED, halve_batch)]
)
def test_what_nobody_uses_is_reported_once(event: Events, function: Any) -> None:
    engine = build(mlp(5, 8, 1), allow=["W85"])
    engine.connect(event, function)
    engine.run(batches(3), max_epochs=2)
    assert [one.code for one in engine.findings.of_run()] == []
    other = build(mlp(5, 8, 1))
    other.connect(event, function)
    with pytest.warns(
        match=rf"W85: {function.__name__} returns a .* but return values are ignored; assign the value"
    ) as caught:
        other.run(batches(3), max_epochs=2)
    assert len(caught) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda engine: engine.state.update.loss,
        lambda engine: engine.state.update.loss.item(),
        lambda engine: engine.state.update.loss.detach() * 2,
        lambda engine: engine.state.batch,
        lambda engine: engine.state.batch[0] * 2,
    ],
)
def test_other_values_stay_silent(function: Any) -> None:
    engine = build(mlp(5, 8, 1))
    engine.connect(Events.LOSS_COMPUTED, function)
    engine.run(batches(3), max_epochs=1)


def add_to_loss(engine: Engine) -> Any:
    update = engine.state.update
    penalty = 0.1 * engine.model[0].weight.square().sum()
    update.backward_loss = update.backward_loss + penalty
    return penalty


def statistics(engine: Engine) -> Any:
    return tuple(one.mean() for one in engine.state.batch)


def totals(engine: Engine) -> Any:
    return tuple(one.sum(0) for one in engine.state.batch)


@pytest.mark.parametrize(
    ("event", "function"),
    [
        (Events.LOSS_COMPUTED, add_to_loss),
        (Events.GET_BATCH_COMPLETED, statistics),
        (Events.GET_BATCH_COMPLETED, totals),
    ],
)
def test_what_a_function_returns_besides_what_it_assigns_or_of_other_sizes_is_no_replacement(
    event: Events, function: Any
) -> None:
    engine = build(mlp(5, 8, 1))
    engine.connect(event, function)
    engine.run([(inputs, targets) for inputs, targets in batches(3)], max_epochs=1)
    assert not engine.findings.of_run()


def test_two_functions_of_one_name_are_both_reported() -> None:
    engine = build(mlp(5, 8, 1))
    engine.connect(Events.LOSS_COMPUTED, lambda engine: engine.state.update.backward_loss / 2)
    engine.connect(Events.GET_BATCH_COMPLETED, lambda engine: tuple(one / 2 for one in engine.state.batch))
    with pytest.warns(FindingWarning, match="W85") as caught:
        engine.run(batches(3), max_epochs=1)
    assert len(caught) == 2


def test_only_the_first_call_is_looked_at() -> None:
    engine = build(mlp(5, 8, 1))
    calls: list[int] = []
    own = partial(lambda calls, engine: calls.append(engine.state.iteration), calls)
    engine.connect(Events.LOSS_COMPUTED, own)
    engine.run(batches(3), max_epochs=1)
    assert calls == [1, 2, 3]
    (connection,) = engine.signal(Events.LOSS_COMPUTED).connections
    assert connection.call is own


def test_an_error_in_the_first_call_names_the_function() -> None:
    engine = build(mlp(5, 8, 1))

    def fails(engine: Engine) -> None:
        raise ValueError("no")

    engine.connect(Events.GET_BATCH_COMPLETED, fails)
    with pytest.raises(ValueError, match="no") as raised:
        engine.run(batches(3), max_epochs=1)
    assert any("raised by" in note and "fails" in note for note in raised.value.__notes__)


def test_a_function_may_detach_itself_in_its_first_call() -> None:
    engine = build(mlp(5, 8, 1))
    calls: list[int] = []

    def once(engine: Engine) -> None:
        calls.append(engine.state.iteration)
        engine.detach(once)

    engine.connect(Events.GET_BATCH_COMPLETED, once)
    engine.run(batches(3), max_epochs=1)
    assert calls == [1]
    assert torch.is_grad_enabled()
