"""Steps that are not made, and what they leave untrained."""

from __future__ import annotations

from torch.nn.functional import mse_loss

from signalfire import Engine, Update
from tests.kit import SGD, batches, mlp
from tests.mistakes.registry import mistake


@mistake("W10")
def a_forgotten_optimizer(right: bool) -> None:
    engine = Engine(Update.supervised(mse_loss, SGD if right else None), model=mlp(5, 8, 1))
    engine.run(batches(), max_epochs=2)
