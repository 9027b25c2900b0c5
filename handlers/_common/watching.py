"""The checks by `Guards` of a model, a batch and an optimizer. They change nothing, but may wait for the device."""

from __future__ import annotations

import hashlib
import math
import re
import weakref
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.data import DataLoader, Dataset

from signalfire import Engine, UpdateState
from signalfire.authoring import as_signed, is_readable, tensors_in, widened
from signalfire.authoring.batches import parts
from signalfire.authoring.functions import called_by, names_reached
from signalfire.distributed import is_sharded, local_part
from signalfire.findings.epoch_checks import held_by_optimizers, names_of
from signalfire.findings.evaluation_findings import effect_of_training
from signalfire.findings.loss_nodes import functions_of
from signalfire.findings.other_optimizers import held_by_none
from signalfire.models.modules import frozen_copies, untrained_copies

__all__ = [
    "Facts",
    "are_of_teachers",
    "batch_of",
    "changed",
    "checksum",
    "differing_rank",
    "first_of",
    "frozen_last_layer",
    "gradient_facts",
    "ignores_all",
    "inputs_of",
    "labels_of",
    "left_in_eval",
    "moving_frozen_norms",
    "name_of_inputs",
    "one_class",
    "out_of_range",
    "place_in_data",
    "same_for_all",
    "statistics_of",
    "total",
    "trained_elsewhere",
    "unheld_since",
    "untrained_spectral_norms",
]

IGNORED = {-100, -1, 255}
"""Labels that losses commonly ignore."""

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm)


@dataclass
class Facts:
    """The observations of the checks of one update so far.

    Attributes:
        looks: the number of checks that saw a step.
        streak: by code, how many checks in a row saw the same suspicious thing.
        missing: the parameters without a gradient in all of these checks.
        losses: the losses of the last checks, with what distinguishes the batches.
        largest_rate: the largest learning rate.
        largest_gradient: the largest of the gradients.
        norms: the first gradient norms; norm: the last one.
        has_classes: whether the loss takes the labels of the batch for classes.
        epoch_losses: the losses of this epoch, with the number of classes.
    """

    looks: int = 0
    streak: dict[str, int] = field(default_factory=dict)
    missing: list[Tensor] = field(default_factory=list)
    losses: list[tuple[float, Any]] = field(default_factory=list)
    largest_rate: float = 0.0
    largest_gradient: float = 0.0
    norms: list[float] = field(default_factory=list)
    norm: float = 0.0
    has_classes: bool = False
    epoch_losses: list[tuple[float, int]] = field(default_factory=list)

    def lasting(self, missing: list[Tensor], wanted: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
        """Parameters without a gradient, and whether they are most of all. Of checks in a row, the same ones count as most.

        Heads of several tasks, or experts, take turns.
        """
        before = set(map(id, self.missing)) if self.streak.get("G01") else set(map(id, missing))
        self.missing = [one for one in missing if id(one) in before]
        if sum(p.numel() for p in self.missing) * 2 < sum(p.numel() for p in wanted):
            return missing, False
        return self.missing, True

    def again(self, code: str, seen: bool) -> int:
        """How many checks in a row, including this one, saw it."""
        self.streak[code] = self.streak.get(code, 0) + 1 if seen else 0
        return self.streak[code]

    def see(self, loss: Tensor, output: Any, labels: Tensor | None) -> None:
        """Note a loss, and whether it is that of classes."""
        self.has_classes = labels is not None and _has_classes(loss) and _may_be_targets(labels, loss)
        scores = isinstance(output, Tensor) and output.dim() == 2 and output.shape[1] > 1
        if self.has_classes and scores and labels is not None and labels.dim() == 1:
            self.epoch_losses.append((float(loss.detach()), output.shape[1]))

    def has_converged(self, largest: float) -> bool:
        """Whether the largest gradient of this check is tiny beside the largest so far."""
        self.largest_gradient = max(self.largest_gradient, largest)
        return largest < 1e-4 * self.largest_gradient

    def is_dead(self, norm: float, loss: Any) -> bool:
        """Whether all gradients are zero, but for those of a hinge loss that had some before and is 0 now."""
        return norm == 0 and not (any(self.norms) and isinstance(loss, Tensor) and not loss.detach().any())


# ---- batches ----------------------------------------------------------------------------------------------------------


def inputs_of(batch: Any) -> Tensor | None:
    """The first floating-point tensor of a batch, which is its input where it has any."""
    return next((one for one in tensors_in(batch) if one.is_floating_point() and is_readable(one)), None)


def first_of(batch: Any) -> Tensor | None:
    """The first tensor of a batch, of any type."""
    return next((one for one in tensors_in(batch) if is_readable(one)), None)


def name_of_inputs(batch: Any) -> str:
    """What to call the result of `inputs_of`, which may as well be the targets where other tensors come before it."""
    if isinstance(batch, Mapping) or inputs_of(batch) is not first_of(batch):
        return "the values of the first floating-point tensor in the batch"
    return "the inputs"


def labels_of(batch: Any) -> Tensor | None:
    """The integer targets of a batch of (input, target); None for other batches."""
    if not isinstance(batch, tuple | list) or len(batch) != 2 or not isinstance(batch[1], Tensor):
        return None
    labels = batch[1]
    if labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool:
        return None
    if not is_readable(labels) or not labels.numel():
        return None
    return as_signed(labels)


def batch_of(batch: Any) -> tuple[Any, ...] | None:
    """What distinguishes one batch from another: shapes and sums of tensors, and words and numbers; None if a part is unknown."""
    leaves = _leaves(batch)
    known = [_known(leaf) for leaf in leaves]
    return None if None in known or not any(isinstance(leaf, Tensor) for leaf in leaves) else tuple(known)


def place_in_data(engine: Engine) -> Hashable:
    """The place of the batch in the data, which may be repeated within an epoch; the same for a batch that is given again."""
    data, tensors = engine.feed.current.given, tensors_in(engine.state.batch)
    if type(data) in (list, tuple) and all(one is data[0] for one in data):
        return 0
    if tensors and not isinstance(data, list | tuple | DataLoader | Dataset):  # as of a function that yields
        place = weakref.ref(tensors[0])
        return place, hash(place)  # which it keeps: a dead one cannot be hashed
    known = engine.feed.current.place_of(engine.state.iteration)
    return engine.state.iteration if known is None else known[1]


def _leaves(batch: Any) -> list[Any]:
    container = None if isinstance(batch, Tensor) else parts(batch)
    return [batch] if container is None else [leaf for part in container[0] for leaf in _leaves(part)]


def _known(leaf: Any) -> tuple[Any, ...] | None:
    """What can be compared of a part of a batch; None if nothing can."""
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), *_sums(leaf)) if is_readable(leaf) else None
    return (leaf,) if leaf is None or isinstance(leaf, str | bytes | int | float) else None


def _sums(tensor: Tensor) -> tuple[float, float]:
    real = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    flat = widened(real.reshape(-1))
    places = torch.arange(1, flat.numel() + 1, dtype=flat.dtype, device=flat.device)
    return float(flat.sum()), float(flat @ places)


def same_for_all(output: Any, inputs: Tensor | None) -> bool:
    """Whether all samples have the same output, although their inputs differ."""
    if not isinstance(output, Tensor) or not output.is_floating_point() or output.dim() < 2 or inputs is None:
        return False
    if not inputs.dim() or len(output) < 2 or len(output) != len(inputs) or not output.numel():
        return False
    differ = bool((inputs != inputs[:1]).any())
    return differ and bool((output == output[:1]).all())


def out_of_range(output: Any, labels: Tensor | None, loss: Tensor | None = None) -> tuple[int, int, int] | None:
    """The smallest and largest label, and the number of classes, if the loss takes labels for classes that lie outside of it."""
    if labels is None or not isinstance(output, Tensor) or not output.is_floating_point() or output.dim() < 2:
        return None
    classes = output.shape[1]
    if classes < 2 or labels.shape != output.shape[:1] + output.shape[2:]:
        return None
    wrong = (labels < 0) | (labels >= classes)
    for one in IGNORED:
        wrong &= labels.long() != one
    if not bool(wrong.any()) or (loss is not None and not _leaves_without_class(loss, output, labels.long(), wrong)):
        return None
    return int(labels.min()), int(labels.max()), classes


_REFUSING = {"NllLoss", "NllLoss2D", "MultiMarginLoss"}
"""Losses that raise an error for a label without a class. Where they do not, what they compare is not the labels of the batch."""
_OF_CLASSES = _REFUSING | {
    *("LogSoftmax", "Softmax", "SoftMarginLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"),
}


def _has_classes(loss: Tensor) -> bool:
    """Whether a loss takes its targets for classes, by the functions of torch in it."""
    return bool(functions_of(loss) & _OF_CLASSES)


def _leaves_without_class(loss: Tensor, output: Tensor, labels: Tensor, wrong: Tensor) -> bool:
    """Whether a loss compares this output with classes, and no class is the target of these samples."""
    nodes = [node for node in _nodes(loss) if _kind(node) in _OF_CLASSES]
    own = [node for node in nodes if output.shape in (_shape(node, "result"), _shape(node, "self"))]
    if not own or functions_of(loss) & _REFUSING:
        return False
    target = _saved(own[0], "target")
    if target is None:
        return any(_has_rows_for(one, output, labels, wrong) for one in _factors(loss))
    return target.shape != output.shape or not bool((target.movedim(1, -1)[wrong] > 0).any())


def _factors(loss: Tensor) -> list[Tensor]:
    """What a loss multiplies with, such as targets with a one for each class."""
    nodes = [node for node in _nodes(loss) if _kind(node) == "Mul"]
    return [one for node in nodes for name in ("self", "other") if (one := _saved(node, name)) is not None]


def _has_rows_for(factor: Tensor, output: Tensor, labels: Tensor, wrong: Tensor) -> bool:
    """Whether a factor chooses the classes of the labels, and none where a label has no class."""
    if factor.shape != output.shape or factor.requires_grad:
        return False
    rows, right = factor.movedim(1, -1) > 0, labels.clamp(0, output.shape[1] - 1)
    chosen = rows.gather(-1, right[..., None])[..., 0]
    return bool(chosen[~wrong].all()) and not bool(rows[wrong].any())


def _may_be_targets(labels: Tensor, loss: Tensor) -> bool:
    """Whether labels may be what a loss compares with, by the targets that it has saved."""
    targets = [one for node in _nodes(loss) if (one := _saved(node, "target")) is not None]
    classes = [one.argmax(1) if one.is_floating_point() and one.dim() > 1 else one for one in targets]
    return not targets or any(
        one.numel() == labels.numel() and bool((one.reshape(-1).to(labels.device) == labels.reshape(-1)).all())
        for one in classes
    )


def ignores_all(loss: Tensor) -> bool:
    """Whether a loss is the mean over no target at all, since its targets are all of the class that it ignores."""
    means = [node for node in _nodes(loss) if _kind(node) in ("NllLoss", "NllLoss2D") and node._saved_reduction == 1]
    weights = [_saved(node, "total_weight") for node in means]
    return any(one is not None and float(one) == 0 for one in weights)


def _nodes(loss: Tensor) -> list[Any]:
    """The functions of torch nearest to a loss."""
    nodes: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    for node in islice(nodes, 64):  # grows meanwhile
        nodes += [child for child, _ in node.next_functions if child is not None and child not in nodes]
    return nodes


def _kind(node: Any) -> str:
    return re.sub(r"Backward\d+$", "", node.name())


def _shape(node: Any, name: str) -> torch.Size | None:
    saved = _saved(node, name)
    return None if saved is None else saved.shape


def _saved(node: Any, name: str) -> Tensor | None:
    """A tensor that a function saved for its backward; None if it has none, or if a backward has freed it."""
    try:
        value = getattr(node, f"_saved_{name}", None)
    except RuntimeError:
        return None
    return value if isinstance(value, Tensor) else None


def one_class(labels: Sequence[tuple[int, int]], facts: Iterable[Facts]) -> bool:
    """Whether the smallest and the largest label were the same in three checks, and some loss takes them for classes."""
    return len(labels) == 3 and all(low == high for low, high in labels) and any(one.has_classes for one in facts)


# ---- models -----------------------------------------------------------------------------------------------------------


def _parts(engine: Engine) -> list[tuple[str, nn.Module]]:
    """All modules with their paths; those of several models begin with the model's name."""
    several = len(engine.modules) > 1
    return [one for name, root in engine.modules.items() for one in root.named_modules(prefix=name if several else "")]


def left_in_eval(engine: Engine, modes: dict[nn.Module, bool]) -> tuple[str, set[nn.Module]]:
    """The name of a part that is in eval mode, but was not when the run began, and what is inside of it; empty without one.

    Norms, and parts without trained parameters, are left out.
    """
    held = held_by_optimizers(engine)
    paths = {part: path for path, part in _parts(engine)}
    off = {part for part in paths if modes.get(part) and not part.training and not isinstance(part, _NormBase)}
    off -= {inner for part in paths if off and _is_untrained(part, held) for inner in part.modules()}
    off = _with_effect(engine, off)
    for name, root in engine.modules.items():
        if root in off:
            return f"the model {name!r}", off.intersection(root.modules())
    first = next((part for part in paths if part in off), None)
    return ("", set()) if first is None else (f"the part {paths[first]!r} of the model", off & {*first.modules()})


def _with_effect(engine: Engine, off: set[nn.Module]) -> set[nn.Module]:
    """The parts that compute something else in eval mode; none if the step calls train() itself, as after such a forward."""
    if not off or any("train" in names_reached(one) for one in called_by(engine)):
        return set()
    return {part for part in off if any(map(effect_of_training, part.modules()))}


def _is_untrained(part: nn.Module, held: set[Tensor]) -> bool:
    parameters = list(part.parameters())
    return bool(parameters) and not any(p.requires_grad and p in held for p in parameters)


def moving_frozen_norms(engine: Engine, before: Mapping[str, Tensor], trained: set[Tensor]) -> list[str]:
    """The normalization layers with frozen weights whose running statistics have changed all the same, but for teachers'.

    Args:
        engine: The engine.
        before: The statistics that they had.
        trained: What was trained meanwhile, and only then frozen.
    """
    meant = {p for root in engine.modules.values() for p in frozen_copies(root)} | trained
    moved = changed(before, statistics_of(engine))
    return [
        path for path, part in _parts(engine) if path in moved and _is_frozen(part) and not meant & {*part.parameters()}
    ]


def are_of_teachers(engine: Engine, norms: Collection[str]) -> bool:
    """Whether normalization layers are in models that are built like one that is trained."""
    teachers = untrained_copies(engine.modules.values(), lambda p: p.requires_grad)
    return all({*part.parameters()} <= teachers for path, part in _parts(engine) if path in norms)


def changed(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> set[str]:
    """The places of statistics that have changed; NaN that stay are the same."""
    same = {
        path for path, old in before.items() if path in now and torch.equal(old.nan_to_num(), now[path].nan_to_num())
    }
    return {path for path in before if path in now} - same


def _is_frozen(part: nn.Module) -> bool:
    parameters = list(part.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def frozen_last_layer(engine: Engine) -> str | None:
    """The last layer of a model, if only normalization layers are trained, some of them in it; None for other models."""
    leaves = [(path, part) for path, part in _parts(engine) if _own(part)]
    training = {part for _, part in leaves if any(p.requires_grad for p in _own(part))}
    if not all(isinstance(part, _NORMS) for part in training):
        return None
    for root in engine.modules.values():
        last = [(path, part) for path, part in leaves if part in {*root.modules()}][-1:]
        if training & {*root.modules()} and last[0][1] not in training:
            return last[0][0]
    return None


def _own(part: nn.Module) -> list[nn.Parameter]:
    return list(part.parameters(recurse=False))


def statistics_of(engine: Engine) -> dict[str, Tensor]:
    """Copies of the running statistics of the normalization layers."""
    return {
        path: part.running_mean.clone()
        for path, part in _parts(engine)
        if isinstance(part, _NormBase) and part.running_mean is not None
    }


def untrained_spectral_norms(engine: Engine) -> list[str]:
    """Layers with ``torch.nn.utils.spectral_norm`` whose vectors are not those of the weights.

    The power iteration runs in training forwards only, so it may never have run, or not with these weights, such as averages.
    """
    found = []
    for path, part in _parts(engine):
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                with torch.no_grad():
                    matrix = hook.reshape_weight_to_matrix(getattr(part, f"{hook.name}_orig"))
                    image = matrix @ getattr(part, f"{hook.name}_v")
                    cosine = (image @ getattr(part, f"{hook.name}_u")) / image.norm().clamp(min=1e-30)
                if float(cosine) < 0.9:  # 1 after an iteration, and hardly less after one more step
                    found.append(path)
    return found


def trained_elsewhere(engine: Engine) -> list[Tensor]:
    """The parameters with a gradient that no optimizer of the engine holds: someone else may step them."""
    held = {p for update in engine.updates for p in update.parameters}
    return [
        p
        for root in engine.modules.values()
        for p in root.parameters()
        if p.requires_grad and p.is_leaf and p not in held and not is_sharded(p)
    ]


def differing_rank(engine: Engine) -> int | None:
    """The first rank whose weights differ from those of rank 0; None if none does, or if it is not known. Collective."""
    if not engine.processes.distributed:
        return None
    sums = engine.processes.gather(engine.findings.look(checksum, engine))
    if None in sums:
        return None
    return next((rank for rank, one in enumerate(sums) if one != sums[0]), None)


def checksum(engine: Engine) -> str | None:
    """What the weights of this rank come to; None for sharded ones, of which each rank has its own part."""
    parameters = [p.detach() for root in engine.modules.values() for p in root.parameters()]
    if not parameters or any(is_sharded(p) for p in parameters):
        return None
    values = [widened(torch.view_as_real(p) if p.is_complex() else p) for p in parameters]
    sums = torch.stack([one.sum().cpu().double() for one in values])
    squares = torch.stack([one.square().sum().cpu().double() for one in values])
    return hashlib.sha256(torch.cat([sums, squares]).numpy().tobytes()).hexdigest()


# ---- gradients --------------------------------------------------------------------------------------------------------


def unheld_since(engine: Engine, known: set[Tensor], foreign: list[Foreign]) -> list[Tensor]:
    """The parameters that no optimizer holds and that were not known as the run began.

    Those that were are with them if a step left alone what an optimizer holds in place of them: others with as many dimensions.
    """
    names, held = names_of(engine), held_by_optimizers(engine)
    stale = {p.dim() for p, version, update, steps in foreign if p._version == version and update.steps > steps}
    unheld = set(names) - held - _untrained_copies(engine, held)
    new = [p for p in names if p in unheld and p.requires_grad and (p not in known or p.dim() in stale)]
    return held_by_none(new)


Foreign = tuple[Tensor, int, UpdateState, int]
"""What an optimizer holds besides the model, with its version, and the update with the number of its steps, as a run begins."""


def _untrained_copies(engine: Engine, held: set[Tensor]) -> set[Tensor]:
    """Parameters like those that are trained, such as of target networks, if updates choose what they train."""
    if all(update.spec.parameters is None for update in engine.updates):
        return set()
    roots = engine.modules.values()
    parts = [*roots, *(part for root in roots if not isinstance(root, nn.Sequential) for part in root.children())]
    return untrained_copies(parts, held.__contains__)


def gradient_facts(update: UpdateState) -> tuple[list[Tensor], list[Tensor], float]:
    """The parameters that should have a gradient, those that have none, and the norm of all gradients.

    The norm is NaN on a rank that holds no element of them.
    """
    wanted = [p for p in update.parameters if p.requires_grad]
    missing = [p for p in wanted if p.grad is None]
    given = [p.grad for p in wanted if p.grad is not None]
    return wanted, missing, total(given) if any(local_part(one).numel() for one in given) else math.nan


def total(gradients: Iterable[Tensor | None]) -> float:
    """The 2-norm of all gradients; of this rank's part where they are sharded."""
    parts: Sequence[Tensor] = [local_part(one).detach() for one in gradients if one is not None]
    dense = [one.coalesce().values() if one.is_sparse else one for one in parts]
    if not dense:
        return 0.0
    return float(torch.stack([torch.linalg.vector_norm(one).cpu().double() for one in dense]).norm())
