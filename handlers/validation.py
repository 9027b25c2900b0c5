"""Validation: another engine runs inside the training, and its metrics become the trainer's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from signalfire import AnyEvent, Engine, Events, Handler, Interval, Phase, on
from signalfire.checks import check_bool, check_int
from signalfire.data import generators_of
from signalfire.interval import check_every
from signalfire.randomness import unchanged_random_state

from ._common.batches import check_data

__all__ = ["Validation"]


class Validation(Handler):
    """Evaluates in regular intervals. The metrics land in the trainer's ``state.metrics``, where monitors find them.

    The evaluation changes no random stream, no gradient and no module's train or eval flag, so that training goes on bit for
    bit as if it had not taken place.

    Args:
        evaluator: an engine that evaluates: its updates have no optimizer. Attach `Metrics` to it.
        data: its data: an iterable that can be iterated again each time. Or several of them by name: then each is evaluated,
            in this order, and its name and a slash come before the names of its metrics.
        every: the interval, such as "1ep", "0.25ep", "500it", "2000st", "15min", or an event.
        prefix: put before the names of the metrics, for more than one validation.
        at_start: whether to evaluate before the first batch, too.
        sanity: on how many batches of each data the evaluator is tried before the first batch, so that its mistakes show
            at once. What it measures there is dropped, and none of its handlers writes files.

    Example:
        >>> from signalfire import Engine, Update
        >>> evaluator = Engine(Update.prediction(lambda engine, batch: batch))
        >>> Validation(evaluator, [1, 2, 3], every="2ep").every
        Interval(value=2, unit='ep')
    """

    def __init__(
        self,
        evaluator: Engine,
        data: Iterable[Any] | Mapping[str, Iterable[Any]],
        *,
        every: str | Interval | AnyEvent = "1ep",
        prefix: str = "",
        at_start: bool = False,
        sanity: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if not isinstance(evaluator, Engine) or evaluator.training:
            raise ValueError(
                f"Validation(evaluator={evaluator!r}): it has to be an Engine that does not train; give its Update "
                "no optimizer: Update.evaluation() makes such a one"
            )
        self.several: dict[str, Any] = dict(data) if isinstance(data, Mapping) else {"": data}
        if not self.several:
            raise ValueError(f"Validation(data={data!r}): there is nothing to evaluate; give at least one data by name")
        for key, one in self.several.items():
            check_data(f"Validation(data={one!r})" if key == "" else f"Validation(data={{{key!r}: {one!r}}})", one)
        if isinstance(data, Mapping) and not all(isinstance(key, str) and key for key in data):
            raise TypeError(f"Validation(data=...): the names {list(data)} have to be strings")
        self.evaluator = evaluator
        self.data = data
        self.every = check_every(self, every)
        self.prefix = prefix
        self.starting = Events.EPOCH_STARTED(once=1) if check_bool(self, "at_start", at_start) else None
        self.sanity = check_int(self, "sanity", sanity, least=0)
        self.trying = Events.EPOCH_STARTED(once=1) if sanity else None

    def attached(self, engine: Engine) -> None:
        if self.evaluator is engine:
            raise ValueError(f"{self.name!r}: the evaluator is the engine itself; build an Engine of its own for it")

    @on(Events.STARTED, phase=Phase.PREPARE)
    def announce(self, engine: Engine) -> None:
        """Say which metrics are to be expected, so that a misspelt name is noticed."""
        names = list(self.evaluator.state.metrics.owners)
        engine.state.metrics.announce(self.name, [self._prefix(key) + name for key in self.several for name in names])

    @on("trying", phase=Phase.PREPARE)
    def try_out(self, engine: Engine) -> None:
        """Run the evaluator over a few batches, and forget what it measured."""
        metrics = self.evaluator.state.metrics
        before, was_dry = metrics.state_dict(), self.evaluator.dry_run
        self.evaluator.dry_run = True
        try:
            for data in self.several.values():
                with unchanged_random_state(*generators_of(data)):
                    self.evaluator.run(islice(iter(data), self.sanity))
        except Exception as error:
            error.add_note(f"in the sanity run of {self.name!r}")
            raise
        finally:
            self.evaluator.dry_run = was_dry
            metrics.load_state_dict(before)

    @on("starting", phase=Phase.PREPARE)
    @on("every", phase=Phase.PREPARE)
    def validate(self, engine: Engine) -> None:
        """Run the evaluator over its data."""
        for key, data in self.several.items():
            engine.evaluate(self.evaluator, data, prefix=self._prefix(key))

    def _prefix(self, key: str) -> str:
        return f"{self.prefix}{key}/" if key else self.prefix
