"""What `Engine.check` knows of a composition: batches that it may read, generators, parameters of optimizers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from signalfire import Update
from signalfire.engine import Engine
from signalfire.findings.composition import Composition, first_batch, own_generators, unchanged_generators
from signalfire.handlers import Validation
from tests.kit import SGD, batches, build, evaluator_of, mlp


class Holding:
    """Holds generators, one of them in an object of its own."""

    def __init__(self) -> None:
        self.numpy = np.random.default_rng(0)
        self.transforms = [type("Flip", (), {})()]
        self.transforms[0].random = random.Random(0)
        self.legacy, self.torch = np.random.RandomState(0), torch.Generator()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(batches(2))


def test_generators_are_found_and_put_back() -> None:
    loader = type("Loader", (), {"dataset": Holding()})()
    found = own_generators(loader)
    assert set(found) == {"dataset.numpy", "dataset.transforms[0].random", "dataset.legacy", "dataset.torch"}

    def draw() -> list[float]:
        held = loader.dataset
        numbers = held.numpy.random(), held.transforms[0].random.random(), held.legacy.rand()
        return [*map(float, numbers), float(torch.rand((), generator=held.torch))]

    with unchanged_generators(found):
        drawn = draw()
    assert draw() == drawn


def test_the_first_batch_is_that_of_an_iteration() -> None:
    samples = TensorDataset(torch.arange(8.0))
    assert first_batch(DataLoader(samples, 4))[0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert first_batch(DataLoader(samples, batch_size=None))[0].item() == 0.0
    assert torch.equal(first_batch(DataLoader(Stream(), batch_size=None))[0], batches(1)[0][0])
    assert first_batch(range(3, 9)) == 3


def test_what_leaves_a_trace_is_not_read() -> None:
    assert first_batch(iter([1, 2])) is None
    assert first_batch(DataLoader(Stream(), batch_size=None, num_workers=1)) is None
    assert first_batch(type("Stateful", (list,), {"load_state_dict": lambda self, state: None})([1])) is None
    assert first_batch([]) is None
    assert first_batch(None) is None


def test_groups_of_a_factory_are_known_before_it_is_called() -> None:
    model = mlp(5, 8, 1)
    update = Update.supervised(
        torch.nn.functional.mse_loss, SGD, parameters=lambda engine: [{"params": model[1].parameters(), "lr": 0.5}]
    )
    known = Composition(Engine(update, model=model), None, reads_batch=False)
    assert {known.parameters[p]: name for p, name in known.optimized.items()} == {"1.weight": "main", "1.bias": "main"}


def test_evaluations_and_their_metrics_are_known() -> None:
    model = mlp(5, 8, 1)
    engine = build(model, Validation(evaluator_of(model), {"dev": batches(1), "test": batches(1)}, prefix="m_"))
    known = Composition(engine, None, reads_batch=False)
    assert [one.key for one in known.evaluations] == ["dev", "test"]
    assert known.produced == {"m_dev/loss": "validation", "m_test/loss": "validation"}
    assert not known.may_write_metrics
