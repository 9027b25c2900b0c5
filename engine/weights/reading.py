"""Reads weights by name from checkpoints, safetensors, PyTorch's and Lightning's files, and Hugging Face's folders."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import checkpoints
from ..authoring.checks import check_local, shown_path
from ..checkpoints.manifest import MANIFEST, STATE
from ..distributed.sharded import read_shards, whole_tensor
from ..resuming.keys import BASE, OWN_PARAMETERS, holds_averages

__all__ = ["WeightFile", "needs_safetensors", "read_weights"]

_FOLDER = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files of a Hugging Face folder, the preferred ones first."""

_WRAPPED_IN = ("state_dict", "model_state_dict", "model", "module")
"""Entries under which files hold the weights, beside epochs and optimizers."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class WeightFile:
    """Weights read from a file, folder or mapping.

    Attributes:
        label: Their source, for messages.
        tensors: The tensors by name; with several modules, names start with the module's.
        notes: Notes for a report, such as the entry of the file that was used.
    """

    label: str
    tensors: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)


def read_weights(source: str | os.PathLike[str] | Mapping[str, Any], *, where: str = "read_weights()") -> WeightFile:
    """Read weights from a checkpoint, safetensors, PyTorch, Lightning or Hugging Face; nothing in a file is executed.

    Args:
        source: A file: safetensors, the index of its shards, or a file of ``torch.save``, such as a state dict or Lightning's
            ``.ckpt``. Or a folder: a checkpoint of `Checkpoint`, a folder of them, from which the newest intact one is read, or
            one of Hugging Face. Or a mapping from names to tensors, as ``model.state_dict()`` returns. From training states only
            the weights are used, not their averages. The weights are read into main memory.
        where: Caller, for messages.

    Raises:
        FileNotFoundError: If there is no such file or folder, or the folder holds no weights.
        ValueError: If the file is damaged, holds no tensors, or holds objects that only unsafe loading would accept.
        ImportError: For safetensors without the package: ``pip install signalfire[safetensors]``.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(
        ...         {"epoch": 3, "state_dict": torch.nn.Linear(2, 1).state_dict()},
        ...         f"{folder}/model.pt",
        ...     )
        ...     found = read_weights(f"{folder}/model.pt")
        >>> sorted(found.tensors), found.notes
        (['bias', 'weight'], ["the weights come from its entry 'state_dict'"])
    """
    if isinstance(source, Mapping):
        return _unwrapped("a mapping", source, where)
    path = shown_path(check_local(where.partition("(")[0], "source", source))
    if path.is_dir():
        if not (path / STATE).exists() and not (path / MANIFEST).exists():
            for name in _FOLDER:
                if (path / name).is_file():
                    return _read_file(path / name, where)
        return _read_checkpoint(path, where)
    if path.name in (STATE, MANIFEST) and (path.parent / MANIFEST).exists():
        return _read_checkpoint(path, where)
    if not path.exists():
        raise FileNotFoundError(f"{where}: there is no file or folder {os.fspath(path)!r}")
    return _read_file(path, where)


def needs_safetensors(where: str) -> None:
    """Raise ImportError if the package is missing."""
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"{where}: the package 'safetensors' is not installed: pip install 'signalfire[safetensors]'"
        ) from error


# ---- checkpoints of Signalfire ------------------------------------------------------------------------------------


def _read_checkpoint(path: Path, where: str) -> WeightFile:
    """Read a version, or the newest of a folder, and verify it."""
    try:
        state = checkpoints.load(path, name=None, where=where, files=checkpoints.Files())
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{where}: the folder {os.fspath(path)!r} contains neither a checkpoint nor any of these files: "
            f"{', '.join(_FOLDER)}"
        ) from error
    return _of_state(os.fspath(path), state)


def _of_state(label: str, state: Mapping[str, Any]) -> WeightFile:
    """The weights of a training state, or of weights alone."""
    parts = {key: value for key, value in state.items() if key not in ("handlers", "updates")}
    modules = read_shards(parts, parameters=(), device=_CPU)
    modules = modules["modules"] if "format" in modules else modules
    own, modules = modules.get(OWN_PARAMETERS), {k: v for k, v in modules.items() if k != OWN_PARAMETERS}
    return WeightFile(label, _flattened(modules), _notes_on(state, own or {}))


def _flattened(modules: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    """The tensors by name; those of a module have its name before theirs, unless it is the only model beside losses."""
    models = [name for name in modules if name != "loss" and not name.endswith("_loss")] or list(modules)
    return {
        key if [name] == models else f"{name}.{key}": value
        for name, root in modules.items()
        for key, value in root.items()
        if isinstance(value, Tensor)
    }


def _notes_on(state: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """What of a state is not used, in words."""
    notes = []
    if own:
        notes.append(f"{len(own)} trained tensors are not used, because they belong to no module")
    if left_out := state.get(BASE, {}).get("sha256", {}):
        notes.append(f"{len(left_out)} frozen parameters are not in the file")
    for name, part in state.get("handlers", {}).items():
        if holds_averages(part):
            notes.append(f"the averages of {name!r} are not used; the weights come from the last step")
    return notes


# ---- files --------------------------------------------------------------------------------------------------------


def _read_file(path: Path, where: str) -> WeightFile:
    if path.name.endswith(".index.json"):
        return WeightFile(os.fspath(path), _read_shard_files(path, where))
    return _read_one(path, where)


def _read_one(path: Path, where: str) -> WeightFile:
    """Read a single file, of a kind that its first bytes tell."""
    with checkpoints.Files().open(path) as file:
        begin = file.read(9)
    if begin[8:] == b"{":
        return WeightFile(os.fspath(path), _read_safetensors(path, where))
    if begin[:2] == b"PK" or begin[:1] == b"\x80":
        return _unwrapped(os.fspath(path), _read_pickled(path, where), where)
    raise ValueError(
        f"{where}: {os.fspath(path)!r} is "
        f"{'empty' if not begin else 'neither a safetensors file nor a file written by torch.save'}"
    )


def _read_safetensors(path: Path, where: str) -> dict[str, Tensor]:
    needs_safetensors(where)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise ValueError(f"{where}: {os.fspath(path)!r} is corrupted or not a safetensors file: {error}") from error


def _read_pickled(path: Path, where: str) -> Any:
    """What ``torch.save`` wrote; plain data and tensors only."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        refused = "weights_only" in str(error) or "Unsupported" in str(error)
        raise ValueError(
            f"{where}: {os.fspath(path)!r} cannot be read as plain tensors: {reason}"
            + (
                "; if you trust the file, load it yourself and pass its weights: "
                "torch.load(path, weights_only=False)['state_dict']"
                if refused
                else ""
            )
        ) from error


def _read_shard_files(index: Path, where: str) -> dict[str, Tensor]:
    """Read the files that an index names, each once."""
    try:
        files: Any = json.loads(index.read_text())["weight_map"]
        named = {str(name): str(file) for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{where}: {os.fspath(index)!r} is not an index of shards, because it has no entry 'weight_map' that maps "
            "names to files"
        ) from error
    tensors: dict[str, Tensor] = {}
    for file in dict.fromkeys(named.values()):
        shard = index.parent / file
        if Path(file).name != file or not shard.is_file():
            raise FileNotFoundError(f"{where}: {os.fspath(index)!r} lists {file!r}, which is not in the same folder")
        inside = _read_one(shard, where).tensors
        wanted = [name for name, of in named.items() if of == file]
        if missing := [name for name in wanted if name not in inside]:
            raise ValueError(f"{where}: {os.fspath(shard)!r} does not contain {missing[0]!r}, which the index lists")
        tensors |= {name: inside[name] for name in wanted}
    return tensors


def _unwrapped(label: str, content: Any, where: str) -> WeightFile:
    """The tensors by name in what a file holds: the content itself, or an entry of it."""

    def refuse(problem: str) -> NoReturn:
        raise ValueError(f"{where}: {label} {problem}")

    label = label if label == "a mapping" else repr(label)
    if isinstance(content, Mapping) and isinstance(content.get("modules"), Mapping) and "format" in content:
        found = _of_state(label.strip("'"), content)
        return found if found.tensors else refuse("holds no tensors")
    content, notes = _entry_of(content)
    if not isinstance(content, Mapping):
        refuse(f"contains a {type(content).__name__}, not a mapping from names to tensors")
    tensors = {str(name): _whole(value) for name, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        names = ", ".join(map(repr, list(content)[:8]))
        refuse(
            f"contains no mapping from names to tensors; its entries are {names or 'none'}; pass the mapping that "
            "contains the tensors"
        )
    return WeightFile(label.strip("'"), tensors, notes)


def _entry_of(content: Any) -> tuple[Any, list[str]]:
    """The entry that holds tensors, in mappings that are known to wrap one; with notes on which that is."""
    notes = []
    entry = ""
    while isinstance(content, Mapping) and not any(isinstance(value, Tensor) for value in content.values()):
        inside = [name for name in _WRAPPED_IN if isinstance(content.get(name), Mapping)]
        if not inside:
            break
        entry, content = f"{entry}.{inside[0]}".lstrip("."), content[inside[0]]
        notes += [f"its entry {other!r} is not used" for other in inside[1:]]
    return content, [f"the weights come from its entry {entry!r}", *notes] if entry else notes


def _whole(value: Tensor) -> Tensor:
    return whole_tensor(value).detach()
