"""Ablation studies: the contribution of each handler, from paired runs over the same seeds, with exact tests.

The report and its statistics need SciPy, the plots Matplotlib: ``pip install signalfire[ablation]``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .designs import Design, Factorial, LeaveOneOut, OneAtATime, Swap
from .divergence import Divergence, divergence
from .factors import Variants
from .fractions import FractionalFactorial
from .kfold import Folds, KFold
from .nuisance import Tuned, tune
from .orders import Cumulative, Shapley
from .plan import Plan, PlannedRun
from .pruning import Halving, Pruned
from .ray_executor import RayExecutor
from .results import BASELINE, Result, Variant
from .store import StoreError, StoreWarning
from .study import Study

if TYPE_CHECKING:
    from .aggregate import (
        bootstrap_interval,
        interquartile_mean,
        optimality_gap,
        performance_profile,
        probability_of_improvement,
        resamples,
    )
    from .cost_ratios import Cost, cost_table, costs
    from .detectability import detectable, power
    from .joint import intervals, step_down
    from .metrics_report import MetricsReport
    from .pictures import plot_curves, plot_pareto
    from .report import Report
    from .rows import Row
    from .statistics import Comparison, Effect, compare, effects, exact, fewest_seeds, holm
    from .stored import read_reports
    from .task_report import TasksReport

__all__ = [
    "BASELINE",
    "Comparison",
    "Cost",
    "Cumulative",
    "Design",
    "Divergence",
    "Effect",
    "Factorial",
    "Folds",
    "FractionalFactorial",
    "Halving",
    "KFold",
    "LeaveOneOut",
    "MetricsReport",
    "OneAtATime",
    "Plan",
    "PlannedRun",
    "Pruned",
    "RayExecutor",
    "Report",
    "Result",
    "Row",
    "Shapley",
    "StoreError",
    "StoreWarning",
    "Study",
    "Swap",
    "TasksReport",
    "Tuned",
    "Variant",
    "Variants",
    "bootstrap_interval",
    "compare",
    "cost_table",
    "costs",
    "detectable",
    "divergence",
    "effects",
    "exact",
    "fewest_seeds",
    "holm",
    "interquartile_mean",
    "intervals",
    "optimality_gap",
    "performance_profile",
    "plot_curves",
    "plot_pareto",
    "power",
    "probability_of_improvement",
    "read_reports",
    "resamples",
    "step_down",
    "tune",
]

_LAZY = {
    "aggregate": [
        "bootstrap_interval",
        "interquartile_mean",
        "optimality_gap",
        "performance_profile",
        "probability_of_improvement",
        "resamples",
    ],
    "cost_ratios": ["Cost", "cost_table", "costs"],
    "detectability": ["detectable", "power"],
    "joint": ["intervals", "step_down"],
    "metrics_report": ["MetricsReport"],
    "pictures": ["plot_curves", "plot_pareto"],
    "report": ["Report"],
    "rows": ["Row"],
    "statistics": ["Comparison", "Effect", "compare", "effects", "exact", "fewest_seeds", "holm"],
    "stored": ["read_reports"],
    "task_report": ["TasksReport"],
}

if not TYPE_CHECKING:  # type checkers would accept any name of a module that has a __getattr__

    def __getattr__(name: str) -> object:
        """Import what needs SciPy on first use, so that worker processes never import it."""
        for module, names in _LAZY.items():
            if name in names:
                return getattr(importlib.import_module(f".{module}", __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
