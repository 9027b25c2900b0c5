"""What shows that the runs of a study are not the runs that it takes them for: equal ones, and ones that depend on each other."""

from __future__ import annotations

from collections.abc import Iterable

from signalfire.findings import finding, warn

from .results import BASELINE, Result

__all__ = ["Beginnings", "report_equal_runs"]


class Beginnings:
    """Compares what the runs of one seed begin with: ``build(seed)`` gives all of them the same handlers, weights and data."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[str, ...]] = {}
        self._composed: dict[int, str] = {}
        self._reported = False

    def compare(self, seed: int, begins: tuple[str, ...], composed: str = "") -> None:
        """Report a run that begins with other handlers, weights or data than an earlier run of its seed.

        Args:
            seed: Seed of the run.
            begins: Digests of the weights and of the data; empty for a run that failed before.
            composed: Digest of the handlers; empty for a run that failed before.
        """
        first = self._first.setdefault(seed, begins) if begins else begins
        different = [what for what, one, other in zip(("weights", "data"), first, begins, strict=False) if one != other]
        if composed and self._composed.setdefault(seed, composed) != composed:
            different.insert(0, "handlers")
        if different and not self._reported:
            self._reported = True
            warn(
                finding(
                    "W82",
                    f"build({seed}) began with other {' and other '.join(different)} than for an earlier run of this seed, so "
                    "that the runs of the study depend on each other",
                    "let build make new handlers, a new model and new data in each call, and change nothing in place",
                )
            )


def report_equal_runs(results: Iterable[Result]) -> None:
    """Report a baseline whose runs are equal for all seeds, as one run that is counted several times."""
    baseline = [one for one in results if one.variant == BASELINE and one.error is None]
    metrics = [one.metrics for one in baseline]
    # Metrics of few digits, such as an accuracy of 1.0, are often equal.
    precise = any(value != round(value, 4) for one in metrics[:1] for value in one.values())
    if len(baseline) > 1 and precise and all(one == metrics[0] for one in metrics) and baseline[0].steps:
        warn(
            finding(
                "W81",
                f"the {len(baseline)} runs of the baseline are equal in every metric although their seeds differ, so that they "
                "are one run that is counted several times",
                "let build(seed) draw the weights and the order of the data from the seed; remove torch.manual_seed from it",
            )
        )
