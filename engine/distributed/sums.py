"""Sums over leaves and over ranks that are added in a fixed order, and the broadcast of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..authoring.versions import all_gather_single
from .processes import Processes

__all__ = ["RankSum", "TreeSum", "broadcast", "merged"]


class TreeSum:
    """Adds the tensors of leaves in a binary tree whose form depends on the number of leaves alone.

    Of n leaves, at most log2(n) + 1 sums are held at once. A leaf without tensors adds nothing. A leaf's tensors are changed.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, list[Tensor] | None]] = []  # with the height of each

    def add(self, leaf: list[Tensor] | None) -> None:
        """Add the next leaf."""
        height = 0
        while self._sums and self._sums[-1][0] == height:
            leaf, height = merged(self._sums.pop()[1], leaf), height + 1
        self._sums.append((height, leaf))

    def total(self) -> list[Tensor] | None:
        """The sum of all leaves, of which there are 2**n or none; None if none of them has tensors."""
        return self._sums[0][1] if self._sums else None


def merged(left: list[Tensor] | None, right: list[Tensor] | None) -> list[Tensor] | None:
    """The sum of two leaves."""
    if left is None or right is None:
        return right if left is None else left
    torch._foreach_add_(left, right)
    return left


class RankSum:
    """The sums of the tensors of the ranks, added in the order of `TreeSum`; the same bits on each rank. Collective.

    Each rank receives a part of all sums, and a flag of each rank. It adds its part, and sends the result to all: as many bytes
    as a ring's all-reduce. The tensors are sent in buckets one after the other, so that the memory beside them is a few buckets.

    Args:
        own: The sums of this rank, which become those of all; if it has none, tensors of the same shapes and dtypes.
        flag: A flag that is sent to all ranks.
        processes: The ranks.

    Attributes:
        flagged: Whether any rank has given a flag.
    """

    def __init__(self, own: list[Tensor], processes: Processes, *, flag: bool) -> None:
        self._own, self._processes = own, processes
        first, *self._rest = _in_buckets(own)
        self._first = _Exchange(first, processes, flag=flag)
        self.flagged = self._first.flagged()

    def total(self, has_sum: Sequence[bool]) -> list[Tensor]:
        """Make the sums of this rank those of all, and return them.

        Args:
            has_sum: Of the ranks whether they have sums. Those of a power of two of the first ones are added; others have none.
        """
        self._first.add(has_sum)
        del self._first
        for bucket in self._rest:
            _Exchange(bucket, self._processes, flag=False).add(has_sum)
        return self._own


class _Exchange:
    """The sums of one bucket: begun when it is built, and ended by `add`."""

    def __init__(self, own: list[Tensor], processes: Processes, *, flag: bool) -> None:
        self._processes, size = processes, processes.world_size
        self._kinds: dict[torch.dtype, list[Tensor]] = {}
        for tensor in own:
            self._kinds.setdefault(tensor.dtype, []).append(tensor)
        flat = [_in_rows(tensors, size) for tensors in self._kinds.values()]
        flags = torch.full((size, _ALIGNED), flag, dtype=torch.uint8, device=flat[0].device)
        self._widths = [one.shape[1] for one in flat]
        rows = torch.cat([flags, *flat], dim=1)
        self._received = torch.empty_like(rows)
        dist.all_to_all_single(self._received, rows, group=processes.main)

    def flagged(self) -> bool:
        """Whether any rank has given a flag."""
        return bool(self._received[:, 0].any())

    def add(self, has_sum: Sequence[bool]) -> None:
        """Add the part of this rank, and send it to all."""
        tree = TreeSum()
        adders = 1 << (len(has_sum).bit_length() - 1)
        for row, one in zip(self._received, has_sum[:adders], strict=False):
            tree.add(self._in_kinds(row[_ALIGNED:]) if one else None)
        total = tree.total()
        assert total is not None, "no rank has a sum"
        part = torch.cat([one.view(torch.uint8) for one in total])
        gathered = part.new_empty((self._processes.world_size, part.numel()))
        all_gather_single(gathered.view(-1), part, group=self._processes.main)
        for flat, tensors in zip(self._in_kinds(gathered), self._kinds.values(), strict=True):
            sizes = [tensor.numel() for tensor in tensors]
            for tensor, one in zip(tensors, flat.reshape(-1)[: sum(sizes)].split(sizes), strict=True):
                tensor.copy_(
                    one.view(tensor.shape)
                )  # its memory layout stays: norms are added in the order of the memory

    def _in_kinds(self, row: Tensor) -> list[Tensor]:
        """The elements of a row, or of several, by dtype; not those of the rows that were received."""
        parts = row.split(self._widths, dim=-1)
        return [
            part.clone(memory_format=torch.contiguous_format).view(dtype)
            for part, dtype in zip(parts, self._kinds, strict=True)
        ]


_BUCKET = 25 * 2**20
"""Bytes of a bucket, as torch's DDP has them; a larger tensor is a bucket of its own."""

_ALIGNED = 16
"""Bytes of which the parts of a row are multiples, so that numbers of each dtype are aligned."""


def _in_rows(tensors: Sequence[Tensor], size: int) -> Tensor:
    """The bytes of tensors of one dtype in rows, padded with zeros."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    row = size * _ALIGNED // flat[0].element_size()
    missing = -sum(one.numel() for one in flat) % row
    return torch.cat([*flat, flat[0].new_zeros(missing)]).view(torch.uint8).view(size, -1)


def broadcast(tensors: Sequence[Tensor]) -> None:
    """Broadcast the tensors' values from rank 0, all tensors of one dtype and device at once."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in kinds.values():
        flat = torch.cat([tensor.detach().flatten() for tensor in alike])
        dist.broadcast(flat.view(torch.uint8), src=0)  # gloo supports fewer dtypes
        for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
            tensor.detach().copy_(part.view_as(tensor))


def _in_buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    held = _BUCKET
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if held + size > _BUCKET:
            buckets.append([])
            held = 0
        buckets[-1].append(tensor)
        held += size
    return buckets
