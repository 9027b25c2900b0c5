"""LabelSmoothing against torch's own, in plain PyTorch loops."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from signalfire import Engine, Events, Update
from signalfire.handlers import GradientAccumulation, LabelSmoothing, MixedPrecision
from signalfire.testing import check_handler
from tests import kit
from tests.kit import average_gradients, windows

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv1d(2, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 4, 3))


def batches(dense: bool, count: int = 6) -> list[tuple[Tensor, Tensor]]:
    """Targets for each place, of shape (N, 3), or for each sample."""
    return kit.batches([5] * count, (2, 7), (3,) if dense else (), classes=4)


def forward(engine: Engine, batch: Any) -> Any:
    output = engine.model(batch[0])
    return output if batch[1].dim() > 1 else output.mean(2)


def loss(engine: Engine, output: Any, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[1])


def build() -> Engine:
    return Engine(Update(forward, loss, SGD), model=network(), seed=7)


def trained(dense: bool, *handlers: Any) -> tuple[Engine, list[float]]:
    engine = build()
    engine.attach(*handlers)
    losses: list[float] = []

    @engine.on(Events.UPDATE_COMPLETED)
    def note(engine: Engine) -> None:
        assert engine.state.update.loss is not None
        losses.append(engine.state.update.loss.item())

    engine.run(batches(dense), max_epochs=2)
    return engine, losses


def plain_loop(
    dense: bool, alpha: float, *, window: int = 1, scaled: bool = False, same_arithmetic: bool = True
) -> tuple[nn.Sequential, list[float]]:
    model = network()
    optimizer = SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    data, losses = batches(dense), []
    for _ in range(2):
        for chunk in windows(data, window):
            for x, y in chunk:
                with torch.autocast("cpu", dtype=torch.float16, enabled=scaled):
                    output = model(x) if dense else model(x).mean(2)
                    if same_arithmetic:
                        smooth = -output.float().log_softmax(1).mean()
                        value = (1 - alpha) * F.cross_entropy(output, y) + alpha * smooth
                    else:
                        value = F.cross_entropy(output, y, label_smoothing=alpha)
                losses.append(value.item())
                scaler.scale(value).backward()
            average_gradients(model, len(chunk))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model, losses


@pytest.mark.moderate
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("alpha", [0.1, 0.5, 1])
@pytest.mark.parametrize("window", [1, 4])
def test_it_trains_as_torchs_label_smoothing_does(dense: bool, alpha: float, window: int) -> None:
    engine, losses = trained(dense, LabelSmoothing(alpha), GradientAccumulation(window))
    model, plain_losses = plain_loop(dense, alpha, window=window, same_arithmetic=False)
    # torch adds the same numbers up in another order: its sums differ in the last bits, and so do twelve steps made of them.
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    for one, other in zip(engine.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    plain, _ = plain_loop(dense, 0.0, window=window, same_arithmetic=False)
    assert not torch.allclose(engine.model[0].weight, plain[0].weight, rtol=1e-3)  # type: ignore[arg-type]


@pytest.mark.moderate
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
def test_weights_equal_the_same_sums_in_a_plain_loop_with_accumulation_and_fp16(scaled: bool, reverse: bool) -> None:
    handlers: list[Any] = [LabelSmoothing(0.2), GradientAccumulation(4)]
    if scaled:
        handlers.append(MixedPrecision("fp16", init_scale=1024.0))
    engine, losses = trained(True, *(reversed(handlers) if reverse else handlers))
    model, plain_losses = plain_loop(True, 0.2, window=4, scaled=scaled)
    for one, other in zip(engine.model.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert losses == plain_losses


def test_what_others_add_to_the_loss_is_not_smoothed() -> None:
    engine = build()
    engine.attach(LabelSmoothing(0.2))
    seen: list[tuple[float, float]] = []

    @engine.on(Events.LOSS_COMPUTED)
    def penalty(engine: Engine) -> None:
        update = engine.state.update
        assert update.loss is not None
        seen.append((update.loss.item(), update.backward_loss.item()))
        update.backward_loss = update.backward_loss + 100.0

    engine.run(batches(False), max_epochs=1)
    _, plain_losses = plain_loop(False, 0.2)
    assert [one for one, _ in seen] == plain_losses[:6]  # a constant changes no gradient
    assert all(one == other for one, other in seen)


def test_one_update_of_two_is_smoothed() -> None:
    updates = [Update(forward, loss, SGD, name=name) for name in "ab"]
    engine = Engine(updates, model=network(), seed=7)
    engine.attach(LabelSmoothing(1, update="b"))
    engine.run([(torch.zeros(5, 2, 7), torch.zeros(5, dtype=torch.long))], max_epochs=1)
    losses = {update.name: update.loss for update in engine.updates}
    assert losses["a"] is not None
    assert losses["b"] is not None
    assert losses["a"] != losses["b"]
    with pytest.raises(KeyError, match="c"):
        engine.attach(LabelSmoothing(update="c", name="other"))


@pytest.mark.moderate
def test_it_keeps_the_promises_of_a_handler() -> None:
    check_handler(build, lambda: LabelSmoothing(0.2), batches(True, 3), max_epochs=2)


def test_an_update_that_is_a_single_function_is_refused_before_the_first_batch() -> None:
    function = Update.from_function(lambda engine, batch: engine.model(batch[0]).sum(), SGD, name="other")
    engine = Engine([Update(forward, loss, SGD), function], model=network())
    handler = LabelSmoothing()
    engine.attach(handler)
    with pytest.raises(
        ValueError, match=r"'label_smoothing': update 'other' is a single function.*Update\(forward, loss"
    ):
        engine.run(batches(True), max_epochs=1)
    assert engine.state.iteration == 0
    engine.detach(handler)
    engine.attach(LabelSmoothing(update="main"))
    engine.run(batches(True), max_epochs=1)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda x: (x, x), "is of type tuple; expected a tensor of logits"),
        (lambda x: x.sum(2).sum(1), r"has shape \(5,\)"),
        (lambda x: x[:, :1], r"has shape \(5, 1, 3\)"),
    ],
)
def test_outputs_that_are_no_logits_are_refused_by_name(output: Any, message: str) -> None:
    update = Update(
        lambda engine, batch: output(engine.model(batch[0])), lambda engine, output, batch: torch.zeros(()), SGD
    )
    engine = Engine(update, model=network())
    engine.attach(LabelSmoothing())
    with pytest.raises(TypeError, match=f"'label_smoothing': the output of update 'main' {message}"):
        engine.run(batches(True), max_epochs=1)


def test_two_refuse_each_other_and_an_engine_that_evaluates() -> None:
    with pytest.raises(ValueError, match="both 'one' and 'two' control label smoothing of update"):
        build().attach(LabelSmoothing(name="one"), LabelSmoothing(name="two"))
    with pytest.raises(ValueError, match="label_smoothing"):
        Engine(Update(forward, loss), model=network()).attach(LabelSmoothing())


@pytest.mark.parametrize("alpha", [0, 1.1, -0.1, math.nan, "0.1", True], ids=str)
def test_bad_arguments_are_refused(alpha: Any) -> None:
    kind = TypeError if alpha in ("0.1", True) else ValueError
    with pytest.raises(kind, match=rf"LabelSmoothing\(alpha={alpha!r}\)"):
        LabelSmoothing(alpha)
