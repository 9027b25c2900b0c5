"""Reporting to a search: each new value of a metric goes to a function, whose answer may stop the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from signalfire.authoring import check_function

from ._common.metric_reports import MetricReports

__all__ = ["Reporting"]


class Reporting(MetricReports):
    """Reports a metric to a hyperparameter search: each new value is passed to a function, which may stop the run.

    Each value is reported once, at whichever event it is written; values of a sanity check are not reported. If the function
    returns True, the run stops at the end of the iteration and ends as usual, with ``state.stop_reason == "pruned"``. With
    several ranks, rank 0 calls the function, and all ranks receive the result; an error in the function ends all ranks.

    Args:
        report: Function called as ``report(value, step)`` with the value and the number of values before it. It returns whether
            to stop.
        monitor: Name of the metric in ``state.metrics``.
        mode: Whether smaller ("min") or larger ("max") values are better; by default, the direction that the metric declares.

    Raises:
        TypeError: if ``report`` cannot be called.
        KeyError: at the start of a run, for a metric that nothing writes.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> from signalfire.handlers import Average, Metrics
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.25)
        >>> engine = Engine(update, model=torch.nn.Linear(1, 1, bias=False))
        >>> _ = torch.nn.init.ones_(engine.model.weight)
        >>> def report(value, step):  # a searcher's, which decides whether to stop
        ...     print(step, value)
        ...     return value < 0.1
        >>> _ = engine.attach(Metrics(loss=Average()), Reporting(report, "loss"))
        >>> engine.run([(torch.ones(4, 1), torch.zeros(4, 1))], max_epochs=10).stop_reason
        0 1.0
        1 0.25
        2 0.0625
        'pruned'
    """

    def __init__(
        self,
        report: Callable[[float, int], bool | None],
        monitor: str,
        *,
        mode: Literal["min", "max"] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(monitor, mode=mode, name=name)
        check_function(self, "report", report, "value", "step")
        self.function = report

    def report(self, value: float, step: int) -> bool:
        return bool(self.function(value, step))
