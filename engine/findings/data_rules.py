"""The rules of `check` about the data, and about what is evaluated."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from ..authoring.batches import parts, tensors_in
from ..authoring.functions import called_by, held_by, is_users, names_in, names_reached
from ..authoring.planning import last_iteration
from ..data.extent import known_length
from ..data.held_generators import draws_in_workers
from ..data.streamed import is_own_iterator
from .composition import Composition, Evaluation, first_batch, in_training, is_meant, is_prepared, own_generators
from .function_rules import may_store
from .reports import Finding, finding

if TYPE_CHECKING:
    from ..core.update import UpdateState

__all__ = ["OF_BATCHES", "OF_DATA"]


def evaluations_that_measure_nothing(it: Composition) -> Iterator[Finding]:
    for one in _of_evaluators(it):
        evaluator = one.evaluator
        if len(evaluator.handlers) or any(signal.connections for signal in evaluator.signals.all()):
            continue
        if not may_store(evaluator):
            yield finding(
                "C20",
                f"{one.handler.name!r} runs an evaluator without handlers, so the evaluation measures nothing",
                "attach Metrics to the evaluator: evaluator.attach(Metrics(loss=Average()))",
                [one.handler.name],
            )


def _of_evaluators(it: Composition) -> list[Evaluation]:
    """The first evaluation of each evaluator."""
    first: dict[int, Evaluation] = {}
    for one in it.evaluations:
        first.setdefault(id(one.evaluator), one)
    return list(first.values())


def data_read_once(it: Composition) -> Iterator[Finding]:
    state = it.engine.state
    once = isinstance(it.data, Iterator) and not is_own_iterator(it.data)
    if once and (state.max_epochs or 1) - state.epoch > 1 and not _lasts(it):
        yield finding(
            "C24",
            f"the data is a {type(it.data).__name__}, which can be read only once, but the run has {state.max_epochs} epochs",
            "pass data that can be iterated again, such as a list or a DataLoader; if the data never ends, set the "
            "length of an epoch with run(epoch_length=)",
        )


def _lasts(it: Composition) -> bool:
    """Whether an iterator has batches for all epochs, as far as it is known."""
    state, source, last = it.engine.state, it.engine.feed.source, last_iteration(it.engine)
    if state.epoch_length is None or last is None:
        return False
    length = source.batches if source is not None and source.given is it.data else known_length(it.data)
    return length is None or length >= last - state.iteration


def unshuffled(it: Composition) -> Iterator[Finding]:
    data = it.data
    if type(data) is not DataLoader or type(_order_of(data)) is not SequentialSampler:
        return
    if len(data) > 1:
        labels = _labels(data.dataset)
        by_class = labels is not None and _is_sorted_by_class(labels)
        if it.engine.state.max_epochs == 1 and not by_class and not it.reads_batch:
            return  # no two epochs have the same batches
        if _draws(data.dataset) or all(_has_its_order(one, len(data)) for one in it.engine.updates):
            return
        yield finding(
            "C13",
            "the training data is not shuffled"
            + (
                " and seems to be sorted by class"
                if by_class
                else ", so each epoch reads dataset[0], dataset[1], ... in this order"
            ),
            "use DataLoader(..., shuffle=True)",
            severity="warning" if by_class else "info",
        )


def _has_its_order(update: UpdateState, batches: int) -> bool:
    """Whether an update makes a step with all samples, in whatever order, or reads a series in chunks."""
    length = update.window.length_of
    return not update.one_step_per_batch or (length is not None and length(1) >= batches)


def _draws(dataset: Any) -> bool:
    """Whether reading a sample draws it at random, by what the code of a dataset names."""
    names = names_in(getattr(type(dataset), "__getitem__", None))
    return is_users(type(dataset)) and bool(names & _DRAWING)


_DRAWING = {
    "rand", "randn", "randint", "randrange", "choice", "choices", "sample", "integers", "uniform", "normal", "shuffle",
}  # fmt: skip


def _order_of(data: DataLoader[Any]) -> Any:
    """The sampler of single samples, in whose order they are read; None if a batch sampler has an order of its own."""
    return data.batch_sampler.sampler if type(data.batch_sampler) is BatchSampler else None


def _labels(data: Any) -> Tensor | None:
    """The classes of all samples, where they can be read without fetching a sample."""
    if isinstance(data, Subset):
        whole = _labels(data.dataset)
        return None if whole is None else whole[list(data.indices)]
    labels = _targets_of(data)
    labels = torch.tensor(labels) if isinstance(labels, list) and labels and type(labels[0]) is int else labels
    return labels if isinstance(labels, Tensor) and labels.dim() == 1 and not labels.is_floating_point() else None


def _targets_of(data: Any) -> Any:
    if type(data) is not TensorDataset:
        return getattr(data, "targets", None)
    return data.tensors[1] if len(data.tensors) == 2 else None  # of three, the last may be no target


def _is_sorted_by_class(labels: Tensor) -> bool:
    if not len(labels) or int(labels.min()) != 0:  # such as lengths
        return False
    changes = int((labels[1:] != labels[:-1]).sum())
    classes = len(labels.unique())
    return 1 < classes == changes + 1 and len(labels) >= 4 * classes


def evaluated_on_training_data(it: Composition) -> Iterator[Finding]:
    if it.data is None:
        return
    yield from _overlaps(it)
    own = _dataset(it.data)
    if any(_dataset(one.data) is not own for one in it.evaluations):
        return  # the training data is evaluated beside other data
    for one in it.evaluations if _selects_all(it.data) and not _is_one_for_all(it) else ():
        if _selects_all(one.data) and not _is_of_training(one) and not _has_masks(it.data):
            yield _training_data(one.handler.name, "is the training data")


def _is_of_training(one: Evaluation) -> bool:
    """Whether an evaluation of the training data is meant, by how it is called."""
    return "train" in f"{one.handler.name} {one.key} {getattr(one.handler, 'prefix', '')}".lower()


def _has_masks(data: Any) -> bool:
    """Whether batches of a list hold masks of what is trained with and what is evaluated, as graphs with labelled nodes do."""
    first = data[0] if isinstance(data, list | tuple) and data else None
    held = [first, *vars(first).values()] if hasattr(first, "__dict__") and not isinstance(first, Tensor) else [first]
    return sum(one.dtype is torch.bool and one.dim() == 1 for one in tensors_in(held)) > 1


def _overlaps(it: Composition) -> Iterator[Finding]:
    """Samples of one data set that are trained with and evaluated."""
    own = _dataset(it.data)
    for one in it.evaluations:
        other = _dataset(one.data)
        if not _selects_all(it.data) or not _selects_all(one.data):
            continue
        if _whole(other) is not _whole(own) or not isinstance(own, Subset) | isinstance(other, Subset):
            continue  # two data sets, or one that is whole in both, of which `evaluated_on_training_data` tells
        trained, evaluated = _places(own), _places(other)
        shared = evaluated if trained is None else trained if evaluated is None else trained & evaluated
        if shared and other is not own and not _is_of_training(one):
            yield _training_data(one.handler.name, f"contains {len(shared)} samples of the training data")


def batches_that_are_in_both(it: Composition) -> Iterator[Finding]:
    """Batches of a list that is trained with, in another list that is evaluated."""
    batches = it.data if type(it.data) is list else []
    own = {
        id(batch) for batch in batches if type(batch) not in (int, str, type(None))
    }  # equal ones of these are one object
    if _is_one_for_all(it) or len(own) < len(batches):  # one object several times only counts the steps
        return
    for one in it.evaluations:
        if shared := 0 if one.data is it.data or _is_no_evidence(one) else _count_shared(own, one.data):
            yield _training_data(one.handler.name, f"contains {shared} of the {len(own)} batches of the training data")


def _is_one_for_all(it: Composition) -> bool:
    """Whether the data is one batch from which functions of the user's may choose, such as a graph and nodes of it."""
    return type(it.data) is list and len(it.data) == 1 and any(map(is_users, called_by(it.engine)))


def _count_shared(own: set[int], data: Any) -> int:
    return sum(id(batch) in own for batch in data) if type(data) is list else 0


def _is_no_evidence(one: Evaluation) -> bool:
    """Whether an evaluation may share what it evaluates with the training: on purpose, or with masks."""
    return _is_of_training(one) or _has_masks(one.data)


def samples_that_are_in_both(it: Composition) -> Iterator[Finding]:
    """Equal samples of two data sets in memory, such as those that were oversampled before the split."""
    own = _samples_of(it.data)
    if own is None or len(own.unique(dim=0)) < 0.9 * len(own):  # few different samples, which are equal by chance
        return
    for one in it.evaluations:
        if _whole(_dataset(one.data)) is _whole(_dataset(it.data)) or _is_of_training(one):
            continue
        other = _samples_of(one.data)
        if other is None or own.shape[1] != other.shape[1] or len(other.unique(dim=0)) < 0.9 * len(other):
            continue
        shared = int(torch.isin(_fingerprints(other), _fingerprints(own)).sum())
        if shared > 0.1 * len(other):
            what = f"contains {shared} samples that are equal to samples of the training data"
            yield _training_data(one.handler.name, what)


def _fingerprints(rows: Tensor) -> Tensor:
    """A number for each row, equal for equal ones: whole numbers, whose sum does not depend on its order."""
    weights = torch.randint(2**62, (rows.shape[1],), generator=torch.Generator().manual_seed(0))
    parts = rows.float().contiguous().view(torch.int32).split(1 << 12)
    return torch.cat([(part * weights).sum(1) for part in parts])


_LARGEST = 20_000_000  # numbers in a data set whose samples are compared


def _samples_of(data: Any) -> Tensor | None:
    """The samples of a data set in memory, one in a row; None for others, and for inputs that are no real numbers."""
    whole, places = _whole(_dataset(data)), _places(_dataset(data))
    if not _selects_all(data) or type(whole) is not TensorDataset or not _is_comparable(whole.tensors[0]):
        return None
    chosen = [one if places is None else one[sorted(places)] for one in whole.tensors]
    if not bool((chosen[0] != chosen[0].round()).any()):
        return None
    return torch.cat([one.reshape(len(one), -1) for one in chosen], dim=1)


def _is_comparable(inputs: Tensor) -> bool:
    """Whether samples are distinguished by their inputs: several real numbers in memory."""
    near = inputs.is_floating_point() and inputs.device.type == "cpu" and inputs.numel() <= _LARGEST
    return near and inputs.dim() > 1 and inputs[0].numel() > 1


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


def _training_data(name: str, what: str) -> Finding:
    return finding(
        "C14",
        f"the data of {name!r} {what}, so its metrics cannot show overfitting",
        "evaluate on data that you do not train on; if you evaluate on training data on purpose, mark its metrics with "
        "Validation(..., prefix='train_')",
        [name],
    )


def _dataset(data: Any) -> Any:
    data = getattr(data, "limited_data", data)
    return data.dataset if isinstance(data, DataLoader) else data


def _selects_all(data: Any) -> bool:
    """Whether data yields all samples of its dataset; not if a sampler of its own may choose some of them."""
    data = getattr(data, "limited_data", data)
    return (
        not isinstance(data, DataLoader) or type(_order_of(data)) in _WHOLE or isinstance(data.dataset, IterableDataset)
    )


_WHOLE = (SequentialSampler, RandomSampler, DistributedSampler)


def same_first_batch(it: Composition) -> Iterator[Finding]:
    own = _dataset(it.data)
    for one in it.evaluations if it.data is not None and tensors_in(it.first_batch) else ():
        if _dataset(one.data) is own or _is_no_evidence(one) or own_generators(one.data):
            continue
        if _equal(it.first_batch, first_batch(one.data)):
            yield _training_data(one.handler.name, "begins with the same batch as the training data")


def _equal(one: Any, other: Any) -> bool:
    """Whether two batches consist of equal tensors, arrays, texts and numbers; not if one holds something else."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        return alike and one.layout is torch.strided and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if (mine := parts(one)) is not None and (its := parts(other)) is not None:
        return len(mine[0]) == len(its[0]) and all(map(_equal, mine[0], its[0]))
    return isinstance(one, str | bytes | int | float | None) and bool(one == other)


def evaluators_of_other_models(it: Composition) -> Iterator[Finding]:
    for one in _of_evaluators(it):
        other: set[Tensor] = {*one.evaluator.modules.parameters()}
        if it.parameters and other and other.isdisjoint(it.parameters):
            meant = is_meant(one.evaluator) or is_prepared(one.evaluator) or _is_used(other, it)
            yield finding(
                "C15",
                f"the evaluator of {one.handler.name!r} has a different model, which shares no parameters with the "
                "model being trained",
                "build the evaluator on the same module: Engine(update.evaluation(), model=model)",
                [one.handler.name],
                severity="info" if meant else None,
            )


def _is_used(parameters: set[Tensor], it: Composition) -> bool:
    """Whether a receiver of the user's may change a model with these parameters, such as an average that it updates."""
    held = [one for of in it.connections if _may_change_weights(of.receiver) for one in held_by(of.receiver)]
    models = [*held, *(inspect.getattr_static(one, "module", None) for one in held)]
    return any(parameters & {*one.parameters()} for one in models if isinstance(one, nn.Module))


_CHANGES = {"copy_", "lerp_", "mul_", "add_", "sub_", "data", "load_state_dict", "update", "update_parameters"}


def _may_change_weights(receiver: Any) -> bool:
    """Whether a receiver of the user's changes tensors."""
    return is_users(receiver) and bool(_CHANGES & names_reached(receiver))


def batches_on_another_device(it: Composition) -> Iterator[Finding]:
    if not it.parameters or any("device" in (one.writes or ()) for one in it.connections):
        return
    device, tensors = it.engine.device, tensors_in(it.first_batch)
    if tensors and all(one.device.type != device.type for one in tensors) and not _moves_batches(it):
        yield finding(
            "C12",
            f"the batches are on {tensors[0].device}, but the model is on {device}, and no handler moves the batches",
            f"attach DeviceTransfer({str(device)!r})",
        )


def _moves_batches(it: Composition) -> bool:
    """Whether a function of the user's names a device or a move, so that it may put batches where they belong."""
    functions = [one for one in (*called_by(it.engine), *(one.receiver for one in it.connections)) if is_users(one)]
    return any(name in ("cpu", "cuda", "to") or "device" in name for one in functions for name in names_reached(one))


def generators_that_are_not_restored(it: Composition) -> Iterator[Finding]:
    saves = [handler for handler in it.handlers if handler.writes and getattr(handler, "retention", None) is not None]
    # In this process, they are saved with the position in the data.
    held = own_generators(it.data) if saves and isinstance(it.data, DataLoader) and draws_in_workers(it.data) else {}
    for path, generator in held.items():
        yield finding(
            "C16",
            f"{path} is a random generator of the data ({type(generator).__name__}), and each worker has its own copy. "
            f"If samples draw from it without seeding it, a run that resumes from {saves[0].name!r} draws different "
            "numbers",
            "draw from the global generators (torch, random or numpy.random), which are seeded for each sample, or use "
            "num_workers=0",
            [saves[0].name],
        )


OF_DATA: Sequence[Callable[[Composition], Iterator[Finding]]] = (
    evaluations_that_measure_nothing,
    data_read_once,
    *map(in_training, (unshuffled, evaluated_on_training_data, batches_that_are_in_both, samples_that_are_in_both)),
)

OF_BATCHES: Sequence[Callable[[Composition], Iterator[Finding]]] = (
    in_training(same_first_batch),
    evaluators_of_other_models,
    batches_on_another_device,
    generators_that_are_not_restored,
)
"""Rules that read a batch, or take longer: for `Engine.check` alone."""
