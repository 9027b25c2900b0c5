"""Words and numbers of messages: what a wrong name was meant to be, and ints of other libraries."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Integral
from typing import Any

__all__ = ["as_int", "did_you_mean", "listed"]


def as_int(value: Any) -> Any:
    """An integer of NumPy's types as an int; anything else unchanged."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of an error about an unknown name, with those that it begins, or else the closest one; empty if none is close.

    Example:
        >>> did_you_mean("historry", ["history", "ema"])
        "; did you mean 'history'?"
        >>> did_you_mean("Ema", ["Metrics", "EMA"])
        "; did you mean 'EMA'?"
        >>> did_you_mean("STEP", ["SETUP", "STEP_STARTED", "STEP_COMPLETED"])
        "; did you mean 'STEP_STARTED' or 'STEP_COMPLETED'?"
    """
    names = list(names)
    begun = [one for one in names if name and one.casefold().startswith(name.casefold())]
    close = begun[:3] or difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def listed(names: Iterable[str], most: int = 4) -> str:
    """The first few of some names, and how many more there are.

    Example:
        >>> listed(["a", "b", "c"], most=2)
        'a, b and 1 more'
    """
    names = list(names)
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
