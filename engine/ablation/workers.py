"""Where the runs of a study are made: in this process, in worker processes, or by an executor."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import TypeVar

from .runs import Outcome, Task, make
from .shared import SharedError

__all__ = ["outcomes", "pickled"]

T = TypeVar("T")

_DIED = "the process of this run died: either it was killed, possibly by the OOM killer, or it crashed in native code"


def outcomes(tasks: Sequence[Task], workers: int | Executor) -> Iterator[tuple[int, Outcome]]:
    """Make the runs; yields the index of each task and its outcome, in order of completion."""
    if not tasks:
        return iter(())
    if not isinstance(workers, int):
        return _through(tasks, workers)
    if workers == 0:
        return ((place, make(task)) for place, task in enumerate(tasks))
    return _in_processes([(place, pickled(task)) for place, task in enumerate(tasks)], workers)


def _through(tasks: Sequence[Task], executor: Executor) -> Iterator[tuple[int, Outcome]]:
    """Make the runs in an executor: those that it loses are an error once all others are made."""
    futures: dict[Future[Outcome], int] = {}
    errors: list[Exception] = []
    made = 0
    try:
        try:
            for place, task in enumerate(tasks):
                futures[executor.submit(make, task)] = place
        except Exception as error:  # what was submitted is made
            errors.append(error)
        for future in _as_completed(futures):
            try:
                outcome = future.result()
            except SharedError:
                raise
            except (Exception, CancelledError) as error:
                errors.append(error)
                continue
            yield futures[future], outcome
            made += 1
        if errors:
            errors[0].add_note(
                f"{executor!r} did not complete {len(tasks) - made} of {len(tasks)} runs of the study. The other "
                f"{made} runs are in the store, so calling run() again performs only the missing runs"
            )
            raise errors[0]
    finally:
        for future in futures:
            if not future.done():
                future.cancel()


_POLL = 0.05  # seconds; the wait doubles up to 20 times as many


def _as_completed(futures: Iterable[Future[Outcome]]) -> Iterator[Future[Outcome]]:
    """The futures in order of completion; jobs that are no `Future`, as schedulers of clusters return, are polled."""
    waiting = list(futures)
    if all(isinstance(future, Future) for future in waiting):
        yield from as_completed(waiting)
        return
    pause = _POLL
    while waiting:
        done = [future for future in waiting if future.done()]
        yield from done
        waiting = [future for future in waiting if future not in done]
        pause = _POLL if done else min(2 * pause, 20 * _POLL)
        if waiting:
            time.sleep(pause)


def pickled(task: Task) -> bytes:
    """A pickled task, to be sent to a worker process.

    Raises:
        TypeError: if a worker process could not import one of its functions.
    """
    way_out = (
        "worker processes import the function, so use a module-level function or a functools.partial of one, or set "
        "workers=0 to run everything in this process"
    )
    functions: list[tuple[str, object]] = [("build", task.build), ("run", task.run)]
    for what, function in functions + [(f"the alternative to {name!r}", factory) for name, factory in task.swaps]:
        try:
            data = pickle.dumps(function)
        except Exception as error:
            raise TypeError(f"{what} is {function!r}, which cannot be pickled ({error}); {way_out}") from None
        if b"__main__" in data and not hasattr(sys.modules["__main__"], "__file__"):
            raise TypeError(f"{what} is {function!r}, which was defined in an interactive session; {way_out}")
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
            for suspect in suspects:  # one at a time, to find the run that kills its process
                yield from _in_processes([suspect], 1)


@contextlib.contextmanager
def _processes(workers: int, task: bytes) -> Iterator[ProcessPoolExecutor]:
    """Worker processes that end with this one, even if it is killed."""
    context = multiprocessing.get_context("spawn")  # a fork would inherit threads, locks and the GPU half-way
    end, alive = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(end,))
    try:
        try:
            _submit(pool, _receive, task).result()
        except BrokenProcessPool:
            raise RuntimeError(
                "a worker process could not start; its error is printed above. Each worker imports the script of the "
                'study, so put the main code of the script under `if __name__ == "__main__":`, or set '
                "workers=0 to run everything in this process"
            ) from None
        yield pool
        pool.shutdown()
    finally:
        alive.close()  # ends workers that are still running
        pool.shutdown(cancel_futures=True)
        end.close()


def _submit(pool: ProcessPoolExecutor, function: Callable[[bytes], T], task: bytes) -> Future[T]:
    """Submit a task with SIGINT blocked: a worker process started here must not receive Ctrl-C; this one does afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        return pool.submit(function, task)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # inherited by a new process
    try:
        return pool.submit(function, task)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(end: Connection) -> None:
    """In a worker: ignore Ctrl-C, which only the study's process handles, and exit when that process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def exit_with_parent() -> None:
        wait_for([end])
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def _receive(task: bytes) -> None:
    """Import what a run needs, so that import errors surface before the first run."""
    try:
        pickle.loads(task)
    except Exception as error:
        raise RuntimeError(
            f"a worker process cannot import a function of the study ({type(error).__name__}: {error}); the worker "
            "uses the sys.path of this process, so put any missing module in a folder on sys.path"
        ) from None
