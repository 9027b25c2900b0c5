"""Limits the number of batches per epoch, in training and in evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from operator import length_hint
from typing import Any

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.authoring import Override
from signalfire.data import FirstBatches

__all__ = ["LimitBatches"]


class LimitBatches(Handler):
    """Limits the number of batches per epoch, in training and in evaluations.

    Only the first batches of an epoch are used, so with shuffling each epoch sees a different part of the data. The workers of a
    DataLoader stop after the last batch used; persistent workers wait for the next epoch. With ``run(epoch_length=)`` the epoch
    keeps that length, and the limited data restarts when it is exhausted.

    A change takes effect in the next `run` or evaluation. Separate handlers may limit training and evaluations. Attached to an
    evaluator, the handler uses ``validation``.

    Args:
        train: Number of training batches per epoch: an int, or a float in (0, 1] as a fraction of the data's length, rounded down
            but at least one batch. None uses all batches.
        validation: Number of batches per evaluation, specified like ``train``.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> _ = engine.attach(LimitBatches(train=0.25))
        >>> state = engine.run([(torch.ones(4, 2), torch.ones(4, 1))] * 20, max_epochs=3)
        >>> state.epoch, state.iteration  # five batches in each epoch
        (3, 15)
    """

    def __init__(self, train: float | None = None, validation: float | None = None, *, name: str | None = None) -> None:
        super().__init__(name=name)
        if train is None and validation is None:
            raise TypeError("LimitBatches(): pass train=, validation=, or both")
        for argument, value in (("train", train), ("validation", validation)):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"LimitBatches({argument}={value!r}): expected an int, a float or None")
            if not (value >= 1 if isinstance(value, int) else 0 < value <= 1):
                raise ValueError(
                    f"LimitBatches({argument}={value!r}): expected a number of batches as an int of 1 or more, or a "
                    "fraction of the data's length as a float in (0, 1]"
                )
        self.train = train
        self.validation = validation

    def attached(self, engine: Engine) -> None:
        own = self.train if engine.training else self.validation
        if own is not None:
            engine.overrides.replace(Override.DATA, self.limit, by=self)
        if engine.training and self.validation is not None:
            engine.overrides.replace(Override.EVALUATION_DATA, self.limit, by=self)

    @on(Events.STARTED, phase=Phase.RECORD, reads=[], writes=[])
    def report(self, engine: Engine) -> None:
        """Report that this run uses part of the data, in case the handler was left attached.

        Raises:
            ValueError: For a limit on training or evaluations that did not exist when the handler was attached.
        """
        owned = engine.overrides.owned_by(self)
        limits = [("train", self.train), ("validation", self.validation)]
        for argument, value in limits if engine.training else limits[1:]:
            what = Override.EVALUATION_DATA if engine.training and argument == "validation" else Override.DATA
            if value is not None and what not in owned:
                raise ValueError(
                    f"{self.name!r}: {argument}={value!r} was set on a handler that was attached without {argument}=; "
                    "detach the handler, and attach it again"
                )
        limited = None if engine.feed.source is None else engine.feed.source.given
        own = "train" if engine.training else "validation"
        if isinstance(limited, FirstBatches) and getattr(self, own) is not None:
            self._report(engine, own, limited)

    def _report(self, engine: Engine, argument: str, limited: FirstBatches) -> None:
        there = length_hint(limited.data, -1)
        if not 0 <= there <= limited.count:  # else that is all of it
            used = "only part of the data" if there > 0 else f"at most {limited.count} batches"
            engine.findings.report(
                "W58",
                f"LimitBatches({argument}={getattr(self, argument)!r}) uses {used}",
                f"to use all of the data, detach {self.name!r}",
                self.name,
                key=argument,
            )

    def limit(self, engine: Engine, data: Any) -> Any:
        """The data that the engine iterates over: the first batches of the original."""
        argument, limit = ("train", self.train) if engine.training else ("validation", self.validation)
        if limit is None:
            return data
        where = f"{self.name!r}: {argument}={limit!r}"
        if data is None:
            raise ValueError(
                f"{where}: this run has no data to limit; to shorten its epochs, pass a smaller epoch_length= to run()"
            )
        if isinstance(data, Iterator):
            raise TypeError(
                f"{where}: an iterator ({type(data).__name__}) cannot be restarted for each epoch; pass data that "
                "can be iterated again, such as a list or a DataLoader"
            )
        if isinstance(limit, float):
            try:
                limit = max(1, int(len(data) * Fraction(str(limit))))  # exact: 0.29 of 100 is 29
            except (TypeError, NotImplementedError):
                raise ValueError(
                    f"{where} is a fraction of the data's length, but this data ({type(data).__name__}) has no length; "
                    "pass a number of batches as an int"
                ) from None
        limited = FirstBatches(data, limit)
        if self.engine is not None and self.engine is not engine:
            self._report(self.engine, argument, limited)
        return limited
