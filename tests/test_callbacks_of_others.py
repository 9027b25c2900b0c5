"""What the tests of Keras' and torchtnt's callbacks expect, case by case and by meaning, of the handlers that do the same.

Sources: keras/src/callbacks/*_test.py of keras-team/keras, and tests/utils/test_early_stop_checker.py of pytorch/tnt. Keras
counts epochs from 0, this package from 1. What is different here is in `test_what_is_different_is_so_for_a_reason`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, MultiplicativeLR, ReduceLROnPlateau

from signalfire import Engine, Events, Phase
from signalfire.handlers import (
    Accuracy,
    Average,
    Checkpoint,
    EarlyStopping,
    History,
    LRScheduling,
    Metrics,
    NonFiniteGuard,
)
from tests.kit import batches, build, linear, mlp

NAN, INF = math.nan, math.inf


# ---- EarlyStopping ------------------------------------------------------------------------------------------------------


class Ended(NamedTuple):
    """The last epoch of a run, whether it was stopped, and the epoch whose weights the model has."""

    epoch: int
    stopped: bool
    weights_of: int


def early_stopping(
    values: Sequence[float | Tensor], *, name: str = "score", stopped_in: int | None = None, **options: Any
) -> Ended:
    """A run with one value in each epoch, whose weights are the number of the epoch."""
    engine = build(linear(5, 1), EarlyStopping(name, **options))

    def measure(engine: Engine) -> None:
        epoch = engine.state.epoch
        with torch.no_grad():
            engine.model.weight.fill_(epoch)
        engine.state.metrics[name] = values[epoch - 1]
        if epoch == stopped_in:
            engine.terminate("another one stops the run")

    engine.connect(Events.EPOCH_COMPLETED, measure, phase=Phase.PREPARE)
    engine.run(batches(1), max_epochs=len(values), check=False)
    reason = engine.state.stop_reason
    return Ended(engine.state.epoch, reason is not None, int(engine.model.weight[0, 0]))


KERAS_LOSSES = [10.0, 9.0, 8.0, 9.0, 8.9, 8.8, 8.7, 8.6, 8.5]


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_keras_early_stopping_patience(patience: int) -> None:
    assert early_stopping(KERAS_LOSSES, mode="min", patience=patience)[:2] == (patience + 3, True)


@pytest.mark.filterwarnings("ignore:W01:signalfire.FindingWarning")  # an error that is maximized
@pytest.mark.parametrize(
    ("mode", "name", "direction"),
    [("max", "mse", "max"), ("min", "loss", "min"), (None, "loss", "min"), (None, "accuracy", "max")],
)
def test_keras_early_stopping_mode(mode: Any, name: str, direction: str) -> None:
    stopper = EarlyStopping(name, mode=mode)
    metrics = Metrics(loss=Average(), mse=lambda output, target: output.sum(), accuracy=Accuracy())
    engine = build(linear(5, 3), metrics, stopper, loss=nn.functional.cross_entropy)
    engine.run([(torch.ones(4, 5), torch.tensor([0, 1, 2, 0]))], max_epochs=2, check=False)
    assert stopper.monitor.mode == direction


def test_keras_early_stopping_of_an_unknown_metric() -> None:
    engine = build(linear(5, 1), Metrics(loss=Average()), EarlyStopping("unknown", mode="min"))
    with pytest.raises(KeyError, match="unknown"):
        engine.run(batches(2), max_epochs=2)


def test_keras_early_stopping_reuse_across_models() -> None:
    stopper = EarlyStopping("score", mode="min", patience=2)
    for best in (1.0, 2.0, 3.0):  # none of which would improve on the first
        engine = build(linear(5, 1), stopper)
        values = [best + 2, best + 1, best, best, best, best]
        engine.connect(
            Events.EPOCH_COMPLETED,
            lambda engine, values=values: engine.state.metrics.update(score=values[engine.state.epoch - 1]),
            phase=Phase.PREPARE,
        )
        engine.run(batches(1), max_epochs=6, check=False)
        assert (engine.state.epoch, stopper.best) == (5, best)
        engine.detach(stopper)


def test_keras_early_stopping_restores_the_best_weights() -> None:
    found = early_stopping([0.2, 0.15, 0.1, 0.11, 0.12], mode="min", patience=2, restore_best=True)
    assert found == Ended(epoch=5, stopped=True, weights_of=3)


def test_keras_early_stopping_restores_where_another_stops_the_run() -> None:
    losses = [0.9, 0.8, 0.7, 0.71, 0.72, 0.73]
    found = early_stopping(losses, mode="min", patience=5, restore_best=True, stopped_in=4)
    assert found == Ended(epoch=4, stopped=True, weights_of=3)


@pytest.mark.parametrize(("patience", "epoch"), [(3, 6), (1, 4)])
def test_keras_early_stopping_start_from_epoch(patience: int, epoch: int) -> None:
    """Epochs 1 and 2 are left out, and the third is the first to compare with."""
    found = early_stopping([0.1, 0.2, *[0.5] * 10], mode="min", patience=patience, after="2ep")
    assert found[:2] == (epoch, True)


class Case(NamedTuple):
    values: Sequence[float]  # of which the last one stops the run
    options: dict[str, Any]


TORCHTNT = {
    "patience": Case([0.4, 0.3, 0.28, 0.25, 0.26, 0.25, 0.25], {"mode": "min", "patience": 3}),
    "more patience": Case([0.4, 0.3, 0.28, 0.25, 0.26, 0.25, 0.25, 0.25], {"mode": "min", "patience": 4}),
    "min_delta": Case([0.4, 0.38, 0.31, 0.25, 0.27, 0.24, 0.25], {"mode": "min", "patience": 3, "min_delta": 0.05}),
    "min_delta, more patience": Case(
        [0.4, 0.38, 0.31, 0.25, 0.27, 0.24, 0.25, 0.26], {"mode": "min", "patience": 4, "min_delta": 0.05}
    ),
    "max": Case([0.25, 0.3, 0.32, 0.38, 0.39, 0.41, 0.39], {"mode": "max", "patience": 3, "min_delta": 0.05}),
    "max, more patience": Case(
        [0.25, 0.3, 0.32, 0.38, 0.39, 0.41, 0.39, 0.35], {"mode": "max", "patience": 4, "min_delta": 0.05}
    ),
    "-inf": Case([0.4, 0.3, 0.28, 0.25, -INF], {"mode": "min", "patience": 3}),
    "nan": Case([0.4, 0.3, 0.28, 0.25, NAN], {"mode": "min", "patience": 3}),
    "threshold": Case([0.4, 0.3, 0.28, 0.25, 0.26, 0.25, 0.23], {"mode": "min", "patience": 6, "threshold": 0.24}),
    "threshold, max": Case([0.2, 0.3, 0.38, 0.4, 0.39, 0.4, 0.42], {"mode": "max", "patience": 6, "threshold": 0.41}),
    "relative": Case(
        [0.4, 0.39, 0.31, 0.25, 0.27, 0.24, 0.25], {"mode": "min", "patience": 3, "min_delta": 0.05, "relative": True}
    ),
    "relative, more patience": Case(
        [0.4, 0.39, 0.31, 0.25, 0.27, 0.24, 0.25, 0.24], {"mode": "min", "patience": 4, "min_delta": 0.05, "relative": True}
    ),
    "relative, max": Case(
        [0.25, 0.26, 0.32, 0.38, 0.39, 0.41, 0.41], {"mode": "max", "patience": 3, "min_delta": 0.1, "relative": True}
    ),
    "relative, max, more patience": Case(
        [0.25, 0.26, 0.32, 0.38, 0.39, 0.41, 0.40, 0.39], {"mode": "max", "patience": 4, "min_delta": 0.1, "relative": True}
    ),
    "divergence": Case([0.4, 0.3, 0.28, 0.25, 0.25, 0.3, 0.51], {"mode": "min", "patience": 6, "divergence": 0.5}),
    "divergence at the limit": Case(
        [0.4, 0.3, 0.28, 0.25, 0.25, 0.3, 0.5, 0.51], {"mode": "min", "patience": 6, "divergence": 0.5}
    ),
    "divergence, max": Case([0.2, 0.3, 0.38, 0.4, 0.3, 0.1, -0.06], {"mode": "max", "patience": 6, "divergence": -0.05}),
    "divergence, max, later": Case(
        [0.2, 0.3, 0.38, 0.4, 0.3, 0.1, -0.03, -0.06], {"mode": "max", "patience": 6, "divergence": -0.05}
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", [float, torch.tensor])
@pytest.mark.parametrize("name", TORCHTNT)
def test_torchtnt_stops_at_the_last_value_and_not_before(name: str, kind: Callable[[float], Any]) -> None:
    values, options = TORCHTNT[name]
    more = [kind(value) for value in (*values, 0.3)]  # so that the run could go on
    assert early_stopping(more, **options)[:2] == (len(values), True)


def test_torchtnt_a_loaded_state_continues() -> None:
    values = [0.4, 0.3, 0.28, 0.25, 0.26, 0.25, 0.25, 0.25]
    saved: list[Any] = []

    def engine_of() -> tuple[Engine, EarlyStopping]:
        stopper = EarlyStopping("score", mode="min", patience=3)
        engine = build(linear(5, 1), stopper)
        engine.connect(
            Events.EPOCH_COMPLETED,
            lambda engine: engine.state.metrics.update(score=values[engine.state.epoch - 1]),
            phase=Phase.PREPARE,
        )
        return engine, stopper

    engine, stopper = engine_of()
    engine.connect(
        Events.EPOCH_COMPLETED(once=6), lambda engine: saved.append(engine.state_dict()), phase=Phase.PERSIST
    )
    engine.run(batches(1), max_epochs=8, check=False)
    assert engine.state.epoch == 7
    again, other = engine_of()
    again.load_state_dict(saved[0])
    again.run(batches(1), max_epochs=8, check=False)
    assert again.state.epoch == 7
    assert (other.best, other.waited) == (stopper.best, stopper.waited) == (0.25, 3)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"mode": "invalid"}, r"mode='invalid'"),
        ({"mode": "min", "min_delta": -1}, r"min_delta=-1"),
    ],
)
def test_torchtnt_wrong_arguments(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        EarlyStopping("score", **options)


def test_torchtnt_a_tensor_of_several_elements() -> None:
    with pytest.raises((TypeError, ValueError), match="score"):
        early_stopping([torch.ones(3)], mode="min")


# ---- learning rates -----------------------------------------------------------------------------------------------------


def rates(
    scheduler: Any, epochs: int, *, values: Sequence[float] | None = None, lr: float = 0.1, **options: Any
) -> list[float]:
    """The rate in each epoch, and the one after the last."""
    engine = build(linear(5, 1), LRScheduling(scheduler, **options), optimizer=partial(torch.optim.SGD, lr=lr))
    found: list[float] = []
    note = lambda engine: found.append(engine.updates[0].optimizer.param_groups[0]["lr"])  # noqa: E731
    if values is not None:
        engine.connect(
            Events.EPOCH_COMPLETED,
            lambda engine: engine.state.metrics.update(score=values[engine.state.epoch - 1]),
            phase=Phase.PREPARE,
        )
    engine.connect(Events.EPOCH_STARTED, note)
    engine.connect(Events.COMPLETED, note)
    engine.run(batches(1), max_epochs=epochs, check=False)
    return found


def plateau(**options: Any) -> Any:
    """Keras reduces after as many values as `patience`, torch after one more."""
    return partial(ReduceLROnPlateau, mode="min", patience=0, factor=0.1, threshold_mode="abs", **options)


def test_keras_plateau_reduces_the_rate() -> None:
    assert rates(plateau(threshold=100), 2, values=[1.0, 0.5], monitor="score")[-1] == pytest.approx(0.01)


def test_keras_plateau_honours_the_smallest_rate() -> None:
    found = rates(plateau(threshold=10, min_lr=0.005), 4, values=[1.0, 0.9, 0.8, 0.7], monitor="score")
    assert found[-1] == 0.005


def test_keras_two_schedules_of_one_optimizer_are_refused() -> None:
    constant = LRScheduling(partial(LambdaLR, lr_lambda=float), name="constant")
    with pytest.raises(ValueError, match="both 'lr_scheduling' and 'constant' control"):
        build(linear(5, 1), LRScheduling(plateau(), monitor="score"), constant)


def test_keras_scheduler_sets_the_rate_and_the_history_has_it() -> None:
    schedule = partial(LambdaLR, lr_lambda=lambda epoch: 1.0 / (2.0 + epoch))
    assert rates(schedule, 1, lr=1.0, every="1ep")[0] == 0.5
    history = History()
    engine = build(
        linear(5, 1), LRScheduling(schedule, every="1ep"), history, optimizer=partial(torch.optim.SGD, lr=1.0)
    )
    engine.connect(
        Events.EPOCH_COMPLETED, lambda engine: engine.log("lr", engine.updates[0].optimizer.param_groups[0]["lr"])
    )
    engine.run(batches(1), max_epochs=1, check=False)
    assert [type(value) for *_, value in history.records["lr"]] == [float]


# ---- checkpoints --------------------------------------------------------------------------------------------------------


def kept(
    folder: Path, *, epochs: int = 1, iterations: int = 2, values: Sequence[float] = (0.5,), **options: Any
) -> list[str]:
    """The checkpoints that a run has left."""
    engine = build(mlp(5, 8, 1), Checkpoint(folder, **options))
    engine.connect(
        Events.EPOCH_COMPLETED,
        lambda engine: engine.state.metrics.update(score=values[engine.state.epoch - 1]),
        phase=Phase.PREPARE,
    )
    engine.run(batches(iterations), max_epochs=epochs, check=False)
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


@pytest.mark.parametrize(
    "options",
    [{"every": "1ep"}, {"monitor": "score", "mode": "min"}, {"monitor": "score", "mode": "max"}],
    ids=str,
)
def test_keras_checkpoint_makes_its_folder_and_saves(options: dict[str, Any], tmp_path: Path) -> None:
    assert len(kept(tmp_path / "sub", **options)) == 1


def test_keras_checkpoint_keeps_the_best_only(tmp_path: Path) -> None:
    found = kept(tmp_path, epochs=4, values=[0.5, 0.3, 0.4, 0.35], monitor="score", mode="min", filename="{epoch}")
    assert found == ["2"]


@pytest.mark.parametrize("weights_only", [False, True])
def test_keras_checkpoint_every_fifteen_batches_of_five_an_epoch(weights_only: bool, tmp_path: Path) -> None:
    found = kept(
        tmp_path,
        epochs=10,
        iterations=5,
        values=[0.5] * 10,
        every="15it",
        keep=10,
        filename="{epoch}",
        weights_only=weights_only,
    )
    assert found == ["3", "6", "9"]


def test_keras_checkpoint_names_with_the_batch(tmp_path: Path) -> None:
    found = kept(
        tmp_path, epochs=5, values=[0.5] * 5, every="1it", keep=99, filename="epoch{epoch:02d}iteration{iteration:02d}"
    )
    assert found == [f"epoch{(at + 1) // 2:02d}iteration{at:02d}" for at in range(1, 11)]


@pytest.mark.parametrize(
    ("options", "problem"),
    [({"monitor": "score", "mode": "unknown"}, "mode='unknown'"), ({"every": "invalid"}, "invalid")],
    ids=str,
)
def test_keras_checkpoint_wrong_arguments(options: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        Checkpoint(tmp_path, **options)


# ---- NaN ----------------------------------------------------------------------------------------------------------------


def with_infinite_targets(*targets: float) -> list[tuple[Tensor, Tensor]]:
    return [(torch.ones(1, 1), torch.tensor([[target]])) for target in targets]


def test_keras_nan_ends_the_run_in_its_iteration() -> None:
    engine = build(linear(1, 1), NonFiniteGuard(check="both", action="stop"))
    engine.run(with_infinite_targets(INF, INF), max_epochs=20, check=False)
    assert (engine.state.epoch, engine.state.iteration) == (1, 1)
    assert engine.state.stop_reason is not None


@pytest.mark.parametrize(("targets", "iteration"), [((INF,), 1), ((1.0, INF), 2)])
def test_keras_nan_is_an_error_that_names_the_batch(targets: tuple[float, ...], iteration: int, tmp_path: Path) -> None:
    (tmp_path / "checkpoint.txt").write_text("kept")
    engine = build(linear(1, 1), NonFiniteGuard(check="both", action="raise"), Checkpoint(tmp_path, every="1it"))
    completed: list[int] = []
    engine.connect(Events.COMPLETED, lambda engine: completed.append(1))
    with pytest.raises(FloatingPointError, match=f"iteration {iteration}"):
        engine.run(with_infinite_targets(*targets), max_epochs=1, check=False)
    assert completed == []
    assert (tmp_path / "checkpoint.txt").read_text() == "kept"


@pytest.mark.parametrize("action", ["stop", "raise"])
def test_keras_finite_losses_are_not_noticed(action: Any) -> None:
    engine = build(linear(1, 1), NonFiniteGuard(check="both", action=action))
    engine.run(with_infinite_targets(1.0, 1.0), max_epochs=2, check=False)
    assert (engine.state.epoch, engine.state.stop_reason) == (2, None)


# ---- what is different --------------------------------------------------------------------------------------------------


def patience_of_zero() -> None:
    """Keras takes a patience of 0 for 1; here it is refused, since a run cannot stop before it has compared two values."""
    with pytest.raises(ValueError, match="patience=0"):
        EarlyStopping("score", patience=0)


def no_baseline() -> None:
    """Keras' baseline is a value to improve on at once: a function that logs nothing until then says the same."""
    with pytest.raises(TypeError, match="baseline"):
        EarlyStopping("score", baseline=0.5)  # type: ignore[call-arg]


def cooldown_as_in_torch() -> None:
    """torch's plateau waits for the whole cooldown, where Keras reduces every other epoch: the scheduler is torch's."""
    found = rates(plateau(threshold=100, cooldown=2), 4, values=[1.0] * 4, monitor="score")
    assert found[-1] == pytest.approx(0.01)


def first_epoch_at_the_base_rate() -> None:
    """Keras calls a schedule before the first epoch as well; torch's MultiplicativeLR leaves that one at the base rate."""
    assert rates(partial(MultiplicativeLR, lr_lambda=lambda epoch: 0.5), 2, lr=0.03, every="1ep")[:2] == [0.03, 0.015]


def an_unknown_metric_of_a_checkpoint() -> None:
    """Keras warns and writes nothing; here it is an error before the first batch."""
    engine = build(linear(5, 1), Metrics(loss=Average()), Checkpoint("unused", monitor="unknown", mode="min"))
    with pytest.raises(KeyError, match="unknown"):
        engine.run(batches(2), max_epochs=1)


def ended_after_an_error() -> None:
    """Keras calls no on_train_end after an error; ENDED is always emitted, so that handlers leave no trace. COMPLETED is not."""
    engine = build(linear(1, 1), NonFiniteGuard(check="both", action="raise"))
    seen: list[str] = []
    engine.connect(Events.ENDED, lambda engine: seen.append("ended"))
    with pytest.raises(FloatingPointError):
        engine.run(with_infinite_targets(INF), max_epochs=1, check=False)
    assert seen == ["ended"]


def no_threshold_of_a_checkpoint() -> None:
    """Keras' initial_value_threshold keeps nothing that is worse; a function that logs the metric from there on does."""
    with pytest.raises(TypeError, match="initial_value_threshold"):
        Checkpoint("unused", monitor="score", initial_value_threshold=0.0)  # type: ignore[call-arg]


DIFFERENT = [
    patience_of_zero, no_baseline, cooldown_as_in_torch, first_epoch_at_the_base_rate, an_unknown_metric_of_a_checkpoint,
    ended_after_an_error, no_threshold_of_a_checkpoint,
]  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENT, ids=lambda case: case.__name__)
def test_what_is_different_is_so_for_a_reason(
    case: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    case()
