"""Base of handlers that add a term to the loss and report it as a metric: penalties and distillation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from signalfire import Engine, Events, Handler, Phase, UpdateState, on
from signalfire.authoring import check_name

from .updates import selected_updates

__all__ = ["LossTerm", "check_losses"]


def check_losses(handler: Handler, updates: Iterable[UpdateState]) -> None:
    """Raise ValueError for an update whose output is not known beside its loss."""
    for update in updates:
        if update.loss_function is None:
            raise ValueError(
                f"{handler.name!r}: update {update.name!r} is a single function, so its output is not available; build "
                "it as Update(forward, loss, ...), or select a different update with update="
            )


class LossTerm(Handler):
    """Writes the terms that a subclass adds to the loss (see `record`) as a metric named like the handler.

    Args:
        update: Name of the update whose loss a term is added to; all by default.
    """

    trains = True
    by_shard = True
    same_in_pieces = False
    """Whether the term is the same for all pieces of a batch, since it depends on the weights only."""

    def __init__(self, *, update: str | None, name: str | None) -> None:
        super().__init__(name=name)
        self.update = check_name(self, "update", update)
        self._terms: list[tuple[Tensor, int]] = []  # of this micro-step: one for each piece, with its samples

    def record(self, engine: Engine, update: UpdateState, term: Tensor) -> None:
        """Record the term of the batch, or of the piece of one, in ``state.batch``."""
        if update.evaluation == 0:
            samples = 1 if self.same_in_pieces else update.samples_in(engine.state.batch)
            self._terms.append((term.detach(), samples))

    def attached(self, engine: Engine) -> None:
        engine.find_update(self.update)

    def metric_names(self, engine: Engine) -> list[str]:
        return [self._metric(engine, update) for update in selected_updates(engine, self.update)]

    @on(Events.STARTED, phase=Phase.PREPARE, reads=[], writes=["metrics"])
    def announce_metrics(self, engine: Engine) -> None:
        """Announce the names of the metrics."""
        self._terms.clear()
        if engine.group.shards is not None:  # of the last step, a process may have computed no shard
            return
        # Each of several ranks has the term of its own batches, and a state is the same on all ranks.
        alike = not engine.processes.distributed
        engine.state.metrics.announce(self.name, self.metric_names(engine), saved=alike)

    @on(Events.UPDATE_RETRIED, reads=[], writes=[])
    def forget_attempt(self, engine: Engine) -> None:
        """Forget the terms of an attempt that ran out of memory."""
        self._terms.clear()

    @on(Events.UPDATE_COMPLETED, phase=Phase.PREPARE, reads=["step"], writes=["metrics"])
    def write_metric(self, engine: Engine) -> None:
        """Write the term of this micro-step: of a batch in pieces, the mean over its samples."""
        terms, self._terms = self._terms, []
        if not terms or engine.group.shards is not None:
            return
        term = terms[0][0]
        if len(terms) > 1 and not self.same_in_pieces:
            total = sum(samples for _, samples in terms)
            term = sum(term * (samples / total) for term, samples in terms)  # type: ignore[assignment]
        engine.state.metrics[self._metric(engine, engine.state.update)] = term

    def _metric(self, engine: Engine, update: UpdateState) -> str:
        return self.name if len(engine.updates) == 1 else f"{self.name}/{update.name}"

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_terms": []}
