"""The learning-rate finder: a sweep over rates, which leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from ..authoring.checks import check_choice
from ..core.blame import warn
from ..core.connection import Phase
from ..core.events import Events
from ..core.handler import Handler, on
from ..runs.rehearsal import check_engine, rehearsal
from .curve import LearningRateCurve

if TYPE_CHECKING:
    from ..core.update import UpdateState
    from ..engine import Engine

__all__ = ["find_learning_rate"]

_NAME = "find_learning_rate"
_SMOOTHING = 0.98
"""Share of the smoothed loss that stays with each further loss, as in fastai and Lightning."""

_SETTLED = 5
"""From so many losses on, the smoothed loss can be the smallest one: a mean of fewer is mostly noise."""

_LATEST = 3
"""So many losses in a row are high where the loss diverges; a batch with an outlier is no divergence."""


def find_learning_rate(
    engine: Engine,
    data: Iterable[Any],
    *,
    low: float = 1e-7,
    high: float = 10.0,
    steps: int = 100,
    spacing: Literal["exponential", "linear"] = "exponential",
    diverges: float | None = 4.0,
    update: str | None = None,
) -> LearningRateCurve:
    """LR finder: trains some steps with a rising learning rate, records the losses, and restores everything.

    Each optimizer step has a higher learning rate than the previous one; with gradient accumulation, a step has several batches,
    whose mean loss is recorded. Learning rates of several parameter groups keep their ratios: the largest one follows the sweep.
    Handlers that affect the step work as in training: clipping, mixing, precision, several processes. All others are disabled for
    the sweep: logs, checkpoints, validation, averages, schedules, patience, guards against non-finite losses. Your functions
    connected in Phase.CHANGE are called as in training; their changes outside the engine, such as to a scheduler that they step,
    are not undone.

    Afterwards weights, optimizers, handlers, counters, random generators and the position in the data are restored, also after an
    error or Ctrl-C, so the following run is the same as without the sweep.

    Args:
        engine: The engine to train; it must not be running.
        data: The training data. If it has too few batches, the sweep starts over at its beginning, with a warning.
        low, high: The first and the last learning rate.
        steps: Number of learning rates; each is used for one optimizer step.
        spacing: Spacing of the learning rates: "exponential" for equal factors, "linear" for equal differences.
        diverges: Factor that ends the sweep once the smoothed loss and each of the last three losses exceed the smallest smoothed
            loss so far by it, or a loss is not finite; None ends only at ``high``. Losses are smoothed exponentially, with bias
            correction, since those of single batches are noisy; a batch with an outlier is no divergence. A smallest loss of zero
            or less never counts as exceeded.
        update: The name of the update whose learning rate is swept; required if the engine has several.

    Returns:
        The curve, with its `suggestion`, `table` and `plot`.

    Raises:
        ValueError: for invalid bounds, or an engine that does not train.
        TypeError: for data that can be iterated only once.

    Source:
        Smith, "Cyclical Learning Rates for Training Neural Networks" (WACV 2017).

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> model = torch.nn.Linear(1, 1)
        >>> step = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> batch = torch.ones(4, 1), torch.zeros(4, 1)
        >>> curve = find_learning_rate(
        ...     Engine(step, model=model), [batch] * 20, low=1e-3, high=1.0, steps=20
        ... )
        >>> len(curve), curve.rates[0], curve.diverged
        (20, 0.001, False)
    """
    check_engine(engine, f"{_NAME}()")
    rates = _rates(low, high, steps, spacing)
    sweep = _Sweep(rates, _update_of(engine, update), _factor(diverges))
    with rehearsal(engine, data, where=f"{_NAME}()"), engine.attach(sweep):
        reason = engine.run(data, max_iters=engine.state.iteration + _ENOUGH, check=False).stop_reason
    _report(sweep, reason)
    return LearningRateCurve(
        tuple(rates[: len(sweep.losses)]), tuple(sweep.losses), low=low, high=high, diverged=sweep.diverged,
        passes=max(sweep.passes, 1), update=sweep.update,
    )  # fmt: skip


def _update_of(engine: Engine, name: str | None) -> str:
    """The name of the update whose rate is swept."""
    if not engine.training:
        raise ValueError(f"{_NAME}({engine!r}): the engine does not train, because its updates have no optimizer")
    if name is None and len(engine.updates) > 1:
        names = ", ".join(repr(one.name) for one in engine.updates)
        raise ValueError(f"{_NAME}(): the engine has several updates: {names}; choose one with update=")
    return engine.find_update(name).name


def _factor(diverges: float | None) -> float:
    """The factor by which a loss has diverged; infinite for None."""
    if diverges is not None and not _is_number(diverges, above=1.0):
        raise ValueError(f"{_NAME}(diverges={diverges!r}): expected a factor above 1, or None")
    return math.inf if diverges is None else diverges


def _report(sweep: _Sweep, reason: str | None) -> None:
    """Report a sweep that is not what was asked for.

    Args:
        sweep: The sweep.
        reason: Why its run was stopped.
    """
    made, steps = len(sweep.losses), len(sweep.rates)
    if not made:
        raise RuntimeError(
            f"{_NAME}(): no step ran, either because the update {sweep.update!r} returned no loss or because every "
            "step was skipped"
        )
    if not sweep.complete:
        warn(f"{_NAME}(): the sweep ended after {made} of {steps} steps, because the run was stopped: {reason}")
    if sweep.passes > 1:
        warn(
            f"{_NAME}(): the data has fewer batches than the sweep needs, so the sweep made {sweep.passes} passes over "
            "the data, and later losses come from batches that the model has already seen; pass more data, or decrease "
            "steps="
        )


_ENOUGH = 10**9
"""More iterations than a sweep has: it ends itself."""


class _Sweep(Handler):
    """Sets the rate of each step, and records the mean loss of its window."""

    by_shard = True
    trains = True
    decides_alike = True

    def __init__(self, rates: list[float], update: str, diverges: float) -> None:
        super().__init__(name=_NAME)
        self.rates = rates
        self.update = update
        self.diverges = diverges
        self.losses: list[float] = []
        self.diverged = False
        self.complete = False
        self.passes = 0
        self._summed, self._sum = 0, 0.0  # losses, and their sum with exponential weights
        self._smallest = math.inf  # smoothed loss so far
        self._window: list[tuple[Tensor, float]] = []
        self._ratios: list[float] = []
        self._refused = 0  # windows in a row without a loss, or whose step was skipped though their loss was finite

    @on(Events.STARTED, phase=Phase.CONTROL, reads=["rates", "optimizer"], writes=[])
    def find_ratios(self, engine: Engine) -> None:
        """The rate of each parameter group relative to the largest one."""
        groups = _groups(engine.find_update(self.update))
        rates = [float(group.get("initial_lr", group["lr"])) for group in groups]
        if not max(rates) > 0:
            raise ValueError(f"{_NAME}(): all parameter groups of update {self.update!r} have a learning rate of 0")
        self._ratios = [rate / max(rates) for rate in rates]

    @on(Events.EPOCH_STARTED | Events.DATA_EXHAUSTED, phase=Phase.RECORD, reads=[], writes=[])
    def count_pass(self, engine: Engine) -> None:
        self.passes += 1

    @on(Events.LOSS_COMPUTED, phase=Phase.RECORD, reads=["loss", "loss_weight"], writes=[])
    def record_loss(self, engine: Engine) -> None:
        """Record a loss with its weight, such as that of a piece of a batch, or of a rank's batch among those of all."""
        update = engine.state.update
        if update.name == self.update and update.loss is not None:
            self._window.append((update.loss, float(update.weight)))

    @on(Events.OPTIMIZER_STEP_STARTED, phase=Phase.PREPARE, reads=[], writes=["rates"])
    def set_rate(self, engine: Engine) -> None:
        update = engine.state.update
        if update.name != self.update:
            return
        groups = _groups(update)
        ratios = self._ratios + [1.0] * (len(groups) - len(self._ratios))  # groups may be added in the run
        for group, ratio in zip(groups, ratios, strict=True):
            rate = self.rates[len(self.losses)] * ratio
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    @on(Events.OPTIMIZER_STEP_COMPLETED, phase=Phase.CONTROL, reads=["loss", "step", "processes"], writes=["stop"])
    def record_step(self, engine: Engine) -> None:
        """Record the mean loss of the window; end the sweep after the last rate, or where the loss diverges."""
        update = engine.state.update
        if update.name != self.update:
            return
        window, self._window = self._window, []
        losses, weights = engine.processes.sum(
            sum(float(loss) * weight for loss, weight in window if weight), float(sum(weight for _, weight in window))
        )
        loss = losses / weights if weights else None
        if loss is None or (update.skipped is not None and math.isfinite(loss)):
            self._refused += 1  # such as by a scale of float16 that is too high: the rate is tried again
            if self._refused > _MOST_REFUSED:
                engine.terminate(f"{self._refused} steps in a row were skipped", by=self.name)
            return
        self._refused = 0
        self.losses.append(loss)
        self.diverged = self._has_diverged()
        self.complete = self.diverged or len(self.losses) == len(self.rates)
        if self.complete:
            engine.terminate("the sweep is complete", by=self.name)

    def _has_diverged(self) -> bool:
        loss = self.losses[-1]
        if not math.isfinite(loss):
            return math.isfinite(self.diverges)
        self._summed += 1
        self._sum = _SMOOTHING * self._sum + (1 - _SMOOTHING) * loss
        smoothed = self._sum / (1 - _SMOOTHING**self._summed)  # with weights that add up to 1 from the first loss on
        if self._summed >= _SETTLED:
            self._smallest = min(self._smallest, smoothed)
        limit = self.diverges * self._smallest
        return smoothed > limit > 0 and min(self.losses[-_LATEST:]) > limit


_MOST_REFUSED = 30
"""So often a rate is tried again: a scale of 2**16 may have to be halved 16 times."""


def _groups(update: UpdateState) -> list[dict[str, Any]]:
    assert update.optimizer is not None
    return update.optimizer.param_groups


def _rates(low: float, high: float, steps: int, spacing: str) -> list[float]:
    for name, value in (("low", low), ("high", high)):
        if not _is_number(value, above=0.0):
            raise ValueError(f"{_NAME}({name}={value!r}): expected a learning rate above 0")
    if low >= high:
        raise ValueError(f"{_NAME}(low={low!r}, high={high!r}): low must be smaller than high")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 3:
        raise ValueError(f"{_NAME}(steps={steps!r}): expected an int of 3 or more")
    check_choice(_NAME, "spacing", spacing, ("exponential", "linear"))
    places = [step / (steps - 1) for step in range(steps)]
    if spacing == "linear":
        return [low + (high - low) * place for place in places]
    return [low * (high / low) ** place for place in places]


def _is_number(value: object, *, above: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and above < value < math.inf
