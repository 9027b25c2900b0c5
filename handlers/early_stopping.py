"""Early stopping: ends the run when a metric stops improving, reaches a threshold or diverges."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from signalfire import Engine, Events, Finding, Handler, Interval, Phase, on
from signalfire.authoring import Claim, Monitor, check_bool, check_every, check_int, check_number, last_epoch
from signalfire.authoring.functions import is_users, names_reached
from signalfire.core.connection import Connection
from signalfire.core.settings import is_default
from signalfire.findings import finding
from signalfire.resuming.keys import UNSAVED

from ._common.ranks import CHECK_METRIC, KEEP_BEST

__all__ = ["EarlyStopping"]


class EarlyStopping(Handler):
    """Early stopping: ends the run when a metric has not improved for ``patience`` consecutive values.

    Each new value is checked once, at whichever event it is reported. While ``min_epochs`` or ``min_iters`` delay a stop, an
    improvement of the metric cancels the stop. NaN is never an improvement.

    With ``restore_best``, the best weights are restored when the run completes, in the modules and in trained tensors outside
    them, such as a temperature. A later `run` continues from these weights, with the optimizers, schedules and counters of the
    last iteration. To continue from the last weights instead, load a checkpoint. After an error, the last weights are kept.

    Args:
        monitor: Name of the metric in ``state.metrics``.
        mode: Whether smaller ("min") or larger ("max") values are better; by default, the direction that the metric declares.
        patience: Number of consecutive values without improvement after which the run stops.
        min_delta: Smallest difference from the best value that counts as an improvement.
        relative: Whether ``min_delta`` is relative to the magnitude of the best value.
        threshold: The run stops when the metric is equal to or better than this value.
        divergence: The run stops when the metric is worse than this value.
        check_finite: Whether the run stops at a NaN or infinite value.
        restore_best: Whether to restore the best weights when the run completes. These are the weights that `Engine.weights`
            returns, including averages. Keeping them takes memory for one more copy on the modules' devices.
        after: Point before which values are ignored, for example "5ep", "1000it" or "1000st".

    Attributes:
        best: Best value so far; None before the first.
        waited: Number of values since the last improvement.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> def build(model):
        ...     update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.01)
        ...     return Engine(update, model=model)
        >>> data = [(torch.ones(2, 1), torch.zeros(2, 1))] * 4
        >>> engine = build(torch.nn.Linear(1, 1))
        >>> @engine.on(Events.EPOCH_COMPLETED, phase=Phase.PREPARE)
        ... def measure(engine):
        ...     engine.log("score", [0.5, 0.7, 0.6, 0.7, 0.9][engine.state.epoch - 1])
        >>> _ = engine.attach(EarlyStopping("score", mode="max", patience=2))
        >>> state = engine.run(data, max_epochs=5)
        >>> state.epoch, state.stop_reason
        (4, 'score has not improved on 0.7 in the last 2 values (greater is better)')
    """

    trains = True
    decides_alike = True

    other_names = {
        "metric": "monitor=",
        "restore_best_weights": "restore_best=",
        "stopping_threshold": "threshold=",
        "divergence_threshold": "divergence=",
    }

    def __init__(
        self,
        monitor: str,
        *,
        mode: Literal["min", "max"] | None = None,
        patience: int = 3,
        min_delta: float = 0.0,
        relative: bool = False,
        threshold: float | None = None,
        divergence: float | None = None,
        check_finite: bool = True,
        restore_best: bool = False,
        after: str | Interval | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.monitor = Monitor("EarlyStopping", monitor, mode, min_delta=min_delta, relative=relative)
        self.threshold = None if threshold is None else check_number(self, "threshold", threshold)
        self.divergence = None if divergence is None else check_number(self, "divergence", divergence)
        self._check_limits()
        self.patience = check_int(self, "patience", patience)
        self.check_finite = check_bool(self, "check_finite", check_finite)
        self.after = None if after is None else check_every(self, after, argument="after", units=["ep", "it", "st"])
        check_bool(self, "restore_best", restore_best)
        self.best_weights_event = Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED if restore_best else None
        self.restore_event = Events.COMPLETED if restore_best else None
        self.best: float | None = None
        self.waited = 0
        self._largest = 0.0  # of the values' magnitudes
        self._reason: str | None = None  # for which the run is to stop
        self._weights: dict[str, Any] | None = None  # of the best value
        self._unsaved: Any = None  # the buffers of then that no state holds, if it was in this process
        self._is_new_best = False  # whether the current event reported the best value

    def _check_limits(self) -> None:
        threshold, divergence, mode = self.threshold, self.divergence, self.monitor.mode
        if threshold is not None and divergence is not None and mode is not None and self._worse(threshold, divergence):
            raise ValueError(
                f"EarlyStopping(threshold={threshold!r}, divergence={divergence!r}): with mode={mode!r}, threshold= is "
                "a worse value than divergence=; swap the two, or change mode="
            )

    def attached(self, engine: Engine) -> None:
        if self.restore_event is not None:
            engine.overrides.claim(Claim("the weights at the end of the run", rehearsed=False), by=self)

    @on(Events.STARTED, phase=Phase.PREPARE, reads=[], writes=[])
    def reset_new_best(self, engine: Engine) -> None:
        """Discard a new best value whose weights an error kept from being copied, because they have changed since."""
        if not engine.unfinished.is_due:
            self._is_new_best = False

    @on(Events.STARTED, phase=Phase.CONTROL, reads=["metrics", "bounds"], writes=[])
    def check_metric(self, engine: Engine) -> None:
        """Find the metric's direction; raise an error for a name that nobody announced or writes."""
        self.monitor.start(engine, self.name)
        self._check_limits()
        self._report_patience(engine)

    def _report_patience(self, engine: Engine) -> None:
        """Report a patience that the values of this run cannot exhaust."""
        if self.monitor.metric in engine.state.metrics.owners and (values := self._too_few_values(engine)) is not None:
            engine.findings.report(
                "W07",
                f"EarlyStopping(patience={self.patience}) cannot stop this run by its patience, because "
                f"{self.monitor.metric!r} has at most {values} values",
                "use a smaller patience, or more epochs",
                self.name,
            )

    def _too_few_values(self, engine: Engine) -> int | None:
        """How many values the metric has at most, if a given patience cannot be exhausted and is all that matters."""
        others = self.threshold is not None or self.divergence is not None or self.best_weights_event is not None
        last = None if others or is_default(self, "patience") else last_epoch(engine)
        values = None if last is None else _most_values(engine, self.monitor.metric, last)
        return None if values is None or values > self.patience else values

    @on(
        Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED,
        phase=Phase.CONTROL,
        reads=["metrics"],
        writes=["stop"],
    )
    def check_patience(self, engine: Engine) -> None:
        """Check a new value of the metric, and request or cancel a stop."""
        value = self.monitor.new_value(engine)
        if value is None or not self._is_active(engine):
            return
        if self.monitor.min_delta:
            self._largest = max(self._largest, abs(value))
        non_finite = self.check_finite and not math.isfinite(value)
        if not non_finite and self.monitor.better(value, self.best):
            self.best, self.waited = value, 0
            self._is_new_best = self.best_weights_event is not None
        else:
            self.waited += 1
        engine.boundary.withdraw(by=self.name)
        reason = self._stop_reason(value, non_finite)
        self._reason = reason
        if reason is not None:
            self._report_min_delta(engine)
            engine.terminate(reason, by=self.name)

    def _report_min_delta(self, engine: Engine) -> None:
        """Report a run that stops though no improvement may have been large enough."""
        monitor, largest = self.monitor, self._largest
        within = monitor.mode == "max" and monitor.min_delta < 1  # an accuracy may still rise by as much
        if self.waited >= self.patience and not monitor.relative and monitor.min_delta >= largest > 0 and not within:
            engine.findings.report(
                "W08",
                f"EarlyStopping(min_delta={monitor.min_delta}) stops the run, but min_delta may be too large for "
                f"{monitor.metric!r}, whose values so far are at most {largest:.3g}",
                "give min_delta in units of the metric, such as 0.001; with relative=True, it is a fraction of the best "
                "value, such as 0.01",
                self.name,
            )

    def _is_active(self, engine: Engine) -> bool:
        if self.after is None:
            return True
        position = {"ep": engine.state.epoch, "it": engine.state.iteration, "st": engine.updates[0].steps}
        return position[self.after.unit] > self.after.value

    def _stop_reason(self, value: float, non_finite: bool) -> str | None:
        """Why the run stops at this value; None if it continues."""
        metric, better = self.monitor.metric, "greater" if self.monitor.mode == "max" else "smaller"
        if non_finite:
            return f"{metric} is {value}, which is not finite"
        if self.divergence is not None and self._worse(value, self.divergence):
            return f"{metric} is {value}, worse than divergence={self.divergence}"
        if self.threshold is not None and (value == self.threshold or self._worse(self.threshold, value)):
            return f"{metric} is {value}, which reaches threshold={self.threshold}"
        if self.waited >= self.patience:
            return f"{metric} has not improved on {self.best} in the last {self.waited} values ({better} is better)"
        return None

    def _worse(self, value: float, than: float) -> bool:
        return value > than if self.monitor.mode == "min" else value < than

    @on(Events.TERMINATED, phase=Phase.RECORD, reads=["stop"], writes=["files"])
    def print_reason(self, engine: Engine) -> None:
        """Print why the run stopped, and which weights the model keeps."""
        reason = engine.state.stop_reason
        if reason is None or reason != self._reason:
            return
        best = "" if self.best is None else f"; restore_best=True would restore the best ({self.best:.4g})"
        weights = "the weights of the best value" if self.restore_event is not None else f"the last weights{best}"
        engine.processes.print(
            f"{self.name}: stopped in epoch {engine.state.epoch}: {reason}; the model keeps {weights}",
            file=sys.stderr,
        )

    @on(
        "best_weights_event",
        phase=Phase.PERSIST,
        rank=KEEP_BEST,
        reads=["weights", "buffers"],
        writes=[],
        repeatable=True,
    )
    def keep_best(self, engine: Engine) -> None:
        """Copy the weights if the current event reported the best value."""
        if self._is_new_best:
            self._weights = engine.snapshots.hold_weights()
            self._unsaved = self._weights.pop(UNSAVED)
            self._is_new_best = False

    @on("restore_event", reads=[], writes=["weights", "buffers"])
    def restore_best(self, engine: Engine) -> None:
        """Load the weights of the best value."""
        if self._weights is not None:
            engine.load_weights(self._weights if self._unsaved is None else self._weights | {UNSAVED: self._unsaved})

    @on(Events.EPOCH_COMPLETED, phase=Phase.CONTROL, rank=CHECK_METRIC, reads=["metrics"], writes=[])
    def check_metric_exists(self, engine: Engine) -> None:
        """Raise an error if the metric does not exist, or differs between the ranks of a distributed run."""
        self.monitor.require(engine)

    def findings(self, engine: Engine) -> Iterator[Finding]:
        """Report a patience that is longer than the run."""
        if (values := self._too_few_values(engine)) is not None:
            yield finding(
                "C19",
                f"{self.name!r} waits for {self.patience} values without improvement, but this run has at most "
                f"{values} values, so the handler cannot stop the run by its patience",
                "reduce the patience, or evaluate more often",
                [self.name],
            )

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"best": self.best, "waited": self.waited, "monitor": self.monitor.state_dict()}
        if self.monitor.min_delta and math.isfinite(self._largest):
            state["largest"] = self._largest
        if self.best_weights_event is not None:
            state["weights"] = self._weights
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]
        # Older states do not say which was the largest: nothing is claimed then.
        self._largest = state.get("largest", math.inf if self.monitor.min_delta else 0.0)
        self._weights = state.get("weights") if self.best_weights_event is not None else None
        self._unsaved = None
        self.monitor.load_state_dict(state["monitor"])


_ONCE_AN_EPOCH = {Events.STARTED, Events.EPOCH_STARTED, Events.EPOCH_COMPLETED, Events.COMPLETED, Events.ENDED}


def _most_values(engine: Engine, metric: str, epochs: int) -> int | None:
    """How many values a metric has at most in so many epochs; None if this is not known."""
    names = {metric, f"val_{metric}"}
    producer = next((one for one in engine.handlers.values() if names & {*one.metric_names(engine)}), None)
    every = getattr(producer, "every", Interval(1, "ep"))
    if not isinstance(every, Interval) or every.unit != "ep":
        return None
    if not hasattr(producer, "every") and not _writes_by_epoch(engine, producer):
        return None
    at_start = getattr(producer, "start_event", None) is not None or (producer is None and _may_write_at_start(engine))
    return int(epochs / every.value) + at_start


def _may_write_at_start(engine: Engine) -> bool:
    """Whether a function of the user's may write metrics before the first epoch, such as those of the initial weights."""
    connections = (one for event in (Events.STARTED, Events.EPOCH_STARTED) for one in engine.signal(event).connections)
    return any(is_users(one.receiver) and {"log", "metrics"} & names_reached(one.receiver) for one in connections)


def _writes_by_epoch(engine: Engine, producer: Handler | None) -> bool:
    """Whether a handler writes metrics only as epochs begin and end; without one, whether all code of the user's does."""

    def may_write(one: Connection) -> bool:
        of_it = is_users(one.receiver) if producer is None else one.owner == producer.name
        return of_it and (one.writes is None or "metrics" in one.writes)

    signals = [signal for signal in engine.signals.all() if any(map(may_write, signal.connections))]
    by_epoch = {signal.event for signal in signals} <= _ONCE_AN_EPOCH
    return by_epoch and (producer is not None or not _has_own_steps(engine))


def _has_own_steps(engine: Engine) -> bool:
    """Whether a forward, a loss or a step is a function of the user's, in which metrics may be written."""
    specs = [one for update in engine.updates for one in (update.spec.forward, update.spec.loss, update.spec.function)]
    modules = [str(getattr(one, "__module__", "")) for one in specs if one is not None]
    return not all(one.startswith(("signalfire.", "torch.")) for one in modules)
