"""Ordinary models, losses and functions in which nothing is wrong, each beside one in which something is."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from signalfire import Engine, Events, Handler, Update, on
from signalfire.findings.codes import PRINTED
from signalfire.handlers import Accuracy, GradientAccumulation, GradientClipping, Guards, Preemption, Validation

from .test_ordinary_scripts import SLOW, X, Y, classifier, loader, trainer

Run = Callable[[], Engine]


def trained(
    loss: Any = F.cross_entropy, model: nn.Module | None = None, *handlers: Handler, data: Any = None, epochs: int = 1
) -> Engine:
    engine = trainer(loss, model)
    engine.attach(*handlers)
    engine.run(loader() if data is None else data, max_epochs=epochs)
    return engine


def stepped(step: Any, model: nn.Module, *handlers: Handler, data: Any = None) -> Engine:
    engine = Engine(Update.from_function(step, partial(Adam, lr=1e-3)), model=model, seed=0)
    engine.attach(*handlers)
    engine.run(loader() if data is None else data, max_epochs=1)
    return engine


class Waves(nn.Module):
    """Learned frequencies, as many as a batch has samples."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.frequencies, self.output = nn.Parameter(torch.randn(size)), nn.Linear(size, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.output(torch.sin(inputs * self.frequencies))
        return output


def waves(*, flat: bool) -> Engine:
    inputs = torch.rand(32, 1)
    targets = torch.sin(inputs)[:, 0] if flat else torch.sin(inputs)
    data = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
    return trained(lambda output, target: (output - target).square().mean(), Waves(8), data=data)


def in_windows(loss: Any, size: int = 8) -> Engine:
    return trained(loss, None, GradientAccumulation(4), data=loader(size))


class Reader(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 6, layers, batch_first=True, bidirectional=True)
        self.output = nn.Linear(12, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.output(self.layer(inputs)[0][:, -1])
        return output


def reading(layers: int) -> Engine:
    data = DataLoader(TensorDataset(torch.randn(32, 7, 4), Y), batch_size=8, shuffle=True)
    return trained(F.cross_entropy, Reader(layers), data=data)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(12, 8, padding_idx=0), nn.Linear(8, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.output(self.embedding(tokens)).transpose(1, 2)
        return output


def tokens() -> Any:
    data = torch.randint(1, 12, (32, 9))
    data[::2, 4:] = 0
    return DataLoader(TensorDataset(data), batch_size=8, shuffle=True)


def denoising(*, corrupts: bool) -> Engine:
    def step(engine: Engine, batch: Any) -> Tensor:
        given = batch[0].clone()
        if corrupts:
            given[torch.rand(given.shape) < 0.3] = 1
        return F.cross_entropy(engine.model(given), batch[0], ignore_index=0)

    return stepped(step, Tokens(), data=tokens())


def padded(*, logs: bool) -> Engine:
    def step(engine: Engine, batch: Any) -> Tensor:
        output, target = engine.model(batch[0][:, :-1]), batch[0][:, 1:]
        if not logs:
            return F.cross_entropy(output, target)
        with torch.no_grad():
            engine.log("with padding", F.cross_entropy(output, target))
        return F.cross_entropy(output, target, ignore_index=0)

    return stepped(step, Tokens(), data=tokens())


def added(*, detaches: bool) -> Engine:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        value = F.cross_entropy(output, target)
        value += 0.1 * (output.detach() if detaches else output).square().mean()
        return value

    return trained(loss)


def evaluated_too(prefix: str) -> Engine:
    """A part of the training data is evaluated beside held-out data."""
    data = TensorDataset(X, Y)
    train, held = Subset(data, range(24)), Subset(data, range(24, 32))
    engine = trainer()
    engine.attach(Validation(DataLoader(held, 8), accuracy=Accuracy()))
    engine.attach(
        Validation(DataLoader(Subset(train, range(8)), 8), accuracy=Accuracy(), prefix=prefix, name="on_some")
    )
    engine.run(DataLoader(train, 8, shuffle=True), max_epochs=1)
    return engine


class Drawn(Dataset[Any]):
    """Samples that are drawn as they are read, or that are not."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        index = int(torch.randint(32, ()))
        return X[index], Y[index]


class Fixed(Drawn):
    def __getitem__(self, index: int) -> Any:
        return X[index], Y[index]


def clipping(*, each: bool) -> Engine:
    engine = trainer()
    engine.attach(GradientAccumulation(2))

    def last(engine: Engine) -> None:
        if engine.state.iteration % 2 == 0:
            clip_grad_norm_(engine.model.parameters(), 1.0)

    def always(engine: Engine) -> None:
        clip_grad_norm_(engine.model.parameters(), 1.0)

    engine.connect(Events.BACKWARD_COMPLETED, always if each else last)
    engine.run(loader(), max_epochs=1)
    return engine


def measuring(bound: float) -> Engine:
    engine = trainer()
    engine.attach(GradientClipping(max_norm=1.0))
    engine.connect(Events.GRADIENTS_READY, lambda engine: clip_grad_norm_(engine.model.parameters(), bound) and None)
    engine.run(loader(), max_epochs=1)
    return engine


class Probing(nn.Module):
    """Has layers in a list, which something beside the engine trains, or nothing does."""

    def __init__(self, *, trains: bool) -> None:
        super().__init__()
        self.inner = classifier()
        self.probes = [nn.Linear(3, 3)]
        self._optimizer = SGD(self.probes[0].parameters(), lr=0.1) if trains else None

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.inner(inputs)
        return output


def half(*, head: bool) -> Engine:
    model = nn.ModuleDict({"backbone": classifier().half(), "head": nn.Linear(3, 3)})
    if head:
        model["head"].half()

    def step(engine: Engine, batch: Any) -> Tensor:
        with torch.no_grad():
            features = engine.model["backbone"](batch[0].half())
        return F.cross_entropy(engine.model["head"](features.half() if head else features.float()).float(), batch[1])

    optimizer = SGD(model["head"].parameters(), lr=0.1)
    engine = Engine(Update.from_function(step, optimizer), model=model, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.run(loader(), max_epochs=1)
    return engine


def chained(*, between: bool) -> Engine:
    def by_layer(engine: Engine, batch: Any) -> Tensor:
        model: Any = engine.model
        return F.cross_entropy(model[2](F.relu(model[1](F.relu(model[0](batch[0]))))), batch[1])

    def step(engine: Engine, batch: Any) -> Tensor:
        return F.cross_entropy(engine.model(batch[0]), batch[1])

    return stepped(by_layer if between else step, nn.Sequential(nn.Linear(10, 8), nn.Linear(8, 8), nn.Linear(8, 3)))


def normalizing(*, sets: bool) -> Engine:
    model = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8, momentum=0.99), nn.Linear(8, 3))
    engine = trainer(model=model)

    def change(engine: Engine) -> None:
        norm: Any = model[1]
        norm.momentum = 0.1

    if sets:
        engine.connect(Events.EPOCH_STARTED, change)
    engine.run(loader(), max_epochs=1)
    return engine


def single_last(*, freezes: bool) -> Engine:
    model = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    engine = trainer(model=model)
    if freezes:
        engine.connect(Events.EPOCH_STARTED, lambda engine: model[1].eval() and None)
    data = DataLoader(TensorDataset(X[:25], Y[:25]), batch_size=8)
    with nullcontext() if freezes else pytest.raises(ValueError, match="more than 1 value per channel"):
        engine.run(data, max_epochs=1)
    return engine


def large_rate(*, by_hand: bool) -> Engine:
    engine = Engine(Update.supervised(F.cross_entropy, partial(Adam, lr=1.0)), model=classifier(), seed=0)

    def warm_up(engine: Engine) -> None:
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e-3 * engine.state.iteration

    if by_hand:
        engine.connect(Events.ITERATION_STARTED, warm_up)
    engine.run(loader(), max_epochs=1)
    return engine


class Saving(Handler):
    """Writes the state itself."""

    @on(Events.EPOCH_COMPLETED)
    def write(self, engine: Engine) -> None:
        save_run(engine)


def save_run(engine: Engine) -> None:
    torch.save(engine.state_dict(), io.BytesIO())


def put_in_eval(model: nn.Module) -> Engine:
    engine = trainer(model=model)
    engine.attach(Guards())
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: engine.model.eval() and None)
    engine.run(loader(), max_epochs=1)
    return engine


def left_over(*, clears: bool) -> Engine:
    def step(engine: Engine, batch: Any) -> Tensor:
        if clears:
            engine.optimizer.zero_grad()
        return F.cross_entropy(engine.model(batch[0]), batch[1])

    engine = Engine(Update.from_function(step, SLOW), model=classifier(), seed=0)
    engine.attach(Guards())
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: engine.model(X).square().mean().backward())
    engine.run(loader(), max_epochs=1)
    return engine


def distilled(*, uses_labels: bool) -> Engine:
    """Labels of other classes, which the loss does not use; or targets that are all zero for them."""
    teacher = copy.deepcopy(net := nn.Linear(10, 4)).requires_grad_(False)
    data = [(X[start : start + 8], torch.arange(8) + 2) for start in range(0, 32, 8)]

    def loss(engine: Engine, output: Tensor, batch: Any) -> Tensor:
        if uses_labels:
            return F.binary_cross_entropy_with_logits(output, F.one_hot(batch[1], 10)[:, :4].float())
        return F.kl_div(output.log_softmax(1), teacher(batch[0]).softmax(1), reduction="batchmean")

    engine = Engine(Update(lambda engine, batch: engine.model(batch[0]), loss, SLOW), model=net, seed=0)
    engine.attach(Guards())
    engine.run(data, max_epochs=1)
    return engine


def of_one_class(*, uses_labels: bool) -> Engine:
    """Batches of one class each, of which a reconstruction does not know."""
    data = [(X[start : start + 8].sigmoid(), torch.full((8,), start // 8)) for start in range(0, 32, 8)]
    model = nn.Linear(10, 10)

    def loss(engine: Engine, output: Tensor, batch: Any) -> Tensor:
        if uses_labels:
            return F.cross_entropy(output, batch[1])
        return F.binary_cross_entropy_with_logits(output, batch[0])

    engine = Engine(Update(lambda engine, batch: engine.model(batch[0]), loss, SLOW), model=model, seed=0)
    engine.attach(Guards())
    engine.run(data, max_epochs=1)
    return engine


def adversaries(*, always: bool) -> Engine:
    """A part that is frozen in every second iteration, as a discriminator is; or always, while its statistics move."""
    model = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    engine = trainer(model=model)
    engine.attach(Guards())

    def freeze(engine: Engine) -> None:
        model[1].requires_grad_(not always and engine.state.iteration % 2 == 0)

    engine.connect(Events.UPDATE_STARTED, freeze)
    engine.run(loader(), max_epochs=1)
    return engine


CASES: dict[str, tuple[str, Run, Run]] = {
    "frequencies": ("W73", partial(waves, flat=False), partial(waves, flat=True)),
    "a sum divided by the number of samples": (
        "W74",
        partial(in_windows, lambda output, target: F.cross_entropy(output, target, reduction="sum") / len(output), 4),
        partial(in_windows, lambda output, target: F.cross_entropy(output, target) / 4),
    ),
    "a weight": (
        "W74",
        partial(in_windows, lambda output, target: 0.25 * (output.logsumexp(1) - output[:, 0]).mean()),
        partial(in_windows, lambda output, target: (F.cross_entropy(output, target) + output.square().mean()) / 4),
    ),
    "two recurrent layers": ("W94", partial(reading, 2), partial(reading, 1)),
    "corrupted tokens": ("W98", partial(denoising, corrupts=True), partial(denoising, corrupts=False)),
    "a loss that is logged": ("W95", partial(padded, logs=True), partial(padded, logs=False)),
    "a term that is added in place": ("W99", partial(added, detaches=False), partial(added, detaches=True)),
    "training data on purpose": ("C14", partial(evaluated_too, "train_"), partial(evaluated_too, "some_")),
    "samples that are drawn": (
        "C13",
        lambda: trained(data=DataLoader(Drawn(), 8), epochs=2),
        lambda: trained(data=DataLoader(Fixed(), 8), epochs=2),
    ),
    "the last batch of a window": ("C26", partial(clipping, each=False), partial(clipping, each=True)),
    "a norm that is measured": ("C04", partial(measuring, 1e9), partial(measuring, 1.0)),
    "a probe": (
        "C27",
        lambda: trained(model=Probing(trains=True)),
        lambda: trained(model=Probing(trains=False)),
    ),
    "a backbone in half precision": ("C32", partial(half, head=False), partial(half, head=True)),
    "activations in the step": ("C37", partial(chained, between=True), partial(chained, between=False)),
    "a momentum that a function sets": ("C34", partial(normalizing, sets=True), partial(normalizing, sets=False)),
    "frozen statistics": ("C21", partial(single_last, freezes=True), partial(single_last, freezes=False)),
    "a warm-up in a function": ("C28", partial(large_rate, by_hand=True), partial(large_rate, by_hand=False)),
    "a handler that saves": (
        "C31",
        lambda: trained(F.cross_entropy, None, Preemption(), Saving()),
        lambda: trained(F.cross_entropy, None, Preemption()),
    ),
    "eval mode without effect": (
        "G06",
        partial(put_in_eval, classifier()),
        partial(put_in_eval, nn.Sequential(nn.Linear(10, 8), nn.Dropout(0.1), nn.Linear(8, 3))),
    ),
    "gradients that the step clears": ("G10", partial(left_over, clears=True), partial(left_over, clears=False)),
    "labels that nothing uses": (
        "G12",
        partial(distilled, uses_labels=False),
        partial(distilled, uses_labels=True),
    ),
    "classes that nothing uses": (
        "G15",
        partial(of_one_class, uses_labels=False),
        partial(of_one_class, uses_labels=True),
    ),
    "a part that is frozen at times": ("G21", partial(adversaries, always=False), partial(adversaries, always=True)),
}


def codes_of(run: Run) -> set[str]:
    """The codes that a run reports, as warnings or as lines on stderr."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run().findings.of_run()
    return {one.code for one in found if one.severity == "warning" or one.code in PRINTED}


@pytest.mark.whole
@pytest.mark.parametrize(("code", "right", "wrong"), CASES.values(), ids=CASES)
def test_a_code_is_found_where_something_is_wrong_only(code: str, right: Run, wrong: Run) -> None:
    assert code not in codes_of(right)
    assert code in codes_of(wrong)
