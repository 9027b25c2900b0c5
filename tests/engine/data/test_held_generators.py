"""Generators that data sets, transforms and samplers hold are part of the position in the data."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset

from signalfire import Engine, Events
from signalfire.data.held_generators import HeldGenerators, held_generators
from signalfire.handlers import GradientAccumulation
from tests.kit import build

GLOBAL = np.random.default_rng(5)


class Noisy(Dataset[Tensor]):
    """Adds noise from a generator of its own."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return torch.full((5,), index + self.draw()), torch.ones(1)


class WithGlobal(Noisy):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return torch.full((5,), index + GLOBAL.random()), torch.ones(1)


class Transform:
    """As MONAI's and albumentations' transforms: the generator is an attribute."""

    def __init__(self, generator: Any) -> None:
        self.R = generator

    def __call__(self) -> float:
        return float(self.R.uniform(0, 1))


class Stream(IterableDataset[Tensor]):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(8):
            yield torch.full((5,), self.rng.random()), torch.ones(1)


class Order(Sampler[int]):
    def __init__(self) -> None:
        self.rng = random.Random(0)

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.sample(range(8), 8))


def of_torch() -> Callable[[], float]:
    generator = torch.Generator().manual_seed(0)
    return lambda: torch.rand((), generator=generator).item()


def with_global() -> Dataset[Any]:
    GLOBAL.bit_generator.state = np.random.default_rng(5).bit_generator.state
    return WithGlobal(float)


DATA: dict[str, Callable[[], Any]] = {
    "numpy": lambda: Noisy(np.random.default_rng(0).random),
    "transform": lambda: Noisy(Transform(np.random.default_rng(0))),
    "legacy": lambda: Noisy(Transform(np.random.RandomState(0))),
    "python": lambda: Noisy(Transform(random.Random(0))),
    "torch, in a closure": lambda: Noisy(of_torch()),
    "partial": lambda: Noisy(partial(Transform(random.Random(0)).R.uniform, 0, 1)),
    "subset": lambda: Subset(Noisy(Transform(random.Random(0))), range(8)),
    "global": with_global,
}


def batches_seen(engine: Engine) -> list[Tensor]:
    seen: list[Tensor] = []
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: seen.append(engine.state.batch[0].clone()))
    return seen


def resumed_equals_whole(
    loader: Callable[[], Any], cut: int, *handlers: Callable[[], Any], epoch_length: int | None = None
) -> None:
    def engine() -> Engine:
        return build(nn.Linear(5, 1), *(make() for make in handlers))

    whole, first, second = engine(), engine(), engine()
    expected, before, after = batches_seen(whole), batches_seen(first), batches_seen(second)
    torch.manual_seed(0)
    whole.run(loader(), max_epochs=3, epoch_length=epoch_length)
    torch.manual_seed(0)
    first.run(loader(), max_iters=cut, epoch_length=epoch_length)
    second.load_state_dict(first.state_dict())
    second.run(loader(), max_epochs=3, epoch_length=epoch_length)
    assert torch.equal(torch.stack(before + after), torch.stack(expected))


@pytest.mark.parametrize("cut", [1, 4, 6, 11])
@pytest.mark.parametrize("kind", DATA)
def test_a_resumed_run_draws_the_same_augmentation(kind: str, cut: int) -> None:
    resumed_equals_whole(lambda: DataLoader(DATA[kind](), 2, shuffle=True), cut)


@pytest.mark.filterwarnings("ignore::signalfire.RereadingWarning")
@pytest.mark.parametrize("cut", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("window", [1, 3])
def test_also_where_the_data_is_read_again_or_ahead(cut: int, window: int) -> None:
    resumed_equals_whole(lambda: DataLoader(Stream(), 2), cut, partial(GradientAccumulation, window))


@pytest.mark.parametrize("epoch_length", [None, 3])
@pytest.mark.parametrize("cut", [1, 3, 4, 5, 8])
def test_a_sampler_with_a_generator_of_its_own_draws_the_same_order(cut: int, epoch_length: int | None) -> None:
    def loader() -> Any:
        return DataLoader(Noisy(Transform(np.random.default_rng(1))), 2, sampler=Order())

    resumed_equals_whole(loader, cut, epoch_length=epoch_length)


def test_a_second_run_keeps_what_the_user_has_seeded_between_them() -> None:
    data = Noisy(Transform(random.Random(0)))
    engine = build(nn.Linear(5, 1))
    engine.run(DataLoader(data, 2), max_epochs=1)
    data.draw.R.seed(7)  # type: ignore[attr-defined]
    seen = batches_seen(engine)
    engine.run(DataLoader(data, 2), max_epochs=2)
    assert seen[0][0, 0].item() == pytest.approx(random.Random(7).uniform(0, 1))


def test_generators_are_found_where_they_are_and_global_ones_are_not() -> None:
    data = DataLoader(Noisy(Transform(random.Random(0))), generator=torch.Generator())
    assert list(held_generators(data)) == ["dataset.draw.R"]
    assert not held_generators(DataLoader(Noisy(random.random)))
    assert not held_generators(DataLoader(Noisy(np.random.random)))
    assert not held_generators([1, 2])
    assert not held_generators(None)
    assert not HeldGenerators(DataLoader(Noisy(float), shuffle=True))


def test_states_are_plain_values() -> None:
    for make in (np.random.default_rng, np.random.RandomState, random.Random):
        data = [Transform(make(3))]
        held = HeldGenerators(Noisy(data[0]))
        states, expected = held.states(), [data[0]() for _ in range(3)]
        held.put_back(states)
        assert [data[0]() for _ in range(3)] == expected
