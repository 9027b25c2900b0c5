"""Studies of real trainings in real processes: what is made, what is kept, and that it never depends on how."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from signalfire import Engine, Events
from signalfire.ablation import Design, Factorial, LeaveOneOut, OneAtATime, Swap, Variant
from signalfire.handlers import EMA, Checkpoint, CSVLogger, GradientNoise, History, ProgressBar
from tests.engine.ablation import builds
from tests.engine.ablation.builds import ROOT, make_study
from tests.kit import LIMIT, finished, group_ended, needs, python, wait_until
from tests.processes import program

DESIGN = LeaveOneOut(["ema", "gradient_clipping", "gradient_noise"])


def apart_from_timings(store: Path) -> bytes:
    """The store's bytes, without what differs from time to time, and without the checksums of it."""
    return re.sub(rb'"timing": \{[^}]*\}|"sum": "[0-9a-f]+"', b"", store.read_bytes())


def made(folder: Path) -> list[str]:
    path = folder / "made.txt"
    return path.read_text().splitlines() if path.exists() else []


def has_ended(process: BaseProcess) -> bool:
    return not process.is_alive()


def made_or_ended(count: int, folder: Path, ended: Callable[[], bool]) -> bool:
    return len(made(folder)) >= count or ended()


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a study by two processes."""
    path = tmp_path_factory.mktemp("two") / "store.jsonl"
    make_study(store=path, seeds=range(3)).run(DESIGN, workers=2)
    return path


# ---- the same results, however they were made -----------------------------------------------------------------------


@pytest.mark.slow
def test_one_worker_and_two_leave_the_same_store(two_workers: Path, tmp_path: Path) -> None:
    one = tmp_path / "one.jsonl"
    make_study(store=one, seeds=range(3)).run(DESIGN, workers=1)
    assert apart_from_timings(one) == apart_from_timings(two_workers)
    lines = [json.loads(line) for line in one.read_text().splitlines()]
    assert len(lines) == 12
    assert all(line["error"] is None and line["steps"] == 6 for line in lines)
    assert all(line["timing"]["seconds"] > 0 and line["timing"]["memory"] > 1e6 for line in lines)
    assert len({line["metrics"]["val_loss"] for line in lines}) == 12  # every variant and seed makes a difference


@pytest.mark.slow
def test_runs_in_this_process_leave_the_same_store_and_no_trace(two_workers: Path, tmp_path: Path) -> None:
    zero = tmp_path / "zero.jsonl"
    torch.manual_seed(3)
    before = torch.get_rng_state()
    make_study(store=zero, seeds=range(3)).run(DESIGN, workers=0)
    assert torch.equal(torch.get_rng_state(), before)
    assert apart_from_timings(zero) == apart_from_timings(two_workers)


@pytest.mark.slow
def test_threads_of_an_executor_make_their_runs_one_after_the_other(two_workers: Path, tmp_path: Path) -> None:
    path = tmp_path / "threads.jsonl"
    with ThreadPoolExecutor(3) as executor:
        make_study(store=path, seeds=range(3)).run(DESIGN, workers=executor)
    assert apart_from_timings(path) == apart_from_timings(two_workers)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Dask's own threads and sockets are not ours to mend
def test_dasks_executor_leaves_the_same_store(two_workers: Path, tmp_path: Path) -> None:
    needs("interop", "distributed")
    import distributed

    path = tmp_path / "dask.jsonl"
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        client.run(sys.path.insert, 0, str(ROOT))
        make_study(store=path, seeds=range(3)).run(DESIGN, workers=client.get_executor())
    assert apart_from_timings(path) == apart_from_timings(two_workers)


def test_a_run_of_the_baseline_is_the_training_by_itself() -> None:
    study = make_study()
    study.run(DESIGN, workers=0)
    results = {result.variant: result for result in study.results(study.plan(DESIGN)) if result.seed == 1}
    torch.manual_seed(1)
    for name, without in (("baseline", []), ("- ema", ["ema"])):
        torch.manual_seed(1)
        engine = builds.composed(1)
        engine.streams = "separate"
        with engine.without(*without):
            builds.train(engine)
        assert results[name].value == engine.state.metrics["val_loss"]
        assert results[name].steps == engine.updates[0].steps == 6


def test_streams_are_separate_by_default() -> None:
    found: list[str] = []

    def build(seed: int) -> Any:
        engine = builds.composed(seed)

        def run(engine: Engine) -> None:
            found.append(engine.streams)
            builds.train(engine)

        return engine, run

    make_study(build, seeds=[0]).plan(DESIGN)
    assert set(found) == {"separate"}
    found.clear()
    make_study(build, seeds=[0], streams=None).plan(DESIGN)
    assert set(found) == {"shared"}


# ---- killed, interrupted, continued ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_killed_at_random_moments_it_ends_with_the_same_store(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    monkeypatch.chdir(whole)
    builds.study_of(".", 0.05).run(LeaveOneOut(), workers=0)

    arguments = [ROOT / "tests/engine/ablation/builds.py", ".", workers, 0.05]
    outputs = [tmp_path / "output", tmp_path / "errors"]
    draws = random.Random(workers)
    kills = 2 if workers else 4  # new processes take their time
    for _ in range(kills):
        before = len(made(killed))
        # However late it is killed on a busy machine, it does not come to its end.
        (killed / "most.txt").write_text(str(before + 3 + workers // 2))
        study = program(*arguments, cwd=killed, outputs=outputs)
        study.start()
        assert study.pid is not None
        try:
            wait_until(partial(made_or_ended, before + 1, killed, partial(has_ended, study)))
            time.sleep(draws.uniform(0, 0.2))
        finally:
            study.kill()
        study.join()
        assert study.exitcode == -signal.SIGKILL, outputs[1].read_text()
        wait_until(partial(group_ended, study.pid))  # its workers end by themselves
    assert kills <= len(made(killed)) < 12 + kills
    (killed / "most.txt").unlink()
    ended = finished(*arguments, cwd=killed)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""  # no terminal, no bar
    assert apart_from_timings(killed / "store.jsonl") == apart_from_timings(whole / "store.jsonl")
    assert len(made(killed)) - len(made(whole)) <= kills * max(workers, 1)  # those that were running


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupt_ends_it_and_finished_runs_stay(workers: int, tmp_path: Path) -> None:
    arguments = [ROOT / "tests/engine/ablation/builds.py", ".", workers, 0.0]
    (tmp_path / "most.txt").write_text(str(2 + workers))
    with python(*arguments, cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True) as study:
        wait_until(partial(made_or_ended, 2 + workers, tmp_path, lambda: study.poll() is not None))
        os.killpg(study.pid, signal.SIGINT)  # as a terminal does: all processes get it
        _, said = study.communicate(timeout=LIMIT)
    assert "\nKeyboardInterrupt\n" in said
    assert said.count("Traceback") == 1, said
    lines = (tmp_path / "store.jsonl").read_text().splitlines()
    assert 1 <= len(lines) < 12
    assert all(json.loads(line)["error"] is None for line in lines)


@pytest.mark.moderate
def test_more_seeds_and_other_variants_run_only_what_is_missing(tmp_path: Path) -> None:
    build = partial(builds.noted, folder=str(tmp_path))
    options = {"store": tmp_path / "store.jsonl"}
    make_study(build, **options).run(DESIGN, workers=0)
    assert len(made(tmp_path)) == 8
    make_study(build, **options).run(DESIGN, workers=0)
    assert len(made(tmp_path)) == 8
    plan = make_study(build, **options, seeds=range(3)).plan(DESIGN)
    assert [(run.variant.name, run.seed) for run in plan.to_make] == [
        ("baseline", 2), ("- ema", 2), ("- gradient_clipping", 2), ("- gradient_noise", 2),
    ]  # fmt: skip
    make_study(build, **options, seeds=range(3)).run(DESIGN, workers=0)
    assert made(tmp_path)[8:] == ["2 ", "2 ema", "2 gradient_clipping", "2 gradient_noise"]
    # A factorial has two of its four variants in common with it.
    make_study(build, **options, seeds=[0]).run(Factorial(["ema", "gradient_noise"]), workers=0)
    assert made(tmp_path)[12:] == ["0 ema gradient_noise"]
    before = (tmp_path / "store.jsonl").read_bytes().splitlines()
    make_study(build, **options, seeds=[0], config={"lr": 0.1}).run(DESIGN, workers=0)
    assert len(made(tmp_path)) == 17
    after = (tmp_path / "store.jsonl").read_bytes().splitlines()
    assert len(after) == len(before) + 4
    assert set(before) <= set(after)


# ---- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_failed_run_is_kept_with_its_traceback_and_made_again_only_when_asked_for(tmp_path: Path) -> None:
    build = partial(builds.failing, folder=str(tmp_path))
    study = make_study(build, seeds=range(3), store=tmp_path / "store.jsonl")
    study.run(DESIGN, workers=1)
    plan = study.plan(DESIGN)
    by_run = {(result.variant, result.seed): result for result in study.results(plan)}
    assert len(by_run) == 12
    failed = [run for run, result in by_run.items() if result.value is None]
    assert failed == [("- gradient_noise", 1)]
    error = by_run["- gradient_noise", 1].error or ""
    assert error.startswith("Traceback")
    assert "no luck with <object object at 0x...>" in error
    assert "raised by fail at Events.ITERATION_COMPLETED, epoch 1, iteration 2" in error
    assert re.search(r"- gradient_noise +2 +1 +0 ", str(plan))
    before = (tmp_path / "store.jsonl").read_bytes()
    (tmp_path / "mended").touch()
    study.run(DESIGN, workers=0)
    assert (tmp_path / "store.jsonl").read_bytes() == before
    assert [run.seed for run in study.plan(DESIGN, retry_failed=True).to_make] == [1]
    study.run(DESIGN, workers=0, retry_failed=True)
    results = study.results(study.plan(DESIGN))
    assert len(results) == 12
    assert all(result.error is None for result in results)
    assert len((tmp_path / "store.jsonl").read_bytes().splitlines()) == 12


def test_a_metric_that_nobody_has_ends_the_study_and_names_those_there_are(tmp_path: Path) -> None:
    study = make_study(metric="val_los", store=tmp_path / "store.jsonl")
    with pytest.raises(
        KeyError, match=r"without the metric 'val_los'.*Available metrics: val_loss; did you mean 'val_loss'\?"
    ):
        study.run(DESIGN, workers=0)
    assert (tmp_path / "store.jsonl").read_bytes() == b""


@pytest.mark.moderate
def test_a_metric_that_one_run_lacks_makes_it_a_failed_one() -> None:
    def build(seed: int) -> Any:
        engine = builds.composed(seed)

        @engine.on(Events.EPOCH_COMPLETED)
        def write(engine: Engine) -> None:
            engine.state.metrics["table"] = torch.zeros(2, 2)
            if engine.handlers["ema"].enabled or seed == 0:
                engine.state.metrics["mine"] = float("nan") if seed else 2

        return engine, builds.train

    study = make_study(build, metric="mine")
    study.run(LeaveOneOut(["ema"]), workers=0)
    results = {(result.variant, result.seed): result for result in study.results(study.plan(LeaveOneOut(["ema"])))}
    assert results["baseline", 0].value == results["- ema", 0].value == 2.0
    assert str(results["baseline", 1].value) == "nan"
    assert results["- ema", 1].value is None
    assert "ended without the metric 'mine'" in (results["- ema", 1].error or "")
    assert sorted(results["baseline", 0].metrics) == ["mine", "val_loss"]


# ---- the plan -------------------------------------------------------------------------------------------------------


@pytest.mark.moderate
def test_the_plan_says_what_is_to_be_made_and_what_it_costs(tmp_path: Path) -> None:
    store = tmp_path / "store.jsonl"
    plan = make_study(store=store).plan(DESIGN)
    assert plan.seconds is None
    assert str(plan).endswith("4 variants x 2 seeds: 8 of 8 runs pending, estimated time if run sequentially: unknown")
    assert not store.exists()
    make_study(store=store, seeds=[0]).run(LeaveOneOut(["ema"]), workers=0)
    plan = make_study(store=store).plan(DESIGN)
    lines = {tuple(line["off"]): line["timing"]["seconds"] for line in map(json.loads, store.read_text().splitlines())}
    mean = sum(lines.values()) / 2
    assert plan.seconds == pytest.approx(lines[()] + lines["ema",] + 4 * mean)
    assert [run.status for run in plan.runs] == ["finished"] * 2 + ["missing"] * 6


def writing(folder: Path, resume: bool, seed: int) -> Any:
    engine = builds.composed(seed)
    engine.attach(Checkpoint(folder / "saved", resume=resume), CSVLogger(folder / "log.csv"), ProgressBar())
    return engine, builds.train


@pytest.mark.moderate
def test_nothing_is_written_or_shown_unless_files_are_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build = partial(writing, tmp_path, True)
    report = make_study(build).run(DESIGN, workers=0)
    assert [row.finished for row in report.rows] == [2] * 4
    assert not os.listdir(tmp_path)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(ValueError, match=r"'checkpoint' is already switched off by the study; set files=True"):
        make_study(build).plan(LeaveOneOut(["checkpoint"]))

    make_study(partial(writing, tmp_path, False), seeds=[0], files=True).run(DESIGN, workers=0)
    assert len(list((tmp_path / "saved").glob("checkpoint-epoch0002*"))) == 4  # one of each run
    assert (tmp_path / "log.csv").exists()
    assert "epoch 2/2" in capsys.readouterr().err


@pytest.mark.moderate
def test_a_run_that_goes_on_from_that_of_another_variant_has_failed(tmp_path: Path) -> None:
    report = make_study(partial(writing, tmp_path, True), seeds=[0], files=True).run(DESIGN, workers=0)
    baseline, *others = report.rows
    assert baseline.finished == 1
    for row in others:
        assert "the run would resume from a checkpoint" in row.failed[0]


def test_nothing_is_trained_to_plan() -> None:
    fired: list[Any] = []
    dry: list[bool] = []

    def build(seed: int) -> Any:
        engine = builds.composed(seed)
        engine.connect(Events.EPOCH_STARTED, fired.append)
        engine.connect(Events.STARTED, lambda engine: dry.append(engine.dry_run))
        return engine, builds.train

    torch.manual_seed(5)
    before = torch.get_rng_state()
    make_study(build).plan(LeaveOneOut(), Swap({"ema": {"slower": partial(EMA, 0.9)}}))
    assert fired == []
    assert dry == [True] * 7  # so nothing is written either: as it is built, twice, and each of the five variants
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("build", "design", "message"),
    [
        (builds.build, LeaveOneOut(["emma"]), r"'- emma': build attaches no handler 'emma'.* did you mean 'ema'\?"),
        (builds.build, LeaveOneOut(["validation"]), "'- validation': the metric 'val_loss', which the study compares"),
        (
            builds.stopping,
            LeaveOneOut(["validation", "ema"]),
            "'- validation': the metric 'val_loss', which",
        ),
        (
            builds.build,
            Swap({"ema": {"noise": partial(GradientNoise, 0.2)}}),
            "'ema = noise': .*'gradient_noise'",
        ),
        (builds.build, Swap({"ema": {"nothing": cast(Any, dict)}}), "'ema = nothing': .*expected a Handler"),
        (builds.build, Swap({"emma": {"other": EMA}}), "no handler 'emma'"),
    ],
)
def test_variants_that_cannot_work_are_refused_together(build: Any, design: Design, message: str) -> None:
    with pytest.raises(ValueError, match="some variants are invalid") as caught:
        make_study(build).plan(design)
    assert re.search(message, str(caught.value), re.DOTALL)


def test_a_variant_that_fails_at_its_start_is_refused_before_anything_is_trained() -> None:
    def build(seed: int) -> Any:
        engine = builds.composed(seed)

        @engine.on(Events.STARTED)
        def check(engine: Engine) -> None:
            if not engine.handlers["ema"].enabled:
                raise ValueError("needs averages")

        return engine, builds.train

    with pytest.raises(ValueError, match=r"- '- ema': needs averages$"):
        make_study(build).plan(LeaveOneOut())


@pytest.mark.moderate
def test_a_swap_takes_the_place_of_a_handler_and_is_undone_in_the_plan() -> None:
    study = make_study(seeds=[0])
    design = Swap({"ema": {"slow": partial(EMA, 0.9), "same": partial(EMA, 0.5)}})
    study.run(design, LeaveOneOut(["ema"]), workers=0)
    value = {result.variant: result.value for result in study.results(study.plan(design, LeaveOneOut(["ema"])))}
    assert value["ema = same"] == value["baseline"] != value["ema = slow"]
    assert len(set(value.values())) == 3


def test_other_handlers_than_those_of_the_store_are_noticed(tmp_path: Path) -> None:
    extra: list[Any] = []

    def build(seed: int) -> Any:
        engine = builds.composed(seed)
        engine.attach(*(make() for make in extra))
        return engine, builds.train

    options = {"store": tmp_path / "store.jsonl", "seeds": [0]}
    make_study(build, **options).run(LeaveOneOut(["ema"]), workers=0)
    extra.append(partial(History, name="second"))
    plan = make_study(build, **options).plan(LeaveOneOut(["ema"]))
    assert [run.status for run in plan.runs] == ["missing"] * 2
    assert plan.notes == (
        "2 stored runs with these variants and seeds were recorded with a different build (its code, or something that "
        "it uses) and a different setup (handlers, updates or modules), so they are not used",
    )


def test_designs_with_different_variants_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="different variants that are both named 'baseline'"):
        make_study().plan(LeaveOneOut(), OneAtATime())


def test_a_design_without_a_baseline_is_refused() -> None:
    class Mine(Design):
        def variants(self, candidates: Any) -> list[Variant]:
            return [Variant("all"), Variant("none", frozenset(candidates))]

    with pytest.raises(ValueError, match=r"but no variant is named 'baseline'.* the variants are all, none"):
        make_study().plan(Mine())


# ---- what is wrong with what is given -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"build": 3}, "Study(build=3)"),
        ({"metric": ""}, "Study(metric='')"),
        ({"mode": "most"}, "Study(mode='most')"),
        ({"seeds": []}, "Study(seeds=[])"),
        ({"seeds": [1, 1]}, "Study(seeds=[1, 1])"),
        ({"seeds": [-1]}, "Study(seeds=-1)"),
        ({"seeds": 3}, "Study(seeds=3): expected a sequence of ints, such as range(8)"),
        ({"files": 1}, "Study(files=1)"),
        ({"seeds": [2**32]}, "below 2**32"),
        ({"handlers": "ema"}, "expected a list of names, such as ['ema']"),
        ({"streams": "own"}, "Study(streams='own')"),
        ({"run": 3}, "Study(run=3)"),
        ({"config": {"a": object()}}, "plain values"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        make_study(**options)


@pytest.mark.moderate
def test_the_study_may_bring_the_run() -> None:
    study = make_study(lambda seed: builds.composed(seed), run=builds.train, seeds=[0])
    study.run(LeaveOneOut(["ema"]), workers=0)
    assert len(study.results(study.plan(LeaveOneOut(["ema"])))) == 2


@pytest.mark.parametrize("workers", [-1, 1.5, "two", None])
def test_workers_are_a_number_or_an_executor(workers: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"run\(workers="):
        make_study().run(DESIGN, workers=workers)


def test_the_bar_is_quiet_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    make_study(seeds=[0]).run(LeaveOneOut(["ema"]), workers=0)
    assert capsys.readouterr().err == ""


@pytest.fixture(autouse=True)
def _no_threads_are_left() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads
