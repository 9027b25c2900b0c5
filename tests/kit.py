"""What many tests share: which values run in the quick tier, and what a machine without an extra leaves out."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterable
from typing import Any

import pytest

__all__ = ["needs", "quick", "spread"]


def quick(values: Iterable[Any], *keep: Any, whole: bool = False) -> list[Any]:
    """Parameters of a test, of which the quick tier runs those in ``keep`` alone.

    Args:
        values: as ``parametrize`` takes them; a tuple gives several parameters, unless it is one as a ``whole``.
    """
    return [value if value in keep else _slow(value, whole) for value in values]


def spread(values: Iterable[Any], count: int) -> list[Any]:
    """Parameters of a test, of which the quick tier runs so many, evenly spread; the first and the last are among them."""
    values = list(values)
    kept: Collection[int] = {round(i * (len(values) - 1) / max(1, count - 1)) for i in range(count)}
    return [value if place in kept else _slow(value, whole=False) for place, value in enumerate(values)]


def _slow(value: Any, whole: bool) -> Any:
    together = isinstance(value, tuple) and not whole
    return pytest.param(*value, marks=pytest.mark.slow) if together else pytest.param(value, marks=pytest.mark.slow)


def needs(extra: str, *modules: str) -> None:
    """Skip the test, or all of a file, where a module of this extra is not installed."""
    if any(importlib.util.find_spec(module) is None for module in modules):
        pytest.skip(f"install the extra: pip install -e '.[{extra}]'", allow_module_level=True)
