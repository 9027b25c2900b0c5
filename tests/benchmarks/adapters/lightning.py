"""Lightning: ``barebones`` for the items without features, as its documentation says for measuring what the loop costs.

The empty step is one of manual optimization: an automatic one that returns None costs more. `Trainer.log_every_n_steps` counts
optimizer steps, and its LearningRateMonitor writes a row in each batch of such a step: a hook passes the rows to the logger.
"""

from __future__ import annotations

import logging
import warnings
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from .items import ACCUMULATE, LOG_EVERY, MAX_NORM, PATIENCE, Batches, Item, Run, choose, decay

PACKAGE = "lightning"


def make(item: Item) -> Run | None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")
    return choose(item, empty=empty, plain=plain, full=full)


class Nothing(pl.LightningModule):
    """The empty step."""

    automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        pass

    def configure_optimizers(self) -> None:
        pass


class Training(pl.LightningModule):
    def __init__(self, item: Item) -> None:
        super().__init__()
        self.item, self.model = item, item.model()

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        loss = self.item.loss(self.model(x), y)
        if self.item.full:
            self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(x))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.item.optimizer(self.model.parameters())
        if not self.item.full:
            return optimizer
        return [optimizer], [{"scheduler": LambdaLR(optimizer, decay), "interval": "step"}]


class FullTraining(Training):
    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if (index + 1) % LOG_EVERY == 0:
            rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            values = {"loss": outputs["loss"].item() * ACCUMULATE, "learning_rate": rate}
            self.trainer.logger.log_metrics(values, step=self.trainer.global_step)


def empty(iterations: int) -> list[Tensor]:
    trainer = pl.Trainer(barebones=True, max_epochs=1, accelerator="cpu", devices=1)
    trainer.fit(Nothing(), train_dataloaders=Batches(range(iterations)))
    return []


def plain(item: Item) -> Run:
    def run(iterations: int) -> list[Tensor]:
        module = Training(item)
        batches, epochs = item.data(iterations)
        trainer = pl.Trainer(barebones=True, max_epochs=epochs, accelerator="cpu", devices=1)
        trainer.fit(module, train_dataloaders=batches)
        return list(module.model.parameters())

    return run


def full(item: Item) -> Run:
    def run(iterations: int) -> list[Tensor]:
        module = FullTraining(item)
        batches, epochs = item.data(iterations)
        with TemporaryDirectory() as folder:
            trainer = pl.Trainer(
                max_epochs=epochs,
                accelerator="cpu",
                devices=1,
                accumulate_grad_batches=ACCUMULATE,
                gradient_clip_val=MAX_NORM,
                logger=CSVLogger(folder),
                callbacks=[
                    EarlyStopping("loss", patience=PATIENCE, check_on_train_epoch_end=True),
                    ModelCheckpoint(folder, save_on_train_epoch_end=True, enable_version_counter=False),
                ],
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(module, train_dataloaders=batches)
            assert trainer.global_step == iterations // ACCUMULATE
        return list(module.model.parameters())

    return run
