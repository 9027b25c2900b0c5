"""Sharded tensors (DTensors): their local parts, the whole tensors, and how both are saved and loaded.

The parameters of a model that `fully_shard` has sharded are DTensors, and so are its gradients, optimizer states and averages.
Everything here passes ordinary tensors through, and imports nothing as long as there are only these.
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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "SHARDS",
    "ShardFiles",
    "discard_unreduced",
    "is_sharded",
    "local_part",
    "norms_over_ranks",
    "read_shards",
    "reshard",
    "sha256_of",
    "split_shards",
    "spread_like",
    "unsharded",
    "whole_tensor",
]

SHARDS = "shards"
"""The entry of a loaded state with the folder of its sharded tensors."""


_PLAIN = (Tensor, nn.Parameter)


def is_sharded(value: object) -> bool:
    """Whether a tensor is a DTensor, of which each process holds a part."""
    if type(value) in _PLAIN:  # asked for every parameter in every step
        return False
    module = sys.modules.get("torch.distributed.tensor")  # without it, there is none
    return module is not None and isinstance(value, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """The part that this process holds, sharing its memory; an ordinary tensor is whole everywhere."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def whole_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor. Collective for a sharded one."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def spread_like(value: Any, own: Any) -> Any:
    """Shard a value like another tensor, or make it whole if the other one is not sharded."""
    if not isinstance(value, Tensor) or not isinstance(own, Tensor) or value.is_meta:
        return value
    if is_sharded(own) and not is_sharded(value):
        if value.shape != own.shape:
            return value
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = own.device_mesh, own.placements  # type: ignore[attr-defined]
        # Each process has the whole, and keeps a copy of its part: there is nothing to send.
        return distribute_tensor(value.to(own.device), mesh, placements, src_data_rank=None).clone()
    return whole_tensor(value) if is_sharded(value) and not is_sharded(own) else value


def norms_over_ranks(norms: Tensor, of: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norms of tensors from those of the parts that this process holds; NaN stays NaN.

    Args:
        norms: the norm of each part, in one tensor.
        of: the tensors, all of them spread over the same processes, or none.
        norm_type: the p of the norm.
    """
    sharded = next((tensor for tensor in of if is_sharded(tensor)), None)
    if sharded is None:
        return norms
    from torch.distributed.tensor import DTensor, Shard

    mesh = sharded.device_mesh  # type: ignore[attr-defined]
    # Gathered and not reduced: one collective for all of them, whatever p is, and a maximum may lose a NaN.
    gathered = DTensor.from_local(norms[None], mesh, [Shard(0)], run_check=False).full_tensor()
    together = torch.linalg.vector_norm(gathered, norm_type, dim=0)
    return torch.where(torch.tensor([is_sharded(t) for t in of], device=norms.device), together, norms)


# ---- modules ------------------------------------------------------------------------------------------------------


def _sharded_modules(roots: Iterable[nn.Module]) -> list[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return [module for root in roots for module in root.modules() if isinstance(module, fsdp.FSDPModule)]


def reshard(roots: Iterable[nn.Module]) -> None:
    """Free the whole parameters that a forward without a backward may have gathered."""
    for module in _sharded_modules(roots):
        module.reshard()


@contextmanager
def unsharded(roots: Iterable[nn.Module]) -> Iterator[None]:
    """Hold whole parameters, so that a forward needs no other process. Collective to enter; no training inside."""
    modules = _sharded_modules(roots)
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


def discard_unreduced(roots: Iterable[nn.Module]) -> None:
    """Release gradients that no backward has reduced.

    torch has no function for it: in 2.13 ``reset_iter_state``, which is to do it, leaves them for the next backward.
    """
    for module in _sharded_modules(roots):
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
    """Split a state into the state without its sharded tensors, and these tensors by their paths in it.

    In its place, each leaves a tensor of the same shape and dtype on the meta device.
    """
    shards: dict[str, Tensor] = {}
    if "torch.distributed.tensor" not in sys.modules or not torch.distributed.is_initialized():  # then there is none
        return state, shards

    def split(value: Any, path: Place) -> Any:
        if is_sharded(value):
            shards[_key(path)] = value
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        return _mapped(value, path, split)

    return split(state, ()), shards


def read_shards(state: Mapping[str, Any], *, parameters: Iterable[Tensor], device: torch.device) -> Mapping[str, Any]:
    """Fill the sharded tensors of a loaded state: each process reads its own parts of them, a single process reads all.

    Args:
        state: as `Checkpoint.load` returns it; one without sharded tensors is returned as it is.
        parameters: of the model, which say how tensors are spread over the processes.
        device: where tensors are put if no parameter is sharded.

    Raises:
        ValueError: if they cannot be read.
    """
    folder = state.get(SHARDS)
    if folder is None:
        return state
    tensors: dict[str, Tensor] = {}
    model = next((p for p in parameters if is_sharded(p)), None)

    def allocate(value: Any, path: Place) -> Any:
        if isinstance(value, Tensor) and value.is_meta:
            made = tensors[_key(path)] = _empty(value, model, device)
            return made
        return _mapped(value, path, allocate)

    filled = {key: allocate(value, (key,)) for key, value in state.items() if key != SHARDS}
    if tensors:
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there are no collectives, which nothing here needs
                load(tensors, storage_reader=_reader(folder), no_dist=True)
        except (Exception, CheckpointException) as error:
            raise ValueError(f"the sharded tensors in {os.fspath(folder)!r} cannot be read: {error}") from error
    return filled


def _empty(meta: Tensor, model: Tensor | None, device: torch.device) -> Tensor:
    if model is None:
        return torch.empty(meta.shape, dtype=meta.dtype, device=device)
    from torch.distributed.tensor import empty

    # As `fully_shard` spreads parameters, whatever it is that has their shapes.
    mesh, placements = model.device_mesh, model.placements  # type: ignore[attr-defined]
    return empty(tuple(meta.shape), dtype=meta.dtype, device_mesh=mesh, placements=placements)


def _mapped(value: Any, path: Place, function: Any) -> Any:
    """A value with what a function of (value, path) makes of the things in it."""
    if isinstance(value, dict):
        same = copy.copy(value)  # a module's state has metadata
        for key, item in value.items():
            same[key] = function(item, (*path, key))
        return same
    if type(value) in (list, tuple):
        return type(value)(function(item, (*path, place)) for place, item in enumerate(value))
    return value


def _key(path: Place) -> str:
    return json.dumps(path, default=repr)  # no two paths give the same, whatever their keys are made of


# ---- the disk -----------------------------------------------------------------------------------------------------


class ShardFiles:
    """Writes sharded tensors with torch.distributed.checkpoint: each process writes its parts, and rank 0 coordinates.

    The processes talk over a gloo group of its own, so that it can be used in a thread while they train. All processes
    create one at the same time.

    Args:
        timeout: seconds after which a process that does not answer counts as lost; others may be writing meanwhile.
    """

    def __init__(self, timeout: float) -> None:
        from datetime import timedelta

        import torch.distributed as dist

        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def write(self, folder: Path, shards: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """Rank 0: let every process write its parts into a new folder; returns the files with their sizes and sha256.

        Raises:
            OSError: if any process could not.
        """
        self._send(("write", str(folder)))
        return self._write(folder, shards)

    def done(self, outcome: Any) -> None:
        """Rank 0: end the others' `assist`, which returns ``outcome``."""
        self._send(("done", outcome))

    def assist(self, shards: Mapping[str, Tensor]) -> Any:
        """Any other rank: write its parts whenever rank 0 asks, until rank 0 is done; returns rank 0's outcome."""
        while True:
            what, value = self._receive()
            if what == "done":
                return value
            try:
                self._write(Path(value), shards)
            except Exception:
                continue  # rank 0 gets the error, too, and decides how to continue

    def _write(self, folder: Path, shards: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        import torch.distributed as dist
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        try:
            save(dict(shards), storage_writer=FileSystemWriter(folder), process_group=self.group)
        except CheckpointException as error:  # all of them get it, and it is no Exception
            failures = {rank: failure for rank, (failure, _) in error.failures.items()}
            own_failure = failures.get(dist.get_rank(self.group))
            if own_failure is not None and not isinstance(own_failure, Exception):
                raise own_failure from None  # Ctrl-C
            told = "; ".join(f"rank {rank}: {type(failure).__name__}: {failure}" for rank, failure in failures.items())
            raise OSError(f"the shards could not be written to {str(folder)!r}: {told}") from None
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
            raise OSError(f"what was written to {str(folder)!r} cannot be read: {'; '.join(problems)}")
        return {name: told for files, _ in every for name, told in files.items()}

    def _send(self, message: Any) -> None:
        import torch.distributed as dist

        dist.broadcast_object_list([message], src=0, group=self.group)

    def _receive(self) -> Any:
        import torch.distributed as dist

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
    """Reads the metadata that torch.distributed.checkpoint pickles, and calls nothing that such metadata does not consist of."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module in _HARMLESS_FROM or module == "torch" else None
        is_class = isinstance(found, type) and found.__module__ in _HARMLESS_FROM
        if (module, name) in _HARMLESS or is_class or isinstance(found, torch.dtype):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the metadata of a checkpoint does not hold a {module}.{name}")


def _reader(folder: str | os.PathLike[str]) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with open(Path(self.path) / ".metadata", "rb") as file:
                return _MetadataUnpickler(file).load()

    return Reader(folder)
