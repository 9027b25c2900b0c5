"""One save of a checkpoint version, in this thread or another; it changes only the disk and itself."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.blame import warn
from ..distributed import Processes, ShardFiles
from .files import Files
from .manifest import NewVersion
from .names import numbered
from .ownership import Ownership
from .retention import Entry
from .state_file import SerializedState
from .store import Taken, commit, prune

__all__ = ["Write"]


@dataclass
class Write:
    """Writes one version, then removes the versions it supersedes.

    Call `run` or `start`, then `join` and `share`, and read the attributes. Rank 0 writes the version; each rank writes its part
    of the shards, if there are any.

    Args:
        folder: Folder of the versions.
        files: File-system operations.
        entry: Entry to write.
        state: State, written by rank 0.
        about: Entries of the manifest.
        ownership: Determines which versions may be replaced and removed.
        planned: Kept entries including this one; None if this one does not count.
        superseded: Names of versions to remove once this one is written.
        avoid: Names that the version must not use.
        shards: Sharded tensors, of which each rank writes its part.
        shard_files: Writer of the shards; None without shards.
        is_rank_zero: Whether this is rank 0.
        sync: Whether to wait until the data is on disk.
        release: Called once the state is not read any more.

    Attributes:
        name: Name on disk once it is written; None if it could not be.
        tried: Names under which writing was attempted.
        left: Names in ``superseded`` that could not be removed.
        problems: Errors of these removals.
        error: Error of the write.
    """

    folder: Path
    files: Files
    entry: Entry
    state: Mapping[str, Any]
    about: Mapping[str, Any]
    ownership: Ownership
    planned: list[Entry] | None
    superseded: list[str]
    avoid: frozenset[str]
    shards: Mapping[str, Any]
    shard_files: ShardFiles | None
    is_rank_zero: bool
    sync: bool
    release: Callable[[], None] | None = None
    name: str | None = None
    tried: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    problems: list[OSError] = field(default_factory=list)
    error: BaseException | None = None
    thread: threading.Thread | None = None
    done: threading.Event | None = None  # set as the thread ends

    @property
    def in_progress(self) -> bool:
        """Whether the thread is still running."""
        return self.done is not None and not self.done.is_set()

    @property
    def takes_part(self) -> bool:
        """Whether this rank writes anything."""
        return self.is_rank_zero or bool(self.shards)

    def start(self) -> None:
        """Run the write in a thread."""
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._run_in_thread, args=[self.done], name="signalfire checkpoint")
        atexit.register(self.join)
        self.thread.start()

    def _run_in_thread(self, done: threading.Event) -> None:
        try:
            self.run()
        finally:
            done.set()

    def join(self) -> None:
        """Wait for the thread, if any.

        It does not use `Thread.join`: in Python 3.11 one that Ctrl-C interrupts takes the thread for ended from then on.
        """
        if self.done is not None:
            self.done.wait()

    def end(self) -> None:
        """Wait for the thread, and release the state."""
        self.join()
        if self.done is not None:
            atexit.unregister(self.join)
        if self.release is not None:
            self.release()

    def warn_about_leftovers(self) -> None:
        """Warn about superseded versions that could not be removed."""
        for problem in self.problems:
            warn(
                f"{self.about['handler']!r}: could not remove the older checkpoint that {self.name!r} replaces: "
                f"{problem}",
                RuntimeWarning,
            )

    def share(self, processes: Processes) -> None:
        """Broadcast rank 0's outcome to every rank; each keeps its own error. Collective.

        Raises:
            BaseException: an interruption of this rank, such as Ctrl-C, after which it cannot communicate with the others.
        """
        if self._interrupted:
            assert self.error is not None
            raise self.error
        problems = [str(problem) for problem in self.problems]
        error = None if self.error is None else f"{type(self.error).__name__}: {self.error}"
        self.tried, self.name, self.left, problems, error = processes.broadcast(
            (self.tried, self.name, self.left, problems, error)
        )
        self.problems = [OSError(problem) for problem in problems]
        if error is not None and self.error is None:
            self.error = RuntimeError(f"rank 0 could not write the checkpoint {self.entry.base!r}: {error}")

    @property
    def _interrupted(self) -> bool:
        return self.error is not None and not isinstance(self.error, Exception)

    def run(self) -> None:
        """Write in the current thread; an error is stored in `error`."""
        try:
            if not self.shards:
                self._write_version()
                return
            assert self.shard_files is not None
            if self.is_rank_zero:
                self._write_version()
                if not self._interrupted:
                    self.shard_files.done(None)
            else:
                self.shard_files.assist(self.shards)
        except BaseException as error:
            self.error = self.error or error

    def _write_version(self) -> None:
        try:
            self.left = self.superseded
            self.name = self._commit()
            superseded = [name for name in self.superseded if name != self.name]
            self.left, self.problems = prune(
                self.folder, superseded, self.ownership.may_remove, self.files, sync=self.sync
            )
        except BaseException as error:
            self.error = error

    def _commit(self) -> str:
        """Write the version under the first free name, or replace an earlier version of the same iteration."""
        state = SerializedState(self.state, in_thread=self.thread is None)
        version = NewVersion(state, self.about, self._write_shards if self.shards else None)
        for name in numbered(self.entry.base):
            path = self.folder / name
            if name in self.avoid or (self.files.exists(path) and not self._may_replace(path)):
                continue
            self.tried.append(name)
            with suppress(Taken):  # another process created it first
                commit(self.folder, name, version, files=self.files, may_replace=self._may_replace, sync=self.sync)
                return name
        raise AssertionError("numbered() is infinite")

    def _write_shards(self, folder: Path) -> dict[str, dict[str, Any]]:
        assert self.shard_files is not None
        return self.shard_files.write(folder, self.shards)

    def _may_replace(self, path: Path) -> bool:
        iteration = self.entry.iteration
        is_only_one = self.planned is not None and len(self.planned) == 1
        if is_only_one and path.name in self.superseded and self.ownership.may_overwrite(path, iteration, self.files):
            return True
        return self.ownership.may_replace(path, iteration, self.files)
