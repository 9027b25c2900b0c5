"""Executors of others: a study leaves the same store whichever of them makes its runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from signalfire.ablation import LeaveOneOut
from tests.engine.ablation.builds import ROOT, make_study
from tests.engine.ablation.test_study import apart_from_timings
from tests.kit import needs

DESIGN = LeaveOneOut(["ema"])


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The store of a study in this process."""
    path = tmp_path_factory.mktemp("here") / "store.jsonl"
    make_study(store=path).run(DESIGN, workers=0)
    return apart_from_timings(path)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_lokys_executor_leaves_the_same_store(here: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("interop", "loky")
    import loky

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    path = tmp_path / "store.jsonl"
    executor = loky.get_reusable_executor(max_workers=2)
    try:
        make_study(store=path).run(DESIGN, workers=executor)
    finally:
        executor.shutdown(wait=True)
    assert apart_from_timings(path) == here


class Job:
    """What a scheduler returns: it says whether it is done, and is no `Future`."""

    def __init__(self, function: Any, arguments: Any, delay: int) -> None:
        self._call, self._delay, self.cancelled = (function, arguments), delay, False

    def done(self) -> bool:
        self._delay -= 1
        return self._delay < 0

    def result(self) -> Any:
        assert self._delay < 0
        function, arguments = self._call
        return function(*arguments)

    def cancel(self) -> None:
        self.cancelled = True


class Scheduler:
    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def submit(self, function: Any, *arguments: Any) -> Job:
        self.jobs.append(Job(function, arguments, 3 - len(self.jobs)))
        return self.jobs[-1]


def test_jobs_that_are_no_futures_are_asked_until_they_are_done(here: bytes, tmp_path: Path) -> None:
    path, scheduler = tmp_path / "store.jsonl", Scheduler()
    make_study(store=path).run(DESIGN, workers=scheduler)  # type: ignore[arg-type]
    assert apart_from_timings(path) == here
    assert len(scheduler.jobs) == 4
    assert not any(job.cancelled for job in scheduler.jobs)


def test_jobs_that_are_no_longer_wanted_are_cancelled() -> None:
    scheduler = Scheduler()
    with pytest.raises(KeyError, match="without the metric 'nothing'"):
        make_study(metric="nothing", seeds=range(4)).run(DESIGN, workers=scheduler)  # type: ignore[arg-type]
    assert sum(job.cancelled for job in scheduler.jobs) == sum(job._delay >= 0 for job in scheduler.jobs)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_submitits_executor_leaves_the_same_store(here: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("interop", "submitit")
    import submitit

    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    path = tmp_path / "store.jsonl"
    executor: Any = submitit.AutoExecutor(folder=tmp_path / "jobs", cluster="local")
    executor.update_parameters(timeout_min=5)
    make_study(store=path, seeds=[0, 1]).run(DESIGN, workers=executor)
    assert apart_from_timings(path) == here
