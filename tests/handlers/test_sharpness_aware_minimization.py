"""SharpnessAwareMinimization against plain PyTorch loops: bit-equal weights, and weights that are put back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from signalfire import Engine, Events, Handler, Phase, Update, on, seed_everything
from signalfire.handlers import (
    Accuracy,
    Average,
    GradientAccumulation,
    GradientClipping,
    LRScheduling,
    Metrics,
    MicroBatching,
    MixedPrecision,
    SharpnessAwareMinimization,
)
from signalfire.testing import check_handler, fingerprint
from tests import kit
from tests.kit import assert_same, mlp, quick

Batch = tuple[Tensor, Tensor]
cross_entropy = nn.functional.cross_entropy
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def make_data(sizes: Iterable[int] = (6, 6, 6, 6, 4)) -> list[Batch]:
    return kit.batches(sizes, 4, (), classes=3, seed=0)


def make_model() -> nn.Sequential:
    return mlp(4, 6, 3, nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Tanh(), seed=0)


def make_trainer(*handlers: Handler, model: nn.Module | None = None, optimizer: Any = SGD) -> Engine:
    return kit.build(model or make_model(), *handlers, loss=cross_entropy, optimizer=optimizer)


def trained(*handlers: Handler, epochs: int = 2, data: Any = None, **options: Any) -> Engine:
    engine = make_trainer(*handlers, **options)
    seed_everything(1)
    engine.run(data or make_data(), max_epochs=epochs)
    return engine


def plain_loop(
    *,
    rho: float = 0.05,
    adaptive: bool = False,
    eta: float = 0.01,
    every: int = 1,
    window: int = 1,
    weight: Callable[[Batch], float] | None = None,
    max_norm: float | None = None,
    schedule: bool = False,
    bf16: bool = False,
    model: nn.Module | None = None,
    data: Sequence[Batch] | None = None,
    epochs: int = 2,
) -> nn.Module:
    """The two evaluations of each step in a plain loop."""
    model, data = model or make_model(), data or make_data()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = SGD(parameters)
    scheduler = StepLR(optimizer, 2, 0.5) if schedule else None
    seed_everything(1)

    def evaluate(batches: Sequence[Batch]) -> None:
        optimizer.zero_grad()
        total = 0.0
        for x, y in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                loss = cross_entropy(model(x), y)
            share = 1 if weight is None else weight((x, y))
            (loss if weight is None else loss * share).backward()
            total += share
        for p in parameters:
            if p.grad is not None and total != 1:
                p.grad.div_(total)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, max_norm)

    steps = 0
    for _ in range(epochs):
        for begin in range(0, len(data), window):
            batches = data[begin : begin + window]
            evaluate(batches)
            steps += 1
            if steps % every == 0:
                moved = [p for p in parameters if p.grad is not None]
                gradients = [p.grad for p in moved if p.grad is not None]
                sizes = [p.detach().abs() + eta if adaptive else torch.tensor(1.0) for p in moved]
                gradients = [g * size for g, size in zip(gradients, sizes, strict=True)]
                norm = torch.stack([g.norm() for g in gradients]).norm()
                before = [p.detach().clone() for p in moved]
                buffers = [b.clone() for b in model.buffers()]
                with torch.no_grad():
                    for p, g, size in zip(moved, gradients, sizes, strict=True):
                        p.addcmul_(g * size, rho / (norm + 1e-12))
                evaluate(batches)
                with torch.no_grad():
                    for p, old in zip(moved, before, strict=True):
                        p.copy_(old)
                    for buffer, old in zip(model.buffers(), buffers, strict=True):
                        buffer.copy_(old)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
    return model


def differ(one: nn.Module, other: nn.Module) -> bool:
    return any(not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


# ---- against a plain loop ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rho": 0.5},
        {"rho": 0.5, "adaptive": True},
        {"rho": 1.0, "adaptive": True, "eta": 0.1},
        {"every": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [1, 2, 3])
def test_weights_equal_a_plain_loop(options: dict[str, Any], window: int) -> None:
    engine = trained(SharpnessAwareMinimization(**options), GradientAccumulation(window))
    assert_same(engine.model, plain_loop(**options, window=window))
    assert differ(engine.model, trained(GradientAccumulation(window)).model)
    assert engine.updates[0].steps == 2 * -(-5 // window)


def test_a_distance_of_almost_nothing_is_almost_a_plain_step() -> None:
    model = nn.Sequential(*(module for module in make_model() if not isinstance(module, nn.Dropout)))
    other = nn.Sequential(*(module for module in make_model() if not isinstance(module, nn.Dropout)))
    trained(SharpnessAwareMinimization(1e-6), model=model)
    trained(model=other)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_the_gradient_is_that_uphill() -> None:
    class Bowl(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([3.0, 4.0]))

    model = Bowl()
    # The loss is |w|^2 / 2, whose gradient is w: uphill by rho lies w * (1 + rho / 5).
    update = Update.from_function(lambda e, b: e.model.weight.square().sum() / 2, partial(torch.optim.SGD, lr=1.0))
    engine = Engine(update, model=model, seed=0)
    engine.attach(SharpnessAwareMinimization(1.0))
    engine.run([0], max_epochs=1)
    torch.testing.assert_close(model.weight.detach(), torch.tensor([-0.6, -0.8]))


def test_the_defaults_are_those_of_the_papers() -> None:
    assert (SharpnessAwareMinimization().rho, SharpnessAwareMinimization(adaptive=True).rho) == (0.05, 0.5)


@pytest.mark.moderate
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("first", [True, False])
def test_both_gradients_are_clipped(window: int, first: bool) -> None:
    handlers = [SharpnessAwareMinimization(0.5, adaptive=True), GradientClipping(max_norm=0.2)]
    engine = trained(*(handlers if first else handlers[::-1]), GradientAccumulation(window))
    assert_same(engine.model, plain_loop(rho=0.5, adaptive=True, max_norm=0.2, window=window))
    assert differ(engine.model, plain_loop(rho=0.5, adaptive=True, window=window))


@pytest.mark.parametrize("window", [1, 2])
def test_the_schedule_moves_once_for_each_step(window: int) -> None:
    handlers = [SharpnessAwareMinimization(), LRScheduling(partial(StepLR, step_size=2, gamma=0.5))]
    engine = trained(*handlers, GradientAccumulation(window))
    assert_same(engine.model, plain_loop(schedule=True, window=window))


def test_batches_count_by_their_weights_in_both_evaluations() -> None:
    def tokens(batch: Batch) -> float:
        return float((batch[1] + 1).sum())

    accumulation = GradientAccumulation(2, weight=lambda engine: tokens(engine.state.batch))
    engine = trained(SharpnessAwareMinimization(), accumulation)
    assert_same(engine.model, plain_loop(weight=tokens, window=2))


def test_mixed_precision_in_bfloat16() -> None:
    engine = trained(SharpnessAwareMinimization(), MixedPrecision("bf16"), GradientAccumulation(2))
    assert_same(engine.model, plain_loop(bf16=True, window=2))
    assert differ(engine.model, plain_loop(window=2))


def test_with_micro_batches_both_evaluations_are_in_pieces() -> None:
    pieces: list[int] = []
    model, other = (nn.Sequential(make_model()[0], nn.Tanh(), make_model()[4]) for _ in range(2))
    engine = make_trainer(SharpnessAwareMinimization(), MicroBatching(3), GradientAccumulation(2), model=model)
    engine.connect(Events.FORWARD_STARTED, lambda engine: pieces.append(len(engine.state.batch[0])))
    engine.run(make_data(), max_epochs=1)
    trained(SharpnessAwareMinimization(), GradientAccumulation(2), model=other, epochs=1)
    assert pieces == 4 * [3, 3, 3, 3] + 2 * [2, 2]
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        # Sums over the batch in another order: a few roundings of 6e-8 in each of three steps.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# ---- what is seen and what stays -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:W18")
def test_metrics_and_records_see_the_first_evaluation() -> None:
    seen: list[tuple[str, int, int]] = []

    class Watch(Handler):
        @on(Events.LOSS_COMPUTED)
        def change(self, engine: Engine) -> None:
            seen.append(("change", engine.state.iteration, engine.state.update.evaluation))

        @on(Events.LOSS_COMPUTED, phase=Phase.RECORD)
        def record(self, engine: Engine) -> None:
            seen.append(("record", engine.state.iteration, engine.state.update.evaluation))

        @on(Events.GRADIENTS_READY)
        def ready(self, engine: Engine) -> None:
            seen.append(("ready", engine.state.iteration, engine.state.update.evaluation))

    model = make_model()
    handlers = [SharpnessAwareMinimization(every=2), GradientAccumulation(2), Metrics(a=Accuracy(), loss=Average())]
    engine = trained(*handlers, Watch(), model=model, epochs=1, optimizer=partial(torch.optim.SGD, lr=0.0))
    first, again = [("change", 0), ("record", 0)], [("change", 1)]
    expected = [(1, first), (2, first), (2, [("ready", 0)])]
    expected += [(3, first), (4, first), (4, [("ready", 0)]), (4, again), (4, again), (4, [("ready", 1)])]
    expected += [(5, first), (5, [("ready", 0)])]
    assert seen == [(kind, iteration, number) for iteration, calls in expected for kind, number in calls]

    reference = make_model()
    seed_everything(1)
    losses = []
    for place, (x, y) in enumerate(make_data()):
        losses.append((cross_entropy(reference(x), y).item(), len(x)))
        if place == 3:  # the second evaluation draws dropout masks for the third and the fourth batch
            for again_x, _ in make_data()[2:4]:
                reference(again_x)
    mean = sum(loss * size for loss, size in losses) / 28
    assert engine.state.metrics["loss"] == pytest.approx(mean, rel=1e-6)


@pytest.mark.filterwarnings("ignore:W18")
def test_the_weights_are_put_back_bit_for_bit() -> None:
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]
    moved: list[bool] = []

    def look(engine: Engine) -> None:
        now = zip(before, engine.model.parameters(), strict=True)
        moved.append(any(not torch.equal(old, new) for old, new in now))

    engine = make_trainer(SharpnessAwareMinimization(0.3), model=model, optimizer=partial(torch.optim.SGD, lr=0.0))
    engine.connect(Events.FORWARD_STARTED | Events.OPTIMIZER_STEP_COMPLETED, look)
    engine.run(make_data(), max_epochs=1)
    assert moved == 5 * [False, True, False]


@pytest.mark.parametrize("kind", [ArithmeticError, KeyboardInterrupt])
@pytest.mark.parametrize("event", [Events.FORWARD_STARTED, Events.BACKWARD_COMPLETED, Events.GRADIENTS_READY], ids=str)
def test_an_error_in_the_second_evaluation_leaves_the_weights_as_they_were(
    event: Events, kind: type[BaseException]
) -> None:
    data, model = make_data(), make_model()
    engine = make_trainer(SharpnessAwareMinimization(0.3), model=model)

    def fail(engine: Engine) -> None:
        if engine.state.update.evaluation == 1 and engine.state.iteration == 3:
            raise kind

    engine.connect(event, fail)
    seed_everything(1)
    with pytest.raises(kind):
        engine.run(data, max_epochs=1)
    reference = plain_loop(rho=0.3, data=data[:2], epochs=1)
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b), name
    # The first evaluation of the third batch was made: its statistics are there, and not the second's.
    reference(data[2][0])
    assert_same(model, reference)
    assert engine.updates[0].evaluation == 0
    assert all(p.grad is None for p in model.parameters())


def test_frozen_and_unused_parameters_stay() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()
            self.unused = nn.Linear(2, 2)
            next(self.net.parameters()).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.net(x)
            return output

    model, seen = Partly(), []
    frozen, unused = next(model.net.parameters()).clone(), model.unused.weight.clone()

    def look(engine: Engine) -> None:
        seen.append(torch.equal(frozen, engine.model.net[0].weight) and torch.equal(unused, engine.model.unused.weight))

    engine = make_trainer(SharpnessAwareMinimization(0.3), model=model)
    engine.connect(Events.FORWARD_STARTED, look)
    seed_everything(1)
    engine.run(make_data(), max_epochs=2)
    assert len(seen) == 20
    assert all(seen)
    assert_same(model, plain_loop(rho=0.3, model=Partly()))


@pytest.mark.filterwarnings("ignore:W12")
def test_a_gradient_of_zero_moves_nothing() -> None:
    update = Update.from_function(lambda e, b: (e.model.weight * 0).sum(), SGD)
    model = nn.Linear(2, 1)
    before = model.weight.clone()
    engine = Engine(update, model=model, seed=0)
    engine.attach(SharpnessAwareMinimization())
    engine.run([0, 0], max_epochs=1)
    assert torch.equal(model.weight, before)


def test_a_skipped_step_is_not_evaluated_again() -> None:
    evaluations: list[int] = []
    engine = make_trainer(SharpnessAwareMinimization())
    engine.connect(Events.FORWARD_STARTED, lambda engine: evaluations.append(engine.state.update.evaluation))
    engine.connect(Events.GRADIENTS_READY(once=2), lambda engine: engine.state.update.skip("on purpose"))
    engine.run(make_data([4, 4, 4]), max_epochs=1)
    assert evaluations == [0, 1, 0, 0, 1]
    assert engine.updates[0].steps == 2


def test_a_window_left_open_between_two_runs_is_not_computed_again_in_part() -> None:
    model = make_model().eval()
    engine = make_trainer(GradientAccumulation(4), model=model)
    engine.connect(Events.STARTED, lambda engine: model.eval())
    data = make_data([6, 6, 6, 6])
    engine.run(data, max_iters=2)
    engine.attach(SharpnessAwareMinimization())
    seen: list[tuple[int, list[Tensor]]] = []

    @engine.on(Events.GRADIENTS_READY)
    def look(engine: Engine) -> None:
        update = engine.state.update
        seen.append((update.evaluation, [p.grad.clone() for p in update.parameters if p.grad is not None]))

    engine.run(data, max_epochs=1)
    assert [evaluation for evaluation, _ in seen] == [0, 1]
    reference = make_model().eval()
    torch.stack([cross_entropy(reference(x), y) for x, y in data[2:]]).mean().backward()
    for parameter, found in zip(reference.parameters(), seen[0][1], strict=True):
        torch.testing.assert_close(parameter.grad, found)


def test_one_update_of_two() -> None:
    models = {"a": nn.Linear(4, 1), "b": nn.Linear(4, 1)}
    evaluations: list[tuple[str, int]] = []

    def update(name: str) -> Update:
        def function(engine: Engine, batch: Batch) -> Tensor:
            loss: Tensor = models[name](batch[0]).square().mean()
            return loss

        return Update.from_function(function, SGD, name=name, parameters=lambda engine: models[name].parameters())

    engine = Engine([update("a"), update("b")], model=models, seed=0)
    engine.attach(SharpnessAwareMinimization(update="b"))
    engine.connect(
        Events.FORWARD_STARTED,
        lambda engine: evaluations.append((engine.state.update.name, engine.state.update.evaluation)),
    )
    engine.run(make_data([4, 4]), max_epochs=1)
    assert evaluations == 2 * [("a", 0), ("b", 0), ("b", 1)]
    with pytest.raises(KeyError, match="'c'"):
        make_trainer(SharpnessAwareMinimization(update="c"))


# ---- what does not go together -------------------------------------------------------------------------------------------


@pytest.mark.moderate
def test_an_optimizer_with_a_closure_is_refused_before_the_first_batch() -> None:
    engine = make_trainer(SharpnessAwareMinimization(), optimizer=torch.optim.LBFGS)
    with pytest.raises(ValueError, match=r"LBFGS.*'main'.*closure"):
        engine.run(make_data(), max_epochs=1)
    assert engine.state.iteration == 0
    with engine.without("sharpness_aware_minimization"):
        engine.run(make_data(), max_epochs=1)
    assert engine.updates[0].steps == 5


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    before = model.weight.detach().clone()
    update = Update.from_function(lambda e, b: e.model(b).sum(), partial(torch.optim.SGD, lr=0.1))
    engine = Engine(update, model=model, seed=0)
    engine.attach(SharpnessAwareMinimization())
    with pytest.raises(TypeError, match="sparse gradients cannot be normalized"):
        engine.run([torch.tensor([1, 2])], max_epochs=1)
    assert torch.equal(model.weight, before)


def scaled_loop(window: int, init_scale: float, *, spoilt: int) -> tuple[nn.Module, list[float], int]:
    """In float16: both gradients of a step are scaled alike, and either of them may overflow."""
    model, data = make_model(), make_data()
    parameters = list(model.parameters())
    optimizer, scale, scales, steps, windows = SGD(parameters), init_scale, list[float](), 0, 0
    seed_everything(1)

    def evaluate(batches: Sequence[Batch], factor: float) -> bool:
        optimizer.zero_grad()
        for x, y in batches:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = cross_entropy(model(x), y)
            (loss * factor * scale).backward()
        gradients = [p.grad for p in parameters if p.grad is not None]
        for gradient in gradients:
            if len(batches) > 1:
                gradient.div_(len(batches))
            gradient.mul_(1 / scale)
        return all(bool(gradient.isfinite().all()) for gradient in gradients)

    for _ in range(2):
        for begin in range(0, len(data), window):
            batches = data[begin : begin + window]
            windows += 1
            finite = evaluate(batches, 1.0)
            if finite:
                norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
                before = [p.detach().clone() for p in parameters]
                buffers = [b.clone() for b in model.buffers()]
                with torch.no_grad():
                    for p in parameters:
                        assert p.grad is not None
                        p.addcmul_(p.grad, 0.05 / (norm + 1e-12))
                finite = evaluate(batches, math.inf if windows == spoilt else 1.0)
                with torch.no_grad():
                    for p, old in zip(parameters, before, strict=True):
                        p.copy_(old)
                    for buffer, held in zip(model.buffers(), buffers, strict=True):
                        buffer.copy_(held)
            if finite:
                optimizer.step()
                steps += 1
            scale *= 1.0 if finite else 0.5
            scales.append(scale)
    return model, scales, steps


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("init_scale", [2.0**10, 2.0**22])
def test_both_gradients_are_scaled_for_float16_and_the_step_is_skipped_if_one_overflows(
    first: bool, window: int, init_scale: float
) -> None:
    handlers = [SharpnessAwareMinimization(), MixedPrecision("fp16", init_scale=init_scale)]
    scales: list[float] = []
    windows = 0

    class Spoil(Handler):
        """Lets the second gradients of the fourth window overflow."""

        @on(Events.LOSS_COMPUTED, phase=Phase.CHANGE)
        def spoil(self, engine: Engine) -> None:
            update = engine.state.update
            if update.evaluation == 1 and windows == 3:
                update.backward_loss = update.backward_loss * math.inf

        @on(Events.OPTIMIZER_STEP_COMPLETED, phase=Phase.PERSIST)
        def count(self, engine: Engine) -> None:
            nonlocal windows
            windows += 1
            scales.append(handlers[1].scalers["main"].get_scale())  # type: ignore[attr-defined]

    engine = trained(*(handlers if first else handlers[::-1]), GradientAccumulation(window), Spoil())
    model, expected, steps = scaled_loop(window, init_scale, spoilt=4)
    assert scales == expected
    assert engine.updates[0].steps == steps < windows
    assert_same(engine.model, model)


class Once(Handler):
    def attached(self, engine: Engine) -> None:
        engine.overrides.compute_gradients_once(by=self)


@pytest.mark.parametrize("first", [True, False])
def test_who_needs_gradients_computed_once_refuses_it(first: bool) -> None:
    handlers = [SharpnessAwareMinimization(), Once()]
    with pytest.raises(ValueError, match="how often a step computes its gradients") as caught:
        make_trainer(*(handlers if first else handlers[::-1]))
    assert "'sharpness_aware_minimization'" in str(caught.value)
    assert "'once'" in str(caught.value)


def test_two_of_them_refuse_each_other() -> None:
    with pytest.raises(ValueError, match="both 'sharpness_aware_minimization' and 'other'"):
        make_trainer(SharpnessAwareMinimization(), SharpnessAwareMinimization(name="other"))


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"rho": 0}, ValueError),
        ({"rho": -0.1}, ValueError),
        ({"rho": math.nan}, ValueError),
        ({"rho": "1"}, TypeError),
        ({"rho": True}, TypeError),
        ({"eta": -1.0}, ValueError),
        ({"eta": None}, TypeError),
        ({"every": 0}, ValueError),
        ({"every": 1.5}, TypeError),
        ({"adaptive": 1}, TypeError),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(options: dict[str, Any], kind: type[Exception]) -> None:
    ((argument, value),) = options.items()
    with pytest.raises(kind) as caught:
        SharpnessAwareMinimization(**options)
    assert f"SharpnessAwareMinimization({argument}={value!r})" in str(caught.value)


# ---- promises ------------------------------------------------------------------------------------------------------------


@pytest.mark.moderate
@pytest.mark.parametrize("window", quick([1, 3], 3))
def test_it_keeps_its_promises(window: int) -> None:
    check_handler(
        lambda: make_trainer(GradientAccumulation(window)),
        lambda: SharpnessAwareMinimization(every=2),
        make_data(),
        max_epochs=2,
    )


def test_switched_off_and_on_inside_a_run() -> None:
    handler = SharpnessAwareMinimization()
    evaluations: list[int] = []
    engine = make_trainer(handler, GradientAccumulation(2))
    engine.connect(Events.FORWARD_STARTED, lambda engine: evaluations.append(engine.state.update.evaluation))
    engine.connect(Events.ITERATION_COMPLETED(once=3), lambda engine: setattr(handler, "enabled", False))
    engine.connect(Events.ITERATION_COMPLETED(once=6), lambda engine: setattr(handler, "enabled", True))
    engine.run(make_data([4] * 8), max_epochs=1)
    assert evaluations == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1]
    assert fingerprint(engine)
