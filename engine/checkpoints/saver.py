"""Writing the versions of one handler, one at a time, and keeping track of what is on the disk."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..distributed import Processes, ShardFiles, split_shards
from .files import Files
from .manifest import environment
from .ownership import Ownership, adopt_versions
from .retention import Entry, Retention
from .writer import Write

__all__ = ["Saver", "SavingRun"]


@dataclass(frozen=True)
class SavingRun:
    """The run that saves.

    Attributes:
        id: the run's id.
        origin: the entry "origin" of the state that it was resumed from; None if it was not.
        position: where it is now: "epoch", "iteration", "epoch_open" and the "steps" of each update.
        device: on which it computes.
        processes: that train together.
        files: the file-system operations to use.
    """

    id: str
    origin: Mapping[str, Any] | None
    position: Mapping[str, Any]
    device: torch.device
    processes: Processes
    files: Files


class Saver:
    """Writes versions one at a time: `start` begins a write, which stays `pending` until `collect` takes over its outcome.

    Only `collect` and `adopt` change what `retention` knows of the disk. All versions have the same constants in their manifest.

    Args:
        folder: of the versions.
        retention: which versions are kept.
        handler: the handler's name.
        weights_only: whether its states are weights alone.
        monitor: the name of the monitored metric.
        hyperparameters: stored with each version.
        sync: whether to wait for the disk.

    Attributes:
        pending: the write that was started and not collected yet.
    """

    def __init__(
        self,
        folder: Path,
        retention: Retention,
        *,
        handler: str,
        weights_only: bool,
        monitor: str | None,
        hyperparameters: Mapping[str, Any] | None,
        sync: bool,
    ) -> None:
        self.folder = folder
        self.handler = handler
        self.weights_only = weights_only
        self.constants = {
            "handler": handler,
            "kind": "weights" if weights_only else "state",
            "monitor": monitor,
            "hyperparameters": hyperparameters,
        }
        self.sync = sync
        self.retention = retention
        self.pending: Write | None = None
        self._ownership: Ownership | None = None
        self._shard_files: ShardFiles | None = None

    def abandon(self) -> None:
        """Drop a write that was never collected, of a run that ended with an error."""
        self.pending = None

    def forget(self) -> None:
        """Forget which versions are the run's own: another state is loaded."""
        self._ownership = None

    def adopt(self, run: SavingRun) -> Ownership:
        """Find out, once for a run, which versions in the folder are its own; rank 0 alone needs it."""
        if self._ownership is None or self._ownership.run != run.id:
            self._ownership, manifests = adopt_versions(
                self.folder, handler=self.handler, run=run.id, origin=run.origin, files=run.files
            )
            self.retention.look_up(manifests, run.position["iteration"])
        return self._ownership

    def prepare(self, run: SavingRun, entry: Entry, state: Mapping[str, Any], *, counted: bool) -> Write:
        """Make the write of a state, without starting it.

        Args:
            run: the run that saves.
            entry: under what name, and with which value.
            state: a whole state, or the current weights.
            counted: whether the entry is one of the retention's plan.
        """
        first = run.processes.is_rank_zero
        ownership = self.adopt(run) if first else Ownership(self.handler, run.id)
        about = {
            **self.constants,
            **(run.position if self.weights_only else _position(state)),
            "run": ownership.run,
            "lineage": sorted(ownership.lineage),
            "value": entry.value if entry.value is None or math.isfinite(entry.value) else str(entry.value),
            "environment": environment(run.device, run.processes.world_size),
        }
        if self.weights_only:  # shards are found by their path in a whole state
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
            superseded=self.retention.superseded_by(entry) if counted else [],
            avoid=self.retention.names_besides(entry),
            shards=shards,
            shard_files=self._shard_files,
            is_rank_zero=first,
            sync=self.sync,
        )

    def start(self, write: Write, *, asynchronous: bool = False) -> None:
        """Run a write, in a thread if it is ``asynchronous``; a process that has no part in it does nothing."""
        self.pending = write
        if not write.takes_part:
            return
        if asynchronous:
            write.start()
        else:
            write.run()

    def collect(self, processes: Processes, *, alone: bool = False) -> Write:
        """Wait for the pending write, and take over its outcome.

        Args:
            processes: all of which take over rank 0's outcome.
            alone: whether the others cannot be asked, as after an error.

        Raises:
            BaseException: the error of the write.
        """
        write = self.pending
        assert write is not None
        write.join()
        self.pending = None
        if processes.distributed and not alone:
            write.share(processes)
        if write.name is None:
            self.retention.failed(write.tried)
        elif write.planned is not None:
            self.retention.saved(write.entry, write.name, write.planned, write.left)
        if write.error is not None:
            raise write.error
        return write


def _position(state: Mapping[str, Any]) -> dict[str, Any]:
    """Where the run was when a whole state was taken."""
    position = {key: state["engine"][key] for key in ("epoch", "iteration", "epoch_open")}
    return position | {"steps": {name: update["steps"] for name, update in state["updates"].items()}}
