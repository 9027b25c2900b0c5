"""Whether what a handler does within a step can be recorded as a CUDA graph and replayed."""

from __future__ import annotations

from enum import Enum

__all__ = ["Capture"]


class Capture(Enum):
    """Whether a graph that replays a step can include a handler's operations within the step; see `Handler.capture`.

    A graph replays the same kernels with the same shapes and the same Python numbers. Learning rates are assumed to be tensors,
    which a schedule fills in place. Nothing captures graphs yet; a handler that does can rely on these values.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#constraints
    """

    OUTSIDE = "outside"
    """The handler adds no operations within a step."""
    INSIDE = "inside"
    """Its operations are the same in each step, with the same numbers, and none waits for the device."""
    FORBIDDEN = "forbidden"
    """It reads values from the device, draws from its own generator, or changes its shapes, numbers or operations."""
