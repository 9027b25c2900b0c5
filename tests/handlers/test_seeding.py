"""Seeding: the global generators start from the run's seed, once."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from signalfire import Engine, Events, Update, allow, seed_everything
from signalfire.handlers import Checkpoint, Seeding, Validation

BATCHES = [(torch.ones(2, 3), torch.ones(2, 1))] * 4
Draw = tuple[float, float, float]


def draw() -> Draw:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def engine_of(*handlers: Any, seed: int | None = 5) -> tuple[Engine, list[Draw]]:
    """An engine, and what is drawn in each of its iterations."""
    update = Update.supervised(nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.01))
    engine = Engine(update, model=nn.Linear(3, 1), seed=seed)
    engine.attach(*handlers)
    drawn: list[Draw] = []
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: drawn.append(draw()))
    return engine, drawn


def drawn_after(seed: int, count: int) -> list[Draw]:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return [draw() for _ in range(count)]


def test_all_generators_start_from_the_engines_seed() -> None:
    engine, drawn = engine_of(Seeding())
    seed_everything(99)
    engine.run(BATCHES, max_epochs=1)
    assert drawn == drawn_after(5, 4)


def test_a_seed_of_its_own_goes_before_the_engines() -> None:
    engine, drawn = engine_of(Seeding(7))
    engine.run(BATCHES, max_epochs=1)
    assert drawn == drawn_after(7, 4)
    assert drawn_after(7, 4) != drawn_after(5, 4)


def test_seed_zero_is_a_seed() -> None:
    engine, drawn = engine_of(Seeding(0))
    engine.run(BATCHES, max_epochs=1)
    assert drawn == drawn_after(0, 4)


def test_an_engine_without_a_seed_uses_torchs_initial_one_however_large() -> None:
    torch.manual_seed(2**40 + 3)
    engine, drawn = engine_of(Seeding(), seed=None)
    engine.run(BATCHES, max_epochs=1)
    assert drawn == drawn_after((2**40 + 3) % 2**32, 4)


def test_a_run_that_continues_is_not_seeded_again() -> None:
    engine, drawn = engine_of(Seeding())
    engine.run(BATCHES, max_epochs=1)
    engine.run(BATCHES, max_epochs=2)
    assert drawn == drawn_after(5, 8)


def test_a_run_from_a_file_goes_on_with_its_random_states(tmp_path: Path) -> None:
    engine, _ = engine_of(Seeding(), Checkpoint(tmp_path, every="3it"))
    engine.run(BATCHES, max_iters=3)
    other, drawn = engine_of(Seeding(), Checkpoint(tmp_path, every="3it"))
    other.load_state_dict(Checkpoint.load(next(tmp_path.iterdir())))
    seed_everything(99)
    other.run(BATCHES, max_epochs=2)
    assert drawn == drawn_after(5, 8)[3:]


def test_reset_seeds_again() -> None:
    engine, drawn = engine_of(Seeding())
    engine.run(BATCHES, max_epochs=1)
    engine.reset()
    engine.run(BATCHES, max_epochs=1)
    assert drawn == drawn_after(5, 4) * 2


@pytest.mark.parametrize("seeding_first", [True, False])
def test_it_comes_before_anything_that_draws_at_the_start(seeding_first: bool) -> None:
    engine, _ = engine_of()
    seen: list[Draw] = []
    if seeding_first:
        engine.attach(Seeding())
    engine.connect(Events.STARTED, lambda engine: seen.append(draw()))
    if not seeding_first:
        engine.attach(Seeding())
    engine.run(BATCHES, max_epochs=1)
    assert seen == drawn_after(5, 1)


@pytest.mark.filterwarnings("ignore:C14:signalfire.FindingWarning")
def test_seeding_an_evaluator_does_not_seed_the_training_around_it() -> None:
    evaluator = Engine(Update.supervised(nn.functional.mse_loss), model=nn.Linear(3, 1))
    evaluator.attach(Seeding(1))
    inside: list[Draw] = []
    evaluator.connect(Events.ITERATION_COMPLETED(once=1), lambda engine: inside.append(draw()))
    engine, drawn = engine_of(Seeding(), Validation(evaluator, BATCHES))
    with allow("W51"):  # a model of its own
        engine.run(BATCHES, max_epochs=2)
    assert drawn == drawn_after(5, 8)
    assert inside == drawn_after(1, 1) * 2  # and each validation draws the same


def test_switched_off_nothing_is_seeded() -> None:
    engine, drawn = engine_of(Seeding())
    expected = drawn_after(99, 4)
    seed_everything(99)
    with engine.without("seeding"):
        engine.run(BATCHES, max_epochs=1)
    assert drawn == expected


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, True, "1"])
def test_bad_seeds_are_refused(seed: Any) -> None:
    with pytest.raises(ValueError, match="Seeding"):
        Seeding(seed)
