"""Ownership of versions: no run replaces or removes a version that another run wrote."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..distributed.liveness import identity, is_alive
from .files import Files
from .manifest import read_manifest_or_none
from .names import visible_name
from .store import find, set_aside

__all__ = ["Ownership", "find_owned_versions"]


@dataclass(frozen=True)
class Ownership:
    """Determines which versions in a folder one handler of one run may replace and remove.

    Args:
        handler: Name of the handler.
        run: Id of the run.
        lineage: Ids of the runs that this run continues.
        source: Name of the version that the run resumed from; it is never replaced or removed.
    """

    handler: str
    run: str
    lineage: frozenset[str] = frozenset()
    source: str | None = None

    def owns(self, name: str, manifest: Mapping[str, Any]) -> bool:
        """Whether this handler wrote a version in this run, or in a run of the lineage that has ended.

        Copied or renamed versions belong to the user.
        """
        if manifest["handler"] != self.handler or manifest["name"] != name:
            return False
        if manifest["run"] == self.run:
            return True
        runs_elsewhere = manifest["writer"] != identity() and is_alive(manifest["writer"])
        return manifest["run"] in self.lineage and not runs_elsewhere

    def may_remove(self, name: str, manifest: Mapping[str, Any]) -> bool:
        """Whether a superseded version may be removed."""
        return name != self.source and self.owns(name, manifest)

    def may_replace(self, path: Path, iteration: int, files: Files) -> bool:
        """Whether a new version may replace the one at a path, which must be of the same iteration of this run."""
        manifest = read_manifest_or_none(path, files)
        return manifest is not None and manifest["iteration"] == iteration and self.may_remove(path.name, manifest)

    def may_overwrite(self, path: Path, iteration: int, files: Files) -> bool:
        """Whether a superseded version may be replaced by a later one that takes its name.

        A fixed filename asks for that, also for the version that the run resumed from.
        """
        manifest = read_manifest_or_none(path, files)
        return manifest is not None and manifest["iteration"] < iteration and self.owns(path.name, manifest)


def find_owned_versions(
    folder: Path, *, handler: str, run: str, origin: Mapping[str, Any] | None, files: Files
) -> tuple[Ownership, dict[str, dict[str, Any]]]:
    """Find the versions in a folder that a run owns, and set aside those that were found damaged when it resumed.

    Args:
        folder: Folder of the versions.
        handler: Name of the handler.
        run: Id of the run.
        origin: Entry "origin" of the state that the run resumed from; None if it did not resume.
        files: File-system operations.

    Returns:
        The ownership, and the manifests of the versions that the run owns, by name.
    """
    lineage, source = set[str](), None
    if origin is not None:
        path = Path(origin["path"])
        for damaged in map(Path, origin["damaged"]):
            if _same(damaged.parent, folder) and files.exists(damaged):
                set_aside(damaged, files)
        lineage = {origin["manifest"]["run"], *origin["manifest"]["lineage"]}
        source = visible_name(path.name) if _same(path.parent, folder) else None
    found = {name: read_manifest_or_none(path, files) for name, path in find(folder, files)}
    manifests = {name: manifest for name, manifest in found.items() if manifest is not None}
    # Only runs that still have a version here; otherwise the lineage would grow with every resume.
    lineage &= {manifest["run"] for manifest in manifests.values()}
    ownership = Ownership(handler, run, frozenset(lineage), source)
    return ownership, {name: manifest for name, manifest in manifests.items() if ownership.owns(name, manifest)}


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
