"""The schedules against their formulas, at every step; against torch's own where one is the same; and resumed."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from signalfire import Engine, Events
from signalfire.handlers import (
    GradientAccumulation,
    LRScheduling,
    cosine_with_warmup,
    one_cycle,
    piecewise,
    polynomial,
    warmup,
    warmup_stable_decay,
)
from signalfire.testing import check_handler
from tests import kit
from tests.kit import batches, linear, spread

Factory = Callable[..., Any]


def optimizer_of(*rates: float, momentum: float = 0.9) -> SGD:
    groups = [{"params": [nn.Parameter(torch.zeros(2))], "lr": rate} for rate in rates]
    return SGD(groups, lr=1.0, momentum=momentum)


def rates(factory: Factory, steps: int, optimizer: Optimizer | None = None) -> list[float]:
    """The rates of the first group in a plain loop."""
    optimizer = optimizer or optimizer_of(0.4)
    scheduler = factory(optimizer)
    used = []
    for _ in range(steps):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return used


def of(factory: Factory, steps: int) -> Factory:
    return partial(factory, total_steps=steps)


# ---- the formulas ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "rising", "low", "least"),
    [
        ({"warmup": 5, "cooldown": 4, "min_factor": 0.1}, 5, 4, 0.1),
        ({"warmup": 0.25, "cooldown": 0.2}, 5, 4, 0.0),
        ({"warmup": 0.29}, 5, 0, 0.0),  # 5.8 steps are 5
        ({"cooldown": 7}, 0, 7, 0.0),
        ({}, 0, 0, 0.0),
        ({"warmup": 0.5, "cooldown": 10}, 10, 10, 0.0),
        ({"warmup": 1.0}, 20, 0, 0.0),
    ],
)
def test_cosine_with_warmup_at_every_step(given: dict[str, Any], rising: int, low: int, least: float) -> None:
    steps = 20
    expected = []
    for t in range(steps):
        if t < rising:
            factor = (t + 1) / (rising + 1)
        elif t >= steps - low:
            factor = least
        else:
            factor = least + (1 - least) * (1 + math.cos(math.pi * (t - rising) / (steps - rising - low))) / 2
        expected.append(0.4 * factor)
    found = rates(of(cosine_with_warmup(**given), steps), steps)
    assert found == pytest.approx(expected, rel=1e-14, abs=0)  # the products may be grouped differently
    assert found[0] == pytest.approx(0.4 / (rising + 1), rel=1e-15)
    if low:
        assert found[-1] == 0.4 * least


HEIGHTS: dict[str, Callable[[float], float]] = {
    "linear": lambda p: 1 - p,
    "cosine": lambda p: (1 + math.cos(math.pi * p)) / 2,
    "1-sqrt": lambda p: 1 - math.sqrt(p),
}


@pytest.mark.parametrize("shape", HEIGHTS)
@pytest.mark.parametrize("least", [0.0, 0.2])
def test_warmup_stable_decay_at_every_step(shape: str, least: float) -> None:
    steps, rising, falling = 30, 3, 6
    factory = warmup_stable_decay(warmup=rising, decay=0.2, shape=shape, min_factor=least)
    expected = [0.4 * (t + 1) / 4 for t in range(rising)] + [0.4] * (steps - rising - falling)
    expected += [0.4 * (least + (1 - least) * HEIGHTS[shape](k / falling)) for k in range(falling)]
    found = rates(of(factory, steps), steps)
    assert found == pytest.approx(expected, rel=1e-15)  # 0.4 * 1 / 4 and 0.4 * (1 / 4) may round apart
    assert found[0] == 0.1
    assert found[-1] == 0.4 * (least + (1 - least) * HEIGHTS[shape](5 / 6))


def test_warmup_stable_decay_without_a_decay_stays() -> None:
    assert rates(of(warmup_stable_decay(decay=0), 8), 8) == [0.4] * 8


@pytest.mark.parametrize(("power", "end"), [(1.0, 0.0), (2, 0.1), (0.5, 0.0)])
def test_polynomial_at_every_step(power: float, end: float) -> None:
    steps, rising = 20, 4
    found = rates(of(polynomial(power=power, end_factor=end, warmup=0.2), steps), steps)
    expected = [0.4 * ((t + 1) / 5) for t in range(rising)]
    expected += [0.4 * (end + (1 - end) * (1 - k / 16) ** power) for k in range(16)]
    assert found == pytest.approx(expected, rel=1e-14, abs=0)
    assert found[0] == pytest.approx(0.4 / 5, rel=1e-15)
    assert found[-1] == pytest.approx(0.4 * (end + (1 - end) / 16**power), rel=1e-15)


def test_piecewise_holds_each_factor_from_its_step_on() -> None:
    assert rates(piecewise({2: 0.5, 5: 0.25}), 8) == [0.4] * 2 + [0.2] * 3 + [0.1] * 3
    assert rates(piecewise({5: 0.25, 2: 0.5}), 8) == [0.4] * 2 + [0.2] * 3 + [0.1] * 3
    assert rates(piecewise({0: 2.0, 4: 1}), 6) == [0.8] * 4 + [0.4] * 2


def test_piecewise_takes_shares_of_the_run() -> None:
    assert rates(of(piecewise({0.25: 0.5, 5: 0.25, 0.9: 0.125}), 8), 8) == [0.4] * 2 + [0.2] * 3 + [0.1] * 2 + [0.05]


def test_piecewise_interpolates_from_one_factor_to_the_next() -> None:
    factors = [1, 0.75, 0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert rates(piecewise({2: 0.5, 5: 2.0}, interpolate=True), 8) == [0.4 * factor for factor in factors]
    factors = [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]
    found = rates(of(piecewise({0.0: 0.0, 2: 1.0, 1.0: 0.0}, interpolate=True), 6), 6)
    assert found == [0.4 * factor for factor in factors]


def test_one_cycle_is_torchs() -> None:
    for given, share in ((0.3, 0.3), (8, 0.4), (0.0, 0.0), (0, 0.0)):
        optimizer, other = optimizer_of(0.4), optimizer_of(0.01)
        found = rates(of(one_cycle(warmup=given, div_factor=10.0), 20), 20, optimizer)
        expected = rates(partial(OneCycleLR, max_lr=0.4, total_steps=20, pct_start=share, div_factor=10.0), 20, other)
        assert found == expected
        assert optimizer.param_groups[0]["momentum"] == other.param_groups[0]["momentum"] != 0.9
    assert rates(of(one_cycle(warmup=8), 20), 20).index(0.4) == 7  # the last step of the rise
    found = rates(of(one_cycle(), 20), 20)
    assert (found[0], found[-1]) == pytest.approx((0.4 / 25, 0.4 / 250_000))


def test_one_cycle_takes_a_rate_for_each_group() -> None:
    for max_lr in (None, [0.4, 0.2]):
        optimizer = optimizer_of(*(max_lr or (0.4, 0.2)))
        one_cycle(max_lr)(optimizer, total_steps=10)
        assert [group["max_lr"] for group in optimizer.param_groups] == [0.4, 0.2]
    optimizer = optimizer_of(0.4, 0.2)
    for _ in range(2):  # built again for the same optimizer, as after engine.reset(), it rises as high
        one_cycle()(optimizer, total_steps=10)
        assert [group["max_lr"] for group in optimizer.param_groups] == [0.4, 0.2]


# ---- the same as torch's, up to rounding: torch multiplies step by step, or groups the products differently ----------


@pytest.mark.parametrize(
    ("factory", "torchs"),
    [
        (cosine_with_warmup(), partial(CosineAnnealingLR, T_max=20)),
        (cosine_with_warmup(min_factor=0.25), partial(CosineAnnealingLR, T_max=20, eta_min=0.1)),
        (polynomial(power=2.0), partial(PolynomialLR, total_iters=20, power=2.0)),
        (polynomial(), partial(LinearLR, start_factor=1.0, end_factor=0.0, total_iters=20)),
        (piecewise({5: 0.5, 9: 0.25}), partial(MultiStepLR, milestones=[5, 9], gamma=0.5)),
        (
            cosine_with_warmup(warmup=4),
            lambda optimizer: SequentialLR(
                optimizer,
                [LinearLR(optimizer, 1 / 5, total_iters=4), CosineAnnealingLR(optimizer, T_max=16)],
                milestones=[4],
            ),
        ),
    ],
)
def test_the_same_as_torchs_own(factory: Factory, torchs: Factory) -> None:
    with_total = factory if isinstance(factory, type(piecewise({1: 1}))) else of(factory, 20)
    assert rates(with_total, 20) == pytest.approx(rates(torchs, 20), rel=1e-12)


# ---- warm-up in front of anything ------------------------------------------------------------------------------------


def chained(optimizer: Optimizer) -> ChainedScheduler:
    return ChainedScheduler([ExponentialLR(optimizer, 0.9), StepLR(optimizer, 3, 0.5)])


def sequential(optimizer: Optimizer) -> SequentialLR:
    parts: list[Any] = [ExponentialLR(optimizer, 0.9), StepLR(optimizer, 3, 0.5)]
    return SequentialLR(optimizer, parts, milestones=[4])


def halving(step: int) -> float:
    return 0.5**step


SCHEDULERS: dict[str, Factory] = {
    "ChainedScheduler": chained,
    "CosineAnnealingLR": partial(CosineAnnealingLR, T_max=9),
    "CosineAnnealingWarmRestarts": partial(CosineAnnealingWarmRestarts, T_0=3),
    "CyclicLR": partial(CyclicLR, base_lr=0.1, max_lr=0.5, step_size_up=3),
    "ExponentialLR": partial(ExponentialLR, gamma=0.8),
    "LambdaLR": partial(LambdaLR, lr_lambda=halving),
    "LinearLR": partial(LinearLR, start_factor=0.2),
    "MultiStepLR": partial(MultiStepLR, milestones=[2, 5], gamma=0.5),
    "MultiplicativeLR": partial(MultiplicativeLR, lr_lambda=halving),
    "OneCycleLR": partial(OneCycleLR, max_lr=0.3, total_steps=12),
    "PolynomialLR": partial(PolynomialLR, total_iters=9),
    "SequentialLR": sequential,
    "StepLR": partial(StepLR, step_size=3, gamma=0.5),
    "piecewise": piecewise({2: 0.5, 5: 0.1}),
    "warmup": warmup(2, then=partial(ExponentialLR, gamma=0.8)),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize(("start", "first"), [(None, 1 / 6), (0.0, 0.0), (0.5, 0.5)])
def test_a_warmup_rises_to_what_follows_and_then_leaves_it_alone(kind: str, start: float | None, first: float) -> None:
    alone = rates(SCHEDULERS[kind], 12)
    found = rates(warmup(5, then=SCHEDULERS[kind], start_factor=start), 17)
    assert found[5:] == alone
    assert found[:5] == pytest.approx([alone[0] * (first + (1 - first) * t / 5) for t in range(5)], rel=1e-15)


def test_a_warmup_is_torchs_linear_one() -> None:
    def torchs(optimizer: Optimizer) -> SequentialLR:
        parts: list[Any] = [LinearLR(optimizer, 1 / 5, total_iters=4), ExponentialLR(optimizer, 0.8)]
        return SequentialLR(optimizer, parts, milestones=[4])

    found = rates(warmup(4, then=partial(ExponentialLR, gamma=0.8)), 12)
    assert found == pytest.approx(rates(torchs, 12), rel=1e-12)


def test_a_warmup_of_no_steps_is_what_follows() -> None:
    factory = partial(ExponentialLR, gamma=0.8)
    assert rates(warmup(0, then=factory), 6) == rates(factory, 6)


def test_what_follows_a_warmup_learns_what_is_left_of_the_run() -> None:
    found = rates(of(warmup(0.25, then=CosineAnnealingLR), 16), 16)
    assert found[4:] == rates(partial(CosineAnnealingLR, T_max=12), 12)
    found = rates(of(warmup(4, then=partial(OneCycleLR, max_lr=0.3)), 16), 16)
    assert found[4:] == rates(partial(OneCycleLR, max_lr=0.3, total_steps=12), 12)
    found = rates(of(warmup(4, then=cosine_with_warmup(cooldown=0.25)), 16), 16)
    assert found[4:] == rates(of(cosine_with_warmup(cooldown=3), 12), 12)


def test_every_group_rises_to_its_own_rate_also_if_it_is_a_tensor() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [
        {"params": [parameters[0]], "lr": torch.tensor(0.5)},
        {"params": [parameters[1]], "lr": torch.tensor(0.25)},
    ]
    optimizer = torch.optim.Adam(groups, lr=torch.tensor(1.0), capturable=False, foreach=False)
    scheduler = warmup(1, then=partial(ExponentialLR, gamma=0.5))(optimizer)
    tensors = [group["lr"] for group in optimizer.param_groups]
    found = []
    for _ in range(3):
        found.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    assert found == [[0.25, 0.125], [0.5, 0.25], [0.25, 0.125]]
    assert all(group["lr"] is tensor for group, tensor in zip(optimizer.param_groups, tensors, strict=True))


# ---- as part of training ---------------------------------------------------------------------------------------------


FACTORIES: dict[str, Factory] = {
    "cosine_with_warmup": cosine_with_warmup(warmup=2, cooldown=0.2, min_factor=0.1),
    "one_cycle": one_cycle(warmup=3),
    "piecewise": piecewise({2: 0.5, 5: 0.1}),
    "piecewise of the run": piecewise({0.5: 2.0, 1.0: 0.0}, interpolate=True),
    "polynomial": polynomial(power=2.0, end_factor=0.1, warmup=2),
    "warmup": warmup(3, then=partial(StepLR, step_size=2)),
    "warmup of the run": warmup(0.2, then=partial(OneCycleLR, max_lr=0.3)),
    "warmup_stable_decay": warmup_stable_decay(warmup=2, decay=0.3, shape="1-sqrt"),
}
FACTORIES |= {f"warmup, then {kind}": warmup(3, then=factory) for kind, factory in SCHEDULERS.items()}


def build() -> Engine:
    return kit.build(linear(5, 2), optimizer=partial(SGD, lr=0.4, momentum=0.9))


def recorded(engine: Engine) -> list[float]:
    used: list[float] = []

    @engine.on(Events.OPTIMIZER_STEP_STARTED)
    def note(engine: Engine) -> None:
        assert engine.state.update.optimizer is not None
        used.append(engine.state.update.optimizer.param_groups[0]["lr"])

    return used


@pytest.mark.filterwarnings("ignore:C05:signalfire.FindingWarning")
@pytest.mark.filterwarnings("ignore:C06:signalfire.FindingWarning")
@pytest.mark.parametrize("kind", FACTORIES)
@pytest.mark.filterwarnings("ignore:W18")
def test_what_is_simulated_is_what_training_uses(kind: str) -> None:
    handler = LRScheduling(FACTORIES[kind])
    engine = build()
    used = recorded(engine)
    engine.attach(handler, GradientAccumulation(2))
    engine.run(batches(5, targets=2), max_epochs=5)
    assert len(used) == 15
    assert len(set(used)) > 2
    assert LRScheduling(FACTORIES[kind]).simulate(15, lr=0.4) == used


@pytest.mark.moderate
@pytest.mark.parametrize("kind", spread(FACTORIES, 7))
@pytest.mark.filterwarnings("ignore:W18")
@pytest.mark.filterwarnings("ignore:C0[56]:signalfire.FindingWarning")
def test_a_schedule_that_is_saved_goes_on_bit_for_bit(kind: str) -> None:
    """`check_handler` saves after every iteration, and loads with ``weights_only=True``."""
    check_handler(build, lambda: LRScheduling(FACTORIES[kind]), batches(5, targets=2), max_epochs=3)


@pytest.mark.parametrize("kind", FACTORIES)
def test_a_factory_can_be_pickled_and_used_again(kind: str) -> None:
    copy = pickle.loads(pickle.dumps(FACTORIES[kind]))
    assert LRScheduling(copy).simulate(15, lr=0.4) == LRScheduling(FACTORIES[kind]).simulate(15, lr=0.4)


def test_factories_with_the_same_options_are_equal() -> None:
    assert cosine_with_warmup(warmup=3) == cosine_with_warmup(warmup=3) != cosine_with_warmup(warmup=4)
    assert piecewise({2: 0.5}) == piecewise({2: 0.5}) != piecewise({2: 0.5}, interpolate=True)
    assert "warmup=3" in repr(cosine_with_warmup(warmup=3))


def test_a_saved_state_brings_its_own_numbers() -> None:
    """A schedule that is loaded continues as it was built, though the one that loads it was built for a shorter run."""
    one, other = optimizer_of(0.4), optimizer_of(0.4)
    scheduler, loading = cosine_with_warmup()(one, total_steps=20), cosine_with_warmup()(other, total_steps=5)
    buffer = io.BytesIO()
    torch.save(scheduler.state_dict(), buffer)
    buffer.seek(0)
    loading.load_state_dict(torch.load(buffer, weights_only=True))
    for optimizer, each in ((one, scheduler), (other, loading)):
        optimizer.step()
        each.step()
    assert one.param_groups[0]["lr"] == other.param_groups[0]["lr"]


def test_a_schedule_that_counts_in_steps_alone_does_not_bound_the_run() -> None:
    for factory in (piecewise({2: 0.5}), warmup(3, then=partial(StepLR, step_size=2))):
        engine = build()
        engine.attach(LRScheduling(factory))
        engine.run(iter(batches(5, targets=2)), max_epochs=1)  # without a length
        engine = build()
        engine.attach(LRScheduling(factory))
        engine.run(batches(5, targets=2), max_epochs=1)
        engine.run(batches(5, targets=2), max_epochs=2)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_what_does_not_fit_into_the_run_is_refused_when_it_is_built() -> None:
    message = r"cosine_with_warmup\(warmup=12\): these arguments add up to 12 steps, but the run has only 10"
    engine = build()
    engine.attach(LRScheduling(cosine_with_warmup(warmup=12)))
    with pytest.raises(ValueError, match=message):
        engine.run(batches(5, targets=2), max_epochs=2)
    assert engine.state.iteration == 0
    assert "step" not in vars(engine.updates[0].optimizer)
    with pytest.raises(ValueError, match=r"warmup=0\.5, decay=6\): these arguments add up to 11 steps"):
        warmup_stable_decay(warmup=0.5, decay=6)(optimizer_of(0.4), total_steps=10)
    with pytest.raises(ValueError, match=r"polynomial\(warmup=11\)"):
        polynomial(warmup=11)(optimizer_of(0.4), total_steps=10)
    with pytest.raises(ValueError, match=r"piecewise\(factors=11\)"):
        piecewise({11: 0.5, 0.5: 1})(optimizer_of(0.4), total_steps=10)
    with pytest.raises(ValueError, match=r"one_cycle\(warmup=11\)"):
        one_cycle(warmup=11)(optimizer_of(0.4), total_steps=10)
    with pytest.raises(ValueError, match=r"one_cycle\(warmup=1\.0\).*leaves none"):
        one_cycle(warmup=1.0)(optimizer_of(0.4), total_steps=10)
    with pytest.raises(ValueError, match=r"warmup\(amount=11\): these arguments add up to 11"):
        warmup(11, then=CosineAnnealingLR)(optimizer_of(0.4), total_steps=10)
    with pytest.raises(ValueError, match=r"warmup\(amount=10\).*leaves none for the schedule"):
        warmup(10, then=CosineAnnealingLR)(optimizer_of(0.4), total_steps=10)


def test_shares_that_add_up_to_more_than_the_run_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"cosine_with_warmup\(warmup=0\.6, cooldown=0\.5\).*more than 1"):
        cosine_with_warmup(warmup=0.6, cooldown=0.5)
    with pytest.raises(ValueError, match=r"warmup_stable_decay\(warmup=0\.9, decay=0\.2\).*more than 1"):
        warmup_stable_decay(warmup=0.9)


@pytest.mark.parametrize("steps", [5, 7, 9, 10, 100])
def test_shares_that_add_up_to_one_fit_into_every_run(steps: int) -> None:
    for a, b in ((0.3, 0.7), (0.1, 0.9), (0.29, 0.71), (0.5, 0.5)):
        found = rates(of(cosine_with_warmup(warmup=a, cooldown=b), steps), steps)
        assert sum(rate == 0 for rate in found) == math.floor(round(b * steps, 6))


def test_a_factory_that_does_not_get_the_length_of_the_run_says_so() -> None:
    for factory in (cosine_with_warmup(), one_cycle(), piecewise({0.5: 1}), warmup(0.1, then=piecewise({5: 0.5}))):
        for wrong in (None, 0, 2.5, True):
            with pytest.raises(ValueError, match=rf"total_steps.*{wrong}.*use LRScheduling"):
                factory(optimizer_of(0.4), total_steps=wrong)
    engine = build()
    engine.attach(LRScheduling(cosine_with_warmup()))
    with pytest.raises(ValueError, match=r"cosine_with_warmup.*needs total_steps.*max_steps="):
        engine.run(iter(batches(5, targets=2)), max_epochs=1)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: cosine_with_warmup(warmup=1.5),
            ValueError,
            r"cosine_with_warmup\(warmup=1\.5\).*or an int \(number of steps\)",
        ),
        (lambda: cosine_with_warmup(warmup=-1), ValueError, r"cosine_with_warmup\(warmup=-1\)"),
        (lambda: cosine_with_warmup(cooldown=-0.1), ValueError, r"cosine_with_warmup\(cooldown=-0\.1\)"),
        (lambda: cosine_with_warmup(warmup=cast(Any, "5")), TypeError, r"cosine_with_warmup\(warmup='5'\)"),
        (lambda: cosine_with_warmup(warmup=True), TypeError, r"cosine_with_warmup\(warmup=True\)"),
        (lambda: cosine_with_warmup(warmup=math.nan), ValueError, r"cosine_with_warmup\(warmup=nan\)"),
        (lambda: cosine_with_warmup(min_factor=2), ValueError, r"cosine_with_warmup\(min_factor=2\)"),
        (lambda: warmup_stable_decay(shape="sqrt"), ValueError, r"\(shape='sqrt'\).*'linear', 'cosine' or '1-sqrt'"),
        (lambda: warmup_stable_decay(decay=1.1), ValueError, r"warmup_stable_decay\(decay=1\.1\)"),
        (lambda: polynomial(power=0), ValueError, r"polynomial\(power=0\)"),
        (lambda: polynomial(end_factor=-1), ValueError, r"polynomial\(end_factor=-1\)"),
        (lambda: piecewise({}), ValueError, r"piecewise\(factors=\{\}\)"),
        (lambda: piecewise({3: -1}), ValueError, r"piecewise\(factors\[3\]=-1\)"),
        (lambda: piecewise({-3: 1}), ValueError, r"piecewise\(factors=-3\)"),
        (lambda: piecewise({3: math.inf}), ValueError, r"piecewise\(factors\[3\]=inf\)"),
        (lambda: one_cycle(pct_start=0.3), TypeError, r"one_cycle\(pct_start=0\.3\).*use warmup="),
        (lambda: one_cycle(div=3), TypeError, r"one_cycle\(div=3\).*div_factor"),
        (lambda: one_cycle(warmup=2.0), ValueError, r"one_cycle\(warmup=2\.0\)"),
        (lambda: warmup(5, then=cast(Any, StepLR(optimizer_of(0.4), 3))), TypeError, r"warmup\(then=.*factory"),
        (lambda: warmup(5, then=partial(ReduceLROnPlateau, patience=2)), ValueError, "ReduceLROnPlateau.*metric"),
        (lambda: warmup(1.5, then=StepLR), ValueError, r"warmup\(amount=1\.5\)"),
        (lambda: warmup(5, then=StepLR, start_factor=-0.5), ValueError, r"warmup\(start_factor=-0\.5\)"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_two_factors_for_one_step_are_refused() -> None:
    with pytest.raises(ValueError, match=r"two factors apply to step 5"):
        piecewise({5: 1, 0.5: 2})(optimizer_of(0.4), total_steps=10)


def test_a_warmup_in_front_of_what_it_cannot_drive_is_refused_when_it_is_built() -> None:
    with pytest.raises(ValueError, match=r"ReduceLROnPlateau, whose step\(\) needs arguments"):
        warmup(5, then=lambda optimizer: ReduceLROnPlateau(optimizer))(optimizer_of(0.4))
    with pytest.raises(TypeError, match=r"returned 3, which is not a scheduler"):
        warmup(5, then=lambda optimizer: 3)(optimizer_of(0.4))
