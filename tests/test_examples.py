"""Every example runs, and the main one reaches what it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from signalfire.handlers import Checkpoint

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(script: str, *arguments: str, folder: Path) -> str:
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ | {"MPLBACKEND": "agg"})
    assert result.returncode == 0, result.stderr
    return result.stdout


def check_main(folder: Path) -> None:
    output = run("main.py", "--steps", "3000", folder=folder)  # half of the paper's steps
    row = re.search(r"^cnn +94 +([\d.]+) +([\d.]+)$", output, re.MULTILINE)
    assert row is not None, output
    assert float(row[1]) >= 90
    left = folder / "runs" / "mnist1d-cnn"
    (best,) = left.glob("best-*.pt")
    assert Checkpoint.load(best)["engine"]["metrics"]["values"]["accuracy"] == pytest.approx(
        float(row[2]) / 100, abs=5e-4
    )
    events = EventAccumulator(str(left))
    events.Reload()
    assert [event.step for event in events.Scalars("metrics/accuracy")] == list(range(1000, 12001, 1000))
    assert (left / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


CHECKS: dict[str, Callable[[Path], None]] = {"main.py": check_main}


@pytest.mark.parametrize("script", CHECKS)
def test_an_example_runs_and_reaches_what_it_promises(script: str, tmp_path: Path) -> None:
    CHECKS[script](tmp_path)


def test_every_example_is_checked() -> None:
    assert {file.name for file in EXAMPLES.glob("*.py")} == set(CHECKS)


@pytest.mark.parametrize("model", ["logistic", "mlp", "gru"])
def test_the_main_example_trains_every_model_and_does_without_handlers(model: str, tmp_path: Path) -> None:
    without = "gradient_accumulation,gradient_clipping,best,early_stopping,progress_bar"
    output = run("main.py", "--model", model, "--steps", "100", "--without", without, folder=tmp_path)
    assert "100 optimizer steps" in output
    assert not list(tmp_path.glob("runs/*/*.pt"))
    assert list(tmp_path.glob("runs/*/events*"))


def test_the_main_example_lists_its_wiring_without_what_is_off(tmp_path: Path) -> None:
    wiring = run("main.py", "--list", "--without", "gradient_clipping", folder=tmp_path)
    assert "GET_BATCH_COMPLETED\n  PREPARE   device_transfer.place_batch" in wiring
    assert "gradient_clipping.clip" not in wiring
    assert "disabled: gradient_clipping" in wiring
    assert not (tmp_path / "runs").exists(), "listing writes nothing"


def test_the_main_example_names_the_handlers_there_are_if_one_is_misspelt(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "main.py"), "--without", "clipping"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2
    assert "gradient_clipping" in result.stderr
