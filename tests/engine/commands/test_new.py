"""``python -m signalfire new``: the project that it writes works as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from signalfire.__main__ import main
from tests.kit import finished
from tests.processes import run_program

FILES = ["README.md", "loss_spikes.py", "pyproject.toml", "study.py", "test_loss_spikes.py", "train.py"]


def test_a_project_is_written_under_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "digits"
    assert main(["new", str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert 'name = "digits"' in (folder / "pyproject.toml").read_text()
    assert not [path.name for path in folder.iterdir() if "my_project" in path.read_text()]
    printed = capsys.readouterr().out
    assert all(str(folder / name) in printed for name in FILES)


@pytest.mark.parametrize("name", ["my-project", "class", "1st", "_x", "x_", "ünïcode", "x\n"])
def test_a_name_that_python_does_not_take_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", str(tmp_path / name)]) == 2
    assert f"{name!r} is not a valid name for a Python package; use ASCII" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["torch", "Torch", "numpy", "signalfire", "train", "test_loss_spikes", "pytest"])
def test_a_name_that_would_hide_a_module_that_is_needed_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", str(tmp_path / name)]) == 2
    assert f"{name!r} is the name of a package or module that the project needs" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


def test_what_to_do_next_can_be_pasted_into_a_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "sub dir" / "ok")
    assert main(["new", folder]) == 0
    assert f"Next: cd '{folder}'; python train.py" in capsys.readouterr().out


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("mine", "file"):
        assert main(["new", str(tmp_path / name)]) == 2
        assert "the folder already exists" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["train.py"]
    (tmp_path / "empty").mkdir()
    assert main(["new", str(tmp_path / "empty")]) == 0


@pytest.mark.slow
def test_a_new_project_trains_continues_passes_its_tests_and_its_study(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    assert main(["new", str(folder)]) == 0
    trained = run_program("train.py", cwd=folder)
    assert trained.returncode == 0, trained.stderr
    assert "validation accuracy: 9" in trained.stdout
    assert "test accuracy: 9" in trained.stdout
    again = run_program("train.py", cwd=folder)
    assert again.returncode == 0, again.stderr
    assert "checkpoint: resuming from 'runs/first/checkpoint-epoch0010-iter00000200', epoch 10" in again.stderr
    assert again.stdout == trained.stdout
    tested = finished("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=folder)
    assert tested.returncode == 0, tested.stdout
    assert "2 passed" in tested.stdout
    studied = run_program("study.py", cwd=folder)
    assert studied.returncode == 0, studied.stderr
    assert "Without ema, val_accuracy" in studied.stdout
