"""Validation: runs an evaluator during training, and stores its metrics in the trainer's state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from signalfire import AnyEvent, Engine, Events, Handler, Interval, Phase, on
from signalfire.authoring import check_bool, check_every, check_int
from signalfire.findings.evaluation_findings import watch_weights
from signalfire.runs.evaluation import check_evaluable, sanity_check

from ._common.batches import check_data

__all__ = ["Validation"]


class Validation(Handler):
    """Evaluates at an interval, and stores the metrics in the trainer's ``state.metrics``, where monitors read them.

    An evaluation leaves all random states, gradients and train or eval flags of modules unchanged, so that training continues
    bit for bit as without it.

    An evaluator inherits how the trainer prepares its batches: what runs at GET_BATCH_COMPLETED in Phase.PREPARE, such as
    `DeviceTransfer`, and the precision of `MixedPrecision` or `TruePrecision`, unless it has such a handler of its own.
    ``print(trainer)`` lists what is inherited.

    Args:
        evaluator: An engine that evaluates: its updates have no optimizer. Attach `Metrics` to it.
        data: The validation data, of known length or not, iterable more than once. Or a mapping from names to several data sets,
            evaluated in this order; the metrics of each are prefixed with its name and a slash. `ReloadedData` is loaded for the
            trainer's epoch.
        every: The interval, such as "1ep", "0.25ep", "500it", "2000st", "15min", or an event.
        prefix: Prefix of the metrics' names, to distinguish several validations.
        at_start: Whether to evaluate before the first batch, too.
        sanity: Number of batches of each data set to evaluate before training starts, to surface errors early. The metrics are
            discarded and no handler writes files.
        inherit: Whether the evaluator inherits how the trainer prepares its batches, and its precision.

    Raises:
        DataError: at the start of a run, for data of length 0.

    Example:
        >>> import torch
        >>> from functools import partial
        >>> from signalfire import Engine, Update
        >>> from signalfire.handlers import Average, History, Metrics
        >>> update = Update.supervised(torch.nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.25))
        >>> model, history = torch.nn.Linear(1, 1, bias=False), History()
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> trainer, evaluator = Engine(update, model=model), Engine(update.evaluation(), model=model)
        >>> _ = evaluator.attach(Metrics(loss=Average()))
        >>> _ = trainer.attach(Validation(evaluator, [(torch.full((4, 1), 4.0), torch.zeros(4, 1))]), history)
        >>> _ = trainer.run([(torch.ones(4, 1), torch.zeros(4, 1))], max_epochs=3)
        >>> history["loss"]  # of the weights 0.5, 0.25 and 0.125
        [4.0, 1.0, 0.25]
    """

    interval_matters = True

    def __init__(
        self,
        evaluator: Engine,
        data: Iterable[Any] | Mapping[str, Iterable[Any]],
        *,
        every: str | Interval | AnyEvent = "1ep",
        prefix: str = "",
        at_start: bool = False,
        sanity: int = 0,
        inherit: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if isinstance(data, Engine):
            raise TypeError("Validation(...): the evaluator comes before the data: Validation(evaluator, data)")
        if not isinstance(evaluator, Engine) or evaluator.training:
            shown = "an engine that trains" if isinstance(evaluator, Engine) else f"a {type(evaluator).__name__}"
            raise ValueError(
                f"Validation(evaluator={shown}): the evaluator must be an Engine that does not train; build it with "
                "`update.evaluation()`, which has no optimizer"
            )
        self.data_sets = _data_sets(data)
        self.evaluator = evaluator
        self.data = data
        self.every = check_every(self, every)
        if not isinstance(prefix, str):
            raise TypeError(f"Validation(prefix={prefix!r}): expected a str, such as 'val/'")
        self.prefix = prefix
        self.start_event = Events.EPOCH_STARTED(once=1) if check_bool(self, "at_start", at_start) else None
        self.sanity = check_int(self, "sanity", sanity, least=0)
        self.inherit = check_bool(self, "inherit", inherit)
        self._evaluated = False  # in this run
        self._done: list[str] = []  # the data sets of a validation that an error has cut short
        self.sanity_event = Events.EPOCH_STARTED(once=1) if sanity else None

    def attached(self, engine: Engine) -> None:
        if self.evaluator is engine:
            raise ValueError(f"{self.name!r}: the evaluator is the trainer itself; build a separate Engine to evaluate")

    @on(Events.STARTED, phase=Phase.PREPARE, reads=[], writes=["metrics"])
    def announce(self, engine: Engine) -> None:
        """Announce the metrics' names, so that a monitor with a misspelt name fails at once, and check the data."""
        for key, data in self.data_sets.items():
            check_evaluable(
                engine, self.evaluator, data, repr(self.name) if key == "" else f"{self.name!r}, data {key!r}"
            )
        watch_weights(engine, self.evaluator)
        self._evaluated = False
        if not engine.unfinished.is_due:
            self._done = []
        measured = self.evaluator.state.metrics
        for prefix in map(self._prefix, self.data_sets):
            directions = {prefix + name: one for name, one in measured.directions.items() if name in measured.owners}
            names = [prefix + name for name in measured.owners]
            engine.state.metrics.announce(self.name, names, directions, evaluated=True)

    def metric_names(self, engine: Engine) -> list[str]:
        names = list(self.evaluator.state.metrics.owners)
        return [self._prefix(key) + name for key in self.data_sets for name in names]

    @on("sanity_event", phase=Phase.PREPARE, reads=["weights", "buffers"], writes=[], repeatable=True)
    def sanity_check(self, engine: Engine) -> None:
        """Run the evaluator over a few batches, and discard the metrics."""
        try:
            for data in self.data_sets.values():
                sanity_check(engine, self.evaluator, data, self.sanity, inherit=self.inherit)
        except Exception as error:
            error.add_note(f"in the sanity check of {self.name!r}")
            raise

    @on(
        "start_event",
        phase=Phase.PREPARE,
        reads=["weights", "buffers", "step", "processes"],
        writes=["metrics"],
        repeatable=True,
    )
    @on(
        "every",
        phase=Phase.PREPARE,
        reads=["weights", "buffers", "step", "processes"],
        writes=["metrics"],
        repeatable=True,
    )
    def validate(self, engine: Engine) -> None:
        """Run the evaluator over all data sets; over those that are left, if an error cut that short."""
        self._evaluated = True
        for key, data in self.data_sets.items():
            if key not in self._done:
                engine.evaluate(self.evaluator, data, prefix=self._prefix(key), inherit=self.inherit)
                self._done.append(key)
        self._done = []

    def rehearse(self, engine: Engine) -> None:
        """Validate if no validation was due in this run."""
        if not self._evaluated:
            self.validate(engine)

    def _prefix(self, key: str) -> str:
        return f"{self.prefix}{key}/" if key else self.prefix


def _data_sets(data: Any) -> dict[str, Any]:
    """The data sets by name; the name of a single one is empty."""
    found = dict(data) if isinstance(data, Mapping) else {"": data}
    if not found:
        raise ValueError("Validation(data={}): there is nothing to evaluate; give at least one data set")
    for key, one in found.items():
        if key == "":
            check_data("Validation(data=", one)
        else:
            check_data(f"Validation(data={{{key!r}: ", one, "})")
    if isinstance(data, Mapping) and not all(isinstance(key, str) and key for key in data):
        raise TypeError(f"Validation(data=...): the names {list(data)} must be non-empty strings")
    return found
