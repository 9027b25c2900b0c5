"""Pictures of several tasks: what they show, and that all of it can be read."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from signalfire.ablation import Report, Result, TasksReport, Variant
from signalfire.ablation.task_pictures import draw_aggregates, draw_profiles


def report_of(variants: int, seeds: int = 5) -> TasksReport:
    names = ["baseline", *(f"a variant with a long name, number {place} of $all$" for place in range(1, variants))]
    generator = np.random.default_rng(0)
    reports = {}
    for task in ("digits", "wine", "cancer"):
        runs = [Result(name, seed, float(generator.uniform(0.5, 1))) for name in names for seed in range(seeds)]
        reports[task] = Report(runs, [Variant(name) for name in names], metric="accuracy", mode="max")
    return TasksReport(reports, (0.0, 1.0))


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved while the test runs."""
    saved: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: Any, **options: Any) -> None:
        saved.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


def written(figure: Figure) -> list[Text]:
    """The texts that are drawn: labels of ticks beyond the limits of their axes, and of hidden axes, are not."""
    hidden: set[Text] = set()
    for axes in figure.axes:
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, sorted(axes.get_ylim()))):
            for tick in axis.get_major_ticks():
                if not low - 1e-9 <= float(tick.get_loc()) <= high + 1e-9:
                    hidden |= {tick.label1, tick.label2}
        if not axes.get_visible():
            hidden |= set(axes.findobj(Text))
    every = [one for one in figure.findobj(Text) if isinstance(one, Text)]
    return [one for one in every if one not in hidden and one.get_visible() and one.get_text().strip()]


def plain(text: str) -> str:
    """A label as it was before it was wrapped."""
    return text.replace("\n", " ").replace(r"\$", "$")


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that lie over each other; and a text by itself that leaves the picture."""
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    boxes = [(one.get_text(), one.get_window_extent(canvas.get_renderer())) for one in written(figure)]
    found = [(a, b) for (a, one), (b, other) in itertools.combinations(boxes, 2) if one.overlaps(other)]
    within = figure.bbox.padded(1)
    return found + [(text, "") for text, box in boxes if not (within.contains(*box.min) and within.contains(*box.max))]


@pytest.mark.slow
@pytest.mark.parametrize("variants", [1, 2, 7, 31])
def test_all_that_is_written_can_be_read(variants: int, figures: list[Figure], tmp_path: Path) -> None:
    report = report_of(variants)
    report.plot_profiles(tmp_path / "profiles.png")
    report.plot_aggregates(tmp_path / "aggregates.png")
    for figure, name in zip(figures, ("profiles.png", "aggregates.png"), strict=True):
        assert overlapping(figure) == []
        height, width = np.asarray(imread(tmp_path / name)).shape[:2]
        assert 250 < height < 3000
        assert 500 < width < 2500
    profiles, aggregates = figures
    assert sum(axes.get_visible() for axes in profiles.axes) == max(1, variants - 1)
    names = [row.variant.name for row in report.rows]
    labels = [plain(text.get_text()) for text in aggregates.axes[0].get_yticklabels()]
    assert labels == names
    titles = [plain(axes.get_title()) for axes in profiles.axes if axes.get_visible()]
    assert titles == (names[1:] or names)


@pytest.mark.moderate
def test_they_show_the_numbers_of_the_report(figures: list[Figure], tmp_path: Path) -> None:
    report = report_of(3)
    report.plot_profiles(tmp_path / "profiles.svg")
    report.plot_aggregates(tmp_path / "aggregates.svg")
    profiles, aggregates = figures
    for axes, profile in zip(profiles.axes, list(report.profiles().values())[1:], strict=True):
        baseline, own = axes.get_lines()
        assert np.asarray(own.get_ydata()).tolist() == profile.shares.tolist()
        assert np.asarray(baseline.get_ydata()).tolist() == report.profiles()["baseline"].shares.tolist()
    markers = [line.get_xdata() for line in aggregates.axes[0].get_lines() if line.get_marker() == "D"]
    found = [one.interquartile_mean.value for one in report.aggregates]
    assert [float(np.asarray(one)[0]) for one in markers] == found
    assert len([line for line in aggregates.axes[2].get_lines() if line.get_marker() == "D"]) == 2


def test_there_is_no_picture_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"plot_profiles\(\): no seed has runs of all variants on all tasks"):
        draw_profiles({}, tmp_path / "x.png")
    with pytest.raises(ValueError, match=r"plot_aggregates\(\): no seed has runs"):
        draw_aggregates({}, tmp_path / "x.png")
