"""Generations of checkpoints on disk: committed whole, verified before they are read, each removed by its own run only.

A generation is a folder that holds a state and a manifest. The manifest tells the size and the sha256 of the state, taken from
memory before it was written, and a sha256 of itself: `torch.load` would load a flipped bit without a word. Not a handler.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import platform
import re
import socket
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..distributed.sharded import sha256_of

__all__ = [
    "LONGEST_NAME",
    "Damaged",
    "Files",
    "Ownership",
    "Taken",
    "check_json",
    "clean",
    "commit",
    "differences",
    "encode",
    "environment",
    "find",
    "lives",
    "make_folders",
    "open_generation",
    "owner",
    "prune",
    "read_manifest",
    "read_state",
    "serialize",
    "set_aside",
    "visible_name",
]

FORMAT = 1
STATE, MANIFEST = "state.pt", "manifest.json"
LONGEST_NAME = 150
"""Of a generation, in characters: a hidden name, which says more, has to fit into the 255 bytes of a file name."""

_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<owner>[0-9a-f]{8}~\d+~\d+)~\d+\.(?P<kind>new|old|replaced)")
_ENTRIES = {"name": str, "handler": str, "kind": str, "run": str, "lineage": list, "writer": str, "epoch": int,
            "iteration": int, "epoch_open": bool, "environment": dict, "files": dict}  # fmt: skip
_STALE = 24 * 3600.0  # seconds after which what another machine was writing has been given up
_json = json.JSONEncoder(sort_keys=True).encode
_numbers = itertools.count()
_going_on: set[str] = set()  # the hidden names under which this process is writing


class Files:
    """The operations on the file system that generations are made of, so that a test may record each, or let it fail."""

    def make_folder(self, path: Path) -> None:
        path.mkdir()

    def write(self, path: Path, content: bytes | memoryview) -> None:
        with open(path, "xb") as file:
            file.write(content)

    def sync(self, path: Path) -> None:
        """Have a file's content, or a folder's entries, on the disk when this returns."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """A folder is never put in the place of one that is not empty: that is an OSError."""
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        path.rmdir()

    def list(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def exists(self, path: Path) -> bool:
        return os.path.lexists(path)


class Damaged(ValueError):
    """A generation that is not what was written."""


class Taken(Exception):
    """Another run's generation, or something else, has the name."""


# ---- who is writing -----------------------------------------------------------------------------------------------


def owner() -> str:
    """This process, so that another one can tell whether it still lives: machine, process id, when it began."""
    pid = os.getpid()
    if pid not in _owners:  # a child of a fork is another one
        began = _began(pid)
        if began is None:  # for a moment, as where there are too many open files
            return f"{_machine()}~{pid}~{began}"
        _owners[pid] = f"{_machine()}~{pid}~{began}"
    return _owners[pid]


_owners: dict[int, str] = {}


def lives(writer: str) -> bool | None:
    """Whether the process that an `owner` named is there; None for one of another machine."""
    machine, pid, began = writer.split("~")
    if machine != _machine():
        return None
    found = _began(int(pid))
    return found is not None and str(found) == began


def _machine() -> str:
    try:
        processes = os.readlink("/proc/self/ns/pid")  # containers of one machine do not see each other's processes
    except OSError:
        processes = ""
    return hashlib.sha256(f"{socket.gethostname()} {processes}".encode()).hexdigest()[:8]


def _began(pid: int) -> int | None:
    """When a process began, in ticks of the machine's clock: a process id is given again. 0 where nobody says."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        if os.path.isdir("/proc/self"):
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return 0


@dataclass(frozen=True)
class Ownership:
    """Which generations of a folder one handler of one run may replace and remove.

    Args:
        handler: the handler's name.
        run: the run's id.
        lineage: the ids of the runs that it goes on from.
        source: the name of the generation that the run was resumed from, which stays.
    """

    handler: str
    run: str
    lineage: frozenset[str] = frozenset()
    source: str | None = None

    def owns(self, name: str, manifest: Mapping[str, Any]) -> bool:
        """Whether a generation was written by this handler of this run, or of one that it goes on from and that has ended.

        One that was copied or renamed is its user's.
        """
        if manifest["handler"] != self.handler or manifest["name"] != name:
            return False
        if manifest["run"] == self.run:
            return True
        elsewhere = manifest["writer"] != owner() and lives(manifest["writer"])
        return manifest["run"] in self.lineage and not elsewhere

    def may_replace(self, path: Path, iteration: int, files: Files) -> bool:
        """Whether what has this name is the same position of the same run."""
        manifest = _manifest_or_none(path, files)
        return (
            manifest is not None
            and path.name != self.source
            and manifest["iteration"] == iteration
            and self.owns(path.name, manifest)
        )


# ---- what is written ----------------------------------------------------------------------------------------------


def serialize(state: Mapping[str, Any]) -> memoryview:
    """A state as bytes. Through memory: torch turns what a file raises, a full disk or Ctrl-C, into a RuntimeError."""
    content = BytesIO()
    torch.save(dict(state), content)
    return content.getbuffer()


def environment(device: torch.device, processes: int) -> dict[str, Any]:
    """On what the bits of a run depend besides its state."""
    return {
        "processes": processes,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": str(np.__version__),
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def encode(manifest: Mapping[str, Any]) -> bytes:
    """The manifest's bytes, a line for each entry: first the sha256 of the others. The same manifest gives the same bytes."""
    lines = [f" {_json(key)}: {_json(manifest[key])}" for key in sorted(manifest.keys() - {"sha256"})]
    told = ("{\n" + ",\n".join(lines) + "\n}\n").encode()
    return told[:2] + _seal(told) + told[2:]


def _seal(told: bytes) -> bytes:
    """The line with the sha256 of all the other ones."""
    return f' "sha256": "{hashlib.sha256(told).hexdigest()}",\n'.encode()


def commit(
    folder: Path,
    name: str,
    content: bytes | memoryview,
    about: Mapping[str, Any],
    *,
    files: Files,
    may_replace: Callable[[Path], bool],
    sync: bool = True,
    more: Callable[[Path], Mapping[str, Mapping[str, Any]]] | None = None,
) -> None:
    """Put a new generation into the folder: at any moment, also of a crash, it is either whole or not there.

    Its files are written and synced under a hidden name, the manifest last, and the folder is then renamed into place. When
    this returns, the disk has it.

    Args:
        folder: where.
        name: of the generation.
        content: the state.
        about: the rest of the manifest.
        files: the operations to use.
        may_replace: asked about what has the name already.
        sync: whether to wait until the disk has it. Without that, the operating system has it, and a crash of the process alone
            does no harm.
        more: called with the folder under its hidden name; writes and syncs further files there, and says of what size and sha256
            they are, by their names.

    Raises:
        Taken: if something has the name that may not be replaced.
        OSError: if it cannot be written. Then, as after any other error, what was there before is there.
    """
    target, aside = folder / name, _hidden(folder, name, "new")
    replaced: Path | None = None
    placing = False
    _going_on.add(aside.name)
    try:
        digest = hashlib.sha256(content).hexdigest()
        written = {STATE: {"size": len(content), "sha256": digest}}
        files.make_folder(aside)
        files.write(aside / STATE, content)
        if sync:
            files.sync(aside / STATE)
        if more is not None:
            written |= {file: dict(told) for file, told in more(aside).items()}
        manifest = {**about, "format": FORMAT, "name": name, "writer": owner(), "files": written}
        files.write(aside / MANIFEST, encode(manifest))
        if sync:
            files.sync(aside / MANIFEST)
            files.sync(aside)
        if files.exists(target):
            if not may_replace(target):
                raise Taken(name)
            replaced = _hidden(folder, name, "replaced")
            files.rename(target, replaced)
        placing = True
        try:
            files.rename(aside, target)
        except OSError:
            if files.exists(target):  # it was put there in the meantime
                raise Taken(name) from None
            raise
        if sync:
            files.sync(folder)
    except BaseException as error:
        if not isinstance(error, Taken):
            error.add_note(f"while writing the checkpoint {str(target)!r}; the earlier ones are untouched")
        # Each of these may fail, too: what a hidden name holds is never taken for a generation, and cleaned away later.
        with contextlib.suppress(OSError):
            if placing and not files.exists(aside):
                files.rename(target, aside)
        with contextlib.suppress(OSError):
            if replaced is not None and files.exists(replaced):
                files.rename(replaced, target)
        _remove(aside, files)
        raise
    finally:
        _going_on.discard(aside.name)
    if replaced is not None:
        _remove(replaced, files)


def prune(
    folder: Path, names: Iterable[str], ownership: Ownership, files: Files, *, sync: bool = True
) -> tuple[list[str], list[OSError]]:
    """Remove generations that were superseded; those of others, the run's own source and damaged ones stay.

    Removing a folder takes several operations: it is renamed to a hidden name first, so that no half of it is ever seen.

    Returns:
        The names of those that could not be removed, and why.
    """
    left: list[str] = []
    problems: list[OSError] = []
    hidden = []
    for name in names:
        manifest = _manifest_or_none(folder / name, files)
        if manifest is None or name == ownership.source or not ownership.owns(name, manifest):
            continue
        aside = _hidden(folder, name, "old")
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
        problems += _remove(aside, files)
    return left, problems


def _remove(folder: Path, files: Files) -> list[OSError]:
    """Remove a folder under a hidden name with all that it holds, as far as that is possible."""
    problems = []

    def attempt(act: Callable[[Path], None], path: Path) -> None:
        try:
            act(path)
        except FileNotFoundError:
            pass
        except OSError as problem:
            problems.append(problem)

    try:
        inside = files.list(folder)
    except OSError as problem:
        return [] if isinstance(problem, FileNotFoundError) else [problem]
    for file in inside:
        attempt(files.remove, folder / file)
    attempt(files.remove_folder, folder)
    return problems


def clean(folder: Path, files: Files) -> None:
    """Remove what processes that have died left under hidden names. What cannot be removed stays for the next one."""
    for entry, found in sorted(_hidden_in(folder, files), key=lambda one: not _is_whole(one[0], files)):
        writer, kind = found["owner"], found["kind"]
        if writer == owner():
            given_up = entry.name not in _going_on
        else:
            alive = lives(writer)
            given_up = not alive and (alive is False or _age(entry) > _STALE)
        if not given_up:
            continue
        if kind == "replaced" and not files.exists(folder / found["name"]):
            with contextlib.suppress(OSError):  # it died before it had put the new one in place
                files.rename(entry, folder / found["name"])
        else:
            _remove(entry, files)


def _is_whole(path: Path, files: Files) -> bool:
    """Whether it was replaced and would load: of two of one name, half a removal of an earlier one must not take the name."""
    if not path.name.endswith(".replaced"):
        return False
    try:
        read_state(path, read_manifest(path, files), files)
    except (Damaged, OSError):
        return False
    return True


def set_aside(path: Path, files: Files) -> None:
    """Rename a damaged generation, so that its name is free; it is never removed."""
    for number in itertools.count(1):
        aside = path.with_name(f"{path.name}{'' if number == 1 else f'-{number}'}.damaged")
        if not files.exists(aside):
            with contextlib.suppress(OSError):
                files.rename(path, aside)
            return


def make_folders(folder: Path, files: Files) -> None:
    """Make a folder and those that it lies in, so that the disk has them."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            files.make_folder(path)
        files.sync(path.parent)


def _hidden(folder: Path, name: str, kind: str) -> Path:
    return folder / f".{name}.{owner()}~{next(_numbers)}.{kind}"


def _hidden_in(folder: Path, files: Files) -> Iterator[tuple[Path, re.Match[str]]]:
    for entry in files.list(folder):
        if (found := _HIDDEN.fullmatch(entry)) is not None:
            yield folder / entry, found


def visible_name(name: str) -> str:
    """The name that a generation has once `clean` has put it back: `load` may have found it under its hidden one."""
    found = _HIDDEN.fullmatch(name)
    return name if found is None else found["name"]


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


# ---- what is read -------------------------------------------------------------------------------------------------


def read_manifest(path: Path, files: Files) -> dict[str, Any]:
    """The manifest of a generation.

    Raises:
        Damaged: if it is not the one that was written, or there is none.
    """
    try:
        content = files.read(path / MANIFEST)
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    except NotADirectoryError:
        raise Damaged("it is no folder") from None
    begin = content.find(b'\n "sha256": ') + 1
    end = content.find(b"\n", begin) + 1
    sealed = content[begin:end] == _seal(content[:begin] + content[end:])
    try:
        manifest = json.loads(content) if sealed else None
    except (ValueError, RecursionError):  # sealed by somebody else
        manifest = None
    if not isinstance(manifest, dict):
        raise Damaged(f"{MANIFEST} is not what was written: its sha256 differs")
    if manifest.get("format") != FORMAT:
        raise Damaged(f"{MANIFEST} has the format {manifest.get('format')!r}, which this version does not read")
    wrong = [key for key, kind in _ENTRIES.items() if not isinstance(manifest.get(key), kind)]
    if (
        wrong
        or not isinstance(manifest["files"].get(STATE), dict)
        or manifest["files"][STATE].keys() < {"size", "sha256"}
    ):
        raise Damaged(f"{MANIFEST} is not what was written: {', '.join(wrong) or 'files'}")
    return manifest


def _manifest_or_none(path: Path, files: Files) -> dict[str, Any] | None:
    try:
        return read_manifest(path, files)
    except (Damaged, OSError):
        return None


def read_state(path: Path, manifest: Mapping[str, Any], files: Files) -> dict[str, Any]:
    """The state in a generation, once it was found to be the one that the manifest tells of.

    Raises:
        Damaged: naming the file and what is wrong with it.
    """
    told = manifest["files"][STATE]
    try:
        content = files.read(path / STATE)
    except FileNotFoundError:
        raise Damaged(f"{STATE} is missing") from None
    if len(content) != told["size"]:
        raise Damaged(f"{STATE} has {len(content)} bytes and not the {told['size']} that were written")
    if hashlib.sha256(content).hexdigest() != told["sha256"]:
        raise Damaged(f"{STATE} is not what was written: its sha256 differs")
    for file, shard in manifest["files"].items():
        if file != STATE:
            _verify(path, file, shard)
    try:
        state = torch.load(BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        raise Damaged(f"{STATE} cannot be loaded: {type(error).__name__}: {error}") from error
    if manifest["kind"] == "state":
        position = state["engine"]
        for key in ("epoch", "iteration"):
            if position[key] != manifest[key]:
                raise Damaged(f"{MANIFEST} tells of {key} {manifest[key]}, and {STATE} holds {key} {position[key]}")
    return dict(state)


def _verify(path: Path, file: str, told: Mapping[str, Any]) -> None:
    """Compare a file that is read elsewhere, perhaps by parts, with what was written."""
    try:
        if Path(file).name != file:
            raise Damaged(f"{MANIFEST} tells of {file!r}, which is no file of the checkpoint")
        if (size := (path / file).stat().st_size) != told["size"]:
            raise Damaged(f"{file} has {size} bytes and not the {told['size']} that were written")
        if sha256_of(path / file) != told["sha256"]:
            raise Damaged(f"{file} is not what was written: its sha256 differs")
    except FileNotFoundError:
        raise Damaged(f"{file} is missing") from None


def is_generation(path: Path, files: Files) -> bool:
    """Whether a folder is meant to be a generation, be it damaged or not."""
    try:
        inside = files.list(path)
    except NotADirectoryError:
        return False
    return MANIFEST in inside or STATE in inside or (not inside and re.search(r"-iter\d+", path.name) is not None)


def find(folder: Path, files: Files) -> list[tuple[str, Path]]:
    """The generations in a folder, damaged ones too, as (name, path)."""
    names = files.list(folder)
    found = [
        (name, folder / name)
        for name in names
        if not name.startswith(".") and not name.endswith(".damaged") and is_generation(folder / name, files)
    ]
    # One that was about to be replaced when its process died is under a hidden name, and nowhere else.
    return found + [
        (match["name"], entry)
        for entry, match in _hidden_in(folder, files)
        if match["kind"] == "replaced" and match["name"] not in names
    ]


def open_generation(
    path: str | os.PathLike[str], *, name: str | None, where: str, files: Files, without: Collection[str] = ()
) -> tuple[Path, dict[str, Any], dict[str, Any], list[Path]]:
    """Find and verify a generation, and read it.

    Args:
        path: a generation, the state in it, or a folder with generations, of which the newest good one is taken.
        name: of the handler whose generations are meant, in a folder with several.
        where: who asks, for errors.
        files: the operations to use.
        without: names of generations in a folder that are not taken.

    Returns:
        Its path, manifest and state, and the damaged ones that were passed over.

    Raises:
        FileNotFoundError: if there is no generation.
        ValueError: if it, or each of those in the folder, is damaged.
    """
    given = Path(path)
    inside = files.exists(given / STATE) or files.exists(given / MANIFEST)
    if inside or given.name in (STATE, MANIFEST):
        generation = given if inside else given.parent
        if not files.exists(generation):
            raise FileNotFoundError(f"{where}: there is no such checkpoint")
        try:
            manifest = read_manifest(generation, files)
            state = read_state(generation, manifest, files)
        except Damaged as error:
            raise ValueError(f"{where}: this is not a whole checkpoint: {error}") from error
        _compare_names(generation.name, manifest, where)
        return generation, manifest, state, []
    if not files.exists(given):
        raise FileNotFoundError(f"{where}: there is no such checkpoint")
    if not given.is_dir():
        raise ValueError(
            f"{where}: this is not a whole checkpoint, which is a folder with a {STATE} and a {MANIFEST}; a file alone "
            "is read, unverified, by torch.load(path, weights_only=True)"
        )
    return _newest(given, name=name, where=where, files=files, without=without)


def _newest(
    folder: Path, *, name: str | None, where: str, files: Files, without: Collection[str]
) -> tuple[Path, dict[str, Any], dict[str, Any], list[Path]]:
    bad: list[tuple[Path, str]] = []
    damaged: list[Path] = []
    good = []

    def pass_over(label: str, path: Path, error: Exception) -> None:
        warnings.warn(
            f"{where}: the checkpoint {label!r} is damaged and passed over: {error}", RuntimeWarning, stacklevel=5
        )
        bad.append((path, f"{label}: {error}"))
        if isinstance(error, Damaged):
            damaged.append(path)

    for label, path in find(folder, files):
        if label in without:
            continue
        try:
            manifest = read_manifest(path, files)
        except (Damaged, OSError) as error:
            if name is None or label.startswith(name):
                pass_over(label, path, error)
            continue
        if name is None or manifest["handler"] == name:
            order = (manifest["epoch"], manifest["iteration"], not manifest["epoch_open"], label)
            good.append((manifest["kind"] == "state", order, label, path, manifest))
    for _, _, label, path, manifest in sorted(good, key=lambda one: one[:2], reverse=True):
        try:
            state = read_state(path, manifest, files)
        except (Damaged, OSError) as error:
            pass_over(label, path, error)
            continue
        _compare_names(label, manifest, where)
        return path, manifest, state, damaged
    of_name = "" if name is None else f" of {name!r}"
    if not bad:
        raise FileNotFoundError(f"{where}: the folder holds no checkpoint{of_name}")
    reasons = "; ".join(reason for _, reason in bad)
    raise ValueError(f"{where}: of the folder's checkpoints{of_name} none is whole: {reasons}")


def _compare_names(label: str, manifest: Mapping[str, Any], where: str) -> None:
    hidden = _HIDDEN.fullmatch(label)
    if manifest["name"] != (label if hidden is None else hidden["name"]):
        warnings.warn(
            f"{where}: {label!r} holds the checkpoint that was written as {manifest['name']!r}",
            RuntimeWarning,
            stacklevel=5,
        )


def differences(manifest: Mapping[str, Any], device: torch.device, processes: int) -> list[str]:
    """In what this process and the device differ from those that wrote a generation."""
    then, now = manifest["environment"], environment(device, processes)
    then = {"processes": 1} | then
    return [f"{key}: {then.get(key)} then, {value} now" for key, value in now.items() if then.get(key) != value]


def check_json(where: str, value: Any) -> Any:
    """Check that a value is one of JSON's, so that it comes back as it was.

    Raises:
        TypeError: naming what is not.
    """
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise TypeError(f"{where}={value!r}: it has to be a finite number, which is what JSON has")
        return value
    if isinstance(value, list):
        return [check_json(f"{where}[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"{where}={value!r}: the key {wrong[0]!r} has to be a str")
        return {key: check_json(f"{where}[{key!r}]", item) for key, item in value.items()}
    raise TypeError(
        f"{where}={value!r}: it has to be a value of JSON: a str, a number, True, False, None, or a list or mapping of these"
    )
