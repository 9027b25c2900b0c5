"""The Trainer of transformers, with `compute_loss` and `get_train_dataloader` of one's own, and its filter for NaN switched off.

Its batches are dicts. It logs after optimizer steps, here after every third (12 batches), into its history in memory. Its early
stopping follows evaluations only: a callback follows the mean training loss. It takes the norm of the gradients in any case,
and has to have an optimizer and a schedule: on "empty", an optimizer that does nothing and a constant rate.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from .items import ACCUMULATE, LOG_EVERY, MAX_NORM, PATIENCE, Batches, Item, Run, choose, decay

PACKAGE = "transformers"


def make(item: Item) -> Run | None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.set_verbosity_error()
    return choose(item, empty=empty, plain=plain, full=full)


class Dicts:
    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return ({"x": x, "y": y} for x, y in self.batches)


class OurTrainer(Trainer):
    def __init__(self, item: Item, batches: Any, **options: Any) -> None:
        self.item, self.batches, self.losses = item, batches, list[Tensor]()
        super().__init__(**options)

    def get_train_dataloader(self) -> Any:
        return Dicts(self.batches)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        loss = self.item.loss(model(inputs["x"]), inputs["y"])
        if self.item.full:
            self.losses.append(loss.detach())
        return loss


class NothingTrainer(Trainer):
    """The empty step."""

    loss = torch.zeros(())

    def get_train_dataloader(self) -> Any:
        return self.train_dataset

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        return self.loss


class Still(Optimizer):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


class EarlyStopping(TrainerCallback):
    """The Trainer gives its callbacks no way to itself: it receives the losses from outside."""

    def __init__(self) -> None:
        self.best, self.waited, self.losses = math.inf, 0, list[Tensor]()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        running = torch.stack(self.losses).mean().item()
        self.losses.clear()
        self.best, self.waited = (running, 0) if running < self.best else (self.best, self.waited + 1)
        control.should_training_stop = self.waited >= PATIENCE


def options(folder: str, epochs: int, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        folder,
        num_train_epochs=epochs,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_nan_inf_filter=False,
        **more,
    )


BARE = {"max_grad_norm": 0.0, "logging_strategy": "no", "save_strategy": "no", "lr_scheduler_type": "constant"}


def empty(iterations: int) -> list[Tensor]:
    with TemporaryDirectory() as folder:
        model = torch.nn.Linear(1, 1)
        optimizer = Still(model.parameters(), {"lr": 0.0})
        batches: Any = Batches([{}] * iterations)
        arguments = options(folder, 1, **BARE)
        trainer = NothingTrainer(model=model, args=arguments, train_dataset=batches, optimizers=(optimizer, None))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return []


def train(item: Item, iterations: int, folder: str, **more: Any) -> list[Tensor]:
    model = item.model()
    optimizer = item.optimizer(model.parameters())
    batches, epochs = item.data(iterations)
    arguments = options(folder, epochs, **more)
    scheduler = LambdaLR(optimizer, decay) if item.full else None
    trainer = OurTrainer(item, batches, model=model, args=arguments, optimizers=(optimizer, scheduler))
    trainer.remove_callback(PrinterCallback)
    if item.full:
        stopping = EarlyStopping()
        stopping.losses = trainer.losses
        trainer.add_callback(stopping)
    trainer.train()
    return list(model.parameters())


def plain(item: Item) -> Run:
    def run(iterations: int) -> list[Tensor]:
        with TemporaryDirectory() as folder:
            return train(item, iterations, folder, **BARE)

    return run


def full(item: Item) -> Run:
    def run(iterations: int) -> list[Tensor]:
        with TemporaryDirectory() as folder:
            return train(
                item,
                iterations,
                folder,
                gradient_accumulation_steps=ACCUMULATE,
                max_grad_norm=MAX_NORM,
                logging_steps=-(-LOG_EVERY // ACCUMULATE),
                save_strategy="epoch",
                save_total_limit=1,
            )

    return run
