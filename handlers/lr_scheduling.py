"""Learning-rate schedules: any scheduler of torch, built late, stepped when a step really happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from signalfire import AnyEvent, Engine, Events, Handler, Interval, Phase, on
from signalfire.acts import Override
from signalfire.checks import check_int
from signalfire.interval import check_every
from signalfire.monitor import Monitor
from signalfire.planning import steps_to_come

from ._common.torch_schedulers import base_of, missing_total, restore_rates, step, unwrap_step
from ._common.updates import made_step

__all__ = ["LRScheduling"]


class LRScheduling(Handler):
    """Drives a learning-rate scheduler through its ``step()``.

    The scheduler is built when the run starts, once the optimizer exists and the number of steps is known: a factory that
    takes ``total_steps`` (or ``T_max``) and was not given it gets the number of times it will be stepped. It moves after
    optimizer steps that really happened, once for each accumulation window and not after a skipped step, or after epochs.
    `simulate` and `plot` show a schedule without training.

    Schedulers with the interface of timm are driven, too: by ``step_update(steps)`` where they count steps, and by
    ``step(epochs)`` where they count epochs (``t_in_epochs``).

    Args:
        scheduler: a factory that is called with the optimizer, such as ``partial(OneCycleLR, max_lr=0.1)``, one of
            `signalfire.handlers.schedules`, or ``lambda optimizer: SequentialLR(optimizer, ...)``.
        every: "1st" (every optimizer step), "5st", "1ep", ...
        monitor: for ReduceLROnPlateau, the metric it watches; it is then stepped once for each new value of it.
        update: the name of the update whose optimizer is scheduled; the first by default.

    Attributes:
        scheduler: the scheduler; None before the first run.

    Example:
        >>> from functools import partial
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
        plateau = base_of(scheduler) is ReduceLROnPlateau
        if plateau and monitor is None:
            raise ValueError("LRScheduling(ReduceLROnPlateau): give monitor=, the metric it watches")
        if monitor is not None and every is not None:
            raise ValueError(
                f"LRScheduling(every={every!r}, monitor={monitor!r}): with monitor= it moves at each new value of the "
                "metric; leave out every="
            )
        self.factory = scheduler
        self.every = check_every(self, "1st" if every is None else every, units=["st", "ep"])
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
        engine.overrides.claim(
            Override.LEARNING_RATE, by=self, target=f"of update {engine.find_update(self.update).name!r}"
        )

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
        self.total = None
        missing = missing_total(self.factory)
        if missing is not None:
            self.total = self._planned(engine)
            if self.total is None:
                raise ValueError(
                    f"{self.name!r}: {_told(self.factory)} needs {missing}, and how many steps this run makes is not "
                    f"known; give {missing} to the factory, or max_steps= or epoch_length= to run()"
                )
        if self.monitor is not None:  # what `restore_rates` goes back to: ReduceLROnPlateau alone does not note it
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        try:
            self.scheduler = self._built(optimizer, self.total)
        finally:
            unwrap_step(optimizer)

    def _built(self, optimizer: Optimizer, total: int | None) -> Any:
        """A new scheduler, which is checked to be one that this handler can drive."""
        missing = missing_total(self.factory)
        scheduler = self.factory(optimizer, **({} if missing is None or total is None else {missing: max(total, 1)}))
        if not hasattr(scheduler, "step") or not hasattr(scheduler, "state_dict"):
            raise TypeError(f"{self.name!r}: the factory returned {scheduler!r}, which is no scheduler")
        kind = type(scheduler).__name__
        if isinstance(scheduler, ReduceLROnPlateau) and self.monitor is None:
            raise ValueError(f"{self.name!r}: the factory returned a {kind}; give monitor=, the metric it watches")
        if isinstance(scheduler, ReduceLROnPlateau) != (self.monitor is not None):
            raise ValueError(
                f"{self.name!r}: monitor= goes with ReduceLROnPlateau, and with nothing else; the factory returned a {kind}"
            )
        if _counts_itself(scheduler):
            if isinstance(getattr(scheduler, "lr_scheduler", None), ReduceLROnPlateau):
                raise ValueError(
                    f"{self.name!r}: the {kind} does not save what it has seen; give torch's ReduceLROnPlateau and monitor="
                )
            if getattr(scheduler, "t_in_epochs", True) != (self.every.unit == "ep"):
                counted, way_out = (
                    ("steps", "t_in_epochs=True, or every='1st'")
                    if self.every.unit == "ep"
                    else ("epochs", "t_in_epochs=False, or every='1ep'")
                )
                raise ValueError(
                    f"{self.name!r}: the {kind} counts {counted}, which every={str(self.every)!r} does not give it; write "
                    f"{way_out}"
                )
        return scheduler

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
        to_come = steps_to_come(engine, update)
        return None if to_come is None else self.stepped + (update.steps + to_come) // every - update.steps // every

    @on("stepping", phase=Phase.CONTROL)
    def follow_steps(self, engine: Engine) -> None:
        """Move on after an optimizer step that happened."""
        if made_step(engine, self.update, self.every):
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
        self._move(self.scheduler, self.stepped)

    def _move(self, scheduler: Any, stepped: int) -> None:
        """Let the scheduler go on to where it was stepped so many times."""
        if _counts_itself(scheduler):
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
        """The rates that this schedule gives in a run, without training and without touching any model or optimizer.

        Args:
            steps: the optimizer steps of the run.
            lr: the rate that the optimizer is built with, or one for each parameter group.
            epochs: for a schedule that follows epochs, the number of equally long ones that the steps make.
            momentum: of the optimizer (SGD) that stands in for the real one; some schedules look at it.
            metric_values: for ReduceLROnPlateau, the values of its metric in the order in which they come, evenly spread over
                the steps, the last one after the last step.

        Returns:
            The rate that each step uses; with several groups, such a list for each group.

        Raises:
            ValueError: if what the schedule follows was not given.

        Example:
            >>> from functools import partial
            >>> from torch.optim.lr_scheduler import StepLR
            >>> LRScheduling(partial(StepLR, step_size=2, gamma=0.5)).simulate(6, lr=0.8)
            [0.8, 0.8, 0.4, 0.4, 0.2, 0.2]
        """
        moves = self._moves(steps, epochs, metric_values)
        rates_at_start = _listed(lr)
        groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates_at_start]
        optimizer = torch.optim.SGD(groups, lr=rates_at_start[0], momentum=momentum)
        scheduler = self._built(optimizer, len(moves))
        rates: list[list[float]] = [[] for _ in groups]
        stepped = 0
        for made in range(1, steps + 1):
            for group, used in zip(optimizer.param_groups, rates, strict=True):
                used.append(float(group["lr"]))
            while stepped < len(moves) and moves[stepped] <= made:
                stepped += 1
                if metric_values is not None:
                    scheduler.step(metric_values[stepped - 1])
                else:
                    self._move(scheduler, stepped)
        return rates if isinstance(lr, Sequence) else rates[0]

    def _moves(self, steps: int, epochs: int | None, metric_values: Sequence[float] | None) -> list[int]:
        """After which of so many steps the scheduler moves."""
        for argument, value in (("steps", steps), ("epochs", epochs)):
            if value is not None:
                check_int("LRScheduling.simulate", argument, value)
        if (metric_values is None) != (self.monitor is None):
            raise ValueError(
                "LRScheduling.simulate(): ReduceLROnPlateau follows a metric; give metric_values=, which it is to see"
                if metric_values is None
                else f"LRScheduling.simulate(metric_values={metric_values!r}): this schedule follows no metric; leave it out"
            )
        if metric_values is not None:
            return [value * steps // len(metric_values) for value in range(1, len(metric_values) + 1)]
        if self.every.unit == "st":
            return list(range(int(self.every.value), steps + 1, int(self.every.value)))
        if epochs is None or steps % epochs:
            raise ValueError(
                f"LRScheduling.simulate(steps={steps}, epochs={epochs!r}): this schedule follows epochs; give the number of "
                "epochs that these steps make, each of the same length"
            )
        length = steps // epochs * int(self.every.value)
        return list(range(length, steps + 1, length))

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
        """Draw what `simulate` gives over the optimizer steps.

        Args:
            path: where to write the picture; the ending chooses the format.
            steps, lr, epochs, momentum, metric_values: as for `simulate`.

        Raises:
            ImportError: without matplotlib, which the extra ``examples`` brings.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "LRScheduling.plot() needs matplotlib: pip install matplotlib; simulate() gives the numbers without it"
            ) from error
        rates = self.simulate(steps, lr=_listed(lr), epochs=epochs, momentum=momentum, metric_values=metric_values)
        figure = Figure(figsize=(7, 3), layout="constrained")
        axes = figure.add_subplot()
        for place, used in enumerate(rates):
            axes.step(range(1, steps + 1), used, where="mid", label=f"group {place}")
        axes.set(xlabel="optimizer step", ylabel="learning rate")
        axes.grid(alpha=0.3)
        if len(rates) > 1:
            axes.legend()
        figure.savefig(path, dpi=120)

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
                restore_rates(self.scheduler.optimizer)
            self.scheduler = None
        else:
            self.scheduler.load_state_dict(state["scheduler"])


def _counts_itself(scheduler: Any) -> bool:
    """Whether a scheduler is told how many steps or epochs were made, as timm's are, instead of counting them."""
    return hasattr(scheduler, "step_update")


def _listed(lr: float | Sequence[float]) -> list[float]:
    return [float(one) for one in lr] if isinstance(lr, Sequence) else [float(lr)]


def _told(factory: Any) -> str:
    return getattr(base_of(factory), "__name__", repr(factory))
