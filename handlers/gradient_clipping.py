"""Gradient clipping, by global norm and by value."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from signalfire import Engine, Events, Handler, on

__all__ = ["GradientClipping"]


class GradientClipping(Handler):
    """Keeps gradients from growing too large: once for each optimizer step, on unscaled gradients.

    Args:
        max_norm: the largest global norm: if the norm of all gradients together is greater, they are scaled down to it.
        max_value: the largest absolute value of any element; what exceeds it is cut off. Done before the norm, if both are
            given.
        norm_type: the p of the norm; ``math.inf`` for the largest absolute value.
        update: the name of the update whose gradients are clipped; all by default, each on its own.

    Attributes:
        total_norm: the global norm before the last clip, as a tensor; None before the first.

    Source:
        Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks" (ICML 2013);
        ``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_`` do the work.

    Example:
        >>> GradientClipping(max_norm=1.0).max_norm
        1.0
    """

    trains = True

    def __init__(
        self,
        *,
        max_norm: float | None = None,
        max_value: float | None = None,
        norm_type: float = 2.0,
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if max_norm is None and max_value is None:
            raise ValueError("GradientClipping(): give max_norm, max_value or both")
        for argument, value in (("max_norm", max_norm), ("max_value", max_value), ("norm_type", norm_type)):
            number = isinstance(value, Real) and not isinstance(value, bool)
            if value is not None and (not number or math.isnan(value) or value <= 0):
                raise ValueError(f"GradientClipping({argument}={value!r}): it has to be a number greater than zero")
        self.max_norm = max_norm
        self.max_value = max_value
        self.norm_type = norm_type
        self.update = update
        self.total_norm: Tensor | None = None

    def attached(self, engine: Engine) -> None:
        for update in engine.updates if self.update is None else (engine.find_update(self.update),):
            engine.claim(f"clipping the gradients of update {update.name!r}", by=self)

    @on(Events.GRADIENTS_READY)
    def clip(self, engine: Engine) -> None:
        """Clip the gradients of the complete window."""
        update = engine.state.update
        if self.update not in (None, update.name):
            return
        if self.max_value is not None:
            torch.nn.utils.clip_grad_value_(update.parameters, self.max_value)
        if self.max_norm is not None:
            self.total_norm = torch.nn.utils.clip_grad_norm_(update.parameters, self.max_norm, self.norm_type)
