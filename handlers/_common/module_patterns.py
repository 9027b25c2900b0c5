"""Modules that are chosen by paths, patterns of paths, or classes."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from signalfire import Engine
from signalfire.models.modules import bare_name

from .hooks import modules_by_path

__all__ = ["Pattern", "check_modules", "find_modules", "named_modules", "outermost"]

Pattern = str | type[nn.Module]


def check_modules(owner: object, modules: Any) -> list[Pattern]:
    """Paths, patterns and classes as a list.

    Raises:
        TypeError, ValueError: For any other value, and for an empty list.
    """
    where = f"{type(owner).__name__}(modules={modules!r})"
    several = list(modules) if isinstance(modules, list | tuple | set) else [modules]
    for one in several:
        if not (isinstance(one, str) and one) and not (isinstance(one, type) and issubclass(one, nn.Module)):
            raise TypeError(f"{where}: {one!r} is not a module path, a pattern such as 'blocks.*', or a module class")
    if not several:
        raise ValueError(f"{where}: expected at least one module")
    return several


def named_modules(engine: Engine) -> dict[str, nn.Module]:
    """All modules of the engine by path, without the parts that torch's wrappers add; the only model has an empty path."""
    return {bare_name(path): module for path, module in modules_by_path(engine).items()}


def find_modules(owner: str, named: dict[str, nn.Module], patterns: list[Pattern]) -> dict[str, nn.Module]:
    """The outermost modules that match one of the patterns; a list of modules, which is never called, stands for its items.

    Args:
        owner: Name of the handler.
        named: Modules by path; the one without a path is left out.
        patterns: What `check_modules` returned.

    Raises:
        ValueError: For a pattern that matches nothing.
    """
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matching = {path: module for path, module in named.items() if path and _matches(pattern, path, module)}
        if not matching:
            shown = ", ".join(map(repr, [path for path in named if path][:8]))
            raise ValueError(f"{owner!r}: modules={pattern!r} matches no module; available modules: {shown or 'none'}")
        for path, module in matching.items():
            found.update(_items(path, module))
    return outermost(found)


def outermost(found: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules that are not inside another module."""
    inside = {part for module in found.values() for part in module.modules() if part is not module}
    return {path: module for path, module in found.items() if module not in inside}


def _matches(pattern: Pattern, path: str, module: nn.Module) -> bool:
    return isinstance(module, pattern) if isinstance(pattern, type) else fnmatchcase(path, bare_name(pattern))


def _items(path: str, module: nn.Module) -> dict[str, nn.Module]:
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return {path: module}
    found: dict[str, nn.Module] = {}
    for name, item in module.named_children():
        found.update(_items(f"{path}.{name}", item))
    return found
