"""Findings about a run's checkpoints: the folder, hyperparameters of a different experiment, or no checkpoint at all."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from signalfire import AnyEvent, Engine, Handler, Interval, checkpoints
from signalfire.authoring import Monitor, check_choice, warn
from signalfire.authoring.checks import shown_path
from signalfire.authoring.monitor import is_announced, users_may_write
from signalfire.checkpoints.manifest import read_manifest_or_none
from signalfire.distributed import is_sharded
from signalfire.resuming.frozen import FrozenBase

__all__ = [
    "check_filename",
    "check_selection",
    "refuse_shards",
    "report_base",
    "report_folder",
    "report_hyperparameters",
    "report_nothing_saved",
    "say_nothing_to_resume",
    "warn_unsynced",
]


def check_selection(handler: Handler, monitor: str | None, mode: str | None, every: object) -> None:
    """Raise ValueError for arguments of `Checkpoint` that select both the last and the best, or for a wrong mode."""
    if monitor is not None and every is not None:
        raise ValueError(
            f"Checkpoint(monitor={monitor!r}, every={every!r}): with monitor=, a checkpoint is saved whenever a new "
            "value of the metric is among the best, so every= does not apply; omit every="
        )
    if mode is not None:
        check_choice(handler, "mode", mode, ("min", "max"))
        if monitor is None:
            kept = (
                "without monitor=, the latest checkpoints are kept, so mode= has no effect; add monitor= or omit mode="
            )
            raise ValueError(f"Checkpoint(mode={mode!r}): {kept}")


def check_filename(engine: Engine, filename: checkpoints.NameTemplate) -> None:
    """Raise KeyError when a run starts for a field that nobody announced and nobody can write; user code may write one later."""
    if not users_may_write(engine) and not all(is_announced(engine, metric) for metric in filename.metrics):
        filename.require(engine.state.metrics)


def refuse_shards(engine: Engine, name: str) -> None:
    """Raise an error if a state to save after an error would be in parts, which the other ranks no longer write then."""
    if any(is_sharded(p) for root in engine.modules.values() for p in root.parameters()):
        raise ValueError(
            f"{name!r}: on_exception=True cannot save a sharded model, because after an error the other ranks no "
            "longer write their parts; omit on_exception=True, and save more often"
        )


def warn_unsynced(name: str, problem: OSError) -> None:
    """Warn that the disk, whose failure may have ended the run, lacks files that a saved state refers to."""
    warn(
        f"{name!r}: saved a checkpoint after an error, but some files that the checkpoint refers to could not be "
        f"synced to disk: {problem}",
        RuntimeWarning,
    )


def report_base(engine: Engine, name: str, base: FrozenBase) -> None:
    """Print how much of the modules a checkpoint leaves out; report a checkpoint that leaves out nothing."""
    parameters = [p for root in engine.modules.values() for p in root.parameters()]
    every = sum(p.nbytes for p in parameters)
    if base.count == 0:
        changed = not all(p.requires_grad for p in parameters)
        engine.findings.report(
            "W30",
            f"{name!r}: trained_only=True has no effect, because "
            + (
                "the frozen parameters were changed after the start"
                if changed
                else "no parameter is frozen when the run starts"
            ),
            "load the weights of frozen parameters before run()"
            if changed
            else "freeze parameters before run() with requires_grad_(False) or Freezing, or omit trained_only=True",
            name,
        )
    elif engine.processes.is_rank_zero:
        print(
            f"{name}: {base.count} frozen parameters ({base.size / 1e6:.1f} of {every / 1e6:.1f} MB) are left out, so "
            "the checkpoints can be loaded only into a model with the same frozen parameters",
            file=sys.stderr,
        )


def report_folder(engine: Engine, name: str, folder: Path, files: checkpoints.Files, *, resumes: bool) -> None:
    """Report entries that cannot be read, and an earlier run that this one does not resume."""
    for problem in checkpoints.find_unreadable(folder, files):
        engine.findings.report(
            "W33",
            f"an entry in the checkpoint folder cannot be read and is skipped: {problem}",
            "if this entry is a broken link, remove it; otherwise, correct its permissions, or use a separate folder "
            "for checkpoints",
            name,
            key=str(problem.filename),
        )
    begins_anew = engine.state.iteration == 0 and not engine.snapshots.has_loaded_state
    if begins_anew and (stopped := checkpoints.preempted(folder, name, files)) is not None:
        engine.findings.report(
            "W36",
            f"{name!r}: the run starts at epoch 1, although {stopped!r} contains the checkpoint of a preempted run",
            "to resume that run, use Checkpoint(..., resume=True) or load_state_dict(Checkpoint.load(folder)); to "
            "start a new run, use a different folder",
            name,
        )
    elif begins_anew and not resumes:
        engine.findings.look(_say_earlier, engine, folder, files)


def _say_earlier(engine: Engine, folder: Path, files: checkpoints.Files) -> None:
    """Print what earlier runs have left in the folder of a run that starts at epoch 1, and that it is kept."""
    found = dict(_intact(folder, files))
    if not found:
        return
    newest, manifest = max(found.items(), key=lambda one: (_written(folder / one[0]), one[1]["iteration"]))
    runs = len({one["run"] for one in found.values()})
    saved = datetime.fromtimestamp(_written(folder / newest)).strftime("%Y-%m-%d %H:%M")
    engine.findings.say(
        f"{str(shown_path(folder))!r} contains {len(found)} checkpoint{'s' if len(found) > 1 else ''} from "
        f"{f'{runs} earlier runs' if runs > 1 else 'an earlier run'}; the newest is {newest!r} (run {manifest['run']}, "
        f"epoch {manifest['epoch']}, iteration {manifest['iteration']}, {saved}). This run starts at epoch 1 and adds "
        "its own checkpoints; the earlier ones are kept. To resume from the newest checkpoint, use "
        "Checkpoint(..., resume=True); to keep the runs apart, use a different folder"
    )


def _intact(folder: Path, files: checkpoints.Files) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The names and manifests of the checkpoints in a folder."""
    for name, path in checkpoints.find(folder, files) if folder.is_dir() else ():
        if (manifest := read_manifest_or_none(path, files)) is not None:
            yield name, manifest


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another run has removed it meanwhile
        return 0.0


_MOST_FOLDERS = 100


def say_nothing_to_resume(engine: Engine, name: str, folder: Path, files: checkpoints.Files) -> None:
    """Print that a run with ``resume=True`` finds nothing, and where checkpoints are that may be meant."""
    if not engine.processes.is_rank_zero:
        return
    line = f"{name}: no checkpoint to resume from in {str(shown_path(folder))!r}, so the run starts at epoch 1"
    if of_others := sorted({str(one["handler"]) for _, one in _intact(folder, files)}):
        line += (
            f"; the folder contains checkpoints of handlers named {', '.join(map(repr, of_others))}; to resume from "
            f"one of these checkpoints, pass the name of its handler to Checkpoint, such as name={of_others[0]!r}"
        )
    elif near := next(_near(folder, files), None):
        line += f"; checkpoints were found in {str(shown_path(near))!r}"
    engine.findings.say(line)


def _near(folder: Path, files: checkpoints.Files) -> Iterator[Path]:
    """Folders with checkpoints that are inside this one, or whose names are similar to it or to a parent."""
    inside = sorted(folder.iterdir())[:_MOST_FOLDERS] if folder.is_dir() else []
    called: list[Path] = []
    rest = Path(folder.name)
    for around in [] if folder.name == "" else folder.absolute().parents:
        if around.is_dir():
            own = _unnumbered(rest.parts[0])
            there = [
                one.name for one in around.iterdir() if _unnumbered(one.name) != own
            ]  # others of a series are no slips
            close = get_close_matches(rest.parts[0], there, n=5)
            called = [around / one / Path(*rest.parts[1:]) for one in close]
            break
        rest = Path(around.name) / rest
    for one in [*inside, *called]:
        if any(True for _ in _intact(one, files)):
            yield one


def _unnumbered(name: str) -> str:
    return re.sub(r"\d+", "0", name)


def report_hyperparameters(engine: Engine, name: str, now: Mapping[str, Any] | None) -> None:
    """Report a run that resumes from a checkpoint with different hyperparameters, such as one of a different experiment."""
    origin = engine.snapshots.origin
    before = None if origin is None else origin["manifest"]["hyperparameters"]
    if origin is None or not before or not now:
        return
    if different := [key for key in now if key in before and before[key] != now[key]]:
        texts = ", ".join(f"{key}={now[key]!r} instead of {before[key]!r}" for key in different)
        engine.findings.report(
            "W32",
            f"the run resumes from {origin['path']!r}, but {name!r} has different hyperparameters: {texts}",
            "to resume from this checkpoint, use the hyperparameters that Checkpoint.hyperparameters(path) returns; to "
            "start a new run, use a different folder",
            name,
        )


def report_nothing_saved(engine: Engine, name: str, every: Interval | AnyEvent | None, monitor: Monitor | None) -> None:
    """Report a run that ends with nothing saved."""
    engine.findings.report(
        "W37",
        f"{name!r} did not save a checkpoint: "
        + (
            f"the run ended before the first checkpoint was due (every={every})"
            if monitor is None
            else f"the metric {monitor.metric!r} had no value that could be compared"
        ),
        "choose a shorter interval, or a metric that is measured in this run",
        name,
    )
