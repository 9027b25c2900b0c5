"""Find the learning rate and the batch size of the convolutional network of MNIST-1D,
before training it.

    python examples/finders.py  # a minute on one core; writes learning_rate.png
    python examples/finders.py --rates 0.1 1 10  # multiples of the rate to train with

The sweep and the trials leave no trace: the trainings that follow are the same without
them. Each multiple of the suggested rate is trained for 1,000 steps from the same
weights, and evaluated on the test samples of the data set as validation data.

Source: Greydanus and Kobak, "Scaling Down Deep Learning with MNIST-1D" (ICML 2024),
https://arxiv.org/abs/2011.14439; Smith, "Cyclical Learning Rates for Training Neural
Networks" (WACV 2017), for the sweep.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from mnist1d.data import get_dataset_args, make_dataset
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Update, seed_everything
from signalfire.handlers import Accuracy, Validation
from signalfire.tuning import find_batch_size, find_learning_rate

STEPS, BATCH = 1000, 100


def load_data() -> tuple[TensorDataset, TensorDataset]:
    made = make_dataset(get_dataset_args())

    def part(name: str) -> TensorDataset:
        y = "y" if name == "x" else "y_test"
        return TensorDataset(
            torch.from_numpy(made[name]).float(), torch.from_numpy(made[y])
        )

    return part("x"), part("x_test")


def build(seed: int, rate: float) -> Engine:
    """The convolutional network of the paper, with Adam."""
    seed_everything(seed)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 40)),
        nn.Conv1d(1, 25, 5, stride=2, padding=1), nn.ReLU(),
        nn.Conv1d(25, 25, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv1d(25, 25, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(125, 10),
    )  # fmt: skip
    return Engine(
        Update.supervised(F.cross_entropy, torch.optim.Adam, lr=rate),
        model=model,
        seed=seed,
    )


def accuracy_of(
    seed: int, rate: float, train: TensorDataset, validation: TensorDataset
) -> float:
    """The accuracy on the validation samples after a training with this rate, in
    percent."""
    engine = build(seed, rate)
    engine.attach(
        Validation(
            DataLoader(validation, batch_size=500),
            accuracy=Accuracy(),
            every=f"{STEPS}st",
        )
    )
    state = engine.run(
        DataLoader(train, batch_size=BATCH, shuffle=True), max_steps=STEPS
    )
    return 100 * float(state.metrics["val_accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Find a learning rate and a batch size, and train with them."
    )
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[0.1, 1.0, 10.0],
        help="multiples of the suggestion",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, default=Path("."), help="where the picture is written"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train, validation = load_data()
    engine = build(arguments.seed, 1e-3)

    curve = find_learning_rate(
        engine,
        DataLoader(train, batch_size=BATCH, shuffle=True),
        low=1e-5,
        high=1.0,
        steps=40,
    )
    print(curve)
    curve.plot(arguments.folder / "learning_rate.png")
    print(
        find_batch_size(
            engine, partial(DataLoader, train, shuffle=True), start=50, maximum=1600
        )
    )
    for multiple in arguments.rates:
        rate = multiple * curve.suggestion()
        accuracy = accuracy_of(arguments.seed, rate, train, validation)
        print(f"learning rate {rate:.3g}, {STEPS} steps: accuracy {accuracy:.1f} %")


if __name__ == "__main__":
    main()
