"""The curves, as a picture."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import NullFormatter

from .curves import CURVES, Curve

__all__ = ["draw"]

Costs = list[list[float]]
"""By size, what each round gave."""


def draw(machine: dict[str, Any], measured: dict[str, dict[str, Any]], path: Path) -> None:
    """A panel for each curve: medians, and the quartiles as a band; plain torch is gray."""
    columns = min(2, len(measured))
    rows = -(-len(measured) // columns)
    figure = Figure(figsize=(6 * columns, 3.6 * rows), layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1))
    figure.suptitle(
        f"What Signalfire costs, and how that grows: medians and quartiles of {machine['rounds']} rounds, "
        f"one thread, PyTorch {machine['torch']}",
        fontsize=9,
    )
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes in panels[len(measured) :]:
        axes.set_axis_off()
    for axes, (name, result) in zip(panels, measured.items(), strict=False):
        _panel(axes, CURVES[name], result["sizes"], result["lines"])
    figure.savefig(path, dpi=120)


def _panel(axes: Axes, curve: Curve, sizes: list[float], lines: dict[str, Costs]) -> None:
    ours, plain = iter(("tab:red", "tab:blue")), iter(("0.25", "0.6"))
    for name, costs in lines.items():
        is_plain = name.startswith("plain PyTorch")
        color = next(plain if is_plain else ours)
        quartiles = [statistics.quantiles(values, n=4) if len(values) > 1 else values * 3 for values in costs]
        lows, middles, highs = zip(*quartiles, strict=True)
        axes.fill_between(sizes, lows, highs, color=color, alpha=0.2, linewidth=0)
        marker = "s" if is_plain else "o"
        axes.plot(sizes, middles, marker=marker, markersize=4, color=color, label=name, zorder=1 if is_plain else 2)
    for axis, letter in ((axes.xaxis, "x"), (axes.yaxis, "y")):
        if letter in curve.log:
            axes.set(**{f"{letter}scale": "log"})
            axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter(lambda value, place: f"{value:,.10g}")
    if "y" not in curve.log:
        axes.set_ylim(0, 1.3 * axes.get_ylim()[1])  # room for the legend
    axes.set_title(curve.title, fontsize=11, loc="left", fontweight="bold")
    axes.set_xlabel(curve.size, fontsize=9)
    axes.set_ylabel({"ns": "nanoseconds", "us": "microseconds", "ms": "milliseconds"}[curve.unit], fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="upper left")
