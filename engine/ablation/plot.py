"""The plot of a report."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, TextIO

from .formats import looks_p_text, p_text
from .pictures import new_figure
from .rows import Findings, Row
from .statistics import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]


def draw(report: Findings, path: str | PathLike[str] | TextIO, format: str | None = None) -> None:
    """Plot the difference of every seed as a dot, with the mean and interval of each variant and a line at zero.

    The dots of a variant are in the order of the seeds, from top to bottom.

    Args:
        report: Report to plot.
        path: File to write, or an open one.
        format: The format, such as "svg"; by default that of the extension: .png, .pdf or .svg.
    """
    compared = [(row, row.comparison) for row in report.rows if row.comparison is not None]
    figure = new_figure(8, 1.6 + 0.62 * max(1, len(compared)), needs="plotting a study needs")
    axes = figure.subplots()
    axes.axvline(0, color="0.45", linewidth=1, linestyle="--", zorder=1)
    for place, (row, comparison) in enumerate(compared):
        _draw_row(axes, place, row, comparison, report.seeds)
    axes.set_yticks(range(len(compared)), [_label(report, row, comparison) for row, comparison in compared])
    axes.set_ylim(max(1, len(compared)) - 0.5, -0.5)
    for edge in range(1, len(compared)):
        axes.axhline(edge - 0.5, color="0.92", linewidth=0.8, zorder=0)
    side = "right" if report.mode == "max" else "left"
    axes.set_xlabel(f"difference in {report.metric} from {report.baseline} (better: {side})".replace("$", r"\$"))
    axes.set_title(
        f"dots: seeds; diamond and line: mean and {'simultaneous ' if report.comparisons > 1 else ''}"
        f"{100 * report.level:g} % interval; p: sign-flip test{', adjusted' if report.comparisons > 1 else ''}",
        fontsize="small",
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.06)
    figure.savefig(path, dpi=150, format=format)


def _draw_row(axes: Axes, place: int, row: Row, comparison: Comparison, seeds: Sequence[int]) -> None:
    """Draw the differences of the seeds, and below them their mean with its interval."""
    for number, seed in enumerate(seeds):
        if seed in row.differences:
            height = place + 0.05 + 0.3 * (number / max(1, len(seeds) - 1))
            axes.plot(row.differences[seed], height, "o", color="#0072B2", alpha=0.6, markersize=5, markeredgewidth=0)
    if comparison.n:
        ends = _ends(row, comparison)
        if all(map(math.isfinite, ends)):
            color = "black" if row.failures is None else "0.6"
            axes.plot(ends, [place - 0.15] * 2, color=color, linewidth=1.8, solid_capstyle="butt", zorder=3)
        axes.plot(comparison.mean, place - 0.15, "D", color="black", markersize=5.5, zorder=4)


def _label(report: Findings, row: Row, comparison: Comparison) -> str:
    """The name of a variant, with how many pairs it has and its p-value."""
    plain = re.sub(r"^- ", "without ", row.variant.name)
    name = "\n".join(textwrap.wrap(plain, 28)).replace("$", r"\$")
    planned = "" if comparison.n == row.planned else f" of {row.planned}"
    pairs = f"{comparison.n}{planned} pairs{' that finished' if row.failures else ''}"
    if comparison.n < 2:
        return f"{name}\n{pairs}"
    if report.looks is None or row.adjusted is None:
        return f"{name}\n{pairs}, p {p_text(row.adjusted, '= ')}"
    return f"{name}\n{pairs}, p {looks_p_text(row.adjusted, report.alpha)}"


def _ends(row: Row, comparison: Comparison) -> tuple[float, float]:
    """The simultaneous interval; that of the finished pairs alone, in grey, if runs failed."""
    if comparison.sd == 0 or row.conclusion is None:
        return math.nan, math.nan
    return (row.conclusion.low, row.conclusion.high) if row.failures is None else (comparison.low, comparison.high)
