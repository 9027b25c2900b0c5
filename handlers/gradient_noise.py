"""Gradient noise with a decaying variance."""

from __future__ import annotations

import math

import torch

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.authoring import Capture, Claim, check_name, check_number
from signalfire.distributed import local_part, spread_like

from ._common.parameters import gradients_of
from ._common.ranks import ADD_NOISE
from ._common.updates import selected_updates

__all__ = ["GradientNoise"]


class GradientNoise(Handler):
    """Adds Gaussian noise with a decaying variance to the gradients.

    The variance is ``eta / (1 + t) ** gamma``, where t is the number of optimizer steps. Noise early in training helps very deep
    networks escape poor initializations. Noise is added once per optimizer step, to unscaled gradients and before clipping, so
    clipping also limits it. A skipped step does not increase t. An optimizer that evaluates its loss several times in a step gets
    new noise each time.

    The noise is drawn from the handler's own generator, in the order of the optimizer's parameters that have a gradient;
    several updates or steps in one iteration draw from it in turn.

    Args:
        eta: Variance at the first step; the paper uses 0.01, 0.3 and 1.0.
        gamma: Exponent of the decay.
        update: Name of the update that gets noise; by default all, each with its own t.

    Raises:
        TypeError: If a gradient is sparse.

    Source:
        Neelakantan et al., "Adding Gradient Noise Improves Learning for Very Deep Networks" (2015).

    Example:
        >>> import torch
        >>> from signalfire import Engine, Events, Phase, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.Linear(100, 100, bias=False), seed=0)
        >>> _ = engine.attach(GradientNoise(eta=1.0, gamma=2.0))
        >>> @engine.on(Events.OPTIMIZER_STEP_STARTED, phase=Phase.RECORD)
        ... def show(engine):
        ...     print(f"{engine.model.weight.grad.std().item():.1f}")
        >>> # Without noise, the gradient is zero.
        >>> _ = engine.run([(torch.zeros(4, 100), torch.zeros(4, 100))] * 3, max_epochs=1)
        1.0
        0.5
        0.3
    """

    capture = Capture.FORBIDDEN
    trains = True
    decides_alike = True

    def __init__(
        self, eta: float = 0.01, *, gamma: float = 0.55, update: str | None = None, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        self.eta = check_number(self, "eta", eta, above=0)
        self.gamma = check_number(self, "gamma", gamma, least=0)
        self.update = check_name(self, "update", update)
        self._iteration: int | None = None
        self._drawing: dict[torch.device, torch.Generator] = {}  # of this iteration

    def attached(self, engine: Engine) -> None:
        for update in selected_updates(engine, self.update):
            engine.overrides.claim(Claim("gradient noise"), by=self, target=f"of update {update.name!r}")

    def variance(self, step: int) -> float:
        """The variance of the noise after this number of optimizer steps."""
        return self.eta / math.pow(1 + step, self.gamma)

    @on(Events.STARTED, phase=Phase.PREPARE, reads=[], writes=[])
    def reset_generators(self, engine: Engine) -> None:
        """Reset the generators, so an iteration repeated after an error draws the same noise."""
        self._iteration = None

    @on(Events.GRADIENTS_READY, rank=ADD_NOISE, reads=["gradients", "optimizer", "step"], writes=["gradients"])
    def add_noise(self, engine: Engine) -> None:
        """Add noise to the gradients of the accumulation window."""
        update = engine.state.update
        if self.update not in (None, update.name):
            return
        if self._iteration != engine.state.iteration:
            self._iteration = engine.state.iteration
            self._drawing.clear()
        gradients = gradients_of(update)
        if not gradients:  # somebody has cleared them, which is reported
            return
        noise = [  # for a sharded gradient, each rank draws the noise of the full gradient and keeps its own shard
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
                    f"{self.name!r}: a gradient of update {update.name!r} is sparse, and noise would make it dense; "
                    "build the embedding with sparse=False, or select a different update with update="
                ) from error
            raise

    def _generator_on(self, engine: Engine, device: torch.device) -> torch.Generator:
        generator = self._drawing.get(device)
        if generator is None:
            generator = self._drawing[device] = self.generator(engine, device)
        return generator

    def __getstate__(self) -> dict[str, object]:
        return super().__getstate__() | {"_iteration": None, "_drawing": {}}
