"""What was measured, as a picture."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

__all__ = ["draw"]


def draw(measured: dict[str, dict[str, dict[str, Any]]], path: Path) -> None:
    """One panel for each item, the frameworks from the fastest to the slowest: medians, and quartiles as whiskers.

    Points and no bars: on a logarithmic scale the length of a bar says nothing.
    """
    rows = -(-len(measured) // 2)
    figure = Figure(figsize=(12, 3.4 * rows), layout="constrained")
    panels = figure.subplots(rows, min(2, len(measured)), squeeze=False).flat
    for axes in panels[len(measured) :]:
        axes.set_axis_off()
    for axes, (item, results) in zip(panels, measured.items(), strict=False):
        middles = {name: statistics.median(result["us"]) for name, result in results.items()}
        names = sorted(middles, key=middles.__getitem__, reverse=True)
        for place, name in enumerate(names):
            times = results[name]["us"]
            low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
            color = {"bare": "0.4", "signalfire": "tab:red"}.get(name, "tab:blue")
            axes.plot([max(low, middles[name] / 10), high], [place, place], color=color)
            axes.plot(middles[name], place, "o", color=color)
            ratio = statistics.median(results[name]["ratios"])
            text = f"{_number(middles[name])} us, {_number(ratio)} x"
            axes.text(1.01, place, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8, color=color)
        axes.set_yticks(range(len(names)), names)
        axes.set_xscale("log")
        axes.set_xlim(
            10 ** math.floor(math.log10(min(middles.values()))), 10 ** math.ceil(math.log10(max(middles.values())))
        )
        axes.xaxis.set_major_formatter(lambda value, place: _number(value))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(axis="x", which="both", color="0.92")
        axes.set_axisbelow(True)
        axes.set_title(f"{item}: microseconds an iteration, and ratio to the bare loop", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _number(value: float) -> str:
    """With three digits, and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
