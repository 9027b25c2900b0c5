"""Norms of gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import is_sharded, local_part, norms_over_ranks

__all__ = ["any_sharded", "joined", "norm_parts", "norms", "unit_means", "unit_norms"]


def any_sharded(tensors: Sequence[Tensor]) -> bool:
    """Whether an update's parameters or gradients are sharded: all of them are, or none."""
    return bool(tensors) and is_sharded(tensors[0])


def norms(gradients: list[Tensor], norm_type: float) -> list[Tensor]:
    """The p-norm of each gradient, on its device: 0 for an empty one, that of the full tensor for a sharded one."""
    if any_sharded(gradients):
        parts = norms([local_part(gradient) for gradient in gradients], norm_type)
        return list(norms_over_ranks(torch.stack(parts), gradients, norm_type))
    try:
        return list(torch._foreach_norm(gradients, norm_type)) if gradients else []
    except RuntimeError:  # a sparse gradient, or an empty one
        values = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
        return [torch.linalg.vector_norm(v, norm_type) if v.numel() else v.new_zeros(()) for v in values]


def unit_norms(tensor: Tensor) -> Tensor:
    """The 2-norm of each row of a tensor of two or more dimensions, which are kept; of a sharded one, of this rank's rows."""
    return _of_rows(partial(torch.linalg.vector_norm, keepdim=True), tensor)


def unit_means(tensor: Tensor) -> Tensor:
    """As `unit_norms`, the mean of each row."""
    # Of a sum, since that of the means of unequal parts is another number.
    return _of_rows(partial(torch.sum, keepdim=True), tensor) / (tensor.numel() // max(1, tensor.shape[0]))


def _of_rows(function: Any, tensor: Tensor) -> Tensor:
    """``function(tensor, dim=)`` over all dimensions but the first; collective if another one is sharded."""
    inner = tuple(range(1, tensor.dim()))
    if is_sharded(tensor) and any(one.is_shard() and one.dim != 0 for one in tensor.placements):  # type: ignore[attr-defined]
        from torch.distributed.tensor import Replicate

        rows = [one if one.is_shard(0) else Replicate() for one in tensor.placements]  # type: ignore[attr-defined]
        return local_part(function(tensor, dim=inner).redistribute(tensor.device_mesh, rows))  # type: ignore[attr-defined]
    found: Tensor = function(local_part(tensor), dim=inner)
    return found


def norm_parts(gradients: list[Tensor]) -> list[Tensor]:
    """Tensors of one element, of which `joined` computes the 2-norm of all gradients once their values are read.

    On a CPU they are the norms of the gradients, whose values cost next to nothing; on other devices, it is one tensor.
    """
    parts = norms(gradients, 2.0)
    return parts if not parts or parts[0].device.type == "cpu" else [torch.linalg.vector_norm(torch.stack(parts))]


def joined(values: Sequence[float]) -> float:
    """The 2-norm of all gradients, from the values of their `norm_parts`."""
    return math.hypot(*values)
