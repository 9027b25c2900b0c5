"""Training and eval mode: of a model as a run begins, and as it was before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from .kernel import Kernel

__all__ = ["Modes", "modules_of", "parts_in_eval", "set_modes"]


def modules_of(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """These modules with their submodules, each once."""
    return list(dict.fromkeys(module for root in roots for module in root.modules()))


class Modes:
    """Which of some modules are in training mode, so that this can be restored.

    Args:
        roots: the modules; their submodules are included.
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self._modes = [(module, module.training) for module in modules_of(roots)]

    def put_back(self) -> None:
        for module, mode in self._modes:
            module.training = mode


def set_modes(engine: Kernel) -> None:
    """Put the modules in training or eval mode; in training, frozen parts that were in eval mode alone stay in it.

    A part is in eval mode alone if the module around it is in training mode, so that it is meant: a backbone whose statistics
    and dropout are to rest. A model that is in eval mode as a whole was evaluated before, and is trained.
    """
    if not engine.training:
        for root in engine.modules.values():
            root.train(False)
        return
    kept = Modes(parts_in_eval(engine)[0].values())
    for root in engine.modules.values():
        root.train()
    kept.put_back()


def parts_in_eval(engine: Kernel) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """The parts that are in eval mode alone, by their paths: the frozen ones and the others."""
    frozen: dict[str, nn.Module] = {}
    others: dict[str, nn.Module] = {}
    for name, root in engine.modules.items():
        if root.training:
            for path, part in _in_eval_alone(root, name):
                (frozen if _is_frozen(part) else others)[path] = part
        elif len(engine.modules) > 1 and engine.model.training and _is_frozen(root):
            frozen[name] = root
    return frozen, others


def _in_eval_alone(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if child.training:
            yield from _in_eval_alone(child, f"{path}.{name}")
        else:
            yield f"{path}.{name}", child


def _is_frozen(module: nn.Module) -> bool:
    """Whether a module has weights or statistics, and none of them is trained."""
    tensors = [*module.parameters(), *module.buffers()]
    return bool(tensors) and not any(tensor.requires_grad for tensor in tensors)
