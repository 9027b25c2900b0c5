"""Gradient noise that fades away."""

from __future__ import annotations

import math

import torch

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.acts import Override
from signalfire.checks import check_number
from signalfire.distributed import local_part, spread_like

from ._common.parameters import gradients_of
from ._common.ranks import ADD_NOISE
from ._common.updates import updates_meant

__all__ = ["GradientNoise"]


class GradientNoise(Handler):
    """Adds to every gradient normal noise of variance ``eta / (1 + t) ** gamma``, where t is the number of steps made so far.

    Early noise lets very deep networks leave bad beginnings; it fades so that training can settle. It is added once for each
    optimizer step, to unscaled gradients and before any clip, so that clips bound what the step sees. A skipped step does not
    move t. An optimizer that evaluates its loss several times within a step gets new noise with each evaluation.

    The numbers come from the handler's own generator, in the order of the optimizer's parameters that have a gradient; updates
    and steps of one iteration draw one after the other.

    Args:
        eta: the variance at the first step; the paper tries 0.01, 0.3 and 1.0.
        gamma: how fast the noise fades.
        update: the name of the update whose gradients get noise; all by default, each with its own t.

    Errors:
        TypeError: for sparse gradients.

    Source:
        Neelakantan et al., "Adding Gradient Noise Improves Learning for Very Deep Networks" (2015).

    Example:
        >>> round(GradientNoise(0.3).variance(step=99), 4)
        0.0238
    """

    trains = True
    decides_alike = True

    def __init__(
        self, eta: float = 0.01, *, gamma: float = 0.55, update: str | None = None, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        self.eta = check_number(self, "eta", eta, above=0)
        self.gamma = check_number(self, "gamma", gamma, least=0)
        self.update = update
        self._iteration: int | None = None
        self._drawing: dict[torch.device, torch.Generator] = {}  # the generators of this iteration

    def attached(self, engine: Engine) -> None:
        for update in updates_meant(engine, self.update):
            engine.overrides.claim(Override.NOISE, by=self, target=f"of update {update.name!r}")

    def variance(self, step: int) -> float:
        """The noise's variance after so many optimizer steps."""
        return self.eta / math.pow(1 + step, self.gamma)

    @on(Events.STARTED, phase=Phase.PREPARE)
    def begin(self, engine: Engine) -> None:
        """An iteration that an error had cut short draws the same numbers when it is made again."""
        self._iteration = None

    @on(Events.GRADIENTS_READY, rank=ADD_NOISE)
    def add(self, engine: Engine) -> None:
        """Add the noise to the gradients of the complete window."""
        update = engine.state.update
        if self.update not in (None, update.name):
            return
        if self._iteration != engine.state.iteration:
            self._iteration = engine.state.iteration
            self._drawing.clear()
        gradients = gradients_of(update)
        noise = [  # of a sharded gradient, each process draws that of the whole, and keeps its part
            local_part(
                spread_like(
                    torch.randn(
                        g.shape, dtype=g.dtype, device=g.device, generator=self._generator_on(engine, g.device)
                    ),
                    g,
                )
            )
            for g in gradients
        ]
        try:
            parts = [local_part(gradient) for gradient in gradients]
            torch._foreach_add_(parts, noise, alpha=math.sqrt(self.variance(update.steps)))
        except RuntimeError as error:
            if any(gradient.is_sparse for gradient in gradients):
                raise TypeError(
                    f"{self.name!r}: a gradient of update {update.name!r} is sparse, and noise would fill it; "
                    "give sparse=False to the embedding, or update= another update"
                ) from error
            raise

    def _generator_on(self, engine: Engine, device: torch.device) -> torch.Generator:
        generator = self._drawing.get(device)
        if generator is None:
            generator = self._drawing[device] = self.generator(engine, device)
        return generator

    def __getstate__(self) -> dict[str, object]:
        return super().__getstate__() | {"_iteration": None, "_drawing": {}}
