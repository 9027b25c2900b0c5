"""TensorBoard through tensorboardX: losses, metrics and learning rates."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from tensorboardX import SummaryWriter

from signalfire import AnyEvent, Engine, Events, Handler, Interval, Phase, as_number, check_every, on

__all__ = ["TensorBoardLogger"]


class TensorBoardLogger(Handler):
    """Writes the loss, every new value of every metric, and the learning rates that were used, as TensorBoard scalars.

    The horizontal axis is the iteration. A run that continues cuts off what an earlier one wrote after its starting point, so
    that there is one clean curve. The file is closed, and so complete, when the run ends, also by an exception.

    Args:
        folder: TensorBoard's log folder; made if it is not there.
        every: the interval of losses and learning rates, in iterations, such as "10it"; metrics are written as they come.

    Attributes:
        writer: the tensorboardX writer while a run is going on, for entries of your own; None otherwise.

    Example:
        >>> TensorBoardLogger("runs/digits", every="50it").name
        'tensorboard'
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, every: str | Interval = "10it", name: str | None = None
    ) -> None:
        super().__init__(name=name or "tensorboard")
        interval = check_every(self, every)
        if not isinstance(interval, Interval) or interval.unit != "it":
            raise ValueError(f"TensorBoardLogger(every={every!r}): losses are written every n iterations: '10it'")
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"TensorBoardLogger(folder={str(folder)!r}): it exists and is no folder")
        self.every = interval
        count = int(interval.value)
        self.rates_used: AnyEvent = Events.OPTIMIZER_STEP_STARTED(every=count)
        self.writer: SummaryWriter | None = None
        self._rates: dict[str, float] = {}
        self._rates_at = 0
        self._seen: dict[str, int] = {}
        self._first = 1

    @on(Events.STARTED | Events.CHECKPOINT_LOADED, phase=Phase.RECORD)
    def begin(self, engine: Engine) -> None:
        """What was measured up to here was written by the run before; what it wrote beyond is cut off."""
        self._seen = dict(engine.state.metrics.serials)
        self._first = engine.state.iteration + 1

    def _open(self) -> SummaryWriter:
        if self.writer is None:
            # A name of its own: two writers in one folder within a second would share a file and lose events.
            suffix = f".{uuid.uuid4().hex[:8]}"
            purge = self._first if self._first > 1 else None
            self.writer = SummaryWriter(str(self.folder), purge_step=purge, filename_suffix=suffix)
        return self.writer

    @on("rates_used", phase=Phase.RECORD)
    def note_rates(self, engine: Engine) -> None:
        """Note the rates before a schedule moves them: those are the ones that are used."""
        self._rates_at = engine.state.iteration
        self._rates.update(_rates(engine, engine.state.update.name))

    @on("every", phase=Phase.RECORD)
    def write_loss(self, engine: Engine) -> None:
        """Write the losses and the rates."""
        writer, iteration = self._open(), engine.state.iteration
        several = len(engine.updates) > 1
        if self._rates_at != iteration:  # inside a window: the rates are those of the step to come
            self._rates = {}
        for update in engine.updates:
            if update.loss is not None:
                writer.add_scalar(f"loss/{update.name}" if several else "loss", update.loss.item(), iteration)
            for tag, rate in _rates(engine, update.name).items():
                writer.add_scalar(tag, self._rates.get(tag, rate), iteration)

    @on(Events.EVALUATION_COMPLETED | Events.EPOCH_COMPLETED | Events.COMPLETED, phase=Phase.RECORD)
    def write_metrics(self, engine: Engine) -> None:
        """Write the metrics that are new."""
        metrics = engine.state.metrics
        for name, value in metrics.new_since(self._seen).items():
            self._open().add_scalar(
                f"metrics/{name}", as_number("TensorBoardLogger", name, value), engine.state.iteration
            )
        self._seen = dict(metrics.serials)

    @on(Events.ENDED, phase=Phase.PERSIST)
    def close(self, engine: Engine) -> None:
        """Close the file; a killed process would lose what was not flushed."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def _rates(engine: Engine, update: str) -> dict[str, float]:
    optimizer = engine.find_update(update).optimizer
    groups = [] if optimizer is None else optimizer.param_groups
    prefix = "learning_rate" if len(engine.updates) == 1 else f"learning_rate/{update}"
    return {prefix if len(groups) == 1 else f"{prefix}/group{i}": float(group["lr"]) for i, group in enumerate(groups)}
