"""Seeding: seeds the global random generators when a run starts."""

from __future__ import annotations

from signalfire import Engine, Events, Handler, Phase, on, seed_everything
from signalfire.authoring import Claim, DeviceFeature, check_seed, derived_seed

from ._common.ranks import SEED

__all__ = ["Seeding"]


class Seeding(Handler):
    """Seeds the global random generators of Python, NumPy and torch when a run starts.

    Dropout and shuffling then do not depend on random numbers drawn before the run. A run that continues, or resumes from a
    checkpoint, keeps its random states instead. Two other seeds exist. ``signalfire.seed_everything(seed)`` seeds the same
    generators immediately; call it before you build the model, because the initial weights are drawn then. ``Engine(seed=)``
    seeds the random numbers of handlers, such as MixUp, and leaves the global generators unchanged.

    Args:
        seed: Seed with 0 <= seed < 2**32; the engine's seed by default.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Events, Update
        >>> def first_draw(*handlers):
        ...     update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        ...     engine = Engine(update, model=torch.nn.Linear(2, 1), seed=7)
        ...     _ = engine.attach(handlers)
        ...     drawn = []
        ...     draw = lambda engine: drawn.append(torch.rand(1).item())
        ...     _ = engine.connect(Events.FORWARD_STARTED, draw)
        ...     _ = engine.run([(torch.ones(4, 2), torch.ones(4, 1))], max_epochs=1)
        ...     return drawn
        >>> first_draw() == first_draw(), first_draw(Seeding()) == first_draw(Seeding())
        (False, True)
    """

    device_features = frozenset({DeviceFeature.GENERATOR})

    def __init__(self, seed: int | None = None, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.seed = None if seed is None else check_seed("Seeding", seed)

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(Claim("seeding"), by=self)

    @on(Events.STARTED, phase=Phase.PREPARE, rank=SEED, reads=[], writes=["random"])
    def seed_generators(self, engine: Engine) -> None:
        """Seed the generators unless the run continues; each rank differently, so dropout masks differ."""
        if engine.state.iteration == 0:
            seed, rank = engine.seed if self.seed is None else self.seed, engine.group.data.rank
            seed_everything((seed if rank == 0 else derived_seed(seed, "rank", rank)) % 2**32)
