"""The line of a run in the store, and the result that it stands for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from signalfire.authoring.checks import did_you_mean

from .plan import PlannedRun
from .provenance import Provenance
from .results import Result
from .runs import Outcome

__all__ = ["check_stored", "differences", "no_direction", "no_metric", "to_line", "to_result"]


def to_line(
    run: PlannedRun,
    outcome: Outcome,
    provenance: Provenance,
    *,
    config: Mapping[str, Any],
    metric: str,
    mode: str | None,
) -> dict[str, Any]:
    """The line of a run; of two runs that are equal, only ``timing`` differs."""
    until = {} if run.until is None else {"until": run.until, "reached": outcome.epoch}
    return {
        **until,
        "begins": list(outcome.begins),
        "config": config,
        "configuration": provenance.key,
        "error": outcome.error,
        "handlers": list(outcome.handlers),
        "history": outcome.history,
        "key": run.key,
        "metric": metric,
        "metrics": outcome.metrics,
        "mode": mode,
        "off": sorted(run.variant.off),
        "provenance": provenance.parts(),
        "seed": run.seed,
        "steps": outcome.steps,
        "swapped": dict(run.variant.swapped),
        "timing": {"memory": outcome.memory, "seconds": outcome.seconds},
        "variant": run.variant.name,
    } | ({"task": run.task} if run.task else {})


def to_result(variant: str, line: Mapping[str, Any], metric: str) -> Result:
    """The result of a stored run, as one of this variant; without the metric, it is a failed one."""
    metrics = {name: float(value) for name, value in line["metrics"].items()}
    error = line["error"]
    if error is None and metric not in metrics:
        error = f"KeyError: {no_metric(metric, variant, metrics)}"
    return Result(
        variant,
        line["seed"],
        None if error is not None else metrics[metric],
        metrics,
        line["steps"],
        line["timing"]["seconds"],
        line["timing"]["memory"],
        error,
        {name: [(epoch, float(value)) for epoch, value in curve] for name, curve in line.get("history", {}).items()},
    )


def differences(line: Mapping[str, Any], outcome: Outcome) -> str:
    """In what a run that was repeated differs from its line, bit for bit; empty if it does not."""
    if outcome.error is not None:
        return f"the stored run finished, but the repeated run failed with {outcome.error.strip().splitlines()[-1]}"
    stored = {name: float(value) for name, value in line["metrics"].items()}
    found = [
        f"{name} is {stored.get(name)!r} in the store, but {outcome.metrics.get(name)!r} in the repeated run"
        for name in sorted({*stored, *outcome.metrics})
        if repr(stored.get(name)) != repr(outcome.metrics.get(name))
    ]
    if line["steps"] != outcome.steps:
        found.append(f"the stored run has {line['steps']} steps, but the repeated run has {outcome.steps}")
    return "; ".join(found)


def check_stored(line: Mapping[str, Any] | None, variant: str, enabled: Sequence[str], begins: Sequence[str]) -> None:
    """Raise an error for a stored run that had other handlers, or began with other weights or data, than it would now.

    Args:
        line: The line of the run; None if the store has none.
        variant: Name of its variant.
        enabled: Names of the handlers that are enabled now, sorted.
        begins: Digests of the weights and of the data that it would begin with now; empty if they cannot be compared.

    Raises:
        ValueError: if it differs; a failed run never does, as it is not used.
    """
    if line is None or line["error"] is not None:
        return
    what = ""
    if line["handlers"] != list(enabled):
        differing = sorted({*line["handlers"]} ^ {*enabled})
        what = f"used handlers other than those that build attaches now (differing: {', '.join(differing)})"
    else:
        names = [
            name for name, one, now in zip(("weights", "data"), line["begins"], begins, strict=False) if one != now
        ]
        if names:
            what = f"began with different {' and different '.join(names)} than a new run would"
    if what:
        raise ValueError(
            f"the stored run of {variant!r} with seed {line['seed']} {what}; set config= to distinguish the two "
            "versions, or use a different store"
        )


def no_metric(metric: str, variant: str, there: Iterable[str]) -> str:
    """The message for a run that ended without the metric."""
    names = sorted(there)
    return (
        f"the run of {variant!r} ended without the metric {metric!r}, or the metric is not a scalar. Available "
        f"metrics: {', '.join(names) or 'none; attach Metrics or Validation'}{did_you_mean(metric, names)}"
    )


def no_direction(metric: str, there: Iterable[str]) -> ValueError:
    """The error for a metric of which nobody knows whether smaller or greater is better."""
    names = sorted(there)
    return ValueError(
        f"Study(metric={metric!r}): it is unknown whether smaller or larger values are better; set mode='min' or "
        f"mode='max'. Announced metrics: {', '.join(names) or 'none'}{did_you_mean(metric, names)}"
    )
