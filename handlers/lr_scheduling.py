"""Learning-rate schedules: any scheduler of torch, built late, stepped when a step really happened."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from signalfire import AnyEvent, Engine, Events, Handler, Interval, Monitor, Phase, check_every, on

__all__ = ["LRScheduling"]

_TOTALS = ("total_steps", "T_max")


class LRScheduling(Handler):
    """Drives a learning-rate scheduler through its ``step()``.

    The scheduler is built when the run starts, once the optimizer exists and the number of steps is known: a factory that
    takes ``total_steps`` (or ``T_max``) and was not given it gets the number of times it will be stepped. It moves after
    optimizer steps that really happened, once for each accumulation window and not after a skipped step, or after epochs.

    Args:
        scheduler: a factory that is called with the optimizer, such as ``partial(OneCycleLR, max_lr=0.1)`` or ``lambda
            optimizer: SequentialLR(optimizer, ...)``.
        every: "1st" (every optimizer step), "5st", "1ep", ...
        monitor: for ReduceLROnPlateau, the metric it watches; it is then stepped once for each new value of it.
        update: the name of the update whose optimizer is scheduled; the first by default.

    Attributes:
        scheduler: the scheduler; None before the first run.

    Example:
        >>> from torch.optim.lr_scheduler import StepLR
        >>> LRScheduling(partial(StepLR, step_size=30), every="1ep").every
        Interval(value=1, unit='ep')
    """

    trains = True

    def __init__(
        self,
        scheduler: Callable[[Optimizer], Any],
        *,
        every: str | Interval | None = None,
        monitor: str | None = None,
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if not callable(scheduler):
            raise TypeError(
                f"LRScheduling({scheduler!r}): give a factory, such as partial(StepLR, step_size=30), not a scheduler "
                "that is already built: the optimizer may not exist yet"
            )
        plateau = _base(scheduler) is ReduceLROnPlateau
        if plateau and monitor is None:
            raise ValueError("LRScheduling(ReduceLROnPlateau): give monitor=, the metric it watches")
        if monitor is not None and every is not None:
            raise ValueError(
                f"LRScheduling(every={every!r}, monitor={monitor!r}): with monitor= it moves at each new value of the "
                "metric; leave out every="
            )
        interval = check_every(self, every or "1st")
        if not isinstance(interval, Interval) or interval.unit not in ("st", "ep"):
            raise ValueError(
                f"LRScheduling(every={every!r}): a schedule follows optimizer steps or epochs: '1st' or '1ep'"
            )
        self.factory = scheduler
        self.every = interval
        self.monitor = None if monitor is None else Monitor("LRScheduling", monitor, "min")
        self.update = update
        self.scheduler: Any = None
        self.total: int | None = None  # the number of steps that the factory was given, if it was
        self.stepped = 0
        by_step = self.monitor is None and self.every.unit == "st"
        self.stepping: AnyEvent | None = Events.OPTIMIZER_STEP_COMPLETED if by_step else None
        self.epochs: AnyEvent | None = self.every.event() if self.monitor is None and not by_step else None
        self.watching = None if self.monitor is None else Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED
        self.requiring = None if self.monitor is None else Events.EPOCH_COMPLETED

    def attached(self, engine: Engine) -> None:
        engine.claim(f"the learning rate of update {engine.find_update(self.update).name!r}", by=self)

    @on(Events.STARTED)
    def build(self, engine: Engine) -> None:
        """Build the scheduler, now that its optimizer exists and the run's bounds are known."""
        update = engine.find_update(self.update)
        optimizer = update.optimizer
        assert optimizer is not None
        if self.scheduler is not None and getattr(self.scheduler, "optimizer", optimizer) is optimizer:
            self.check(engine)
            return
        self.stepped = 0
        arguments = {}
        missing = _missing_total(self.factory)
        if missing is not None:
            self.total = self._planned(engine)
            if self.total is None:
                raise ValueError(
                    f"{self.name!r}: {_told(self.factory)} needs {missing}, and how many steps this run makes is not "
                    f"known; give {missing} to the factory, or max_steps= or epoch_length= to run()"
                )
            arguments[missing] = max(self.total, 1)
        self.scheduler = self.factory(optimizer, **arguments)
        if not hasattr(self.scheduler, "step") or not hasattr(self.scheduler, "state_dict"):
            made, self.scheduler = self.scheduler, None
            raise TypeError(f"{self.name!r}: the factory returned {made!r}, which is no scheduler")
        if isinstance(self.scheduler, ReduceLROnPlateau) != (self.monitor is not None):
            raise ValueError(
                f"{self.name!r}: monitor= goes with ReduceLROnPlateau, and with nothing else; the factory "
                f"returned a {type(self.scheduler).__name__}"
            )
        # torch wraps optimizer.step only to warn about a wrong order, which the engine rules out: leave no trace.
        if hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched"):
            del optimizer.step

    @on(Events.CHECKPOINT_LOADED)
    def check(self, engine: Engine) -> None:
        """Refuse to go beyond the number of steps that the schedule was built for."""
        planned = self._planned(engine) if self.total is not None else None
        if planned is not None and self.total is not None and planned > self.total:
            raise ValueError(
                f"{self.name!r} was built for {self.total} steps, but this run goes up to {planned}; give the "
                "factory its number of steps explicitly, or begin anew with engine.reset()"
            )

    def _planned(self, engine: Engine) -> int | None:
        """How often the scheduler will have been stepped when the run reaches its bounds."""
        state, every = engine.state, int(self.every.value)
        if self.every.unit == "ep":
            done = state.epoch - state.epoch_open
            return None if state.max_epochs is None else self.stepped + state.max_epochs // every - done // every
        update = engine.find_update(self.update)
        to_come = engine.steps_to_come(update)
        return None if to_come is None else self.stepped + (update.steps + to_come) // every - update.steps // every

    @on("stepping", phase=Phase.CONTROL)
    def follow_steps(self, engine: Engine) -> None:
        """Move on after an optimizer step that happened."""
        update = engine.state.update
        if (
            update is engine.find_update(self.update)
            and update.skipped is None
            and update.steps % self.every.value == 0
        ):
            self._step()

    @on("epochs", phase=Phase.CONTROL)
    def follow_epochs(self, engine: Engine) -> None:
        """Move on after an epoch."""
        self._step()

    @on("watching", phase=Phase.CONTROL)
    def follow_metric(self, engine: Engine) -> None:
        """Move on with a new value of the metric."""
        assert self.monitor is not None
        if (value := self.monitor.new_value(engine)) is not None:
            self.scheduler.step(value)

    @on("requiring", phase=Phase.CONTROL)
    def require_metric(self, engine: Engine) -> None:
        """Refuse a metric that does not exist."""
        assert self.monitor is not None
        self.monitor.require(engine)

    def _step(self) -> None:
        self.stepped += 1
        if not _first_steps(self.scheduler):
            self.scheduler.step()
            return
        with warnings.catch_warnings():  # at its first step torch looks for the wrapper that `build` took off
            warnings.filterwarnings("ignore", message=".*optimizer.step.*", category=UserWarning)
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return {
            "scheduler": scheduler and {key: value for key, value in scheduler.items() if not callable(value)},
            "total": self.total,
            "stepped": self.stepped,
            "monitor": self.monitor and self.monitor.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total, self.stepped = state["total"], state["stepped"]
        if self.monitor is not None:
            self.monitor.load_state_dict(state["monitor"])
        if state["scheduler"] is None:
            if self.scheduler is not None:  # begin anew, from the rate that the optimizer was built with
                for group in self.scheduler.optimizer.param_groups:
                    group["lr"] = group.get("initial_lr", group["lr"])
            self.scheduler = None
        else:
            self.scheduler.load_state_dict(state["scheduler"])


def _first_steps(scheduler: Any) -> bool:
    return getattr(scheduler, "_step_count", 2) <= 1 or any(
        _first_steps(s) for s in getattr(scheduler, "_schedulers", ())
    )


def _base(factory: Any) -> Any:
    while isinstance(factory, partial):
        factory = factory.func
    return factory


def _missing_total(factory: Any) -> str | None:
    """The argument for the number of steps that the factory takes, has no value for, and cannot do without."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return None
    if isinstance(factory, partial) and {"epochs", "steps_per_epoch"} <= set(factory.keywords):
        return None  # OneCycleLR's other way to be told
    for name in _TOTALS:
        parameter = parameters.get(name)
        if parameter is not None and parameter.default in (inspect.Parameter.empty, None):
            return name
    return None


def _told(factory: Any) -> str:
    return getattr(_base(factory), "__name__", repr(factory))
