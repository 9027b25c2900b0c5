"""Workers that each read a whole iterable data set are seen by their first batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from signalfire import Events
from signalfire.handlers import Validation
from tests.kit import build, linear


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return ((torch.full((5,), float(number)), torch.ones(1)) for number in range(8))


class Divided(Numbers):
    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        count, place = (1, 0) if worker is None else (worker.num_workers, worker.id)
        return (one for number, one in enumerate(super().__iter__()) if number % count == place)


class Shuffled(Numbers):
    """In each worker in another order."""

    def __iter__(self) -> Iterator[Any]:
        rows = list(super().__iter__())
        return (rows[place] for place in torch.randperm(8).tolist())


class Drawn(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return ((torch.randn(5), torch.ones(1)) for _ in range(4))


class Wrapped(IterableDataset[Any]):
    """What it wraps may divide itself."""

    def __init__(self) -> None:
        self.inner = Divided()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)


def same_seed(worker: int) -> None:
    torch.manual_seed(0)


def loader(data: Any, workers: int = 2, **options: Any) -> Any:
    context = "fork" if workers else None
    return DataLoader(data, 2, num_workers=workers, multiprocessing_context=context, **options)


@pytest.mark.moderate
@pytest.mark.whole
@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: loader(Numbers()), ["W26"]),
        (lambda: loader(Numbers(), workers=3), ["W26"]),
        (lambda: loader(Numbers(), workers=1), []),
        (lambda: loader(Numbers(), workers=0), []),
        (lambda: loader(Numbers(), worker_init_fn=same_seed), []),  # which may divide it
        (lambda: loader(Divided()), []),
        (lambda: loader(Wrapped()), []),
        (lambda: loader(Shuffled()), []),
        (lambda: loader(Drawn()), []),
    ],
    ids=["whole", "three", "one", "none", "initialized", "divided", "wrapped", "shuffled", "drawn"],
)
def test_workers_that_read_everything_are_reported(make: Callable[[], Any], found: list[str]) -> None:
    for act in (train, evaluate):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            act(make())
        assert [str(one.message)[:3] for one in caught if "W26" in str(one.message)] == found, act


def train(data: Any) -> None:
    build(linear(5, 1)).run(data, max_epochs=2)


def evaluate(data: Any) -> None:
    engine = build(linear(5, 1), Validation(data))
    engine.run([(torch.randn(2, 5), torch.ones(1))] * 2, max_epochs=1)


@pytest.mark.moderate
@pytest.mark.parametrize("iterations", [1, 3])
def test_nothing_of_it_is_left(iterations: int) -> None:
    engine = build(linear(5, 1))
    before = len(engine.signal(Events.GET_BATCH_COMPLETED).connections)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.run(loader(Numbers()), max_iters=iterations)
    assert len(engine.signal(Events.GET_BATCH_COMPLETED).connections) == before
    assert len(engine.findings.of_run().of("W26")) == (iterations > 1)
