"""``python -m signalfire compare``: where two traces differ first."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

__all__ = ["add_compare", "compare"]


def add_compare(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser("compare", help="find the first difference between two traces")
    for name in ("a", "b"):
        parser.add_argument(name, type=Path, help="a file that the Trace handler wrote on rank 0")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write a plot to a file, such as apart.png")


def compare(given: argparse.Namespace) -> int:
    """Print where two traces differ; returns 0 if they do not, and 2 for files that cannot be compared.

    It returns 1 if they differ, also where one of the runs has ended earlier.
    """
    from ..traces import compare as compare_traces

    try:
        found = compare_traces(given.a, given.b)
        print(found)
        if given.picture is not None:
            found.plot(given.picture)
    except (OSError, ValueError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    if not found.compared:
        return 2
    return 0 if found.equal and found.ends[0] == found.ends[1] else 1
