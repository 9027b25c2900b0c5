"""pytorch-accelerated: its Trainer without callbacks, with its own hooks for what differs.

Its `gradient_clip_value` clips by value; by norm, it is done in its hook `optimizer_step`. It keeps no rows: a callback does.
"""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import EarlyStoppingCallback, TrainerCallback
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from .items import ACCUMULATE, LOG_EVERY, MAX_NORM, PATIENCE, Batches, Item, Run, choose, decay

PACKAGE = "pytorch-accelerated"


def make(item: Item) -> Run | None:
    return choose(item, empty=empty, plain=plain, full=full)


class OurTrainer(Trainer):
    """Takes its batches as they are."""

    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
        self._train_dl_kwargs = {"batch_size": batch_size}
        if isinstance(self.train_dataset, Batches):
            self.train_dataset.batch_sampler = SimpleNamespace()  # where it leaves an option
        return self.train_dataset


class NothingTrainer(OurTrainer):
    """The empty step: all that it does is in methods to be overridden."""

    output: ClassVar[dict[str, Any]] = {"loss": torch.zeros(()), "model_outputs": None, "batch_size": 1}

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        return self.output

    def backward_step(self, loss: Tensor) -> None:
        pass

    def optimizer_step(self) -> None:
        pass

    def optimizer_zero_grad(self) -> None:
        pass


class FullTrainer(OurTrainer):
    def optimizer_step(self) -> None:
        self._accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        super().optimizer_step()


class Rows(TrainerCallback):
    def __init__(self, file: Any) -> None:
        self.writer, self.iteration = csv.writer(file), 0

    def on_train_step_end(self, trainer: Any, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        self.iteration += 1
        if self.iteration % LOG_EVERY == 0:
            rate = trainer.scheduler.get_last_lr()[0]
            self.writer.writerow([self.iteration, batch_output["loss"].item() * ACCUMULATE, rate])


class SaveLast(TrainerCallback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_training_run_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        trainer.save_checkpoint(self.path)


class Quiet(EarlyStoppingCallback):
    """Early stopping prints a line for every epoch."""

    def on_training_run_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        trainer.print, shown = lambda *text: None, trainer.print
        super().on_training_run_epoch_end(trainer, **kwargs)
        trainer.print = shown


def empty(iterations: int) -> list[Tensor]:
    model = torch.nn.Linear(1, 1)
    trainer = NothingTrainer(model, None, torch.optim.SGD(model.parameters()), callbacks=())
    trainer.train(Batches(range(iterations)), 1)
    return []


def plain(item: Item) -> Run:
    def run(iterations: int) -> list[Tensor]:
        model = item.model()
        batches, epochs = item.data(iterations)
        trainer = OurTrainer(model, item.loss, item.optimizer(model.parameters()), callbacks=())
        trainer.train(batches, epochs)
        return list(model.parameters())

    return run


def full(item: Item) -> Run:
    def run(iterations: int) -> list[Tensor]:
        model = item.model()
        batches, epochs = item.data(iterations)
        with TemporaryDirectory() as folder, open(Path(folder, "log.csv"), "w", newline="") as log:
            stopping = Quiet(PATIENCE, early_stopping_threshold=0.0, watch_metric="train_loss_epoch")
            callbacks = (Rows(log), stopping, SaveLast(Path(folder, "last.pt")))
            trainer = FullTrainer(model, item.loss, item.optimizer(model.parameters()), callbacks=callbacks)
            trainer.train(
                batches,
                epochs,
                gradient_accumulation_steps=ACCUMULATE,
                create_scheduler_fn=partial(LambdaLR, lr_lambda=decay),
            )
        return list(model.parameters())

    return run
