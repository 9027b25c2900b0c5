"""What the engine knows of its data between two runs and at the beginning of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Sampler, TensorDataset

from signalfire import Engine, Events, Update


class ByEpoch(Sampler[int]):
    """Draws its order from the epoch that it was set to."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def make() -> tuple[Engine, DataLoader[Any], list[list[float]]]:
    seen: list[list[float]] = []

    def function(engine: Engine, batch: Any) -> Tensor:
        seen.append(batch[0].flatten().tolist())
        return engine.model(batch[0]).sum()  # type: ignore[no-any-return]

    engine = Engine(Update.from_function(function, partial(SGD, lr=0.1)), model=nn.Linear(1, 1), seed=0)
    data = TensorDataset(torch.arange(6.0).reshape(6, 1))
    return engine, DataLoader(data, batch_size=2, sampler=ByEpoch(6)), seen


def test_a_state_taken_as_an_epoch_of_a_continued_run_begins_has_the_order_of_that_epoch() -> None:
    engine, data, seen = make()
    engine.run(data, max_epochs=1)
    states: list[dict[str, Any]] = []
    with engine.connect(Events.EPOCH_STARTED(once=2), lambda engine: states.append(engine.state_dict())):
        engine.run(data, max_epochs=3)
    resumed, data, seen_again = make()
    resumed.load_state_dict(states[0])
    resumed.run(data, max_epochs=3)
    assert seen_again == seen[3:]
    assert len(seen_again) == 6
