"""Writes, finds, reads and removes the versions in a folder; after a crash at any moment, each is complete or absent."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.blame import warn
from ..distributed.liveness import identity, is_alive
from .files import Files, remove_folder
from .manifest import (
    MANIFEST,
    STATE,
    Damaged,
    NewVersion,
    read_manifest,
    read_manifest_or_none,
    read_state,
    seal_manifest,
)
from .names import hidden_name, match_hidden, numbered, visible_name

__all__ = ["Taken", "clean", "commit", "find", "find_unreadable", "open_version", "preempted", "prune", "set_aside"]

_STALE = 24 * 3600.0  # seconds after which an unfinished write of another machine counts as abandoned
_ATTEMPTS = 100  # to read a version that is replaced or removed meanwhile
_being_written: set[str] = set()  # hidden names that this process is writing


# A version: its name, its path, its manifest, and the mark of its files when that was read.
_Found = tuple[str, Path, dict[str, Any], tuple[int, int] | None]


class Taken(Exception):
    """Raised if the name is taken by another run's version, or by something else."""


class _Changed(Exception):
    """Raised if a version was replaced or removed while it was read."""


# ---- writing ------------------------------------------------------------------------------------------------------


def commit(
    folder: Path,
    name: str,
    version: NewVersion,
    *,
    files: Files,
    may_replace: Callable[[Path], bool],
    sync: bool = True,
) -> None:
    """Write a new version atomically: even after a crash it is either complete or absent.

    Its files are written and synced under a hidden name, the manifest last, and then the folder is renamed into place. When
    this returns, the version is on disk.

    Args:
        folder: Folder of the versions.
        name: Name of the version.
        version: What it holds.
        files: File-system operations.
        may_replace: Called if the name is taken; returns whether the existing version may be replaced.
        sync: Whether to wait until the data is on disk. Without it, the operating system still writes the files if only the
            process crashes.

    Raises:
        Taken: if the name is taken and the existing version may not be replaced.
        OSError: if the version cannot be written. After any error the previous content of the folder is unchanged.
    """
    target, aside = folder / name, hidden_name(folder, name, "new")
    replaced: Path | None = None
    placing = False
    _being_written.add(aside.name)
    try:
        _write_files(aside, name, version, files, sync=sync)
        if files.exists(target):
            if not may_replace(target):
                raise Taken(name)
            replaced = hidden_name(folder, name, "replaced")
            files.rename(target, replaced)
        placing = True
        try:
            files.rename(aside, target)
        except OSError:
            if files.exists(target):  # another process created it first
                raise Taken(name) from None
            raise
        if sync:
            files.sync(folder)
    except BaseException as error:
        if not isinstance(error, Taken):
            error.add_note(f"while writing the checkpoint {str(target)!r}; earlier checkpoints are unchanged")
        # Each of these may also fail: a hidden folder is never read as a version, and `clean` removes it later.
        with contextlib.suppress(OSError):
            if placing and not files.exists(aside):
                files.rename(target, aside)
        with contextlib.suppress(OSError):
            if replaced is not None and files.exists(replaced):
                files.rename(replaced, target)
        remove_folder(aside, files)
        raise
    finally:
        _being_written.discard(aside.name)
    if replaced is not None:
        remove_folder(replaced, files)


def _write_files(aside: Path, name: str, version: NewVersion, files: Files, *, sync: bool) -> None:
    """Write the files of a version under its hidden name, the manifest last."""
    files.make_folder(aside)
    files.write(aside / STATE, version.state)
    if sync:
        files.sync(aside / STATE)
    entries = {STATE: version.state.entry}
    if version.write_more is not None:
        entries |= {file: dict(entry) for file, entry in version.write_more(aside).items()}
    files.write(aside / MANIFEST, seal_manifest(version.about, name=name, writer=identity(), files=entries))
    if sync:
        files.sync(aside / MANIFEST)
        files.sync(aside)


# ---- removing -----------------------------------------------------------------------------------------------------


def prune(
    folder: Path,
    names: Iterable[str],
    may_remove: Callable[[str, Mapping[str, Any]], bool],
    files: Files,
    *,
    sync: bool = True,
) -> tuple[list[str], list[OSError]]:
    """Remove superseded versions, except damaged ones and those for which ``may_remove(name, manifest)`` is false.

    Removing a folder takes multiple operations, so it is first renamed to a hidden name: a partial version is never visible.

    Returns:
        The names of the versions that could not be removed, and the errors.
    """
    left: list[str] = []
    problems: list[OSError] = []
    hidden = []
    for name in names:
        manifest = read_manifest_or_none(folder / name, files)
        if manifest is None or not may_remove(name, manifest):
            continue
        aside = hidden_name(folder, name, "old")
        try:
            files.rename(folder / name, aside)
            hidden.append(aside)
        except OSError as problem:
            left.append(name)
            problems.append(problem)
    if hidden and sync:
        try:
            files.sync(folder)
        except OSError as problem:
            problems.append(problem)
    for aside in hidden:
        problems += remove_folder(aside, files)
    return left, problems


def clean(folder: Path, files: Files) -> None:
    """Remove the hidden folders of dead processes, and restore the versions that these were replacing.

    Folders that cannot be removed remain for the next call.
    """
    for entry, found in sorted(_hidden_in(folder, files), key=lambda one: not _is_intact(one[0], files)):
        writer, kind = found["owner"], found["kind"]
        if writer == identity():
            abandoned = entry.name not in _being_written
        else:
            alive = is_alive(writer)
            abandoned = not alive and (alive is False or _age(entry) > _STALE)
        if not abandoned:
            continue
        if kind == "replaced" and not files.exists(folder / found["name"]):
            with contextlib.suppress(OSError):  # the process died before the new version was in place
                files.rename(entry, folder / found["name"])
        else:
            remove_folder(entry, files)


def _is_intact(path: Path, files: Files) -> bool:
    """Whether a replaced version can be loaded: a half-removed one must not be restored in its place."""
    if not path.name.endswith(".replaced"):
        return False
    try:
        read_state(path, read_manifest(path, files), files)
    except (Damaged, OSError):
        return False
    return True


def set_aside(path: Path, files: Files) -> None:
    """Rename a damaged version to ``<name>.damaged``, to free its name; it is never removed."""
    for name in numbered(path.name):
        aside = path.with_name(f"{name}.damaged")
        if not files.exists(aside):
            with contextlib.suppress(OSError):
                files.rename(path, aside)
            return


def _hidden_in(folder: Path, files: Files) -> Iterator[tuple[Path, re.Match[str]]]:
    for entry in files.list(folder):
        if (found := match_hidden(entry)) is not None:
            yield folder / entry, found


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


# ---- finding and reading ------------------------------------------------------------------------------------------


def find(folder: Path, files: Files, unreadable: list[OSError] | None = None) -> list[tuple[str, Path]]:
    """The versions in a folder, including damaged ones, as (name, path).

    If another run removes one while they are looked at, the folder is listed again: that run has written a newer one before.

    Args:
        folder: Folder of the versions.
        files: File-system operations.
        unreadable: List to which the errors of entries are added that cannot be looked into, such as links that lead nowhere.
    """
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(_Changed):
            return _find(folder, files, unreadable)
    raise OSError(errno.EBUSY, "the checkpoints are being removed faster than they can be listed", str(folder))


def _find(folder: Path, files: Files, unreadable: list[OSError] | None) -> list[tuple[str, Path]]:
    """As `find`; raises `_Changed` if one has gone since the folder was listed."""
    names = files.list(folder)
    found, problems = [], []
    for name in names:
        if name.startswith(".") or name.endswith(".damaged"):
            continue
        try:
            if _is_version(folder / name, files):
                found.append((name, folder / name))
        except OSError as error:
            if not files.exists(folder / name):
                raise _Changed from error
            problems.append(error)
    if unreadable is not None:
        unreadable += problems
    # A version that was being replaced when the process died exists only under a hidden name.
    return found + [
        (match["name"], entry)
        for entry, match in _hidden_in(folder, files)
        if match["kind"] == "replaced" and match["name"] not in names
    ]


def find_unreadable(folder: Path, files: Files) -> list[OSError]:
    """The errors of entries that cannot be looked into: dangling links, and folders without permission."""
    unreadable: list[OSError] = []
    find(folder, files, unreadable)
    return unreadable


def preempted(folder: Path, handler: str, files: Files) -> str | None:
    """The name of the version that a preempted run has left, if no run of this handler has come further since."""
    found = {name: read_manifest_or_none(path, files) for name, path in find(folder, files)}
    own = {name: one for name, one in found.items() if one is not None and one["handler"] == handler}
    if not own:
        return None
    furthest = max(own, key=lambda name: (own[name]["iteration"], name.endswith("-preempted")))
    return furthest if furthest.endswith("-preempted") else None


def _is_version(path: Path, files: Files) -> bool:
    """Whether a folder looks like a version, intact or damaged."""
    try:
        inside = files.list(path)
    except NotADirectoryError:
        return False
    return MANIFEST in inside or STATE in inside or (not inside and re.search(r"-iter\d+", path.name) is not None)


def open_version(
    path: str | os.PathLike[str], *, name: str | None, where: str, files: Files, without: Collection[str] = ()
) -> tuple[Path, dict[str, Any], dict[str, Any], list[Path]]:
    """Find, verify and read a version.

    Args:
        path: A version, its state file, or a folder of versions, of which the newest intact one is opened.
        name: Name of the handler whose versions are considered, in a folder shared by multiple handlers.
        where: Caller, for messages.
        files: File-system operations.
        without: Names of versions in a folder to skip.

    Returns:
        Its path, manifest and state, and the paths of the damaged versions that were skipped.

    Raises:
        FileNotFoundError: if there is no version.
        ValueError: if the version, or every version in the folder, is damaged.
    """
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(_Changed):
            return _open_version(Path(path), name=name, where=where, files=files, without=without)
    raise ValueError(f"{where}: the checkpoints are being replaced faster than they can be read")


def _open_version(
    given: Path, *, name: str | None, where: str, files: Files, without: Collection[str]
) -> tuple[Path, dict[str, Any], dict[str, Any], list[Path]]:
    """Open a version; raises `_Changed` if the files changed while they were read."""
    if given.name not in (STATE, MANIFEST) and not files.exists(given):
        given = _replaced(given, where, files)
    inside = files.exists(given / STATE) or files.exists(given / MANIFEST)
    if inside or given.name in (STATE, MANIFEST):
        version = given if inside else given.parent
        version = version if files.exists(version) else _replaced(version, where, files)
        mark = files.mark(version)
        try:
            manifest = read_manifest(version, files)
            state = read_state(version, manifest, files)
        except (Damaged, OSError) as error:
            if _has_changed(version, mark, files):
                raise _Changed from error
            if not isinstance(error, Damaged):
                raise
            raise ValueError(f"{where}: the checkpoint is damaged: {error}") from error
        _compare_names(version.name, manifest, where)
        return version, manifest, state, []
    if not given.is_dir():
        raise ValueError(
            f"{where}: the path is not a checkpoint; a checkpoint is a folder that contains {STATE} and {MANIFEST}. To "
            "read a single file without verification, use torch.load(path, weights_only=True)"
        )
    return _open_newest(given, name=name, where=where, files=files, without=without)


def _replaced(path: Path, where: str, files: Files) -> Path:
    """The hidden path of a version that is being replaced, or was when a process died."""
    for hidden, found in _hidden_in(path.parent, files) if path.parent.is_dir() else ():
        if found["kind"] == "replaced" and found["name"] == path.name:
            return hidden
    if files.exists(path):
        raise _Changed  # the new one has just taken its place
    raise FileNotFoundError(f"{where}: no such checkpoint")


def _open_newest(
    folder: Path, *, name: str | None, where: str, files: Files, without: Collection[str]
) -> tuple[Path, dict[str, Any], dict[str, Any], list[Path]]:
    """Open the newest intact version in a folder; complete states are preferred to weights only."""
    bad: list[str] = []
    damaged: list[Path] = []
    unreadable: list[OSError] = []

    def skip(label: str, path: Path, error: Exception, mark: tuple[int, int] | None) -> bool:
        """Skip a damaged version; False if another run has removed or replaced it meanwhile."""
        if _has_changed(path, mark, files):
            return False
        warn(f"{where}: the checkpoint {label!r} is damaged and is skipped: {error}", RuntimeWarning)
        bad.append(f"{label}: {error}")
        if isinstance(error, Damaged):
            damaged.append(path)
        return True

    good, gone = [], False
    for label, path in find(folder, files, unreadable):
        if label in without:
            continue
        mark = files.mark(path)
        try:
            manifest = read_manifest(path, files)
        except (Damaged, OSError) as error:
            if name is None or label.startswith(name):
                gone |= not skip(label, path, error, mark)
            continue
        if name is None or manifest["handler"] == name:
            good.append((label, path, manifest, mark))
    for label, path, manifest, mark in _newest_first(good):
        try:
            state = read_state(path, manifest, files)
        except (Damaged, OSError) as error:
            gone |= not skip(label, path, error, mark)
            if gone:
                raise _Changed from error  # the newest one now may be a newer one
            continue
        for problem in unreadable:
            warn(f"{where}: an entry in the folder cannot be read and is skipped: {problem}", RuntimeWarning)
        _compare_names(label, manifest, where)
        return path, manifest, state, damaged
    if gone:
        raise _Changed
    raise _none_intact(bad, name, where)


def _has_changed(path: Path, mark: tuple[int, int] | None, files: Files) -> bool:
    """Whether another run has removed or replaced a version since it had this mark."""
    return files.mark(path) != mark or not files.exists(path)


def _newest_first(versions: Sequence[_Found]) -> list[_Found]:
    runs = {manifest["run"] for _, _, manifest, _ in versions}
    return sorted(versions, key=lambda one: _order(one[0], one[2], runs), reverse=True)


def _none_intact(bad: Sequence[str], name: str | None, where: str) -> Exception:
    of_name = "" if name is None else f" of {name!r}"
    if not bad:
        return FileNotFoundError(f"{where}: the folder contains no checkpoint{of_name}")
    return ValueError(f"{where}: all checkpoints{of_name} in the folder are damaged: {'; '.join(bad)}")


def _order(label: str, manifest: Mapping[str, Any], runs: set[str]) -> tuple[Any, ...]:
    """Where a version comes among others, the newest last; states come after weights only."""
    position = manifest["epoch"], manifest["iteration"], not manifest["epoch_open"]
    # Of one position, the version of the run that continues the other runs: it owns their versions, and can remove them.
    return manifest["kind"] == "state", *position, len(runs.intersection(manifest["lineage"])), label


def _compare_names(label: str, manifest: Mapping[str, Any], where: str) -> None:
    if manifest["name"] != visible_name(label):
        warn(
            f"{where}: the folder {label!r} contains a checkpoint that was written under the name {manifest['name']!r}",
            RuntimeWarning,
        )
