"""Corners of runs that are cut and resumed, in which few handlers suffice."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from signalfire import CombinedData, Engine, Events, ReloadedData, Update
from signalfire.handlers import (
    EMA,
    SWA,
    Average,
    GradientAccumulation,
    GradientClipping,
    History,
    LimitBatches,
    Metrics,
    Validation,
)
from tests.resume_recipes import ADAM, Augmented, Batch, Recipe, make_net, make_samples, own, trainer, validation


def own_loader() -> DataLoader[Any]:
    """A loader with a generator of its own."""
    return DataLoader(TensorDataset(*make_samples()), 4, shuffle=True, generator=own())


def own_sampler(batch_size: int = 4) -> DataLoader[Any]:
    """A loader whose sampler alone has a generator of its own."""
    samples = TensorDataset(*make_samples())
    return DataLoader(samples, batch_size, sampler=RandomSampler(samples, generator=own()))


def an_epoch_without_an_iteration(folder: Path) -> Engine:
    engine = trainer(History())
    engine.connect(Events.EPOCH_STARTED(once=2), lambda engine: engine.terminate_epoch("none of it"))
    return engine


def parts_of_epochs_after_a_short_one(folder: Path) -> Engine:
    model = make_net()
    engine = trainer(validation(model, every="0.5ep"), History(), model=model)
    engine.connect(Events.ITERATION_COMPLETED(once=2), lambda engine: engine.terminate_epoch("enough of it"))
    return engine


def a_late_listener(folder: Path) -> Engine:
    """Which wants every second evaluation, also of those that were before it came."""
    model = make_net()
    engine = trainer(validation(model), GradientClipping(max_norm=0.5), model=model)  # nobody else listens to it

    def kick(engine: Engine) -> None:
        with torch.no_grad():
            engine.model[0].bias.mul_(1.5)

    @engine.on(Events.EPOCH_STARTED | Events.CHECKPOINT_LOADED)
    def listen(engine: Engine) -> None:
        if engine.state.epoch >= 4 and not engine.has(kick):
            engine.connect(Events.EVALUATION_COMPLETED(every=2), kick)

    return engine


def sanity(folder: Path) -> Engine:
    model = make_net()
    evaluator = Engine(Update.supervised(nn.functional.cross_entropy), model=model)
    evaluator.attach(Metrics(loss=Average()))
    few = TensorDataset(*make_samples())
    data = DataLoader(few, 4, sampler=RandomSampler(few, num_samples=7, generator=own()))
    return trainer(Validation(evaluator, data, every="2it", sanity=1, prefix="train_"), History(), model=model)


def limited_validation(folder: Path) -> Engine:
    model = make_net()
    evaluator = Engine(Update.supervised(nn.functional.cross_entropy), model=model)
    evaluator.attach(Metrics(loss=Average()))
    again = Validation(evaluator, own_loader(), every="2it", prefix="train_")
    return trainer(again, LimitBatches(validation=2), History(), model=model)


def statistics_in_an_order_of_their_own(folder: Path) -> Engine:
    model = make_net()
    swa = SWA(1, bn_data=own_sampler(5), bn_batches=2, bn_update="evaluation")
    return trainer(swa, validation(model), History(), model=model)


def wrapped_metrics(folder: Path) -> Engine:
    accuracy = partial(torchmetrics.classification.MulticlassAccuracy, 3)
    return trainer(
        Metrics(
            extremes=torchmetrics.MinMaxMetric(accuracy()),
            running=torchmetrics.wrappers.Running(accuracy(), window=3),
            by_class=torchmetrics.wrappers.ClasswiseWrapper(accuracy(average=None)),
            name="train_metrics",
        ),
        History(),
    )


def side_by_side(folder: Path) -> Engine:
    """Two data of different lengths, one of them augmented."""

    def loss(engine: Engine, batch: dict[str, Batch]) -> Tensor:
        losses = [nn.functional.cross_entropy(engine.model(x), y) for x, y in batch.values()]
        return torch.stack(losses).mean()

    engine = Engine(Update.from_function(loss, ADAM), model=make_net(), seed=0)
    engine.attach(GradientAccumulation(2), EMA(0.9), Metrics(train_loss=Average()), History())
    return engine


def made_anew(epoch: int) -> DataLoader[Any]:
    x, y = make_samples()
    return DataLoader(TensorDataset(x + epoch, y), 4, shuffle=True, generator=own(epoch))


CORNERS: dict[str, Recipe] = {
    "side by side": Recipe(
        side_by_side,
        lambda: CombinedData({"one": own_loader(), "other": DataLoader(Augmented(8), 4, shuffle=True)}),
    ),
    "made anew": Recipe(
        lambda folder: trainer(GradientAccumulation(2), History()),
        lambda: ReloadedData(made_anew, every=2),
        {"max_epochs": 5},
    ),
    "limited, loader's generator": Recipe(lambda folder: trainer(LimitBatches(3), History()), own_loader),
    "an epoch without an iteration": Recipe(an_epoch_without_an_iteration),
    "parts of epochs after a short one": Recipe(parts_of_epochs_after_a_short_one),
    "a late listener": Recipe(a_late_listener, bounds={"max_epochs": 5}),
    "sanity, sampler's generator": Recipe(sanity),
    "limited validation, loader's generator": Recipe(limited_validation),
    "statistics, sampler's generator": Recipe(statistics_in_an_order_of_their_own),
    "wrapped metrics": Recipe(wrapped_metrics),
}
