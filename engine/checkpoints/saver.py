"""Writes the versions of one handler, one at a time, and tracks what is on disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..distributed import Processes, ShardFiles, split_shards
from ..resuming.keys import BASE
from .files import Files
from .manifest import environment
from .ownership import Ownership, find_owned_versions
from .retention import Entry, Retention
from .store import prune
from .writer import Write

__all__ = ["Saver", "SavingRun"]


@dataclass(frozen=True)
class SavingRun:
    """The run that saves.

    Attributes:
        id: Id of the run.
        origin: Entry "origin" of the state that the run resumed from; None if it did not resume.
        position: Current position: "epoch", "iteration", "epoch_open" and the "steps" of each update.
        device: Device of the model.
        processes: Ranks of the run.
        files: File-system operations.
        oldest: Earliest iteration to which the run may go back; None if it cannot.
        reached: Iteration from which it went back; None if it did not.
        parts: Over how many ranks, or shards, each step is split.
    """

    id: str
    origin: Mapping[str, Any] | None
    position: Mapping[str, Any]
    device: torch.device
    processes: Processes
    files: Files
    oldest: int | None = None
    reached: int | None = None
    parts: int = 1


@dataclass(eq=False)
class Saver:
    """Writes versions one at a time: `start` begins a write, which stays `pending` until `collect` records its outcome.

    Only `collect` and `ownership` update the disk state in `retention`.

    Args:
        folder: Folder of the versions.
        retention: Bookkeeping of the kept versions.
        handler: Name of the handler.
        weights_only: Whether only weights are saved.
        monitor: Name of the monitored metric.
        hyperparameters: Values to store with each version.
        sync: Whether to wait until the data is on disk.

    Attributes:
        pending: Write that was started and not yet collected.
        written: Number of versions that were written.
    """

    folder: Path
    retention: Retention
    _: KW_ONLY
    handler: str
    weights_only: bool
    monitor: str | None
    hyperparameters: Mapping[str, Any] | None
    sync: bool
    pending: Write | None = field(default=None, init=False)
    written: int = field(default=0, init=False)
    _ownership: Ownership | None = field(default=None, init=False)
    _shard_files: ShardFiles | None = field(default=None, init=False)
    _holds: bool = field(default=False, init=False)  # whether the run may go back to before versions were superseded

    def abandon(self) -> None:
        """Discard a pending write of a run that ended with an error."""
        self.pending = None

    def forget(self) -> None:
        """Discard the ownership, because another state was loaded; a write that is under way is finished, but does not count.

        Raises:
            BaseException: the error of that write.
        """
        self._ownership = None
        if (write := self.pending) is not None:
            self.pending = None
            write.end()
            if write.error is not None:
                raise write.error

    def ownership(self, run: SavingRun) -> Ownership:
        """The versions in the folder that a run owns, looked up once per run; for rank 0 only."""
        if self._ownership is None or self._ownership.run != run.id:
            self._ownership, manifests = find_owned_versions(
                self.folder, handler=self.handler, run=run.id, origin=run.origin, files=run.files
            )
            self.retention.look_up(manifests, run.position["iteration"], oldest=run.oldest, reached=run.reached)
        return self._ownership

    def prepare(
        self,
        run: SavingRun,
        entry: Entry,
        state: Mapping[str, Any],
        *,
        counted: bool,
        base: Mapping[str, Any] | None = None,
        release: Callable[[], None] | None = None,
    ) -> Write:
        """Prepare the write of a state, without starting it.

        Args:
            run: The run that saves.
            entry: Entry to write.
            state: Complete state, or the current weights.
            counted: Whether the entry is part of the retention's plan.
            base: Manifest entry of the frozen parameters that the state leaves out; None if it is complete.
            release: Called once the state is not read any more.
        """
        is_rank_zero = run.processes.is_rank_zero
        self._holds = run.oldest is not None
        ownership = self.ownership(run) if is_rank_zero else Ownership(self.handler, run.id)
        about = {
            "handler": self.handler,
            "kind": "weights" if self.weights_only else "state",
            "monitor": self.monitor,
            "hyperparameters": self.hyperparameters,
            **(run.position if self.weights_only else _position(state)),
            "run": ownership.run,
            "lineage": sorted(ownership.lineage),
            "value": entry.value if entry.value is None or math.isfinite(entry.value) else str(entry.value),
            "environment": environment(run.device, run.parts),
        } | ({} if base is None else {BASE: base})
        if self.weights_only:  # shards are identified by their path in a complete state
            parts, shards = split_shards({"modules": state})
            state = parts["modules"]
        else:
            state, shards = split_shards(state)
        if shards and self._shard_files is None:
            self._shard_files = ShardFiles(run.processes.timeout)
        return Write(
            self.folder,
            run.files,
            entry,
            state,
            about,
            ownership,
            planned=list(self.retention.planned) if counted else None,
            superseded=self.retention.superseded_by(entry, run.oldest) if counted else [],
            avoid=self.retention.other_names(entry) if counted else frozenset(self.retention.names.values()),
            shards=shards,
            shard_files=self._shard_files,
            is_rank_zero=is_rank_zero,
            sync=self.sync,
            release=release,
        )

    def remove_held(self, run: SavingRun, *, abandoned: bool = False) -> None:
        """Remove the superseded versions that were kept in case the run went back; or only those of the way that it has left."""
        stays = [one for one in self.retention.held if abandoned and one[0] > 0]
        names = [name for since, name in self.retention.held if (since, name) not in stays]
        self.retention.held = stays
        if names and run.processes.is_rank_zero:
            left, _ = prune(self.folder, names, self.ownership(run).may_remove, run.files, sync=self.sync)
            self.retention.superseded += left

    def start(self, write: Write, *, asynchronous: bool = False) -> None:
        """Run a write, in a thread if ``asynchronous``; does nothing on a rank that has nothing to write."""
        self.pending = write
        if not write.takes_part:
            return
        if asynchronous:
            write.start()
        else:
            write.run()

    def collect(self, processes: Processes, *, rank_local: bool = False) -> Write:
        """Wait for the pending write, and record its outcome.

        Args:
            processes: Ranks that all receive rank 0's outcome.
            rank_local: Whether to skip communication with the other ranks, as necessary after an error.

        Raises:
            BaseException: the error of the write.
        """
        write = self.pending
        assert write is not None
        write.end()
        self.pending = None
        if processes.distributed and not rank_local:
            write.share(processes)
        if write.name is None:
            self.retention.failed(write.tried)
        elif write.planned is not None:
            removed = write.superseded if self._holds else None
            self.retention.saved(write.entry, write.name, write.planned, write.left, removed)
        if write.error is not None:
            raise write.error
        self.written += 1
        return write


def _position(state: Mapping[str, Any]) -> dict[str, Any]:
    """The position at which a complete state was taken."""
    position = {key: state["engine"][key] for key in ("epoch", "iteration", "epoch_open")}
    return position | {"steps": {name: update["steps"] for name, update in state["updates"].items()}}
