"""The memory of this process, where the operating system reports it."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

__all__ = ["peak", "resident"]


def resident() -> int | None:
    """Bytes that the process holds now; None where that cannot be read: outside Linux."""
    with suppress(OSError, ImportError):
        import resource

        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return None


def peak() -> int | None:
    """The most bytes that the process has held; None where that cannot be read: on Windows."""
    try:
        import resource
    except ImportError:
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
