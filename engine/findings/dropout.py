"""Whether dropout is computed where it should not be."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["ActiveDropout", "EagerMode", "LookingHook", "has_other_path", "is_compiled"]

_FUSED = nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer


class EagerMode(TorchFunctionMode):
    """A mode that only looks, and leaves for good when something is compiled inside the ``with`` block.

    Dynamo traces a mode with the function, and ties the graph to it: it would break or refuse the graph, and compile once more
    without the mode.
    """

    def __enter__(self) -> Any:
        self._left = False
        callbacks = sys.modules.get("torch._dynamo.callback")
        self._callbacks: Any = getattr(callbacks, "callback_handler", None)  # None before anything could be compiled
        if self._callbacks is not None:
            self._callbacks.register_start_callback(self._leave)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        if self._callbacks is not None:
            self._callbacks.remove_start_callback(self._leave)
        if not self._left:
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    @property
    def has_left(self) -> bool:
        """Whether it no longer looks, because something is compiled."""
        return self._left

    def _leave(self, compilation: Any = None) -> None:  # which is given from torch 2.9 on
        """Leave the stack of modes, before it is looked at for a compilation."""
        inside = _get_current_function_mode_stack()
        if self._left or self not in inside:  # it is the stack of another thread
            return
        self._left = True
        above = inside[inside.index(self) + 1 :]
        for _ in range(len(above) + 1):
            _pop_mode()
        for mode in above:
            _push_mode(mode)


class LookingHook:
    """A hook of a module that only looks. One that is copied or pickled with the module does nothing.

    Args:
        look: What the hook calls; None for nothing.
    """

    def __init__(self, look: Callable[..., Any] | None = None) -> None:
        self._look = look

    def __call__(self, *given: Any) -> None:
        if self._look is not None:
            self._look(*given)

    def __reduce__(self) -> tuple[type[LookingHook], tuple[()]]:
        return LookingHook, ()


class ActiveDropout(EagerMode):
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


def has_other_path(engine: Engine) -> bool:
    """Whether a mode around the forward would change it: what is compiled is compiled again, and attention is not fused.

    In eval mode, attention and encoders of torch compute in one function, with other rounding, but not inside a mode.
    """
    fused = (part for root in engine.modules.values() for part in root.modules() if isinstance(part, _FUSED))
    return any(not part.training for part in fused) or is_compiled(engine)


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
