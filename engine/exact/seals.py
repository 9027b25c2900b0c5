"""Seals for folders that another library writes: a sealed one is complete, and is compared with its seal before it is used."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from ..checkpoints import Files
from ..core.blame import warn

__all__ = ["fingerprint", "newest_sealed", "seal"]

SEAL = "seal.json"


def seal(folder: str | os.PathLike[str]) -> None:
    """Note the sha256 of every file of a folder that is complete, in a file that appears at once.

    Raises:
        OSError: if it cannot be read or written.
    """
    folder, files = Path(folder), Files()
    hidden = folder / f".{SEAL}"
    for path in _files(folder):
        files.sync(path)
    hidden.write_text(json.dumps(_hashes(folder), indent=1))
    files.sync(hidden)
    os.replace(hidden, folder / SEAL)
    files.sync(folder)


def newest_sealed(path: str | os.PathLike[str], prefix: str) -> Path | None:
    """The folder with the greatest number after ``prefix`` that is as it was sealed; None if there is none.

    What comes after it is named in a warning: a folder without a seal is incomplete, or was saved without `ExactResume`; one
    that differs from its seal is damaged.

    Args:
        path: where the folders are.
        prefix: what their names begin with, such as ``"checkpoint-"``.

    Raises:
        ValueError: if there are sealed folders, and all of them are damaged.
    """
    damaged = []
    for folder in sorted(_numbered(Path(path), prefix), key=lambda one: int(one.name[len(prefix) :]), reverse=True):
        try:
            noted = json.loads((folder / SEAL).read_text())
            if noted == _hashes(folder):
                return folder
            damaged.append(folder)
            warn(
                f"{folder}: the content of the folder does not match its checksums, so the folder is damaged and is "
                "skipped"
            )
        except (FileNotFoundError, NotADirectoryError):
            warn(
                f"{folder}: the folder has no checksums, because it is incomplete or was saved without ExactResume; "
                "the folder is skipped"
            )
        except ValueError:
            damaged.append(folder)
            warn(f"{folder}: the checksums of the folder cannot be read, so the folder is damaged and is skipped")
    if damaged:
        raise ValueError(
            f"newest_sealed({str(path)!r}): all {len(damaged)} checkpoint folders are damaged; start the run in a "
            "different folder"
        )
    return None


def fingerprint(model: torch.nn.Module) -> str:
    """The sha256 of a model's parameters and buffers, with their names and types."""
    found = hashlib.sha256()
    state = model.state_dict().items()
    tensors: dict[str, Any] = {name: one for name, one in state if isinstance(one, torch.Tensor)}  # no extra states
    for name, tensor in tensors.items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def _numbered(path: Path, prefix: str) -> list[Path]:
    if not path.is_dir():
        return []
    return [one for one in path.iterdir() if one.name.startswith(prefix) and one.name[len(prefix) :].isdecimal()]


def _files(folder: Path) -> list[Path]:
    return sorted(one for one in folder.rglob("*") if one.is_file() and one.name not in (SEAL, f".{SEAL}"))


def _hashes(folder: Path) -> dict[str, str]:
    hashes = {}
    for path in _files(folder):
        with path.open("rb") as file:
            hashes[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes
