"""Verdicts: what an interval and a test say of a difference, in one word that never contradicts them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .failures import Failures

__all__ = ["Conclusion", "Verdict", "check_margin", "conclude", "conclude_failures"]

Verdict = Literal["equivalent", "better", "worse", "undecided"]


@dataclass(frozen=True)
class Conclusion:
    """A verdict and the interval that it rests on.

    Attributes:
        verdict: "equivalent" if the interval is inside the margins; else "better" or "worse" than the reference if it is on one
            side of 0; else "undecided".
        low: Lower end of the simultaneous interval; NaN if there is none.
        high: Upper end, likewise.
        cut: Whether the interval ends at 0 only because a later step of the step-down test rejects 0: the single-step interval
            contains it.
        sign: Direction of the difference, as the metric counts: 1 or -1 if the test rejects 0, else 0.
    """

    verdict: Verdict
    low: float
    high: float
    cut: bool
    sign: int


def conclude(
    interval: tuple[float, float],
    mean: float,
    rejected: bool,
    *,
    mode: Literal["min", "max"],
    margin: float | None = None,
) -> Conclusion:
    """The verdict on a difference.

    Args:
        interval: Simultaneous interval of the mean difference, by the single-step test.
        mean: Mean difference.
        rejected: Whether the step-down test rejects that it is 0.
        mode: Whether smaller or larger values are better.
        margin: Largest difference that does not matter, in the unit of the metric.

    The interval is cut at 0 if the test rejects 0 and the interval contains it, and extended to 0 if it is the other way round.

    Example:
        >>> conclude((-0.1, 0.3), 0.1, True, mode="max").verdict
        'better'
        >>> conclude((-0.1, 0.3), 0.1, False, mode="max", margin=0.5).verdict
        'equivalent'
    """
    low, high = interval
    cut = rejected and low <= 0 <= high
    if cut:
        low, high = (0.0, high) if mean > 0 else (low, 0.0)
    elif not rejected:
        low, high = min(low, 0.0), max(high, 0.0)  # a NaN stays
    sign = 0 if not rejected else 1 if mean > 0 else -1
    if margin is not None and -margin < low and high < margin:
        return Conclusion("equivalent", low, high, cut, sign)
    return Conclusion(_of_sign(sign, mode), low, high, cut, sign)


def conclude_failures(
    rank_sum: float, rejected: bool, failures: Failures, *, mode: Literal["min", "max"]
) -> Conclusion:
    """The verdict on a comparison of which runs failed, by their signed ranks.

    What fails in more pairs than what it is compared with is never called better, whatever its finished runs reach.
    """
    sign = 0 if not rejected else 1 if rank_sum > 0 else -1
    verdict = _of_sign(sign, mode)
    more = failures.variant - failures.baseline
    if (verdict == "better" and more > 0) or (verdict == "worse" and more < 0):
        verdict, sign = "undecided", 0
    return Conclusion(verdict, math.nan, math.nan, False, sign)


def _of_sign(sign: int, mode: Literal["min", "max"]) -> Verdict:
    return "undecided" if sign == 0 else "better" if (sign > 0) == (mode == "max") else "worse"


def check_margin(owner: str, margin: object) -> float | None:
    """The margin as a float.

    Raises:
        TypeError, ValueError: if it is not a positive number or None.
    """
    if margin is None:
        return None
    if isinstance(margin, bool) or not isinstance(margin, int | float):
        raise TypeError(f"{owner}(margin={margin!r}): expected a number in the unit of the metric, such as 0.005")
    if not 0 < margin < math.inf:
        raise ValueError(
            f"{owner}(margin={margin!r}): expected a positive number, or None to make no claim of equivalence"
        )
    return float(margin)
