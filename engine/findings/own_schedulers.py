"""Schedulers that a script builds for an optimizer by itself: nobody may step them, and no state holds their position."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..authoring.functions import held_by, is_users, names_reached
from ..core.events import Events

if TYPE_CHECKING:
    from ..core.update import UpdateState
    from ..engine import Engine

__all__ = ["OwnSchedulers"]


class OwnSchedulers:
    """What was built for the optimizers of an engine before its run, and is driven by no handler.

    Args:
        engine: the engine, whose handlers have built theirs.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._steps = {update.name: update.steps for update in engine.updates}
        self._epoch = engine.state.epoch - engine.state.epoch_open  # the last that has ended
        self._found: dict[str, list[tuple[weakref.ref[LRScheduler], int]]] = {}
        self._rates: dict[str, list[float]] = {}
        steps = self._may_step()  # ReduceLROnPlateau leaves no trace on its optimizer
        known = {one.name: one.optimizer for one in engine.updates if steps or _is_wrapped(one.optimizer)}
        built = _schedulers_besides(engine) if known else []
        for name, optimizer in known.items():
            own = [one for one in built if getattr(one, "optimizer", None) is optimizer]
            self._found[name] = [(weakref.ref(one), one.last_epoch) for one in own]
            self._rates[name] = _rates_of(optimizer)

    def report(self) -> None:
        """Report schedulers that were not stepped in the run that ends, and those whose position its checkpoints lack."""
        engine = self.engine
        for update in engine.updates:
            found = self._living(update)
            ended = engine.state.epoch - engine.state.epoch_open - self._epoch
            if not found or update.steps == self._steps[update.name] or not ended:
                continue
            names = ", ".join(sorted({type(one).__name__ for one, _ in found}))
            way_out = "attach LRScheduling with a factory instead, such as LRScheduling(partial(StepLR, step_size=30))"
            optimizer = f"the optimizer of update {update.name!r}"
            if any(one.last_epoch != before for one, before in found):
                if engine.signal(Events.CHECKPOINT_SAVED).fired and not self._is_restored(found):
                    what = f"a function steps the scheduler ({names}) of {optimizer}"
                    effect = "checkpoints lack the scheduler's position, and a resumed run would restart the schedule"
                    engine.remark("W87", f"{what}, so {effect}", way_out, key=update.name)
            elif ended > 1 and not self._may_wait(update, found):  # after one epoch, a loop around the run may step it
                what = f"a scheduler ({names}) was built for {optimizer}, but was not stepped in the {ended} epochs of this run"
                engine.remark("W86", f"{what}, so the learning rate was constant", way_out, key=update.name)

    def _is_restored(self, schedulers: list[tuple[LRScheduler, int]]) -> bool:
        """Whether a receiver loads a state as checkpoints are loaded, or saves that of a scheduler which it holds."""
        loading = [one.receiver for one in self.engine.signal(Events.CHECKPOINT_LOADED).connections]
        every = [one.receiver for signal in self.engine.signals.all() for one in signal.connections]
        return any(is_users(one) and "load_state_dict" in names_reached(one) for one in loading) or any(
            is_users(one) and "state_dict" in names_reached(one) and _holds(one, schedulers) for one in every
        )

    def _living(self, update: UpdateState) -> list[tuple[LRScheduler, int]]:
        found = ((ref(), before) for ref, before in self._found.get(update.name, []))
        return [(one, before) for one, before in found if one is not None]

    def _may_wait(self, update: UpdateState, found: list[tuple[LRScheduler, int]]) -> bool:
        """Whether schedulers had begun, the learning rates have changed otherwise, or a function may step them later."""
        return (
            any(before for _, before in found)
            or _rates_of(update.optimizer) != self._rates[update.name]
            or self._may_step()
        )

    def _may_step(self) -> bool:
        """Whether a connected function, or a method of a user's handler, names a method ``step``."""
        theirs = {None, *[name for name, handler in self.engine.handlers.items() if is_users(type(handler))]}
        signals = self.engine.signals.all()
        receivers = [one.receiver for signal in signals for one in signal.connections if one.owner in theirs]
        return any(is_users(one) and "step" in names_reached(one) for one in receivers)


def _holds(receiver: Any, schedulers: list[tuple[LRScheduler, int]]) -> bool:
    return any(one is held for held in held_by(receiver) for one, _ in schedulers)


def _schedulers_besides(engine: Engine) -> list[LRScheduler]:
    """The schedulers of this process that no handler holds. One knows its optimizer, but not the other way round."""
    held = {id(one) for handler in engine.handlers.values() for one in _held_by(handler)}
    # `issubclass`, since `isinstance` asks each object for its class, and some of them warn.
    return [one for one in gc.get_objects() if issubclass(type(one), LRScheduler) and id(one) not in held]


def _held_by(handler: Any) -> Iterator[Any]:
    """The attributes of a handler, and what is in its plain lists and dictionaries; others may be data, which are not read."""
    for value in vars(handler).values():
        yield value
        yield from value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()


def _rates_of(optimizer: Optimizer | None) -> list[float]:
    return [] if optimizer is None else [float(group["lr"]) for group in optimizer.param_groups]


def _is_wrapped(optimizer: Optimizer | None) -> bool:
    return optimizer is not None and hasattr(optimizer.step, "_wrapped_by_lr_sched")
