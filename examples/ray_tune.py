"""Search hyperparameters with Ray Tune, whose scheduler ends the trials that lag
behind; a search that was killed continues.

    pip install "ray[tune]"
    python examples/ray_tune.py

A trial is an engine: `run`, called again with a larger bound, continues. ENDED was
emitted for a trial that is ended, paused or moved to another machine, and its state is
that of a checkpoint.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from ray import tune
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Update, seed_everything
from signalfire.exact import CheckpointFolder
from signalfire.handlers import Accuracy, Seeding, Validation


def digits(first: int, last: int, **options: Any) -> DataLoader[Any]:
    images, labels = load_digits(return_X_y=True)
    x, y = (
        torch.tensor(images[first:last], dtype=torch.float32) / 16,
        torch.tensor(labels[first:last]),
    )
    return DataLoader(TensorDataset(x, y), **options)


def build(rate: float, width: int) -> Engine:
    seed_everything(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    update = Update.supervised(
        nn.functional.cross_entropy, torch.optim.SGD, lr=rate, momentum=0.9
    )
    trainer = Engine(update, model=model, seed=0)
    trainer.attach(
        Seeding(), Validation(digits(1000, 1400, batch_size=400), accuracy=Accuracy())
    )
    return trainer


class Trial(tune.Trainable):  # type: ignore[misc]  # its types are not looked at
    """One engine of a search: each step is an epoch."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.engine = build(**config)
        self.data = digits(0, 1000, batch_size=50, shuffle=True)

    def step(self) -> dict[str, float]:
        state = self.engine.run(self.data, max_epochs=self.iteration + 1)
        return {name: float(value) for name, value in state.metrics.items()}

    def save_checkpoint(self, folder: str) -> None:
        CheckpointFolder(folder).save(self.engine.state_dict(), step=self.iteration)

    def load_checkpoint(self, folder: str) -> None:
        if (newest := CheckpointFolder(folder).newest()) is None:
            raise FileNotFoundError(f"{folder} has no intact checkpoint")
        self.engine.load_state_dict(newest.state)


def main() -> None:
    parser = argparse.ArgumentParser(description="Search with Ray Tune.")
    parser.add_argument(
        "--epochs", type=int, default=9, help="of the trials that are not ended before"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/ray_tune"),
        help="one that all machines see",
    )
    options = parser.parse_args()

    folder = os.path.abspath(options.folder)
    if tune.Tuner.can_restore(f"{folder}/search"):
        tuner = tune.Tuner.restore(
            f"{folder}/search", Trial, resume_unfinished=True, restart_errored=True
        )
    else:
        tuner = tune.Tuner(
            Trial,
            param_space={
                "rate": tune.grid_search([1e-3, 1e-2, 1e-1]),
                "width": tune.grid_search([16, 128]),
            },
            tune_config=tune.TuneConfig(
                metric="val_accuracy",
                mode="max",
                scheduler=tune.schedulers.AsyncHyperBandScheduler(
                    max_t=options.epochs, reduction_factor=3
                ),
            ),
            run_config=tune.RunConfig(
                name="search",
                storage_path=folder,
                stop={"training_iteration": options.epochs},
                checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
            ),
        )
    results = tuner.fit()
    for error in results.errors:
        raise error
    best = results.get_best_result("val_accuracy", "max")
    epochs = [result.metrics["training_iteration"] for result in results]
    accuracy = best.metrics["val_accuracy"]
    print(
        f"{len(epochs)} trials of {min(epochs)} to {max(epochs)} epochs: "
        f"{accuracy:.1%} with {best.config}"
    )


if __name__ == "__main__":
    main()
