"""Validation: runs an evaluator during training, and stores its metrics in the trainer's state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

from torch import nn

from signalfire import AnyEvent, Engine, EventEnum, Events, Handler, Interval, Phase, on
from signalfire.authoring import check_bool, check_every, check_int, check_name, did_you_mean
from signalfire.findings.evaluation_findings import watch_weights
from signalfire.runs.evaluation import check_evaluable, sanity_check
from signalfire.updates.places import described

from ._common.batches import check_data
from ._common.measures import Average
from ._common.metric_names import Metric, is_of_loss, shown
from ._common.metrics import Metrics
from ._common.updates import only_update

__all__ = ["Validation"]

_READ = ["weights", "buffers", "step", "processes"]


class Validation(Handler):
    """Runs validation at an interval, and stores the metrics in the trainer's ``state.metrics``, where monitors read them.

    ``Validation(data, accuracy=Accuracy())`` measures "val_accuracy" and "val_loss", the mean loss of the trainer's update, with
    the trainer's model. To measure something else, build the evaluator yourself: ``Validation(evaluator, data)``, whose metric
    names have no prefix by default.

    An evaluation leaves random states, gradients and train or eval modes unchanged, so training continues bit for bit as it
    would without the evaluation.

    An evaluator inherits how the trainer prepares its batches (everything at GET_BATCH_COMPLETED in Phase.PREPARE, such as
    `DeviceTransfer`) and the precision of `MixedPrecision` or `TruePrecision`, unless it has its own. ``print(trainer)`` lists
    both.

    Args:
        evaluator: An engine whose updates have no optimizer, with `Metrics` attached. Without it, the handler builds one for each
            trainer that it is attached to, available as ``evaluator``.
        data: The validation data, iterable more than once, with or without a length; without one, its first batch is read as
            the first run starts, to refuse empty data. Or a mapping from names to data sets,
            evaluated in this order; the metrics of each are prefixed with its name: "val_clean_loss". `ReloadedData` is loaded
            for the trainer's epoch.
        metrics: Without an evaluator, metrics to measure besides the loss, by name, such as ``accuracy=Accuracy()``: all that
            `Metrics` accepts.
        update: Without an evaluator, the name of the trainer's update that is measured; required if there are several.
        every: Interval between evaluations, such as "1ep", "0.25ep", "500it" (iterations), "2000st" (optimizer
            steps), "15min", or an event.
        prefix: Prefix of the metrics' names, to distinguish several validations; by default ``"val_"``, and none with an
            evaluator.
        at_start: Whether to also evaluate before the first batch.
        sanity: Number of batches of each data set to evaluate before training starts, to find errors early. The metrics are
            discarded, and no handler writes files.
        inherit: Whether the evaluator inherits how the trainer prepares its batches, and its precision.
        named: Metrics as keyword arguments, like ``metrics``.

    Raises:
        DataError: at the start of a run, for data of length 0, or that yields no batch.
        ValueError: at the start of a run, for metrics of two data sets with the same name.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> from signalfire.handlers import History
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.25)
        >>> model, history = torch.nn.Linear(1, 1, bias=False), History()
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> trainer = Engine(update, model=model)
        >>> _ = trainer.attach(Validation([(torch.full((4, 1), 4.0), torch.zeros(4, 1))]), history)
        >>> _ = trainer.run([(torch.ones(4, 1), torch.zeros(4, 1))], max_epochs=3)
        >>> history["val_loss"]  # of the weights 0.5, 0.25 and 0.125
        [4.0, 1.0, 0.25]
    """

    interval_matters = True

    @overload
    def __init__(
        self,
        evaluator: Engine,
        data: Iterable[Any] | Mapping[str, Iterable[Any]],
        *,
        every: str | Interval | AnyEvent = "1ep",
        prefix: str | None = None,
        at_start: bool = False,
        sanity: int = 0,
        inherit: bool = True,
        name: str | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self,
        data: Iterable[Any] | Mapping[str, Iterable[Any]],
        /,
        *,
        metrics: Mapping[str, Any] | None = None,
        update: str | None = None,
        every: str | Interval | AnyEvent = "1ep",
        prefix: str | None = None,
        at_start: bool = False,
        sanity: int = 0,
        inherit: bool = True,
        name: str | None = None,
        **named: Any,
    ) -> None: ...

    def __init__(  # type: ignore[misc]  # `named` has no place for evaluator= and data=
        self,
        evaluator: Any = None,
        data: Any = None,
        *,
        metrics: Mapping[str, Any] | None = None,
        update: str | None = None,
        every: str | Interval | AnyEvent = "1ep",
        prefix: str | None = None,
        at_start: bool = False,
        sanity: int = 0,
        inherit: bool = True,
        name: str | None = None,
        **named: Any,
    ) -> None:
        super().__init__(name=name)
        if isinstance(data, Engine):
            raise TypeError("Validation(...): pass the evaluator before the data: Validation(evaluator, data)")
        if evaluator is None or data is None:
            evaluator, data = (
                (evaluator, data) if isinstance(evaluator, Engine) else (None, evaluator if data is None else data)
            )
        self._given = None if evaluator is None else _checked_evaluator(evaluator)
        self.metrics = _checked_metrics("Validation", _ARGUMENTS, metrics, named)
        self.update = check_name(self, "update", update)
        beside = [*self.metrics, *(["update"] if update is not None else [])]
        if self._given is not None and beside:
            raise TypeError(
                f"Validation({beside[0]}=): you passed an evaluator, which measures its own metrics; attach "
                f"Metrics({beside[0]}=...) to the evaluator"
            )
        self.data_sets = _data_sets("Validation", data)
        self.data = data
        self.every = check_every(self, every)
        if not isinstance(prefix, str | None):
            raise TypeError(f"Validation(prefix={prefix!r}): expected a str, such as 'val/'")
        self.prefix = prefix if prefix is not None else "val_" if self._given is None else ""
        self.start_event = Events.EPOCH_STARTED(once=1) if check_bool(self, "at_start", at_start) else None
        self.sanity = check_int(self, "sanity", sanity, least=0)
        self.inherit = check_bool(self, "inherit", inherit)
        self._built: Engine | None = None
        self._evaluated = False  # in this run
        self._done: list[str] = []  # the data sets of a validation that an error has cut short
        self.sanity_event = Events.EPOCH_STARTED(once=1) if sanity else None

    @property
    def evaluator(self) -> Engine:
        """The given evaluator, or the one built for the trainer that the handler is attached to."""
        evaluator = self._built if self._given is None else self._given
        if evaluator is None:
            raise AttributeError(
                f"{self.name!r} has no evaluator yet; the evaluator is built when the handler is attached to an engine"
            )
        return evaluator

    def attached(self, engine: Engine) -> None:
        if self._given is None:
            self._built = self._evaluator_of(engine, self.metrics)
        elif self._given is engine:
            raise ValueError(f"{self.name!r}: the evaluator is the trainer itself; evaluate with a separate Engine")

    def detached(self, engine: Engine) -> None:
        self._built = None

    def evaluator_for(self, engine: Engine, metrics: Mapping[str, Any] | None, named: Mapping[str, Any]) -> Engine:
        """The engine that measures these metrics for `Engine.test`, or those of the validation if there are none."""
        measured = _checked_metrics("test", _ARGUMENTS_OF_TEST, metrics, named)
        return self._evaluator_of(engine, measured) if measured else self.evaluator

    def data_sets_of(self, data: Any) -> dict[str, Any]:
        """The data sets of `Engine.test`, by the prefix that each gives to the names of its metrics."""
        if not isinstance(data, Mapping):
            return {"": data}
        return {f"{key}{self._joint}": one for key, one in _data_sets("test", data).items()}

    def _evaluator_of(self, engine: Engine, metrics: Mapping[str, Any]) -> Engine:
        """An engine that evaluates an update of this one, with its model."""
        spec = only_update(engine, self.update, by=self, does="is validated").spec
        models = engine.modules.models
        has_loss = spec.loss is not None or spec.function is not None
        measured = ({"loss": Average()} if has_loss else {}) | dict(metrics)
        if not measured:
            raise ValueError(
                f"{self.name!r}: update {spec.name!r} has no loss and Validation has no metrics, so there is nothing "
                "to measure; pass metrics="
            )
        if spec.forward is None and (unknown := [key for key, one in metrics.items() if not is_of_loss(one)]):
            raise ValueError(
                f"{self.name!r}: update {spec.name!r} is a single function and has no output for {', '.join(unknown)} "
                "to measure; evaluate with a separate engine whose update has an output: Validation(evaluator, data)"
            )
        evaluator = Engine(spec.evaluation(), model=next(iter(models.values())) if len(models) == 1 else models or None)
        evaluator.attach(Metrics(measured))
        return evaluator

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_built": None}

    @on(Events.STARTED, phase=Phase.PREPARE, reads=[], writes=["metrics"])
    def announce(self, engine: Engine) -> None:
        """Announce the metrics' names, so a monitor with a misspelled name fails at once, and check the data."""
        reads = not (self._evaluated or self.sanity or self.start_event)  # else a batch was read, or is about to be
        for key, data in self.data_sets.items():
            where = repr(self.name) if key == "" else f"{self.name!r}, data {key!r}"
            check_evaluable(engine, self.evaluator, data, where, reads=reads)
        watch_weights(engine, self.evaluator)
        self._evaluated = False
        if not engine.unfinished.is_due:
            self._done = []
        self._check_names()
        measured = self.evaluator.state.metrics
        for prefix in map(self._prefix, self.data_sets):
            directions = {prefix + name: one for name, one in measured.directions.items() if name in measured.owners}
            names = [prefix + name for name in measured.owners]
            engine.state.metrics.announce(self.name, names, directions, evaluated=True)

    def _check_names(self) -> None:
        """Refuse two data sets that write the same metric, such as "b_loss" of data "a" and "loss" of data "a_b"."""
        writers: dict[str, str] = {}
        for key in self.data_sets:
            for name in (self._prefix(key) + own for own in self.evaluator.state.metrics.owners):
                if (other := writers.setdefault(name, key)) != key:
                    raise ValueError(
                        f"{self.name!r}: the data {other!r} and the data {key!r} both write the metric {name!r}; rename the "
                        "metric or one of the data sets"
                    )

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

    @on("start_event", phase=Phase.PREPARE, reads=_READ, writes=["metrics"], repeatable=True)
    @on("every", phase=Phase.PREPARE, reads=_READ, writes=["metrics"], repeatable=True)
    def validate(self, engine: Engine) -> None:
        """Run the evaluator over all data sets; after an error, over the remaining ones."""
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
        return f"{self.prefix}{key}{self._joint}" if key else self.prefix

    @property
    def _joint(self) -> str:
        """The separator between the name of a data set and the name of a metric."""
        return "_" if self._given is None else "/"


def _data_sets(where: str, data: Any) -> dict[str, Any]:
    """The data sets by name; the name of a single one is empty."""
    found = dict(data) if isinstance(data, Mapping) else {"": data}
    if not found:
        raise ValueError(f"{where}(data={{}}): there is nothing to evaluate; pass at least one data set")
    for key, one in found.items():
        if key == "":
            check_data(f"{where}(data=", one)
        else:
            check_data(f"{where}(data={{{key!r}: ", one, "})")
    if isinstance(data, Mapping) and not all(isinstance(key, str) and key for key in data):
        raise TypeError(f"{where}(data=...): the names {list(data)} must be non-empty strings")
    return found


def _checked_evaluator(evaluator: Any) -> Engine:
    if isinstance(evaluator, Engine) and not evaluator.training:
        return evaluator
    shown, more = "an engine that trains", ""
    if not isinstance(evaluator, Engine):
        shown = described(evaluator)
        more = "; or pass only the data by position, and metrics by keyword: Validation(data, accuracy=Accuracy())"
    raise ValueError(
        f"Validation(evaluator={shown}): the evaluator must be an Engine that does not train; build it with "
        f"`update.evaluation()`, which has no optimizer{more}"
    )


_ARGUMENTS = ("evaluator", "data", "metrics", "update", "every", "prefix", "at_start", "sanity", "inherit", "name")
_ARGUMENTS_OF_TEST = ("data", "weights", "validation", "inherit", "metrics")
_ELSEWHERE = {"check_val_every_n_epoch": "every", "eval_steps": "every", "val_check_interval": "every"}
_NO_METRICS = (EventEnum, AnyEvent, Interval, str, int, float, Engine)


def _checked_metrics(where: str, arguments: Sequence[str], metrics: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """All metrics by name, checked as `Metrics` does it."""
    _refuse_no_metrics(where, arguments, named)
    given = {} if metrics is None else metrics
    if not isinstance(given, Mapping | nn.ModuleDict):
        raise TypeError(
            f"{where}(metrics=a {type(metrics).__name__}): expected a mapping from names to metrics, such as "
            "{'accuracy': Accuracy()}"
        )
    if twice := [key for key in given if key in named]:
        raise TypeError(
            f"{where}({twice[0]}=): {twice[0]!r} is given twice, in metrics= and as a keyword; omit one of them"
        )
    if not len(given) and not named:
        return {}
    found = Metrics(metrics, **named).metrics
    _refuse_another_loss(where, found)
    return found


def _refuse_no_metrics(where: str, arguments: Sequence[str], named: Mapping[str, Any]) -> None:
    """Raise TypeError for a keyword that is no metric, and perhaps a misspelt argument."""
    for key, value in named.items():
        if isinstance(value, _NO_METRICS) or not (callable(value) or isinstance(value, Metric)):
            hint = did_you_mean(_ELSEWHERE.get(key, key), arguments) or f"; the arguments are {', '.join(arguments)}"
            given = shown(value)
            raise TypeError(f"{where}({key}={given}): {key}= is not an argument, and {given} is not a metric{hint}")


def _refuse_another_loss(where: str, metrics: Mapping[str, Any]) -> None:
    """Raise ValueError for a metric named 'loss' that is surely not the mean of a loss."""
    metric = metrics.get("loss")
    if getattr(metric, "higher_is_better", None) is not True and not isinstance(metric, nn.ModuleDict):
        return
    kind = type(metric).__name__
    raise ValueError(
        f"{where}(loss={kind}()): 'loss' is the mean loss of the update, which {kind}() would replace; give the metric "
        f"a different name: {kind.lower()}={kind}()"
    )
