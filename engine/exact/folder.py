"""A folder of verified checkpoints for any state: each is complete or absent, whenever the process dies."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..authoring.checks import check_bool, check_int, check_local, check_parents
from ..checkpoints import Files, Taken, clean, commit, find, make_folders, open_version
from ..checkpoints.manifest import NewVersion, environment, read_manifest_or_none
from ..checkpoints.state_file import SerializedState
from ..checkpoints.store import prune
from ..resuming.changeable import Unsaved
from ..resuming.saving import copied

__all__ = ["CheckpointFolder", "Saved"]

_HANDLER = "exact"


class Saved(NamedTuple):
    """A checkpoint that was read.

    Attributes:
        state: what was saved.
        step: the step that it was saved at.
        path: its folder.
    """

    state: dict[str, Any]
    step: int
    path: Path


class CheckpointFolder:
    """Saves states into a folder, and finds the newest that is intact.

    A version is written under a hidden name, synced, and renamed into place; its sha256 is compared as it is read. A damaged one
    is named in a warning, and the newest good one is taken. After a save, the oldest versions beyond ``keep`` are removed.

    Args:
        path: the folder, which is created.
        keep: number of versions to keep; None for all.
        sync: whether `save` returns only once the version is on the disk. Without it, a crash of the machine may lose it.
        files: operations of the file system.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as path:
        ...     folder = CheckpointFolder(path, keep=2)
        ...     for step in (1, 2, 3):
        ...         saved = folder.save({"weight": torch.full((2,), float(step))}, step=step)
        ...     newest = CheckpointFolder(path).newest()
        ...     newest.step, newest.state["weight"], len(folder.versions())
        (3, tensor([3., 3.]), 2)
    """

    def __init__(
        self, path: str | os.PathLike[str], *, keep: int | None = 3, sync: bool = True, files: Files | None = None
    ) -> None:
        self.path = check_local(self, "path", path)
        self.keep = None if keep is None else check_int("CheckpointFolder", "keep", keep, least=1)
        self.sync = check_bool("CheckpointFolder", "sync", sync)
        self.files = Files() if files is None else files
        check_parents(self, "path", self.path)
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(
                f"CheckpointFolder({str(path)!r}): the path exists, but is not a folder; choose a different path"
            )

    def save(self, state: Mapping[str, Any], *, step: int) -> Path:
        """Save a state; returns the folder of the version.

        A version of the same step is replaced.

        Args:
            state: a mapping of what ``torch.load(weights_only=True)`` accepts: tensors, numbers, strings, and containers of them.
            step: the step, of which the greatest is the newest.

        Raises:
            TypeError: for what is no mapping, or cannot be read back, naming it.
            OSError: if it cannot be written; then what was there before is unchanged.
        """
        if not isinstance(state, Mapping):
            raise TypeError(
                f"CheckpointFolder.save({type(state).__name__}): expected a mapping, such as {{'model': ...}}"
            )
        check_int("CheckpointFolder.save", "step", step, least=0)
        check_readable("CheckpointFolder.save(state", state)
        name = f"step-{step:012d}"
        make_folders(self.path, self.files)
        clean(self.path, self.files)
        about: dict[str, Any] = {
            "handler": _HANDLER, "kind": "weights", "monitor": None, "hyperparameters": None, "epoch": 0, "iteration": step,
            "epoch_open": False, "steps": {}, "value": None, "run": _HANDLER, "lineage": [], "signalfire": "exact",
            "environment": environment(torch.device("cpu"), 1),
        }  # fmt: skip
        version = NewVersion(SerializedState(copied(dict(state))), about)
        try:
            commit(self.path, name, version, files=self.files, may_replace=self._is_own, sync=self.sync)
        except Taken as error:
            raise FileExistsError(
                f"CheckpointFolder.save(step={step}): {name!r} exists in the folder, but is not a checkpoint; remove "
                "it, or use a different folder"
            ) from error
        old = [] if self.keep is None else self.versions()[: -self.keep]
        prune(self.path, old, lambda _, manifest: manifest["handler"] == _HANDLER, self.files, sync=self.sync)
        return self.path / name

    def newest(self) -> Saved | None:
        """The newest intact version; None if the folder has none at all.

        Raises:
            ValueError: if all versions are damaged.
        """
        if not self.path.is_dir():
            return None
        try:
            path, manifest, state, _ = open_version(
                self.path, name=_HANDLER, where=f"CheckpointFolder({str(self.path)!r})", files=self.files
            )
        except FileNotFoundError:
            return None
        return Saved(state, manifest["iteration"], path)

    def versions(self) -> list[str]:
        """The names of the versions, the oldest first."""
        return sorted(name for name, path in find(self.path, self.files) if self._is_own(path))

    def _is_own(self, path: Path) -> bool:
        manifest = read_manifest_or_none(path, self.files)
        return manifest is not None and manifest["handler"] == _HANDLER


def check_readable(where: str, value: Any) -> None:
    """Raise TypeError for what ``torch.load(weights_only=True)`` would not read back, naming its place."""
    if value is None or isinstance(value, torch.Tensor | bool | int | float | str | bytes | torch.dtype | torch.Size):
        return
    if isinstance(value, Mapping):
        for key, one in value.items():
            check_readable(f"{where}[{key!r}]", one)
    elif isinstance(value, list | tuple | set):
        for place, one in enumerate(value):
            check_readable(f"{where}[{place}]", one)
    elif not hasattr(value, "item") and not isinstance(value, Unsaved):  # NumPy's numbers are saved as plain ones
        raise TypeError(
            f"{where}): torch.load(weights_only=True) rejects a {type(value).__name__}; save the object's "
            "state_dict(), or plain values"
        )
