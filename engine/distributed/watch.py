"""Reports to the other ranks what this process does, and finds the rank that broke a collective and where it was."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ..events import Events
from .liveness import boot_id, find_process, machine_name

__all__ = ["Watch", "cut_connections"]

BLOCK = 64  # processes whose news are read at a time: every process reads as much, whatever the number of them
ORDER = {event.name: place for place, event in enumerate(Events)}  # they are declared in the order of the loop

Told = dict[str, Any]


class Watch:
    """A thread that reports once a second where this process is, and notices which of the others failed or died.

    A broken collective only says "Connection closed by peer", or that it timed out. ``explain`` says which rank caused it, and
    what that rank was doing.

    - A rank that raises and ends, or is killed, closes its connections: gloo raises in the others in a fraction of a second.
    - A rank that raised while its process lives on (the script caught it) would be waited for until the group's timeout. No
      call of torch 2.13 ends a collective of gloo that waits: ``abort``, ``shutdown`` and ``destroy_process_group`` from a
      thread have no effect on it. But the thread can shut down the sockets under it (``cut_connections``, on Linux), and it
      raises in the main thread, like any other error. This is done ``interval`` seconds after a failure or a death was
      noticed, unless this rank has failed or asked for an explanation by then; the group is of no use afterwards.
    - Where that is not possible, or with NCCL (after an abort its streams would go on with whatever is in the buffers), the
      explanation is printed, and the process left with ``os._exit(1)`` once ``where`` has not changed for ``grace`` seconds.
    - Only the group's timeout tells a rank that is stopped or hangs from a slow one. ``explain`` then names the rank that was
      waited for: one that is silent, or the one whose event is behind.

    Every process creates its watches in the same order. The thread ends quietly if the store's host is gone.

    Args:
        store: of the group; it is cloned, so that the thread waits for nobody.
        rank, size: of this process, and how many there are.
        timeout: of the group's collectives, in seconds.
        interval: seconds between two reports.
        where: what this process is doing, such as "BACKWARD_STARTED, epoch 1, iteration 7"; called in the thread.
        grace: seconds before the process is left, see above.
    """

    made = 0

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout: float,
        interval: float = 1.0,
        where: Callable[[], str],
        grace: float = 10.0,
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.interval = interval
        self.grace = grace
        self.where = where
        self.others = [other for other in range(size) if other != rank]
        self.told: dict[int, Told] = {}  # what each rank told last
        self.heard: dict[int, float] = {}  # when that was new, by this process's clock
        self.gone: str | None = None  # why the store cannot be reached
        self._store = PrefixStore(f"signalfire/watch/{Watch.made}", store.clone())  # type: ignore[attr-defined]
        Watch.made += 1
        self._own: Told = {"pid": os.getpid(), "host": socket.gethostname(), "machine": _machine(), "reports": 0}
        self._own["started"] = _started(os.getpid())
        self._since = 0.0
        self._next = 0  # of self.others, to be read
        self._explained = self._failed = False  # this rank knows by itself
        self._asked = threading.Condition()
        self._requests = self._answers = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="signalfire watch", daemon=True)

    def start(self) -> None:
        if self.others:
            self._thread.start()
            atexit.register(self._end)

    def stop(self) -> None:
        """Report that the run has ended here without an error, so that a rank that still waits for this one learns why."""
        if self._thread.is_alive():
            self._own["left"] = True
            self._end()
        atexit.unregister(self._end)

    def failed(self, error: BaseException) -> None:
        """Report at once that this rank leaves its run with an error, since the others will wait for it."""
        if not self._thread.is_alive() or self._failed:
            return
        self._failed = True
        consequence = self._explained or isinstance(error, dist.DistError) or "/gloo/" in str(error)
        message = str(error).strip().split("\n")[0][:500]
        self._own["failed"] = {"error": type(error).__name__, "message": message, "consequence": consequence}
        self._ask(2.0)

    def explain(self) -> list[str]:
        """The ranks that caused the error that a collective raised here, the likeliest first; one line each.

        This takes up to two and a half intervals if no rank has failed or died, since only its reports show that a process on
        another host is alive.
        """
        if not self.others:
            return []
        self._explained = self._own["raised"] = True
        deadline = time.monotonic() + 2.5 * self.interval
        while True:
            answered = self._ask(max(0.5, self.interval))
            lines = self._causes()
            if lines or not answered or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if lines:
            return lines + self._consequences()
        if not answered:
            host = (
                "the launcher is gone"
                if self.gone
                else "its host, the launcher or rank 0, is stopped or cannot be reached"
            )
            lines.append(f"the store that the ranks talk through does not answer: {host}")
        return lines + self._suspects()

    # What is known

    def _causes(self) -> list[str]:
        """The ranks that died, that failed by themselves, or that have left."""
        died = [other for other in self.others if self._died(other)]
        lines = [f"{self._name(other)} died; the last event that it told was {self._event(other)}" for other in died]
        failures = [(other, self.told[other]) for other in self.others if self.told.get(other, {}).get("failed")]
        for other, told in sorted(failures, key=lambda found: found[1]["order"]):
            if not told["failed"]["consequence"]:
                lines.append(f"{self._name(other)} failed with {_error(told)} at {told['where']}")
        left = [other for other in self.others if self._left(other)]
        for other in left:
            lines.append(f"{self._name(other)} has ended its run; its last event was {self._event(other)}")
        return lines

    def _consequences(self) -> list[str]:
        return [
            f"{self._name(other)} failed because of it with {_error(told)} at {told['where']}"
            for other, told in sorted(self.told.items())
            if told.get("failed") and told["failed"]["consequence"] and not self._died(other)
        ]

    def _suspects(self) -> list[str]:
        """The ranks that may have been waited for, if none has failed or died: silent ones, or one that is behind."""
        now = time.monotonic()
        age = {other: now - heard for other, heard in self.heard.items()}
        lost = [other for other in self.others if age.get(other, 1e9) > 2 * self.interval]
        missed = [] if lost else self._missed()
        lines = []
        for other in [*lost, *missed, *(other for other in self.others if other not in lost + missed)]:
            told = self.told.get(other)
            if told is None:
                lines.append(f"rank {other} has never told anything")
            elif other in lost:
                lines.append(
                    f"{self._name(other)} has been silent for {age[other]:.1f} s: it is stopped or cut off; "
                    f"the last event that it told was {told['where']}"
                )
            elif told.get("failed"):
                lines.append(f"{self._name(other)} failed too, with {_error(told)} at {told['where']}")
            else:
                line = f"{self._name(other)} is alive, and at {told['where']} for {told['since'] + age[other]:.1f} s"
                lines.append(f"{line}: it is the one that was waited for" if other in missed else line)
        return lines

    def _missed(self) -> list[int]:
        """Of the ranks in which no collective has raised, those whose event is earliest: they did not reach it."""
        places = {
            other: _place(told["where"])
            for other, told in self.told.items()
            if not told.get("failed") and not told.get("raised")
        }
        return sorted(other for other, place in places.items() if place == min(places.values()))

    def _left(self, other: int) -> bool:
        told = self.told.get(other, {})
        return bool(told.get("left")) and not told.get("failed")

    def _died(self, other: int) -> bool:
        """Whether the rank's process is gone; False for one of another machine, of which nothing is known."""
        told = self.told.get(other)
        if told is None or told.get("failed") or told.get("left") or told["machine"] != self._own["machine"]:
            return False
        return bool(_started(told["pid"]) != told["started"])

    def _name(self, other: int) -> str:
        told = self.told[other]
        return f"rank {other} (pid {told['pid']} on {told['host']})"

    def _event(self, other: int) -> str:
        return str(self.told[other]["where"])

    # The thread, which alone uses the store: an operation on a store whose host is stopped never returns

    def _ask(self, timeout: float) -> bool:
        """Let the thread report and read everything now; returns whether it did so in time."""
        with self._asked:
            self._requests += 1
            mine = self._requests
            self._asked.notify_all()
            self._asked.wait_for(lambda: self._answers >= mine or self.gone is not None, timeout)
            return self._answers >= mine and self.gone is None

    def _end(self) -> None:
        """End the thread: one that comes back from the store while the interpreter is torn down aborts the process."""
        if self._thread.is_alive():
            self._stopped = True
            self._ask(2.0)
            self._thread.join(2.0)

    def _run(self) -> None:
        found: float | None = None  # when a failure or a death was noticed
        cut = False
        while True:
            with self._asked:
                requests = self._requests
            try:
                self._report()
                self._read(everything=requests > self._answers)
            except Exception as error:  # the store's host has ended; in an ending process, that has many kinds
                with self._asked:
                    self.gone = str(error) or type(error).__name__
                    self._asked.notify_all()
                return
            with self._asked:
                self._answers = requests
                self._asked.notify_all()
            if self._stopped:
                return
            if found is None:
                found = time.monotonic() if self._broken() else None
            elif not (self._explained or self._failed):
                if not cut and time.monotonic() - found >= self.interval:
                    cut = True
                    with contextlib.suppress(Exception):  # then the process is left after the grace, see below
                        if cut_connections() and not _nccl():
                            found = float("inf")  # gloo raises in the main thread
                if cut and time.monotonic() - max(found, self._since) > self.grace:
                    self._exit()
            with self._asked:
                self._asked.wait_for(lambda: self._requests > self._answers, self.interval)

    def _report(self) -> None:
        now = time.monotonic()
        where = self.where()
        if where != self._own.get("where"):
            self._own["where"], self._since = where, now
        self._own["since"] = now - self._since
        self._own["reports"] += 1
        if self._own.get("failed") and "order" not in self._own:
            self._own["order"] = self._store.add("failures", 1)
        self._store.set(str(self.rank), json.dumps(self._own))

    def _read(self, *, everything: bool) -> None:
        ranks = self.others
        if not everything and len(ranks) > BLOCK:
            ranks = (ranks + ranks)[self._next : self._next + BLOCK]
            self._next = (self._next + BLOCK) % len(self.others)
        keys = [str(other) for other in ranks]
        if not self._store.check(keys):  # only at the start
            keys = [key for key in keys if self._store.check([key])]
        for key, value in zip(keys, self._store.multi_get(keys) if keys else [], strict=True):
            told = json.loads(value)
            if told["reports"] != self.told.get(int(key), {}).get("reports"):
                self.told[int(key)], self.heard[int(key)] = told, time.monotonic()

    def _broken(self) -> bool:
        return any(told.get("failed") or self._died(other) for other, told in self.told.items())

    def _exit(self) -> None:
        lines = "\n  ".join(self._causes() + self._consequences())
        print(
            f"rank {self.rank} waits in vain in {self._own['where']} and is ended:\n  {lines}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def cut_connections() -> int:
    """Shut down the connections of all gloo groups of this process, so that every collective raises; returns their number.

    Only sockets with an end at an address that gloo published in a group's store are touched. On Linux only.
    """
    published = b"".join(_published(group) for group in list(dist.distributed_c10d._world.pg_map))
    cut = 0
    for name in os.listdir("/proc/self/fd") if published and os.path.isdir("/proc/self/fd") else []:
        # Most are no sockets, not connected, or closed meanwhile.
        with contextlib.suppress(OSError), _copy(int(name)) as connection:
            ends = [connection.getsockname(), connection.getpeername()]
            if any(_packed(connection.family, end) in published for end in ends):
                connection.shutdown(socket.SHUT_RDWR)
                cut += 1
    return cut


def _copy(descriptor: int) -> socket.socket:
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _published(group: dist.ProcessGroup) -> bytes:
    """What gloo wrote into the group's store for its members: among other things their socket addresses."""
    store = group.get_group_store().clone()  # type: ignore[attr-defined]  # the main thread may wait in the original
    store.set_timeout(timedelta(seconds=2))
    keys = [key for key in store.list_keys() if "cpu//" in key and store.check([key])]
    return b"".join(store.multi_get(keys)) if keys else b""


def _packed(family: int, end: tuple[Any, ...]) -> bytes:
    """The part of a struct sockaddr_in or sockaddr_in6 that identifies an address."""
    start = int(family).to_bytes(2, sys.byteorder) + int(end[1]).to_bytes(2, "big")
    if family == socket.AF_INET:
        return start + socket.inet_pton(socket.AF_INET, end[0])
    if family != socket.AF_INET6:
        raise OSError("not of the internet")
    return start + bytes(4) + socket.inet_pton(socket.AF_INET6, end[0].partition("%")[0])


def _nccl() -> bool:
    return any("nccl" in str(dist.get_backend_config(group)) for group in list(dist.distributed_c10d._world.pg_map))


def _error(told: Told) -> str:
    failed = told["failed"]
    return f"{failed['error']}: {failed['message']}" if failed["message"] else str(failed["error"])


def _place(where: str) -> tuple[int, ...]:
    """A sort key by time: the numbers in a report (epoch, iteration), then the event's place in the loop."""
    event = next((ORDER[word] for word in re.findall(r"[A-Z_]+", where) if word in ORDER), -1)
    return (*(int(number) for number in re.findall(r"\d+", where)), event)


def _started(pid: int) -> int | None:
    """When a process of this machine started; None if it has ended, as a zombie has."""
    found = find_process(pid)
    return None if found is None or found.defunct else found.started


def _machine() -> str:
    """Equal for processes that can look each other up by their ids: of one machine since its boot, in one namespace."""
    return f"{machine_name()} {boot_id()}"
