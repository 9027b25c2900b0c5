"""Checkpoints that earlier versions wrote still load, and the run continues from them.

`version-0.1` was written by version 0.1.0, inside an epoch and inside an accumulation window; `version-0.1.json` says how that
run ended. So are those of 0.2.0. Run this file as a script to write such files with the version that is installed.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import Adam
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Update
from signalfire.handlers import (
    EMA,
    Average,
    Checkpoint,
    EarlyStopping,
    GradientAccumulation,
    GradientClipping,
    History,
    LRScheduling,
    Metrics,
    NonFiniteGuard,
    Validation,
)
from tests.kit import needs_torch

FILES = Path(__file__).parent / "files"
VERSIONS = ["0.1", "0.2"]
EPOCHS, SAVED_AT = 4, 8  # of 5 batches each, in windows of 2


def build(folder: Path, monitor: str = "") -> tuple[Engine, DataLoader[Any]]:
    """The run of the files; with a ``monitor``, in the short form of a validation."""
    torch.manual_seed(1)
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Tanh(), nn.Linear(4, 2)]
    model = nn.Sequential(*layers)
    update = Update.supervised(mse_loss, partial(Adam, lr=1e-2))
    evaluator, held_out = Engine(update.evaluation(), model=model), [(torch.ones(4, 3), torch.zeros(4, 2))]
    evaluator.attach(Metrics(error=Average()))
    engine = Engine(update, model=model, seed=0)
    engine.attach(
        Validation(held_out, error=Average()) if monitor else Validation(evaluator, held_out),
        GradientAccumulation(2),
        GradientClipping(max_norm=1.0),
        EMA(0.9),
        LRScheduling(partial(OneCycleLR, max_lr=0.05)),
        EarlyStopping(monitor or "error", mode="min", patience=50),
        History(),
        NonFiniteGuard(),
        Checkpoint(folder, every="1it", keep=100, name="each", hyperparameters={"lr": 0.01}),
    )
    inputs, targets = torch.arange(60.0).reshape(20, 3) / 60, torch.arange(40.0).reshape(20, 2) / 40
    return engine, DataLoader(TensorDataset(inputs, targets), batch_size=4, shuffle=True)


def outcome(engine: Engine) -> dict[str, Any]:
    state = engine.state_dict()
    return {
        "epoch": engine.state.epoch,
        "iteration": engine.state.iteration,
        "steps": engine.updates[0].steps,
        "metrics": dict(engine.state.metrics),
        "patience": state["handlers"]["early_stopping"],
        "weights": {name: tensor.tolist() for name, tensor in engine.modules["model"].state_dict().items()},
    }


@needs_torch(2, 9, why="the attributes of the schedules that the checkpoints hold")
@pytest.mark.moderate
@pytest.mark.filterwarnings("ignore:the run resumes from .* in a different environment")  # such as on another processor
@pytest.mark.parametrize("version", VERSIONS)
def test_a_run_continues_from_a_checkpoint_of_an_earlier_version(version: str, tmp_path: Path) -> None:
    (saved,) = FILES.glob(f"version-{version}/*")
    engine, data = build(tmp_path)
    engine.load_state_dict(Checkpoint.load(saved))
    engine.run(data, max_epochs=EPOCHS)
    expected = json.loads((FILES / f"version-{version}.json").read_text())
    ended = outcome(engine)
    for key in ("epoch", "iteration", "steps"):
        assert ended[key] == expected[key]
    # Other processors round otherwise; where this was written, all of it is equal bit for bit.
    found, wanted = ended["weights"], expected["weights"]
    assert found.keys() == wanted.keys()
    # The gradient of a bias before batch normalization is rounding alone, which Adam scales up to its full rate. Training is not
    # changed by this bias; the mean of the statistics, and the error of the evaluations, do.
    alike = wanted.keys() - ({"0.bias", "1.running_mean"} if found["0.bias"] != wanted["0.bias"] else set())
    for name in alike:
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(wanted[name]), rtol=1e-5, atol=1e-6)
    if alike == wanted.keys():
        assert ended["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)


@needs_torch(2, 9, why="the attributes of the schedules that the checkpoints hold")
@pytest.mark.moderate
@pytest.mark.filterwarnings("ignore:the run resumes from .* in a different environment")
@pytest.mark.parametrize("monitor", ["val_error", "val/error", "error"])
@pytest.mark.parametrize("version", VERSIONS)
def test_the_short_form_of_a_validation_continues_such_a_run(version: str, monitor: str, tmp_path: Path) -> None:
    (saved,) = FILES.glob(f"version-{version}/*")
    engine, data = build(tmp_path, monitor)
    engine.load_state_dict(Checkpoint.load(saved))
    engine.run(data, max_epochs=EPOCHS)
    expected = json.loads((FILES / f"version-{version}.json").read_text())["patience"]
    found = outcome(engine)["patience"]
    assert found["waited"] == expected["waited"]
    assert found["monitor"]["seen"] == expected["monitor"]["seen"]
    assert found["best"] == pytest.approx(expected["best"], rel=1e-5)
    assert engine.state.metrics.serials == {"val_error": EPOCHS, "val_loss": EPOCHS - 1}
    assert len(engine["history"]["val_error"]) == EPOCHS


@pytest.mark.filterwarnings("ignore:the run resumes from .* in a different environment")  # such as on another processor
@needs_torch(2, 9, why="the attributes of the schedules that the checkpoints hold")
@pytest.mark.parametrize("version", VERSIONS)
def test_what_such_a_checkpoint_holds_is_put_in_place_bit_for_bit(version: str, tmp_path: Path) -> None:
    (path,) = FILES.glob(f"version-{version}/*")
    saved = Checkpoint.load(path)
    assert Checkpoint.hyperparameters(path) == {"lr": 0.01}
    (window,) = (one["window"] for one in saved["updates"].values())
    assert window["filled"] == 1, "the checkpoint was written inside an accumulation window"
    engine, data = build(tmp_path)
    engine.load_state_dict(saved)
    with pytest.warns(UserWarning, match="nothing to do"):
        engine.run(data, max_iters=SAVED_AT)
    put_in_place = engine.state_dict()
    if version == "0.1":
        assert put_in_place["handlers"]["lr_scheduling"].pop("kind") == "OneCycleLR"  # which that version did not save
    for part in ("modules", "updates", "handlers"):
        assert flat(put_in_place[part]) == flat(saved[part]), part


def flat(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    return [flat(item) for item in value] if isinstance(value, list | tuple) else value


def write(version: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine, data = build(folder)
        engine.run(data, max_epochs=EPOCHS)
        (saved,) = folder.glob(f"*iter{SAVED_AT:08d}")
        target = FILES / f"version-{version}" / saved.name
        shutil.copytree(saved, target)
        FILES.joinpath(f"version-{version}.json").write_text(json.dumps(outcome(engine), indent=1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(sys.argv[1])
