"""Reports on a store alone, without the code that made its runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from signalfire.authoring.checks import did_you_mean

from .lines import to_result
from .pruning import Pruned, pruned_of
from .report import Report
from .results import BASELINE, Result, Variant
from .store import Store, StoreError

__all__ = ["read_reports"]

Line = Mapping[str, Any]


def read_reports(
    path: str | os.PathLike[str], *, metric: str | None = None, mode: Literal["min", "max"] | None = None
) -> dict[str, Report]:
    """A report on each study in a store, by a line that says what it is; nothing is built or run.

    Runs that were made with other code or arguments are another study. Of runs of version 0.1 it is not known whether they were.

    Args:
        path: File of the store.
        metric: Name of the metric to compare; by default that of the study.
        mode: Whether smaller ("min") or greater ("max") is better; by default that of the study.

    Raises:
        FileNotFoundError: if there is no such file.
        KeyError: for a metric that no run has.
        ValueError: if it is not known which metric to compare, or which direction is better; and if one study has two runs of the
            same variant and seed.
        StoreError: for a file that is no store, or has no run.
    """
    if not Path(path).exists():
        raise FileNotFoundError(
            f"there is no store {str(path)!r}; to create one, run a study with Study(..., store={str(path)!r})"
        )
    store = Store(path)
    studies: dict[str, list[Line]] = {}
    for line in (*store.read().values(), *store.old()):
        studies.setdefault(line["configuration"], []).append(line)
    if not studies:
        raise StoreError(f"the store {str(path)!r} has no runs")
    return {
        _title(place, len(studies), lines): _report(lines, metric, mode)
        for place, lines in enumerate(studies.values(), 1)
    }


def _title(place: int, count: int, lines: list[Line]) -> str:
    config = (
        ", ".join(f"{name}={value!r}" for name, value in lines[0]["config"].items()) if lines[0].get("config") else ""
    )
    made = lines[0].get("provenance", {})
    what = f"torch {made['torch']}, Python {made['python']}" if made else "written by version 0.1, without checksums"
    task = [f"task {lines[0]['task']!r}"] if lines[0].get("task") else []
    words = [f"study {place} of {count}", *task, *([config] if config else []), f"{len(lines)} runs", what]
    return ", ".join(words)


def _report(lines: list[Line], metric: str | None, mode: Literal["min", "max"] | None) -> Report:
    metric, mode = _metric(lines, metric, mode)
    variants: dict[str, Variant] = {}
    results: list[Result] = []
    pruned: dict[str, Pruned] = {}
    for line in lines:
        name = _name(line)
        variant = Variant(name, frozenset(line["off"]), tuple(sorted(line["swapped"].items())))
        other = variants.setdefault(name, variant)
        if other != variant:
            raise ValueError(
                f"a study in the store has different variants named {name!r}, from different designs; create the "
                "report with study.report(design)"
            )
        if "until" in line:
            if "pruned" in line:
                pruned[name] = pruned_of(variant, line["pruned"])
            continue
        if any((one.variant, one.seed) == (name, line["seed"]) for one in results):
            raise ValueError(
                f"a study in the store has two runs of {name!r} with seed {line['seed']}, because an alternative "
                "changed between them; create the report with study.report(design)"
            )
        results.append(to_result(name, line, metric))
    if BASELINE not in variants:
        raise ValueError(
            f"every comparison is made with the baseline, but no run belongs to the variant {BASELINE!r}; the "
            f"variants are {', '.join(variants)}"
        )
    ordered = sorted(variants.values(), key=lambda one: one.name != BASELINE)
    trained = {one.variant for one in results}
    left_out = [one for name, one in pruned.items() if name not in trained]
    return Report(results, ordered, metric=metric, mode=mode, pruned=left_out)


def _name(line: Line) -> str:
    if "variant" in line:
        return str(line["variant"])
    parts = [
        *(f"- {name}" for name in line["off"]),
        *(f"{one} = {other}" for one, other in sorted(line["swapped"].items())),
    ]
    return " ".join(parts) or BASELINE


def _metric(
    lines: list[Line], metric: str | None, mode: Literal["min", "max"] | None
) -> tuple[str, Literal["min", "max"]]:
    asked = {line["metric"]: line["mode"] for line in lines if line.get("metric")}
    there = sorted({name for line in lines for name in line["metrics"]})
    if metric is None:
        metric = _asked(asked, there)
    elif metric not in there:
        raise KeyError(
            f"no run has the metric {metric!r}; available metrics: "
            f"{', '.join(there) or 'none'}{did_you_mean(metric, there)}"
        )
    mode = mode or asked.get(metric)
    if mode is None:
        raise ValueError(
            f"it is unknown whether smaller or larger values of {metric!r} are better; set mode='min' or mode='max'"
        )
    return metric, mode


def _asked(asked: Iterable[str], there: list[str]) -> str:
    """The metric that all studies compare."""
    names = list(asked)
    if len(names) != 1:
        such = next(iter(names or there), "accuracy")
        raise ValueError(
            f"the store does not say which metric to compare; set metric=, such as metric={such!r}. Available "
            f"metrics: {', '.join(there) or 'none'}"
        )
    return names[0]
