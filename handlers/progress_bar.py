"""A progress bar; plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from tqdm.auto import tqdm

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.checks import check_bool, check_number
from signalfire.state import as_number

__all__ = ["ProgressBar"]


class ProgressBar(Handler):
    """Shows how far the epoch is, how fast it goes, and what is measured.

    In a terminal or a notebook it is a bar for each epoch, which stays when the epoch is complete only with ``leave``. Elsewhere
    (a file, a pipe) it is a line for each epoch, at most one in ``line_interval`` seconds, and the last one always.
    What it shows is fetched from the device only when it is drawn, so that an iteration costs a fraction of a microsecond.

    Args:
        metrics: the names to show, of metrics or of running values (see `Metrics`); by default all, or the last batch's loss if
            there are none.
        interval: the shortest time in seconds between two drawings.
        leave: whether finished bars stay.
        line_interval: the shortest time in seconds between two lines; see above.
        file: where to draw; standard error by default.

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
        self.metrics = None if metrics is None else list(metrics)
        self.interval = check_number(self, "interval", interval, least=0, infinite=True)
        self.leave = check_bool(self, "leave", leave)
        self.line_interval = check_number(self, "line_interval", line_interval, least=0, infinite=True)
        self.file = file
        self._bar: tqdm[Any] | None = None
        self._plain = False
        self._last_line = 0.0
        self._epoch_began = 0.0
        self._told = 0  # the epoch that the last line was about

    @on(Events.STARTED, phase=Phase.RECORD)
    def begin(self, engine: Engine) -> None:
        """Find out what can be drawn here."""
        file = self.file or sys.stderr
        notebook = "ipykernel" in sys.modules and self.file is None
        self._plain = not notebook and not (hasattr(file, "isatty") and file.isatty())
        self._last_line = self._epoch_began = time.monotonic()

    @on(Events.CHECKPOINT_LOADED, phase=Phase.RECORD)
    def go_on(self, engine: Engine) -> None:
        """Go on in an epoch that was begun elsewhere."""
        if engine.state.epoch_open:
            self.begin_epoch(engine)
            if self._bar is not None:
                self._bar.update(engine.state.epoch_iteration)

    @on(Events.EPOCH_STARTED, phase=Phase.RECORD)
    def begin_epoch(self, engine: Engine) -> None:
        """Start a bar."""
        self._epoch_began = time.monotonic()
        if not self._plain:
            self._close()
            self._bar = tqdm(
                total=engine.state.epoch_length,
                desc=_epoch_of(engine),
                mininterval=self.interval,
                leave=self.leave,
                file=self.file or sys.stderr,
                dynamic_ncols=True,
                unit="it",
            )

    @on(Events.ITERATION_COMPLETED, phase=Phase.RECORD)
    def advance(self, engine: Engine) -> None:
        """Count the iteration; the values are fetched only when the bar was redrawn."""
        if self._bar is not None and self._bar.update():
            self._bar.set_postfix(self._values(engine), refresh=False)

    @on(Events.EPOCH_COMPLETED, phase=Phase.RECORD)
    def end_epoch(self, engine: Engine) -> None:
        """Show the epoch's values."""
        if self._bar is not None:
            self._bar.set_postfix(self._values(engine), refresh=True)
            self._close()
        elif self._plain and time.monotonic() - self._last_line >= self.line_interval:
            self._line(engine)

    @on(Events.COMPLETED, phase=Phase.RECORD)
    def end(self, engine: Engine) -> None:
        """The last epoch is always told."""
        if self._plain and self._told != engine.state.epoch:
            self._line(engine)

    @on(Events.ENDED)
    def close(self, engine: Engine) -> None:
        """Leave the terminal as it was, also after an error."""
        self._close()

    def _line(self, engine: Engine) -> None:
        self._last_line = time.monotonic()
        self._told = engine.state.epoch
        values = "  ".join(f"{name} {value}" for name, value in self._values(engine).items())
        seconds = self._last_line - self._epoch_began
        print(f"{_epoch_of(engine)}  iteration {engine.state.iteration}  {seconds:.1f}s  {values}".rstrip(),
              file=self.file or sys.stderr, flush=True)  # fmt: skip

    def _values(self, engine: Engine) -> dict[str, str]:
        metrics = engine.state.metrics
        names = self.metrics if self.metrics is not None else list(dict.fromkeys([*metrics.running, *metrics]))
        values = {}
        for name in names:
            running = engine.state.epoch_open and name in metrics.running
            value = metrics.running[name]() if running else as_number(metrics.get(name))
            if value is not None:  # not there yet, or not one number
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
