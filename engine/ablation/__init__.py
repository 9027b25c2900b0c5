"""Ablation studies: the contribution of each handler, from paired runs over the same seeds, with exact tests.

The report and its statistics need SciPy, the plots Matplotlib: ``pip install signalfire[ablation]``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .designs import Design, Factorial, LeaveOneOut, OneAtATime, Swap
from .divergence import Divergence, divergence
from .factors import Variants
from .orders import Cumulative, Shapley
from .plan import Plan, PlannedRun
from .results import BASELINE, Result, Variant
from .store import StoreError, StoreWarning
from .study import Study

if TYPE_CHECKING:
    from .joint import intervals, step_down
    from .power import detectable, power
    from .report import Report
    from .rows import Row
    from .statistics import Comparison, Effect, compare, effects, exact, fewest_seeds, holm

__all__ = [
    "BASELINE",
    "Comparison",
    "Cumulative",
    "Design",
    "Divergence",
    "Effect",
    "Factorial",
    "LeaveOneOut",
    "OneAtATime",
    "Plan",
    "PlannedRun",
    "Report",
    "Result",
    "Row",
    "Shapley",
    "StoreError",
    "StoreWarning",
    "Study",
    "Swap",
    "Variant",
    "Variants",
    "compare",
    "detectable",
    "divergence",
    "effects",
    "exact",
    "fewest_seeds",
    "holm",
    "intervals",
    "power",
    "step_down",
]

_LAZY = {
    "Comparison": "statistics",
    "Effect": "statistics",
    "Report": "report",
    "Row": "rows",
    "compare": "statistics",
    "detectable": "power",
    "effects": "statistics",
    "exact": "statistics",
    "fewest_seeds": "statistics",
    "holm": "statistics",
    "intervals": "joint",
    "power": "power",
    "step_down": "joint",
}


def __getattr__(name: str) -> Any:
    """Import what needs SciPy on first use, so that worker processes never import it."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
