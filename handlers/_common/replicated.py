"""Parameters that are DTensors with a copy on each rank, of modules that compute on plain tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from signalfire.distributed import is_sharded

__all__ = ["ReplicatedParameters"]


class ReplicatedParameters:
    """Replaces the plain parameters of a module by replicated DTensors; in a forward, plain tensors take their place.

    torch refuses to compute with a DTensor and a plain tensor together, so a module that is not split needs plain parameters. The
    hooks are on all modules, since any of them may be called by itself; only the outermost call does anything.

    Args:
        root: The module; its DTensors are left alone.
        mesh: The device mesh of the copies. All ranks hold the same values already.
    """

    def __init__(self, root: nn.Module, mesh: Any) -> None:
        from torch.distributed.tensor import Replicate, distribute_tensor

        self._places: list[tuple[nn.Module, str]] = []
        self._depth = 0
        replicated: dict[nn.Parameter, nn.Parameter] = {}  # shared ones stay shared
        for module in root.modules():
            for key, parameter in list(module._parameters.items()):
                if parameter is None or is_sharded(parameter):
                    continue
                if parameter not in replicated:
                    copy = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
                    replicated[parameter] = nn.Parameter(copy, requires_grad=parameter.requires_grad)
                    replicated[parameter].grad = None
                setattr(module, key, replicated[parameter])
                self._places.append((module, key))
        self._held: list[Tensor | None] = []
        self._hooks: list[Any] = []
        for module in root.modules():
            self._hooks += [
                module.register_forward_pre_hook(self._begin, prepend=True),
                module.register_forward_hook(self._end, always_call=True),
            ]

    def remove(self) -> None:
        """Remove the hooks; the parameters stay replicated."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        held: dict[Tensor, Tensor] = {}  # a shared parameter is one tensor
        self._held = [holder._parameters[key] for holder, key in self._places]
        for (holder, key), parameter in zip(self._places, self._held, strict=True):
            if parameter is not None and is_sharded(parameter):
                if parameter not in held:
                    held[parameter] = parameter.to_local()  # type: ignore[attr-defined]
                holder._parameters[key] = held[parameter]  # type: ignore[assignment]

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        self._depth = 0
        for (holder, key), parameter in zip(self._places, self._held, strict=True):
            holder._parameters[key] = parameter  # type: ignore[assignment]
        self._held = []
