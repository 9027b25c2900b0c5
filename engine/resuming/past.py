"""The states that a run has passed through, kept in memory, and going back to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.overrides import Claim
from ..core.part import Part
from ..data.left_out import LeftOut
from ..data.source import DataError
from .keys import UNSAVED

if TYPE_CHECKING:
    from ..core.handler import Handler
    from ..engine import Engine

__all__ = ["Past", "Place"]

BEFORE = "before"
"""The key of where the pass over the data began that came before that of a state; see `Source.before`."""


_MOST_REPEATS = 10


class Place(NamedTuple):
    """A batch of the run.

    Attributes:
        epoch: the number of the pass over the data, counted from 1: the epoch, unless passes continue across epochs.
        batch: its index in that pass, counted from 0.
    """

    epoch: int
    batch: int

    def __str__(self) -> str:
        return f"batch {self.batch} of epoch {self.epoch}"


class Past(Part["Engine"]):
    """Keeps the newest states of a run in memory, and puts one of them back in place.

    A handler keeps them (`keep_states`), and takes one at every n-th iteration with `hold`. Going back to any iteration since
    the oldest state is exact: the newest state from before it is put back, and the run makes the iterations in between again, bit
    for bit. A saved state has the oldest of them with it, so that a resumed run can go back as far.

    Attributes:
        every: the interval of the states in iterations; 0 if none are kept.
        keep: how many are kept.
        oldest: the earliest iteration to which the run can go back; None if it cannot.
        reached: the last iteration that was made before the run went back; None if it did not.
        recorded: what a handler has recorded of the iterations since the oldest state, by iteration and name.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.every = 0
        self.keep = 0
        self.oldest: int | None = None
        self.reached: int | None = None
        self.recorded: dict[int, dict[str, float]] = {}
        self._states: dict[int, dict[str, Any]] = {}  # by iteration, the oldest first
        # How often in a row the run went back from one iteration to another, with nothing changed.
        self._repeated = 0, (0, 0)
        self._before: int | None = None  # from a loaded state, until its position in the data is in place

    # ---- keeping states -------------------------------------------------------------------------------------------

    def keep_states(self, *, every: int, keep: int, by: Handler) -> None:
        """Let a handler keep states of this run, until it is detached."""
        self.engine.overrides.claim(Claim("which earlier states are kept", rehearsed=False), by=by)
        self.every, self.keep = every, keep

    def forget(self) -> None:
        """Keep no states any more."""
        self.every = self.keep = 0
        self.reset()

    def reset(self) -> None:
        """Drop the states."""
        self._take({})
        self.reached, self.recorded = None, {}

    def _take(self, states: dict[int, dict[str, Any]]) -> None:
        self._states, self.oldest = states, min(states, default=None)

    def begin_run(self) -> None:
        """Begin with the state in which the run starts, unless there are those of the run that it continues.

        Raises:
            DataError: for data that cannot go back, such as a generator.
        """
        self.reached, self._repeated = None, (0, (0, 0))
        feed = self.engine.feed
        feed.check_can_go_back({"random": None})
        if self._before is not None:
            feed.current.before, self._before = self._before, None
        if not self._states:
            self.hold()

    def hold(self) -> None:
        """Keep the state of this iteration, and drop the oldest one if there are too many.

        A state from before the first pass over data that keeps its own position is of no use: it is not kept. Nor is one of an
        iteration at whose end the run goes back: it would only take the place of an older one.
        """
        engine = self.engine
        if engine.boundary.requests[1] is not None:
            return
        state = engine.snapshots.own_state()
        try:
            engine.feed.check_can_go_back(state["data"])
        except DataError:
            return
        state[BEFORE] = engine.feed.current.before
        self._states.pop(engine.state.iteration, None)
        while len(self._states) >= self.keep:
            del self._states[next(iter(self._states))]
        self._take(self._states | {engine.state.iteration: state})
        oldest = self.oldest or 0
        self.recorded = {iteration: values for iteration, values in self.recorded.items() if iteration > oldest}

    @property
    def newest(self) -> int | None:
        """The iteration of the newest state that is kept; None without one."""
        return max(self._states, default=None)

    def before(self, iteration: int) -> tuple[int, dict[str, Any]]:
        """The newest state from which an iteration can be repeated, and the iteration that it is from.

        Raises:
            RuntimeError: if there is none.
        """
        fitting = [one for one in self._states if one < iteration]
        if not fitting:
            have = (
                f"the oldest stored state is from iteration {self.oldest}"
                if self._states
                else "no states are stored; attach a handler that stores states, such as Rewindable()"
            )
            raise RuntimeError(f"iteration {iteration} cannot be repeated: {have}")
        return max(fitting), self._states[max(fitting)]

    # ---- going back -----------------------------------------------------------------------------------------------

    def rewind(
        self, to: int, *, leave_out: int | Sequence[Place] = 0, changes: Mapping[str, Any] | None = None
    ) -> list[Place]:
        """Go back to the end of an iteration; see `Engine.rewind`.

        Args:
            to: the iteration.
            leave_out: which batches are left out from now on, or how many of those that follow the iteration.
            changes: what replaces entries of handlers' states, by handler: what is to be remembered of having gone back.

        Returns:
            The batches that are left out.
        """
        engine, now = self.engine, self.engine.state.iteration
        if not engine.running:
            raise RuntimeError(
                f"rewind(to={to!r}): the engine is not running; outside a run, call load_state_dict() instead"
            )
        if isinstance(to, bool) or not isinstance(to, int) or not 0 <= to < now:
            raise ValueError(f"rewind(to={to!r}): expected the number of a completed iteration, from 0 to {now - 1}")
        leave_out = self._places(to, leave_out)
        if not leave_out and not changes:
            self._check_repeats(now, to)
        last = self._becomes_last(to, leave_out)
        if last and self.oldest == to:
            raise RuntimeError(
                f"rewind(to={to}): without the skipped batches, iteration {to} is the last of its epoch, so it must be "
                f"repeated from an earlier state. The oldest stored state is from iteration {to}; increase keep= of "
                "the handler that stores the states"
            )
        _, state = self.before(to if last else to + 1)
        engine.snapshots.restore(self._changed(state, leave_out, changes or {}))
        return list(leave_out)

    def _changed(
        self, state: Mapping[str, Any], leave_out: Sequence[Place], changes: Mapping[str, Any]
    ) -> dict[str, Any]:
        """A state with batches that are left out from now on, and with other entries of handlers' states."""
        places = [(place.epoch - 1, place.batch) for place in leave_out]
        # Also those that were left out since that state, when the run went back before.
        left_out = (self.engine.feed.current.left_out or LeftOut()).plus(places).state_dict()
        data = {**(state["data"] or {}), "left_out_now": left_out} if left_out else state["data"]
        handlers = {name: {**state["handlers"].get(name, {}), **entries} for name, entries in changes.items()}
        return {**state, "data": data, "handlers": {**state["handlers"], **handlers}}

    def _places(self, to: int, leave_out: int | Sequence[Place]) -> Sequence[Place]:
        """The places of batches that are left out, which are given, or by how many follow the iteration."""
        if isinstance(leave_out, int):
            if isinstance(leave_out, bool) or leave_out < 0:
                raise ValueError(f"rewind(leave_out={leave_out!r}): expected a number of batches, 0 or more")
            return self.places_of(range(to + 1, min(to + leave_out, self.engine.state.iteration) + 1))
        if isinstance(leave_out, str) or not all(isinstance(one, Place) for one in leave_out):
            raise TypeError(
                f"rewind(leave_out={leave_out!r}): expected a number of batches, or a list of places, such as "
                "[engine.replay(iteration).place]"
            )
        return leave_out

    def _becomes_last(self, to: int, leave_out: Sequence[Place]) -> bool:
        """Whether an iteration may become the last of its epoch, as nothing that was read after it is used any more.

        It has to be repeated then, since the last iteration closes the accumulation window and ends what counts in epochs.
        """
        engine, now = self.engine, self.engine.state.iteration
        feed = engine.feed
        own = self.places_of([to]) if leave_out and not feed.current.continues else []
        later = [place for place in self.places_of(range(to + 1, now + 1)) if own and place.epoch == own[0].epoch]
        if not later or not set(later) <= set(leave_out):
            return False
        ends_later = later[-1] == self.places_of([now])[0] and now < feed.epoch_end
        return not ends_later

    def _check_repeats(self, now: int, to: int) -> None:
        """Raise an error for a run that goes back again and again: it makes the same iterations each time, and never ends."""
        count, way = self._repeated
        self._repeated = (count + 1 if way == (now, to) else 1), (now, to)
        if self._repeated[0] > _MOST_REPEATS:
            raise RuntimeError(
                f"rewind(to={to}): the run goes back from iteration {now} for the {self._repeated[0]}th time without "
                "leaving out a batch, and would do so forever. The function that calls rewind() runs again whenever "
                "the run reaches this iteration; pass leave_out=, or let the function remember that it has already "
                "called rewind()"
            )

    def places_of(self, iterations: Iterable[int]) -> list[Place]:
        """Which batches the iterations have used, as far back as to the pass before this one; none without data."""
        feed = self.engine.feed
        return [Place(number + 1, index) for number, index in feed.places_of(iterations)] if feed.has_data else []

    def went_back(self, reached: int, state: Mapping[str, Any]) -> None:
        """Drop the states that the run repeats, once one was put back."""
        self.reached = reached
        self.engine.feed.current.before = state.get(BEFORE)
        now = self.engine.state.iteration
        self._take({iteration: state for iteration, state in self._states.items() if iteration <= now})

    # ---- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The oldest state, from which everything since then can be repeated."""
        if self.oldest is None:
            return {}
        before = self.engine.feed.current.before
        oldest = {key: value for key, value in self._states[self.oldest].items() if key != UNSAVED}
        return {"iteration": self.oldest, "state": oldest, BEFORE: before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave, in a run that resumes, if a handler keeps states."""
        if state and self.every:
            self._take({state["iteration"]: dict(state["state"])})
            self._before = state[BEFORE]
