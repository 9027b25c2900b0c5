"""The frozen base of a model: parameters that no checkpoint has to hold, because each run has them from its beginning.

A checkpoint of what is trained, such as the adapters of LoRA, is of use only together with the same base: it has the names and
a sha256 of the parameters that it leaves out.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.processes import Processes
from ..distributed.sharded import is_sharded, local_part, whole_tensor
from ..models.modules import bare_name
from .keys import BASE, UNSAVED

__all__ = ["FrozenBase", "fill_in", "leave_out", "without"]


_BLOCK = 4096
"""Words of 8 bytes that are summed up: a change moves the sum of its block."""


class FrozenBase:
    """The parameters that are frozen from the beginning of a run and still have their original values.

    Attributes:
        size: Bytes of all of them.
    """

    def __init__(self) -> None:
        self.size = 0
        self._digests: dict[str, str] = {}
        self._marks: dict[str, Hashable] = {}

    @property
    def count(self) -> int:
        """Number of these parameters."""
        return len(self._digests)

    def record(self, modules: Mapping[str, nn.Module]) -> None:
        """Record the parameters that are currently frozen. Collective if any is sharded."""
        saved = {f"{root}.{key}" for root, module in modules.items() for key in module.state_dict()}
        frozen = {name: p for name, p in _parameters(modules) if not p.requires_grad and name in saved}
        self._digests = {name: _digest(p) for name, p in frozen.items()}
        self._note(frozen, {name: _mark(p) for name, p in frozen.items()})

    def recheck(self, modules: Mapping[str, nn.Module]) -> None:
        """Forget the parameters whose values a loaded state has changed. Collective if any is sharded."""
        kept = {n: p for n, p in _parameters(modules) if n in self._digests and _digest(p) == self._digests[n]}
        self._digests = {name: self._digests[name] for name in kept}
        self._note(kept, {name: _mark(p) for name, p in kept.items()})

    def names(self, modules: Mapping[str, nn.Module], processes: Processes) -> frozenset[str]:
        """The names to leave out, such as "model.0.weight". A parameter that has changed once is never left out again.

        Collective if any parameter is sharded, because a change may affect the shard of only one rank.
        """
        same = {n: p for n, p in _parameters(modules) if n in self._marks and _mark(p) == self._marks[n]}
        if any(is_sharded(p) for _, p in _parameters(modules)):
            on_all = frozenset.intersection(*map(frozenset, processes.gather(sorted(same))))
            same = {name: p for name, p in same.items() if name in on_all}
        self._digests = {name: self._digests[name] for name in same}
        self._note(same, {name: self._marks[name] for name in same})
        return frozenset(name for name, p in same.items() if not p.requires_grad)

    def entry(self, names: Collection[str]) -> dict[str, Any]:
        """The manifest entry of the parameters with these names."""
        return {"sha256": {bare_name(name): self._digests[name] for name in sorted(names)}}

    def _note(self, parameters: Mapping[str, Tensor], marks: dict[str, Hashable]) -> None:
        self._marks = marks
        self.size = sum(p.nbytes for p in parameters.values())


def without(state: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    """A complete state as it is written, without the parameters of these names."""
    if UNSAVED in state:
        state[UNSAVED].report()
        state = {key: value for key, value in state.items() if key != UNSAVED}
    return {**state, "modules": leave_out(state["modules"], names)} if names else state


def leave_out(states: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The states of modules without the tensors of these names."""
    left, names = dict(states), {bare_name(name) for name in names}
    for root, state in states.items():
        if any(name.startswith(f"{root}.") for name in names):
            left[root] = copy.copy(state)  # keeps the metadata
            for key in [key for key in state if bare_name(f"{root}.{key}") in names]:
                del left[root][key]
    return left


def fill_in(
    modules: Mapping[str, nn.Module], saved: Mapping[str, Any], where: str, *, weights: bool = False
) -> Mapping[str, Any]:
    """A loaded state with the parameters of these modules in place of those that it leaves out. Collective if any is sharded.

    Args:
        modules: Modules of the engine.
        saved: State from `Checkpoint.load`.
        where: Caller, for messages.
        weights: Whether only weights are loaded, for which losses may be there or not.

    Raises:
        ValueError: if they are not those that the state was trained with.
    """
    if BASE not in saved:
        return saved
    left_out = saved[BASE]["sha256"]
    if weights:  # without losses that only one of the two has
        left_out = {
            name: one for name, one in left_out.items() if name.partition(".")[0] in modules or not _is_loss(name)
        }
    own = {name: p for name, p in _parameters(modules) if bare_name(name) in left_out}
    if missing := left_out.keys() - {bare_name(name) for name in own}:
        raise ValueError(
            f"{where}: the state was saved without its frozen parameters, but some of them, such as {min(missing)!r}, "
            "are missing from this model; build the model from the same base, such as the same pretrained weights"
        )
    if different := [name for name, p in own.items() if _digest(p) != left_out[bare_name(name)]]:
        raise ValueError(
            f"{where}: the state was saved without its {len(left_out)} frozen parameters, but {len(different)} of "
            f"these parameters, such as {min(different)!r}, have different values in this model; build the model from "
            "the same base, such as the same pretrained weights"
        )
    filled = dict(saved["modules"])
    for name, parameter in own.items():
        root, _, key = name.partition(".")
        if filled[root] is saved["modules"][root]:
            filled[root] = copy.copy(filled[root])
        filled[root][key] = parameter.detach()
    return {**saved, "modules": filled}


def _parameters(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for root, module in modules.items():
        yield from module.named_parameters(prefix=root, remove_duplicate=False)


def _digest(tensor: Tensor) -> str:
    """The sha256 of the values, the shape and the dtype of a tensor."""
    whole = whole_tensor(tensor.detach()).cpu().resolve_conj().resolve_neg().contiguous()
    found = hashlib.sha256(f"{whole.dtype} {list(whole.shape)}".encode())
    found.update(whole.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _mark(tensor: Tensor) -> Hashable:
    """A fast checksum of a tensor, or of its local shard: its version, and sums of its bits.

    The version alone does not count changes through ``data``, nor those of some fused optimizers.
    """
    bits = local_part(tensor.detach()).resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if bits.storage_offset() % 8:  # a view into other memory, which cannot be read in words
        bits = bits.clone()
    words = bits[: len(bits) // 8 * 8].view(torch.int64)
    blocks = len(words) // _BLOCK * _BLOCK
    sums = [words[:blocks].view(-1, _BLOCK).sum(1), words[blocks:].sum()[None], bits[len(words) * 8 :].sum()[None]]
    return tensor._version, tuple(torch.cat(sums).tolist())


def _is_loss(name: str) -> bool:
    root = name.partition(".")[0]
    return root == "loss" or root.endswith("_loss")
