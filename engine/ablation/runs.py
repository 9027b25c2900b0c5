"""One run of a study: built, put together as its variant says, and made, in this process or in others."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    as_completed,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Literal, TypeVar

import torch

from signalfire import Engine, Events, Handler, seed_everything
from signalfire.randomness import unchanged_random_state
from signalfire.state import as_number

__all__ = ["Build", "Outcome", "Run", "Task", "compose", "exchange", "make", "outcomes"]

T = TypeVar("T")

Run = Callable[[Engine], object]
Build = Callable[[int], Engine | tuple[Engine, Run]]

_DIED = (
    "the process that made this run died: it was killed, perhaps because the memory ran out, or it crashed in code that is "
    "not Python"
)
_alone = threading.Lock()  # runs of one process share its global generators: one after the other


@dataclass(frozen=True)
class Task:
    """What a run is made from; it travels to other processes.

    Attributes:
        build, run, streams, files: those of the study.
        seed: of the run.
        off: the names of the handlers that are off.
        swaps: for each handler that is exchanged, what builds the other.
        nonce: tells tries apart, for executors that keep results of equal calls.
    """

    build: Build
    run: Run | None
    streams: Literal["shared", "separate"] | None
    files: bool
    seed: int
    off: tuple[str, ...] = ()
    swaps: tuple[tuple[str, Callable[[], Handler]], ...] = ()
    nonce: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        error: the traceback, if it failed.
        handlers: the names of those that took part.
        metrics: those that are one number.
        announced: the names of all metrics that were there or were announced.
        steps, seconds, memory: as in `Result`.
    """

    error: str | None = None
    handlers: tuple[str, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    announced: tuple[str, ...] = ()
    steps: int = 0
    seconds: float = 0.0
    memory: int = 0


def compose(
    build: Build, run: Run | None, streams: Literal["shared", "separate"] | None, files: bool, seed: int
) -> tuple[Engine, Run]:
    """Build an engine, and what runs it, with the global generators seeded; without files, nobody writes or shows anything.

    Raises:
        TypeError: if that is not what the function returns.
        ValueError: if the engine has another seed.
    """
    seed_everything(seed)
    built = build(seed)
    engine, own = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(engine, Engine) or not (own is None or callable(own)):
        raise TypeError(
            f"build({seed}) returned {built!r}; it has to be an Engine, or an Engine and a function that runs it"
        )
    run = own or run
    if run is None:
        raise TypeError(
            f"build({seed}) returned an engine alone: return (engine, run) with a function that runs it, such as "
            "lambda engine: engine.run(loader, max_epochs=5), or give Study(run=...)"
        )
    if engine.seed != seed:
        raise ValueError(
            f"build({seed}) returned an engine whose seed is {engine.seed}: give it Engine(..., seed=seed)"
        )
    if streams is not None:
        engine.streams = streams
    if not files:
        engine.dry_run = True  # which evaluations in it are, too
        for handler in engine.handlers.values():
            if writes_or_shows(handler):
                handler.enabled = False
    return engine, run


def writes_or_shows(handler: Handler) -> bool:
    """Whether it is for files or the screen, and no part of the training."""
    return handler.writes or handler.rank_zero_only


def exchange(engine: Engine, name: str, factory: Callable[[], Handler]) -> Handler:
    """Put a new handler in the place of the one with this name."""
    with unchanged_random_state():
        handler = factory()
    if not isinstance(handler, Handler):
        raise TypeError(f"what builds the alternative to {name!r} returned {handler!r}; it has to be a Handler")
    engine.detach(name)
    engine.attach(handler)
    return handler


def make(task: Task) -> Outcome:
    """Make a run in this process; an error that leaves it is a part of the outcome."""
    with _alone, unchanged_random_state(), _one_thread():
        memory = _Memory()
        engine: Engine | None = None
        began: float | None = None
        error: str | None = None
        try:
            engine, run = compose(task.build, task.run, task.streams, task.files, task.seed)
            for name in task.off:
                engine.handlers[name].enabled = False
            for name, factory in task.swaps:
                exchange(engine, name, factory)
            if not engine.snapshots.has_loaded_state:  # otherwise it was built so, for all variants alike
                engine.connect(Events.STARTED, _begin_anew)
            began = time.perf_counter()
            run(engine)
        except (Exception, SystemExit):
            # Addresses of objects differ from process to process.
            error = re.sub(r"\b0x[0-9a-f]{6,}\b", "0x...", traceback.format_exc())
        seconds = 0.0 if began is None else time.perf_counter() - began
        if engine is None:
            return Outcome(error, memory=memory.peak())
        metrics = engine.state.metrics
        numbers = {name: number for name in sorted(metrics) if (number := as_number(metrics[name])) is not None}
        return Outcome(
            error,
            tuple(sorted(name for name, handler in engine.handlers.items() if handler.enabled)),
            numbers,
            tuple(sorted({*metrics, *metrics.owners})),
            engine.updates[0].steps,
            seconds,
            memory.peak(),
        )


def _begin_anew(engine: Engine) -> None:
    if engine.snapshots.has_loaded_state:
        raise RuntimeError(
            "the run would go on from what another had saved, and those of a study begin anew: leave Checkpoint(resume=True) "
            "out of build, or do without Study(files=True)"
        )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Sums come out otherwise with another number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Memory:
    """The peak memory of this process from now on, with that of its GPU; on systems other than Linux, since it began."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """In bytes; 0 if the system does not tell."""
        on_device = (
            torch.cuda.max_memory_allocated() if torch.cuda.is_available() and torch.cuda.is_initialized() else 0
        )
        with contextlib.suppress(OSError), open("/proc/self/status") as file:
            if found := re.search(r"VmHWM:\s+(\d+) kB", file.read()):
                return int(found[1]) * 1024 + on_device
        try:
            import resource
        except ImportError:
            return on_device
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit + on_device


# ---- where runs are made --------------------------------------------------------------------------------------------


def outcomes(tasks: Sequence[Task], workers: int | Executor) -> Iterator[tuple[int, Outcome]]:
    """Make the runs; gives each one's place among the tasks and its outcome, as they are completed."""
    if not tasks:
        return iter(())
    if not isinstance(workers, int):
        return _through(tasks, workers)
    if workers == 0:
        return ((place, make(task)) for place, task in enumerate(tasks))
    return _in_processes([(place, pickled(task)) for place, task in enumerate(tasks)], workers)


def _through(tasks: Sequence[Task], executor: Executor) -> Iterator[tuple[int, Outcome]]:
    futures: dict[Future[Outcome], int] = {}
    try:
        for place, task in enumerate(tasks):
            futures[executor.submit(make, task)] = place
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except (Exception, CancelledError) as error:
                error.add_note(f"{executor!r} could not make a run of the study; what is finished is in the store")
                raise
    finally:
        for future in futures:
            future.cancel()


def pickled(task: Task) -> bytes:
    """A task as it is sent to a process.

    Raises:
        TypeError: if a new process could not get at a function of it.
    """
    way_out = (
        "a new process has to import it: write a function at the top of a module, or functools.partial of one; or "
        "take workers=0, which makes the runs in this process"
    )
    functions: list[tuple[str, object]] = [("build", task.build), ("run", task.run)]
    for what, function in functions + [(f"the alternative to {name!r}", factory) for name, factory in task.swaps]:
        try:
            data = pickle.dumps(function)
        except Exception as error:
            raise TypeError(f"{what} is {function!r}, which cannot be pickled ({error}); {way_out}") from None
        if b"__main__" in data and not hasattr(sys.modules["__main__"], "__file__"):
            raise TypeError(f"{what} is {function!r}, which was written in an interactive session; {way_out}")
    return pickle.dumps(task)


def _make_pickled(data: bytes) -> Outcome:
    return make(pickle.loads(data))


def _in_processes(tasks: list[tuple[int, bytes]], workers: int) -> Iterator[tuple[int, Outcome]]:
    waiting = deque(tasks)
    while waiting:
        running: dict[Future[Outcome], tuple[int, bytes]] = {}
        try:
            with _processes(min(workers, len(waiting)), waiting[0][1]) as pool:
                while waiting or running:
                    while waiting and len(running) < workers:
                        running[_submit(pool, _make_pickled, waiting[0][1])] = waiting[0]
                        waiting.popleft()
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in sorted(done, key=lambda future: future.exception() is not None):
                        outcome = future.result()
                        yield running.pop(future)[0], outcome
        except BrokenProcessPool:
            suspects = sorted(running.values())
            if len(suspects) == 1:
                yield suspects[0][0], Outcome(_DIED)
                continue
            for suspect in suspects:  # alone, the one that kills its process shows
                yield from _in_processes([suspect], 1)


@contextlib.contextmanager
def _processes(workers: int, task: bytes) -> Iterator[ProcessPoolExecutor]:
    """New processes that end with this one, however it ends."""
    context = multiprocessing.get_context("spawn")  # a fork would take over threads, locks and the GPU half-way
    end, alive = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(end,))
    try:
        try:
            _submit(pool, _receive, task).result()
        except BrokenProcessPool:
            raise RuntimeError(
                "a worker process could not be started; its message stands above. A script that makes a study needs "
                'the line `if __name__ == "__main__":` in front of what it does, since each process imports it; '
                "workers=0 makes the runs in this process"
            ) from None
        yield pool
        pool.shutdown()
    finally:
        alive.close()  # ends those that still work
        pool.shutdown(cancel_futures=True)
        end.close()


def _submit(pool: ProcessPoolExecutor, function: Callable[[bytes], T], task: bytes) -> Future[T]:
    """Submit a task, which may start a process: Ctrl-C must not reach that one, and reaches this one afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        return pool.submit(function, task)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # a new process inherits it
    try:
        return pool.submit(function, task)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(end: Connection) -> None:
    """In a worker: Ctrl-C is for the study's process alone; without that one, there is nothing left to do here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def follow() -> None:
        wait_for([end])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _receive(task: bytes) -> None:
    """Import what a run needs, so that what cannot be imported shows before the first run."""
    try:
        pickle.loads(task)
    except Exception as error:
        raise RuntimeError(
            f"a worker process cannot import what the study is made of ({type(error).__name__}: {error}); it looks where this "
            "process does (sys.path)"
        ) from None
