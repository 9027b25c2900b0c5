"""Executors of others: a study leaves the same store whichever of them makes its runs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from signalfire.ablation import LeaveOneOut, RayExecutor
from tests.engine.ablation.builds import ROOT, make_study
from tests.engine.ablation.test_study import apart_from_timings
from tests.kit import LIMIT, needs

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


@pytest.mark.moderate
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
def test_submitits_executor_leaves_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("interop", "submitit")
    import submitit

    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    path, here = tmp_path / "store.jsonl", tmp_path / "here.jsonl"
    executor: Any = submitit.AutoExecutor(folder=tmp_path / "jobs", cluster="local")
    executor.update_parameters(timeout_min=5)
    make_study(store=path, seeds=[0]).run(DESIGN, workers=executor)
    make_study(store=here, seeds=[0]).run(DESIGN, workers=0)
    assert apart_from_timings(path) == apart_from_timings(here)


ON_RAY = """
import os, sys, time

import ray

from signalfire.ablation import LeaveOneOut, RayExecutor
from tests.engine.ablation.builds import make_study

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
make_study(store=sys.argv[1]).run(LeaveOneOut(["ema"]), workers=RayExecutor(num_cpus=1))
executor = RayExecutor()
def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)
go_on = sys.argv[1] + ".go_on"
running, waiting = executor.submit(wait_for, go_on), executor.submit(time.sleep, 3600)
print("cancelled:", waiting.cancel())
open(go_on, "w").close()
running.result()
print("the next:", executor.submit(divmod, 7, 2).result(timeout=300))  # the only worker is free again
try:
    executor.submit(int, "no number").result()
except ValueError as error:
    print("error: no number" if "'no number'" in str(error) else error)
"""


@pytest.mark.slow
def test_tasks_of_ray_leave_the_same_store_and_can_be_cancelled(here: bytes, tmp_path: Path) -> None:
    needs("cluster", "ray")
    path = tmp_path / "store.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-c", ON_RAY, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd=tmp_path, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-3:] == ["cancelled: True", "the next: (3, 1)", "error: no number"]
    assert apart_from_timings(path) == here


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_error_names_the_extra() -> None:
    with pytest.raises(ImportError, match=r"RayExecutor needs Ray: pip install 'signalfire\[cluster\]'"):
        RayExecutor()
