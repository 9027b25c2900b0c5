"""The number of steps to come is the number that the run makes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD

from signalfire import Engine, Events, Update
from signalfire.authoring.planning import comes_up, last_epoch, last_iteration, steps_to_come
from signalfire.handlers import FastDevRun, GradientAccumulation, LimitBatches
from tests.kit import build, mlp


class Unsized:
    def __iter__(self) -> Any:
        return iter([(torch.ones(1, 1), torch.ones(1, 1))] * 7)


@pytest.mark.parametrize("window", [1, 3, {1: 2, 2: 4}])
@pytest.mark.parametrize(
    "bounds", [{"max_epochs": 3}, {"max_epochs": 3, "max_iters": 16}, {"max_steps": 5}, {"max_iters": 10}]
)
def test_what_is_planned_at_any_iteration_is_what_is_made(window: Any, bounds: dict[str, int]) -> None:
    engine = Engine(Update.supervised(mse_loss, partial(SGD, lr=0.1)), model=nn.Linear(1, 1), seed=0)
    engine.attach(GradientAccumulation(window))
    update = engine.updates[0]
    planned: list[int] = []

    @engine.on(Events.STARTED | Events.ITERATION_COMPLETED)
    def plan(engine: Engine) -> None:
        to_come = steps_to_come(engine, update)
        assert to_come is not None
        planned.append(update.steps + to_come)

    engine.run(list(Unsized()), **bounds)  # type: ignore[arg-type]
    assert set(planned) == {update.steps}


@pytest.mark.parametrize(
    ("bounds", "expected"), [({"max_epochs": 1}, None), ({"max_iters": 9}, 9), ({"max_steps": 12}, 12)]
)
def test_for_data_without_a_length_it_is_known_only_where_a_bound_says_it(
    bounds: dict[str, int], expected: int | None
) -> None:
    engine = Engine(Update.supervised(mse_loss, partial(SGD, lr=0.1)), model=nn.Linear(1, 1), seed=0)
    found: list[int | None] = []
    engine.connect(Events.STARTED, lambda engine: found.append(steps_to_come(engine, engine.updates[0])))
    engine.run(Unsized(), **bounds)  # type: ignore[arg-type]
    assert found == [expected]


def test_a_trial_run_knows_the_steps_of_the_run_that_it_is_a_trial_of() -> None:
    found: list[tuple[int | None, int | None]] = []
    for handlers, bounds in (
        ([FastDevRun(2)], {}),
        ([FastDevRun(2), LimitBatches(5)], {}),
        ([], {}),
        ([FastDevRun(2)], {"epoch_length": 4}),
    ):
        engine = Engine(Update.supervised(mse_loss, partial(SGD, lr=0.1)), model=nn.Linear(1, 1), seed=0)
        engine.attach(*handlers)

        def ask(engine: Engine) -> None:
            update = engine.updates[0]
            found.append((steps_to_come(engine, update), steps_to_come(engine, update, planned=True)))

        engine.connect(Events.STARTED, ask)
        engine.run(list(Unsized()), max_epochs=3, **bounds)  # type: ignore[arg-type]
    assert found[:3] == [(2, 21), (2, 15), (21, 21)]
    assert found[3][1] == 12


def expecting(length: int | None = 10, **bounds: int) -> Engine:
    engine = build(mlp(5, 8, 1))
    engine.state.epoch_length = length
    for name, bound in bounds.items():
        setattr(engine.state, name, bound)
    return engine


def test_where_a_run_ends_is_known_from_each_of_its_bounds() -> None:
    assert (last_iteration(expecting(max_epochs=3)), last_epoch(expecting(max_epochs=3))) == (30, 3)
    assert (last_iteration(expecting(max_iters=25)), last_epoch(expecting(max_iters=25))) == (25, 2)
    assert (last_iteration(expecting(max_steps=15)), last_epoch(expecting(max_steps=15))) == (15, 1)
    assert (last_iteration(expecting(None, max_epochs=3)), last_epoch(expecting(None, max_epochs=3))) == (None, 3)


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ("3ep", True), ("4ep", False), ("0.5ep", True), ("30it", True), ("31it", False), ("30st", True), ("31st", False),
        ("1s", None), (Events.EPOCH_COMPLETED, True), (Events.EPOCH_COMPLETED(every=4), False),
        (Events.ITERATION_COMPLETED(once=30), True), (Events.ITERATION_COMPLETED(after=30), False),
        (Events.ITERATION_COMPLETED(when=lambda engine: True), None), (Events.EVALUATION_COMPLETED(every=2), None),
        (Events.EPOCH_COMPLETED(every=4) | Events.ITERATION_COMPLETED(every=7), True),
    ],
    ids=str,
)  # fmt: skip
def test_whether_an_interval_comes_up(every: Any, expected: bool | None) -> None:
    assert comes_up(expecting(max_epochs=3), every) is expected


def test_an_interval_that_nobody_can_know_is_unknown() -> None:
    assert comes_up(expecting(None), "5it") is None
