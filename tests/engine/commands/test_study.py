"""``python -m signalfire study`` and ``... report``: a leave-one-out study in one line, and what a person gets wrong."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from signalfire.__main__ import main
from signalfire.ablation import LeaveOneOut, StoreWarning
from signalfire.commands.study import find_function
from tests.engine.ablation.builds import ROOT, make_study
from tests.processes import run_program

TRAIN = f"""
import sys
sys.path.append({str(ROOT)!r})
from tests.engine.ablation import builds
from tests.engine.ablation.builds import build, composed, train
number = 3
def no_argument():
    return build(0)
def broken(seed):
    raise ZeroDivisionError("of the user")
"""
COMMAND = ("-m", "signalfire", "study")
OPTIONS = ("--metric", "val_loss", "--mode", "min", "--seeds", "2")
BUILD = "tests.engine.ablation.builds:build"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.mark.slow
def test_a_study_in_one_line_and_its_report(folder: Path) -> None:
    done = run_program(*COMMAND, "train:build", *OPTIONS, "--workers", 2, "--store", "s.jsonl", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "4 variants x 2 seeds: 8 of 8 runs pending" in done.stdout
    assert re.search(r"^- ema +2/2 ", done.stdout, re.MULTILINE)
    assert "Without gradient_clipping, 2 seeds are too few" in done.stdout
    table = done.stdout[done.stdout.index("variant              runs") :]
    again = run_program(*COMMAND, "train.py:build", *OPTIONS, "--store", "s.jsonl", cwd=folder)
    assert "0 of 8 runs pending" in again.stdout
    reported = run_program("-m", "signalfire", "report", "s.jsonl", cwd=folder)
    assert (reported.returncode, reported.stderr) == (0, "")
    # The store does not know in which order the design has its variants.
    repeated = again.stdout[again.stdout.index("variant              runs") :]
    assert sorted(reported.stdout.split()) == sorted(table.split()) == sorted(repeated.split())
    verified = run_program(*COMMAND, "train:build", *OPTIONS, "--store", "s.jsonl", "--verify", 3, cwd=folder)
    assert verified.stdout == "3 runs repeated; all results are bit-identical to the stored results\n", verified.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trian:build",), "there is no module 'trian'; did you mean 'train'?"),
        (("train:biuld",), "'train' has no 'biuld'; did you mean 'build'?"),
        (("train:number",), "is 3; expected a function number(seed)"),
        (("train:build", "--metric", "val_los"), "Available metrics: val_loss; did you mean 'val_loss'?"),
    ],
)
def test_what_a_person_gets_wrong_is_said_in_a_sentence(arguments: Any, message: str, folder: Path) -> None:
    done = run_program(*COMMAND, arguments[0], *OPTIONS, *arguments[1:], "--workers", 0, cwd=folder)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_error_of_the_user_keeps_its_traceback(folder: Path) -> None:
    done = run_program(*COMMAND, "train:broken", *OPTIONS, "--workers", 0, cwd=folder)
    assert done.returncode == 1
    assert "ZeroDivisionError: of the user" in done.stderr
    assert "in broken" in done.stderr


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("train", "expected the name of a module and of a function in it, such as train:build"),
        (":build", "expected the name of a module and of a function"),
        ("nowhere.py:build", "there is no file 'nowhere.py'"),
        ("train:no_argument", "cannot be called as no_argument(seed): too many positional arguments"),
        ("train:number", "expected a function number(seed)"),
        ("train:builds.bild", "did you mean 'build'?"),
        ("math:pi", "is 3.14"),
        ("nothing.there:build", "there is no module 'nothing.there'"),
    ],
)
def test_a_function_that_is_none_is_refused(
    name: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises((ValueError, ImportError, AttributeError, TypeError), match=re.escape(message)):
        find_function(name, "build", "(seed)")
    sys.modules.pop("train", None)


def test_what_fails_to_import_inside_of_the_module_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imports_more.py").write_text("import surely_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="No module named 'surely_not_there'"):
        find_function("imports_more:build", "build", "(seed)")


@pytest.mark.whole
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seeds", "none"], "--seeds none: expected a number of seeds"),
        (["--seeds", "0"], "--seeds 0: expected at least 1"),
        (["--seeds", "1,1"], "expected distinct ints"),
        (["--workers", "-1"], "--workers -1: expected 0 or more"),
        (["--store", "."], "the path is a folder; pass a file in this folder"),
        (["--handlers", "emma", "--plan"], "no handler 'emma'"),
        (["--run", "tests.engine.ablation.builds:trian"], "did you mean 'train'?"),
        (["--verify", "2"], "no finished run"),
    ],
)
def test_wrong_options_are_refused(
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["study", BUILD, *OPTIONS, *options]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.moderate
def test_a_study_with_chosen_seeds_and_handlers_in_this_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "s.jsonl"
    options = ["--metric", "val_loss", "--seeds", "3,5", "--workers", "0", "--store", str(store), "--handlers", "ema"]
    picture = tmp_path / "p.png"
    assert main(["study", BUILD, *options, "--plot", str(picture)]) == 0
    assert "2 variants x 2 seeds" in capsys.readouterr().out
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert {json.loads(line)["seed"] for line in store.read_text().splitlines()} == {3, 5}
    for style, begin in (("markdown", "| variant"), ("latex", "%"), ("csv", "variant,finished")):
        assert main(["report", str(store), "--format", style]) == 0
        assert capsys.readouterr().out.startswith(begin)
    assert main(["report", str(store), "--output", str(tmp_path / "r.txt")]) == 0
    assert "Without ema, 2 seeds are too few" in (tmp_path / "r.txt").read_text()


@pytest.mark.moderate
def test_a_store_with_two_studies_is_reported_one_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "s.jsonl"
    for config in ({"width": 1}, {"width": 2}):
        make_study(store=store, seeds=[0], config=config).run(LeaveOneOut(["ema"]), workers=0)
    assert main(["report", str(store)]) == 0
    said = capsys.readouterr().out
    assert re.findall(r"study (\d) of 2, width=(\d), 2 runs, torch", said) in (
        [("1", "1"), ("2", "2")],
        [("1", "2"), ("2", "1")],
    )
    assert main(["report", str(store), "--output", "x"]) == 2
    assert "the store has 2 studies" in capsys.readouterr().err


@pytest.mark.moderate
def test_what_is_wrong_with_a_store_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "s.jsonl"
    assert main(["report", str(store)]) == 2
    assert "there is no store" in capsys.readouterr().err
    store.write_text("")
    assert main(["report", str(store)]) == 2
    assert "has no run" in capsys.readouterr().err
    store.write_text("name,value\n")
    assert main(["report", str(store)]) == 2
    assert "line 1 of the store" in capsys.readouterr().err
    store.unlink()
    make_study(store=store).run(LeaveOneOut(["ema"]), workers=0)
    assert main(["report", str(store), "--metric", "val_los"]) == 2
    printed = capsys.readouterr().err
    assert "no run has the metric 'val_los'; available metrics: val_loss; did you mean 'val_loss'?" in printed
    content = store.read_bytes()
    store.write_bytes(content.replace(b'"steps": 6', b'"steps": 7', 1))
    with pytest.warns(StoreWarning, match="line 1 .* is damaged"):
        assert main(["report", str(store)]) == 0
    assert re.search(r"^baseline +1/2 ", capsys.readouterr().out, re.MULTILINE)
