"""History: every new value once, with its epoch and iteration; the table and the plot."""

from __future__ import annotations

import itertools
import math
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from signalfire import Engine, Events
from signalfire.handlers import Average, Checkpoint, History, Metrics, Validation
from tests.kit import build, evaluator_of

BATCHES = [(torch.full((2, 3), float(n)), torch.ones(2, 1)) for n in range(4)]


def engine_of(*handlers: Any, model: nn.Module | None = None) -> Engine:
    return build(model or nn.Linear(3, 1), *handlers, optimizer=partial(torch.optim.SGD, lr=0.01))


def scored(history: History, epochs: int = 3) -> Engine:
    """A run with a score in every epoch and an odd one in every second."""
    engine = engine_of(history)
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(score=10.0 * engine.state.epoch))
    engine.connect(Events.EPOCH_COMPLETED(every=2), lambda engine: engine.state.metrics.update(odd=torch.tensor(0.5)))
    engine.run(BATCHES, max_epochs=epochs)
    return engine


def test_every_new_value_is_recorded_once_with_its_place() -> None:
    history = History()
    scored(history)
    assert history.records == {"score": [(1, 4, 10.0), (2, 8, 20.0), (3, 12, 30.0)], "odd": [(2, 8, 0.5)]}
    assert history["score"] == [10.0, 20.0, 30.0]
    assert history.latest == {"score": 30.0, "odd": 0.5}
    assert sorted(history.names) == ["odd", "score"]
    assert not isinstance(history["odd"][0], torch.Tensor)


def test_the_same_number_written_again_is_recorded_again() -> None:
    history = History()
    engine = engine_of(history)
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(score=1.0))
    engine.run(BATCHES, max_epochs=3)
    assert history["score"] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("history_first", [True, False])
def test_validations_are_recorded_where_they_happen(history_first: bool) -> None:
    model = nn.Linear(3, 1)
    evaluator = evaluator_of(model)
    history = History()
    validation = Validation(evaluator, BATCHES, every="3it", at_start=True)
    handlers: list[Any] = [history, validation, Metrics(train_loss=Average())]
    engine = engine_of(*(handlers if history_first else reversed(handlers)), model=model)
    engine.run(BATCHES, max_epochs=2)
    places = {name: [record[:2] for record in records] for name, records in history.records.items()}
    assert places == {"loss": [(1, 0), (1, 3), (2, 6)], "train_loss": [(1, 4), (2, 8)]}
    assert history["loss"][-1] == engine.state.metrics["loss"]


def test_a_run_that_continues_goes_on_with_its_records() -> None:
    history = History()
    engine = scored(history)
    engine.run(BATCHES, max_epochs=4)
    assert history["score"] == [10.0, 20.0, 30.0, 40.0]
    assert history["odd"] == [0.5, 0.5]


def test_the_table_has_a_row_for_each_epoch() -> None:
    history = History()
    assert history.table() == "epoch"
    scored(history)
    lines = [line.split() for line in history.table().splitlines()]
    assert sorted(lines[0]) == ["epoch", "odd", "score"]
    column = lines[0].index("score")
    assert [line[0] for line in lines[1:]] == ["1", "2", "3"]
    assert lines[2][column] == "20"
    assert len(lines[1]) == 2  # nothing odd in epoch 1
    assert len({len(line) for line in history.table().splitlines()}) == 1


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    history = History()
    with pytest.raises(ValueError, match="nothing was recorded"):
        history.plot(tmp_path / "none.png")
    scored(history)
    history.plot(tmp_path / "all.png")
    history.plot(tmp_path / "one.png", "score,odd")
    for name in ("all.png", "one.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(KeyError, match="loss"):
        history.plot(tmp_path / "missing.png", "loss")


def test_a_metric_that_was_not_recorded_is_an_error_that_names_those_there_are() -> None:
    history = History()
    with pytest.raises(KeyError, match="none"):
        history["loss"]
    scored(history)
    with pytest.raises(KeyError, match=r"'loss'.*score"):
        history["loss"]


def test_a_metric_that_is_not_one_number_is_left_out() -> None:
    history = History()
    engine = engine_of(history)
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(matrix=torch.ones(2, 2), one=1))
    engine.run(BATCHES, max_epochs=1)
    assert "matrix" not in history.names
    assert history["one"] == [1.0]


def test_nan_is_recorded_as_it_is() -> None:
    history = History()
    engine = engine_of(history)
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(score=math.nan))
    engine.run(BATCHES, max_epochs=1)
    assert math.isnan(history["score"][0])


def test_a_saved_run_has_the_whole_history(tmp_path: Path) -> None:
    def build(folder: Path) -> tuple[Engine, History]:
        history = History()
        engine = engine_of(history, Metrics(loss=Average()), Checkpoint(folder, every="6it", keep=9))
        return engine, history

    torch.manual_seed(0)
    whole, history = build(tmp_path / "whole")
    whole.run(BATCHES, max_epochs=4)
    for path in sorted((tmp_path / "whole").iterdir()):
        other, continued = build(tmp_path / "other")
        other.load_state_dict(Checkpoint.load(path))
        other.run(BATCHES, max_epochs=4)
        assert continued.records == history.records, path.name


def measured(keep: int | None, iterations: int, folder: Path | None = None) -> Engine:
    """A run with a value in each iteration."""
    engine = engine_of(History(keep=keep), *([] if folder is None else [Checkpoint(folder, every="7it", keep=99)]))
    engine.connect(
        Events.ITERATION_COMPLETED, lambda engine: engine.state.metrics.update(score=float(engine.state.iteration))
    )
    if folder is None or not folder.exists():
        engine.run(BATCHES, max_iters=iterations)
    return engine


def test_the_older_half_is_thinned_out_and_the_newest_is_complete() -> None:
    whole, limited = (measured(keep, 100).find(History) for keep in (None, 16))
    assert whole["score"] == list(map(float, range(1, 101)))
    assert whole.dropped == {}
    values = limited["score"]
    assert 8 < len(values) <= 16
    assert values[0] == 1.0
    assert values[-8:] == list(map(float, range(93, 101)))
    gaps = [after - before for before, after in itertools.pairwise(values)]
    assert gaps == sorted(gaps, reverse=True), "the older, the fewer are left"
    assert limited.dropped == {"score": 100 - len(values)}
    assert all(record in whole.records["score"] for record in limited.records["score"])


@pytest.mark.slow
def test_a_resumed_run_thins_out_at_the_same_places(tmp_path: Path) -> None:
    whole = measured(8, 42, tmp_path / "runs").find(History)
    for path in sorted((tmp_path / "runs").iterdir()):
        engine = measured(8, 42, tmp_path / "runs")
        engine.load_state_dict(Checkpoint.load(path))
        if path.name.endswith("42"):
            continue
        engine.run(BATCHES, max_iters=42)
        assert engine.find(History).state_dict() == whole.state_dict()


def test_a_longer_history_that_is_loaded_is_thinned_out_at_once() -> None:
    whole, limited = measured(None, 40).find(History), History(keep=4)
    limited.load_state_dict(whole.state_dict())
    assert len(limited["score"]) <= 4
    assert limited["score"][0] == 1.0
    assert limited["score"][-2:] == [39.0, 40.0]


@pytest.mark.slow
def test_the_state_of_a_long_run_is_small() -> None:
    history = measured(200, 4_000).find(History)
    assert len(pickle.dumps(history.state_dict())) < 6_000
    assert len(history["score"]) + history.dropped["score"] == 4_000


def test_reset_forgets() -> None:
    history = History()
    engine = scored(history)
    engine.reset()
    assert history.records == {}
    engine.run(BATCHES, max_epochs=1)
    assert history["score"] == [10.0]


def test_switched_off_nothing_is_recorded() -> None:
    history = History()
    engine = engine_of(history, Metrics(loss=Average()))
    with engine.without("history"):
        engine.run(BATCHES, max_epochs=1)
    assert history.records == {}


def test_validations_at_the_start_are_recorded_in_their_order() -> None:
    model = nn.Linear(3, 1)
    evaluator = evaluator_of(model)
    history = History()
    engine = engine_of(Validation(evaluator, BATCHES, at_start=True), history, model=model)
    engine.run(BATCHES, max_epochs=2)
    assert [place[:2] for place in history.records["loss"]] == [(1, 0), (1, 4), (2, 8)]
    assert history["loss"][0] > history["loss"][-1]
