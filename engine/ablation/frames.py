"""The runs and the comparisons of a study as tables of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .failures import Failures
from .formats import without_nan
from .pruning import Pruned
from .results import Result
from .rows import Findings, Row

__all__ = ["content_of", "framed", "record_of", "records_of", "records_of_runs"]

Record = dict[str, Any]

_COMPARED = (
    *("pairs", "difference", "low", "high", "p", "p_adjusted", "d_z", "verdict"),
    *("failed_pairs_variant", "failed_pairs_baseline", "failed_pairs_both"),
)
_NO_FAILURES = Failures(0, 0, 0, 1.0)


def record_of(row: Row) -> Record:
    """A variant as one line of numbers and names; None where there is no number."""
    found: Record = {
        "variant": row.variant.name,
        "finished": row.finished,
        "planned": row.planned,
        "mean": row.mean,
        "sd": row.sd,
        **_comparison_of(row),
        "seconds": row.seconds,
        "steps": row.steps,
        "memory": row.memory or None,
    }
    for name, seeds in (("failed", row.failed), ("missing", row.missing), ("without_pair", row.without_pair)):
        found["seeds_without_pair" if name == "without_pair" else f"{name}_seeds"] = " ".join(map(str, seeds))
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in found.items()}


def _comparison_of(row: Row) -> Record:
    """The comparison with the baseline; None throughout for the baseline itself."""
    one, end = row.comparison, row.conclusion
    if one is None or end is None:
        return dict.fromkeys(_COMPARED)
    failures = row.failures or _NO_FAILURES
    numbers = (one.n, one.mean, end.low, end.high, row.p, row.adjusted, one.effect, end.verdict)
    return dict(zip(_COMPARED, (*numbers, failures.variant, failures.baseline, failures.both), strict=True))


def records_of(rows: Sequence[Row], pruned: Sequence[Pruned]) -> list[Record]:
    """All variants, and then those that were pruned, which have no numbers."""
    records = [record_of(row) for row in rows]
    if pruned:
        empty = dict.fromkeys(records[0])
        records = [one | {"pruned_after_epoch": None} for one in records]
        records += [
            empty | {"variant": one.variant.name, "finished": 0, "planned": one.seeds, "pruned_after_epoch": one.epoch}
            for one in pruned
        ]
    return records


def records_of_runs(results: Sequence[Result], metric: str) -> list[Record]:
    """Each run as one line: variant, seed, the value of the metric, the first line of its error, its costs, and all metrics."""
    names = dict.fromkeys(name for result in results for name in result.metrics)
    records = []
    for one in results:
        error = None if one.error is None else one.error.strip().rpartition("\n")[2]
        found: Record = {"variant": one.variant, "seed": one.seed, metric: one.value, "error": error}
        found |= {"seconds": one.seconds, "steps": one.steps, "memory": one.memory or None}
        records.append(found | {name: one.metrics.get(name) for name in names if name != metric})
    return records


def content_of(report: Findings) -> dict[str, Any]:
    """What a report was made from and its rows, as JSON types; None where there is no number."""
    rows = []
    for row in report.rows:
        one = {name: value for name, value in asdict(row).items() if name not in ("variant", "comparison")}
        one |= {"verdict": row.verdict}
        one["values"] = {str(seed): value for seed, value in row.values.items()}
        one["differences"] = {str(seed): value for seed, value in row.differences.items()}
        one["failed"] = {str(seed): reason for seed, reason in row.failed.items()}
        one |= {"missing": list(row.missing), "without_pair": list(row.without_pair), "finished": row.finished}
        one["variant"] = {
            "name": row.variant.name,
            "off": sorted(row.variant.off),
            "swapped": [list(pair) for pair in row.variant.swapped],
            "level": dict(row.variant.level),
            "arguments": {name: repr(value) for name, value in row.variant.arguments},
        }
        one["comparison"] = None if row.comparison is None else asdict(row.comparison) | {"exact": row.comparison.exact}
        rows.append(one)
    content: dict[str, Any] = without_nan(
        {
            "metric": report.metric,
            "mode": report.mode,
            "baseline": report.baseline,
            "level": report.level,
            "seeds": list(report.seeds),
            "comparisons": report.comparisons,
            "seeds_needed": report.needed,
            "rows": rows,
            "margin": report.margin,
            "looks": None if report.looks is None else list(report.looks.sizes),
            "seen": list(report.seen),
            "pruned": [{"variant": one.variant.name, **one.evidence()} for one in report.pruned],
        }
    )
    return content


def framed(records: Sequence[Record]) -> Any:
    """A ``pandas.DataFrame`` if pandas is installed; else a dict of columns, which are lists of equal length."""
    columns = {name: [record[name] for record in records] for name in records[0]} if records else {}
    try:
        import pandas
    except ImportError:
        return columns
    return pandas.DataFrame(columns)
