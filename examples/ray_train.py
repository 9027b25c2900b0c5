"""Train with Ray Train, which starts the processes and connects them, on one machine or
on a cluster.

    pip install "ray[train]"
    python examples/ray_train.py --workers 2

`TorchTrainer` calls the function below in each of its workers, in a process group of
torch.distributed. DistributedDataParallel takes that group as it is: the engine is that
of any other script. A run that Ray restarts continues from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, Update
from signalfire.handlers import (
    Accuracy,
    Average,
    Checkpoint,
    DistributedDataParallel,
    Metrics,
    Seeding,
)


def train(options: dict[str, Any]) -> None:
    """What each worker does."""
    from ray import train as ray_train

    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    y = (x[:, 0] * x[:, 1] > 0).long()
    engine = Engine(
        Update.supervised(F.cross_entropy, torch.optim.Adam, lr=1e-2),
        model=nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)),
        seed=0,
    )
    engine.attach(
        DistributedDataParallel(),
        Seeding(),
        Metrics(train_loss=Average(), train_accuracy=Accuracy()),
        Checkpoint(Path(options["folder"]) / "checkpoints", resume=True),
    )

    @engine.on(Events.EPOCH_COMPLETED)
    def report(engine: Engine) -> None:
        ray_train.report(
            {
                "epoch": engine.state.epoch,
                **{name: float(v) for name, v in engine.state.metrics.items()},
            }
        )

    batch = 64 // engine.processes.world_size
    engine.run(
        DataLoader(TensorDataset(x, y), batch_size=batch, shuffle=True),
        max_epochs=options["epochs"],
    )
    engine.processes.print(
        f"{engine.processes.world_size} workers, {engine.state.iteration} steps: "
        f"accuracy {100 * float(engine.state.metrics['train_accuracy']):.1f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with Ray Train.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/ray"),
        help="one that all machines see",
    )
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    options = parser.parse_args()
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    folder = os.path.abspath(options.folder)
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": folder, "epochs": options.epochs},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(
            name="signalfire",
            storage_path=folder,
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
