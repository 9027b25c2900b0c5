"""Checks of what the methods of a study are given."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor

from signalfire import Engine
from signalfire.authoring.checks import check_int

from .runs import Build

__all__ = ["check_build", "check_handlers", "check_seeds", "check_workers", "message_of"]


def check_build(build: Build | None, run: object, metric: object) -> Build:
    """The function that builds the runs.

    Raises:
        TypeError: if it is none, or ``run`` is none, or ``metric`` is no name.
    """
    if build is None or isinstance(build, Engine) or not callable(build):
        raise TypeError(f"Study(build={build!r}): expected a function that takes a seed and returns a new engine")
    if run is not None and not callable(run):
        raise TypeError(f"Study(run={run!r}): expected a function that takes the engine")
    if not isinstance(metric, str) or not metric:
        raise TypeError(f"Study(metric={metric!r}): expected the name of a metric, such as 'accuracy'")
    return build


def check_seeds(owner: str, seeds: Iterable[int]) -> tuple[int, ...]:
    """The seeds as a tuple.

    Raises:
        TypeError, ValueError: if they are not distinct ints of 0 or more.
    """
    if isinstance(seeds, int) or not isinstance(seeds, Iterable):
        raise TypeError(f"{owner}(seeds={seeds!r}): expected a sequence of ints, such as range(8)")
    found = tuple(check_int(owner, "seeds", seed, least=0) for seed in seeds)
    if not found:
        raise ValueError(
            f"{owner}(seeds=[]): expected at least one seed; with fewer than 6 seeds, no effect can be significant"
        )
    if len(set(found)) < len(found) or max(found) >= 2**32:
        raise ValueError(f"{owner}(seeds={list(found)}): expected distinct ints below 2**32")
    return found


def check_handlers(owner: str, handlers: Iterable[str]) -> tuple[str, ...]:
    """The names as a tuple, if they are not one string."""
    if isinstance(handlers, str):
        raise TypeError(f"{owner}(handlers={handlers!r}): expected a list of names, such as [{handlers!r}]")
    return tuple(handlers)


def check_workers(method: str, workers: int | Executor) -> int | Executor:
    """The workers, if they are an executor or a number."""
    return workers if callable(getattr(workers, "submit", None)) else check_int(method, "workers", workers, least=0)


def message_of(error: Exception) -> str:
    """The message of an error; that of a `KeyError` without quotes."""
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else f"{error}"
