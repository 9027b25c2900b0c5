"""Optimizers that evaluate the loss inside their step, against the plain PyTorch closures: bit-equal weights."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from signalfire import Engine, Events, Handler, Phase, Update, on, seed_everything
from signalfire.core.overrides import Override
from signalfire.handlers import (
    Accuracy,
    Average,
    GradientAccumulation,
    GradientClipping,
    LRScheduling,
    Metrics,
    MixedPrecision,
)
from signalfire.testing import check_handler, fingerprint
from tests import kit
from tests.kit import assert_same, mlp, quick

Batch = tuple[Tensor, Tensor]
cross_entropy = nn.functional.cross_entropy
LBFGS = partial(torch.optim.LBFGS, lr=0.3, max_iter=4)
SEARCHING = partial(torch.optim.LBFGS, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def make_data(sizes: Iterable[int] = (8, 8, 8, 8, 5)) -> list[Batch]:
    return kit.batches(sizes, 4, (), classes=3, seed=0)


def make_model(*, dropout: float = 0.0) -> nn.Sequential:
    return mlp(4, 6, 3, nn.BatchNorm1d(6), nn.Tanh(), *([nn.Dropout(dropout)] if dropout else []), seed=0)


def make_trainer(*handlers: Handler, optimizer: Any = LBFGS, dropout: float = 0.0) -> Engine:
    return kit.build(make_model(dropout=dropout), *handlers, loss=cross_entropy, optimizer=optimizer)


def trained(*handlers: Handler, epochs: int = 2, **options: Any) -> Engine:
    engine = make_trainer(*handlers, **options)
    seed_everything(1)
    engine.run(make_data(), max_epochs=epochs)
    return engine


def tokens(batch: Batch) -> int:
    return int((batch[1] + 1).sum())


def weigh(engine: Engine) -> int:
    return tokens(engine.state.batch)


def plain_loop(
    *,
    optimizer: Any = LBFGS,
    window: int = 1,
    max_norm: float | None = None,
    weight: Callable[[Batch], int] | None = None,
    dropout: float = 0.0,
    schedule: bool = False,
    bf16: bool = False,
    windows: Sequence[Sequence[Batch]] | None = None,
    evaluations: list[int] | None = None,
) -> nn.Module:
    """A closure over the batches of each window, as one writes it for ``optimizer.step(closure)``."""
    model, data = make_model(dropout=dropout), make_data()
    chosen = optimizer(model.parameters())
    scheduler = StepLR(chosen, 2, 0.5) if schedule else None
    seed_everything(1)
    if windows is None:
        windows = 2 * [data[begin : begin + window] for begin in range(0, len(data), window)]
    for batches in windows:
        calls = 0

        def closure(batches: Sequence[Batch] = batches) -> Tensor:
            nonlocal calls
            calls += 1
            chosen.zero_grad()
            losses, total = [], 0
            for x, y in batches:
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                    loss = cross_entropy(model(x), y)
                share = 1 if weight is None else weight((x, y))
                (loss * share if share != 1 else loss).backward()
                losses.append((loss.detach(), share))
                total += share
            if total != 1:
                for p in model.parameters():
                    assert p.grad is not None
                    p.grad.div_(total)
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            if len(losses) == 1:
                return losses[0][0]
            return torch.stack([loss * share for loss, share in losses]).sum() / total

        chosen.step(closure)
        if evaluations is not None:
            evaluations.append(calls)
        if scheduler is not None:
            scheduler.step()
    return model


class Heun(torch.optim.Optimizer):
    """An optimizer of one's own that needs a closure: the mean of the gradients at both ends of a plain step."""

    def __init__(self, params: Any, lr: float = 0.2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        group = self.param_groups[0]
        before = [p.clone() for p in group["params"]]
        first = [p.grad.clone() for p in group["params"]]
        for p, gradient in zip(group["params"], first, strict=True):
            p.sub_(group["lr"] * gradient)
        with torch.enable_grad():
            closure()
        for p, old, gradient in zip(group["params"], before, first, strict=True):
            p.copy_(old - group["lr"] / 2 * (gradient + p.grad))
        return loss


OPTIMIZERS = {"LBFGS": LBFGS, "LBFGS with a line search": SEARCHING, "Heun": Heun}


# ---- against plain PyTorch closures  -------------------------------------------------------------------------------------------


@pytest.mark.moderate
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("window", quick([1, 2, 3], 2))
@pytest.mark.parametrize("max_norm", [None, 0.2])
def test_weights_equal_a_plain_loop(optimizer: str, window: int, max_norm: float | None) -> None:
    kind = OPTIMIZERS[optimizer]
    evaluations: list[int] = []
    counts: list[int] = []
    handlers: list[Handler] = [GradientAccumulation(window)] if window > 1 else []
    if max_norm is not None:
        handlers.append(GradientClipping(max_norm=max_norm))
    engine = make_trainer(*handlers, optimizer=kind)

    @engine.on(Events.GRADIENTS_READY)
    def count(engine: Engine) -> None:
        counts.append(engine.state.update.evaluation)

    seed_everything(1)
    engine.run(make_data(), max_epochs=2)
    reference = plain_loop(optimizer=kind, window=window, max_norm=max_norm, evaluations=evaluations)
    assert_same(engine.model, reference)
    assert engine.updates[0].steps == 2 * -(-5 // window)
    # GRADIENTS_READY comes for each evaluation, numbered from 0 in each step.
    assert counts == [number for calls in evaluations for number in range(calls)]
    assert max(evaluations) > 1
    assert all(p.grad is None for p in engine.model.parameters())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("window", quick([1, 2, 3], 3))
@pytest.mark.parametrize("as_tensor", [False, True])
def test_batches_count_by_their_weights(optimizer: str, window: int, as_tensor: bool) -> None:
    def weight(engine: Engine) -> Any:
        return torch.tensor(weigh(engine)) if as_tensor else weigh(engine)

    engine = trained(GradientAccumulation(window, weight=weight), optimizer=OPTIMIZERS[optimizer])
    assert_same(engine.model, plain_loop(optimizer=OPTIMIZERS[optimizer], window=window, weight=tokens))


@pytest.mark.moderate
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("window", [1, 2])
def test_dropout_draws_what_a_plain_pytorch_closure_draws(optimizer: str, window: int) -> None:
    kind = OPTIMIZERS[optimizer]
    engine = trained(GradientAccumulation(window), optimizer=kind, dropout=0.3)
    assert_same(engine.model, plain_loop(optimizer=kind, window=window, dropout=0.3))


@pytest.mark.moderate
@pytest.mark.parametrize("window", [1, 2])
def test_a_schedule_moves_once_for_each_step(window: int) -> None:
    rates: list[float] = []
    engine = make_trainer(LRScheduling(partial(StepLR, step_size=2, gamma=0.5)), GradientAccumulation(window))

    @engine.on(Events.OPTIMIZER_STEP_COMPLETED)
    def note(engine: Engine) -> None:
        assert engine.state.update.optimizer is not None
        rates.append(engine.state.update.optimizer.param_groups[0]["lr"])

    seed_everything(1)
    engine.run(make_data(), max_epochs=2)
    assert_same(engine.model, plain_loop(window=window, schedule=True))
    assert rates == [0.3 * 0.5 ** (step // 2) for step in range(len(rates))]


def test_autocast_to_bfloat16() -> None:
    engine = trained(MixedPrecision("bf16"), GradientAccumulation(2))
    assert_same(engine.model, plain_loop(window=2, bf16=True))


def test_scaling_for_float16_is_refused_before_the_first_batch() -> None:
    engine = make_trainer(MixedPrecision("fp16"))
    with pytest.raises(ValueError, match="mixed_precision"):
        engine.run(make_data(), max_epochs=1)
    assert engine.state.iteration == 0


def test_a_built_optimizer_does_as_a_factory_does() -> None:
    model = make_model()
    engine = Engine(Update.supervised(cross_entropy, LBFGS(model.parameters())), model=model, seed=0)
    seed_everything(1)
    engine.run(make_data(), max_epochs=2)
    assert_same(model, plain_loop())


def test_an_optimizer_that_may_take_a_closure_gets_none() -> None:
    evaluations: list[int] = []
    engine = make_trainer(optimizer=partial(torch.optim.SGD, lr=0.1))
    engine.connect(Events.FORWARD_STARTED, lambda engine: evaluations.append(engine.state.update.evaluation))
    engine.run(make_data(), max_epochs=1)
    assert evaluations == [0] * 5


# ---- what is seen --------------------------------------------------------------------------------------------------------


class Counter(Handler):
    """Counts by (event, phase) in which evaluations it was called, and what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[int]] = {}

    def note(self, what: str, engine: Engine) -> None:
        self.seen.setdefault(what, []).append(engine.state.update.evaluation)

    @on(Events.LOSS_COMPUTED, phase=Phase.PREPARE)
    def prepare(self, engine: Engine) -> None:
        self.note("PREPARE", engine)

    @on(Events.LOSS_COMPUTED)
    def change(self, engine: Engine) -> None:
        self.note("CHANGE", engine)

    @on(Events.LOSS_COMPUTED, phase=Phase.FINALIZE)
    def finalize(self, engine: Engine) -> None:
        self.note("FINALIZE", engine)

    @on(Events.LOSS_COMPUTED, phase=Phase.RECORD)
    def record(self, engine: Engine) -> None:
        self.note("RECORD", engine)

    @on(Events.LOSS_COMPUTED(every=2), phase=Phase.RECORD)
    def record_every_second(self, engine: Engine) -> None:
        self.note("RECORD, filtered", engine)

    @on(Events.GRADIENTS_READY, phase=Phase.CONTROL)
    def control(self, engine: Engine) -> None:
        self.note("CONTROL", engine)

    @on(Events.OPTIMIZER_STEP_COMPLETED, phase=Phase.RECORD)
    def stepped(self, engine: Engine) -> None:
        self.note("STEP", engine)


@pytest.mark.moderate
@pytest.mark.parametrize("window", [1, 2])
def test_what_records_and_decides_sees_the_first_evaluation_only(window: int) -> None:
    evaluations: list[int] = []
    plain_loop(window=window, evaluations=evaluations)
    counter = Counter()
    trained(counter, GradientAccumulation(window))
    data = make_data()
    sizes = 2 * [len(data[begin : begin + window]) for begin in range(0, len(data), window)]
    every = [n for size, calls in zip(sizes, evaluations, strict=True) for n in range(calls) for _ in range(size)]
    assert {what: counter.seen[what] for what in ("PREPARE", "CHANGE", "FINALIZE")} == {
        "PREPARE": every,
        "CHANGE": every,
        "FINALIZE": every,
    }
    assert counter.seen["RECORD"] == [0] * 10
    assert counter.seen["RECORD, filtered"] == [0] * 5
    assert counter.seen["CONTROL"] == [0] * len(sizes)
    assert counter.seen["STEP"] == [0] * len(sizes)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.filterwarnings("ignore:W18")
def test_metrics_measure_each_batch_once(window: int) -> None:
    # A rate of zero: every evaluation gives the same, so that the epoch's values can be computed at once.
    engine = make_trainer(
        Metrics(accuracy=Accuracy(), loss=Average()), GradientAccumulation(window), optimizer=partial(LBFGS, lr=0.0)
    )
    engine.run(make_data(), max_epochs=1)
    model = make_model()
    with torch.no_grad():
        outputs = [(model(x), y) for x, y in make_data()]
    hits = sum(int((output.argmax(1) == y).sum()) for output, y in outputs)
    total = sum(cross_entropy(output, y).item() * len(y) for output, y in outputs)
    assert engine.state.metrics["accuracy"] == hits / 37
    assert engine.state.metrics["loss"] == pytest.approx(total / 37, rel=1e-6)


def test_after_the_step_the_update_shows_the_first_evaluation() -> None:
    engine = make_trainer(GradientAccumulation(2))
    first: dict[int, Any] = {}
    compared: list[bool] = []

    def shown(engine: Engine) -> tuple[Any, ...]:
        update = engine.state.update
        return engine.state.batch, update.output, update.raw_loss, update.backward_loss

    @engine.on(Events.BACKWARD_COMPLETED, phase=Phase.RECORD)
    def note(engine: Engine) -> None:
        first[engine.state.iteration] = shown(engine)

    @engine.on(Events.OPTIMIZER_STEP_COMPLETED)
    def compare(engine: Engine) -> None:
        pairs = zip(shown(engine), first[engine.state.iteration], strict=True)
        compared.append(all(one is other for one, other in pairs))

    engine.run(make_data(), max_epochs=1)
    assert compared == [True] * 3


def test_gradients_are_computed_again_inside_a_step_only() -> None:
    engine = trained(epochs=1)
    with pytest.raises(RuntimeError, match="recomputed only inside the step"):
        engine.updates[0].again()


# ---- skips, losses that are missing, errors ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event", [Events.LOSS_COMPUTED, Events.BACKWARD_COMPLETED, Events.GRADIENTS_READY, Events.OPTIMIZER_STEP_STARTED], ids=str
)  # fmt: skip
def test_a_skip_in_the_first_evaluation_skips_the_step(event: Events) -> None:
    data = make_data()
    evaluations: list[int] = []
    engine = make_trainer()
    engine.connect(event(once=2), lambda engine: engine.state.update.skip("on purpose"))
    engine.connect(Events.FORWARD_STARTED(once=2), lambda engine: evaluations.append(engine.state.update.evaluation))
    seed_everything(1)
    engine.run(data, max_epochs=1)
    reference = plain_loop(windows=[[one] for one in (data[0], data[2], data[3], data[4])])
    # Not the running statistics: the skipped batch went through the forward.
    for (name, a), b in zip(engine.model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert evaluations == [0]
    assert engine.updates[0].steps == 4


def test_a_skip_in_a_later_evaluation_is_too_late() -> None:
    engine = make_trainer()

    @engine.on(Events.GRADIENTS_READY)
    def skip(engine: Engine) -> None:
        if engine.state.update.evaluation > 0:
            engine.state.update.skip("too late")

    seed_everything(1)
    engine.run(make_data(), max_epochs=2)
    assert_same(engine.model, plain_loop())
    assert engine.updates[0].skipped is None


def test_a_skipped_batch_is_not_evaluated_again_with_its_window() -> None:
    data = make_data()
    engine = make_trainer(GradientAccumulation(3))
    # The skip discards what the window holds: of the first window, the third batch is left.
    engine.connect(Events.FORWARD_STARTED(once=2), lambda engine: engine.state.update.skip("on purpose"))
    batches: list[Any] = []
    engine.connect(Events.BACKWARD_COMPLETED, lambda engine: batches.append(engine.state.batch[0]))
    seed_everything(1)
    engine.run(data, max_epochs=1)
    assert engine.updates[0].steps == 2
    place = {id(x): number for number, (x, _) in enumerate(data)}
    order = [place[id(x)] for x in batches]
    assert order[:2] == [0, 2]
    assert set(order[2 : order.index(3)]) == {2}
    assert set(order[order.index(3) :]) == {3, 4}


def test_a_batch_without_a_loss_does_not_count_in_the_closure() -> None:
    data = make_data()

    def loss(engine: Engine, output: Tensor, batch: Batch) -> Tensor | None:
        return None if batch[0] is data[1][0] else cross_entropy(output, batch[1])

    model = make_model()
    engine = Engine(Update(lambda e, b: e.model(b[0]), loss, LBFGS), model=model, seed=0)
    engine.attach(GradientAccumulation(3))
    engine.run(data, max_epochs=1)
    reference = plain_loop(windows=[[data[0], data[2]], [data[3], data[4]]])
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("batches", [1, 2])
def test_a_loss_that_is_missing_in_a_later_evaluation(batches: int) -> None:
    """One of several batches then does not count; without any, there is nothing that the closure could return."""
    data = make_data([6, 6])[:batches]
    values: list[float] = []

    class Watching(Heun):
        def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
            def watched() -> Tensor:
                values.append(closure().item())
                return torch.tensor(values[-1])

            return super().step(watched)

    def loss(engine: Engine, output: Tensor, batch: Batch) -> Tensor | None:
        missing = engine.state.update.evaluation == 1 and batch[0] is data[-1][0]
        return None if missing else output.mean() * 0 + (1.0 if batch[0] is data[0][0] else 3.0)

    engine = Engine(Update(lambda e, b: e.model(b[0]), loss, Watching), model=make_model(), seed=0)
    engine.attach(GradientAccumulation(batches))
    if batches == 1:
        with pytest.raises(RuntimeError, match=r"'main' returned a loss at first, but none .* \(recomputation 1\)"):
            engine.run(data, max_epochs=1)
    else:
        engine.run(data, max_epochs=1)
        assert values == [2.0, 1.0]


def test_an_error_inside_the_closure_leaves_an_engine_that_can_run() -> None:
    engine = make_trainer(
        GradientAccumulation(2), optimizer=Heun
    )  # LBFGS' own state does not survive an error in its step
    recorded: list[int] = []
    engine.connect(Events.LOSS_COMPUTED, lambda engine: recorded.append(engine.state.iteration), phase=Phase.RECORD)

    def fail(engine: Engine) -> None:
        if engine.state.update.evaluation == 1:
            raise ArithmeticError

    with engine.connect(Events.FORWARD_STARTED, fail), pytest.raises(ArithmeticError):
        engine.run(make_data(), max_epochs=1)
    assert recorded == [1, 2]
    assert engine.regions.depth == 0
    assert engine.updates[0].evaluation == 0
    assert engine.updates[0].window.kept == []
    with pytest.raises(RuntimeError, match="recomputed only inside the step"):
        engine.updates[0].again()
    with pytest.warns(UserWarning, match="iteration 2 is repeated, although the step of update 'main' had begun"):
        engine.run(make_data(), max_epochs=2)
    assert len(recorded) > 2


# ---- resume --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("weight", quick([None, weigh], weigh))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_state_inside_an_open_window_resumes_exactly(optimizer: str, weight: Any) -> None:
    def build() -> Engine:
        engine = make_trainer(GradientAccumulation(3, weight=weight), optimizer=OPTIMIZERS[optimizer], dropout=0.3)
        engine.attach(Metrics(loss=Average()))
        return engine

    whole = build()
    saved: list[bytes] = []

    @whole.on(Events.ITERATION_COMPLETED, phase=Phase.PERSIST)
    def save(engine: Engine) -> None:
        file = io.BytesIO()
        torch.save(engine.state_dict(), file)
        saved.append(file.getvalue())

    seed_everything(1)
    whole.run(make_data(), max_epochs=2)
    for file in saved[:-1]:
        resumed = build()
        resumed.load_state_dict(torch.load(io.BytesIO(file), weights_only=True))
        seed_everything(5)
        resumed.run(make_data(), max_epochs=2)
        assert fingerprint(resumed) == fingerprint(whole)


@pytest.mark.slow
def test_handlers_keep_their_promises_with_a_closure() -> None:
    for make in (lambda: GradientAccumulation(3), lambda: GradientClipping(max_norm=0.1)):
        check_handler(make_trainer, make, make_data(), max_epochs=2)


@pytest.mark.moderate
def test_detaching_what_asked_for_windows_leaves_a_closure_its_own() -> None:
    class Again(Handler):
        def attached(self, engine: Engine) -> None:
            engine.overrides.replace(Override.STEP, lambda engine, update, step: step(), by=self, again=True)

    engine = make_trainer()
    seed_everything(1)
    engine.run(make_data(), max_epochs=1)
    engine.attach(Again()).detach()
    engine.run(make_data(), max_epochs=2)
    assert_same(engine.model, plain_loop())


# ---- several updates -----------------------------------------------------------------------------------------------------


def test_one_of_two_updates_has_a_closure() -> None:
    data = make_data()

    def models() -> dict[str, nn.Linear]:
        torch.manual_seed(0)
        return {"a": nn.Linear(4, 1), "b": nn.Linear(4, 1)}

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
        return loss

    nets, reference = models(), models()

    def update(name: str, optimizer: Any) -> Update:
        return Update.from_function(
            lambda engine, batch: loss_of(nets[name], batch[0]), optimizer, name=name,
            parameters=lambda engine: nets[name].parameters(),
        )  # fmt: skip

    SGD = partial(torch.optim.SGD, lr=0.1)
    engine = Engine([update("a", LBFGS), update("b", SGD)], model=nets, seed=0)
    engine.run(data, max_epochs=1)

    first, second = LBFGS(reference["a"].parameters()), SGD(reference["b"].parameters())
    for x, _ in data:

        def closure(x: Tensor = x) -> Tensor:
            first.zero_grad()
            loss = loss_of(reference["a"], x)
            loss.backward()
            return loss

        first.step(closure)
        second.zero_grad()
        loss_of(reference["b"], x).backward()
        second.step()
    for name in nets:
        assert_same(nets[name], reference[name])
