"""Parameter scheduling: schedules any field of the optimizer's parameter groups: weight decay, momentum, betas, eps, ..."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from signalfire import AnyEvent, Engine, Events, Handler, Interval, Phase, UpdateState, on
from signalfire.authoring import Capture, Claim, check_every, check_function, check_int, check_name, check_number

from ._common.updates import made_step, only_update

__all__ = ["ParameterScheduling"]

Schedule = Callable[[int], Any]


class ParameterScheduling(Handler):
    """Schedules weight decay, momentum, betas or any other field of the optimizer's parameter groups.

    The value is a function of the number of optimizer steps or epochs so far. The first step uses the value for 0. The field is
    set after each optimizer step (once per accumulation window, and not after a skipped step), or after each epoch. The value
    stays when the run ends, and ``engine.reset()`` restores the optimizer's initial value.

    Args:
        field: Name of the field, such as "weight_decay", "momentum", "betas" or "eps". Use `LRScheduling` for the learning
            rate.
        schedule: Function of the count; a mapping ``{0: a, 100: b}`` from counts to the values that apply from then on;
            `linear`; or `cosine`. For a field with multiple values, such as betas, it returns all of them, unless ``index`` is
            set.
        every: Interval between changes, such as "1step" (every optimizer step), "10steps" or "1ep". The schedule is called with
            the number of steps or epochs, according to the unit, and not with the number of intervals.
        index: Index of the scheduled value in a field with multiple values: 0 for the first of the betas.
        update: Name of the update whose optimizer is scheduled; required if the engine has several.
        groups: Indices of the parameter groups to schedule; all by default.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Events, Update
        >>> update = Update.supervised(
        ...     torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1, weight_decay=0.3
        ... )
        >>> engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> schedule = ParameterScheduling.cosine(0.04, 0.4, over=2)
        >>> _ = engine.attach(ParameterScheduling("weight_decay", schedule))
        >>> decays = []
        >>> @engine.on(Events.GRADIENTS_READY)
        ... def look(engine):
        ...     decays.append(round(engine.optimizer.param_groups[0]["weight_decay"], 3))
        >>> _ = engine.run([(torch.ones(4, 2), torch.ones(4, 1))] * 4, max_epochs=1)
        >>> decays
        [0.04, 0.22, 0.4, 0.4]
    """

    capture = Capture.FORBIDDEN
    trains = True

    def __init__(
        self,
        field: str,
        schedule: Schedule | Mapping[int, Any],
        *,
        every: str | Interval = "1step",
        index: int | None = None,
        update: str | None = None,
        groups: Iterable[int] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if not isinstance(field, str):
            raise TypeError(f"ParameterScheduling(field={field!r}): expected a field name, such as 'weight_decay'")
        if field in _OTHER_FIELDS:
            raise ValueError(f"ParameterScheduling(field={field!r}): {_OTHER_FIELDS[field]}")
        _check_schedule(schedule)
        if groups is not None and (isinstance(groups, str | bytes) or not isinstance(groups, Iterable)):
            raise TypeError(
                f"ParameterScheduling(groups={groups!r}): expected indices of parameter groups, such as [0]"
            )
        self.groups = None if groups is None else [check_int(self, "groups", place, least=0) for place in groups]
        if self.groups == []:
            raise ValueError(
                "ParameterScheduling(groups=[]): expected at least one index; to schedule all groups, omit groups="
            )
        self.field = field
        self.schedule: Schedule = _Steps(schedule) if isinstance(schedule, Mapping) else schedule
        self.every = check_every(self, every, units=["st", "ep"])
        self.index = None if index is None else check_int(self, "index", index, least=0)
        self.update = check_name(self, "update", update)
        by_step = self.every.unit == "st"
        self.step_event: AnyEvent | None = Events.OPTIMIZER_STEP_COMPLETED if by_step else None
        self.epoch_event: AnyEvent | None = None if by_step else self.every.event()

    @staticmethod
    def linear(start: float, end: float, *, over: int) -> Schedule:
        """A schedule that changes linearly from ``start`` to ``end`` over ``over`` steps (or epochs), then stays at ``end``."""
        return _Ramp(start, end, over, cosine=False)

    @staticmethod
    def cosine(start: float, end: float, *, over: int) -> Schedule:
        """A schedule along half a cosine from ``start`` to ``end`` over ``over`` steps (or epochs), then at ``end``."""
        return _Ramp(start, end, over, cosine=True)

    def attached(self, engine: Engine) -> None:
        update = only_update(engine, self.update, by=self, does="is scheduled")
        claim = Claim("the parameter group field")
        engine.overrides.claim(claim, by=self, target=f"{self.field!r} of update {update.name!r}")

    @on(Events.STARTED, phase=Phase.FINALIZE, reads=["optimizer", "step"], writes=["groups"])
    def begin(self, engine: Engine) -> None:
        """Check the field, and set the value for the first step."""
        for group in self._groups(engine):
            self._check_group(group)
        self._set(engine)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        if self.field not in group:
            fields = ", ".join(key for key in group if key != "params" and not key.startswith("initial_"))
            raise ValueError(f"{self.name!r}: the optimizer has no field {self.field!r}; the fields are {fields}")
        if self.field in ("momentum", "betas") and "max_momentum" in group:
            raise ValueError(
                f"{self.name!r}: the learning-rate schedule also sets {self.field!r}; build that schedule with "
                "cycle_momentum=False"
            )
        own = group[self.field] if self.index is None else self._item(group[self.field], self.index)
        value = self.schedule(0)
        if not _alike(value, own):
            raise TypeError(
                f"{self.name!r}: the schedule returns {value!r} for {self.field!r}"
                + ("" if self.index is None else f" with index={self.index}")
                + f", but the value in the optimizer is {own!r}; return values of the same type"
            )

    def _item(self, values: Any, index: int) -> Any:
        if not isinstance(values, tuple | list):
            raise ValueError(
                f"{self.name!r}: index={index}, but {self.field!r} is a single value, {values!r}; omit index="
            )
        if index >= len(values):
            raise ValueError(f"{self.name!r}: index={index}, but {self.field!r} has {len(values)} values: {values!r}")
        return values[index]

    @on(Events.CHECKPOINT_LOADED, phase=Phase.FINALIZE, reads=["optimizer"], writes=["groups"])
    def resume(self, engine: Engine) -> None:
        """Set the value for the step count of the loaded run."""
        self._set(engine)

    @on("step_event", phase=Phase.CONTROL, reads=["optimizer", "step"], writes=["groups"])
    def step_on_optimizer_step(self, engine: Engine) -> None:
        """Set the next value after each optimizer step that is not skipped."""
        if made_step(engine, self.update, self.every):
            self._set(engine)

    @on("epoch_event", phase=Phase.CONTROL, reads=["optimizer"], writes=["groups"])
    def step_on_epoch(self, engine: Engine) -> None:
        """Set the next value at the interval of epochs."""
        self._set(engine)

    def _set(self, engine: Engine) -> None:
        update, every = engine.find_update(self.update), int(self.every.value)
        count = update.steps if self.every.unit == "st" else engine.state.epoch - engine.state.epoch_open
        value = self.schedule(count - count % every)
        for group in self._groups(engine):
            # As in torch's schedulers, the group keeps its initial value.
            own = group.setdefault(f"initial_{self.field}", group[self.field])
            if self.index is None:
                group[self.field] = value
            else:
                values = list(group[self.field])
                values[self.index] = value
                group[self.field] = type(own)(values)

    def _groups(self, engine: Engine) -> list[dict[str, Any]]:
        groups = _groups_of(engine.find_update(self.update))
        if self.groups is None:
            return groups
        if max(self.groups) >= len(groups):
            raise ValueError(
                f"{self.name!r}: groups={self.groups}, but the optimizer has {len(groups)} groups, numbered from 0"
            )
        return [groups[place] for place in self.groups]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the optimizer's initial value; there is no state, because the value follows from the counts."""
        super().load_state_dict(state)
        if (engine := self.engine) is not None:
            for group in _groups_of(engine.find_update(self.update)):
                if f"initial_{self.field}" in group:
                    group[self.field] = group.pop(f"initial_{self.field}")


_OTHER_FIELDS = {
    "lr": "use LRScheduling for the learning rate: LRScheduling(partial(LambdaLR, lr_lambda=...))",
    "params": "this field holds the parameters themselves; choose a different field, such as 'weight_decay'",
}
"""Fields that are no hyperparameters to schedule here, each with what to do instead."""


class _Steps:
    """A piecewise constant schedule: each value applies from its count on."""

    def __init__(self, values: Mapping[int, Any]) -> None:
        self.counts = sorted(values)
        self.values = [values[count] for count in self.counts]

    def __call__(self, count: int) -> Any:
        return self.values[bisect_right(self.counts, count) - 1]


class _Ramp:
    """A linear or cosine schedule from one value to another."""

    def __init__(self, start: float, end: float, over: int, *, cosine: bool) -> None:
        where = f"ParameterScheduling.{'cosine' if cosine else 'linear'}"
        self.start, self.end = check_number(where, "start", start), check_number(where, "end", end)
        self.over = check_int(where, "over", over)
        self.cosine = cosine

    def __call__(self, count: int) -> float:
        if count >= self.over:
            return self.end
        share = count / self.over
        if self.cosine:
            share = (1 - math.cos(math.pi * share)) / 2
        return self.start + (self.end - self.start) * share


def _check_schedule(schedule: Schedule | Mapping[int, Any]) -> None:
    if not isinstance(schedule, Mapping):
        if not callable(schedule):
            raise TypeError(
                f"ParameterScheduling(schedule={schedule!r}): expected a function of the step count, or a mapping "
                "from step counts to values"
            )
        check_function("ParameterScheduling", "schedule", schedule, "steps")
        return
    where = f"ParameterScheduling(schedule={dict(schedule)!r})"
    for count in schedule:
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"{where}: the key {count!r} is not a number of steps or epochs; use ints of 0 or more")
    if 0 not in schedule:
        raise ValueError(f"{where}: the initial value is missing; add it as {{0: ..., ...}}")


def _groups_of(update: UpdateState) -> list[dict[str, Any]]:
    return [] if update.optimizer is None else update.optimizer.param_groups


def _alike(value: Any, own: Any) -> bool:
    """Whether the value is of the same type as the optimizer's own."""
    if isinstance(own, tuple | list):
        return isinstance(value, tuple | list) and len(value) == len(own) and all(map(_alike, value, own))
    if isinstance(own, bool) or own is None:
        return value is None or isinstance(value, bool)
    return not isinstance(own, int | float) or (isinstance(value, int | float) and not isinstance(value, bool))
