"""A training whose configuration is a dataclass, filled by plain argparse, stored with
every checkpoint, and read back.

    python examples/configured.py --lr 3e-3 --hidden 64 32
    # with the stored configuration
    python examples/configured.py --continue-from runs/configured

Muon trains the matrices of the network, AdamW the rest, at one step.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR

from signalfire import Engine, Update, groups, seed_everything
from signalfire.handlers import (
    Accuracy,
    Checkpoint,
    GradientClipping,
    LRScheduling,
    Validation,
)


@dataclass
class Config:
    """The arguments, with their defaults."""

    folder: Path = Path("runs/configured")
    hidden: list[int] = field(default_factory=lambda: [64, 32])
    lr: float = 3e-3
    muon_lr: float = 0.02
    epochs: int = 5
    batch_size: int = 32
    seed: int = 0


def from_arguments() -> Config:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--continue-from",
        type=Path,
        help="the folder of an earlier run, whose configuration is used",
    )
    for one in fields(Config):
        kind = type(getattr(Config(), one.name))
        if kind is list:
            parser.add_argument(f"--{one.name}", type=int, nargs="+")
        else:
            parser.add_argument(f"--{one.name.replace('_', '-')}", type=kind)
    given = {
        name: value
        for name, value in vars(parser.parse_args()).items()
        if value is not None
    }
    if (earlier := given.pop("continue_from", None)) is not None:
        given = Checkpoint.hyperparameters(earlier, **given)
        given["folder"] = Path(given["folder"])
    return Config(**given)


def load_batches(
    config: Config,
) -> tuple[
    list[tuple[torch.Tensor, torch.Tensor]], list[tuple[torch.Tensor, torch.Tensor]]
]:
    digits = load_digits()
    x, y = (
        torch.tensor(digits.data, dtype=torch.float32) / 16,
        torch.tensor(digits.target),
    )
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    train = list(
        zip(
            x[:1400].split(config.batch_size),
            y[:1400].split(config.batch_size),
            strict=True,
        )
    )
    return train, [(x[1400:], y[1400:])]


def main() -> None:
    config = from_arguments()
    torch.set_num_threads(1)
    seed_everything(config.seed)
    sizes = [64, *config.hidden]
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(sizes[-1], 10))
    update = Update.supervised(
        F.cross_entropy,
        {
            "matrices": partial(torch.optim.Muon, lr=config.muon_lr),
            "rest": partial(torch.optim.AdamW, lr=config.lr),
        },
        parameters=lambda engine: groups(
            engine.model, {"matrices": lambda name, p: p.dim() == 2, "rest": "*"}
        ),
    )
    trainer = Engine(update, model=model, seed=config.seed)
    train, validation = load_batches(config)
    trainer.attach(
        GradientClipping(max_norm=1.0),
        LRScheduling({"matrices": CosineAnnealingLR, "rest": CosineAnnealingLR}),
        Validation(validation, accuracy=Accuracy()),
        Checkpoint(config.folder, hyperparameters=config),
    )
    state = trainer.run(train, max_epochs=config.epochs)
    print(
        f"accuracy {state.metrics['val_accuracy']:.1%} with "
        f"{Checkpoint.hyperparameters(config.folder)}"
    )


if __name__ == "__main__":
    main()
