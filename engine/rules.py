"""The rules of `check`: each is a function of a `Composition` that yields findings."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, Subset

from .batches import tensors_in
from .composition import Composition, first_batch, own_generators
from .connection import Connection
from .distributed import expected_processes
from .events import AnyEvent
from .findings import Finding, finding
from .function_rules import OF_FUNCTIONS
from .interval import Interval
from .model_rules import OF_MODELS
from .modules import frozen_copies
from .planning import comes_up

__all__ = ["OF_BATCHES", "OF_COMPOSITIONS"]

Rule = Callable[[Composition], Iterator[Finding]]


# ---- metrics ----------------------------------------------------------------------------------------------------------


def monitored_by_nobody_produced(it: Composition) -> Iterator[Finding]:
    for handler, monitor in it.monitors:
        if monitor.metric in it.produced:
            continue
        there = ", ".join(sorted(it.produced)) or "none"
        if it.may_write_metrics:
            yield finding(
                "C01",
                f"{handler.name!r} monitors {monitor.metric!r}, which no handler announces (announced: {there})",
                f"if your own function writes it, announce it: engine.state.metrics.announce('user', [{monitor.metric!r}])",
                [handler.name],
                "info",
            )
        else:
            yield finding(
                "C01",
                f"{handler.name!r} monitors {monitor.metric!r}, which nobody produces; there are: {there}",
                "attach Metrics or Validation with this metric, or monitor one of those",
                [handler.name],
            )


def produced_and_read_by_nobody(it: Composition) -> Iterator[Finding]:
    monitored = {monitor.metric for _, monitor in it.monitors}
    if not it.engine.training or any(one.reads is None or "metrics" in one.reads for one in it.connections):
        return  # a logger, a display, or a function that may read them
    for name in sorted({owner for owner in it.produced.values() if owner}):
        unread = [metric for metric, owner in it.produced.items() if owner == name and metric not in monitored]
        if unread:
            yield finding(
                "C02",
                f"{name!r} produces {_list(unread)}, but no handler monitors, logs or shows it during the run",
                "attach a logger, ProgressBar or History to see every value; the last is in engine.state.metrics",
                [name],
            )


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


# ---- receivers --------------------------------------------------------------------------------------------------------


def receivers_without_an_order(it: Composition) -> Iterator[Finding]:
    for signal in it.engine.signals.all():
        at_once: dict[tuple[int, int], list[Connection]] = defaultdict(list)
        for one in signal.connections:
            at_once[int(one.phase), one.rank].append(one)
        for several in at_once.values():
            for place, one in enumerate(several):
                for other in several[place + 1 :]:
                    # Of one class, or a method of one base: they exclude each other, take turns, or commute.
                    alike = it.kind_of(one) is it.kind_of(other) or _function_of(one) is _function_of(other)
                    thing = None if alike else _conflict(one, other)
                    if thing is not None:
                        yield finding(
                            "C03",
                            f"{one!r} and {other!r} both use the {thing} at {signal.event.name}, in {one.phase.name} and with "
                            f"rank {one.rank}; one of them writes it, so that their order of attaching decides",
                            "give one of the two another phase or rank: @on(..., phase=, rank=)",
                            [str(one.owner), str(other.owner)],
                        )


def _function_of(one: Connection) -> Any:
    return getattr(one.receiver, "__func__", one.receiver)


# Two receivers may write these in either order: each writes entries, files or requests of its own.
_OWN = frozenset({"metrics", "files", "stop", "step", "flags", "processes", "signals", "state", "position", "error"})


def _conflict(one: Connection, other: Connection) -> str | None:
    """A thing that one of two receivers writes and the other one uses; None if there is none, or they declare nothing."""
    if one.reads is None or one.writes is None or other.reads is None or other.writes is None:
        return None
    used = (one.writes & (other.reads | other.writes)) | (other.writes & one.reads)
    return min(used - _OWN, default=None)


def intervals_that_never_come_up(it: Composition) -> Iterator[Finding]:
    for handler in it.handlers:
        every = getattr(handler, "every", None)
        if not isinstance(every, str | Interval | AnyEvent) or comes_up(it.engine, every) is not False:
            continue
        severity = "warning" if getattr(handler, "interval_matters", False) else "info"
        if severity == "info" and not it.engine.training:
            continue  # an evaluation is as long as its data
        yield finding(
            "C17",
            f"{handler.name!r} runs every {every}, which does not come up in this run{_extent(it)}",
            "choose a shorter interval, or a longer run",
            [handler.name],
            severity,  # type: ignore[arg-type]
        )
    for signal in it.engine.signals.all():
        for one in signal.connections:
            if (
                one.owner is None
                and one.filter is not None
                and comes_up(it.engine, signal.event(**_arguments(one))) is False
            ):
                yield finding(
                    "C17",
                    f"the function {one!r} is connected to {signal.event}({one.filter}), which does not come up in this "
                    f"run{_extent(it)}",
                    "choose another filter, or a longer run",
                    severity="info",
                )


def _arguments(one: Connection) -> dict[str, Any]:
    chosen = one.filter
    assert chosen is not None
    names = ("every", "once", "after", "before", "when")
    return {name: value for name in names if (value := getattr(chosen, name)) is not None}


def _extent(it: Composition) -> str:
    state = it.engine.state
    bounds = ((state.max_epochs, "epochs"), (state.max_iters, "iterations"), (state.max_steps, "optimizer steps"))
    return "".join(f" of {number} {unit}" for number, unit in bounds if number is not None)


# ---- optimizers and parameters ----------------------------------------------------------------------------------------


def foreign_parameters(it: Composition) -> Iterator[Finding]:
    # With parameters of the model that no optimizer holds, a layer was probably replaced after the optimizer was built.
    replaced = any(one.requires_grad and one not in it.optimized for one in it.parameters)
    for update in it.engine.updates if it.parameters and it.engine.training else ():
        foreign = [one for one, name in it.optimized.items() if name == update.name and one not in it.parameters]
        if foreign:
            yield finding(
                "C07",
                f"the optimizer of update {update.name!r} holds {len(foreign)} parameters that are not the model's, of shape "
                f"{_list(str(tuple(one.shape)) for one in foreign)}: they are neither moved nor averaged with the model",
                "build the optimizer from the model's parameters, or add their module: Engine(model={'model': ..., 'loss': ...})",
                severity="warning" if replaced and update.spec.parameters is None else "info",
            )


def untrained_parameters(it: Composition) -> Iterator[Finding]:
    if not it.engine.training:
        return
    left = [name for one, name in it.parameters.items() if one.requires_grad and one not in it.optimized]
    if left:
        chosen = any(update.spec.parameters is not None for update in it.engine.updates)
        yield finding(
            "C08",
            f"{len(left)} trainable parameters are held by no optimizer: {_list(left)}",
            "give them to an optimizer, or freeze them with requires_grad_(False), which also saves their gradients",
            severity="info" if chosen else None,
        )


def frozen_parameters(it: Composition) -> Iterator[Finding]:
    if not it.engine.training:
        return
    frozen = [name for one, name in it.parameters.items() if not one.requires_grad]
    if not frozen:
        return
    meant = any(getattr(handler, "freezes", False) for handler in it.handlers) or any(
        update.spec.parameters is not None for update in it.engine.updates
    )
    last = any(_ends_frozen(module) for module in it.engine.modules.values())
    yield finding(
        "C09",
        f"{len(frozen)} of {len(it.parameters)} parameters are frozen: {_list(frozen)}"
        + (", and nothing after them is trained" if last else ""),
        "unfreeze what is to be trained with requires_grad_(True); usually the last layers are trained",
        severity="warning" if last and not meant else "info",
    )


def _ends_frozen(module: nn.Module) -> bool:
    """Whether only the first parameters are trained; not for a module that is frozen as a whole, such as a teacher.

    Adapters lie between frozen layers: only one block of trained parameters, with nothing trained behind it, is suspicious.
    """
    if isinstance(module, nn.ModuleDict):  # of which no part comes after another
        return any(_ends_frozen(part) for part in module.values())
    copies = frozen_copies(module)
    trained = [one.requires_grad for one in module.parameters() if one not in copies]
    count = sum(trained)
    return 0 < count < len(trained) and all(trained[:count])


def last_batches_of_one_sample(it: Composition) -> Iterator[Finding]:
    data = it.data
    if not it.engine.training or not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset):
        return
    size = data.batch_size
    if size is None or size < 2 or data.drop_last:
        return
    try:
        samples = len(data.sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return
    norms = [name for part, name in it.modules.items() if isinstance(part, _BatchNorm) and part.training]
    if norms and samples % size == 1 and not it.engine.processes.distributed:
        yield finding(
            "C21",
            f"the last batch of each epoch has one sample ({samples} samples in batches of {size}), for which BatchNorm "
            f"({_list(norms)}) has no variance",
            "use DataLoader(drop_last=True), or another batch size",
        )


def processes_that_nothing_connects(it: Composition) -> Iterator[Finding]:
    launched = expected_processes()
    if it.engine.training and launched.distributed and launched.is_rank_zero and not it.engine.processes.distributed:
        yield finding(
            "C30",
            f"this process was launched as one of {launched.world_size}, but nothing connects them: each trains alone on all of "
            "the data, and all write the same files",
            "attach DistributedDataParallel() or FullyShardedDataParallel(); or launch one process, without torchrun",
        )


def windows_longer_than_an_epoch(it: Composition) -> Iterator[Finding]:
    length, epochs = it.engine.state.epoch_length, range(1, 1 + min(it.engine.state.max_epochs or 1, 100))
    for update in it.engine.updates if it.engine.training and length else ():
        window = update.window.length_of
        longest = 1 if window is None else max(window(epoch) for epoch in epochs)
        if length is not None and longest > length:
            yield finding(
                "C22",
                f"update {update.name!r} accumulates {longest} batches for a step, but an epoch has {length}: windows end with "
                "the epoch, so that each step uses fewer",
                "accumulate at most an epoch, or run over the data several times an epoch with run(epoch_length=)",
            )


# ---- files ------------------------------------------------------------------------------------------------------------


def one_file_for_two(it: Composition) -> Iterator[Finding]:
    writers: dict[str, list[str]] = defaultdict(list)
    engines = {id(engine): engine for engine in (it.engine, *(one.evaluator for one in it.evaluations))}
    for number, engine in enumerate(engines.values()):
        for handler in engine.handlers.values():
            place = _place(handler) if handler.enabled and handler.writes else None
            if place is not None:
                writers[place].append(handler.name if number == 0 else f"{handler.name} of the evaluator")
    for place, names in writers.items():
        if len(names) > 1:
            yield finding(
                "C10",
                f"{' and '.join(map(repr, names))} write to {place!r}",
                "give each a file, or a folder, of its own",
                names,
            )


def _place(handler: Any) -> str | None:
    """What a handler alone should write: a file, or the names of its files in a folder."""
    if (path := getattr(handler, "path", None)) is not None:
        return str(os.path.abspath(path))
    if (folder := getattr(handler, "folder", None)) is None:
        return None
    template = str(getattr(getattr(handler, "filename", None), "text", "{name}"))
    return os.path.join(os.path.abspath(folder), template.replace("{name}", handler.name))


def best_of_nothing(it: Composition) -> Iterator[Finding]:
    monitored = {handler.name for handler, _ in it.monitors}
    for handler in it.handlers:
        filename = str(getattr(getattr(handler, "filename", None), "text", ""))
        if filename and handler.name not in monitored and ("best" in handler.name or "best" in filename):
            yield finding(
                "C11",
                f"{handler.name!r} is called the best, but keeps the last versions, since it monitors no metric",
                "give it the metric that decides: Checkpoint(..., monitor='accuracy')",
                [handler.name],
            )


# ---- data and evaluations ---------------------------------------------------------------------------------------------


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


def _list(names: Any, most: int = 4) -> str:
    names = list(names)
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


OF_COMPOSITIONS: Sequence[Rule] = (
    monitored_by_nobody_produced,
    produced_and_read_by_nobody,
    evaluations_that_measure_nothing,
    receivers_without_an_order,
    *OF_FUNCTIONS,
    *OF_MODELS,
    intervals_that_never_come_up,
    foreign_parameters,
    untrained_parameters,
    frozen_parameters,
    last_batches_of_one_sample,
    processes_that_nothing_connects,
    windows_longer_than_an_epoch,
    one_file_for_two,
    best_of_nothing,
    data_read_once,
    unshuffled,
    evaluated_on_training_data,
)
"""Rules that need no batch: they are also checked when a run starts."""

OF_BATCHES: Sequence[Rule] = (
    same_first_batch,
    evaluators_of_other_models,
    batches_on_another_device,
    generators_that_are_not_restored,
)
"""Rules that read a batch, or take longer: for `Engine.check` alone."""
