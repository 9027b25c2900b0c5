"""MixedPrecision against torch.autocast and torch.amp.GradScaler in plain PyTorch loops."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Handler, Update
from signalfire.core.overrides import Override
from signalfire.handlers import GradientAccumulation, GradientClipping, LRScheduling, MixedPrecision
from tests import kit
from tests.kit import assert_same, average_gradients, build, mlp, windows

Batches = list[tuple[Tensor, Tensor]]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def network() -> nn.Sequential:
    return mlp(5, 8, 2, nn.Tanh())


def batches(count: int = 7) -> Batches:
    return kit.batches(count, targets=2)


def with_a_huge_one() -> Batches:
    """The third batch's loss is so large that its scaled gradients overflow in float16."""
    data = batches()
    data[2] = (data[2][0], data[2][1] * 30000)
    return data


engine_of = partial(build, optimizer=partial(torch.optim.Adam, lr=0.05))


def plain_loop(
    precision: str,
    data: Batches,
    *,
    epochs: int = 2,
    window: int = 1,
    max_norm: float | None = None,
    skip_at: int | None = None,
    **options: Any,
) -> tuple[nn.Sequential, list[float], int]:
    """The trained model, the scale after every window, and how many steps happened."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16", **options)
    scales: list[float] = []
    steps, number = 0, 0
    for _ in range(epochs):
        for chunk in windows(data, window):
            for inputs, targets in chunk:
                with torch.autocast("cpu", dtype=DTYPES[precision]):
                    loss = nn.functional.mse_loss(model(inputs), targets)
                scaler.scale(loss).backward()
            average_gradients(model, len(chunk))
            scaler.unscale_(optimizer)
            finite = all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            number += 1
            if number != skip_at:
                scaler.step(optimizer)
                steps += finite
            scaler.update()
            scales.append(scaler.get_scale())
            optimizer.zero_grad()
    return model, scales, steps


def note_scales(engine: Engine, handler: MixedPrecision) -> list[float]:
    scales: list[float] = []

    @engine.on(Events.UPDATE_COMPLETED)
    def note(engine: Engine) -> None:
        if engine.state.update.window.filled == 0:
            scales.append(handler.scalers["main"].get_scale())

    return scales


def test_bf16_equals_a_plain_loop() -> None:
    model = network()
    handler = MixedPrecision("bf16")
    engine_of(model, handler).run(batches(), max_epochs=2)
    reference, _, _ = plain_loop("bf16", batches())
    assert_same(model, reference)
    assert handler.scalers == {}
    plain = network()
    engine_of(plain).run(batches(), max_epochs=2)
    assert not torch.equal(next(plain.parameters()), next(model.parameters()))  # the cast does something


OPTIONS: list[dict[str, Any]] = [
    {},
    {"init_scale": 2.0**40},
    {"init_scale": 4.0, "growth_interval": 3},
    {"init_scale": 2.0**20, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_fp16_equals_a_plain_loop(options: dict[str, Any], window: int, max_norm: float | None) -> None:
    model = network()
    handler = MixedPrecision("fp16", **options)
    clipping = [] if max_norm is None else [GradientClipping(max_norm=max_norm)]
    engine = engine_of(model, *clipping, GradientAccumulation(window), handler)
    scales = note_scales(engine, handler)
    engine.run(with_a_huge_one(), max_epochs=2)
    reference, expected, steps = plain_loop("fp16", with_a_huge_one(), window=window, max_norm=max_norm, **options)
    assert scales == expected
    assert engine.updates[0].steps == steps
    assert_same(model, reference)


def test_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    model = network()
    before = [p.detach().clone() for p in model.parameters()]
    handler = MixedPrecision("fp16", init_scale=2.0**40)
    engine = engine_of(model, handler, LRScheduling(partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)))
    skipped: list[str | None] = []
    engine.connect(Events.OPTIMIZER_STEP_COMPLETED, lambda engine: skipped.append(engine.state.update.skipped))
    engine.run(batches(1), max_epochs=1)
    assert skipped == ["the scaled gradients are not finite"]
    assert handler.scalers["main"].get_scale() == 2.0**39
    assert engine.updates[0].steps == 0
    for a, b in zip(before, model.parameters(), strict=True):
        assert torch.equal(a, b)
        assert b.grad is None
    assert engine.updates[0].optimizer.param_groups[0]["lr"] == 0.05  # type: ignore[union-attr]


def test_a_step_that_somebody_else_skips_still_moves_the_scale() -> None:
    model = network()
    handler = MixedPrecision("fp16", init_scale=4.0, growth_interval=3)
    engine = engine_of(model, handler)
    engine.connect(Events.GRADIENTS_READY(once=2), lambda engine: engine.state.update.skip("on purpose"))
    scales = note_scales(engine, handler)
    engine.run(batches(), max_epochs=1)
    reference, expected, _ = plain_loop("fp16", batches(), epochs=1, skip_at=2, init_scale=4.0, growth_interval=3)
    assert scales == expected == [4.0, 4.0, 8.0, 8.0, 8.0, 16.0, 16.0]
    assert engine.updates[0].steps == 6
    assert_same(model, reference)


def test_a_window_without_a_gradient_leaves_the_scale_alone() -> None:
    handler = MixedPrecision("fp16", init_scale=4.0, growth_interval=3)
    engine = engine_of(network(), handler)
    engine.connect(Events.LOSS_COMPUTED(once=2), lambda engine: engine.state.update.skip("on purpose"))
    scales = note_scales(engine, handler)
    engine.run(batches(4), max_epochs=1)
    assert scales == [4.0, 4.0, 4.0, 8.0]


def test_the_reported_loss_is_not_scaled() -> None:
    data = batches(2)
    engine = engine_of(network(), MixedPrecision("fp16", init_scale=1024.0))
    losses: list[Tensor | None] = []
    scaled: list[Tensor] = []
    engine.connect(Events.BACKWARD_STARTED, lambda engine: scaled.append(engine.state.update.backward_loss.detach()))
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.update.loss))
    engine.run(data, max_iters=1)
    with torch.autocast("cpu", dtype=torch.float16):
        expected = nn.functional.mse_loss(network()(data[0][0]), data[0][1])
    assert losses[0] is not None
    assert torch.equal(losses[0], expected)
    assert torch.equal(scaled[0], expected * 1024)


def test_the_backward_runs_outside_autocast() -> None:
    engine = engine_of(network(), MixedPrecision("bf16"))
    inside: dict[str, bool] = {}
    for event in (Events.FORWARD_COMPLETED, Events.LOSS_COMPUTED, Events.BACKWARD_STARTED, Events.ITERATION_COMPLETED):
        engine.connect(event, lambda engine, event=event: inside.update({event.name: torch.is_autocast_enabled("cpu")}))
    engine.run(batches(1), max_epochs=1)
    assert inside == {
        "FORWARD_COMPLETED": True,
        "LOSS_COMPUTED": True,
        "BACKWARD_STARTED": False,
        "ITERATION_COMPLETED": False,
    }


def test_autocast_is_left_when_the_forward_raises() -> None:
    engine = engine_of(network(), MixedPrecision("bf16"))
    with pytest.raises(RuntimeError, match="shape"):
        engine.run([(torch.randn(4, 6), torch.randn(4, 2))], max_epochs=1)
    assert not torch.is_autocast_enabled("cpu")


def test_each_update_has_a_scaler_of_its_own() -> None:
    models = {"a": network(), "b": network()}

    def update(name: str, factor: float) -> Update:
        def function(engine: Engine, batch: Any) -> Tensor:
            return nn.functional.mse_loss(models[name](batch[0]), batch[1]) * factor

        return Update.from_function(
            function,
            partial(torch.optim.Adam, lr=0.05),
            name=name,
            parameters=lambda engine: models[name].parameters(),
        )

    engine = Engine([update("a", 1.0), update("b", 1e9)], model=models, seed=0)
    handler = MixedPrecision("fp16", init_scale=2.0**10)
    engine.attach(handler)
    engine.run(batches(1), max_epochs=1)
    assert {name: scaler.get_scale() for name, scaler in handler.scalers.items()} == {"a": 2.0**10, "b": 2.0**9}
    assert [update.steps for update in engine.updates] == [1, 0]


@pytest.mark.parametrize("at", [2, 4, 5])
def test_a_saved_run_goes_on_bit_for_bit(at: int) -> None:
    def build(model: nn.Module) -> tuple[Engine, MixedPrecision]:
        handler = MixedPrecision("fp16", init_scale=2.0**20, growth_interval=3)
        return engine_of(model, handler, GradientAccumulation(2)), handler

    whole = network()
    engine, handler = build(whole)
    saved: list[dict[str, Any]] = []
    engine.connect(Events.ITERATION_COMPLETED(once=at), lambda engine: saved.append(engine.state_dict()))
    scales = note_scales(engine, handler)
    engine.run(with_a_huge_one(), max_epochs=2)

    torch.manual_seed(99)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    other, loaded = build(model)
    rest = note_scales(other, loaded)
    other.load_state_dict(saved[0])
    other.run(with_a_huge_one(), max_epochs=2)
    assert rest == scales[at // 2 :]
    assert loaded.state_dict() == handler.state_dict()
    assert_same(model, whole)


def test_a_run_stopped_inside_a_window_can_go_on() -> None:
    engine = engine_of(network(), MixedPrecision("fp16", init_scale=4.0), GradientAccumulation(4))
    engine.connect(Events.ITERATION_COMPLETED(once=2), lambda engine: engine.terminate("enough"))
    engine.run(batches(), max_epochs=1)
    engine.run(batches(), max_epochs=3)
    assert engine.state.epoch == 3


def test_an_error_between_unscale_and_step_does_not_spoil_the_next_run() -> None:
    engine = engine_of(network(), MixedPrecision("fp16", init_scale=4.0))

    def fail(engine: Engine) -> None:
        raise ArithmeticError("on purpose")

    connection = engine.connect(Events.GRADIENTS_READY(once=1), fail)
    with pytest.raises(ArithmeticError):
        engine.run(batches(), max_epochs=1)
    connection.detach()
    engine.run(batches(), max_epochs=2)
    assert engine.updates[0].steps > 0


def test_an_evaluator_only_autocasts() -> None:
    model = network()
    evaluator = Engine(Update.supervised(nn.functional.mse_loss), model=model)
    handler = MixedPrecision("fp16")
    evaluator.attach(handler)
    outputs: list[Tensor] = []
    losses: list[Tensor | None] = []
    evaluator.connect(Events.FORWARD_COMPLETED, lambda engine: outputs.append(engine.state.update.output))
    evaluator.connect(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.update.loss))
    evaluator.run(batches(1))
    with torch.autocast("cpu", dtype=torch.float16), torch.no_grad():
        output = model(batches(1)[0][0])
        loss = nn.functional.mse_loss(output, batches(1)[0][1])
    assert outputs[0].dtype == torch.float16
    assert torch.equal(outputs[0], output)
    assert losses[0] is not None
    assert torch.equal(losses[0], loss)
    assert handler.scalers == {}


@pytest.mark.parametrize("way", ["without", "disabled", "detached"])
def test_switched_off_it_equals_a_plain_loop(way: str) -> None:
    model, reference = network(), network()
    handler = MixedPrecision("fp16", init_scale=4.0)
    engine = engine_of(model, handler)
    if way == "without":
        with engine.without("mixed_precision"):
            engine.run(batches(), max_epochs=2)
    else:
        if way == "disabled":
            handler.enabled = False
        else:
            engine.detach(handler)
        engine.run(batches(), max_epochs=2)
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.05)
    for inputs, targets in batches() * 2:
        nn.functional.mse_loss(reference(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model, reference)


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "fp8"},
        {"init_scale": 0.0},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"backoff_factor": 0.0},
        {"growth_interval": 0},
        {"init_scale": math.nan},
    ],
    ids=str,
)
def test_bad_arguments_are_refused(options: dict[str, Any]) -> None:
    ((argument, value),) = options.items()
    with pytest.raises(ValueError, match=rf"MixedPrecision\({argument}={value!r}\)"):
        MixedPrecision(**{"precision": "fp16", **options})


def test_a_run_that_reaches_its_bounds_inside_a_window_continues_it() -> None:
    model = network()
    handler = MixedPrecision("fp16", init_scale=2.0**20, growth_interval=2)
    engine = engine_of(model, handler, GradientAccumulation(3))
    for bound in (2, 5, 8):
        engine.run(with_a_huge_one(), max_iters=bound)
    engine.run(with_a_huge_one(), max_epochs=2)
    reference, scales, steps = plain_loop("fp16", with_a_huge_one(), window=3, init_scale=2.0**20, growth_interval=2)
    assert handler.scalers["main"].get_scale() == scales[-1]
    assert engine.updates[0].steps == steps
    assert_same(model, reference)


@pytest.mark.parametrize("way", ["detached", "switched off", "attached"])
def test_a_window_left_open_between_two_runs_is_discarded_when_scaling_comes_or_goes(way: str) -> None:
    handler = MixedPrecision("fp16")
    sgd = partial(torch.optim.SGD, lr=1.0)
    engine = Engine(Update.supervised(nn.functional.mse_loss, sgd), model=network(), seed=0)
    engine.attach(GradientAccumulation(4), *([] if way == "attached" else [handler]))
    engine.run(batches(4), max_iters=2)
    if way == "attached":
        engine.attach(handler)
    elif way == "detached":
        engine.detach(handler)
    else:
        handler.enabled = False
    engine.run(batches(4), max_epochs=1)
    assert engine.updates[0].steps == 1

    reference, parameters = network(), list(engine.model.parameters())
    optimizer = sgd(reference.parameters())
    for inputs, targets in batches(4)[2:]:  # what the window held before is gone; it is averaged over the other two
        with torch.autocast("cpu", dtype=torch.float16, enabled=way == "attached"):
            loss = nn.functional.mse_loss(reference(inputs), targets)
        (loss * (2.0**16 if way == "attached" else 1.0)).backward()
    for parameter in reference.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(2)
        parameter.grad.div_(2.0**16 if way == "attached" else 1.0)
    optimizer.step()
    for one, other in zip(parameters, reference.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_reset_begins_with_the_first_scale() -> None:
    handler = MixedPrecision("fp16", init_scale=2.0**40)
    engine = engine_of(network(), handler)
    engine.run(batches(1), max_epochs=1)
    assert handler.scalers["main"].get_scale() == 2.0**39
    engine.reset()
    scales = note_scales(engine, handler)
    engine.run(batches(1), max_epochs=1)
    assert scales == [2.0**39]


# ---- gradients that are computed several times in a step ----------------------------------------------------------


def lbfgs_of(model: nn.Module, *handlers: Any) -> Engine:
    update = Update.supervised(nn.functional.mse_loss, partial(torch.optim.LBFGS, max_iter=3), name="fit")
    engine = Engine(update, model=model, seed=0)
    engine.attach(*handlers)
    return engine


def test_fp16_refuses_an_optimizer_with_a_closure_before_the_first_batch() -> None:
    engine = lbfgs_of(network(), MixedPrecision("fp16"))
    with pytest.raises(ValueError, match=r"'mixed_precision'.*LBFGS.*'fit'.*MixedPrecision\('bf16'\)"):
        engine.run(batches(), max_epochs=1)
    assert engine.state.iteration == 0
    engine.detach("mixed_precision")
    assert engine.run(batches(), max_epochs=1).iteration == 7  # the closure still works


@pytest.mark.moderate
def test_bf16_with_a_closure_equals_a_plain_loop() -> None:
    model, reference = network(), network()
    lbfgs_of(model, MixedPrecision("bf16")).run(batches(), max_epochs=2)
    optimizer = torch.optim.LBFGS(reference.parameters(), max_iter=3)
    for inputs, targets in batches() * 2:

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(reference(inputs), targets)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_same(model, reference)


class Again(Handler):
    """Computes the gradients of every step twice."""

    def attached(self, engine: Engine) -> None:
        engine.overrides.replace(Override.STEP, self.step, by=self, again=True)

    def step(self, engine: Engine, update: Any, step: Any) -> None:
        update.again()
        step()


@pytest.mark.parametrize("first", [True, False])
def test_gradients_that_a_handler_computes_again_are_unscaled_like_the_first(first: bool) -> None:
    """A scale that is a power of two rounds nothing: the weights are those without the handler."""
    handlers = [MixedPrecision("fp16", init_scale=1024.0), Again()]
    again = engine_of(network(), *(handlers if first else handlers[::-1]))
    again.run(batches(), max_epochs=1)
    once = engine_of(network(), MixedPrecision("fp16", init_scale=1024.0))
    once.run(batches(), max_epochs=1)
    assert_same(again.model, once.model)
