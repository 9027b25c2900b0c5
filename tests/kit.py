"""What many tests share: values of the quick tier, extras, programs in processes of their own, waiting."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

__all__ = ["LIMIT", "finished", "group_ended", "interruptible", "needs", "python", "quick", "spread", "wait_until"]

LIMIT = 300.0
"""Seconds after which a test gives up on another process: many times what a busy machine takes."""


def quick(values: Iterable[Any], *keep: Any, whole: bool = False) -> list[Any]:
    """Parameters of a test, of which the quick tier runs those in ``keep`` alone.

    Args:
        values: as ``parametrize`` takes them; a tuple gives several parameters, unless it is one as a ``whole``.
    """
    return [value if value in keep else _slow(value, whole) for value in values]


def spread(values: Iterable[Any], count: int) -> list[Any]:
    """Parameters of a test, of which the quick tier runs so many, evenly spread; the first and the last are among them."""
    values = list(values)
    kept: Collection[int] = {round(i * (len(values) - 1) / max(1, count - 1)) for i in range(count)}
    return [value if place in kept else _slow(value, whole=False) for place, value in enumerate(values)]


def _slow(value: Any, whole: bool) -> Any:
    together = isinstance(value, tuple) and not whole
    return pytest.param(*value, marks=pytest.mark.slow) if together else pytest.param(value, marks=pytest.mark.slow)


def needs(extra: str, *modules: str) -> None:
    """Skip the test, or all of a file, where a module of this extra is not installed."""
    if any(importlib.util.find_spec(module) is None for module in modules):
        pytest.skip(f"install the extra: pip install -e '.[{extra}]'", allow_module_level=True)


def wait_until(condition: Callable[[], object], limit: float = LIMIT) -> None:
    """Wait for what another process or thread brings about.

    Raises:
        TimeoutError: if it does not, within so many seconds.
    """
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"still not so after {limit:g} s")
        time.sleep(0.005)


@contextmanager
def interruptible() -> Iterator[None]:
    """Have SIGINT interrupt what is started meanwhile; in the background of a shell, the tests themselves ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def python(*arguments: Any, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A Python program while it runs; it is killed at the end, with all of its session if it has one of its own."""
    command = [sys.executable, *map(str, arguments)]
    with interruptible():
        process = subprocess.Popen(command, text=True, **options)
    with process:
        try:
            yield process
        finally:
            process.kill()
            if options.get("start_new_session"):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def group_ended(group: int) -> bool:
    """Whether no process of this process group is left."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, of = path.read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state not in "ZX":
                return False
    return True


def finished(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """What has become of a Python program, with all that it wrote."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    with python(*arguments, **pipes) as process:
        output, errors = process.communicate(timeout=LIMIT)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
