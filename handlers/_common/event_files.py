"""TensorBoard's event files, written in the thread of the run."""

from __future__ import annotations

import os
import re
import struct
import time
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from tensorboardX import FileWriter, RecordWriter, SummaryWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

__all__ = ["EventWriter", "drawn", "png"]

_EVENT_FILE = re.compile(r"events\.out\.tfevents\.(\d{10})\.(?:(\d{9})\.)?")
_FLUSH_SECONDS = 30  # a killed process loses at most this much


def _latest(folder: str) -> int:
    """The time in the name of the last event file of a folder, in ns; 0 without one."""
    with suppress(OSError):
        names = [_EVENT_FILE.match(name) for name in os.listdir(folder)]
        return max((int(m[1]) * 10**9 + int(m[2] or 10**9) for m in names if m is not None), default=0)
    return 0


class _EventFile:
    """tensorboardX's event file without its thread, in which a full disk would go unnoticed and hang the run."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.failed = False
        self.flushed = time.monotonic()
        # TensorBoard reads the files in the order of their names; two files of one name would lose events. The clock may have
        # been set back since the last file.
        seconds, nanoseconds = divmod(max(time.time_ns(), _latest(folder) + 1), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{uuid.uuid4().hex[:8]}"
        with self._path_in_errors():
            self.file = RecordWriter(os.path.join(folder, name))
        self.add_event(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def get_logdir(self) -> str:
        return self.folder

    def add_event(self, event: Event) -> None:
        with self._path_in_errors():
            self.file.write(event.SerializeToString())
        if time.monotonic() - self.flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        self.flushed = time.monotonic()
        if not self.failed:
            with self._path_in_errors():
                self.file.flush()

    def close(self) -> None:
        with suppress(OSError) if self.failed else self._path_in_errors():
            self.file.close()

    @contextmanager
    def _path_in_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failed = True
            error.add_note(f"TensorBoardLogger: the events could not be written to {self.folder!r}")
            raise


class _FileWriter(FileWriter):  # type: ignore[misc]
    def __init__(self, folder: str) -> None:
        self.event_writer = _EventFile(folder)
        self._default_metadata: dict[str, Any] = {}


class EventWriter(SummaryWriter):  # type: ignore[misc]
    """tensorboardX's writer, but writing in the run's own thread."""

    file_writer: _FileWriter | None

    def _get_file_writer(self) -> _FileWriter:
        if self.file_writer is None:
            self.file_writer = _FileWriter(self.logdir)
            self.all_writers = {self.logdir: self.file_writer}
        return self.file_writer

    def purge_from(self, step: int) -> None:
        """Make TensorBoard purge earlier entries with this step or a greater one."""
        for _ in range(2):  # TensorBoard takes the first start in a folder for that of the run, and purges nothing
            self._get_file_writer().add_event(Event(session_log=SessionLog(status=SessionLog.START)), step)

    def add(self, summary: Summary, step: int) -> None:
        """Write a summary, which may hold several values, as one event."""
        self._get_file_writer().add_summary(summary, step)

    def write_graph(self, graph: Any) -> None:
        """Write a GraphDef."""
        self._get_file_writer().add_event(Event(graph_def=graph.SerializeToString()))


def drawn(figure: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The pixels of a matplotlib figure, of shape (height, width, 3)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3]


def png(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    """Encode an image of shape (height, width, 3) as PNG (RFC 2083)."""
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each row begins with its filter: 0 for none
    rows[:, 1:] = pixels.reshape(height, 3 * width)
    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b""))
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
