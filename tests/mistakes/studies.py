"""Studies whose runs are not what they seem: seeds that are ignored, models and data that are shared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from signalfire import Engine, Events, Update
from signalfire.ablation import LeaveOneOut, Study
from signalfire.handlers import Average, GradientClipping, Metrics, Validation
from tests.kit import batches
from tests.mistakes.registry import mistake


def studied(build: Callable[[int], Any], **options: Any) -> None:
    Study(build, **({"metric": "loss", "seeds": range(2)} | options)).run(LeaveOneOut(["gradient_clipping"]), workers=0)


def composed(seed: int, model: nn.Module, data: Any) -> Any:
    update = Update.supervised(mse_loss, partial(torch.optim.SGD, lr=0.1))
    trainer = Engine(update, model=model, seed=seed)
    trainer.attach(GradientClipping(max_norm=0.1), Metrics(loss=Average()))
    return trainer, lambda engine: engine.run(data, max_epochs=1)


@mistake("W81")
def a_build_that_ignores_its_seed(right: bool) -> None:
    def build(seed: int) -> Any:
        torch.manual_seed(seed if right else 0)
        return composed(seed, nn.Linear(5, 1), batches(4))

    studied(build)


@mistake("W82")
def batches_that_each_run_of_a_study_normalises_in_place(right: bool) -> None:
    data = batches(4)

    def build(seed: int) -> Any:
        trainer, run = composed(seed, nn.Linear(5, 1), data)

        def normalize(engine: Engine) -> None:
            inputs, targets = engine.state.batch
            engine.state.batch = (inputs - 1.0 if right else inputs.sub_(1.0)), targets

        trainer.connect(Events.GET_BATCH_COMPLETED, normalize)
        return trainer, run

    studied(build)


@mistake("W04")
def a_score_of_the_last_batch(right: bool) -> None:
    """It is written in each batch of an evaluation, and not once with the mean."""

    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        model = nn.Linear(5, 1)
        trainer, _ = composed(seed, model, batches(4))
        evaluator = Engine(trainer.updates[0].spec.evaluation(), model=model)
        losses: list[float] = []

        def record(engine: Engine) -> None:
            losses.append(engine.state.update.loss.item())  # type: ignore[union-attr]

        def measure(engine: Engine) -> None:
            record(engine)
            engine.state.metrics["score"] = losses[-1]

        def take_mean(engine: Engine) -> None:
            engine.state.metrics["score"] = sum(losses) / len(losses)

        if right:
            evaluator.connect(Events.LOSS_COMPUTED, record)
            evaluator.connect(Events.EPOCH_COMPLETED, take_mean)
        else:
            evaluator.connect(Events.LOSS_COMPUTED, measure)
        trainer.attach(Validation(evaluator, batches(3, seed=1)))
        return trainer, lambda engine: engine.run(batches(4), max_epochs=1)

    studied(build, metric="score", mode="min")


@mistake("W04")
def a_score_of_the_last_batch_of_the_training(right: bool) -> None:
    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        trainer, run = composed(seed, nn.Linear(5, 1), batches(4))

        def write(engine: Engine) -> None:
            engine.state.metrics["score"] = engine.state.update.loss.item()  # type: ignore[union-attr]

        trainer.connect(Events.EPOCH_COMPLETED if right else Events.ITERATION_COMPLETED, write)
        return trainer, run

    studied(build, metric="score", mode="min")
