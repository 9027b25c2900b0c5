"""Sharded tensors (DTensors): local shards, full tensors, and how they are saved and loaded.

The parameters of a model sharded by `fully_shard` are DTensors, and so are its gradients, optimizer states and averages. All
functions return plain tensors unchanged, and import nothing while there are no others.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..authoring.versions import LOAD_ALONE, NO_SOURCE

__all__ = [
    "SHARDS",
    "ShardFiles",
    "discard_unreduced",
    "gathered_until_backward",
    "is_sharded",
    "is_unit",
    "like_parameter",
    "local_part",
    "norms_over_ranks",
    "read_shards",
    "reshard",
    "sha256_of",
    "split_shards",
    "spread_like",
    "units_in",
    "unsharded",
    "whole_tensor",
]

SHARDS = "shards"
"""Key of the folder with the sharded tensors, in a loaded state."""


_PLAIN = (Tensor, nn.Parameter)


def is_sharded(value: object) -> bool:
    """Whether a tensor is a DTensor, of which each rank holds a shard."""
    if type(value) in _PLAIN:  # fast path: called for every parameter in every step
        return False
    module = sys.modules.get("torch.distributed.tensor")  # if it was never imported, there are no DTensors
    return module is not None and isinstance(value, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor, sharing its memory; a plain tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def whole_tensor(tensor: Tensor) -> Tensor:
    """The full tensor; collective if it is sharded."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def spread_like(value: Any, own: Any) -> Any:
    """Shard a tensor like another one, or gather it if the other one is not sharded; may be collective."""
    if not isinstance(value, Tensor) or not isinstance(own, Tensor) or value.is_meta:
        return value
    if is_sharded(own) and not is_sharded(value):
        if value.shape != own.shape:
            return value
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = own.device_mesh, own.placements  # type: ignore[attr-defined]
        # Each rank has the full tensor and copies its shard, so no communication is needed.
        return distribute_tensor(value.to(own.device), mesh, placements, **NO_SOURCE).clone()
    if is_sharded(value) and is_sharded(own):
        return like_parameter(value, own)
    return whole_tensor(value) if is_sharded(value) else value


def like_parameter(value: Tensor, own: Tensor) -> Tensor:
    """A DTensor with the placements of another one of its shape; collective if they differ."""
    mesh, placements = own.device_mesh, own.placements  # type: ignore[attr-defined]
    if value.shape != own.shape or (value.placements == placements and value.device_mesh == mesh):  # type: ignore[attr-defined]
        return value
    moved: Tensor = value.redistribute(mesh, placements)  # type: ignore[attr-defined]
    return moved


def norms_over_ranks(norms: Tensor, of: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norms of full tensors, from the norms of their local shards; NaN stays NaN. Collective if any is sharded.

    Args:
        norms: Norms of the local shards, in one tensor.
        of: The tensors; all sharded ones are on the same device mesh.
        norm_type: Order p of the norm.
    """
    kinds: dict[tuple[bool, ...], list[bool]] = {}  # by the mesh dimensions over which tensors are sharded: which ones
    for place, tensor in enumerate(of):
        if is_sharded(tensor) and any(over := tuple(not one.is_replicate() for one in tensor.placements)):  # type: ignore[attr-defined]
            kinds.setdefault(over, [False] * len(of))[place] = True
    if not kinds:
        return norms
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = next(tensor for tensor in of if is_sharded(tensor)).device_mesh  # type: ignore[attr-defined]
    for over, which in sorted(kinds.items()):
        # Gathered instead of reduced: one collective for any p, and a maximum could lose a NaN.
        placements = [Shard(0) if one else Replicate() for one in over]
        gathered = DTensor.from_local(norms[None], mesh, placements, run_check=False).full_tensor()
        together = torch.linalg.vector_norm(gathered, norm_type, dim=0)
        norms = torch.where(torch.tensor(which, device=norms.device), together, norms)
    return norms


# ---- modules ------------------------------------------------------------------------------------------------------


def is_unit(module: nn.Module) -> bool:
    """Whether FSDP2 gathers the weights of a module when it is called."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def units_in(roots: Iterable[nn.Module]) -> list[Any]:
    """The modules of which FSDP2 gathers the weights."""
    return [module for root in roots for module in root.modules() if is_unit(module)]


def reshard(roots: Iterable[nn.Module]) -> None:
    """Free the full parameters that a forward pass without a backward pass may have gathered."""
    for module in units_in(roots):
        module.reshard()


@contextmanager
def gathered_until_backward(units: Iterable[Any]) -> Iterator[None]:
    """Keep the weights of units after a forward, for the backward that follows; then free them.

    With ``reshard_after_forward=False`` alone, torch keeps them after each forward: where the model is called between a backward
    and its step, the next forward would find the weights of before the step.
    """
    states = [unit._get_fsdp_state() for unit in units]
    groups = [group for state in states if not state._auto_reshard_after_forward for group in state._fsdp_param_groups]
    before = [group.post_forward_mesh_info for group in groups]
    try:
        for group in groups:
            group.post_forward_mesh_info = None
        yield
    finally:
        for group, kept in zip(groups, before, strict=True):
            group.post_forward_mesh_info = kept
            if kept is not None:
                group.reshard()


@contextmanager
def unsharded(roots: Iterable[nn.Module]) -> Iterator[None]:
    """Keep full parameters, so that a forward pass needs no other rank. Collective to enter; not for training."""
    modules = units_in(roots)
    before = [_reshards(module) for module in modules]
    try:
        for module in modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        yield
    finally:
        for module, reshards in zip(modules, before, strict=True):
            module.set_reshard_after_forward(reshards, recurse=False)
            module.reshard()
            # torch records forwards without gradients, too, and gathers weights for the next backward by that record, which
            # differs between ranks that have evaluated different numbers of batches.
            if module._get_fsdp_state()._is_root:
                module.reset_iter_state()


def discard_unreduced(roots: Iterable[nn.Module]) -> None:
    """Free gradients that no backward pass has reduced.

    torch has no function for this: in 2.13, ``reset_iter_state`` leaves them for the next backward pass.
    """
    for module in units_in(roots):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if (used := getattr(parameter, "_unsharded_param", None)) is not None:
                    used.grad = None


def _reshards(module: Any) -> bool:
    return any(group._reshard_after_forward for group in module._get_fsdp_state()._fsdp_param_groups)


# ---- states -------------------------------------------------------------------------------------------------------

Place = tuple[Any, ...]


def split_shards(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split a state into the state without its sharded tensors, and the sharded tensors by their path in it.

    Each sharded tensor is replaced by a tensor of the same shape and dtype on the meta device.
    """
    shards: dict[str, Tensor] = {}
    # Then there are no DTensors.
    if "torch.distributed.tensor" not in sys.modules or not torch.distributed.is_initialized():
        return state, shards

    def split(value: Any, path: Place) -> Any:
        if is_sharded(value):
            shards[_key(path)] = value
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        return _mapped(value, path, split)

    return split(state, ()), shards


def read_shards(state: Mapping[str, Any], *, parameters: Iterable[Tensor], device: torch.device) -> Mapping[str, Any]:
    """Fill in the sharded tensors of a loaded state: each rank reads its own shards, a single process reads all of them.

    Args:
        state: State from `Checkpoint.load`; without sharded tensors it is returned unchanged.
        parameters: Parameters of the model, which determine how tensors are sharded.
        device: Device of the tensors if no parameter is sharded.

    Raises:
        ValueError: if they cannot be read.
    """
    folder = state.get(SHARDS)
    if folder is None:
        return state
    tensors: dict[str, Tensor] = {}
    sharded = [p for p in parameters if is_sharded(p)]
    model = next(iter(sharded), None)
    alike = len({p.placements for p in sharded}) == 1  # type: ignore[attr-defined]

    def allocate(value: Any, path: Place) -> Any:
        if isinstance(value, Tensor) and value.is_meta:
            made = tensors[_key(path)] = _empty(value, model, device, alike=alike)
            return made
        return _mapped(value, path, allocate)

    filled = {key: allocate(value, (key,)) for key, value in state.items() if key != SHARDS}
    if tensors:
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a warning that no collectives are used; none are needed
                load(tensors, storage_reader=_reader(folder), **LOAD_ALONE)
        except (Exception, CheckpointException) as error:
            raise ValueError(f"the sharded tensors in {os.fspath(folder)!r} cannot be read: {error}") from error
    return filled


def _empty(meta: Tensor, model: Tensor | None, device: torch.device, *, alike: bool) -> Tensor:
    if model is None:
        return torch.empty(meta.shape, dtype=meta.dtype, device=device)
    from torch.distributed.tensor import Replicate, Shard, empty

    mesh, placements = model.device_mesh, model.placements  # type: ignore[attr-defined]
    if not alike:  # sharded by rows to be read; then as its parameter, which `spread_like` knows
        placements = [Shard(0) if meta.dim() else Replicate()] * mesh.ndim
    return empty(tuple(meta.shape), dtype=meta.dtype, device_mesh=mesh, placements=placements)


def _mapped(value: Any, path: Place, function: Any) -> Any:
    """A copy of a container with ``function(value, path)`` applied to its items; other values unchanged."""
    if isinstance(value, dict):
        same = copy.copy(value)  # keeps the metadata of a module's state_dict
        for key, item in value.items():
            same[key] = function(item, (*path, key))
        return same
    if type(value) in (list, tuple):
        return type(value)(function(item, (*path, place)) for place, item in enumerate(value))
    return value


def _key(path: Place) -> str:
    return json.dumps(path, default=repr)  # unique for each path


# ---- the disk -----------------------------------------------------------------------------------------------------


class ShardFiles:
    """Writes sharded tensors with torch.distributed.checkpoint: each rank writes its shards, and rank 0 coordinates.

    It uses a separate gloo group, so that it can run in a thread during training. All ranks create it at the same time.

    Args:
        timeout: Seconds after which a rank that does not answer counts as lost; it includes the time in which others write.
    """

    def __init__(self, timeout: float) -> None:
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def write(self, folder: Path, shards: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """On rank 0: make every rank write its shards to a new folder; returns the files with their sizes and sha256.

        Raises:
            OSError: if any rank could not.
        """
        self._send(("write", str(folder)))
        return self._write(folder, shards)

    def done(self, outcome: Any) -> None:
        """On rank 0: end `assist` on the other ranks, which returns ``outcome``."""
        self._send(("done", outcome))

    def assist(self, shards: Mapping[str, Tensor]) -> Any:
        """On other ranks: write the local shards whenever rank 0 requests it, until `done`; returns rank 0's outcome."""
        while True:
            what, value = self._receive()
            if what == "done":
                return value
            try:
                self._write(Path(value), shards)
            except Exception:
                continue  # rank 0 also gets the error, and decides how to continue

    def _write(self, folder: Path, shards: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        try:
            save(dict(shards), storage_writer=FileSystemWriter(folder), process_group=self.group)
        except CheckpointException as error:  # raised on all ranks; it is not an Exception
            failures = {rank: failure for rank, (failure, _) in error.failures.items()}
            own_failure = failures.get(dist.get_rank(self.group))
            if own_failure is not None and not isinstance(own_failure, Exception):
                raise own_failure from None  # Ctrl-C
            causes = "; ".join(
                f"rank {rank}: {type(failure).__name__}: {failure}" for rank, failure in failures.items()
            )
            raise OSError(f"the shards could not be written to {str(folder)!r}: {causes}") from None
        return self._entries(folder)

    def _entries(self, folder: Path) -> dict[str, dict[str, Any]]:
        """The files that all ranks have written to a folder, with their sizes and sha256; collective."""
        rank = dist.get_rank(self.group)
        own: dict[str, Any] = {}
        problem = None
        try:
            for path in sorted(folder.iterdir()):
                if path.name.startswith(f"__{rank}_") or (rank == 0 and path.name == ".metadata"):
                    own[path.name] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
        except OSError as error:
            problem = f"rank {rank}: {error}"
        every: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(every, (own, problem), group=self.group)
        if problems := [problem for _, problem in every if problem is not None]:
            raise OSError(f"the shards written to {str(folder)!r} cannot be read: {'; '.join(problems)}")
        return {name: entry for files, _ in every for name, entry in files.items()}

    def _send(self, message: Any) -> None:
        dist.broadcast_object_list([message], src=0, group=self.group)

    def _receive(self) -> Any:
        message: list[Any] = [None]
        dist.broadcast_object_list(message, src=0, group=self.group)
        return message[0]


def sha256_of(path: Path) -> str:
    """The sha256 of a file, read in chunks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_HARMLESS = {
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}
_HARMLESS_FROM = {"torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles the metadata of torch.distributed.checkpoint, restricted to the classes that such metadata contains."""

    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # where Python 3.13 defines its paths
        found = super().find_class(module, name) if module in _HARMLESS_FROM or module == "torch" else None
        is_class = isinstance(found, type) and found.__module__ in _HARMLESS_FROM
        if (module, name) in _HARMLESS or is_class or isinstance(found, torch.dtype):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the metadata of a checkpoint must not contain a {module}.{name}")


def _reader(folder: str | os.PathLike[str]) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    # Before torch's own code, of which some versions hide why it cannot be read.
    with open(Path(folder, ".metadata"), "rb") as file:
        metadata = _MetadataUnpickler(file).load()

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata

    return Reader(folder)
