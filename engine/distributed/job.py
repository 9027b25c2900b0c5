"""What a process knows of the job that it belongs to, and what shows that two processes belong to different ones."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .liveness import environment_of, find_process, machine

__all__ = ["describe", "difference"]

_IDS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "FLUX_JOB_ID")
"""Variables that are equal in all processes of a job; of two processes, the first one that both have decides."""
_UNNAMED = ("", "-", "-c", "__main__", "ipykernel_launcher")
"""Programs that say nothing about what they run."""


def describe() -> dict[str, Any]:
    """What this process knows of its job; JSON can hold it."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "ids": _ids(),
        "spawner": _spawner(),
        "program": Path(*getattr(sys, "argv", [])[:1]).stem,
    }


def difference(own: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """What shows that two processes belong to different jobs; None if nothing does.

    Processes of one job may differ in host, folder, parent and arguments, so that these show nothing.
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
    return None


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
