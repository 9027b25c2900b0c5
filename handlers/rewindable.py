"""Keeps states of the run in memory, so it can go back to an earlier iteration."""

from __future__ import annotations

from signalfire import Engine, Events, Handler, Interval, Phase, on
from signalfire.authoring import check_every, check_int

from ._common.ranks import HOLD_STATE

__all__ = ["Rewindable"]


class Rewindable(Handler):
    """Keeps recent states of the run in main memory, so ``engine.rewind(to=iteration)`` can go back to an earlier iteration.

    A state contains everything that a resumed run needs: weights, optimizers, handlers, generators, the position in the data.
    Within the process, the run can go back to any iteration since the oldest state, and repeats bit for bit. A checkpoint
    includes the oldest state, so it is about twice as large, and a resumed run can go back equally far.

    Args:
        every: Interval in iterations between two states.
        keep: Maximum number of states to keep; a run can go back at least ``keep - 1`` intervals.

    Raises:
        DataError: at the start of a run, for data that can be iterated only once, such as a generator.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Events, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.25)
        >>> engine = Engine(update, model=torch.nn.Linear(1, 1, bias=False))
        >>> _ = torch.nn.init.ones_(engine.model.weight)
        >>> _ = engine.attach(Rewindable(every="1it"))
        >>> seen = []
        >>> @engine.on(Events.ITERATION_COMPLETED)
        ... def look(engine):
        ...     seen.append((engine.state.iteration, engine.model.weight.item()))
        ...     if len(seen) == 3:
        ...         engine.rewind(to=1)
        >>> _ = engine.run([(torch.ones(4, 1), torch.zeros(4, 1))] * 3, max_epochs=1)
        >>> seen
        [(1, 0.5), (2, 0.25), (3, 0.125), (2, 0.25), (3, 0.125)]
    """

    trains = True
    decides_alike = True

    def __init__(self, *, every: str | Interval = "20it", keep: int = 4, name: str | None = None) -> None:
        super().__init__(name=name)
        self.every = check_every(self, every, units=["it"])
        self.keep = check_int(self, "keep", keep)

    def attached(self, engine: Engine) -> None:
        engine.past.keep_states(every=int(self.every.value), keep=self.keep, by=self)

    def detached(self, engine: Engine) -> None:
        engine.past.forget()

    @on(Events.STARTED, phase=Phase.PERSIST, rank=HOLD_STATE, reads=["state"], writes=[])
    def begin(self, engine: Engine) -> None:
        """Keep the initial state."""
        if not engine.snapshots.has_loaded_state:
            engine.past.begin_run()

    @on(Events.CHECKPOINT_LOADED, phase=Phase.PERSIST, rank=HOLD_STATE, reads=["state"], writes=[])
    def resume(self, engine: Engine) -> None:
        """Keep the loaded state, unless an older one came with it."""
        if engine.past.reached is None:
            engine.past.begin_run()

    @on("every", phase=Phase.PERSIST, rank=HOLD_STATE, reads=["state"], writes=[])
    def hold(self, engine: Engine) -> None:
        """Keep the state of this iteration."""
        engine.past.hold()
