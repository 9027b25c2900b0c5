"""Checks of arguments: the error names the class, the argument with its value, and what is expected."""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Sequence
from numbers import Integral, Real
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

from ..core.words import as_int, did_you_mean

__all__ = [
    "as_int",
    "check_bool",
    "check_choice",
    "check_function",
    "check_int",
    "check_local",
    "check_name",
    "check_number",
    "check_parents",
    "check_stream",
    "did_you_mean",
    "shown_path",
]


F = TypeVar("F")

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def check_bool(owner: object, argument: str, value: Any) -> bool:
    """Check that an argument is True or False.

    Args:
        owner: The object that takes the argument, or the name of a function.
        argument: Name of the argument.
        value: Value of the argument.

    Raises:
        TypeError: if it is not.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{_call(owner, argument, value)}: expected True or False")
    return value


def check_choice(owner: object, argument: str, value: Any, choices: Sequence[str]) -> str:
    """Check that an argument is one of several strings.

    Args:
        owner: The object that takes the argument, or the name of a function.
        argument: Name of the argument.
        value: Value of the argument.
        choices: Accepted strings, at least two.

    Raises:
        ValueError: if it is not one of them.
    """
    if not isinstance(value, str) or value not in choices:
        *some, last = (repr(choice) for choice in choices)
        raise ValueError(f"{_call(owner, argument, value)}: expected {', '.join(some)} or {last}")
    return value


def check_function(owner: object, argument: str, function: F, *takes: str, optional: bool = False) -> F:
    """Check that an argument can be called with the arguments it will receive.

    Args:
        owner: The object that takes the argument, or the name of a function.
        argument: Name of the argument.
        function: Value of the argument.
        takes: Names of the positional arguments that it is called with.
        optional: Whether None is allowed.

    Raises:
        TypeError: if it cannot be called, or takes different arguments.

    Example:
        >>> check_function("Reporting", "report", lambda value: None, "value", "step")
        Traceback (most recent call last):
        TypeError: Reporting(report=...): the function cannot be called as report(value, step): too many positional arguments
    """
    if optional and function is None:
        return function
    call = f"{argument}({', '.join(takes)})"
    if not callable(function):
        raise TypeError(f"{_call(owner, argument, function)}: expected a function, called as {call}")
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # a built-in without a signature
        return function
    try:
        signature.bind(*takes)
    except TypeError as error:
        wrong = f"{_call(owner, argument, function)}: the function cannot be called as {call}: {error}"
        raise TypeError(wrong) from None
    return function


def check_int(owner: object, argument: str, value: Any, *, least: int = 1) -> int:
    """Check an integer, possibly of NumPy's types, and return it as an int.

    Args:
        owner: The object that takes the argument, or the name of a function.
        argument: Name of the argument.
        value: Value of the argument.
        least: Smallest value allowed.

    Raises:
        TypeError: if it is not an integer.
        ValueError: if it is less than ``least``.

    Example:
        >>> check_int("Checkpoint", "keep", 0)
        Traceback (most recent call last):
        ValueError: Checkpoint(keep=0): expected an int of 1 or more
    """
    message = f"{_call(owner, argument, value)}: expected an int of {least} or more"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(message)
    if value < least:
        raise ValueError(message)
    return int(value)


def check_local(owner: object, argument: str, path: str | os.PathLike[str]) -> Path:
    """Check that a path is local and not a URL, which would create a folder named after the scheme.

    ``Path("s3://bucket")`` is "s3:/bucket", so a single slash also counts as a URL. For a folder that really has such a name,
    write "./s3:/bucket" in a string, or an absolute path. A scheme has at least two letters, so "C:/runs" is a path.

    Returns:
        The absolute path, with "~" expanded to the home folder: a program may change its working folder before it writes to the
        path.

    Raises:
        TypeError: if it is not a path.
        ValueError: if it is empty, or a URL.

    Example:
        >>> check_local("Checkpoint", "folder", "file:///tmp/runs")
        Traceback (most recent call last):
        ValueError: Checkpoint(folder='file:///tmp/runs'): a URL is not a path; write '/tmp/runs'
    """
    if not isinstance(path, str | bytes | os.PathLike):
        raise TypeError(f"{_call(owner, argument, path)}: expected a path")
    address = os.fspath(path)
    if not address:
        raise ValueError(f"{_call(owner, argument, address)}: expected a path; for the current folder, pass '.'")
    if not isinstance(address, str) or not _URL.match(address):
        return Path(os.path.abspath(os.path.expanduser(os.fsdecode(path))))
    if address[:5].lower() == "file:":
        hint = f"write {url2pathname(urlsplit(address).path)!r}"
    else:
        hint = (
            "crash-safe writes need a local or mounted file system. Pass a folder on such a file system, and copy the "
            "files to the object store; see 'Checkpoints in an object store' in the guide"
        )
    raise ValueError(f"{_call(owner, argument, address)}: a URL is not a path; {hint}")


def check_parents(owner: object, argument: str, path: Path) -> None:
    """Raise NotADirectoryError if the folder of a path to be written cannot be created because one of its parents is a file."""
    there = next((one for one in path.parents if os.path.exists(one)), None)
    if there is not None and not there.is_dir():
        raise NotADirectoryError(
            f"{_call(owner, argument, str(path))}: {str(there)!r} is a file, not a folder; choose a different path"
        )


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
    """Check a real number, possibly of NumPy's types, and return it as an int or float. NaN is rejected.

    Args:
        owner: The object that takes the argument, or the name of a function.
        argument: Name of the argument.
        value: Value of the argument.
        above: Exclusive lower bound.
        least: Inclusive lower bound.
        below: Exclusive upper bound.
        most: Inclusive upper bound.
        infinite: Whether infinity is allowed.

    Raises:
        TypeError: if it is not a real number.
        ValueError: if it is out of bounds, NaN, or infinite where that is not allowed.

    Example:
        >>> check_number("LabelSmoothing", "alpha", 2.0, above=0, most=1)
        Traceback (most recent call last):
        ValueError: LabelSmoothing(alpha=2.0): expected a number above 0 and at most 1
    """
    given = zip(_BOUNDS, (above, least, below, most), strict=True)
    bounds = [(words, is_within, bound) for (words, is_within), bound in given if bound is not None]
    said = " and ".join(words.format(bound) for words, _, bound in bounds)
    message = (
        f"{_call(owner, argument, value)}: expected a {'' if infinite or bounds else 'finite '}number {said}".rstrip()
    )
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(message)
    number = float(value)
    is_allowed = math.isfinite(number) or (infinite and math.isinf(number))
    if not is_allowed or not all(is_within(number, bound) for _, is_within, bound in bounds):
        raise ValueError(message)
    return int(value) if isinstance(value, Integral) else number


_BOUNDS = (("above {:g}", gt), ("of {:g} or more", ge), ("below {:g}", lt), ("at most {:g}", le))
"""How a bound is said, and when a number is within it."""


def shown_path(path: Path) -> Path:
    """A path for messages: relative if it lies below the working folder, provided that this folder still exists."""
    try:
        return path.relative_to(Path.cwd())
    except (ValueError, OSError):
        return path


def check_name(owner: object, argument: str, value: Any) -> str | None:
    """Check a name, or None.

    Raises:
        TypeError: if it is neither a non-empty string nor None.
    """
    if value is not None and (not isinstance(value, str) or not value):
        raise TypeError(f"{_call(owner, argument, value)}: expected a name, or None")
    return value


def check_stream(owner: object, argument: str, value: Any) -> Any:
    """Check an open text file, or None.

    Raises:
        TypeError: if it has no ``write``.
    """
    if value is not None and not callable(getattr(value, "write", None)):
        raise TypeError(f"{_call(owner, argument, value)}: expected an open text file, such as sys.stdout, or None")
    return value


def _call(owner: object, argument: str, value: Any) -> str:
    return f"{owner if isinstance(owner, str) else type(owner).__name__}({argument}={value!r})"
