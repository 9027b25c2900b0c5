"""Progress bar in a terminal or notebook; plain lines anywhere else."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TextIO

from tqdm import tqdm

from signalfire import Engine, Events, Handler, Phase, UpdateState, on
from signalfire.authoring import (
    check_announced,
    check_bool,
    check_choice,
    check_function,
    check_number,
    check_stream,
    did_you_mean,
)
from signalfire.core.state import as_number

from ._common.displays import Display, RichDisplay, TqdmDisplay, View, in_notebook, is_drawing, of_notebook, printable
from ._common.progress import Bound, Forecast, Pace, SmoothedLoss
from ._common.ranks import REPORT_MISSING

__all__ = ["ProgressBar"]

SHORT_EPOCH = 20
"""Redraws: epochs in which there is time for fewer share one bar over the run."""
SILENCE = 60.0
"""Seconds after which a line comes also within an epoch, or without a value."""
LINES = 50
"""How many lines the time of a run has room for, once it is long: a day gets a few hundred of them."""


class ProgressBar(Handler):
    """Shows a progress bar with metrics, iterations and samples per second, and the time left; plain lines in log files.

    In a terminal, each epoch has a bar; a single bar covers the whole run if epochs are short, or if the run is bounded by
    iterations, steps or time. If the bar does not fit, speeds and values that were not requested are left out first, the
    metrics last. Output of this process to ``sys.stdout`` and ``sys.stderr`` appears above the bar; output of child processes
    cannot be detected. In a notebook, one output is updated, and its last line stays. Files and pipes get plain lines: after an
    epoch, at most one per ``line_interval`` seconds and per 2 % of the time since the run began; within an epoch, or without a
    value to show, one per minute.

    At the end of training, a bar or a line with the time of the whole run always stays. After an error or an interrupt, the bar
    stays as last drawn. The bar of an evaluation stays unless a different bar was on the terminal when it began. Consecutive
    evaluations do not write lines more often.

    The time left until the nearest bound is estimated from the mean time of an iteration. If the time left depends on the
    iterations per step, or per epoch of data without a length, the values of this run so far are used. During an evaluation,
    the bar shows that an evaluation is running.

    Without training metrics, the bar shows the loss of the last batch and a smoothed loss: an exponential average, with bias
    correction, of losses sampled at most once in ``interval`` seconds. The smoothed loss stays on the device and is fetched
    only when something is drawn, so an iteration costs a fraction of a microsecond. Samples are counted when a loss is sampled,
    assuming that all ranks train the same number.

    Args:
        metrics: Names of the metrics or running values (see `Metrics`) to show; by default all, and the loss as above while no
            running values exist. Unless a metric has that name, "loss" is the last batch's loss, and "smooth_loss" the smoothed
            loss.
        interval: Shortest time in seconds between two drawings.
        leave: Whether the bars of all epochs stay in a terminal, rather than only the last one.
        line_interval: Shortest time in seconds between two lines; 0 for a line after each epoch.
        learning_rate: Whether to show the learning rate, or the smallest and the largest if parameter groups differ.
        smoothing: Weight of the previous smoothed loss when a loss is added, from 0 to below 1.
        style: Library that draws the bar in a terminal: "tqdm" or "rich" (the extra ``rich``).
        file: Stream to draw on; standard error by default.
        clock: Function that returns the time in seconds.

    Raises:
        ImportError: if ``style`` is "rich" and that package is not installed.

    Example:
        >>> import io
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.25)
        >>> engine, file = Engine(update, model=torch.nn.Linear(1, 1, bias=False)), io.StringIO()
        >>> _ = torch.nn.init.ones_(engine.model.weight)
        >>> clock = lambda: engine.state.iteration  # one second for each
        >>> bar = ProgressBar(["loss"], line_interval=0, file=file, clock=clock)
        >>> _ = engine.attach(bar)
        >>> _ = engine.run([(torch.ones(4, 1), torch.zeros(4, 1))] * 2, max_epochs=2)
        >>> print(file.getvalue().strip())
        epoch 1/2  iteration 2  2.0s  1 it/s  4 samples/s  00:02 left  loss 0.25
        epoch 2/2  iteration 4  4.0s in total  1 it/s  4 samples/s  loss 0.01562
    """

    by_shard = True
    rank_zero_only = True
    _forecast: Forecast

    other_names = {
        "refresh_rate": "interval=, in seconds",
    }

    def __init__(
        self,
        metrics: Sequence[str] | None = None,
        *,
        interval: float = 0.1,
        leave: bool = False,
        line_interval: float = 5.0,
        learning_rate: bool = False,
        smoothing: float = 0.98,
        style: str = "tqdm",
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if isinstance(metrics, str):
            raise TypeError(f"ProgressBar(metrics={metrics!r}): pass a list of names: [{metrics!r}]")
        if metrics is not None and not (isinstance(metrics, Iterable) and all(isinstance(one, str) for one in metrics)):
            raise TypeError(f"ProgressBar(metrics={metrics!r}): expected a list of names, or None")
        self.metrics = None if metrics is None else list(metrics)
        self.interval = check_number(self, "interval", interval, least=0, infinite=True)
        self.leave = check_bool(self, "leave", leave)
        self.line_interval = check_number(self, "line_interval", line_interval, least=0, infinite=True)
        self.learning_rate = check_bool(self, "learning_rate", learning_rate)
        self.smoothing = check_number(self, "smoothing", smoothing, least=0, below=1)
        self.style = check_choice(self, "style", style, ("tqdm", "rich"))
        self.file = check_stream(self, "file", file)
        check_function(self, "clock", clock)
        self.clock = clock
        if style == "rich" and importlib.util.find_spec("rich") is None:
            raise ImportError(
                "ProgressBar(style='rich'): rich is not installed; install the extra: pip install 'signalfire[rich]'"
            )
        self._plain = self._stays = self._within = False
        self._bar: Display | None = None
        self._view = View("")
        self._smoothed: dict[str, SmoothedLoss] = {}  # by update
        self._pace = Pace()
        self._due = -math.inf  # when to look again
        self._short = False  # whether epochs are too short for bars of their own
        self._paused_at: float | None = None
        self._drawn_at = self._noted_at = -math.inf
        self._began = self._epoch_began = self._lined_at = 0.0
        self._lined = 0  # the iteration of the last line
        self._has_lined = self._continued = False  # whether there was a line; and then another evaluation
        self._held: str | None = None  # the line of an epoch, until it is known whether it is the run's last

    # ---- the run --------------------------------------------------------------------------------------------------

    @on(Events.STARTED, phase=Phase.RECORD, reads=["bounds", "step", "window"], writes=["files"])
    def begin(self, engine: Engine) -> None:
        """Choose a bar or plain lines; draw the bar of an epoch that the previous run left unfinished."""
        file = self.file or sys.stderr
        self._stays = self.leave and not self._in_notebook()
        self._plain = not self._in_notebook() and not (hasattr(file, "isatty") and file.isatty())
        self._within = not engine.training and is_drawing()  # an evaluation during a training with a bar
        self._began = self._epoch_began = now = self.clock()
        self._held = None
        # Lines come no faster for one evaluation after another.
        self._continued = not engine.training and self._has_lined
        self._lined_at = self._lined_at if self._continued else now
        self._due, self._short, self._paused_at = -math.inf, False, None
        self._start(engine)
        if engine.state.epoch_open and not engine.snapshots.has_loaded_state:
            self._draw(engine)

    @on(Events.STARTED, phase=Phase.CONTROL, reads=["metrics"], writes=[])
    def check_metrics(self, engine: Engine) -> None:
        """Raise an error for a name that nobody announced or writes."""
        for name in self.metrics or ():
            if name not in ("loss", "smooth_loss", *engine.state.metrics.running):
                check_announced(engine, name, by="ProgressBar", verb="shows")

    @on(Events.CHECKPOINT_LOADED, phase=Phase.RECORD, reads=["bounds", "step", "window"], writes=["files"])
    def resume(self, engine: Engine) -> None:
        """Continue from the position of the loaded state."""
        self._close()
        self._smoothed.clear()
        self._start(engine)
        if engine.state.epoch_open:
            self._draw(engine)

    @on(Events.EPOCH_STARTED, phase=Phase.RECORD, reads=["bounds", "step"], writes=["files"])
    def begin_epoch(self, engine: Engine) -> None:
        """Draw the bar of a new epoch."""
        self._epoch_began = self.clock()
        self._write_held()
        if self._stays:
            self._close()
        if not self._short:
            self._draw(engine)

    @on(Events.ITERATION_COMPLETED, phase=Phase.RECORD, writes=["files"],
        reads=["batch", "bounds", "loss", "metrics", "optimizer", "rates", "step"])  # fmt: skip
    def advance(self, engine: Engine) -> None:
        """Sample the loss and draw, once per interval."""
        if self.clock() >= self._due:
            self._look(engine)

    @on(Events.EVALUATION_STARTED, phase=Phase.RECORD, reads=[], writes=["files"])
    def pause(self, engine: Engine) -> None:
        """Show that an evaluation is running."""
        self._paused_at = now = self.clock()
        if self._bar is not None and now - self._noted_at >= self.interval:
            self._noted_at = now
            self._bar.show(replace(self._view, note="evaluating"))

    @on(Events.EVALUATION_COMPLETED, phase=Phase.RECORD, reads=[], writes=["files"])
    def proceed(self, engine: Engine) -> None:
        """Exclude the time of the evaluation from the speeds."""
        if self._paused_at is not None:
            self._pace.pause(self.clock() - self._paused_at)
            self._paused_at = None
        if self._bar is not None and self._noted_at >= self._drawn_at:
            self._bar.show(self._view)

    @on(
        Events.EPOCH_COMPLETED,
        phase=Phase.RECORD,
        reads=["loss", "metrics", "bounds", "optimizer", "rates", "step"],
        writes=["files"],
    )
    def end_epoch(self, engine: Engine) -> None:
        """Show the epoch's values."""
        if not self._plain and not self._covers_run(engine):
            self._draw(engine, values=True, finished=self._stays)
        elif self._plain and self.clock() - self._lined_at >= self._spacing():
            self._held = self._line(engine)
        self._forecast.learn_length(engine)

    @on(Events.EPOCH_COMPLETED, phase=Phase.PERSIST, rank=REPORT_MISSING, reads=["metrics"], writes=[])
    def report_missing(self, engine: Engine) -> None:
        """Report metrics that no receiver has written."""
        metrics = engine.state.metrics
        several = [f"/{update.name}" for update in engine.updates]
        losses = {f"{kind}{suffix}" for kind in ("loss", "smooth_loss") for suffix in ("", *several)}
        known = {*metrics, *metrics.owners, *metrics.running, *losses}
        for name in self.metrics or ():
            if metrics.under(name) not in known and not any(name.startswith(f"{one}/") for one in metrics.owners):
                engine.findings.report(
                    "W61",
                    f"{self.name!r} shows {name!r}, but no such metric was produced in the first epoch; available "
                    "metrics: "
                    f"{', '.join(sorted(known - losses)) or 'none'}{did_you_mean(name, sorted(known))}",
                    f"correct the name, or announce the metric: engine.state.metrics.announce('user', [{name!r}])",
                    self.name,
                    key=name,
                )

    @on(
        Events.COMPLETED,
        phase=Phase.RECORD,
        reads=["loss", "metrics", "bounds", "optimizer", "rates", "step"],
        writes=["files"],
    )
    def end(self, engine: Engine) -> None:
        """Show where the run ended, and how long it took."""
        early = self._continued and self.clock() - self._lined_at < self._spacing()
        if self._bar is not None and not self._within:
            self._draw(engine, values=True, finished=True, note=self._elapsed(engine, last=True))
            self._close(keep=True)
        elif self._bar is not None and (engine.state.epoch_open or self._covers_run(engine)):
            self._draw(engine, values=True)
        elif self._held is not None or (self._plain and engine.state.iteration > self._lined and not early):
            self._held = self._line(engine, last=True)
            self._write_held()

    @on(Events.ENDED, reads=[], writes=["files"])
    def close(self, engine: Engine) -> None:
        """Close the bar; after an error it stays as it was last drawn."""
        self._write_held()
        if self._bar is not None and not self._within:
            self._bar.show(replace(self._view, left="", note=""))
        self._close(keep=not self._within)

    def attached(self, engine: Engine) -> None:
        self._smoothed.clear()
        self._has_lined = False

    # ---- drawing --------------------------------------------------------------------------------------------------

    def _start(self, engine: Engine) -> None:
        """Measure from the position at which the run stands."""
        if engine.state.completed == 0:
            self._smoothed.clear()
        self._pace, self._forecast = Pace(), Forecast(engine, self._began)
        self._view, self._lined = View(""), engine.state.completed

    def _look(self, engine: Engine) -> None:
        now = self.clock()
        self._due = now + self.interval
        self._forecast.look(engine, now)
        for suffix, update in _updates(engine):
            if update.loss is not None:
                self._smoothed.setdefault(suffix, SmoothedLoss(self.smoothing)).add(update.loss)
        line = self._plain and now - self._lined_at >= max(SILENCE, self._spacing())
        first, batch = engine.updates[0], engine.state.batch
        counts = (
            first.spec.samples is None or line or not self._plain
        )  # a function of the user's may wait for the device
        group = engine.group
        readers = group.data.world_size if group.shards is None else group.shards.readers
        size = 0 if batch is None else first.samples_in(batch) * readers if counts else None
        self._pace.look(now, engine.state.iteration, size)
        if line:
            self._held = self._line(engine)
            self._write_held()
        elif not self._plain:
            self._draw(engine, values=True)

    def _draw(self, engine: Engine, *, values: bool = False, finished: bool = False, note: str = "") -> None:
        """Draw the bar, with new values if requested, else with those of the previous drawing."""
        if self._plain:
            return
        now = self._drawn_at = self.clock()
        if values:
            self._pace.look(now, engine.state.iteration, None)
        bounds = self._forecast.bounds(engine, now)
        fraction, count = self._covered(engine, bounds)
        rate, samples, left = self._rates(bounds)
        left = "" if finished else left  # that of the run: it would stay beside an epoch that is over
        shown, lesser = self._shown(engine) if values else (self._view.values, self._view.lesser)
        self._view = View(_title(engine), fraction, count, rate, samples, left, shown, lesser, note)
        if self._bar is None:
            self._bar = self._display()
        self._bar.show(self._view)

    def _display(self) -> Display:
        if self._in_notebook():
            return of_notebook()
        return (RichDisplay if self.style == "rich" else TqdmDisplay)(self.file or sys.stderr)

    def _in_notebook(self) -> bool:
        return self.file is None and in_notebook()

    def _close(self, *, keep: bool = False) -> None:
        if self._bar is not None:
            self._bar.close(keep=keep or self._stays)
            self._bar = None

    def _covers_run(self, engine: Engine) -> bool:
        """Whether the bar is over the run, and not over the epoch."""
        if self._stays or engine.state.max_epochs is None:
            return not self._stays
        length, each = self._forecast.epoch_length(engine), self._forecast.seconds_of_iteration(engine, self.clock())
        if length is not None and each is not None and length * each < SHORT_EPOCH * self.interval:
            self._short = True
        return self._short

    def _covered(self, engine: Engine, bounds: list[Bound]) -> tuple[float | None, str]:
        """How much is done of what the bar is over."""
        state = engine.state
        if self._covers_run(engine):
            return (bounds[0].fraction, bounds[0].count) if bounds else (None, f"{state.iteration}it")
        done, length = state.epoch_iteration, self._forecast.epoch_length(engine)
        ends = [one.iterations - state.epoch_start for one in bounds if one.iterations is not None]
        end = min([*ends, *([] if length is None else [length])], default=None)
        if end is None or end <= 0:
            return None, f"{done}it"
        return min(1.0, done / end), f"{done}/{end:.0f}"

    def _spacing(self) -> float:
        """Seconds between two lines."""
        return max(self.line_interval, (self.clock() - self._began) / LINES) if self.line_interval else 0.0

    def _line(self, engine: Engine, *, last: bool = False) -> str | None:
        """A line with what is known, or None without news."""
        values = self._values(engine)
        now = self.clock()
        if not values and self.line_interval and not last and now - self._lined_at < SILENCE:
            return None
        self._lined_at, self._lined, self._has_lined = now, engine.state.iteration, True
        self._pace.look(now, engine.state.iteration, None)
        rate, samples, left = self._rates(self._forecast.bounds(engine, now))
        facts = [_title(engine), f"iteration {engine.state.iteration}", self._elapsed(engine, last=last)]
        facts += [one for one in (rate, samples, "" if last else left) if one]
        return "  ".join([*facts, *(f"{printable(name)} {value}" for name, value in values.items())])

    def _write_held(self) -> None:
        line, self._held = self._held, None
        file = self.file or sys.stderr
        if line is None or file is None:  # a program whose standard error is closed has none
            return
        print(line, file=file)
        if hasattr(file, "flush"):
            file.flush()

    def _elapsed(self, engine: Engine, *, last: bool) -> str:
        """The time of the epoch, or of the run at its end."""
        if last and engine.training:
            return f"{self.clock() - self._began:.1f}s in total"
        return f"{self.clock() - self._epoch_began:.1f}s"

    def _rates(self, bounds: list[Bound]) -> tuple[str, str, str]:
        """Iterations and samples per second, and the time left."""
        rate, samples = self._pace.iterations_per_second, self._pace.samples_per_second
        seconds = bounds[0].seconds if bounds else None
        return (
            "" if rate is None else f"{rate:.3g} it/s" if rate < 100 else f"{rate:.0f} it/s",
            "" if not samples else f"{samples:.3g} samples/s" if samples < 100 else f"{samples:.0f} samples/s",
            f"{tqdm.format_interval(seconds)} left" if seconds else "",
        )

    # ---- values ---------------------------------------------------------------------------------------------------

    def _values(self, engine: Engine) -> dict[str, str]:
        metrics = engine.state.metrics
        found: dict[str, float | None] = {}
        if self.metrics is None and "loss" not in metrics.running:
            last = "batch_loss" if "loss" in metrics.owners or "loss" in metrics else "loss"
            for suffix, update in _updates(engine):
                found[f"smooth_loss{suffix}"] = self._smooth(suffix)
                found[f"{last}{suffix}"] = as_number(update.loss)
        for name in self.metrics if self.metrics is not None else dict.fromkeys([*metrics.running, *metrics]):
            found[name] = self._value(engine, name)
        # None: not measured yet, or not a single number.
        shown = {name: f"{value:.4g}" for name, value in found.items() if value is not None}
        return shown | (_learning_rates(engine) if self.learning_rate else {})

    def _shown(self, engine: Engine) -> tuple[dict[str, str], list[str]]:
        """The values, and the names of those that were not requested.

        These are the smoothed loss shown with the batch's, and purely diagnostic values.
        """
        shown, metrics = self._values(engine), engine.state.metrics
        if self.metrics is not None:
            return shown, [name for name in shown if name not in self.metrics]
        asked = {*metrics.running, *metrics.evaluated, *metrics.directions}
        diagnoses = {name for name, owner in metrics.owners.items() if owner != "user" and name not in asked}
        return shown, [name for name in shown if name in diagnoses or name.startswith("smooth_loss")]

    def _value(self, engine: Engine, name: str) -> float | None:
        metrics = engine.state.metrics
        name = metrics.under(name)
        if name in metrics.running and (engine.state.epoch_open or name not in metrics):
            return as_number(metrics.running[name]())
        if name in metrics:
            return as_number(metrics[name])
        for suffix, update in _updates(engine):
            if name in ("smooth_loss", f"smooth_loss{suffix}"):
                return self._smooth(suffix)
            if name == f"loss{suffix}":
                return as_number(update.loss)
        return as_number(engine.state.update.loss) if name == "loss" else None

    def _smooth(self, suffix: str) -> float | None:
        return self._smoothed[suffix].value() if suffix in self._smoothed else None


def _updates(engine: Engine) -> list[tuple[str, UpdateState]]:
    """The updates of this iteration, each with what its name adds to that of its loss."""
    if len(engine.updates) == 1:
        return [("", engine.updates[0])]
    return [(f"/{one.name}", one) for one in engine.updates if one.omitted_in != engine.state.iteration]


def _learning_rates(engine: Engine) -> dict[str, str]:
    """The rate of each update, or the smallest and the largest of its groups."""
    found = {}
    for update in engine.updates:
        groups = [] if update.optimizer is None else update.optimizer.param_groups
        rates = sorted({float(group["lr"]) for group in groups if group.get("lr") is not None})
        if rates:
            name = "lr" if len(engine.updates) == 1 else f"lr/{update.name}"
            found[name] = "-".join(f"{one:.3g}" for one in dict.fromkeys((rates[0], rates[-1])))
    return found


def _title(engine: Engine) -> str:
    epoch, last = engine.state.epoch, engine.state.max_epochs
    if last == 1 and not engine.training:
        return "evaluation"
    return f"epoch {epoch}" if last is None else f"epoch {epoch}/{last}"
