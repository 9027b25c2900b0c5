"""Fewer batches: the first ones of every epoch, of the training and of the evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from signalfire import Engine, Handler
from signalfire.acts import Override
from signalfire.data import FirstBatches

__all__ = ["LimitBatches"]


class LimitBatches(Handler):
    """Takes the first batches of the data, anew in every epoch and in every evaluation.

    Shuffling still draws over all of the data, so that another part of it comes in every epoch. The workers of a DataLoader
    end with the last batch that is taken, unless they are persistent: those wait for the next epoch. With ``run(epoch_length=)``
    the epoch keeps that length, and the limited data starts again when it is exhausted.

    It takes effect with the next `run` or evaluation. On an engine that evaluates, ``validation`` is the limit.

    Args:
        train: how many batches of the training's data an epoch takes: an int, or a float in (0, 1] for a share of the data's
            length, rounded down to one batch at least. None for all of them.
        validation: the same for the data of evaluations.

    Example:
        >>> LimitBatches(train=0.1, validation=20).train
        0.1
    """

    def __init__(self, train: float | None = None, validation: float | None = None, *, name: str | None = None) -> None:
        super().__init__(name=name)
        if train is None and validation is None:
            raise TypeError("LimitBatches(): give train=, validation= or both")
        for argument, value in (("train", train), ("validation", validation)):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"LimitBatches({argument}={value!r}): it has to be an int, a float or None")
            if not (value >= 1 if isinstance(value, int) else 0 < value <= 1):
                raise ValueError(
                    f"LimitBatches({argument}={value!r}): it has to be an int of 1 or more batches, or a float in (0, 1]: a "
                    "share of the data's length"
                )
        self.train = train
        self.validation = validation

    def attached(self, engine: Engine) -> None:
        engine.overrides.replace(Override.DATA, self.limit, by=self)

    def limit(self, engine: Engine, data: Any) -> Any:
        """What the engine iterates instead of its data."""
        argument, limit = ("train", self.train) if engine.training else ("validation", self.validation)
        if limit is None:
            return data
        where = f"{self.name!r}: {argument}={limit!r}"
        if data is None:
            raise ValueError(f"{where}: this run has no data; give run() a smaller epoch_length=")
        if isinstance(data, Iterator):
            raise TypeError(
                f"{where}: an iterator ({type(data).__name__}) cannot begin anew in every epoch; give an iterable, such as a "
                "list or a DataLoader"
            )
        if isinstance(limit, float):
            try:
                limit = max(1, int(len(data) * Fraction(str(limit))))  # exact: 0.29 of 100 are 29
            except (TypeError, NotImplementedError):
                raise ValueError(
                    f"{where} is a share of the data's length, but this data ({type(data).__name__}) has none; give a number "
                    "of batches"
                ) from None
        return FirstBatches(data, limit)
