"""The content of a checkpoint version: a folder with a state and a manifest that verifies it.

The manifest holds the size and sha256 of the state, computed from the memory that is written, and a sha256 of itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core.blame import warn
from ..distributed.sharded import sha256_of
from ..resuming.keys import BASE
from .files import Files, WrongSize
from .state_file import SerializedState, load_and_hash

__all__ = [
    "MANIFEST",
    "STATE",
    "Damaged",
    "NewVersion",
    "check_json",
    "encode",
    "environment",
    "read_manifest",
    "read_manifest_or_none",
    "read_state",
    "seal_manifest",
    "warn_if_environment_changed",
]

FORMAT = 1
STATE, MANIFEST = "state.pt", "manifest.json"

_ENTRIES = {"name": str, "handler": str, "kind": str, "run": str, "lineage": list, "writer": str, "epoch": int,
            "iteration": int, "epoch_open": bool, "environment": dict, "files": dict}  # fmt: skip
_MOST = 2**26  # bytes of a manifest, many times what one has
_json = json.JSONEncoder(sort_keys=True).encode


class Damaged(ValueError):
    """Raised for a version whose content differs from what was written."""


@dataclass(frozen=True)
class NewVersion:
    """What a new version holds.

    Attributes:
        state: State to write.
        about: Entries of the manifest except the format, the name, the writer and the files.
        write_more: Called with the hidden folder; writes and syncs further files there, and returns their manifest entries.
    """

    state: SerializedState
    about: Mapping[str, Any]
    write_more: Callable[[Path], Mapping[str, Mapping[str, Any]]] | None = None


# ---- writing ------------------------------------------------------------------------------------------------------


def seal_manifest(about: Mapping[str, Any], *, name: str, writer: str, files: Mapping[str, Any]) -> bytes:
    """Add the format, the name, the writer and the files to the entries of a manifest, and encode it."""
    return encode({**about, "format": FORMAT, "name": name, "writer": writer, "files": files})


def encode(manifest: Mapping[str, Any]) -> bytes:
    """Encode a manifest with one line per entry, the first with the sha256 of the others. Equal manifests give equal bytes."""
    lines = [f" {_json(key)}: {_json(manifest[key])}" for key in sorted(manifest.keys() - {"sha256"})]
    content = ("{\n" + ",\n".join(lines) + "\n}\n").encode()
    return content[:2] + _seal(content) + content[2:]


def _seal(content: bytes) -> bytes:
    """The line with the sha256 of all other lines."""
    return f' "sha256": "{hashlib.sha256(content).hexdigest()}",\n'.encode()


def environment(device: torch.device, processes: int) -> dict[str, Any]:
    """The environment that determines, besides the state, whether a run is bit-exact."""
    return {
        "processes": processes,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": str(np.__version__),
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def warn_if_environment_changed(origin: Mapping[str, Any] | None, device: torch.device, processes: int) -> None:
    """Warn if a run resumes in a different environment than the one that wrote its checkpoint.

    Args:
        origin: Entry "origin" of the loaded state; None does nothing.
        device: Device of the model.
        processes: Number of ranks.
    """
    if origin is None:
        return
    then, now = {"processes": 1} | origin["manifest"]["environment"], environment(device, processes)
    changes = [
        f"{key}: {then.get(key)} when saved, {value} now" for key, value in now.items() if then.get(key) != value
    ]
    if changes:
        warn(
            f"the run resumes from {origin['path']!r} in a different environment ({', '.join(changes)}), so the "
            "resumed run may not be bit-exact",
            RuntimeWarning,
        )


def check_json(where: str, value: Any) -> Any:
    """Check that JSON stores a value exactly.

    Raises:
        TypeError: if not, naming the part that JSON cannot store.
    """
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise TypeError(f"{where}={value!r}: JSON stores only finite numbers; use None or a str")
        return value
    if isinstance(value, list):
        return [check_json(f"{where}[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"{where}={value!r}: the key {wrong[0]!r} is not a str")
        return {key: check_json(f"{where}[{key!r}]", item) for key, item in value.items()}
    raise TypeError(
        f"{where}={value!r}: JSON cannot store this value; use a str, a number, True, False, None, or a list or "
        "mapping that contains only these"
    )


# ---- reading ------------------------------------------------------------------------------------------------------


def read_manifest(path: Path, files: Files) -> dict[str, Any]:
    """Read the manifest of a version.

    Raises:
        Damaged: if it is missing, or differs from what was written.
    """
    try:
        content = files.read(path / MANIFEST, _MOST)
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    except WrongSize as error:
        raise Damaged(f"{MANIFEST} is too large for a manifest: it has {error.size} bytes") from None
    except NotADirectoryError:
        raise Damaged("it is not a folder") from None
    manifest = _unsealed(content)
    if not isinstance(manifest, dict):
        raise Damaged(f"{MANIFEST} has changed since it was written: its sha256 differs")
    if manifest.get("format") != FORMAT:
        raise Damaged(
            f"{MANIFEST} has the format {manifest.get('format')!r}, which this version of Signalfire does not support"
        )
    wrong = [key for key, kind in _ENTRIES.items() if type(manifest.get(key)) is not kind]
    wrong = wrong or [key for key, is_possible in _POSSIBLE.items() if not is_possible(manifest.get(key))]
    if wrong:
        raise Damaged(f"{MANIFEST} has changed since it was written; invalid entries: {', '.join(wrong)}")
    return manifest


def _unsealed(content: bytes) -> Any:
    """What a manifest holds; None if it differs from what was sealed."""
    begin = content.find(b'\n "sha256": ') + 1
    end = content.find(b"\n", begin) + 1
    if content[begin:end] != _seal(content[:begin] + content[end:]):
        return None
    try:
        return json.loads(content)
    except (ValueError, RecursionError):  # the sha256 is correct, but this library did not write it
        return None


def _is_base(base: Any) -> bool:
    """Whether this is a valid entry for frozen parameters that the state leaves out; None if it leaves out none."""
    if base is None:
        return True
    digests = base.get("sha256") if isinstance(base, dict) else None
    return isinstance(digests, dict) and all(isinstance(digest, str) for digest in digests.values())


def _are_files(files: Mapping[str, Any]) -> bool:
    """Whether the state is among these files, each with its size and sha256."""
    return STATE in files and all(
        type(entry) is dict and type(entry.get("size")) is int and isinstance(entry.get("sha256"), str)
        for entry in files.values()
    )


def _is_value(value: Any) -> bool:
    """Whether this is a metric's value, or None: infinite ones are stored as text."""
    if value is None or type(value) is float:
        return True
    try:
        return type(value) in (int, str) and isinstance(float(value), float)
    except (ValueError, OverflowError):
        return False


_POSSIBLE: Mapping[str, Callable[[Any], bool]] = {
    "epoch": lambda value: value >= 0,
    "iteration": lambda value: value >= 0,
    "kind": lambda value: value in ("state", "weights"),
    "lineage": lambda value: all(isinstance(run, str) for run in value),
    "hyperparameters": lambda value: isinstance(value, dict | None),
    "value": _is_value,
    BASE: _is_base,
    "files": _are_files,
}
"""Whether the value of an entry, which has the right type, is one that this library writes."""


def read_manifest_or_none(path: Path, files: Files) -> dict[str, Any] | None:
    """Read the manifest of a version; None if it is missing, damaged or unreadable."""
    try:
        return read_manifest(path, files)
    except (Damaged, OSError):
        return None


def read_state(path: Path, manifest: Mapping[str, Any], files: Files) -> dict[str, Any]:
    """Verify every file of a version against the manifest, and read the state.

    Raises:
        Damaged: if a file is wrong, naming it and what is wrong.
    """
    entry = manifest["files"][STATE]
    try:
        with files.open(path / STATE, entry["size"]) as file:
            state, sha256 = load_and_hash(file)
    except FileNotFoundError:
        raise Damaged(f"{STATE} is missing") from None
    except WrongSize as error:
        raise Damaged(f"{STATE} has {error.size} bytes, but {entry['size']} were written") from None
    if sha256 != entry["sha256"]:
        raise Damaged(f"{STATE} has changed since it was written: its sha256 differs")
    for file, shard in manifest["files"].items():
        if file != STATE:
            _verify_shard(path, file, shard)
    if isinstance(state, Exception):
        raise Damaged(f"{STATE} cannot be loaded: {type(state).__name__}: {state}") from state
    if manifest["kind"] == "state":
        _check_position(state, manifest)
    if not isinstance(state, dict):
        raise Damaged(
            f"{STATE} contains a {type(state).__name__}, although {MANIFEST} describes it as a dict that maps names to "
            "weights"
        )
    return dict(state)


def _check_position(state: Any, manifest: Mapping[str, Any]) -> None:
    """Raise an error unless this is the state of an engine at the position that the manifest gives."""
    position = state.get("engine") if isinstance(state, dict) else None
    if not isinstance(position, dict) or not {"epoch", "iteration"} <= position.keys():
        raise Damaged(f"{STATE} does not contain the state of an engine, although {MANIFEST} describes it as one")
    for key in ("epoch", "iteration"):
        if position[key] != manifest[key]:
            raise Damaged(f"{MANIFEST} has {key} {manifest[key]}, but {STATE} has {key} {position[key]}")


def _verify_shard(path: Path, file: str, entry: Mapping[str, Any]) -> None:
    """Verify a shard file, which is not read here, against the manifest."""
    try:
        if Path(file).name != file or "\0" in file:
            raise Damaged(f"{MANIFEST} lists {file!r}, which is not a valid name for a file in a checkpoint")
        found = (path / file).stat()
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(f"{file!r} is not a regular file")
        if (size := found.st_size) != entry["size"]:
            raise Damaged(f"{file} has {size} bytes, but {entry['size']} were written")
        if sha256_of(path / file) != entry["sha256"]:
            raise Damaged(f"{file} has changed since it was written: its sha256 differs")
    except FileNotFoundError:
        raise Damaged(f"{file} is missing") from None
