"""Random numbers in the forward that are the same when the backward computes a part of it again."""

from __future__ import annotations

import torch

from signalfire import Engine, Handler
from signalfire.authoring.randomness import mixed

__all__ = ["Draws"]


class Draws:
    """Keys for random numbers: each forward in an iteration has its own key, which depends on no other handler.

    Activation checkpointing computes parts of a forward again, and a single generator would then give different numbers.

    Attributes:
        begun: Whether a forward has begun since `restart`.
    """

    def __init__(self) -> None:
        self._place: tuple[int, int] | None = None  # the iteration and the rank, or shard
        self._generator = torch.Generator()
        self._on: dict[torch.device, torch.Generator] = {}
        self._key = 0
        self.begun = False

    def restart(self) -> None:
        """An iteration that is repeated after an error draws the same numbers."""
        self._place, self.begun = None, False

    def begin_forward(self, handler: Handler, engine: Engine) -> None:
        """Draw the key of a forward from the handler's generator; ranks other than 0 draw other keys than a single process."""
        iteration, rank = engine.state.iteration, engine.group.data.rank
        if engine.group.shards is not None or self._place != (iteration, rank):
            self._place = iteration, rank
            self._generator = handler.generator(engine, of_rank=rank or None)
        self.begun = True
        self._key = int(torch.randint(2**62, (), generator=self._generator))

    def generator(self, device: torch.device, place: int = 0) -> torch.Generator:
        """A generator on a device for the numbers drawn in this forward at one place in the model."""
        generator = self._on.get(device)
        if generator is None:
            generator = self._on[device] = torch.Generator(device)
        return generator.manual_seed(mixed(self._key, place))

    def __getstate__(self) -> dict[str, object]:
        """A copy has its own generators."""
        return {}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__()  # type: ignore[misc]
