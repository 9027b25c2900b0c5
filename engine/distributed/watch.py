"""Reports the position of this rank to the others, and finds the rank that broke a collective and its position."""

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
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ..authoring.versions import clone_of, keys_of
from ..core.events import Events
from .liveness import find_process, is_alive, machine

__all__ = ["Watch", "cut_connections"]

BLOCK = 64  # ranks whose reports are read at a time, so that the load of a rank does not grow with the number of ranks
ORDER = {event.name: place for place, event in enumerate(Events)}  # in declaration order, which is that of the loop

Report = dict[str, Any]


class Watch:
    """A thread that reports the position of this rank once a second, and detects ranks that failed or died.

    A broken collective only raises "Connection closed by peer", or a timeout. ``explain`` returns which rank caused it, and the
    position of that rank.

    - If a rank raises and exits, or is killed, its connections are closed: gloo raises on the other ranks within a second.
    - If a rank raises, but its process continues (the script caught the error), the others would wait until the group's timeout.
      In torch 2.13 nothing interrupts a waiting gloo collective: ``abort``, ``shutdown`` and ``destroy_process_group`` from
      another thread have no effect. But this thread can shut down its sockets (``cut_connections``, on Linux), and then it
      raises in the main thread. This happens ``interval`` seconds after a failure or death was detected, unless this rank has
      failed or called ``explain`` by then; the group cannot be used afterwards. If nothing raises, because the main thread waits
      for something else, such as a group that is being made, the process exits as below, after six times as long.
    - Where that is not possible, or with NCCL (after an abort, its streams would continue with undefined buffers), the
      explanation is printed, and the process exits with ``os._exit(1)`` once ``where`` has not changed for ``grace`` seconds.
    - A rank that is stopped or hangs can be distinguished from a slow one only by the group's timeout. ``explain`` then names
      the rank that the others waited for: one that stopped reporting, or the one with the earliest position.

    All ranks create their watches in the same order. The thread ends silently if the host of the store is gone.

    Args:
        store: Store of the group; it is cloned, so that the thread does not wait for other users of it.
        rank, size: Rank of this process, and number of ranks.
        timeout: Timeout of the group's collectives, in seconds.
        interval: Seconds between two reports.
        where: Returns the current position, such as "BACKWARD_STARTED, epoch 1, iteration 7"; called in the thread.
        grace: Seconds before the process exits, see above.
        peers: The `identity` of each rank's process, if known, to detect the death of one that has not reported yet.
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
        peers: Sequence[str] = (),
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.interval = interval
        self.grace = grace
        self.where = where
        self.peers = peers
        self.others = [other for other in range(size) if other != rank]
        self.reports: dict[int, Report] = {}  # the latest report of each rank
        self.received: dict[int, float] = {}  # when it was first read, by the clock of this process
        self.gone: str | None = None  # why the store cannot be reached
        self._store = PrefixStore(f"signalfire/watch/{Watch.made}", clone_of(store))
        Watch.made += 1
        self._own: Report = {"pid": os.getpid(), "host": socket.gethostname(), "machine": machine(), "reports": 0}
        self._own["started"] = _started(os.getpid())
        self._since = 0.0
        self._next = 0  # index in self.others of the next report to read
        self._explained = self._failed = False  # whether this rank knows of the problem
        self._condition = threading.Condition()
        self._requests = self._answers = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="signalfire watch", daemon=True)

    def start(self) -> None:
        if self.others:
            self._thread.start()
            atexit.register(self._end)

    def stop(self) -> None:
        """Report that the run ended on this rank without an error, for ranks that still wait for it."""
        if self._thread.is_alive():
            self._own["left"] = True
            self._end()
        atexit.unregister(self._end)

    def failed(self, error: BaseException) -> None:
        """Report immediately that the run ends on this rank with an error, because the others will wait for it."""
        if not self._thread.is_alive() or self._failed:
            return
        self._failed = True
        consequence = self._explained or isinstance(error, dist.DistError) or "/gloo/" in str(error)
        message = str(error).strip().split("\n")[0][:500]
        self._own["failed"] = {"error": type(error).__name__, "message": message, "consequence": consequence}
        self._report_now(2.0)

    def explain(self) -> list[str]:
        """The ranks that caused the error of a collective on this rank, the most likely first; one line each.

        This takes up to two and a half intervals if no rank has failed or died, because only its reports show that a process on
        another host is alive.
        """
        if not self.others:
            return []
        self._explained = self._own["raised"] = True
        deadline = time.monotonic() + 2.5 * self.interval
        while True:
            answered = self._report_now(max(0.5, self.interval))
            lines = self._causes()
            if lines or not answered or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if lines:
            return lines + self._consequences()
        if not answered:
            host = (
                "the launcher has ended"
                if self.gone
                else "its host, which is the launcher or rank 0, has stopped or cannot be reached"
            )
            lines.append(f"the store of the process group does not answer: {host}")
        return lines + self._suspects()

    # ---- analysis -------------------------------------------------------------------------------------------------

    def _causes(self) -> list[str]:
        """The ranks that died, that failed first, or that ended their run."""
        died = [other for other in self.others if self._died(other)]
        lines = [f"{self._name(other)} died; {self._event(other)}" for other in died]
        failures = [(other, self.reports[other]) for other in self.others if self.reports.get(other, {}).get("failed")]
        for other, report in sorted(failures, key=lambda found: found[1]["order"]):
            if not report["failed"]["consequence"]:
                lines.append(f"{self._name(other)} failed with {_error(report)} at {report['where']}")
        left = [other for other in self.others if self._left(other)]
        for other in left:
            lines.append(f"{self._name(other)} has ended its run; its last event was {self.reports[other]['where']}")
        return lines

    def _consequences(self) -> list[str]:
        return [
            f"{self._name(other)} failed as a consequence, with {_error(report)} at {report['where']}"
            for other, report in sorted(self.reports.items())
            if report.get("failed") and report["failed"]["consequence"] and not self._died(other)
        ]

    def _suspects(self) -> list[str]:
        """The ranks that the others may have waited for, if none has failed or died: silent ones, or the one furthest behind."""
        now = time.monotonic()
        age = {other: now - received for other, received in self.received.items()}
        lost = [other for other in self.others if age.get(other, 1e9) > 2 * self.interval]
        missed = [] if lost else self._missed()
        lines = []
        for other in [*lost, *missed, *(other for other in self.others if other not in lost + missed)]:
            report = self.reports.get(other)
            if report is None:
                lines.append(f"rank {other} has never reported")
            elif other in lost:
                lines.append(
                    f"{self._name(other)} has not reported for {age[other]:.1f} s, so it is suspended or disconnected; "
                    f"its last reported event was {report['where']}"
                )
            elif report.get("failed"):
                lines.append(f"{self._name(other)} also failed, with {_error(report)} at {report['where']}")
            else:
                line = (
                    f"{self._name(other)} is alive, and has been at {report['where']} for "
                    f"{report['since'] + age[other]:.1f} s"
                )
                lines.append(f"{line}; the other ranks waited for this rank" if other in missed else line)
        return lines

    def _missed(self) -> list[int]:
        """Of the ranks on which no collective has raised, those with the earliest position: they did not reach it."""
        places = {
            other: _place(report["where"])
            for other, report in self.reports.items()
            if not report.get("failed") and not report.get("raised")
        }
        return sorted(other for other, place in places.items() if place == min(places.values()))

    def _left(self, other: int) -> bool:
        report = self.reports.get(other, {})
        return bool(report.get("left")) and not report.get("failed")

    def _died(self, other: int) -> bool:
        """Whether the process of a rank has ended; False on another machine, where this is unknown."""
        report = self.reports.get(other)
        if report is None:
            return bool(self.peers) and is_alive(self.peers[other]) is False
        if report.get("failed") or report.get("left") or report["machine"] != self._own["machine"]:
            return False
        return bool(_started(report["pid"]) != report["started"])

    def _name(self, other: int) -> str:
        report = self.reports.get(other)
        if report is None:
            return f"rank {other} (pid {self.peers[other].split('~')[1]})"
        return f"rank {other} (pid {report['pid']} on {report['host']})"

    def _event(self, other: int) -> str:
        report = self.reports.get(other)
        return "it has never reported an event" if report is None else f"its last reported event was {report['where']}"

    # ---- the thread: only it uses the store, because an operation on a store whose host is stopped never returns ----

    def _report_now(self, timeout: float) -> bool:
        """Make the thread report and read all reports now; returns whether it did so in time."""
        with self._condition:
            self._requests += 1
            mine = self._requests
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._answers >= mine or self.gone is not None, timeout)
            return self._answers >= mine and self.gone is None

    def _end(self) -> None:
        """End the thread: if it returned from the store during interpreter shutdown, it would abort the process."""
        if self._thread.is_alive():
            with self._condition:
                self._stopped = True
                self._requests += 1
                self._condition.notify_all()
            self._thread.join(4.0)

    def _run(self) -> None:
        found: float | None = None  # when a failure or death was detected
        cut, grace = False, self.grace
        while True:
            with self._condition:
                # Read before the report: one that began before the watch was stopped does not say that this rank has left.
                requests, stopped = self._requests, self._stopped
            try:
                self._report()
                self._read(everything=requests > self._answers)
            except Exception as error:  # the host of the store is gone; at exit this raises errors of many types
                with self._condition:
                    self.gone = str(error) or type(error).__name__
                    self._condition.notify_all()
                return
            with self._condition:
                self._answers = requests
                self._condition.notify_all()
            if stopped:
                return
            if found is None:
                found = time.monotonic() if self._broken() else None
            elif not (self._explained or self._failed):
                if not cut and time.monotonic() - found >= self.interval:
                    cut = True
                    with contextlib.suppress(Exception):  # then the process exits after the grace period, see below
                        if cut_connections() and not _nccl():
                            grace *= 6  # gloo raises in the main thread instead, unless that waits for something else
                if cut and time.monotonic() - max(found, self._since) > grace:
                    self._exit()
            with self._condition:
                self._condition.wait_for(lambda: self._requests > self._answers, self.interval)

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
        if not self._store.check(keys):  # not all ranks have reported yet
            keys = [key for key in keys if self._store.check([key])]
        for key, value in zip(keys, self._store.multi_get(keys) if keys else [], strict=True):
            report = json.loads(value)
            if report["reports"] != self.reports.get(int(key), {}).get("reports"):
                self.reports[int(key)], self.received[int(key)] = report, time.monotonic()

    def _broken(self) -> bool:
        return any(self.reports.get(other, {}).get("failed") or self._died(other) for other in self.others)

    def _exit(self) -> None:
        lines = "\n  ".join(self._causes() + self._consequences())
        print(
            f"rank {self.rank} cannot continue at {self._own['where']} and exits:\n  {lines}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def cut_connections() -> int:
    """Shut down the connections of all gloo groups of this process, so that every collective raises; returns their number.

    Only sockets with an endpoint that gloo published in the store of a group are shut down. On Linux only.
    """
    published = b""
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # one that is being made: the others are cut all the same
            published += _published(group)
    cut = 0
    for name in os.listdir("/proc/self/fd") if published and os.path.isdir("/proc/self/fd") else []:
        # Most descriptors are not sockets, or are not connected.
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
    """The values that gloo wrote into the store of a group, which include socket addresses."""
    store = clone_of(group.get_group_store())  # the main thread may be waiting in the original
    store.set_timeout(timedelta(seconds=2))
    keys = [key for key in keys_of(store) if "cpu//" in key and store.check([key])]
    return b"".join(store.multi_get(keys)) if keys else b""


def _packed(family: int, end: tuple[Any, ...]) -> bytes:
    """The part of a struct sockaddr_in or sockaddr_in6 that identifies an address."""
    start = int(family).to_bytes(2, sys.byteorder) + int(end[1]).to_bytes(2, "big")
    if family == socket.AF_INET:
        return start + socket.inet_pton(socket.AF_INET, end[0])
    if family != socket.AF_INET6:
        raise OSError("not an internet socket")
    return start + bytes(4) + socket.inet_pton(socket.AF_INET6, end[0].partition("%")[0])


def _nccl() -> bool:
    return any("nccl" in str(dist.get_backend_config(group)) for group in list(dist.distributed_c10d._world.pg_map))


def _error(report: Report) -> str:
    failed = report["failed"]
    return f"{failed['error']}: {failed['message']}" if failed["message"] else str(failed["error"])


def _place(where: str) -> tuple[int, ...]:
    """A sort key of a position: its numbers (epoch, iteration), then the event's place in the loop."""
    event = next((ORDER[word] for word in re.findall(r"[A-Z_]+", where) if word in ORDER), -1)
    return (*(int(number) for number in re.findall(r"\d+", where)), event)


def _started(pid: int) -> int | None:
    """Start time of a process of this machine; None if it has ended or is a zombie."""
    found = find_process(pid)
    return None if found is None or found.defunct else found.started
