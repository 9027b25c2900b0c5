"""Cut at every iteration, epoch start and epoch end, and gone on in a new process, a run ends as if it had never been stopped.

The recipes are a stated set that has every handler with a state in company with others. Each is run once without a stop, with its
state taken at every cut. From each cut a new engine with new handlers and new data, in another random state, runs to the end:
its losses, the whole fingerprint, what it exports, its logs and kept files have to be those of the run that was not stopped,
bit for bit. That this finds what is forgotten is shown part by part: each control leaves one part out of the saved state.
"""

from __future__ import annotations

import copy
import hashlib
import io
import logging
import os
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, TensorDataset

import signalfire.handlers
from signalfire import CombinedData, Engine, EventEnum, Events, Handler, Phase, ReloadedData, Update, seed_everything
from signalfire.handlers import (
    EMA,
    SWA,
    Accuracy,
    AdaptiveGradientClipping,
    Average,
    Checkpoint,
    CSVLogger,
    CutMix,
    Cutout,
    DeviceTransfer,
    EarlyStopping,
    Freezing,
    GradientAccumulation,
    GradientClipping,
    GradientNoise,
    GradientNorms,
    History,
    JSONLinesLogger,
    LabelSmoothing,
    LimitBatches,
    LRScheduling,
    Metrics,
    MicroBatching,
    MixedPrecision,
    MixUp,
    NonFiniteGuard,
    ParameterScheduling,
    ProgressBar,
    Seeding,
    SharpnessAwareMinimization,
    TensorBoardLogger,
    TruePrecision,
    TruncatedBPTT,
    UpdateFrequency,
    Validation,
    cosine_with_warmup,
    discriminative_rates,
    one_cycle,
    piecewise,
    polynomial,
    warmup,
    warmup_stable_decay,
)
from signalfire.testing import fingerprint
from tests.kit import quick, spread

Batch = tuple[Tensor, Tensor]
Saved = dict[str, Any]

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
) -> Engine:
    engine = Engine(supervised(optimizer), model=make_net() if model is None else model, seed=seed)
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
        LabelSmoothing(0.1),
        AdaptiveGradientClipping(0.1),
        GradientNorms(every="2it"),
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
        Metrics(train_loss=Average(), name="train_metrics"),
        ParameterScheduling("weight_decay", ParameterScheduling.cosine(0.0, 0.4, over=8)),
        History(),
        seed=None,
    )


def workers(folder: Path) -> Engine:
    return trainer(
        GradientAccumulation(3),
        LabelSmoothing(0.2),
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
        EarlyStopping("loss", patience=1, min_delta=10.0),
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
        EMA(0.9),
        LRScheduling(chained),
        Metrics(train_loss=Average(), thirds=thirds, name="train_metrics"),
        EarlyStopping("train_loss", patience=1, min_delta=10.0),
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
        TensorBoardLogger(folder / "events", every="2it"),
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


# ---- and corners, in which few handlers suffice -----------------------------------------------------------------------


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
    return trainer(Validation(evaluator, data, every="2it", sanity=1), History(), model=model)


def limited_validation(folder: Path) -> Engine:
    model = make_net()
    evaluator = Engine(Update.supervised(nn.functional.cross_entropy), model=model)
    evaluator.attach(Metrics(loss=Average()))
    return trainer(Validation(evaluator, own_loader(), every="2it"), LimitBatches(validation=2), History(), model=model)


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


# ---- runs, and what is left of them -----------------------------------------------------------------------------------

FIRST_PROCESS, SECOND_PROCESS = 0, 99
FOLDER = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))


@pytest.fixture(autouse=True, scope="session")
def _clean_up() -> Iterator[None]:
    FOLDER.mkdir(exist_ok=True)
    yield
    shutil.rmtree(FOLDER)


def a_folder() -> Path:
    return Path(tempfile.mkdtemp(dir=FOLDER))


@dataclass(frozen=True)
class Cut:
    """Where a run was cut: its state as a file, and its folder as it was then."""

    epoch: int
    iteration: int
    within: int
    open: bool
    file: bytes
    folder: Path | None

    def state(self) -> Saved:
        return copy.deepcopy(loaded(self.file))

    def __str__(self) -> str:
        if not self.open:
            return f"at the end of epoch {self.epoch}"
        return f"after iteration {self.iteration}" if self.within else f"at the start of epoch {self.epoch}"


@cache
def loaded(file: bytes) -> Saved:
    """What is in a file, as a new process reads it. Reading takes longer than the rest of such a short run."""
    state: Saved = torch.load(io.BytesIO(file), weights_only=True)
    return state


@dataclass(frozen=True)
class Left:
    """What a run leaves: the losses of each iteration, and a digest of every part of the rest."""

    losses: dict[int, list[tuple[str, str]]]
    parts: dict[str, str]
    last: int

    def differences(self, other: Left, cut: Cut) -> set[str]:
        """What of this one, which resumed from a cut, differs from the other, which was not stopped."""
        names = self.parts.keys() | other.parts.keys()
        different = {name for name in names if self.parts.get(name) != other.parts.get(name)}
        ahead = {at: losses for at, losses in other.losses.items() if at > cut.iteration}
        return different | ({"losses"} if self.losses != ahead else set())


def run(
    recipe: Recipe,
    folder: Path,
    state: Saved | None = None,
    *,
    process: int = SECOND_PROCESS,
    watch: Callable[[Engine], None] | None = None,
) -> Left:
    """Run to the end in what might be another process: nothing is taken over from an earlier run but the state."""
    seed_everything(process)
    engine = recipe.build(folder)
    losses: dict[int, list[tuple[str, str]]] = {}

    def note(engine: Engine) -> None:
        update = engine.state.update
        reported = "none" if update.loss is None else float(update.loss).hex()
        losses.setdefault(engine.state.iteration, []).append((update.name, reported))

    engine.connect(Events.UPDATE_COMPLETED, note, phase=Phase.RECORD)
    if watch is not None:
        watch(engine)
    if state is not None:
        engine.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"run\(\): nothing to do")
        warnings.filterwarnings("ignore", message="The ``compute`` method of metric")  # of one whose sums are left out
        engine.run(recipe.data(), **recipe.bounds)
    parts: dict[str, str] = fingerprint(engine)
    parts["exported"] = digest(engine.weights())
    if recipe.writes:
        parts |= logs_in(folder)
        if state is None or "origin" in state:  # in one without, the owner of the files is unknown
            parts |= kept_of(engine)
    return Left(losses, parts, engine.state.iteration)


def digest(value: Any) -> str:
    """A sha256 that is equal for equal states alone."""
    found = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, Tensor):
            found.update(f"{value.dtype}{tuple(value.shape)}".encode() + value.contiguous().view(-1).numpy().tobytes())
        elif isinstance(value, Mapping):
            for key in sorted(value, key=str):
                found.update(f"{key}:".encode())
                feed(value[key])
        elif isinstance(value, list | tuple):
            found.update(b"[")
            for item in value:
                feed(item)
        else:
            found.update(f"{value!r};".encode())

    feed(value)
    return found.hexdigest()


def logs_in(folder: Path) -> dict[str, str]:
    """What those who read the logs find in them."""
    found = {name: (folder / name).read_text() for name in ("log.csv", "log.jsonl") if (folder / name).exists()}
    if (folder / "events").exists():
        logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it reports everything that a resumed run cuts off
        reader = EventAccumulator(str(folder / "events"))
        reader.Reload()
        scalars = {tag: [(one.step, one.value) for one in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
        found["scalars"] = repr(sorted(scalars.items()))
    return found


def kept_of(engine: Engine) -> dict[str, str]:
    """What each Checkpoint has kept: the values and the content, in its order, whatever the files are called."""
    found = {}
    for name, handler in engine.handlers.items():
        if isinstance(handler, Checkpoint):
            states = [Checkpoint.load(handler.folder / one) for one, _ in handler.kept]
            contents = [digest({key: part for key, part in state.items() if key != "origin"}) for state in states]
            found[f"kept by {name}"] = repr(
                [(value, one) for (_, value), one in zip(handler.kept, contents, strict=True)]
            )
    return found


@dataclass(frozen=True)
class Whole:
    """A run that was never stopped, with the cuts at which others resume from it."""

    left: Left
    cuts: list[Cut]
    checkpoints: list[
        tuple[str, Cut]
    ]  # each that was there to be loaded at a cut: when it was new, and when it was about to go
    with_state: set[type[Handler]]
    reported: set[str]  # why steps were skipped, and how the scale moved


@cache
def whole(name: str) -> Whole:
    recipe, folder = (RECIPES | CORNERS)[name], a_folder()
    cuts: list[Cut] = []
    checkpoints: list[tuple[str, Cut]] = []
    with_state: set[type[Handler]] = set()
    reported: set[str] = set()

    def save(engine: Engine) -> None:
        buffer, state, saved = io.BytesIO(), engine.state, engine.state_dict()
        torch.save(saved, buffer)
        there = Path(shutil.copytree(folder, a_folder(), dirs_exist_ok=True)) if recipe.writes else None
        cut = Cut(state.epoch, state.iteration, state.epoch_iteration, state.epoch_open, buffer.getvalue(), there)
        cuts.append(cut)
        with_state.update(type(one) for key, one in engine.handlers.items() if saved["handlers"][key])
        for one in engine.handlers.values():
            if isinstance(one, Checkpoint) and not one.weights_only:
                checkpoints.extend((f"{one.name}/{kept}", cut) for kept, _ in one.kept)

    def watch(engine: Engine) -> None:
        engine.connect(
            Events.EPOCH_STARTED | Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED,
            save,
            phase=Phase.PERSIST,
            rank=1000,
        )
        engine.connect(Events.OPTIMIZER_STEP_COMPLETED, look, phase=Phase.RECORD)
        engine.connect(Events.TERMINATED, lambda engine: reported.add(f"stopped: {engine.state.stop_reason}"))

    scales: dict[str, float] = {}

    def look(engine: Engine) -> None:
        update = engine.state.update
        if update.skipped is not None:
            reported.add(update.skipped)
        for one in engine.handlers.values():
            if isinstance(one, MixedPrecision) and one.scalers:
                scale = one.scalers[update.name].get_scale()
                before = scales.setdefault(update.name, scale)
                reported.update(
                    {"the scale grew"} if scale > before else {"the scale shrank"} if scale < before else ()
                )
                scales[update.name] = scale

    left = run(recipe, folder, process=FIRST_PROCESS, watch=watch)
    there = dict(reversed(checkpoints)).items() | dict(checkpoints).items()
    return Whole(left, cuts, sorted(there, key=lambda one: (one[0], one[1].iteration)), with_state, reported)


def resumed(name: str, cut: Cut, state: Saved | None = None) -> Left:
    """What is left of a run that resumes from a cut, with the state as it was saved or another in its place."""
    folder = a_folder()
    if cut.folder is not None:
        shutil.copytree(cut.folder, folder, dirs_exist_ok=True)
    try:
        return run((RECIPES | CORNERS)[name], folder, cut.state() if state is None else state)
    finally:
        shutil.rmtree(folder)


# ---- every recipe, cut everywhere -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", spread(RECIPES, 2))
def test_taking_the_state_changes_nothing(name: str) -> None:
    assert run(RECIPES[name], a_folder(), process=FIRST_PROCESS) == whole(name).left


@pytest.mark.parametrize("name", quick([*RECIPES, *CORNERS], "windows", "two updates", "limited, loader's generator"))
def test_a_run_resumed_from_any_cut_ends_as_the_one_that_was_not_stopped(name: str) -> None:
    expected, cuts = whole(name).left, whole(name).cuts
    wrong = {}
    for cut in cuts:
        different = resumed(name, cut).differences(expected, cut)
        different -= {part for part in expected.parts if part.startswith("kept by ")}
        if different:
            wrong[str(cut)] = sorted(different)
    assert not wrong


@cache
def kept_and_logged(name: str) -> int:
    """Resume from every checkpoint that was there at every cut; returns how many that were."""
    recipe, expected, tried = RECIPES[name], whole(name).left, 0
    wrong = {}
    for path, cut in whole(name).checkpoints:
        folder = a_folder()
        assert cut.folder is not None
        shutil.copytree(cut.folder, folder, dirs_exist_ok=True)
        state = Checkpoint.load(folder / path)
        at = state["engine"]
        from_there = Cut(at["epoch"], at["iteration"], 0, at["epoch_open"], b"", None)
        different = run(recipe, folder, state).differences(expected, from_there)
        if different:
            wrong[f"{path}, as it was there {cut}"] = sorted(different)
        shutil.rmtree(folder)
        tried += 1
    assert not wrong
    return tried


@pytest.mark.parametrize("name", quick([name for name, recipe in RECIPES.items() if recipe.writes], "stopping"))
def test_a_run_resumed_from_any_checkpoint_keeps_and_logs_the_same(name: str) -> None:
    """Also from an older one, in front of which the stopped run had gone on, and had written others."""
    assert kept_and_logged(name) >= 8
    assert any(part.startswith("kept by ") for part in whole(name).left.parts)


def shipped() -> set[type[Handler]]:
    public = [getattr(signalfire.handlers, name) for name in signalfire.handlers.__all__]
    return {one for one in public if isinstance(one, type) and issubclass(one, Handler)}


# They have a state in several processes alone: `test_resume_together` and their own tests cut and resume such runs.
DISTRIBUTING = "DistributedDataParallel", "FullyShardedDataParallel"


def test_every_handler_that_has_a_state_is_in_a_recipe_that_gives_it_one() -> None:
    able = {one for one in shipped() if one.state_dict is not Handler.state_dict and one.__name__ not in DISTRIBUTING}
    given = set().union(*(whole(name).with_state for name in RECIPES))
    assert able <= given, f"no recipe gives a state to {sorted(one.__name__ for one in able - given)}"


def test_the_recipes_do_what_they_are_there_for() -> None:
    """Scales shrink and grow, steps are skipped, stops come or are held back, windows are cut open."""
    reported = {name: whole(name).reported for name in RECIPES}
    for name in ("windows", "two updates"):
        assert {"the scale grew", "the scale shrank"} <= reported[name], name
    for name in ("stopping", "averages", "two updates", "around the data"):
        assert any(one.startswith("stopped") for one in reported[name]), name
    assert any("loss is not finite" in one for one in reported["sharpness"])
    held_back = [cut for cut in whole("stopping").cuts if cut.state()["engine"]["stops"]]
    assert held_back
    for name in RECIPES.keys() - {"augmentation", "a seed of its own"}:  # these accumulate nothing
        states = [cut.state() for cut in whole(name).cuts]
        assert any(update["window"] for state in states for update in state["updates"].values()), name


# ---- controls: what is left out is noticed ----------------------------------------------------------------------------

Forget = Callable[[Saved, Saved], None]
Where = Callable[[Cut, Saved, Whole], bool]

TRAINING = ("losses", "modules")


@dataclass(frozen=True)
class Control:
    """A part of the state that is left out before a run resumes.

    Attributes:
        recipe: which run.
        forget: called with a saved state, which it changes, and that of an engine which has just begun.
        where: at which cuts it has to be noticed; or at how many, where that depends on the numbers of the run.
        shows: in which parts of what is left it is noticed; the part itself is none.
    """

    recipe: str
    forget: Forget
    where: Where | int
    shows: tuple[str, ...] = TRAINING


def as_new(*paths: str) -> Forget:
    """What is there at these paths is as in an engine that has just begun."""

    def forget(saved: Saved, new: Saved) -> None:
        for path in paths:
            *outer, last = path.split(".")
            there, instead = saved, new
            for key in outer:
                there, instead = there[key], instead[key]
            there[last] = copy.deepcopy(instead[last])

    return forget


def instead(path: str, value: Any) -> Forget:
    """Something else is there at this path."""

    def forget(saved: Saved, new: Saved) -> None:
        *outer, last = path.split(".")
        for key in outer:
            saved = saved[key]
        saved[last] = value

    return forget


def tensors(of: str, *endings: str) -> Forget:
    """The tensors of a module with these endings are as in a new one."""

    def forget(saved: Saved, new: Saved) -> None:
        for key in saved["modules"][of]:
            if key.endswith(endings):
                saved["modules"][of][key] = new["modules"][of][key]

    return forget


def order(saved: Saved, new: Saved) -> None:
    """A position in the data without what its order was drawn from."""
    if "random" in saved["data"]:
        saved["data"]["random"] = new["random"]


def loader_generator(saved: Saved, new: Saved) -> None:
    """A loader's generator is as it was built."""
    for key in ("generators", "generators_now"):
        if key in saved["data"]:
            saved["data"][key] = new["data"]["generators_now"]


def sampler_epoch(saved: Saved, new: Saved) -> None:
    """A sampler did not receive the epoch."""
    for key in ("epochs", "epochs_now"):
        if key in saved["data"]:
            saved["data"][key] = new["data"]["epochs_now"]


def window_without(part: str, of: str = "main") -> Forget:
    """A window that was saved without a part of it; the gradients are those that there are without any."""

    def forget(saved: Saved, new: Saved) -> None:
        window = saved["updates"][of]["window"]
        if window is not None:
            value = window[part]
            window[part] = [None] * len(value) if part == "gradients" else [] if isinstance(value, list) else 0

    return forget


def going_on(cut: Cut, saved: Saved, all_of_it: Whole) -> bool:
    """Iterations are still to come."""
    return cut.iteration < all_of_it.left.last


def begun(cut: Cut, saved: Saved, all_of_it: Whole) -> bool:
    """Some iterations were made, and some are still to come."""
    return 0 < cut.iteration < all_of_it.left.last


def made(cut: Cut, saved: Saved, all_of_it: Whole) -> bool:
    """Some iterations were made."""
    return cut.iteration > 0


def inside(cut: Cut, saved: Saved, all_of_it: Whole) -> bool:
    """Some of an epoch's batches were taken, and some are still to come."""
    return cut.open and cut.within % 5 > 0 and cut.iteration < all_of_it.left.last


def in_epoch(cut: Cut, saved: Saved, all_of_it: Whole) -> bool:
    """Some of an epoch's batches were taken, and its end was not emitted."""
    return cut.open and cut.within > 0


def later_epoch(cut: Cut, saved: Saved, all_of_it: Whole) -> bool:
    return inside(cut, saved, all_of_it) and cut.epoch > 1


def stepped(cut: Cut, saved: Saved, all_of_it: Whole) -> bool:
    """Steps were made, and more are to come."""
    return begun(cut, saved, all_of_it) and all(update["steps"] > 0 for update in saved["updates"].values())


def in_window(cut: Cut, saved: Saved, all_of_it: Whole) -> bool:
    """A window is open, and more is to come."""
    return going_on(cut, saved, all_of_it) and next(iter(saved["updates"].values()))["window"] is not None


def has(path: str) -> Where:
    """There is something at this path of the state."""

    def there(cut: Cut, saved: Saved, all_of_it: Whole) -> bool:
        value: Any = saved
        for key in path.split("."):
            value = value[key]
        return bool(value)

    return there


COUNTERS = as_new("engine.epoch", "engine.iteration", "engine.epoch_start", "engine.epoch_open")

CONTROLS: dict[str, Control] = {
    # the engine's own
    "weights": Control("windows", tensors("model", "weight", "bias"), going_on),
    "buffers": Control("windows", tensors("model", "running_mean", "running_var"), begun),
    "counters": Control("augmentation", COUNTERS, made),
    "steps": Control("sequences", as_new("updates.main.steps"), stepped),
    "optimizer": Control("windows", as_new("updates.main.optimizer"), stepped),
    "optimizer's moments": Control("windows", instead("updates.main.optimizer.state", {}), stepped),
    "optimizer of LBFGS": Control("closures", as_new("updates.main.optimizer"), stepped),
    "optimizer of the second update": Control("two updates", as_new("updates.generator.optimizer"), 8),
    "own parameters": Control("two updates", as_new("updates.generator.own_parameters"), 8),
    "window": Control("windows", instead("updates.main.window", None), in_window),
    "window's gradients": Control("pieces", window_without("gradients"), in_window),
    "window's count": Control("pieces", window_without("held"), in_window),
    "window of time chunks": Control("sequences", instead("updates.main.window", None), in_window),
    "window of one of two updates": Control("two updates", instead("updates.critic.window", None), 5),
    "window's batches for LBFGS": Control("closures", window_without("kept"), in_window),
    "window's batches for SAM": Control("sharpness", window_without("kept"), 7),
    "metrics": Control("windows", as_new("engine.metrics"), has("engine.metrics.values"), ("handlers.history",)),
    "stops": Control("stopping", instead("engine.stops", {}), 2),
    "stop of the epoch": Control("around the data", instead("engine.epoch_stop", None), has("engine.epoch_stop")),
    "seed": Control("a seed of its own", as_new("engine.seed"), going_on),
    "counts of events": Control("two updates", as_new("engine.fired"), 13),
    # random states
    "Python's random state": Control("windows", as_new("random.python"), going_on),
    "NumPy's random state": Control("windows", as_new("random.numpy"), going_on),
    "torch's random state": Control("windows", as_new("random.torch"), going_on),
    # data
    "position in the data": Control("windows", as_new("data"), inside),
    "what the order is drawn from": Control("windows", order, inside),
    "the loader's generator": Control("augmentation", loader_generator, later_epoch),
    "the epoch of a sampler": Control("sharpness", sampler_epoch, later_epoch),
    "the number of the pass": Control("workers", instead("data.number", 0), 3),
    "the data's own position": Control("unsized", as_new("data"), inside),
    # handlers
    "one cycle": Control("windows", as_new("handlers.lr_scheduling"), 12),
    "schedule of epochs": Control("augmentation", as_new("handlers.lr_scheduling"), 7),
    "warm-up chain": Control("workers", as_new("handlers.lr_scheduling"), 6),
    "warm-up chain of an update": Control("two updates", as_new("handlers.critic_rate"), 3),
    "phases": Control("sequences", as_new("handlers.lr_scheduling"), 12),
    "sequence of schedules": Control("around the data", as_new("handlers.lr_scheduling"), 17),
    "plateau": Control("stopping", as_new("handlers.lr_scheduling"), 3),
    "scaler": Control("windows", as_new("handlers.mixed_precision"), 12),
    "scalers": Control("two updates", as_new("handlers.mixed_precision"), 1),
    "EMA": Control("windows", as_new("handlers.ema"), has("handlers.ema.count"), ("exported",)),
    "SWA": Control("averages", as_new("handlers.swa"), has("handlers.swa.count"), ("exported",)),
    "SWA's annealing": Control("averages", instead("handlers.swa.scheduler", None), 7),
    "patience": Control("stopping", as_new("handlers.early_stopping"), has("handlers.early_stopping.best")),
    "values waited for": Control("stopping", instead("handlers.early_stopping.waited", 0), 6),
    "best weights": Control(
        "stopping", instead("handlers.early_stopping.weights", None), has("handlers.early_stopping.weights")
    ),
    "best checkpoints": Control("stopping", as_new("handlers.best"), 8, ("handlers.best",)),
    "seen values": Control("stopping", as_new("handlers.lr_scheduling.monitor"), 3),
    "partial sums": Control("windows", as_new("handlers.train_metrics"), in_epoch, ("handlers.history",)),
    "a torchmetrics metric": Control(
        "augmentation", as_new("handlers.train_metrics.f1"), in_epoch, ("handlers.history",)
    ),
    "history": Control("windows", as_new("handlers.history"), has("handlers.history.records"), ("handlers.history",)),
    "bad steps in a row": Control("two updates", as_new("handlers.non_finite_guard.in_a_row"), 5),
    "losses of a window": Control("sharpness", as_new("handlers.non_finite_guard.losses"), 1),
    "measured intervals": Control("augmentation", as_new("handlers.gradient_norms"), 9, ("engine",)),
    "mixed targets": Control("sharpness", instead("handlers.mixup", {}), 7),
    "cut and mixed targets": Control("closures", instead("handlers.cutmix", {}), in_window),
    "learned size": Control("pieces", instead("handlers.micro_batching", {}), 15),
    "CSV log": Control("logs", as_new("handlers.csv_logger"), begun, ("log.csv",)),
    "JSON log": Control("logs", as_new("handlers.json_lines_logger"), 1, ("log.jsonl",)),
    "TensorBoard's log": Control("logs", as_new("handlers.tensorboard"), 1, ("scalars",)),
}


class _Begun(Exception):
    pass


@cache
def just_begun(name: str) -> bytes:
    """The state of a new engine, in another process, before its first iteration."""
    buffer = io.BytesIO()

    def save(engine: Engine) -> None:
        torch.save(engine.state_dict(), buffer)
        raise _Begun

    def watch(engine: Engine) -> None:
        engine.connect(Events.EPOCH_STARTED, save, phase=Phase.PERSIST, rank=1000)

    with pytest.raises(_Begun):
        run(RECIPES[name], a_folder(), watch=watch)
    return buffer.getvalue()


def noticed(control: Control) -> tuple[list[Cut], list[Cut]]:
    """The cuts at which it is noticed, of those at which it was tried."""
    all_of_it, new = whole(control.recipe), loaded(just_begun(control.recipe))
    found, tried = [], []
    for cut in all_of_it.cuts:
        saved = cut.state()
        if not isinstance(control.where, int) and not control.where(cut, saved, all_of_it):
            continue
        before = digest(saved)
        control.forget(saved, new)
        if digest(saved) == before:  # there was nothing of it yet
            continue
        tried.append(cut)
        try:
            different = resumed(control.recipe, cut, saved).differences(all_of_it.left, cut)
        except (RuntimeError, ValueError):  # it cannot even resume
            found.append(cut)
            continue
        if any(part.startswith(control.shows) for part in different):
            found.append(cut)
    return found, tried


@pytest.mark.parametrize("part", spread(CONTROLS, 4))
def test_a_state_without_this_part_ends_elsewhere(part: str) -> None:
    where = CONTROLS[part].where
    found, tried = noticed(CONTROLS[part])
    if isinstance(where, int):
        assert len(found) >= where, f"noticed {', '.join(map(str, found))} alone"
    else:
        assert tried
        assert not [str(cut) for cut in tried if cut not in found]
