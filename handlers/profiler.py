"""Profiler: the time of each stage of the loop and of each handler at each event, as a table and a trace."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, TextIO

import torch

from signalfire import Attachment, Connection, Engine, Events, Handler, Phase, Signal, on
from signalfire.authoring import Claim, check_bool, check_int, check_stream

from ._common.folders import check_folder, open_folder
from ._common.ranks import AFTER_ALL, BEFORE_ALL

__all__ = ["Profiler", "Timing"]

# The stages of the loop, each between the receivers of two events.
STAGES = {
    "waiting for data": (Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED),
    "forward": (Events.FORWARD_STARTED, Events.FORWARD_COMPLETED),
    "loss": (Events.FORWARD_COMPLETED, Events.LOSS_COMPUTED),
    "backward": (Events.BACKWARD_STARTED, Events.BACKWARD_COMPLETED),
    "optimizer step": (Events.OPTIMIZER_STEP_STARTED, Events.OPTIMIZER_STEP_COMPLETED),
}

Span = tuple[int, Any]
"""The start of a measurement in nanoseconds, and its region in torch's profile."""


@dataclass(slots=True)
class Timing:
    """The time spent in a stage of the loop, or in a receiver.

    Attributes:
        name: A stage of the loop, such as "forward", or a receiver, such as "gradient_clipping.clip".
        event: Event at which a receiver was called; empty for a stage.
        calls: Number of calls.
        seconds: Total time in seconds; that of a receiver includes everything that it calls.
        longest: Time of the longest call, in seconds.

    Example:
        >>> import io, time
        >>> import torch
        >>> from signalfire import Engine, Events, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> profiler = Profiler(file=io.StringIO())
        >>> _ = engine.attach(profiler)
        >>> @engine.on(Events.EPOCH_COMPLETED)
        ... def pause(engine):
        ...     time.sleep(0.01)
        >>> _ = engine.run([(torch.ones(4, 2), torch.ones(4, 1))] * 3, max_epochs=2)
        >>> timing = profiler.timings[-1]
        >>> timing.name, timing.event, timing.calls, timing.seconds > 0.015, timing.longest > 0.005
        ('pause', 'EPOCH_COMPLETED', 2, True, True)
    """

    name: str
    event: str = ""
    calls: int = 0
    seconds: float = 0.0
    longest: float = 0.0

    def add(self, nanoseconds: int) -> None:
        """Add one call."""
        seconds = nanoseconds * 1e-9
        self.calls += 1
        self.seconds += seconds
        if seconds > self.longest:
            self.longest = seconds


class Profiler(Handler):
    """Profiles the run: the time of each stage of the training loop and of each handler, as a table and a trace.

    Receivers are timed where signals call them, so the table includes every attached handler and connected function. A detached
    or disabled profiler costs nothing; an attached one costs one to two microseconds per call. On a GPU, kernels run
    asynchronously, after the measured time; ``synchronize`` waits for them.

    A receiver's time includes everything that it calls, such as a whole evaluation for a validation. To see its parts, attach a
    second profiler to the evaluator.

    Args:
        folder: Folder for "profile.txt" (the table) and "trace.json", for chrome://tracing or https://ui.perfetto.dev. With None,
            the table is printed and no trace is written.
        trace_after: Number of iterations before the trace starts.
        trace_iterations: Number of iterations to trace.
        torch_profiler: Whether to trace with torch's profiler, which includes operators and kernels and also writes
            "operators.txt". Everything is much slower while it runs.
        synchronize: Whether to wait for the GPU before each clock reading.
        file: Stream to print the table to; standard error by default.

    Attributes:
        iterations: Number of measured iterations.
        seconds: Duration of the run, up to now during a run.
        timings: The measurements; see `Timing`.

    Example:
        >>> import io
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> from signalfire.handlers import GradientClipping
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> profiler = Profiler(file=io.StringIO())
        >>> _ = engine.attach(profiler, GradientClipping(1.0))
        >>> _ = engine.run([(torch.ones(4, 2), torch.ones(4, 1))] * 3, max_epochs=2)
        >>> [one.name for one in profiler.timings]
        ['waiting for data', 'forward', 'loss', 'backward', 'optimizer step', 'gradient_clipping.clip']
        >>> [one.calls for one in profiler.timings]
        [6, 6, 6, 6, 6, 6]
    """

    by_shard = True
    rank_zero_only = True

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        trace_after: int = 10,
        trace_iterations: int = 50,
        torch_profiler: bool = False,
        synchronize: bool = False,
        file: TextIO | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.folder = None if folder is None else check_folder(self, folder)
        self.writes = self.folder is not None
        self.trace_after = check_int(self, "trace_after", trace_after, least=0)
        self.trace_iterations = check_int(self, "trace_iterations", trace_iterations)
        self.torch_profiler = check_bool(self, "torch_profiler", torch_profiler)
        if self.torch_profiler and self.folder is None:
            raise ValueError("Profiler(torch_profiler=True): the trace needs a folder; pass folder=")
        self.synchronize = check_bool(self, "synchronize", synchronize)
        self.file = check_stream(self, "file", file)
        self.iterations = 0
        self._timings: dict[tuple[str, str], Timing] = {}
        self._marks: list[Attachment] = []
        self._own: set[int] = set()  # the profiler's own receivers, which are not measured
        self._began: int | None = None
        self._took = 0
        self._tracing = False
        self._slices: list[tuple[str, str, int, int]] = []
        self._of_torch: Any = None

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(Claim("how receivers are called", of_step=False), by=self)

    # ---- measuring ------------------------------------------------------------------------------------------------

    @on(Events.STARTED, phase=Phase.PREPARE, rank=BEFORE_ALL, reads=[], writes=["signals", "files"])
    def begin(self, engine: Engine) -> None:
        """Start measuring."""
        if self.folder is not None:
            open_folder(self, self.folder)
        self._timings, self._slices, self.iterations, self._tracing = {}, [], 0, False
        for name, (started, completed) in STAGES.items():
            self._time_stage(engine, name, started, completed)
        self._mark(engine, Events.ITERATION_COMPLETED, self._count, Phase.PERSIST, AFTER_ALL)
        self._switch_trace()
        engine.signals.call_through(self._timed)
        self._began = perf_counter_ns()

    def _time_stage(self, engine: Engine, name: str, started: Events, completed: Events) -> None:
        timing = self._timings[name, ""] = Timing(name)
        since: list[Span] = []

        def begin(engine: Engine) -> None:
            since[:] = [self._begin(name)]

        def end(engine: Engine) -> None:
            if since:  # a recomputation, such as in a closure, is part of the stage that requests it
                self._end(timing, since.pop())

        # Connected without an owner: the engine compares the handlers that affect gradients when an open window is resumed.
        self._mark(engine, started, begin, Phase.PERSIST, AFTER_ALL)
        self._mark(engine, completed, end, Phase.PREPARE, BEFORE_ALL)

    def _mark(self, engine: Engine, event: Events, receiver: Callable[[Engine], None], phase: Phase, rank: int) -> None:
        self._own.add(id(receiver))
        self._marks.append(engine.connect(event, receiver, phase=phase, rank=rank))

    def _timed(self, signal: Signal, connection: Connection) -> Callable[..., Any]:
        """The function to call instead of a receiver: it calls the receiver and measures the time."""
        call = connection.call
        if id(connection.receiver) in self._own or connection.owner == self.name:
            return call
        key = repr(connection), signal.event.name
        timing = self._timings.setdefault(key, Timing(*key))
        add = timing.add

        def timed(engine: Engine, **options: Any) -> Any:
            began = perf_counter_ns()
            try:
                return call(engine, **options)
            finally:
                add(perf_counter_ns() - began)

        def traced(engine: Engine, **options: Any) -> Any:
            span = self._begin(timing.name)
            try:
                return call(engine, **options)
            finally:
                self._end(timing, span)

        return traced if self._tracing or self.synchronize else timed

    def _now(self) -> int:
        if self.synchronize and torch.cuda.is_available():
            torch.cuda.synchronize()
        return perf_counter_ns()

    def _begin(self, name: str) -> Span:
        region = None
        if self._of_torch is not None:
            region = torch.profiler.record_function(name)
            region.__enter__()
        return self._now(), region

    def _end(self, timing: Timing, span: Span) -> None:
        began, region = span
        ended = self._now()
        if region is not None:
            region.__exit__(None, None, None)
        timing.add(ended - began)
        if self._tracing:
            self._slices.append((timing.name, timing.event, began, ended))

    def _count(self, engine: Engine) -> None:
        self.iterations += 1
        if self.iterations in (self.trace_after, self.trace_after + self.trace_iterations):
            self._switch_trace()
            engine.signals.call_through(self._timed)

    def _switch_trace(self) -> None:
        """Start or stop the trace if this iteration is its first or its last."""
        if self.folder is None:
            return
        if self.iterations == self.trace_after:
            self._tracing = True
            if self.torch_profiler:
                self._of_torch = torch.profiler.profile()
                self._of_torch.__enter__()
        elif self.iterations == self.trace_after + self.trace_iterations:
            self._end_trace()

    def _end_trace(self) -> None:
        self._tracing = False
        of_torch, self._of_torch = self._of_torch, None
        if of_torch is not None:
            assert self.folder is not None
            of_torch.__exit__(None, None, None)
            of_torch.export_chrome_trace(str(self.folder / "trace.json"))
            table = of_torch.key_averages().table(sort_by="self_cpu_time_total", row_limit=50)
            (self.folder / "operators.txt").write_text(table)

    # ---- reports --------------------------------------------------------------------------------------------------

    @on(Events.ENDED, phase=Phase.PERSIST, rank=AFTER_ALL, reads=[], writes=["signals", "files"])
    def report(self, engine: Engine) -> None:
        """Stop measuring, and print or write the table and the trace."""
        if self._began is None:
            return
        self._took, self._began = perf_counter_ns() - self._began, None
        engine.signals.call_through(None)
        for mark in self._marks:
            mark.detach()
        self._marks, self._own = [], set()
        if self.folder is None:
            print(self.table(), file=self.file or sys.stderr)
            return
        self._end_trace()
        (self.folder / "profile.txt").write_text(self.table() + "\n")
        if not self.torch_profiler:
            (self.folder / "trace.json").write_text(json.dumps(self.trace()))

    @property
    def seconds(self) -> float:
        return (self._took if self._began is None else perf_counter_ns() - self._began) * 1e-9

    @property
    def timings(self) -> list[Timing]:
        """The measurements: first the stages in the order of the loop, then the receivers by descending time."""
        stages = [one for one in self._timings.values() if not one.event and one.calls]
        receivers = [one for one in self._timings.values() if one.event and one.calls]
        return stages + sorted(receivers, key=lambda one: -one.seconds)

    def table(self) -> str:
        """The measurements as text; "the rest" is the time of the loop and of measuring."""
        total = self.seconds or float("nan")
        rows = [
            (one.name, one.event, str(one.calls), f"{one.seconds:.3f}", f"{one.seconds / one.calls * 1e6:.1f}",
             f"{one.longest * 1e6:.0f}", f"{100 * one.seconds / total:.1f}")
            for one in self.timings
        ]  # fmt: skip
        rest = total - sum(one.seconds for one in self.timings)
        rows.append(("the rest", "", "", f"{rest:.3f}", "", "", f"{100 * rest / total:.1f}"))
        header = ("", "event", "calls", "seconds", "us per call", "longest", "%")
        widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in (header, *rows)
        ]
        a_second = self.iterations / total
        title = f"{self.iterations} iterations in {total:.3f} s, {a_second:.1f} per second"
        return "\n".join([title, *lines])

    def trace(self) -> dict[str, Any]:
        """The trace in the format of chrome://tracing, with times in microseconds."""
        events = [
            {"name": name, "cat": event or "loop", "ph": "X", "ts": began / 1e3, "dur": (ended - began) / 1e3, "pid": 0,
             "tid": 0, "args": {"event": event} if event else {}}
            for name, event, began, ended in self._slices
        ]  # fmt: skip
        return {"displayTimeUnit": "ms", "traceEvents": events}
