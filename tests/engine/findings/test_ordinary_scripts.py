"""Ordinary scripts in which nothing is wrong, each beside one in which something is: the code is reported there only."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, CosineAnnealingWarmRestarts, CyclicLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split

from signalfire import Engine, Events, Update
from signalfire.handlers import (
    EMA,
    Average,
    Checkpoint,
    CSVLogger,
    GradientAccumulation,
    Guards,
    LRScheduling,
    Metrics,
    Validation,
)

X, Y = torch.randn(32, 10, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 3
SLOW = partial(SGD, lr=0.05)


def loader(size: int = 8) -> Any:
    return DataLoader(TensorDataset(X, Y), batch_size=size, shuffle=True)


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))


def trainer(loss: Any = F.cross_entropy, model: nn.Module | None = None, **options: Any) -> Engine:
    return Engine(Update.supervised(loss, SLOW, **options), model=model or classifier(), seed=0)


def samples_in_training_mode(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))
    pictures = torch.randn(8, 3, 6, 6)
    engine = trainer(F.l1_loss, model)

    def show(engine: Engine) -> None:
        with torch.no_grad():
            engine.model(pictures[:2])

    engine.connect(Events.EPOCH_COMPLETED, show)
    engine.run(DataLoader(TensorDataset(pictures, pictures), batch_size=4), max_epochs=2)


class Positions(nn.Module):
    """Attention over positions, which are shifted as in the Music Transformer, or swapped by a reshape."""

    def __init__(self, *, swaps: bool) -> None:
        super().__init__()
        self.input, self.output, self.swaps = nn.Linear(6, 8), nn.Linear(8, 3), swaps

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.input(inputs)
        steps = x.shape[1]
        scores = (x @ x.new_ones(1, steps, 8).transpose(1, 2))[:, None]
        shifted = F.pad(scores, (1, 0)).view(len(x), 1, steps + 1, steps)[:, :, 1:].view_as(scores)
        if self.swaps:
            x = x.reshape(len(x), 8, steps).reshape(len(x), steps, 8)
        return self.output((shifted[:, 0].softmax(-1) @ x).mean(1))  # type: ignore[no-any-return]


def positions(swaps: bool) -> None:
    data = DataLoader(TensorDataset(torch.randn(16, 12, 6), torch.arange(16) % 3), batch_size=8)
    trainer(model=Positions(swaps=swaps)).run(data, max_epochs=1)


def accumulated(loss: Any, size: int = 8) -> None:
    engine = trainer(loss)
    engine.attach(GradientAccumulation(2))
    engine.run(loader(size), max_epochs=1)


def rewarded(output: Tensor, target: Tensor) -> Tensor:
    rewards = torch.linspace(-1, 2, len(output))
    chosen = output.log_softmax(1).gather(1, target[:, None]).squeeze(1)
    return (-chosen * rewards).sum()


def divided(output: Tensor, target: Tensor) -> Tensor:
    losses = F.cross_entropy(output, target, reduction="none")
    return (losses / len(losses)).sum()


def summed_terms(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum") + 0.1 * output.square().sum()


def penalized(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) + 0.1 * output.square().sum()


def scheduled(scheduler: Any) -> None:
    engine = trainer()
    engine.attach(LRScheduling(scheduler))
    engine.run(loader(), max_epochs=20)  # of 4 batches


def counted(how: str) -> None:
    def loss(engine: Engine, output: Tensor, batch: Any) -> Tensor:
        value = F.cross_entropy(output, batch[1])
        if how == "logs" and engine.state.iteration % 50 == 1:
            engine.log("norm", output.norm().item())
        elif how == "anneals":
            value = value * min(1.0, engine.state.iteration / 10)
        return value

    def anneal(engine: Engine, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1]) * min(1.0, engine.state.iteration / 10)

    def anneal_by_state(engine: Engine, output: Tensor, batch: Any) -> Tensor:
        state = engine.state
        return F.cross_entropy(output, batch[1]) * min(1.0, state.iteration / 10)

    def name(engine: Engine, output: Tensor, batch: Any) -> Tensor:
        state = engine.state
        value = F.cross_entropy(output, batch[1])
        assert value.isfinite(), f"no finite loss in iteration {state.iteration} of epoch {state.epoch}"
        return value

    losses = {"anneals": anneal, "anneals by its state": anneal_by_state, "names": name, "logs": loss}
    update = Update(lambda engine, batch: engine.model(batch[0]), losses[how], SLOW)
    engine = Engine(update, model=classifier(), seed=0)
    engine.attach(Validation([(X[:8], Y[:8])]))
    engine.run(loader(), max_epochs=1)


def plateau_by_hand(folder: Path, *, restores: bool) -> None:
    model = classifier()
    optimizer = SLOW(model.parameters())
    scheduler = ReduceLROnPlateau(optimizer)
    engine = Engine(Update.supervised(F.cross_entropy, optimizer), model=model, seed=0)
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: scheduler.step(float(engine.loss)))
    if restores:
        engine.connect(Events.CHECKPOINT_LOADED, lambda engine: scheduler.load_state_dict({}))
    engine.attach(Checkpoint(folder))
    engine.run(loader(), max_epochs=2)


def evaluated(times: int, folder: Path) -> None:
    engine = trainer()
    evaluator = Engine(Update.supervised(F.cross_entropy), model=engine.model)
    evaluator.attach(Metrics(loss=Average(F.cross_entropy)), CSVLogger(folder / f"{times}.csv"))
    engine.run(loader(), max_epochs=1)
    for _ in range(times):
        engine.evaluate(evaluator, loader())


def averages_loaded(folder: Path, *, evaluate: bool) -> None:
    engine = trainer()
    engine.attach(EMA(0.9, evaluate=evaluate), Checkpoint(folder / str(evaluate)))
    engine.run(loader(), max_epochs=1)
    evaluator = Engine(Update.supervised(F.cross_entropy), model=classifier())
    evaluator.load_weights(Checkpoint.load(folder / str(evaluate)))


def changed_loss(change: Callable[[Any], Tensor]) -> None:
    engine = trainer()

    def weight(engine: Engine) -> None:
        update = engine.state.update
        update.loss = change(update)

    engine.connect(Events.LOSS_COMPUTED, weight)
    engine.run(loader(), max_epochs=1)


def scheduled_by_hand(folder: Path, *, restores: bool) -> None:
    model = classifier()
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = CosineAnnealingLR(optimizer, T_max=4)
    engine = Engine(Update.supervised(F.cross_entropy, optimizer), model=model, seed=0)
    engine.attach(Checkpoint(folder))
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: scheduler.step())

    def load(engine: Engine) -> None:
        scheduler.load_state_dict(torch.load(folder / "scheduler.pt"))

    if restores:
        engine.connect(Events.CHECKPOINT_LOADED, load)
    engine.run(loader(), max_epochs=2)


class Augmented(Dataset[Any]):
    def __init__(self, amount: float) -> None:
        self.amount = amount
        self.order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        place = self.order[index]
        return X[place] + (self.amount * torch.randn(10) if self.amount else 0.0), Y[place]


def split(amount: float) -> None:
    train, held_out = random_split(Augmented(amount), [24, 8], generator=torch.Generator().manual_seed(0))
    engine = trainer()
    engine.attach(Validation(DataLoader(held_out, batch_size=4)))
    engine.run(DataLoader(train, batch_size=4, shuffle=True), max_epochs=1)


def made_by_hand(*, right: bool) -> None:
    def by_hand(engine: Engine, batch: Any) -> None:
        optimizer = engine.optimizer
        assert optimizer is not None
        optimizer.zero_grad()
        F.cross_entropy(engine.model(batch[0]), batch[1]).backward()
        optimizer.step()

    def forgotten(engine: Engine, batch: Any) -> None:
        F.cross_entropy(engine.model(batch[0]), batch[1])

    update = Update(function=by_hand if right else forgotten, optimizer=SLOW)
    Engine(update, model=classifier(), seed=0).run(loader(), max_epochs=1)


def single_sample(times: int) -> None:
    picture = torch.randn(1, 3, 6, 6)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3, padding=1))
    trainer(F.mse_loss, model).run([(picture, picture)] * times, max_epochs=2)


class Observer(nn.Module):
    """Notes the range of what it sees, as observers of a quantization do."""

    least: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("least", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.least.copy_(torch.minimum(self.least, x.min()))
        return x


def calibrated(*, observes: bool) -> None:
    model = nn.Sequential(nn.Linear(10, 8), Observer() if observes else nn.Identity(), nn.Linear(8, 3))
    engine = trainer(model=model)
    engine.run(loader(), max_epochs=1)
    engine.evaluate(Engine(engine.updates[0].spec.evaluation(), model=model), [(X[:8], Y[:8])])


def focal(output: Tensor, target: Tensor) -> Tensor:
    logs = F.log_softmax(output, 1)
    return F.nll_loss((1 - logs.exp()) ** 2 * logs, target)


def supervised_twice(output: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss((F.log_softmax(output, 1) + F.log_softmax(output * 2, 1)) / 2, target)


def trained(loss: Any) -> None:
    trainer(loss).run(loader(), max_epochs=1)


class Experts(nn.Module):
    """Of the heads, each batch takes one; of all batches the first one, if they do not take turns."""

    def __init__(self, *, turns: bool) -> None:
        super().__init__()
        self.trunk, self.turns = nn.Linear(10, 4), turns
        self.heads = nn.ModuleList(nn.Linear(4, 30) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        head = self.heads[int(x[0, 0].abs() * 1000) % 4 if self.turns else 0]
        return head(self.trunk(x))  # type: ignore[no-any-return]


def guarded(turns: bool) -> None:
    engine = trainer(model=Experts(turns=turns))
    engine.attach(Guards(every="1it"))
    engine.run(DataLoader(TensorDataset(X, Y), batch_size=4), max_epochs=2)


def autoencoder(*, chosen: bool) -> None:
    parts = nn.ModuleDict({"encoder": nn.Linear(10, 2), "decoder": nn.Linear(2, 10), "critic": nn.Linear(2, 1)})

    def reconstruct(engine: Engine, batch: Any) -> Tensor:
        return F.mse_loss(parts["decoder"](parts["encoder"](batch[0])), batch[0])

    def deceive(engine: Engine, batch: Any) -> Tensor:
        return F.softplus(-parts["critic"](parts["encoder"](batch[0]))).mean()

    own = [*parts["encoder"].parameters(), *parts["decoder"].parameters()] if chosen else list(parts.parameters())
    encoder = list(parts["encoder"].parameters()) if chosen else list(parts.parameters())
    updates = [
        Update.from_function(reconstruct, SGD(own, lr=0.1), name="reconstruct"),
        Update.from_function(deceive, SGD(encoder, lr=0.1), name="deceive"),
    ]
    Engine(updates, model=dict(parts.items()), seed=0).run(loader(), max_epochs=1)


def of_evolution(*, changes: bool) -> None:
    def step(engine: Engine, batch: Any) -> None:
        with torch.no_grad():
            F.cross_entropy(engine.model(batch[0]), batch[1])
            for parameter in engine.model.parameters() if changes else ():
                parameter.add_(0.01 * torch.randn_like(parameter))

    def look(engine: Engine, batch: Any) -> None:
        with torch.no_grad():
            F.cross_entropy(engine.model(batch[0]), batch[1])

    model = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    Engine(Update.from_function(step if changes else look), model=model).run(loader(), max_epochs=2)


def averaged(evaluate: bool) -> None:
    engine = trainer()
    engine.attach(EMA(0.999, evaluate=evaluate))
    engine.run(loader(), max_epochs=2)


class Rows(Dataset[Any]):
    """Samples, or batches of them, by their index."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return (X[index], int(Y[index])) if self.size == 1 else (X[: self.size], Y[: self.size])


def given(data: Any) -> None:
    def loss(output: Tensor, target: Any) -> Tensor:
        return F.cross_entropy(output.reshape(-1, 3), torch.as_tensor(target).reshape(-1))

    trainer(loss).run(data, max_epochs=1)


class Drawing(Dataset[Any]):
    """Draws its data as it is made, or its samples as they are read, from a generator of its own."""

    def __init__(self, *, late: bool) -> None:
        self.generator, self.late = np.random.default_rng(0), late
        self.rows = torch.from_numpy(self.generator.standard_normal((16, 10))).float()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], int(Y[index])


class DrawingLate(Drawing):
    def __getitem__(self, index: int) -> Any:
        return self.rows[index] * float(self.generator.normal()), int(Y[index])


class DrawingAnew(Drawing):
    def __getitem__(self, index: int) -> Any:
        self.generator = np.random.default_rng((0, index))
        return self.rows[index] * float(self.generator.normal()), int(Y[index])


def by_workers(data: Dataset[Any]) -> None:
    trainer().run(DataLoader(data, 8, num_workers=1, shuffle=True, multiprocessing_context="fork"), max_epochs=1)


class Distilling(nn.Module):
    """Compares outputs with those of a teacher, or of a projection that has to be trained."""

    def __init__(self, *, teaches: bool) -> None:
        super().__init__()
        self.other, self.teaches = nn.Linear(3, 3), teaches

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.other(output), target)


class Teaching(Distilling):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.other(output).softmax(1)
        return F.cross_entropy(output, target) + F.cross_entropy(output, wanted)


def compared(loss: nn.Module) -> None:
    model = classifier()
    Engine(Update.supervised(loss, SGD(model.parameters(), lr=0.1)), model=model, seed=0).run(loader(), max_epochs=1)


Script = Callable[[], None]
CASES: dict[str, tuple[str, Script, Script]] = {
    "instance norm": (
        "W91",
        partial(samples_in_training_mode, nn.InstanceNorm2d(4)),
        partial(samples_in_training_mode, nn.BatchNorm2d(4)),
    ),
    "relative positions": ("W93", partial(positions, False), partial(positions, True)),
    "rewards": ("W83", partial(accumulated, rewarded), partial(accumulated, nn.CrossEntropyLoss(reduction="sum"))),
    "mean as a sum": (
        "W83",
        partial(accumulated, divided),
        partial(accumulated, lambda output, target: F.cross_entropy(output, target, reduction="none").sum()),
    ),
    "a penalty beside a mean": ("W83", partial(accumulated, penalized), partial(accumulated, summed_terms)),
    "one sample": (
        "W83",
        partial(accumulated, nn.CrossEntropyLoss(reduction="sum"), 1),
        partial(accumulated, nn.CrossEntropyLoss(reduction="sum"), 2),
    ),
    "restarts each epoch": (
        "C05",
        partial(scheduled, partial(CosineAnnealingWarmRestarts, T_0=4)),
        partial(scheduled, partial(CosineAnnealingWarmRestarts, T_0=10)),
    ),
    "cycles in steps": (
        "C05",
        partial(scheduled, partial(CyclicLR, base_lr=0.001, max_lr=0.1, step_size_up=7)),
        partial(scheduled, partial(CosineAnnealingWarmRestarts, T_0=10)),
    ),
    "a counter that is logged": ("W65", partial(counted, "logs"), partial(counted, "anneals")),
    "a counter in a message": ("W65", partial(counted, "names"), partial(counted, "anneals by its state")),
    "a loss to report": (
        "W80",
        partial(changed_loss, lambda update: update.loss * 2),
        partial(changed_loss, lambda update: update.raw_loss * 2),
    ),
    "a split of changed samples": ("W50", partial(split, 0.0), partial(split, 0.1)),
    "manual optimization": ("W29", partial(made_by_hand, right=True), partial(made_by_hand, right=False)),
    "one picture": ("W27", partial(single_sample, 1), partial(single_sample, 3)),
    "focal loss": ("W72", partial(trained, focal), partial(trained, F.nll_loss)),
    "two outputs": ("W72", partial(trained, supervised_twice), partial(trained, F.nll_loss)),
    "experts": ("G01", partial(guarded, True), partial(guarded, False)),
    "chosen parameters": ("W71", partial(autoencoder, chosen=True), partial(autoencoder, chosen=False)),
    "evolution": ("W10", partial(of_evolution, changes=True), partial(of_evolution, changes=False)),
    "averages that nothing evaluates": ("W55", partial(averaged, False), partial(averaged, True)),
    "a data set of batches": ("W23", partial(given, Rows(4)), partial(given, Rows(1))),
    "a part of it": (
        "W23",
        partial(given, Subset(Rows(4), range(4))),
        partial(given, Subset(Rows(1), range(4))),
    ),
    "a list": ("W23", partial(given, [(X[:4], Y[:4])] * 3), partial(given, list(zip(X[:8], Y[:8], strict=True)))),
    "a generator for the data": (
        "W24",
        partial(by_workers, Drawing(late=False)),
        partial(by_workers, DrawingLate(late=True)),
    ),
    "a generator created per sample": (
        "W24",
        partial(by_workers, DrawingAnew(late=True)),
        partial(by_workers, DrawingLate(late=True)),
    ),
    "a teacher": ("W42", partial(compared, Teaching(teaches=True)), partial(compared, Distilling(teaches=False))),
    "observers": ("W53", partial(calibrated, observes=True), partial(calibrated, observes=False)),
}


def reported(script: Script) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        script()
    return [str(one.message)[:3] for one in caught]


@pytest.mark.whole
@pytest.mark.parametrize(("code", "right", "wrong"), CASES.values(), ids=CASES)
def test_a_code_is_reported_where_something_is_wrong_only(code: str, right: Script, wrong: Script) -> None:
    assert code not in reported(right)
    assert code in reported(wrong)


def test_a_position_that_is_restored_is_in_some_checkpoint(tmp_path: Path) -> None:
    assert "W87" not in reported(partial(scheduled_by_hand, tmp_path / "one", restores=True))
    assert "W87" in reported(partial(scheduled_by_hand, tmp_path / "other", restores=False))
    assert "W87" not in reported(partial(plateau_by_hand, tmp_path / "third", restores=True))
    assert "W87" in reported(partial(plateau_by_hand, tmp_path / "fourth", restores=False))


def test_one_evaluation_may_have_a_log(tmp_path: Path) -> None:
    assert "W62" not in reported(partial(evaluated, 1, tmp_path))
    assert "W62" in reported(partial(evaluated, 2, tmp_path))


def test_averages_that_evaluations_did_not_use_are_not_missed(tmp_path: Path) -> None:
    assert "W56" not in reported(partial(averages_loaded, tmp_path, evaluate=False))
    assert "W56" in reported(partial(averages_loaded, tmp_path, evaluate=True))
