"""Overfitting a few batches: a sanity check that the model can learn."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import islice
from operator import length_hint
from typing import Any

import torch

from signalfire import Engine, Events, Handler, Phase, on, seed_everything
from signalfire.authoring import DeviceFeature, Override, check_bool, check_int, derived_seed, unchanged_random_state

__all__ = ["OverfitBatches"]


class OverfitBatches(Handler):
    """Overfits a few batches, as a sanity check: a sound model brings their loss close to zero.

    The batches are the first ones of the data, read once and kept in memory, so shuffling and augmentation are the same in every
    epoch. Their random states depend only on the run's seed and the handler's name, so a resumed run draws the same batches, and
    all other random draws stay the same. The handler takes effect with the next `run`, which reports it in one line on stderr.

    Args:
        count: Number of batches to train on.
        validation: Whether evaluations inside the run use these batches instead of their own data.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Events, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.01)
        >>> engine = Engine(update, model=torch.nn.Linear(1, 1), seed=0)
        >>> _ = engine.attach(OverfitBatches(2))
        >>> seen = []
        >>> @engine.on(Events.FORWARD_STARTED)
        ... def look(engine):
        ...     seen.append(engine.state.batch[0].item())
        >>> data = [(torch.full((1, 1), float(i)), torch.ones(1, 1)) for i in range(5)]
        >>> _ = engine.run(data, max_epochs=3)
        >>> seen
        [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    """

    trains = True

    device_features = frozenset({DeviceFeature.GENERATOR})

    def __init__(self, count: int = 1, *, validation: bool = False, name: str | None = None) -> None:
        super().__init__(name=name)
        self.count = check_int(self, "count", count)
        self.validation = check_bool(self, "validation", validation)
        self._kept: _Kept | None = None

    def attached(self, engine: Engine) -> None:
        engine.overrides.replace(Override.DATA, self.replace_data, by=self)
        if self.validation:
            engine.overrides.replace(Override.EVALUATION_DATA, self.replace_data, by=self)

    def detached(self, engine: Engine) -> None:
        self._kept = None

    @on(Events.STARTED, phase=Phase.RECORD, reads=[], writes=[])
    def report(self, engine: Engine) -> None:
        """Report that this run uses part of the data, in case the handler was left attached."""
        if self._kept is not None and 0 <= length_hint(self._kept.data, -1) <= self.count:
            return  # that is all of it
        engine.findings.report(
            "W58",
            f"OverfitBatches({self.count}) trains on at most {self.count} of the batches",
            f"to train on all batches, detach {self.name!r}",
            self.name,
        )

    def replace_data(self, engine: Engine, data: Any) -> Any:
        """The kept batches, which the engine iterates instead of its data."""
        if engine is not self.engine:
            return data if self._kept is None else self._kept
        if data is None:
            raise ValueError(f"{self.name!r}: this run has no data; pass data to run(), or detach {self.name!r}")
        if self._kept is None or self._kept.data is not data:
            self._kept = _Kept(data, self.count, engine, self.name)
        return self._kept


class _Kept:
    """The first batches of the data, read at the first iteration over them."""

    def __init__(self, data: Any, count: int, engine: Engine, name: str) -> None:
        self.data = data
        self.count = count
        self._engine = weakref.ref(engine)  # for its seed, which a state loaded later may change
        self._name = name
        self._batches: list[Any] | None = None

    def __len__(self) -> int:
        return min(self.count, len(self.data))

    def __iter__(self) -> Iterator[Any]:
        return self.batches_from(0)

    def batches_from(self, start: int) -> Iterator[Any]:
        """The kept batches from index ``start`` on, for a resumed run."""
        if self._batches is None:
            engine = self._engine()
            assert engine is not None
            seed = derived_seed(engine.seed, self._name)
            generator = getattr(self.data, "generator", None)
            with unchanged_random_state(generator):
                seed_everything(seed % 2**32)
                if isinstance(generator, torch.Generator):
                    generator.manual_seed(seed)
                self._batches = list(islice(iter(self.data), self.count))
        return islice(self._batches, start, None)
