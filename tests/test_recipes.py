"""What researchers put together, each recipe against one plain PyTorch loop."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from signalfire import Engine, Events, Phase, Update
from signalfire.handlers import (
    EMA,
    GradientAccumulation,
    GradientClipping,
    LRScheduling,
    MixedPrecision,
    TruncatedBPTT,
)
from tests import kit
from tests.kit import assert_same, mlp

Batch = tuple[Tensor, Tensor]

BATCHES, WINDOW, EPOCHS, MAX_NORM, DECAY = 7, 3, 3, 0.3, 0.8
STEPS = EPOCHS * 3  # a window of the epoch's last batch alone included
SCALER: dict[str, Any] = {"init_scale": 2.0**18, "growth_interval": 2}  # it overflows at first, and grows again later
ADAM = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
ONE_CYCLE = partial(OneCycleLR, max_lr=5e-2)


def make_model() -> nn.Module:
    return mlp(5, 16, 3, nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), seed=4)


def make_data() -> list[Batch]:
    return kit.batches([6] * BATCHES, targets=(), classes=3, seed=5)


def plain_loop_with_accumulation_scaling_clipping_schedule_and_average() -> tuple[
    nn.Module, nn.Module, list[float], int
]:
    """The model, its average, the rates that its steps used, and how many of them overflowed."""
    model = make_model()
    optimizer = ADAM(model.parameters())
    schedule = ONE_CYCLE(optimizer, total_steps=STEPS)
    scaler = torch.amp.GradScaler("cpu", **SCALER)
    average: nn.Module | None = None
    rates: list[float] = []
    overflows = 0
    torch.manual_seed(6)
    for _ in range(EPOCHS):
        for window in (make_data()[i : i + WINDOW] for i in range(0, BATCHES, WINDOW)):
            for x, y in window:
                with torch.autocast("cpu", torch.float16):
                    loss = nn.functional.cross_entropy(model(x), y)
                scaler.scale(loss).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= len(window)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            scale, rate = scaler.get_scale(), float(schedule.get_last_lr()[0])
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if scaler.get_scale() < scale:
                overflows += 1
                continue  # no step was made: neither the schedule nor the average moves
            rates.append(rate)
            schedule.step()
            if average is None:
                average = copy.deepcopy(model)
                continue
            for mean, tensor in zip(average.parameters(), model.parameters(), strict=True):
                mean.data.lerp_(tensor.data, 1 - DECAY)
            for mean_buffer, buffer in zip(average.buffers(), model.buffers(), strict=True):
                mean_buffer.copy_(buffer)
    assert average is not None
    return model, average, rates, overflows


@pytest.mark.moderate
@pytest.mark.parametrize("order", [1, -1])
def test_accumulation_fp16_clipping_schedule_and_average(order: int) -> None:
    reference, average, expected_rates, overflows = plain_loop_with_accumulation_scaling_clipping_schedule_and_average()
    assert 0 < overflows < STEPS, "the scale has to be too large at first, or skipped steps are not shown"
    model = make_model()
    engine = Engine(Update.supervised(nn.functional.cross_entropy, ADAM), model=model, seed=0)
    handlers = [
        GradientAccumulation(WINDOW),
        MixedPrecision("fp16", **SCALER),
        GradientClipping(max_norm=MAX_NORM),
        LRScheduling(ONE_CYCLE),
        EMA(DECAY),
    ]
    engine.attach(*handlers[::order])
    rates: list[float] = []

    @engine.on(Events.OPTIMIZER_STEP_COMPLETED, phase=Phase.PREPARE)  # before the schedule moves on
    def note(engine: Engine) -> None:
        update = engine.state.update
        assert update.optimizer is not None
        if update.skipped is None:
            rates.append(update.optimizer.param_groups[0]["lr"])

    torch.manual_seed(6)
    engine.run(make_data(), max_epochs=EPOCHS)
    assert_same(model, reference)
    assert rates == expected_rates
    assert engine.updates[0].steps == STEPS - overflows == len(expected_rates)
    exported = engine.weights()["model"]
    for name, tensor in average.state_dict().items():
        assert torch.equal(exported[name], tensor), name


class Recurrent(nn.Module):
    """A GRU over (N, T, 2) whose hidden state is carried on, and a number for every point in time."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, 8, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        output, hidden = self.gru(x, hidden)
        return self.head(output).squeeze(2), hidden


@pytest.mark.moderate
def test_truncated_bptt_accumulation_and_clipping() -> None:
    generator = torch.Generator().manual_seed(7)
    data = [(x, x.sum(2).cumsum(1)) for x in torch.randn(3, 4, 10, 2, generator=generator)]
    chunk, window = 4, 2  # three chunks a batch, the last of two points: windows reach over two batches

    torch.manual_seed(8)
    reference = Recurrent()
    optimizer = ADAM(reference.parameters())
    steps, held = 0, 0
    for _ in range(EPOCHS):
        chunks = [
            (n, part) for n, batch in enumerate(data) for part in zip(*(t.split(chunk, 1) for t in batch), strict=True)
        ]
        hidden, current = None, -1
        for place, (n, (x, y)) in enumerate(chunks):
            hidden, current = (None if n != current else hidden), n
            output, hidden = reference(x, None if hidden is None else hidden.detach())
            nn.functional.mse_loss(output, y).backward()
            held += 1
            if held < window and place + 1 < len(chunks):
                continue
            for parameter in reference.parameters():
                assert parameter.grad is not None
                parameter.grad /= held
            held = 0
            nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1

    def forward(engine: Engine, batch: Batch) -> Tensor:
        update = engine.state.update
        output, update.hidden = engine.model(batch[0], update.hidden)
        return output  # type: ignore[no-any-return]

    def loss(engine: Engine, output: Tensor, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(output, batch[1])

    torch.manual_seed(8)
    model = Recurrent()
    engine = Engine(Update(forward, loss, ADAM), model=model, seed=0)
    engine.attach(GradientClipping(max_norm=MAX_NORM), TruncatedBPTT(chunk), GradientAccumulation(window))
    engine.run(data, max_epochs=EPOCHS)
    assert engine.updates[0].steps == steps
    assert_same(model, reference)
