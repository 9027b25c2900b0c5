"""Update frequencies: runs some of several updates only in every n-th iteration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import lcm

from signalfire import Engine, Events, Handler, Phase, UpdateState, on
from signalfire.authoring import Claim, check_int, last_iteration
from signalfire.findings import Finding, finding

from ._common.ranks import SELECT_UPDATES

__all__ = ["UpdateFrequency"]


class UpdateFrequency(Handler):
    """Runs an update only in every n-th iteration, such as a GAN's generator once per five critic steps (n_critic).

    Iterations are counted over all epochs, from 1: with n = 5 the update runs in the iterations 5, 10, 15, ..., and with an
    offset of 1 in 1, 6, 11, ... In other iterations, the update is omitted, as if the engine did not have it. Updates not named
    here run in every iteration.

    Gradient accumulation counts only iterations that run the update. Its last window of an epoch closes when the update runs for
    the last time in the epoch, and is averaged over its actual length. This requires a known length of the epoch.

    Args:
        every: Interval n in iterations of each update, by name.
        offset: Number of iterations by which an update is delayed, by name; 0 for updates not named.
        frequencies: Interval n of each update, as keywords: ``UpdateFrequency(generator=5)``.

    Errors:
        KeyError: When the handler is attached, for a name that no update has.
        ValueError: When it is attached, for frequencies that leave an iteration without any update, because its batch would be
            lost; and before an epoch of unknown length, if the gradients of such an update are accumulated. Since the number of
            steps of the update is not known in advance, a schedule such as OneCycleLR must be given its number of steps.

    Source:
        Arjovsky, Chintala and Bottou, "Wasserstein Generative Adversarial Networks" (ICML 2017), algorithm 1, where n_critic = 5.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> def update(name):
        ...     def loss(engine, batch):
        ...         return engine.model[name](batch).square().mean()
        ...
        ...     options = {"lr": 0.1, "name": name, "parameters": name}
        ...     return Update.from_function(loss, torch.optim.SGD, **options)
        >>> models = {"critic": torch.nn.Linear(1, 1), "generator": torch.nn.Linear(1, 1)}
        >>> engine = Engine([update("critic"), update("generator")], model=models)
        >>> _ = engine.attach(UpdateFrequency(generator=5))
        >>> _ = engine.run([torch.ones(4, 1)] * 10, max_epochs=1)
        >>> {one.name: one.steps for one in engine.updates}
        {'critic': 10, 'generator': 2}
        >>> UpdateFrequency(generator=2, critic=2, offset={"critic": 1}).every  # alternating
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
        if not all(one is None or isinstance(one, Mapping) for one in (every, offset)):
            raise TypeError(
                f"UpdateFrequency(every={every!r}, offset={offset!r}): expected dicts that map update names to ints; "
                "write UpdateFrequency({'generator': 5})"
            )
        self.every = {**(every or {}), **frequencies}
        self.offset = dict(offset or {})
        if not self.every:
            raise ValueError("UpdateFrequency(every={}): name at least one update: UpdateFrequency({'generator': 5})")
        if twice := sorted(set(every or {}) & set(frequencies)):
            raise ValueError(
                f"UpdateFrequency(every={every!r}): given both in every= and as a keyword: {', '.join(twice)}; "
                "use only one of the two"
            )
        for argument, numbers, least in (("every", self.every, 1), ("offset", self.offset, 0)):
            for update, number in numbers.items():
                numbers[update] = check_int(self, f"{argument}[{update!r}]", number, least=least)
        for update, number in self.offset.items():
            if update not in self.every:
                raise ValueError(
                    f"UpdateFrequency(offset={{{update!r}: {number}}}): an offset needs a frequency; set one for "
                    f"{update!r} in every="
                )
        self._window: int | None = None  # length of the current update's window, if it is closed early

    def is_made(self, update: str, iteration: int) -> bool:
        """Whether the update of this name runs in this iteration."""
        every = self.every.get(update, 1)
        return (iteration - self.offset.get(update, 0)) % every == 0

    def attached(self, engine: Engine) -> None:
        for update in self.every:
            engine.find_update(update)
        engine.overrides.claim(Claim("how often each update runs"), by=self)
        if all(update.name in self.every for update in engine.updates):
            period = range(1, lcm(*self.every.values()) + 1)
            idle = next((i for i in period if not any(self.is_made(update, i) for update in self.every)), None)
            if idle is not None:
                raise ValueError(
                    f"UpdateFrequency(every={self.every}, offset={self.offset}): no update would run in iteration "
                    f"{idle}, so its batch would be lost; remove one update from this handler, so that it runs in "
                    "every iteration, or choose different offsets"
                )
        self._mark_updates(engine)

    def _mark_updates(self, engine: Engine) -> None:
        for name, every in self.every.items():
            if every > 1:
                engine.find_update(name).one_step_per_batch = False

    def detached(self, engine: Engine) -> None:
        for name, every in self.every.items():
            if every > 1:
                engine.find_update(name).one_step_per_batch = True

    def findings(self, engine: Engine) -> Iterator[Finding]:
        """Report updates that never run."""
        first, last = engine.state.iteration + 1, last_iteration(engine)
        for name, every in self.every.items():
            due = first + (self.offset.get(name, 0) - first) % every
            if last is not None and due > last:
                yield finding(
                    "C17",
                    f"{self.name!r} does not run the update {name!r} in this run: it is first due in iteration {due}, but the "
                    f"run ends with iteration {last}",
                    "use smaller numbers in every= or offset=, train longer, or continue the training in a later run()",
                    [self.name],
                )

    @on(Events.STARTED, phase=Phase.PREPARE, reads=[], writes=["step"])
    def mark_updates(self, engine: Engine) -> None:
        """Declare that batches are not steps; a different handler may have reset this when it was detached."""
        self._mark_updates(engine)

    @on(Events.EPOCH_STARTED, phase=Phase.PREPARE, reads=["window", "bounds"], writes=[])
    def check(self, engine: Engine) -> None:
        """Raise an error for accumulation windows that cannot be closed at the end of an epoch of unknown length."""
        for name, every in self.every.items():
            update = engine.find_update(name)
            if every > 1 and update.window.length > 1 and engine.state.epoch_length is None:
                raise ValueError(
                    f"{self.name!r}: update {name!r} accumulates gradients and runs every {every} iterations, but the "
                    "data has no length, so the update's last iteration in an epoch cannot be determined; pass "
                    "epoch_length= to run()"
                )

    @on(Events.ITERATION_STARTED, rank=SELECT_UPDATES, reads=["plan"], writes=["plan"])
    def select_updates(self, engine: Engine) -> None:
        """Omit the updates that do not run in this iteration."""
        state = engine.state
        state.plan = [update for update in state.plan if self.is_made(update.name, state.iteration)]

    @on(Events.UPDATE_STARTED, phase=Phase.FINALIZE, reads=["plan", "window", "bounds"], writes=["window"])
    def close_window(self, engine: Engine) -> None:
        """Close the open window when the update runs for the last time in the epoch."""
        update = engine.state.update
        if update.window.length > 1 and not update.more and self._last_in_epoch(engine, update):
            self._window = update.window.length
            update.window.length = update.window.filled + 1

    def _last_in_epoch(self, engine: Engine, update: UpdateState) -> bool:
        state = engine.state
        if update.name not in self.every or state.epoch_length is None:
            return False
        return state.epoch_iteration + self.every[update.name] > state.epoch_length

    @on(Events.UPDATE_COMPLETED, phase=Phase.PREPARE, reads=["window"], writes=["window"])
    def open_window(self, engine: Engine) -> None:
        """Reset the window to its full length."""
        if self._window is not None:
            engine.state.update.window.length = self._window
            self._window = None

    @on(Events.ENDED, reads=[], writes=[])
    def clear_window(self, engine: Engine) -> None:
        """Discard the length after an error; the next epoch sets the windows' lengths."""
        self._window = None
