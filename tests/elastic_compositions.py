"""Compositions of included handlers, drawn by chance, for trainings whose steps consist of shards."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassF1Score

from signalfire import Engine, Events, Handler, Update
from signalfire.distributed.shards import OF_SHARDS
from signalfire.handlers import (
    EMA,
    L1,
    L2,
    SWA,
    Accuracy,
    ActivationCheckpointing,
    AdaptiveGradientClipping,
    AutoClip,
    Average,
    CutMix,
    Cutout,
    Distillation,
    EarlyStopping,
    ElasticDataParallel,
    Freezing,
    GradientAccumulation,
    GradientCentralization,
    GradientClipping,
    GradientNoise,
    GradientNorms,
    History,
    LabelSmoothing,
    LimitBatches,
    Lookahead,
    LRScheduling,
    Metrics,
    MicroBatching,
    MixedPrecision,
    MixUp,
    NonFiniteGuard,
    OptimizerStatistics,
    OverfitBatches,
    ParameterScheduling,
    ParameterStatistics,
    Penalty,
    ProgressiveResizing,
    Pruning,
    RandomErasing,
    Rewindable,
    SharpnessAwareMinimization,
    SpikeGuard,
    StochasticDepth,
    Validation,
)

__all__ = ["compose", "run_composition"]

Make = Callable[[], Handler]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Any:
        return x + self.norm(self.convolution(x)).relu()


def network() -> nn.Module:
    """A small CNN with dropout and batch norm, for images of any size."""
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), Residual(), nn.Dropout(0.2), nn.AdaptiveAvgPool2d(3), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(36, 3))


def images(count: int, seed: int, *, shuffle: bool = True) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    data = TensorDataset(
        torch.randn(count, 1, 8, 8, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    )
    return DataLoader(data, batch_size=4, shuffle=shuffle, generator=torch.Generator().manual_seed(seed))


def z_loss(engine: Engine) -> Tensor:
    loss: Tensor = engine.state.update.output.logsumexp(1).square().mean()
    return loss


POOL: list[list[Make]] = [
    [partial(GradientAccumulation, 2), partial(GradientAccumulation, 3)],
    [
        partial(GradientClipping, max_norm=0.1),
        partial(GradientClipping, max_value=0.01),
        AutoClip,
        AdaptiveGradientClipping,
    ],
    [partial(MixUp, 0.4), partial(CutMix, 1.0), partial(LabelSmoothing, 0.1)],
    [partial(Cutout, 3), RandomErasing],
    [partial(EMA, 0.9), partial(SWA, start=2, bn_batches=0)],
    [SharpnessAwareMinimization, partial(Lookahead, k=2), partial(MicroBatching, 2, halve_on_oom=False)],
    [partial(L1, 1e-3), partial(L2, 1e-2), partial(Penalty, z_loss, 1e-2)],
    [lambda: Distillation(network())],
    [partial(MixedPrecision, "bf16")],
    [partial(GradientNoise, 0.1), GradientCentralization],
    [partial(StochasticDepth, "2", 0.3), partial(ActivationCheckpointing, "2")],
    [partial(Freezing, "0", unfreeze_at=2), partial(Pruning, 0.5, every=2)],
    [
        lambda: LRScheduling(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2), every="1step"),
        lambda: LRScheduling(
            lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0), monitor="val_accuracy"
        ),
        lambda: ParameterScheduling("weight_decay", ParameterScheduling.linear(0.0, 0.1, over=6)),
    ],
    [NonFiniteGuard, partial(SpikeGuard, watch="gradient_norm", window=8)],
    [GradientNorms, partial(OptimizerStatistics, every="2st"), partial(ParameterStatistics, every="2st")],
    [partial(ProgressiveResizing, initial=0.5), partial(LimitBatches, train=17), partial(OverfitBatches, 5)],
    [partial(Rewindable, every="2it"), partial(EarlyStopping, "val_loss", patience=1)],
]
"""Handlers of which a composition has at most one each."""


def compose(seed: int) -> list[Handler]:
    """Handlers that are drawn by chance, in an order that is, too."""
    draw = random.Random(seed)
    handlers = [draw.choice(several)() for several in draw.sample(POOL, draw.randint(3, 8))]
    draw.shuffle(handlers)
    return handlers


def run_composition(seed: int) -> dict[str, Any] | str:
    """What a process has after a training with the handlers of a seed, or why it is refused."""
    torch.manual_seed(0)
    engine = Engine(Update.supervised(F.cross_entropy, partial(torch.optim.AdamW, lr=1e-2)), model=network(), seed=seed)
    validation = Validation(images(22, 1, shuffle=False), accuracy=Accuracy(), f1=MulticlassF1Score(3))
    try:
        engine.attach(
            ElasticDataParallel(shards=8), Metrics(loss=Average(), accuracy=Accuracy()), validation, History()
        )
        engine.attach(*compose(seed))
        losses: list[float] = []
        engine.connect(Events.ITERATION_COMPLETED, lambda engine: losses.append(float(engine.loss)))
        engine.run(images(74, 2), max_epochs=3)
    except ValueError as error:
        return str(error)
    # A process has the states of its own shards in memory, and a saved state those of all.
    states = {name: {**handler.state_dict(), OF_SHARDS: None} for name, handler in engine.handlers.items()}
    return {
        "model": engine.model.state_dict(),
        "optimizer": engine.optimizer.state_dict(),
        "losses": losses,
        "metrics": dict(engine.state.metrics),
        "handlers": states,
    }
