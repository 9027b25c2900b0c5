"""The runs of a study share nothing that a run changes: it is an error that names what is shared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, Handler, Update, on
from signalfire.ablation import LeaveOneOut, Study, Swap
from signalfire.ablation.shared import SharedError
from signalfire.handlers import Average, GradientClipping, Metrics, Validation

DATA = TensorDataset(torch.linspace(-1, 1, 16).reshape(4, 4), torch.linspace(0, 1, 4).reshape(4, 1))

Made = dict[str, Any]


def builder(*shared: str, again: Callable[[Made, int], None] | None = None) -> Callable[[int], Any]:
    """A function that builds runs, which share some of their parts; ``again`` puts these back."""
    kept: Made = {}

    def build(seed: int) -> Any:
        def part(name: str, make: Callable[[], Any]) -> Any:
            if name not in shared:
                return make()
            return kept[name] if name in kept else kept.setdefault(name, make())

        model = part("model", lambda: nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1)))
        factory = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        optimizer = part("optimizer", lambda: factory(model.parameters()))
        generator = part("generator", torch.Generator)
        if again is not None:
            again({"model": model, "generator": generator}, seed)
        update = part("update", lambda: Update.supervised(mse_loss, optimizer if "optimizer" in shared else factory))
        evaluator = part("evaluator", lambda: Engine(update.evaluation(), model=model))
        if not evaluator.handlers:
            evaluator.attach(Metrics(val=Average(mse_loss)))
        trainer = Engine(update, model=model, seed=seed)
        clipping = part("clipping", lambda: GradientClipping(max_norm=0.1))
        trainer.attach(clipping, Validation(evaluator, list(zip(*[iter(DATA.tensors)] * 2, strict=True))))
        loader = part(
            "loader", lambda: DataLoader(DATA, batch_size=2, shuffle="in order" not in shared, generator=generator)
        )
        return trainer, lambda engine: engine.run(loader, max_epochs=1)

    return build


def values(build: Callable[[int], Any], *designs: Any, seeds: Any = range(2)) -> list[float | None]:
    study = Study(build, metric="val", mode="min", seeds=seeds)
    designs = designs or (LeaveOneOut(["gradient_clipping"]),)
    study.run(*designs, workers=0)
    return [one.value for one in study.results(study.plan(*designs))]


def seeded(made: Made, seed: int) -> None:
    made["generator"].manual_seed(seed)


def reset(made: Made, seed: int) -> None:
    seeded(made, seed)
    for layer in made["model"]:
        layer.reset_parameters()


SHARED: dict[str, tuple[Callable[[int], Any], str]] = {
    "handler": (
        builder("clipping"),
        r"build\(\d\) returned the handler 'gradient_clipping' \(GradientClipping\) for a second",
    ),
    "evaluator": (
        builder("model", "evaluator", again=reset),
        r"returned the handler 'metrics' \(Metrics\) for a second run",
    ),
    "model": (builder("model"), "returned the tensor 'model.0.weight', already modified by an earlier run"),
    "optimizer": (
        builder("model", "optimizer", again=reset),
        "returned the optimizer of 'main', already modified by an earlier run",
    ),
    "generator": (builder("generator"), "data whose generator an earlier run has advanced"),
}


@pytest.mark.parametrize("what", SHARED)
@pytest.mark.parametrize("seeds", [[0], [0, 1]], ids=["one", "two"])
def test_what_runs_share_and_change_is_an_error_that_names_it(what: str, seeds: list[int]) -> None:
    build, message = SHARED[what]
    with pytest.raises(SharedError, match=message):
        values(build, seeds=seeds)


IN_ORDER = builder("generator", "loader", "in order")
"""The generator is the loader's, which draws nothing that matters from it."""


@pytest.mark.moderate
@pytest.mark.parametrize(
    "build",
    [
        builder("update", again=seeded),
        builder("model", again=reset),
        builder("generator", "loader", again=seeded),
        IN_ORDER,
    ],
    ids=[
        "an update with a factory",
        "a model that is put back",
        "a generator that is put back",
        "a generator that nothing is drawn from",
    ],
)
def test_what_runs_share_and_put_back_gives_the_numbers_of_a_fresh_build(build: Callable[[int], Any]) -> None:
    fresh = builder(*["in order"] if build is IN_ORDER else [], again=seeded)
    assert values(build) == values(fresh)


def test_an_alternative_that_is_made_once_is_an_error_too() -> None:
    other = GradientClipping(max_norm=5.0)
    with pytest.raises(SharedError, match="factory for the alternative to 'gradient_clipping' returned the handler"):
        values(builder(), Swap({"gradient_clipping": {"looser": lambda: other}}))


# ---- what is in no module ---------------------------------------------------------------------------------------------


class Counting(TensorDataset):
    """Data that counts how often it was read, keeps what it has read, and grows harder with that, if ``harder``."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__(*(one.clone() for one in DATA.tensors))
        self.read = 0
        self.counts = counts
        self.cache: dict[int, Any] = {}
        self.opened: object | None = None

    def __getitem__(self, index: Any) -> Any:
        self.read += self.counts
        self.opened = self
        inputs, targets = self.cache.setdefault(int(index), tuple(one[index] for one in self.tensors))
        return inputs * (1 + self.read / 10), targets


class Drawing(TensorDataset):
    """Data with noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__(*DATA.tensors)
        self.random = np.random.default_rng(0)

    def __getitem__(self, index: Any) -> Any:
        inputs, targets = (one[index] for one in self.tensors)
        return inputs + self.random.normal(), targets


class Annealed:
    """A loss that is no module, and grows with its calls; or stays as it is."""

    def __init__(self, *, grows: bool = True) -> None:
        self.calls, self.grows = 0, grows
        self.weights = [1.0]

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += self.grows
        self.weights[0] += self.grows
        return mse_loss(output, target) * self.weights[0]


class Evaluating(Handler):
    """Holds evaluators in a list or a mapping."""

    def __init__(self, evaluators: Any) -> None:
        self.evaluators = evaluators

    @on(Events.EPOCH_COMPLETED)
    def evaluate(self, engine: Engine) -> None:
        for one in self.evaluators.values() if isinstance(self.evaluators, dict) else self.evaluators:
            engine.state.metrics["val"] = one.run([DATA.tensors]).metrics["val"]


def parts(
    *,
    loss: Callable[[], Any] = lambda: mse_loss,
    data: Callable[[], Any] = lambda: DATA,
    scale: Callable[[], torch.Tensor] | None = None,
    validation: Callable[[], Any] = lambda: [DATA.tensors],
    evaluators: Callable[[Engine], Any] | None = None,
    back: Callable[[], object] = lambda: None,
) -> Callable[[int], Any]:
    """A function that builds runs of which some parts may be shared."""

    def build(seed: int) -> Any:
        back()
        model = nn.Linear(4, 1)
        own = torch.ones(1, requires_grad=True) if scale is None else scale()
        update = Update(
            lambda engine, batch: engine.model(batch[0]) * own,
            Compared(loss()),
            partial(torch.optim.SGD, lr=0.1),
            parameters=lambda engine: [*engine.model.parameters(), own],
        )
        evaluator = Engine(Update.supervised(mse_loss).evaluation(), model=model)
        evaluator.attach(Metrics(val=Average(mse_loss)))
        trainer = Engine(update, model=model, seed=seed)
        trainer.attach(GradientClipping(max_norm=1.0))
        if evaluators is None:
            trainer.attach(Validation(evaluator, validation()))
        else:
            trainer.attach(Evaluating(evaluators(evaluator)))
        loader = DataLoader(data(), batch_size=2)
        return trainer, lambda engine: engine.run(loader, max_epochs=1)

    return build


class Compared:
    """A loss of the output and the targets of a batch."""

    def __init__(self, loss: Any) -> None:
        self.inner = loss

    def __call__(self, engine: Engine, output: Any, batch: Any) -> Any:
        return self.inner(output, batch[1])


def always(thing: Any) -> Callable[..., Any]:
    return lambda *_: thing


def held(kind: Callable[[Engine], Any]) -> Callable[[Engine], Any]:
    """Evaluators of the first call, in a container."""
    kept: list[Any] = []

    def make(evaluator: Engine) -> Any:
        kept.append(kept[0] if kept else evaluator)
        return kind(kept[-1])

    return make


def shuffled() -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=2, shuffle=True, generator=torch.Generator())


def looking(loader: DataLoader[Any]) -> Callable[[int], Any]:
    """A function that builds runs with a handler of the user that goes through a loader."""

    def build(seed: int) -> Any:
        trainer, run = parts()(seed)
        trainer.attach(Looking(loader))
        return trainer, run

    return build


class Looking(Handler):
    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    @on(Events.EPOCH_COMPLETED)
    def look(self, engine: Engine) -> None:
        list(self.loader)


CHANGED: dict[str, tuple[Callable[[int], Any], str]] = {
    "a trained tensor": (parts(scale=always(torch.ones(1, requires_grad=True))), r"returned the parameter 0 of update"),
    "a loss": (
        parts(loss=always(Annealed())),
        r"\(Annealed\), whose '(calls|weights\[0\])' was changed by an earlier run",
    ),
    "a counter of the data": (
        parts(data=always(Counting(counts=True))),
        r"\(Counting\), whose 'read' was changed by an earlier run",
    ),
    "noise of the data": (parts(data=always(Drawing())), r"\(Drawing\), whose 'random' was changed by an earlier run"),
    "a loader of a handler": (looking(shuffled()), "whose generator an earlier run has advanced"),
    "an evaluator in a list": (parts(evaluators=held(lambda one: [one])), "the handler 'metrics'"),
    "an evaluator in a mapping": (parts(evaluators=held(lambda one: {"val": [one]})), "the handler 'metrics'"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_what_is_in_no_module_is_an_error_too_once_a_run_has_changed_it(what: str) -> None:
    build, message = CHANGED[what]
    with pytest.raises(SharedError, match=message):
        values(build)


def kept_and_put_back() -> dict[str, tuple[Callable[[int], Any], Callable[[int], Any]]]:
    own, loss, data, loader = torch.ones(1, requires_grad=True), Annealed(), Counting(counts=True), shuffled()

    def back() -> None:
        with torch.no_grad():
            own.fill_(1.0)
        loss.calls, loss.weights[0], data.read = 0, 1.0, 0
        loader.generator.manual_seed(torch.Generator().initial_seed())

    return {
        "put back": (
            parts(scale=always(own), loss=always(loss), data=always(data), validation=always(loader), back=back),
            parts(loss=Annealed, data=lambda: Counting(counts=True), validation=shuffled),
        ),
        "never changed": (
            parts(
                loss=always(Annealed(grows=False)),
                data=always(Counting(counts=False)),
                validation=always(shuffled()),  # the validation puts its generator back
            ),
            parts(validation=shuffled),
        ),
        "new ones in a list": (parts(evaluators=lambda one: [one]), parts(evaluators=lambda one: {"val": one})),
    }


@pytest.mark.moderate
@pytest.mark.parametrize("what", kept_and_put_back())
def test_what_is_put_back_or_only_caches_gives_the_numbers_of_a_fresh_build(what: str) -> None:
    build, fresh = kept_and_put_back()[what]
    assert values(build) == values(fresh)
