"""Memory: a long run holds no more than a short one, and an engine goes when its last reference goes."""

from __future__ import annotations

import gc
import io
import tracemalloc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # torch imports it with the first optimizer, and keeps the frames of that moment
from torch import nn

from signalfire import Engine, Events, Update
from signalfire.handlers import (
    Average,
    Checkpoint,
    EarlyStopping,
    GradientAccumulation,
    GradientClipping,
    History,
    LRScheduling,
    Metrics,
    MixedPrecision,
    ProgressBar,
    TensorBoardLogger,
    Validation,
)
from tests.kit import quick


@pytest.mark.slow
def test_a_million_iterations_of_an_empty_step_hold_memory_constant() -> None:
    engine = Engine(Update.from_function(lambda engine, batch: None))
    held: list[int] = []

    @engine.on(Events.ITERATION_COMPLETED(every=100_000))
    def measure(engine: Engine) -> None:
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])

    tracemalloc.start()
    try:
        engine.run(max_iters=1_000_000)
    finally:
        tracemalloc.stop()
    assert len(held) == 10
    # From the second look on; a single object of 16 bytes kept in every iteration would be 12.8 MB.
    assert max(held[1:]) - min(held[1:]) < 10_000


def compose(folder: Path) -> Engine:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    update = Update.supervised(nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1))
    evaluator = Engine(update.evaluation(), model=model)
    evaluator.attach(Metrics(loss=Average()))
    engine = Engine(update, model=model)
    engine.attach(
        Validation(evaluator, [(torch.ones(4, 3), torch.ones(4, 2))]),
        GradientAccumulation(2),
        GradientClipping(max_norm=1.0),
        LRScheduling(partial(torch.optim.lr_scheduler.StepLR, step_size=3)),
        MixedPrecision("fp16"),
        EarlyStopping("loss", patience=100),
        Checkpoint(folder, monitor="loss"),
        TensorBoardLogger(folder, every="1it"),
        Metrics(train_loss=Average(), name="train_metrics"),
        History(),
        ProgressBar(file=io.StringIO()),
    )
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: None)
    return engine


@pytest.mark.parametrize("how", quick(["never run", "run", "failed", "detached"], "failed"))
def test_an_engine_and_its_handlers_are_freed_without_a_pass_of_the_garbage_collector(tmp_path: Path, how: str) -> None:
    engine = compose(tmp_path)
    data: list[Any] = [(torch.ones(4, 3), torch.ones(4, 2))] * 4
    gc.collect()
    gc.disable()
    try:
        if how == "failed":
            with pytest.raises(ValueError, match="empty"):
                engine.run([], max_epochs=1)
            engine.connect(Events.ITERATION_COMPLETED(once=3), fail)
            with pytest.raises(ZeroDivisionError):
                engine.run(data, max_epochs=1)
        elif how != "never run":
            engine.run(data, max_epochs=2)
        handlers = [weakref.ref(handler) for handler in engine.handlers.values()]
        if how == "detached":
            for name in list(engine.handlers):
                engine.detach(name)
            assert [ref() for ref in handlers if ref() is not None] == []
        reference = weakref.ref(engine)
        del engine
        assert reference() is None
        assert [ref() for ref in handlers if ref() is not None] == []
    finally:
        gc.enable()


def fail(engine: Engine) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("training", [True, False])
def test_the_previous_output_is_gone_before_there_is_another(training: bool) -> None:
    outputs: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    class Noting(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            alive.append(sum(one() is not None for one in outputs))
            output = super().forward(input)
            outputs.append(weakref.ref(output))
            return output

    optimizer = partial(torch.optim.SGD, lr=0.1) if training else None
    engine = Engine(Update.supervised(nn.functional.mse_loss, optimizer), model=Noting(3, 1))
    engine.run([(torch.ones(2, 3), torch.ones(2, 1))] * 5, max_epochs=1)
    assert alive == [0] * 5
    assert engine.updates[0].output is outputs[-1](), "the last one stays, to be looked at"
