"""Runs that failed after resuming: three from one version, and a restarted script passes it over."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from signalfire import Engine, Events
from signalfire.checkpoints import Files, ResumeFailures
from signalfire.handlers import Checkpoint
from tests.kit import batches, build, linear

DATA = batches(10, inputs=3)


def restarted(folder: Path, *, fails_at: int | None = None) -> Engine:
    """What a script that is started again builds."""
    engine = build(linear(3, 1), Checkpoint(folder, every="2it", keep=3, resume=True))
    if fails_at is not None:

        def fail(engine: Engine) -> None:
            raise ArithmeticError("as it does each time")

        engine.connect(Events.FORWARD_STARTED(once=fails_at), fail)
    return engine


def fail_from(folder: Path, version: str, *runs: str) -> None:
    """Runs that resume from a version and fail."""
    for run in runs:
        failures = ResumeFailures(folder, "checkpoint")
        failures.resumed(version)
        failures.add(run)


def test_one_from_which_three_runs_failed_is_passed_over(tmp_path: Path) -> None:
    restarted(tmp_path).run(DATA, max_iters=6)
    for _ in range(3):
        with pytest.raises(ArithmeticError):
            restarted(tmp_path, fails_at=7).run(DATA, max_iters=9)
    engine = restarted(tmp_path)
    first: list[int] = []
    engine.connect(Events.CHECKPOINT_LOADED, lambda engine: first.append(engine.state.iteration))
    with pytest.warns(RuntimeWarning, match=r"3 runs that resumed from checkpoint-epoch0001-iter00000006 failed"):
        engine.run(DATA, max_iters=9)
    assert first == [4]
    assert not (tmp_path / ".checkpoint.failures").exists(), "it has got further, and begins to count anew"


def test_when_there_is_none_left_to_try_it_says_how_to_try_again(tmp_path: Path) -> None:
    restarted(tmp_path).run(DATA, max_iters=2)
    for _ in range(3):
        with pytest.raises(ArithmeticError):
            restarted(tmp_path, fails_at=3).run(DATA, max_iters=9)
    with pytest.raises(FileNotFoundError, match=r"to try again, delete '\.checkpoint\.failures' from the folder"):
        restarted(tmp_path).run(DATA, max_iters=9)
    shutil.rmtree(tmp_path / ".checkpoint.failures")
    assert restarted(tmp_path).run(DATA, max_iters=9).iteration == 9


def test_a_run_counts_once_however_many_of_its_ranks_fail(tmp_path: Path) -> None:
    fail_from(tmp_path, "a", "first", "first", "first", "second")
    failures = ResumeFailures(tmp_path, "checkpoint")
    assert failures.given_up() == []
    fail_from(tmp_path, "a", "third")
    assert failures.given_up() == ["a"]


def test_each_version_is_counted_by_itself_whatever_is_in_its_name(tmp_path: Path) -> None:
    fail_from(tmp_path, "best@1", "first", "second", "third")
    fail_from(tmp_path, "best@2", "fourth", "fifth")
    fail_from(tmp_path, "best", "sixth", "seventh")
    assert ResumeFailures(tmp_path, "checkpoint").given_up() == ["best@1"]


def test_a_run_that_resumed_from_nothing_or_has_saved_since_does_not_count(tmp_path: Path) -> None:
    failures = ResumeFailures(tmp_path, "checkpoint")
    failures.add("begun anew")
    failures.resumed("a")
    failures.saved(clear=True)
    failures.add("failed later")
    assert not failures.path.exists()


def test_a_save_removes_the_counts_of_its_own_handler_on_one_rank_alone(tmp_path: Path) -> None:
    fail_from(tmp_path, "a", "first", "second", "third")
    other = ResumeFailures(tmp_path, "best")
    other.resumed("b")
    other.add("fourth")
    failures = ResumeFailures(tmp_path, "checkpoint")
    failures.saved(clear=True)
    assert failures.given_up() == ["a"], "a run that began anew says nothing of those that resumed"
    failures.resumed("a")
    failures.saved(clear=False)
    assert failures.given_up() == ["a"]
    failures.resumed("a")
    failures.saved(clear=True)
    assert failures.given_up() == []
    assert other.path.is_dir()


def test_an_empty_folder_has_nothing_to_resume_from_and_that_is_no_error(tmp_path: Path) -> None:
    assert ResumeFailures(tmp_path, "checkpoint").newest(where="here", files=Files()) is None
    assert ResumeFailures(tmp_path / "none yet", "checkpoint").newest(where="here", files=Files()) is None
