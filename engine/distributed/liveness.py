"""Who this process is, and whether another one still runs. The only reader of ``/proc`` for these questions."""

from __future__ import annotations

import hashlib
import os
import socket
from typing import NamedTuple

__all__ = ["Process", "boot_id", "find_process", "identity", "is_alive", "machine_name"]


class Process(NamedTuple):
    """What the system says about a process.

    Attributes:
        started: when it started, in clock ticks since the machine booted, since process ids are reused. 0 where the system does
            not say.
        defunct: whether it has ended and only its exit status is left for its parent to collect (a zombie).
    """

    started: int
    defunct: bool


def find_process(pid: int) -> Process | None:
    """Look up a process of this machine by its id; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name in front of it may hold anything
        return Process(started=int(fields[19]), defunct=fields[0] in (b"Z", b"X"))
    except OSError:
        if os.path.isdir("/proc/self"):
            return None
    try:  # not Linux
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return Process(started=0, defunct=False)


def machine_name() -> str:
    """The host name and the process namespace; containers on one machine do not see each other's processes."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}"


def boot_id() -> str:
    """What identifies the time since the machine's last boot; empty where the system does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def identity() -> str:
    """This process as a text for other processes: its machine, its id, and when it started; `is_alive` reads it."""
    pid = os.getpid()
    if pid not in _identities:  # a forked child is another process
        found = find_process(pid)
        if found is None:  # temporary, such as too many open files: not remembered
            return f"{_machine_digest()}~{pid}~None"
        _identities[pid] = f"{_machine_digest()}~{pid}~{found.started}"
    return _identities[pid]


_identities: dict[int, str] = {}


def is_alive(process: str) -> bool | None:
    """Whether the process with this `identity` still runs; None if it is one of another machine. A zombie counts as alive."""
    machine, pid, started = process.split("~")
    if machine != _machine_digest():
        return None
    found = find_process(int(pid))
    return found is not None and str(found.started) == started


def _machine_digest() -> str:
    return hashlib.sha256(machine_name().encode()).hexdigest()[:8]
