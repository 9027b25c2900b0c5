"""Base of penalties: terms that are added to the loss that the backward starts from, and reported as metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

from torch import Tensor

from signalfire import Engine, Events, UpdateState, on
from signalfire.authoring import Capture, check_function, check_number

from .loss_terms import LossTerm
from .ranks import ADD_PENALTY

__all__ = ["Penalizing", "Weight"]

Weight = float | Callable[[int], float]


class Penalizing(LossTerm):
    """Adds a term (see `value`), times a weight, to the loss that the backward starts from, and writes it as a metric.

    The reported loss excludes the term. The term is a part of each micro-step's loss, so accumulation, micro-batches, loss
    scaling and repeated gradient computations treat it like the loss. Several penalties are added in the order of their names,
    whichever was attached first, so their gradients add up to the same bits.

    Args:
        weight: Factor of the term: a number, or a function of the update's number of optimizer steps.
        update: Name of the update whose loss it is added to; all by default.
        least: Smallest weight that is allowed.
    """

    capture = Capture.INSIDE

    def __init__(self, weight: Weight, *, update: str | None, name: str | None, least: float | None = None) -> None:
        super().__init__(update=update, name=name)
        self._least = least
        if callable(weight):
            check_function(self, "weight", weight, "steps")
        self.weight: Weight = weight if callable(weight) else check_number(self, "weight", weight, least=least)

    def value(self, engine: Engine, update: UpdateState) -> Tensor | None:
        """The unweighted term for the batch in ``state.batch``, a scalar; None if there is none."""
        raise NotImplementedError

    @on(
        Events.LOSS_COMPUTED,
        rank=ADD_PENALTY,
        reads=["batch", "loss", "optimizer", "output", "step", "trainable", "weights"],
        writes=["loss"],
    )
    def add(self, engine: Engine) -> None:
        """Add the terms of all penalties in the order of their names, if this is the first of them."""
        update = engine.state.update
        penalties = _connected(engine)
        if penalties[0] is not self:
            return
        for penalty in penalties:
            if penalty.update in (None, update.name):
                try:
                    penalty._add(engine, update)
                except Exception as error:
                    if penalty is not self:
                        error.add_note(f"raised in the penalty {penalty.name!r}")
                    raise

    def _add(self, engine: Engine, update: UpdateState) -> None:
        weight = self._weight_after(update.steps)
        value = self.value(engine, update) if weight else None
        loss = update.backward_loss
        if value is None:
            term = loss.detach().new_zeros(())
        else:
            term = weight * value
            update.backward_loss = loss + term.to(loss.device)
        self.record(engine, update, term)

    def _weight_after(self, steps: int) -> float:
        if not callable(self.weight):
            return self.weight
        weight = self.weight(steps)
        if isinstance(weight, bool) or not isinstance(weight, Real) or not math.isfinite(weight):
            raise TypeError(f"{self.name!r}: weight= returned {weight!r} after {steps} steps; expected a finite number")
        if self._least is not None and weight < self._least:
            raise ValueError(f"{self.name!r}: weight= returned {weight!r} after {steps} steps; expected 0 or more")
        return float(weight)


def _connected(engine: Engine) -> list[Penalizing]:
    """The penalties that take part now, by name."""
    receivers = (one.receiver for one in engine.signal(Events.LOSS_COMPUTED).connections)
    found = [getattr(receiver, "__self__", None) for receiver in receivers]
    return sorted((one for one in found if isinstance(one, Penalizing)), key=lambda one: one.name)
