"""Throughput: samples, tokens, batches and steps per second, and model FLOPs utilization (MFU)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Literal

from torch import Tensor
from torch.nn import RNNBase

from signalfire import AnyEvent, Engine, Events, Handler, Interval, Phase, on
from signalfire.authoring import Capture, check_bool, check_every, check_function, check_int, check_number, event_of
from signalfire.distributed.shards import Shards
from signalfire.findings.dropout import is_compiled
from signalfire.updates.places import Place, PlaceError, check_place, value_at

from ._common.operations import OperationCounter
from ._common.options import events_if
from ._common.peaks import name_of, peak_of
from ._common.ranks import AFTER_ALL, BEFORE_ALL, MEASURE_RATES

__all__ = ["Throughput"]


class Throughput(Handler):
    """Measures throughput: samples, tokens, batches and steps per second over all processes, and MFU.

    The metrics in ``state.metrics`` are "samples_per_second", "batches_per_second" and "steps_per_second", since the previous
    measurement. Evaluations, checkpoints and the first iterations of a run do not count, so a resumed run shows no drop. With
    gradient accumulation, a step has several batches. Optional metrics are "tokens_per_second"; "waiting_for_data", the share
    of the time spent waiting for the next batch; "flops_per_second"; and "mfu" (model FLOPs utilization), the share of the
    processors' peak performance that the model uses. A ``name`` given to the handler prefixes these names, as in
    "slow/samples_per_second", so you can attach several such handlers.

    On a GPU, the values are right only if iterations wait for the device from time to time, for example by reading a loss,
    because kernels run asynchronously.

    Args:
        every: Interval between two measurements.
        warmup: Number of initial iterations of each run that are not measured.
        tokens: Function from a batch to its number of tokens; or the index, key or name of a tensor whose elements are counted.
        waiting: Whether to measure the time spent waiting for data, which takes two more calls per iteration.
        flops: Floating-point operations of training with one sample, forward and backward; a function from a batch to its
            operations; or "count", which counts those of the first batch with torch's counter. "count" does not work for compiled
            models, and does not count an LSTM; see `Summary`.
        peak: Peak performance of one process's processor in operations per second, such as 989e12 for bfloat16 on an H100. By
            default that of dense bfloat16 on the model's device, for a few known GPUs; on other devices, a line on standard error
            reports that "mfu" is not measured.
        clock: Function that returns the time in seconds.

    Source:
        MFU: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways" (JMLR 2023), appendix B.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> clock = lambda: 0.5 * engine.state.iteration  # an iteration takes half a second
        >>> _ = engine.attach(Throughput(every="4it", warmup=2, tokens=0, clock=clock))
        >>> metrics = engine.run([(torch.ones(16, 2), torch.ones(16, 1))] * 4, max_epochs=1).metrics
        >>> for name, value in metrics.items():
        ...     print(name, value)
        samples_per_second 32.0
        batches_per_second 2.0
        steps_per_second 2.0
        tokens_per_second 64.0
    """

    by_shard = True
    capture = Capture.OUTSIDE
    trains = True

    def __init__(
        self,
        *,
        every: str | Interval | AnyEvent = "100it",
        warmup: int = 10,
        tokens: Place | None = None,
        waiting: bool = False,
        flops: float | Callable[[Any], float] | Literal["count"] | None = None,
        peak: float | None = None,
        clock: Callable[[], float] = perf_counter,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.every = check_every(self, every)
        self.warmup = check_int(self, "warmup", warmup, least=1)
        check_function(self, "clock", clock)
        check_place("Throughput(tokens", tokens)
        self._check_operations(flops, peak)
        self.tokens = tokens
        self.flops = flops
        self._operations_of_batch = flops if callable(flops) else None
        self.peak = peak
        self.clock = clock
        self.missing_peak_event = Events.STARTED if flops is not None and peak is None else None
        self._prefix = "" if name is None else f"{name}/"
        self.record_event = event_of(self.every)
        waits = events_if(check_bool(self, "waiting", waiting), Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED)
        self.wait_event, self.arrive_event = waits
        passes = Events.FORWARD_STARTED, Events.BACKWARD_STARTED, Events.BACKWARD_COMPLETED
        self.count_event, self.count_backward_event, self.counted_event = events_if(flops == "count", *passes)
        self._begun: float | None = None  # when the window began, without the pauses before; None in the warm-up
        self._left = 0  # iterations of the warm-up
        self._counts_itself = False  # whether no function says how many samples a batch has
        self._paused_at: float | None = None
        self._paused = 0.0  # seconds of all pauses
        self._waited = self._asked = 0.0
        self._iterations = self._samples = self._tokens = self._batches = self._steps = 0
        self._operations = 0.0
        self._counter: OperationCounter | None = None
        self._counted = 0  # its operations up to the end of a backward
        self._of_sample: float | None = None  # operations counted in the first batch

    def _check_operations(self, flops: Any, peak: float | None) -> None:
        if isinstance(flops, str) and flops != "count":
            raise ValueError(f"Throughput(flops={flops!r}): expected a number, a function of the batch, or 'count'")
        if flops is not None and not isinstance(flops, str) and not callable(flops):
            check_number(self, "flops", flops, above=0)
        if peak is not None:
            check_number(self, "peak", peak, above=0)
            if flops is None:
                raise ValueError(
                    f"Throughput(peak={peak!r}): peak= requires flops=; pass the operations per sample, or 'count'"
                )

    def metric_names(self, engine: Engine) -> list[str]:
        optional = {
            "tokens_per_second": self.tokens is not None,
            "waiting_for_data": self.wait_event is not None,
            "flops_per_second": self.flops is not None,
            "mfu": self.flops is not None and self._peak(engine) is not None,
        }
        names = [
            "samples_per_second",
            "batches_per_second",
            "steps_per_second",
            *(name for name, measured in optional.items() if measured),
        ]
        return [self._prefix + name for name in names]

    @on(Events.STARTED, phase=Phase.PREPARE, reads=["device"], writes=["metrics"])
    def begin(self, engine: Engine) -> None:
        """Start the warm-up, and announce the names of the metrics."""
        engine.state.metrics.announce(self.name, self.metric_names(engine), saved=False)
        self._begun, self._left, self._counter = None, self.warmup, None
        self._paused_at, self._paused = None, 0.0
        self._counts_itself = engine.updates[0].spec.samples is None

    @on("missing_peak_event", phase=Phase.RECORD, reads=["device"], writes=["files"])
    def report_missing_peak(self, engine: Engine) -> None:
        """Print why there is no MFU, if the device's peak performance is not known."""
        if self._peak(engine) is None:
            device = name_of(engine.device)
            line = f"{self.name}: 'mfu' is omitted, because the peak performance of {device!r} is not known; pass peak="
            engine.processes.print(line, file=sys.stderr)

    @on("count_event", phase=Phase.RECORD, reads=[], writes=[])
    @on("count_backward_event", phase=Phase.RECORD, reads=[], writes=[])
    def count_operations(self, engine: Engine) -> None:
        """Count the operations of the first batch."""
        first = self._left == self.warmup and engine.state.update.evaluation == 0
        if first and self._of_sample is None and not is_compiled(engine):
            self._counter = self._counter or OperationCounter()
            engine.regions.enter(self._counter)

    @on("counted_event", phase=Phase.PREPARE, rank=BEFORE_ALL, reads=["modules"], writes=[])
    def end_counting(self, engine: Engine) -> None:
        """Take the count so far; a step may compute the gradients again."""
        if self._counter is not None and engine.state.update.evaluation == 0:
            if not self._counted:
                self._report_uncounted(engine)
            self._counted = self._counter.total

    def _report_uncounted(self, engine: Engine) -> None:
        found = {
            type(part).__name__
            for root in engine.modules.values()
            for part in root.modules()
            if isinstance(part, RNNBase)
        }
        if found:
            engine.processes.print(
                f"{self.name}: torch does not count the operations of {', '.join(sorted(found))}, so "
                "'flops_per_second' and 'mfu' are too low; pass flops=",
                file=sys.stderr,
            )

    @on("wait_event", phase=Phase.PERSIST, rank=AFTER_ALL, reads=[], writes=[])
    def begin_waiting(self, engine: Engine) -> None:
        """Record when a batch was requested."""
        self._asked = self.clock()

    @on("arrive_event", phase=Phase.PREPARE, rank=BEFORE_ALL, reads=[], writes=[])
    def end_waiting(self, engine: Engine) -> None:
        """Record how long it took."""
        self._waited += self.clock() - self._asked

    @on(
        Events.EVALUATION_STARTED | Events.CHECKPOINT_STARTED | Events.CHECKPOINT_SAVING,
        phase=Phase.PREPARE,
        rank=BEFORE_ALL,
        reads=[],
        writes=[],
    )
    def pause(self, engine: Engine) -> None:
        """Pause the clock during an evaluation, or while a checkpoint is written."""
        if self._paused_at is None:
            engine.regions.enter(self._pause())

    @contextmanager
    def _pause(self) -> Iterator[None]:
        self._paused_at = self.clock()
        try:
            yield
        finally:
            if self._paused_at is not None:
                self._paused += self.clock() - self._paused_at
            self._paused_at = None

    def _now(self) -> float:
        """The time, without all pauses."""
        return (self.clock() if self._paused_at is None else self._paused_at) - self._paused

    @on(Events.ITERATION_COMPLETED, phase=Phase.PREPARE, rank=BEFORE_ALL, reads=["batch", "step"], writes=[])
    def count(self, engine: Engine) -> None:
        """Count an iteration."""
        if self._left:
            self._warm_up(engine)
            return
        batch = engine.state.batch
        self._iterations += 1
        if batch.__class__ is Shards:
            self._count_shards(engine, batch)
        elif batch is not None:
            self._batches += 1
            # The usual batches are counted here, without a call, as `samples_in` counts them.
            usual = self._counts_itself and batch.__class__ in (tuple, list) and batch and batch[0].__class__ is Tensor
            shape = batch[0].shape if usual and not batch[0].is_nested else None
            self._samples += shape[0] if shape else engine.updates[0].samples_in(batch)
            if self.tokens is not None:
                self._tokens += self._tokens_in(batch)
            if self._operations_of_batch is not None:
                self._operations += self._operations_of_batch(batch)

    def _count_shards(self, engine: Engine, shards: Shards) -> None:
        """Count the batches of a step with shards."""
        batches = [batch for batch in shards if batch is not None]
        self._batches += len(batches)
        self._samples += sum(map(engine.updates[0].samples_in, batches))
        if self.tokens is not None:
            self._tokens += sum(map(self._tokens_in, batches))
        if self._operations_of_batch is not None:
            self._operations += sum(map(self._operations_of_batch, batches))

    def _warm_up(self, engine: Engine) -> None:
        if self._counter is not None and (samples := engine.updates[0].samples_in(engine.state.batch)):
            self._of_sample, self._counter = self._counted / samples, None
        self._left -= 1
        if self._left == 0:
            self._begin_window(engine)

    @on(
        "record_event",
        phase=Phase.PREPARE,
        rank=MEASURE_RATES,
        reads=["processes", "step", "device"],
        writes=["metrics"],
    )
    def record(self, engine: Engine) -> None:
        """Write the values of the window, and start the next one."""
        if self._begun is None or self._iterations == 0:
            return
        seconds = self._now() - self._begun
        operations = self._operations + self._samples * self._operations_of_sample()
        waited, steps = self._waited, engine.updates[0].steps - self._steps
        samples, batches, tokens, operations = engine.group.data.sum(
            self._samples, self._batches, self._tokens, operations
        )
        self._begin_window(engine)
        if seconds <= 0:  # by a coarse clock
            return
        values = {
            "samples_per_second": samples / seconds,
            "batches_per_second": batches / seconds,
            "steps_per_second": steps / seconds,
            "tokens_per_second": tokens / seconds,
            "waiting_for_data": waited / seconds,
            "flops_per_second": operations / seconds,
            "mfu": operations / seconds / (self._peak(engine) or 1.0) / engine.processes.world_size,
        }
        measured = self.metric_names(engine)
        named = {self._prefix + name: value for name, value in values.items()}
        engine.state.metrics.update({name: value for name, value in named.items() if name in measured})

    def _tokens_in(self, batch: Any) -> int:
        assert self.tokens is not None
        try:
            found = value_at(batch, self.tokens)
        except PlaceError as error:
            raise TypeError(f"{self.name!r}: tokens={self.tokens!r}: {error}") from None
        return int(found if callable(self.tokens) else found.numel())

    def _peak(self, engine: Engine) -> float | None:
        """As given, or that of the model's device; None if it is not known."""
        return peak_of(name_of(engine.device)) if self.peak is None else self.peak

    def _operations_of_sample(self) -> float:
        """As given or counted; 0 where a function gives those of each batch, or none are known."""
        known = self._of_sample if self.flops == "count" else self.flops
        return float(known) if isinstance(known, int | float) else 0.0

    def _begin_window(self, engine: Engine) -> None:
        self._begun = self._now()
        self._waited = self._operations = 0.0
        self._iterations = self._samples = self._tokens = self._batches = 0
        self._steps = engine.updates[0].steps
