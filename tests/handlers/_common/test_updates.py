"""Handlers of engines with several updates: what belongs to one of them asks which one it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from signalfire import Engine, Handler, Update
from signalfire.handlers import SWA, LRScheduling, ParameterScheduling
from tests.kit import SGD, linear

SCHEDULES: dict[str, Callable[..., Handler]] = {
    "rates": partial(LRScheduling, partial(ExponentialLR, gamma=0.5)),
    "rates, by a metric": partial(LRScheduling, partial(ReduceLROnPlateau, mode="min"), monitor="loss"),
    "a field": partial(ParameterScheduling, "momentum", lambda steps: 0.01 * steps),
    "annealing": partial(SWA, start=2, lr=0.01),
}


def engine_of(*names: str) -> Engine:
    models = {name: linear(5, 1) for name in names}

    def update(name: str) -> Update:
        def function(engine: Engine, batch: Any) -> Tensor:
            return models[name](batch[0]).sum()  # type: ignore[no-any-return]

        return Update.from_function(function, SGD, name=name, parameters=lambda engine: models[name].parameters())

    return Engine([update(name) for name in names], model=models, seed=0)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_asks_which_of_several_updates_it_is_for(kind: str) -> None:
    engine = engine_of("a", "b")
    with pytest.raises(ValueError, match=r"the engine has several updates \(a, b\); pass update="):
        engine.attach(SCHEDULES[kind]())
    assert list(engine.handlers) == []
    engine.attach(SCHEDULES[kind](update="b"))
    engine_of("a").attach(SCHEDULES[kind]())
