"""JSONLinesLogger: what its records say. What it promises over stops and resumes is in _common/test_text_logs.py."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from signalfire import Engine, Events
from signalfire.handlers import JSONLinesLogger, LRScheduling
from tests import kit
from tests.kit import build, linear

batches = partial(kit.batches, targets=2)


def engine_of(*handlers: Any) -> Engine:
    return build(linear(5, 2), *handlers)


def refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def records(path: Path) -> list[dict[str, Any]]:
    """As a strict parser reads them."""
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_losses_and_rates_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    engine_of(JSONLinesLogger(path, every="4it"), LRScheduling(partial(ExponentialLR, gamma=0.9))).run(
        batches(), max_epochs=2
    )
    torch.manual_seed(3)
    model = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = ExponentialLR(optimizer, gamma=0.9)
    expected = []
    for number in range(12):
        inputs, targets = batches()[number % 6]
        loss = nn.functional.mse_loss(model(inputs), targets)
        place = {"epoch": 1 + number // 6, "iteration": number + 1, "step": number + 1}
        expected.append(place | {"train/loss": loss.item(), "lr": optimizer.param_groups[0]["lr"]})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert records(path) == expected[3::4]
    assert [list(record) for record in records(path)] == [list(expected[0])] * 3


def test_metrics_are_records_of_their_own_and_values_that_are_not_finite_are_strings(tmp_path: Path) -> None:
    engine = engine_of(JSONLinesLogger(tmp_path / "log", every="100it"))

    @engine.on(Events.EPOCH_COMPLETED(once=1))
    def measure(engine: Engine) -> None:
        engine.state.metrics.update({"a": math.nan, "b": math.inf, "c": -math.inf, "d": torch.tensor(0.5), "e": "text"})

    engine.run(batches(), max_epochs=2)
    (record,) = records(tmp_path / "log")
    assert record == {
        "epoch": 1,
        "iteration": 6,
        "step": 6,
        "train/a": "NaN",
        "train/b": "Infinity",
        "train/c": "-Infinity",
        "train/d": 0.5,
    }
    assert math.isnan(float(record["train/a"]))
    assert float(record["train/c"]) == -math.inf
