"""Seeding: seeds the global random generators when a run starts."""

from __future__ import annotations

from signalfire import Engine, Events, Handler, Phase, on, seed_everything
from signalfire.acts import Override
from signalfire.randomness import derived_seed

from ._common.ranks import SEED

__all__ = ["Seeding"]


class Seeding(Handler):
    """Seeds the global generators of Python, NumPy and torch when a run starts.

    A run that continues, or resumes from a checkpoint, keeps its random states instead. The model's initial weights are drawn
    before there is an engine: call ``signalfire.seed_everything(seed)`` before building the model.

    Args:
        seed: Seed with 0 <= seed < 2**32; the engine's seed by default.

    Example:
        >>> Seeding(7).seed
        7
    """

    def __init__(self, seed: int | None = None, *, name: str | None = None) -> None:
        super().__init__(name=name)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32):
            raise ValueError(f"Seeding(seed={seed!r}): expected an int with 0 <= seed < 2**32")
        self.seed = seed

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(Override.SEEDING, by=self)

    @on(Events.STARTED, phase=Phase.PREPARE, rank=SEED, reads=["position"], writes=["random"])
    def seed_generators(self, engine: Engine) -> None:
        """Seed the generators unless the run continues; each rank differently, so that dropout masks differ."""
        if engine.state.iteration == 0:
            seed, rank = engine.seed if self.seed is None else self.seed, engine.processes.rank
            seed_everything((seed if rank == 0 else derived_seed(seed, "rank", rank)) % 2**32)
