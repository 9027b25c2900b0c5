"""Pictures of studies of several tasks: performance profiles, and aggregates with their intervals."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import NamedTuple, TextIO

import numpy as np
import numpy.typing as npt

from .pictures import figure_of_panels, new_figure, plain_text
from .results import BASELINE

__all__ = ["Profile", "draw_aggregates", "draw_profiles"]

BLUE, GREY = "#0072B2", "0.45"
TITLES = ("interquartile mean\n(larger is better)", "optimality gap\n(smaller is better)", "P(better than {baseline})")

Floats = npt.NDArray[np.float64]
Ends = tuple[float, float, float]


class Profile(NamedTuple):
    """The performance profile of a variant.

    Attributes:
        taus: Thresholds.
        shares: Share of the runs that score more than each threshold.
        low: Lower ends of their pointwise intervals.
        high: Upper ends.
    """

    taus: Floats
    shares: Floats
    low: Floats
    high: Floats


def draw_profiles(
    profiles: Mapping[str, Profile],
    path: str | PathLike[str] | TextIO,
    *,
    baseline: str = BASELINE,
    level: float = 0.95,
    format: str | None = None,
) -> None:
    """Plot each performance profile in a panel, beside that of the baseline in grey.

    Args:
        profiles: The profiles by variant.
        path: File to write, or an open one.
        baseline: Name of the variant that all panels show.
        level: Level of the intervals, for the caption.
        format: The format, such as "svg"; by default that of the extension.

    Raises:
        ValueError: without any profile.
    """
    if not profiles:
        raise ValueError("plot_profiles(): no seed has runs of all variants on all tasks; complete these runs first")
    others = [name for name in profiles if name != baseline] or [baseline]
    names = {name: _wrapped(name, 30) for name in others}
    lines = max(one.count("\n") for one in names.values())
    figure, panels = figure_of_panels(len(others), 0.9, 2.0 + 0.16 * lines)
    for axes, name in zip(panels, others, strict=True):
        for which, color in ((baseline, GREY), (name, BLUE)):
            if which in profiles:
                one = profiles[which]
                axes.step(one.taus, one.shares, where="post", color=color, linewidth=1.4)
                axes.fill_between(one.taus, one.low, one.high, step="post", color=color, alpha=0.2, linewidth=0)
        axes.set_title(names[name], fontsize="small", color=BLUE if name != baseline else GREY)
        axes.set_ylim(-0.03, 1.03)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7, labelbottom=True)
    caption = f"score (gray: {baseline}; bands: pointwise {100 * level:g} % intervals of the bootstrap)"
    figure.supxlabel("\n".join(textwrap.wrap(plain_text(caption), 60 if len(others) == 1 else 100)), fontsize="small")
    figure.supylabel("share of runs above", fontsize="small")
    figure.savefig(path, dpi=150, format=format)


def draw_aggregates(
    found: Mapping[str, Sequence[Ends | None]],
    path: str | PathLike[str] | TextIO,
    *,
    baseline: str = BASELINE,
    level: float = 0.95,
    format: str | None = None,
) -> None:
    """Plot interquartile mean, optimality gap and probability of improvement, a line for each variant.

    Args:
        found: For each variant three triples of a value and the ends of its interval; None where there is no number.
        path: File to write, or an open one.
        baseline: Name of the variant in grey.
        level: Level of the intervals, for the caption.
        format: The format, such as "svg"; by default that of the extension.

    Raises:
        ValueError: without any variant.
    """
    if not found:
        raise ValueError("plot_aggregates(): no seed has runs of all variants on all tasks; complete these runs first")
    names = {name: _wrapped(name, 34) for name in found}
    lines = max(one.count("\n") for one in names.values())
    figure = new_figure(9.5, 1.5 + (0.32 + 0.16 * lines) * len(found))
    panels = figure.subplots(1, 3, sharey=True)
    for column, (axes, title) in enumerate(zip(panels, TITLES, strict=True)):
        for place, (name, parts) in enumerate(found.items()):
            if (part := parts[column]) is not None:
                value, low, high = part
                color = GREY if name == baseline else BLUE
                axes.plot([low, high], [place, place], color=color, linewidth=5, alpha=0.35, solid_capstyle="butt")
                axes.plot(value, place, "D", color=color, markersize=4.5)
        if column == 2:
            axes.axvline(0.5, color="0.45", linewidth=1, linestyle="--", zorder=0)
            axes.set_xlim(-0.02, 1.02)
        axes.set_title(_wrapped(title.format(baseline=baseline), 36), fontsize="small")
        axes.set_ylim(len(found) - 0.5, -0.5)
        axes.grid(axis="y", color="0.93", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(labelsize=8, length=0)
        axes.locator_params(axis="x", nbins=5)
    panels[0].set_yticks(range(len(found)), list(names.values()))
    figure.supxlabel(f"bars: {100 * level:g} % intervals of the stratified bootstrap", fontsize="small")
    figure.savefig(path, dpi=150, format=format)


def _wrapped(text: str, width: int) -> str:
    """The text in lines of so many characters; none of it is left out, as the ends of long names tell them apart."""
    lines = [line for part in text.splitlines() for line in textwrap.wrap(part, width)]
    return plain_text("\n".join(lines))
