"""The rules of `check` about the data, and about what is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, Subset

from ..batches import tensors_in
from .composition import Composition, first_batch, own_generators
from .reports import Finding, finding

__all__ = ["OF_BATCHES", "OF_DATA"]


def evaluations_that_measure_nothing(it: Composition) -> Iterator[Finding]:
    seen = set()
    for one in it.evaluations:
        evaluator = one.evaluator
        if id(evaluator) in seen or len(evaluator.handlers) or any(s.connections for s in evaluator.signals.all()):
            continue
        seen.add(id(evaluator))
        if not any(update.spec.function is not None for update in evaluator.updates):
            yield finding(
                "C20",
                f"{one.handler.name!r} runs an evaluator to which nothing is attached: it measures nothing",
                "attach Metrics to the evaluator: evaluator.attach(Metrics(loss=Average()))",
                [one.handler.name],
            )


def data_read_once(it: Composition) -> Iterator[Finding]:
    state = it.engine.state
    if isinstance(it.data, Iterator) and state.epoch_length is None and (state.max_epochs or 1) > 1:
        yield finding(
            "C24",
            f"the data is a {type(it.data).__name__}, which ends with the first of {state.max_epochs} epochs",
            "give data that can be iterated again, such as a list or a DataLoader, or epoch_length= to run()",
        )


def unshuffled(it: Composition) -> Iterator[Finding]:
    data = it.data
    if not it.engine.training or type(data) is not DataLoader or type(data.sampler) is not SequentialSampler:
        return
    if type(data.batch_sampler) is BatchSampler and len(data) > 1:  # another one has an order of its own
        yield finding("C13", "the training data is not shuffled", "use DataLoader(..., shuffle=True)")


def evaluated_on_training_data(it: Composition) -> Iterator[Finding]:
    if not it.engine.training or it.data is None:
        return
    own = _dataset(it.data)
    sets = [(one, _dataset(one.data)) for one in it.evaluations]
    if any(data is not own for _, data in sets):
        sets = []  # the training data is evaluated beside other data
    yield from _overlaps(it)
    decides = bool(it.monitors)
    for one, _ in sets:
        if "train" not in f"{one.handler.name} {one.key} {getattr(one.handler, 'prefix', '')}".lower():
            yield _training_data(one.handler.name, "is the training data", None if decides else "info")


def _overlaps(it: Composition) -> Iterator[Finding]:
    """Samples of one data set that are trained with and evaluated."""
    own = _dataset(it.data)
    for one in it.evaluations:
        other = _dataset(one.data)
        if _whole(other) is not _whole(own) or not isinstance(own, Subset) | isinstance(other, Subset):
            continue  # two data sets, or one that is whole in both, of which `evaluated_on_training_data` tells
        trained, evaluated = _places(own), _places(other)
        shared = evaluated if trained is None else trained if evaluated is None else trained & evaluated
        if shared and other is not own:
            yield _training_data(one.handler.name, f"has {len(shared)} samples of the training data", None)


def _whole(data: Any) -> Any:
    """The data set that a subset, or a subset of a subset, is of."""
    while isinstance(data, Subset):
        data = data.dataset
    return data


def _places(data: Any) -> set[int] | None:
    """Which samples of the whole data set a subset has; None for all of them."""
    if not isinstance(data, Subset):
        return None
    places = [int(place) for place in data.indices]
    while isinstance(data := data.dataset, Subset):
        places = [int(data.indices[place]) for place in places]
    return set(places)


def _training_data(name: str, what: str, severity: Any) -> Finding:
    return finding(
        "C14",
        f"the data that {name!r} evaluates {what}: overfitting does not show in it",
        "evaluate data that is not trained on; if this is meant, name it: Validation(..., prefix='train_')",
        [name],
        severity,
    )


def _dataset(data: Any) -> Any:
    data = getattr(data, "limited_data", data)
    return getattr(data, "dataset", data)


def same_first_batch(it: Composition) -> Iterator[Finding]:
    if not it.engine.training or it.data is None or not it.evaluations:
        return
    own, batch = _dataset(it.data), tensors_in(it.first_batch)
    for one in it.evaluations:
        if (
            _dataset(one.data) is own
            or "train" in f"{one.handler.name} {one.key} {getattr(one.handler, 'prefix', '')}".lower()
        ):
            continue
        other = tensors_in(first_batch(one.data))
        if batch and len(batch) == len(other) and all(_equal(a, b) for a, b in zip(batch, other, strict=True)):
            yield _training_data(one.handler.name, "begins with the same batch as the training data", None)


def _equal(one: Tensor, other: Tensor) -> bool:
    return (
        one.shape == other.shape and one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    )


def evaluators_of_other_models(it: Composition) -> Iterator[Finding]:
    seen = set()
    for one in it.evaluations:
        other = [p for root in one.evaluator.modules.values() for p in root.parameters()]
        if id(one.evaluator) in seen or not it.parameters or not other or any(p in it.parameters for p in other):
            continue
        seen.add(id(one.evaluator))
        yield finding(
            "C15",
            f"the evaluator of {one.handler.name!r} has another model: it shares no parameter with the one that is trained",
            "build it with the same module: Engine(update.evaluation(), model=model)",
            [one.handler.name],
        )


def batches_on_another_device(it: Composition) -> Iterator[Finding]:
    if not it.parameters or any("device" in (one.writes or ()) for one in it.connections):
        return
    device, tensors = it.engine.device, tensors_in(it.first_batch)
    if tensors and all(one.device.type != device.type for one in tensors):
        yield finding(
            "C12",
            f"the batches are on {tensors[0].device}, the model on {device}, and no handler moves them",
            f"attach DeviceTransfer({str(device)!r})",
        )


def generators_that_are_not_restored(it: Composition) -> Iterator[Finding]:
    saves = [handler for handler in it.handlers if handler.writes and getattr(handler, "retention", None) is not None]
    held = own_generators(it.data) if saves and isinstance(it.data, DataLoader) else {}
    for path, generator in held.items():
        yield finding(
            "C16",
            f"{path} is a random generator of the data's own ({type(generator).__name__}): a run that resumes from "
            f"{saves[0].name!r} continues with other numbers",
            "draw from the global generators (torch, random or numpy.random), which are seeded for each sample",
            [saves[0].name],
        )


OF_DATA: Sequence[Callable[[Composition], Iterator[Finding]]] = (
    evaluations_that_measure_nothing,
    data_read_once,
    unshuffled,
    evaluated_on_training_data,
)

OF_BATCHES: Sequence[Callable[[Composition], Iterator[Finding]]] = (
    same_first_batch,
    evaluators_of_other_models,
    batches_on_another_device,
    generators_that_are_not_restored,
)
"""Rules that read a batch, or take longer: for `Engine.check` alone."""
