"""Classes of torchmetrics: bit-equal to the metric used by itself over the same uneven batches, also when resumed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torchmetrics
from torch import nn

from signalfire import Engine, Events, Update
from signalfire.handlers import Metrics

from .outcomes import Outcome, judged

SIZES = [5, 3, 7, 2]
CUT = 2


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def check(build: Callable[[], Any], make: Callable[[int, torch.Generator], tuple[Any, Any]]) -> str | None:
    """Why a metric does not pass; None if it does."""
    generator = torch.Generator().manual_seed(5)
    data = [make(size, generator) for size in SIZES]
    own = build()
    for output, target in data:
        own.update(output, target, **_groups_of(own, target))
    expected = own.compute()

    def engine_of() -> Engine:
        optimizer = partial(torch.optim.SGD, lr=0.1)
        parameter = nn.Linear(1, 1)
        update = Update(
            lambda engine, batch: batch[0], lambda engine, output, batch: engine.model.weight.sum(), optimizer
        )
        engine = Engine(update, model=parameter, seed=0)
        engine.attach(Metrics(metric=(metric := build()), inputs=partial(_inputs, metric)))
        return engine

    states: list[Any] = []
    engine = engine_of()
    engine.connect(Events.ITERATION_COMPLETED(once=CUT), lambda engine: states.append(engine.state_dict()))
    whole = _values(engine.run(data, max_epochs=1, check=False))
    resumed = engine_of()
    resumed.load_state_dict(states[0])
    again = _values(resumed.run(data, max_epochs=1, check=False))
    given = (
        {f"metric/{key}": value for key, value in expected.items()}
        if isinstance(expected, dict)
        else {"metric": expected}
    )
    if not _same({key: whole.get(key) for key in given}, given):
        return "differs from the metric used by itself"
    return None if _same({key: again.get(key) for key in given}, given) else "resumed, it differs"


def _groups_of(metric: Any, target: Any) -> dict[str, Any]:
    """Metrics of fairness take the groups that the samples belong to, as well."""
    return (
        {"groups": (torch.arange(len(target)) % 2)} if "groups" in inspect.signature(metric.update).parameters else {}
    )


def _inputs(metric: Any, engine: Engine) -> Any:
    output, target = engine.state.update.output, engine.state.batch[1]
    if groups := _groups_of(metric, target):
        return {"preds": output, "target": target, **groups}
    return output, target


def _values(state: Any) -> dict[str, Any]:
    return {key: value for key, value in state.metrics.items() if key.startswith("metric")}


def _kinds() -> dict[str, tuple[Callable[[Any], Any], Callable[[int, torch.Generator], tuple[Any, Any]]]]:
    def classes(size: int, generator: torch.Generator) -> tuple[Any, Any]:
        return torch.rand(size, 3, generator=generator).softmax(1), torch.randint(3, (size,), generator=generator)

    def binary(size: int, generator: torch.Generator) -> tuple[Any, Any]:
        return torch.rand(size, generator=generator), torch.randint(2, (size,), generator=generator)

    def labels(size: int, generator: torch.Generator) -> tuple[Any, Any]:
        return torch.rand(size, 3, generator=generator), torch.randint(2, (size, 3), generator=generator)

    def numbers(size: int, generator: torch.Generator) -> tuple[Any, Any]:
        return torch.rand(size, generator=generator) + 0.1, torch.rand(size, generator=generator) + 0.1

    def distributions(size: int, generator: torch.Generator) -> tuple[Any, Any]:
        return tuple(torch.rand(size, 3, generator=generator).softmax(1) for _ in range(2))  # type: ignore[return-value]

    def ensembles(size: int, generator: torch.Generator) -> tuple[Any, Any]:
        return torch.rand(size, 4, generator=generator), torch.rand(size, generator=generator)

    return {
        **dict.fromkeys(
            ["CosineSimilarity", "JensenShannonDivergence", "KLDivergence"], (lambda kind: kind(), distributions)
        ),
        "ContinuousRankedProbabilityScore": (lambda kind: kind(), ensembles),
        "Multiclass": (lambda kind: kind(num_classes=3), classes),
        "Binary": (lambda kind: kind(), binary),
        "Multilabel": (lambda kind: kind(num_labels=3), labels),
        "": (lambda kind: kind(), numbers),
    }


_NEEDS: dict[str, dict[str, Any]] = {
    "FBetaScore": {"beta": 2.0}, "RecallAtFixedPrecision": {"min_precision": 0.5}, "PrecisionAtFixedRecall": {"min_recall": 0.5},
    "SensitivityAtSpecificity": {"min_specificity": 0.5}, "SpecificityAtSensitivity": {"min_sensitivity": 0.5},
    "MinkowskiDistance": {"p": 3.0}, "CriticalSuccessIndex": {"threshold": 0.5}, "BinaryFairness": {"num_groups": 2},
    "BinaryGroupStatRates": {"num_groups": 2},
}  # fmt: skip


def of_torchmetrics() -> list[Outcome]:
    """Metrics of classification and regression."""
    found = []
    kinds = _kinds()
    for module in (torchmetrics.classification, torchmetrics.regression):
        for name in sorted(module.__all__):
            kind = getattr(module, name)
            if not inspect.isclass(kind) or not issubclass(kind, torchmetrics.Metric):
                continue
            prefix = next(one for one in kinds if name.startswith(one))
            if prefix == "" and module is torchmetrics.classification:
                continue  # a wrapper that builds one of the others
            build, make = kinds[prefix]
            options = next((one for end, one in _NEEDS.items() if name.endswith(end)), {})
            found.append(judged(name, partial(check, partial(build, partial(kind, **options)), make)))
    return found
