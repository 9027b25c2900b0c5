"""The checks by `Guards` of a model, a batch and an optimizer. They change nothing, but may wait for the device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.spectral_norm import SpectralNorm

from signalfire import Engine, UpdateState
from signalfire.authoring import as_signed, is_readable, tensors_in, widened
from signalfire.distributed import is_sharded, local_part
from signalfire.findings.epoch_checks import held_by_optimizers, names_of
from signalfire.findings.loss_graph import functions_of, ignored_by
from signalfire.models.modules import frozen_copies

__all__ = [
    "Facts",
    "batch_of",
    "checksum",
    "differing_rank",
    "frozen_last_layer",
    "gradient_facts",
    "inputs_of",
    "labels_of",
    "left_in_eval",
    "moving_frozen_norms",
    "one_class",
    "out_of_range",
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
        losses: the losses of the last checks, with what distinguishes the batches.
        largest_rate: the largest learning rate.
        largest_gradient: the largest of the gradients.
        norms: the first gradient norms.
        has_classes: whether the loss takes its targets for classes.
        epoch_losses: the losses of this epoch, with the number of classes.
    """

    looks: int = 0
    streak: dict[str, int] = field(default_factory=dict)
    losses: list[tuple[float, Any]] = field(default_factory=list)
    largest_rate: float = 0.0
    largest_gradient: float = 0.0
    norms: list[float] = field(default_factory=list)
    has_classes: bool = False
    epoch_losses: list[tuple[float, int]] = field(default_factory=list)

    def again(self, code: str, seen: bool) -> int:
        """How many checks in a row, including this one, saw it."""
        self.streak[code] = self.streak.get(code, 0) + 1 if seen else 0
        return self.streak[code]

    def see(self, loss: Tensor, output: Any, labels: Tensor | None) -> None:
        """Note a loss, and whether it is that of classes."""
        self.has_classes = _has_classes(loss)
        scores = isinstance(output, Tensor) and output.dim() == 2 and output.shape[1] > 1
        if self.has_classes and scores and labels is not None and labels.dim() == 1:
            self.epoch_losses.append((float(loss.detach()), output.shape[1]))

    def has_converged(self, largest: float) -> bool:
        """Whether the largest gradient of this check is tiny beside the largest so far."""
        self.largest_gradient = max(self.largest_gradient, largest)
        return largest < 1e-4 * self.largest_gradient


# ---- batches ----------------------------------------------------------------------------------------------------------


def inputs_of(batch: Any) -> Tensor | None:
    """The first floating-point tensor of a batch, which is its input where it has any."""
    return next((one for one in tensors_in(batch) if one.is_floating_point() and is_readable(one)), None)


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
    """What distinguishes one batch from another: shapes and sums of its tensors; None without tensors."""
    tensors = [one for one in tensors_in(batch) if is_readable(one) and not one.is_complex()]
    sums = [(tuple(one.shape), *_sums(one)) for one in tensors]
    return tuple(sums) or None


def _sums(tensor: Tensor) -> tuple[float, float]:
    flat = widened(tensor.detach().reshape(-1))
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
    if loss is not None and not _has_classes(loss):
        return None
    if labels is None or not isinstance(output, Tensor) or not output.is_floating_point() or output.dim() < 2:
        return None
    classes = output.shape[1]
    if classes < 2 or labels.shape != output.shape[:1] + output.shape[2:]:
        return None
    wrong = (
        set(labels[(labels < 0) | (labels >= classes)].unique().tolist())
        - IGNORED
        - {None if loss is None else ignored_by(loss)}
    )
    return (int(labels.min()), int(labels.max()), classes) if wrong else None


_OF_CLASSES = {"LogSoftmax", "Softmax", "NllLoss", "NllLoss2D", "MultiMarginLoss", "SoftMarginLoss"} | {
    "BinaryCrossEntropy",
    "BinaryCrossEntropyWithLogits",
}


def _has_classes(loss: Tensor) -> bool:
    """Whether a loss takes its targets for classes, by the functions of torch in it."""
    return bool(functions_of(loss) & _OF_CLASSES)


def one_class(labels: Sequence[tuple[int, int]], facts: Iterable[Facts]) -> bool:
    """Whether the smallest and the largest label were the same in three checks, and some loss takes them for classes."""
    return len(labels) == 3 and all(low == high for low, high in labels) and any(one.has_classes for one in facts)


# ---- models -----------------------------------------------------------------------------------------------------------


def _parts(engine: Engine) -> list[tuple[str, nn.Module]]:
    """All modules with their paths inside the engine's module that contains them."""
    return [one for root in engine.modules.values() for one in root.named_modules()]


def left_in_eval(engine: Engine, modes: dict[nn.Module, bool]) -> str | None:
    """The name of a part that is in eval mode, but was not when the run began; frozen parts and norms are left out."""
    for name, root in engine.modules.items():
        if modes.get(root) and not root.training:
            return f"the model {name!r}"
    parts = {part: path for path, part in _parts(engine)}
    off = [part for part in parts if modes.get(part) and not part.training and not isinstance(part, _NormBase)]
    frozen = {inner for part in parts if off and _is_frozen(part) for inner in part.modules()}
    return next((f"the part {parts[part]!r} of the model" for part in off if part not in frozen), None)


def _is_frozen(part: nn.Module) -> bool:
    parameters = list(part.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def moving_frozen_norms(engine: Engine) -> list[str]:
    """The normalization layers with frozen weights whose running statistics are updated all the same, but for teachers'."""
    copies = {p for root in engine.modules.values() for p in frozen_copies(root)}
    return [
        path
        for path, part in _parts(engine)
        if isinstance(part, _NormBase) and part.training and part.running_mean is not None
        if (own := list(part.parameters())) and not any(p.requires_grad or p in copies for p in own)
    ]


def frozen_last_layer(engine: Engine) -> str | None:
    """The last layer of a model in which only normalization layers are trained; None for other models."""
    for root in engine.modules.values():
        leaves = [
            (path, part) for path, part in root.named_modules() if any(True for _ in part.parameters(recurse=False))
        ]
        training = [part for _, part in leaves if any(p.requires_grad for p in part.parameters(recurse=False))]
        if training and all(isinstance(part, _NORMS) for part in training) and leaves[-1][1] not in training:
            return str(leaves[-1][0])
    return None


def statistics_of(engine: Engine) -> dict[str, Tensor]:
    """Copies of the running statistics of the normalization layers."""
    return {
        path: part.running_mean.clone()
        for path, part in _parts(engine)
        if isinstance(part, _NormBase) and part.running_mean is not None
    }


def untrained_spectral_norms(engine: Engine) -> list[str]:
    """Layers with ``torch.nn.utils.spectral_norm`` whose power iteration never ran: it runs in training forwards only."""
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


def unheld_since(engine: Engine, known: set[Tensor], foreign: list[tuple[Tensor, int]]) -> list[Tensor]:
    """The parameters that no optimizer holds and that were not known as the run began.

    Those that were are with them if the optimizers hold others, of these versions, which no step has changed.
    """
    names, held = names_of(engine), held_by_optimizers(engine)
    unheld = [p for p in names if p.requires_grad and p not in held]
    stale = any(p not in names and p._version == version for p, version in foreign if engine.updates[0].steps)
    return unheld if stale else [p for p in unheld if p not in known]


def gradient_facts(update: UpdateState) -> tuple[list[Tensor], list[Tensor], float]:
    """The parameters that should have a gradient, those that have none, and the norm of all gradients."""
    wanted = [p for p in update.parameters if p.requires_grad]
    missing = [p for p in wanted if p.grad is None]
    return wanted, missing, total(p.grad for p in wanted)


def total(gradients: Iterable[Tensor | None]) -> float:
    """The 2-norm of all gradients; of this rank's part where they are sharded."""
    parts: Sequence[Tensor] = [local_part(one).detach() for one in gradients if one is not None]
    dense = [one.coalesce().values() if one.is_sparse else one for one in parts]
    if not dense:
        return 0.0
    return float(torch.stack([torch.linalg.vector_norm(one).cpu().double() for one in dense]).norm())
