"""Traces: digests of what a run consists of, written at its events, and where two runs differ."""

from .bisection import Bisection, bisect
from .comparison import Comparison, compare
from .differences import Difference
from .digests import Digests
from .files import TraceFile, read_traces
from .scripts import Script

__all__ = [
    "Bisection",
    "Comparison",
    "Difference",
    "Digests",
    "Script",
    "TraceFile",
    "bisect",
    "compare",
    "read_traces",
]
