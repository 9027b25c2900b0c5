"""The rules of `check` about what optimizers hold, and what is trained together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, default_collate

from ..authoring.functions import is_users, names_reached
from ..core.update import UpdateState
from ..core.words import listed
from ..data.extent import known_length
from ..distributed import expected_processes
from ..models.modules import frozen_copies, untrained_copies
from .composition import Composition
from .reports import Finding, finding

__all__ = ["OF_PARAMETERS", "ends_frozen"]


def foreign_parameters(it: Composition) -> Iterator[Finding]:
    # With parameters of the model that no optimizer holds, a layer was probably replaced after the optimizer was built.
    replaced = any(one.requires_grad and one not in it.optimized for one in it.parameters)
    for update in it.engine.updates if it.parameters else ():
        foreign = [one for one, name in it.optimized.items() if name == update.name and one not in it.parameters]
        if foreign:
            yield finding(
                "C07",
                f"the optimizer of update {update.name!r} holds parameters that do not belong to the model, "
                f"of shape {listed(str(tuple(one.shape)) for one in foreign)}, and that are not moved with the model",
                "build the optimizer from the model's parameters, or add the module that these parameters belong to: "
                "Engine(model={'model': ..., 'loss': ...})",
                severity="warning" if replaced and update.spec.parameters is None else "info",
            )


def untrained_parameters(it: Composition) -> Iterator[Finding]:
    held = it.optimized.keys() | it.trained_by_user
    left = {one: name for one, name in it.parameters.items() if one.requires_grad and one not in held}
    if left:
        # An optimizer that is given as an object chooses what it trains, as `parameters=` does.
        chosen = any(
            update.spec.parameters is not None or isinstance(update.spec.optimizer, Optimizer)
            for update in it.engine.updates
        )
        yield finding(
            "C08",
            f"{len(left)} trainable parameters are in no optimizer: {listed(left.values())}",
            "add them to an optimizer, or freeze them with requires_grad_(False), which also saves the memory "
            "for their gradients",
            severity="info" if chosen and left.keys() <= {*_first_layers(it), *_targets(it)} else None,
        )


def _first_layers(it: Composition) -> Iterator[Tensor]:
    """The parameters of each model before the first one that is trained: a trunk of which the head alone is fine-tuned."""
    for root in it.engine.modules.values():
        first = [*itertools.takewhile(lambda one: one not in it.optimized, root.parameters())]
        if len(first) < len([*root.parameters()]):
            yield from first


def _targets(it: Composition) -> set[Tensor]:
    """The parameters of parts of which nothing is trained, and which are built like one that is, such as a target network."""
    roots = it.engine.modules.values()
    parts = [*roots, *(part for root in roots if not isinstance(root, nn.Sequential) for part in root.children())]
    return untrained_copies(parts, it.optimized.__contains__)


def frozen_parameters(it: Composition) -> Iterator[Finding]:
    frozen = [name for one, name in it.parameters.items() if not one.requires_grad]
    if not frozen:
        return
    meant = any(getattr(handler, "freezes", False) for handler in it.handlers) or any(
        update.spec.parameters is not None for update in it.engine.updates
    )
    last = any(ends_frozen(module) and not _is_named_otherwise(module) for module in it.engine.modules.values())
    yield finding(
        "C09",
        f"{len(frozen)} of {len(it.parameters)} parameters are frozen: {listed(frozen)}"
        + (". No layer that is registered after them is trained" if last else ""),
        "unfreeze the layers that should train, usually the last ones, with requires_grad_(True)",
        severity="warning" if last and not meant else "info",
    )


def ends_frozen(module: nn.Module) -> bool:
    """Whether only the first parameters are trained; not for a module that is frozen as a whole, such as a teacher.

    Adapters lie between frozen layers: only one block of trained parameters, with nothing trained behind it, is suspicious.
    """
    if isinstance(module, nn.ModuleDict):  # of which no part comes after another
        return any(ends_frozen(part) for part in module.values())
    others = {*frozen_copies(module), *_embeddings(module)}
    trained = [one.requires_grad for one in module.parameters() if one not in others]
    count = sum(trained)
    return 0 < count < len(trained) and all(trained[:count])


def _embeddings(module: nn.Module) -> Iterator[Tensor]:
    """The weights of embeddings, which come before all layers, wherever they are registered."""
    return (part.weight for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag))


def _is_named_otherwise(module: nn.Module) -> bool:
    """Whether names tell that frozen layers come last on purpose.

    What is trained has no place among the layers, such as a prompt, or is made before layers that it comes after; or what is
    frozen is of a loss, such as the network of a perceptual one, a model to learn from, or one that reads what is trained.
    """
    trained, frozen = set[str](), set[str]()
    for name, parameter in module.named_parameters():
        (trained if parameter.requires_grad else frozen).add(name.rpartition(".")[0].casefold())
    named = all(not path or any(word in path for word in _LAST) for path in trained)
    return named or all(any(word in path for word in _NO_LAYERS) for path in frozen)


_LAST = ("head", "classifier", "prompt", "adapter", "projector", "connector", "bridge", "mapper", "qformer")
_NO_LAYERS = (
    *("loss", "vgg", "lpips", "percept", "teacher", "target", "reference", "critic", "discriminator", "reward"),
    *("decoder", "generator", "llm", "language"),
)


def last_batches_of_one_sample(it: Composition) -> Iterator[Finding]:
    size, samples = _extent(it.data)
    if size < 2 or samples is None or samples % size != 1:
        return
    norms = {name: part for part, name in it.modules.items() if isinstance(part, _BatchNorm) and part.training}
    if norms and _reaches(it, samples // size + 1) and not it.engine.processes.distributed:
        yield _one_sample(it, norms, f"{samples} samples in batches of {size}")


def _extent(data: Any) -> tuple[int, int | None]:
    """The samples of a batch and of an epoch, where the last batch is not left out; None if they are not known."""
    if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset) or data.drop_last:
        return 1, None
    return data.batch_size or 1, known_length(data.sampler)


def _reaches(it: Composition, iteration: int) -> bool:
    most = it.engine.state.max_iters
    return most is None or most >= iteration


def _one_sample(it: Composition, norms: Mapping[str, nn.Module], extent: str) -> Finding:
    over_samples = [name for name, part in norms.items() if not _is_over_places(part, it)]
    what = f"BatchNorm ({listed(norms)}) computes the mean and the variance over it"
    if over_samples:
        what = f"BatchNorm ({listed(over_samples)}) cannot compute a variance over it if inputs have one row per sample"
    # Places have a variance, too, and a handler, or the model's train(), may freeze the statistics as the run starts.
    freezes = it.names_any({"eval", "train"}) or any(getattr(one, "freezes", False) for one in it.handlers)
    plain = it.data.collate_fn is default_collate and all(type(one).train is nn.Module.train for one in it.modules)
    warns = over_samples and plain and not freezes
    return finding(
        "C21",
        f"the last batch of each epoch has one sample ({extent}). {what}",
        "use DataLoader(drop_last=True), or a different batch size",
        severity=None if warns else "info",
    )


def _is_over_places(norm: nn.Module, it: Composition) -> bool:
    """Whether a normalization layer gets several places of each sample, as behind a convolution."""
    if isinstance(norm, nn.BatchNorm2d | nn.BatchNorm3d):
        return True
    before = [*itertools.takewhile(lambda one: one is not norm, it.modules)]
    last = next((one for one in reversed(before) if isinstance(one, (_ConvNd, *_JOINING))), None)
    return isinstance(last, _ConvNd)


_JOINING = (nn.Linear, nn.Flatten, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d)
"""Layers behind which the places of a sample are one row, or may be one place."""


def processes_that_nothing_connects(it: Composition) -> Iterator[Finding]:
    launched = expected_processes()
    if _is_wrapped(it):
        return
    shares = isinstance(getattr(it.data, "sampler", None), DistributedSampler)
    if it.engine.training and launched.distributed and launched.is_rank_zero and not it.engine.processes.distributed:
        yield finding(
            "C30",
            f"this process was launched as one of {launched.world_size} processes, but no handler connects the "
            f"processes. Each one trains alone{'' if shares else ' on all of the data'}, and all may write the same "
            "files",
            "attach DistributedDataParallel() or FullyShardedDataParallel(); or launch a single process, without "
            "torchrun",
            severity="info" if _may_communicate(it) else None,
        )


def _is_wrapped(it: Composition) -> bool:
    """Whether torch's DDP averages the gradients of the processes."""
    wrapped = any(isinstance(one, nn.parallel.DistributedDataParallel) for one in it.modules)
    return wrapped or it.engine.modules.wrapper == "DistributedDataParallel"


def _may_communicate(it: Composition) -> bool:
    """Whether a function, a handler's method or a hook of the user's may average gradients or weights over the processes."""
    methods = (method for one in it.handlers if is_users(type(one)) for method in vars(type(one)).values())
    functions = (*(one.receiver for one in it.functions), *methods)
    hooked = any(getattr(one, "_backward_hooks", None) for one in it.parameters)
    return hooked or any("reduce" in name or "average" in name for one in functions for name in names_reached(one))


def windows_longer_than_an_epoch(it: Composition) -> Iterator[Finding]:
    length = it.engine.state.epoch_length
    for update in it.engine.updates if length else ():
        lengths = _window_lengths(it, update)
        longer = [epoch for epoch, one in lengths.items() if length is not None and one > length]
        if longer and update.one_step_per_batch:  # time chunks count, too
            since = f" from epoch {longer[0]} on" if longer[0] > 1 else ""
            yield finding(
                "C22",
                f"update {update.name!r} accumulates {max(lengths.values())} batches per step{since}, but an epoch has "
                f"only {length}. Windows end with the epoch, so each of these steps uses fewer batches",
                "accumulate at most one epoch of batches, or make epochs longer than the data with run(epoch_length=)",
            )


def _window_lengths(it: Composition, update: UpdateState) -> dict[int, int]:
    """How many batches a step takes, by epoch."""
    epochs, of = range(1, 1 + min(it.engine.state.max_epochs or 1, 100)), update.window.length_of
    return {epoch: 1 if of is None else of(epoch) for epoch in epochs}


OF_PARAMETERS: Sequence[Callable[[Composition], Iterator[Finding]]] = (
    foreign_parameters,
    untrained_parameters,
    frozen_parameters,
    last_batches_of_one_sample,
    processes_that_nothing_connects,
    windows_longer_than_an_epoch,
)
