"""CSVLogger: what its rows say. What it promises over stops and resumes is in _common/test_text_logs.py."""

from __future__ import annotations

import csv
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from signalfire import Engine, Events, Update
from signalfire.handlers import Average, CSVLogger, GradientAccumulation, LRScheduling, Metrics
from tests import kit
from tests.kit import build, linear

batches = partial(kit.batches, targets=2)


def engine_of(*handlers: Any) -> Engine:
    return build(linear(5, 2), *handlers)


def rows(path: Path) -> list[list[str]]:
    with open(path, newline="") as file:
        return list(csv.reader(file))


@pytest.mark.parametrize("logger_first", [True, False])
def test_losses_rates_and_metrics_are_those_of_a_plain_loop(tmp_path: Path, logger_first: bool) -> None:
    handlers = [
        CSVLogger(tmp_path / "log.csv", every="2it"),
        LRScheduling(partial(ExponentialLR, gamma=0.9)),
        GradientAccumulation(3),
        Metrics(train_loss=Average()),
    ]
    engine_of(*(handlers if logger_first else reversed(handlers))).run(batches(), max_epochs=2)

    torch.manual_seed(3)
    model = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = ExponentialLR(optimizer, gamma=0.9)
    expected = [["epoch", "iteration", "step", "name", "value"]]
    iteration = steps = 0
    for epoch in (1, 2):
        losses = []
        for inputs, targets in batches():
            iteration += 1
            loss = nn.functional.mse_loss(model(inputs), targets)
            losses.append(loss.item())
            loss.backward()
            rate = optimizer.param_groups[0]["lr"]
            if iteration % 3 == 0:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.div_(3)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                steps += 1
            if iteration % 2 == 0:
                place = [str(epoch), str(iteration), str(steps)]
                expected += [[*place, "train/loss", repr(losses[-1])], [*place, "lr", repr(rate)]]
        mean = (torch.tensor(losses, dtype=torch.float64).sum() / 6).item()
        expected.append([str(epoch), str(iteration), str(steps), "train/train_loss", repr(mean)])
    found = rows(tmp_path / "log.csv")
    assert [row[:4] for row in found] == [row[:4] for row in expected]
    for row, other in zip(found[1:], expected[1:], strict=True):
        if row[3].startswith("metrics"):  # a mean may be added up in another order
            assert float(row[4]) == pytest.approx(float(other[4]), rel=1e-6)
        else:
            assert row[4] == other[4]


def test_a_name_may_come_later_and_may_hold_anything_and_values_need_not_be_finite(tmp_path: Path) -> None:
    engine = engine_of(CSVLogger(tmp_path / "log.csv", every="100it"))
    values = {'a "name", with a comma': 0.1, "b": math.nan, "c": math.inf, "d": -math.inf, "e": "no number"}

    @engine.on(Events.EPOCH_COMPLETED(once=2))
    def measure(engine: Engine) -> None:
        engine.state.metrics.update(values)

    engine.run(batches(), max_epochs=2)
    assert rows(tmp_path / "log.csv")[1:] == [
        ["2", "12", "12", 'train/a "name", with a comma', "0.1"],
        ["2", "12", "12", "train/b", "nan"],
        ["2", "12", "12", "train/c", "inf"],
        ["2", "12", "12", "train/d", "-inf"],
    ]


def test_the_file_is_complete_at_any_moment_of_the_run(tmp_path: Path) -> None:
    engine = engine_of(CSVLogger(tmp_path / "log.csv", every="1it"))
    found: list[int] = []
    engine.connect(Events.ITERATION_STARTED(after=1), lambda engine: found.append(len(rows(tmp_path / "log.csv"))))
    engine.run(batches(), max_epochs=1)
    assert found == [3, 5, 7, 9, 11]


def values_of(path: Path, name: str) -> list[float]:
    with open(path) as file:
        return [float(row["value"]) for row in csv.DictReader(file) if row["name"] == name]


def test_the_mean_loss_of_an_epoch_stands_beside_that_of_its_last_batch(tmp_path: Path) -> None:
    engine = build(linear(5, 1), Metrics(loss=Average()), CSVLogger(tmp_path / "log.csv", every="1it"))
    engine.run(kit.batches(3), max_epochs=1, check=False)
    losses = values_of(tmp_path / "log.csv", "train/loss")
    assert len(losses) == 3
    assert values_of(tmp_path / "log.csv", "train/loss_epoch") == [pytest.approx(sum(losses) / 3)]


def test_an_engine_that_evaluates_logs_under_val(tmp_path: Path) -> None:
    evaluator = Engine(Update.supervised(nn.functional.mse_loss), model=linear(5, 1))
    evaluator.attach(Metrics(loss=Average()), CSVLogger(tmp_path / "log.csv", every="1it"))
    evaluator.run(kit.batches(3), check=False)
    losses = values_of(tmp_path / "log.csv", "val/batch_loss")
    assert len(losses) == 3
    assert values_of(tmp_path / "log.csv", "val/loss") == [pytest.approx(sum(losses) / 3)]
    assert values_of(tmp_path / "log.csv", "train/loss") == []
