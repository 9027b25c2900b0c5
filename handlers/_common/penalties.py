"""Base of penalties: terms that are added to the loss that the backward starts from, and reported as metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

from torch import Tensor

from signalfire import Engine, Events, Handler, Phase, UpdateState, on
from signalfire.checks import check_name, check_number

from .ranks import ADD_PENALTY
from .updates import selected_updates

__all__ = ["Penalizing", "Weight"]

Weight = float | Callable[[int], float]


class Penalizing(Handler):
    """Adds a term (see `value`), times a weight, to the loss that the backward starts from, and writes it as a metric.

    The reported loss stays without it. The term is a part of each micro-step's loss: what accumulation, micro-batches, loss
    scaling and steps that compute their gradients again do to the loss, they do to the term. Several penalties are added in the
    order of their names, whichever was attached first, so that their gradients add up to the same bits.

    Args:
        weight: Factor of the term: a number, or a function of the update's number of optimizer steps.
        update: Name of the update whose loss it is added to; all by default.
        least: Smallest weight that is allowed.
    """

    trains = True
    same_in_pieces = False
    """Whether the term is the same for all pieces of a batch, since it depends on the weights only."""

    def __init__(self, weight: Weight, *, update: str | None, name: str | None, least: float | None = None) -> None:
        super().__init__(name=name)
        self._least = least
        self.weight: Weight = weight if callable(weight) else check_number(self, "weight", weight, least=least)
        self.update = check_name(self, "update", update)
        self._added: list[tuple[Tensor, int]] = []  # by this micro-step: a term for each piece, with its samples

    def value(self, engine: Engine, update: UpdateState) -> Tensor | None:
        """The term for the batch in ``state.batch``, without the weight: a scalar; None for none."""
        raise NotImplementedError

    def attached(self, engine: Engine) -> None:
        if self.update is not None:
            engine.find_update(self.update)

    def metric_names(self, engine: Engine) -> list[str]:
        return [self._metric(engine, update) for update in selected_updates(engine, self.update)]

    @on(Events.STARTED, phase=Phase.PREPARE, reads=[], writes=["metrics"])
    def announce_metrics(self, engine: Engine) -> None:
        """Announce the names of the metrics."""
        self._added.clear()
        engine.state.metrics.announce(self.name, self.metric_names(engine))

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
                        error.add_note(f"the penalty is that of {penalty.name!r}")
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
        if update.evaluation == 0:
            self._added.append((term.detach(), self._samples(engine, update)))

    def _weight_after(self, steps: int) -> float:
        if not callable(self.weight):
            return self.weight
        weight = self.weight(steps)
        if isinstance(weight, bool) or not isinstance(weight, Real) or not math.isfinite(weight):
            raise TypeError(f"{self.name!r}: weight= returned {weight!r} after {steps} steps; expected a finite number")
        if self._least is not None and weight < self._least:
            raise ValueError(f"{self.name!r}: weight= returned {weight!r} after {steps} steps; expected 0 or more")
        return float(weight)

    def _samples(self, engine: Engine, update: UpdateState) -> int:
        return 1 if self.same_in_pieces else update.samples_in(engine.state.batch)

    @on(Events.UPDATE_RETRIED, reads=[], writes=[])
    def forget_attempt(self, engine: Engine) -> None:
        """Forget the terms of an attempt that ran out of memory."""
        self._added.clear()

    @on(Events.UPDATE_COMPLETED, phase=Phase.PREPARE, reads=[], writes=["metrics"])
    def write_metric(self, engine: Engine) -> None:
        """Write the term of this micro-step: of a batch in pieces, the mean over its samples."""
        added, self._added = self._added, []
        if not added:
            return
        term = added[0][0]
        if len(added) > 1 and not self.same_in_pieces:
            total = sum(samples for _, samples in added)
            term = sum(term * (samples / total) for term, samples in added)  # type: ignore[assignment]
        engine.state.metrics[self._metric(engine, engine.state.update)] = term

    def _metric(self, engine: Engine, update: UpdateState) -> str:
        return self.name if len(engine.updates) == 1 else f"{self.name}/{update.name}"

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_added": []}


def _connected(engine: Engine) -> list[Penalizing]:
    """The penalties that take part now, by name."""
    receivers = (one.receiver for one in engine.signal(Events.LOSS_COMPUTED).connections)
    found = [getattr(receiver, "__self__", None) for receiver in receivers]
    return sorted((one for one in found if isinstance(one, Penalizing)), key=lambda one: one.name)
