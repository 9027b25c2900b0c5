"""Optuna pruning: stops trials that are worse than others early."""

from __future__ import annotations

import sys
from typing import Any, Literal

from signalfire import Engine, Events, Phase, on

from ._common.metric_reports import MetricReports

__all__ = ["OptunaPruning"]


class OptunaPruning(MetricReports):
    """Reports a metric to an Optuna trial, and stops the run when the study's pruner prunes it.

    The run first ends as usual: files are closed, ENDED is emitted, and checkpoints can be loaded. Then `Engine.run` raises
    ``optuna.TrialPruned``, which Optuna expects from an objective.

    Args:
        trial: The trial that Optuna passes to the objective; None on ranks other than 0.
        monitor: Name of the metric in ``state.metrics``, such as "val_accuracy".
        mode: Direction of the metric, "min" or "max"; by default that of the trial's study.

    Raises:
        TypeError: for an object that is not a trial.
        ValueError: if the study has several objectives, because Optuna does not prune such studies.
        optuna.TrialPruned: from `Engine.run`, after ENDED.

    Source: Akiba et al., Optuna: A Next-generation Hyperparameter Optimization Framework, KDD 2019,
    https://arxiv.org/abs/1907.10902

    Example:
        >>> def objective(trial):
        ...     engine = build(lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True))
        ...     engine.attach(OptunaPruning(trial, "val_accuracy"))
        ...     engine.run(loader, max_epochs=10)
        ...     return engine.state.metrics["val_accuracy"]
        >>> OptunaPruning(None, "val_accuracy").name  # as on other ranks than 0
        'optuna_pruning'
    """

    reason = "pruned by Optuna"

    def __init__(
        self, trial: Any, monitor: str, *, mode: Literal["min", "max"] | None = None, name: str | None = None
    ) -> None:
        if trial is not None and not all(callable(getattr(trial, one, None)) for one in ("report", "should_prune")):
            raise TypeError(f"OptunaPruning(trial={trial!r}): expected an Optuna trial, or None on ranks other than 0")
        directions = [one.name for one in getattr(getattr(trial, "study", None), "directions", ())]
        if len(directions) > 1:
            raise ValueError(
                f"OptunaPruning(trial=...): the study has {len(directions)} objectives, but Optuna prunes trials only "
                "in studies with a single objective"
            )
        if mode is None and directions:
            mode = "max" if directions == ["MAXIMIZE"] else "min"
        super().__init__(monitor, mode=mode, name=name)
        self.trial = trial

    def report(self, value: float, step: int) -> bool:
        self.trial.report(value, step)
        return bool(self.trial.should_prune())

    @on(Events.STARTED, phase=Phase.PREPARE, reads=[], writes=[])
    def check_trial(self, engine: Engine) -> None:
        """Check that rank 0 has a trial."""
        if self.trial is None and engine.processes.is_rank_zero:
            raise TypeError("OptunaPruning(trial=None): pass the trial on rank 0, and None only on other ranks")

    @on(Events.ENDED, phase=Phase.PERSIST, rank=sys.maxsize, reads=["stop"], writes=[])
    def raise_pruned(self, engine: Engine) -> None:
        """Raise for Optuna once everything else has ended, even if a pruned run resumes, which has nothing left to do."""
        if engine.state.stop_reason == self.reason:
            raise _error(f"pruned after {self.reported} reported values of {self.monitor.metric!r}")


def _error(message: str) -> Exception:
    try:
        from optuna import TrialPruned
    except ImportError as error:
        raise ImportError("OptunaPruning needs Optuna: pip install 'signalfire[search]'") from error
    pruned: Exception = TrialPruned(message)
    return pruned
