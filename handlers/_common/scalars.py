"""Base of the loggers: collects losses, learning rates and metrics as numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from signalfire import AnyEvent, Engine, Events, Handler, Interval, Phase, UpdateState, on
from signalfire.authoring import Capture, check_every
from signalfire.core.settings import is_default

from .new_values import NewValues, Record

__all__ = ["Record", "ScalarLogger"]


class ScalarLogger(Handler):
    """Collects the numbers of a run; a subclass writes them in `record`.

    The losses are those of the updates run in the iteration. Inside an accumulation window, the learning rates are those of
    the next step. Each new value of a metric is written once, even if the run stops and resumes in between.

    Args:
        every: Interval in iterations for losses, learning rates and per-iteration metrics; with "10it" the first are those of
            iteration 10. All other new metric values are written with the iteration that measured them; a value that may be the
            first of several waits for the next iteration.
    """

    capture = Capture.FORBIDDEN  # rates are read before the step
    writes = True
    rank_zero_only = True

    def __init__(self, *, every: str | Interval, name: str | None) -> None:
        super().__init__(name=name)
        self.every = check_every(self, every, units=["it"])
        count = int(self.every.value)
        self.rates_event: AnyEvent = Events.OPTIMIZER_STEP_STARTED(every=count)
        self._rates: dict[str, float] = {}
        self._rates_at = 0
        self._new = NewValues(count)
        self._tags: dict[str, str] = {}  # names of metrics in the log
        self._named: dict[str, str] = {}  # and the metrics by these
        self._losses: list[tuple[str, UpdateState]] = []  # the updates, by the names of their losses in the log
        self._wrote_losses = False
        self._seen_loaded = False  # what `_new` has seen is from a loaded state
        self._early: list[Record] = []

    @staticmethod
    def tag_of(engine: Engine, metric: str) -> str:
        """The name of a metric in a log: under "train/", or "val/" for an evaluation's "loss", "val/loss" or "val_loss".

        The loss of a batch in training is "train/loss"; a metric "loss", the mean of an epoch, is "train/loss_epoch" beside it.
        """
        evaluated = engine.state.metrics.evaluated
        if metric not in evaluated and engine.training:
            name = metric if metric.startswith("train/") else f"train/{metric}"
            return f"{name}_epoch" if name in _tags_of_losses(engine) else name
        bare = metric.removeprefix("val_") if metric.removeprefix("val_") not in evaluated else metric
        return bare if bare.startswith("val/") else f"val/{bare}"

    def record(self, record: Record) -> None:
        """Write the values."""
        raise NotImplementedError

    def converted(self, engine: Engine, convert: Callable[[Any], Any]) -> tuple[str, Any]:
        """The tag of the logged entry, and the value to write; None if the conversion fails, which does not end the run."""
        entry = engine.log.entry
        if entry is None:
            return "", None
        self.write_earlier(engine)
        try:
            return entry.tag, convert(entry.value)
        except Exception as error:  # whatever matplotlib raises
            engine.findings.report(
                "W40",
                f"{self.name!r} cannot write {entry.name!r}: {type(error).__name__}: {error}",
                "to reproduce the error, draw or convert the value outside the run",
                self.name,
                key=entry.name,
            )
            return entry.tag, None

    def _record(self, record: Record) -> None:
        if record.epoch == 0:  # before the first epoch: a state loaded later may include these values
            self._early.append(record)
            return
        if self._early:
            early, self._early = self._early, []
            for one in early:
                self.record(one)
        self.record(record)

    @on(Events.STARTED, phase=Phase.RECORD, reads=["metrics"], writes=[])
    def begin(self, engine: Engine) -> None:
        """Skip the metrics measured so far: the previous run wrote them."""
        self._new.start(engine)
        self._tags, self._named = {}, {}
        for name, owner in engine.state.metrics.owners.items():
            if owner != "user":  # of whose metrics a value shows whether they are an evaluation's
                self._tag(engine, name)
        self._losses = list(zip(_tags_of_losses(engine), engine.updates, strict=True))
        self._seen_loaded = self._wrote_losses = False

    @on(Events.CHECKPOINT_LOADED, phase=Phase.RECORD, reads=["metrics"], writes=[])
    def resume(self, engine: Engine) -> None:
        """Resume from the logger's state in the checkpoint; without one, log the values measured from here on."""
        self._early = []
        if not self._seen_loaded:
            self._new.skip(engine)

    @on("rates_event", phase=Phase.RECORD, reads=["rates", "optimizer"], writes=[])
    def record_rates(self, engine: Engine) -> None:
        """Record the learning rates that the step uses, before a schedule changes them."""
        if self._rates_at != engine.state.iteration:
            self._rates, self._rates_at = {}, engine.state.iteration
        self._rates.update(_rates(engine, engine.state.update))

    @on("every", phase=Phase.RECORD, reads=["loss", "metrics", "rates", "optimizer", "step"], writes=["files"])
    def write_losses(self, engine: Engine) -> None:
        """Write the losses and the rates, after the metrics of earlier iterations."""
        if self._new.pending:
            self.write_metrics(engine)
        iteration = engine.state.iteration
        if self._rates_at != iteration:
            self._rates = {}
        values: dict[str, float] = {}
        for tag, update in self._losses:
            loss = update.loss
            if loss is not None and update.omitted_in != iteration:  # else the loss is from an earlier iteration
                values[tag] = loss.item()
            for key, rate in _rates(engine, update).items():
                values[key] = self._rates.get(key, rate)
        if values:
            self._wrote_losses = True
            self._record(Record(engine.state.epoch, iteration, engine.updates[0].steps, values))

    @on(
        Events.EVALUATION_COMPLETED | Events.EPOCH_COMPLETED | Events.COMPLETED,
        phase=Phase.RECORD,
        reads=["metrics"],
        writes=["files"],
    )
    def write_metrics(self, engine: Engine) -> None:
        """Write the metrics that are new."""
        self._write_new(engine)

    def write_earlier(self, engine: Engine) -> None:
        """Write the new metrics of earlier iterations, before something of this iteration is written."""
        if self._new.pending:
            self._write_new(engine, earlier=True)

    def _tag(self, engine: Engine, name: str) -> str:
        """The name of a metric in the log, found once.

        Raises:
            ValueError: if a different metric has this name.
        """
        if name not in self._tags:
            tag = self.tag_of(engine, name)
            if (other := self._named.setdefault(tag, name)) != name:
                raise ValueError(
                    f"{self.name!r}: the metrics {other!r} and {name!r} are both logged as {tag!r}; rename one of them"
                )
            self._tags[name] = tag
        return self._tags[name]

    def _write_new(self, engine: Engine, *, last: bool = False, earlier: bool = False) -> None:
        for epoch, iteration, step, measured in self._new.take(engine, last=last, earlier=earlier):
            values = {}
            for name, value in measured.items():
                values[self._tag(engine, name)] = value
            self._record(Record(epoch, iteration, step, values))

    @on(Events.COMPLETED, phase=Phase.RECORD, reads=[], writes=[])
    def report_interval(self, engine: Engine) -> None:
        """Report an interval that no iteration of the run has reached."""
        shorter = 0 < engine.state.iteration < self.every.value and not is_default(self, "every")
        if engine.training and shorter and not self._wrote_losses:
            engine.findings.report(
                "W63",
                f"{self.name!r} wrote neither losses nor learning rates, because its interval {str(self.every)!r} is "
                f"longer than the run of {engine.state.iteration} iterations",
                "set every= to a shorter interval",
                self.name,
            )

    @on(Events.ENDED, phase=Phase.PERSIST, reads=[], writes=["files"])
    def close(self, engine: Engine) -> None:
        """Write the new values, unless the run ended before its first epoch."""
        self._write_new(engine, last=True)
        self._new.stop()
        self._early, self._losses = [], []

    def state_dict(self) -> dict[str, Any]:
        if (engine := self.engine) is not None and self._new.collects:  # a checkpoint is to hold what was measured
            self.write_metrics(engine)
        return self._new.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._new.load(state)
        self._seen_loaded = True


def _tags_of_losses(engine: Engine) -> list[str]:
    """The names of the updates' losses of a batch."""
    tag = "train/loss" if engine.training else "val/batch_loss"
    return [tag] if len(engine.updates) == 1 else [f"{tag}/{update.name}" for update in engine.updates]


def _rates(engine: Engine, update: UpdateState) -> dict[str, float]:
    groups = [] if update.optimizer is None else update.optimizer.param_groups
    tag = "lr" if len(engine.updates) == 1 else f"lr/{update.name}"
    if len(groups) == 1:
        group = groups[0]
        rate, name = group["lr"], "name" in group and group["name"]  # None: Adafactor finds its rates itself
        return {} if rate is None else {f"{tag}/{name}" if name else tag: float(rate)}
    named = zip(_names_of(groups), groups, strict=True)
    return {f"{tag}/{name}": float(group["lr"]) for name, group in named if group["lr"] is not None}


def _names_of(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """The name of each of several groups, or else its number."""
    numbers = [f"group{i}" for i in range(len(groups))]
    names = [group.get("name") or number for group, number in zip(groups, numbers, strict=True)]
    return names if len({*names}) == len(names) else numbers
