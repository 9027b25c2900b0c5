"""Helpers for parameters: their names, selection by patterns, gradients and norms."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from signalfire import Engine, UpdateState
from signalfire.distributed.norms import any_sharded, norms
from signalfire.models.modules import Modules, bare_name

__all__ = [
    "alike",
    "all_names",
    "any_sharded",
    "check_matches",
    "check_patterns",
    "gradients_of",
    "longest_match",
    "matches",
    "moments_of",
    "named_parameters",
    "norm_of_all",
    "norms",
    "total_norm",
]


def named_parameters(engine: Engine) -> dict[str, nn.Parameter]:
    """All parameters of the engine's modules by name; several modules prefix the names with their own."""
    return {
        bare_name(name): parameter
        for root, module in engine.modules.items()
        for name, parameter in module.named_parameters(prefix=engine.modules.prefix(root))
    }


def all_names(modules: Modules) -> dict[nn.Parameter, list[str]]:
    """All names of every parameter, of which a shared one has several; prefixed as in `named_parameters`."""
    names: dict[nn.Parameter, list[str]] = {}
    for root, module in modules.items():
        for name, parameter in module.named_parameters(prefix=modules.prefix(root), remove_duplicate=False):
            names.setdefault(parameter, []).append(bare_name(name))
    return names


def matches(name: str, pattern: str) -> bool:
    """Whether a parameter is under a path, such as "backbone", or matches a pattern with ``*``, ``?`` or ``[]``."""
    pattern = bare_name(pattern)
    if any(sign in pattern for sign in "*?["):
        return fnmatchcase(name, pattern)
    path = pattern.rstrip(".")
    return name == path or name.startswith(f"{path}.")


def check_patterns(owner: object, argument: str, value: Any) -> list[str] | None:
    """A pattern of parameter names, or several, as a list; None for None.

    Raises:
        TypeError: If it is neither.
    """
    if value is None:
        return None
    patterns = [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple | set) else []
    if patterns and all(isinstance(pattern, str) and pattern for pattern in patterns):
        return patterns
    raise TypeError(
        f"{type(owner).__name__}({argument}={value!r}): expected a name pattern or a list of them, such as ['*.weight']"
    )


def longest_match(names: Iterable[str], patterns: Iterable[str]) -> str | None:
    """The longest pattern that matches one of a parameter's names; None if none does."""
    there = list(names)
    fitting = (pattern for pattern in patterns if any(matches(name, pattern) for name in there))
    return max(fitting, key=len, default=None)


def check_matches(
    where: str, patterns: Iterable[str], names: Collection[str], parameters: Collection[str] | None = None
) -> None:
    """Raise ValueError for a pattern that matches none of the names, which are those of parameters; the error shows some."""
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            there = list(names if parameters is None else parameters)
            shown = ", ".join(map(repr, there[:5])) + (f", ... ({len(there)} in total)" if len(there) > 5 else "")
            raise ValueError(f"{where}{pattern!r} matches no parameter; the parameters are {shown or 'none'}")


def gradients_of(update: UpdateState) -> list[Tensor]:
    """The gradients of an update's parameters, in order; parameters without a gradient are skipped."""
    return [parameter.grad for parameter in update.parameters if parameter.grad is not None]


def moments_of(engine: Engine, parameters: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors that optimizers hold in the shapes of these parameters, such as momentum, each after its parameter."""
    states = [update.optimizer.state for update in engine.updates if update.optimizer is not None]
    for parameter in parameters:
        for value in (value for state in states for value in state.get(parameter, {}).values()):
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                yield parameter, value


def alike(gradients: Sequence[Tensor]) -> bool:
    """Whether one foreach kernel takes them all: dense tensors of one device and dtype that need no gradient."""
    first = gradients[0]
    device, dtype = first.device, first.dtype
    for one in gradients:  # without a generator, which takes a call for each of them
        if type(one) is not Tensor or one.dtype is not dtype or one.device != device:
            return False
        if one.layout is not torch.strided or one.requires_grad:
            return False
    return True


def total_norm(gradients: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """The p-norm of all gradients together, as ``torch.nn.utils.get_total_norm``, even for sharded gradients."""
    if not any_sharded(gradients):
        return torch.nn.utils.get_total_norm(gradients, norm_type)
    return norm_of_all(gradients, norm_type)


def norm_of_all(gradients: list[Tensor], norm_type: float) -> Tensor:
    """A faster `total_norm` for at least one gradient; all must be `alike` or sharded."""
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms(gradients, norm_type)), norm_type)
    return total
