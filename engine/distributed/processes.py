"""Collectives between the ranks of a distributed run; a single process is a group of one."""

from __future__ import annotations

import os
import pickle
import secrets
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from time import perf_counter
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from ..authoring.batches import map_leaves, tensors_in
from .rendezvous import bounded, ended_peers, join, launched, launched_in_part, peers
from .watch import Watch

__all__ = [
    "BROADCAST_AT_ONCE",
    "GATHERED_AT_ONCE",
    "SINGLE_PROCESS",
    "DataGroups",
    "ProcessGroup",
    "Processes",
    "SameData",
    "expected_processes",
    "lost_another",
    "process_group",
]

GATHERED_AT_ONCE, BROADCAST_AT_ONCE = 2048, 16384
"""The bytes of a pickled value that one collective sends."""
_SIZE_BYTES = 8


class Processes:
    """A single process with the interface of a process group; distributed runs use `ProcessGroup`.

    Every method except `print` and `ended` is collective: all ranks call it, in the same order.

    Attributes:
        rank: Rank of this process.
        world_size: Number of ranks.
        local_rank: Rank on this machine.
        distributed: Whether there is more than one rank.
        is_rank_zero: Whether this is rank 0, which writes files and logs.
        timeout: Seconds after which a rank that does not join a collective counts as lost.
        waited: Seconds that this process has spent in these collectives, mostly waiting for slower ranks. Those of torch, such as
            the reduction of gradients, are not included.
        main: torch's group of these ranks, with the backend of the device; None for all ranks.

    Example:
        >>> SINGLE_PROCESS.gather("here"), SINGLE_PROCESS.sum(1, 2.5), SINGLE_PROCESS.is_rank_zero
        (['here'], [1.0, 2.5], True)
    """

    rank = 0
    timeout = 300.0
    world_size = 1
    local_rank = 0
    waited = 0.0
    main: dist.ProcessGroup | None = None

    @property
    def distributed(self) -> bool:
        return self.world_size > 1

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    def sum(self, *numbers: float) -> list[float]:
        """The sum of each number over all ranks, in double precision, bitwise equal on all ranks."""
        return [float(number) for number in numbers]

    def any(self, flag: bool) -> bool:
        """Whether the flag is true on any rank."""
        return bool(flag)

    def any_later(self, flag: bool) -> Callable[[], bool]:
        """Like `any`, but without waiting for the other ranks: returns a function that waits and returns the answer."""
        return lambda: bool(flag)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order; any value that can be pickled."""
        return [value]

    def collect(self, value: Any) -> list[Any]:
        """Like `gather`, but only on rank 0; other ranks get an empty list."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0, on all ranks."""
        return value

    def barrier(self) -> None:
        """Wait for all ranks."""

    def gather_samples(self, value: Any) -> Any:
        """Concatenate the tensors of all ranks along their first dimension, in the order of the ranks.

        Args:
            value: A tensor, or tensors nested in tuples, lists, dicts, namedtuples and dataclasses; everything else is returned
                unchanged. First dimensions may differ between ranks, and may be 0; nothing is padded.
        """
        return value

    def watch(self, where: Callable[[], str]) -> Watch | None:
        """Start reporting the position of this rank to the others, and detecting lost ranks.

        Args:
            where: Returns a short description of the current position; called in a thread, once a second.

        Returns:
            The watch; None for a single process.
        """
        return None

    def of_data(self, alike: int) -> Processes:
        """The ranks by which data is sharded if ``alike`` consecutive ranks read the same; `SameData` if all do."""
        return self

    def ended(self) -> list[str]:
        """The ranks of this machine that have ended since they joined, such as "rank 1 (pid 4711)". Not collective."""
        return []

    def print(self, *values: object, all: bool = False, **options: Any) -> None:
        """Print on rank 0 only, or on every rank, prefixed with the rank.

        Args:
            values: Values to print.
            all: Whether every rank prints.
            options: Options of `print`, such as ``file``.
        """
        if self.is_rank_zero or all:
            prefix = (f"[rank {self.rank}]",) if all and self.distributed else ()
            print(*prefix, *values, **{"flush": True} | options)

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.world_size}>"


SINGLE_PROCESS = Processes()
"""The group of a single process."""


class SameData(Processes):
    """All ranks of a group with regard to the data, of which each reads all: like a single process, in the order of rank 0.

    The samples that a rank has seen are all samples, so that nothing is gathered; what rank 0 draws is broadcast.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self.local_rank = processes.local_rank

    def broadcast(self, value: Any) -> Any:
        return self._processes.broadcast(value)


class _LaunchedProcesses(Processes):
    """The ranks that the launcher has started, before they have joined: their numbers, and no collectives."""

    def __init__(self) -> None:
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))

    def _not_joined(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError(
            f"rank {self.rank} of {self.world_size} has not joined the process group yet; attach the handler to the "
            "engine first"
        )

    sum = any = any_later = gather = collect = broadcast = barrier = gather_samples = watch = _not_joined


P = ParamSpec("P")
R = TypeVar("R")


def _waiting(collective: Callable[Concatenate[ProcessGroup, P], R]) -> Callable[Concatenate[ProcessGroup, P], R]:
    """Add the time that a collective takes to `Processes.waited`."""

    @wraps(collective)
    def timed(self: ProcessGroup, /, *args: P.args, **options: P.kwargs) -> R:
        begun = perf_counter()
        result = collective(self, *args, **options)
        self.waited += perf_counter() - begun
        return result

    return timed


class ProcessGroup(Processes):
    """The process group of ``torch.distributed``.

    Its collectives use a separate gloo group, so that they neither wait for a device nor delay the reduction of gradients.
    """

    def __init__(self, store: Store, timeout: float) -> None:
        self.timeout = timeout
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        # What is answered later is sent at another place on a rank that lacks a batch: it must not be matched with other calls.
        self.group_later = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._of_data: dict[int, Processes] = {}
        # A random prefix hides keys that processes of an earlier attempt have left.
        self.store: Store = PrefixStore(f"signalfire/{self.broadcast(secrets.token_hex(8))}", store)

    @_waiting
    def sum(self, *numbers: float) -> list[float]:
        reduced = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(reduced, group=self.group)
        return reduced.tolist()

    def any(self, flag: bool) -> bool:
        return self.sum(flag)[0] > 0

    def any_later(self, flag: bool) -> Callable[[], bool]:
        flags = torch.tensor([flag], dtype=torch.float32)
        work = dist.all_reduce(flags, group=self.group_later, async_op=True)

        def answer() -> bool:
            assert work is not None
            work.wait()
            return flags.item() > 0

        return answer

    @_waiting
    def gather(self, value: Any) -> list[Any]:
        packed = pickle.dumps(value)
        head = _head(packed, GATHERED_AT_ONCE)
        heads = [torch.empty_like(head) for _ in range(self.world_size)]
        dist.all_gather(heads, head, group=self.group)
        sizes = [_size(one) for one in heads]
        longest = max(sizes)
        tails: list[Tensor | None] = [None] * self.world_size
        if longest > GATHERED_AT_ONCE:
            tail = _tail(packed, GATHERED_AT_ONCE, longest)
            tails = [torch.empty_like(tail) for _ in range(self.world_size)]
            dist.all_gather(tails, tail, group=self.group)
        return [_unpacked(*parts) for parts in zip(heads, tails, strict=True)]

    @_waiting
    def collect(self, value: Any) -> list[Any]:
        values: list[Any] | None = [None] * self.world_size if self.is_rank_zero else None
        dist.gather_object(value, values, group=self.group, group_dst=0)
        return values or []

    @_waiting
    def broadcast(self, value: Any) -> Any:
        packed = pickle.dumps(value) if self.is_rank_zero else b""
        head = _head(packed, BROADCAST_AT_ONCE)
        dist.broadcast(head, 0, group=self.group)
        tail = None
        if (size := _size(head)) > BROADCAST_AT_ONCE:
            tail = _tail(packed, BROADCAST_AT_ONCE, size)
            dist.broadcast(tail, 0, group=self.group)
        return value if self.is_rank_zero else _unpacked(head, tail)

    @_waiting
    def barrier(self) -> None:
        dist.barrier(group=self.group)

    def of_data(self, alike: int) -> Processes:
        if alike == 1:
            return self
        if alike not in self._of_data:
            self._of_data[alike] = SameData(self) if alike == self.world_size else DataGroups(self, alike)
        return self._of_data[alike]

    def ended(self) -> list[str]:
        return ended_peers()

    def gather_samples(self, value: Any) -> Any:
        if not tensors_in(value):
            return value
        return map_leaves(self._concatenate, value)

    def watch(self, where: Callable[[], str]) -> Watch | None:
        watch = Watch(self.store, self.rank, self.world_size, timeout=self.timeout, where=where, peers=peers())
        watch.start()
        return watch

    def _concatenate(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        own = leaf.detach().contiguous()
        shapes = self.gather(tuple(own.shape))
        if any(shape[1:] != shapes[0][1:] or not shape for shape in shapes):
            raise ValueError(
                f"gather_samples(): tensors of shapes {shapes} cannot be concatenated along the first dimension; all other "
                "dimensions must be equal"
            )
        longest = max(shape[0] for shape in shapes)
        if longest == 0:
            return own
        padded = own.new_zeros((longest, *own.shape[1:]))
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in shapes]
        dist.all_gather(parts, padded, group=self.group if own.device.type == "cpu" else self.main)
        return torch.cat([part[: shape[0]] for part, shape in zip(parts, shapes, strict=True)])


class DataGroups(ProcessGroup):
    """The ranks of a group with regard to the data, of which so many consecutive ones read the same: one of each such group.

    Collective to create.

    Args:
        processes: All ranks.
        size: Number of consecutive ranks that read the same.
    """

    def __init__(self, processes: ProcessGroup, size: int) -> None:
        self.timeout, self.local_rank = processes.timeout, processes.local_rank
        self.rank, self.world_size = processes.rank // size, processes.world_size // size
        ranks = [list(range(first, processes.world_size, size)) for first in range(size)]
        timeout = timedelta(seconds=self.timeout)
        self.main, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout)
        self.group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout, backend="gloo")
        self.group_later = self.group
        self._processes = processes

    @property
    def waited(self) -> float:
        """Those of all collectives of this process."""
        return self._processes.waited

    @waited.setter
    def waited(self, seconds: float) -> None:
        self._processes.waited = seconds

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0 of all."""
        return self._processes.broadcast(value)


# A value of any size is sent as its size and its first bytes, in one collective; only larger ones need a second.


def _head(packed: bytes, at_once: int) -> Tensor:
    """The size of a pickled value and its first bytes."""
    head = torch.zeros(_SIZE_BYTES + at_once, dtype=torch.uint8)
    first = len(packed).to_bytes(_SIZE_BYTES, "little") + packed[:at_once]
    head[: len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
    return head


def _tail(packed: bytes, at_once: int, size: int) -> Tensor:
    """The bytes of a pickled value that are not in its head, padded to the longest of all ranks."""
    return torch.frombuffer(bytearray(packed[at_once:].ljust(size - at_once, b"\0")), dtype=torch.uint8)


def _size(head: Tensor) -> int:
    return int.from_bytes(head[:_SIZE_BYTES].numpy().tobytes(), "little")


def _unpacked(head: Tensor, tail: Tensor | None) -> Any:
    packed = head[_SIZE_BYTES:].numpy().tobytes() + (b"" if tail is None else tail.numpy().tobytes())
    return pickle.loads(packed[: _size(head)])


def lost_another(error: BaseException) -> bool:
    """Whether an error only means that another rank did not take part in a collective."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


_joined: list[ProcessGroup] = []


def process_group(*, backend: str | None = None, timeout: float = 300.0) -> Processes:
    """The process group of this run, joined on the first call; `SINGLE_PROCESS` if the run is not distributed.

    Args:
        backend: Backend of torch.distributed; by default gloo for the CPU, and also NCCL if there are GPUs.
        timeout: Seconds after which a rank that does not join a collective counts as lost; joining the group may take a few
            seconds longer.

    Raises:
        RuntimeError: if the environment describes a distributed run, but lacks variables that are needed to join it.

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


def expected_processes() -> Processes:
    """The processes that `process_group` would join, with the launcher's numbers; it joins nothing."""
    return _joined[0] if _joined and dist.is_initialized() else _LaunchedProcesses() if launched() else SINGLE_PROCESS
