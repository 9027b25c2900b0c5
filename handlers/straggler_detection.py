"""Straggler detection: names slow ranks, and the slow part of their iterations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import torch

from signalfire import Engine, Events, Handler, Interval, Phase, on
from signalfire.authoring import Capture, check_every, check_number, warn
from signalfire.distributed import SINGLE_PROCESS, Processes, expected_processes, is_sharded

from ._common.ranks import AFTER_ALL, BEFORE_ALL, MEASURE_RATES

__all__ = ["StragglerDetection", "Times", "find_stragglers"]

LEAST_EVERY = 5
"""The shortest interval in iterations: the median of fewer is not robust."""
LEAST_EXCESS = 0.001
"""Seconds an iteration by which a straggler is slower than the median, at least: less is lost in the noise of any machine."""
PARTS = {
    "data": "waiting for data",
    "forward": "batch transfer, forward pass, and loss",
    "backward": "backward",
    "handlers": "optimizer step and handlers",
}


class StragglerDetection(Handler):
    """Detects stragglers in distributed training: names slow ranks and the slow part of their iterations.

    In every iteration, all ranks wait for the slowest one, so all seem equally slow. This handler times the work of each rank
    without the waiting, and the ranks compare their times every ``every`` iterations. A rank is a straggler if its work takes
    more than ``threshold`` times the median of all ranks, and at least 1 ms more, in three quarters of the iterations. One
    warning names the rank and the slow part: data, forward (with the transfer of the batch and the loss), backward, or handlers
    (with the optimizer step). A second warning reports when the rank is back to normal. "straggler_ratio" in ``state.metrics``
    is the median time of the slowest rank divided by the median of all ranks.

    The backward is measured in CPU time, which does not pass while a process waits for another or sleeps. On GPUs, only data
    and forward are compared, since the host cannot tell when the device waits; for sharded models on GPUs, only data.

    In a single process, nothing is measured, so the same script runs unchanged.

    Args:
        every: Interval between two comparisons, in iterations; 5 or more.
        threshold: Ratio to the median time above which a rank is a straggler.

    Attributes:
        stragglers: The ranks that are slow now, each with its slow part; the same on all ranks.

    Source:
        The straggler detection of NVIDIA's Resiliency Extension, and `SlowRankDetector` of torchtnt.

    Example:
        >>> from torch import nn
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=nn.Linear(2, 1), seed=0)
        >>> detection = StragglerDetection(every="5it")
        >>> _ = engine.attach(detection)
        >>> engine.run([(torch.ones(4, 2), torch.ones(4, 1))] * 10, max_epochs=1).iteration
        10
        >>> # With several processes, from the first comparison on.
        >>> detection.stragglers, engine.state.metrics.get("straggler_ratio")
        ({}, None)
        >>> # What such a comparison finds:
        >>> usual = {"data": Times(0.010, 0.009), "forward": Times(0.020, 0.019)}
        >>> slow = usual | {"data": Times(0.030, 0.029)}
        >>> find_stragglers([usual, slow, usual], detection.threshold, before={})
        {1: 'data'}
    """

    by_shard = True
    capture = Capture.FORBIDDEN
    trains = True

    def __init__(self, *, every: str | Interval = "100it", threshold: float = 1.2, name: str | None = None) -> None:
        super().__init__(name=name)
        self.every = check_every(self, every, units=["it"])
        if self.every.value < LEAST_EVERY:
            raise ValueError(f"StragglerDetection(every={every!r}): expected '{LEAST_EVERY}it' or more")
        self.threshold = check_number(self, "threshold", threshold, above=1)
        self.stragglers: dict[int, str] = {}
        self._processes: Processes = SINGLE_PROCESS
        self._times: dict[str, list[Any]] = {}  # by part: begin and end in the iterations since the last comparison
        self._mark: Callable[[], Any] | None = None  # what reads the time of the forward
        self._times_work = True  # whether backward and handlers are measured
        self._ended: float | None = None  # the iteration before
        self._arrived: Any = None  # its batch; None once the forward is measured
        self._begun: float | None = None  # its backward

    def attached(self, engine: Engine) -> None:
        several = engine.processes.distributed or expected_processes().distributed
        self.arrive_event = Events.GET_BATCH_COMPLETED if several else None
        self.backward_event = Events.BACKWARD_STARTED if several else None
        self.end_event = Events.ITERATION_COMPLETED if several else None
        self.compare_event = Events.ITERATION_COMPLETED(every=int(self.every.value)) if several else None

    def metric_names(self, engine: Engine) -> list[str]:
        return [] if self.compare_event is None else ["straggler_ratio"]

    @on(Events.STARTED, phase=Phase.PREPARE, reads=[], writes=["metrics"])
    def announce_metrics(self, engine: Engine) -> None:
        """Announce the name of the metric."""
        engine.state.metrics.announce(self.name, self.metric_names(engine), saved=False)

    @on(Events.STARTED, phase=Phase.PERSIST, reads=["device", "modules"], writes=[])
    def begin(self, engine: Engine) -> None:
        """Choose the clocks that do not run while this rank waits for others; by now the model may be sharded."""
        self._processes, self.stragglers = engine.processes, {}
        self._forget()
        on_cpu, on_cuda = (engine.device.type == kind for kind in ("cpu", "cuda"))
        sharded = any(is_sharded(p) for root in engine.modules.values() for p in root.parameters())
        self._times_work = on_cpu
        if sharded:  # the forward gathers weights, and waits for the other ranks
            self._mark = thread_time if on_cpu else None
        else:
            self._mark = perf_counter if on_cpu else _recorded if on_cuda else None

    @on("arrive_event", phase=Phase.PREPARE, rank=BEFORE_ALL, reads=[], writes=[])
    def end_waiting(self, engine: Engine) -> None:
        """Note how long the data took, and when the forward begins."""
        # The ranks may have to agree on whether their data has ended: what they wait for each other is not part of their work.
        state, now = engine.state, perf_counter() - self._processes.waited
        if self._ended is not None and state.iteration != state.epoch_start + 1:  # else an evaluation may lie between
            self._times["data"].append((self._ended, now))
        self._arrived = None if self._mark is None else self._mark()

    @on("backward_event", phase=Phase.PERSIST, rank=AFTER_ALL, reads=[], writes=[])
    def begin_backward(self, engine: Engine) -> None:
        """Note how long the forward took, and when the first backward begins."""
        if self._arrived is not None and self._mark is not None:
            self._times["forward"].append((self._arrived, self._mark()))
            self._arrived = None
        if self._times_work and self._begun is None:
            self._begun = thread_time()

    @on("end_event", phase=Phase.PERSIST, rank=AFTER_ALL, reads=[], writes=[])
    def end_iteration(self, engine: Engine) -> None:
        """Note how long backward, step and handlers took.

        Gradients are reduced while the backward runs, and at its end each rank waits for the slowest one. This waiting takes no
        CPU time of this thread, which runs the backward. After that, each rank's time is its own again.
        """
        self._ended = now = perf_counter() - self._processes.waited
        if self._begun is not None:
            met, met_cpu = engine.group.met
            if met_cpu > self._begun:
                self._times["backward"].append((self._begun, met_cpu))
                self._times["handlers"].append((met, now))
            else:  # inside an accumulation window nothing is reduced
                self._times["backward"].append((self._begun, thread_time()))
        self._arrived = self._begun = None

    @on("compare_event", phase=Phase.PREPARE, rank=MEASURE_RATES, reads=["processes"], writes=["metrics"])
    def compare(self, engine: Engine) -> None:
        """Exchange the times, and report which ranks have become slow, or normal again."""
        if not engine.processes.distributed:
            return
        durations = {part: _durations(times) for part, times in self._times.items()}
        self._forget()
        own = {part: Times(median(seconds), seconds[len(seconds) // 4]) for part, seconds in durations.items()}
        ranks: list[dict[str, Times]] = engine.processes.gather(own)
        totals = [sum(times.median for times in parts.values()) for parts in ranks]
        middle = median(totals)
        if middle > 0:
            engine.state.metrics["straggler_ratio"] = max(totals) / middle
        before, self.stragglers = self.stragglers, find_stragglers(ranks, self.threshold, self.stragglers)
        if engine.processes.is_rank_zero:
            place = f"{self.name!r}: iteration {engine.state.iteration}"
            for rank in sorted(self.stragglers.keys() - before.keys()):
                warn(f"{place}: {_slow(rank, self.stragglers[rank], ranks)}")
            for rank in sorted(before.keys() - self.stragglers.keys()):
                now = f"{totals[rank] * 1e3:.1f} ms per iteration; the median of the ranks is {middle * 1e3:.1f} ms"
                warn(f"{place}: rank {rank} is back to normal: {now}")

    @on(Events.ENDED, reads=[], writes=[])
    def end(self, engine: Engine) -> None:
        """Discard the times of the run."""
        self._forget()
        self._processes = SINGLE_PROCESS

    def _forget(self) -> None:
        self._times = {part: [] for part in PARTS}
        self._ended = self._arrived = self._begun = None


class Times(NamedTuple):
    """The time of a part of the iterations on a rank, in seconds: median and lower quartile."""

    median: float
    quartile: float


def find_stragglers(
    ranks: Sequence[Mapping[str, Times]], threshold: float, before: Mapping[int, str]
) -> dict[int, str]:
    """Find slow ranks, each with the part that exceeds the median of the ranks most.

    The lower quartile decides, because processes that compete for the cores of a busy machine may be slow in many iterations, but
    are as fast as the others in some. A slow rank stays slow until half of its excess is gone, by the median, so a rank near the
    threshold is not named repeatedly.

    Args:
        ranks: The times of each part, for each rank.
        threshold: Ratio to the median above which a rank is slow.
        before: Ranks that were slow so far, with their parts.

    Example:
        >>> fast, slow = {"data": Times(0.010, 0.009)}, {"data": Times(0.030, 0.029)}
        >>> find_stragglers([fast, slow, fast], 1.2, {})
        {1: 'data'}
    """
    middle = median(sum(times.median for times in parts.values()) for parts in ranks)
    usual = {part: median(parts[part].median for parts in ranks) for part in ranks[0]}
    excess = max((threshold - 1) * middle, LEAST_EXCESS)
    found = {}
    for rank, parts in enumerate(ranks):
        if rank in before:
            if sum(times.median for times in parts.values()) - middle > excess / 2:
                found[rank] = before[rank]
        elif sum(times.quartile for times in parts.values()) - middle > excess:
            found[rank] = max(parts, key=lambda part: parts[part].median - usual[part])
    return found


def _slow(rank: int, part: str, ranks: Sequence[Mapping[str, Times]]) -> str:
    """The report about a slow rank."""
    totals = [sum(times.median for times in parts.values()) for parts in ranks]
    own, usual = ranks[rank][part].median, median(parts[part].median for parts in ranks)
    return (
        f"rank {rank} is a straggler that all other ranks wait for: its own work takes {totals[rank] * 1e3:.1f} ms per "
        f"iteration, compared with a median of {median(totals) * 1e3:.1f} ms over all ranks. The slow part is {part} "
        f"({PARTS[part]}): {own * 1e3:.1f} ms instead of {usual * 1e3:.1f} ms"
    )


def _recorded() -> torch.cuda.Event:
    """A place in the stream of the GPU, whose time is read later."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _durations(times: Sequence[tuple[Any, Any]]) -> list[float]:
    """The durations in seconds in ascending order; 0 where nothing was measured. Of a GPU, it waits for the last one."""
    if times and isinstance(times[-1][1], torch.cuda.Event):
        times[-1][1].synchronize()
        return sorted(begin.elapsed_time(end) * 1e-3 for begin, end in times)
    return sorted(end - begin for begin, end in times) or [0.0]
