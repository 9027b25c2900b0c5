"""Fast development run: a few batches of training and evaluation, with no files written."""

from __future__ import annotations

import sys
from typing import Any

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.authoring import Override, check_int
from signalfire.data import FirstBatches

from ._common.ranks import LIMIT_RUN, REHEARSE

__all__ = ["FastDevRun"]


class FastDevRun(Handler):
    """Runs one epoch of a few batches of training and evaluation, to find errors quickly; writes no files.

    At the end, handlers whose interval is longer than this epoch act once (`Handler.rehearse`), so `Validation`, for example,
    validates. A schedule that needs more steps, such as for a warm-up, is built for the steps that the run would take without
    this handler.

    `Engine.dry_run` is on while the handler is attached, so handlers that write files or send data elsewhere are disabled
    during the run. Other limits passed to `run` still apply. The run changes the weights. Before the actual training, call
    `Engine.reset`, which keeps the weights, or build the engine again.

    A run without data, or with ``epoch_length=``, ends its epoch after ``batches`` iterations and discards an open accumulation
    window.

    Args:
        batches: Number of batches for training and for each evaluation.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> _ = engine.attach(FastDevRun(2))
        >>> state = engine.run([(torch.ones(4, 2), torch.ones(4, 1))] * 1000, max_epochs=50)
        >>> state.epoch, state.iteration
        (1, 2)
    """

    decides_alike = True

    def __init__(self, batches: int = 1, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.batches = check_int(self, "batches", batches)
        self._dry_before = False
        self._whole: int | None = None  # number of batches of the training data

    def attached(self, engine: Engine) -> None:
        if engine.running:
            raise RuntimeError(
                f"{self.name!r} cannot be attached during a run, because the run already has its data; attach this "
                "handler before run()"
            )
        engine.overrides.replace(Override.TRIAL, self.limit, by=self)
        self._dry_before, engine.dry_run = engine.dry_run, True

    def detached(self, engine: Engine) -> None:
        engine.dry_run = self._dry_before

    def limit(self, engine: Engine, data: Any) -> Any:
        """The data that the engine iterates over: the first batches of the original."""
        if engine is self.engine:
            try:
                self._whole = None if data is None else len(data)
            except (TypeError, NotImplementedError):
                self._whole = None
        return None if data is None else FirstBatches(data, self.batches)

    @on(Events.STARTED | Events.CHECKPOINT_LOADED, phase=Phase.PREPARE, rank=LIMIT_RUN, reads=[], writes=["bounds"])
    def limit_epochs(self, engine: Engine) -> None:
        """Limit the run to one epoch, without a minimum."""
        state = engine.state
        if state.planned is None:
            length = engine.feed.current.given_length
            if length is None and self._whole is not None:
                length = -(-self._whole // engine.group.data.world_size)
            state.planned = state.max_epochs, length
        state.max_epochs = state.epoch - state.epoch_open + 1
        state.min_epochs = state.min_iters = 0

    @on(Events.STARTED, phase=Phase.RECORD, reads=[], writes=["files"])
    def report(self, engine: Engine) -> None:
        """Report that this run is a trial, in case the handler was left attached."""
        most = f"at most {self.batches} batch{'es' if self.batches > 1 else ''}"
        engine.findings.report(
            "W58",
            f"FastDevRun({self.batches}) ends this run after one epoch of {most}, and nothing is written",
            f"before the real training, detach {self.name!r} and call engine.reset()",
            self.name,
        )
        engine.processes.print(f"{self.name}: one epoch of {most}; nothing is written", file=sys.stderr)

    @on(Events.ITERATION_COMPLETED, phase=Phase.CONTROL, reads=["bounds"], writes=["stop"])
    def end_epoch(self, engine: Engine) -> None:
        """End an epoch whose length is not given by the data."""
        state = engine.state
        if state.epoch_iteration >= self.batches and state.epoch_length is not None and not engine.feed.on_last_batch():
            engine.terminate_epoch(f"{self.name} limits epochs to {self.batches} batches", by=self.name)

    @on(
        Events.EPOCH_COMPLETED | Events.COMPLETED,
        phase=Phase.PREPARE,
        rank=REHEARSE,
        reads=["weights", "buffers"],
        writes=["metrics"],
    )
    def rehearse_all(self, engine: Engine) -> None:
        """Let every handler act once if nothing was due in these few batches."""
        for handler in list(engine.handlers.values()):
            if handler.enabled:
                handler.rehearse(engine)
