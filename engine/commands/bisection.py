"""``python -m signalfire bisect``: what made two runs differ."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .study import find_function

if TYPE_CHECKING:
    from ..traces import Script

__all__ = ["add_bisect", "bisect"]


def add_bisect(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser("bisect", help="repeat and compare two runs to find out why they differ")
    parser.add_argument(
        "traces", nargs="*", type=Path, help="the two traces; without traces, the runs are compared from the start"
    )
    parser.add_argument(
        "--script",
        nargs="+",
        metavar="SCRIPT",
        help="the training script, or one script for each run; put a script and its arguments in quotes: "
        "'train.py --lr 0.1'",
    )
    parser.add_argument(
        "--build", nargs="+", metavar="NAME", help="one or two functions that return (engine, run), such as train:build"
    )
    parser.add_argument(
        "--checkpoints",
        type=Path,
        metavar="FOLDER",
        help="checkpoints from either run; the repeated runs start from one of them instead of from iteration 1",
    )
    parser.add_argument("--until", type=int, metavar="N", help="the last iteration to compare if no traces are given")


def bisect(given: argparse.Namespace) -> int:
    """Print what made two runs differ; returns 1 if something did, 0 if nothing does, and 2 for what cannot be repeated."""
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


def _builds(given: argparse.Namespace) -> list[Callable[[], Any] | Script]:
    from ..traces import Script

    names = given.script or given.build or []
    if len(given.traces) not in (0, 2):
        raise ValueError(f"bisect takes either two traces or none, but got {len(given.traces)}")
    if bool(given.script) == bool(given.build) or len(names) > 2:
        raise ValueError("bisect needs --script train.py or --build train:build, with one or two values")
    if given.script:
        return [Script(one) for one in names]
    return [find_function(one, "--build", "()", ()) for one in names]
