"""Ctrl-C that waits until something is done that must not stop in the middle."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Interrupts", "without_interrupts"]


class Interrupts:
    """Lets Ctrl-C wait while an engine is changed over or put back, which must not stop in the middle."""

    def __init__(self) -> None:
        self._own: Callable[[int, FrameType | None], Any] | None = None  # what SIGINT calls otherwise
        self._came = False

    def hold(self) -> None:
        """Let it wait, in the main thread, which is the one that it interrupts."""
        own = signal.getsignal(signal.SIGINT)
        if callable(own) and threading.current_thread() is threading.main_thread():
            self._own = own
            signal.signal(signal.SIGINT, self._note)

    def release(self) -> None:
        """Let it interrupt again, and at once if it has come."""
        if self._own is not None:
            own, self._own = self._own, None
            signal.signal(signal.SIGINT, own)
            if self._came:
                self._came = False
                signal.raise_signal(signal.SIGINT)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Let Ctrl-C wait until the end of the block."""
    interrupts = Interrupts()
    interrupts.hold()
    try:
        yield
    finally:
        interrupts.release()
