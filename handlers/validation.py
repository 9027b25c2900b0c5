"""Validation: another engine runs inside the training, and its metrics become the trainer's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from signalfire import AnyEvent, Engine, Events, Handler, Interval, Phase, check_every, on

__all__ = ["Validation"]


class Validation(Handler):
    """Evaluates in regular intervals. The metrics land in the trainer's ``state.metrics``, where monitors find them.

    The evaluation changes no random stream, no gradient and no module's train or eval flag, so that training goes on bit for
    bit as if it had not taken place.

    Args:
        evaluator: an engine that evaluates: its updates have no optimizer. Attach `Metrics` to it.
        data: its data: an iterable that can be iterated again each time.
        every: the interval, such as "1ep", "500it", "2000st", "15min", or an event.
        prefix: put before the names of the metrics, for more than one validation.
        at_start: whether to evaluate before the first batch, too.

    Example:
        >>> from signalfire import Engine, Update
        >>> evaluator = Engine(Update.prediction(lambda engine, batch: batch))
        >>> Validation(evaluator, [1, 2, 3], every="2ep").every
        Interval(value=2, unit='ep')
    """

    def __init__(
        self,
        evaluator: Engine,
        data: Iterable[Any],
        *,
        every: str | Interval | AnyEvent = "1ep",
        prefix: str = "",
        at_start: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if not isinstance(evaluator, Engine) or evaluator.training:
            raise ValueError(
                f"Validation(evaluator={evaluator!r}): it has to be an Engine that does not train; give its Update "
                "no optimizer: Update.evaluation() makes such a one"
            )
        if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
            raise TypeError(
                f"Validation(data={data!r}): it has to be iterable, such as a DataLoader or a list of batches"
            )
        if isinstance(data, Iterator):
            raise TypeError(
                f"Validation(data={data!r}): an iterator is used up by the first validation; give an iterable that "
                "starts anew each time, such as a list or a DataLoader"
            )
        self.evaluator = evaluator
        self.data = data
        self.every = check_every(self, every)
        self.prefix = prefix
        self.starting = Events.EPOCH_STARTED(once=1) if at_start else None

    def attached(self, engine: Engine) -> None:
        if self.evaluator is engine:
            raise ValueError(f"{self.name!r}: the evaluator is the engine itself; build an Engine of its own for it")

    @on(Events.STARTED, phase=Phase.PREPARE)
    def announce(self, engine: Engine) -> None:
        """Say which metrics are to be expected, so that a misspelt name is noticed."""
        engine.state.metrics.announce(self.name, [self.prefix + name for name in self.evaluator.state.metrics.owners])

    @on("starting", phase=Phase.PREPARE)
    @on("every", phase=Phase.PREPARE)
    def validate(self, engine: Engine) -> None:
        """Run the evaluator over its data."""
        engine.evaluate(self.evaluator, self.data, prefix=self.prefix)
