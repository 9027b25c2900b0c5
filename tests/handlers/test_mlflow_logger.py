"""MLflowLogger: what MLflow's database holds in the end, over its own client."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from signalfire import Events, Phase
from signalfire.handlers import MLflowLogger
from tests.kit import LIMIT, needs, same
from tests.remote import DATA, first_send, go_back_once, killed_and_resumed, rows_of_csv, trainer

needs("mlflow", "mlflow", "sqlalchemy", "alembic")

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with its tables, which take seconds to make."""
    from mlflow import MlflowClient

    folder = tmp_path_factory.mktemp("mlflow")
    MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()
    return folder / "mlflow.db"


@pytest.fixture
def client(empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from mlflow import MlflowClient

    shutil.copy(empty_database, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)  # where MLflow keeps artifacts
    return MlflowClient(uri(tmp_path))


def uri(folder: Path) -> str:
    return f"sqlite:///{folder}/mlflow.db"


def make(folder: Path, **options: Any) -> MLflowLogger:
    return MLflowLogger("digits", folder, uri=uri(folder), every="1it", **options)


def found(client: Any, run_id: str) -> Any:
    """MLflow's run of our id, of which there is one."""
    (experiment,) = [one for one in client.search_experiments() if one.name != "Default"]
    runs = client.search_runs([experiment.experiment_id])
    (run,) = [one for one in runs if one.data.tags["signalfire.run"] == run_id]
    return run


def numbers(client: Any, run_id: str) -> list[tuple[str, int, float]]:
    run = found(client, run_id)
    points = [one for name in run.data.metrics for one in client.get_metric_history(run.info.run_id, name)]
    return sorted((one.key, one.step, one.value) for one in points)


@pytest.mark.moderate
def test_the_database_has_the_rows_of_the_csv_logger_value_for_value(tmp_path: Path, client: Any) -> None:
    random.seed(1)
    np.random.seed(1)
    logger = make(tmp_path, title="first")
    engine = trainer(logger, folder=tmp_path)
    engine.log.hyperparameters({f"a{i}": i for i in range(120)}, text="x" * 7000)

    def log(engine: Any) -> None:
        engine.log("nan", float("nan"))
        engine.log("odd $ name", 1.0)
        engine.log.image("image", torch.zeros(3, 2, 2))
        engine.log.text("text", "hello")
        engine.log.histogram("histogram", [1.0, 2.0])

    engine.connect(Events.ITERATION_COMPLETED(once=3), log)
    engine.run(DATA, max_epochs=2)
    drawn = random.random(), np.random.rand(), torch.rand(1)
    rows = sorted((name.replace("$", "_"), at, value) for name, at, value in rows_of_csv(tmp_path / "log.csv"))
    assert [repr(row) for row in numbers(client, logger.remote_id)] == [repr(row) for row in rows]
    run = found(client, logger.remote_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert run.data.params["a119"] == "119"
    assert run.data.params["text"] == "x" * 6000
    assert len(run.data.params) == 121

    def artifact(path: str) -> Path:
        return Path(client.download_artifacts(run.info.run_id, path))

    assert artifact("images/train/image/3.png").read_bytes().startswith(b"\x89PNG")
    assert artifact("texts/train/text/3.md").read_text() == "hello"
    assert sum(json.loads(artifact("histograms/train/histogram/3.json").read_text())["counts"]) == 2
    random.seed(1)
    np.random.seed(1)
    alone = trainer()
    alone.run(DATA, max_epochs=2)
    assert drawn == (random.random(), np.random.rand(), torch.rand(1))
    assert same(engine.model, alone.model)


@pytest.mark.slow
def test_how_a_run_ends_is_its_status(tmp_path: Path, client: Any) -> None:
    def end(do: Any) -> Any:
        logger = make(tmp_path)
        engine = trainer(logger)
        engine.connect(Events.ITERATION_COMPLETED(once=3), do)
        with suppress(ZeroDivisionError, KeyboardInterrupt):
            engine.run(DATA, max_epochs=1)
        run = found(client, logger.remote_id)
        return run.info.status, run.data.tags.get("error")

    def interrupt(engine: Any) -> None:
        raise KeyboardInterrupt

    assert end(lambda engine: 1 / 0) == ("FAILED", "ZeroDivisionError: division by zero")
    assert end(interrupt) == ("KILLED", None)
    assert end(lambda engine: engine.boundary.preempt("SIGTERM")) == ("RUNNING", None)


@pytest.mark.slow
def test_a_run_that_takes_another_way_continues_as_a_new_run(tmp_path: Path, client: Any) -> None:
    logger = make(tmp_path, run_id="mine")
    engine = trainer(logger, folder=tmp_path)
    go_back_once(engine, at=8, to=3)
    sent = first_send(logger, of=4)
    engine.connect(Events.ITERATION_COMPLETED(once=7), lambda engine: engine.log("waited", sent.wait(LIMIT)))
    engine.connect(Events.CHECKPOINT_LOADED, lambda engine: engine.updates[0].optimizer.param_groups[0].update(lr=0.01))
    engine.run(DATA, max_epochs=2)
    assert logger.remote_id == "mine-1"
    assert numbers(client, "mine-1") == sorted(rows_of_csv(tmp_path / "log.csv"))
    old = found(client, "mine")
    why = (
        "the run went back to iteration 3 and logged different values from iteration 4 onward, "
        "so it continues as mine-1"
    )
    assert (old.info.status, old.data.tags["error"]) == ("KILLED", why)


@pytest.mark.slow
def test_a_resumed_run_continues_the_run_of_mlflow_and_a_param_that_changed_is_a_tag(
    tmp_path: Path, client: Any
) -> None:
    states: list[Any] = []
    logger = make(tmp_path)
    engine = trainer(logger)
    engine.log.hyperparameters(lr=0.1)
    engine.connect(
        Events.EPOCH_COMPLETED(once=1), lambda engine: states.append(engine.state_dict()), phase=Phase.PERSIST
    )
    engine.run(DATA, max_epochs=2)
    again = make(tmp_path)
    engine = trainer(again, folder=tmp_path)
    engine.log.hyperparameters(lr=0.2)
    engine.load_state_dict(states[0])
    engine.run(DATA, max_epochs=3)
    run = found(client, again.remote_id)
    assert again.remote_id == logger.remote_id
    assert (run.data.params["lr"], run.data.tags["changed/lr"]) == ("0.1", "0.2")
    steps = [at for name, at, _ in numbers(client, again.remote_id) if name == "train/loss"]
    assert steps == list(range(1, 19))


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_loses_and_doubles_nothing(tmp_path: Path, client: Any) -> None:
    run_id = killed_and_resumed("mlflow", tmp_path, [5, 14, 9, 22])
    assert numbers(client, run_id) == sorted(rows_of_csv(tmp_path / "log.csv"))
