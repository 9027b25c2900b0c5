"""Checkpoints on disk: the last ones, or the best by a metric."""

from __future__ import annotations

import difflib
import math
import os
import re
import shutil
import string
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

from signalfire import AnyEvent, Engine, Events, Handler, Interval, Phase, on
from signalfire.checkpoints.store import (
    LONGEST_NAME,
    Files,
    Ownership,
    Taken,
    check_json,
    clean,
    commit,
    differences,
    environment,
    find,
    make_folders,
    open_generation,
    prune,
    read_manifest,
    serialize,
    set_aside,
    visible_name,
)
from signalfire.checks import check_bool, check_int
from signalfire.distributed import SHARDS, ShardFiles, is_sharded, lost_another, split_shards
from signalfire.interval import check_every, unfiltered
from signalfire.monitor import Monitor
from signalfire.state import as_number

from ._common.folders import check_folder, open_folder
from ._common.ranks import DECIDE_CHECKPOINTS

__all__ = ["Checkpoint"]

TRIES = 3
DEFAULT_FILENAME = "{name}-epoch{epoch:04d}-iter{iteration:08d}"
HARVEST, HOLD = -20, 10
"""PERSIST: what a thread has written is told before anything else is written, and what an error is to leave is held
once everything was."""


class Entry(NamedTuple):
    """One that is kept: its name unless that was taken, the metric's value, and the iteration in which it was written."""

    base: str
    value: float | None
    iteration: int


class Checkpoint(Handler):
    """Writes the engine's whole state to a folder of its own each time, and keeps the last ones, or the best by a metric.

    Every one holds everything that is needed to go on (`Engine.state_dict`), and several Checkpoints share one snapshot. Each
    is a folder ``<name>-epoch0003-iter00000120/`` with ``state.pt``, which ``torch.load`` reads, and ``manifest.json``, which
    tells its size and sha256, the metric, the hyperparameters and on what the run's bits depend. It is written under a hidden
    name, synced, and renamed into place before an old one goes, so that a crash at any moment leaves the old ones
    whole; `load` verifies it, and of a folder takes the newest good one.

    Of several processes, rank 0 writes, what differs between them included, and the others go on once it is written. An error
    of its writing is one of all. Of sharded tensors each process writes its part, besides ``state.pt``, by
    ``torch.distributed.checkpoint``; what loads them may be any number of processes, each of which reads its own parts.

    No run overwrites or removes what another wrote: a name that is taken gets a suffix ``-2``. A resumed run counts as the one
    that it goes on from, and never removes the one that it was resumed from.

    The best are chosen once for each new value of the metric: NaN is never kept, and of equal values the earlier one stays.

    Args:
        folder: where to write; made if it is not there.
        monitor: the metric by which the best are kept; without it the last ones are kept.
        mode: "min" if smaller is better, "max" if greater is.
        keep: how many are kept; by default 1 with monitor and 2 without, so that there is one to fall back to.
        every: without monitor, the interval: "1ep" by default; also a time, such as "15min", which begins anew with every run.
        filename: a template for the names, of {name}, {epoch}, {iteration}, {step} (the first update's optimizer steps) and
            the names of metrics, such as "best-{epoch:03d}-{accuracy:.3f}". A metric that has no value yet is nan.
        weights_only: write `Engine.weights` only, for `Engine.load_weights`: with averages in place, and nothing to go on with.
        hyperparameters: a mapping of values that JSON has, to be stored with each; `hyperparameters` gives them back.
        on_exception: when an error or Ctrl-C ends the run, write ``<name>-epoch....-exception``: the state after the last
            event of a completed iteration or epoch, from which the run goes on bit for bit. What was cut short is not in it.
            For this the state is copied in every iteration. It is not counted in keep.
        resume: go on from the newest good one of this handler in the folder when a run begins, if there is one: a script that is
            started again, as by ``torchrun --max-restarts``, goes on by itself. One after which three runs failed with an error
            before the next was written is passed over. A state that was loaded, and a run that goes on, come first.
        sync_files: whether a checkpoint counts as saved only once the disk has it, which takes five syncs of some 1 ms each. If
            not, a killed process loses nothing, but a power failure may damage the newest: keep 2.
        asynchronous: write in a thread while training goes on; only the copy of the state blocks, and the writing before, if it
            has not ended. Nothing is told as saved before the disk has it. An error of the thread leaves the run at the
            next completed iteration, or at its end, which waits for the thread.

    Attributes:
        kept: the names of those that are kept and on the disk, with their values: the best first, or the oldest first.

    Example:
        >>> import tempfile
        >>> Checkpoint(tempfile.mkdtemp(), monitor="accuracy", mode="max", keep=3, name="best").keep
        3
    """

    trains = True

    writes = True

    files: Files = Files()
    """The operations on the file system, for tests that record them or let them fail."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        keep: int | None = None,
        every: str | Interval | AnyEvent | None = None,
        filename: str = DEFAULT_FILENAME,
        weights_only: bool = False,
        hyperparameters: Mapping[str, Any] | None = None,
        on_exception: bool = False,
        resume: bool = False,
        sync_files: bool = True,
        asynchronous: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if monitor is not None and every is not None:
            raise ValueError(
                f"Checkpoint(monitor={monitor!r}, every={every!r}): the best are chosen at each new value of the "
                "metric; leave out every="
            )
        self.folder = check_folder(self, folder)
        self.monitor = None if monitor is None else Monitor("Checkpoint", monitor, mode)
        self.keep = check_int(self, "keep", (2 if monitor is None else 1) if keep is None else keep)
        self.every = check_every(self, every or "1ep") if monitor is None else None
        self.filename = Template(filename, self.name)
        self.weights_only = check_bool(self, "weights_only", weights_only)
        self.sync_files = check_bool(self, "sync_files", sync_files)
        self.asynchronous = check_bool(self, "asynchronous", asynchronous)
        if check_bool(self, "on_exception", on_exception) and weights_only:
            raise ValueError(
                "Checkpoint(on_exception=True, weights_only=True): weights alone are no state to go on from; leave out one"
            )
        if check_bool(self, "resume", resume) and weights_only:
            raise ValueError(
                "Checkpoint(resume=True, weights_only=True): weights alone are no state to go on from; leave out one"
            )
        if hyperparameters is not None and not isinstance(hyperparameters, Mapping):
            raise TypeError(f"Checkpoint(hyperparameters={hyperparameters!r}): it has to be a mapping")
        self._hyperparameters = check_json("Checkpoint(hyperparameters)", hyperparameters)
        self.watching = None if monitor is None else Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED
        self.requiring = None if monitor is None and not self.filename.metrics else Events.EPOCH_COMPLETED
        self.saving = self.watching or unfiltered(self.every or "1ep")
        self.polling = Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED if asynchronous else None
        self.waiting = Events.COMPLETED if asynchronous else None
        self.ending = Events.ENDED if asynchronous else None
        self.holding = Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED if on_exception else None
        self.resuming = Events.MODEL_SETUP if resume else None
        self.noting = Events.EXCEPTION_RAISED if resume else None
        self.preempting = None if weights_only else Events.PREEMPTED
        self.failing = Events.EXCEPTION_RAISED | Events.INTERRUPTED if on_exception else None
        self._decided: list[Entry] = []  # what is kept once everything that was decided on is written
        self._written: list[Entry] = []  # what is kept as the disk has it
        self._names: dict[int, str] = {}  # what these are called on the disk, by iteration; no saved state has it
        self._due: Entry | None = None  # what was decided on in CONTROL and is written in PERSIST
        # What could not be removed yet, or was left by the run that this one goes on from.
        self._superseded: list[str] = []
        self._write: _Write | None = None  # what a thread is writing
        self._held: dict[str, Any] | None = None  # for an error
        self._ownership: Ownership | None = None
        self._resumed_from: str | None = None  # until the next is written
        self._shard_files: ShardFiles | None = None

    @property
    def kept(self) -> list[tuple[str, float | None]]:
        return [(self._names[one.iteration], one.value) for one in self._written if one.iteration in self._names]

    @property
    def best(self) -> Path | None:
        """The one with the best value of the metric; None before the first, or without monitor."""
        return self.folder / self.kept[0][0] if self.kept and self.monitor is not None else None

    @property
    def last(self) -> Path | None:
        """The newest of those that are kept; None before the first."""
        newest = max((one.iteration for one in self._written if one.iteration in self._names), default=None)
        return None if newest is None else self.folder / self._names[newest]

    @staticmethod
    def load(path: str | os.PathLike[str], *, name: str | None = None) -> dict[str, Any]:
        """Read a checkpoint for ``engine.load_state_dict``, once it was verified. Nothing in it can run code.

        Args:
            path: a checkpoint, the ``state.pt`` in it, or a folder with several: of these the newest good one is taken, and
                damaged ones are named in a warning. Full states come before weights alone.
            name: of the handler whose checkpoints are meant, in a folder with several.

        Returns:
            The state. Under "origin" it says where it came from, so that the resumed run knows what is its own.

        Raises:
            FileNotFoundError: if there is none.
            ValueError: if it is damaged, cut or exchanged, naming the file; for a folder, if each is.
        """
        where = f"Checkpoint.load({str(path)!r})"
        found, manifest, state, damaged = open_generation(path, name=name, where=where, files=Checkpoint.files)
        sharded = {SHARDS: os.path.abspath(found)} if len(manifest["files"]) > 1 else {}
        if manifest["kind"] != "state":
            return {"format": 1, "modules": state} | sharded if sharded else state
        state |= sharded
        state["origin"] = {
            "path": os.path.abspath(found),
            "damaged": [os.path.abspath(one) for one in damaged],
            "manifest": manifest,
        }
        return state

    @staticmethod
    def hyperparameters(path: str | os.PathLike[str], /, **overrides: Any) -> dict[str, Any]:
        """The hyperparameters that were stored with a checkpoint, some of them replaced.

        Args:
            path: as in `load`.
            overrides: values to take in place of those that were stored, by name.

        Raises:
            ValueError: for a name that was not stored, naming those that were; or if none were.
        """
        where = f"Checkpoint.hyperparameters({str(path)!r})"
        found, manifest, _, _ = open_generation(path, name=None, where=where, files=Checkpoint.files)
        stored: dict[str, Any] | None = manifest["hyperparameters"]
        if stored is None:
            raise ValueError(f"{where}: {found.name!r} was written without hyperparameters=")
        if unknown := [name for name in overrides if name not in stored]:
            raise ValueError(f"{where}: no {unknown[0]!r} was stored; there are: {', '.join(stored) or 'none'}")
        return {**stored, **overrides}

    # ---- going on -------------------------------------------------------------------------------------------------

    @on("resuming", phase=Phase.PREPARE)
    def go_on(self, engine: Engine) -> None:
        """Load the newest good checkpoint, of several processes the one that rank 0 finds."""
        if engine.state.epoch > 0 or engine.snapshots.has_loaded_state:
            return
        found = self._next_to_try() if engine.processes.first else None
        if (found := engine.processes.broadcast(found)) is not None:
            engine.load_state_dict(self.load(self.folder / found, name=self.name))
            self._resumed_from = found

    def _next_to_try(self) -> str | None:
        """The name of the newest good one that has not failed too often."""
        given_up = sorted(name for name, runs in self._failures().items() if runs >= TRIES)
        where = f"Checkpoint({str(self.folder)!r}, resume=True)"
        try:
            path, *_ = open_generation(self.folder, name=self.name, where=where, files=self.files, without=given_up)
        except FileNotFoundError:
            if not given_up:
                return None
            raise FileNotFoundError(
                f"{where}: {TRIES} runs that went on from {', '.join(given_up)} failed before the next was written, and "
                f"there is no other; remove {self._failures_folder.name!r} from the folder to try again"
            ) from None
        if given_up:
            warnings.warn(
                f"{where}: {TRIES} runs that went on from {', '.join(given_up)} failed before the next was written; this one "
                f"goes on from {path.name}",
                RuntimeWarning,
                stacklevel=2,
            )
        return path.name

    @on("noting", phase=Phase.PERSIST)
    def note_failure(self, engine: Engine) -> None:
        """Remember that an error of this process ended a run before it had got further than what it went on from."""
        error = engine.state.exception
        if self._resumed_from is None or error is None or lost_another(error):
            return
        # All processes of a run may do so at once, and make the same empty file.
        self._failures_folder.mkdir(exist_ok=True)
        (self._failures_folder / f"{self._resumed_from}@{engine.snapshots.run_id}").touch()

    @property
    def _failures_folder(self) -> Path:
        return self.folder / f".{self.name}.failures"

    def _failures(self) -> Counter[str]:
        """How many runs have failed, by the name of the checkpoint that they went on from."""
        if not self._failures_folder.is_dir():
            return Counter()
        return Counter(path.name.rpartition("@")[0] for path in self._failures_folder.iterdir())

    # ---- deciding -------------------------------------------------------------------------------------------------

    @on(Events.STARTED, phase=Phase.PREPARE)
    def open(self, engine: Engine) -> None:
        """Make the folder, so that a place that cannot be written shows before the first batch."""
        # What an error kept from being written is not written under its old name.
        self._due = self._write = self._held = None
        if engine.processes.several:  # after an error, rank 0 alone knows of what was still being written
            known = self._written, self._names, self._superseded
            self._written, self._names, self._superseded = engine.processes.broadcast(known)
        self._decided = list(self._written)
        if self.failing is not None and any(
            is_sharded(p) for root in engine.modules.values() for p in root.parameters()
        ):
            raise ValueError(
                f"{self.name!r}: on_exception=True cannot write a sharded model, since after an error there is no group of "
                "processes of which each could write its part; leave it out, and save more often"
            )
        if engine.processes.first:
            make_folders(self.folder, self.files)
            open_folder(self, self.folder)
            clean(self.folder, self.files)

    @on(Events.CHECKPOINT_LOADED, phase=Phase.PREPARE)
    def adopt(self, engine: Engine) -> None:
        """Learn from the state that was loaded which of the folder's checkpoints are this run's, and compare the machines."""
        self._ownership = None
        if engine.processes.first:
            self._own(engine)
        self._names, self._superseded = engine.processes.broadcast((self._names, self._superseded))
        if engine.snapshots.origin is not None and (
            changed := differences(engine.snapshots.origin["manifest"], engine.device, engine.processes.size)
        ):
            warnings.warn(
                f"the run goes on from {engine.snapshots.origin['path']!r}, but not as it was "
                f"({', '.join(changed)}): it may not be "
                "bit-exact",
                RuntimeWarning,
                stacklevel=2,
            )

    def _own(self, engine: Engine) -> Ownership:
        if self._ownership is not None and self._ownership.run == engine.snapshots.run_id:
            return self._ownership
        runs, source = set[str](), None
        if engine.snapshots.origin is not None:
            path = Path(engine.snapshots.origin["path"])
            for damaged in map(Path, engine.snapshots.origin["damaged"]):
                if _same(damaged.parent, self.folder) and self.files.exists(damaged):
                    set_aside(damaged, self.files)
            runs = {engine.snapshots.origin["manifest"]["run"], *engine.snapshots.origin["manifest"]["lineage"]}
            source = visible_name(path.name) if _same(path.parent, self.folder) else None
        there = dict(self._manifests())
        runs &= {manifest["run"] for manifest in there.values()}  # so that it does not grow with every resume
        self._ownership = Ownership(self.name, engine.snapshots.run_id, frozenset(runs), source)
        own = {name: manifest for name, manifest in there.items() if self._ownership.owns(name, manifest)}
        for one in self._decided:
            names = [name for name in own if own[name]["iteration"] == one.iteration and _is_numbered(name, one.base)]
            if names:
                self._names[one.iteration] = max(names, key=lambda name: (len(name), name))
        kept = set(self._names.values())
        self._superseded = [
            name
            for name, manifest in own.items()
            if name not in kept and manifest["iteration"] <= engine.state.iteration
        ]
        return self._ownership

    def _manifests(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, path in find(self.folder, self.files):
            try:
                yield name, read_manifest(path, self.files)
            except (ValueError, OSError):
                continue

    @on("every", phase=Phase.CONTROL, rank=DECIDE_CHECKPOINTS)
    def decide(self, engine: Engine) -> None:
        """Decide to write, and which goes for it."""
        entry = self._entry(engine, None)
        self._decided = [*self._others(engine), entry][-self.keep :]
        self._due = entry

    @on("watching", phase=Phase.CONTROL, rank=DECIDE_CHECKPOINTS)
    def decide_by_metric(self, engine: Engine) -> None:
        """Decide to write if the metric's new value is one of the best."""
        assert self.monitor is not None
        value = self.monitor.new_value(engine)
        if value is None:
            return
        others = self._others(engine)
        place = next((i for i, one in enumerate(others) if self.monitor.better(value, one.value)), len(others))
        if place < self.keep and value == value:
            entry = self._entry(engine, value)
            self._decided = [*others[:place], entry, *others[place:]][: self.keep]
            self._due = entry
        else:
            self._decided = others

    @on("requiring", phase=Phase.CONTROL)
    def require(self, engine: Engine) -> None:
        """Refuse a metric that does not exist."""
        if self.monitor is not None:
            self.monitor.require(engine)
        self.filename.require(engine)

    def _others(self, engine: Engine) -> list[Entry]:
        """What is kept from other iterations: a second new value in one iteration takes the place of the first."""
        return [one for one in self._decided if one.iteration != engine.state.iteration]

    def _entry(self, engine: Engine, value: float | None) -> Entry:
        self.filename.require(engine)
        iteration = engine.state.iteration
        steps = engine.updates[0].steps
        base = self.filename.fill(self.name, engine.state.epoch, iteration, steps, engine.state.metrics)
        return Entry(base, value, iteration)

    # ---- writing --------------------------------------------------------------------------------------------------

    @on("polling", phase=Phase.PERSIST, rank=HARVEST)
    def poll(self, engine: Engine) -> None:
        """Tell what the thread has written. If another is to be written, wait for it: there is one at a time."""
        if self._write is not None and (self._due is not None or not engine.processes.broadcast(self._write.going_on)):
            self._harvest(engine)

    @on("saving", phase=Phase.PERSIST)
    def save(self, engine: Engine) -> None:
        """Write what was decided, and only then remove what it supersedes."""
        if self._due is None:
            return
        entry, self._due = self._due, None
        if self._write is not None:  # at an event at which it is not polled
            self._harvest(engine)
        try:
            state = engine.weights() if self.weights_only else engine.snapshots.take(at_once=not self.asynchronous)
            self._sync_written(engine)
            write = self._prepare(engine, entry, state, list(self._decided))
        except BaseException:
            self._decided = list(self._written)
            raise
        self._write = write
        if not engine.processes.first and not write.shards:
            pass  # what rank 0 writes is this one's, too
        elif self.asynchronous:
            write.start()
        else:
            write.run()
        if not self.asynchronous:
            self._harvest(engine)

    @on("waiting", phase=Phase.PREPARE)
    @on("ending", phase=Phase.PERSIST, rank=HARVEST)
    def wait(self, engine: Engine) -> None:
        """Nobody may take a run for ended while its last checkpoint is still being written."""
        if self._write is not None:
            # After an error the others may be in the middle of something else, and cannot be asked.
            self._harvest(engine, alone=engine.state.exception is not None)

    @on("holding", phase=Phase.PERSIST, rank=HOLD)
    def hold(self, engine: Engine) -> None:
        """Hold the state from which the run can go on if an error ends it."""
        self._held = engine.snapshots.take()

    @on("failing", phase=Phase.PERSIST)
    def save_held(self, engine: Engine) -> None:
        """Write the state that was held before the error."""
        held, self._held = self._held, None
        if not engine.processes.first:
            return  # the others cannot be asked any more
        if self._write is not None:
            self._harvest(engine, alone=True)
        if held is not None:  # otherwise no iteration was completed
            try:
                self._sync_written(engine)
            except OSError as problem:  # perhaps the very error; the state is worth having all the same
                warnings.warn(
                    f"{self.name!r}: written after an error, though not all that it tells of could be synced: {problem}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            self._save_besides(engine, held, "exception", alone=True)

    @on("preempting", phase=Phase.PERSIST)
    def save_preempted(self, engine: Engine) -> None:
        """Write the state of this very point; it is not counted in keep, which stays that of a run that was not stopped."""
        if self._write is not None:
            self._harvest(engine)
        state = engine.snapshots.take()
        self._sync_written(engine)
        self._save_besides(engine, state, "preempted")

    def _sync_written(self, engine: Engine) -> None:
        """What the state tells of, such as logs, has to be on the disk when the state is."""
        if self.sync_files and not self.weights_only:
            for handler in engine.handlers.values():
                handler.sync_written()

    def _save_besides(self, engine: Engine, state: Mapping[str, Any], why: str, *, alone: bool = False) -> None:
        """Write a state that is not counted among those that are kept; ``alone`` without telling the other processes."""
        position, first = state["engine"], engine.updates[0].name
        base = self.filename.fill(
            self.name,
            position["epoch"],
            position["iteration"],
            state["updates"][first]["steps"],
            position["metrics"]["values"],
        )
        self._write = self._prepare(engine, Entry(f"{base}-{why}", None, position["iteration"]), state, None)
        if engine.processes.first or self._write.shards:
            self._write.run()
        self._harvest(engine, alone=alone)

    def _prepare(self, engine: Engine, entry: Entry, state: Mapping[str, Any], decided: list[Entry] | None) -> _Write:
        ownership = (
            self._own(engine)
            if engine.processes.first
            else Ownership(self.name, engine.snapshots.run_id, frozenset(), None)
        )
        position = {key: getattr(engine.state, key) for key in ("epoch", "iteration", "epoch_open")}
        steps = {update.name: update.steps for update in engine.updates}
        if not self.weights_only:
            position = {key: state["engine"][key] for key in position}
            steps = {name: update["steps"] for name, update in state["updates"].items()}
        value = entry.value if entry.value is None or math.isfinite(entry.value) else str(entry.value)
        about = {
            "handler": self.name,
            "kind": "weights" if self.weights_only else "state",
            "run": ownership.run,
            "lineage": sorted(ownership.lineage),
            **position,
            "steps": steps,
            "monitor": None if self.monitor is None else self.monitor.metric,
            "value": value,
            "hyperparameters": self._hyperparameters,
            "environment": environment(engine.device, engine.processes.size),
        }
        gone: list[str] = []
        if decided is not None:
            stays = {one.iteration for one in decided} - {entry.iteration}  # a second one of an iteration has its place
            gone = [name for iteration, name in self._names.items() if iteration not in stays] + self._superseded
        taken = frozenset(name for iteration, name in self._names.items() if iteration != entry.iteration)
        if self.weights_only:  # by the paths that they have in a whole state
            parts, shards = split_shards({"modules": state})
            state = parts["modules"]
        else:
            state, shards = split_shards(state)
        if shards and self._shard_files is None:
            self._shard_files = ShardFiles(engine.processes.timeout)
        return _Write(
            self.folder, self.files, entry, state, about, ownership, decided, gone, taken, shards, self._shard_files,
            engine.processes.first, self.sync_files,
        )  # fmt: skip

    def _harvest(self, engine: Engine, *, alone: bool = False) -> None:
        """Take over what was written, once it is; of several processes, what rank 0 has written."""
        write = self._write
        assert write is not None
        write.join()
        self._write = None
        if engine.processes.several and not alone:
            if write.interrupted:
                assert write.error is not None
                raise write.error
            write.take_over(engine.processes.broadcast(write.outcome()))
        if write.name is None:
            self._due = None
            self._decided = list(self._written)
            # Where not even undoing was possible, it is there all the same.
            self._superseded = self._superseded + [name for name in write.tried if name not in self._names.values()]
        elif write.decided is not None:
            self._written, self._superseded = write.decided, write.left
            stays = {one.iteration for one in self._written}
            self._names = {iteration: name for iteration, name in self._names.items() if iteration in stays}
            self._names[write.entry.iteration] = write.name
        if write.error is not None:
            raise write.error
        if write.name is None:
            return  # interrupted before it had begun
        if self._resumed_from is not None:
            self._resumed_from = None  # the run has got further
            if engine.processes.first:
                shutil.rmtree(self._failures_folder, ignore_errors=True)  # what stays is only a count
        engine.snapshots.report_saved()
        for problem in write.problems if engine.processes.first else ():
            warnings.warn(
                f"{self.name!r}: what the checkpoint {write.name!r} supersedes could not be removed: {problem}",
                RuntimeWarning,
                stacklevel=2,
            )

    # ---- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [list(one) for one in self._decided], "monitor": self.monitor and self.monitor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._decided = [Entry(base, value, iteration) for base, value, iteration in state["kept"]]
        self._written = list(self._decided)
        self._names, self._superseded, self._ownership = {}, [], None  # looked up anew
        if self.monitor is not None:
            self.monitor.load_state_dict(state["monitor"])


@dataclass
class _Write:
    """One checkpoint that is written, here or in a thread; it touches nothing of the handler."""

    folder: Path
    files: Files
    entry: Entry
    state: Mapping[str, Any]
    about: Mapping[str, Any]
    ownership: Ownership
    decided: list[Entry] | None  # what is kept with it; None if it is not counted
    gone: list[str]  # what is removed once it is written
    taken: frozenset[str]  # the names of the others
    shards: Mapping[str, Any]  # tensors of which each process writes its part
    shard_files: ShardFiles | None
    first: bool  # whether this process writes the rest
    sync: bool  # whether it waits until the disk has it
    tried: list[str] = field(default_factory=list)  # the names that it was to have
    name: str | None = None  # what it is called on the disk, once it is there
    left: list[str] = field(default_factory=list)  # of those that are to go, what could not be removed
    problems: list[OSError] = field(default_factory=list)
    error: BaseException | None = None
    thread: threading.Thread | None = None

    @property
    def going_on(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    @property
    def interrupted(self) -> bool:
        """By Ctrl-C, say: the others may be anywhere, and learn of it as of any failure of this process."""
        return self.error is not None and not isinstance(self.error, Exception)

    def start(self) -> None:
        self.thread = threading.Thread(target=self.run, name="signalfire checkpoint")
        self.thread.start()

    def join(self) -> None:
        if self.thread is not None:
            self.thread.join()

    def outcome(self) -> tuple[Any, ...]:
        """What other processes have to know of it."""
        problems = [str(problem) for problem in self.problems]
        return self.tried, self.name, self.left, problems, self.error and f"{type(self.error).__name__}: {self.error}"

    def take_over(self, outcome: tuple[Any, ...]) -> None:
        """Be what rank 0 has written; it keeps its own error."""
        self.tried, self.name, self.left, problems, error = outcome
        self.problems = [OSError(problem) for problem in problems]
        if error is not None and self.error is None:
            self.error = RuntimeError(f"rank 0 could not write the checkpoint {self.entry.base!r}: {error}")

    def run(self) -> None:
        try:
            if not self.shards:
                self._run()
                return
            assert self.shard_files is not None
            if self.first:
                self._run()
                if not self.interrupted:
                    self.shard_files.done(None)
            else:
                self.shard_files.assist(self.shards)
        except BaseException as error:
            self.error = self.error or error

    def _run(self) -> None:
        try:
            self.left = self.gone
            self.name = self._commit()
            gone = [name for name in self.gone if name != self.name]
            self.left, self.problems = prune(self.folder, gone, self.ownership, self.files, sync=self.sync)
        except BaseException as error:
            self.error = error

    def _commit(self) -> str:
        content = serialize(self.state)
        for name in _numbered(self.entry.base):
            if name in self.taken or (
                self.files.exists(self.folder / name) and not self._may_replace(self.folder / name)
            ):
                continue
            self.tried.append(name)
            with suppress(Taken):  # another process was quicker
                commit(
                    self.folder, name, content, self.about, files=self.files, may_replace=self._may_replace,
                    sync=self.sync, more=self._write_shards if self.shards else None,
                )  # fmt: skip
                return name
        raise AssertionError("the numbers do not end")

    def _write_shards(self, folder: Path) -> dict[str, dict[str, Any]]:
        assert self.shard_files is not None
        return self.shard_files.write(folder, self.shards)

    def _may_replace(self, path: Path) -> bool:
        return self.ownership.may_replace(path, self.entry.iteration, self.files)


class Template:
    """The names of checkpoints.

    Args:
        text: what ``filename=`` was given.
        name: the handler's name.

    Raises:
        TypeError, ValueError: for what could never be a name.
    """

    counters = ("name", "epoch", "iteration", "step")

    def __init__(self, text: str, name: str) -> None:
        self.where = f"Checkpoint(filename={text!r})"
        if not isinstance(text, str):
            raise TypeError(f"{self.where}: it has to be a str, such as {DEFAULT_FILENAME!r}")
        try:
            self.parts = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from None
        fields = [(key, form, conversion) for _, key, form, conversion in self.parts if key is not None]
        for key, form, conversion in fields:
            if not key or key.isdigit() or conversion or "{" in (form or ""):
                raise ValueError(
                    f"{self.where}: {{{key}}} has to be one of {', '.join(self.counters)}, or the name of a metric, with a "
                    "format such as {accuracy:.3f} at most"
                )
        self.metrics = sorted({key for key, _, _ in fields} - set(self.counters))
        self.fill(name, 1, 1, 1, dict.fromkeys(self.metrics, 0.0))  # what is wrong with any name shows at once

    def require(self, engine: Engine) -> None:
        """Refuse a metric that nobody announced and that does not exist."""
        metrics = engine.state.metrics
        for key in self.metrics:
            if key not in metrics and key not in metrics.owners:
                there = sorted({*self.counters, *metrics, *metrics.owners})
                close = difflib.get_close_matches(key, there, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise KeyError(f"{self.where}: there is no {key!r}; there are: {', '.join(there)}{hint}")

    def fill(self, name: str, epoch: int, iteration: int, step: int, metrics: Mapping[str, Any]) -> str:
        """The name at a position of the run."""
        values: dict[str, Any] = {"name": name, "epoch": epoch, "iteration": iteration, "step": step}
        filled = ""
        for literal, key, form, _ in self.parts:
            filled += literal
            if key is None:
                continue
            value = values[key] if key in values else as_number(metrics.get(key, math.nan))
            if value is None:
                raise ValueError(f"{self.where}: the metric {key!r} is a {type(metrics[key]).__name__}, not one number")
            try:
                filled += format(value, form or "")
            except ValueError as error:
                raise ValueError(f"{self.where}: {{{key}}}: {error}") from None
        if (
            not re.fullmatch(r"[A-Za-z0-9_+=@,-][A-Za-z0-9_.+=@,-]*", filled)
            or filled.endswith(".damaged")
            or len(filled) > LONGEST_NAME
        ):
            raise ValueError(
                f"{self.where}: it gives {filled!r}; a name consists of at most {LONGEST_NAME} letters, digits and "
                "'_', '-', '.', '+', '=', '@', ',', and does not begin with '.' or end with '.damaged'"
            )
        return filled


def _numbered(base: str) -> Iterator[str]:
    return (base if number == 1 else f"{base}-{number}" for number in count(1))


def _is_numbered(name: str, base: str) -> bool:
    return name == base or (name.startswith(f"{base}-") and name[len(base) + 1 :].isdigit())


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
