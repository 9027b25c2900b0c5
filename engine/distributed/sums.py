"""Sums over leaves and over ranks that are added in a fixed order, and the broadcast of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .processes import Processes

__all__ = ["TreeSum", "broadcast", "merged", "sum_over_ranks"]


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


def sum_over_ranks(own: Sequence[Tensor], has_sum: Sequence[bool], processes: Processes) -> list[Tensor]:
    """The sums of the tensors of the ranks, added in the order of `TreeSum`; the same bits on each rank. Collective.

    Each rank receives a part of all sums, adds it, and sends the result to all: as many bytes as a ring's all-reduce.

    Args:
        own: The sums of this rank; if it has none, tensors of the same shapes and dtypes.
        has_sum: Of each of the first ranks whether it has sums; their number is a power of two. Ranks after them have none.
        processes: The ranks.
    """
    size, rank = processes.world_size, processes.rank
    packed = _Packed(own, size)
    sends = rank < len(has_sum) and has_sum[rank]
    received = packed.rows.new_empty((sum(has_sum), packed.rows.shape[1]))
    width = packed.rows.shape[1]
    dist.all_to_all_single(
        received.view(-1),
        packed.rows.view(-1) if sends else packed.rows.new_empty(0),
        [width * one for one in has_sum] + [0] * (size - len(has_sum)),
        [width * sends] * size,
        group=processes.main,
    )
    rows, tree = iter(received), TreeSum()
    for one in has_sum:
        tree.add(packed.kinds_in(next(rows)) if one else None)
    total = tree.total()
    assert total is not None, "no rank has a sum"
    own_bytes = torch.cat([part.view(torch.uint8) for part in total])
    _all_gather(packed.rows.view(-1), own_bytes, group=processes.main)
    return packed.tensors()


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name since torch 2.13


class _Packed:
    """Tensors as bytes, with as many rows as there are ranks.

    Attributes:
        rows: The bytes. A row begins with the elements of the largest dtype, so that those of each are aligned.
    """

    def __init__(self, tensors: Sequence[Tensor], size: int) -> None:
        self._like = list(tensors)
        self._kinds: dict[torch.dtype, list[int]] = {}
        for place in sorted(range(len(tensors)), key=lambda place: -tensors[place].element_size()):
            self._kinds.setdefault(tensors[place].dtype, []).append(place)
        flat = [
            _in_rows([tensors[place] for place in places], size).view(torch.uint8) for places in self._kinds.values()
        ]
        self._widths = [one.shape[1] for one in flat]
        self.rows = torch.cat(flat, dim=1)

    def kinds_in(self, row: Tensor) -> list[Tensor]:
        """The elements of a row, or of several, by dtype."""
        parts = row.split(self._widths, dim=-1)
        return [part.contiguous().view(dtype) for part, dtype in zip(parts, self._kinds, strict=True)]

    def tensors(self) -> list[Tensor]:
        """The tensors that the rows hold now."""
        found: dict[int, Tensor] = {}
        for flat, places in zip(self.kinds_in(self.rows), self._kinds.values(), strict=True):
            sizes = [self._like[place].numel() for place in places]
            parts = flat.reshape(-1)[: sum(sizes)].split(sizes)
            found |= {place: part.view(self._like[place].shape) for place, part in zip(places, parts, strict=True)}
        return [found[place] for place in range(len(self._like))]


def _in_rows(tensors: Sequence[Tensor], size: int) -> Tensor:
    """The elements of tensors of one dtype in rows, padded with zeros; the bytes of a row are a multiple of 8."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    multiple = size * max(8 // flat.element_size(), 1)
    padded = flat.new_zeros(-(-flat.numel() // multiple) * multiple)
    padded[: flat.numel()] = flat
    return padded.view(size, -1)


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
