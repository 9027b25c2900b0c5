"""A fast development run: a few batches through everything, and nothing written."""

from __future__ import annotations

from typing import Any

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.acts import Override
from signalfire.checks import check_int
from signalfire.data import FirstBatches

__all__ = ["FastDevRun"]


class FastDevRun(Handler):
    """Makes every run one epoch of a few batches, evaluations included, to see whether all of it works.

    The engine's `dry_run` is on while the handler is attached: handlers that write files or send something away are left out
    of the run, and are back afterwards. The other bounds that are given to `run` still hold. The training is real: begin anew
    afterwards with `Engine.reset`, which keeps the weights, or build the engine again.

    A run without data, or with ``epoch_length=``, ends its epoch after so many iterations, and discards an open window.

    Args:
        batches: how many batches of the training and of every evaluation.

    Example:
        >>> FastDevRun(2).batches
        2
    """

    def __init__(self, batches: int = 1, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.batches = check_int(self, "batches", batches)
        self._dry_before = False

    def attached(self, engine: Engine) -> None:
        if engine.running:
            raise RuntimeError(
                f"{self.name!r}: it cannot join a running engine, which has its data; attach it before run()"
            )
        engine.overrides.replace(Override.DATA, self.limit, by=self)
        self._dry_before, engine.dry_run = engine.dry_run, True

    def detached(self, engine: Engine) -> None:
        engine.dry_run = self._dry_before

    def limit(self, engine: Engine, data: Any) -> Any:
        """What the engine iterates instead of its data."""
        return None if data is None else FirstBatches(data, self.batches)

    @on(Events.STARTED | Events.CHECKPOINT_LOADED, phase=Phase.PREPARE)
    def bound(self, engine: Engine) -> None:
        """One epoch from here; a stop is not held back."""
        state = engine.state
        state.max_epochs = state.epoch - state.epoch_open + 1
        state.min_epochs = state.min_iters = 0

    @on(Events.ITERATION_COMPLETED, phase=Phase.CONTROL)
    def end_epoch(self, engine: Engine) -> None:
        """End an epoch whose length is not that of the data."""
        state = engine.state
        if state.epoch_iteration >= self.batches and state.epoch_length is not None and not engine.feed.on_last_batch():
            engine.terminate_epoch(f"{self.name} makes {self.batches} batches")
