"""Reports of results that are known: of variants whose runs differ from those of the baseline by so many percent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from signalfire.ablation.report import Report
from signalfire.ablation.results import Result, Variant

__all__ = ["BASE", "BETTER", "NOTHING", "WORSE", "report", "results", "without"]

BASE = [90, 91, 92, 90, 93, 91, 92, 94]
"""The accuracies of the baseline in percent, by seed."""

# Changes in percent, by seed.
WORSE = [-1, -2, -1, -3, -2, -1, -1, -2]
NOTHING = [1, -1, 0, 2, -2, 1, -1, 1]
BETTER = [1, 2, 1, 3, 2, 1, 1, 2]


def without(*names: str) -> Variant:
    return Variant(f"- {' - '.join(names)}", off=frozenset(names))


def results(variant: str, values: Sequence[float | None], **others: Any) -> list[Result]:
    """Runs of seeds 0, 1, ...; None is one that failed."""
    return [
        Result(variant, seed, value, error=None if value is not None else "Traceback ...\nValueError: boom\n", **others)
        for seed, value in enumerate(values)
    ]


def report(
    changes: Mapping[str, Sequence[float | None]],
    variants: Sequence[Variant] | None = None,
    *,
    base: Sequence[float | None] | None = None,
    mode: Literal["min", "max"] = "max",
    metric: str = "accuracy",
    **options: Any,
) -> Report:
    """A report of variants by how many percent their runs differ from the baseline."""
    seeds = len(next(iter(changes.values())))
    runs = results("baseline", [number / 100 for number in BASE[:seeds]] if base is None else base)
    for name, change in changes.items():
        values = [None if one is None else (number + one) / 100 for number, one in zip(BASE, change, strict=False)]
        runs += results(name, values)
    if variants is None:
        variants = [Variant("baseline"), *(without(name.removeprefix("- ")) for name in changes)]
    return Report(runs, variants, metric=metric, mode=mode, **options)
