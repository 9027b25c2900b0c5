"""Recipes of runs that are cut and resumed: every handler that has a state, in company with others, with its data and bounds."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchmetrics
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, TensorDataset

from signalfire import Engine, EventEnum, Events, Handler, Update
from signalfire.handlers import (
    EMA,
    L2,
    SWA,
    Accuracy,
    ActivationStatistics,
    AdaptiveGradientClipping,
    AutoClip,
    Average,
    Checkpoint,
    CSVLogger,
    CutMix,
    Cutout,
    DeviceTransfer,
    Distillation,
    EarlyStopping,
    Export,
    Freezing,
    GradientAccumulation,
    GradientCentralization,
    GradientClipping,
    GradientNoise,
    GradientNorms,
    Histograms,
    History,
    JSONLinesLogger,
    LabelSmoothing,
    LimitBatches,
    Lookahead,
    LRScheduling,
    Metrics,
    MicroBatching,
    MixedPrecision,
    MixUp,
    MLflowLogger,
    NonFiniteGuard,
    OptunaPruning,
    ParameterScheduling,
    ProgressBar,
    ProgressiveResizing,
    Pruning,
    RemoteLogger,
    Reporting,
    Seeding,
    SharpnessAwareMinimization,
    SpikeGuard,
    TensorBoardLogger,
    Trace,
    TrackioLogger,
    TruePrecision,
    TruncatedBPTT,
    UpdateFrequency,
    Validation,
    WandbLogger,
    cosine_with_warmup,
    discriminative_rates,
    one_cycle,
    piecewise,
    polynomial,
    warmup,
    warmup_stable_decay,
)
from tests.kit import Trial
from tests.remote import in_memory

Batch = tuple[Tensor, Tensor]

ADAM = partial(torch.optim.Adam, lr=0.05)

# ---- models and data --------------------------------------------------------------------------------------------------


class Noise(nn.Module):
    """Draws from Python's and NumPy's global generators, as some layers of users do."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * (1 + 0.2 * random.random()) + 0.2 * float(np.random.rand())


def make_net(*, features: int = 3, dropout: float = 0.2) -> nn.Sequential:
    """36 parameters; with BatchNorm, dropout and noise, so that it draws from each generator and remembers what it saw."""
    return nn.Sequential(
        nn.Linear(features, 4), nn.BatchNorm1d(4), nn.Tanh(), Noise(), nn.Dropout(dropout), nn.Linear(4, 3)
    )


def make_samples(count: int = 18) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


class Augmented(Dataset[Batch]):
    """Samples with noise from each of the global generators, as augmentations draw it."""

    def __init__(self, count: int = 18) -> None:
        self.x, self.y = make_samples(count)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Batch:
        noise = torch.randn(3) + float(np.random.randn()) + random.gauss(0, 1)
        return self.x[index] + 0.3 * noise, self.y[index]


class Keeping(IterableDataset[Batch]):
    """Batches without a length, which keep their own position."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Batch]:
        begin, self.at = self.at, 0
        x, y = make_samples(20)
        for place in range(begin, 5):
            self.at = place + 1
            part = slice(4 * place, 4 * place + 4)
            yield x[part] + 0.1 * torch.randn(4, 3), y[part]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def shuffled() -> DataLoader[Any]:
    """Five batches, of which the last is short."""
    return DataLoader(TensorDataset(*make_samples()), 4, shuffle=True)


def own(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def held_out() -> list[Batch]:
    x, y = make_samples(24)
    return [(x[18:22], y[18:22]), (x[22:], y[22:])]


def supervised(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> Update:
    return Update.supervised(nn.functional.cross_entropy, optimizer, **options)


def trainer(
    *handlers: Handler,
    model: nn.Module | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = ADAM,
    seed: int | None = 0,
    allow: Sequence[str] = (),
) -> Engine:
    engine = Engine(supervised(optimizer), model=make_net() if model is None else model, seed=seed, allow=allow)
    engine.attach(*handlers)
    return engine


def validation(model: nn.Module, **options: Any) -> Validation:
    evaluator = Engine(Update.supervised(nn.functional.cross_entropy), model=model)
    evaluator.attach(Metrics(loss=Average(), accuracy=Accuracy()))
    return Validation(evaluator, held_out(), **options)


def thirds(output: Tensor, target: Tensor) -> float:
    """A quantity whose sums have to be rounded."""
    return float(output.double().square().mean()) / 3


# ---- the recipes ------------------------------------------------------------------------------------------------------


def windows(folder: Path) -> Engine:
    model = make_net()
    return trainer(
        GradientAccumulation(2),
        MixedPrecision("fp16", init_scale=2.0**18, growth_factor=8.0, growth_interval=2),
        GradientClipping(max_norm=0.5),
        NonFiniteGuard(check="both"),
        LRScheduling(one_cycle(0.1, warmup=0.4)),
        EMA(0.8),
        Metrics(train_loss=Average(), thirds=thirds, name="train_metrics"),
        validation(model),
        History(),
        model=model,
    )


def augmentation(folder: Path, model: nn.Module | None = None) -> Engine:
    return trainer(
        MixUp(0.4),
        GradientNoise(0.1),
        GradientCentralization(),
        LabelSmoothing(0.1),
        AdaptiveGradientClipping(0.1),
        GradientNorms(every="2it"),
        ActivationStatistics(every="3it", window=3),
        LRScheduling(partial(StepLR, step_size=2, gamma=0.5), every="1ep"),
        Metrics(
            average=Average(),
            f1=torchmetrics.classification.MulticlassF1Score(3),
            collection=torchmetrics.MetricCollection(
                [
                    torchmetrics.classification.MulticlassPrecision(3),
                    torchmetrics.classification.MulticlassRecall(3),
                ]
            ),
            auroc=torchmetrics.classification.MulticlassAUROC(3),
            name="train_metrics",
        ),
        History(),
        model=model,
    )


def with_seed_of_its_own(folder: Path) -> Engine:
    """Nobody gave a seed: that of the process is a part of the state."""
    return trainer(
        GradientNoise(0.1),
        MixUp(0.4),
        EMA(0.9, warmup=True),
        Pruning(0.5, start=2, end=8, every=2),
        Metrics(train_loss=Average(), name="train_metrics"),
        ParameterScheduling("weight_decay", ParameterScheduling.cosine(0.0, 0.4, over=8)),
        History(),
        seed=None,
    )


def workers(folder: Path) -> Engine:
    return trainer(
        GradientAccumulation(3),
        LabelSmoothing(0.2),
        Lookahead(3),
        AutoClip(40, window=4),
        EMA(0.7, start=1, every=2),
        LRScheduling(warmup(2, partial(CosineAnnealingLR, eta_min=0.01))),
        Metrics(accuracy=Accuracy(), name="train_metrics"),
        GradientNoise(0.1),
        History(),
    )


def stopping(folder: Path) -> Engine:
    model = make_net()
    return trainer(
        GradientAccumulation(2),
        validation(model, every="0.4ep", at_start=True),
        LRScheduling(partial(ReduceLROnPlateau, patience=1, threshold=0.2), monitor="loss"),
        EarlyStopping("loss", patience=3, min_delta=0.3, restore_best=True),
        Reporting(lambda value, step: step > 50, "loss"),
        OptunaPruning(Trial(), "loss"),
        Checkpoint(folder / "best", monitor="loss", keep=3, name="best"),
        EMA(0.5, warmup=True, buffers="average"),
        Metrics(train_loss=Average(), name="train_metrics"),
        ProgressBar(file=io.StringIO(), line_interval=0),
        History(),
        model=model,
    )


def averages(folder: Path) -> Engine:
    model = make_net()
    loader = DataLoader(TensorDataset(*make_samples()), 6, shuffle=True)
    return trainer(
        SWA(2, lr=0.2, anneal_epochs=2, bn_data=loader, bn_batches=2, bn_update="evaluation"),
        GradientAccumulation({1: 2, 2: 3}),
        Freezing({"0": 2, "1": 3}),
        ParameterScheduling("weight_decay", {0: 0.0, 3: 0.1}),
        EarlyStopping("loss", patience=1, min_delta=0.9),
        validation(model),
        History(),
        model=model,
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    )


class Reported(EventEnum):
    """An event of the user's own, which is counted by how often it was fired."""

    LOSS_SEEN = "loss_seen"


def two_updates(folder: Path) -> Engine:
    models = {"generator": make_net(), "critic": make_net()}
    temperature = nn.Parameter(torch.ones(()))

    def forward(of: str) -> Callable[[Engine, Batch], Tensor]:
        return lambda engine, batch: engine.modules[of](batch[0])

    def loss(engine: Engine, output: Tensor, batch: Batch) -> Tensor | None:
        return nn.functional.cross_entropy(output * temperature.exp(), batch[1])

    def broken_now_and_then(engine: Engine, output: Tensor, batch: Batch) -> Tensor:
        value = nn.functional.cross_entropy(output, batch[1])
        return value * float("nan") if engine.state.iteration in (3, 8, 10, 12) else value

    def parameters(of: str, *more: nn.Parameter) -> Callable[[Engine], Any]:
        return lambda engine: [*engine.modules[of].parameters(), *more]

    adam, sgd = partial(torch.optim.AdamW, lr=0.05), partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    engine = Engine(
        [
            Update(forward("critic"), broken_now_and_then, sgd, "critic", parameters("critic")),
            Update(forward("generator"), loss, adam, "generator", parameters("generator", temperature)),
        ],
        model=models,
        seed=0,
        allow=["W19"],  # some losses are not finite
    )
    engine.attach(
        UpdateFrequency(generator=2),
        GradientAccumulation(2, update="critic"),
        NonFiniteGuard(check="both", action="stop", patience=3),
        MixedPrecision("fp16", init_scale=2.0**15, growth_interval=3, growth_factor=16.0),
        GradientNorms(every="3it", per_parameter=True),
        LRScheduling(warmup(2, piecewise({2: 0.5, 4: 0.2})), update="critic", name="critic_rate"),
        LRScheduling(warmup(3, partial(ExponentialLR, gamma=0.8)), update="generator", name="generator_rate"),
        Metrics(critic_loss=Average(), update="critic", name="critic_metrics"),
        History(),
    )
    engine.register_events(Reported)
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: engine.fire(Reported.LOSS_SEEN))

    def kick(engine: Engine) -> None:
        with torch.no_grad():
            next(engine.modules["generator"].parameters()).mul_(1.25)

    engine.connect(Reported.LOSS_SEEN(every=4), kick)
    return engine


class Recurrent(nn.Module):
    """54 parameters, with a hidden state that is carried from chunk to chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(1, 3, batch_first=True)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        output, hidden = self.cell(x, hidden)
        assert hidden is not None
        return self.head(self.dropout(output)), hidden


def sequences(folder: Path) -> Engine:
    def forward(engine: Engine, batch: Batch) -> Tensor:
        update = engine.state.update
        output, hidden = engine.model(batch[0], update.hidden)
        if update.more:
            update.hidden = hidden
        return output  # type: ignore[no-any-return]

    def loss(engine: Engine, output: Tensor, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(output, batch[1])

    optimizer = partial(torch.optim.RMSprop, lr=0.01, momentum=0.5)
    engine = Engine(Update(forward, loss, optimizer), model=Recurrent(), seed=0)
    engine.attach(
        TruncatedBPTT(3),
        GradientAccumulation(2),
        GradientClipping(max_norm=0.5),
        LRScheduling(partial(warmup_stable_decay(warmup=2, decay=0.5), total_steps=20)),
        EMA(0.8),
        Lookahead(3),
        Metrics(train_loss=Average(), name="train_metrics"),
        LimitBatches(4),
        History(),
    )
    return engine


def make_sequences() -> DataLoader[Any]:
    x = torch.randn(18, 7, 1, generator=own(0))
    return DataLoader(TensorDataset(x, x.cumsum(1)), 4, shuffle=True, generator=own())


class Picture(nn.Module):
    """Sees 3 features as a picture of 1 x 3 x 3."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net(features=9)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(x.flatten(1))
        return output


def pictures() -> list[Batch]:
    x, y = make_samples()
    outer = x[:, None, :, None] * x[:, None, None, :]
    return list(zip(outer.split(4), y.split(4), strict=True))


def closures(folder: Path) -> Engine:
    model = Picture()
    return trainer(
        CutMix(),
        Cutout(1),
        GradientAccumulation(2),
        validation_of_pictures(model),
        LRScheduling(partial(ExponentialLR, gamma=0.9)),
        Metrics(train_loss=Average(), name="train_metrics"),
        History(),
        model=model,
        optimizer=partial(torch.optim.LBFGS, lr=0.2, max_iter=3, history_size=4),
    )


def growing(folder: Path) -> Engine:
    """Pictures grow; a teacher and a penalty add to the loss."""
    torch.manual_seed(9)
    return trainer(
        ProgressiveResizing(initial=0.34, delay=0.2, increment=1),
        CutMix(),
        Distillation(nn.Sequential(nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(9, 3)), weight=0.3),
        L2(0.1),
        Export(folder / "best.safetensors", at="best", monitor="train_loss"),
        GradientAccumulation(2),
        Metrics(train_loss=Average(), name="train_metrics"),
        History(),
        model=nn.Sequential(nn.AdaptiveAvgPool2d(3), Picture()),
    )


def validation_of_pictures(model: nn.Module) -> Validation:
    evaluator = Engine(Update.supervised(nn.functional.cross_entropy), model=model)
    evaluator.attach(Metrics(loss=Average()))
    return Validation(evaluator, pictures()[:2], every="2st")


def sharpness(folder: Path) -> Engine:
    engine = trainer(
        SharpnessAwareMinimization(0.1),
        MixUp(0.4),
        LabelSmoothing(0.1),
        GradientAccumulation(3),
        NonFiniteGuard(check="loss"),
        LRScheduling(cosine_with_warmup(warmup=1, cooldown=1)),
        EMA(0.6),
        Metrics(train_loss=Average(), name="train_metrics"),
        History(),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        allow=["W19"],  # a loss is not finite
    )

    def spoil(engine: Engine) -> None:
        """A loss that is not finite, with gradients that are."""
        if engine.state.iteration == 7:
            engine.state.update.backward_loss = engine.state.update.backward_loss + float("inf")

    engine.connect(Events.LOSS_COMPUTED, spoil)
    return engine


def pieces(folder: Path) -> Engine:
    engine = trainer(
        MicroBatching(),
        GradientAccumulation(2),
        MixedPrecision("bf16"),
        GradientNorms(every="2st"),
        LRScheduling(piecewise({0: 0.5, 2: 1.0, 1.0: 0.1}, interpolate=True)),
        Metrics(train_loss=Average(), accuracy=Accuracy(), name="train_metrics"),
        Seeding(),
        DeviceTransfer("cpu"),
        History(),
    )

    def spike(engine: Engine) -> None:
        """The memory runs out once."""
        if engine.state.iteration == 3 and len(engine.state.batch[0]) > 2:
            raise torch.OutOfMemoryError

    engine.connect(Events.FORWARD_STARTED, spike)
    return engine


def around_the_data(folder: Path) -> Engine:
    """Epochs are longer than the data, and one is ended by the user; stops are held back."""
    model = make_net()
    engine = trainer(
        GradientAccumulation(3),
        TruePrecision("fp64"),
        AutoClip(40, window=None),
        EMA(0.9),
        LRScheduling(chained),
        Metrics(train_loss=Average(), thirds=thirds, name="train_metrics"),
        EarlyStopping("train_loss", patience=1, min_delta=0.9),
        History(),
        model=model,
    )

    def end(engine: Engine) -> None:
        if engine.state.iteration == 11:
            engine.terminate_epoch("enough of it")

    engine.connect(Events.ITERATION_COMPLETED, end)
    engine.connect(Events.DATA_EXHAUSTED(every=2), lambda engine: engine.model[0].bias.data.mul_(1.5))
    return engine


def chained(optimizer: torch.optim.Optimizer) -> SequentialLR:
    parts: list[Any] = [ExponentialLR(optimizer, 0.8), StepLR(optimizer, 1, 0.5)]
    return SequentialLR(optimizer, parts, milestones=[2])


def unsized(folder: Path) -> Engine:
    model = make_net()
    update = supervised(
        partial(torch.optim.Adam, lr=0.05),
        parameters=lambda engine: discriminative_rates(engine.model, {"0": 0.01, "5": 0.05}, default=0.02),
    )
    engine = Engine(update, model=model, seed=0)
    engine.attach(
        GradientAccumulation(2),
        GradientNoise(0.05),
        LRScheduling(warmup(2, partial(ExponentialLR, gamma=0.9)), every="2st"),
        validation(model, every="2st"),
        EMA(0.9),
        Metrics(train_loss=Average(), name="train_metrics"),
        History(),
    )
    return engine


def logs(folder: Path) -> Engine:
    model = make_net()
    return trainer(
        GradientAccumulation(2),
        LRScheduling(polynomial(power=2.0, warmup=0.2)),
        EMA(0.8),
        Metrics(train_loss=Average(), name="train_metrics"),
        validation(model, every="3it"),
        CSVLogger(folder / "log.csv", every="1it"),
        JSONLinesLogger(folder / "log.jsonl", every="2it"),
        Trace(folder / "trace.jsonl", every="2it", detail="tensor"),
        TensorBoardLogger(folder / "events", every="2it"),
        *(in_memory(kind, folder, every="2it") for kind in (RemoteLogger, MLflowLogger, WandbLogger, TrackioLogger)),
        Histograms(every="3it"),
        SpikeGuard(window=8, sigmas=60),
        Checkpoint(folder / "best", monitor="loss", keep=2, name="best"),
        Checkpoint(folder / "last", every="1it", keep=2, name="last"),
        Checkpoint(folder / "weights", every="3st", keep=2, weights_only=True, name="weights"),
        History(),
        model=model,
    )


@dataclass(frozen=True)
class Recipe:
    """An engine with a company of handlers, its data and its bounds; all made anew each time, as by a new process."""

    build: Callable[[Path], Engine]
    data: Callable[[], Any] = shuffled
    bounds: Mapping[str, Any] = field(default_factory=lambda: {"max_epochs": 3})
    writes: bool = False


RECIPES: dict[str, Recipe] = {
    "windows": Recipe(windows),
    "augmentation": Recipe(augmentation, lambda: DataLoader(Augmented(), 4, shuffle=True, generator=own())),
    "a seed of its own": Recipe(with_seed_of_its_own, lambda: DataLoader(Augmented(), 4, shuffle=True)),
    "workers": Recipe(
        workers,
        lambda: DataLoader(
            Augmented(14),
            4,
            num_workers=2,
            sampler=RandomSampler(range(14), generator=own()),
        ),
        {"max_epochs": 2},
    ),
    "stopping": Recipe(stopping, bounds={"max_epochs": 6, "min_iters": 9}, writes=True),
    "averages": Recipe(averages, bounds={"max_epochs": 6, "min_epochs": 4}),
    "two updates": Recipe(two_updates),
    "sequences": Recipe(sequences, make_sequences, {"max_epochs": 6, "max_steps": 16}),
    "closures": Recipe(closures, pictures),
    "growing": Recipe(growing, pictures),
    "sharpness": Recipe(
        sharpness,
        lambda: DataLoader(TensorDataset(*make_samples()), 4, sampler=DistributedSampler(range(18), 1, 0)),  # type: ignore[arg-type]
    ),
    "pieces": Recipe(pieces),
    "around the data": Recipe(
        around_the_data,
        lambda: DataLoader(TensorDataset(*make_samples()), 4, shuffle=True, generator=own()),
        {"epoch_length": 7, "max_epochs": 4, "min_epochs": 3},
    ),
    "unsized": Recipe(unsized, Keeping),
    "logs": Recipe(logs, bounds={"max_epochs": 2}, writes=True),
}
