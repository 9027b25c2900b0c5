"""Where a run's time goes: waiting for data, the parts of a step, each handler at each event; a table and a trace."""

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
from signalfire.acts import Override
from signalfire.checks import check_bool, check_int

from ._common.folders import check_folder, open_folder
from ._common.ranks import AFTER_ALL, BEFORE_ALL

__all__ = ["Profiler", "Timing"]

# What the loop does between the receivers of two events.
ACTS = {
    "waiting for data": (Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED),
    "forward": (Events.FORWARD_STARTED, Events.FORWARD_COMPLETED),
    "loss": (Events.FORWARD_COMPLETED, Events.LOSS_COMPUTED),
    "backward": (Events.BACKWARD_STARTED, Events.BACKWARD_COMPLETED),
    "optimizer step": (Events.OPTIMIZER_STEP_STARTED, Events.OPTIMIZER_STEP_COMPLETED),
}

Span = tuple[int, Any]
"""When something began, and its region in torch's profile."""


@dataclass(slots=True)
class Timing:
    """How long something took.

    Attributes:
        name: an act of the loop, such as "forward", or a receiver, such as "gradient_clipping.clip".
        event: at which a receiver was called; empty for an act.
        calls: how often.
        seconds: in all; of a receiver, with everything that it calls.
        longest: the longest of them, in seconds.

    Example:
        >>> forward = Timing("forward")
        >>> forward.add(2_000_000_000)
        >>> forward.calls, forward.seconds
        (1, 2.0)
    """

    name: str
    event: str = ""
    calls: int = 0
    seconds: float = 0.0
    longest: float = 0.0

    def add(self, nanoseconds: int) -> None:
        """One more."""
        seconds = nanoseconds * 1e-9
        self.calls += 1
        self.seconds += seconds
        if seconds > self.longest:
            self.longest = seconds


class Profiler(Handler):
    """Measures the acts of the loop and every receiver of every event, and tells when the run ends.

    Receivers are timed where the signals call them, so that whatever is attached shows, also functions of your own, and
    nothing of it is there once the profiler is detached or disabled. Attached, it costs one to two microseconds for each receiver
    that is called. On a GPU, what is launched goes on behind the time that is measured; ``synchronize`` waits for it.

    A receiver's time holds everything that it does: that of a validation, the whole of it. What an evaluator does in it, a
    profiler of its own tells.

    Args:
        folder: where "profile.txt" (the table) and "trace.json" go, the latter for chrome://tracing or https://ui.perfetto.dev;
            by default the table is printed, and nothing traced.
        trace_after: how many iterations of the run are left out before the trace begins.
        trace_iterations: how many iterations it is long.
        torch_profiler: whether torch's own profiler makes the trace, with operators and kernels in it, and
            "operators.txt" besides. While it runs everything is much slower.
        synchronize: whether to wait for the GPU before each look at the clock.
        file: where to print; standard error by default.

    Attributes:
        iterations: how many iterations were measured.
        seconds: how long the run took; up to now inside of one.

    Example:
        >>> profiler = Profiler()
        >>> profiler.timings
        []
    """

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
            raise ValueError("Profiler(torch_profiler=True): give a folder, into which its trace is written")
        self.synchronize = check_bool(self, "synchronize", synchronize)
        self.file = file
        self.iterations = 0
        self._timings: dict[tuple[str, str], Timing] = {}
        self._marks: list[Attachment] = []
        self._own: set[int] = set()  # the receivers that measure, which are not measured
        self._began: int | None = None
        self._took = 0
        self._tracing = False
        self._slices: list[tuple[str, str, int, int]] = []
        self._of_torch: Any = None

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(Override.RECEIVER_CALLS, by=self)

    # ---- measuring ------------------------------------------------------------------------------------------------

    @on(Events.STARTED, phase=Phase.PREPARE, rank=BEFORE_ALL)
    def begin(self, engine: Engine) -> None:
        """Measure from here on."""
        if self.folder is not None:
            open_folder(self, self.folder)
        self._timings, self._slices, self.iterations, self._tracing = {}, [], 0, False
        for name, (started, completed) in ACTS.items():
            self._time_act(engine, name, started, completed)
        self._mark(engine, Events.ITERATION_COMPLETED, self._count, Phase.PERSIST, AFTER_ALL)
        self._look()
        engine.signals.call_through(self._timed)
        self._began = perf_counter_ns()

    def _time_act(self, engine: Engine, name: str, started: Events, completed: Events) -> None:
        timing = self._timings[name, ""] = Timing(name)
        since: list[Span] = []

        def begin(engine: Engine) -> None:
            since[:] = [self._begin(name)]

        def end(engine: Engine) -> None:
            if since:  # what is computed again, such as by a closure, belongs to the act that has it computed
                self._end(timing, since.pop())

        # They belong to nobody: whoever has a hand in gradients is asked about when an open window is resumed.
        self._mark(engine, started, begin, Phase.PERSIST, AFTER_ALL)
        self._mark(engine, completed, end, Phase.PREPARE, BEFORE_ALL)

    def _mark(self, engine: Engine, event: Events, receiver: Callable[[Engine], None], phase: Phase, rank: int) -> None:
        self._own.add(id(receiver))
        self._marks.append(engine.connect(event, receiver, phase=phase, rank=rank))

    def _timed(self, signal: Signal, connection: Connection) -> Callable[..., Any]:
        """What is called in place of a receiver."""
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
            self._look()
            engine.signals.call_through(self._timed)

    def _look(self) -> None:
        """Begin or end the trace where it begins or ends."""
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
            told = of_torch.key_averages().table(sort_by="self_cpu_time_total", row_limit=50)
            (self.folder / "operators.txt").write_text(told)

    # ---- telling --------------------------------------------------------------------------------------------------

    @on(Events.ENDED, phase=Phase.PERSIST, rank=AFTER_ALL)
    def end(self, engine: Engine) -> None:
        """Measure no more, and tell what was found."""
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
        """What was measured: the acts in the order of the loop, then receivers, those that took longest first."""
        acts = [one for one in self._timings.values() if not one.event and one.calls]
        receivers = [one for one in self._timings.values() if one.event and one.calls]
        return acts + sorted(receivers, key=lambda one: -one.seconds)

    def table(self) -> str:
        """All of it, as text. The rest is the loop, and what it takes to measure."""
        total = self.seconds or float("nan")
        rows = [
            (one.name, one.event, str(one.calls), f"{one.seconds:.3f}", f"{one.seconds / one.calls * 1e6:.1f}",
             f"{one.longest * 1e6:.0f}", f"{100 * one.seconds / total:.1f}")
            for one in self.timings
        ]  # fmt: skip
        rest = total - sum(one.seconds for one in self.timings)
        rows.append(("the rest", "", "", f"{rest:.3f}", "", "", f"{100 * rest / total:.1f}"))
        header = ("", "event", "calls", "seconds", "us a call", "longest", "%")
        widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in (header, *rows)
        ]
        a_second = self.iterations / total
        title = f"{self.iterations} iterations in {total:.3f} s, {a_second:.1f} a second"
        return "\n".join([title, *lines])

    def trace(self) -> dict[str, Any]:
        """What was traced, in the format of chrome://tracing: microseconds."""
        events = [
            {"name": name, "cat": event or "loop", "ph": "X", "ts": began / 1e3, "dur": (ended - began) / 1e3, "pid": 0,
             "tid": 0, "args": {"event": event} if event else {}}
            for name, event, began, ended in self._slices
        ]  # fmt: skip
        return {"displayTimeUnit": "ms", "traceEvents": events}
