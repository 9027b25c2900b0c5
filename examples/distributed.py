"""Train on handwritten digits with one or more processes, using the same script.

    python examples/distributed.py  # one process
    # two, on one machine
    torchrun --nproc-per-node=2 --max-restarts=3 examples/distributed.py
    # on each of two machines
    torchrun --nnodes=2 --nproc-per-node=8 --max-restarts=3 --rdzv-backend=c10d \\
        --rdzv-endpoint=host0:29400 examples/distributed.py --folder /shared/runs

DistributedDataParallel shards the batches over the processes launched by torchrun. A
step uses 64 images, whatever the number of processes. The accuracy covers all test
images, each counted once; rank 0 writes the log and the checkpoints. If a process is
killed during training, torchrun restarts all of them; they resume from the newest valid
checkpoint and end with the weights of an uninterrupted run. With `--sharded`, each rank
holds a shard of the weights and of Adam's state, and writes that shard of a checkpoint.

The data are 1,797 images of 8x8 pixels from scikit-learn.

Source: Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits" (UCI Machine
Learning Repository, 1998), https://doi.org/10.24432/C50P49
"""

from __future__ import annotations

import argparse
import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Update, seed_everything
from signalfire.handlers import (
    Accuracy,
    Checkpoint,
    CSVLogger,
    DeviceTransfer,
    DistributedDataParallel,
    FullyShardedDataParallel,
    GradientClipping,
    LRScheduling,
    Preemption,
    ProgressBar,
    Seeding,
    Validation,
)

STEP = 64
"""Number of images per step, over all processes."""


def load_data(batch: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """1,397 training images in shuffled batches for one rank, and 400 test images."""
    pictures, digits = load_digits(return_X_y=True)
    x = torch.tensor(pictures, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(digits)
    train = DataLoader(
        TensorDataset(x[:-400], y[:-400]), batch_size=batch, shuffle=True
    )
    return train, DataLoader(TensorDataset(x[-400:], y[-400:]), batch_size=batch)


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with one or more processes.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--sharded", action="store_true", help="shard the model over the ranks (FSDP)"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/distributed"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    seed_everything(options.seed)

    model = build_model()
    update = Update.supervised(F.cross_entropy, torch.optim.Adam, lr=1e-3)
    trainer = Engine(update, model=model, seed=options.seed)
    parallel = (
        FullyShardedDataParallel(timeout=60)
        if options.sharded
        else DistributedDataParallel(timeout=60)
    )
    trainer.attach(parallel)
    train_data, test_data = load_data(max(1, STEP // parallel.processes.world_size))
    # One folder per number of processes: a restarted run resumes from the checkpoints
    # in it.
    folder = (
        options.folder
        / f"{parallel.processes.world_size}{'-sharded' if options.sharded else ''}"
    )
    trainer.attach(
        Seeding(),
        DeviceTransfer(),
        GradientClipping(max_norm=1.0),
        LRScheduling(partial(OneCycleLR, max_lr=1e-2)),
        Validation(test_data, accuracy=Accuracy()),
        Checkpoint(folder, every="10it", keep=2, resume=True),
        Preemption(),
        CSVLogger(folder / "log.csv"),
        ProgressBar(),
    )
    trainer.run(train_data, max_epochs=options.epochs)
    if isinstance(parallel, FullyShardedDataParallel):
        parallel.unshard(trainer)  # a plain model with the full weights on every rank

    weights = b"".join(
        value.cpu().numpy().tobytes() for value in model.state_dict().values()
    )
    metrics = trainer.state.metrics
    parallel.processes.print(
        f"{parallel.processes.world_size} process(es), {trainer.state.iteration} "
        "steps: "
        f"accuracy {100 * metrics['val_accuracy']:.2f} %, loss "
        f"{metrics['val_loss']:.4f}, "
        f"weights {hashlib.sha256(weights).hexdigest()[:12]}"
    )


if __name__ == "__main__":
    main()
