"""Findings: reported once a run, silenced by code, shown as a table and as JSON."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from torch.nn import Linear
from torch.nn.functional import mse_loss
from torch.optim import SGD

import signalfire
from signalfire import Engine, Events, Finding, Findings, FindingWarning, Handler, Update
from signalfire.ablation import LeaveOneOut, Study
from signalfire.handlers import Average, GradientClipping, LimitBatches, Metrics, OverfitBatches
from signalfire.tuning import find_learning_rate
from tests.kit import batches, build, evaluator_of, linear, mlp

WAY_OUT = "give the Update an optimizer"


def untrained(**options: object) -> Engine:
    return Engine(Update.supervised(mse_loss), model=mlp(5, 8, 1), **options)  # type: ignore[arg-type]


def test_a_finding_is_a_warning_of_the_users_line_and_comes_once_a_run() -> None:
    engine = untrained()
    engine.connect(Events.ITERATION_STARTED, lambda engine: engine.findings.report("W10", "again", WAY_OUT))
    for _ in range(2):
        with pytest.warns(FindingWarning, match="W10: .*trains nothing") as caught:
            engine.run(batches(), max_epochs=2)
        assert [Path(one.filename).name for one in caught] == [Path(__file__).name]
        assert [finding.code for finding in engine.findings.of_run()] == ["W10"]


def test_findings_of_one_code_are_told_apart_by_handlers_and_key() -> None:
    engine = untrained()

    def report_all() -> None:
        for handlers, key in [((), None), (("ema",), None), ((), 1), ((), 1)]:
            engine.findings.report("W10", "nothing", WAY_OUT, *handlers, key=key)

    with pytest.warns(FindingWarning) as caught:
        report_all()
    assert len(caught) == 3


@pytest.mark.filterwarnings("error")
def test_a_finding_is_silenced_by_its_code() -> None:
    untrained(allow=["W10"]).run(batches(), max_epochs=2)
    with signalfire.allow("W10"):
        untrained().run(batches(), max_epochs=2)
    with pytest.raises(FindingWarning):
        untrained().run(batches(), max_epochs=2)


def test_a_code_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Engine\(allow=\): 'X1' is not a finding code"):
        untrained(allow=["X1"])
    with pytest.raises(TypeError, match=r"write \['W10'\]"):
        untrained(allow="W10")
    with pytest.raises(ValueError, match="allow: 'w10' is not a finding code"), signalfire.allow("w10"):
        pass


def test_an_evaluator_reports_to_the_engine_that_runs_it_and_obeys_what_that_allows() -> None:
    trainer, evaluator = untrained(), evaluator_of(mlp(5, 8, 1))
    evaluator.connect(Events.STARTED, lambda engine: engine.findings.report("W10", "nothing", WAY_OUT, key="own"))
    trainer.connect(Events.EPOCH_COMPLETED, lambda engine: engine.evaluate(evaluator, batches()))
    with pytest.warns(FindingWarning) as caught:
        trainer.run(batches(), max_epochs=3)
    assert len(caught) == 2 == len(trainer.findings.of_run())  # the trainer's own, and one of three evaluations
    with signalfire.allow("W10"), warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.run(batches(), max_epochs=6)


def test_findings_are_listed() -> None:
    findings = Findings(
        [Finding("W10", "a", "b", ("ema",), "info"), Finding("C01", "c", "d"), Finding("G01", "e", "f", (), "error")]
    )
    assert str(findings[:1]) == "W10  info     a [ema]\n              -> b"
    assert str(Findings()) == "nothing was found"
    assert [one.code for one in findings.at_least("warning")] == ["C01", "G01"]
    assert findings.of("C01")[0].sentence == "c"
    assert json.loads(findings.json())[0] == {
        "code": "W10", "sentence": "a", "way_out": "b", "handlers": ["ema"], "severity": "info"
    }  # fmt: skip


def test_a_finding_that_repeats_an_earlier_one_is_listed_but_does_not_warn_again() -> None:
    def seen(check: bool) -> tuple[list[str], dict[str, str]]:
        model = mlp(5, 8, 2)
        engine = Engine(Update.supervised(mse_loss, SGD(model.parameters(), lr=0.1)), model=model)
        model[-1] = Linear(8, 1)
        with warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always")
            engine.run(batches(), max_epochs=1, check=check)
        codes = [one.message.finding.code for one in messages if isinstance(one.message, FindingWarning)]
        return codes, {one.code: one.severity for one in engine.findings.of_run()}

    warned, listed = seen(check=True)
    assert ("C08" in warned, "W11" in warned, listed["W11"]) == (True, False, "info")
    warned, listed = seen(check=False)
    assert (warned, listed["W11"]) == (["W11"], "warning")


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_line_comes_once_and_neither_in_dry_runs_nor_from_other_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    engine = build(linear(5, 1), OverfitBatches(1))
    for epochs in (1, 2):
        engine.run(batches(), max_epochs=epochs)
    (line,) = lines_of(capsys)
    assert line.startswith("W58: OverfitBatches(1) trains on at most 1 of the batches")
    silent = build(linear(5, 1), OverfitBatches(1))
    silent.dry_run = True
    silent.run(batches(), max_epochs=1)
    allowing = Engine(Update.supervised(mse_loss, SGD), model=linear(5, 1), allow=["W58"])
    allowing.attach(OverfitBatches(1))
    allowing.run(batches(), max_epochs=1)
    assert lines_of(capsys) == []


@pytest.mark.parametrize("handler", [OverfitBatches(6), LimitBatches(6), LimitBatches(train=1.0)], ids=repr)
def test_a_limit_that_leaves_out_nothing_prints_no_line(handler: Handler, capsys: pytest.CaptureFixture[str]) -> None:
    build(linear(5, 1), handler).run(batches(6), max_epochs=1)
    assert lines_of(capsys) == []


def test_searches_and_evaluators_print_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    engine = build(linear(5, 1), OverfitBatches(3))
    find_learning_rate(engine, batches(), steps=3)
    evaluator = evaluator_of(engine.model)
    evaluator.attach(LimitBatches(validation=1))
    evaluator.run(batches())
    assert lines_of(capsys) == []
    assert engine.findings.prints


def test_a_study_prints_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    data = batches()

    def compose(seed: int) -> Any:
        engine = Engine(Update.supervised(mse_loss, SGD), model=linear(5, 1), seed=seed)
        engine.attach(LimitBatches(1), GradientClipping(max_norm=1.0), Metrics(loss=Average()))
        return engine, lambda engine: engine.run(data, max_epochs=1)

    Study(compose, metric="loss", seeds=range(1), files=True).run(LeaveOneOut(["gradient_clipping"]), workers=0)
    assert not any("W58" in line for line in lines_of(capsys))
