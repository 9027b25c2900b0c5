"""Hooks on modules: which modules there are, and whether their hooks are called."""

from __future__ import annotations

from torch import nn

from signalfire import Engine, Handler
from signalfire.models.modules import bare_name

from .claims import COMPILATION

__all__ = ["check_not_compiled", "named_modules"]


def named_modules(engine: Engine) -> dict[str, nn.Module]:
    """All modules inside of the engine's by path; several modules of the engine prefix the paths with their own name."""
    return {
        bare_name(path): part
        for root, module in engine.modules.items()
        for path, part in module.named_modules(prefix=engine.modules.prefix(root))
        if path
    }


def check_not_compiled(handler: Handler, engine: Engine) -> None:
    """Raise ValueError for a compiled model, which leaves out hooks that come and go; also for one that is going to be."""
    if (other := engine.overrides.owner_of(COMPILATION)) is not None:
        raise ValueError(
            f"{handler.name!r} needs hooks that come and go, which the modules that {other!r} compiles do not call; detach one "
            "of the two"
        )
    for root, module in engine.modules.items():
        for path, part in module.named_modules(prefix=root):
            if type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None:
                raise ValueError(
                    f"{handler.name!r}: {path!r} is compiled, and compiled modules do not call the hooks that it needs; detach "
                    "the handler, or do not compile"
                )
