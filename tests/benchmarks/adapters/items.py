"""The work that every framework does alike. A call of a `Run` trains a new model from the same start, and gives its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Sampler, TensorDataset

__all__ = [
    "ACCUMULATE", "EPOCH", "ITEMS", "LOG_EVERY", "MAX_NORM", "PATIENCE", "Batches", "Item", "Run", "choose", "decay",
]  # fmt: skip

ACCUMULATE, MAX_NORM, LOG_EVERY, PATIENCE = 4, 0.02, 10, 1000
EPOCH = 200  # batches, of the item "full"

Run = Callable[[int], list[Tensor]]
"""Called with a number of iterations, trains a new model for so many, and returns its weights."""


@dataclass(frozen=True)
class Item:
    """What is to be trained.

    Args:
        name: by which it is chosen.
        short, long: the two numbers of iterations whose times are compared.
        model: builds the model, always the same.
        loss: called as ``loss(output, target)``.
        optimizer: called with the parameters.
        data: called with the number of iterations, gives the batches of an epoch and the number of epochs.
        full: whether with accumulation, clipping, schedule, running loss, early stopping, checkpoint and logger.
    """

    name: str
    short: int
    long: int
    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Iterable[Any]], Optimizer]
    data: Callable[[int], tuple[Any, int]]
    full: bool = False


class Shuffled(Sampler[int]):
    """A permutation for each epoch.

    A RandomSampler draws once more when it is exhausted: those who count the batches themselves, and leave it before that, would
    come to another order in the second epoch.
    """

    def __init__(self, n: int, generator: torch.Generator) -> None:
        self.n, self.generator = n, generator

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.n, generator=self.generator).tolist())


class Batches:
    """Batches that cost next to nothing: sized, iterable, and no list, which some take for several data loaders."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches
        self.batch_sampler: Any = None

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def choose(item: Item, *, plain: Callable[[Item], Run], full: Callable[[Item], Run], empty: Any = None) -> Run | None:
    """What an adapter has for this item; None if the framework has no such thing."""
    run: Run | None = empty if item.name == "empty" else full(item) if item.full else plain(item)
    return run


def decay(step: int) -> float:
    """The factor on the learning rate after so many optimizer steps."""
    return 1 / (1 + 0.001 * step)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(32, 32)


def convolutional() -> nn.Module:
    """The convolutional network of the MNIST-1D paper."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 40)), nn.Conv1d(1, 25, 5, stride=2, padding=1), nn.ReLU(),
        nn.Conv1d(25, 25, 3, stride=2, padding=1), nn.ReLU(), nn.Conv1d(25, 25, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(125, 10),
    )  # fmt: skip


@cache
def made_batches(n: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, 16, 32, generator=generator)
    return [(draw(), draw()) for _ in range(n)]


@cache
def digits() -> TensorDataset:
    from mnist1d.data import get_dataset_args, make_dataset

    data = make_dataset(get_dataset_args())
    return TensorDataset(torch.tensor(data["x"], dtype=torch.float32), torch.tensor(data["y"]))


def shuffled(iterations: int) -> tuple[Any, int]:
    sampler = Shuffled(len(digits()), torch.Generator().manual_seed(0))
    return DataLoader(digits(), batch_size=100, sampler=sampler), iterations // 40


sgd = partial(torch.optim.SGD, lr=1e-3)
adam = partial(torch.optim.Adam, lr=1e-2)
ITEMS = {
    item.name: item
    for item in (
        Item("empty", 1000, 21_000, linear, F.mse_loss, sgd, lambda n: (Batches(range(n)), 1)),
        Item("tiny", 100, 1100, linear, F.mse_loss, sgd, lambda n: (Batches(made_batches(1) * n), 1)),
        Item(
            "full",
            EPOCH,
            6 * EPOCH,
            linear,
            F.mse_loss,
            sgd,
            lambda n: (Batches(made_batches(EPOCH)), n // EPOCH),
            full=True,
        ),
        Item("real", 40, 240, convolutional, F.cross_entropy, adam, shuffled),
    )
}
