"""Classes of torchmetrics: bit-equal to the metric used by itself over the same uneven batches, resumed, and on two ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics
from torch import nn

from signalfire import Engine, Events, Update
from signalfire.distributed import process_group
from signalfire.handlers import DistributedDataParallel, Metrics
from tests.processes import run_together

from .other_metrics import of_other_kinds
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
    data = _data(make)
    states: list[Any] = []
    engine = _engine_with(build())
    engine.connect(Events.ITERATION_COMPLETED(once=CUT), lambda engine: states.append(engine.state_dict()))
    whole = _values(engine.run(data, max_epochs=1, check=False))
    resumed = _engine_with(build())
    resumed.load_state_dict(states[0])
    again = _values(resumed.run(data, max_epochs=1, check=False))
    given = _by_itself(build(), data)
    if not _same({key: whole.get(key) for key in given}, given):
        return "differs from the metric used by itself"
    return None if _same({key: again.get(key) for key in given}, given) else "resumed, it differs"


def check_on_two(build: Callable[[], Any], make: Callable[[int, torch.Generator], tuple[Any, Any]]) -> str | None:
    """The same on this rank of two, whose batches go to the ranks in turn."""
    data = _data(make)
    engine = _engine_with(build())
    engine.attach(DistributedDataParallel())
    whole = _values(engine.run(data, max_epochs=1, check=False))
    given = _by_itself(build(), data[dist.get_rank() :: 2])
    if not _same({key: whole.get(key) for key in given}, given):
        return "on two ranks it differs from the metric used by itself"
    alone = build()
    alone.distributed_available_fn = lambda: False
    in_one = _by_itself(alone, data)
    return None if _near(given, in_one) else "on two ranks the metric by itself is not that of one process"


def _data(make: Callable[[int, torch.Generator], tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(5)
    return [make(size, generator) for size in SIZES]


def _by_itself(metric: Any, data: list[tuple[Any, Any]]) -> dict[str, Any]:
    """What the metric comes to over the data, over that of all ranks where there are several."""
    for output, target in data:
        arguments = _arguments(metric, output, target)
        metric.update(**arguments) if isinstance(arguments, dict) else metric.update(*arguments)
    value = metric.compute()
    return {f"metric/{key}": one for key, one in value.items()} if isinstance(value, dict) else {"metric": value}


def _engine_with(metric: Any) -> Engine:
    update = Update(
        lambda engine, batch: batch[0],
        lambda engine, output, batch: engine.model(torch.ones(1, 1)).sum(),
        partial(torch.optim.SGD, lr=0.1),
    )
    engine = Engine(update, model=nn.Linear(1, 1), seed=0)
    engine.attach(Metrics(metric=metric, inputs=partial(_inputs, metric)))
    return engine


def _near(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.allclose(
            one.double(), other.double(), rtol=0, atol=1e-5, equal_nan=True
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_near(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_near, one, other))
    return bool(one == other)


def _arguments(metric: Any, output: Any, target: Any) -> tuple[Any, ...] | dict[str, Any]:
    """Some take one tensor; metrics of fairness take groups of samples as well, and those of retrieval the queries."""
    names = [*inspect.signature(metric.update).parameters]
    for more in ("groups", "indexes"):
        if more in names:
            return {"preds": output, "target": target, more: torch.arange(len(target)) % 2}
    single = (len(names) == 1 and names != ["args"]) or isinstance(metric, torchmetrics.RunningSum)
    return (output,) if single else (output, target)


def _inputs(metric: Any, engine: Engine) -> Any:
    return _arguments(metric, engine.state.update.output, engine.state.batch[1])


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
    """Every class that needs no download and no further package."""
    return [judged(name, partial(check, build, make)) for name, build, make in _metrics()]


def of_torchmetrics_on_two() -> list[Outcome]:
    """The same on two ranks: bit-equal to their own use over the same shards, and within 1e-5 of one process."""
    first, second = run_together(_on_this_rank, 2)
    return [one if one.reason is not None else other for one, other in zip(first, second, strict=True)]


def _on_this_rank() -> list[Outcome]:
    torch.set_num_threads(1)
    process_group(backend="gloo", timeout=60.0)
    return [judged(name, partial(check_on_two, build, make)) for name, build, make in _metrics()]


def _metrics() -> Iterator[tuple[str, Callable[[], Any], Callable[[int, torch.Generator], tuple[Any, Any]]]]:
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
            yield name, partial(build, partial(kind, **options)), make
    yield from of_other_kinds()
