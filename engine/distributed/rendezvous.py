"""Joins and leaves the process group, safely under restarts and with a reliable exit status."""

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

from . import job
from .liveness import identity, is_alive

__all__ = ["agree", "bounded", "ended_peers", "join", "launched", "launched_in_part", "note_failure", "peers"]

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
PR_SET_PDEATHSIG = 1
GRACE = 5.0  # seconds in which gloo may report the timeout itself
LEAVING = 5.0  # seconds that a finished process waits for the others

NOTICED = 1.0  # seconds in which gloo may report that another rank has ended
NOTICING = 0.1  # seconds between two looks for ranks that have ended
TOGETHER = 100  # clock ticks within which a launcher begins all processes of one start

_failed = False
_peers: list[str] = []


def launched() -> bool:
    """Whether torchrun, or a launcher that sets the same environment, started this process."""
    return all(name in os.environ for name in ENVIRONMENT)


def launched_in_part() -> bool:
    """Whether the environment describes a distributed run, even if incompletely, in which each rank would train on all data."""
    return os.environ.get("WORLD_SIZE", "1") != "1" or os.environ.get("RANK", "0") != "0"


def note_failure() -> None:
    """Note that this process ends with an error that the interpreter does not see, so that the group is not destroyed."""
    global _failed
    _failed = True


def join(*, backend: str | None = None, timeout: float) -> Store:
    """Initialize torch.distributed in a process started by torchrun, and return a store that only this group uses.

    Workers restarted by torchrun find the keys of dead workers in the store, and plain ``init_process_group`` would connect to
    addresses that no process listens on. They therefore first agree on a fresh prefix for all of their keys.

    A process that ends without an error waits a few seconds for the others and destroys the group: otherwise a few percent of
    finished processes abort when gloo's threads are torn down, and torchrun restarts the finished job. After an unhandled
    exception, or ``note_failure``, it neither waits nor destroys the group. If torchrun is killed, its workers receive SIGTERM,
    which they can catch to save their state; on Linux only.

    If torch.distributed is already initialized, its store is returned and nothing is changed, now or at exit.

    Args:
        backend: As for ``init_process_group``; by default "gloo", and with CUDA "cpu:gloo,cuda:nccl", with the local rank's GPU
            as the current device.
        timeout: Seconds for joining, and then for each collective.

    Raises:
        RuntimeError: if the process was not launched by torchrun, there are too few GPUs, or the store cannot be reached.
        RuntimeError: also if a rank of this machine ends before all have joined, naming it; if rank 0 belongs to another job; or
            if another process has the same rank.
        TimeoutError: naming the ranks that did not join.
    """
    if dist.is_initialized():
        return _get_default_store()
    if not launched():
        missing = ", ".join(name for name in ENVIRONMENT if name not in os.environ)
        raise RuntimeError(
            f"join(): these environment variables are not set: {missing}. Start the script with torchrun, set these "
            "variables yourself (LOCAL_RANK is 0 if the machine runs a single process), or call "
            "torch.distributed.init_process_group first"
        )
    rank, size, local_rank = (int(os.environ[name]) for name in ENVIRONMENT[:3])
    if not 0 <= rank < size:
        raise RuntimeError(f"join(): RANK={rank}: expected a rank from 0 to WORLD_SIZE - 1, which is {size - 1}")
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "nccl" in backend:
        _take_gpu(local_rank)
    _end_with_launcher()

    deadline = time.monotonic() + timeout
    address = _address()
    try:
        store, _peers[:] = _agree(_connect(rank, timeout), rank, size, timeout=max(0.0, deadline - time.monotonic()))
    except dist.DistError as error:
        host = "the launcher" if _launcher_hosts() else "rank 0"
        if rank == 0 and host == "rank 0" and "EADDRINUSE" in str(error):
            raise RuntimeError(
                f"join(): rank 0 could not host the store at {address}, because another process, perhaps from a "
                "different job, already uses this port; give each job on a machine its own MASTER_PORT"
            ) from error
        raise RuntimeError(
            f"join(): rank {rank} could not use the store at {address}, hosted by {host}; check that {host} is running"
        ) from error
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    atexit.register(_leave, os.getpid())
    return store


def peers() -> list[str]:
    """The processes that have joined the group, by rank, as `identity` describes them; empty if `join` was not needed."""
    return list(_peers)


def ended_peers() -> list[str]:
    """The ranks of this machine that have joined the group and have ended since, such as "rank 1 (pid 4711)"."""
    return [_named(rank, peer) for rank, peer in enumerate(_peers) if is_alive(peer) is False]


@contextlib.contextmanager
def bounded(timeout: float, who: str) -> Iterator[None]:
    """Exit the process if it has not joined the group a few seconds after the timeout, or after another rank has ended.

    If another rank dies while connections are made, gloo may wait forever and cannot be interrupted.
    """
    joined = threading.Event()

    def wait() -> None:
        deadline = time.monotonic() + timeout + GRACE
        cause = f"within {timeout:g} s, because one of these ranks has ended or cannot be reached"
        while not joined.wait(min(NOTICING, max(0.0, deadline - time.monotonic()))):
            ended = ended_peers()
            if ended and not cause.startswith("because"):
                cause = f"because {', '.join(ended)} has ended"
                deadline = min(deadline, time.monotonic() + NOTICED)
            if time.monotonic() >= deadline:
                print(
                    f"join(): {who} was not connected to the other ranks {cause}; this process exits",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)

    threading.Thread(target=wait, name="signalfire join", daemon=True).start()
    try:
        yield
    except Exception as error:
        if ended := ended_peers():
            error.add_note(f"{', '.join(ended)} has ended")
        raise
    finally:
        joined.set()


def agree(base: Store, rank: int, size: int, *, timeout: float) -> PrefixStore:
    """Agree with the running ranks on a fresh prefix in a store, regardless of keys that dead processes left in ``base``.

    Each rank posts a word: a random one, with its process. Rank 0 publishes an offer: a new random prefix and the words it found;
    when a word changes, it publishes another. A rank acknowledges an offer that contains its own word, under the offer's prefix.
    Once all words are acknowledged, rank 0 confirms this under the prefix, and all ranks use it. The word of a dead process is
    never acknowledged, and the offer of a dead rank 0 never contains the word of a running process. A rank that belongs to
    another job than rank 0 says no word, and rank 0 takes none of it.

    Raises:
        RuntimeError: if a process of this machine ends meanwhile, naming its rank; if rank 0 belongs to another job; or if
            another process has the same rank.
        TimeoutError: naming the ranks that did not come.
    """
    return _agree(base, rank, size, timeout=timeout)[0]


def _agree(base: Store, rank: int, size: int, *, timeout: float) -> tuple[PrefixStore, list[str]]:
    """The store, and the processes by rank."""
    here = PrefixStore("signalfire/join", base)
    prefix, words = _lead(here, size, timeout) if rank == 0 else _follow(here, rank, size, timeout)
    return PrefixStore(f"signalfire/{prefix}", base), [_process(word or "") for word in words]


class _Lookout:
    """Tells ranks that have ended in this start from the words of dead processes that earlier starts have left."""

    def __init__(self) -> None:
        self._found: dict[int, str] = {}  # the words that were there at first
        self._alive: set[str] = set()

    def living(self, words: dict[int, str | None], *, offered: bool = False) -> dict[int, str | None]:
        """The words of running processes, with None for those that earlier starts have left.

        Args:
            words: Words by rank.
            offered: Whether they are those of an offer of this start, which has no others.

        Raises:
            RuntimeError: if processes of this start have ended.
        """
        dead = {rank: word for rank, word in words.items() if word and is_alive(_process(word)) is False}
        for rank, word in words.items():
            self._found.setdefault(rank, word or "")
            if word and rank not in dead:
                self._alive.add(word)
        ended = dead if offered else {rank: word for rank, word in dead.items() if self._has_run(rank, word)}
        if ended:
            named = ", ".join(_named(rank, _process(word)) for rank, word in ended.items())
            raise RuntimeError(f"join(): {named} ended before all ranks had joined")
        return {rank: None if rank in dead else word for rank, word in words.items()}

    def _has_run(self, rank: int, word: str) -> bool:
        """Whether a process that has ended was one of this start."""
        return word != self._found[rank] or word in self._alive or _of_this_start(word)


def _word() -> str:
    return f"{uuid.uuid4().hex} {identity()} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"


def _process(word: str) -> str:
    """The `identity` in a word."""
    return word.split(" ")[1] if word.count(" ") == 2 else ""


def _key(word: str) -> str:
    """The random part of a word."""
    return word.partition(" ")[0]


def _start(word: str) -> str:
    """What torchrun counts as the start of a word's process; empty without torchrun."""
    return word.rpartition(" ")[2]


def _address() -> str:
    return f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"


def _named(rank: int, process: str) -> str:
    return f"rank {rank} (pid {process.split('~')[1]})"


def _of_this_start(word: str) -> bool:
    """Whether torchrun began a process in the same start as this one."""
    start = _start(word)
    began, own = (process.rpartition("~")[2] for process in (_process(word), identity()))
    if not start or start != os.environ.get("TORCHELASTIC_RESTART_COUNT") or not (began.isdigit() and own.isdigit()):
        return False
    return int(began) > int(own) - TOGETHER


class _Membership:
    """Keeps the processes of other jobs out of a group, and processes that have a rank of another one.

    Two jobs with one address share a store: rank 0 of one hosts it, and the ranks of both write to it.

    Args:
        store: The store in which the ranks meet.
        rank: Rank of this process.
        word: Its word.
    """

    def __init__(self, store: Store, rank: int, word: str) -> None:
        self.store, self.rank, self.word = store, rank, word
        self.job = job.describe()
        self._differences: dict[str, str | None] = {}  # by word
        store.set(f"job/{_key(word)}", json.dumps(self.job))

    def check_leader(self, word: str | None) -> None:
        """Raise RuntimeError if rank 0 is of another job."""
        if word is not None and is_alive(_process(word)) is not False and (found := self._difference(word)) is not None:
            own = f"pid {self.job['pid']} on {self.job['host']}"
            self.store.set(f"refused/{self.rank}", own)
            raise RuntimeError(
                f"join(): rank {self.rank} ({own}) does not belong to the same job as {found}. Give each job on a "
                "machine its own MASTER_PORT; to start one job in several parts, give all of the parts the same "
                "TORCHELASTIC_RUN_ID"
            )

    def members(self, words: list[str | None]) -> list[str | None]:
        """The words of the other ranks, with None for those of another job."""
        return [None if word is not None and self._difference(word) is not None else word for word in words]

    def check_rank(self, found: str | None) -> None:
        """Raise RuntimeError if another running process has this rank; ``found`` is the word of this rank in the store."""
        other = _process(found or "")
        if found in (None, self.word) or not other or other == identity() or is_alive(other) is not True:
            return
        if _start(found or "") != _start(self.word) or self._difference(found or "") is not None:
            return  # of an earlier start, which is about to be killed, or of a job that is refused
        error = (
            f"join(): two processes on {self.job['host']} have rank {self.rank} in the group at {_address()}: pid "
            f"{other.split('~')[1]} and pid {self.job['pid']}. Give each process its own RANK; if the processes belong "
            "to two jobs, give each job its own MASTER_PORT instead"
        )
        self.store.set("double", json.dumps({"word": found, "error": error}))
        raise RuntimeError(error)

    def check_double(self, words: list[str | None]) -> None:
        """Raise RuntimeError if another process has found that it has the rank of one of these."""
        if self.store.check(["double"]):
            double = json.loads(self.store.get("double"))
            if double["word"] in words:
                raise RuntimeError(double["error"])

    def _difference(self, word: str) -> str | None:
        """The process of a word, and what shows that it is of another job; None if nothing does."""
        if word not in self._differences:
            key = f"job/{_key(word)}"
            other = json.loads(self.store.get(key)) if self.store.check([key]) else None
            found = None if other is None else job.difference(self.job, other)
            if other is not None and found is not None:
                found = f"the process at {_address()} (pid {other['pid']} on {other['host']}): {found}"
            self._differences[word] = found
        return self._differences[word]


def _lead(store: Store, size: int, timeout: float) -> tuple[str, list[str | None]]:
    own, lookout = _word(), _Lookout()
    prefix, again = "", 0.0
    offered: list[str | None] = []
    membership = _Membership(store, 0, own)
    membership.check_rank(*_read(store, ["word/0"]))
    store.set("word/0", own)
    for now in _until(timeout):
        read = membership.members(_read(store, [f"word/{rank}" for rank in range(1, size)]))
        try:
            membership.check_double([own, *read])
            words = [own, *lookout.living(dict(enumerate(read, start=1))).values()]
        except RuntimeError as error:
            store.set("offer", json.dumps({"failed": str(error), "words": [own, *read]}))
            _wait_until_known(store, read)
            raise
        # An incomplete offer only shows which ranks are missing.
        if words != offered and (None not in words or now >= again):
            prefix, offered, again = uuid.uuid4().hex, words, now + 1.0
            store.set("offer", json.dumps({"prefix": prefix, "words": words}))
            store.set(f"{prefix}/ack/0", own)
        complete = words == offered and None not in words
        if complete and _read(store, [f"{prefix}/ack/{rank}" for rank in range(size)]) == words:
            store.set(f"{prefix}/agreed", own)
            return prefix, words
    raise _missing_ranks(store, prefix, offered, size, timeout)


def _follow(store: Store, rank: int, size: int, timeout: float) -> tuple[str, list[str | None]]:
    own = _word()
    try:
        return _follow_as(own, store, rank, size, timeout)
    except RuntimeError:
        with contextlib.suppress(dist.DistError):  # rank 0, which hosts the store, has ended already
            store.set(f"known/{_key(own)}", "")
        raise


def _follow_as(own: str, store: Store, rank: int, size: int, timeout: float) -> tuple[str, list[str | None]]:
    lookout = _Lookout()
    prefix: str = ""
    words: list[str | None] = []
    membership = _Membership(store, rank, own)
    for _ in _until(timeout):
        found, leader, offer = _read(store, [f"word/{rank}", "word/0", "offer"])
        membership.check_leader(leader)
        membership.check_rank(found)
        if found != own:
            # The first time, or after a process that was still running has replaced it.
            store.set(f"word/{rank}", own)
        fresh = json.loads(offer) if offer is not None else {"words": []}
        answers = len(fresh["words"]) == size and fresh["words"][rank] == own
        if "failed" in fresh and (answers or (fresh["words"][0] == leader and is_alive(_process(leader or "")))):
            raise RuntimeError(fresh["failed"])
        if answers:
            if fresh["prefix"] != prefix:
                prefix, words = fresh["prefix"], fresh["words"]
                store.set(f"{prefix}/ack/{rank}", own)
            if store.check([f"{prefix}/agreed"]):
                return prefix, words
        lookout.living(dict(enumerate(fresh["words"])) if answers else {0: leader}, offered=answers)
    if not prefix:
        raise TimeoutError(
            f"join(): rank {rank} of {size} waited {timeout:g} s, but rank 0 did not answer; check that rank 0 was "
            f"started with WORLD_SIZE={size}"
        )
    raise _missing_ranks(store, prefix, words, size, timeout)


def _wait_until_known(store: Store, words: list[str | None]) -> None:
    """Wait a little until the running ranks know why rank 0 ends: it may host the store, which ends with it."""
    for _ in _until(LEAVING):
        running = [word for word in words if word is not None and is_alive(_process(word)) is not False]
        if store.check([f"known/{_key(word)}" for word in running]):
            return


def _missing_ranks(store: Store, prefix: str, words: list[str | None], size: int, timeout: float) -> TimeoutError:
    acknowledged = _read(store, [f"{prefix}/ack/{rank}" for rank in range(size)])
    missing = [str(rank) for rank in range(size) if acknowledged[rank] is None and rank > 0]
    others = zip(missing, _read(store, [f"refused/{rank}" for rank in missing]), strict=True)
    refused = [
        f"rank {rank} of a different job ({where}) connected to this address and was rejected"
        for rank, where in others
        if where
    ]
    return TimeoutError(
        f"join(): not all {size} ranks joined within {timeout:g} s; missing: rank {', '.join(missing) or 0}; "
        f"{'; '.join([*refused, 'check that every rank was started and calls join()'])}"
    )


def _read(store: Store, keys: list[str]) -> list[str | None]:
    """The values of existing keys, without waiting; None for the others."""
    if keys and store.check(keys):
        return [value.decode() for value in store.multi_get(keys)]
    return [store.get(key).decode() if store.check([key]) else None for key in keys]


def _until(timeout: float) -> Iterator[float]:
    """Yield the time until the timeout, with growing pauses, so that a thousand ranks do not flood the store."""
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
        wait_for_workers=False,  # missing ranks are reported by name instead
        multi_tenant=True,
    )


def _take_gpu(local_rank: int) -> None:
    available = torch.cuda.device_count()
    if local_rank >= available:
        raise RuntimeError(
            f"join(): LOCAL_RANK={local_rank} needs {local_rank + 1} GPUs on this host, but only {available} are "
            "available; start at most one process per GPU (--nproc-per-node), or train on the CPU with backend='gloo'"
        )
    torch.cuda.set_device(local_rank)


def _end_with_launcher() -> None:
    """Have the kernel end this process when torchrun dies: otherwise its workers run forever, on GPUs that appear free."""
    if not sys.platform.startswith("linux") or "TORCHELASTIC_RUN_ID" not in os.environ:
        return  # other launchers may end before their workers
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun died before prctl was called


def _leave(pid: int) -> None:
    if os.getpid() != pid or not dist.is_initialized():
        return  # a forked child, or the group was already destroyed
    if _failed or getattr(sys, "last_value", None) is not None:
        return
    with contextlib.suppress(Exception):  # the other ranks may have exited already, and this one is done
        _barrier(LEAVING)
    gc.collect()  # unreferenced objects that use the group, such as wrappers of models
    with contextlib.suppress(Exception):  # likewise: the process is about to exit
        dist.destroy_process_group()


def _barrier(timeout: float) -> None:
    group = dist.group.WORLD
    if group is None or "gloo" not in dist.get_backend_config(group):
        return
    options = dist.BarrierOptions()
    options.timeout = timedelta(seconds=timeout)
    options.device = torch.device("cpu")
    group.barrier(options).wait()
