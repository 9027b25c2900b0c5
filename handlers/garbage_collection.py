"""Garbage collection at the same iterations on all ranks, instead of whenever Python decides."""

from __future__ import annotations

import gc
import os
from time import perf_counter

from signalfire import AnyEvent, Engine, Events, Handler, Interval, Phase, on
from signalfire.authoring import Claim, check_bool, check_every, event_of

from ._common.ranks import AFTER_ALL, BEFORE_ALL

__all__ = ["GarbageCollection"]

YOUNG, ALL = 1, 2
"""The oldest generation that is collected: that of objects made since the collection before, or that of all objects."""
LIMIT = 1000
"""The number of collections of young objects after which all are collected, for epochs that hardly end."""


class GarbageCollection(Handler):
    """Runs Python's garbage collector at the same iterations on all ranks, instead of whenever Python decides.

    Python frees objects in reference cycles only in a collection, which starts after a number of allocations. In distributed
    runs, each process pauses in a different iteration, and all others wait for it. With this handler, automatic collection is
    off, and all ranks collect at the same iterations. The pauses are short, because objects that exist when the run starts are
    set aside (`gc.freeze`), and only objects created since the last collection are examined. A full collection runs at the
    start of the run, at the end of an epoch, before an evaluation, and after 1,000 collections of young objects.

    The weights do not change. Automatic collection and frozen objects are restored when the run ends or fails; if objects were
    frozen before, none are added. Worker processes of a DataLoader collect automatically.

    Memory in cycles, such as a loss that an exception or a closure refers to, is freed at the next collection. If memory grows
    during the run, use a smaller interval.

    Args:
        every: Interval between collections of young objects.
        freeze: Whether to set aside the objects that exist when the run starts.

    Attributes:
        collections: Number of collections in this run.
        seconds: Their total time, in seconds; a `Profiler` shows it as a separate row.
        longest_pause: Time of the longest collection of young objects, in seconds.

    Source:
        The `gc` module of Python: https://docs.python.org/3/library/gc.html.

    Example:
        >>> import gc
        >>> import torch
        >>> from signalfire import Engine, Events, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> garbage = GarbageCollection(every="2it")
        >>> _ = engine.attach(garbage)
        >>> @engine.on(Events.ITERATION_STARTED)
        ... def show(engine):
        ...     counted = f"{garbage.collections} collections, automatic ones: {gc.isenabled()}"
        ...     print(f"iteration {engine.state.iteration}: {counted}")
        >>> _ = engine.run([(torch.ones(4, 2), torch.ones(4, 1))] * 3, max_epochs=1)
        iteration 1: 1 collections, automatic ones: False
        iteration 2: 1 collections, automatic ones: False
        iteration 3: 2 collections, automatic ones: False
    """

    def __init__(
        self, *, every: str | Interval | AnyEvent = "10it", freeze: bool = True, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        self.every = check_every(self, every)
        self.freeze = check_bool(self, "freeze", freeze)
        self.collect_event = event_of(self.every)
        self.collections = 0
        self.seconds = self.longest_pause = 0.0
        self._young = 0  # collections of young objects since all were collected
        self._was_enabled = self._has_frozen = False

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(Claim("when garbage is collected"), by=self)

    @on(Events.STARTED, phase=Phase.PERSIST, rank=AFTER_ALL, reads=[], writes=[])
    def begin(self, engine: Engine) -> None:
        """Collect all garbage, set the other objects aside, and turn automatic collection off."""
        self.collections = 0
        self.seconds = self.longest_pause = 0.0
        self._collect(ALL)
        self._has_frozen = self.freeze and gc.get_freeze_count() == 0
        if self._has_frozen:
            gc.freeze()
        self._was_enabled = gc.isenabled()
        if self._was_enabled:
            gc.disable()
            _switched_off.append(self)

    @on("collect_event", phase=Phase.PERSIST, rank=AFTER_ALL, reads=[], writes=[])
    def collect(self, engine: Engine) -> None:
        """Collect young objects."""
        self._collect(YOUNG if self._young < LIMIT else ALL)

    @on(Events.EPOCH_COMPLETED, phase=Phase.PERSIST, rank=AFTER_ALL, reads=[], writes=[])
    @on(Events.EVALUATION_STARTED, phase=Phase.PREPARE, rank=BEFORE_ALL, reads=[], writes=[])
    def collect_all(self, engine: Engine) -> None:
        """Collect all objects except those set aside, at a point where no iteration waits."""
        self._collect(ALL)

    @on(Events.ENDED, phase=Phase.PERSIST, rank=AFTER_ALL, reads=[], writes=[])
    def end(self, engine: Engine) -> None:
        """Restore what `begin` has changed."""
        if self._has_frozen:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()
            _switched_off.remove(self)
        self._has_frozen = self._was_enabled = False

    def _collect(self, oldest: int) -> None:
        begun = perf_counter()
        gc.collect(oldest)
        pause = perf_counter() - begun
        self.collections += 1
        self.seconds += pause
        self._young = self._young + 1 if oldest == YOUNG else 0
        if oldest == YOUNG:
            self.longest_pause = max(self.longest_pause, pause)


_switched_off: list[GarbageCollection] = []  # of runs under way


def _enable_in_child() -> None:
    if _switched_off:
        _switched_off.clear()
        gc.enable()


if hasattr(os, "register_at_fork"):  # a forked worker of a DataLoader has no handler that collects
    os.register_at_fork(after_in_child=_enable_in_child)
