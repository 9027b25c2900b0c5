"""Loading a state whole or not at all: what a load that fails has changed is put back."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..distributed.processes import lost_another
from ..distributed.sharded import is_sharded, spread_like
from ..models.modules import differences

__all__ = ["ModuleTensors", "OptimizerParts", "load_each", "load_modules", "naming", "refusal", "spread_over"]


class ModuleTensors:
    """The parameters, buffers and extra states of some modules, to be put back as they were.

    A load may copy values, change shapes, as quantization observers do, and put other tensors in place.

    Args:
        roots: the modules; their submodules are included.
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
        held: list[Any] = [own for module in modules for own in (module._parameters, module._buffers)]
        self._held = [(own, dict(own.items())) for own in held]
        tensors = dict.fromkeys(tensor for _, before in self._held for tensor in before.values() if tensor is not None)
        self._lazy = {tensor: type(tensor) for tensor in tensors if is_lazy(tensor)}
        self._values = {tensor: _copy(tensor) for tensor in tensors if tensor not in self._lazy}
        self._extra = [
            (module, copy.deepcopy(module.get_extra_state()))
            for module in modules
            if type(module).get_extra_state is not nn.Module.get_extra_state
        ]

    def put_back(self) -> None:
        for own, before in self._held:
            for key in [key for key in own if key not in before]:
                del own[key]
            for key, tensor in before.items():
                if own.get(key) is not tensor:
                    own[key] = tensor
        with torch.no_grad():
            for tensor, values in self._values.items():
                if tensor.shape == values.shape and not (tensor.layout is torch.strided and 0 in tensor.stride()):
                    tensor.copy_(values)
                else:
                    tensor.data = values.to(tensor.device)
            for tensor, kind in self._lazy.items():
                if not is_lazy(tensor):
                    tensor.data = tensor.new_empty(0)
                    tensor.__class__ = kind
        for module, state in self._extra:
            module.set_extra_state(state)


class OptimizerParts:
    """The state and the groups of some optimizers, to be put back as they were, whatever form their saved states have.

    Args:
        optimizers: torch's optimizers.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._held = [
            (
                optimizer,
                optimizer.state,
                {parameter: copy.deepcopy(state) for parameter, state in optimizer.state.items()},
                optimizer.param_groups,
                [(group, _group_copy(group)) for group in optimizer.param_groups],
            )
            for optimizer in optimizers
        ]

    def put_back(self) -> None:
        for optimizer, state, values, groups, options in self._held:
            state.clear()
            state.update(values)
            for group, own in options:
                group.clear()
                group.update(own)
            groups[:] = [group for group, _ in options]
            optimizer.state, optimizer.param_groups = state, groups


def _group_copy(group: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if key == "params" else copy.deepcopy(value) for key, value in group.items()}


def _copy(tensor: Tensor) -> Tensor:
    """A copy in the main memory; of a shard, where it is."""
    if is_sharded(tensor) or tensor.is_meta:
        return tensor.detach().clone()
    return tensor.detach().to("cpu", copy=True)


def refusal(module: nn.Module, state: Mapping[str, Any]) -> str:
    """Why a module does not take a state; empty if it does. The module is not changed.

    What does not have the same names and shapes is for the module to decide, whose load may rename keys or change shapes.
    """
    different = differences(module.state_dict(), state)
    if not different or any(isinstance(value, Tensor) and value.is_meta for value in state.values()):
        return different
    before = ModuleTensors([module])
    try:
        module.load_state_dict(spread_over(module, state))
    except Exception as error:
        if lost_another(error):
            raise
        return different
    finally:
        before.put_back()
    return ""


def load_modules(states: Mapping[nn.Module, Mapping[str, Any]]) -> None:
    """Let each module load its state; if one of them fails, none is changed.

    Raises:
        ValueError: for a state that a module refuses.
    """
    before = ModuleTensors(states)
    try:
        load_each(states)
    except BaseException:
        before.put_back()
        raise


def load_each(states: Mapping[nn.Module, Mapping[str, Any]]) -> None:
    """Let each module load its state, as strictly as it does itself."""
    for module, state in states.items():
        with naming(f"{type(module).__name__} rejects its state"):
            module.load_state_dict(spread_over(module, state))


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Say of an error of the ``with`` block which part of the loaded state it is about."""
    try:
        yield
    except Exception as error:
        if lost_another(error):
            raise
        said = " ".join(str(error).split())
        reason = said if isinstance(error, ValueError) else f"{type(error).__name__}: {said}"
        raise ValueError(f"the loaded state does not match this engine: {what}: {reason}") from error


def spread_over(root: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A module's state, sharded like the module."""
    own, spread = root.state_dict(), copy.copy(state)  # a copy keeps the metadata
    assert isinstance(spread, dict)
    for key, value in state.items():
        spread[key] = spread_like(value, own.get(key))
    return spread
