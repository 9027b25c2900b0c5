"""Whether what a handler does within a step can be recorded as a CUDA graph and replayed."""

from __future__ import annotations

from enum import Enum

__all__ = ["Capture"]


class Capture(Enum):
    """What a handler's operations within a step are to a graph that replays the step; see `Handler.capture`.

    A graph replays the same kernels with the same shapes and the same Python numbers. Learning rates are taken to be tensors,
    which a schedule fills in place. Nothing here captures graphs yet: this is what a handler that does may rely on.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#constraints
    """

    OUTSIDE = "outside"
    """The handler adds no operations within a step."""
    INSIDE = "inside"
    """Its operations are the same in each step, with the same numbers, and none waits for the device."""
    FORBIDDEN = "forbidden"
    """It reads values of the device, draws from a generator of its own, or its shapes, numbers or operations change."""
