"""What does each handler contribute? A leave-one-out study of a network on MNIST-1D,
over eight seeds.

    # 48 runs of 1,200 steps in two processes: a few minutes
    python examples/ablation.py
    python examples/ablation.py --seeds 3 --epochs 2
    python examples/ablation.py --seeds 12  # later: runs only the four new seeds

A one-cycle learning rate, an EMA of the weights, mixup, label smoothing and gradient
clipping are disabled one at a time. All runs with the same seed have the same initial
weights, data order and random draws. Finished runs are stored in the folder, so an
interrupted study resumes.

Source: Greydanus and Kobak, "Scaling Down Deep Learning with MNIST-1D" (ICML 2024),
https://arxiv.org/abs/2011.14439
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from mnist1d.data import get_dataset_args, make_dataset
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Update, seed_everything
from signalfire.ablation import LeaveOneOut, Study
from signalfire.handlers import (
    EMA,
    Accuracy,
    GradientClipping,
    LabelSmoothing,
    LRScheduling,
    MixUp,
    Validation,
)

SEEDS, EPOCHS, BATCH, RATE = 8, 30, 100, 1e-2


@cache
def load_data() -> tuple[TensorDataset, TensorDataset]:
    """4,000 training samples, and the 1,000 test samples of the data set as validation
    samples; generated once per process.
    """
    data = make_dataset(get_dataset_args())
    train = TensorDataset(
        torch.tensor(data["x"], dtype=torch.float32), torch.tensor(data["y"])
    )
    return train, TensorDataset(
        torch.tensor(data["x_test"], dtype=torch.float32), torch.tensor(data["y_test"])
    )


def build_model() -> nn.Module:
    """The paper's convolutional network."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 40)),
        nn.Conv1d(1, 25, 5, stride=2, padding=1), nn.ReLU(),
        nn.Conv1d(25, 25, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv1d(25, 25, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(125, 10),
    )  # fmt: skip


def build(
    seed: int, *, epochs: int = EPOCHS
) -> tuple[Engine, Callable[[Engine], object]]:
    """The trainer for one seed, and a function that runs it. The study calls it for
    each run, in a worker process.
    """
    train_data, validation_data = load_data()
    seed_everything(seed)
    model = build_model()
    update = Update.supervised(F.cross_entropy, torch.optim.Adam, lr=RATE)

    trainer = Engine(update, model=model, seed=seed)
    trainer.attach(
        Validation(
            DataLoader(validation_data, batch_size=1000),
            accuracy=Accuracy(),
            every=f"{epochs}ep",
        ),  # once, at the end
        LRScheduling(partial(OneCycleLR, max_lr=RATE)),
        EMA(0.99),
        MixUp(0.2),
        LabelSmoothing(0.1),
        GradientClipping(max_norm=1.0),
    )
    loader = DataLoader(train_data, batch_size=BATCH, shuffle=True)
    return trainer, lambda engine: engine.run(loader, max_epochs=epochs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure the contribution of each handler in a leave-one-out study."
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=SEEDS,
        help=f"number of seeds per variant (default: {SEEDS})",
    )
    parser.add_argument(
        "--epochs",
        type=int,
        default=EPOCHS,
        help=f"epochs of 40 steps (default: {EPOCHS})",
    )
    parser.add_argument(
        "--workers", type=int, default=2, help="number of worker processes (default: 2)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs") / "ablation",
        help="folder of the results",
    )
    arguments = parser.parse_args()
    for name in ("seeds", "epochs", "workers"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)}: expected at least 1")

    study = Study(
        partial(build, epochs=arguments.epochs),
        metric="val_accuracy",
        mode="max",
        seeds=range(arguments.seeds),
        store=arguments.folder / "runs.jsonl",
    )
    design = LeaveOneOut()
    print(study.plan(design))

    report = study.run(design, workers=arguments.workers)
    print(f"\n{report}\n")
    print(*report.sentences(), sep="\n")
    picture = arguments.folder / "ablation.png"
    report.plot(picture)
    print(f"\n  {picture}")


if __name__ == "__main__":
    main()
