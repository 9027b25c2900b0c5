"""Preemption: on a signal, saves a checkpoint and stops the run, so a new process can resume without loss."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Literal

from signalfire import Engine, Events, Finding, Handler, Phase, on
from signalfire.authoring import check_int, check_number, warn
from signalfire.authoring.functions import is_users, names_reached
from signalfire.findings import finding

__all__ = ["Preemption"]

_USUAL = tuple(name for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))  # Windows has no SIGUSR1
_FOR_ALL = ("SIGUSR1", "SIGUSR2")
"""Signals that schedulers send to all processes of a job; by default they would kill the DataLoader's workers before the run
is saved."""


class Preemption(Handler):
    """Saves a checkpoint and stops the run at a preemption signal (Slurm, spot instances), so it can resume without loss.

    The current iteration completes. Then PREEMPTED is emitted, to which you can also connect functions, and every `Checkpoint`
    of the whole state saves ``<name>-...-preempted``, even inside an accumulation window. The run stops as with
    ``engine.terminate``: TERMINATED, COMPLETED and ENDED are emitted, and ``state.stop_reason`` names the signal. A run resumed
    from this checkpoint is bit-identical to one that was never stopped.

    After ENDED, ``run()`` raises SystemExit to report that the run is not finished, by default with 128 + the signal's number,
    as in shells: 143 for SIGTERM and 138 for SIGUSR1. torchrun restarts such a process. Slurm requeues a job submitted with
    ``sbatch --requeue`` if Slurm itself preempted the job; before a time limit, the batch script must requeue the job if
    training ended with such a status: ``scontrol requeue $SLURM_JOB_ID``. Let Slurm send the signal early enough with
    ``sbatch --signal=USR1@120``; the number of seconds must exceed the time of an iteration, an evaluation and a checkpoint
    together.

    The previous signal handlers are replaced during a run and restored when it ends, even after an error. A second signal of
    the same kind goes to the previous handler, which by default ends the process at once. Forked workers of a DataLoader ignore
    SIGUSR1 and SIGUSR2. A SIGTERM kills them, and the run with them, so send SIGTERM only to the training process.

    Args:
        signals: Names of the signals that stop the run.
        exit_status: Exit status of the process: "signal" for 128 + the signal's number, any other number, or None to return from
            ``run()``; then check `preempted`.
        repeat_seconds: Seconds within which a second signal of the same kind is ignored, because torchrun forwards signals that
            the scheduler has already sent to all processes.

    Attributes:
        preempted: Name of the signal received in the latest run; None if there was none.

    Errors:
        RuntimeError: At the start of a run outside the main thread, where Python delivers no signals, and for a signal whose
            handler was not installed from Python and cannot be restored.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> def build(model):
        ...     update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.01)
        ...     return Engine(update, model=model)
        >>> data = [(torch.ones(2, 1), torch.zeros(2, 1))] * 4
        >>> engine = build(torch.nn.Linear(1, 1))
        >>> # Beside Checkpoint(folder, resume=True), which saves and resumes.
        >>> _ = engine.attach(Preemption(exit_status=None))
        >>> @engine.on(Events.PREEMPTED)
        ... def report(engine):
        ...     print("saved after iteration", engine.state.iteration)
        >>> @engine.on(Events.FORWARD_STARTED(once=3))
        ... def warn(engine):
        ...     os.kill(os.getpid(), signal.SIGTERM)  # as a scheduler does
        >>> engine.run(data, max_epochs=2).stop_reason
        saved after iteration 3
        'preempted by SIGTERM'
    """

    trains = True

    def __init__(
        self,
        signals: Sequence[str] = _USUAL,
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
                raise ValueError(f"Preemption(exit_status={exit_status}): expected an exit status from 0 to 255")
        self.exit_status = exit_status
        self.repeat_seconds = check_number(self, "repeat_seconds", repeat_seconds, least=0)
        self.preempted: str | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._received_at = 0.0
        self._process = 0

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_previous": {}}

    def findings(self, engine: Engine) -> Iterator[Finding]:
        """Report a run that no handler saves at the signal."""
        exits = self.exit_status is not None  # else the script may save the state after run()
        if engine.training and exits and not self._savers(engine):
            yield finding(
                "C31",
                f"{self.name!r} stops the run when a signal arrives, but no receiver seems to save the run",
                "attach a Checkpoint that saves the whole state, or connect a function to Events.PREEMPTED",
                [self.name],
            )

    def _savers(self, engine: Engine) -> bool:
        """Whether a receiver at the signal, or one of the user's at any event, may save the run."""
        receivers = [one.receiver for signal in engine.signals.all() for one in signal.connections]
        named = {name for one in receivers if is_users(one) for name in names_reached(one)}
        return any(one.owner != self.name for one in engine.signal(Events.PREEMPTED).connections) or any(
            name.startswith(("save", "dump", "state_dict")) for name in named
        )

    @on(Events.STARTED, phase=Phase.PREPARE, reads=[], writes=["signals"])
    def install(self, engine: Engine) -> None:
        """Install the signal handlers until the run ends."""
        self.preempted = None
        self._process = os.getpid()
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"{self.name!r}: Python delivers signals to the main thread only, but this run is in "
                f"{threading.current_thread().name!r}; run it in the main thread, or detach {self.name!r}"
            )
        for one in self.signals:
            if signal.getsignal(one) is None:
                raise RuntimeError(
                    f"{self.name!r}: the signal handler for {one.name} was not installed from Python and cannot be "
                    f"restored; remove {one.name} from signals="
                )
        for one in self.signals:
            self._previous[one] = signal.getsignal(one)
            signal.signal(one, self._receive)

    @on(Events.EPOCH_COMPLETED, phase=Phase.RECORD, reads=[], writes=[])
    def check_installed(self, engine: Engine) -> None:
        """Report a signal handler that something else has installed since the run started."""
        for one in self.signals:
            if not self._is_called_by(signal.getsignal(one)):
                engine.findings.report(
                    "W66",
                    f"{self.name!r}: a different signal handler for {one.name} was installed during the run. This "
                    "signal does not save the run unless the new signal handler calls the previous one",
                    "install your own signal handler before run() (the first signal then saves the run, and a second "
                    "one calls your handler), or remove this signal from signals=",
                    self.name,
                    key=one.name,
                )

    def _is_called_by(self, handler: Any) -> bool:
        """Whether a signal handler is that of this run, or one that holds it to call it."""
        cells = [cell.cell_contents for cell in getattr(handler, "__closure__", None) or ()]
        owner = getattr(getattr(handler, "__self__", None), "__dict__", {})
        return any(one == self._receive for one in (handler, *cells, *getattr(handler, "args", ()), *owner.values()))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Record the signal and request the stop, nothing else, since it runs between any two bytecodes."""
        received = signal.Signals(number)
        if os.getpid() != self._process:
            if received.name not in _FOR_ALL:
                self._forward(received, frame)
        elif self.preempted is None:
            self.preempted = received.name
            self._received_at = time.monotonic()
            if (engine := self.engine) is not None and engine.running:
                engine.boundary.preempt(f"preempted by {received.name}")
        elif self.preempted == received.name and time.monotonic() - self._received_at >= self.repeat_seconds:
            self._forward(received, frame)

    def _forward(self, received: signal.Signals, frame: FrameType | None) -> None:
        previous = self._previous.get(received, signal.SIG_DFL)
        if callable(previous):
            previous(received, frame)
        elif previous == signal.SIG_DFL:
            signal.signal(received, signal.SIG_DFL)
            signal.raise_signal(received)

    @on(Events.PREEMPTED, phase=Phase.PREPARE, reads=["processes"], writes=[])
    def sync_signal(self, engine: Engine) -> None:
        """Exchange the signal, which only some ranks may have received, so all exit with the same status."""
        received = [signal for signal in engine.processes.gather(self.preempted) if signal is not None]
        if self.preempted is None and received:
            # The scheduler has sent it to all processes: one received here shortly is the same signal.
            self.preempted, self._received_at = received[0], time.monotonic()

    @on(Events.TERMINATED, phase=Phase.RECORD, reads=[], writes=[])
    def warn_if_unsaved(self, engine: Engine) -> None:
        """Warn if nothing saved the run."""
        if self.preempted is not None and not self._savers(engine):
            warn(
                f"{self.name!r}: the run was stopped by {self.preempted}, but nothing saved it; attach a Checkpoint "
                "that saves the whole state, or connect a function to Events.PREEMPTED",
            )

    @on(Events.ENDED, phase=Phase.PERSIST, reads=[], writes=["signals"])
    def exit(self, engine: Engine) -> None:
        """Restore the signal handlers, and exit if a signal was received, even one too late to stop the run."""
        self._restore()
        if self.preempted is None or self.exit_status is None or engine.state.exception is not None:
            return
        number = signal.Signals[self.preempted].value
        raise SystemExit(128 + number if self.exit_status == "signal" else self.exit_status)

    def detached(self, engine: Engine) -> None:
        self._restore()

    def _restore(self) -> None:
        while self._previous:
            one, previous = self._previous.popitem()
            if signal.getsignal(one) == self._receive:  # otherwise other code has replaced it, and restores it
                signal.signal(one, previous)


def _check_signals(signals: Sequence[str]) -> tuple[signal.Signals, ...]:
    where = f"Preemption(signals={signals!r})"
    if isinstance(signals, str) or not isinstance(signals, Sequence) or not signals:
        raise TypeError(f"{where}: expected a list of signal names, such as ['SIGTERM', 'SIGUSR1']")
    found = []
    for name in signals:
        if not isinstance(name, str) or name not in signal.Signals.__members__:
            raise ValueError(f"{where}: {name!r} is not a signal on this system; use names such as 'SIGTERM'")
        if name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"{where}: no process can catch {name}; remove {name} from signals=")
        found.append(signal.Signals[name])
    return tuple(dict.fromkeys(found))
