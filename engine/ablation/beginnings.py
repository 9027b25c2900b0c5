"""What shows that the runs of a study are not what it takes them for: equal ones, dependent ones, values of last batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from types import MappingProxyType

from signalfire import Engine
from signalfire.findings import finding, warn

from .results import BASELINE, Result

__all__ = ["Beginnings", "last_values_of", "report_equal_runs"]


class Beginnings:
    """Compares what the runs of one seed begin with: ``build(seed)`` gives all of them the same parts, weights and data."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[str, ...]] = {}
        self._composed: dict[tuple[int, str], str] = {}
        self._reported = False
        self._noted = False

    def compare(self, seed: int, begins: tuple[str, ...], composed: Mapping[str, str] = MappingProxyType({})) -> None:
        """Report a run that begins with other parts, weights or data than an earlier run of its seed.

        Args:
            seed: Seed of the run.
            begins: Digests of the weights and of the data; empty for a run that failed before.
            composed: Digests of parts, such as the handlers, by their name; empty for a run that failed before.
        """
        first = self._first.setdefault(seed, begins) if begins else begins
        different = [what for what, one in composed.items() if self._composed.setdefault((seed, what), one) != one]
        different += [what for what, one, now in zip(("weights", "data"), first, begins, strict=False) if one != now]
        if different and not self._reported:
            self._reported = True
            warn(
                finding(
                    "W82",
                    f"build({seed}) produced different {' and different '.join(different)} than in an earlier run with "
                    "the same seed, so the runs of the study are not independent",
                    "create the handlers, the model and the data inside build, so that each call returns new ones, and "
                    "do not modify objects that are shared between runs",
                )
            )

    def note_last_values(self, metric: str, names: tuple[str, ...]) -> None:
        """Report that the metric of the study is, perhaps, one of last batches.

        Args:
            metric: The metric.
            names: Those that a run has written in each batch.
        """
        if metric in names and not self._noted:
            self._noted = True
            warn(
                finding(
                    "W04",
                    f"the study compares {metric!r}, which a function writes in each batch. Unless this function "
                    "averages over the batches, the study compares the value from the last batch",
                    "in the engine that runs these batches, let Metrics compute the mean: "
                    f"attach(Metrics({{{metric.rpartition('/')[2]!r}: Average(function)}}))",
                )
            )


def last_values_of(engine: Engine) -> tuple[str, ...]:
    """The metrics that nobody announced, and that were written in each batch of the last evaluation, or of the run."""
    metrics, batches, epochs = engine.state.metrics, engine.state.completed, engine.state.epoch
    of_training = {
        name
        for name in metrics.keys() - metrics.evaluated
        if metrics.serials[name] >= batches > epochs and metrics.owners.get(name, "user") == "user"
    }
    return tuple(sorted(of_training | metrics.last_values))


def report_equal_runs(results: Iterable[Result]) -> None:
    """Report a baseline whose runs are equal for all seeds, as one run that is counted several times."""
    baseline = [one for one in results if one.variant == BASELINE and one.error is None]
    metrics = [one.metrics for one in baseline]
    precise = any(_is_precise(value) for one in metrics[:1] for value in one.values())
    if len(baseline) > 1 and precise and all(one == metrics[0] for one in metrics) and baseline[0].steps:
        warn(
            finding(
                "W81",
                f"the {len(baseline)} runs of the baseline are identical in every metric although their seeds differ, so they "
                "are probably the same run, counted several times",
                "in build(seed), use the seed for the initial weights and the data order, and remove "
                "torch.manual_seed from build; if nothing in the training is random, one seed is enough",
            )
        )


def _is_precise(value: float) -> bool:
    """Whether a value is no number of few digits, and no share of few samples: an accuracy of 29/30 is often equal."""
    share = Fraction(value).limit_denominator(500) if math.isfinite(value) else value
    return value != round(value, 4) and abs(value - share) > 1e-7
