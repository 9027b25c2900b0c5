"""What the ranks of a distributed run ask each other; a single process is a group of one."""

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

__all__ = ["SINGLE_PROCESS", "ProcessGroup", "Processes", "lost_another", "process_group"]


class Processes:
    """A single process, with the methods that a process group has; `ProcessGroup` is the group of a distributed run.

    Every method but `print` is collective: all processes call it, in the same order.

    Attributes:
        rank: of this process.
        world_size: the number of processes.
        local_rank: the rank on its machine.
        distributed: whether the run is distributed, that is, there is more than one process.
        is_rank_zero: whether this is rank 0, which writes what is written once.
        timeout: seconds after which a process that does not join a collective counts as lost.

    Example:
        >>> SINGLE_PROCESS.gather("here"), SINGLE_PROCESS.sum(1, 2.5), SINGLE_PROCESS.is_rank_zero
        (['here'], [1.0, 2.5], True)
    """

    rank = 0
    timeout = 300.0
    world_size = 1
    local_rank = 0

    @property
    def distributed(self) -> bool:
        return self.world_size > 1

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    def sum(self, *numbers: float) -> list[float]:
        """The sum of each number over all processes, in double precision, with the same bits in each of them."""
        return [float(number) for number in numbers]

    def any(self, flag: bool) -> bool:
        """Whether the flag is true in any of the processes."""
        return bool(flag)

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, by rank; anything that can be pickled."""
        return [value]

    def collect(self, value: Any) -> list[Any]:
        """Like `gather`, but for rank 0 only; the others get an empty list."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0."""
        return value

    def barrier(self) -> None:
        """Wait for all processes."""

    def gather_samples(self, value: Any) -> Any:
        """Concatenate the tensors of all processes along their first dimension, in the order of the ranks.

        Args:
            value: a tensor, or tensors in tuples, lists, dicts, namedtuples and dataclasses, nested; everything else is given
                back as it is here. First dimensions may differ between the processes, also be 0; nothing is padded.
        """
        return value

    def watch(self, where: Callable[[], str]) -> Watch | None:
        """Start reporting what this process does, and noticing which of the others is lost.

        Args:
            where: returns in a few words what this process does now; called in a thread, once a second.

        Returns:
            The watch; None in a single process.
        """
        return None

    def print(self, *values: object, all: bool = False, **options: Any) -> None:
        """Print on rank 0 only, or on every rank with the rank in front.

        Args:
            values: what is printed.
            all: whether each process prints.
            options: of `print`, such as ``file``.
        """
        if self.is_rank_zero or all:
            told = (f"[rank {self.rank}]",) if all and self.distributed else ()
            print(*told, *values, **{"flush": True} | options)

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.world_size}>"


SINGLE_PROCESS = Processes()
"""The group of a single process."""


class ProcessGroup(Processes):
    """The processes of ``torch.distributed``.

    They communicate over a gloo group of its own, so that this neither waits for a device nor delays gradients that are reduced
    at the same time.
    """

    def __init__(self, store: Store, timeout: float) -> None:
        self.timeout = timeout
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        # Under a random prefix, so that nothing is read that a process of an earlier attempt left.
        self.store: Store = PrefixStore(f"signalfire/{self.broadcast(secrets.token_hex(8))}", store)

    def sum(self, *numbers: float) -> list[float]:
        reduced = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(reduced, group=self.group)
        return reduced.tolist()

    def any(self, flag: bool) -> bool:
        return self.sum(flag)[0] > 0

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def collect(self, value: Any) -> list[Any]:
        values: list[Any] | None = [None] * self.world_size if self.is_rank_zero else None
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
        watch = Watch(self.store, self.rank, self.world_size, timeout=self.timeout, where=where)
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
    """Whether an error only says that another process did not take part in a collective."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


_joined: list[ProcessGroup] = []


def process_group(*, backend: str | None = None, timeout: float = 300.0) -> Processes:
    """The process group of this run, joined at the first call; `SINGLE_PROCESS` if this process was launched by itself.

    Args:
        backend: of torch.distributed; by default gloo for the CPU, and also NCCL if there are GPUs.
        timeout: seconds after which a process that does not join a collective counts as lost; joining the group may take
            a few seconds more.

    Errors:
        RuntimeError: the environment tells of several processes, but not of all that it takes to join them.

    Example:
        >>> process_group().world_size
        1
    """
    if not _joined or not dist.is_initialized():
        if not dist.is_initialized() and not launched() and not launched_in_part():
            return SINGLE_PROCESS
        with bounded(timeout, f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')}"):
            _joined[:] = [ProcessGroup(join(backend=backend, timeout=timeout), timeout)]
    return _joined[0]
