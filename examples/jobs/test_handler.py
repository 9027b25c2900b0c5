"""The test of the handler in handler.py: `python -m pytest test_handler.py`, in this
folder.
"""

from functools import partial

import torch
from handler import PlateauRestart
from torch import nn

from signalfire import Engine, Update
from signalfire.handlers import Validation
from signalfire.testing import check_handler

torch.manual_seed(0)
batches = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(3)]
held_out = [(torch.randn(8, 3), torch.randn(8, 1))]


def build() -> Engine:
    torch.manual_seed(0)
    update = Update.supervised(nn.functional.mse_loss, torch.optim.SGD, lr=0.9)
    engine = Engine(update, nn.Linear(3, 1), seed=0)
    engine.attach(Validation(held_out))
    return engine


def test_it_guarantees_what_every_handler_does() -> None:
    print(
        check_handler(
            build,
            partial(PlateauRestart, "val_loss", patience=1),
            batches,
            max_epochs=4,
        )
    )


def test_it_goes_back_at_half_the_learning_rate() -> None:
    engine = build()
    engine.attach(PlateauRestart("val_loss", patience=1))
    engine.run(batches, max_epochs=6)
    restarts = engine[PlateauRestart].restarts
    assert restarts > 0
    assert engine.optimizer.param_groups[0]["lr"] == 0.9 * 0.5**restarts
