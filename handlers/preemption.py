"""Preemption: a signal saves the run and stops it, so that another process goes on as if there had been no stop."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any, Literal

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.checks import check_int, check_number

__all__ = ["Preemption"]

_FOR_ALL = ("SIGUSR1", "SIGUSR2")
"""Signals that schedulers send to all processes of a job; by default they would end the data's workers before the run is
saved."""


class Preemption(Handler):
    """Lets signals, as schedulers send before they take a machine away, save the run and stop it.

    The iteration under way is completed. Then PREEMPTED is told, at which every `Checkpoint` that holds the whole state writes
    one, as ``<name>-...-preempted``, also inside an accumulation window; functions of your own may listen to it, too. The
    run is stopped as by ``engine.terminate``: TERMINATED, COMPLETED and ENDED come, ``state.stop_reason`` names the signal.
    The run that is resumed from there ends as one that was never stopped, bit for bit.

    After ENDED, ``run()`` raises SystemExit, so that whoever started the process sees that it was not finished: with 128 + the
    signal's number, 143 for SIGTERM, as shells tell it. torchrun starts such a process again, and Slurm a job with
    ``--requeue``. The signal comes in time with ``sbatch --signal=USR1@120``, whose number has to be longer than an
    iteration, an evaluation and a checkpoint together.

    While a run goes on, the signals' previous handlers are replaced; they are back when it has ended, also by an error. A
    second signal of the same kind gets to the previous handler, which by default ends the process at once. Forked workers of
    the data ignore SIGUSR1 and SIGUSR2. They die of a SIGTERM of their own, and the run with them: send it to the
    training process alone.

    Args:
        signals: their names.
        exit_status: with what the process leaves: "signal" for 128 + the signal's number, a number of your own, or None: then
            ``run()`` returns, and `preempted` tells.
        repeat_seconds: a second signal of the same kind that comes this soon is the first one: torchrun hands on what the
            scheduler has sent to all processes already.

    Attributes:
        preempted: the name of the signal that came in the latest run; None if there was none.

    Errors:
        A run outside of the main thread, where Python hands over no signals, is refused at its start; so is a signal whose
        handler was not installed from Python and could not be put back.

    Example:
        >>> Preemption(["SIGTERM", "SIGUSR1"]).preempted is None
        True
    """

    trains = True

    def __init__(
        self,
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1"),
        *,
        exit_status: int | Literal["signal"] | None = "signal",
        repeat_seconds: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.signals = _check_signals(signals)
        if exit_status is not None and exit_status != "signal":
            exit_status = check_int(self, "exit_status", exit_status, least=0)
            if exit_status > 255:
                raise ValueError(f"Preemption(exit_status={exit_status}): a process has one of 0 to 255")
        self.exit_status = exit_status
        self.repeat_seconds = check_number(self, "repeat_seconds", repeat_seconds, least=0)
        self.preempted: str | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._came_at = 0.0
        self._process = 0

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_previous": {}}

    @on(Events.STARTED, phase=Phase.PREPARE)
    def install(self, engine: Engine) -> None:
        """Take the signals over until the run ends."""
        self.preempted = None
        self._process = os.getpid()
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"{self.name!r}: Python hands signals to the main thread only, and this run is in "
                f"{threading.current_thread().name!r}; run it in the main thread, or detach {self.name!r}"
            )
        for one in self.signals:
            if signal.getsignal(one) is None:
                raise RuntimeError(
                    f"{self.name!r}: the handler of {one.name} was not installed from Python, and could not be put back; "
                    "leave that signal out"
                )
        for one in self.signals:
            self._previous[one] = signal.getsignal(one)
            signal.signal(one, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Runs between any two bytecodes: it only notes what came."""
        came = signal.Signals(number)
        if os.getpid() != self._process:
            if came.name not in _FOR_ALL:
                self._hand_on(came, frame)
        elif self.preempted is None:
            self.preempted = came.name
            self._came_at = time.monotonic()
            if (engine := self.engine) is not None and engine.running:
                engine.boundary.preempt(f"preempted by {came.name}")
        elif self.preempted == came.name and time.monotonic() - self._came_at >= self.repeat_seconds:
            self._hand_on(came, frame)

    def _hand_on(self, came: signal.Signals, frame: FrameType | None) -> None:
        previous = self._previous.get(came, signal.SIG_DFL)
        if callable(previous):
            previous(came, frame)
        elif previous == signal.SIG_DFL:
            signal.signal(came, signal.SIG_DFL)
            signal.raise_signal(came)

    @on(Events.PREEMPTED, phase=Phase.PREPARE)
    def tell_all(self, engine: Engine) -> None:
        """Of several processes, the signal may have come to one of them: all leave alike."""
        came = [signal for signal in engine.processes.gather(self.preempted) if signal is not None]
        if self.preempted is None and came:
            # The scheduler has sent it to all: what comes here in a moment is the same one.
            self.preempted, self._came_at = came[0], time.monotonic()

    @on(Events.TERMINATED, phase=Phase.RECORD)
    def tell(self, engine: Engine) -> None:
        """Say so if nothing was saved."""
        if self.preempted is not None and all(
            one.owner == self.name for one in engine.signal(Events.PREEMPTED).connections
        ):
            warnings.warn(
                f"{self.name!r}: the run was stopped by {self.preempted}, and nothing saved it: attach a Checkpoint that holds "
                "the whole state, or connect a function to Events.PREEMPTED",
                stacklevel=2,
            )

    @on(Events.ENDED, phase=Phase.PERSIST)
    def leave(self, engine: Engine) -> None:
        """Put the previous handlers back; a signal that came is not forgotten, also if it came too late for a stop."""
        self._put_back()
        if self.preempted is None or self.exit_status is None or engine.state.exception is not None:
            return
        number = signal.Signals[self.preempted].value
        raise SystemExit(128 + number if self.exit_status == "signal" else self.exit_status)

    def detached(self, engine: Engine) -> None:
        self._put_back()

    def _put_back(self) -> None:
        while self._previous:
            one, previous = self._previous.popitem()
            if signal.getsignal(one) == self._receive:  # somebody may have replaced it, and has to put it back
                signal.signal(one, previous)


def _check_signals(signals: Sequence[str]) -> tuple[signal.Signals, ...]:
    where = f"Preemption(signals={signals!r})"
    if isinstance(signals, str) or not isinstance(signals, Sequence) or not signals:
        raise TypeError(f"{where}: give the names of signals in a list, such as ['SIGTERM', 'SIGUSR1']")
    found = []
    for name in signals:
        if not isinstance(name, str) or name not in signal.Signals.__members__:
            raise ValueError(f"{where}: {name!r} is no signal here; give names such as 'SIGTERM'")
        if name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"{where}: {name} cannot be caught by any process")
        found.append(signal.Signals[name])
    return tuple(dict.fromkeys(found))
