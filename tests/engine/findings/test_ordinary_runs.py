"""Ordinary runs in which nothing is wrong, each beside one in which something is: steps, schedules, data, evaluations."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from signalfire import Engine, Events, Phase, Update
from signalfire.handlers import (
    Accuracy,
    Checkpoint,
    EarlyStopping,
    GradientAccumulation,
    LRScheduling,
    Metrics,
    ProgressBar,
    Validation,
)

from .test_ordinary_scripts import SLOW, Script, X, Y, classifier, loader, reported, trainer


def in_order(size: int = 8) -> Any:
    return DataLoader(TensorDataset(X, Y), batch_size=size)


def batches() -> list[Any]:
    return [(X[start : start + 8].clone(), Y[start : start + 8]) for start in range(0, 32, 8)]


def decaying(last: float) -> None:
    """A linear schedule that ends at this factor in the step after the last."""
    engine = trainer()
    engine.attach(LRScheduling(partial(LambdaLR, lr_lambda=lambda step: 1 - (1 - last) * step / 12), every="1st"))
    engine.run(loader(), max_epochs=3)


def writing(change: Callable[[Tensor], Any], epochs: int = 3) -> None:
    def step(engine: Engine, batch: Any) -> Tensor:
        change(batch[0])
        return F.cross_entropy(engine.model(batch[0]), batch[1])

    Engine(Update.from_function(step, SLOW), model=classifier(), seed=0).run(batches(), max_epochs=epochs)


def auto_decoder() -> None:
    codes = [(nn.Parameter(torch.randn(8, 4)), inputs) for inputs, _ in batches()]
    decoder = nn.Linear(4, 10)

    def step(engine: Engine, batch: Any) -> Tensor:
        return F.mse_loss(engine.model(batch[0]), batch[1])

    optimizer = Adam([*decoder.parameters(), *(code for code, _ in codes)], lr=1e-2)
    Engine(Update.from_function(step, optimizer), model=decoder).run(codes, max_epochs=3)


def by_hand(*, returns: bool) -> None:
    def step(engine: Engine, batch: Any) -> Tensor | None:
        optimizer: Any = engine.optimizer
        optimizer.zero_grad()
        loss = F.cross_entropy(engine.model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return F.cross_entropy(engine.model(batch[0]), batch[1]) if returns else None

    Engine(Update.from_function(step, partial(Adam, lr=1e-2)), model=classifier()).run(loader(), max_epochs=2)


class Private(SGD):
    """Sums clipped gradients of batches itself, as differential privacy does; or forgets them."""

    sums = True

    def take(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            if self.sums:
                parameter.summed = getattr(parameter, "summed", 0) + parameter.grad.clamp(-1, 1)
            parameter.grad = torch.zeros_like(parameter.grad)

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if self.sums:
                parameter.grad, parameter.summed = parameter.summed / 2, 0
        return super().step(closure)


class Forgetful(Private):
    sums = False


def private(kind: type[Private]) -> None:
    engine = Engine(Update.supervised(F.cross_entropy, kind, lr=0.1), model=classifier(), seed=0)
    engine.attach(GradientAccumulation(2))
    engine.connect(Events.BACKWARD_COMPLETED, lambda engine: engine.optimizer.take())
    engine.run(loader(), max_epochs=1)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = classifier()

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.inner(inputs)
        return output


def probed(*, trains: bool) -> None:
    """A probe that is added in the first iteration, and that an optimizer beside the engine trains."""
    engine = trainer(model=Wrapped())
    optimizers: list[SGD] = []

    def add(engine: Engine) -> None:
        engine.model.probe = nn.Linear(10, 2)
        if trains:
            optimizers.append(SGD(engine.model.probe.parameters(), lr=0.1))

    def train(engine: Engine) -> None:
        engine.model.probe(X).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    engine.connect(Events.ITERATION_COMPLETED(once=1), add)
    engine.connect(Events.ITERATION_COMPLETED(after=2), train)
    engine.run(loader(), max_epochs=2)


def stopped_early(*, at_start: bool) -> Engine:
    engine = trainer()
    for event in [Events.EPOCH_COMPLETED, *[Events.STARTED] * at_start]:
        engine.connect(event, lambda engine: engine.log("score", 1.0), phase=Phase.PREPARE)
    engine.attach(EarlyStopping("score", mode="max", patience=5))
    engine.run(loader(), max_epochs=5)
    return engine


def drawn(sampler: Any) -> None:
    engine = trainer()
    data = DataLoader(TensorDataset(X, Y), batch_sampler=BatchSampler(sampler, 8, drop_last=False))
    engine.attach(Validation(data, accuracy=Accuracy()))
    engine.run(loader(), max_epochs=1)


def cut(*, drops: bool) -> None:
    engine = trainer()
    sampler = BatchSampler(SequentialSampler(X), 12, drop_last=drops)
    engine.attach(Validation(DataLoader(TensorDataset(X, Y), batch_sampler=sampler), accuracy=Accuracy()))
    engine.run(loader(), max_epochs=1)


class Stream:
    """Batches without end, of which four make an epoch."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(batches())


def streamed(length: int | None) -> None:
    trainer().run(Stream(), max_epochs=2, epoch_length=length)


def connected(first: Phase, second: Phase) -> None:
    engine = trainer()

    def norm(engine: Engine) -> None:
        sum(p.grad.norm() for p in engine.model.parameters())

    engine.connect(Events.GRADIENTS_READY, norm, phase=first)
    engine.connect(Events.GRADIENTS_READY(every=2), norm, phase=second)
    engine.run(loader(), max_epochs=1)


def stepped_outside(epochs: int) -> None:
    model = classifier()
    optimizer = SLOW(model.parameters())
    scheduler = StepLR(optimizer, 2)
    engine = Engine(Update.supervised(F.cross_entropy, optimizer), model=model, seed=0)
    for epoch in range(0, 4, epochs):
        engine.run(loader(), max_epochs=epoch + epochs)
        if epochs == 1:
            scheduler.step()


def evaluated_after(make: Callable[[nn.Module], nn.Module]) -> None:
    """The metrics of an average of the weights, or of a model that has nothing to do with them."""
    engine = trainer()
    average = make(engine.model)

    def update(engine: Engine) -> None:
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), engine.model.parameters(), strict=True):
                mean.lerp_(weight, 0.1)

    if average is not None and make is copy.deepcopy:
        engine.connect(Events.OPTIMIZER_STEP_COMPLETED, update)
    evaluator = Engine(Update.supervised(F.cross_entropy), model=average)
    evaluator.attach(Metrics(accuracy=Accuracy()))
    engine.run(loader(), max_epochs=2)
    engine.evaluate(evaluator, in_order())


class Normalizing(nn.Module):
    """Normalizes its inputs itself, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = classifier()

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.inner(inputs.sub_(128).div_(64))
        return output


def normalized(scale: float) -> None:
    engine = trainer(model=Normalizing())
    raw = TensorDataset(torch.rand(32, 10) * 255, Y)
    other = TensorDataset(torch.rand(32, 10) * 255 * scale, Y)
    engine.attach(Validation(DataLoader(other, batch_size=8), accuracy=Accuracy()))
    engine.run(DataLoader(raw, batch_size=8), max_epochs=1)


def continued(*, target: bool) -> None:
    """A second run, whose STARTED copies the weights to a target network, or initializes them again."""
    online, other = classifier(), classifier().requires_grad_(False)
    update = Update(
        lambda engine, batch: engine.model["online"](batch[0]),
        lambda engine, output, batch: F.cross_entropy(output, batch[1]),
        SLOW,
        parameters="online",
    )
    engine = Engine(update, model={"online": online, "target": other}, seed=0)

    def start(engine: Engine) -> None:
        changed, source = (other, online) if target else (online, classifier())
        changed.load_state_dict(source.state_dict())

    engine.connect(Events.STARTED, start)
    for epochs in (1, 2):
        engine.run(loader(), max_epochs=epochs)


class Experts(nn.Module):
    """Leaves a loss for the module around it in each forward; or a state for its own next forward."""

    def __init__(self, *, carries: bool) -> None:
        super().__init__()
        self.layer, self.carries = nn.Linear(10, 3), carries
        self.extra = torch.zeros(3)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(inputs)
        self.extra = self.extra * 0.9 + output.detach().mean(0) if self.carries else output.mean(0)
        return output


class Forgetting(Experts):
    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(inputs)
        self.extra = output.mean(0)
        return output


class Around(nn.Module):
    def __init__(self, inner: Experts) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.inner(inputs)
        return output + 0 * self.inner.extra


def leaving(inner: Experts, folder: Any) -> None:
    engine = trainer(model=Around(inner))
    engine.attach(Checkpoint(folder))
    engine.run(loader(), max_epochs=2)


def shown(name: str) -> None:
    def loss(model: str, engine: Engine, batch: Any) -> Tensor:
        return F.cross_entropy(engine.model[model](batch[0]), batch[1])

    updates = [Update.from_function(partial(loss, one), SLOW, name=one, parameters=one) for one in "ab"]
    engine = Engine(updates, model={"a": classifier(), "b": classifier()}, seed=0)
    engine.attach(ProgressBar([name], file=open_nothing()))
    engine.run(loader(), max_epochs=2)


def open_nothing() -> Any:
    return io.StringIO()


CASES: dict[str, tuple[str, Script, Script]] = {
    "a schedule that ends below 0": ("W18", partial(decaying, -1 / 11), partial(decaying, -1.0)),
    "a write that changes nothing": (
        "W28",
        partial(writing, lambda inputs: inputs.clamp_(min=0)),
        partial(writing, lambda inputs: inputs.mul_(0.5)),
    ),
    "the last epoch": (
        "W28",
        partial(writing, lambda inputs: inputs.mul_(0.5), epochs=1),
        partial(writing, lambda inputs: inputs.mul_(0.5), epochs=2),
    ),
    "trained inputs": ("W28", auto_decoder, partial(writing, lambda inputs: inputs.add_(1.0))),
    "manual optimization": ("W17", partial(by_hand, returns=False), partial(by_hand, returns=True)),
    "an optimizer that sums itself": ("W16", partial(private, Private), partial(private, Forgetful)),
    "a probe": ("W11", partial(probed, trains=True), partial(probed, trains=False)),
    "a batch sampler": (
        "W20",
        partial(drawn, RandomSampler(X)),
        partial(drawn, WeightedRandomSampler(torch.ones(32).tolist(), 32)),
    ),
    "a batch sampler that drops": ("W59", partial(cut, drops=False), partial(cut, drops=True)),
    "an endless stream": ("W21", partial(streamed, 4), partial(streamed, None)),
    "before and after clipping": (
        "W44",
        partial(connected, Phase.PREPARE, Phase.RECORD),
        partial(connected, Phase.RECORD, Phase.RECORD),
    ),
    "a loop around the run": ("W86", partial(stepped_outside, 1), partial(stepped_outside, 4)),
    "an averaged copy of the model": (
        "W51",
        partial(evaluated_after, copy.deepcopy),
        partial(evaluated_after, lambda model: classifier()),
    ),
    "inputs normalized in place": ("W60", partial(normalized, 1.0), partial(normalized, 1 / 255)),
    "a target network": ("W68", partial(continued, target=True), partial(continued, target=False)),
    "the loss of an update": ("W61", partial(shown, "loss/a"), partial(shown, "loss/c")),
}


@pytest.mark.whole
@pytest.mark.parametrize(("code", "right", "wrong"), CASES.values(), ids=CASES)
def test_a_code_is_reported_where_something_is_wrong_only(code: str, right: Script, wrong: Script) -> None:
    assert code not in reported(right)
    assert code in reported(wrong)


def test_a_metric_of_the_initial_weights_counts_for_the_patience() -> None:
    first, other = stopped_early(at_start=True), stopped_early(at_start=False)
    assert first.state.stop_reason is not None
    assert other.state.stop_reason is None
    assert not first.findings.of_run().of("C19")
    assert other.findings.of_run().of("C19")
