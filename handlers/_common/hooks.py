"""Hooks on modules: which modules there are, and whether their hooks are called."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from signalfire import Engine, Handler
from signalfire.models.modules import bare_name

from .claims import COMPILATION
from .parameters import matches

__all__ = ["check_matches", "check_not_compiled", "modules_by_path", "named_modules"]


def modules_by_path(engine: Engine) -> dict[str, nn.Module]:
    """All modules of the engine by path; several models prefix the paths with their names."""
    return {
        path: part
        for root, module in engine.modules.items()
        for path, part in module.named_modules(prefix=engine.modules.prefix(root))
    }


def named_modules(engine: Engine) -> dict[str, nn.Module]:
    """All submodules of the engine's modules by path, without the parts that torch's wrappers add to a path."""
    return {bare_name(path): part for path, part in modules_by_path(engine).items() if path}


def check_matches(handler: Handler, argument: str, patterns: Iterable[str], named: dict[str, nn.Module]) -> None:
    """Raise ValueError for a pattern that matches no module; the error shows some of the modules."""
    for pattern in patterns:
        if not any(matches(path, pattern) for path in named):
            some = ", ".join(map(repr, list(named)[:8])) + (", ..." if len(named) > 8 else "")
            where = f"{handler.name!r}: {argument}={pattern!r}"
            raise ValueError(f"{where} matches no module; available modules: {some}")


def check_not_compiled(handler: Handler, engine: Engine) -> None:
    """Raise ValueError for a model that is or will be compiled, because it skips hooks that are added and removed."""
    if (other := engine.overrides.owner_of(COMPILATION)) is not None:
        raise ValueError(
            f"{handler.name!r} adds hooks during the run, but modules compiled by {other!r} do not call these hooks; "
            "detach one of the two"
        )
    for root, module in engine.modules.items():
        for path, part in module.named_modules(prefix=root):
            if type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None:
                raise ValueError(
                    f"{handler.name!r}: {path!r} is compiled, and compiled modules do not call the hooks that the "
                    "handler adds; detach the handler, or leave this module uncompiled"
                )
