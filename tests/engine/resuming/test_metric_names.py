"""Metrics of a saved state continue under their current names, with patience, best value and history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from signalfire import Engine, Events
from signalfire.handlers import Checkpoint, EarlyStopping, History, Validation
from tests.kit import batches, build, evaluator_of, mlp

TRAINING, HELD_OUT = batches(4), {"clean": batches(2, seed=1), "noisy": batches(2, seed=2)}


def composed(folder: Path, monitor: str, *, data: Any, long: str | None = None) -> Engine:
    """An engine with a validation; in the long form with this prefix, if there is one."""
    model = mlp(5, 8, 1)
    validation = Validation(data) if long is None else Validation(evaluator_of(model), data, prefix=long)
    best = Checkpoint(folder, monitor=monitor, mode="min", keep=2, name="best")
    return build(model, validation, EarlyStopping(monitor, mode="min", min_delta=100, patience=4), History(), best)


@pytest.mark.filterwarnings("ignore:W08")  # no value improves by so much, so patience counts from the first one on
@pytest.mark.parametrize(
    ("data", "prefix", "before", "now"),
    [
        (HELD_OUT["clean"], "val/", "val/loss", "val/loss"),
        (HELD_OUT["clean"], "val/", "val/loss", "val_loss"),
        (HELD_OUT["clean"], "", "loss", "val_loss"),
        (HELD_OUT, "", "noisy/loss", "noisy/loss"),
        (HELD_OUT, "", "noisy/loss", "val_noisy_loss"),
    ],
)
def test_a_run_goes_on_where_its_metrics_are_called_otherwise(
    data: Any, prefix: str, before: str, now: str, tmp_path: Path
) -> None:
    straight = composed(tmp_path / "straight", before, data=data, long=prefix)
    straight.run(TRAINING, max_epochs=20)
    assert straight.state.epoch == 5

    first = composed(tmp_path / "resumed", before, data=data, long=prefix)
    first.run(TRAINING, max_epochs=3)
    second = composed(tmp_path / "resumed", now, data=data)
    second.load_state_dict(first.state_dict())
    second.run(TRAINING, max_epochs=20)
    assert second.state.epoch == straight.state.epoch
    assert second["early_stopping"].best == straight["early_stopping"].best
    kept, expected = (sorted(path.name for path in (tmp_path / one).iterdir()) for one in ("resumed", "straight"))
    assert [name.partition("-epoch")[2] for name in kept] == [name.partition("-epoch")[2] for name in expected]
    name = now if now.startswith("val_") else f"val_{now.removeprefix('val/')}".replace("/", "_")
    assert second["history"][name] == straight["history"][before]


def test_a_metric_of_the_training_does_not_become_one_of_a_validation() -> None:
    first = build(mlp(5, 8, 1))
    first.connect(Events.EPOCH_COMPLETED, lambda engine: engine.log("loss", 1.0))
    first.run(TRAINING, max_epochs=1)
    second = build(mlp(5, 8, 1), Validation(HELD_OUT["clean"]))
    second.load_state_dict(first.state_dict())
    second.run(TRAINING, max_epochs=2)
    assert second.state.metrics.serials == {"loss": 1, "val_loss": 1}
