"""The runs of a plan: which of them the store has, and how long the others will take."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from .designs import Factories
from .factors import with_arguments
from .identity import Identity
from .lines import to_result
from .plan import PlannedRun
from .results import Result, Variant
from .runs import Task

__all__ = ["planned_runs", "stored_looks", "stored_results", "task_of"]


def planned_runs(
    variants: Sequence[Variant],
    seeds: Sequence[int],
    identity: Identity,
    lines: Mapping[str, Any],
    *,
    metric: str,
    pruned: Collection[str],
    retry_failed: bool,
) -> tuple[PlannedRun, ...]:
    """The runs of all variants, seed by seed.

    Args:
        variants, seeds: Of the study.
        identity: What the study was built from, which gives the keys of runs in the store.
        lines: The lines of the store, by key.
        metric: Name of the study's metric.
        pruned: Names of the variants that are pruned.
        retry_failed: Whether failed runs are repeated.
    """
    stored = {
        (variant.name, seed): to_result(variant.name, line, metric)
        for variant in variants
        for seed in seeds
        if (line := lines.get(identity.key(variant, seed))) is not None
    }
    took: dict[str, list[float]] = {}
    for result in stored.values():
        if result.error is None:
            took.setdefault(result.variant, []).append(result.seconds)
    every = _durations(lines, identity.provenance.key)
    runs = []
    for seed in seeds:
        for variant in variants:
            status = _status(stored.get((variant.name, seed)), variant.name in pruned)
            make = status == "missing" or (retry_failed and status == "failed")
            known = took.get(variant.name, every)
            seconds = sum(known) / len(known) if known else None
            key, task = identity.key(variant, seed), identity.provenance.task
            runs.append(PlannedRun(variant, seed, key, status, make, seconds, task=task))
    return tuple(runs)


def _durations(lines: Mapping[str, Any], configuration: str) -> list[float]:
    """The durations of the finished runs of a study, whichever their variants."""
    return [
        line["timing"]["seconds"]
        for line in lines.values()
        if line["configuration"] == configuration and line["error"] is None and "until" not in line
    ]


def _status(result: Result | None, is_pruned: bool) -> Literal["finished", "failed", "missing", "pruned"]:
    if is_pruned:
        return "pruned"
    if result is None:
        return "missing"
    return "failed" if result.value is None else "finished"


def stored_results(runs: Sequence[PlannedRun], lines: Mapping[str, Any], metric: str) -> list[Result]:
    """The results of those runs that the store has."""
    return [to_result(run.variant.name, line, metric) for run in runs if (line := lines.get(run.key)) is not None]


def stored_looks(runs: Sequence[PlannedRun], lines: Mapping[str, Any]) -> list[int]:
    """The numbers of seeds for which the stored runs were made: a look each."""
    found = (lines.get(run.key, {}).get("look") for run in runs)
    return sorted({look for look in found if look is not None})


def task_of(run: PlannedRun, task: Task, factories: Factories) -> Task:
    """The task of a run.

    Args:
        run: The run.
        task: What the runs of the study have in common.
        factories: Factories of the alternatives, by the names of the handler and the alternative.
    """
    return replace(
        task,
        build=with_arguments(task.build, run.variant),
        seed=run.seed,
        off=tuple(sorted(run.variant.off)),
        swaps=tuple((name, factories[name, alternative]) for name, alternative in run.variant.swapped),
        until=run.until,
    )
