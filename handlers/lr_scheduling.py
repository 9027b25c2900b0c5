"""Learning-rate schedules: drives any torch scheduler, stepping it only after real optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from signalfire import Engine, Events, Finding, Handler, Interval, Phase, on
from signalfire.authoring import Monitor, check_every, check_name, last_epoch, steps_to_come
from signalfire.findings import finding

from ._common.claims import LEARNING_RATE
from ._common.joint_schedule import JointSchedule
from ._common.ranks import CHECK_METRIC
from ._common.schedule_findings import ScheduledRun, schedule_findings
from ._common.simulated_rates import plot_rates, steps_of_scheduler
from ._common.torch_schedulers import (
    SCHEDULER_OPTIONS,
    base_of,
    check_drivable,
    check_factory,
    check_kind,
    different_arguments,
    given_argument,
    kind_of_scheduler,
    missing_total,
    name_of,
    restore_rates,
    set_mode,
    step,
    takes_count,
    unwrap_step,
    with_total,
)
from ._common.updates import made_step, only_update

__all__ = ["LRScheduling"]


class LRScheduling(Handler):
    """Learning-rate scheduling with any torch scheduler: stepped per optimizer step, per epoch, or by a metric.

    The scheduler is built at the start of the run, when the optimizer and the number of steps are known. A factory with an unset
    ``total_steps``, ``T_max``, ``num_training_steps`` (Hugging Face) or ``t_initial`` (timm) gets the number of scheduler steps
    in the run. The scheduler is stepped once per accumulation window, and not after a skipped step. `simulate` and `plot` show a
    schedule without training.

    Schedulers with timm's interface are stepped with ``step_update(steps)``, or with ``step(epochs)`` if they count epochs
    (``t_in_epochs``). A scheduler whose ``step`` requires an argument, such as ReduceLROnPlateau, is stepped with a metric.

    Args:
        scheduler: Factory called with the optimizer, such as ``partial(OneCycleLR, max_lr=0.1)``, one of
            `signalfire.handlers.schedules`, or ``lambda optimizer: SequentialLR(optimizer, ...)``. For several optimizers that
            step together, a mapping from some or all of their names to factories.
        every: Interval between scheduler steps without ``monitor``, such as "5steps"; by default every optimizer step. Use "1ep"
            for a scheduler that counts epochs, such as ``StepLR(step_size=30)``.
        monitor: Name of the metric for ReduceLROnPlateau, which is stepped once per new value. A factory
            ``partial(ReduceLROnPlateau, ...)`` without ``mode`` gets the metric's own direction.
        warmup: With ``monitor``, the factory of a second scheduler, such as ``partial(LinearLR, start_factor=0.01,
            total_iters=500)``. It is stepped after every optimizer step, and its factor multiplies the learning rates.
        update: Name of the update whose optimizer is scheduled; required if the engine has several.

    Attributes:
        scheduler: The scheduler; None before the first run.
        warmup_scheduler: The warm-up scheduler; None before the first run and without ``warmup``.

    Example:
        >>> import torch
        >>> from functools import partial
        >>> from signalfire import Engine, Events, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.8)
        >>> from torch.optim.lr_scheduler import StepLR
        >>> engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> _ = engine.attach(LRScheduling(partial(StepLR, step_size=2, gamma=0.5), every="1ep"))
        >>> @engine.on(Events.EPOCH_STARTED)
        ... def show(engine):
        ...     print(f"epoch {engine.state.epoch}: {engine.optimizer.param_groups[0]['lr']}")
        >>> _ = engine.run([(torch.ones(4, 2), torch.ones(4, 1))], max_epochs=5)
        epoch 1: 0.8
        epoch 2: 0.8
        epoch 3: 0.4
        epoch 4: 0.4
        epoch 5: 0.2
    """

    trains = True

    other_names = {
        "interval": 'every="1it" or "1ep"',
        "frequency": 'every="1it" or "1ep"',
        "lr_scheduler": "the first argument, scheduler", **SCHEDULER_OPTIONS,
    }  # fmt: skip

    def __init__(
        self,
        scheduler: Callable[..., Any] | Mapping[str, Callable[..., Any]],
        *,
        every: str | Interval | None = None,
        monitor: str | None = None,
        warmup: Callable[[Optimizer], LRScheduler] | None = None,
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if isinstance(scheduler, Mapping):
            scheduler = JointSchedule(scheduler)
        check_factory(scheduler)
        plateau = base_of(scheduler) is ReduceLROnPlateau
        if plateau and monitor is None:
            raise ValueError("LRScheduling(ReduceLROnPlateau): the scheduler needs a metric; pass its name as monitor=")
        _check_beside_monitor(monitor, every, warmup)
        self.factory = scheduler
        self.warmup = warmup
        self.warmup_scheduler: LRScheduler | None = None
        self.warmup_event = None if warmup is None else Events.OPTIMIZER_STEP_COMPLETED
        self.every = check_every(self, "1st" if every is None else every, units=["st", "ep"])
        mode = given_argument(scheduler, "mode") if plateau else None
        self._finds_mode = plateau and mode is None
        self.monitor = None if monitor is None else Monitor("LRScheduling", monitor, mode, mode_of="ReduceLROnPlateau")
        self.update = check_name(self, "update", update)
        self.scheduler: Any = None
        self._optimizer: Any = None
        self._loaded = False  # whether the scheduler goes on from a saved one
        self._rate: Any = None  # of the first group, after the last step
        self.total: int | None = None  # the number of steps given to the factory, if any
        self.stepped = 0
        self.step_event = self.epoch_event = self.start_event = self.metric_event = self.check_metric_event = None
        if monitor is not None:
            self.start_event, self.check_metric_event = Events.STARTED, Events.EPOCH_COMPLETED
            self.metric_event = Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED
        elif self.every.unit == "st":
            self.step_event = Events.OPTIMIZER_STEP_COMPLETED
        else:
            self.epoch_event = self.every.event()

    def attached(self, engine: Engine) -> None:
        update = only_update(engine, self.update, by=self, does="is scheduled")
        engine.overrides.claim(LEARNING_RATE, by=self, target=f"of update {update.name!r}")

    @on(Events.STARTED, reads=["optimizer", "step", "window", "bounds"], writes=["rates"])
    def build(self, engine: Engine) -> None:
        """Build the scheduler: its optimizer exists and the length of the run is known."""
        update = engine.find_update(self.update)
        optimizer = update.optimizer
        assert optimizer is not None
        if self.scheduler is not None and getattr(self.scheduler, "optimizer", optimizer) is optimizer:
            self._loaded = True  # it continues
            self.check_total(engine)
            return
        self.stepped, self.total = 0, None
        self.total = self._needed_total(engine)
        if self.monitor is not None:  # for `restore_rates`: ReduceLROnPlateau does not set it, other schedulers do
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        try:
            try:
                self.scheduler = self._build_scheduler(optimizer, self.total)
            except ValueError:  # in a trial run, for a warm-up that is longer
                if self.total is None or engine.state.planned is None:
                    raise
                if (planned := self._total_steps(engine, planned=True)) is None:
                    raise
                self.total = planned
                self.scheduler = self._build_scheduler(optimizer, self.total)
            if self.warmup is not None:
                self.warmup_scheduler = self._build_warmup(optimizer)
        finally:
            unwrap_step(optimizer)
        self._optimizer, self._rate, self._loaded = optimizer, None, False

    def _needed_total(self, engine: Engine) -> int | None:
        """The number of steps to build the scheduler with; None if the factory needs none."""
        if (missing := missing_total(self.factory)) is None:
            return None
        if (total := self._total_steps(engine)) is None:
            raise ValueError(
                f"{self.name!r}: {name_of(self.factory)} needs {missing}, but the number of steps in this run is not "
                f"known; pass {missing} to the factory, or pass max_steps= or epoch_length= to run()"
            )
        return total

    def _build_warmup(self, optimizer: Optimizer) -> LRScheduler:
        assert self.warmup is not None
        scheduler = self.warmup(optimizer)
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError(
                f"{self.name!r}: warmup= returned {scheduler!r}; expected a scheduler that is stepped after each "
                "optimizer step, such as LinearLR"
            )
        return scheduler

    def _build_scheduler(self, optimizer: Optimizer, total: int | None) -> Any:
        """Build a scheduler, and check that this handler can drive it."""
        missing = missing_total(self.factory)
        scheduler = self.factory(optimizer, **({} if missing is None or total is None else {missing: max(total, 1)}))
        if not hasattr(scheduler, "step") or not hasattr(scheduler, "state_dict"):
            raise TypeError(f"{self.name!r}: the factory returned {scheduler!r}, which is not a scheduler")
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ValueError(
                f"{self.name!r}: the factory ignores the optimizer passed to it and schedules a different one, so no "
                "learning rate in this run would change; build the scheduler with the optimizer that is passed, as in "
                "lambda optimizer: StepLR(optimizer, ...)"
            )
        check_drivable(self.name, scheduler, self.every, monitored=self.monitor is not None)
        return scheduler

    @on(Events.CHECKPOINT_LOADED, reads=["optimizer", "step", "window", "bounds"], writes=["rates"])
    def check_total(self, engine: Engine) -> None:
        """Build a schedule that the loaded state lacks; raise an error if the run exceeds the steps of a schedule."""
        if engine.state.iteration and not self._loaded:  # as a plain loop builds it, with the optimizer as it is now
            self.scheduler = None
            self.build(engine)
            return
        self._loaded = False
        total = self._total_steps(engine) if self.total is not None else None
        if total is not None and self.total is not None and total > self.total:
            raise ValueError(
                f"{self.name!r}: the schedule was built for {self.total} steps, but this run extends to {total} steps; "
                f"pass the total to the factory before the first run, as in {with_total(self.factory)}. To start a new "
                "run from these weights instead, use engine.load_weights(state), or call engine.reset() on this engine"
            )

    def _total_steps(self, engine: Engine, *, planned: bool = False) -> int | None:
        """The number of scheduler steps at the end of the run, earlier runs included; None if unknown."""
        state, every = engine.state, int(self.every.value)
        if self.every.unit == "ep":
            done, last = state.epoch - state.epoch_open, last_epoch(engine)
            if planned and state.planned is not None:
                last = state.planned[0]
            return None if last is None else self.stepped + last // every - done // every
        update = engine.find_update(self.update)
        to_come = steps_to_come(engine, update, planned=planned)
        return None if to_come is None else self.stepped + (update.steps + to_come) // every - update.steps // every

    @on("step_event", phase=Phase.CONTROL, reads=["optimizer", "step"], writes=["rates"])
    def step_on_optimizer_step(self, engine: Engine) -> None:
        """Step the scheduler after an optimizer step that was not skipped."""
        if made_step(engine, self.update, self.every):
            self._step(engine)

    @on("warmup_event", phase=Phase.CONTROL, reads=["step"], writes=["rates"])
    def warm_up(self, engine: Engine) -> None:
        """Step the warm-up scheduler after an optimizer step that was not skipped."""
        if made_step(engine, self.update, self.every):
            step(self.warmup_scheduler)

    @on("epoch_event", phase=Phase.CONTROL, reads=["optimizer"], writes=["rates"])
    def step_on_epoch(self, engine: Engine) -> None:
        """Step the scheduler after an epoch."""
        self._step(engine)

    @on("start_event", phase=Phase.CONTROL, reads=["metrics"], writes=[])
    def check_metric(self, engine: Engine) -> None:
        """Find the metric's direction; raise an error for a name that nobody announced or writes."""
        assert self.monitor is not None
        if not self._finds_mode and getattr(self.scheduler, "mode", None) in ("min", "max"):
            self.monitor.given = self.scheduler.mode
        self.monitor.needs_mode = isinstance(self.scheduler, ReduceLROnPlateau)
        self.monitor.start(engine, self.name)

    @on("metric_event", phase=Phase.CONTROL, reads=["metrics"], writes=["rates"])
    def step_on_metric(self, engine: Engine) -> None:
        """Step the scheduler with a new value of the metric."""
        assert self.monitor is not None
        if (value := self.monitor.new_value(engine)) is not None:
            self.monitor.report_nan(engine, value, self.name, "which counts as no improvement")
            if isinstance(self.scheduler, ReduceLROnPlateau):
                assert self.monitor.mode is not None
                set_mode(self.scheduler, self.monitor.mode)
            self.scheduler.step(value)

    @on("check_metric_event", phase=Phase.CONTROL, rank=CHECK_METRIC, reads=["metrics"], writes=[])
    def check_metric_exists(self, engine: Engine) -> None:
        """Raise an error if the metric does not exist, or differs between the ranks of a distributed run."""
        assert self.monitor is not None
        self.monitor.require(engine)

    def _step(self, engine: Engine) -> None:
        group = self._optimizer.param_groups[0]
        if group["lr"] is not self._rate and self._rate is not None:
            self._report_change(engine, self._rate, group["lr"])
        self.stepped += 1
        self._step_scheduler(self.scheduler, self.stepped)
        self._rate = group["lr"]

    def _report_change(self, engine: Engine, last: Any, now: Any) -> None:
        """Report a learning rate that a function has changed since the schedule's last step."""
        if isinstance(last, Tensor) or abs(now - last) <= 1e-5 * abs(last):  # some states hold it in less precision
            return
        others = (one for one in engine.handlers.values() if one is not self and one.enabled)
        if any("rates" in (one.writes or ()) for other in others for one in type(other).subscriptions):
            return
        engine.findings.report(
            "W89",
            f"{self.name!r}: the learning rate was changed from {last:g} to {float(now):g} between two steps of "
            f"{type(self.scheduler).__name__}; the next step may overwrite this change or continue from the new value",
            "change learning rates only in the schedule: chain schedules with SequentialLR, or pass a LambdaLR to "
            "LRScheduling",
            self.name,
        )

    def _step_scheduler(self, scheduler: Any, stepped: int) -> None:
        """Make the scheduler's step with this number, counted from 1."""
        if takes_count(scheduler):
            count = stepped * int(self.every.value)
            (scheduler.step if self.every.unit == "ep" else scheduler.step_update)(count)
        else:
            step(scheduler)

    @overload
    def simulate(
        self,
        steps: int,
        *,
        lr: float,
        epochs: int | None = None,
        momentum: float = 0.9,
        metric_values: Sequence[float] | None = None,
    ) -> list[float]: ...

    @overload
    def simulate(
        self,
        steps: int,
        *,
        lr: Sequence[float],
        epochs: int | None = None,
        momentum: float = 0.9,
        metric_values: Sequence[float] | None = None,
    ) -> list[list[float]]: ...

    def simulate(
        self,
        steps: int,
        *,
        lr: float | Sequence[float],
        epochs: int | None = None,
        momentum: float = 0.9,
        metric_values: Sequence[float] | None = None,
    ) -> list[float] | list[list[float]]:
        """Compute the learning rates of this schedule in a run, without training and without a model or optimizer.

        Args:
            steps: Number of optimizer steps of the run.
            lr: Initial learning rate of the optimizer, or one per parameter group.
            epochs: Number of epochs of equal length in these steps, for a schedule stepped after epochs.
            momentum: Momentum of the SGD optimizer that replaces the real one; some schedules use it.
            metric_values: For ReduceLROnPlateau, the values of its metric in order, evenly spread over the steps, with the
                last one after the last step.

        Returns:
            The learning rate of each step; with several groups, one such list per group.

        Raises:
            ValueError: If ``epochs`` or ``metric_values`` is missing for a schedule that needs it.

        Example:
            >>> from functools import partial
            >>> from torch.optim.lr_scheduler import StepLR
            >>> LRScheduling(partial(StepLR, step_size=2, gamma=0.5)).simulate(6, lr=0.8)
            [0.8, 0.8, 0.4, 0.4, 0.2, 0.2]
        """
        scheduler_steps = steps_of_scheduler(
            self.every, steps, epochs, metric_values, by_metric=self.monitor is not None
        )
        initial_rates = _as_list(lr)
        groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in initial_rates]
        optimizer = torch.optim.SGD(groups, lr=initial_rates[0], momentum=momentum)
        scheduler = self._build_scheduler(optimizer, len(scheduler_steps))
        if self._finds_mode and self.monitor is not None and self.monitor.mode is not None:  # known from a run
            set_mode(scheduler, self.monitor.mode)
        warmup = None if self.warmup is None else self._build_warmup(optimizer)
        rates: list[list[float]] = [[] for _ in groups]
        stepped = 0
        for optimizer_step in range(1, steps + 1):
            for group, used in zip(optimizer.param_groups, rates, strict=True):
                used.append(float(group["lr"]))
            if warmup is not None:
                step(warmup)
            while stepped < len(scheduler_steps) and scheduler_steps[stepped] <= optimizer_step:
                stepped += 1
                if metric_values is not None:
                    scheduler.step(metric_values[stepped - 1])
                else:
                    self._step_scheduler(scheduler, stepped)
        return rates if isinstance(lr, Sequence) else rates[0]

    def plot(
        self,
        path: str | Path,
        steps: int,
        *,
        lr: float | Sequence[float],
        epochs: int | None = None,
        momentum: float = 0.9,
        metric_values: Sequence[float] | None = None,
    ) -> None:
        """Plot the learning rates of `simulate` over the optimizer steps.

        Args:
            path: Path of the image; its extension selects the format.
            steps, lr, epochs, momentum, metric_values: As for `simulate`.

        Raises:
            ImportError: If matplotlib is not installed; the extra ``examples`` includes it.
        """
        rates = self.simulate(steps, lr=_as_list(lr), epochs=epochs, momentum=momentum, metric_values=metric_values)
        plot_rates(path, rates)

    def findings(self, engine: Engine) -> Iterator[Finding]:
        """Report mismatches between the schedule and the run, and optimizers that no schedule drives."""
        schedules = (one for one in engine.handlers.values() if isinstance(one, LRScheduling))
        driven = {engine.find_update(one.update).name for one in schedules}
        if left := [update.name for update in engine.updates if update.name not in driven]:
            rest = f"{self.name!r} schedules only some updates; no LRScheduling changes the learning rates of {', '.join(left)}"
            yield finding("C23", rest, "to schedule them, attach one LRScheduling(..., update=) for each", [self.name])
        total = self._total_steps(engine)
        if self.monitor is None and total and self.total in (None, total):  # the run refuses a longer one
            try:
                scheduler = self.scheduler or self._build_scheduler(_stand_in(), total)
            except Exception:  # it needs the real optimizer; the run raises what is wrong
                return
            run = ScheduledRun.of(engine, self.name, self.every.unit, total, engine.find_update(self.update))
            yield from schedule_findings(scheduler, run)

    def state_dict(self) -> dict[str, Any]:
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return {
            "scheduler": scheduler and {key: value for key, value in scheduler.items() if not callable(value)},
            "kind": self._kind,
            "total": self.total,
            "stepped": self.stepped,
            "monitor": self.monitor and self.monitor.state_dict(),
        } | ({} if self.warmup_scheduler is None else {"warmup": self.warmup_scheduler.state_dict()})

    @property
    def _kind(self) -> str | None:
        """The classes of the schedulers; None before they are built."""
        return None if self.scheduler is None else kind_of_scheduler(self.scheduler, self.warmup_scheduler)

    def _report_arguments(self, state: Mapping[str, Any]) -> None:
        """Report arguments inside of a factory that a saved state replaces; those of a partial are reported as settings."""
        filled_in = self.total is not None  # with a number of steps, which may be that of another run
        if self.engine is None or filled_in or isinstance(self.factory, partial):
            return
        if different := different_arguments(self.scheduler, state):
            self.engine.findings.report(
                "W32",
                f"{self.name!r}: {'; '.join(different)}",
                "use the schedule of the saved run; to continue with a different schedule, give the handler a "
                f"different name, and write load_state_dict(state, allow=[{self.name!r}, ...])",
                self.name,
                key=self.name,
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_kind(self.name, state.get("kind"), self._kind)
        self._loaded = state["scheduler"] is not None
        self.total, self.stepped, self._rate = state["total"], state["stepped"], None
        if self.monitor is not None:
            self.monitor.load_state_dict(state["monitor"])
        if state["scheduler"] is None:
            if self.scheduler is not None and self.engine is not None:  # from the optimizer's initial learning rate
                restore_rates(self.scheduler.optimizer)
            self.scheduler = self.warmup_scheduler = None
        else:
            self._report_arguments(state["scheduler"])
            self.scheduler.load_state_dict(state["scheduler"])
            if self.warmup_scheduler is not None and "warmup" in state:
                self.warmup_scheduler.load_state_dict(state["warmup"])


def _check_beside_monitor(monitor: str | None, every: object, warmup: object) -> None:
    if monitor is not None and every is not None:
        raise ValueError(
            f"LRScheduling(every={every!r}, monitor={monitor!r}): with monitor=, the scheduler is stepped at each new "
            "value of the metric, so every= does not apply; omit every="
        )
    if warmup is not None and (monitor is None or not callable(warmup)):
        raise ValueError(
            f"LRScheduling(warmup={warmup!r}): warmup= must be a factory and requires monitor=; without monitor=, "
            "use lambda optimizer: SequentialLR(optimizer, [warmup, schedule], milestones=[...])"
        )


def _stand_in() -> Optimizer:
    """An optimizer to build a scheduler with that drives nothing."""
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)


def _as_list(lr: float | Sequence[float]) -> list[float]:
    return [float(rate) for rate in lr] if isinstance(lr, Sequence) else [float(lr)]
