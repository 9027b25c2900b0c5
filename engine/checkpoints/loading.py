"""Loads a checkpoint version: its state, with its origin, and the hyperparameters stored with it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..authoring.checks import check_local
from ..distributed import SHARDS
from ..resuming.keys import BASE
from .files import Files
from .store import open_version

__all__ = ["load", "load_hyperparameters", "load_newest"]


def load(path: str | os.PathLike[str], *, name: str | None, where: str, files: Files) -> dict[str, Any]:
    """Read and verify a version; see `Checkpoint.load`.

    Args:
        path: A version, its state file, or a folder of versions.
        name: Name of the handler whose versions are considered, in a folder shared by multiple handlers.
        where: Caller, for messages.
        files: File-system operations.
    """
    _check_given(path, where)
    path = check_local(where.partition("(")[0], "path", path)
    return _with_origin(*open_version(path, name=name, where=where, files=files))


def _check_given(path: object, where: str) -> None:
    """Raise an error for the None that `Checkpoint.best` and `Checkpoint.last` are before the first checkpoint."""
    if path is None:
        call = f"{where.partition('(')[0]}(path=None)"
        raise TypeError(
            f"{call}: expected a path, got None; a handler's `best` and `last` are None until the handler saves a "
            "checkpoint"
        )


def load_newest(
    folder: Path, *, name: str, where: str, files: Files, without: Collection[str]
) -> tuple[str, dict[str, Any]]:
    """The name and the state of the newest intact version in a folder; those that are damaged stay where they are.

    It is read once: what another run removes as soon as it has been found is not lost.
    """
    found, manifest, state, _ = open_version(folder, name=name, where=where, files=files, without=without)
    return found.name, _with_origin(found, manifest, state, [])


def _with_origin(
    found: Path, manifest: dict[str, Any], state: dict[str, Any], damaged: Sequence[Path]
) -> dict[str, Any]:
    further: dict[str, Any] = {SHARDS: os.path.abspath(found)} if len(manifest["files"]) > 1 else {}
    if manifest.get(BASE) is not None:
        further[BASE] = manifest[BASE]
    if manifest["kind"] != "state":
        return {"format": 1, "modules": state} | further if further else state
    origin = {
        "path": os.path.abspath(found),
        "damaged": [os.path.abspath(one) for one in damaged],
        "manifest": manifest,
    }
    return state | further | {"origin": origin}


def load_hyperparameters(
    path: str | os.PathLike[str], overrides: Mapping[str, Any], *, where: str, files: Files
) -> dict[str, Any]:
    """Read the hyperparameters of a version, with overrides; see `Checkpoint.hyperparameters`."""
    path = check_local(where.partition("(")[0], "path", path)
    found, manifest, _, _ = open_version(path, name=None, where=where, files=files)
    stored: dict[str, Any] | None = manifest["hyperparameters"]
    if stored is None:
        raise ValueError(
            f"{where}: {found.name!r} contains no hyperparameters; write the checkpoint with "
            "Checkpoint(hyperparameters=)"
        )
    if unknown := [name for name in overrides if name not in stored]:
        raise ValueError(
            f"{where}: there is no stored hyperparameter {unknown[0]!r}; stored hyperparameters: "
            f"{', '.join(stored) or 'none'}"
        )
    return {**stored, **overrides}
