"""A build that makes another run in each call is an error before any run; what does not matter may differ."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, FindingWarning, Handler, Update, on
from signalfire.ablation import LeaveOneOut, Study
from signalfire.ablation.repeated import RepeatError
from signalfire.handlers import EMA, Average, GradientClipping, LRScheduling, Metrics

INPUTS = torch.linspace(-1, 1, 16).reshape(8, 2)
TARGETS = INPUTS.sum(1, keepdim=True)


class Scaled(Handler):
    """A handler of the user with any attributes."""

    def __init__(self, log: list[Any] | None = None, **options: Any) -> None:
        self.log = [] if log is None else log
        vars(self).update(options)

    @on(Events.GRADIENTS_READY)
    def scale(self, engine: Engine) -> None:
        self.log.append((engine.state.iteration, object()))


def clipped(engine: Engine, number: int) -> None:
    vars(engine.handlers["gradient_clipping"])["max_norm"] = number


def halved(engine: Engine, number: int) -> None:
    with torch.no_grad():
        next(engine.modules["model"].parameters()).mul_(1 / number)


def scheduled(engine: Engine, number: int) -> None:
    factor = 1.0 / number
    engine.attach(LRScheduling(lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor)))


def built(
    change: Callable[[Engine, int], object] = lambda engine, number: None,
    *,
    lr: Callable[[int], float] = lambda number: 0.1,
    layer: Callable[[int], nn.Module] = lambda number: nn.Linear(2, 1),
    data: Callable[[int], Any] = lambda number: DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=4),
    epochs: Callable[[int], int] = lambda number: 1,
    loss: Callable[[int], Any] = lambda number: mse_loss,
) -> Callable[[int], Any]:
    """A function that builds runs, of which one part is made with the number of the call."""
    calls = itertools.count(1)

    def build(seed: int) -> Any:
        number = next(calls)
        update = Update.supervised(loss(number), partial(torch.optim.SGD, lr=lr(number)))
        engine = Engine(update, model=layer(number), seed=seed)
        engine.attach(GradientClipping(max_norm=1.0), Metrics(val=Average(mse_loss)))
        change(engine, number)
        batches, last = data(number), epochs(number)
        return engine, lambda engine: engine.run(batches, max_epochs=last)

    return build


def plan(build: Callable[[int], Any]) -> None:
    Study(build, metric="val", seeds=range(2)).plan(LeaveOneOut(["gradient_clipping"]))


def weighted(number: int, output: Any, target: Any) -> Any:
    return mse_loss(output, target) / number


ORDERED = partial(DataLoader, TensorDataset(INPUTS, TARGETS))
KEPT = TensorDataset(INPUTS.clone(), TARGETS)


def normalized(number: int) -> Any:
    KEPT.tensors[0].sub_(1.0)
    return DataLoader(KEPT, batch_size=4)


DIFFERENT: dict[str, tuple[Callable[[int], Any], str]] = {
    "an argument": (built(clipped), r"handler 'gradient_clipping'\.max_norm was 2 in one call and 3 in the next"),
    "off": (
        built(lambda engine, number: setattr(engine.handlers["gradient_clipping"], "enabled", number % 2 == 1)),
        r"handler 'gradient_clipping'\.enabled was False in one call and True",
    ),
    "attached every other time": (
        built(lambda engine, number: engine.attach(EMA(0.5)) if number % 2 == 1 else None),
        "handler 'ema' is in only one of the runs",
    ),
    "another handler": (
        built(lambda engine, number: engine.attach(EMA(0.5, name="other") if number % 2 == 1 else Scaled())),
        "handler '(other|scaled)' is in only one of the runs",
    ),
    "an attribute": (built(lambda engine, number: engine.attach(Scaled(by=number))), r"handler 'scaled'\.by was 2"),
    "a schedule": (built(scheduled), r"variable 'factor' was 0\.5 in one call and 0\.33"),
    "a learning rate": (built(lr=lambda number: 0.1 * number), r"optimizer\.keywords\['lr'\] was 0\.2"),
    "a loss": (built(loss=lambda number: partial(weighted, number)), r"args\[0\] was 2"),
    "layers": (built(layer=lambda number: nn.Linear(2, 1, bias=number % 2 == 1)), r"module 'model'\.\(bias\)"),
    "an option": (
        built(layer=lambda number: nn.Sequential(nn.Dropout(0.1 * number), nn.Linear(2, 1))),
        r"module 'model'\.0\.p was 0\.2",
    ),
    "weights": (built(halved), r"module 'model'\.\(weight\) was Parameter"),
    "epochs": (built(epochs=lambda number: number), r"was 2 in one call and 3 in the next"),
    "data": (built(data=lambda number: [(INPUTS * number, TARGETS)]), r"\[0\]\[0\] was Tensor"),
    "size of batches": (built(data=lambda number: ORDERED(batch_size=number)), "batch_size was 2"),
    "order": (built(data=lambda number: ORDERED(batch_size=4, shuffle=number % 2 == 1)), "sampler"),
    "data in place": (built(data=normalized), r"dataset\.tensors\[0\] was Tensor"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_build_that_makes_another_run_in_each_call_is_an_error(what: str) -> None:
    build, message = DIFFERENT[what]
    with pytest.raises(RepeatError, match=r"two calls to build\(0\) produced different runs: .*" + message):
        plan(build)


LOG: list[Any] = []


def logged(engine: Engine, number: int) -> None:
    LOG.append((number, engine.seed))
    engine.attach(Scaled(LOG))


@pytest.mark.parametrize(
    "build",
    [
        built(),
        built(
            lambda engine, number: engine.attach(Scaled(at=time.time(), began=time.perf_counter(), ns=time.time_ns()))
        ),
        built(lambda engine, number: engine.attach(Scaled(LOG))),
        built(logged),
        built(lambda engine, number: engine.attach(Scaled(folder=f"/tmp/run{number}"))),
        built(lambda engine, number: engine.attach(Scaled(generator=np.random.default_rng()))),
        built(lambda engine, number: engine.attach(Scaled(of=object(), names={"b", "a"}, call=lambda: 0))),
    ],
    ids=["equal", "times", "a shared log", "a log of builds", "folders", "entropy", "objects"],
)
def test_what_does_not_matter_may_differ(build: Callable[[int], Any]) -> None:
    state = torch.get_rng_state()
    plan(build)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_made_in_the_first_call_and_put_back_in_the_others_is_fine() -> None:
    kept: list[nn.Linear] = []

    def layer(number: int) -> nn.Module:
        kept.append(kept[0] if kept else nn.Linear(2, 1))  # the first call draws twice
        kept[0].reset_parameters()
        return kept[0]

    plan(built(layer=layer))


def test_a_study_builds_twice_once() -> None:
    calls: list[int] = []
    inner = built()

    def build(seed: int) -> Any:
        calls.append(seed)
        return inner(seed)

    study = Study(build, metric="val", seeds=range(2))
    design = LeaveOneOut(["gradient_clipping"])
    study.plan(design)
    assert calls == [0, 0, 1]
    study.plan(design)
    assert calls == [0, 0, 1, 0]


def test_a_build_that_changes_its_handlers_later_is_reported() -> None:
    norms = [1.0] * 4  # two for the plan, one for the second seed, and one for the first run

    def clip(engine: Engine, number: int) -> None:
        engine.detach("gradient_clipping")
        engine.attach(GradientClipping(max_norm=norms.pop() if norms else 5.0))

    study = Study(built(clip), metric="val", seeds=range(2))
    with pytest.warns(FindingWarning, match=r"W82: build\(0\) produced different handlers than in an earlier run"):
        study.run(LeaveOneOut(["gradient_clipping"]), workers=0)


def later(first: Any, other: Any) -> Callable[[int], Any]:
    """A value that is another one once the plan and the first run are made."""
    return lambda number: first if number <= 4 else other


@pytest.mark.moderate
@pytest.mark.whole
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": later(0.1, 0.2)}, "different updates"),
        ({"loss": later(mse_loss, nn.functional.l1_loss)}, "different updates"),
        ({"loss": later(nn.MSELoss(), nn.L1Loss())}, "different updates"),
        ({"epochs": later(1, 2)}, "different run functions"),
        ({"loss": lambda number: nn.MSELoss()}, None),
        ({"loss": lambda number: partial(nn.functional.huber_loss, delta=2.0)}, None),
        ({"data": lambda number: [(INPUTS, TARGETS)]}, None),
    ],
    ids=["rate", "loss", "module", "epochs", "same module", "same options", "other data objects"],
)
def test_a_build_that_changes_anything_later_is_reported(options: Any, said: str | None) -> None:
    study = Study(built(**options), metric="val", seeds=range(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        study.run(LeaveOneOut(["gradient_clipping"]), workers=0)
    found = [str(one.message) for one in caught if str(one.message).startswith("W82")]
    assert len(found) == (said is not None)
    assert said is None or f"produced {said} than in an earlier run" in found[0]


def test_what_a_loss_counts_and_when_it_was_made_is_no_difference() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.made = 0, time.time()

        def forward(self, output: Any, target: Any) -> Any:
            self.calls += 1
            return mse_loss(output, target)

    def recorded(number: int) -> Any:
        made = time.time()

        def loss(output: Any, target: Any) -> Any:
            seen.append(made)
            return mse_loss(output, target)

        return loss

    seen: list[float] = []
    for loss in (lambda number: Counted(), recorded):
        study = Study(built(loss=loss), metric="val", seeds=range(2))
        with warnings.catch_warnings():
            warnings.simplefilter("error", FindingWarning)
            study.run(LeaveOneOut(["gradient_clipping"]), workers=0)
