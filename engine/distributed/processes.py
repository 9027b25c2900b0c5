"""The processes that train together: what they have to agree on, and what they put together. One alone is a group of one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from ..batches import map_leaves, tensors_in
from .rendezvous import bounded, join, launched, launched_in_part
from .watch import Watch

__all__ = ["ALONE", "Processes", "Together", "lost_another", "together"]


class Processes:
    """One process alone, and what several have in common: `Together` does the same for several.

    Every method but `print` has to be called by all of the processes, in the same order.

    Attributes:
        rank: which one of the processes this is, counted from 0.
        size: how many there are.
        local_rank: which one it is on its machine.
        several: whether there is more than one.
        first: whether this is the one of rank 0, which writes what is written once.
        timeout: after how many seconds one that does not come to what all do together counts as lost.

    Example:
        >>> ALONE.gather("here"), ALONE.sum(1, 2.5), ALONE.first
        (['here'], [1.0, 2.5], True)
    """

    rank = 0
    timeout = 300.0
    size = 1
    local_rank = 0

    @property
    def several(self) -> bool:
        return self.size > 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, *numbers: float) -> list[float]:
        """Each number added up over the processes, in double precision: the same bits in each of them."""
        return [float(number) for number in numbers]

    def any(self, flag: bool) -> bool:
        """Whether it is true in any of the processes."""
        return bool(flag)

    def gather(self, value: Any) -> list[Any]:
        """What every process gives, by rank; anything that can be pickled."""
        return [value]

    def collect(self, value: Any) -> list[Any]:
        """As `gather`, but for the process of rank 0 alone; the others get nothing."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """What the process of rank 0 gives."""
        return value

    def barrier(self) -> None:
        """Wait for all."""

    def gather_samples(self, value: Any) -> Any:
        """The tensors of all processes, joined along their first dimension in the order of the ranks.

        Args:
            value: a tensor, or tensors in tuples, lists, dicts, namedtuples and dataclasses, nested; everything else is given
                back as it is here. First dimensions may differ between the processes, also be 0; nothing is padded.
        """
        return value

    def watch(self, where: Callable[[], str]) -> Watch | None:
        """Begin to tell the others what this process does, and to notice which of them is lost.

        Args:
            where: tells in a few words what this process does now; called in a thread, once a second.

        Returns:
            The watch; None alone.
        """
        return None

    def print(self, *values: object, all: bool = False, **options: Any) -> None:
        """`print` in the process of rank 0 alone, or in each of them, with its rank in front.

        Args:
            values: what is printed.
            all: whether each process prints.
            options: of `print`, such as ``file``.
        """
        if self.first or all:
            told = (f"[rank {self.rank}]",) if all and self.several else ()
            print(*told, *values, **{"flush": True} | options)

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.size}>"


ALONE = Processes()
"""One process that trains by itself."""


class Together(Processes):
    """The processes of ``torch.distributed``.

    What they agree on goes through a gloo group of its own, so that neither a device nor what is reduced at the same time
    waits for it.
    """

    def __init__(self, store: Store, timeout: float) -> None:
        self.timeout = timeout
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        # What a process of an earlier attempt has left under the same names is never read.
        self.store: Store = PrefixStore(f"signalfire/{self.broadcast(secrets.token_hex(8))}", store)

    def sum(self, *numbers: float) -> list[float]:
        reduced = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(reduced, group=self.group)
        return reduced.tolist()

    def any(self, flag: bool) -> bool:
        return self.sum(flag)[0] > 0

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def collect(self, value: Any) -> list[Any]:
        values: list[Any] | None = [None] * self.size if self.first else None
        dist.gather_object(value, values, group=self.group)
        return values or []

    def broadcast(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def barrier(self) -> None:
        dist.barrier(group=self.group)

    def gather_samples(self, value: Any) -> Any:
        if not tensors_in(value):
            return value
        return map_leaves(self._joined, value)

    def watch(self, where: Callable[[], str]) -> Watch | None:
        watch = Watch(self.store, self.rank, self.size, timeout=self.timeout, where=where)
        watch.start()
        return watch

    def _joined(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        own = leaf.detach().contiguous()
        shapes = self.gather(tuple(own.shape))
        if any(shape[1:] != shapes[0][1:] or not shape for shape in shapes):
            raise ValueError(
                f"gather_samples(): tensors of shapes {shapes} cannot be joined along their first dimension; all others have "
                "to agree"
            )
        longest = max(shape[0] for shape in shapes)
        if longest == 0:
            return own
        padded = own.new_zeros((longest, *own.shape[1:]))
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in shapes]
        # Tensors on a device go through the main group, whose backend is that of the device.
        dist.all_gather(parts, padded, group=self.group if own.device.type == "cpu" else None)
        return torch.cat([part[: shape[0]] for part, shape in zip(parts, shapes, strict=True)])


def lost_another(error: BaseException) -> bool:
    """Whether an error only says that another process did not do its part of what all do together."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


_joined: list[Together] = []


def together(*, backend: str | None = None, timeout: float = 300.0) -> Processes:
    """The processes that were launched together, joined when this is first called; `ALONE` if this one was launched alone.

    Args:
        backend: of torch.distributed; by default gloo for the CPU, and NCCL besides it if there are GPUs.
        timeout: after how many seconds a process that does not come to what all do together counts as lost. While they come
            together at first, it may take a few seconds more.

    Errors:
        RuntimeError: the environment tells of several processes, but not of all that it takes to join them.

    Example:
        >>> together().size
        1
    """
    if not _joined or not dist.is_initialized():
        if not dist.is_initialized() and not launched() and not launched_in_part():
            return ALONE
        with bounded(timeout, f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')}"):
            _joined[:] = [Together(join(backend=backend, timeout=timeout), timeout)]
    return _joined[0]
