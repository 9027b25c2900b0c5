"""torchtnt: units with a step of one's own, and, where there is more to do, its AutoUnit, which accumulates, clips and schedules.

The running loss is the unit's. Its savers write through torchsnapshot or torch's distributed checkpoints: this is the latter, in
one thread and so into one file, where 16 would be its default.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

warnings.filterwarnings("ignore", message="pkg_resources is deprecated|torch.distributed is disabled")

from torchtnt.framework.auto_unit import AutoUnit  # noqa: E402
from torchtnt.framework.callbacks import DistributedCheckpointSaver, EarlyStopping  # noqa: E402
from torchtnt.framework.callbacks.checkpointer_types import KnobOptions  # noqa: E402
from torchtnt.framework.train import train  # noqa: E402
from torchtnt.framework.unit import TrainUnit  # noqa: E402
from torchtnt.utils.early_stop_checker import EarlyStopChecker  # noqa: E402
from torchtnt.utils.loggers import CSVLogger  # noqa: E402

from .items import ACCUMULATE, LOG_EVERY, MAX_NORM, PATIENCE, Batches, Item, Run, choose, decay  # noqa: E402

PACKAGE = "torchtnt"


def make(item: Item) -> Run | None:
    logging.getLogger("torchtnt").setLevel(logging.ERROR)
    return choose(item, empty=empty, plain=plain, full=full)


class Nothing(TrainUnit[Any]):
    """The empty step."""

    def train_step(self, state: Any, data: Any) -> None:
        pass


class Training(TrainUnit[Any]):
    def __init__(self, item: Item) -> None:
        super().__init__()
        self.item, self.module = item, item.model()
        self.optimizer = item.optimizer(self.module.parameters())

    def train_step(self, state: Any, data: Any) -> None:
        x, y = data
        loss = self.item.loss(self.module(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class FullTraining(AutoUnit[Any]):
    def __init__(self, item: Item, rows: Any) -> None:
        super().__init__(
            module=item.model(),
            device=torch.device("cpu"),
            gradient_accumulation_steps=ACCUMULATE,
            clip_grad_norm=MAX_NORM,
            step_lr_interval="step",
        )
        self.item, self.rows, self.running, self.losses = item, rows, 0.0, list[Tensor]()

    def compute_loss(self, state: Any, data: Any) -> tuple[Tensor, Tensor]:
        x, y = data
        output = self.module(x)
        return self.item.loss(output, y), output

    def configure_optimizers_and_lr_scheduler(self, module: Any) -> Any:
        optimizer = self.item.optimizer(module.parameters())
        return optimizer, LambdaLR(optimizer, decay)

    def on_train_step_end(self, state: Any, data: Any, step: int, results: Any) -> None:
        self.losses.append(results.loss.detach())
        if (step + 1) % LOG_EVERY == 0:
            rate = self.lr_scheduler.get_last_lr()[0]
            self.rows.log_dict({"loss": results.loss.item() * ACCUMULATE, "learning_rate": rate}, step + 1)

    def on_train_epoch_end(self, state: Any) -> None:
        super().on_train_epoch_end(state)
        self.running, self.losses = torch.stack(self.losses).mean().item(), []


def empty(iterations: int) -> list[Tensor]:
    train(Nothing(), Batches(range(iterations)), max_epochs=1)
    return []


def plain(item: Item) -> Run:
    def run(iterations: int) -> list[Tensor]:
        batches, epochs = item.data(iterations)
        unit = Training(item)
        train(unit, batches, max_epochs=epochs)
        return list(unit.module.parameters())

    return run


def full(item: Item) -> Run:
    def run(iterations: int) -> list[Tensor]:
        batches, epochs = item.data(iterations)
        with TemporaryDirectory() as folder:
            unit = FullTraining(item, CSVLogger(str(Path(folder, "log.csv"))))
            stopping = EarlyStopping("running", EarlyStopChecker("min", PATIENCE))
            saver = DistributedCheckpointSaver(
                folder,
                save_every_n_epochs=1,
                keep_last_n_checkpoints=1,
                knob_options=KnobOptions(max_per_rank_io_concurrency=1),
            )
            train(unit, batches, max_epochs=epochs, callbacks=[stopping, saver])
            unit.rows.close()
        return list(unit.module.parameters())

    return run
