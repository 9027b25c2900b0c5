"""What a process knows of the job that it belongs to, and what shows that two processes belong to different ones."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .liveness import environment_of, find_process, machine

__all__ = ["describe", "difference"]

_IDS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "FLUX_JOB_ID")
"""Variables that are equal in all processes of a job; of two processes, the first one that both have decides."""
_UNNAMED = ("", "-", "-c", "__main__", "ipykernel_launcher")
"""Programs that say nothing about what they run."""

_OF_A_RANK = re.compile("rank|device|gpu|cuda|node|worker", re.IGNORECASE)
"""Arguments in which the ranks of one job differ."""


def describe() -> dict[str, Any]:
    """What this process knows of its job; JSON can hold it."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "ids": _ids(),
        "spawner": _spawner(),
        "program": Path(*getattr(sys, "argv", [])[:1]).stem,
        "starter": _starter(),
        "call": _call(),
    }


def difference(own: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """What shows that two processes belong to different jobs; None if nothing does.

    Processes of one job may differ in host, folder, parent and arguments. Without an id of the job, processes of one machine that
    differ in their parent and in what it has called, which is the folder or an argument that is not about ranks, are of two.
    """
    shared = next((name for name in _IDS if name in own["ids"] and name in other["ids"]), None)
    if shared is not None and own["ids"][shared] != other["ids"][shared]:
        return f"{shared} is {own['ids'][shared]} in this process, but {other['ids'][shared]} in the other process"
    spawner, others = own["spawner"], other["spawner"]
    if spawner and others and spawner[:2] == others[:2] and spawner != others:  # of one machine, from the same rank on
        return f"process {spawner[2]} started this process, but process {others[2]} started the other process"
    programs = own["program"], other["program"]
    if shared is None and programs[0] != programs[1] and not set(programs) & set(_UNNAMED):
        return f"this process runs {programs[0]!r}, but the other process runs {programs[1]!r}"
    return _of_two_calls(own, other, shared)


def _of_two_calls(own: Mapping[str, Any], other: Mapping[str, Any], shared: str | None) -> str | None:
    """What shows that two processes of one machine, without a shared id, were called for two jobs, by different parents."""
    starters, calls = (own["starter"], other["starter"]), (own["call"], other["call"])
    if shared is not None or None in starters or starters[0][0] != starters[1][0]:
        return None
    if starters[0] == starters[1] or calls[0] == calls[1]:
        return None
    return (
        f"process {starters[0][1]} started this process, but process {starters[1][1]} started the other process with different "
        "arguments or in a different folder"
    )


def _ids() -> dict[str, str]:
    found = {name: value for name in _IDS if (value := os.environ.get(name)) not in (None, "", "none")}
    if (together := os.environ.get("SLURM_HET_JOB_ID")) is not None:  # its components have ids of their own
        found["SLURM_JOB_ID"] = together
    return found


def _spawner() -> list[Any] | None:
    """The process that has started the ranks of this machine with multiprocessing, and which ranks; None if none has.

    Returns:
        The machine, the rank of the process with local rank 0, and id and start time of the process that has started them.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or (found := find_process(parent.pid)) is None:
        return None
    variables = environment_of(parent.pid)
    if variables is None or "RANK" in variables:
        return None  # that process is itself a rank
    first = int(os.environ.get("RANK", 0)) - int(os.environ.get("LOCAL_RANK", 0))
    return [machine(), first, parent.pid, found.started]


def _starter() -> list[Any] | None:
    """The machine, and id and start time of the parent process; None if it has ended."""
    parent = os.getppid()
    found = find_process(parent) if parent > 1 else None
    return None if found is None else [machine(), parent, found.started]


def _call() -> str:
    """A digest of the folder and the arguments, which may be secret."""
    folder = ""
    with suppress(OSError):  # it has been removed
        folder = os.getcwd()
    return hashlib.sha256(repr([folder, *_arguments(getattr(sys, "argv", [])[1:])]).encode()).hexdigest()[:16]


def _arguments(given: Sequence[str]) -> list[str]:
    """Arguments without those in which the ranks of a job differ, and without numbers that no name precedes, which may be ranks.

    Example:
        >>> _arguments(["--rank", "1", "--lr", "0.1", "device=cuda:1", "3"])
        ['--lr', '0.1']
    """
    found: list[str] = []
    before = ""  # the name of an option whose value comes next
    for one in given:
        name, has_value, _ = one.partition("=")
        is_option = one.startswith("-")
        of_rank = _OF_A_RANK.search(name if has_value or is_option else before)
        if not of_rank and (before or not one.isdigit()):
            found.append(one)
        before = one if is_option and not has_value else ""
    return found
