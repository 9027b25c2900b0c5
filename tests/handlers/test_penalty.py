"""Penalty, L1 and L2 against plain PyTorch loops that add the same terms to the loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from signalfire import Engine, Events, Handler, Phase, Update, seed_everything
from signalfire.handlers import (
    L1,
    L2,
    DistributedDataParallel,
    Freezing,
    GradientAccumulation,
    GradientClipping,
    MicroBatching,
    MixedPrecision,
    ParameterScheduling,
    Penalty,
    SharpnessAwareMinimization,
)
from signalfire.testing import check_handler
from tests import kit
from tests.kit import assert_same, mlp, new_metrics, same
from tests.processes import run_together

Batch = tuple[Tensor, Tensor]
Term = Callable[[Any, Tensor], Tensor]
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
LBFGS = partial(torch.optim.LBFGS, lr=0.2, max_iter=3)


def network() -> Any:
    return mlp(5, 8, 3, nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3))


def data(sizes: Any = (6, 6, 6, 6, 4)) -> list[Batch]:
    return kit.batches(sizes, 5, (), classes=3)


def z_loss(engine: Engine) -> Tensor:
    output: Tensor = engine.state.update.output
    return output.logsumexp(1).square().mean()


def of_output(model: Any, output: Tensor) -> Tensor:
    return output.logsumexp(1).square().mean()


def absolutes(model: Any, output: Tensor) -> Tensor:
    return torch.stack([model[0].weight.abs().sum(), model[4].weight.abs().sum()]).sum()


def squares(model: Any, output: Tensor) -> Tensor:
    return 0.5 * torch.stack([model[0].weight.square().sum(), model[4].weight.square().sum()]).sum()


KINDS: dict[str, tuple[Callable[[float], Handler], Term]] = {
    "penalty": (partial(Penalty, z_loss), of_output),
    "l1": (L1, absolutes),
    "l2": (L2, squares),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def build(*handlers: Handler, optimizer: Any = SGD, model: nn.Module | None = None) -> Engine:
    return kit.build(model or network(), *handlers, loss=F.cross_entropy, optimizer=optimizer)


def trained(*handlers: Handler, epochs: int = 2, batches: list[Batch] | None = None, optimizer: Any = SGD) -> Engine:
    engine = build(*handlers, optimizer=optimizer)
    seed_everything(1)
    engine.run(batches or data(), max_epochs=epochs)
    return engine


def plain_loop(
    terms: list[tuple[float | Callable[[int], float], Term]],
    *,
    window: int = 1,
    share_of: Callable[[Batch], float] = lambda batch: 1,
    pieces: int = 1,
    scaled: bool = False,
    rho: float | None = None,
) -> tuple[Any, list[float], list[float]]:
    """Returns the model, the losses without the terms, and the last term of each micro-step."""
    model, losses, added = network(), [], []
    optimizer = SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    step = 0
    seed_everything(1)

    def gradients(chunk: Any, *, record: bool) -> None:
        for batch in chunk:
            parts = list(zip(batch[0].chunk(pieces), batch[1].chunk(pieces), strict=True))
            for x, y in parts:
                with torch.autocast("cpu", dtype=torch.float16, enabled=scaled):
                    output = model(x)
                    loss = F.cross_entropy(output, y)
                    if record:
                        losses.append(loss.item())
                    for weight, term in terms:
                        value = (weight(step) if callable(weight) else weight) * term(model, output)
                        loss = loss + value
                share = share_of(batch) if pieces == 1 else len(x) / len(batch[0])
                (scaler.scale(loss) if share == 1 else scaler.scale(loss) * share).backward()
            if record:
                added.append(value.item())
        total = sum(map(share_of, chunk))
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(total)

    for chunk in itertools.chain(*[kit.windows(data(), window)] * 2, kit.windows(data(), window)):
        gradients(chunk, record=True)
        if rho is not None:
            _perturbed(model, rho, partial(gradients, chunk, record=False))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        step += 1
        if step == 2 * -(-5 // window):
            break
    return model, losses, added


def _perturbed(model: nn.Module, rho: float, evaluate: Callable[[], None]) -> None:
    """SAM's second evaluation: at the perturbed weights, with buffers unchanged."""
    parameters = list(model.parameters())
    before = [p.detach().clone() for p in parameters]
    buffers = [b.clone() for b in model.buffers()]
    gradients = [p.grad for p in parameters if p.grad is not None]
    with torch.no_grad():
        scale = rho / (nn.utils.get_total_norm(gradients) + 1e-12)
        for p, g in zip(parameters, gradients, strict=True):
            p.addcmul_(g, scale)
            p.grad = None
    evaluate()
    with torch.no_grad():
        for p, old in zip([*parameters, *model.buffers()], [*before, *buffers], strict=True):  # type: ignore[assignment]
            p.copy_(old)


def recorded(engine: Engine) -> list[float]:
    losses: list[float] = []
    engine.connect(
        Events.LOSS_COMPUTED, lambda engine: losses.append(engine.state.update.loss.item()), phase=Phase.RECORD
    )
    return losses


def count(batch: Batch) -> float:
    return len(batch[1])


def count_of(engine: Engine) -> float:
    return count(engine.state.batch)


@pytest.mark.moderate
@kinds
@pytest.mark.parametrize("setting", ["plain", "accumulated", "weighted", "scaled"])
def test_weights_losses_and_terms_equal_those_of_a_plain_loop(kind: str, setting: str) -> None:
    make, term = KINDS[kind]
    handlers: dict[str, list[Handler]] = {
        "plain": [],
        "accumulated": [GradientAccumulation(2)],
        "weighted": [GradientAccumulation(2, weight=count_of)],
        "scaled": [GradientAccumulation(2), MixedPrecision("fp16", init_scale=1024.0)],
    }
    engine = build(*handlers[setting], make(0.125))
    losses, written = recorded(engine), new_metrics(engine)
    seed_everything(1)
    engine.run(data(), max_epochs=2)
    model, plain_losses, added = plain_loop(
        [(0.125, term)],
        window=1 if setting == "plain" else 2,
        share_of=count if setting == "weighted" else lambda batch: 1,
        scaled=setting == "scaled",
    )
    assert_same(engine.model, model)
    assert losses == plain_losses, "the reported loss stays without the term"
    assert [metrics[kind] for _, metrics in written] == added


@pytest.mark.moderate
@kinds
def test_a_batch_in_pieces_has_the_term_once(kind: str) -> None:
    make, term = KINDS[kind]
    engine = build(make(0.125), MicroBatching(pieces=2, halve_on_oom=False))
    written = new_metrics(engine)
    seed_everything(1)
    engine.run(data(), max_epochs=2)
    model, _, added = plain_loop([(0.125, term)], pieces=2)
    assert_same(engine.model, model)
    if kind != "penalty":  # the last piece's term is that of the batch
        assert [metrics[kind] for _, metrics in written] == added


def test_the_metric_of_pieces_is_the_mean_over_the_samples_also_after_a_retry() -> None:
    seen: list[tuple[float, int]] = []

    def penalty(engine: Engine) -> Tensor:
        samples = len(engine.state.batch[0])
        value = z_loss(engine) * samples
        if samples < 5:
            seen.append((value.item(), samples))
        return value

    engine = build(Penalty(penalty), MicroBatching(), model=mlp(5, 8, 3))

    @engine.on(Events.BACKWARD_STARTED)
    def run_out_of_memory(engine: Engine) -> None:
        if len(engine.state.batch[0]) == 5:
            raise torch.OutOfMemoryError

    written = new_metrics(engine)
    engine.run(data([5]), max_epochs=1)
    assert [samples for _, samples in seen] == [2, 2, 1]
    assert written[0][1]["penalty"] == pytest.approx(sum(value * samples for value, samples in seen) / 5, rel=1e-6)


@pytest.mark.moderate
@kinds
def test_the_second_evaluation_of_sam_has_the_term_too(kind: str) -> None:
    make, term = KINDS[kind]
    engine = build(make(0.125), SharpnessAwareMinimization(0.1), GradientAccumulation(2))
    written = new_metrics(engine)
    seed_everything(1)
    engine.run(data(), max_epochs=2)
    model, _, added = plain_loop([(0.125, term)], window=2, rho=0.1)
    assert_same(engine.model, model)
    assert [metrics[kind] for _, metrics in written] == added, "that of the first evaluation"


@pytest.mark.moderate
@kinds
def test_the_closure_of_lbfgs_evaluates_the_loss_with_the_term(kind: str) -> None:
    make, term = KINDS[kind]
    engine = trained(make(0.125), optimizer=LBFGS)
    model = network()
    optimizer = LBFGS(model.parameters())
    seed_everything(1)
    for x, y in data() * 2:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            output = model(x)
            loss = F.cross_entropy(output, y) + 0.125 * term(model, output)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_same(engine.model, model)


def test_a_weight_follows_the_number_of_steps_and_zero_is_no_penalty() -> None:
    schedule = ParameterScheduling.linear(0.0, 0.4, over=4)
    engine = build(Penalty(z_loss, schedule), GradientAccumulation(2))
    written = new_metrics(engine)
    seed_everything(1)
    engine.run(data(), max_epochs=2)
    model, _, added = plain_loop([(schedule, of_output)], window=2)
    assert_same(engine.model, model)
    assert [metrics["penalty"] for _, metrics in written] == added
    assert added[0] == 0 < added[2]

    def never(engine: Engine) -> Tensor:
        raise AssertionError

    assert_same(trained(Penalty(never, 0.0)).model, trained().model)


@pytest.mark.moderate
def test_several_penalties_are_added_in_the_order_of_their_names() -> None:
    def handlers() -> list[Handler]:
        return [L1(0.1), L2(0.3), Penalty(z_loss, 0.7), L2(0.01, parameters="4.weight", name="a")]

    weighted: list[tuple[float, Term]] = [(0.1, absolutes), (0.3, squares), (0.7, of_output)]
    only = (0.01, lambda model, output: 0.5 * torch.stack([model[4].weight.square().sum()]).sum())
    model, _, _ = plain_loop([only, *weighted])
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        assert_same(trained(*(handlers()[place] for place in order)).model, model)
    other, _, _ = plain_loop([*weighted[::-1], only])
    assert not same(model, other), "the order can be seen in the last bits"


def test_a_disabled_penalty_is_absent_and_the_others_stay() -> None:
    l1, l2 = L1(0.1), L2(0.3)
    l1.enabled = False
    assert_same(trained(l1, l2).model, plain_loop([(0.3, squares)])[0])

    engine = build(L1(0.1), L2(0.3))

    @engine.on(Events.EPOCH_COMPLETED(once=1))
    def disable(engine: Engine) -> None:
        engine.handlers["l1"].enabled = False

    seed_everything(1)
    engine.run(data(), max_epochs=2)
    both, _, _ = plain_loop([(0.1, absolutes), (0.3, squares)])
    assert not same(engine.model, both)


# ---- L1 and L2 -------------------------------------------------------------------------------------------------------


@pytest.mark.moderate
@pytest.mark.parametrize("window", [1, 4])
def test_l2_is_the_weight_decay_of_sgd_where_the_products_are_exact(window: int) -> None:
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    l2 = L2(2**-7, norms_and_biases=True)
    one = build(l2, GradientAccumulation(window), optimizer=sgd, model=mlp(5, 8, 3, nn.Tanh()))
    other = build(
        GradientAccumulation(window), optimizer=partial(sgd, weight_decay=2**-7), model=mlp(5, 8, 3, nn.Tanh())
    )
    without = build(GradientAccumulation(window), model=mlp(5, 8, 3, nn.Tanh()))
    for engine in (one, other, without):
        engine.run(data(), max_epochs=20)
    exact = window == 1  # a sum of several gradients is rounded with the penalty in it
    for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0 if exact else 1e-6)
    assert not same(one.model, without.model)


def test_a_window_of_four_and_a_batch_in_one_agree() -> None:
    model = mlp(5, 8, 3, nn.Tanh())
    (x, y), *_ = whole = data([16])
    parts = list(zip(x.chunk(4), y.chunk(4), strict=True))
    ended = []
    for batches, window in ((whole, 1), (parts, 4)):
        engine = build(L1(0.02), L2(0.1), GradientAccumulation(window), model=mlp(5, 8, 3, nn.Tanh()))
        engine.run(batches, max_epochs=10)
        ended.append(engine.model)
    for p, q in zip(ended[0].parameters(), ended[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
    assert not same(ended[0], model)


def test_norms_and_biases_are_left_out_and_said_to_be() -> None:
    engine = build(L2(0.1))
    handler = engine.find(L2)
    assert repr(handler) == "<L2 'l2', without 0.bias, 1.weight, 1.bias, 4.bias>"
    engine.run(data([6]), max_epochs=1)
    assert engine.state.metrics["l2"] == 0.1 * squares(network(), torch.zeros(())).detach()

    every = build(L2(0.1, norms_and_biases=True, parameters=["0.*", "1.*"]))
    every.run(data([6]), max_epochs=1)

    class Scale(nn.Module):
        """A normalization layer of one's own."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    assert repr(build(L2(0.1), model=nn.Sequential(nn.LayerNorm((2, 2)), Scale())).find(L2)) == (
        "<L2 'l2', without 0.weight, 0.bias, 1.scale>"
    )
    expected = sum(p.square().sum() for part in list(network())[:2] for p in part.parameters()) * 0.05
    torch.testing.assert_close(every.state.metrics["l2"], expected.detach())
    assert repr(every.find(L2)) == "<L2 'l2'>"


def test_frozen_parameters_are_not_counted_until_they_are_unfrozen() -> None:
    engine = build(L2(0.5), Freezing({"0": 2}))
    written = new_metrics(engine)
    first: list[Tensor] = []
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: first.append(engine.model[0].weight.detach().clone()))
    engine.run(data([6]), max_epochs=2)
    model = network()
    assert torch.equal(first[0], model[0].weight)
    assert written[0][1]["l2"] == 0.25 * model[4].weight.square().sum().item()
    assert written[1][1]["l2"] > 0.25 * model[0].weight.square().sum().item()


def test_each_of_two_updates_has_a_penalty_on_its_own_parameters() -> None:
    model: Any = mlp(5, 8, 3, nn.Tanh())

    def update(name: str, part: nn.Module) -> Update:
        return Update.supervised(F.cross_entropy, SGD, name=name, parameters=lambda engine: part.parameters())

    engine = Engine([update("first", model[0]), update("last", model[2])], model=model, seed=0)
    engine.attach(L2(1.0), L1(1.0, update="last", name="only"), L2(1.0, parameters="0.*", name="named"))
    before = [part.weight.detach().square().sum() / 2 for part in (model[0], model[2])]
    engine.run(data([6]), max_epochs=1)
    metrics = engine.state.metrics
    assert metrics["l2/first"] == metrics["named/first"] == before[0]
    assert metrics["l2/last"] == before[1]
    assert metrics["named/last"] == 0
    assert "only/first" not in metrics
    with pytest.raises(KeyError, match="none"):
        engine.attach(L1(1.0, update="none", name="other"))


@pytest.mark.parametrize("kind", [L1, L2])
def test_complex_weights_have_the_sum_of_their_sizes(kind: Any) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).abs().square().mean()

    x, y = torch.randn(4, 3, dtype=torch.complex64), torch.randn(4, 1, dtype=torch.complex64)
    model, plain = (nn.Linear(3, 1, bias=False, dtype=torch.complex64) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    engine = Engine(Update.supervised(loss, partial(torch.optim.SGD, lr=0.1)), model=model)
    engine.attach(kind(0.5))
    engine.run([(x, y)] * 2, max_epochs=1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        weight = plain.weight
        size = weight.abs().sum() if kind is L1 else 0.5 * (weight.real.square() + weight.imag.square()).sum()
        optimizer.zero_grad()
        (loss(plain(x), y) + 0.5 * size).backward()
        optimizer.step()
    torch.testing.assert_close(model.weight, plain.weight)


def test_half_precision_weights_are_summed_in_float32() -> None:
    model = nn.Linear(300, 300, dtype=torch.float16)
    with torch.no_grad():
        model.weight.fill_(2.0)
    engine = kit.build(
        model, L2(1.0), optimizer=SGD, loss=lambda output, target: output.float().sum() * 0, allow=["C32"]
    )
    engine.run([(torch.zeros(1, 300, dtype=torch.float16),) * 2], max_epochs=1)
    assert engine.state.metrics["l2"].item() == 180_000  # beyond float16


# ---- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda engine: 1.0, TypeError, "function= returned 1.0; expected a floating-point tensor with one element"),
        (lambda engine: engine.state.update.output, TypeError, r"a tensor of shape \(6, 3\)"),
        (lambda engine: z_loss(engine).detach(), ValueError, "does not require grad"),
    ],
)
def test_what_is_no_penalty_is_refused(function: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        trained(Penalty(function), L1(0.1))
    assert ("raised in the penalty 'penalty'" in getattr(caught.value, "__notes__", [])) is True


def test_a_function_that_cannot_be_called_with_the_engine_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match=r"Penalty\(function=\): .*\(\) cannot be called with only the engine"):
        Penalty(lambda: torch.ones(()))  # type: ignore[arg-type, misc]


@pytest.mark.parametrize("weight", [lambda step: None, lambda step: float("nan"), lambda step: -1.0])
def test_a_weight_that_is_none_is_refused(weight: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"'l1': weight= returned (None|nan|-1.0) after 0 steps"):
        trained(L1(weight))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parameters": "5.*"}, r"'l2': '5.\*' matches no parameter; the parameters are '0.weight'"),
        (
            {"parameters": "*.bias"},
            r"no parameter to penalize except norm weights and biases \(0.bias, 1.bias, 4.bias\); to penalize",
        ),
    ],
)
def test_parameters_that_are_not_there_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained(L2(0.1, **options))


def test_a_negative_weight_is_for_functions_only() -> None:
    assert Penalty(z_loss, -1.0).weight == -1
    for kind in (L1, L2):
        with pytest.raises(ValueError, match=rf"{kind.__name__}\(weight=-1\): expected a number of 0 or more"):
            kind(-1)


@pytest.mark.moderate
@pytest.mark.parametrize("kind", ["penalty", "l2"])
def test_it_keeps_the_promises_of_a_handler(kind: str) -> None:
    check_handler(build, lambda: KINDS[kind][0](0.1), data()[:3], max_epochs=2)


# ---- two processes -----------------------------------------------------------------------------------------------------


def distributed() -> dict[str, Tensor]:
    engine = build(L1(0.02), L2(0.1), DistributedDataParallel(), GradientClipping(max_norm=1.0), model=mlp(5, 8, 3))
    engine.run(data([4, 4, 4, 4]), max_epochs=3)
    return {name: value.clone() for name, value in engine.weights()["model"].items()}


@pytest.mark.slow
def test_two_processes_train_as_one_does() -> None:
    results = run_together(distributed, 2)
    assert_same(*results)
    engine = build(L1(0.02), L2(0.1), GradientAccumulation(2), GradientClipping(max_norm=1.0), model=mlp(5, 8, 3))
    engine.run(data([4, 4, 4, 4]), max_epochs=3)
    for name, value in engine.model.state_dict().items():
        torch.testing.assert_close(results[0][name], value, rtol=0, atol=1e-6)
