"""A monitored metric: its direction, its new values, and whether they are improvements."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..core.state import Direction, as_number
from .checks import check_bool, check_choice, check_number, did_you_mean
from .functions import may_log

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["Monitor", "check_announced", "find_mode", "find_name", "is_announced", "no_direction", "users_may_write"]


def find_name(engine: Engine, metric: str, *, by: str, name: str = "") -> str:
    """The metric that is asked for: itself, its other spelling, or that of a validation, "val_loss" for "loss".

    Args:
        engine: The engine that has the metric.
        metric: The name that the user gave.
        by: The class that needs it, for messages.
        name: Name of the handler.

    Raises:
        KeyError: if a metric of the training may be meant, too.
    """
    found = _found_name(engine, metric, by=by)
    _report_other_name(engine, metric, found, by=by, name=name)
    return found


def _found_name(engine: Engine, metric: str, *, by: str) -> str:
    metrics = engine.state.metrics
    written = metrics.under(metric)
    if written in metrics or written in metrics.owners:
        return written
    validated, trained = metrics.under(f"val_{metric}"), metrics.under(f"train_{metric}")
    if validated not in metrics.owners:
        return metric
    if trained in metrics.owners:
        raise KeyError(f"{by} asks for {metric!r}, which is ambiguous; write {validated!r} or {trained!r}")
    return validated


def _report_other_name(engine: Engine, metric: str, read: str, *, by: str, name: str) -> None:
    """Report that a validation's metric is read in place of the one that was asked for; not for another spelling."""
    metrics = engine.state.metrics
    if read in metrics.owners and read == metrics.under(f"val_{metric}"):
        engine.findings.report(
            "C40",
            f"{by} reads {metric!r} as {read!r}, which {metrics.owners[read]!r} measures",
            f"write {read!r}",
            *([name] if name else []),
            key=(by, metric),
        )


def find_mode(engine: Engine, metric: str, given: Direction | None, *, by: str, name: str = "") -> Direction | None:
    """Whether a metric is to be minimized ("min") or maximized ("max"); None if nobody knows.

    A mode against the metric's own direction is reported (W01), and used.

    Args:
        engine: The engine that has the metric.
        metric: Its name.
        given: The mode that the user gave; None for the metric's own direction.
        by: The class that needs it, for messages.
        name: Name of the handler.
    """
    own = engine.state.metrics.directions.get(metric)
    if given is not None and own is None:
        _report_name(engine, metric, given, by=by, name=name)
    if given is None or own is None or given == own:
        return given or own
    better = "greater" if own == "max" else "smaller"
    what = f"{by}(mode={given!r}) monitors {metric!r}, but the metric declares that {better} values are better"
    way_out = f"omit mode=, or write mode={own!r}; if the opposite is intended, allow W01"
    engine.findings.report("W01", what, way_out, *filter(None, [name]), key=(by, metric))
    return given


_SMALLER = {"loss", "error", "mse", "rmse", "mae", "nll", "perplexity", "wer", "cer"}
_GREATER = {"accuracy", "acc", "f1", "auc", "auroc", "iou", "miou", "dice", "bleu", "psnr"}
_WORDS = {"train", "training", "val", "valid", "validation", "test", "mean", "epoch", "macro", "micro", "top1", "top5"}


def _report_name(engine: Engine, metric: str, given: Direction, *, by: str, name: str) -> None:
    """Report a mode against what a metric is called, where nothing else in its name may turn that round."""
    words = set(re.split(r"[^a-z0-9]+", metric.casefold())) - _WORDS
    smaller, greater = words <= _SMALLER, words <= _GREATER
    if words and (smaller if given == "max" else greater):
        engine.findings.report(
            "W01",
            f"{by}(mode={given!r}) monitors {metric!r}, but its name suggests that "
            f"{'smaller' if smaller else 'greater'} values are better",
            f"write mode={'min' if smaller else 'max'!r}; if the name is misleading, rename the metric",
            *filter(None, [name]),
            key=(by, metric),
        )


def no_direction(metric: str, by: str, mode_of: str = "") -> ValueError:
    """The error for a metric whose direction nobody knows; ``mode_of`` is what takes mode=, if not the handler itself."""
    taker = f"{mode_of} " if mode_of else ""
    return ValueError(
        f"{by} monitors {metric!r}, but it is not known whether smaller or greater values are better; pass "
        f"{taker}mode='min' or mode='max', or declare the direction in the metric: Average(function, "
        "higher_is_better=True)"
    )


def check_announced(engine: Engine, metric: str, *, by: str, verb: str = "monitors") -> bool:
    """Whether a handler announced this metric or it has a value; to be called at STARTED, after all announcements.

    Raises:
        KeyError: if it was not, and nobody else can write it.
    """
    if is_announced(engine, metric):
        return True
    if not users_may_write(engine):
        raise KeyError(_no_such(engine, metric, f"{by} {verb}", "no such metric is announced"))
    return False


def is_announced(engine: Engine, metric: str) -> bool:
    """Whether a handler announced this metric, or one of which it is a part, or it has a value."""
    metrics = engine.state.metrics
    known = {*metrics, *metrics.owners}
    return metrics.under(metric) in known or any(metric.startswith(f"{one}/") for one in known)


def users_may_write(engine: Engine) -> bool:
    """Whether code of the user's runs in the engine that may write metrics: receivers, handlers, forwards and losses."""
    if may_log(engine):
        return True
    if any(one.owner is None for signal in engine.signals.all() for one in signal.connections):
        return True
    return any(map(_has_users_code, engine.handlers.values()))


def _has_users_code(handler: Any) -> bool:
    """Whether a handler is the user's, or has an evaluator in which code of the user's may write metrics."""
    if not type(handler).__module__.startswith("signalfire."):
        return True
    evaluator: Any = getattr(handler, "evaluator", None)
    return hasattr(evaluator, "handlers") and users_may_write(evaluator)


def _no_such(engine: Engine, metric: str, by: str, fact: str) -> str:
    metrics = engine.state.metrics
    there = sorted({*metrics, *metrics.owners})
    by_function = (
        " If your function writes the metric after Phase.CONTROL, write it in Phase.PREPARE. If it does not write the "
        "metric in every epoch, announce the metric first: engine.state.metrics.announce('user', ['its_name'])"
    )
    return (
        f"{by} {metric!r}, but {fact}. Available metrics: {', '.join(there) or 'none; attach Metrics or Validation'}"
        f"{did_you_mean(metric, there) or '.'}{by_function if users_may_write(engine) else ''}"
    )


class Monitor:
    """Reports each new value of one metric once, and whether it is better than another value.

    NaN is never better than anything, and an equal value is not better.

    Args:
        handler: Class name of the handler, for errors.
        metric: Name of the metric in ``state.metrics``.
        mode: "min" if smaller is better, "max" if larger is; None for the metric's own direction.
        min_delta: Smallest difference that counts as an improvement; in units of the metric, or with ``relative`` as a fraction
            of the best value's magnitude, which also works for negative scores.
        relative: Whether min_delta is relative.
        mode_of: What accepts ``mode=``, for errors, if the handler does not.

    Attributes:
        given: The mode that was given.
        needs_mode: Whether a metric whose direction is unknown is an error.
        mode: The mode in effect; None while it is unknown.
        asked: The name that was passed; from `start` on, `metric` is the name under which the metric is written.
    """

    def __init__(
        self,
        handler: str,
        metric: str,
        mode: Direction | None = None,
        *,
        min_delta: float = 0.0,
        relative: bool = False,
        mode_of: str = "",
    ) -> None:
        if not isinstance(metric, str) or not metric:
            raise TypeError(f"{handler}: the monitored metric is {metric!r}; expected a name, such as 'accuracy'")
        self.handler = handler
        self.asked = metric
        self.metric = metric
        self.mode_of = mode_of
        self.needs_mode = True
        if mode is not None:
            check_choice(handler, "mode", mode, ("min", "max"))
        self.given = mode
        self.mode = mode
        self.min_delta = check_number(handler, "min_delta", min_delta, least=0)
        self.relative = check_bool(handler, "relative", relative)
        self._name = ""  # of the handler, from `start` on
        self.serial = 0  # of all metrics at the last call: one comparison shows that nothing is new
        self.seen = 0  # the serial of the metric's value that was last returned
        self._other_read = False  # whether that was a value of a metric of another name than was given

    def start(self, engine: Engine, name: str = "") -> None:
        """Find the mode and check the metric's name; call this at STARTED in Phase.CONTROL, after all announcements.

        Raises:
            KeyError: for a metric that nothing can write.
            ValueError: for an announced metric whose direction is unknown, without mode=.
        """
        self._name, self.metric = name, _found_name(engine, self.asked, by=self.handler)
        announced = check_announced(engine, self.metric, by=self.handler)
        self.mode = find_mode(engine, self.metric, self.given, by=self.handler, name=name)
        if self.mode is None and self.needs_mode and announced and self.metric in engine.state.metrics.owners:
            raise no_direction(self.metric, self.handler, self.mode_of)
        self._report_training_metric(engine, name)

    def _report_training_metric(self, engine: Engine, name: str) -> None:
        """Report a training metric that is monitored although an evaluator measures one of the same name."""
        owners = engine.state.metrics.owners
        owner = owners.get(self.metric)
        evaluating = {one for one, handler in engine.handlers.items() if hasattr(handler, "evaluator")}
        if owner is None or owner in evaluating:
            return
        others = {other: by for other, by in owners.items() if by in evaluating}
        same = _of_one_name(self.metric, others)
        handler = engine.handlers.get(owner)  # one of the user's may measure held-out data itself
        if others and hasattr(handler, "metrics") and type(handler).__module__.startswith("signalfire."):
            other = same or next(iter(others))
            engine.findings.report(
                "W06",
                f"{self.handler} monitors {self.metric!r}, which is measured on the training data",
                f"monitor {other!r}, which {others[other]!r} measures",
                *filter(None, [name]),
                key=(self.handler, self.metric),
                severity="info" if same is None or self._means_training(other) else None,
            )

    def _means_training(self, other: str) -> bool:
        """Whether a training metric is meant, and not one of an evaluation.

        A rate may follow the training, whoever writes "train" means it, and by test data nothing should be chosen.
        """
        return self.handler == "LRScheduling" or _base(self.metric) != self.metric or other.startswith("test")

    def new_value(self, engine: Engine) -> float | None:
        """The metric's value if it is new since the last call, else None.

        Raises:
            TypeError: for a value that is not a single number.
            ValueError: if the metric's direction is not known.
        """
        metrics = engine.state.metrics
        if metrics.serial == self.serial:
            return None
        self.serial = metrics.serial
        if self.asked != self.metric and self.asked in metrics.serials:
            self._take_asked()
        serial = metrics.serials.get(self.metric, 0)
        if serial == self.seen:
            return None
        self.seen = serial
        self._other_read = self.metric != self.asked
        if self._other_read:
            _report_other_name(engine, self.asked, self.metric, by=self.handler, name=self._name)
        self._report_late(engine)
        value = metrics[self.metric]
        number = as_number(value)
        if number is None:
            shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
            raise TypeError(
                f"{self.handler}: the metric {self.metric!r} is a {type(value).__name__}{shape}; expected a single number"
            )
        self.mode = find_mode(engine, self.metric, self.given, by=self.handler, name=self._name)
        if self.mode is None and self.needs_mode:
            raise no_direction(self.metric, self.handler, self.mode_of)
        return number

    def _take_asked(self) -> None:
        """Read the metric of the very name that was given, which was not announced and has its first value now.

        Raises:
            KeyError: if values of a validation were read in its place before.
        """
        if self._other_read:
            raise KeyError(
                f"{self.handler} asks for {self.asked!r}, which is ambiguous. The handler has read {self.metric!r} so "
                f"far, but a metric named {self.asked!r} now exists; pass {self.metric!r} to the handler, or announce "
                f"{self.asked!r} before the run: engine.state.metrics.announce('user', [{self.asked!r}])"
            )
        self.metric = self.asked

    def _report_late(self, engine: Engine) -> None:
        """Report a new value that was written in an earlier iteration, after this monitor had looked there."""
        now = engine.state.iteration
        written = engine.state.metrics.written.get(self.metric, now)
        if 0 < written < now:  # before the first iteration, it is a baseline
            engine.findings.report(
                "W41",
                f"{self.metric!r} is written after {self.handler} reads it. In iteration {now}, {self.handler} read "
                f"the value from iteration {written}, and the weights have changed since then",
                "write the metric in an earlier phase than CONTROL, such as @engine.on(Events.EPOCH_COMPLETED, "
                "phase=Phase.PREPARE)",
                key=self.metric,
            )

    def report_nan(self, engine: Engine, value: float, name: str, effect: str) -> None:
        """Report a value that is NaN, for handlers that would otherwise ignore it silently."""
        if math.isnan(value):
            engine.findings.report(
                "W02",
                f"{self.handler}: the monitored metric {self.metric!r} is NaN, {effect}",
                "find the source of the NaN; NonFiniteGuard can skip steps with a non-finite loss or gradients, and "
                "EarlyStopping can stop the run at the first non-finite value of its metric",
                name,
            )

    def require(self, engine: Engine) -> None:
        """Check at the end of an epoch that the metric exists, and is the same on all ranks of a distributed run.

        Raises:
            KeyError: if it was neither announced nor written.
            ValueError: if the ranks would base their decisions on different values.
        """
        metrics = engine.state.metrics
        known = self.metric in metrics or self.metric in metrics.owners
        if engine.processes.distributed:
            self._require_agreement(engine)
        if not known and not any(self.metric.startswith(f"{one}/") for one in metrics.owners):
            raise KeyError(_no_such(engine, self.metric, f"{self.handler} monitors", "no such metric was produced"))

    def _require_agreement(self, engine: Engine) -> None:
        metrics = engine.state.metrics
        value = as_number(metrics[self.metric]) if self.metric in metrics else None
        values = engine.processes.gather(value)
        first = values[0]
        for rank, other in enumerate(values):
            if _differ(first, other):
                raise ValueError(
                    f"{self.handler} monitors {self.metric!r}, which differs between the ranks ({_shown(first)} on "
                    f"rank 0, {_shown(other)} on rank {rank}), so the ranks would make different decisions; "
                    "measure the metric with Metrics or Validation, which combine the values of all ranks, or combine "
                    "the values in your own function with engine.processes.sum"
                )

    def better(self, value: float, best: float | None) -> bool:
        """Whether ``value`` is better than ``best`` by more than min_delta; everything except NaN is better than None."""
        if self.mode is None:
            raise no_direction(self.metric, self.handler, self.mode_of)
        if math.isnan(value):
            return False
        if best is None or math.isnan(best):
            return True
        if self.min_delta == 0.0 or math.isinf(best):
            return value < best if self.mode == "min" else value > best
        margin = self.min_delta * abs(best) if self.relative else self.min_delta
        return value < best - margin if self.mode == "min" else value > best + margin

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen} | ({"other_read": True} if self._other_read else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]
        self._other_read = state.get("other_read", False)
        self.serial = -1  # check all metrics at the next call


def _base(metric: str) -> str:
    """The name of a metric without the prefix of the training."""
    return metric.removeprefix("train_").removeprefix("train/")


def _of_one_name(metric: str, others: Iterable[str]) -> str | None:
    """The first of some metrics that has the name of one of the training, apart from a prefix; None without one."""
    base = _base(metric)
    return next((one for one in others if one == base or one.endswith((f"_{base}", f"/{base}"))), None)


def _differ(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is not other
    return not (math.isclose(one, other, rel_tol=1e-6) or (math.isnan(one) and math.isnan(other)))


def _shown(value: float | None) -> str:
    return "none" if value is None else str(value)
