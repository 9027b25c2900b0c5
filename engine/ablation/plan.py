"""The runs of a study: which are in the store, which are to be made, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .results import Variant

__all__ = ["Plan", "PlannedRun", "duration"]


@dataclass(frozen=True)
class PlannedRun:
    """A run of a plan.

    Attributes:
        variant, seed: which run.
        key: by which the store knows it.
        status: whether it is to be made ("missing"), or what the store has of it.
        make: whether `Study.run` makes it.
        seconds: what it took, or what it will take, by the finished runs of its variant or else of all; None if there are none.
    """

    variant: Variant
    seed: int
    key: str
    status: Literal["finished", "failed", "missing"]
    make: bool
    seconds: float | None


@dataclass(frozen=True)
class Plan:
    """The runs of a study: those in the store, and those to be made; ``print`` shows them by variant.

    Attributes:
        variants, seeds: what is compared, and over which seeds.
        runs: for each seed, one of each variant: so that what is there can be compared when a study is stopped half-way.
    """

    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    runs: tuple[PlannedRun, ...]

    @property
    def to_make(self) -> tuple[PlannedRun, ...]:
        """The runs that `Study.run` makes."""
        return tuple(run for run in self.runs if run.make)

    @property
    def seconds(self) -> float | None:
        """The time to make them one after the other; None if it cannot be estimated."""
        costs = [run.seconds for run in self.to_make if run.seconds is not None]
        return sum(costs) if len(costs) == len(self.to_make) else None

    def __str__(self) -> str:
        width = max(len("variant"), *(len(variant.name) for variant in self.variants))
        lines = [f"{'variant':<{width}}  finished  failed  to make  off or exchanged"]
        for variant in self.variants:
            runs = [run for run in self.runs if run.variant is variant]
            finished, failed = (sum(run.status == status for run in runs) for status in ("finished", "failed"))
            swaps = [f"{name} = {alternative}" for name, alternative in variant.swapped]
            what = ", ".join([*sorted(variant.off), *swaps]) or "-"
            lines.append(
                f"{variant.name:<{width}}  {finished:>8}  {failed:>6}  {sum(run.make for run in runs):>7}  {what}"
            )
        cost = "unknown" if self.seconds is None else duration(self.seconds)
        lines.append(
            f"{len(self.variants)} variants x {len(self.seeds)} seeds: {len(self.to_make)} of {len(self.runs)} runs to make, "
            f"cost one after the other: {cost}"
        )
        return "\n".join(lines)


def duration(seconds: float) -> str:
    """A time in words, such as "2 h 5 min".

    Example:
        >>> duration(7500), duration(75), duration(0.5)
        ('2 h 5 min', '1 min 15 s', '0.5 s')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
