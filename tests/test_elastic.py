"""Trainings with other numbers of processes: killed and started again, with ranks that are late, and in drawn compositions."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from signalfire import Engine, Events, Update
from signalfire.handlers import ElasticDataParallel
from tests.elastic_compositions import compose, run_composition
from tests.kit import SGD, campaign, digest, last_of_campaign, linear
from tests.processes import assert_alike, run_together


@pytest.mark.campaign
def test_killed_and_started_with_any_number_of_processes_all_end_as_one_undisturbed_process() -> None:
    found = campaign("elastic", "--jobs", 3, "--seed", 1)
    assert found["equal"] == found["jobs"] == 3, found["failed"]
    assert found["kills"] > 0


@pytest.mark.slow
def test_the_last_result_of_the_long_form_is_printed() -> None:
    printed, last = last_of_campaign("elastic")
    assert f"{last['equal']} of {last['jobs']} jobs ended bit for bit" in printed
    assert last["equal"] == last["jobs"] >= 100
    assert last["kills"] >= 100


def run_late(steps: int, longest: float) -> str:
    """What a process has after a training in which it waits at moments, and for times, that it draws."""
    engine = Engine(Update.supervised(F.cross_entropy, SGD), model=linear(6, 3), seed=0)
    engine.attach(handler := ElasticDataParallel(shards=8))
    draw = random.Random(handler.processes.rank)

    def wait(engine: Engine) -> None:
        if longest and draw.random() < 0.2:
            time.sleep(draw.uniform(0, longest))

    for event in (Events.BACKWARD_COMPLETED, Events.GRADIENTS_READY, Events.ITERATION_STARTED):
        engine.connect(event, wait)
    data = [
        (torch.randn(2, 6, generator=torch.Generator().manual_seed(i)), torch.tensor([0, i % 3])) for i in range(80)
    ]
    engine.run(data, max_iters=steps)
    return digest([engine.model.state_dict(), engine.loss])


@pytest.mark.slow
def test_ranks_that_are_late_by_chance_end_with_the_same_bits() -> None:
    assert assert_alike(run_together(run_late, 4, 1000, 0.003)) == run_late(1000, 0.0)


def run_compositions(seeds: Sequence[int]) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parts of the data, and of processes that see some shards only
        return [run_composition(seed) for seed in seeds]


@pytest.mark.slow
def test_compositions_that_are_drawn_end_with_the_same_bits_for_any_number_of_processes() -> None:
    seeds = range(30)
    alone = run_compositions(seeds)
    refused = [seed for seed, found in zip(seeds, alone, strict=True) if isinstance(found, str)]
    assert len(refused) < 5, [alone[seed] for seed in refused]
    assert len({type(handler) for seed in seeds for handler in compose(seed)}) > 30
    for size in (2, 4):
        of_ranks = run_together(run_compositions, size, seeds)
        for seed, one, *others in zip(seeds, alone, *of_ranks, strict=True):
            names = [type(handler).__name__ for handler in compose(seed)]
            assert {digest(other) for other in others} == {digest(one)}, (seed, names)
