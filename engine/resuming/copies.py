"""Copies of states for writes in threads, in memory that is kept from one copy to the next.

Most of the time of a copy goes into memory that the process has not used before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ..distributed.sharded import is_sharded, local_part
from .saving import copied

__all__ = ["Copies", "Copy"]


class Copies:
    """Makes copies of states, and keeps the memory of one that is not used any more for the next."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, list[Tensor]] = {}

    def make(self, state: Any) -> Copy:
        """A deep copy of a state. Tensors of an accelerator are copied to main memory."""
        return Copy(state, self)

    def take(self, tensor: Tensor) -> Tensor:
        """Memory for a copy of a tensor: kept, or new."""
        if kept := self._kept.get(_kind(tensor)):
            return kept.pop()
        if tensor.device.type == "cpu" or is_sharded(tensor):
            return torch.empty_like(tensor)
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)

    def keep(self, tensors: list[Tensor]) -> None:
        """Keep the memory of these, and free what was kept before."""
        self._kept = defaultdict(list)
        for tensor in tensors:
            self._kept[_kind(tensor)].append(tensor)

    def free(self) -> None:
        """Free the memory that is kept."""
        self._kept = {}


class Copy:
    """A copy of a state, for those who share it.

    Attributes:
        state: The copy. Equal views of the same memory, such as tied weights, share memory in it, too.
        users: Number of those who have not released it; the memory of a copy without users is used for the next one.
    """

    def __init__(self, state: Any, memory: Copies) -> None:
        self.users = 0
        self._memory = memory
        self._tensors: list[Tensor] = []
        self._copied: dict[tuple[torch.device, int, Hashable], Tensor] = {}
        self.state = copied(state, self._copy)
        for device in {device for device, *_ in self._copied if device.type != "cpu"}:
            torch.accelerator.synchronize(device)  # until then, its tensors are on their way

    def release(self) -> None:
        """Note that one of those who share it has no use for it any more."""
        self.users -= 1
        if self.users == 0:
            self._memory.keep(self._tensors)

    def _copy(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta
        # The memory of others is not their value.
        plain = plain and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        if not plain and not is_sharded(tensor):
            return tensor.clone()
        place = tensor.device, local_part(tensor).data_ptr(), _kind(tensor)
        if place not in self._copied:
            self._copied[place] = self._memory.take(tensor).copy_(tensor, non_blocking=True)
            self._tensors.append(self._copied[place])
        return self._copied[place]


def _kind(tensor: Tensor) -> Hashable:
    """What two tensors share if one can be copied into the memory of the other's copy."""
    spread = (tensor.device_mesh, tensor.placements) if is_sharded(tensor) else None  # type: ignore[attr-defined]
    return tensor.dtype, tensor.shape, tensor.stride(), spread
