"""Merges the states of all ranks into one: the state of rank 0, and for every other rank its differences.

Most of the state is the same on all ranks, except for example random states and the gradients of an open window. Nothing is
assumed to be equal: every tensor is compared by its sha256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .processes import Processes
from .sharded import is_sharded
from .shards import OF_SHARDS

__all__ = ["for_rank", "gather_shards", "of_all", "own_alone"]

# A difference is None, or a pair of one of these and a value; a list, because torch.load(weights_only=True) accepts it.
IS, WITHIN = "is", "within"


def of_all(own: dict[str, Any], processes: Processes) -> dict[str, Any]:
    """Merge the states of all ranks on rank 0; on other ranks, return their own. Collective: each rank passes its own state."""
    if not processes.distributed:
        return own
    digests = processes.broadcast(_digest(own) if processes.is_rank_zero else None)
    differing = processes.collect(None if processes.is_rank_zero else _difference(own, digests))
    ranks = {str(rank): part for rank, part in enumerate(differing) if rank}
    return own | {"processes": processes.world_size, "rank": processes.rank, "ranks": ranks}


def own_alone(own: dict[str, Any], processes: Processes) -> dict[str, Any]:
    """The state of this rank in the form of a merged one that has no other ranks."""
    place = {"processes": processes.world_size, "rank": processes.rank, "ranks": {}}
    return own | place if processes.distributed else own


def gather_shards(own: dict[str, Any], processes: Processes) -> dict[str, Any]:
    """A state of this rank with the parts of all shards, in handlers' states and in windows. Collective if it has any."""
    parts = [
        one for one in (*own["handlers"].values(), *_kept_batches(own)) if isinstance(one, dict) and OF_SHARDS in one
    ]
    if not parts:
        return own
    for several in processes.gather([one[OF_SHARDS] for one in parts]):
        for one, of_rank in zip(parts, several, strict=True):
            one[OF_SHARDS] = one[OF_SHARDS] | of_rank
    return own


def _kept_batches(own: Mapping[str, Any]) -> list[Any]:
    """The batches that open windows of a state keep."""
    windows = [update["window"] for update in own["updates"].values() if update["window"] is not None]
    return [batch for window in windows for batch, *_ in window["kept"] or ()]


def for_rank(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """The state of one rank; if it was not saved, the state of the rank in ``state["rank"]``."""
    difference = state.get("ranks", {}).get(str(rank))
    own: dict[str, Any] = _merged({key: state[key] for key in state if key not in ("rank", "ranks")}, difference)
    return own | {"rank": rank if str(rank) in state.get("ranks", {}) else state.get("rank", 0)}


def _digest(value: Any) -> Any:
    """A tree with the structure of the state and a sha256 in place of every leaf."""
    if isinstance(value, Mapping):
        return {key: _digest(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_digest(item) for item in value] if _has_tensors(value) else _sha256(repr(value).encode())
    if is_sharded(value) or (isinstance(value, Tensor) and value.is_meta):  # each rank has its part of one tensor
        return _sha256(f"{value.dtype} {tuple(value.shape)}".encode())
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        content = _sha256(plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
        return _sha256(f"{plain.dtype} {tuple(plain.shape)}".encode() + content)
    return _sha256(f"{type(value).__name__} {value!r}".encode())


def _sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _has_tensors(values: Iterable[Any]) -> bool:
    return any(isinstance(value, Tensor | Mapping) or (isinstance(value, list | tuple) and _has_tensors(value))
               for value in values)  # fmt: skip


def _difference(own: Any, digest: Any) -> Any:
    """The difference of a state to the one with this digest; None if they are equal."""
    if isinstance(own, Mapping) and isinstance(digest, dict) and own.keys() == digest.keys():
        pairs = [(key, item, digest[key]) for key, item in own.items()]
    elif isinstance(own, list | tuple) and isinstance(digest, list) and len(own) == len(digest):
        pairs = [(place, item, digest[place]) for place, item in enumerate(own)]
    else:
        return None if _digest(own) == digest else [IS, own]
    parts = {key: part for key, item, other in pairs if (part := _difference(item, other)) is not None}
    return [WITHIN, parts] if parts else None


def _merged(base: Any, difference: Any) -> Any:
    if difference is None:
        return base
    kind, parts = difference
    if kind == IS:
        return parts
    if isinstance(base, Mapping):
        return {key: _merged(item, parts.get(key)) for key, item in base.items()}
    merged = [_merged(item, parts.get(place)) for place, item in enumerate(base)]
    return tuple(merged) if isinstance(base, tuple) else merged
