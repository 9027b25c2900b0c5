"""Joining and leaving the process group: safe under restarts, and with an exit status that can be trusted."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_store

__all__ = ["agree", "bounded", "join", "launched", "launched_in_part", "note_failure"]

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
PR_SET_PDEATHSIG = 1
GRACE = 5.0  # seconds that gloo has to say by itself that it was not in time
LEAVING = 5.0  # seconds that a process that is done waits for the others

_failed = False


def launched() -> bool:
    """Whether torchrun, or what sets the same environment, has started this process."""
    return all(name in os.environ for name in ENVIRONMENT)


def launched_in_part() -> bool:
    """Whether the environment names other processes, but not how to reach them: each would train on all data by itself."""
    return os.environ.get("WORLD_SIZE", "1") != "1" or os.environ.get("RANK", "0") != "0"


def note_failure() -> None:
    """Note that this process ends after an error that does not reach the interpreter: the group is then not destroyed."""
    global _failed
    _failed = True


def join(*, backend: str | None = None, timeout: float) -> Store:
    """Initialise torch.distributed in a process that torchrun has started, and return a store that only this group uses.

    Workers that torchrun restarts find what the dead ones left in the store, and with plain ``init_process_group`` they
    connect to addresses that nobody listens on any more. So they first agree on a fresh prefix for all that they write.

    A process that ends well waits a few seconds for the others and destroys the group: without, one in some tens of finished
    processes aborts when gloo's threads are torn down, and torchrun starts the finished job again. After an unhandled
    exception, or ``note_failure``, nothing is waited for and nothing destroyed. A worker of a torchrun that was killed is ended
    by SIGTERM, which it can catch to save what it has; on Linux only.

    If torch.distributed is initialised already, its store is returned, and nothing is changed, now or at the end.

    Args:
        backend: as of ``init_process_group``; by default "gloo", and with CUDA "cpu:gloo,cuda:nccl", with the local rank's GPU
            as the current device.
        timeout: seconds, for coming together and then for each collective.

    Raises:
        RuntimeError: not launched, too few GPUs, or the store cannot be reached.
        TimeoutError: with the ranks that did not come.
    """
    if dist.is_initialized():
        return _get_default_store()
    if not launched():
        missing = ", ".join(name for name in ENVIRONMENT if name not in os.environ)
        raise RuntimeError(
            f"join(): {missing} not set in the environment. Start the script with torchrun, set them (LOCAL_RANK is 0 where a "
            "machine has one process), or call torch.distributed.init_process_group first"
        )
    rank, size, local_rank = (int(os.environ[name]) for name in ENVIRONMENT[:3])
    if not 0 <= rank < size:
        raise RuntimeError(f"join(): RANK={rank} has to be from 0 to WORLD_SIZE - 1, which is {size - 1}")
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "nccl" in backend:
        _take_gpu(local_rank)
    _end_with_launcher()

    deadline = time.monotonic() + timeout
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store = agree(_connect(rank, timeout), rank, size, timeout=max(0.0, deadline - time.monotonic()))
    except dist.DistError as error:
        host = "the launcher" if _launcher_hosts() else "rank 0"
        raise RuntimeError(
            f"join(): rank {rank} could not use the store at {address}, which {host} holds. Has it ended, or not started yet?"
        ) from error
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    atexit.register(_leave, os.getpid())
    return store


@contextlib.contextmanager
def bounded(timeout: float, who: str) -> Iterator[None]:
    """Exit the process if it has not joined the others within the timeout and a few seconds.

    If one of them dies while connections are made, gloo may wait for ever, where no exception reaches it.
    """

    def leave() -> None:
        print(
            f"join(): {who} was not connected with the others within {timeout:g} s: one of them has ended meanwhile, or cannot "
            "be reached. The process is left",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    timer = threading.Timer(timeout + GRACE, leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def agree(base: Store, rank: int, size: int, *, timeout: float) -> PrefixStore:
    """Agree with the processes that are alive now on a fresh prefix in a store, whatever dead ones have left in ``base``.

    Each process posts a random word. Rank 0 offers a new random prefix together with the words that it found, and again with
    another prefix when a word is new; a process acknowledges an offer that holds its own word, under the offer's prefix. When
    all words of an offer are acknowledged, rank 0 says so under that prefix, and everyone goes on with it. A dead
    process's word is never acknowledged, and a dead rank 0's offer never holds a living process's word.
    """
    here = PrefixStore("signalfire/join", base)
    prefix = _lead(here, size, timeout) if rank == 0 else _follow(here, rank, size, timeout)
    return PrefixStore(f"signalfire/{prefix}", base)


def _lead(store: Store, size: int, timeout: float) -> str:
    own = uuid.uuid4().hex
    prefix, again = "", 0.0
    offered: list[str | None] = []
    for now in _until(timeout):
        words = [own, *_read(store, [f"word/{rank}" for rank in range(1, size)])]
        if words != offered and (None not in words or now >= again):  # an incomplete one only tells who is missing
            prefix, offered, again = uuid.uuid4().hex, words, now + 1.0
            store.set("offer", json.dumps({"prefix": prefix, "words": words}))
            store.set(f"{prefix}/ack/0", own)
        complete = words == offered and None not in words
        if complete and _read(store, [f"{prefix}/ack/{rank}" for rank in range(size)]) == words:
            store.set(f"{prefix}/agreed", own)
            return prefix
    raise _missing(store, prefix, offered, size, timeout)


def _follow(store: Store, rank: int, size: int, timeout: float) -> str:
    own = uuid.uuid4().hex
    prefix: str = ""
    words: list[str | None] = []
    for _ in _until(timeout):
        found, offer = _read(store, [f"word/{rank}", "offer"])
        if found != own:
            store.set(f"word/{rank}", own)  # for the first time, or over that of one that was still alive
        fresh = json.loads(offer) if offer is not None else {"words": []}
        if len(fresh["words"]) == size and fresh["words"][rank] == own:
            if fresh["prefix"] != prefix:
                prefix, words = fresh["prefix"], fresh["words"]
                store.set(f"{prefix}/ack/{rank}", own)
            if store.check([f"{prefix}/agreed"]):
                return prefix
    if not prefix:
        raise TimeoutError(
            f"join(): rank {rank} of {size} waited {timeout:g} s, and rank 0 did not answer. Was it started, and with "
            f"WORLD_SIZE={size}?"
        )
    raise _missing(store, prefix, words, size, timeout)


def _missing(store: Store, prefix: str, words: list[str | None], size: int, timeout: float) -> TimeoutError:
    come = _read(store, [f"{prefix}/ack/{rank}" for rank in range(size)])
    missing = [str(rank) for rank in range(size) if come[rank] is None and rank > 0]
    return TimeoutError(
        f"join(): of {size} processes, rank {', '.join(missing)} did not come within {timeout:g} s. "
        "Were they started, and do they call it too?"
    )


def _read(store: Store, keys: list[str]) -> list[str | None]:
    """The values of the keys that exist, without waiting; None for the others."""
    if keys and store.check(keys):
        return [value.decode() for value in store.multi_get(keys)]
    return [store.get(key).decode() if store.check([key]) else None for key in keys]


def _until(timeout: float) -> Iterator[float]:
    """The time, again and again with growing pauses, so that a thousand processes do not flood the store."""
    now, pause = time.monotonic(), 0.005
    deadline = now + timeout
    while now < deadline:
        yield now
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        now, pause = time.monotonic(), min(1.5 * pause, 0.2)


def _launcher_hosts() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _connect(rank: int, timeout: float) -> Store:
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not _launcher_hosts(),
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,  # who is missing is told by name instead
        multi_tenant=True,
    )


def _take_gpu(local_rank: int) -> None:
    there = torch.cuda.device_count()
    if local_rank >= there:
        raise RuntimeError(
            f"join(): LOCAL_RANK={local_rank} needs {local_rank + 1} GPUs on this host, and there are {there}. Start no more "
            "processes on a host than it has GPUs (--nproc-per-node), or train on the CPU with backend='gloo'"
        )
    torch.cuda.set_device(local_rank)


def _end_with_launcher() -> None:
    """Let the kernel end this process when torchrun dies: otherwise its workers run for ever, on GPUs that seem free."""
    if not sys.platform.startswith("linux") or "TORCHELASTIC_RUN_ID" not in os.environ:
        return  # another launcher may well end before what it has started
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)  # it died before the kernel was asked


def _leave(pid: int) -> None:
    if os.getpid() != pid or not dist.is_initialized():
        return  # a forked child, or somebody has left before
    if _failed or getattr(sys, "last_value", None) is not None:
        return
    with contextlib.suppress(Exception):  # the others may have gone, and this process has done its work
        _barrier(LEAVING)
    gc.collect()  # what holds the group and is not needed any more, such as the wrappers of models
    with contextlib.suppress(Exception):  # likewise: what is not destroyed ends with the process
        dist.destroy_process_group()


def _barrier(timeout: float) -> None:
    group = dist.group.WORLD
    if group is None or "gloo" not in dist.get_backend_config(group):
        return
    options = dist.BarrierOptions()
    options.timeout = timedelta(seconds=timeout)
    options.device = torch.device("cpu")
    group.barrier(options).wait()
