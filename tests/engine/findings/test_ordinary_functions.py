"""What functions do by way of helpers, partial functions and objects is seen; what others do to something else is not theirs."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, StepLR
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from signalfire import DataError, Engine, Events, FindingWarning, Handler, Phase, Update, on
from signalfire.handlers import (
    EMA,
    Checkpoint,
    EarlyStopping,
    GradientAccumulation,
    Guards,
    LabelSmoothing,
    LRScheduling,
    Metrics,
    MixedPrecision,
    Validation,
)
from tests.kit import assert_same

from .test_ordinary_handlers import found
from .test_ordinary_scripts import SLOW, Script, X, Y, classifier, loader, reported, trainer


def clip(engine: Engine) -> None:
    clip_grad_norm_(engine.model.parameters(), 1.0)


def clip_to(engine: Engine, bound: float) -> None:
    clip_grad_norm_(engine.model.parameters(), bound)


def clipped(event: Any, function: Any = clip) -> list[str]:
    engine = trainer()
    engine.attach(GradientAccumulation(4))
    engine.connect(event, function)
    return found(engine)


def test_a_function_that_clips_each_fourth_batch_clips_whole_windows() -> None:
    assert "C26" in clipped(Events.BACKWARD_COMPLETED)
    assert "C26" in clipped(Events.BACKWARD_COMPLETED, partial(clip_to, bound=1.0))
    assert "C26" not in clipped(Events.BACKWARD_COMPLETED(every=4))


class Clipping(Handler):
    @on(Events.BACKWARD_COMPLETED)
    def clip(self, engine: Engine) -> None:
        clip_grad_norm_(engine.model.parameters(), 1.0)


def test_the_gradients_of_another_network_are_not_scaled() -> None:
    other = classifier()

    def clip_other(engine: Engine) -> None:
        engine.log("norm", clip_grad_norm_(other.parameters(), 1.0))

    def measure(engine: Engine, bound: float = float("inf")) -> None:
        clip_grad_norm_(engine.model.parameters(), bound)

    for function in (clip_other, measure):
        engine = trainer()
        engine.attach(MixedPrecision("fp16"))
        engine.connect(Events.BACKWARD_COMPLETED, function)
        assert "C25" not in found(engine)
    engine = trainer()
    engine.attach(MixedPrecision("fp16"), Clipping())
    assert "C25" in found(engine)


class Remembering(nn.Module):
    """Keeps the last output; or a tensor that was computed once, as it was built."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.layer, self.again = nn.Linear(10, 3), again
        self.scale: Tensor = nn.Parameter(torch.ones(3)) * 2

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(inputs) * self.scale.detach()
        return output


class Again(Remembering):
    def forward(self, inputs: Tensor) -> Tensor:
        self.scale = self.layer(inputs)
        return self.scale


def with_old_output(model: Remembering) -> None:
    model(X)
    model.layer = nn.Linear(10, 3)
    trainer(model=model).run(loader(), max_epochs=1)


def stepping(*, own: bool) -> None:
    """A receiver steps the optimizer of another engine, or of this one."""
    engine, critic = trainer(), nn.Linear(10, 1)
    other = Engine(
        Update.from_function(lambda engine, batch: critic(batch).mean(), SGD(critic.parameters(), 0.1)), model=critic
    )
    stepped = engine if own else other

    @engine.on(Events.ITERATION_COMPLETED)
    def train(engine: Engine) -> None:
        critic(X).pow(2).mean().backward()
        stepped.optimizer.step()

    engine.run(loader(), max_epochs=2)


def joint(*, steps: bool) -> None:
    """Several optimizers in one update, of which a receiver makes further steps."""
    groups = {"a": partial(Adam, lr=0.01), "b": partial(Adam, lr=0.1)}
    first, last = classifier(), nn.Linear(3, 3)
    model = nn.Sequential(first, last)

    def parts(engine: Engine) -> Any:
        return {"a": list(first.parameters()), "b": list(last.parameters())}

    update = Update.supervised(F.cross_entropy, groups, parameters=parts)
    engine = Engine(update, model=model, seed=0)

    @engine.on(Events.OPTIMIZER_STEP_COMPLETED)
    def again(engine: Engine) -> None:
        optimizer: Any = engine.updates[0].optimizer
        if steps:
            optimizer.step()

    engine.run(loader(), max_epochs=2)


def counted(*, shares: bool) -> None:
    def step(engine: Engine, batch: Any) -> Tensor:
        output: Tensor = engine.model(batch[0])
        return output * min(1.0, engine.state.iteration / 10)

    model = classifier()
    evaluator = Engine(Update(step, lambda engine, output, batch: F.cross_entropy(output, batch[1])), model=model)
    evaluator.attach(Metrics(score=lambda output, batch: output.sum()))
    update = Update(
        step if shares else evaluating, lambda engine, output, batch: F.cross_entropy(output, batch[1]), SLOW
    )
    engine = Engine(update, model=model, seed=0)
    engine.attach(Validation(evaluator, loader()))
    engine.run(loader(), max_epochs=1)


def evaluating(engine: Engine, batch: Any) -> Tensor:
    output: Tensor = engine.model(batch[0])
    return output


class Meter:
    def __init__(self) -> None:
        self.total = 0.0

    def __call__(self, value: Tensor) -> None:
        self.total += float(value)


def measured(*, meter: Meter | None) -> None:
    def loss(engine: Engine, output: Tensor, batch: Any) -> Tensor:
        value = F.cross_entropy(output, batch[1])
        meter(value) if meter is not None else None
        return value

    def plain(engine: Engine, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1])

    engine = trainer()
    evaluator = Engine(Update(evaluating, plain if meter is None else loss), model=engine.model)
    engine.attach(Validation(evaluator, loader()))
    engine.run(loader(), max_epochs=1)


def save_weights(engine: Engine) -> None:
    torch.save(engine.model.state_dict(), io.BytesIO())


def scheduled(folder: Path, *, saves: bool) -> None:
    model = classifier()
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 1)
    engine = Engine(Update.supervised(F.cross_entropy, optimizer), model=model, seed=0)
    engine.attach(Checkpoint(folder / "checkpoints"))

    @engine.on(Events.EPOCH_COMPLETED)
    def step(engine: Engine) -> None:
        scheduler.step()

    def save(engine: Engine) -> None:
        torch.save(scheduler.state_dict(), folder / "state.pt")

    engine.connect(Events.CHECKPOINT_SAVED, save if saves else save_weights)
    engine.run(loader(), max_epochs=2)


def write(engine: Engine) -> None:
    engine.log("score", 0.0)


def has_too_few_values(begin: Callable[[Engine], None]) -> bool:
    engine = trainer()
    engine.connect(Events.STARTED, begin, phase=Phase.PREPARE)
    engine.connect(Events.EPOCH_COMPLETED, write, phase=Phase.PREPARE)
    engine.attach(EarlyStopping("score", mode="max", patience=4))
    engine.run(loader(), max_epochs=4)
    return bool(engine.findings.of_run().of("C19"))


def nothing(engine: Engine) -> None: ...


def freeze(model: nn.Module) -> None:
    for part in model.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.eval()


def with_norm(change: Callable[[nn.Module], Any]) -> list[str]:
    model = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    engine = trainer(model=model)
    engine.connect(Events.EPOCH_STARTED, lambda engine: change(engine.model))
    return found(engine, DataLoader(TensorDataset(X[:25], Y[:25]), batch_size=8))


def test_a_helper_may_keep_a_norm_in_eval_mode() -> None:
    assert "C21" not in with_norm(freeze)
    assert "C21" in with_norm(lambda model: None)


def returning(change: Callable[[Engine], Any], event: Any) -> None:
    engine = trainer()
    engine.connect(event, change)
    engine.run(DataLoader(TensorDataset(X, Y), batch_size=8), max_epochs=1)


def noisy(engine: Engine) -> Any:
    inputs, targets = engine.state.batch
    return inputs + 0.1, targets


def training_another() -> Callable[[Engine], Any]:
    other = nn.Linear(10, 1)
    optimizer = SGD(other.parameters(), lr=0.1)

    def train(engine: Engine) -> Tensor:
        loss: Tensor = other(engine.state.batch[0]).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return train


def adjust(optimizer: Any, iteration: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * min(1, iteration / 10)


def step_with_warmup(engine: Engine, batch: Any) -> Tensor:
    adjust(engine.updates[0].optimizer, engine.state.iteration)
    return F.cross_entropy(engine.model(batch[0]), batch[1])


def step(engine: Engine, batch: Any) -> Tensor:
    return F.cross_entropy(engine.model(batch[0]), batch[1])


def stepped(function: Any) -> None:
    Engine(Update.from_function(function, AdamW, lr=1.0), model=classifier(), seed=0).run(loader(), max_epochs=1)


def trained(engine: Engine, **bounds: Any) -> None:
    engine.run(loader(), **bounds)


def in_range(highest: float) -> None:
    model = nn.Sequential(nn.Linear(10, 1), nn.Sigmoid())
    targets = torch.linspace(0, highest, 32)[:, None]
    trainer(F.mse_loss, model).run(DataLoader(TensorDataset(X, targets), batch_size=32), max_epochs=1)


def rounded(change: Callable[[float], float]) -> None:
    engine = trainer()
    engine.attach(LRScheduling(partial(ExponentialLR, gamma=0.9), every="1st"))

    @engine.on(Events.ITERATION_COMPLETED(every=3))
    def round_trip(engine: Engine) -> None:
        for group in engine.optimizer.param_groups:
            group["lr"] = change(group["lr"])

    engine.run(loader(), max_epochs=2)


def compared(width: int) -> None:
    engine = trainer()
    engine.run(loader(), max_epochs=1)
    other = nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 3))
    evaluator = Engine(Update.supervised(F.cross_entropy).evaluation(), model=other)
    evaluator.connect(Events.COMPLETED, nothing)
    engine.evaluate(evaluator, loader())


def own_term(engine: Engine, batch: Any) -> Tensor:
    """A term with a backward pass of its own is only shown in the loss."""
    term = 0.1 * engine.model(batch[0]).pow(2).mean()
    term.backward()
    loss: Tensor = step(engine, batch) + term.detach()
    return loss


def constant_term(engine: Engine, batch: Any) -> Tensor:
    loss: Tensor = step(engine, batch) + 0.1 * engine.model(batch[0]).detach().pow(2).mean()
    return loss


def with_penalty(*, detaches: bool) -> None:
    """A term of the loss is kept to be shown."""
    kept = []

    def penalized(engine: Engine, batch: Any) -> Tensor:
        output = engine.model(batch[0])
        penalty: Tensor = output.pow(2).mean()
        kept.append(penalty.detach() if detaches else penalty)
        return F.cross_entropy(output, batch[1]) + 0.1 * penalty

    stepped(penalized)


def evaluated_copy(*, refreshed: bool) -> None:
    engine = trainer()
    other = copy.deepcopy(engine.model)
    evaluator = Engine(Update.supervised(F.cross_entropy).evaluation(), model=other)
    evaluator.connect(Events.COMPLETED, nothing)

    def refresh(evaluator: Engine) -> None:
        other.load_state_dict(engine.model.state_dict())

    if refreshed:
        evaluator.connect(Events.STARTED, refresh)
    engine.attach(Validation(evaluator, loader()))
    engine.run(loader(), max_epochs=3)


class Agent:
    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, SGD(model.parameters(), lr=0.1)

    def learn(self, batch: Any) -> None:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def learned(*, forgets: bool) -> None:
    """A step that leaves all to an agent; or one that forgets to return its loss."""
    agent = Agent(classifier())

    def learn(engine: Engine, batch: Any) -> None:
        agent.learn(batch)

    def forget(engine: Engine, batch: Any) -> None:
        step(engine, batch)

    update = Update.from_function(forget if forgets else learn, agent.optimizer)
    Engine(update, model=agent.model, seed=0).run(loader(), max_epochs=2)


CASES: dict[str, tuple[str, Script, Script]] = {
    "an output of before": (
        "C27",
        lambda: with_old_output(Again(again=True)),
        lambda: with_old_output(Remembering(again=False)),
    ),
    "another engine": ("W17", partial(stepping, own=False), partial(stepping, own=True)),
    "a term that is kept": ("W76", partial(with_penalty, detaches=True), partial(with_penalty, detaches=False)),
    "a backward of its own": ("W99", partial(stepped, own_term), partial(stepped, constant_term)),
    "a copy that is refreshed": (
        "W51",
        partial(evaluated_copy, refreshed=True),
        partial(evaluated_copy, refreshed=False),
    ),
    "an agent": ("W29", partial(learned, forgets=False), partial(learned, forgets=True)),
    "several optimizers": ("W17", partial(joint, steps=False), partial(joint, steps=True)),
    "a step for evaluations": ("W65", partial(counted, shares=False), partial(counted, shares=True)),
    "a meter": ("C20", partial(measured, meter=Meter()), partial(measured, meter=None)),
    "training another": (
        "W85",
        lambda: returning(training_another(), Events.LOSS_COMPUTED),
        lambda: returning(noisy, Events.GET_BATCH_COMPLETED),
    ),
    "rates of a helper": ("C28", partial(stepped, step_with_warmup), partial(stepped, step)),
    "noisy targets": ("W77", partial(in_range, 1.02), partial(in_range, 1.5)),
    "a rate in float32": (
        "W89",
        partial(rounded, lambda rate: float(torch.tensor(rate))),
        partial(rounded, lambda rate: rate * 0.5),
    ),
    "a smaller model": ("W51", partial(compared, 4), partial(compared, 8)),
}


@pytest.mark.whole
@pytest.mark.parametrize(("code", "right", "wrong"), CASES.values(), ids=CASES)
def test_a_code_is_reported_where_something_is_wrong_only(code: str, right: Script, wrong: Script) -> None:
    assert code not in reported(right)
    assert code in reported(wrong)


def test_a_partial_function_may_write_the_first_value() -> None:
    assert not has_too_few_values(partial(write))
    assert has_too_few_values(partial(nothing))


def test_a_scheduler_whose_state_a_receiver_saves_has_a_position(tmp_path: Path) -> None:
    assert "W87" not in reported(partial(scheduled, tmp_path, saves=True))
    assert "W87" in reported(partial(scheduled, tmp_path, saves=False))


class Holding(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.inner(output, target)
        return loss


def test_a_loss_that_holds_one_which_smooths_labels_smooths_them() -> None:
    for smoothing in (0.0, 0.1):
        engine = trainer(Holding(nn.CrossEntropyLoss(label_smoothing=smoothing)))
        engine.attach(LabelSmoothing())
        assert ("C29" in found(engine)) is (smoothing > 0)


def test_a_schedule_in_epochs_ends_with_the_last_epoch_that_the_run_can_make() -> None:
    engine = trainer()
    engine.attach(LRScheduling(CosineAnnealingLR, every="1ep"))
    codes = reported(partial(trained, engine, max_epochs=100, max_iters=12))  # three epochs
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)
    assert not {"C05", "C06"} & {*codes}


# ---- looks that would draw, or raise ------------------------------------------------------------------------------------


class Drawing(Sampler[list[int]]):
    """A sampler of batches that draws its order, also to know how many there are."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(32).tolist()
        yield from (order[start : start + 8] for start in range(0, 32, 8))

    def __len__(self) -> int:
        return len(list(iter(self)))


def drawn(*handlers: Handler, of_iterator: bool = False) -> Any:
    torch.manual_seed(0)
    engine = trainer()
    engine.attach(*handlers)
    data: Any = DataLoader(TensorDataset(X, Y), batch_sampler=Drawing())
    engine.run(iter(data) if of_iterator else data, max_epochs=1 if of_iterator else 2)
    return engine.model


def plain(epochs: int) -> Any:
    torch.manual_seed(0)
    engine = trainer()
    engine.detach("findings")
    data: Any = DataLoader(TensorDataset(X, Y), batch_sampler=Drawing())
    engine.run(iter(data) if epochs == 1 else data, max_epochs=epochs)
    return engine.model


def test_no_look_asks_data_for_a_length_that_draws() -> None:
    assert_same(drawn(Guards(every="1it")), plain(2))
    assert_same(drawn(of_iterator=True), plain(1))


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.ones(10), torch.tensor(1)


def test_streams_and_lazy_layers_are_looked_at() -> None:
    engine = trainer()
    engine.run(DataLoader(Endless(), batch_size=4), max_epochs=1, epoch_length=2)
    assert not engine.findings.of_run().of("W09")
    lazy = trainer(model=nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3)))
    assert "W09" not in [one.code for one in lazy.check(loader(), max_epochs=1)]


def test_an_iterator_that_is_at_its_end_cannot_be_iterated_again() -> None:
    again = "in epoch 2, although it had batches in epoch 1, so it cannot be iterated again"
    with pytest.warns(FindingWarning, match="C24"), pytest.raises(DataError, match=again):
        trainer().run(iter(loader()), max_epochs=2)


# ---- Guards and averages in pieces of a run -----------------------------------------------------------------------------


def test_guards_look_at_the_first_iterations_of_a_run_in_pieces_and_can_be_copied() -> None:
    engine, guards, seen = trainer(), Guards(every="50it"), list[int]()
    engine.attach(guards)

    @engine.on(Events.ITERATION_COMPLETED)
    def note(engine: Engine) -> None:
        if engine.signal(Events.LOSS_COMPUTED).connections:
            seen.append(engine.state.iteration)
        if engine.state.iteration == 4:
            copy.deepcopy(guards)

    for iterations in (1, 2, 4):
        engine.run(loader(), max_iters=iterations)
    assert seen == [1, 2, 3]
    assert not engine.findings.of_run().of("C17")


def test_a_lagging_average_is_reported_again_for_a_new_training() -> None:
    update, model = Update.supervised(F.cross_entropy, SLOW), classifier()
    evaluator = Engine(update.evaluation(), model=model)
    evaluator.connect(Events.COMPLETED, nothing)
    engine = Engine(update, model=model, seed=0)
    engine.attach(EMA(0.999), Validation(evaluator, loader()))
    assert "W55" in reported(partial(trained, engine, max_epochs=1))
    engine.reset()
    assert "W55" in reported(partial(trained, engine, max_epochs=1))
