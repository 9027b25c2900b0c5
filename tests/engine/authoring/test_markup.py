"""What notebooks show: it is valid HTML, and has the text that `str` has."""

from __future__ import annotations

import html
import importlib
import inspect
import sys
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from signalfire import Engine, Events
from signalfire.ablation import FractionalFactorial, Report, Result, Variant
from signalfire.ablation.kfold import Folds
from signalfire.ablation.metrics_report import MetricsReport
from signalfire.ablation.plan import Plan
from signalfire.authoring.markup import preformatted, table
from signalfire.findings import Finding, Findings
from signalfire.handlers import EMA, Average, History, Metrics, summary
from signalfire.handlers._common.weight_plan import WeightPlan
from signalfire.runs.replay import Made, Remade
from signalfire.traces import Bisection, Comparison, Difference
from signalfire.tuning import LearningRateCurve
from signalfire.tuning.batch_size import BatchSizes, Trial
from tests.kit import batches, build, mlp
from tests.test_package import OF_OTHERS, modules


class Strict(HTMLParser):
    """Collects text; tags have to be closed in the order in which they were opened."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None: ...

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def text_of(page: str) -> str:
    """The text of a page that is valid as HTML and as XML."""
    parser = Strict()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert "".join(ElementTree.fromstring(page).itertext()) == parser.text
    return parser.text


def wiring() -> Any:
    engine = build(mlp(5, 8, 1), EMA(0.9), Metrics(loss=Average()))
    engine.connect(Events.ITERATION_COMPLETED(when=lambda engine: True), lambda engine: None)  # "<lambda>"
    return engine.wiring()


def report() -> Report:
    results = [Result(name, seed, seed + (name != "baseline")) for name in ("baseline", "- <b>") for seed in range(3)]
    variants = [Variant("baseline"), Variant("- <b>", off=frozenset({"b"}))]
    return Report(results, variants, metric="loss & more", mode="min")


SHOWN: dict[str, Any] = {
    "wiring": wiring,
    "findings": lambda: Findings([Finding("W10", "a < b & 'c'", "give <one>", ("<handler>",))]),
    "no findings": Findings,
    "curve": lambda: LearningRateCurve((0.001, 0.01, 0.1, 1.0), (2.3, 2.2, 1.4, 1.35), low=0.001, high=1.0),
    "batch sizes": lambda: BatchSizes((Trial(2, True, 2**20, 10.0), Trial(4, False, None, None)), 2, "limit <4>"),
    "report": report,
    "metrics": lambda: MetricsReport({"loss & more": report()}),
    "plan": lambda: Plan((Variant("baseline"), Variant("- <b>")), (0, 1), (), notes=("other <code>",)),
    "fraction": lambda: FractionalFactorial(list("abcd"), generators={"d": list("abc")}),
    "folds": lambda: Folds("loss & more", (((0,), (1,)), ((1,), (0,))), {0: Result("<fold>", 0, 0.5)}),
    "summary": lambda: summary(nn.Sequential(nn.Linear(2, 2))),
    "replay": lambda: Remade(7, [Made(0.5, 1.5, "ab", "cd")], {"loss": 0.5, "gradient_norm": 1.25}),
    "comparison": lambda: Comparison("<a>", "b & c", [], [], 1, Difference(3, "E", "<u>", None, "loss"), None, []),
    "bisection": lambda: Bisection(None, None, 3, "E", ("loss",), "made by <function>"),
    "weights": lambda: WeightPlan("<file>", {"0.weight": "0.weight"}, missing=["0.bias & more"]),
}

ON_ONE_LINE = {
    "Cost",
    "Difference",
    "Divergence",
    "Engine",
    "EventEnum",
    "Filter",
    "Finding",
    "Interval",
    "OldName",
    "Place",
    "Pruned",
}


def test_all_that_prints_several_lines_is_here() -> None:
    printing, shown = set(), {type(make()) for make in SHOWN.values()} | {History}
    for name in set(modules()) - OF_OTHERS.keys():
        for kind in vars(importlib.import_module(name)).values():
            if inspect.isclass(kind) and kind.__module__.startswith("signalfire"):
                if "__str__" in vars(kind) and kind.__name__ not in ON_ONE_LINE:
                    printing.add(kind)
                if "_repr_html_" in vars(kind):
                    printing.add(kind)
    assert printing == {kind for kind in shown if kind in printing}
    assert len(printing) > 12


@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_shows_what_is_printed(name: str) -> None:
    shown = SHOWN[name]()
    assert str(shown) in text_of(shown._repr_html_())


def test_without_matplotlib_a_curve_is_shown_as_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    curve = SHOWN["curve"]()
    assert str(curve) + curve.table() == text_of(curve._repr_html_())


def test_the_cells_of_a_history_are_those_of_its_table() -> None:
    history = History()
    engine = build(mlp(5, 8, 1), history)

    def measure(engine: Engine) -> None:
        engine.state.metrics["<b>&'score'"] = torch.tensor(1.5)
        if engine.state.epoch == 2:
            engine.state.metrics["odd"] = -3e-9

    engine.connect(Events.EPOCH_COMPLETED, measure)
    engine.run(batches(2), max_epochs=3)
    page = history._repr_html_()
    text_of(page)
    rows = [[cell.text or "" for cell in row] for row in ElementTree.fromstring(page).iter("tr")]
    assert rows == [["epoch", "<b>&'score'", "odd"], ["1", "1.5", ""], ["2", "1.5", "-3e-09"], ["3", "1.5", ""]]
    assert [" ".join(row).split() for row in rows] == [line.split() for line in history.table().splitlines()]
    assert next([cell.tag for cell in row] for row in ElementTree.fromstring(page).iter("tr")) == ["th"] * 3
    assert text_of(History()._repr_html_()) == "epoch"


def test_special_characters_are_escaped() -> None:
    for text in ("<script>alert('x')</script>", 'a & "b"'):
        assert preformatted(text) == f"<pre>{html.escape(text)}</pre>"
        assert text_of(table([[text], [text]])) == text * 2
