"""The state of a run: metrics that are counted as they are written, bounds that make sense, and the position."""

from __future__ import annotations

import copy
import io
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from signalfire import Engine, Events, Update
from signalfire.core.state import MetricStore, as_number, as_numbers
from signalfire.testing import trace
from tests import kit
from tests.kit import build, evaluator_of, linear

Batch = tuple[Tensor, Tensor]


def make_data(batches: int = 3) -> list[Batch]:
    return kit.batches(batches, 3, 2)


def make_engine() -> Engine:
    return build(linear(3, 2))


# ---- metrics --------------------------------------------------------------------------------------------------------


def test_every_way_to_write_a_metric_is_counted() -> None:
    metrics = MetricStore()
    metrics["a"] = 1.0
    metrics.update({"a": 2.0}, b=3.0)
    metrics.update([("b", 3.0)])
    metrics |= {"c": 4.0}
    assert metrics.setdefault("d", 5.0) == 5.0
    assert metrics.setdefault("a", 6.0) == 2.0
    assert metrics == {"a": 2.0, "b": 3.0, "c": 4.0, "d": 5.0}
    assert metrics.serials == {"a": 2, "b": 2, "c": 1, "d": 1}
    assert metrics.serial == 6


def test_what_was_written_since_is_sorted_also_where_the_value_is_the_same() -> None:
    metrics = MetricStore()
    metrics.update(z=1.0, loss=2.0, kept=3.0)
    seen = dict(metrics.serials)
    assert metrics.new_since(seen) == {}
    matrix = torch.eye(2)
    metrics.update(z=1.0, matrix=matrix, loss=torch.tensor([0.5]))
    assert list(metrics.new_since(seen)) == ["loss", "matrix", "z"]
    assert torch.equal(metrics.new_since(seen)["matrix"], matrix)
    assert metrics.numbers_since(seen) == {"loss": 0.5, "z": 1.0}


def test_a_metric_has_one_writer_until_that_one_withdraws() -> None:
    metrics = MetricStore()
    metrics.announce("validation", ["loss", "accuracy"])
    metrics.announce("validation", ["loss"])
    with pytest.raises(ValueError, match="both 'validation' and 'test' write the metric 'loss'; rename one, as with"):
        metrics.announce("test", ["error", "loss"])
    metrics.withdraw("validation")
    metrics.announce("test", ["loss"])
    assert metrics.owners == {"error": "test", "loss": "test"}
    with pytest.raises(ValueError, match="'test' also writes the metric 'val/loss', the same metric as 'val_loss'"):
        metrics.announce("test", ["val_loss", "val/loss"])


def test_its_state_is_put_back_and_nothing_in_it_is_new() -> None:
    metrics, other = MetricStore(), MetricStore()
    metrics.update(b=1.0, a=2.0)
    metrics["a"] = 3.0
    other.update(c=9.0)
    other.load_state_dict(metrics.state_dict())
    assert (other, other.serials, other.serial) == ({"a": 3.0, "b": 1.0}, {"a": 2, "b": 1}, 3)
    assert other.new_since(metrics.serials) == {}
    other["a"] = 4.0
    assert (metrics["a"], other.new_since(metrics.serials)) == (3.0, {"a": 4.0})


def test_numbers_of_numpy_are_those_of_python_and_load_from_a_file() -> None:
    metrics, file = MetricStore(), io.BytesIO()
    metrics.update(f1=np.mean([1.0, 2.0]), n=np.int64(3), flag=np.bool_(True))
    assert {type(value) for value in metrics.values()} == {float, int, bool}
    torch.save(metrics.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["values"] == {"f1": 1.5, "n": 3, "flag": True}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_is_a_plain_dict_without_writers(copied: Any) -> None:
    metrics = MetricStore()
    metrics.running["loss"] = lambda: 0.5  # which could be copied nowhere
    metrics["loss"] = 1.0
    found = copied(metrics)
    assert type(found) is dict
    assert found == {"loss": 1.0}


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3.0), (True, 1.0), (torch.tensor([[2.0]]), 2.0), (np.float32(0.5), 0.5), ("0.25", 0.25),
        (torch.ones(2), None), (np.ones(2), None), ("good", None), (None, None), ({}, None), (1 + 2j, None),
    ],
    ids=str,
)  # fmt: skip
def test_a_number_is_what_a_float_can_be_made_of(value: Any, number: float | None) -> None:
    assert as_number(value) == number


def test_numbers_are_those_of_each_value_by_name() -> None:
    values = {
        "loss": torch.tensor([0.1]),
        "matrix": torch.ones(2),
        "accuracy": 0.5,
        "count": np.int64(7),
        "text": "good",
    }
    numbers = as_numbers(values)
    assert list(numbers.items()) == [("accuracy", 0.5), ("count", 7.0), ("loss", float(torch.tensor(0.1)))]


# ---- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({}, "max_epochs"),
        ({"max_epochs": 0}, "max_epochs=0"),
        ({"max_epochs": True}, "max_epochs=True"),
        ({"max_iters": 1.5}, "max_iters=1.5"),
        ({"max_epochs": 2, "min_epochs": 3}, "min_epochs=3"),
        ({"max_epochs": 2, "min_iters": -1}, "min_iters=-1"),
        ({"max_time": "5ep"}, "run(max_time='5ep'): 5ep is not a wall-clock time"),
        ({"max_time": "soon"}, "run(max_time='soon'): expected a wall-clock time with its unit, such as '90s'"),
        ({"max_time": "0s"}, "run(max_time='0s'): expected a wall-clock time"),
        ({"max_epochs": 1, "epoch_length": 0}, "epoch_length=0"),
    ],
)
def test_bounds_that_make_no_sense_are_refused_before_anything_runs(bounds: dict[str, Any], message: str) -> None:
    engine = make_engine()
    seen = trace(engine)
    with pytest.raises(ValueError, match=re.escape(message)):
        engine.run(make_data(), **bounds)
    assert seen == []


def test_without_data_an_epoch_length_or_max_iters_is_needed() -> None:
    engine = Engine(Update.from_function(lambda engine, batch: None))
    with pytest.raises(ValueError, match="epoch_length"):
        engine.run()
    assert engine.run(epoch_length=5, max_epochs=2).iteration == 10
    assert engine.run(max_iters=7).iteration == 7


def test_a_time_without_a_unit_is_refused() -> None:
    with pytest.raises(TypeError, match=r"run\(max_time=5\): expected a wall-clock time with its unit"):
        make_engine().run(make_data(), max_time=5)


def test_an_engine_that_evaluates_makes_one_epoch_unless_it_is_given_bounds_and_no_steps() -> None:
    evaluator = evaluator_of(linear(3, 2))
    assert evaluator.run(make_data(3), max_iters=2).iteration == 2
    assert evaluator.run(make_data(3)).iteration == 3
    assert evaluator.state.max_epochs == 1
    with pytest.raises(ValueError, match=r"run\(max_steps=2\): an engine that only evaluates runs no optimizer steps"):
        evaluator.run(make_data(3), max_steps=2)


def test_the_least_may_be_as_much_as_the_most() -> None:
    state = make_engine().run(make_data(), max_epochs=2, min_epochs=2, max_iters=3, min_iters=3, max_time="1h")
    assert (state.min_epochs, state.min_iters, state.max_seconds, state.iteration) == (2, 3, 3600.0, 3)


# ---- position -------------------------------------------------------------------------------------------------------


def test_iterations_are_counted_over_all_epochs_and_within_each() -> None:
    engine, seen = make_engine(), list[tuple[int, ...]]()

    @engine.on(Events.UPDATE_STARTED)
    def look(engine: Engine) -> None:
        state = engine.state
        seen.append((state.epoch, state.iteration, state.epoch_iteration, state.completed))

    engine.run(make_data(2), max_epochs=2)
    assert seen == [(1, 1, 1, 0), (1, 2, 2, 1), (2, 3, 1, 2), (2, 4, 2, 3)]


def test_its_position_is_put_back_without_bounds_and_metrics() -> None:
    engine, other = make_engine(), make_engine()
    engine.state.metrics["loss"] = 1.0
    engine.run(make_data(3), max_iters=5)
    other.state.load_state_dict(engine.state.state_dict())
    state = other.state
    assert (state.epoch, state.iteration, state.epoch_iteration, state.completed) == (2, 5, 2, 5)
    assert (state.epoch_open, state.max_iters, state.metrics) == (True, None, {})
    assert repr(engine.state) == "State(epoch=2, iteration=5, metrics={loss=1.0})"
    engine.state.reset()
    assert repr(engine.state) == "State(epoch=0, iteration=0, metrics={})"
    assert engine.state.metrics.serials == {}


def test_finding_the_other_spelling_does_not_search_through_all_names() -> None:
    class Counted(str):
        replaced = 0

        def replace(self, *arguments: Any) -> str:
            Counted.replaced += 1
            return super().replace(*arguments)

    metrics = MetricStore()
    names = [Counted(f"norm/layer_{place}") for place in range(100)]
    metrics.announce("norms", names)
    for name in names:
        metrics[name] = 1.0
    assert Counted.replaced <= 300
    assert metrics.under("norm_layer/7") == "norm/layer_7"
    metrics.withdraw("norms")
    metrics.clear()
    assert metrics.under("norm_layer/7") == "norm_layer/7"


def test_both_spellings_of_a_metric_are_found_in_every_way() -> None:
    metrics = MetricStore()
    metrics["val_loss"] = 1.0
    assert (metrics["val/loss"], metrics.get("val/loss"), metrics.setdefault("val/loss", 2.0)) == (1.0, 1.0, 1.0)
    assert "val/loss" in metrics
    assert "val/los" not in metrics
    assert metrics.get("val/los", 3.0) == 3.0
    assert 3 not in metrics  # type: ignore[comparison-overlap]


def test_metrics_are_loaded_under_the_names_that_they_have_now() -> None:
    saved, loaded = MetricStore(), MetricStore()
    saved["accuracy"], saved["loss"] = 0.5, 2.0
    saved.evaluated.add("loss")
    loaded.announce("validation", ["val_accuracy", "val_loss"])
    loaded.load_state_dict(saved.state_dict(), {"loss": "val_loss"})
    assert loaded == {"accuracy": 0.5, "val_loss": 2.0}
    assert loaded.evaluated == {"val_loss"}
    assert loaded.serials == {"accuracy": 1, "val_loss": 1}
