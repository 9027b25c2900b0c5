"""Lightning's Trainer, killed anywhere and started again: bit-equal with the callback, and what it does without."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from signalfire.exact import ResumableData, random_state
from tests import kit
from tests.engine.exact.lives import Result, Samples, Tick, kill_and_resume, life, nothing

kit.needs("migration", "lightning")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::Warning:lightning")]

EPOCHS, BATCHES = 3, 6


def trainer_of(folder: Path, tick: Tick, exact: bool, every: int) -> tuple[Any, Any]:
    """A trainer that saves after every so many batches, and the module."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    from signalfire.exact.lightning import ExactResume

    class Module(LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            tick()
            return F.mse_loss(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            F.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)]

    class Saves(Callback):  # type: ignore[misc, unused-ignore]
        def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
            if (trainer.fit_loop.total_batch_idx + 1) % every == 0:
                trainer.save_checkpoint(folder / "last.ckpt")
            tick()

    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    trainer = Trainer(
        max_epochs=EPOCHS,
        accumulate_grad_batches=4,
        callbacks=[*([ExactResume()] if exact else []), Saves()],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    return trainer, Module()


def train(folder: Path, tick: Tick = nothing, *, exact: bool = True, workers: int = 0, every: int = 1) -> Result:
    """One life of a training; it continues from the file that it saved last."""
    trainer, module = trainer_of(folder, tick, exact, every)
    loader = DataLoader(Samples(), batch_size=4, shuffle=True, num_workers=workers)
    last = folder / "last.ckpt"
    trainer.fit(
        module,
        ResumableData(loader) if exact else loader,
        DataLoader(Samples(), batch_size=8),
        ckpt_path=str(last) if last.exists() else None,
    )
    states = {
        "weights": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "rate": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "generators": random_state(),
    }
    return {name: kit.digest(state) for name, state in states.items()}


@pytest.fixture(scope="module", autouse=True)
def _imported_once() -> None:
    import lightning.pytorch

    import signalfire.exact.lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    assert lightning.pytorch.Trainer
    assert signalfire.exact.lightning


# At each batch: before its step, and after it was saved.
POINTS = range(EPOCHS * BATCHES * 2)


@pytest.mark.campaign
@pytest.mark.parametrize("workers", [0, 2])
def test_a_fit_that_is_killed_at_any_of_36_points_ends_with_the_same_bits(tmp_path: Path, workers: int) -> None:
    kill_and_resume(train, tmp_path, POINTS, workers=workers)


def test_a_fit_that_is_killed_ends_with_the_same_bits(tmp_path: Path) -> None:
    kill_and_resume(train, tmp_path / "0", [5, 12, 19], workers=0)
    kill_and_resume(train, tmp_path / "2", [26], workers=2)


@pytest.mark.parametrize("every", [2, BATCHES])
def test_a_bare_fit_continues_neither_inside_an_epoch_nor_from_its_end(tmp_path: Path, every: int) -> None:
    cut = 2 * every
    whole = life(train, tmp_path / "whole", exact=False, every=every)
    assert life(train, tmp_path / "cut", cut, exact=False, every=every) is None
    assert life(train, tmp_path / "cut", exact=False, every=every) != whole
    kill_and_resume(train, tmp_path / "exact", [cut], every=every)


def test_the_gradients_of_manual_optimization_are_in_the_checkpoint(tmp_path: Path) -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer

    from signalfire.exact.lightning import ExactResume

    class Module(LightningModule):  # type: ignore[misc, unused-ignore]
        """It steps after every fourth batch, also over the end of an epoch of six."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net, self.batches = nn.Linear(3, 1), 0

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(F.mse_loss(self.net(batch[0]), batch[1]))
            self.batches += 1
            if self.batches % 4 == 0:
                optimizer = self.optimizers()
                optimizer.step()
                optimizer.zero_grad()

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["batches"] = self.batches

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.batches = checkpoint["batches"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Saves(Callback):  # type: ignore[misc, unused-ignore]
        def on_train_batch_end(self, trainer: Any, module: Any, *given: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{module.batches}.ckpt")

    def fit(epochs: int, begin: Path | None = None) -> str:
        torch.manual_seed(0)
        module = Module()
        trainer = Trainer(
            max_epochs=epochs,
            callbacks=[ExactResume()] if begin else [ExactResume(), Saves()],
            default_root_dir=tmp_path,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
        )
        data = ResumableData(DataLoader(Samples(), batch_size=4, shuffle=True))
        trainer.fit(module, data, ckpt_path=None if begin is None else str(begin))
        return kit.digest(module.state_dict())

    whole = fit(2)
    for batches in (2, 3, BATCHES, 10):  # inside a window, and at the end of an epoch, which is inside one
        assert fit(2, tmp_path / f"{batches}.ckpt") == whole


def test_a_checkpoint_of_the_end_of_an_epoch_is_continued_with_the_next_one(tmp_path: Path) -> None:
    from lightning.pytorch import Callback

    class Saves(Callback):  # type: ignore[misc, unused-ignore]
        """It saves where `ModelCheckpoint` does if there is no validation."""

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    def fit(validates: bool, begin: Path | None = None) -> str:
        trainer, module = trainer_of(tmp_path, nothing, True, 10**6)
        if begin is None:
            trainer.callbacks.append(Saves())
        loaders = [DataLoader(Samples(), batch_size=8)] if validates else []
        data = ResumableData(DataLoader(Samples(), batch_size=4, shuffle=True))
        trainer.fit(module, data, *loaders, ckpt_path=None if begin is None else str(begin))
        return kit.digest(module.state_dict())

    for validates in (False, True):
        whole = fit(validates)
        assert [fit(validates, tmp_path / f"{epoch}.ckpt") for epoch in range(EPOCHS - 1)] == [whole] * (EPOCHS - 1)


def test_data_that_cannot_be_continued_is_refused(tmp_path: Path) -> None:
    trainer, module = trainer_of(tmp_path, nothing, True, 1)
    with pytest.raises(ValueError, match=r"a DataLoader; pass ResumableData\(loader\) to fit\(\)"):
        trainer.fit(module, DataLoader(Samples(), batch_size=4))
    trainer, module = trainer_of(tmp_path, nothing, True, 1)

    class Unsized:
        def __iter__(self) -> Any:
            return iter(DataLoader(Samples(), batch_size=4))

    with pytest.raises(ValueError, match="has no length"):
        trainer.fit(module, ResumableData(Unsized()))
    trainer, module = trainer_of(tmp_path, nothing, True, 1)
    trainer.reload_dataloaders_every_n_epochs = 1
    with pytest.raises(ValueError, match="Lightning reloads the data, so its position is lost"):
        trainer.fit(module, ResumableData(DataLoader(Samples(), batch_size=4)))


@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # emitted anew where another warning is looked for
def test_a_checkpoint_without_the_callback_is_continued_with_a_warning(tmp_path: Path) -> None:
    train(tmp_path, exact=False, every=BATCHES)
    trainer, module = trainer_of(tmp_path, nothing, True, 1)
    loader = ResumableData(DataLoader(Samples(), batch_size=4))
    with pytest.warns(UserWarning, match="was saved without ExactResume"):
        trainer.fit(module, loader, DataLoader(Samples(), batch_size=8), ckpt_path=str(tmp_path / "last.ckpt"))
