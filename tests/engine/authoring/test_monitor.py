"""A monitored metric: its value is reported once each time it is written, and judged against another."""

from __future__ import annotations

from contextlib import nullcontext
from math import inf, nan
from typing import Any

import pytest
import torch

from signalfire import Engine, Events, FindingWarning, Handler, Phase, Update, on
from signalfire.authoring.monitor import Monitor
from signalfire.handlers import Average, EarlyStopping, Metrics, Validation
from tests.kit import batches, build, evaluator_of, linear


def make_engine(**metrics: Any) -> Engine:
    engine = Engine(Update.prediction())
    engine.state.metrics.update(metrics)
    return engine


def test_a_value_is_new_once_each_time_it_is_written() -> None:
    engine, monitor = make_engine(), Monitor("Mine", "loss", "min")
    metrics = engine.state.metrics
    assert monitor.new_value(engine) is None
    metrics["loss"] = torch.tensor(2.0)
    assert monitor.new_value(engine) == 2.0
    assert monitor.new_value(engine) is None
    metrics["other"] = 1.0
    assert monitor.new_value(engine) is None
    metrics["loss"] = 2.0
    assert monitor.new_value(engine) == 2.0


def test_a_value_that_was_reported_before_it_was_saved_is_not_reported_again() -> None:
    engine, monitor, other = make_engine(loss=2.0), Monitor("Mine", "loss", "min"), Monitor("Mine", "loss", "min")
    unseen = other.state_dict()
    monitor.new_value(engine)
    other.load_state_dict(monitor.state_dict())
    assert other.new_value(engine) is None
    other.load_state_dict(unseen)
    assert other.new_value(engine) == 2.0, "it had been written, and was not reported yet"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2, 3), r"Mine: the metric 'loss' is a Tensor of shape \(2, 3\); expected a single number"),
        ([1.0], "Mine: the metric 'loss' is a list; expected a single number"),
        (None, "Mine: the metric 'loss' is a NoneType; expected"),
    ],
    ids=["tensor", "list", "none"],
)
def test_a_value_that_is_no_number_is_refused(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Monitor("Mine", "loss", "min").new_value(make_engine(loss=value))


@pytest.mark.parametrize(
    ("options", "best", "better", "not_better"),
    [
        ({"mode": "min"}, 1.0, [0.999, -inf], [1.0, 1.001, inf, nan]),
        ({"mode": "max"}, 1.0, [1.001, inf], [1.0, 0.999, -inf, nan]),
        ({"mode": "min"}, None, [0.0, inf, -inf], [nan]),
        ({"mode": "max"}, nan, [0.0, inf, -inf], [nan]),
        ({"mode": "min", "min_delta": 0.5}, 1.0, [0.25], [0.5, 0.75, nan]),
        ({"mode": "max", "min_delta": 0.5}, 1.0, [1.75], [1.5, 1.25, nan]),
        ({"mode": "min", "min_delta": 0.5, "relative": True}, -4.0, [-6.5], [-6.0, -5.0]),
        ({"mode": "max", "min_delta": 0.5, "relative": True}, -4.0, [-1.5], [-2.0, -3.0]),
        ({"mode": "min", "min_delta": 0.5, "relative": True}, 0.0, [-0.001], [0.0, 0.001]),
        ({"mode": "min", "min_delta": 0.5, "relative": True}, inf, [1e30], [inf, nan]),
        ({"mode": "max", "min_delta": 0.5, "relative": True}, -inf, [-1e30], [-inf, nan]),
    ],
    ids=str,
)
def test_what_is_better_exceeds_the_best_by_more_than_the_smallest_difference(
    options: dict[str, Any], best: float | None, better: list[float], not_better: list[float]
) -> None:
    monitor = Monitor("Mine", "loss", **options)
    values = better + not_better
    assert [value for value in values if monitor.better(value, best)] == better


def test_a_metric_is_required_only_of_those_who_announced_nothing() -> None:
    engine, monitor = make_engine(), Monitor("Mine", "loss", "min")
    with pytest.raises(KeyError, match=r"Mine monitors 'loss'.*Available metrics: none; attach Metrics or Validation"):
        monitor.require(engine)
    engine.state.metrics["accuracy"] = 0.5
    with pytest.raises(KeyError, match=r"Available metrics: accuracy\.\"$"):
        monitor.require(engine)
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: None)
    with pytest.raises(KeyError, match=r"Available metrics: accuracy\. If your function"):
        monitor.require(engine)
    engine.state.metrics.announce("user", ["loss"])
    monitor.require(engine)


def test_a_name_that_is_like_an_announced_one_may_be_written_by_a_function() -> None:
    engine, monitor = make_engine(), Monitor("Mine", "score", "max")
    engine.state.metrics.announce("another", ["scores"])
    with pytest.raises(
        KeyError, match=r"Mine monitors 'score', but no such metric is announced.*did you mean 'scores'"
    ):
        monitor.start(engine)
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(score=1.0))
    monitor.start(engine)


@pytest.mark.parametrize(("name", "severity"), [("loss", "warning"), ("train_loss", "info")])
def test_a_metric_that_is_called_that_of_the_training_is_monitored_on_purpose(name: str, severity: str) -> None:
    model = linear(5, 1)
    validation = Validation(evaluator_of(model), batches(2, seed=1), prefix="val_")
    engine = build(model, Metrics({name: Average()}), validation, EarlyStopping(name, threshold=0.0))
    with pytest.warns(FindingWarning, match="W06") if severity == "warning" else nullcontext():
        engine.run(batches(2), max_epochs=1)
    assert [one.severity for one in engine.findings.of_run().of("W06")] == [severity]


def test_a_metric_of_ones_own_is_monitored_under_its_name_and_not_that_of_a_validation() -> None:
    engine = make_engine()
    metrics, monitor = engine.state.metrics, Monitor("Mine", "loss", "min")
    metrics.announce("validation", ["val_loss"])
    monitor.start(engine)
    metrics["loss"], metrics["val_loss"] = 1.0, 2.0
    assert monitor.new_value(engine) == 1.0


def test_a_metric_of_ones_own_that_comes_after_values_of_a_validation_is_ambiguous() -> None:
    engine = make_engine()
    metrics, monitor = engine.state.metrics, Monitor("Mine", "loss", "min")
    metrics.announce("validation", ["val_loss"])
    monitor.start(engine)
    metrics["val_loss"] = 2.0
    assert monitor.new_value(engine) == 2.0
    metrics["loss"] = 1.0
    with pytest.raises(KeyError, match=r"'loss', which is ambiguous. The handler has read 'val_loss' so far"):
        monitor.new_value(engine)


def test_a_metric_is_monitored_under_either_spelling() -> None:
    engine = make_engine()
    metrics, monitor = engine.state.metrics, Monitor("Mine", "val/loss", "min")
    metrics.announce("validation", ["val_loss"])
    monitor.start(engine)
    metrics["val_loss"] = 2.0
    assert monitor.new_value(engine) == 2.0


def test_a_metric_of_ones_own_is_monitored_under_its_name_after_a_resume() -> None:
    engine = make_engine()
    metrics, monitor, resumed = engine.state.metrics, Monitor("Mine", "loss", "min"), Monitor("Mine", "loss", "min")
    metrics.announce("validation", ["val_loss"])
    for one in (monitor, resumed):
        one.start(engine)  # before the saved metrics are in place
    metrics["loss"], metrics["val_loss"] = 1.0, 2.0
    assert monitor.new_value(engine) == 1.0
    resumed.load_state_dict(monitor.state_dict())
    assert resumed.new_value(engine) is None
    metrics["loss"] = 0.5
    assert resumed.new_value(engine) == 0.5


def test_a_mode_against_the_metrics_own_direction_is_reported_once() -> None:
    engine = build(linear(5, 1), Validation(batches(2, seed=1)), EarlyStopping("val_loss", mode="max"))
    with pytest.warns(FindingWarning, match="W01"):
        engine.run(batches(2), max_epochs=2)
    assert len(engine.findings.of_run().of("W01")) == 1


class Probe(Handler):
    """Measures held-out data."""

    metrics = ("loss",)

    def attached(self, engine: Engine) -> None:
        engine.state.metrics.announce(self.name, ["loss"], {"loss": "min"})

    @on(Events.EPOCH_COMPLETED, phase=Phase.PREPARE)
    def measure(self, engine: Engine) -> None:
        engine.state.metrics["loss"] = 1.0


def test_what_a_handler_of_the_users_measures_is_not_said_to_be_of_the_training() -> None:
    engine = build(linear(5, 1), Probe(), Validation(batches(2, seed=1)), EarlyStopping("loss"))
    engine.run(batches(2), max_epochs=1)
    assert not engine.findings.of_run().of("W06")


def test_a_baseline_from_before_the_first_iteration_is_not_late() -> None:
    engine = build(linear(5, 1), EarlyStopping("score", mode="max", patience=3))
    engine.connect(Events.EPOCH_STARTED(once=1) | Events.EPOCH_COMPLETED, lambda engine: engine.log("score", 1.0))
    engine.run(batches(2), max_epochs=2)
    assert not engine.findings.of_run().of("W41")
