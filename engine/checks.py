"""Checks of arguments where they are given: the error names the class, the argument and its value, and what it has to be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

__all__ = ["check_bool", "check_choice", "check_int", "check_number"]


def check_bool(owner: object, argument: str, value: Any) -> bool:
    """Check that an argument is True or False.

    Args:
        owner: whose argument it is: an object, or the name of a function.
        argument: its name.
        value: its value.

    Raises:
        TypeError: if it is anything else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{_call(owner, argument, value)}: it has to be True or False")
    return value


def check_choice(owner: object, argument: str, value: Any, choices: Sequence[str]) -> str:
    """Check that an argument is one of some words.

    Args:
        owner: whose argument it is: an object, or the name of a function.
        argument: its name.
        value: its value.
        choices: the words, at least two.

    Raises:
        ValueError: if it is none of them.
    """
    if not isinstance(value, str) or value not in choices:
        *some, last = (repr(choice) for choice in choices)
        raise ValueError(f"{_call(owner, argument, value)}: it has to be {', '.join(some)} or {last}")
    return value


def check_int(owner: object, argument: str, value: Any, *, least: int = 1) -> int:
    """Check a whole number, of NumPy's kinds too, and give it as an int.

    Args:
        owner: whose argument it is: an object, or the name of a function.
        argument: its name.
        value: its value.
        least: the smallest number allowed.

    Raises:
        TypeError: if it is no whole number.
        ValueError: if it is less than ``least``.

    Example:
        >>> check_int("Checkpoint", "keep", 0)
        Traceback (most recent call last):
        ValueError: Checkpoint(keep=0): it has to be an int of 1 or more
    """
    told = f"{_call(owner, argument, value)}: it has to be an int of {least} or more"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(told)
    if value < least:
        raise ValueError(told)
    return int(value)


def check_number(
    owner: object,
    argument: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    infinite: bool = False,
) -> float:
    """Check a number, of NumPy's kinds too, and give it as Python's. NaN is never one.

    Args:
        owner: whose argument it is: an object, or the name of a function.
        argument: its name.
        value: its value.
        above: what it has to be greater than.
        least: the smallest number allowed.
        below: what it has to be less than.
        most: the largest number allowed.
        infinite: whether it may be infinite.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is out of bounds.

    Example:
        >>> check_number("LabelSmoothing", "alpha", 2.0, above=0, most=1)
        Traceback (most recent call last):
        ValueError: LabelSmoothing(alpha=2.0): it has to be a number above 0 and of 1 or less
    """
    words = (("above {:g}", above), ("of {:g} or more", least), ("below {:g}", below), ("of {:g} or less", most))
    bounds = " and ".join(word.format(bound) for word, bound in words if bound is not None)
    told = f"{_call(owner, argument, value)}: it has to be a {'' if infinite or bounds else 'finite '}number"
    told = f"{told} {bounds}".rstrip()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(told)
    number = float(value)
    if (
        math.isnan(number)
        or (math.isinf(number) and not infinite)
        or (above is not None and not number > above)
        or (least is not None and not number >= least)
        or (below is not None and not number < below)
        or (most is not None and not number <= most)
    ):
        raise ValueError(told)
    return int(value) if isinstance(value, Integral) else number


def _call(owner: object, argument: str, value: Any) -> str:
    return f"{owner if isinstance(owner, str) else type(owner).__name__}({argument}={value!r})"
