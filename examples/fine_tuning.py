"""Fine-tune on MNIST-1D: pretrain on many samples of the digits 0 to 4, then train on
few of the digits 5 to 9.

    # three ways to train on the new digits: under two minutes on one core
    python examples/fine_tuning.py
    python examples/fine_tuning.py --samples 10 --seed 1
    python examples/fine_tuning.py --list  # the wiring with gradual unfreezing

A convolutional network is pretrained on all samples of the digits 0 to 4, and its
weights are saved. Three networks are then trained on a few samples of each of the
digits 5 to 9: one from scratch; one that starts with the pretrained convolutions
(`WarmStart`) and trains all layers at once; and one whose pretrained convolutions are
frozen at first and unfrozen from the last to the first, with smaller learning rates for
earlier layers. The accuracy is measured on the test samples of the digits 5 to 9.

Source: Howard and Ruder, "Universal Language Model Fine-tuning for Text Classification"
(ACL 2018), for gradual unfreezing and discriminative rates; Greydanus and Kobak,
"Scaling Down Deep Learning with MNIST-1D" (ICML 2024), for the data and the network.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from mnist1d.data import get_dataset_args, make_dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Update, seed_everything
from signalfire.handlers import (
    Accuracy,
    Average,
    Freezing,
    History,
    Metrics,
    Seeding,
    Validation,
    WarmStart,
    discriminative_rates,
)

STEPS, SAMPLES, BATCH, RATE = 500, 20, 25, 3e-3
WAYS = {
    "scratch": "from scratch",
    "full": "all layers fine-tuned at once",
    "gradual": "gradual unfreezing, rates by layer",
}


class Network(nn.Module):
    """The paper's convolutional network, for five digits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(1, 25, 5, stride=2, padding=1)
        self.conv2 = nn.Conv1d(25, 25, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(25, 25, 3, stride=2, padding=1)
        self.head = nn.Linear(125, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = x.unsqueeze(1)
        for conv in (self.conv1, self.conv2, self.conv3):
            h = conv(h).relu()
        logits: Tensor = self.head(h.flatten(1))
        return logits


def load_data(samples: int, seed: int) -> dict[str, DataLoader[Any]]:
    """Loaders of all training samples of the old digits, a few of each new digit, and
    the test samples of both.
    """
    data = make_dataset(get_dataset_args())
    x, y = torch.tensor(data["x"], dtype=torch.float32), torch.tensor(data["y"])
    x_test, y_test = (
        torch.tensor(data["x_test"], dtype=torch.float32),
        torch.tensor(data["y_test"]),
    )
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(y), generator=generator)
    few = torch.cat(
        [shuffled[y[shuffled] == digit][:samples] for digit in range(5, 10)]
    )

    def loader(
        x: Tensor, y: Tensor, size: int, *, shuffle: bool = False
    ) -> DataLoader[Any]:
        order = torch.Generator().manual_seed(seed)
        return DataLoader(
            TensorDataset(x, y % 5),
            batch_size=min(size, len(y)),
            shuffle=shuffle,
            generator=order,
        )

    return {
        "old": loader(x[y < 5], y[y < 5], 100, shuffle=True),
        "old_test": loader(x_test[y_test < 5], y_test[y_test < 5], 1000),
        "new": loader(x[few], y[few], BATCH, shuffle=True),
        "new_test": loader(x_test[y_test >= 5], y_test[y_test >= 5], 1000),
    }


def build(
    model: nn.Module,
    test_data: DataLoader[Any],
    *,
    seed: int,
    every: int,
    way: str,
    epochs: int = 1,
) -> Engine:
    """Compose the trainer of one of the ways."""

    def parameters(engine: Engine) -> list[Any]:
        if way != "gradual":
            return list(model.parameters())
        rates = {"conv1": RATE / 8, "conv2": RATE / 4, "conv3": RATE / 2}
        return discriminative_rates(model, rates, default=RATE)

    update = Update.supervised(
        F.cross_entropy, torch.optim.Adam, lr=RATE, parameters=parameters
    )
    trainer = Engine(update, model=model, seed=seed)
    trainer.attach(Seeding(), Metrics(train_loss=Average()), History())
    trainer.attach(Validation(test_data, accuracy=Accuracy(), every=f"{every}st"))
    if way == "gradual":  # unfreeze one more layer after every tenth of the run
        stages = {
            conv: 1 + max(1, stage * epochs // 10)
            for stage, conv in enumerate(("conv3", "conv2", "conv1"), start=1)
        }
        trainer.attach(Freezing(stages))
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Fine-tune a network on few samples of new digits, in three ways."
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        help=f"optimizer steps of each training (default: {STEPS})",
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=SAMPLES,
        help=f"samples per new digit (default: {SAMPLES})",
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs") / "fine_tuning",
        help="folder of the weights and the plot",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="print the wiring with gradual unfreezing and exit",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    steps, seed = arguments.steps, arguments.seed
    every = max(1, steps // 25)

    data = load_data(arguments.samples, seed)
    epochs = -(-steps // len(data["new"]))
    if arguments.list:
        print(
            build(
                Network(),
                data["new_test"],
                seed=seed,
                every=every,
                way="gradual",
                epochs=epochs,
            )
        )
        return

    began = time.perf_counter()
    seed_everything(seed)
    old = Network()
    trainer = build(old, data["old_test"], seed=seed, every=every, way="full")
    trainer.run(data["old"], max_steps=2 * steps)
    print(
        "trained on the digits 0 to 4: "
        f"{100 * trainer.state.metrics['val_accuracy']:.1f} % of their test samples"
    )

    arguments.folder.mkdir(parents=True, exist_ok=True)
    torch.save(old.state_dict(), arguments.folder / "pretrained.pt")

    histories: dict[str, History] = {}
    for way in WAYS:
        seed_everything(seed)
        model = Network()
        trainer = build(
            model, data["new_test"], seed=seed, every=every, way=way, epochs=epochs
        )
        if (
            way != "scratch"
        ):  # all pretrained weights except the head's, which predicts other digits
            trainer.attach(
                WarmStart(arguments.folder / "pretrained.pt", exclude="head")
            )
        trainer.run(data["new"], max_steps=steps)
        histories[way] = trainer[History]
    report(histories, arguments.samples, arguments.folder, time.perf_counter() - began)


def report(
    histories: dict[str, History], samples: int, folder: Path, seconds: float
) -> None:
    """Print a table and plot the learning curves."""
    from matplotlib.figure import Figure

    print(
        f"\ndigits 5 to 9 from {samples} samples each, test accuracy in % "
        f"({seconds:.0f} s in all)"
    )
    print(f"{'way':<38}{'last':>8}{'best':>8}")
    figure = Figure(figsize=(7, 6.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    for way, label in WAYS.items():
        history = histories[way]
        accuracy = [100 * value for value in history["val_accuracy"]]
        print(f"{label:<38}{accuracy[-1]:>8.1f}{max(accuracy):>8.1f}")
        steps = [iteration for _, iteration, _ in history.records["val_accuracy"]]
        top.plot(steps, accuracy, label=label, marker=".")
        bottom.plot(steps, history["val_loss"], label=label, marker=".")
    top.set(
        ylabel="test accuracy in %",
        title=f"MNIST-1D, digits 5 to 9 from {samples} samples each",
    )
    bottom.set(xlabel="optimizer steps", ylabel="test loss")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    top.legend()
    figure.savefig(folder / "fine_tuning.png", dpi=120)
    print(f"  {folder / 'fine_tuning.png'}")


if __name__ == "__main__":
    main()
