"""Identifies this process, and checks whether another one is running. The only module that reads ``/proc`` for this."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import sys
from typing import NamedTuple

__all__ = ["Process", "boot_id", "environment_of", "find_process", "identity", "is_alive", "machine", "machine_name"]


class Process(NamedTuple):
    """A running process.

    Attributes:
        started: Start time in clock ticks since boot, which distinguishes processes with a reused id; 0 if the system does not
            report it.
        defunct: Whether it is a zombie: it has ended, and its parent has not yet collected the exit status.
    """

    started: int
    defunct: bool


def find_process(pid: int) -> Process | None:
    """Look up a process of this machine by its id; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the process name before it may contain any character
        return Process(started=int(fields[19]), defunct=fields[0] in (b"Z", b"X"))
    except OSError:
        if os.path.isdir("/proc/self"):
            return None
    if sys.platform == "win32":  # where os.kill(pid, 0) would interrupt it
        return Process(started=0, defunct=False)
    try:  # not Linux
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return Process(started=0, defunct=False)


def environment_of(pid: int) -> dict[str, str] | None:
    """The environment variables with which a process of this machine began; None if they cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = file.read().decode(errors="replace").split("\0")
    except OSError:
        return None
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs) if name}


def machine_name() -> str:
    """The host name and the PID namespace; containers on one machine do not see each other's processes."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}"


def boot_id() -> str:
    """An id of the machine's current boot; empty if the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def machine() -> str:
    """An id that is equal for processes that can find each other by process id: same machine, boot and PID namespace.

    The name alone is not enough: hosts of one name may share a folder, and the PID namespace of a host has the same number on
    each of them.
    """
    return f"{machine_name()} {boot_id()}"


def identity() -> str:
    """A string that identifies this process: machine, process id and start time. `is_alive` parses it."""
    pid = os.getpid()
    if pid not in _identities:  # a forked child is a different process
        found = find_process(pid)
        if found is None:  # a temporary error, such as too many open files: not cached
            return f"{_machine_digest()}~{pid}~None"
        _identities[pid] = f"{_machine_digest()}~{pid}~{found.started}"
    return _identities[pid]


_identities: dict[int, str] = {}


def is_alive(process: str) -> bool | None:
    """Whether the process with this `identity` is running; None for another machine or boot, and for what is no identity.

    On Windows, it is known of this process only.

    A zombie has ended: it writes no more. An identity of 0.2.0 lacks the boot: such a process is known to run if it is found
    here, and else may run on another host of the same name.
    """
    digest, _, rest = process.partition("~")
    pid, _, started = rest.partition("~")
    lacks_boot = digest == _digest(machine_name())
    if not (lacks_boot or digest == _machine_digest()) or not re.fullmatch(r"[0-9]{1,10}", pid):
        return None
    if sys.platform == "win32" and int(pid) != os.getpid():
        return None
    found = find_process(int(pid))
    if found is not None and not found.defunct and str(found.started) == started:
        return True
    return None if lacks_boot else False


def _machine_digest() -> str:
    return _digest(machine())


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:8]
