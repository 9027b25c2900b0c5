"""A schedule for each of several optimizers that step together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from signalfire.updates.optimizers import JointOptimizer

from .torch_schedulers import missing_total, step, takes_metric, unwrap_step

__all__ = ["JointSchedule", "JointScheduler"]


class JointSchedule:
    """A factory for `JointScheduler`.

    Args:
        factories: Factories by the names of the optimizers that they schedule.

    Raises:
        TypeError: If these are not factories by name.
    """

    def __init__(self, factories: Mapping[str, Callable[..., Any]]) -> None:
        if not factories or not all(isinstance(name, str) and callable(one) for name, one in factories.items()):
            raise TypeError(
                f"LRScheduling({factories!r}): expected a mapping from optimizer names to factories, such as "
                "{'matrices': partial(CosineAnnealingLR), 'rest': ...}"
            )
        self.factories = dict(factories)

    def missing_total(self) -> bool:
        """Whether any of them needs the number of steps."""
        return any(missing_total(factory) is not None for factory in self.factories.values())

    def __call__(self, optimizer: Optimizer, total_steps: int | None = None) -> JointScheduler:
        if not isinstance(optimizer, JointOptimizer):
            raise ValueError(
                f"LRScheduling({{{', '.join(map(repr, self.factories))}}}): this update has a single optimizer, "
                f"{type(optimizer).__name__}; pass a single factory, or set Update(optimizer=) to a dict that maps "
                "names to optimizers"
            )
        if unknown := self.factories.keys() - optimizer.optimizers.keys():
            raise ValueError(
                f"LRScheduling({min(unknown)!r}: ...): the update has no optimizer with this name; its optimizers are "
                f"{', '.join(optimizer.optimizers)}"
            )
        schedulers = []
        for name, factory in self.factories.items():
            missing = missing_total(factory)
            scheduler = factory(optimizer.optimizers[name], **({} if missing is None else {missing: total_steps}))
            unwrap_step(optimizer)
            if takes_metric(scheduler) or hasattr(scheduler, "step_update"):
                raise ValueError(
                    f"LRScheduling({name!r}: ...): {type(scheduler).__name__}.step() needs an argument, but in "
                    "an update with several optimizers, step() is called without arguments; use a torch scheduler "
                    "other than ReduceLROnPlateau"
                )
            schedulers.append(scheduler)
        return JointScheduler(optimizer, schedulers, names=tuple(self.factories))


class JointScheduler:
    """The schedulers of several optimizers that step together."""

    def __init__(self, optimizer: JointOptimizer, schedulers: list[Any], *, names: tuple[str, ...]) -> None:
        self.optimizer = optimizer
        self.names = names
        self._schedulers = schedulers

    def step(self) -> None:
        for scheduler in self._schedulers:
            step(scheduler)

    def get_last_lr(self) -> list[float]:
        """The rates of all groups."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        states = [scheduler.state_dict() for scheduler in self._schedulers]
        return {"schedulers": [{k: v for k, v in state.items() if not callable(v)} for state in states]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for scheduler, own in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(own)
