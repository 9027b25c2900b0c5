"""Ordinary compositions in which nothing is wrong, each beside one in which something is: handlers, evaluators, models."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam

from signalfire import Engine, Events, FindingWarning, Phase, Update
from signalfire.handlers import (
    EMA,
    Checkpoint,
    GradientAccumulation,
    Guards,
    MixedPrecision,
    ProgressBar,
    Validation,
)

from .test_ordinary_scripts import SLOW, Script, X, Y, classifier, loader, reported, trainer


def stepped(*, loads: bool) -> None:
    """The state of the optimizer is replaced within an epoch; or a receiver makes steps."""
    engine = Engine(Update.supervised(F.cross_entropy, Adam, lr=0.01), model=classifier(), seed=0)

    def load(optimizer: Any) -> None:
        state = copy.deepcopy(optimizer.state_dict())
        for one in state["state"].values():
            one["step"] += 100
        optimizer.load_state_dict(state)

    @engine.on(Events.OPTIMIZER_STEP_COMPLETED(once=6))
    def change(engine: Engine) -> None:
        optimizer: Any = engine.updates[0].optimizer
        load(optimizer) if loads else optimizer.step()

    engine.run(loader(), max_epochs=3)


def bad_batch(guard: Callable[[Engine], None]) -> None:
    """A loss that is NaN, whose gradients a receiver drops."""
    engine = trainer()
    engine.connect(Events.GRADIENTS_READY, guard)
    engine.run([(X[:8], Y[:8]), (X[8:16], Y[8:16]), (X[16:24] * float("nan"), Y[16:24])], max_epochs=1)


def dropping(engine: Engine) -> None:
    if not all(bool(p.grad.isfinite().all()) for p in engine.model.parameters() if p.grad is not None):
        engine.optimizer.zero_grad()


def zeroing(engine: Engine) -> None:
    if engine.state.iteration == 3:
        engine.optimizer.zero_grad()


def shown(name: str) -> None:
    engine = trainer()
    engine.attach(ProgressBar([name], file=io.StringIO()))

    @engine.on(Events.EPOCH_COMPLETED, phase=Phase.PERSIST)
    def measure(engine: Engine) -> None:
        engine.log("norm", 1.0)

    engine.run(loader(), max_epochs=1)


def repeated(data: list[Any], every: str = "1it") -> None:
    engine = trainer()
    engine.attach(Guards(every=every))
    engine.run(data, max_epochs=1, epoch_length=40)


def equal_batches() -> list[Any]:
    return [(X[:8].clone(), Y[:8]) for _ in range(8)]


def distilled(teacher: nn.Module) -> None:
    def step(engine: Engine, batch: Any) -> Tensor:
        output = engine.modules["student"](batch[0])
        with torch.no_grad():
            wanted = engine.modules["teacher"](batch[0])
        return F.cross_entropy(output, batch[1]) + F.mse_loss(output, wanted)

    update = Update.from_function(step, SLOW, parameters="student")
    engine = Engine(update, model={"student": normalizing(3), "teacher": teacher}, seed=0)
    engine.attach(Guards())
    engine.run(loader(), max_epochs=1)


def normalizing(outputs: int, width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(10, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, outputs))


class OfZeros(nn.Module):
    """Two layers that begin with zeros: heads beside each other, or a chain."""

    def __init__(self, *, chained: bool) -> None:
        super().__init__()
        inner = 6 if chained else 10
        self.actor, self.critic, self.chained = nn.Linear(10, inner, bias=False), nn.Linear(inner, 3), chained
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.actor(inputs)
        result: Tensor = self.critic(output) if self.chained else self.critic(inputs) + output[:, :3]
        return result


def of_zeros(*, chained: bool) -> None:
    trainer(model=OfZeros(chained=chained)).run(loader(), max_epochs=1)


CASES: dict[str, tuple[str, Script, Script]] = {
    "a loaded state of the optimizer": ("W17", partial(stepped, loads=True), partial(stepped, loads=False)),
    "a guard of the user's": ("W15", partial(bad_batch, dropping), partial(bad_batch, zeroing)),
    "a metric that is written late": ("W61", partial(shown, "norm"), partial(shown, "nrom")),
    "one object": ("G11", partial(repeated, [(X[:8], Y[:8])] * 40), partial(repeated, equal_batches())),
    "the same place of the data": (
        "G11",
        partial(repeated, [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 32, 8)], "4it"),
        partial(repeated, equal_batches(), "4it"),
    ),
    "a teacher beside its student": (
        "G21",
        partial(distilled, normalizing(3).requires_grad_(False)),
        partial(distilled, normalizing(3, 4).requires_grad_(False)),
    ),
    "heads of zeros": ("C33", partial(of_zeros, chained=False), partial(of_zeros, chained=True)),
}


@pytest.mark.whole
@pytest.mark.parametrize(("code", "right", "wrong"), CASES.values(), ids=CASES)
def test_a_code_is_reported_where_something_is_wrong_only(code: str, right: Script, wrong: Script) -> None:
    assert code not in reported(right)
    assert code in reported(wrong)


# ---- engine.check -------------------------------------------------------------------------------------------------------


def found(engine: Engine, data: Any = None, epochs: int = 1) -> list[str]:
    checked = engine.check(loader() if data is None else data, max_epochs=epochs)
    return [one.code for one in checked if one.severity == "warning"]


def test_an_evaluator_may_have_an_average_that_the_user_updates() -> None:
    update, model, other = Update.supervised(F.cross_entropy, SGD, lr=0.1), classifier(), classifier()

    @torch.no_grad()
    def average(engine: Engine) -> None:
        for own, new in zip(other.parameters(), model.parameters(), strict=True):
            own.lerp_(new, 0.1)

    evaluator = Engine(update.evaluation(), model=other)
    evaluator.connect(Events.COMPLETED, lambda engine: None)
    engine = Engine(update, model=model, seed=0)
    engine.attach(Validation(evaluator, loader()))
    assert "C15" in found(engine)
    engine.connect(Events.OPTIMIZER_STEP_COMPLETED, average)
    assert "C15" not in found(engine)


def test_a_bound_that_is_scaled_as_the_gradients_are() -> None:
    def clip(engine: Engine) -> None:
        clip_grad_norm_(engine.model.parameters(), 1.0)

    def clip_scaled(engine: Engine) -> None:
        clip_grad_norm_(engine.model.parameters(), engine.find(MixedPrecision).scalers["main"].get_scale())

    for function, wrong in ((clip, True), (clip_scaled, False)):
        engine = trainer()
        engine.attach(MixedPrecision("fp16"))
        engine.connect(Events.BACKWARD_COMPLETED, function)
        assert ("C25" in found(engine)) is wrong


def test_a_helper_may_move_the_batches() -> None:
    def send(batch: Any, like: Tensor) -> Any:
        return [one.to(like.device) for one in batch]

    def step(engine: Engine, batch: Any) -> Tensor:
        inputs, targets = send(batch, next(engine.model.parameters()))
        return F.cross_entropy(engine.model(inputs), targets)

    assert "C12" not in found(Engine(Update.from_function(step, SLOW), model=classifier().to("meta"), seed=0))
    assert "C12" in found(trainer(model=classifier().to("meta")))


def test_an_iterator_of_a_loader_is_read_once() -> None:
    assert "C24" in found(trainer(), iter(loader()), epochs=2)
    assert "C24" not in found(trainer(), iter(loader()))
    engine = trainer()
    assert "C24" not in [one.code for one in engine.check(iter(loader()), max_epochs=2, epoch_length=2)]
    assert "C24" in [one.code for one in engine.check(iter(loader()), max_epochs=3, epoch_length=2)]


# ---- a factor -----------------------------------------------------------------------------------------------------------


def accumulated(change: Callable[[Tensor], Tensor]) -> str:
    engine = trainer(lambda output, target: change(F.cross_entropy(output, target)))
    engine.attach(GradientAccumulation(4))
    with pytest.warns(FindingWarning, match="W74") as caught:
        engine.run(loader(), max_epochs=1)
    return str(caught[0].message)


def test_a_factor_that_may_be_a_weight_is_not_said_to_be_an_average() -> None:
    assert "the gradients are now divided twice" in accumulated(lambda loss: loss / 4)
    assert "if it is a weight, allow W74" in accumulated(lambda loss: 0.25 * loss)


# ---- a run that is continued --------------------------------------------------------------------------------------------


def test_a_lagging_average_is_reported_once_though_the_run_is_continued() -> None:
    update, model = Update.supervised(F.cross_entropy, SLOW), classifier()
    evaluator = Engine(update.evaluation(), model=model)
    evaluator.connect(Events.COMPLETED, lambda engine: None)
    engine = Engine(update, model=model, seed=0)
    engine.attach(EMA(0.999), Validation(evaluator, loader()))

    def in_pieces() -> None:
        for epochs in (1, 2, 3):
            engine.run(loader(), max_epochs=epochs)

    assert reported(in_pieces).count("W55") == 1


def looked_at(engine: Engine, epochs: int) -> list[int]:
    seen: list[int] = []

    def note(engine: Engine) -> None:
        if engine.signal(Events.LOSS_COMPUTED).connections:
            seen.append(engine.state.iteration)

    with engine.connect(Events.ITERATION_COMPLETED, note):
        engine.run(loader(), max_epochs=epochs)
    return seen


def test_guards_look_again_as_a_run_resumes_and_not_as_it_is_continued(tmp_path: Path) -> None:
    engine, resumed = trainer(), trainer()
    for one in (engine, resumed):
        one.attach(Guards(), Checkpoint(tmp_path))
    assert looked_at(engine, 1) == [1, 2, 3]
    assert looked_at(engine, 2) == []
    resumed.load_state_dict(Checkpoint.load(tmp_path))
    assert looked_at(resumed, 3) == [9, 10, 11]


def test_guards_look_at_the_first_iterations_of_what_they_join() -> None:
    engine, guards = trainer(), Guards()
    engine.run(loader(), max_epochs=1)
    engine.attach(guards)
    assert looked_at(engine, 2) == [5, 6, 7]
    engine.detach(guards)
    engine.connect(Events.ITERATION_COMPLETED(once=9), lambda engine: engine.attach(guards))
    assert looked_at(engine, 4) == [10, 11, 12]
