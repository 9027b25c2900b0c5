"""``python -m signalfire bisect``: what made two runs differ."""

from __future__ import annotations

import argparse
import os
import runpy
import shlex
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from signalfire import Engine

from .study import find_function

__all__ = ["add_bisect", "bisect", "built_by"]


def add_bisect(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser("bisect", help="what made two runs differ? make them again, and look closely")
    parser.add_argument(
        "traces", nargs="*", type=Path, help="the two traces; without, the runs are compared from the start"
    )
    parser.add_argument(
        "--script",
        nargs="+",
        metavar="SCRIPT",
        help="the script that trains, or those of both runs; with arguments in quotes: 'train.py --lr 0.1'",
    )
    parser.add_argument(
        "--build", nargs="+", metavar="NAME", help="a function that returns (engine, run), such as train:build, or two"
    )
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="checkpoints of either run, to begin later")
    parser.add_argument("--until", type=int, metavar="N", help="the last iteration that is looked at, without traces")


def bisect(given: argparse.Namespace) -> int:
    """Print what made two runs differ; returns 1 if something did, 0 if nothing does, and 2 for what cannot be made again."""
    from ..traces import bisect as bisect_runs

    try:
        builds = _builds(given)
        found = bisect_runs(*builds, traces=given.traces, checkpoints=given.checkpoints, until=given.until)
    except (OSError, ValueError, TypeError, ImportError, AttributeError) as error:
        print(error, file=sys.stderr)
        return 2
    print(found)
    if found.iteration is None and found.compared is not None:
        return 2
    return 0 if found.iteration is None else 1


def _builds(given: argparse.Namespace) -> list[Callable[[], Any]]:
    names = given.script or given.build or []
    if len(given.traces) not in (0, 2):
        raise ValueError(f"bisect takes two traces, or none; got {len(given.traces)}")
    if bool(given.script) == bool(given.build) or len(names) > 2:
        raise ValueError("bisect needs --script train.py, or --build train:build: one for both runs, or two")
    if given.script:
        return [partial(built_by, one) for one in names]
    return [find_function(one, "--build", "()", ()) for one in names]


class _Captured(BaseException):
    """Ends a script once its engine is about to train; not an `Exception`, which the script may catch."""


def built_by(script: str) -> tuple[Engine, Callable[[Engine], object]]:
    """The engine that a script trains first, and what the script calls to train it.

    Args:
        script: Its path, and its arguments as on a command line.

    Raises:
        ValueError: If the script ends without a training.
    """
    captured: list[tuple[Engine, Callable[[Engine], object]]] = []
    path, *arguments = shlex.split(script, posix=os.name != "nt")

    def capture(engine: Engine, *args: Any, **options: Any) -> Any:
        if not engine.training:
            return run(engine, *args, **options)
        captured.append((engine, lambda engine: run(engine, *args, **options)))
        raise _Captured

    with _in_place_of_run(capture) as run, _as_a_program(Path(path).resolve(), arguments):
        try:
            runpy.run_path(path, run_name="__main__")
        except _Captured as error:
            # The script's variables, such as its data, live as long as the engine.
            captured[0][0].__dict__["script"] = error
            return captured[0]
        except SystemExit as error:
            raise ValueError(f"{path!r} ended before a training, with the exit status {error.code!r}") from None
    raise ValueError(f"{path!r} ends without a training: it calls run() of no engine that trains")


@contextmanager
def _in_place_of_run(capture: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    run = Engine.run
    Engine.run = capture  # type: ignore[method-assign]
    try:
        yield run
    finally:
        Engine.run = run  # type: ignore[method-assign]


@contextmanager
def _as_a_program(script: Path, arguments: list[str]) -> Iterator[None]:
    """Let a script find its arguments, and the modules beside it; another script imports its own."""
    before, given, searched = set(sys.modules), sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = [str(script), *arguments], [str(script.parent)]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = given, searched
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and not any(Path(file).is_relative_to(folder) for folder in _INSTALLED):
                del sys.modules[name]


_INSTALLED = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {
    str(Path(sys.modules[Engine.__module__].__file__ or "").parent)
}
"""Folders of what is installed: the same for each script."""
