"""Values are reported once, and what the searcher answers ends the run in the usual way."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from signalfire import Engine, Events, Update
from signalfire.handlers import Average, Checkpoint, CSVLogger, Metrics, OptunaPruning, Reporting, Validation
from tests.kit import assert_same, batches, mlp, needs

mse_loss = nn.functional.mse_loss


def trainer(*handlers: Any, lr: float = 0.1, sanity: int = 0, every: str = "1ep") -> Engine:
    model = mlp(5, 8, 1)
    update = Update.supervised(mse_loss, partial(torch.optim.SGD, lr=lr))
    evaluator = Engine(update.evaluation(), model=model)
    evaluator.attach(Metrics(loss=Average(mse_loss)))
    engine = Engine(update, model=model, seed=0)
    engine.attach(Validation(evaluator, batches(2, seed=1), prefix="val_", sanity=sanity, every=every), *handlers)
    return engine


def losses(epochs: int, lr: float = 0.1) -> list[float]:
    """The validation's losses of the plain loop."""
    model = mlp(5, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    found = []
    for _ in range(epochs):
        for x, y in batches():
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            values = [mse_loss(model(x), y).double() for x, y in batches(2, seed=1)]
        found.append(torch.stack(values).mean().item())
    return found


def test_each_value_is_reported_once_and_equals_the_plain_loops() -> None:
    seen: list[tuple[float, int]] = []
    engine = trainer(Reporting(lambda value, step: seen.append((value, step)), "val_loss"), sanity=1)
    engine.run(batches(), max_epochs=4)
    assert seen == [(value, step) for step, value in enumerate(losses(4))]


def test_a_true_answer_ends_the_run_in_the_usual_way(tmp_path: Path) -> None:
    events: list[str] = []
    engine = trainer(
        Reporting(lambda value, step: step == 2, "val_loss"),
        CSVLogger(tmp_path / "log.csv"),
        Checkpoint(tmp_path / "saved"),
    )
    for event in (Events.TERMINATED, Events.COMPLETED, Events.ENDED):
        engine.connect(event, lambda engine, name=event.name: events.append(name))
    engine.run(batches(), max_epochs=9)
    assert (engine.state.epoch, engine.state.stop_reason) == (3, "pruned")
    assert events == ["TERMINATED", "COMPLETED", "ENDED"]
    assert engine.state.metrics["val_loss"] == losses(3)[-1]
    assert len(list((tmp_path / "saved").glob("checkpoint-epoch0003*"))) == 1


def test_resumed_the_steps_go_on() -> None:
    seen: list[tuple[float, int]] = []
    first = trainer(Reporting(lambda value, step: seen.append((value, step)), "val_loss"))
    first.run(batches(), max_epochs=2)
    second = trainer(Reporting(lambda value, step: seen.append((value, step)), "val_loss"))
    second.load_state_dict(first.state_dict())
    second.run(batches(), max_epochs=4)
    assert seen == [(value, step) for step, value in enumerate(losses(4))]


def test_an_error_of_the_function_is_that_of_the_run() -> None:
    def report(value: float, step: int) -> bool:
        raise ConnectionError("no searcher there")

    with pytest.raises(ConnectionError, match="no searcher there"):
        trainer(Reporting(report, "val_loss")).run(batches(), max_epochs=1)


def test_what_is_wrong_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Reporting\(report=3\): expected a function"):
        Reporting(3, "val_loss")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"OptunaPruning\(trial=3\): expected an Optuna trial"):
        OptunaPruning(3, "val_loss")
    with pytest.raises(TypeError, match=r"trial=None\): pass the trial on rank 0"):
        trainer(OptunaPruning(None, "val_loss")).run(batches(), max_epochs=1)
    engine = trainer(Reporting(lambda value, step: None, "val_los"))
    with pytest.raises(KeyError, match="did you mean 'val_loss'"):
        engine.run(batches(), max_epochs=1)


# ---- Optuna ---------------------------------------------------------------------------------------------------------


def objective(trial: Any, ended: list[str], *, plain: bool = False) -> float:
    lr = trial.suggest_float("lr", 1e-3, 0.3, log=True)
    if plain:
        import optuna

        for step, value in enumerate(losses(5, lr)):
            trial.report(value, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return value
    engine = trainer(OptunaPruning(trial, "val_loss"), lr=lr)
    engine.connect(Events.ENDED, lambda engine: ended.append("ended"))
    engine.run(batches(), max_epochs=5)
    return float(engine.state.metrics["val_loss"])


@pytest.mark.moderate
@pytest.mark.filterwarnings("default")
def test_trials_are_bit_equal_to_the_plain_loops_and_prune_as_these_do() -> None:
    needs("search", "optuna")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    found = []
    for plain in (False, True):
        ended: list[str] = []
        study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=0), pruner=optuna.pruners.MedianPruner(n_startup_trials=3)
        )
        study.optimize(partial(objective, ended=ended, plain=plain), n_trials=20)
        found.append([(trial.state.name, trial.value, trial.intermediate_values) for trial in study.trials])
        assert plain or len(ended) == 20
    assert found[0] == found[1]
    states = [state for state, *_ in found[0]]
    assert 0 < states.count("PRUNED") < 17
    assert states.count("PRUNED") + states.count("COMPLETE") == 20


@pytest.mark.moderate
@pytest.mark.filterwarnings("default")
def test_a_pruner_that_prunes_at_three_leaves_three_epochs_and_a_checkpoint_that_loads(tmp_path: Path) -> None:
    needs("search", "optuna")
    import optuna

    class AtThree(optuna.pruners.BasePruner):  # type: ignore[misc]
        def prune(self, study: Any, trial: Any) -> bool:
            return len(trial.intermediate_values) == 3

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    engines: list[Engine] = []

    def objective(trial: Any) -> float:
        engines.append(trainer(OptunaPruning(trial, "val_loss"), Checkpoint(tmp_path), CSVLogger(tmp_path / "log.csv")))
        engines[0].run(batches(), max_epochs=9)
        return 0.0

    study = optuna.create_study(pruner=AtThree())
    study.optimize(objective, n_trials=1)
    assert [trial.state.name for trial in study.trials] == ["PRUNED"]
    assert engines[0].state.epoch == 3
    assert not engines[0].running
    trial = optuna.create_study(pruner=optuna.pruners.NopPruner()).ask()
    again = trainer(
        OptunaPruning(trial, "val_loss"), Checkpoint(tmp_path, resume=True), CSVLogger(tmp_path / "log.csv")
    )
    with pytest.raises(optuna.TrialPruned, match="pruned after 3 reported values of 'val_loss'"):  # not finished
        again.run(batches(), max_epochs=9)
    assert again.state.metrics["val_loss"] == losses(3)[-1]
    assert_same(again.model, engines[0].model)


@pytest.mark.filterwarnings("default")
def test_the_direction_is_that_of_the_study_and_several_objectives_are_refused() -> None:
    needs("search", "optuna")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    assert OptunaPruning(optuna.create_study(direction="maximize").ask(), "accuracy").monitor.mode == "max"
    assert OptunaPruning(optuna.create_study().ask(), "accuracy").monitor.mode == "min"
    several = optuna.create_study(directions=["minimize", "maximize"]).ask()
    with pytest.raises(ValueError, match="the study has 2 objectives"):
        OptunaPruning(several, "accuracy")
