"""Pictures of studies beside that of the report: metric against cost, and learning curves with bands."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Collection, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from signalfire.authoring.checks import check_choice, did_you_mean

from .cost_ratios import COSTS, What
from .results import BASELINE, Result, finished_value
from .statistics import compare

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["figure_of_panels", "front", "new_figure", "plain_text", "plot_curves", "plot_pareto"]

BLUE, GREY, ORANGE = "#0072B2", "0.45", "#D55E00"
UNITS = {"seconds": "seconds per run", "memory": "peak memory in MB", "steps": "optimizer steps per run"}
DIRECT = 12  # variants that are named beside their points; more have numbers


def plot_pareto(
    results: Sequence[Result],
    path: str | PathLike[str],
    *,
    metric: str,
    mode: Literal["min", "max"],
    cost: What = "seconds",
    level: float = 0.95,
) -> None:
    """Plot the metric of each variant against its cost, and mark those that no other one beats in both.

    Each point is the mean over the finished runs, with the interval of the metric's mean. It does not show which differences
    are certain: see the report.

    Args:
        results: Results of the runs, such as ``study.results(plan)``.
        path: File to write; its extension sets the format, such as .png, .pdf or .svg.
        metric: Name of the metric, for the axis.
        mode: "min" if smaller is better, "max" if greater is.
        cost: "seconds", "memory" or "steps".
        level: Confidence level of the intervals.
    """
    check_choice("plot_pareto", "cost", cost, COSTS)
    check_choice("plot_pareto", "mode", mode, ("min", "max"))
    figure = new_figure(9, 5.5)
    axes = figure.subplots()
    points = _draw_means(axes, results, cost, level)
    best = front(points, mode)
    axes.plot(
        [points[name][0] for name in best], [points[name][1] for name in best], color=ORANGE, linewidth=1, zorder=2
    )
    _draw_points(axes, points, best)
    axes.set_xlabel(UNITS[cost])
    axes.set_ylabel(plain_text(f"{metric} ({'greater' if mode == 'max' else 'smaller'} is better)"))
    axes.set_title(
        f"means with {100 * level:g} % intervals; square: baseline; orange: no variant is both better and cheaper",
        fontsize="small",
    )
    axes.margins(0.12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _draw_means(axes: Axes, results: Sequence[Result], cost: What, level: float) -> dict[str, tuple[float, float]]:
    """Draw the interval of each variant; returns its mean cost and metric, by name."""
    points = {}
    for name, runs in _by_variant(results).items():
        taken = [float(getattr(one, cost)) / (1e6 if cost == "memory" else 1) for one in runs]
        if not any(taken):
            continue
        mean = compare([one.value for one in runs if one.value is not None], level=level)
        points[name] = statistics.fmean(taken), mean.mean
        if not math.isnan(mean.low):
            axes.plot([points[name][0]] * 2, [mean.low, mean.high], color="0.75", linewidth=1.2, zorder=1)
    return points


def _draw_points(axes: Axes, points: Mapping[str, tuple[float, float]], best: Collection[str]) -> None:
    """Draw the points with their names, or with numbers and a list of names beside the axes."""
    for number, (name, (x, y)) in enumerate(points.items(), 1):
        color = GREY if name == BASELINE else ORANGE if name in best else BLUE
        axes.plot(x, y, "s" if name == BASELINE else "o", color=color, markersize=6, zorder=3)
        label = plain_text(name) if len(points) <= DIRECT else str(number)
        weight = "bold" if name in best else "normal"
        axes.annotate(label, (x, y), (6, -10), textcoords="offset points", fontsize=8, weight=weight, zorder=4)
    if len(points) > DIRECT:
        names = [f"{number:>2}  {plain_text(textwrap.shorten(name, 34))}" for number, name in enumerate(points, 1)]
        axes.text(1.02, 1.0, "\n".join(names), transform=axes.transAxes, va="top", fontsize=7.5, linespacing=1.25)


def front(points: Mapping[str, tuple[float, float]], mode: Literal["min", "max"]) -> list[str]:
    """The names of the points (cost, metric) that no other one beats in one and equals in the other, by cost.

    Example:
        >>> front({"a": (1.0, 0.5), "b": (2.0, 0.6), "c": (3.0, 0.6)}, "max")
        ['a', 'b']
    """
    sign = 1 if mode == "max" else -1
    ordered = sorted(points, key=lambda name: (points[name][0], -sign * points[name][1]))
    found: list[str] = []
    for name in ordered:
        if not found or sign * points[name][1] > sign * points[found[-1]][1]:
            found.append(name)
    return found


def plot_curves(
    results: Sequence[Result], path: str | PathLike[str], *, metric: str, baseline: str = BASELINE, level: float = 0.95
) -> None:
    """Plot the learning curves of all variants, each in a panel with the baseline: means with bands.

    A band is the Student-t interval of the mean over the seeds at each epoch; it does not show differences, which are paired.

    Args:
        results: Results of the runs, such as ``study.results(plan)``.
        path: File to write; its extension sets the format.
        metric: Name of the metric.
        baseline: Name of the variant that each panel shows in grey.
        level: Confidence level of the bands.

    Raises:
        KeyError: if no run has a curve of this metric.
    """
    curves = _curves(results, metric, level)
    others = [name for name in curves if name != baseline] or [baseline]
    lines = max(len(textwrap.wrap(name, 30)) for name in others)  # of a title: names are long, and differ at their ends
    figure, panels = figure_of_panels(len(others), 0.8, 1.8 + 0.2 * lines)
    for axes, name in zip(panels, others, strict=True):
        for which, color in ((baseline, GREY), (name, BLUE)):
            if which in curves:
                _draw_curve(axes, curves[which], color)
        axes.set_title("\n".join(map(plain_text, textwrap.wrap(name, 30))), fontsize="small", color=BLUE)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7, labelbottom=True)
    figure.supxlabel(f"epoch (gray: {baseline}; bands: {100 * level:g} % intervals of the mean)", fontsize="small")
    figure.supylabel(plain_text(metric), fontsize="small")
    figure.savefig(path, dpi=150)


def _curves(results: Sequence[Result], metric: str, level: float) -> dict[str, list[tuple[float, float, float, float]]]:
    """The curve of each variant that has one; an error if none has."""
    curves = {name: _curve(runs, metric, level) for name, runs in _by_variant(results).items()}
    if not any(curves.values()):
        there = sorted({name for one in results for name in one.history})
        raise KeyError(
            f"plot_curves(metric={metric!r}): no finished run has a curve of this metric; metrics with curves: "
            f"{', '.join(there) or 'none'}{did_you_mean(metric, there)}"
        )
    return {name: curve for name, curve in curves.items() if curve}


def _draw_curve(axes: Axes, curve: Sequence[tuple[float, float, float, float]], color: str) -> None:
    epochs, means, lows, highs = zip(*curve, strict=True)
    axes.plot(epochs, means, color=color, linewidth=1.4, marker="o" if len(curve) < 2 else "", markersize=3)
    axes.fill_between(epochs, lows, highs, color=color, alpha=0.2, linewidth=0)


def _curve(runs: Sequence[Result], metric: str, level: float) -> list[tuple[float, float, float, float]]:
    """For each epoch that a run has: epoch, mean, and the ends of the interval."""
    values: dict[float, list[float]] = {}
    for run in runs:
        for epoch, value in run.history.get(metric, ()):
            if math.isfinite(float(value)):
                values.setdefault(epoch, []).append(float(value))
    found = []
    for epoch, several in sorted(values.items()):
        one = compare(several, level=level)
        low, high = (one.mean, one.mean) if math.isnan(one.low) else (one.low, one.high)
        found.append((epoch, one.mean, low, high))
    return found


def _by_variant(results: Sequence[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for one in results:
        if finished_value(one) is not None:
            found.setdefault(one.variant, []).append(one)
    return found


def plain_text(text: str) -> str:
    """The text for Matplotlib, in which no dollar begins mathematics."""
    return text.replace("$", r"\$")


def new_figure(width: float, height: float, *, needs: str = "plotting a study needs") -> Figure:
    """A figure of this size in inches, which needs no display.

    Args:
        width, height: Its size.
        needs: Beginning of the error.

    Raises:
        ImportError: if Matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{needs} Matplotlib: pip install 'signalfire[ablation]'") from error
    made: Any = Figure(figsize=(width, height), layout="constrained")
    return made


def figure_of_panels(count: int, base: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure and as many panels with common axes, in rows.

    Args:
        count: Number of panels.
        base: Height of what is beside the panels, in inches.
        height: Height of a panel.
    """
    columns = min(count, 3 if count <= 9 else 5)
    rows = -(-count // columns)
    figure = new_figure(max(5.0, 2.6 * columns), base + height * rows)
    panels = list(figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat)
    for axes in panels[count:]:
        axes.set_visible(False)
    return figure, panels[:count]
