"""Learning-rate schedules for `LRScheduling`: warm-up before any scheduler, and schedules that are common in papers.

Each function returns a factory, which is called with the optimizer and, if needed, with the number of steps of the run;
`LRScheduling` passes both. All but `warmup` and `one_cycle` build a ``LambdaLR``. A factory can be pickled, compared and
printed, and used for any number of optimizers; each parameter group is scheduled relative to its own rate.

Durations are numbers of steps (int), or fractions of the run (float from 0 to 1), rounded down to whole steps. The rates below
are for the optimizer steps t = 0 ... N - 1 of a run of N steps, as multiples of the optimizer's initial rate.
"""

from __future__ import annotations

import inspect
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from signalfire.authoring import check_bool, check_choice, check_number

from ._common.torch_schedulers import base_of, missing_total

__all__ = ["cosine_with_warmup", "one_cycle", "piecewise", "polynomial", "warmup", "warmup_stable_decay"]

Factory = Callable[..., Any]

_SHAPES = ("linear", "cosine", "1-sqrt")


def warmup(amount: float, then: Factory, *, start_factor: float | None = None) -> Factory:
    """Linear learning-rate warm-up before any torch scheduler.

    For W steps, the learning rate rises linearly to the first rate of ``then``; at step t it is ``s + (1 - s) * t / W`` times
    this rate. From step W on, the rate follows ``then`` from step 0, as in a run that is W steps shorter. Fractions in ``then``
    are fractions of that shorter run. As in torch's LinearLR, the full learning rate is reached after the W steps, not at the
    last of them.

    First rate: ``s``; after the warm-up: as ``then``.

    Args:
        amount: Length of the warm-up, in steps or as a fraction of the run.
        then: Factory of the scheduler that follows, as for `LRScheduling`. If the factory requires ``total_steps`` or ``T_max``
            and you do not set it, the number of steps after the warm-up is filled in.
        start_factor: Initial factor s. By default 1 / (W + 1), so no step has a learning rate of 0.

    Source:
        Goyal et al., "Accurate, Large Minibatch SGD" (2017), https://arxiv.org/abs/1706.02677

    Example:
        >>> import torch
        >>> from torch.optim.lr_scheduler import ExponentialLR
        >>> factory = warmup(3, then=partial(ExponentialLR, gamma=0.5))
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> scheduler, rates = factory(optimizer), []
        >>> for step in range(6):
        ...     rates.append(optimizer.param_groups[0]["lr"])
        ...     optimizer.step(), scheduler.step()
        (None, None)...
        >>> rates
        [0.25, 0.5, 0.75, 1.0, 0.5, 0.25]
    """
    amount = _amount("warmup", "amount", amount)
    if not callable(then):
        raise TypeError(
            f"warmup(then={then!r}): expected a factory, such as partial(StepLR, step_size=30), not a scheduler"
        )
    if base_of(then) is ReduceLROnPlateau:
        raise ValueError("warmup(then=ReduceLROnPlateau): its step() needs a metric; use LRScheduling(warmup=) instead")
    if start_factor is not None:
        start_factor = _factor("warmup", "start_factor", start_factor)
    missing = missing_total(then)
    kind = _Warmup if isinstance(amount, int) and missing is None else _WarmupOfRun
    return kind(amount, then, start_factor, missing)


def cosine_with_warmup(*, warmup: float = 0, cooldown: float = 0, min_factor: float = 0.0) -> Factory:
    """Cosine schedule with linear warm-up and a cooldown at the lowest learning rate.

    With W steps of warm-up, C of cooldown and D = N - W - C between them, the factor at step t is ``(t + 1) / (W + 1)`` for
    t < W, then ``m + (1 - m) * (1 + cos(pi * (t - W) / D)) / 2``, and m in the last C steps.

    First rate: 1 / (W + 1), which is 1 without a warm-up. Last rate: m with a cooldown, otherwise one step of the cosine above m.

    Args:
        warmup: Length of the warm-up, in steps or as a fraction of the run.
        cooldown: Length of the cooldown, in steps or as a fraction of the run.
        min_factor: Lowest factor m.

    Source:
        Loshchilov and Hutter, "SGDR" (ICLR 2017), https://arxiv.org/abs/1608.03983

    Example:
        >>> from signalfire.handlers import LRScheduling
        >>> schedule = LRScheduling(cosine_with_warmup(warmup=1, cooldown=0.2))
        >>> [round(rate, 2) for rate in schedule.simulate(10, lr=1.0)]
        [0.5, 1.0, 0.95, 0.81, 0.61, 0.39, 0.19, 0.05, 0.0, 0.0]
    """
    return _phases("cosine_with_warmup", "cosine", warmup=warmup, cooldown=cooldown, min_factor=min_factor)


def warmup_stable_decay(
    *, warmup: float = 0, decay: float = 0.2, shape: str = "linear", min_factor: float = 0.0
) -> Factory:
    """Warmup-stable-decay schedule (WSD, trapezoidal): linear warm-up, a long constant phase, and a short decay.

    A longer run can continue from the stable phase; a cosine schedule would have to restart. With W steps of warm-up and D of
    decay, the factor at step t is ``(t + 1) / (W + 1)`` for t < W, 1 up to step N - D, and then ``m + (1 - m) * h(p)`` with ``p =
    (t - (N - D)) / D``: h is ``1 - p`` (linear), ``(1 + cos(pi * p)) / 2`` (cosine) or ``1 - sqrt(p)``.

    First rate: 1 / (W + 1), which is 1 without a warm-up. Last rate: one step of the decay above m.

    Args:
        warmup: Length of the warm-up, in steps or as a fraction of the run.
        decay: Length of the decay, in steps or as a fraction of the run.
        shape: Shape of the decay: "linear", "cosine" or "1-sqrt".
        min_factor: Lowest factor m, which one more step would reach.

    Source:
        Hu et al., "MiniCPM" (2024), https://arxiv.org/abs/2404.06395; Hägele et al., "Scaling Laws and Compute-Optimal Training
        Beyond Fixed Training Durations" (NeurIPS 2024), https://arxiv.org/abs/2405.18392, who compare the shapes.

    Example:
        >>> from signalfire.handlers import LRScheduling
        >>> schedule = LRScheduling(warmup_stable_decay(warmup=3, decay=0.4))
        >>> [round(rate, 2) for rate in schedule.simulate(10, lr=1.0)]
        [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    check_choice("warmup_stable_decay", "shape", shape, _SHAPES)
    return _phases("warmup_stable_decay", shape, warmup=warmup, decay=decay, min_factor=min_factor)


def polynomial(*, power: float = 1.0, end_factor: float = 0.0, warmup: float = 0) -> Factory:
    """Polynomial decay with linear warm-up.

    With W steps of warm-up and D = N - W, the factor at step t is ``(t + 1) / (W + 1)`` for t < W and then
    ``e + (1 - e) * (1 - (t - W) / D) ** power``. Without warm-up and with e = 0 this is torch's PolynomialLR.

    First rate: 1 / (W + 1), which is 1 without a warm-up. Last rate: ``e + (1 - e) / D ** power``.

    Args:
        power: Exponent; 1 is linear.
        end_factor: Factor e that one more step would reach.
        warmup: Length of the warm-up, in steps or as a fraction of the run.

    Example:
        >>> from signalfire.handlers import LRScheduling
        >>> [round(rate, 2) for rate in LRScheduling(polynomial(power=2.0)).simulate(4, lr=1.0)]
        [1.0, 0.56, 0.25, 0.06]
    """
    power = float(check_number("polynomial", "power", power, above=0))
    end_factor = _factor("polynomial", "end_factor", end_factor)
    return _phases("polynomial", "polynomial", warmup=warmup, min_factor=end_factor, power=power)


def one_cycle(max_lr: float | Sequence[float] | None = None, *, warmup: float = 0.3, **options: Any) -> Factory:
    """One-cycle schedule: torch's OneCycleLR with a warm-up in steps or as a fraction, and momentum cycled inversely.

    First rate: max_lr / 25. The last step of the warm-up has the highest rate, max_lr. Last rate: max_lr / 250,000. (With
    OneCycleLR's defaults ``div_factor=25.0`` and ``final_div_factor=1e4``.)

    Args:
        max_lr: Highest learning rate, or one for each parameter group; by default the optimizer's initial learning rates.
        warmup: Length of the warm-up, in steps or as a fraction of the run: torch's ``pct_start``.
        options: Additional arguments of OneCycleLR, such as ``div_factor`` or ``cycle_momentum=False``.

    Source:
        Smith and Topin, "Super-Convergence" (2018), https://arxiv.org/abs/1708.07120

    Example:
        >>> from signalfire.handlers import LRScheduling
        >>> factory = one_cycle(warmup=3, anneal_strategy="linear", div_factor=4.0)
        >>> [round(rate, 2) for rate in LRScheduling(factory).simulate(8, lr=1.0)]
        [0.25, 0.62, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0]
    """
    warmup = _amount("one_cycle", "warmup", warmup)
    own = {"optimizer", "max_lr", "total_steps", "epochs", "steps_per_epoch", "pct_start", "last_epoch"}
    known = sorted(set(inspect.signature(OneCycleLR).parameters) - own)
    for option, value in options.items():
        if option not in known:
            way_out = "use warmup=" if option == "pct_start" else f"the options are max_lr, warmup, {', '.join(known)}"
            raise TypeError(f"one_cycle({option}={value!r}): there is no option {option}; {way_out}")
    return _OneCycle(max_lr, warmup, tuple(sorted(options.items())))


def piecewise(factors: Mapping[float, float], *, interpolate: bool = False) -> Factory:
    """Piecewise constant or piecewise linear schedule.

    First rate: 1, unless a factor is given for step 0. Last rate: the last factor.

    Args:
        factors: ``{step: factor}``; each applies from its step on, and 1 before the first. Steps may be fractions of the run.
        interpolate: Whether to interpolate linearly between the factors, starting with 1 at step 0 unless that is given.

    Example:
        >>> from signalfire.handlers import LRScheduling
        >>> schedule = LRScheduling(piecewise({2: 0.5, 5: 0.1}))
        >>> [round(rate, 2) for rate in schedule.simulate(6, lr=1.0)]
        [1.0, 1.0, 0.5, 0.5, 0.5, 0.1]
        >>> schedule = LRScheduling(piecewise({0: 0.0, 2: 1.0, 1.0: 0.0}, interpolate=True))
        >>> [round(rate, 2) for rate in schedule.simulate(6, lr=1.0)]
        [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]
    """
    if not isinstance(factors, Mapping) or not factors:
        raise ValueError(f"piecewise(factors={factors!r}): expected a non-empty mapping {{step: factor}}")
    points: list[tuple[int | float, float]] = []
    for at, factor in factors.items():
        place = _amount("piecewise", "factors", at)
        points.append((place, float(check_number("piecewise", f"factors[{at!r}]", factor, least=0))))
    absolute = all(isinstance(at, int) for at, _ in points)
    made = (_Piecewise if absolute else _PiecewiseOfRun)(
        tuple(points), check_bool("piecewise", "interpolate", interpolate)
    )
    if absolute:
        made.steps(None)  # raises an error for two factors at one step
    return made


# ---- factories: plain data, so that they can be pickled, compared and printed ----------------------------------------


@dataclass(frozen=True)
class _Warmup:
    """Takes no ``total_steps``, so `LRScheduling` does not tie the run to its length."""

    amount: int | float
    then: Factory
    start_factor: float | None
    missing: str | None

    def build(self, optimizer: Optimizer, total_steps: int | None) -> _WarmupLR:
        rising, arguments = self.amount, {}
        if total_steps is not None:
            (rising,) = _steps("warmup", total_steps, amount=self.amount)
            if self.missing is not None:
                if rising >= total_steps:
                    raise ValueError(
                        f"warmup(amount={self.amount!r}): the warm-up takes all {total_steps} steps of the run and "
                        "leaves none for the schedule that follows; use a shorter warm-up"
                    )
                arguments[self.missing] = total_steps - rising
        assert isinstance(rising, int)
        start = 1 / (rising + 1) if self.start_factor is None else self.start_factor
        return _WarmupLR(optimizer, partial(self.then, **arguments) if arguments else self.then, rising, start)

    def __call__(self, optimizer: Optimizer) -> _WarmupLR:
        return self.build(optimizer, None)


class _WarmupOfRun(_Warmup):
    def __call__(self, optimizer: Optimizer, total_steps: int | None = None) -> _WarmupLR:
        return self.build(optimizer, _check_total("warmup", total_steps))


@dataclass(frozen=True)
class _Phases:
    name: str
    shape: str
    warmup: int | float
    decay: int | float | None
    cooldown: int | float
    min_factor: float
    power: float

    def __call__(self, optimizer: Optimizer, total_steps: int | None = None) -> LambdaLR:
        total = _check_total(self.name, total_steps)
        amounts = {"warmup": self.warmup, "cooldown": self.cooldown}
        if self.decay is not None:
            amounts["decay"] = self.decay
        rising, low, *falling = _steps(self.name, total, **amounts)
        end = total - low
        begin = end - falling[0] if falling else rising
        return LambdaLR(optimizer, _PhasesFactor(self.shape, rising, begin, end, self.min_factor, self.power))


@dataclass(frozen=True)
class _OneCycle:
    max_lr: float | Sequence[float] | None
    warmup: int | float
    options: tuple[tuple[str, Any], ...]

    def __call__(self, optimizer: Optimizer, total_steps: int | None = None) -> OneCycleLR:
        total = _check_total("one_cycle", total_steps)
        if isinstance(self.warmup, int):
            (rising,) = _steps("one_cycle", total, warmup=self.warmup)
            share = rising / total
        else:
            share = self.warmup
        if share == 1:
            raise ValueError(
                f"one_cycle(warmup={self.warmup!r}): the warm-up takes all {total} steps of the run and leaves none "
                "for the decay; use a shorter warm-up"
            )
        # OneCycleLR overwrites the groups' rates; a second one finds the highest rate in the group's "max_lr".
        largest: Any = self.max_lr
        if largest is None:
            largest = [float(group.get("max_lr", group["lr"])) for group in optimizer.param_groups]
        elif isinstance(largest, Sequence):
            largest = list(largest)
        return OneCycleLR(optimizer, largest, total_steps=total, pct_start=share, **dict(self.options))


@dataclass(frozen=True)
class _Piecewise:
    points: tuple[tuple[int | float, float], ...]
    interpolate: bool

    def steps(self, total_steps: int | None) -> list[tuple[int, float]]:
        """The points in order, from step 0, in whole steps."""
        resolved: dict[int, float] = {}
        for at, factor in self.points:
            if total_steps is not None:
                (place,) = _steps("piecewise", total_steps, factors=at)
            else:
                assert isinstance(at, int)
                place = at
            if place in resolved:
                raise ValueError(f"piecewise(factors={dict(self.points)}): two factors apply to step {place}; omit one")
            resolved[place] = factor
        return sorted({0: 1.0, **resolved}.items())

    def __call__(self, optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, _PiecewiseFactor(self.steps(None), self.interpolate))


class _PiecewiseOfRun(_Piecewise):
    def __call__(self, optimizer: Optimizer, total_steps: int | None = None) -> LambdaLR:
        return LambdaLR(
            optimizer, _PiecewiseFactor(self.steps(_check_total("piecewise", total_steps)), self.interpolate)
        )


# ---- callables and schedulers: torch saves the attributes of a LambdaLR's callables with its state -------------------


class _PhasesFactor:
    def __init__(self, shape: str, rising: int, begin: int, end: int, least: float, power: float) -> None:
        self.shape = shape
        self.rising = rising
        self.begin = begin
        self.end = end
        self.least = least
        self.power = power

    def __call__(self, step: int) -> float:
        if step < self.rising:
            return (step + 1) / (self.rising + 1)
        if step < self.begin:
            return 1.0
        if step >= self.end:
            return self.least
        progress = (step - self.begin) / (self.end - self.begin)
        if self.shape == "cosine":
            height = (1 + math.cos(math.pi * progress)) / 2
        elif self.shape == "1-sqrt":
            height = 1 - math.sqrt(progress)
        else:
            height = (1 - progress) ** self.power
        return self.least + (1 - self.least) * height


class _PiecewiseFactor:
    def __init__(self, points: list[tuple[int, float]], interpolate: bool) -> None:
        self.points = points
        self.interpolate = interpolate

    def __call__(self, step: int) -> float:
        later = bisect_right([at for at, _ in self.points], step)
        at, factor = self.points[later - 1]
        if not self.interpolate or later == len(self.points):
            return factor
        until, target = self.points[later]
        return factor + (target - factor) * (step - at) / (until - at)


class _WarmupLR(LRScheduler):
    """Warms up to the initial rates of a second scheduler, then follows it.

    SequentialLR resets its second scheduler to step 0 in a way that MultiplicativeLR and SequentialLR itself do not support.
    """

    def __init__(self, optimizer: Optimizer, then: Factory, steps: int, start: float) -> None:
        scheduler = then(optimizer)
        if not hasattr(scheduler, "step") or not hasattr(scheduler, "state_dict"):
            raise TypeError(f"warmup(then=...): the factory returned {scheduler!r}, which is not a scheduler")
        if isinstance(scheduler, ReduceLROnPlateau) or hasattr(scheduler, "step_update"):
            raise ValueError(
                f"warmup(then=...): the factory returned a {type(scheduler).__name__}, whose step() needs arguments; "
                "use this scheduler without warmup()"
            )
        self._schedulers = [scheduler]
        self.steps = steps
        self.start = start
        self.goals = _rates_of(optimizer)
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        if self.last_epoch == self.steps:
            return [goal.clone() if isinstance(goal, Tensor) else goal for goal in self.goals]
        factor = self.start + (1 - self.start) * self.last_epoch / self.steps
        return [goal * factor for goal in self.goals]

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch < self.steps:
            super().step()
            return
        self.last_epoch += 1
        self._step_count += 1
        self._schedulers[0].step()
        self._last_lr = _rates_of(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        own = {key: value for key, value in vars(self).items() if key not in ("optimizer", "_schedulers")}
        then = self._schedulers[0].state_dict()
        return own | {"then": {key: value for key, value in then.items() if not callable(value)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._schedulers[0].load_state_dict(dict(state_dict["then"]))
        vars(self).update({key: value for key, value in state_dict.items() if key != "then"})


def _rates_of(optimizer: Optimizer) -> list[Any]:
    rates = [group["lr"] for group in optimizer.param_groups]
    return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]


# ---- arguments -------------------------------------------------------------------------------------------------------


def _phases(
    name: str,
    shape: str,
    *,
    warmup: float,
    decay: float | None = None,
    cooldown: float = 0,
    min_factor: float,
    power: float = 1.0,
) -> _Phases:
    warmup, cooldown = _amount(name, "warmup", warmup), _amount(name, "cooldown", cooldown)
    decay = None if decay is None else _amount(name, "decay", decay)
    given = {"warmup": warmup, "decay": decay, "cooldown": cooldown}
    shares = {argument: value for argument, value in given.items() if isinstance(value, float) and value > 0}
    if sum(shares.values()) > 1 + 1e-9:
        arguments = ", ".join(f"{argument}={value!r}" for argument, value in shares.items())
        raise ValueError(f"{name}({arguments}): the fractions of the run add up to more than 1; reduce them")
    return _Phases(name, shape, warmup, decay, cooldown, _factor(name, "min_factor", min_factor), power)


def _amount(function: str, argument: str, value: Any) -> int | float:
    """Check a duration: an int of steps, or a float that is a fraction of the run."""
    where = f"{function}({argument}={value!r})"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{where}: expected an int (number of steps), or a float from 0 to 1 (fraction of the run)")
    if isinstance(value, Integral):
        if value < 0:
            raise ValueError(f"{where}: expected 0 or more steps")
        return int(value)
    if not 0 <= float(value) <= 1:
        raise ValueError(f"{where}: expected a float from 0 to 1 (fraction of the run), or an int (number of steps)")
    return float(value)


def _factor(function: str, argument: str, value: Any) -> float:
    return float(check_number(function, argument, value, least=0, most=1))


def _steps(function: str, total_steps: int, **amounts: float) -> list[int]:
    """The durations in whole steps of a run of this length.

    Raises:
        ValueError: If they add up to more than the run.
    """
    # Rounded down, so that fractions that add up to 1 fit the run; 0.29 * 100 is slightly below 29 in floating point.
    steps = [a if isinstance(a, int) else math.floor(a * total_steps + 1e-6) for a in amounts.values()]
    if sum(steps) > total_steps:
        arguments = ", ".join(f"{argument}={value!r}" for argument, value in amounts.items() if value)
        raise ValueError(
            f"{function}({arguments}): these arguments add up to {sum(steps)} steps, but the run has only "
            f"{total_steps}; reduce the numbers, or use fractions of the run (floats)"
        )
    return steps


def _check_total(function: str, total_steps: int | None) -> int:
    if isinstance(total_steps, bool) or not isinstance(total_steps, int) or total_steps < 1:
        raise ValueError(
            f"{function}: the factory needs total_steps, the number of steps in the run, as an int of 1 or more, but "
            f"got {total_steps!r}; use LRScheduling, which passes total_steps, or partial(factory, total_steps=...)"
        )
    return total_steps
