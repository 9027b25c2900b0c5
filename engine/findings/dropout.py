"""Whether dropout is computed where it should not be."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["ActiveDropout", "is_compiled"]


class ActiveDropout(TorchFunctionMode):
    """Notes whether dropout is computed inside the ``with`` block with a rate above zero, as in training.

    Attributes:
        seen: whether it was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        name = getattr(func, "__name__", "")
        if "dropout" in name:
            rate = named.get("p", args[1] if len(args) > 1 else 0)
            training = named.get("training", named.get("train", args[2] if len(args) > 2 else False))
            self.seen = self.seen or bool(training and rate)
        elif name == "scaled_dot_product_attention":
            self.seen = self.seen or bool(named.get("dropout_p", args[4] if len(args) > 4 else 0))
        return func(*args, **named)


def is_compiled(engine: Engine) -> bool:
    """Whether a part of the model, or any function of this process, is compiled: a mode around it has it compiled again."""
    # torch.compile notes each backend that it was given, of which only `torch._dynamo.reset` knows otherwise.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if any(backend is not None for backend in getattr(dynamo, "cached_backends", {}).values()):
        return True
    roots = [*engine.modules.values(), *([engine.model] if isinstance(engine.model, nn.Module) else [])]
    return any(
        type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None
        for root in roots
        for part in root.modules()
    )
