"""CutMix against plain PyTorch loops that draw the same numbers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from signalfire import Engine, Events, Handler, Update
from signalfire.authoring.randomness import derived_seed
from signalfire.core.overrides import Override
from signalfire.handlers import (
    CutMix,
    Cutout,
    GradientAccumulation,
    LabelSmoothing,
    MixedPrecision,
    MixUp,
    SharpnessAwareMinimization,
)
from signalfire.testing import check_handler
from tests import kit
from tests.kit import average_gradients, same, windows

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SHAPES = [(9,), (6, 7), (4, 5, 3)]


def network(shape: tuple[int, ...]) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(2 * math.prod(shape), 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
    )


def batches(shape: tuple[int, ...], count: int = 6) -> list[tuple[Tensor, Tensor]]:
    return kit.batches([8] * (count - 1) + [5], (2, *shape), (), classes=3)


def build(shape: tuple[int, ...] = (6, 7)) -> Engine:
    return kit.build(network(shape), loss=F.cross_entropy, optimizer=SGD, seed=7)


def expected_mix(x: Tensor, iteration: int, alpha: float) -> tuple[Tensor, float, Tensor]:
    """The paper's algorithm, element by element."""
    generator = torch.Generator().manual_seed(derived_seed(7, "cutmix", iteration))
    one, other = torch._standard_gamma(torch.tensor([alpha, alpha], dtype=torch.float64), generator=generator)
    perm = torch.randperm(len(x), generator=generator)
    shape = x.shape[2:]
    ratio = (other / (one + other)).item() ** (1 / len(shape))
    inside = torch.ones(shape, dtype=torch.bool)
    for dimension, size in enumerate(shape):
        center = torch.randint(size, (), generator=generator).item()
        half = int(size * ratio) // 2
        places = torch.arange(size).view([-1 if d == dimension else 1 for d in range(len(shape))])
        inside &= (places >= center - half) & (places < center + half)
    return torch.where(inside, x[perm], x), 1 - int(inside.sum()) / inside.numel(), perm


def plain_loop(
    shape: tuple[int, ...], alpha: float, *, window: int = 1, smoothing: float = 0.0, scaled: bool = False
) -> tuple[nn.Sequential, list[float]]:
    model = network(shape)
    optimizer = SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    data, iteration, lams = batches(shape), 0, []
    for _ in range(2):
        for chunk in windows(data, window):
            for x, y in chunk:
                iteration += 1
                mixed, lam, perm = expected_mix(x, iteration, alpha)
                lams.append(lam)
                with torch.autocast("cpu", dtype=torch.float16, enabled=scaled):
                    output = model(mixed)
                    loss = lam * F.cross_entropy(output, y) + (1 - lam) * F.cross_entropy(output, y[perm])
                if smoothing:
                    loss = (1 - smoothing) * loss + smoothing * -output.float().log_softmax(1).mean()
                scaler.scale(loss).backward()
            average_gradients(model, len(chunk))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model, lams


@pytest.mark.moderate
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize("window", [1, 4])
def test_weights_and_shares_equal_a_plain_loop(shape: tuple[int, ...], alpha: float, window: int) -> None:
    engine = build(shape)
    handler = CutMix(alpha)
    engine.attach(handler, GradientAccumulation(window))
    lams: list[float | None] = []
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: lams.append(handler.lam))
    engine.run(batches(shape), max_epochs=2)
    reference, plain = plain_loop(shape, alpha, window=window)
    assert same(engine.model, reference)
    assert lams == plain
    assert len(set(plain)) > 3  # boxes of different sizes were cut


@pytest.mark.parametrize("reverse", [True, False])
def test_with_smoothing_accumulation_and_fp16(reverse: bool) -> None:
    engine = build()
    handlers = [
        CutMix(),
        LabelSmoothing(0.1),
        GradientAccumulation(4),
        MixedPrecision("fp16", init_scale=1024.0),
    ]
    engine.attach(*(reversed(handlers) if reverse else handlers))
    engine.run(batches((6, 7)), max_epochs=2)
    assert same(engine.model, plain_loop((6, 7), 1.0, window=4, smoothing=0.1, scaled=True)[0])


def test_the_data_stays_as_it_is_and_whole_numbers_can_be_cut() -> None:
    data = [(x.mul(50).byte(), y) for x, y in batches((6, 7))]
    before = [x.clone() for x, _ in data]

    def forward(engine: Engine, batch: Any) -> Any:
        assert batch[0].dtype == torch.uint8
        return engine.model(batch[0].float())

    update = Update(forward, lambda engine, output, batch: F.cross_entropy(output, batch[1]), SGD)
    engine = Engine(update, model=network((6, 7)), seed=7)
    engine.attach(CutMix())
    engine.run(data, max_epochs=1)
    assert all(torch.equal(x, unchanged) for (x, _), unchanged in zip(data, before, strict=True))


def test_dicts_and_batches_of_none() -> None:
    def forward(engine: Engine, batch: Any) -> Any:
        return engine.model(batch["x"])

    update = Update(forward, lambda engine, output, batch: F.cross_entropy(output, batch["y"]), SGD)
    engine = Engine(update, model=network((9,)), seed=7)
    engine.attach(CutMix(input="x", target="y"))
    engine.run([{"x": x, "y": y} for x, y in batches((9,))], max_epochs=2)
    assert same(engine.model, plain_loop((9,), 1.0)[0])
    engine = build((9,))
    engine.attach(CutMix())
    engine.run([batches((9,))[0], None], max_epochs=1)
    assert engine.updates[0].steps == 1


@pytest.mark.moderate
def test_it_keeps_the_promises_of_a_handler() -> None:
    check_handler(build, lambda: CutMix(), batches((6, 7), 3), max_epochs=2)


def test_an_update_that_is_a_single_function_is_refused_before_the_first_batch() -> None:
    engine = Engine(Update.from_function(lambda engine, batch: engine.model(batch[0]).sum(), SGD), model=network((9,)))
    engine.attach(CutMix())
    with pytest.raises(ValueError, match=r"'cutmix': update 'main' is a single function.*Update\(forward, loss"):
        engine.run(batches((9,)), max_epochs=1)
    assert engine.state.iteration == 0


def test_gradients_of_parts_of_the_batch_and_replaced_targets_are_refused() -> None:
    class Pieces(Handler):
        def attached(self, engine: Engine) -> None:
            engine.overrides.replace(Override.GRADIENTS, lambda engine, update, compute: compute(), by=self)

    engine = build()
    engine.attach(CutMix(), Pieces())
    with pytest.raises(ValueError, match="'cutmix' mixes samples across the whole batch"):
        engine.run(batches((6, 7)), max_epochs=1)
    engine = build()
    engine.attach(CutMix())

    @engine.on(Events.ITERATION_STARTED)
    def replace(engine: Engine) -> None:
        engine.state.batch = (engine.state.batch[0], engine.state.batch[1].clone())

    with pytest.raises(RuntimeError, match="'cutmix': the targets of the batch were replaced after samples were mixed"):
        engine.run(batches((6, 7)), max_epochs=1)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(4, 2), torch.zeros(4)), r"the inputs have shape \(4, 2\)"),
        ((torch.zeros(4, 2, 3), torch.zeros(3)), r"shape \(4, 2, 3\) and targets of shape \(3,\)"),
        ((torch.zeros(4, 2, 3), None), r"a tuple of length 2, has no tensor at 1.*CutMix\(target=\)"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused_by_name(batch: Any, message: str) -> None:
    engine = build()
    engine.attach(CutMix())
    with pytest.raises((TypeError, ValueError), match=f"'cutmix': .*{message}"):
        engine.run([batch], max_epochs=1)


def expected_mixup(x: Tensor, iteration: int, alpha: float) -> tuple[Tensor, float, Tensor]:
    generator = torch.Generator().manual_seed(derived_seed(7, "mixup", iteration))
    one, other = torch._standard_gamma(torch.tensor([alpha, alpha], dtype=torch.float64), generator=generator)
    perm, lam = torch.randperm(len(x), generator=generator), (one / (one + other)).item()
    return lam * x + (1 - lam) * x[perm], lam, perm


def is_cut(iteration: int, share: float) -> bool:
    """Whether the batch is cut, with this share against one of 1 of MixUp."""
    generator = torch.Generator().manual_seed(derived_seed(7, "mixing", iteration))
    return torch.rand((), dtype=torch.float64, generator=generator).item() < share / (share + 1)


def in_turn(share: float, *, rho: float = 0.0) -> nn.Sequential:
    """The plain loop: one of the two mixes each batch; with rho, the gradients are those at the ascended weights (SAM)."""
    model = network((6, 7))
    optimizer = SGD(model.parameters())
    for iteration, (x, y) in enumerate(batches((6, 7)) * 2, start=1):
        mix = partial(expected_mix, alpha=1.0) if is_cut(iteration, share) else partial(expected_mixup, alpha=0.4)
        mixed, lam, perm = mix(x, iteration)

        def loss(mixed: Tensor = mixed, lam: float = lam, y: Tensor = y, perm: Tensor = perm) -> Tensor:
            output = model(mixed)
            return lam * F.cross_entropy(output, y) + (1 - lam) * F.cross_entropy(output, y[perm])

        optimizer.zero_grad()
        loss().backward()
        if rho:
            ascend_and_compute_again(model, loss, rho)
        optimizer.step()
    return model


def ascend_and_compute_again(model: nn.Module, loss: Any, rho: float) -> None:
    parameters = list(model.parameters())
    norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
    before = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p in parameters:
            assert p.grad is not None
            p.add_(p.grad * (rho / (norm + 1e-12)))
            p.grad = None
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum, module.left = 0.0, module.momentum  # type: ignore[assignment]
    loss().backward()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = module.left  # type: ignore[assignment]
    with torch.no_grad():
        for p, value in zip(parameters, before, strict=True):
            p.copy_(value)


@pytest.mark.parametrize("share", [1.0, 0.25])
@pytest.mark.parametrize("order", [1, -1])
def test_it_takes_turns_with_mixup_batch_by_batch_as_a_plain_loop_does(share: float, order: int) -> None:
    cuts = [is_cut(iteration, share) for iteration in range(1, 13)]
    assert 0 < sum(cuts) < 12
    engine = build()
    engine.attach(*[CutMix(share=share), MixUp(0.4)][::order])
    engine.run(batches((6, 7)), max_epochs=2)
    assert same(engine.model, in_turn(share))


@pytest.mark.parametrize("switched_off", ["cutmix", "mixup"])
def test_the_one_that_is_left_mixes_every_batch(switched_off: str) -> None:
    engine, alone = build(), build()
    engine.attach(CutMix(), MixUp(0.4))
    alone.attach(MixUp(0.4) if switched_off == "cutmix" else CutMix())
    engine.handlers[switched_off].enabled = False
    for one in (engine, alone):
        one.run(batches((6, 7)), max_epochs=2)
    assert same(engine.model, alone.model)


@pytest.mark.moderate
def test_turns_go_on_in_a_resumed_run_also_where_gradients_are_recomputed() -> None:
    def made() -> Engine:
        engine = build()
        engine.attach(MixUp(0.4), CutMix(), SharpnessAwareMinimization(0.05))
        return engine

    whole, states = made(), []
    whole.connect(Events.ITERATION_COMPLETED, lambda engine: states.append(engine.state_dict()))
    whole.run(batches((6, 7)), max_epochs=2)
    reference = in_turn(1.0, rho=0.05)
    for one, other in zip(whole.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    for state in states[1::3]:
        resumed = made()
        resumed.load_state_dict(state)
        resumed.run(batches((6, 7)), max_epochs=2)
        assert same(resumed.model, whole.model)


def test_two_of_one_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="both 'cutmix' and 'other' control the mixing of samples by CutMix"):
        build().attach(CutMix(), CutMix(name="other"))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"alpha": -1}, ValueError, "alpha=-1"),
        ({"alpha": True}, TypeError, "alpha=True"),
        ({"input": None}, TypeError, "input=None"),
        ({"input": "x", "target": "x"}, ValueError, "input='x', target='x'"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=rf"CutMix\({message}\)"):
        CutMix(**options)


@pytest.mark.parametrize("order", [1, -1])
def test_cutout_cuts_the_mixed_samples(order: int) -> None:
    """Its boxes are whole, and lie elsewhere in each sample: none of them was mixed."""
    engine = build((8, 8))
    engine.attach(*[CutMix(1.0), Cutout(2)][::order])
    seen: list[Tensor] = []
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: seen.append(engine.state.batch[0]))
    engine.run([(torch.ones(16, 2, 8, 8), torch.zeros(16, dtype=torch.int64))] * 4, max_epochs=1)
    for batch in seen:
        covered = (batch == 0).sum(dim=(1, 2, 3)) // 2
        assert set(covered.tolist()) <= {1, 2, 4}  # at the border a box is smaller
