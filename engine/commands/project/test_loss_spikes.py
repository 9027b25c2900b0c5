"""A handler has to leave no trace when it is detached, and to resume exactly; `check_handler` runs it in all these ways."""

import torch
from loss_spikes import LossSpikes
from torch import nn
from train import build

from signalfire import Engine
from signalfire.testing import check_handler

DATA = [(torch.full((4, 2), float(i)), torch.tensor([0, 1, 0, 1])) for i in range(4)]


def make_engine() -> Engine:
    trainer, _ = build(seed=0)
    trainer.detach("loss_spikes")
    return trainer


def test_the_handler_keeps_the_promises() -> None:
    check_handler(make_engine, LossSpikes, DATA, changes_training=False, max_epochs=2)


def test_a_large_loss_is_found() -> None:
    engine = make_engine()
    engine.attach(spikes := LossSpikes())
    model = engine.model
    assert isinstance(model, nn.Module)
    engine.run([*DATA[:3], (1000 * DATA[3][0], DATA[3][1])], max_epochs=1)
    assert spikes.found == [4]
