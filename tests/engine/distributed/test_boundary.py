"""The boundary of several ranks: which steps are left out by a stop that all ranks decide alike."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from signalfire import Engine, EventEnum, Events, Handler, Update
from signalfire.handlers import DistributedDataParallel
from tests.processes import run_together


class StopAlike(Handler):
    """Stops in the second iteration, at one event, on each rank."""

    decides_alike = True

    def __init__(self, event: EventEnum) -> None:
        super().__init__()
        self.event = event

    def attached(self, engine: Engine) -> None:
        engine.connect(self.event(once=2), self.stop)

    def stop(self, engine: Engine) -> None:
        engine.terminate("enough", by=self.name)


def _forward(name: str, engine: Engine, batch: Any) -> Any:
    return engine.modules[name](batch)


def _parameters(name: str, engine: Engine) -> Any:
    return engine.modules[name].parameters()


def _weights_after_a_stop(event: EventEnum) -> list[tuple[int, float]]:
    torch.set_num_threads(1)
    parts = {"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)}
    for part in parts.values():
        nn.init.ones_(part.weight)
    updates = [
        Update(
            partial(_forward, name),
            loss=lambda engine, output, batch: output.sum(),
            optimizer=partial(torch.optim.SGD, lr=0.5),
            parameters=partial(_parameters, name),
            name=name,
        )
        for name in parts
    ]
    engine = Engine(updates, model=parts)
    engine.attach(DistributedDataParallel(timeout=60), StopAlike(event))
    engine.run([torch.ones(1, 1)] * 4, max_epochs=1)
    return [(update.steps, parts[update.name].weight.item()) for update in engine.updates]


@pytest.mark.moderate
@pytest.mark.parametrize("event", [Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED])
def test_a_stop_before_the_updates_that_all_ranks_ask_for_leaves_out_each_of_them(event: EventEnum) -> None:
    for rank in run_together(_weights_after_a_stop, 2, event):
        assert rank == [(1, 0.5), (1, 0.5)]
