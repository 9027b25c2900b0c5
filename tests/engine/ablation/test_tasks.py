"""Studies of several tasks: every variant runs in each, and the store keeps their runs apart."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from signalfire import Engine, Update
from signalfire.ablation import LeaveOneOut, Plan, StoreError, Study, TasksReport, Variants, read_reports
from signalfire.handlers import Average, GradientClipping, GradientNoise, Metrics

DESIGN = LeaveOneOut(["gradient_clipping"])
TASKS: dict[str, dict[str, Any]] = {"steep": {"slope": 3.0}, "flat": {"slope": 0.5, "samples": 6}}
SCORES = {"steep": (20.0, 0.0), "flat": (2.0, 0.0)}


def build(seed: int, *, slope: float, samples: int = 8, rate: float = 0.1, broken: bool = False) -> Any:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 2, generator=generator)
    update = Update.supervised(mse_loss, partial(torch.optim.SGD, lr=rate))
    trainer = Engine(update, model=nn.Linear(2, 1), seed=seed)
    trainer.attach(GradientClipping(max_norm=0.1), Metrics(loss=Average()))
    if broken and seed == 1:
        raise ValueError("no such data")
    return trainer, lambda engine: engine.run([(inputs, slope * inputs.sum(1, keepdim=True))], max_epochs=3)


def build_flat(seed: int) -> Any:
    return build(seed, slope=0.5, samples=6)


def build_steep(seed: int) -> Any:
    return build(seed, slope=3.0)


def study(**options: Any) -> Study:
    given: dict[str, Any] = {"build": build, "tasks": TASKS, "scores": SCORES, "seeds": range(3)}
    return Study(**{"metric": "loss", "mode": "min"} | given | options)


def tasks_of(report: object) -> TasksReport:
    assert isinstance(report, TasksReport)
    return report


def losses(report: TasksReport) -> dict[tuple[str, str], Mapping[int, float]]:
    return {(task, row.variant.name): row.values for task, one in report.tasks.items() for row in one.rows}


def test_seeds_are_those_that_the_study_was_made_with() -> None:
    one = study()
    with pytest.raises(AttributeError, match="seeds"):
        one.seeds = (7, 8)  # type: ignore[misc]  # which its tasks would not see
    assert one.seeds == one.tasks["steep"].seeds == (0, 1, 2)


@pytest.mark.moderate
def test_each_task_has_the_runs_that_a_study_of_it_alone_has() -> None:
    found = losses(tasks_of(study().run(DESIGN, workers=0)))
    for task, arguments in TASKS.items():
        alone = Study(partial(build, **arguments), metric="loss", mode="min", seeds=range(3)).run(DESIGN, workers=0)
        for row in alone.rows:
            assert found[task, row.variant.name] == row.values
    assert len(found) == 4


@pytest.mark.moderate
def test_tasks_may_have_functions_of_their_own() -> None:
    own = study(build=None, tasks={"steep": build_steep, "flat": build_flat})
    assert losses(tasks_of(own.run(DESIGN, workers=0))) == losses(tasks_of(study().run(DESIGN, workers=0)))


@pytest.mark.moderate
def test_the_plan_counts_the_runs_of_all_tasks_and_trains_nothing() -> None:
    one = study()
    plan = one.plan(DESIGN)
    assert isinstance(plan, Plan)
    assert len(plan.to_make) == 2 * 2 * 3
    assert {(run.task, run.variant.name, run.seed) for run in plan.runs} == {
        (task, name, seed) for task in TASKS for name in ("baseline", "- gradient_clipping") for seed in range(3)
    }
    assert len({run.key for run in plan.runs}) == 12
    assert "2 variants x 2 tasks x 3 seeds: 12 of 12 runs pending" in str(plan)
    assert str(plan).splitlines()[1].split() == ["baseline", "0", "0", "6", "-"]
    one.run(DESIGN, workers=0)
    assert one.plan(DESIGN).to_make == ()


@pytest.mark.moderate
def test_the_store_keeps_the_runs_of_tasks_apart_even_where_they_are_built_alike(tmp_path: Path) -> None:
    twins = {"one": {"slope": 1.0}, "other": {"slope": 1.0}}
    options: dict[str, Any] = {"tasks": twins, "scores": (5.0, 0.0), "store": tmp_path / "store.jsonl"}
    first = study(**options)
    first.run(DESIGN, workers=0)
    lines = [json.loads(line) for line in (tmp_path / "store.jsonl").read_text().splitlines()]
    assert sorted(line["task"] for line in lines) == ["one"] * 6 + ["other"] * 6
    assert len({line["key"] for line in lines}) == 12
    again = study(**options)
    plan = again.plan(DESIGN)
    assert plan.to_make == ()
    assert plan.notes == ()
    assert losses(tasks_of(again.report(DESIGN))) == losses(tasks_of(first.report(DESIGN)))
    # Another task of the same content is another task, and so is a study without tasks.
    renamed = study(**options | {"tasks": {"one": {"slope": 1.0}, "third": {"slope": 1.0}}})
    assert len(renamed.plan(DESIGN).to_make) == 6
    alone = Study(partial(build, slope=1.0), metric="loss", mode="min", seeds=range(3), store=options["store"])
    assert len(alone.plan(DESIGN).to_make) == 6
    assert alone.plan(DESIGN).notes == ()
    titles = read_reports(options["store"])
    assert sorted(title.split(", ")[1] for title in titles) == ["task 'one'", "task 'other'"]


@pytest.mark.moderate
def test_another_argument_of_one_task_makes_its_runs_anew_and_no_others(tmp_path: Path) -> None:
    store = tmp_path / "store.jsonl"
    study(store=store).run(DESIGN, workers=0)
    changed = study(store=store, tasks=TASKS | {"flat": {"slope": 0.6, "samples": 6}})
    plan = changed.plan(DESIGN)
    assert {run.task for run in plan.to_make} == {"flat"}
    assert plan.notes == (
        "flat: 6 stored runs with these variants and seeds were recorded with a different build (its code, or "
        "something that it uses), so they are not used",
    )


@pytest.mark.moderate
def test_an_interrupted_study_goes_on_where_it_was(tmp_path: Path) -> None:
    store = tmp_path / "store.jsonl"
    whole = tasks_of(study(store=store).run(DESIGN, workers=0))
    lines = store.read_bytes().splitlines(keepends=True)
    store.write_bytes(b"".join(lines[:5]))
    rest = study(store=store)
    assert len(rest.plan(DESIGN).to_make) == 7
    assert losses(tasks_of(rest.run(DESIGN, workers=0))) == losses(whole)


@pytest.mark.moderate
def test_stored_runs_of_every_task_are_made_again_and_compared(tmp_path: Path) -> None:
    one = study(store=tmp_path / "store.jsonl")
    one.run(DESIGN, workers=0)
    assert [(run.task, run.seed) for run in one.verify(2, DESIGN)] == [
        ("steep", 0),
        ("steep", 2),
        ("flat", 0),
        ("flat", 2),
    ]
    other = study(store=tmp_path / "other.jsonl")
    with other.store.writing():
        for key, line in one.store.read().items():
            changed = {"loss": line["metrics"]["loss"] + (1e-9 if line["task"] == "flat" and line["seed"] == 2 else 0)}
            content = {name: value for name, value in line.items() if name not in ("sum", "format")}
            other.store.append(content | {"key": key, "metrics": changed})
    with pytest.raises(StoreError, match="with seed 2: loss is"):
        other.verify(2, DESIGN)


@pytest.mark.moderate
def test_designs_of_arguments_and_workers_work_as_without_tasks() -> None:
    design = Variants({"rate": 0.1}, rate=[0.2])
    found = tasks_of(study().run(design, workers=0))
    alone = Study(partial(build, slope=3.0), metric="loss", mode="min", seeds=range(3)).run(design, workers=0)
    assert found.tasks["steep"].rows[1].values == alone.rows[1].values


@pytest.mark.slow
def test_runs_of_tasks_are_the_same_in_another_process() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = losses(tasks_of(study(seeds=range(2)).run(DESIGN, workers=pool)))
    assert found == losses(tasks_of(study(seeds=range(2)).run(DESIGN, workers=0)))


@pytest.mark.moderate
def test_a_run_that_fails_in_one_task_fails_there_and_in_the_overall_comparison() -> None:
    one = study(tasks={"steep": {"slope": 3.0}, "flat": {"slope": 0.5, "broken": True}})
    found = tasks_of(one.run(DESIGN, workers=0))
    assert [row.finished for row in found.tasks["steep"].rows] == [3, 3]
    assert [list(row.failed) for row in found.tasks["flat"].rows] == [[1], [1]]
    assert [list(row.failed) for row in found.rows] == [[1], [1]]
    assert "flat: ValueError: no such data" in str(found)


def test_an_invalid_variant_of_the_last_task_is_an_error_before_the_first_one_runs(tmp_path: Path) -> None:
    def plain(seed: int) -> Any:
        engine, run = build(seed, slope=1.0)
        engine.detach("gradient_clipping")
        engine.attach(GradientNoise(0.1))
        return engine, run

    one = study(build=None, tasks={"steep": build_steep, "plain": plain}, scores=(5.0, 0.0), store=tmp_path / "s.jsonl")
    with pytest.raises(ValueError, match="build attaches no handler 'gradient_clipping'"):
        one.run(DESIGN, workers=0)
    assert not (tmp_path / "s.jsonl").exists()
    with pytest.raises(ValueError, match=r"'steep' and 'plain' .* because only one of them has - gradient_noise"):
        one.plan(LeaveOneOut())


@pytest.mark.moderate
def test_results_are_those_of_a_task() -> None:
    one = study()
    one.run(DESIGN, workers=0)
    with pytest.raises(ValueError, match=r"on a single task, such as study.tasks\['steep'\]"):
        one.results(one.plan(DESIGN))
    steep = one.tasks["steep"]
    assert len(steep.results(steep.plan(DESIGN))) == 6


@pytest.mark.moderate
def test_a_margin_of_the_score_is_one_of_each_task_in_its_own_unit() -> None:
    found = tasks_of(study(margin=0.5).run(DESIGN, workers=0))
    assert found.margin == 0.5
    assert {name: task.margin for name, task in found.tasks.items()} == {"steep": 10.0, "flat": 1.0}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"tasks": ["digits"]},
            TypeError,
            r"Study\(tasks=\['digits'\]\): expected a dict that maps task names",
        ),
        ({"tasks": {"one": {}}}, ValueError, "expected two or more tasks"),
        ({"tasks": {"one": build_flat, "two": {}}}, TypeError, "expected a dict that maps the argument names of build"),
        ({"build": None}, TypeError, "expected a function that takes a seed, because build="),
        ({"scores": None}, TypeError, r"set scores= to the values of the metric that map to a score of 0 and of 1"),
        ({"scores": {"steep": (1.0, 0.0)}}, ValueError, "the tasks steep, flat; these names do not match: flat"),
        ({"scores": (1.0, 1.0)}, ValueError, "expected two different finite numbers"),
        ({"scores": (1.0, float("nan"))}, ValueError, "expected two different finite numbers"),
        ({"scores": {"steep": 1.0, "flat": 2.0}}, TypeError, r"scores={'steep': 1.0}\): expected the two values"),
        ({"tasks": None}, ValueError, "scores= applies only with tasks="),
        (
            {"looks": [6, 8], "seeds": None},
            ValueError,
            "looks= does not work with several tasks; omit looks= or tasks=",
        ),
        ({"tasks": None, "scores": None, "build": None}, TypeError, r"Study\(build=None\): expected a function"),
    ],
)
def test_what_is_no_study_of_tasks_is_refused(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        study(**options)


def test_scores_of_the_wrong_direction_are_refused_before_anything_is_run(tmp_path: Path) -> None:
    one = study(scores={"steep": (2.0, 0.0), "flat": (0.0, 20.0)}, store=tmp_path / "store.jsonl")
    with pytest.raises(ValueError, match="smaller values are better, so 20 cannot count as 1 and 0 as 0"):
        one.run(DESIGN, workers=0)
    assert not one.store.read()


def test_a_design_that_would_replace_what_makes_a_task_is_refused() -> None:
    one = study(tasks={"slow": {"slope": 1.0, "rate": 0.01}, "fast": {"slope": 1.0, "rate": 0.1}}, scores=(9.0, 0.0))
    with pytest.raises(ValueError, match="the variant 'baseline' would overwrite rate of the task 'slow'"):
        one.run(Variants({"rate": 0.1}, rate=[0.2]), workers=0)


def test_the_builds_of_tasks_are_digested_as_any_other(tmp_path: Path) -> None:
    with open(__file__) as file, pytest.raises(TypeError, match="describe the value with config="):
        study(tasks={"one": {"slope": file}, "two": {"slope": 1.0}}, scores=(1.0, 0.0), store=tmp_path / "store.jsonl")
