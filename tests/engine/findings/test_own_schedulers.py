"""Schedulers that a script builds for its optimizer by itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, SequentialLR, StepLR

from signalfire import Engine, Events, Handler, Update, on
from signalfire.handlers import Checkpoint
from tests.kit import SGD, batches, mlp


def trainer() -> tuple[Engine, torch.optim.Optimizer]:
    model = mlp(5, 8, 1)
    optimizer = SGD(model.parameters())
    return Engine(Update.supervised(nn.functional.mse_loss, optimizer), model=model), optimizer


def test_one_that_nobody_steps_is_named() -> None:
    engine, optimizer = trainer()
    scheduler = StepLR(optimizer, 1)
    with pytest.warns(match="W86: a scheduler .StepLR. was built for .* was not stepped in the 2 epochs of this run"):
        engine.run(batches(3), max_epochs=2)
    assert scheduler.last_epoch == 0


@pytest.mark.parametrize("event", [Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED])
def test_one_that_a_function_steps_is_fine_also_in_parts(event: Events) -> None:
    engine, optimizer = trainer()
    scheduler = SequentialLR(optimizer, [LinearLR(optimizer), StepLR(optimizer, 1)], [100])
    engine.connect(event, lambda engine: scheduler.step())
    engine.run(batches(3), max_epochs=2)


def test_before_an_epoch_has_ended_nothing_is_missing() -> None:
    engine, optimizer = trainer()
    scheduler = StepLR(optimizer, 1)
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: scheduler.step())
    engine.run(batches(3), max_iters=2)


def test_one_that_has_come_to_its_end_or_waits_for_its_turn_is_fine() -> None:
    engine, optimizer = trainer()
    scheduler = StepLR(optimizer, 1)

    def step_later(engine: Engine) -> None:
        if engine.state.epoch == 2:
            scheduler.step()

    engine.connect(Events.EPOCH_COMPLETED, step_later)
    for epochs in (1, 2):
        engine.run(batches(3), max_epochs=epochs)
    engine.detach(step_later)
    engine.run(batches(3), max_epochs=3)


def test_one_of_which_a_rate_of_ones_own_takes_the_place_is_fine() -> None:
    engine, optimizer = trainer()
    scheduler = StepLR(optimizer, 1)

    def halve(engine: Engine) -> None:
        optimizer.param_groups[0]["lr"] /= 2

    engine.connect(Events.EPOCH_COMPLETED, halve)
    engine.run(batches(3), max_epochs=1)
    assert scheduler.last_epoch == 0


def test_one_that_is_gone_is_not_reported() -> None:
    engine, optimizer = trainer()
    StepLR(optimizer, 1)
    engine.run(batches(3), max_epochs=1)


class Warming(Handler):
    """Steps a scheduler, and saves its position."""

    trains = True

    def __init__(self, scheduler: StepLR, *, several: bool) -> None:
        super().__init__()
        self.schedulers: Any = {"main": scheduler} if several else scheduler

    @property
    def scheduler(self) -> StepLR:
        return self.schedulers["main"] if isinstance(self.schedulers, dict) else self.schedulers  # type: ignore[no-any-return]

    @on(Events.EPOCH_COMPLETED)
    def step(self, engine: Engine) -> None:
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scheduler.load_state_dict(dict(state))


@pytest.mark.parametrize("several", [False, True])
def test_one_that_a_handler_of_ones_own_holds_is_fine(tmp_path: Path, several: bool) -> None:
    engine, optimizer = trainer()
    engine.attach(Checkpoint(tmp_path), Warming(StepLR(optimizer, 1), several=several))
    engine.run(batches(3), max_epochs=1)
