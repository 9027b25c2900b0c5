"""Progress bar, or plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from tqdm.auto import tqdm

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.checks import check_bool, check_number, check_stream
from signalfire.monitor import check_announced
from signalfire.state import as_number, did_you_mean

__all__ = ["ProgressBar"]


class ProgressBar(Handler):
    """Shows the progress of the epoch, its speed, and the metrics.

    In a terminal or a notebook there is a bar for each epoch, which is removed at its end unless ``leave`` is set. Elsewhere
    (a file, a pipe) there is a line for each epoch, at most one in ``line_interval`` seconds, and always one for the last.
    Values are fetched from the device only when the bar is drawn, so that an iteration costs a fraction of a microsecond.

    Args:
        metrics: Names of the metrics or running values (see `Metrics`) to show; by default all, or the last batch's loss if
            there are none. Without a metric "loss", that name shows the last batch's loss. For a smoothed one, attach
            ``Metrics(loss=MovingAverage())`` to the trainer.
        interval: Shortest time in seconds between two drawings.
        leave: Whether finished bars stay.
        line_interval: Shortest time in seconds between two lines.
        file: Where to draw; standard error by default.

    Example:
        >>> ProgressBar(["accuracy"]).metrics
        ['accuracy']
    """

    rank_zero_only = True

    def __init__(
        self,
        metrics: Sequence[str] | None = None,
        *,
        interval: float = 0.1,
        leave: bool = False,
        line_interval: float = 5.0,
        file: TextIO | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if isinstance(metrics, str):
            raise TypeError(f"ProgressBar(metrics={metrics!r}): give a list of names: [{metrics!r}]")
        if metrics is not None and not (isinstance(metrics, Iterable) and all(isinstance(one, str) for one in metrics)):
            raise TypeError(f"ProgressBar(metrics={metrics!r}): expected a list of names, or None")
        self.metrics = None if metrics is None else list(metrics)
        self.interval = check_number(self, "interval", interval, least=0, infinite=True)
        self.leave = check_bool(self, "leave", leave)
        self.line_interval = check_number(self, "line_interval", line_interval, least=0, infinite=True)
        self.file = check_stream(self, "file", file)
        self._bar: tqdm[Any] | None = None
        self._plain = False
        self._last_line = 0.0
        self._epoch_began = 0.0
        self._printed_epoch = 0  # the epoch of the last line

    @on(Events.STARTED, phase=Phase.RECORD, reads=[], writes=[])
    def begin(self, engine: Engine) -> None:
        """Choose a bar or plain lines."""
        file = self.file or sys.stderr
        notebook = "ipykernel" in sys.modules and self.file is None
        self._plain = not notebook and not (hasattr(file, "isatty") and file.isatty())
        self._last_line = self._epoch_began = time.monotonic()
        if engine.state.epoch_open and not engine.snapshots.has_loaded_state:  # the run before ended inside this epoch
            self.begin_epoch(engine)

    @on(Events.STARTED, phase=Phase.CONTROL, reads=["metrics"], writes=[])
    def check_metrics(self, engine: Engine) -> None:
        """Raise an error for a name that nobody announced or writes."""
        for name in self.metrics or ():
            if name != "loss":
                check_announced(engine, name, by="ProgressBar", verb="shows")

    @on(Events.CHECKPOINT_LOADED, phase=Phase.RECORD, reads=[], writes=["files"])
    def resume(self, engine: Engine) -> None:
        """Start the bar at the position of a resumed epoch."""
        self._close()
        if engine.state.epoch_open:
            self.begin_epoch(engine)

    @on(Events.EPOCH_STARTED, phase=Phase.RECORD, reads=["bounds"], writes=["files"])
    def begin_epoch(self, engine: Engine) -> None:
        """Start a bar, at the position of an epoch that goes on."""
        self._epoch_began = time.monotonic()
        if not self._plain:
            self._close()
            self._bar = tqdm(
                initial=engine.state.epoch_iteration,
                total=engine.state.epoch_length,
                desc=_epoch_of(engine),
                mininterval=self.interval,
                leave=self.leave,
                file=self.file or sys.stderr,
                dynamic_ncols=True,
                unit="it",
            )

    @on(Events.ITERATION_COMPLETED, phase=Phase.RECORD, reads=["metrics", "loss"], writes=["files"])
    def advance(self, engine: Engine) -> None:
        """Count the iteration; fetch the values only if the bar is redrawn."""
        if self._bar is not None and self._bar.update():
            self._bar.set_postfix(self._values(engine), refresh=False)

    @on(Events.EPOCH_COMPLETED, phase=Phase.RECORD, reads=["loss", "metrics", "bounds"], writes=["files"])
    def end_epoch(self, engine: Engine) -> None:
        """Show the epoch's values."""
        self._report_missing(engine)
        if self._bar is not None:
            self._bar.set_postfix(self._values(engine), refresh=True)
            self._close()
        elif self._plain and time.monotonic() - self._last_line >= self.line_interval:
            self._line(engine)

    @on(Events.COMPLETED, phase=Phase.RECORD, reads=["loss", "metrics", "bounds"], writes=["files"])
    def end(self, engine: Engine) -> None:
        """Print a line for the last epoch, if there is none yet."""
        if self._plain and self._printed_epoch != engine.state.epoch:
            self._line(engine)

    @on(Events.ENDED, reads=[], writes=["files"])
    def close(self, engine: Engine) -> None:
        """Close the bar, also after an error."""
        self._close()

    def _report_missing(self, engine: Engine) -> None:
        metrics = engine.state.metrics
        known = {*metrics, *metrics.owners, *metrics.running, "loss"}
        for name in self.metrics or ():
            if name not in known and not any(name.startswith(f"{one}/") for one in metrics.owners):
                engine.findings.report(
                    "W61",
                    f"{self.name!r} shows {name!r}, but no such metric was produced in the first epoch; there are: "
                    f"{', '.join(sorted(known - {'loss'})) or 'none'}{did_you_mean(name, sorted(known))}",
                    f"correct the name, or announce it: engine.state.metrics.announce('user', [{name!r}])",
                    self.name,
                    key=name,
                )

    def _line(self, engine: Engine) -> None:
        self._last_line = time.monotonic()
        self._printed_epoch = engine.state.epoch
        values = "  ".join(f"{name} {value}" for name, value in self._values(engine).items())
        seconds = self._last_line - self._epoch_began
        print(f"{_epoch_of(engine)}  iteration {engine.state.iteration}  {seconds:.1f}s  {values}".rstrip(),
              file=self.file or sys.stderr, flush=True)  # fmt: skip

    def _values(self, engine: Engine) -> dict[str, str]:
        metrics = engine.state.metrics
        names = self.metrics if self.metrics is not None else list(dict.fromkeys([*metrics.running, *metrics]))
        values = {}
        for name in names:
            if name == "loss" and name not in metrics and name not in metrics.running and self.metrics is not None:
                if (loss := engine.state.update.loss) is not None:
                    values[name] = f"{float(loss):.4g}"
                continue
            running = engine.state.epoch_open and name in metrics.running
            value = metrics.running[name]() if running else as_number(metrics.get(name))
            if value is not None:  # None: not measured yet, or not a single number
                values[name] = f"{value:.4g}"
        if not names and (loss := engine.state.update.loss) is not None:
            values["loss"] = f"{float(loss):.4g}"
        return values

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _epoch_of(engine: Engine) -> str:
    epoch, last = engine.state.epoch, engine.state.max_epochs
    return f"epoch {epoch}" if last is None else f"epoch {epoch}/{last}"
