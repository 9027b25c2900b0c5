"""Everything that waits for a place where the loop may end: stops, preemption, toggles, the time limit, a state to restore."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .events import Events
from .part import Part

if TYPE_CHECKING:
    from .kernel import Kernel
    from .signals import Signal

__all__ = ["Boundary"]

_MOST_EMPTY = 10  # epochs


class Boundary(Part["Kernel"]):
    """Requests that may arrive at any time, and take effect where the loop calls `attend`.

    Each request calls `wake`, even from a signal handler. The loop calls `attend` after ITERATION_COMPLETED, and where a stop
    needs no further iteration. An iteration without requests has no overhead.

    Attributes:
        stops: the requested stops, by requester. The dictionary stays the same object, because the loop holds it.
        epoch_stop: why the epoch ends early; None if it does not.
        preempted: whether this run was saved and stopped; the run that resumes it completes the epoch.
    """

    def __init__(self, engine: Kernel) -> None:
        super().__init__(engine)
        self.stops: dict[str, str] = {}
        self.epoch_stop: str | None = None
        self.preempted = False
        self._signal: Signal = engine.signal(Events.ITERATION_COMPLETED)
        self.preemption: str | None = None
        self._deadline: float | None = None
        self._restored = False  # whether a state was put back since `take_restored`
        self._going_back: Callable[[], None] | None = None
        self._stopped_bounds: list[int | None] | None = None  # the bounds of the run that was stopped
        self._empty_epochs = 0  # in a row

    # ---- waiting for the boundary ---------------------------------------------------------------------------------

    def wake(self) -> None:
        """Have `attend` called at the end of this iteration."""
        if not self._signal.awaited:
            self._signal.wait(True)

    @property
    def is_awake(self) -> bool:
        """Whether something is to be attended to."""
        return self._signal.awaited

    def attend(self) -> bool:
        """Do what had to wait for the end of the iteration; True if the epoch does not continue, or begins again.

        It is called at the end of an iteration, and wherever a stop may take effect besides: after STARTED, EPOCH_STARTED,
        GET_BATCH_STARTED, GET_BATCH_COMPLETED, ITERATION_STARTED, the last iteration of an epoch and EPOCH_COMPLETED.
        """
        engine = self.engine
        for update in engine.updates:
            update.skipped = None
        engine.signals.between_events()
        self._sleep_if_nothing_recurs()
        stops, preemption = self.agreed()
        if self._going_back is not None:
            self._going_back()
            self._going_back = None  # only now: what an interrupt cut short is put back again as the run continues
            self._restored = True
        if preemption is not None:
            self.preempted = True
            engine.signals.emit(engine, Events.PREEMPTED)  # before the stop, which the saved state does not have
            self._stop(preemption)
            return True
        if not engine.handlers.is_settled:
            if any(update.window.filled for update in engine.updates):
                self.wake()  # once the window is closed
            else:
                engine.handlers.settle()
        if stops:
            if self._may_stop():
                self._stop(stops[min(stops)])
                return True
            self.wake()
        if self.epoch_stop is not None:
            discard_windows(engine)
            return True
        return self._restored or self.limit_reached()

    def _sleep_if_nothing_recurs(self) -> None:
        recurring = self._deadline is not None or self.engine.state.max_steps is not None
        if recurring is not self._signal.awaited:
            self._signal.wait(recurring)

    def agreed(self) -> tuple[dict[str, str], str | None]:
        """The stops and the preemption that take effect now."""
        return self.stops, self.preemption

    def decides(self, by: str | None) -> bool:
        """Whether what this name asks for takes effect in this process at once."""
        return True

    # ---- asking ---------------------------------------------------------------------------------------------------

    def stop(self, reason: str, *, by: str) -> None:
        """Stop the run once all receivers of this event have run; see `Engine.terminate`.

        Within an iteration, a step that has not been taken yet is skipped, and updates that have not begun are omitted; an
        iteration in which no update has begun is omitted entirely. ``min_epochs`` and ``min_iters`` delay a stop; until it
        takes effect, `withdraw` cancels it.
        """
        engine = self.engine
        if not engine.running:
            raise RuntimeError(f"terminate({reason!r}): the engine is not running")
        if not isinstance(reason, str) or not reason:
            raise TypeError(f"terminate({reason!r}): expected a short reason, such as 'loss is NaN'")
        self.stops.setdefault(by, reason)
        engine.signals.note_asker(engine)
        self.wake()
        run = engine.current_run
        if self.decides(by) and run is not None and self._may_stop():
            for update in run.loop.to_skip():
                update.skip(f"the run is being stopped: {reason}")

    def withdraw(self, *, by: str = "user") -> None:
        """Cancel a stop that has not taken effect yet. Steps and updates that were skipped for the stop remain skipped."""
        self.stops.pop(by, None)

    def end_epoch(self, reason: str, *, by: str) -> None:
        """End the epoch at the next boundary; see `Engine.terminate_epoch`."""
        if not self.engine.running or not self.engine.state.epoch_open:
            raise RuntimeError(f"terminate_epoch({reason!r}): no epoch is under way")
        self.ask_epoch_stop(reason, by=by)
        self.engine.signals.note_asker(self.engine)
        self.wake()

    def ask_epoch_stop(self, reason: str, *, by: str) -> None:
        """Note that the epoch is to end."""
        self.epoch_stop = reason

    def preempt(self, reason: str) -> None:
        """Save and stop the run at the next iteration boundary, so that another process can resume it exactly; with several
        ranks, once they agree.

        Unlike with `Engine.terminate`, the current iteration is finished, ``min_epochs`` and ``min_iters`` do not delay the
        stop, and PREEMPTED is emitted before an open window is discarded, so receivers of PREEMPTED take the snapshot of a run
        that continues. TERMINATED, COMPLETED and ENDED follow. A signal handler may call this at any time.

        Args:
            reason: stored in ``state.stop_reason``.
        """
        if not self.engine.running:
            raise RuntimeError(f"preempt({reason!r}): the engine is not running")
        self.preemption = reason  # in this order: an `attend` in between sees it at the next boundary
        self.wake()

    def go_back(self, act: Callable[[], None]) -> None:
        """Let ``act`` put an earlier position in place at the end of this iteration, from which the run then continues."""
        self._going_back = act
        self.wake()

    @property
    def requests(self) -> tuple[dict[str, str], Callable[[], None] | None]:
        """The stops, and what goes back to an earlier position, that were asked for and did not take effect yet."""
        return dict(self.stops), self._going_back

    def ask_again(self, stops: Mapping[str, str], going_back: Callable[[], None] | None) -> None:
        """Ask for what was asked for in the run before, and which an error kept from taking effect."""
        for by, reason in stops.items():
            self.stops.setdefault(by, reason)
        self._going_back = going_back if self._going_back is None else self._going_back
        if self.stops or self._going_back is not None:
            self.wake()

    # ---- what the loop asks ---------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Begin a run under the bounds that the state has."""
        seconds = self.engine.state.max_seconds
        self._deadline = None if seconds is None else self.engine.group.now() + seconds
        self.stops.clear()
        self.preemption = self._going_back = None
        self._restored = self.preempted = False
        self._empty_epochs = 0
        self._sleep_if_nothing_recurs()

    def end_run(self) -> None:
        """End a run: nobody attends any more."""
        if self._signal.awaited:
            self._signal.wait(False)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the run's time limit, negative once it has passed; None if there is no limit."""
        return None if self._deadline is None else self._deadline - self.engine.group.now()

    def limit_reached(self) -> bool:
        """Whether the run has reached one of its bounds, or was stopped."""
        state = self.engine.state
        return (
            state.stop_reason is not None
            or (state.max_epochs is not None and state.epoch - state.epoch_open >= state.max_epochs)
            or (state.max_iters is not None and state.iteration >= state.max_iters)
            or (state.max_steps is not None and self.engine.updates[0].steps >= state.max_steps)
            or (self._deadline is not None and self.engine.group.has_come(self._deadline))
        )

    def why_ended(self) -> str:
        """What ended a run that makes no iteration, for its warning."""
        state, left = self.engine.state, self.seconds_left
        if state.stop_reason is not None:
            return f"the run was stopped ({state.stop_reason})"
        if left is not None and left <= 0:
            return f"max_time={state.max_seconds:g} s ran out before the first iteration,"
        return "the run reached its bounds"

    def stops_now(self) -> bool:
        """Whether a stop takes effect inside an iteration."""
        return bool(self.stops) and self._may_stop()

    def cuts_now(self) -> bool:
        """Whether a stop of the run or of the epoch takes effect inside an iteration, before its updates; see `stops_now`."""
        return self.stops_now() or self.epoch_stop is not None

    def take_restored(self) -> bool:
        """Return whether a state was put back in place, so that the epoch begins again there, and clear that."""
        restored, self._restored = self._restored, False
        return restored

    def take_epoch_stop(self) -> bool:
        """Return whether the epoch was ended early, and clear the request."""
        reason, self.epoch_stop = self.epoch_stop, None
        return reason is not None

    def check_moves(self) -> None:
        """Raise an error for a run whose epochs are ended before their first iteration, if nothing else ends it."""
        state = self.engine.state
        self._empty_epochs = 0 if state.epoch_iteration else self._empty_epochs + 1
        if self._empty_epochs >= _MOST_EMPTY and state.max_epochs is state.max_seconds is None:
            raise RuntimeError(
                f"{_MOST_EMPTY} epochs in a row ended before their first iteration (reason: {self.epoch_stop!r}), so "
                "the run would never end; call terminate_epoch() at ITERATION_COMPLETED, or pass max_epochs= to run()"
            )

    def _may_stop(self) -> bool:
        """Whether the minimum bounds let a stop take effect."""
        state = self.engine.state
        return state.epoch - state.epoch_open >= state.min_epochs and state.completed >= state.min_iters

    def _stop(self, reason: str) -> None:
        state = self.engine.state
        state.stop_reason = reason
        self._stopped_bounds = [state.max_epochs, state.max_iters, state.max_steps]
        self.stops.clear()
        self.preemption = None
        discard_windows(self.engine)

    def reconsider_stop(self) -> None:
        """Let a stopped run continue if it is given larger bounds than those under which it was stopped."""
        state = self.engine.state
        if state.stop_reason is None:
            return
        now = [state.max_epochs, state.max_iters, state.max_steps]
        before = self._stopped_bounds or now
        larger = [old is not None and (new is None or new > old) for new, old in zip(now, before, strict=True)]
        if any(larger) or before == [None] * 3:  # stopped under a time limit, which every run has again
            state.stop_reason = None

    # ---- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "stops": dict(self.stops),  # asked for, and still to take effect
            "epoch_stop": self.epoch_stop,
            "stopped_bounds": self._stopped_bounds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave; stops that were asked for since the run began stay."""
        self._stopped_bounds = state["stopped_bounds"]
        for by, reason in state["stops"].items():
            self.stops.setdefault(by, reason)
        self.epoch_stop = state["epoch_stop"]
        if state["stops"] or state["epoch_stop"] is not None:
            self.wake()

    def reset(self) -> None:
        """Forget the bounds under which a run was stopped."""
        self._stopped_bounds = None


def discard_windows(engine: Kernel) -> None:
    """Forget the gradients and the questions of all open windows."""
    for update in engine.updates:
        update.abandon()
