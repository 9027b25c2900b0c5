"""The picture of a report: what it shows, what it says beside that, and what it needs."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from signalfire.ablation.report import Report
from signalfire.ablation.results import Variant
from tests.engine.ablation.reports import NOTHING, WORSE, report, results
from tests.kit import LIMIT


@pytest.mark.moderate
def test_the_picture_shows_each_seed(tmp_path: Path) -> None:
    found = report({"- ema": [None, *WORSE[1:]], "- a$b_c": NOTHING, "- noise": [0] * 8})
    found.plot(tmp_path / "found.svg")
    tree = ElementTree.parse(tmp_path / "found.svg")
    uses = [use.get("style", "") for use in tree.iter("{http://www.w3.org/2000/svg}use")]
    assert sum("#0072b2" in style for style in uses) == 7 + 8 + 8
    found.plot(str(tmp_path / "found.png"))
    assert np.asarray(imread(tmp_path / "found.png")).shape[0] > 300


@pytest.mark.slow
def test_the_picture_needs_no_display_and_leaves_pyplot_alone(tmp_path: Path) -> None:
    script = (
        "import sys; from signalfire.ablation.report import Report; from signalfire.ablation.results import Result, Variant\n"
        "assert not {'matplotlib', 'scipy'} & set(sys.modules)\n"
        "report = Report([Result('baseline', 0, 1.0)], [Variant('baseline'), Variant('a')], metric='loss', mode='min')\n"
        f"report.plot({str(tmp_path / 'found.png')!r})\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=LIMIT)
    assert (tmp_path / "found.png").stat().st_size > 1000


@pytest.mark.moderate
def test_it_says_how_many_pairs_there_are_and_which_side_is_better(tmp_path: Path) -> None:
    found = report({"- ema": WORSE, "- one": [-1, *[None] * 7]}, metric="loss", mode="min", level=0.9)
    found.plot(tmp_path / "found.svg")
    text = (tmp_path / "found.svg").read_text()
    assert "8 pairs, p = 0.016" in text
    assert "1 of 8 pairs that finished -->" in text  # a single pair has no p
    assert "difference in loss from baseline (better: left)" in text
    assert "mean and simultaneous 90 % interval; p: sign-flip test, adjusted -->" in text
    report({"- ema": WORSE}).plot(tmp_path / "one.svg")
    text = (tmp_path / "one.svg").read_text()
    assert "accuracy from baseline (better: right)" in text
    assert "p: sign-flip test -->" in text


@pytest.mark.moderate
def test_dollars_in_names_begin_no_formula(tmp_path: Path) -> None:
    found = report({r"$\nothing$": WORSE}, [Variant("baseline"), Variant(r"$\nothing$")], metric=r"$\neither$")
    found.plot(tmp_path / "found.svg")
    text = (tmp_path / "found.svg").read_text()
    assert r"$\nothing$" in text
    assert r"difference in $\neither$ from baseline" in text


@pytest.mark.moderate
def test_only_differences_that_differ_have_an_interval(tmp_path: Path) -> None:
    found = report({"- ema": WORSE, "- same": [-1] * 8, "- one": [-1, *[None] * 7], "- none": [None] * 8})
    found.plot(tmp_path / "found.svg")
    styles = [one.get("style", "") for one in ElementTree.parse(tmp_path / "found.svg").iter()]
    assert sum("stroke-width: 1.8" in style for style in styles) == 1


@pytest.mark.moderate
def test_a_report_that_compares_nothing_has_a_picture(tmp_path: Path) -> None:
    Report(results("baseline", [0.5]), [Variant("baseline")], metric="loss", mode="min").plot(tmp_path / "found.png")
    assert (tmp_path / "found.png").stat().st_size > 1000


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"plotting a study needs Matplotlib: pip install 'signalfire\[ablation\]'"):
        report({"- ema": WORSE}).plot(tmp_path / "found.svg")
