"""WandbLogger, offline: what W&B's files hold in the end, read with W&B's own records."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from signalfire import Events
from signalfire.handlers import WandbLogger
from tests.kit import LIMIT, needs, same
from tests.remote import DATA, first_send, go_back_once, killed_and_resumed, rows_of_csv, trainer

needs("wandb", "wandb")

import wandb  # noqa: E402

from signalfire.handlers.wandb_logger import read_history, read_records  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def parts(folder: Path, run_id: str) -> list[Path]:
    return sorted(folder.glob(f"wandb/offline-run-*-{run_id}*/run-{run_id}.wandb"))


def numbers(folder: Path, run_id: str) -> list[tuple[str, int, float]]:
    rows = [row for part in parts(folder, run_id) for row in read_history(part)]
    return [
        (name, row["step"], value)
        for row in rows
        for name, value in row.items()
        if name != "step" and value is not None
    ]


def records(folder: Path, run_id: str, kind: str) -> list[Any]:
    found = [record for part in parts(folder, run_id) for record in read_records(part)]
    return [getattr(record, kind) for record in found if record.WhichOneof("record_type") == kind]


def make(folder: Path, **options: Any) -> WandbLogger:
    return WandbLogger("digits", folder, mode="offline", every="1it", **options)


@pytest.mark.moderate
def test_the_files_have_the_rows_of_the_csv_logger_value_for_value(tmp_path: Path) -> None:
    random.seed(1)
    np.random.seed(1)
    logger = make(tmp_path)
    engine = trainer(logger, folder=tmp_path)
    engine.log.hyperparameters(lr=0.1)

    def log(engine: Any) -> None:
        engine.log("infinite", float("inf"))
        engine.log.image("image", torch.zeros(3, 2, 2))
        engine.log.text("text", "a < b")
        engine.log.histogram("histogram", [1.0, 2.0])

    engine.connect(Events.ITERATION_COMPLETED(once=3), log)
    engine.run(DATA, max_epochs=2)
    drawn = random.random(), np.random.rand(), torch.rand(1)
    assert sorted(numbers(tmp_path, logger.remote_id)) == sorted(rows_of_csv(tmp_path / "log.csv"))
    shown = {item.nested_key[0] for row in records(tmp_path, logger.remote_id, "history") for item in row.item}
    assert {"train/image", "train/text", "train/histogram"} <= shown
    (text,) = tmp_path.rglob("*.html")
    assert text.read_text() == "<pre>a &lt; b</pre>"
    assert len(list(tmp_path.rglob("media/images/**/*.png"))) == 1
    config = {
        item.key: item.value_json for run in records(tmp_path, logger.remote_id, "run") for item in run.config.update
    }
    assert config["lr"] == "0.1"
    metrics = {one.name or one.glob_name: one.step_metric for one in records(tmp_path, logger.remote_id, "metric")}
    assert metrics == {"step": "", "*": "step"}
    assert [one.exit_code for one in records(tmp_path, logger.remote_id, "exit")] == [0]
    random.seed(1)
    np.random.seed(1)
    alone = trainer()
    alone.run(DATA, max_epochs=2)
    assert drawn == (random.random(), np.random.rand(), torch.rand(1))
    assert same(engine.model, alone.model)


@pytest.mark.slow
def test_how_a_run_ends_is_its_exit_code(tmp_path: Path) -> None:
    def end(do: Any) -> Any:
        logger = make(tmp_path)
        engine = trainer(logger)
        engine.connect(Events.ITERATION_COMPLETED(once=3), do)
        with suppress(ZeroDivisionError, KeyboardInterrupt):
            engine.run(DATA, max_epochs=1)
        (code,) = [one.exit_code for one in records(tmp_path, logger.remote_id, "exit")]
        updates = [item for one in records(tmp_path, logger.remote_id, "summary") for item in one.update]
        errors = [item.value_json for item in updates if item.key == "error"]
        return code, errors, len(records(tmp_path, logger.remote_id, "preempting"))

    def interrupt(engine: Any) -> None:
        raise KeyboardInterrupt

    assert end(lambda engine: 1 / 0) == (1, ['"ZeroDivisionError: division by zero"'], 0)
    assert end(interrupt) == (255, [], 0)
    assert end(lambda engine: engine.boundary.preempt("SIGTERM")) == (1, [], 1)


@pytest.mark.slow
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
    (text,) = [
        item.value_json for one in records(tmp_path, "mine", "summary") for item in one.update if item.key == "error"
    ]
    assert text == (
        '"the run went back to iteration 3 and logged different values from iteration 4 onward, '
        'so it continues as mine-1"'
    )


@pytest.mark.slow
def test_a_run_that_failed_to_begin_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.sdk import wandb_init

    wait = wandb_init.wait_with_progress
    failed: list[bool] = []

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        if not failed:
            failed.append(True)
            raise OSError("no answer")
        return wait(*args, **kwargs)

    monkeypatch.setattr(wandb_init, "wait_with_progress", fail_once)
    logger = make(tmp_path)
    engine = trainer(logger, folder=tmp_path)
    sent = first_send(logger)
    engine.connect(Events.ITERATION_COMPLETED(once=2), lambda engine: engine.log("waited", sent.wait(LIMIT)))
    with pytest.warns(UserWarning, match="cannot be sent: OSError: no answer; training continues"):
        engine.run(DATA, max_epochs=2)
    assert sorted(numbers(tmp_path, logger.remote_id)) == sorted(rows_of_csv(tmp_path / "log.csv"))


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False], ids=["the parent's service", "its own service"])
def test_a_run_that_is_killed_and_resumed_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    wandb.setup()
    assert "WANDB_SERVICE" in os.environ  # by which the processes that a process starts share its service
    if not shared:
        monkeypatch.delenv("WANDB_SERVICE")
    run_id = killed_and_resumed("wandb", tmp_path, [5, 14, 9, 22])
    assert len(parts(tmp_path, run_id)) >= 5  # one that W&B failed to begin may be there too
    assert sorted(numbers(tmp_path, run_id)) == sorted(rows_of_csv(tmp_path / "log.csv"))
