"""Testing with the best checkpoint, in the same process and in a new one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Update, seed_everything
from signalfire.handlers import Average, Checkpoint, Metrics, Predictions, Validation
from tests import kit
from tests.kit import mlp

UPDATE = Update.supervised(nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.2))


def network() -> nn.Sequential:
    return mlp(5, 8, 1, nn.BatchNorm1d(8))


def batches(seed: int, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    return kit.batches(count, seed=seed)


def evaluator_of(model: nn.Module, *handlers: Any) -> Engine:
    engine = Engine(UPDATE.evaluation(), model=model)
    engine.attach(Metrics(loss=Average()), *handlers)
    return engine


def trained(folder: Path, keep: int = 1) -> tuple[Engine, Checkpoint, list[dict[str, Tensor]], list[float]]:
    """A trainer after its run, its checkpoints, and the weights and validation losses of every epoch."""
    model = network()
    trainer = Engine(UPDATE, model=model, seed=0)
    best = Checkpoint(folder, monitor="loss", keep=keep, name="best")
    trainer.attach(Validation(evaluator_of(model), batches(2)), best)
    weights: list[dict[str, Tensor]] = []
    losses: list[float] = []

    @trainer.on(Events.EPOCH_COMPLETED)
    def note(engine: Engine) -> None:
        weights.append({name: value.clone() for name, value in model.state_dict().items()})
        losses.append(engine.state.metrics["loss"])

    seed_everything(0)
    trainer.run(batches(1), max_epochs=8)
    return trainer, best, weights, losses


def measured(weights: dict[str, Tensor], data: list[tuple[Tensor, Tensor]]) -> float:
    model = network().eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        return sum(nn.functional.mse_loss(model(x), y).item() * len(x) for x, y in data) / sum(len(x) for x, _ in data)


def test_testing_uses_the_best_weights_and_not_the_last(tmp_path: Path) -> None:
    _, best, weights, losses = trained(tmp_path)
    of_best = losses.index(min(losses))
    assert of_best != len(losses) - 1  # otherwise nothing is shown
    assert best.best is not None

    predictions = Predictions()
    tester = evaluator_of(network(), predictions)
    tester.load_weights(Checkpoint.load(best.best))
    assert tester.run(batches(3)).metrics["loss"] == measured(weights[of_best], batches(3))
    assert tester.run(batches(2)).metrics["loss"] == losses[of_best]
    model = network().eval()
    model.load_state_dict(weights[of_best])
    with torch.no_grad():
        assert torch.equal(predictions.outputs, torch.cat([model(x) for x, _ in batches(2)]))


def test_the_trainers_own_model_may_be_tested_with_the_best_weights(tmp_path: Path) -> None:
    trainer, best, weights, losses = trained(tmp_path)
    tester = evaluator_of(trainer.model)
    assert tester.run(batches(3)).metrics["loss"] == measured(weights[-1], batches(3))
    assert best.best is not None
    tester.load_weights(Checkpoint.load(best.best))
    expected = measured(weights[losses.index(min(losses))], batches(3))
    assert tester.run(batches(3)).metrics["loss"] == expected


def test_best_and_last_are_files_that_are_kept(tmp_path: Path) -> None:
    _, best, _, losses = trained(tmp_path, keep=3)
    order = sorted(range(len(losses)), key=losses.__getitem__)[:3]
    iterations = [4 * (epoch + 1) for epoch in order]
    assert best.best is not None
    assert best.last is not None
    assert best.best.is_dir()
    assert best.last.is_dir()
    assert Checkpoint.load(best.best)["engine"]["iteration"] == iterations[0]
    assert Checkpoint.load(best.last)["engine"]["iteration"] == max(iterations)


def test_without_a_monitor_there_is_a_last_one_and_no_best(tmp_path: Path) -> None:
    last = Checkpoint(tmp_path, every="1ep", keep=2)
    assert (last.best, last.last) == (None, None)
    trainer = Engine(UPDATE, model=network(), seed=0)
    trainer.attach(last)
    trainer.run(batches(1), max_epochs=3)
    assert last.best is None
    assert last.last is not None
    assert Checkpoint.load(last.last)["engine"]["iteration"] == 12


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    _, best, _, _ = trained(tmp_path)
    assert best.best is not None
    other = evaluator_of(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    with pytest.raises(ValueError, match=r"'model' differs in 2\.bias, 2\.weight"):
        other.load_weights(Checkpoint.load(best.best))
