"""LimitBatches against plain PyTorch loops over the first batches of a loader."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, ReloadedData, Update, seed_everything
from signalfire.handlers import (
    Average,
    DeviceTransfer,
    GradientAccumulation,
    LimitBatches,
    LRScheduling,
    Metrics,
    OverfitBatches,
    Validation,
)
from signalfire.testing import check_handler
from tests.kit import assert_same, build, mlp, quick

Batches = list[tuple[Tensor, Tensor]]


def network() -> nn.Sequential:
    return mlp(5, 8, 1, nn.Dropout(0.5))


def dataset(size: int = 30) -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    return TensorDataset(torch.randn(size, 5, generator=generator), torch.randn(size, 1, generator=generator))


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(dataset(), batch_size=3, shuffle=True, **options)


def batches(count: int = 6) -> Batches:
    return [dataset()[3 * i : 3 * i + 3] for i in range(count)]


engine_of = partial(build, optimizer=partial(torch.optim.SGD, lr=0.05))


def evaluator_of(model: nn.Module) -> Engine:
    engine = Engine(Update.supervised(nn.functional.mse_loss), model=model)
    engine.attach(Metrics(loss=Average()))
    return engine


def plain_loop(data: Any, count: int, *, epochs: int = 3, window: int = 1) -> nn.Sequential:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seed_everything(1)
    for _ in range(epochs):
        for number, (inputs, targets) in enumerate(islice(data, count), start=1):
            nn.functional.mse_loss(model(inputs), targets).backward()
            if number % window == 0 or number == count:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.div_((number - 1) % window + 1)
                optimizer.step()
                optimizer.zero_grad()
    return model


OPTIONS: list[dict[str, Any]] = [
    {},
    {"generator": True},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True},
]


def loader_with(options: dict[str, Any]) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5) if "generator" in options else None
    return loader(**(options | {"generator": generator}))


@pytest.mark.moderate
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("limit", "count"), quick([(4, 4), (0.45, 4)], (0.45, 4)))
def test_each_epoch_takes_the_first_batches_of_a_new_shuffle(options: dict[str, Any], limit: float, count: int) -> None:
    model = network()
    engine = engine_of(model, LimitBatches(limit))
    seed_everything(1)
    assert engine.run(loader_with(options), max_epochs=3).iteration == 3 * count
    assert_same(model, plain_loop(loader_with(options), count))


def test_a_window_closes_with_the_last_batch_that_is_taken() -> None:
    model = network()
    engine = engine_of(model, LimitBatches(4), GradientAccumulation(3), DeviceTransfer("cpu"))
    seed_everything(1)
    engine.run(loader(), max_epochs=3)
    assert engine.updates[0].steps == 6
    assert_same(model, plain_loop(loader(), 4, window=3))


class Unsized:
    """Data without a length."""

    def __iter__(self) -> Iterator[Any]:
        yield from batches()


def test_unsized_data_is_limited_by_a_number() -> None:
    for handlers in ([], [GradientAccumulation(3)]):
        model = network()
        engine = engine_of(model, LimitBatches(4), *handlers)
        ends: list[int] = []
        engine.connect(Events.EPOCH_COMPLETED, lambda engine, ends=ends: ends.append(engine.state.iteration))
        seed_everything(1)
        engine.run(Unsized(), max_epochs=2)
        assert ends == [4, 8]
        assert_same(model, plain_loop(Unsized(), 4, epochs=2, window=3 if handlers else 1))


@pytest.mark.parametrize(
    ("limit", "length", "taken"),
    [(0.29, 100, 29), (0.1, 30, 3), (0.01, 30, 1), (1.0, 30, 30), (0.999, 30, 29), (1, 30, 1), (99, 30, 30)],
)
def test_a_share_is_that_of_the_length_exactly(limit: float, length: int, taken: int) -> None:
    engine = engine_of(network(), LimitBatches(limit))
    assert engine.run(batches(1) * length, max_epochs=1).iteration == taken
    assert engine.state.epoch_length == taken


def test_evaluations_have_a_limit_of_their_own() -> None:
    model = network()
    evaluator = evaluator_of(model)
    seen: list[int] = []
    evaluator.connect(Events.COMPLETED, lambda engine: seen.append(engine.state.iteration))
    engine = engine_of(model, LimitBatches(validation=2), Validation(evaluator, batches()))
    assert engine.run(batches(5), max_epochs=2).iteration == 10
    assert seen == [2, 2]
    with engine.without("limit_batches"):
        engine.run(batches(5), max_epochs=3)
    engine.detach("limit_batches")
    engine.attach(LimitBatches(2, 0.5))
    engine.run(batches(5), max_epochs=4)
    assert engine.state.iteration == 17
    assert seen == [2, 2, 6, 3]


def test_on_an_evaluator_it_limits_what_is_evaluated() -> None:
    evaluator = evaluator_of(network())
    evaluator.attach(LimitBatches(train=1, validation=3))
    assert evaluator.run(batches()).iteration == 3


def test_a_schedule_knows_the_limited_length() -> None:
    model = network()
    schedule = LRScheduling(partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1))
    engine_of(model, LimitBatches(3), schedule).run(batches(), max_epochs=2)
    assert schedule.scheduler.total_steps == 6


def test_a_given_epoch_length_stays_and_the_limited_data_starts_again() -> None:
    order: list[float] = []
    engine = engine_of(network(), LimitBatches(2))
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: order.append(engine.state.batch[0][0, 0].item()))
    engine.run(batches(), max_epochs=1, epoch_length=5)
    first, second = (batch[0][0, 0].item() for batch in batches(2))
    assert order == [first, second, first, second, first]


@pytest.mark.moderate
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_end_with_the_last_batch_that_is_taken_unless_they_are_persistent(persistent: bool) -> None:
    before = set(multiprocessing.active_children())
    data = loader(num_workers=2, persistent_workers=persistent)
    engine = engine_of(network(), LimitBatches(2))
    alive: list[int] = []
    engine.connect(
        Events.ITERATION_COMPLETED,
        lambda engine: alive.append(len(set(multiprocessing.active_children()) - before)),
    )
    engine.run(data, max_epochs=2)
    assert alive == ([2, 2, 2, 2] if persistent else [2, 0, 2, 0])


@pytest.mark.moderate
def test_no_worker_is_left_behind_by_an_error() -> None:
    before = set(multiprocessing.active_children())
    engine = engine_of(network(), LimitBatches(5))

    def fail(engine: Engine) -> None:
        raise ArithmeticError("on purpose")

    engine.connect(Events.ITERATION_COMPLETED(once=2), fail)
    with pytest.raises(ArithmeticError):
        engine.run(loader(num_workers=2), max_epochs=2)
    del engine
    assert set(multiprocessing.active_children()) == before


def test_what_cannot_be_limited_is_refused_before_the_first_batch() -> None:
    engine = engine_of(network(), LimitBatches(0.5))
    with pytest.raises(ValueError, match=r"'limit_batches': train=0\.5.*Unsized.*number of batches"):
        engine.run(Unsized(), max_epochs=1)
    engine = engine_of(network(), LimitBatches(2))
    with pytest.raises(TypeError, match=r"'limit_batches': train=2.*iterator"):
        engine.run(iter(batches()), max_epochs=1)
    with pytest.raises(ValueError, match=r"'limit_batches': train=2.*epoch_length="):
        engine.run(max_epochs=1, epoch_length=3)
    assert engine.state.epoch == 0


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (TypeError, {}),
        (TypeError, {"train": True}),
        (TypeError, {"train": "0.5"}),
        (ValueError, {"train": 0}),
        (ValueError, {"validation": -1}),
        (ValueError, {"train": 0.0}),
        (ValueError, {"validation": 1.5}),
        (ValueError, {"train": float("nan")}),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(error: type[Exception], options: dict[str, Any]) -> None:
    with pytest.raises(error, match=f"LimitBatches\\({next(iter(options), '')}"):
        LimitBatches(**options)


def test_data_that_is_reloaded_is_limited_in_each_epoch() -> None:
    loaded: list[int] = []

    def load(epoch: int) -> Batches:
        loaded.append(epoch)
        return batches(2 + epoch)

    assert engine_of(network(), LimitBatches(3)).run(ReloadedData(load), max_epochs=3).iteration == 2 + 3 + 3
    assert loaded == [0, 1, 2]


def test_two_refuse_each_other() -> None:
    engine = engine_of(network(), LimitBatches(2))
    with pytest.raises(ValueError, match="both 'limit_batches' and 'other'"):
        engine.attach(LimitBatches(3, name="other"))
    engine.detach("limit_batches")
    assert engine.run(batches(), max_epochs=1).iteration == 6


@pytest.mark.moderate
@pytest.mark.parametrize("order", [1, -1])
def test_one_may_limit_the_training_and_another_the_validation(order: int) -> None:
    lengths = {}
    pairs: dict[str, list[Any]] = {
        "two": [LimitBatches(3), LimitBatches(validation=2, name="other")],
        "overfit": [OverfitBatches(3), LimitBatches(validation=2)],
        "one": [LimitBatches(3, 2)],
    }
    for name, handlers in pairs.items():
        model = network()
        evaluator = evaluator_of(model)
        evaluated: list[int] = []
        evaluator.connect(Events.COMPLETED, lambda engine, into=evaluated: into.append(engine.state.iteration))
        trainer = engine_of(model, *[*handlers, Validation(evaluator, batches(5))][::order])
        trainer.run(batches(5), max_epochs=2)
        lengths[name] = (trainer.state.iteration, evaluated)
    assert lengths == dict.fromkeys(("two", "overfit", "one"), (6, [2, 2]))


def test_a_limit_that_is_set_after_the_handler_was_attached_without_it_is_refused() -> None:
    handler = LimitBatches(3)
    engine = engine_of(network(), handler)
    handler.train = 2
    assert engine.run(batches(5), max_epochs=1).iteration == 2
    handler.validation = 2
    with pytest.raises(ValueError, match="'limit_batches': validation=2 was set on a handler"):
        engine.run(batches(5), max_epochs=2)


@pytest.mark.moderate
@pytest.mark.parametrize("data", [batches(), DataLoader(dataset(), batch_size=3, shuffle=True)], ids=["list", "loader"])
def test_it_keeps_its_promises(data: Any) -> None:
    check_handler(
        lambda: engine_of(network(), GradientAccumulation(2)),
        lambda: LimitBatches(3),
        data,
        max_epochs=3,
    )


@pytest.mark.parametrize(
    ("train", "validation", "reported"),
    [(100, 50, []), (1.0, 1.0, []), (None, 50, []), (None, 1, ["validation=1"]), (2, 50, ["train=2"])],
)
def test_only_limits_that_leave_something_out_are_reported(train: Any, validation: Any, reported: list[str]) -> None:
    model = network()
    engine = engine_of(model, Validation(evaluator_of(model), batches(2)), LimitBatches(train, validation))
    engine.run(batches(), max_epochs=1)
    found = [one.sentence for one in engine.findings.of_run().of("W58")]
    assert found == [f"LimitBatches({one}) uses only part of the data" for one in reported]


def test_an_evaluation_of_less_than_the_limit_is_whole() -> None:
    evaluator = evaluator_of(network())
    evaluator.attach(LimitBatches(validation=50))
    evaluator.run(batches(2))
    assert not evaluator.findings.of_run().of("W58")
