"""OverfitBatches: the same batches in every epoch, against a plain loop over a list of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, Update, seed_everything
from signalfire.authoring.randomness import derived_seed
from signalfire.handlers import (
    Average,
    GradientAccumulation,
    LimitBatches,
    Metrics,
    OverfitBatches,
    Seeding,
    Validation,
)
from signalfire.testing import check_handler
from tests.kit import build, evaluator_of, mlp, quick

Batches = list[tuple[Tensor, Tensor]]


def network() -> nn.Sequential:
    return mlp(5, 8, 1, nn.Dropout(0.2))


class Augmented(TensorDataset):
    """Adds noise to every sample, as augmentation does."""

    def __getitem__(self, index: Any) -> Any:
        inputs, targets = super().__getitem__(index)  # type: ignore[no-untyped-call]
        return inputs + 0.1 * torch.randn(5), targets


def loader(*, own_generator: bool = False, workers: int = 0) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(11)
    data = Augmented(torch.randn(30, 5, generator=generator), torch.randn(30, 1, generator=generator))
    return DataLoader(
        data, batch_size=3, shuffle=True, generator=generator if own_generator else None, num_workers=workers
    )


engine_of = partial(build, optimizer=partial(torch.optim.Adam, lr=0.02), seed=7)


def plain_loop_batches(data: DataLoader[Any], count: int, seed: int = 7) -> Batches:
    """The first batches as the documented streams give them."""
    seed = derived_seed(seed, "overfit_batches")
    seed_everything(seed % 2**32)
    if isinstance(data.generator, torch.Generator):
        data.generator.manual_seed(seed)
    return list(islice(data, count))


@pytest.mark.moderate
@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_it_equals_a_plain_loop_over_the_same_batches(own_generator: bool, workers: int) -> None:
    data = plain_loop_batches(loader(own_generator=own_generator, workers=workers), 2)
    reference = network()
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.02)
    seed_everything(1)
    for inputs, targets in data * 4:
        nn.functional.mse_loss(reference(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = network()
    seed_everything(1)
    state = engine_of(model, OverfitBatches(2)).run(loader(own_generator=own_generator, workers=workers), max_epochs=4)
    assert (state.iteration, state.epoch_length) == (8, 2)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_a_model_that_can_learn_overfits() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1))
    engine = engine_of(model, OverfitBatches(1), Metrics(loss=Average()))
    engine.run(loader(), max_epochs=300)
    assert engine.state.metrics["loss"] < 1e-3


def batches_of(engine: Engine, data: Any, **bounds: Any) -> list[Tensor]:
    seen: list[Tensor] = []
    with engine.connect(Events.ITERATION_STARTED, lambda engine: seen.append(engine.state.batch[0].clone())):
        engine.run(data, **bounds)
    return seen


def test_the_batches_depend_on_the_runs_seed_alone() -> None:
    def drawn(seed: int, *handlers: Any) -> Tensor:
        torch.manual_seed(123 + seed + len(handlers))
        return batches_of(engine_of(network(), OverfitBatches(), *handlers, seed=seed), loader(), max_epochs=1)[0]

    assert torch.equal(drawn(1), drawn(1, Seeding(), GradientAccumulation(2)))
    assert not torch.equal(drawn(1), drawn(2))


def test_nothing_else_draws_differently() -> None:
    data = loader(own_generator=True)
    assert isinstance(data.generator, torch.Generator)
    engine = engine_of(nn.Linear(5, 1), OverfitBatches())
    torch.manual_seed(0)
    expected, position = torch.get_rng_state(), data.generator.get_state()
    engine.run(data, max_epochs=2)
    assert torch.equal(torch.get_rng_state(), expected)
    assert torch.equal(data.generator.get_state(), position)


def test_a_later_run_goes_on_with_the_same_batches() -> None:
    engine, data = engine_of(network(), OverfitBatches(2)), loader()
    first = batches_of(engine, data, max_epochs=1)
    second = batches_of(engine, data, max_epochs=2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("own", [False, True])
def test_evaluations_are_made_on_these_batches_if_wanted(own: bool) -> None:
    model = network()
    evaluator = evaluator_of(model)
    seen: list[Tensor] = []
    evaluator.connect(Events.ITERATION_STARTED, lambda engine: seen.append(engine.state.batch[0].clone()))
    other = [(torch.ones(2, 5), torch.ones(2, 1))]
    engine = engine_of(
        model, OverfitBatches(2, validation=own), Validation(evaluator, other, at_start=True, every="1ep")
    )
    trained = batches_of(engine, loader(), max_epochs=1)
    expected = trained * 2 if own else [other[0][0]] * 2
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))


class Unsized:
    def __iter__(self) -> Iterator[Any]:
        for _ in range(9):
            yield torch.randn(2, 5), torch.ones(2, 1)


@pytest.mark.parametrize("data", [Unsized(), iter(Unsized())], ids=["unsized", "iterator"])
def test_unsized_data_and_iterators_are_read_once(data: Any) -> None:
    seen = batches_of(engine_of(network(), OverfitBatches(2), GradientAccumulation(2)), data, max_epochs=3)
    assert len(seen) == 6
    assert all(torch.equal(a, b) for a, b in zip(seen[:4], seen[2:], strict=True))
    assert not torch.equal(seen[0], seen[1])


def test_less_data_than_asked_for_is_taken_whole() -> None:
    data = [(torch.ones(2, 5), torch.ones(2, 1))] * 3
    assert engine_of(network(), OverfitBatches(9)).run(data, max_epochs=2).iteration == 6


def test_detached_it_keeps_no_batch_and_trains_on_everything() -> None:
    handler = OverfitBatches(2)
    engine = engine_of(network(), handler)
    engine.run(loader(), max_epochs=1)
    engine.detach(handler)
    assert handler._kept is None
    assert engine.run(loader(), max_epochs=2).iteration == 12


def test_wrong_use_is_refused() -> None:
    for count in (0, -1, 0.5, True):
        kind = ValueError if type(count) is int else TypeError
        with pytest.raises(kind, match=rf"OverfitBatches\(count={count!r}\)"):
            OverfitBatches(count)  # type: ignore[arg-type]
    engine = engine_of(network(), OverfitBatches())
    with pytest.raises(ValueError, match=r"'overfit_batches'.*no data"):
        engine.run(max_epochs=1, epoch_length=3)
    with pytest.raises(
        ValueError, match="both 'overfit_batches' and 'limit_batches' control the data that a run iterates over"
    ):
        engine.attach(LimitBatches(2))
    both = engine_of(network(), OverfitBatches(validation=True))
    with pytest.raises(ValueError, match="control the evaluation data"):
        both.attach(LimitBatches(validation=2))
    with pytest.raises(ValueError, match="for training"):
        Engine(Update.prediction()).attach(OverfitBatches())


@pytest.mark.moderate
@pytest.mark.parametrize("own_generator", quick([False, True], True))
def test_it_keeps_its_promises(own_generator: bool) -> None:
    class Fresh:
        """A loader that begins the same in every process."""

        def __iter__(self) -> Iterator[Any]:
            return iter(loader(own_generator=own_generator))

        def __len__(self) -> int:
            return 10

    check_handler(
        lambda: engine_of(network(), GradientAccumulation(2)),
        lambda: OverfitBatches(3),
        Fresh(),
        max_epochs=3,
    )
