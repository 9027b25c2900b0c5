"""What a suite has found: one row for each thing that was tried."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Outcome", "judged", "same", "table"]


@dataclass
class Outcome:
    """One thing that was tried.

    Attributes:
        name: its name.
        reason: why it does not pass; None if it does.
    """

    name: str
    reason: str | None = None


def judged(name: str, check: Callable[[], str | None]) -> Outcome:
    """Try one thing; an error is the reason why it does not pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return Outcome(name, check())
        except Exception as error:
            first = str(error).partition("\n")[0]
            return Outcome(name, f"{type(error).__name__}: {first[:150]}")


def same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Whether tensors are alike bit for bit; NaN is like NaN."""
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, other, strict=True))


def table(title: str, outcomes: list[Outcome]) -> str:
    """How many pass, and each that does not with its reason."""
    failed = [one for one in outcomes if one.reason is not None]
    passed = len(outcomes) - len(failed)
    lines = [f"{title}: {passed} of {len(outcomes)} ({passed / max(len(outcomes), 1):.1%})"]
    return "\n".join(lines + [f"  {one.name}: {one.reason}" for one in failed])
