"""FastDevRun: everything works once, nothing is written, and nothing is left switched off."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, Handler, Update, seed_everything
from signalfire.handlers import (
    Average,
    Checkpoint,
    EarlyStopping,
    FastDevRun,
    GradientAccumulation,
    LimitBatches,
    LRScheduling,
    Metrics,
    OverfitBatches,
    Seeding,
    TensorBoardLogger,
    Validation,
    cosine_with_warmup,
    warmup,
)
from signalfire.testing import check_handler
from tests.kit import build, mlp, quick


def network() -> nn.Sequential:
    return mlp(5, 8, 1, nn.BatchNorm1d(8))


def loader(**options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(11)
    data = TensorDataset(torch.randn(30, 5, generator=generator), torch.randn(30, 1, generator=generator))
    return DataLoader(data, batch_size=3, shuffle=True, **options)


def batches(count: int = 6) -> list[tuple[Tensor, Tensor]]:
    return list(loader())[:count]


engine_of = partial(build, optimizer=partial(torch.optim.SGD, lr=0.05))


def whole(folder: Path, model: nn.Module, *handlers: Any) -> tuple[Engine, Engine]:
    """A trainer with everything, and its evaluator, which writes, too."""
    evaluator = Engine(Update.supervised(nn.functional.mse_loss), model=model)
    evaluator.attach(Metrics(loss=Average()), TensorBoardLogger(folder / "evaluations"))
    trainer = engine_of(
        model,
        Validation(evaluator, loader(num_workers=2)),
        LRScheduling(partial(OneCycleLR, max_lr=0.1)),
        EarlyStopping("loss", patience=5),
        Checkpoint(folder / "best", monitor="loss", name="best"),
        Checkpoint(folder / "last", every="1it", name="last"),
        TensorBoardLogger(folder / "events", every="1it"),
        *handlers,
    )
    return trainer, evaluator


@pytest.mark.moderate
@pytest.mark.parametrize("count", quick([1, 3], 3))
def test_it_runs_one_epoch_of_a_few_batches_of_everything_and_writes_nothing(tmp_path: Path, count: int) -> None:
    before = set(multiprocessing.active_children())
    model = network()
    trainer, evaluator = whole(tmp_path, model, FastDevRun(count))
    evaluated: list[int] = []
    evaluator.connect(Events.COMPLETED, lambda engine: evaluated.append(engine.state.iteration))
    seed_everything(1)
    state = trainer.run(loader(num_workers=2), max_epochs=20, min_epochs=5)
    assert (state.epoch, state.iteration, state.max_epochs, state.stop_reason) == (1, count, 1, None)
    assert trainer.updates[0].steps == count
    assert evaluated == [count]
    assert "loss" in state.metrics
    assert list(tmp_path.rglob("*")) == []
    assert set(multiprocessing.active_children()) == before

    reference = network()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
    schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=count)
    seed_everything(1)
    for number, (inputs, targets) in enumerate(loader(num_workers=2), start=1):
        nn.functional.mse_loss(reference(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == count:
            break
        schedule.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.moderate
def test_afterwards_everything_is_back(tmp_path: Path) -> None:
    trainer, evaluator = whole(tmp_path, network(), FastDevRun())
    trainer.run(loader(), max_epochs=20)
    assert all(handler.enabled for handler in (*trainer.handlers.values(), *evaluator.handlers.values()))
    assert not evaluator.dry_run
    trainer.detach("fast_dev_run")
    assert not trainer.dry_run
    trainer.reset()
    state = trainer.run(loader(), max_epochs=2)
    assert (state.epoch, state.iteration) == (2, 20)
    written = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert written >= {"best", "last", "events"}


@pytest.mark.slow
def test_after_an_error_nothing_stays_switched_off(tmp_path: Path) -> None:
    trainer, evaluator = whole(tmp_path, network(), FastDevRun())

    def fail(engine: Engine) -> None:
        raise ArithmeticError("on purpose")

    failing = evaluator.connect(Events.FORWARD_COMPLETED, fail)
    with pytest.raises(ArithmeticError):
        trainer.run(loader(), max_epochs=20)
    failing.detach()
    assert all(handler.enabled for handler in (*trainer.handlers.values(), *evaluator.handlers.values()))
    assert not evaluator.dry_run
    assert list(tmp_path.rglob("*")) == []
    trainer.reset()
    with trainer.without("fast_dev_run"):
        assert not trainer.dry_run
        assert trainer.run(loader(), max_epochs=2).iteration == 20
    assert trainer.dry_run


def test_a_dry_run_that_was_wanted_before_stays_so() -> None:
    trainer = engine_of(network())
    trainer.dry_run = True
    trainer.attach(FastDevRun()).detach()
    assert trainer.dry_run


def test_a_later_run_is_one_epoch_more() -> None:
    trainer = engine_of(network(), FastDevRun(2))
    for epoch in (1, 2, 3):
        state = trainer.run(batches(), max_epochs=20)
        assert (state.epoch, state.iteration) == (epoch, 2 * epoch)


class Unsized:
    def __iter__(self) -> Iterator[Any]:
        yield from batches()


@pytest.mark.parametrize("data", [Unsized(), iter(batches())], ids=["unsized", "iterator"])
@pytest.mark.parametrize("window", [1, 4])
def test_unsized_data_is_one_epoch_of_a_few_batches(data: Any, window: int) -> None:
    trainer = engine_of(network(), FastDevRun(2), GradientAccumulation(window))
    ended: list[int] = []
    trainer.connect(Events.EPOCH_COMPLETED, lambda engine: ended.append(engine.state.iteration))
    assert trainer.run(data, max_epochs=9).epoch == 1
    assert ended == [2]
    assert trainer.updates[0].steps == (2 if window == 1 else 1)


@pytest.mark.parametrize("data", [None, batches()], ids=["no data", "list"])
@pytest.mark.parametrize("length", [2, 50])
def test_a_given_epoch_length_is_cut_to_a_few_batches(data: Any, length: int) -> None:
    model = nn.Linear(5, 1)
    update = Update.from_function(
        lambda engine, batch: engine.model(torch.ones(2, 5)).sum(), partial(torch.optim.SGD, lr=0.1)
    )
    trainer = Engine(update, model=model, seed=0)
    trainer.attach(FastDevRun(2))
    ended: list[int] = []
    trainer.connect(Events.EPOCH_COMPLETED, lambda engine: ended.append(engine.state.iteration))
    state = trainer.run(data, max_epochs=9, epoch_length=length)
    assert (state.epoch, ended) == (1, [2])


def test_smaller_bounds_still_hold() -> None:
    assert engine_of(network(), FastDevRun(5)).run(batches(), max_iters=3).iteration == 3


def test_a_loaded_run_makes_one_epoch_more() -> None:
    saved = engine_of(network())
    saved.run(batches(), max_epochs=2)
    trainer = engine_of(network(), FastDevRun(2))
    trainer.load_state_dict(saved.state_dict())
    # Before the loaded position is announced, the bound is that of a new run.
    with pytest.warns(UserWarning, match="nothing to do"):
        state = trainer.run(batches(), max_epochs=20)
    assert (state.epoch, state.iteration) == (3, 14)


def test_an_evaluator_may_be_tried_alone(tmp_path: Path) -> None:
    evaluator = Engine(Update.supervised(nn.functional.mse_loss), model=network())
    evaluator.attach(Metrics(loss=Average()), TensorBoardLogger(tmp_path / "events"), FastDevRun(2))
    assert evaluator.run(batches()).iteration == 2
    assert list(tmp_path.rglob("*")) == []


def test_wrong_use_is_refused() -> None:
    for count in (0, -1, 0.5, True):
        kind = ValueError if type(count) is int else TypeError
        with pytest.raises(kind, match=rf"FastDevRun\(batches={count!r}\)"):
            FastDevRun(count)  # type: ignore[arg-type]
    trainer = engine_of(network())
    trainer.connect(Events.ITERATION_COMPLETED, lambda engine: engine.attach(FastDevRun()) and None)
    with pytest.raises(RuntimeError, match=r"'fast_dev_run'.*before run\(\)"):
        trainer.run(batches(), max_epochs=1)
    assert not trainer.dry_run


@pytest.mark.parametrize("every", ["2ep", "500it", "100st", "3h", "0.9ep", "1it"])
def test_it_validates_once_however_long_the_interval_is(every: str) -> None:
    model = network()
    evaluator = Engine(Update.supervised(nn.functional.mse_loss), model=model)
    evaluator.attach(Metrics(loss=Average()))
    evaluated: list[int] = []
    evaluator.connect(Events.COMPLETED, lambda engine: evaluated.append(engine.state.iteration))
    trainer = engine_of(
        model, FastDevRun(1), Validation(evaluator, loader(), every=every), EarlyStopping("loss", mode="min")
    )
    for epoch in (1, 2):
        assert trainer.run(batches(), max_epochs=20).epoch == epoch
    assert evaluated == [1, 1]


def test_it_validates_also_where_a_smaller_bound_ends_the_run() -> None:
    model = network()
    evaluator = Engine(Update.supervised(nn.functional.mse_loss), model=model)
    evaluator.attach(Metrics(loss=Average()))
    trainer = engine_of(model, FastDevRun(5), Validation(evaluator, loader(), every="9ep"))
    assert "loss" in trainer.run(batches(), max_iters=2).metrics


def test_handlers_of_the_users_own_are_rehearsed_while_they_are_enabled() -> None:
    class Rare(Handler):
        rehearsed = 0

        def rehearse(self, engine: Engine) -> None:
            self.rehearsed += 1

    trainer = engine_of(network(), FastDevRun(), Rare(), rare := Rare(name="disabled"))
    rare.enabled = False
    trainer.run(batches(), max_epochs=2)
    assert trainer.find(FastDevRun).engine is trainer
    assert [handler.rehearsed for handler in trainer.handlers.values() if isinstance(handler, Rare)] == [2, 0]


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("make", "trained", "evaluated", "afterwards"),
    [
        (lambda: LimitBatches(2, 1), 2, 1, 2),
        (lambda: LimitBatches(9, 9), 3, 3, 9),
        (lambda: OverfitBatches(2, validation=True), 2, 2, 2),
    ],
    ids=["few", "many", "overfit"],
)
def test_other_limits_may_be_attached_beside_it(
    make: Callable[[], Handler], trained: int, evaluated: int, afterwards: int
) -> None:
    losses = []
    for order in (1, -1):
        model = network()
        evaluator = Engine(Update.supervised(nn.functional.mse_loss), model=model)
        evaluator.attach(Metrics(loss=Average()))
        lengths: list[int] = []
        evaluator.connect(Events.COMPLETED, lambda engine, lengths=lengths: lengths.append(engine.state.iteration))
        trainer = engine_of(model, *[FastDevRun(3), make(), Validation(evaluator, loader())][::order])
        seed_everything(0)
        state = trainer.run(loader(), max_epochs=5)
        assert (state.iteration, lengths) == (trained, [evaluated])
        losses.append(state.metrics["loss"])
        trainer.detach("fast_dev_run")
        trainer.reset()
        assert trainer.run(loader(), max_epochs=1).iteration == afterwards
    assert losses[0] == losses[1]


def test_a_schedule_that_needs_more_steps_is_built_for_the_run_that_is_tried() -> None:
    for make, expected in (
        (partial(cosine_with_warmup, warmup=20), 1 / 21),
        (partial(warmup, 20, then=partial(torch.optim.lr_scheduler.CosineAnnealingLR)), 1 / 21),
        (partial(cosine_with_warmup, warmup=0.5), 1.0),  # which fits one step
    ):
        rates: list[float] = []
        schedule = LRScheduling(make())
        trainer = engine_of(network(), FastDevRun(), schedule, optimizer=partial(torch.optim.SGD, lr=1.0))
        trainer.connect(
            Events.OPTIMIZER_STEP_STARTED,
            lambda engine, rates=rates: rates.append(engine.updates[0].optimizer.param_groups[0]["lr"]),
        )
        trainer.run(batches(), max_epochs=9)
        assert rates == [pytest.approx(expected)]
    with pytest.raises(ValueError, match="add up to 99 steps, but the run has only 54"):
        engine_of(network(), FastDevRun(), LRScheduling(cosine_with_warmup(warmup=99))).run(batches(), max_epochs=9)
    with pytest.raises(ValueError, match="add up to 99 steps, but the run has only 6"):
        engine_of(network(), LRScheduling(cosine_with_warmup(warmup=99))).run(batches(), max_epochs=1)


def test_a_schedule_by_epochs_is_built_for_the_run_that_is_tried() -> None:
    schedule = LRScheduling(cosine_with_warmup(warmup=3), every="1ep")
    assert engine_of(network(), FastDevRun(), schedule).run(batches(), max_epochs=9).epoch == 1
    assert schedule.total == 9


def test_it_is_listed_as_a_finding() -> None:
    trainer = engine_of(network(), FastDevRun())
    trainer.run(batches(), max_epochs=9)
    (found,) = trainer.findings.of_run().of("W58")
    assert "nothing is written" in found.sentence


@pytest.mark.moderate
def test_it_keeps_its_promises() -> None:
    check_handler(
        lambda: engine_of(network(), Seeding(), GradientAccumulation(2)),
        lambda: FastDevRun(3),
        batches(),
        max_epochs=2,
    )
