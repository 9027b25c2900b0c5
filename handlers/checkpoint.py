"""Checkpoints of the training state: saves the last or the best by a metric, and resumes from them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from signalfire import AnyEvent, Engine, Events, Handler, Interval, Phase, checkpoints, on
from signalfire.authoring import Monitor, check_bool, check_every, check_int, comes_up, plain_mapping
from signalfire.authoring.devices import DeviceFeature
from signalfire.authoring.interval import saving_events, unfiltered
from signalfire.distributed import lost_another
from signalfire.resuming.frozen import FrozenBase, without

from ._common import checkpoint_findings
from ._common.folders import check_folder, check_shared, open_folder, read_together, shown_path
from ._common.options import events_if
from ._common.ranks import CHECK_METRIC, COLLECT, DECIDE_CHECKPOINTS, HOLD, RESUME

__all__ = ["Checkpoint"]

_DONE = Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED


class Checkpoint(Handler):
    """Saves checkpoints of the complete training state, keeps the newest or the best ones, and resumes from them.

    A checkpoint is a folder ``<name>-epoch0003-iter00000120/``. ``torch.load`` reads its ``state.pt`` (the weights are in
    ``["modules"]["model"]``); ``manifest.json`` contains the size and sha256 of ``state.pt``, the metric, the hyperparameters
    and the environment. A checkpoint contains everything that a resume needs (`Engine.state_dict`). It is written under a
    hidden name, synced, and renamed before an old checkpoint is removed, so a crash at any moment leaves the old ones intact.
    `load` verifies a checkpoint; given a folder, it opens the newest intact one. To keep both the newest and the best
    checkpoint, attach two handlers with different names, such as ``Checkpoint(folder, resume=True, name="last")`` and
    ``Checkpoint(folder, monitor="val_accuracy", name="best")``.

    In distributed runs, rank 0 writes the checkpoint, including the states that differ between ranks, while the other ranks
    wait. All ranks need access to the folder, even on several machines. A write error is raised on all ranks. Each rank writes
    its part of sharded tensors next to ``state.pt`` with ``torch.distributed.checkpoint``; any number of ranks can load the
    parts.

    A run never replaces or removes a checkpoint of a different run; if its name is taken, a checkpoint gets the suffix ``-2``.
    A resumed run owns the checkpoints of the run that it continues, but never removes the one from which it resumed, except
    with ``keep=1`` and a fixed filename, such as "last".

    With ``monitor``, each new value is considered once. A checkpoint with the value NaN is never kept; if values are equal,
    the earlier checkpoint is kept.

    Args:
        folder: Folder of the checkpoints; created if necessary.
        monitor: Name of the metric that selects the best checkpoints; without it, the newest ones are kept.
        mode: Whether smaller ("min") or larger ("max") values are better; by default, the direction that the metric declares.
        keep: Number of checkpoints to keep; by default, 1 with ``monitor`` and 2 without, so that one remains as a fallback.
        every: Interval between saves without ``monitor``, such as "15min", counted from the start of each run; by default
            "1ep". A save that is due during another event, such as EVALUATION_COMPLETED, is written once that event is
            complete.
        filename: Template for the names with {name}, {epoch}, {iteration}, {step} (optimizer steps of the first update) and
            metric names, such as "best-{epoch:03d}-{accuracy:.3f}". A metric that has no value yet appears as nan.
        weights_only: Save only the result of `Engine.weights`, which includes averages, for `Engine.load_weights`; no run can
            resume from it.
        hyperparameters: Configuration to store as plain values (`plain_mapping`); `hyperparameters` returns them.
        on_exception: When an error or Ctrl-C ends the run, save ``<name>-epoch....-exception``: the state after the last
            completed iteration or epoch, from which a run resumes bit-exactly. This copies the state in every iteration. The
            checkpoint does not count toward ``keep``.
        resume: When a run starts, resume from the newest intact checkpoint of this handler in the folder, for example after
            ``torchrun --max-restarts``. A line on stderr names the checkpoint, or reports that none exists. A checkpoint is
            skipped if three runs that resumed from it failed before the next save. Ignored if a state has already been loaded.
        sync_files: Whether a save is complete only once it is on disk, which takes five syncs of about 1 ms each. If False, a
            power failure (but not a killed process) may damage the newest checkpoint; use ``keep=2`` or more.
        asynchronous: Write in a thread while training continues. Training waits only for the copy of the state, whose memory
            is kept until the run ends, and for a previous write that is still in progress. A save is reported once it is on
            disk. An error in the thread is raised at the next completed iteration, or at the end of the run, which waits for
            the thread.
        trained_only: Leave out parameters that are frozen when the first run starts and have not changed since, such as the
            base model of adapters (LoRA), and report how many. The manifest contains their sha256, and `load` returns a state
            that loads only into a model with the same frozen parameters. These are hashed at about 1 GB/s at the start, and
            checked at each save. To leave out their averages as well, pass ``trained_only=True`` to `EMA`.

    Attributes:
        retention: Bookkeeping of the kept checkpoints, both those planned and those on disk.
        kept: Names and values of the kept checkpoints on disk, in order: with ``monitor``, the best first; otherwise, the
            oldest first.

    Example:
        >>> import os, tempfile
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        ...     _ = engine.attach(Checkpoint(folder, keep=2))
        ...     _ = engine.run([(torch.ones(4, 2), torch.ones(4, 1))] * 5, max_epochs=3)
        ...     print(sorted(os.listdir(folder)))
        ['checkpoint-epoch0002-iter00000010', 'checkpoint-epoch0003-iter00000015']
    """

    trains = True
    writes = True
    device_features = frozenset({DeviceFeature.GENERATOR})
    interval_matters = True

    files: checkpoints.Files = checkpoints.Files()  # tests record them or make them fail
    other_names = {
        "save_top_k": "keep=", "n_saved": "keep=", "save_total_limit": "keep=", "dirpath": "the first argument, the folder",
        "save_last": 'a second Checkpoint(folder, name="last")', "save_best_only": "monitor=", "score_function": "monitor=",
        "every_n_epochs": 'every="2ep"', "every_n_train_steps": 'every="100st"', "save_weights_only": "weights_only=",
    }  # fmt: skip

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        monitor: str | None = None,
        mode: Literal["min", "max"] | None = None,
        keep: int | None = None,
        every: str | Interval | AnyEvent | None = None,
        filename: str = checkpoints.DEFAULT_FILENAME,
        weights_only: bool = False,
        hyperparameters: Any = None,
        on_exception: bool = False,
        resume: bool = False,
        sync_files: bool = True,
        asynchronous: bool = False,
        trained_only: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        checkpoint_findings.check_selection(self, monitor, mode, every)
        self.folder = check_folder(self, folder)
        self.monitor = None if monitor is None else Monitor("Checkpoint", monitor, mode)
        keep = check_int(self, "keep", (2 if monitor is None else 1) if keep is None else keep)
        self.every = check_every(self, "1ep" if every is None else every) if monitor is None else None
        self.filename = checkpoints.NameTemplate(filename, self.name)
        self.weights_only = check_bool(self, "weights_only", weights_only)
        self.sync_files = check_bool(self, "sync_files", sync_files)
        self.asynchronous = check_bool(self, "asynchronous", asynchronous)
        self.trained_only = check_bool(self, "trained_only", trained_only)
        for option, value in (("on_exception", on_exception), ("resume", resume)):
            if check_bool(self, option, value) and weights_only:
                raise ValueError(
                    f"Checkpoint({option}=True, weights_only=True): a run cannot resume from weights alone; omit one "
                    "of the two"
                )
        given = None if hyperparameters is None else plain_mapping("Checkpoint(hyperparameters", hyperparameters)
        self.retention = checkpoints.Retention(keep)
        self._saver = checkpoints.Saver(
            self.folder, self.retention, handler=self.name, weights_only=self.weights_only, monitor=monitor,
            hyperparameters=checkpoints.check_json("Checkpoint(hyperparameters)", given), sync=self.sync_files,
        )  # fmt: skip
        self._failures = checkpoints.ResumeFailures(self.folder, self.name)
        self._held: dict[str, Any] | None = None  # the state to save if an error ends the run
        self._base: FrozenBase | None = None  # of the first run of this handler
        self._began, self._may_save = 0, True  # the iteration after which the run began, and whether a save may be due
        self._choose_events()
        error = Events.EXCEPTION_RAISED
        self.hold_event, self.exception_event = events_if(on_exception, _DONE, error | Events.INTERRUPTED)
        self.resume_event, self.failure_event = events_if(resume, Events.MODEL_SETUP, error)

    def _choose_events(self) -> None:
        selects, due = self.monitor is not None, unfiltered(self.every or "1ep")
        self.select_event = _DONE if selects else None
        checks = events_if(selects or bool(self.filename.metrics), Events.STARTED, Events.EPOCH_COMPLETED)
        self.monitor_event, self.check_event = checks
        self.save_event = self.select_event or saving_events(due)
        self.between_event = None if selects or self.save_event == due else due
        waits = events_if(self.asynchronous, _DONE, Events.COMPLETED, Events.ENDED)
        self.collect_event, self.wait_event, self.end_event = waits
        self.base_event = Events.STARTED | Events.CHECKPOINT_LOADED if self.trained_only else None
        self.preemption_event = None if self.weights_only else Events.PREEMPTED

    @property
    def keep(self) -> int:
        """Number of checkpoints to keep."""
        return self.retention.keep

    @property
    def kept(self) -> list[tuple[str, float | None]]:
        return [(name, entry.value) for name, entry in self.retention.kept]

    @property
    def best(self) -> Path | None:
        """The checkpoint with the best value of the metric; None before the first, or without ``monitor``."""
        return self.folder / self.kept[0][0] if self.kept and self.monitor is not None else None

    @property
    def last(self) -> Path | None:
        """The newest kept checkpoint; None before the first."""
        kept = [(entry.iteration, name) for name, entry in self.retention.kept]
        return self.folder / max(kept)[1] if kept else None

    @staticmethod
    def load(path: str | os.PathLike[str], *, name: str | None = None) -> dict[str, Any]:
        """Read and verify a checkpoint for ``engine.load_state_dict``. Its content cannot execute code.

        Args:
            path: A checkpoint, its ``state.pt``, or a folder of checkpoints. From a folder, the newest intact one is loaded,
                with a warning that names damaged ones. A complete state is preferred to weights only.
            name: Name of the handler whose checkpoints are considered, in a folder shared by several handlers.

        Returns:
            The state. Its entry "origin" identifies the checkpoint, so the resumed run knows which checkpoints it owns.

        Raises:
            FileNotFoundError: if there is no checkpoint.
            ValueError: if the checkpoint is damaged, truncated or swapped (the error names the file), or if every checkpoint in
                a folder is.
        """
        return checkpoints.load(path, name=name, where=f"Checkpoint.load({str(path)!r})", files=Checkpoint.files)

    @staticmethod
    def hyperparameters(path: str | os.PathLike[str], /, **overrides: Any) -> dict[str, Any]:
        """Read the hyperparameters stored with a checkpoint, with optional overrides.

        Args:
            path: As in `load`.
            overrides: Values that replace stored ones, by name.

        Raises:
            ValueError: for an override whose name was not stored (the error lists the stored names), or if none were stored.
        """
        where = f"Checkpoint.hyperparameters({str(path)!r})"
        return checkpoints.load_hyperparameters(path, overrides, where=where, files=Checkpoint.files)

    # ---- starting and resuming ------------------------------------------------------------------------------------

    @on("resume_event", phase=Phase.PREPARE, rank=RESUME, reads=["files", "processes"], writes=["state"])
    def resume(self, engine: Engine) -> None:
        """Load the newest intact checkpoint; in distributed runs, the one that rank 0 finds."""
        if engine.state.epoch > 0 or engine.snapshots.has_loaded_state:
            return
        where = f"Checkpoint({str(shown_path(self.folder))!r}, resume=True)"
        newest = partial(self._failures.newest, where=where, files=self.files)
        found = read_together(self, self.folder, engine.processes, newest, partial(self.load, name=self.name))
        if found is None:
            engine.findings.look(checkpoint_findings.say_nothing_to_resume, engine, self.name, self.folder, self.files)
            return
        name, state = found
        engine.load_state_dict(state)
        self._failures.resumed(name)
        at, path = "epoch {epoch}, iteration {iteration}".format_map(state["engine"]), shown_path(self.folder / name)
        engine.processes.print(f"{self.name}: resuming from {str(path)!r}, {at}", file=sys.stderr)

    @on("failure_event", phase=Phase.PERSIST, reads=["error"], writes=["files"])
    def count_failure(self, engine: Engine) -> None:
        """Record an error of this rank that ended the resumed run before its next save."""
        if (error := engine.state.exception) is not None and not lost_another(error):
            self._failures.add(engine.snapshots.run_id)

    @on(Events.STARTED, phase=Phase.PREPARE, writes=["files"],
        reads=["modules", "processes", "bounds", "step", "window"])  # fmt: skip
    def open(self, engine: Engine) -> None:
        """Create the folder, so missing write permission is detected before the first batch."""
        self._saver.abandon()  # left by a run that ended with an error
        self._held = None
        if engine.processes.distributed:
            self.retention.share(engine.processes)
        if self.retention.selected is None or not engine.unfinished.is_due:
            self.retention.restart()
        if self.exception_event is not None:
            checkpoint_findings.refuse_shards(engine, self.name)
        if engine.processes.is_rank_zero:
            checkpoints.make_folders(self.folder, self.files)
            open_folder(self, self.folder)
            checkpoints.clean(self.folder, self.files)
            resumes = self.resume_event is not None
            checkpoint_findings.report_folder(engine, self.name, self.folder, self.files, resumes=resumes)
        if engine.processes.distributed:
            check_shared(self, self.folder, engine.processes)
        self._began = engine.state.iteration
        # `Engine.check` reports an interval that is known not to come up; here is what only the end of the run shows.
        self._may_save = self.every is None or comes_up(engine, self.every) is not False

    @on("base_event", phase=Phase.PERSIST, reads=["modules", "trainable", "weights"], writes=[])
    def record_base(self, engine: Engine) -> None:
        """Record which parameters are frozen from the start, and report how many; later, drop those whose values have changed."""
        before = None if self._base is None else self._base.count
        if self._base is None:
            self._base = FrozenBase()
            self._base.record(engine.modules)
        else:
            self._base.recheck(engine.modules)
        if self._base.count != before:
            checkpoint_findings.report_base(engine, self.name, self._base)

    @on(Events.CHECKPOINT_LOADED, phase=Phase.PREPARE, reads=["device", "step", "files", "processes"], writes=[])
    def find_owned_versions(self, engine: Engine) -> None:
        """Find the checkpoints that the resumed run owns, and warn if the environment has changed since they were written."""
        self._saver.forget()
        if engine.processes.is_rank_zero:
            self._saver.ownership(self._run(engine))
            checkpoint_findings.report_hyperparameters(engine, self.name, self._saver.hyperparameters)
        self.retention.share(engine.processes)
        checkpoints.warn_if_environment_changed(engine.snapshots.origin, engine.device, engine.group.parts)

    @on(Events.CHECKPOINT_LOADED, phase=Phase.PERSIST, reads=["state", "files"], writes=["files"])
    def write_missing(self, engine: Engine) -> None:
        """Write checkpoints that the loaded state counts as kept if its run ended before; abandoned ones are never resumed."""
        entry, origin = self.retention.missing(engine.state.iteration), engine.snapshots.origin
        if self.monitor is None and self.retention.has_abandoned:
            self._write(engine, self.retention.selecting(self._entry(engine, None)), asynchronous=False)
        elif self.retention.has_abandoned:
            self._saver.remove_held(self._run(engine), abandoned=True)
        elif entry is not None and origin is not None and origin["manifest"]["handler"] != self.name:
            self._write(engine, entry, asynchronous=False)

    def _run(self, engine: Engine) -> checkpoints.SavingRun:
        position = {key: getattr(engine.state, key) for key in ("epoch", "iteration", "epoch_open")}
        position["steps"] = {update.name: update.steps for update in engine.updates}
        return checkpoints.SavingRun(
            engine.snapshots.run_id, engine.snapshots.origin, position, engine.device, engine.processes, self.files,
            engine.past.oldest, engine.past.reached, engine.group.parts,
        )  # fmt: skip

    # ---- selecting ------------------------------------------------------------------------------------------------

    @on("monitor_event", phase=Phase.CONTROL, reads=["metrics"], writes=[])
    def check_metric(self, engine: Engine) -> None:
        """Find the metric's direction; raise an error for a name, even in the filename, that nobody announced or writes."""
        if self.monitor is not None:
            self.monitor.start(engine, self.name)
        checkpoint_findings.check_filename(engine, self.filename)

    @on("every", phase=Phase.CONTROL, rank=DECIDE_CHECKPOINTS, reads=["step", "metrics"], writes=[])
    def select_last(self, engine: Engine) -> None:
        """Select the current state to replace the oldest checkpoint."""
        self.retention.select_last(self._entry(engine, None))

    @on("select_event", phase=Phase.CONTROL, rank=DECIDE_CHECKPOINTS, reads=["step", "metrics"], writes=[])
    def select_best(self, engine: Engine) -> None:
        """Select the current state if the metric has a new value that is among the best."""
        assert self.monitor is not None
        if (value := self.monitor.new_value(engine)) is None:
            return
        self.monitor.report_nan(engine, value, self.name, "so this state is not kept")
        if (place := self.retention.place(value, engine.state.iteration, self.monitor.better)) is None:
            self.retention.drop(engine.state.iteration)
        else:
            self.retention.select_best(self._entry(engine, value), place)

    @on("check_event", phase=Phase.CONTROL, rank=CHECK_METRIC, reads=["metrics"], writes=[])
    def check_metric_exists(self, engine: Engine) -> None:
        """Raise a KeyError if the monitored metric, or one in the filename, does not exist."""
        if self.monitor is not None:
            self.monitor.require(engine)
        self.filename.require(engine.state.metrics)

    def _entry(self, engine: Engine, value: float | None) -> checkpoints.Entry:
        state = engine.state
        self.filename.require(state.metrics)
        base = self.filename.fill(self.name, state.epoch, state.iteration, engine.updates[0].steps, state.metrics)
        return checkpoints.Entry(base, value, state.iteration)

    # ---- writing --------------------------------------------------------------------------------------------------

    @on("collect_event", phase=Phase.PERSIST, rank=COLLECT, reads=["processes"], writes=[], repeatable=True)
    def collect_finished(self, engine: Engine) -> None:
        """Report a finished asynchronous write; wait for it first if a new checkpoint is about to be written."""
        if (write := self._saver.pending) is None:
            return
        if self.retention.selected is not None or not engine.processes.broadcast(write.in_progress):
            with engine.snapshots.saving():
                self._collect_write(engine)

    @on("save_event", phase=Phase.PERSIST, reads=["state"], writes=["files"], repeatable=True)
    def save(self, engine: Engine) -> None:
        """Write the selected state, then remove the checkpoints it supersedes."""
        cut = self.between_event is not None and engine.state.exception is not None  # the event at which it was due
        if cut or (entry := self.retention.take_selected()) is None:
            return
        if entry.iteration != engine.state.iteration:  # it was due before the batch of this iteration was read
            entry = self.retention.move(entry, self._entry(engine, entry.value))
        with engine.snapshots.saving():
            if self._saver.pending is not None:  # at an event without `collect_finished`
                self._collect_write(engine)
            with self.retention.selected_until_written(entry):
                self._write(engine, entry, asynchronous=self.asynchronous)

    @on("between_event", phase=Phase.PERSIST, reads=["state"], writes=["files"])
    def save_between_runs(self, engine: Engine) -> None:
        """Write the selected state at once if no run is in progress."""
        if not engine.running:
            self.save(engine)

    def _write(self, engine: Engine, entry: checkpoints.Entry, *, asynchronous: bool) -> None:
        """Write a version that counts towards ``keep``; it may refer to versions of earlier events, which are written first."""
        try:
            engine.snapshots.wait_for_earlier_writes()
            left_out = self._left_out(engine)
            if self.weights_only or asynchronous:
                copy = (engine.snapshots.lend_weights if self.weights_only else engine.snapshots.lend)(left_out)
                state, release = copy.state, copy.release
            else:
                state, release = without(engine.snapshots.take(at_once=True), left_out), None
            self._sync_written(engine)
            write = self._prepare(engine, entry, state, left_out, counted=True, release=release)
        except BaseException:
            self.retention.failed()
            raise
        self._saver.start(write, asynchronous=asynchronous)
        if asynchronous:
            engine.snapshots.add_write(write.join)
        else:
            self._collect_write(engine)

    def _left_out(self, engine: Engine) -> frozenset[str]:
        """The names of the parameters that are not written."""
        return frozenset() if self._base is None else self._base.names(engine.modules, engine.processes)

    def _prepare(self, engine: Engine, entry: checkpoints.Entry, state: Mapping[str, Any], left_out: frozenset[str],
                 **options: Any) -> checkpoints.Write:  # fmt: skip
        base = self._base.entry(left_out) if self._base is not None and left_out else None
        return self._saver.prepare(self._run(engine), entry, state, base=base, **options)

    @on("wait_event", phase=Phase.PREPARE, reads=["processes", "error"], writes=["files"])
    @on("end_event", phase=Phase.PERSIST, rank=COLLECT, reads=["processes", "error"], writes=["files"])
    def wait_for_write(self, engine: Engine) -> None:
        """Wait for the last write, so the run ends only once its last checkpoint is on disk."""
        if self._saver.pending is not None:
            # After an error the other ranks may be at any point, so nothing collective is possible.
            self._collect_write(engine, rank_local=engine.state.exception is not None)

    @on(Events.ENDED, phase=Phase.FINALIZE, reads=["error", "step", "device"], writes=["files"])
    def check_saved(self, engine: Engine) -> None:
        """Report a run that saved nothing; remove checkpoints that were kept only in case the run went back."""
        if engine.state.exception is None and not engine.boundary.preempted:
            self._saver.remove_held(self._run(engine))
        nothing = not self.retention.planned and self._saver.pending is None and self._saver.written == 0
        ran = engine.state.exception is None and engine.state.completed > self._began
        if nothing and ran and self._may_save and engine.processes.is_rank_zero:
            checkpoint_findings.report_nothing_saved(engine, self.name, self.every, self.monitor)

    @on("hold_event", phase=Phase.PERSIST, rank=HOLD, reads=["state"], writes=[])
    def hold_state(self, engine: Engine) -> None:
        """Hold the current state, to be saved if an error ends the run."""
        self._held = engine.snapshots.take()

    @on("exception_event", phase=Phase.PERSIST, reads=["device", "step"], writes=["files"])
    def save_held_state(self, engine: Engine) -> None:
        """Write the state that was held before the error."""
        held, self._held = self._held, None
        if not engine.processes.is_rank_zero:
            return  # nothing collective is possible after an error
        if self._saver.pending is not None:
            self._collect_write(engine, rank_local=True)
        if held is None:
            return  # no iteration was completed
        try:
            self._sync_written(engine)
        except OSError as problem:  # perhaps the error that ended the run; the state is saved nevertheless
            checkpoint_findings.warn_unsynced(self.name, problem)
        self._save_uncounted(engine, held, "exception", rank_local=True)

    @on("preemption_event", phase=Phase.PERSIST, reads=["state"], writes=["files"])
    def save_preempted(self, engine: Engine) -> None:
        """Write the current state; it does not count towards ``keep``, so a preemption does not change the kept checkpoints."""
        if self._saver.pending is not None:
            self._collect_write(engine)
        state = engine.snapshots.take()
        self._sync_written(engine)
        self._save_uncounted(engine, state, "preempted")

    def _sync_written(self, engine: Engine) -> None:
        """Sync the files that the state refers to, such as logs: they must be on disk before the state."""
        if self.sync_files and not self.weights_only:
            engine.handlers.sync_written()

    def _save_uncounted(self, engine: Engine, state: Mapping[str, Any], why: str, *, rank_local: bool = False) -> None:
        """Write a state that does not count towards ``keep``; with ``rank_local``, without communication between ranks."""
        at, steps = state["engine"], state["updates"][engine.updates[0].name]["steps"]
        base = self.filename.fill(self.name, at["epoch"], at["iteration"], steps, at["metrics"]["values"])
        entry = checkpoints.Entry(f"{base}-{why}", None, at["iteration"])
        left_out = self._left_out(engine)
        self._saver.start(self._prepare(engine, entry, without(state, left_out), left_out, counted=False))
        self._collect_write(engine, rank_local=rank_local)

    def _collect_write(self, engine: Engine, *, rank_local: bool = False) -> None:
        """Wait for the pending write and report it; with ``rank_local``, without communication between ranks."""
        write = self._saver.collect(engine.processes, rank_local=rank_local)
        if write.name is None:
            return  # interrupted before it started
        self._failures.saved(clear=engine.processes.is_rank_zero)
        engine.snapshots.report_saved()
        if engine.processes.is_rank_zero:
            write.warn_about_leftovers()

    # ---- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        kept = [list(one) for one in self.retention.planned]
        return {"kept": kept, "monitor": self.monitor and self.monitor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.retention.load(checkpoints.Entry(base, value, iteration) for base, value, iteration in state["kept"])
        self._saver.forget()
        if self.monitor is not None:
            self.monitor.load_state_dict(state["monitor"])
