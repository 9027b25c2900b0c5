"""Output above progress bars: text that a program prints while bars are drawn on a terminal appears above them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TextIO

from tqdm import tqdm

__all__ = ["StepAside"]

STILL = re.compile(r"\x1b\[[\d;:?]*[mKhl]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
"""Escape sequences that leave the cursor where it is: colors, erasing to the end of the line, modes, links."""
ERASE = "\r\x1b[J"
"""Erases the line of the cursor and everything below."""


class StepAside:
    """The bars on the terminal, which leave it while something else is written there.

    While there are bars, the method ``write`` of `sys.stdout` and `sys.stderr` is replaced if these are terminals; the last bar
    restores it. The streams stay the same objects, so handlers of `logging` and other bars that hold them are covered. Elsewhere
    (files, pipes, notebooks, the capture of a test runner) nothing is replaced.

    After a text, the bars stay away until one of them is drawn next, because the text may be a prompt that waits for an answer.
    """

    def __init__(self) -> None:
        self._bars: list[tqdm[Any]] = []
        self._watched: list[Watched] = []
        self._away = False
        self._unfinished: Watched | None = None  # where the last text ended within a line
        self._stale = False  # whether lines below the cursor may hold something that another bar drew
        self._astray = False  # whether the line of the cursor may

    def direct(self, stream: TextIO) -> TextIO | Direct:
        """The stream, for bars to draw to."""
        if not _is_terminal(stream):
            return stream
        write = next((one.write for one in self._watched if one.stream is stream), stream.write)
        return Direct(stream, write)

    def add(self, bar: tqdm[Any]) -> None:
        """Also watch the standard streams for this bar."""
        if not self._bars:
            self._start()
            streams = [one for one in dict.fromkeys((sys.stdout, sys.stderr)) if _is_terminal(one)]
            self._watched = [Watched(one, self.leave) for one in streams]
        self._bars.append(bar)

    def remove(self, bar: tqdm[Any]) -> None:
        """Forget this bar; without bars nothing is watched."""
        self._bars = [one for one in self._bars if one is not bar]  # tqdm compares bars by their positions
        while self._watched and not self._bars:
            self._watched.pop().put_back()

    def is_empty(self) -> bool:
        """Whether there are no bars."""
        return not self._bars

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw the bars again below the written text; other threads write nothing until the caller has also drawn."""
        with _lock():
            self._come_back()
            yield
            self._start()

    def leave(self, written: Watched, text: str) -> None:
        """Take the bars off the terminal before this text is written."""
        if not self._away:
            self._away = True
            self._astray = self._stale = bool(self._others())
            for bar in self._bars:
                bar.clear(nolock=True)
        visible = STILL.sub("", text)
        if "\x1b" in visible:  # another bar, which moves the cursor and minds its lines itself
            self._astray, self._stale, self._unfinished = True, True, None
            return
        if self._astray and visible.strip("\n") and not visible.startswith("\r"):
            written.write(ERASE)
            self._stale = False
        if visible:
            self._astray = self._stale and visible.endswith("\n")
            self._unfinished = None if "\r" in visible or visible.endswith("\n") else written

    def _come_back(self) -> None:
        if not self._away:
            return
        if self._unfinished is not None:
            self._unfinished.write("\n")
        for one in self._watched:
            one.flush()
        for one in self._watched[:1]:
            one.write(ERASE)
            one.flush()
        for bar in [*self._others(), *self._bars]:
            bar.refresh(nolock=True)

    def _start(self) -> None:
        self._away, self._unfinished = False, None
        self._astray = self._stale = False

    def _others(self) -> list[tqdm[Any]]:
        """The bars that the program itself has drawn with tqdm on this terminal; ours draw to a `Direct`."""
        streams = [one.stream for one in self._watched]
        bars = list(tqdm._instances)  # type: ignore[attr-defined]
        drawn = [one for one in bars if hasattr(one, "start_t") and getattr(one, "sp", None) is not None]
        return [one for one in drawn if any(getattr(one, "fp", None) == stream for stream in streams)]


class Watched:
    """A stream that announces each text before writing it.

    Args:
        stream: A terminal.
        notice: Called with the stream and the text before each write.
    """

    def __init__(self, stream: TextIO, notice: Callable[[Watched, str], None]) -> None:
        self.stream = stream
        self.write = stream.write
        self._notice = notice
        self._before = vars(stream).get("write")  # somebody's, who has replaced it, too
        vars(stream)["write"] = self._write

    def _write(self, text: str) -> int:
        with _lock():
            if text:
                self._notice(self, text)
            return self.write(text)

    def flush(self) -> None:
        """Flush the stream, unless it stands in for one and has no such method."""
        if hasattr(self.stream, "flush"):
            self.stream.flush()

    def put_back(self) -> None:
        """Leave the stream as it was."""
        self._notice = _ignore  # for those who hold the method
        attributes = vars(self.stream)
        if attributes.get("write") != self._write:
            return
        del attributes["write"]
        if self._before is not None:
            attributes["write"] = self._before


class Direct:
    """A stream with a different ``write``."""

    def __init__(self, stream: TextIO, write: Callable[[str], int]) -> None:
        self._stream = stream
        self.write = write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _lock() -> AbstractContextManager[Any]:
    """The lock under which bars are drawn."""
    lock: AbstractContextManager[Any] = tqdm.get_lock()  # type: ignore[no-untyped-call]
    return lock


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether this is a terminal (a program without a console has no streams), as an object that can be given a method."""
    return stream is not None and hasattr(stream, "isatty") and stream.isatty() and hasattr(stream, "__dict__")


def _ignore(written: Watched, text: str) -> None:
    """Nothing is drawn that could be in the way."""
