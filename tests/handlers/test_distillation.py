"""Distillation against plain PyTorch loops, closed formulas, and what it must leave alone."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from signalfire import Engine, Events, Handler, Phase, Update, seed_everything
from signalfire.findings import FindingWarning
from signalfire.handlers import (
    EMA,
    CutMix,
    Cutout,
    Distillation,
    DistributedDataParallel,
    GradientAccumulation,
    LabelSmoothing,
    MicroBatching,
    MixedPrecision,
    MixUp,
    TruePrecision,
)
from signalfire.testing import check_handler, fingerprint
from tests import kit
from tests.kit import assert_same, digest, mlp, new_metrics, same
from tests.processes import run_together

Batch = tuple[Tensor, Tensor]
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
LBFGS = partial(torch.optim.LBFGS, lr=0.2, max_iter=3)
T, W = 3.0, 0.75


def student() -> Any:
    return mlp(5, 8, 3, nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3))


def make_teacher(seed: int = 8) -> Any:
    """In training mode, with statistics of its own."""
    model = mlp(5, 16, 3, nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def data(sizes: Any = (6, 6, 6, 6, 4)) -> list[Batch]:
    return kit.batches(sizes, 5, (), classes=3)


def build(*handlers: Handler, optimizer: Any = SGD, model: nn.Module | None = None, **options: Any) -> Engine:
    return kit.build(model or student(), *handlers, loss=F.cross_entropy, optimizer=optimizer, **options)


def distillation(**options: Any) -> Distillation:
    return Distillation(make_teacher(), **{"temperature": T, "weight": W, **options})


def trained(*handlers: Handler, **options: Any) -> Engine:
    engine = build(*handlers, **options)
    seed_everything(1)
    engine.run(data(), max_epochs=2)
    return engine


def divergence(output: Tensor, target: Tensor, temperature: float = T) -> Tensor:
    """As one writes it in a plain loop."""
    output, target = output.float(), target.float()
    kl = F.kl_div(F.log_softmax(output / temperature, 1), F.softmax(target / temperature, 1), reduction="batchmean")
    return kl * temperature**2


def plain_loop(*, window: int = 1, pieces: int = 1, scaled: bool = False) -> tuple[Any, list[float], list[float]]:
    """Returns the model, the losses of the task, and the divergences."""
    model, teacher, losses, terms = student(), make_teacher().eval(), [], []
    optimizer = SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    seed_everything(1)
    for _ in range(2):
        for chunk in kit.windows(data(), window):
            for batch in chunk:
                for x, y in zip(batch[0].chunk(pieces), batch[1].chunk(pieces), strict=True):
                    with torch.autocast("cpu", dtype=torch.float16, enabled=scaled):
                        output = model(x)
                        task = F.cross_entropy(output, y)
                        with torch.no_grad():
                            target = teacher(x)
                        term = divergence(output, target)
                        loss = (1 - W) * task + W * term
                    losses.append(task.item())
                    terms.append(term.item())
                    share = len(x) / len(batch[0])
                    (scaler.scale(loss) if pieces == 1 else scaler.scale(loss) * share).backward()
            kit.average_gradients(model, len(chunk))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model, losses, terms


@pytest.mark.parametrize("setting", ["plain", "accumulated", "scaled"])
def test_weights_losses_and_divergences_equal_those_of_a_plain_loop(setting: str) -> None:
    handlers: dict[str, list[Handler]] = {
        "plain": [],
        "accumulated": [GradientAccumulation(2)],
        "scaled": [GradientAccumulation(2), MixedPrecision("fp16", init_scale=1024.0)],
    }
    engine = build(*handlers[setting], distillation())
    written = new_metrics(engine)
    losses: list[float] = []
    engine.connect(
        Events.LOSS_COMPUTED, lambda engine: losses.append(float(engine.state.update.loss)), phase=Phase.RECORD
    )
    seed_everything(1)
    engine.run(data(), max_epochs=2)
    model, plain_losses, terms = plain_loop(window=1 if setting == "plain" else 2, scaled=setting == "scaled")
    assert_same(engine.model, model)
    assert losses == plain_losses, "the reported loss is that of the task"
    assert [metrics["distillation"] for _, metrics in written] == terms


def test_a_batch_in_pieces_equals_a_plain_loop() -> None:
    engine = build(distillation(), MicroBatching(pieces=2, halve_on_oom=False))
    written = new_metrics(engine)
    seed_everything(1)
    engine.run(data(), max_epochs=2)
    model, _, terms = plain_loop(pieces=2)
    assert_same(engine.model, model)
    means = [sum(pair) / 2 for pair in zip(terms[::2], terms[1::2], strict=True)]
    assert [metrics["distillation"] for _, metrics in written] == pytest.approx(means, rel=1e-6)


def test_the_closure_of_lbfgs_evaluates_the_distilled_loss() -> None:
    engine = trained(distillation(), optimizer=LBFGS)
    model, teacher = student(), make_teacher().eval()
    optimizer = LBFGS(model.parameters())
    seed_everything(1)
    for x, y in data() * 2:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            output = model(x)
            loss = (1 - W) * F.cross_entropy(output, y) + W * divergence(output, teacher(x).detach())
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_same(engine.model, model)


def test_a_weight_of_zero_is_as_without() -> None:
    assert_same(trained(distillation(weight=0.0)).model, trained().model)
    assert not same(trained(distillation(weight=0.0, task_weight=0.5)).model, trained().model)


# ---- formulas ----------------------------------------------------------------------------------------------------------


class Logits(nn.Module):
    """Returns the logits that it is given, as its first parameter."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.logits


def gradient_and_term(ours: Tensor, theirs: Tensor, temperature: float, **options: Any) -> tuple[Tensor, float]:
    model, found = Logits(ours.clone()), []
    handler = Distillation(Logits(theirs), temperature=temperature, weight=1.0, **options)
    engine = build(handler, model=model, optimizer=partial(torch.optim.SGD, lr=0.0), allow=["W18"])
    engine.connect(Events.GRADIENTS_READY, lambda engine: found.append(model.logits.grad))
    targets = torch.zeros(ours.shape[:1] + ours.shape[2:], dtype=torch.long)
    engine.run([(torch.zeros(len(ours), 1), targets)], max_epochs=1, check=False)
    assert found[0] is not None
    return found[0], engine.state.metrics["distillation"].item()


@pytest.mark.parametrize("missing", [float("-inf"), -1000.0])
def test_a_teacher_that_is_certain_gives_the_cross_entropy(missing: float) -> None:
    ours, target = torch.randn(7, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    certain = torch.full((7, 4), missing).scatter(1, target[:, None], 0.0)
    logits = ours.clone().requires_grad_()
    loss = F.cross_entropy(logits, target)
    loss.backward()
    gradient, term = gradient_and_term(ours, certain, 1.0)
    assert term == pytest.approx(loss.item(), abs=1e-6)
    assert logits.grad is not None
    torch.testing.assert_close(gradient, logits.grad, rtol=0, atol=1e-6)


def test_at_a_high_temperature_the_gradient_is_the_difference_of_the_logits() -> None:
    ours, theirs = torch.randn(2, 6, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, theirs = (one - one.mean(1, keepdim=True) for one in (ours, theirs))
    expected = (ours - theirs) / ours.numel()
    off = [
        ((gradient_and_term(ours, theirs, temperature)[0] - expected).norm() / expected.norm()).item()
        for temperature in (1.0, 10.0, 1000.0)
    ]
    assert off[0] > 0.2
    assert off[0] > off[1] > off[2]
    assert off[2] < 2e-3


@pytest.mark.parametrize(("dim", "shape"), [(1, (3, 4, 5)), (-1, (3, 5, 4))])
def test_positions_are_averaged_and_classes_are_where_they_are_said_to_be(dim: int, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    flat = [one.movedim(dim, -1).reshape(-1, 4).clone() for one in (ours, theirs)]
    model = Logits(ours)
    update = Update(
        lambda engine, batch: SimpleNamespace(logits=engine.model(batch)),
        lambda engine, output, batch: output.logits.sum() * 0,
        SGD,
    )
    engine = Engine(update, model=model, seed=0)
    engine.attach(Distillation(Logits(theirs), dim=dim, temperature=T, forward=lambda teacher, batch: teacher(batch)))
    engine.run([torch.zeros(3, 1)], max_epochs=1, check=False)
    assert engine.state.metrics["distillation"].item() == pytest.approx(divergence(flat[0], flat[1]).item(), rel=1e-5)


# ---- what the teacher sees, and what is left alone ------------------------------------------------------------------


class Watched(nn.Module):
    """A teacher that notes its inputs and its modes, and draws random numbers even in eval mode."""

    def __init__(self, model: nn.Module | None = None, *, draws: bool = False) -> None:
        super().__init__()
        self.model = model or make_teacher()
        self.draws = draws
        self.seen: list[Tensor] = []
        self.modes: set[bool] = set()

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append(inputs)
        self.modes |= {part.training for part in self.modules()}
        output: Tensor = self.model(F.dropout(inputs, 0.5, training=True) if self.draws else inputs)
        assert not output.requires_grad
        return output


@pytest.mark.parametrize("mixing", [MixUp, CutMix])
def test_the_teacher_sees_the_mixed_batch(mixing: Any) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 3))
    teacher = Watched(nn.Sequential(nn.Flatten(), nn.Linear(32, 3)))
    inputs: list[Tensor] = []
    engine = build(Distillation(teacher), mixing(), Cutout(2), LabelSmoothing(0.1), MicroBatching(3), model=model)
    engine.connect(Events.FORWARD_STARTED, lambda engine: inputs.append(engine.state.batch[0]))
    batches = kit.batches(3, (2, 4, 4), (), classes=3)
    engine.run(batches, max_epochs=1)
    assert len(inputs) == len(teacher.seen) == 6
    for one, other in zip(inputs, teacher.seen, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(torch.cat(inputs), torch.cat([x for x, _ in batches])), "they were mixed"


def test_labels_are_smoothed_in_the_task_loss_only() -> None:
    both, alone = trained(LabelSmoothing(0.3), distillation(weight=1.0)), trained(distillation(weight=1.0))
    assert_same(both.model, alone.model)


def test_the_teacher_is_as_before_after_the_run_and_in_eval_mode_within() -> None:
    teacher = Watched()
    list(teacher.modules())[3].eval()  # one part was in eval mode
    before = digest(dict(teacher.state_dict()))
    modes = [part.training for part in teacher.modules()]
    engine = build(Distillation(teacher), EMA(0.9))
    engine.connect(Events.EPOCH_STARTED, lambda engine: teacher.train())
    engine.run(data(), max_epochs=2)
    assert digest(dict(teacher.state_dict())) == before
    assert [part.training for part in teacher.modules()] == modes
    assert teacher.modes == {False}
    assert all(p.grad is None and p.requires_grad for p in teacher.parameters())

    def fail(engine: Engine) -> None:
        raise ValueError("meant")

    engine.connect(Events.ITERATION_COMPLETED, fail)
    with pytest.raises(ValueError, match="meant"):
        engine.run(data(), max_epochs=3)
    assert [part.training for part in teacher.modules()] == modes


def test_a_teacher_that_draws_moves_no_draw_of_the_student() -> None:
    ends = []
    for handlers in ([], [Distillation(Watched(draws=True))]):
        trained(*handlers)
        ends.append(torch.get_rng_state())
    assert torch.equal(*ends)


@pytest.mark.moderate
def test_no_state_holds_the_teacher_and_another_one_is_reported_on_resume() -> None:
    engine = build(distillation())
    engine.run(data(), max_epochs=1)
    state = engine.state_dict()
    numbers = sum(value.numel() for value in state["modules"]["model"].values())
    assert numbers == sum(value.numel() for value in student().state_dict().values())
    assert state["handlers"].get("distillation", {}) == {}
    assert set(engine.weights()) == {"model"}

    resumed = build(distillation())
    resumed.load_state_dict(state)
    resumed.run(data(), max_epochs=2)
    other = build(Distillation(make_teacher(9), temperature=T, weight=W))
    other.load_state_dict(state)
    with pytest.warns(FindingWarning, match=r"W32: .*'distillation' has teacher='[0-9a-f]{16}', but had teacher='"):
        other.run(data(), max_epochs=2)
    whole = trained(distillation())
    assert fingerprint(resumed).keys() == fingerprint(whole).keys()


def test_the_fingerprint_is_of_values_names_and_shapes() -> None:
    teacher = make_teacher()
    first = Distillation(teacher).fingerprint
    assert first == Distillation(copy.deepcopy(teacher), temperature=9.0).fingerprint
    teacher[1].running_mean[0] += 1
    assert Distillation(teacher).fingerprint != first
    assert Distillation(Logits(torch.zeros(2, 3))).fingerprint != Distillation(Logits(torch.zeros(3, 2))).fingerprint


def test_inputs_in_another_precision_are_converted_for_the_teacher() -> None:
    teacher = Watched()
    trained(Distillation(teacher), TruePrecision("fp64"))
    assert {one.dtype for one in teacher.seen} == {torch.float32}


@pytest.mark.moderate
@pytest.mark.parametrize("draws", [True, False])
def test_it_keeps_the_promises_of_a_handler(draws: bool) -> None:
    check_handler(build, lambda: Distillation(Watched(draws=draws)), data()[:3], max_epochs=2)


# ---- errors ------------------------------------------------------------------------------------------------------------


def test_a_teacher_that_is_trained_is_refused() -> None:
    model = student()
    with pytest.raises(ValueError, match=r"shares parameters with the model that is being trained.*copy\.deepcopy"):
        trained(Distillation(nn.Sequential(model)), model=model)
    assert_same(trained(Distillation(copy.deepcopy(model))).model, trained(Distillation(student())).model)
    teacher = make_teacher()
    update = Update.supervised(
        F.cross_entropy, SGD, parameters=lambda engine: [*engine.model.parameters(), *teacher.parameters()]
    )
    engine = Engine(update, model=student(), seed=0)
    engine.attach(Distillation(teacher))
    with pytest.raises(ValueError, match="shares parameters"):
        engine.run(data(), max_epochs=1)


@pytest.mark.parametrize(
    ("teacher", "error", "message"),
    [
        (nn.Linear(5, 4), ValueError, r"has shape \(6, 3\), but the teacher's output has shape \(6, 4\)"),
        (nn.Linear(5, 1), TypeError, r"the teacher's output is of shape \(6, 1\); expected a tensor of logits"),
        (nn.GRU(5, 3), TypeError, "the teacher's output is a tuple"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(teacher: nn.Module, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        trained(Distillation(teacher))


def test_batches_and_updates_without_what_it_needs_are_refused() -> None:
    function = Update.from_function(lambda engine, batch: engine.model(batch[0]).sum(), SGD)
    engine = Engine(function, model=student(), seed=0)
    engine.attach(distillation())
    with pytest.raises(ValueError, match="'main' is a single function"):
        engine.run(data(), max_epochs=1)
    engine = Engine(
        Update(
            lambda engine, batch: engine.model(batch["x"]),
            lambda engine, output, batch: F.cross_entropy(output, batch["y"]),
            SGD,
        ),
        model=student(),
        seed=0,
    )
    engine.attach(distillation())
    with pytest.raises(TypeError, match=r"in a batch of type dict.*forward=lambda teacher, batch"):
        engine.run([{"x": x, "y": y} for x, y in data()], max_epochs=1)
    with pytest.raises(ValueError, match="control distillation of update 'main'"):
        build(distillation(), distillation(name="other"))


# ---- two processes -----------------------------------------------------------------------------------------------------


def distributed() -> dict[str, Tensor]:
    engine = build(distillation(), DistributedDataParallel(), model=mlp(5, 8, 3))
    engine.run(data([4, 4, 4, 4]), max_epochs=3)
    return {name: value.clone() for name, value in engine.weights()["model"].items()}


@pytest.mark.slow
def test_two_processes_train_as_one_does() -> None:
    results = run_together(distributed, 2)
    assert_same(*results)
    engine = build(distillation(), GradientAccumulation(2), model=mlp(5, 8, 3))
    engine.run(data([4, 4, 4, 4]), max_epochs=3)
    for name, value in engine.model.state_dict().items():
        torch.testing.assert_close(results[0][name], value, rtol=0, atol=1e-6)
