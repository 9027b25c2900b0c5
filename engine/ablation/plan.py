"""The planned runs of a study: which are stored, which remain, and how long they take."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import Literal

from ..authoring.markup import preformatted
from .formats import WIDTH
from .results import Variant

__all__ = ["Plan", "PlannedRun", "duration"]


@dataclass(frozen=True)
class PlannedRun:
    """One run of a plan.

    Attributes:
        variant, seed: Variant and seed of the run.
        key: Key of the run in the store.
        status: Whether the store has the run, "finished" or "failed", or it is "missing"; or its variant was "pruned".
        make: Whether `Study.run` will make it.
        seconds: Estimated duration: the mean over the finished runs of its variant, or else of all variants; None without any.
        until: Epoch after which the run ends, for a decision on pruning; None for a run that is trained to the end.
        task: Name of its task; empty in a study without tasks.
    """

    variant: Variant
    seed: int
    key: str
    status: Literal["finished", "failed", "missing", "pruned"]
    make: bool
    seconds: float | None
    until: int | None = None
    task: str = ""


@dataclass(frozen=True)
class Plan:
    """The runs of a study, both stored and to be made; ``print`` shows them by variant.

    Attributes:
        variants, seeds: The variants to compare, and the seeds.
        runs: One run of each variant for the first seed, then for the next: a study stopped half-way can still compare variants.
        notes: Why stored runs are not used, such as other code of ``build``.
        metric: Name of the metric, for the sentence about its spread.
        spread: Standard deviation of the paired differences of the stored runs, median over the variants; None without any.
        looks: Planned numbers of seeds at each look; empty without.
        pruning: The plan of successive halving in words, and the variants pruned so far; empty without.
        tasks: Names of the tasks; empty without.
    """

    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    runs: tuple[PlannedRun, ...]
    notes: tuple[str, ...] = ()
    metric: str = ""
    spread: float | None = None
    looks: tuple[int, ...] = ()
    pruning: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()

    @property
    def to_make(self) -> tuple[PlannedRun, ...]:
        """The runs that `Study.run` will make."""
        return tuple(run for run in self.runs if run.make)

    @property
    def seconds(self) -> float | None:
        """Estimated total duration of the runs to make, run sequentially; None if it is unknown."""
        costs = [run.seconds for run in self.to_make if run.seconds is not None]
        return sum(costs) if len(costs) == len(self.to_make) else None

    def power(self, d_z: float, *, real: int = 1, alpha: float = 0.05) -> float:
        """The probability that the study finds a difference, by simulation (:func:`signalfire.ablation.power`).

        Args:
            d_z: Size of the real differences, in standard deviations of the paired differences.
            real: Number of variants with a real difference.
            alpha: Significance level for the adjusted p-value.
        """
        from .detectability import power

        return power(len(self.seeds), len(self.variants) - 1, d_z, real=real, alpha=alpha)

    @property
    def prospects(self) -> str:
        """What the number of seeds can show at best, and which difference it finds with a probability of 80 %."""
        from .detectability import detectable
        from .joint import smallest_p

        n, comparisons = len(self.seeds), len(self.variants) - 1
        share = comparisons if self.pruning else 1  # what is pruned may have been the best by chance: see pruning.py
        smallest = min(1.0, smallest_p(n) * share)
        seeds = f"{n} seed{'s' if n > 1 else ''}"
        at_best = f"the smallest possible p with {seeds} is {smallest:.2g}"
        size = detectable(n, 1 if self.pruning else comparisons, alpha=0.05 / share) if comparisons else math.inf
        if self.pruning and smallest > 0.05:
            return (
                f"with {seeds}, none of {comparisons} comparisons can be significant (smallest possible p = "
                f"{smallest:.2g}); use more seeds"
            )
        if smallest > 0.05:
            return (
                f"with {seeds}, no effect can be significant (smallest possible p = {smallest:.2g}); use 6 or more "
                "seeds"
            )
        if math.isinf(size):
            return at_best
        amount = "" if self.spread is None or not self.spread else f" ({size * self.spread:.2g} in {self.metric})"
        return (
            f"{at_best}; with {comparisons} comparison{'s' if comparisons > 1 else ''}, a difference of {size:.1f} "
            f"standard deviations of the paired differences{amount} is detected with a probability of 80 %"
        )

    def __str__(self) -> str:
        width = max(len("variant"), *(len(variant.name) for variant in self.variants))
        lines = [f"{'variant':<{width}}  finished  failed  pending  off or replaced"]
        lines += [self._line(variant, width) for variant in self.variants]
        lines.append(textwrap.fill(f"power: {self.prospects}", WIDTH, subsequent_indent="  "))
        if self.looks:
            lines.append(
                f"looks at {', '.join(map(str, self.looks))} seeds: a variant gets no further runs once it is "
                "found to differ"
            )
        lines += [textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in self.pruning]
        cost = "unknown" if self.seconds is None else duration(self.seconds)
        tasks = f"{len(self.tasks)} tasks x " if self.tasks else ""
        lines.append(
            f"{len(self.variants)} variants x {tasks}{len(self.seeds)} seeds: {len(self.to_make)} of {len(self.runs)} "
            f"runs pending, estimated time if run sequentially: {cost}"
        )
        return "\n".join([*lines, *(f"! {note}" for note in self.notes)])

    def _line(self, variant: Variant, width: int) -> str:
        runs = [run for run in self.runs if run.variant.name == variant.name]
        finished, failed = (sum(run.status == status for run in runs) for status in ("finished", "failed"))
        swaps = [f"{name} = {alternative}" for name, alternative in variant.swapped]
        what = ", ".join([*sorted(variant.off), *swaps]) or "-"
        return f"{variant.name:<{width}}  {finished:>8}  {failed:>6}  {sum(run.make for run in runs):>7}  {what}"

    def _repr_html_(self) -> str:
        return preformatted(self)


def duration(seconds: float) -> str:
    """A duration as text, such as "2 h 5 min".

    Example:
        >>> duration(7500), duration(75), duration(0.5)
        ('2 h 5 min', '1 min 15 s', '0.5 s')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
