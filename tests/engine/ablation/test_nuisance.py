"""Nuisance tuning: each variant gets the best of the same values, by runs of other seeds than those that are reported."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from signalfire import Engine, Events, Update, seed_everything
from signalfire.ablation import LeaveOneOut, Study, Swap, Variants, read_reports, tune
from signalfire.handlers import Average, GradientClipping, GradientNoise, Metrics, Validation
from tests.engine.ablation import builds
from tests.engine.ablation.test_study import apart_from_timings
from tests.kit import needs

DESIGN = LeaveOneOut(["gradient_clipping", "gradient_noise"])
VALUES = [0.03, 0.3, 1.5]
SEEDS = range(100, 102)


def composed(seed: int, lr: float) -> Engine:
    model = nn.Linear(2, 1)
    update = Update.supervised(mse_loss, partial(torch.optim.SGD, lr=lr))
    evaluator = Engine(update.evaluation(), model=model)
    evaluator.attach(Metrics(loss=Average(mse_loss)))
    trainer = Engine(update, model=model, seed=seed)
    trainer.attach(
        Validation(evaluator, builds.data(1000), prefix="val_"), GradientClipping(max_norm=0.1), GradientNoise(0.01)
    )
    return trainer


def build(seed: int, lr: float) -> Any:
    return composed(seed, lr), builds.train


def failing(seed: int, lr: float) -> Any:
    """With the largest rate, one of the runs fails; the other is the best of all."""
    engine = composed(seed, lr)

    @engine.on(Events.ITERATION_COMPLETED(once=2))
    def fail(engine: Engine) -> None:
        if seed == 100 and lr == 1.5:
            raise ValueError("it exploded")

    return engine, builds.train


def study_of(build: Any = build, **options: Any) -> Study:
    return Study(build, **{"metric": "val_loss", "mode": "min", "seeds": range(2)} | options)


def trained(seed: int, lr: float, off: str) -> float:
    """The metric of a run by itself."""
    seed_everything(seed)
    engine = composed(seed, lr)
    engine.streams = "separate"
    with engine.without(*([off] if off else [])):
        builds.train(engine)
    return float(engine.state.metrics["val_loss"])


OFF = {"baseline": "", "- gradient_clipping": "gradient_clipping", "- gradient_noise": "gradient_noise"}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a study whose learning rates were tuned."""
    path = tmp_path_factory.mktemp("tuned") / "store.jsonl"
    study = study_of(store=path)
    study.run(tune(study, DESIGN, arguments={"lr": VALUES}, seeds=SEEDS, workers=0), workers=0)
    return path


@pytest.mark.moderate
def test_each_variant_gets_the_best_value_of_the_same_grid_on_other_seeds(stored: Path) -> None:
    before = stored.read_bytes()
    study = study_of(store=stored)
    tuned = tune(study, DESIGN, arguments={"lr": VALUES}, seeds=SEEDS, workers=0)
    report = study.run(tuned, workers=0)
    assert stored.read_bytes() == before  # all of it is stored, the tuning as well
    means = {name: [np.mean([trained(seed, lr, off) for seed in SEEDS]) for lr in VALUES] for name, off in OFF.items()}
    assert tuned.chosen == {name: {"lr": VALUES[int(np.argmin(those))]} for name, those in means.items()}
    assert len({values["lr"] for values in tuned.chosen.values()}) == 2  # what suits one does not suit another
    for row in report.rows:
        name = row.variant.name
        assert dict(row.values) == {seed: trained(seed, tuned.chosen[name]["lr"], OFF[name]) for seed in range(2)}
    runs = [(line["variant"], line["seed"]) for line in map(json.loads, before.splitlines())]
    assert len(runs) == 3 * 3 * 2 + 3 * 2  # three variants, three values and two seeds; then one value and two seeds
    labels = ["", " [lr = 0.3]", " [lr = 1.5]"]
    assert all(runs.count((name + label, seed)) == 1 for name in OFF for label in labels for seed in SEEDS)


@pytest.mark.moderate
def test_the_report_says_what_was_tuned_and_how(stored: Path) -> None:
    study = study_of(store=stored)
    tuned = tune(study, DESIGN, arguments={"lr": VALUES}, seeds=SEEDS, workers=0)
    report = study.report(tuned)
    assert (
        "The argument lr of build was tuned for each variant with the same budget, each value (lr: 0.03, 0.3, 1.5), "
        "over 2 seeds (100 and 101) that are not reported; the values with the best mean of val_loss were chosen: "
    ) in report.methods()
    for name, values in tuned.chosen.items():
        (part,) = (part for part in tuned.facts[0].split(": ")[-1].split(";") if f'"{name}"' in part)
        assert f"lr = {values['lr']:g} for" in part
    edge = [name for name, values in tuned.chosen.items() if values["lr"] in (0.03, 1.5)]
    warning = [one for one in report.warnings() if "at the edge of the range that was tried" in one]
    assert len(warning) == 1
    assert all((f'"{name}"' in warning[0]) == (name in edge) for name in OFF)


@pytest.mark.moderate
def test_the_store_is_read_without_the_code(stored: Path) -> None:
    reports = read_reports(stored)
    assert len(reports) == 2
    (own,) = [report for title, report in reports.items() if "tuning" not in title]
    assert own.seeds == (0, 1)


@pytest.mark.slow
def test_tuning_by_an_executor_leaves_the_same_store(stored: Path, tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    study = study_of(store=path)
    with ThreadPoolExecutor(3) as executor:
        study.run(tune(study, DESIGN, arguments={"lr": VALUES}, seeds=SEEDS, workers=executor), workers=executor)
    assert apart_from_timings(path) == apart_from_timings(stored)


@pytest.mark.moderate
def test_a_value_whose_runs_fail_is_taken_by_none_of_those_that_finish() -> None:
    design = LeaveOneOut(["gradient_noise"])
    tuned = tune(study_of(failing), design, arguments={"lr": [0.01, 1.5]}, seeds=SEEDS, workers=0)
    assert all(values == {"lr": 0.01} for values in tuned.chosen.values())
    assert tuned.limits == ()
    hopeless = tune(study_of(failing), design, arguments={"lr": [1.5]}, seeds=SEEDS, workers=0)
    assert hopeless.limits[0] == '"baseline": 1 tuning run failed even with the best values found by tuning'


@pytest.mark.slow
def test_a_search_is_that_of_optuna_for_each_variant_and_resumes(tmp_path: Path) -> None:
    needs("search", "optuna")
    import optuna

    def suggest(trial: Any) -> float:
        return float(trial.suggest_float("lr", 0.01, 1.0, log=True))

    path = tmp_path / "store.jsonl"
    tuned = tune(study_of(store=path), DESIGN, arguments={"lr": suggest}, seeds=SEEDS, trials=12, workers=0)
    for name, off in OFF.items():
        search = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))

        def objective(trial: Any, off: str = off) -> float:
            lr = suggest(trial)
            return float(np.mean([trained(seed, lr, off) for seed in SEEDS]))

        search.optimize(objective, n_trials=12)
        assert tuned.chosen[name]["lr"] == pytest.approx(search.best_params["lr"], rel=1e-9)
    assert "12 trials with Optuna's TPE sampler, over 2 seeds (100 and 101)" in tuned.facts[0]
    before = path.read_bytes()
    again = tune(study_of(store=path), DESIGN, arguments={"lr": suggest}, seeds=SEEDS, trials=12, workers=0)
    assert path.read_bytes() == before
    assert again.chosen == tuned.chosen


@pytest.mark.slow
def test_any_design_and_several_arguments_can_be_tuned() -> None:
    study = study_of(wide, seeds=[0])
    tuned = tune(
        study,
        Variants({"width": 1}, width=[2]),
        arguments={"lr": [0.01, 0.3], "norm": [0.1, 1.0]},
        seeds=[100],
        workers=0,
    )
    assert set(tuned.chosen) == {"baseline", "width = 2"}
    arguments = {row.variant.name: dict(row.variant.arguments) for row in study.run(tuned, workers=0).rows}
    assert arguments == {
        "baseline": {"width": 1, **tuned.chosen["baseline"]},
        "width = 2": {"width": 2, **tuned.chosen["width = 2"]},
    }
    assert "each of 4 combinations (lr: 0.01, 0.3; norm: 0.1, 1.0)" in tuned.facts[0]
    swap = Swap({"gradient_noise": {"less": partial(GradientNoise, 0.001)}})
    swapped = tune(study_of(seeds=[0]), swap, arguments={"lr": [0.3]}, seeds=[100], workers=0)
    assert list(swapped.chosen) == ["baseline", "gradient_noise = less"]


def wide(seed: int, width: int, lr: float, norm: float) -> Any:
    model = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))
    update = Update.supervised(mse_loss, partial(torch.optim.SGD, lr=lr))
    evaluator = Engine(update.evaluation(), model=model)
    evaluator.attach(Metrics(loss=Average(mse_loss)))
    trainer = Engine(update, model=model, seed=seed)
    trainer.attach(Validation(evaluator, builds.data(1000), prefix="val_"), GradientClipping(max_norm=norm))
    return trainer, builds.train


def test_what_distinguishes_the_variants_cannot_be_tuned() -> None:
    design = Variants({"lr": 0.1, "norm": 0.1, "width": 2}, width=[4], lr=[0.3])
    with pytest.raises(ValueError, match=r"the variant 'lr = 0.3' sets lr itself, and tuning would overwrite its"):
        tune(study_of(wide), design, arguments={"norm": [0.1, 0.2], "lr": [0.1, 0.2]}, seeds=[100], workers=0)


@pytest.mark.moderate
def test_tuning_in_two_steps_keeps_the_first_and_says_so() -> None:
    study = study_of(wide)
    first = tune(
        study,
        Variants({"lr": 0.1, "norm": 0.1, "width": 2}, width=[4]),
        arguments={"lr": [0.2]},
        seeds=[100],
        workers=0,
    )
    both = tune(study, first, arguments={"norm": [0.3]}, seeds=[101], workers=0)
    assert [dict(one.arguments) for one in both.variants([])] == [
        {"lr": 0.2, "norm": 0.3, "width": width} for width in (2, 4)
    ]
    assert [fact[:23] for fact in both.facts] == ["The argument lr of buil", "The argument norm of bu"]


@pytest.mark.moderate
def test_what_is_wrong_is_refused() -> None:
    for options, error, what in (
        ({"seeds": range(1, 4)}, ValueError, r"already reports results for the seeds \[1\]; tune with different seeds"),
        ({"seeds": []}, ValueError, r"tune\(seeds=\[\]\)"),
        ({"arguments": {}}, TypeError, "expected a dict that maps arguments to values"),
        ({"arguments": {"lr": []}}, TypeError, "expected a list of values"),
        ({"arguments": {"lr": "0.1"}}, TypeError, "expected a list of values"),
        ({"arguments": {"lr": float}}, TypeError, "to pass a function that suggests values, also set trials="),
        ({"trials": 3}, TypeError, "expected a function that takes a trial, such as lambda trial"),
        ({"trials": 0}, ValueError, "trials"),
    ):
        given: dict[str, Any] = {"arguments": {"lr": [0.1]}, "seeds": [100], "workers": 0} | options
        with pytest.raises(error, match=what):
            tune(study_of(), DESIGN, **given)
    several = study_of(tasks={"one": {}, "two": {}}, scores=(1.0, 0.0))
    with pytest.raises(
        ValueError,
        match=r"the study has several tasks, .* tune the tasks one at a time, as in tune\(study.tasks\['one'\], ...\)",
    ):
        tune(several, DESIGN, arguments={"lr": [0.1]}, seeds=[100], workers=0)
    tuned = tune(study_of(seeds=[0]), LeaveOneOut(["gradient_noise"]), arguments={"lr": [0.1]}, seeds=[100], workers=0)
    tuned.designs = (DESIGN,)
    with pytest.raises(
        ValueError, match="the variant '- gradient_clipping' was not tuned; the tuned variants are baseline, -"
    ):
        study_of(seeds=[0]).plan(tuned)
