"""Parameters that are DTensors with a copy on each rank, of modules that compute on plain tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from signalfire.authoring.versions import NO_SOURCE
from signalfire.distributed import is_sharded, is_unit

__all__ = ["ReplicatedParameters"]


Held = list[tuple[nn.Module, str, Tensor | None]]
"""The parameters whose places plain tensors have taken: their modules and names."""


class ReplicatedParameters:
    """Replaces the plain parameters of a module by replicated DTensors; in a forward, plain tensors take their place.

    torch refuses to compute with a DTensor and a plain tensor together, so a module that is not split needs plain parameters. The
    hooks are on all modules, because any of them may be called directly; only the outermost call does anything. If the model is
    also sharded (FSDP), this is the outermost call of each unit, because its parameters are gathered just before.

    Args:
        root: The module; its DTensors are left alone.
        mesh: The device mesh of the copies. All ranks hold the same values already.
    """

    def __init__(self, root: nn.Module, mesh: Any) -> None:
        from torch.distributed.tensor import Replicate, distribute_tensor

        self._places: list[tuple[nn.Module, str]] = []
        self._of_unit: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        self._depth = 0
        self._held: list[tuple[nn.Module, Held]] = []  # by the calls that are under way
        replicated: dict[nn.Parameter, nn.Parameter] = {}  # shared ones stay shared
        for module in root.modules():
            for key, parameter in list(module._parameters.items()):
                if parameter is None or is_sharded(parameter):
                    continue
                if parameter not in replicated:
                    copy = distribute_tensor(parameter.detach(), mesh, [Replicate()], **NO_SOURCE)
                    replicated[parameter] = nn.Parameter(copy, requires_grad=parameter.requires_grad)
                    replicated[parameter].grad = None
                setattr(module, key, replicated[parameter])
                self._places.append((module, key))
        self._hooks: list[Any] = []
        for module in root.modules():
            self._hooks += [
                module.register_forward_pre_hook(self._begin, prepend=True),
                module.register_forward_hook(self._end, always_call=True),
            ]

    def forget_units(self) -> None:
        """Find the units again, because a different handler may have sharded the model."""
        self._of_unit.clear()

    def remove(self) -> None:
        """Remove the hooks; the parameters stay replicated."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth > 1 and not is_unit(module):
            return
        plain: dict[Tensor, Tensor] = {}  # a shared parameter is one tensor
        held: Held = []
        for holder, key in self._places_of(module):
            parameter = holder._parameters[key]
            held.append((holder, key, parameter))
            if parameter is not None and is_sharded(parameter):
                if parameter not in plain:
                    plain[parameter] = parameter.to_local()  # type: ignore[attr-defined]
                holder._parameters[key] = plain[parameter]  # type: ignore[assignment]
        self._held.append((module, held))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._held and self._held[-1][0] is module and (self._depth == 0 or is_unit(module)):
            for holder, key, parameter in self._held.pop()[1]:
                holder._parameters[key] = parameter  # type: ignore[assignment]

    def _places_of(self, unit: nn.Module) -> list[tuple[nn.Module, str]]:
        """The places in a unit that are in none of the units inside it; all, if it is none."""
        if not is_unit(unit):
            return self._places
        if unit in self._of_unit:
            return self._of_unit[unit]
        inside = {part for one in unit.modules() if one is not unit and is_unit(one) for part in one.modules()}
        own = set(unit.modules()) - inside
        self._of_unit[unit] = [place for place in self._places if place[0] in own]
        return self._of_unit[unit]
