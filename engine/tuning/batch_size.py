"""The batch-size finder: trials of a few steps at rising sizes, which leave no trace."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from ..authoring.checks import check_choice
from ..authoring.markup import preformatted
from ..authoring.versions import current_accelerator, memory_of
from ..core.connection import Phase
from ..core.events import Events
from ..core.handler import Handler, on
from ..core.overrides import Override
from ..models.explain import is_out_of_memory
from ..runs.rehearsal import check_engine, rehearsal
from ..runs.restore import attempt

if TYPE_CHECKING:
    from ..core.update import UpdateState
    from ..engine import Engine

__all__ = ["BatchSizes", "Trial", "find_batch_size"]

_NAME = "find_batch_size"
_LoaderOf = Callable[[int], Iterable[Any]]


class Trial(NamedTuple):
    """A trial of one batch size.

    Attributes:
        size: The number of samples in a batch, of each process.
        ok: Whether memory sufficed.
        peak: Peak memory in bytes: of the accelerator, or of this process on a CPU with Linux; None if it is not known, or memory
            did not suffice.
        samples_per_second: Throughput of each process over all steps except the first; None if memory did not suffice.
    """

    size: int
    ok: bool
    peak: int | None
    samples_per_second: float | None


@dataclass(frozen=True)
class BatchSizes:
    """Results of a batch-size search, by size.

    Attributes:
        trials: The trials.
        largest: The size to use: the largest one that fits, less the margin. It was tried, too.
        limit: Reason why no larger size was tried; empty if memory did not suffice for one.
    """

    trials: tuple[Trial, ...]
    largest: int
    limit: str = ""

    @property
    def fastest(self) -> int:
        """The size with the most samples per second, among those that fit."""
        return max((one for one in self.trials if one.ok), key=lambda one: one.samples_per_second or 0.0).size

    def __str__(self) -> str:
        lines = [f"{'size':>8}  {'fits':<4} {'peak MiB':>9} {'samples/s':>11}"]
        named = {"largest": self.largest, "fastest": self.fastest}
        for one in self.trials:
            peak = "" if one.peak is None else f"{one.peak / 2**20:.0f}"
            speed = "" if one.samples_per_second is None else f"{one.samples_per_second:.0f}"
            marks = [mark for mark, size in named.items() if one.ok and size == one.size]
            note = f"  <- {', '.join(marks)}" if marks else ""
            lines.append(f"{one.size:>8}  {'yes' if one.ok else 'no':<4} {peak:>9} {speed:>11}{note}")
        if self.limit:
            lines.append(self.limit)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return preformatted(self)


def find_batch_size(
    engine: Engine,
    loader_of: Callable[[int], Iterable[Any]],
    *,
    start: int = 2,
    mode: Literal["power", "bisect"] = "power",
    margin: float = 0.05,
    maximum: int | None = None,
    steps: int = 3,
    evaluation: tuple[Engine, Callable[[int], Iterable[Any]]] | None = None,
) -> BatchSizes:
    """Batch-size finder: tries batch sizes until memory runs out, and restores everything.

    Each size is tried for some optimizer steps, as in training: with clipping, mixed precision, gradient accumulation, several
    processes. Logs, checkpoints, validation, averages and schedules are disabled, as in `find_learning_rate`. Afterwards weights,
    optimizers, handlers, counters, random generators and the position in the data are restored.

    With several processes, a size must fit on all of them. If a single one runs out of memory inside the optimizer's step, the
    search ends with an error after the timeout of the process group.

    Args:
        engine: The engine to train; it must not be running.
        loader_of: Function called with a size that returns data in batches of this size, such as a DataLoader. If its ``dataset``
            has a length, no larger size is tried.
        start: The first size.
        mode: "power": sizes are doubled until one does not fit; "bisect": then the range in between is halved until the largest
            size is found.
        margin: Share of the largest size that is left unused, since memory use varies; the resulting size is tried, too.
        maximum: The largest size to try; None sets no limit.
        steps: Number of optimizer steps per trial, at least 2: optimizers such as Adam allocate their memory in the first step,
            and need it in the second.
        evaluation: An evaluator and a function that returns its data for a size, evaluated at the end of each trial; None
            evaluates nothing.

    Returns:
        The trials, with the largest size and the fastest one.

    Raises:
        ValueError: for invalid arguments, for an engine that does not train, or with `MicroBatching`, which splits batches that
            do not fit.
        torch.OutOfMemoryError: if memory does not suffice for a single sample.

    Example:
        >>> from functools import partial
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> data = torch.utils.data.TensorDataset(torch.ones(50, 4), torch.zeros(50, 1))
        >>> step = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(step, model=torch.nn.Linear(4, 1))
        >>> sizes = find_batch_size(engine, partial(torch.utils.data.DataLoader, data), margin=0.0)
        >>> [trial.size for trial in sizes.trials], sizes.limit
        ([2, 4, 8, 16, 32, 50], 'the data has 50 samples')
    """
    check_engine(engine, f"{_NAME}()")
    _check_functions(loader_of, evaluation)
    _check(start, mode, margin, maximum, steps)
    if not engine.training:
        raise ValueError(f"{_NAME}({engine!r}): the engine does not train, because its updates have no optimizer")
    if (owner := engine.overrides.owner_of(Override.GRADIENTS)) is not None:
        raise ValueError(
            f"{_NAME}(): {owner!r} computes the gradients in pieces of a fixed size, so the batch size has no effect; "
            f"detach the handler, or disable it: with engine.without({owner!r})"
        )
    limit = _samples_of(loader_of(start))
    why = "" if limit is None else f"the data has {limit} samples"
    if maximum is not None and (limit is None or maximum < limit):
        limit, why = maximum, f"maximum={maximum}"
    search = _Search(partial(_try, engine, loader_of, steps=steps, evaluation=evaluation), limit, why)
    largest = search.run(start, mode, margin)
    return BatchSizes(tuple(sorted(search.trials.values())), largest, search.why if search.too_large is None else "")


def _check_functions(loader_of: object, evaluation: object) -> None:
    if not callable(loader_of):
        raise TypeError(
            f"{_NAME}(loader_of={type(loader_of).__name__}): expected a function that takes a batch size and returns "
            "data, such as partial(DataLoader, dataset)"
        )
    pair = isinstance(evaluation, tuple) and len(evaluation) == 2 and callable(evaluation[1])
    if evaluation is not None and not pair:
        raise TypeError(
            f"{_NAME}(evaluation={type(evaluation).__name__}): expected a pair: an evaluator, and a function that "
            "takes a batch size and returns the evaluation data"
        )


class _Search:
    """Which sizes are tried; each of them once.

    Attributes:
        trials: The trials by size.
        limit: The largest size that can be tried; None while it is not known.
        why: What limits it.
        too_large: The smallest size that did not fit.
    """

    def __init__(self, trial: Callable[[int], Trial], limit: int | None, why: str) -> None:
        self._trial = trial
        self.limit = limit
        self.why = why
        self.trials: dict[int, Trial] = {}

    @property
    def fitting(self) -> int:
        """The largest size that did fit; 0 without one."""
        return max((size for size, trial in self.trials.items() if trial.ok), default=0)

    @property
    def too_large(self) -> int | None:
        return min((size for size, trial in self.trials.items() if not trial.ok), default=None)

    def fits(self, size: int) -> bool:
        if size in self.trials:
            return self.trials[size].ok
        trial = self._trial(size)
        if trial.size > size or trial.size <= self.fitting < size:
            raise ValueError(
                f"{_NAME}(): loader_of({size}) returned batches of {trial.size} samples; return batches of the "
                "requested size, as partial(DataLoader, dataset) does. If samples are not along the first dimension, "
                "pass Update(..., samples=)"
            )
        if trial.size < size:
            self.limit, self.why = trial.size, f"the batches have at most {trial.size} samples"
        self.trials[trial.size] = trial
        return trial.ok

    def run(self, start: int, mode: str, margin: float) -> int:
        """Try sizes; returns the one to use."""
        size = start if self.limit is None else min(start, self.limit)
        while not self.fits(size):
            if size == 1:
                raise torch.OutOfMemoryError(f"{_NAME}(): out of memory with a batch of one sample")
            size //= 2
        while self.too_large is None and self.fitting != self.limit:
            size = 2 * self.fitting
            self.fits(size if self.limit is None else min(size, self.limit))
        while mode == "bisect" and self.too_large is not None and self.too_large - self.fitting > 1:
            self.fits((self.fitting + self.too_large) // 2)
        wanted = self.fitting
        if self.too_large is not None:
            wanted = max(1, int(wanted * (1 - margin) + 1e-9))
        while not self.fits(wanted):  # memory varies
            wanted = max(1, wanted // 2)
        return wanted


def _try(
    engine: Engine, loader_of: _LoaderOf, size: int, *, steps: int, evaluation: tuple[Engine, _LoaderOf] | None
) -> Trial:
    """Train with batches of one size, and evaluate; nothing remains of it."""
    data = loader_of(size)
    measure = _Measure(steps)
    device = engine.device
    _free()
    memory = _Peak(device)
    failed = False
    with ExitStack() as stack:
        stack.enter_context(rehearsal(engine, data, where=f"{_NAME}()"))
        if evaluation is not None:
            evaluator, held_out = evaluation[0], evaluation[1](size)
            stack.enter_context(rehearsal(evaluator, held_out, where=f"{_NAME}(evaluation=)"))
        try:
            with engine.attach(measure):
                engine.run(data, max_iters=engine.state.iteration + _ENOUGH, check=False)
            if evaluation is not None and not measure.failed:
                engine.evaluate(evaluator, held_out, max_iters=1)
        except Exception as error:
            if not is_out_of_memory(error):
                error.add_note(f"in a trial of {_NAME}() with batches of {size}")
                raise
            failed = True  # what the traceback holds is freed before anything is put back
        if failed or measure.failed:
            _free()
    failed = engine.processes.any(failed or measure.failed)
    peak, speed = (None, None) if failed else (memory.read(), measure.samples_per_second)
    taken = measure.taken
    del memory, measure
    _free()
    return Trial(taken or size, not failed, peak, speed)


_ENOUGH = 10**9
"""More iterations than a trial has: it ends itself."""


class _Measure(Handler):
    """Ends a trial after its steps, counts samples and time, and lets all ranks know where the memory of one does not suffice."""

    trains = True
    decides_alike = True

    def __init__(self, steps: int) -> None:
        super().__init__(name=_NAME)
        self.steps = steps
        self.failed = False
        self.samples_per_second: float | None = None
        self.taken = 0  # samples of the first batch
        self._made = 0
        self._samples = 0
        self._since = 0  # the iteration of the first step
        self._began = 0.0

    def attached(self, engine: Engine) -> None:
        if engine.processes.distributed:
            engine.overrides.replace(Override.GRADIENTS, self.compute, by=self)

    def compute(self, engine: Engine, update: UpdateState, compute: Callable[[], None]) -> None:
        """Compute the gradients before they are reduced: a rank that fails alone would leave the others waiting."""
        synchronizes, update.sync_gradients = update.sync_gradients, False
        done = attempt(engine, update, compute)
        update.sync_gradients = synchronizes
        if not done:
            self.failed = True
            update.skip("out of memory")
            engine.terminate("out of memory", by=self.name)

    @on(Events.ITERATION_STARTED, phase=Phase.RECORD, reads=["batch"], writes=[])
    def note_size(self, engine: Engine) -> None:
        """Note how many samples the batches really have."""
        if not self.taken and engine.state.batch is not None:
            self.taken = engine.updates[0].samples_in(engine.state.batch)

    @on(Events.OPTIMIZER_STEP_COMPLETED, phase=Phase.CONTROL, reads=["step"], writes=["stop"])
    def count_step(self, engine: Engine) -> None:
        if engine.state.update is engine.updates[0]:
            self._made += 1
            if self._made == self.steps:
                engine.terminate("the trial is complete", by=self.name)

    @on(Events.ITERATION_COMPLETED, phase=Phase.CONTROL, reads=["batch"], writes=[])
    def count_samples(self, engine: Engine) -> None:
        """Count the samples, and take the time, from the end of the first step to that of the last one."""
        if self._made == 0:
            return
        if self._since == 0:
            self._since = engine.state.iteration
            _synchronize(engine.device)
            self._began = time.perf_counter()
            return
        if engine.state.batch is not None:
            self._samples += engine.updates[0].samples_in(engine.state.batch)
        if self._made == self.steps:
            _synchronize(engine.device)
            self.samples_per_second = self._samples / (time.perf_counter() - self._began)


class _Peak:
    """The largest amount of memory in use since it was made, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._accelerated = device, device.type != "cpu"
        self._resets = False
        if self._accelerated:
            memory_of(device).reset_peak_memory_stats(device)
        elif sys.platform == "linux":
            with suppress(OSError):  # a container may forbid it
                Path("/proc/self/clear_refs").write_text("5")  # begins the peak of VmHWM again
                self._resets = True

    def read(self) -> int | None:
        if self._accelerated:
            return int(memory_of(self._device).max_memory_allocated())
        if not self._resets:
            return None
        lines = Path("/proc/self/status").read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _free() -> None:
    gc.collect()
    if (device := current_accelerator()) is not None:
        memory_of(device).empty_cache()


def _samples_of(data: Any) -> int | None:
    """The number of samples in the data, by the dataset of a DataLoader; None if it is not known."""
    if isinstance(data, Iterator):
        return None  # an error in the first trial
    dataset = getattr(data, "dataset", None)
    if not isinstance(dataset, Sized):
        return None
    try:
        return len(dataset) or None
    except (TypeError, NotImplementedError):
        return None


def _check(start: int, mode: str, margin: float, maximum: int | None, steps: int) -> None:
    for name, value, least in (("start", start, 1), ("steps", steps, 2), ("maximum", maximum, 1)):
        if value is None and name == "maximum":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{_NAME}({name}={value!r}): expected an int of {least} or more")
    check_choice(_NAME, "mode", mode, ("power", "bisect"))
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin < 1:
        raise ValueError(f"{_NAME}(margin={margin!r}): expected a fraction of at least 0 and less than 1")
