"""A training that Hydra composes and overrides: optimizer and schedule are targets of
its configuration.

    python examples/hydra_config.py  # needs: pip install hydra-core
    python examples/hydra_config.py optimizer.lr=0.3 epochs=3 'hidden=[128]'

The configuration is stored with every checkpoint, with interpolations resolved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import hydra
import torch
from hydra.core.config_store import ConfigStore
from hydra.utils import instantiate
from omegaconf import MISSING, DictConfig
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from signalfire import Engine, Update, seed_everything
from signalfire.handlers import Accuracy, Checkpoint, LRScheduling, Metrics


@dataclass
class SGD:
    _target_: str = "torch.optim.SGD"
    _partial_: bool = True
    lr: float = 0.2
    momentum: float = 0.9
    weight_decay: float = 1e-4


@dataclass
class OneCycle:
    _target_: str = "torch.optim.lr_scheduler.OneCycleLR"
    _partial_: bool = True
    max_lr: float = "${optimizer.lr}"  # type: ignore[assignment]


@dataclass
class Config:
    optimizer: Any = field(default_factory=SGD)
    schedule: Any = field(default_factory=OneCycle)
    hidden: list[int] = field(default_factory=lambda: [64])
    epochs: int = 5
    seed: int = 0
    folder: str = MISSING


ConfigStore.instance().store(
    name="config", node=Config(folder="${hydra:runtime.output_dir}/checkpoints")
)


@hydra.main(version_base="1.3", config_path=None, config_name="config")
def main(config: DictConfig) -> None:
    torch.set_num_threads(1)
    seed_everything(config.seed)
    sizes = [64, *config.hidden]
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(sizes[-1], 10))
    # Both are functools.partial objects, which is what an Update and LRScheduling take:
    # the run completes their arguments.
    trainer = Engine(
        Update.supervised(F.cross_entropy, instantiate(config.optimizer)),
        model=model,
        seed=config.seed,
    )
    trainer.attach(
        LRScheduling(instantiate(config.schedule)),
        Metrics(accuracy=Accuracy()),
        Checkpoint(config.folder, hyperparameters=config),
    )
    digits = load_digits()
    x, y = (
        torch.tensor(digits.data, dtype=torch.float32) / 16,
        torch.tensor(digits.target),
    )
    state = trainer.run(
        list(zip(x.split(32), y.split(32), strict=True)), max_epochs=config.epochs
    )
    stored = Checkpoint.hyperparameters(config.folder)
    print(
        f"accuracy {state.metrics['accuracy']:.1%}, max_lr "
        f"{stored['schedule']['max_lr']}, hidden {stored['hidden']}"
    )


if __name__ == "__main__":
    main()
