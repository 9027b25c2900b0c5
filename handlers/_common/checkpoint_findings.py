"""What looks wrong about the checkpoints of a run: their folder, another experiment's hyperparameters, and none at all."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from signalfire import AnyEvent, Engine, Interval, checkpoints
from signalfire.blame import warn
from signalfire.distributed import is_sharded
from signalfire.frozen import FrozenBase
from signalfire.monitor import Monitor

__all__ = [
    "refuse_shards",
    "report_base",
    "report_folder",
    "report_hyperparameters",
    "report_nothing_saved",
    "warn_unsynced",
]


def refuse_shards(engine: Engine, name: str) -> None:
    """Raise an error if a state that is held for an error would be in parts, which the other ranks no longer write then."""
    if any(is_sharded(p) for root in engine.modules.values() for p in root.parameters()):
        raise ValueError(
            f"{name!r}: on_exception=True cannot save a sharded model, because after an error the other ranks no longer write "
            "their parts; remove it, and save more often"
        )


def warn_unsynced(name: str, problem: OSError) -> None:
    """Say that the disk, whose failure perhaps ended the run, does not have the files that a saved state refers to."""
    warn(
        f"{name!r}: saved a checkpoint after an error, but files it refers to could not be synced: {problem}",
        RuntimeWarning,
    )


def report_base(engine: Engine, name: str, base: FrozenBase) -> None:
    """Say how much of the modules a checkpoint leaves out; report one that leaves out nothing."""
    every = sum(p.nbytes for root in engine.modules.values() for p in root.parameters())
    if base.count == 0:
        engine.findings.report(
            "W30",
            f"{name!r}: trained_only=True leaves out nothing, because no parameter is frozen as the run starts",
            "freeze the base before run(), with requires_grad_(False) or Freezing, or remove trained_only=True",
            name,
        )
    elif engine.processes.is_rank_zero:
        print(
            f"{name}: leaves out {base.count} frozen parameters, {base.size / 1e6:.1f} of {every / 1e6:.1f} MB; a checkpoint "
            "loads into a model with the same ones",
            file=sys.stderr,
        )


def report_folder(engine: Engine, name: str, folder: Path, files: checkpoints.Files) -> None:
    """Report entries that cannot be read, and a preempted run that this one does not resume."""
    for problem in checkpoints.find_unreadable(folder, files):
        engine.findings.report(
            "W33",
            f"an entry of the checkpoint folder cannot be read and is passed over: {problem}",
            "remove it if it is a link that leads nowhere, correct its permissions, or give checkpoints their own folder",
            name,
            key=str(problem.filename),
        )
    begins_anew = engine.state.iteration == 0 and not engine.snapshots.has_loaded_state
    if begins_anew and (stopped := checkpoints.preempted(folder, name, files)) is not None:
        engine.findings.report(
            "W36",
            f"{name!r}: the run begins anew, although {stopped!r} holds the state in which an earlier one was preempted",
            "resume it: Checkpoint(..., resume=True), or load_state_dict(Checkpoint.load(folder)); for another run, give another "
            "folder",
            name,
        )


def report_hyperparameters(engine: Engine, name: str, now: Mapping[str, Any] | None) -> None:
    """Report a run that resumes from a checkpoint with other hyperparameters, such as that of another experiment."""
    origin = engine.snapshots.origin
    before = None if origin is None else origin["manifest"]["hyperparameters"]
    if origin is None or not before or not now:
        return
    if different := [key for key in now if key in before and before[key] != now[key]]:
        texts = ", ".join(f"{key}={now[key]!r} in place of {before[key]!r}" for key in different)
        engine.findings.report(
            "W32",
            f"the run resumes from {origin['path']!r}, and {name!r} has other hyperparameters: {texts}",
            "resume with those of the checkpoint (Checkpoint.hyperparameters(path)), or give this experiment its own folder",
            name,
        )


def report_nothing_saved(engine: Engine, name: str, every: Interval | AnyEvent | None, monitor: Monitor | None) -> None:
    """Report a run that ends with nothing saved."""
    engine.findings.report(
        "W37",
        f"{name!r} has saved nothing: "
        + (
            f"its interval, {every}, did not come up before the run ended"
            if monitor is None
            else f"{monitor.metric!r} had no value that could be compared"
        ),
        "choose a shorter interval, or a metric that is measured in this run",
        name,
    )
