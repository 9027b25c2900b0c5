"""TrackioLogger: what Trackio's database holds in the end."""

from __future__ import annotations

import json
import random
import sqlite3
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from signalfire import Events
from signalfire.handlers import TrackioLogger
from tests.kit import LIMIT, needs, same
from tests.remote import DATA, first_send, go_back_once, killed_and_resumed, rows_of_csv, trainer

needs("trackio", "trackio")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def folder_of_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trackio  # noqa: F401

    folder = tmp_path / "trackio"
    monkeypatch.setenv("TRACKIO_DIR", str(folder))
    for name, module in list(sys.modules.items()):  # those that have read the variable as they were imported
        if name.startswith("trackio"):
            for variable, path in (("TRACKIO_DIR", folder), ("MEDIA_DIR", folder / "media")):
                if hasattr(module, variable):
                    monkeypatch.setattr(module, variable, path)


def query(folder: Path, what: str) -> list[Any]:
    with closing(sqlite3.connect(folder / "trackio" / "digits.db")) as connection:
        return connection.execute(what).fetchall()


def entries(folder: Path, run_id: str) -> list[tuple[str, int, Any]]:
    """Everything that a run has, in the order in which it came."""
    rows = query(folder, "SELECT run_name, step, metrics FROM metrics ORDER BY id")
    return [
        (name, at, value) for run, at, values in rows if run == run_id for name, value in json.loads(values).items()
    ]


def numbers(folder: Path, run_id: str) -> list[tuple[str, int, float]]:
    return [(name, at, float(value)) for name, at, value in entries(folder, run_id) if not isinstance(value, dict)]


def make(folder: Path, **options: Any) -> TrackioLogger:
    return TrackioLogger("digits", folder, every="1it", **options)


def test_the_database_has_the_rows_of_the_csv_logger_value_for_value(tmp_path: Path) -> None:
    random.seed(1)
    logger = make(tmp_path)
    engine = trainer(logger, folder=tmp_path)
    engine.log.hyperparameters(lr=0.1)

    def log(engine: Any) -> None:
        engine.log("infinite", float("inf"))
        engine.log.image("image", torch.zeros(3, 2, 2))
        engine.log.text("text", "hello")
        engine.log.histogram("histogram", [1.0, 2.0])

    engine.connect(Events.ITERATION_COMPLETED(once=3), log)
    engine.run(DATA, max_epochs=2)
    drawn = random.random()
    assert numbers(tmp_path, logger.remote_id) == rows_of_csv(tmp_path / "log.csv")
    shown = {name: (at, value) for name, at, value in entries(tmp_path, logger.remote_id) if isinstance(value, dict)}
    assert shown["train/text"] == (3, {"_type": "trackio.markdown", "_value": "hello"})
    assert sum(shown["train/histogram"][1]["values"]) == 2
    assert shown["train/image"][1]["_type"] == "trackio.image"
    ((config,),) = query(tmp_path, "SELECT config FROM configs")
    assert json.loads(config)["lr"] == 0.1
    assert query(tmp_path, "SELECT title, text, level FROM alerts") == [("FINISHED", None, "info")]
    random.seed(1)
    alone = trainer()
    alone.run(DATA, max_epochs=2)
    assert drawn == random.random()
    assert same(engine.model, alone.model)


@pytest.mark.moderate
def test_how_a_run_ends_is_an_alert(tmp_path: Path) -> None:
    def end(do: Any) -> Any:
        logger = make(tmp_path)
        engine = trainer(logger)
        engine.connect(Events.ITERATION_COMPLETED(once=3), do)
        with suppress(ZeroDivisionError, KeyboardInterrupt):
            engine.run(DATA, max_epochs=1)
        return query(tmp_path, f"SELECT title, text FROM alerts WHERE run_name = '{logger.remote_id}'")

    def interrupt(engine: Any) -> None:
        raise KeyboardInterrupt

    assert end(lambda engine: 1 / 0) == [("FAILED", "ZeroDivisionError: division by zero")]
    assert end(interrupt) == [("KILLED", None)]
    assert end(lambda engine: engine.boundary.preempt("SIGTERM")) == []


@pytest.mark.moderate
def test_a_run_that_takes_another_way_continues_as_a_new_run(tmp_path: Path) -> None:
    logger = make(tmp_path, run_id="mine")
    engine = trainer(logger, folder=tmp_path)
    go_back_once(engine, at=8, to=3)
    sent = first_send(logger, of=4)
    engine.connect(Events.ITERATION_COMPLETED(once=7), lambda engine: engine.log("waited", sent.wait(LIMIT)))
    engine.connect(Events.CHECKPOINT_LOADED, lambda engine: engine.updates[0].optimizer.param_groups[0].update(lr=0.01))
    engine.run(DATA, max_epochs=2)
    assert logger.remote_id == "mine-1"
    assert sorted(numbers(tmp_path, "mine-1")) == sorted(rows_of_csv(tmp_path / "log.csv"))
    why = (
        "the run went back to iteration 3 and logged different values from iteration 4 onward, "
        "so it continues as mine-1"
    )
    assert query(tmp_path, "SELECT title, text FROM alerts WHERE run_name = 'mine'") == [("KILLED", why)]


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_loses_and_doubles_nothing(tmp_path: Path) -> None:
    run_id = killed_and_resumed("trackio", tmp_path, [5, 14, 9, 22])
    with closing(sqlite3.connect(tmp_path / "trackio" / "x.db")) as connection:
        rows = connection.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert {run for run, *_ in rows} == {run_id}
    found = [(name, at, value) for _, at, values in rows for name, value in json.loads(values).items()]
    assert found == rows_of_csv(tmp_path / "log.csv")
