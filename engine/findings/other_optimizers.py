"""Optimizers of the user beside those of an engine: what they hold is trained, though the engine does not know of it."""

from __future__ import annotations

import gc
from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["held_by_any_optimizer", "held_by_none"]


def held_by_any_optimizer(tensors: Iterable[Tensor]) -> set[Tensor]:
    """Those of some tensors that an optimizer of this process holds. It asks all objects, so only for what would be reported.

    Example:
        >>> import torch
        >>> weight, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> found = held_by_any_optimizer([weight, other])
        >>> weight in found, other in found
        (True, False)
    """
    if not (wanted := {id(one): one for one in tensors}):
        return set()
    # `issubclass`, since `isinstance` asks each object for its class, and some of them warn.
    optimizers = [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]
    held = (p for one in optimizers for group in getattr(one, "param_groups", ()) for p in group["params"])
    return {wanted[id(one)] for one in held if id(one) in wanted}


def held_by_none(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those of some tensors that no optimizer of this process holds, in their order.

    Example:
        >>> import torch
        >>> held_by_none([torch.ones(2)])
        [tensor([1., 1.])]
    """
    found = list(tensors)
    held = held_by_any_optimizer(found)
    return [one for one in found if one not in held]
