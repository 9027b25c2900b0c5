"""Reports as tables of numbers, as a paragraph for a paper, and as a page of their own."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from signalfire.ablation.looks import Looks
from tests.engine.ablation.reports import NOTHING, WORSE, report

FAILED = [-1, -2, None, -3, -2, -1, -1, -2]


def columns(frame: Any) -> dict[str, list[Any]]:
    """Of a DataFrame or a dict; missing numbers as None."""
    found = {name: list(frame[name]) for name in (frame if isinstance(frame, dict) else frame.columns)}
    return {name: [None if value != value else value for value in values] for name, values in found.items()}


def test_the_frame_of_comparisons_has_the_columns_and_numbers_of_the_csv() -> None:
    found = report({"- ema": WORSE, "- mixup": FAILED, "- clip": NOTHING}, margin=0.05)
    frame, lines = columns(found.frame()), list(csv.DictReader(io.StringIO(found.csv())))
    assert list(frame) == list(lines[0])
    for place, line in enumerate(lines):
        for name, text in line.items():
            value = frame[name][place]
            if text == "":
                assert value in (None, ""), name
            elif isinstance(value, str):
                assert value == text
            else:
                assert float(text) == float(value), name


def test_the_frame_of_runs_has_each_run_with_its_seed_and_its_error() -> None:
    runs = columns(report({"- ema": FAILED}).runs())
    assert runs["variant"] == ["baseline"] * 8 + ["- ema"] * 8
    assert runs["seed"] == [*range(8)] * 2
    assert runs["error"][10] == "ValueError: boom"
    assert runs["accuracy"][10] is None
    assert runs["accuracy"][8] == 0.89
    assert sum(error is not None for error in runs["error"]) == 1


@pytest.mark.slow
def test_without_pandas_a_frame_is_a_dict_of_columns() -> None:
    program = (
        "import sys; sys.modules['pandas'] = None\n"
        "from tests.engine.ablation.reports import WORSE, report\n"
        "frame = report({'- ema': WORSE}).frame()\n"
        "assert type(frame) is dict and frame['variant'] == ['baseline', '- ema'], frame"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.moderate
def test_the_methods_state_what_was_done() -> None:
    text = report({"- ema": WORSE, "- mixup": NOTHING}).methods()
    assert text.startswith(
        '2 variants were compared with "baseline" over 8 seeds (0 to 7), with differences paired by seed.'
    )
    assert "The metric is accuracy at the end of each run; larger values are better. 24 of 24 runs finished." in text
    assert "over all sign patterns" in text
    assert "adjusted for 2 comparisons by the step-down procedure over joint sign flips" in text
    assert "simultaneous 95 % intervals" in text
    assert "8 seeds are enough to detect a single difference of" in text
    for absent in ("failed", "McNemar", "equivalent", "Looks"):
        assert absent not in text


def test_the_methods_name_failures_margins_and_looks() -> None:
    text = report({"- ema": FAILED}, margin=0.01).methods()
    assert "15 of 16 runs finished, and 1 failed; a failed run counts as worse than any finished run." in text
    assert "McNemar's exact test" in text
    assert "equivalent if its interval lies within 0.01 of 0" in text
    assert "adjusted" not in text
    assert "simultaneous" not in text
    text = report({"- ema": WORSE, "- mixup": NOTHING}, looks=Looks([7, 8])).methods()
    assert "Looks were planned at 7 and 8 seeds. The level of 0.05 was spent in proportion" in text
    assert "in a closed test" in text
    assert "step-down" not in text
    few = report({"- ema": WORSE[:3]}).methods()
    assert "(0 to 2)" in few
    assert "find" not in few, "three seeds can find nothing"


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.linked: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "path", "use", "br"):
            self.open.append(tag)
        self.linked += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("path", "use"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.moderate
def test_the_page_holds_everything_and_needs_no_other_file(tmp_path: Path) -> None:
    found = report({"- ema": FAILED, "- <mixup & $more$>": NOTHING})
    path = tmp_path / "new" / "report.html"
    found.html(path)
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    assert page.open == []
    assert all(link.startswith("#") for link in page.linked), "only parts of the picture point to others"
    for line in (*found.sentences(), *found.warnings(), found.methods()):
        assert line in page.text
    assert [one.name for one in path.parent.iterdir()] == ["report.html"]


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"Report.html\(path='.*report.txt'\): expected a file name that ends with '.html'"
    ):
        report({"- ema": WORSE}).html(tmp_path / "report.txt")
