"""The picture of a comparison: the iterations, where two runs are equal, and how far they are apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .differences import Difference, Row

__all__ = ["draw"]

_EQUAL, _DIFFERENT = "#2a9d8f", "#d1495b"
_LINES = {"loss": "#d1495b", "gradients": "#edae49", "parameters": "#30638e"}


def draw(rows: Sequence[Row], first: Difference | None) -> Any:
    """The figure of matplotlib.

    Raises:
        ImportError: Without matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for name, color in _LINES.items():
        _draw_line(axes, rows, name, color)
    equal = [row.iteration for row in rows if row.equal]
    axes.scatter(equal, [0] * len(equal), s=14, color=_EQUAL, label="equal, bit for bit", zorder=3, clip_on=False)
    if first is not None:
        axes.axvline(first.iteration, color=_DIFFERENT, linewidth=1, linestyle="--")
        axes.set_title(f"first difference: {first}", fontsize=9, loc="left")
    if apart := [value for row in rows for value in row.apart.values() if value]:
        axes.set_yscale("symlog", linthresh=min(apart))
        axes.set_ylim(top=max(apart) * 2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("iteration")
    axes.set_ylabel("relative difference")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _draw_line(axes: Any, rows: Sequence[Row], name: str, color: str) -> None:
    """Draw how far one of the numbers is apart."""
    known = [row for row in rows if name in row.apart]
    apart = [row.apart[name] for row in known]
    axes.plot([row.iteration for row in known], apart, color=color, linewidth=1.2, marker=".", label=name)
