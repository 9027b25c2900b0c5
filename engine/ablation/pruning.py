"""Successive halving: variants that look worst after some epochs are not trained to the end, with all of their seeds.

After each of some epochs, the runs of all variants that are left are compared, and the best share of the variants continues. A
variant is pruned with all of its seeds or with none, so that those that are left are paired with the baseline over all
seeds. The baseline is never pruned. Runs that continue are repeated from their beginning: they are, bit for bit, those of
a study that prunes nothing, and a decision follows from what is stored alone, wherever and in which order its runs were
made.

Variants are ranked within each seed, a failed run below any finished one, and their ranks are averaged over the seeds. Of
equal mean ranks, the better mean of the metric comes first, over the seeds that all of them finished; of equal means, the
earlier variant.

What was chosen by its own seeds looks better than it is. The tests account for that: a variant that was pruned stays in the
family, with p = 1, and p-values are adjusted by Holm's procedure, which holds however variants were chosen. The step-down
test over joint sign flips would need the results of the pruned variants. Each interval has the level 1 - alpha / k, for k
planned comparisons.

Source: Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization, AISTATS 2016,
https://arxiv.org/abs/1502.07943 (successive halving); Holm, A Simple Sequentially Rejective Multiple Test Procedure, Scandinavian
Journal of Statistics 6, 1979.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Literal

from signalfire.authoring.checks import check_int

from .formats import count, listed
from .joint import Differences, intervals, step_down
from .lines import to_result
from .plan import PlannedRun
from .results import BASELINE, MOST_POINTS, Variant, finished_value
from .statistics import exact, holm
from .store import Store

__all__ = [
    "Decided",
    "Halving",
    "Pruned",
    "Pruning",
    "adjusted_with_pruned",
    "check_left",
    "check_prune",
    "pruned_in_words",
    "pruned_of",
]

Line = Mapping[str, Any]
Values = dict[tuple[str, int], Fraction | None]
"""The metric of each run at the end of an epoch, by variant and seed; None for a failed run."""


class Halving:
    """A plan of successive halving for a study: ``Study(..., prune=Halving([1, 3]))``.

    After each of the epochs the best share of the variants continues, and the others are pruned. Choose epochs at whose end
    the metric is measured, and whose order of the variants tells something about that at the end: what averages, anneals or
    regularizes often looks worst early.

    Args:
        epochs: Epochs after which variants are pruned, increasing.
        keep: Share of the variants that continues, rounded up; the baseline is not counted, and always continues.

    Raises:
        TypeError, ValueError: for epochs that do not increase, or a share that is not between 0 and 1.

    Example:
        >>> plan = Halving([1, 3], keep=1 / 3)
        >>> plan.kept(18), plan.kept(plan.kept(18))
        (6, 2)
    """

    def __init__(self, epochs: Sequence[int], *, keep: float = 0.5) -> None:
        if isinstance(epochs, str) or not isinstance(epochs, Sequence) or not epochs:
            raise TypeError(f"Halving(epochs={epochs!r}): expected epoch counts in increasing order, such as [1, 3]")
        self.epochs = tuple(check_int(self, "epochs", epoch) for epoch in epochs)
        if any(one >= other for one, other in zip(self.epochs, self.epochs[1:], strict=False)):
            raise ValueError(
                f"Halving(epochs={list(epochs)}): expected epoch counts in increasing order, such as [1, 3]"
            )
        if isinstance(keep, bool) or not isinstance(keep, int | float):
            raise TypeError(f"Halving(keep={keep!r}): expected the fraction of the variants to keep, such as 0.5")
        if not 0 < keep < 1:
            raise ValueError(f"Halving(keep={keep!r}): expected a number between 0 and 1, such as 0.5")
        self.keep = float(keep)

    def kept(self, variants: int) -> int:
        """How many of this number of variants continue."""
        return math.ceil(exact(self.keep) * variants)

    def __repr__(self) -> str:
        return f"Halving({list(self.epochs)}, keep={self.keep:g})"


@dataclass(frozen=True)
class Pruned:
    """A variant that was pruned, when, and on what evidence.

    Attributes:
        variant: The variant.
        epoch: The epoch after which it was pruned.
        place: Its place among the variants that were left then, from 1, the best.
        of: Number of these variants, without the baseline.
        rank: Mean over the seeds of its rank among them.
        difference: Mean difference of the metric to the baseline at the end of that epoch, over the seeds that both finished; NaN
            without any. It is no effect of the variant: its runs were not trained to the end.
        seeds: Number of seeds.
        failed: Number of its runs that had failed by then.
    """

    variant: Variant
    epoch: int
    place: int
    of: int
    rank: float
    difference: float
    seeds: int
    failed: int

    def evidence(self) -> dict[str, Any]:
        """All but the variant, as it is stored."""
        return {name: value for name, value in asdict(self).items() if name != "variant"}

    def __str__(self) -> str:
        failed = f", {count(self.failed, 'run')} failed" if self.failed else ""
        change = f", mean difference from the baseline {self.difference:+.3g}"
        difference = "" if math.isnan(self.difference) else change
        return (
            f'"{self.variant.name}" was pruned after epoch {self.epoch}: it ranked number {self.place} of {self.of} by '
            f"mean rank over {count(self.seeds, 'seed')} (mean rank {self.rank:.3g}{difference} at this epoch{failed})"
            ". No effect is reported, because this variant was not trained to the end."
        )


@dataclass(frozen=True)
class Decided:
    """What the stored runs decide.

    Attributes:
        pruned: The variants that were pruned, in the order of the decisions, the worst last.
        left: The other variants, the baseline among them, in their order.
    """

    pruned: tuple[Pruned, ...]
    left: tuple[Variant, ...]


class Pruning:
    """The decisions of a study that prunes; each follows from the stored runs alone.

    Args:
        halving: The plan.
        variants, seeds: Those of the study.
        key: Gives the key in the store of a run that is trained to the end.
        metric, mode: Those of the study.
    """

    def __init__(
        self,
        halving: Halving,
        variants: Sequence[Variant],
        seeds: Sequence[int],
        key: Callable[[Variant, int], str],
        *,
        metric: str,
        mode: Literal["min", "max"],
    ) -> None:
        self.halving, self.variants, self.seeds = halving, tuple(variants), tuple(seeds)
        self.metric, self.mode = metric, mode
        self._key = key

    def key(self, variant: Variant, seed: int, epoch: int) -> str:
        """The key of a run that ends after an epoch: such a run never stands for one that is trained to the end."""
        return hashlib.sha256(f"{self._key(variant, seed)} until epoch {epoch}".encode()).hexdigest()

    def keys(self, variant: Variant, seed: int) -> list[str]:
        """The keys of all runs of a variant and seed that end early."""
        return [self.key(variant, seed, epoch) for epoch in self.halving.epochs]

    def decide(self, lines: Mapping[str, Line], before: float = math.inf) -> Decided:
        """The decisions of which all runs are stored.

        Args:
            lines: The stored runs, by key.
            before: The decisions of this epoch and of later ones are not made.
        """
        left = list(self.variants)
        pruned: list[Pruned] = []
        for epoch in self.halving.epochs:
            if epoch >= before or any(self.key(one, seed, epoch) not in lines for one in left for seed in self.seeds):
                break
            out = self._out(left, epoch, lines)
            pruned += out
            gone = {one.variant.name for one in out}
            left = [one for one in left if one.name not in gone]
        return Decided(tuple(pruned), tuple(left))

    def stages(self, store: Store, *, retry_failed: bool) -> Iterator[list[PlannedRun]]:
        """The runs to make, epoch by epoch; each decision is marked in the store once its runs are made.

        Args:
            store: The store, which is read before and after each stage.
            retry_failed: Whether to make failed runs again.

        Raises:
            ValueError: if a run does not have the metric at the end of an epoch, or no run reaches it.
        """
        for epoch in self.halving.epochs:
            yield self._runs(store.read(), epoch, retry_failed)
            self._check_measured(store.read(), epoch)
            self._mark(store)

    def description(self, lines: Mapping[str, Line]) -> tuple[str, ...]:
        """The plan in words, and the variants pruned so far."""
        left = len(self.variants) - 1
        parts = [f"all {count(left, 'variant')} are trained to the end of epoch {self.halving.epochs[0]}"]
        short = left + 1  # with the baseline
        for epoch in self.halving.epochs[1:]:
            left = self.halving.kept(left)
            short += left + 1
            parts.append(f"the best {left} to the end of epoch {epoch}")
        parts.append(
            f"and the best {self.halving.kept(left)} to the end of the run; every stage trains from scratch and "
            "includes the baseline"
        )
        found = [
            f"pruning: {', '.join(parts)}",
            f"the {count(short * len(self.seeds), 'run')} that end early are not counted below",
        ]
        for epoch in self.halving.epochs:
            if names := [f'"{one.variant.name}"' for one in self.decide(lines).pruned if one.epoch == epoch]:
                found.append(f"pruned after epoch {epoch}: {', '.join(names)}")
        return tuple(found)

    def _runs(self, lines: Mapping[str, Line], epoch: int, retry_failed: bool) -> list[PlannedRun]:
        runs = []
        for seed in self.seeds:
            for variant in self.decide(lines, before=epoch).left:
                line = lines.get(key := self.key(variant, seed, epoch))
                if line is None or (retry_failed and line["error"] is not None):
                    status: Literal["failed", "missing"] = "missing" if line is None else "failed"
                    runs.append(PlannedRun(variant, seed, key, status, True, None, epoch))
        return runs

    def _check_measured(self, lines: Mapping[str, Line], epoch: int) -> None:
        reached = set()
        for variant in self.decide(lines, before=epoch).left:
            for seed in self.seeds:
                line = lines.get(self.key(variant, seed, epoch))
                if line is None or line["error"] is not None:
                    continue
                reached.add(line.get("reached", epoch))
                if self.metric not in line["metrics"]:
                    raise ValueError(
                        f"Study(prune={self.halving!r}): the run of {variant.name!r} with seed {seed} has no metric "
                        f"{self.metric!r} at the end of epoch {epoch}; choose epochs that end with a measurement of "
                        "this metric"
                    )
                curve, ended = line.get("history", {}).get(self.metric), line.get("reached", epoch)
                if curve and curve[-1][0] < ended <= MOST_POINTS:
                    raise ValueError(
                        f"Study(prune={self.halving!r}): the run of {variant.name!r} with seed {seed} last measured "
                        f"{self.metric!r} in epoch {curve[-1][0]}, but the pruning decision is made after epoch "
                        f"{ended}; choose epochs that end with a measurement of this metric"
                    )
        if max(reached, default=epoch) < epoch:
            raise ValueError(
                f"Study(prune={self.halving!r}): all runs ended before epoch {epoch}; the longest run ended after "
                f"epoch {max(reached)}, so pass no epoch above {max(reached)}"
            )

    def _mark(self, store: Store) -> None:
        """Mark the runs of pruned variants in the store; a mark of an earlier decision that no longer holds is removed."""
        lines = store.read()
        evidence = {(one.variant.name, one.epoch): one.evidence() for one in self.decide(lines).pruned}
        for variant in self.variants:
            for seed in self.seeds:
                for epoch in self.halving.epochs:
                    if (line := lines.get(self.key(variant, seed, epoch))) is not None:
                        plain = {name: value for name, value in line.items() if name not in ("pruned", "sum", "format")}
                        mark = evidence.get((variant.name, epoch))
                        if _stored(mark) != line.get("pruned"):
                            store.append(plain if mark is None else {**plain, "pruned": mark})

    def _out(self, left: Sequence[Variant], epoch: int, lines: Mapping[str, Line]) -> list[Pruned]:
        """The variants that are pruned after an epoch, in the order of their places."""
        candidates = [one for one in left if one.name != BASELINE]
        values = self._values(left, epoch, lines)
        names = [one.name for one in candidates]
        ranks, totals = self._ranks(names, values), self._totals(names, values)
        ordered = sorted(candidates, key=lambda one: (ranks[one.name], totals[one.name]))
        kept = self.halving.kept(len(candidates))
        return [
            Pruned(
                variant,
                epoch,
                place,
                len(candidates),
                float(ranks[variant.name]),
                self._difference(variant.name, values),
                len(self.seeds),
                sum(values[variant.name, seed] is None for seed in self.seeds),
            )
            for place, variant in enumerate(ordered[kept:], kept + 1)
        ]

    def _values(self, left: Sequence[Variant], epoch: int, lines: Mapping[str, Line]) -> Values:
        """The metric of each run at the end of an epoch; None for a failed run."""
        values: Values = {}
        for variant in left:
            for seed in self.seeds:
                value = finished_value(to_result(variant.name, lines[self.key(variant, seed, epoch)], self.metric))
                values[variant.name, seed] = None if value is None else exact(value)
        return values

    def _totals(self, names: Sequence[str], values: Values) -> dict[str, Fraction]:
        """The sum over the seeds that all variants finished, smaller for a better variant: it decides between equal ranks."""
        shared = [seed for seed in self.seeds if all(values[name, seed] is not None for name in names)]
        sign = -1 if self.mode == "max" else 1
        return {name: sign * sum((values[name, seed] or Fraction() for seed in shared), Fraction()) for name in names}

    def _difference(self, name: str, values: Values) -> float:
        """The mean difference to the baseline over the pairs that finished; NaN without any."""
        pairs = [(values[name, seed], values[BASELINE, seed]) for seed in self.seeds]
        differences = [one - other for one, other in pairs if one is not None and other is not None]
        return float(sum(differences) / len(differences)) if differences else math.nan

    def _ranks(self, names: Sequence[str], values: Values) -> dict[str, Fraction]:
        """The mean rank of each variant over the seeds; 1 is the best, ties share their ranks, failed runs come last."""
        totals = dict.fromkeys(names, Fraction())
        for seed in self.seeds:
            scores = {name: self._score(values[name, seed]) for name in names}
            for name, score in scores.items():
                before = sum(other < score for other in scores.values())
                equal = sum(other == score for other in scores.values())
                totals[name] += before + Fraction(equal + 1, 2)
        return {name: total / len(self.seeds) for name, total in totals.items()}

    def _score(self, value: Fraction | None) -> tuple[bool, Fraction]:
        """What is smaller for a better run."""
        if value is None:
            return True, Fraction()
        return False, -value if self.mode == "max" else value


def adjusted_with_pruned(
    scores: Sequence[Differences], differences: Sequence[Differences], pruned: int, level: float
) -> tuple[list[float], list[tuple[float, float]]]:
    """The adjusted p-values and simultaneous intervals of the variants that are left, whichever were pruned.

    Args:
        scores: What is tested, for each variant that is left: differences or signed ranks, by seed.
        differences: The differences of each.
        pruned: Number of variants that were pruned: they belong to the family.
        level: Simultaneous confidence level.
    """
    if not pruned:
        return step_down(scores), intervals(differences, level)
    family = len(scores) + pruned
    p = [step_down([own])[0] for own in scores]
    adjusted = holm([*p, *[1.0] * pruned])[: len(p)]
    return adjusted, [intervals([own], 1 - (1 - level) / family)[0] for own in differences]


def check_prune(prune: object, looks: object) -> Halving | None:
    """The plan of pruning of a study.

    Raises:
        TypeError, ValueError: if it is no plan, or the study has planned looks.
    """
    if prune is None:
        return None
    if not isinstance(prune, Halving):
        raise TypeError(f"Study(prune={prune!r}): expected a pruning plan, such as Halving([1, 3])")
    if looks is not None:
        raise ValueError(
            "Study(prune=..., looks=...): the error rate of planned looks does not account for pruning; "
            "set either prune= or looks=, not both"
        )
    return prune


def check_left(method: str, pruned: Sequence[Pruned], needed: Collection[str]) -> None:
    """Raise an error if a variant whose runs are needed was pruned."""
    if gone := [f'"{one.variant.name}"' for one in pruned if one.variant.name in needed]:
        raise ValueError(
            f"{method}(): {listed(gone)} {'was' if len(gone) == 1 else 'were'} pruned, but effects require the runs "
            "of all variants in the design; run the design in a study without prune="
        )


def pruned_of(variant: Variant, mark: Mapping[str, Any]) -> Pruned:
    """A pruned variant, from the mark of its runs in the store."""
    return Pruned(variant, **{**mark, "difference": float(mark["difference"])})


def pruned_in_words(pruned: Sequence[Pruned], variants: int) -> str:
    """How many variants were pruned, and when; for a paragraph on methods."""
    epochs = sorted({one.epoch for one in pruned})
    parts = [f"{sum(one.epoch == epoch for one in pruned)} after epoch {epoch}" for epoch in epochs]
    return (
        f"{len(pruned)} of {count(variants, 'variant')} {'was' if len(pruned) == 1 else 'were'} pruned by successive "
        f"halving ({listed(parts)}), based on the rank within each seed, averaged over the seeds. Pruned variants are "
        "excluded from all averages and count with p = 1 in the multiple-testing correction."
    )


def _stored(mark: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A mark as the store gives it back: NaN is a string there."""
    if mark is None:
        return None
    return {
        name: str(value) if isinstance(value, float) and math.isnan(value) else value for name, value in mark.items()
    }
