"""Update frequencies: some of several updates are made in every n-th iteration only."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm

from signalfire import Engine, Events, Handler, Phase, UpdateState, on
from signalfire.acts import Override
from signalfire.checks import check_int

from ._common.ranks import CHOOSE_UPDATES

__all__ = ["UpdateFrequency"]


class UpdateFrequency(Handler):
    """Makes an update in every n-th iteration only, such as a generator's after every five of its critic (n_critic).

    Iterations are counted over all epochs, from 1: with n = 5 the update is made in the iterations 5, 10, 15, ...; with an
    offset of 1 in 1, 6, 11, ... In the other ones it is left out as if the engine had no such update. An update that is not
    named is made in every iteration.

    Accumulation counts how often the update is made. Its last window of an epoch closes when the update is made for the last
    time in it, and is averaged over its real length. For that, the epoch's length has to be known.

    Args:
        every: the n of each update by name.
        offset: by how many iterations the updates are made later, by name; 0 for those not named.
        frequencies: the n of each update as keywords: ``UpdateFrequency(generator=5)``.

    Errors:
        A name that no update has, and frequencies that leave some iteration without any update, so that its batch would be lost,
        are refused when the handler is attached. Accumulation for such an update over data of unknown length is refused in
        front of the epoch. How many steps the update makes is not known beforehand, so that a schedule such as OneCycleLR has
        to be given its number of steps.

    Source:
        Arjovsky, Chintala and Bottou, "Wasserstein Generative Adversarial Networks" (ICML 2017), algorithm 1, where n_critic = 5.

    Example:
        >>> UpdateFrequency({"generator": 5}).every
        {'generator': 5}
        >>> UpdateFrequency(generator=2, critic=2, offset={"critic": 1}).every  # by turns
        {'generator': 2, 'critic': 2}
    """

    trains = True

    def __init__(
        self,
        every: Mapping[str, int] | None = None,
        *,
        offset: Mapping[str, int] | None = None,
        name: str | None = None,
        **frequencies: int,
    ) -> None:
        super().__init__(name=name)
        if not isinstance(every or {}, Mapping) or not isinstance(offset or {}, Mapping):
            raise TypeError(
                f"UpdateFrequency(every={every!r}, offset={offset!r}): give updates by name: UpdateFrequency({{'generator': 5}})"
            )
        self.every = {**(every or {}), **frequencies}
        self.offset = dict(offset or {})
        if not self.every:
            raise ValueError("UpdateFrequency(every={}): name at least one update: UpdateFrequency({'generator': 5})")
        if twice := sorted(set(every or {}) & set(frequencies)):
            raise ValueError(f"UpdateFrequency(every={every!r}): {', '.join(twice)} is given as a keyword, too")
        for argument, numbers, least in (("every", self.every, 1), ("offset", self.offset, 0)):
            for update, number in numbers.items():
                numbers[update] = check_int(self, f"{argument}[{update!r}]", number, least=least)
        for update, number in self.offset.items():
            if update not in self.every:
                raise ValueError(f"UpdateFrequency(offset={{{update!r}: {number}}}): give {update!r} a frequency, too")
        self._window: int | None = None  # of the update at work, if it was closed early

    def is_made(self, update: str, iteration: int) -> bool:
        """Whether the update of this name is made in this iteration."""
        every = self.every.get(update, 1)
        return (iteration - self.offset.get(update, 0)) % every == 0

    def attached(self, engine: Engine) -> None:
        for update in self.every:
            engine.find_update(update)
        engine.overrides.claim(Override.UPDATE_FREQUENCY, by=self)
        if all(update.name in self.every for update in engine.updates):
            period = range(1, lcm(*self.every.values()) + 1)
            idle = next((i for i in period if not any(self.is_made(update, i) for update in self.every)), None)
            if idle is not None:
                raise ValueError(
                    f"UpdateFrequency(every={self.every}, offset={self.offset}): in iteration {idle} no update would be made, "
                    "and its batch would be lost; leave out one of the updates, or choose other offsets"
                )
        self._tell(engine)

    def _tell(self, engine: Engine) -> None:
        for name, every in self.every.items():
            if every > 1:
                engine.find_update(name).regular = False

    def detached(self, engine: Engine) -> None:
        for name, every in self.every.items():
            if every > 1:
                engine.find_update(name).regular = True

    @on(Events.STARTED, phase=Phase.PREPARE)
    def start(self, engine: Engine) -> None:
        """Say that batches are not steps; another handler may have said otherwise when it left."""
        self._tell(engine)

    @on(Events.EPOCH_STARTED, phase=Phase.PREPARE)
    def check(self, engine: Engine) -> None:
        """Refuse windows of which nobody can know in time that the epoch closes them."""
        for name, every in self.every.items():
            update = engine.find_update(name)
            if every > 1 and update.window.length > 1 and engine.state.epoch_length is None:
                raise ValueError(
                    f"{self.name!r}: gradients of update {name!r} are accumulated, but over data without a length it is not "
                    f"known which of every {every} iterations is the epoch's last to make it; give epoch_length= to run()"
                )

    @on(Events.ITERATION_STARTED, rank=CHOOSE_UPDATES)
    def choose(self, engine: Engine) -> None:
        """Leave out the updates whose turn it is not."""
        state = engine.state
        state.plan = [update for update in state.plan if self.is_made(update.name, state.iteration)]

    @on(Events.UPDATE_STARTED, phase=Phase.FINALIZE)
    def close_window(self, engine: Engine) -> None:
        """Close the open window where the update is made for the last time in the epoch."""
        update = engine.state.update
        if update.window.length > 1 and not update.more and self._last_in_epoch(engine, update):
            self._window = update.window.length
            update.window.length = update.window.filled + 1

    def _last_in_epoch(self, engine: Engine, update: UpdateState) -> bool:
        state = engine.state
        if update.name not in self.every or state.epoch_length is None:
            return False
        return state.epoch_iteration + self.every[update.name] > state.epoch_length

    @on(Events.UPDATE_COMPLETED, phase=Phase.PREPARE)
    def open_window(self, engine: Engine) -> None:
        """Give the next window its full length again."""
        if self._window is not None:
            engine.state.update.window.length = self._window
            self._window = None

    @on(Events.ENDED)
    def finish(self, engine: Engine) -> None:
        """After an error the next epoch gives the windows their lengths."""
        self._window = None
