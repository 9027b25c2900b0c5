"""The runs of a study share nothing that a run changes: it is an error that names what is shared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Update
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
    study = Study(build, metric="val", seeds=seeds)
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
    "model": (builder("model"), "returned the tensor 'model.0.weight' of an earlier run, as that run has left it"),
    "optimizer": (
        builder("model", "optimizer", again=reset),
        "returned the optimizer of 'main' of an earlier run, as that",
    ),
    "generator": (builder("generator"), "over data whose generator an earlier run has left as it is"),
}


@pytest.mark.parametrize("what", SHARED)
@pytest.mark.parametrize("seeds", [[0], [0, 1]], ids=["one", "two"])
def test_what_runs_share_and_change_is_an_error_that_names_it(what: str, seeds: list[int]) -> None:
    build, message = SHARED[what]
    with pytest.raises(SharedError, match=message):
        values(build, seeds=seeds)


IN_ORDER = builder("generator", "loader", "in order")
"""The generator is the loader's, which draws nothing that matters from it."""


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
    with pytest.raises(SharedError, match="the factory of the alternative to 'gradient_clipping' returned the handler"):
        values(builder(), Swap({"gradient_clipping": {"looser": lambda: other}}))
