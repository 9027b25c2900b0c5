"""The file of a state, which ``torch.load`` reads; its sha256 is computed beside the write, and beside the load.

`torch.load` does not detect a flipped bit, and computing a sha256 takes about as long as writing: another thread does it.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from ..authoring.versions import without_crc32

__all__ = ["SerializedState", "load_and_hash"]

_SMALL = 2**16  # bytes that are copied before another thread is asked to hash them
_CHUNK = 2**20
_PLAIN = (Tensor, nn.Parameter)


class SerializedState:
    """The content of a state's file, for `Files.write`: serialized while it is written, so that no second copy is in memory.

    Args:
        state: The state, which must not change before `entry` is read.
        in_thread: Whether another thread computes the sha256, also while the file is synced. A save beside training leaves the
            other processors to the training.
    """

    def __init__(self, state: Mapping[str, Any], *, in_thread: bool = True) -> None:
        self.state = state
        self._in_thread = in_thread
        self._written: _Hashed | None = None

    def __call__(self, file: BinaryIO) -> None:
        """Write the state.

        Raises:
            BaseException: what the file has raised, such as an OSError, which ``torch.save`` turns into a RuntimeError.
        """
        self._written = None
        with _Hashed(file, self.state if self._in_thread else None) as hashed:
            buffered: Any = io.BufferedWriter(hashed, _SMALL)
            try:
                with without_crc32():
                    torch.save(dict(self.state), buffered)
                buffered.flush()
            except BaseException as error:
                if hashed.error is None and (place := _unpicklable(self.state)):
                    error.add_note(f"in the state's entry {place!r}")
                if hashed.error is None or hashed.error is error:
                    raise
                raise hashed.error from None
        self._written = hashed

    @property
    def entry(self) -> dict[str, Any]:
        """The manifest entry of the file, once it is written: size and sha256 of what was handed to the file."""
        assert self._written is not None
        return {"size": self._written.size, "sha256": self._written.sha256()}


class _Hashed(io.RawIOBase):
    """A file whose content is hashed while it is written, in portions: those that are not large are gathered before.

    Args:
        file: The file.
        state: What is written, which stays as it is until the sha256 is asked for: another thread hashes its tensors, and the
            write continues. None hashes everything in this thread.
    """

    def __init__(self, file: BinaryIO, state: Mapping[str, Any] | None) -> None:
        self.file, self.state = file, state
        self.size = 0
        self.error: BaseException | None = None
        self._sha256 = hashlib.sha256()
        self._thread: ThreadPoolExecutor | None = None  # once there is something large
        self._last: Future[None] | None = None
        self._lasting: set[int] | None = None  # addresses of the state's tensors, once they are asked for

    def __exit__(self, *raised: object) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=raised[0] is not None)

    def writable(self) -> bool:
        return True

    def write(self, data: memoryview) -> int:  # type: ignore[override]
        if self.error is not None:
            return len(data)  # torch closes its archive, whatever was raised
        try:
            hashing = self._hash(data)
            try:
                self.file.write(data)
            finally:
                if hashing is not None:
                    hashing.result()
        except BaseException as error:
            self.error = error
            raise
        self.size += len(data)
        return len(data)

    def sha256(self) -> str:
        """The sha256 of everything that was written; waits for the thread."""
        if self._last is not None:
            self._last.result()
        return self._sha256.hexdigest()

    def _update(self, data: bytes | memoryview, state: Mapping[str, Any]) -> None:
        """In the thread; the state is given so that its memory is there until then, also after an error."""
        self._sha256.update(data)

    def _hash(self, data: memoryview) -> Future[None] | None:
        """Hash what is written next; returns what to wait for before its memory may be freed."""
        small = len(data) <= _SMALL
        if self.state is None or (small and self._thread is None):
            self._sha256.update(data)
            return None
        self._thread = self._thread or ThreadPoolExecutor(1, "signalfire sha256")
        self._last = self._thread.submit(self._update, bytes(data) if small else data, self.state)
        if small:
            return None
        self._lasting = _addresses(self.state) if self._lasting is None else self._lasting
        return None if _address(data) in self._lasting else self._last


def _unpicklable(value: Any, place: str = "") -> str:
    """The place of what pickle refuses in a state, such as "metrics.values.score"; empty if there is none."""
    if isinstance(value, Mapping):
        return next(filter(None, (_unpicklable(item, f"{place}.{key}".lstrip(".")) for key, item in value.items())), "")
    if isinstance(value, Tensor):
        return ""
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return place
    return ""


def _addresses(state: Any) -> set[int]:
    """Where the tensors of a state begin that are in main memory."""
    found, parts = set(), [state]
    for part in parts:  # which grows meanwhile
        if isinstance(part, dict):
            parts += part.values()
        elif isinstance(part, list | tuple):
            parts += part
        elif isinstance(part, Tensor) and type(part) in _PLAIN and part.layout is torch.strided and part.is_cpu:
            found.add(part.untyped_storage().data_ptr())
    return found


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


def load_and_hash(file: BinaryIO) -> tuple[Any, str]:
    """Load a state into main memory; its content cannot execute code.

    Args:
        file: A regular file, opened for reading.

    Returns:
        The state, or the exception that ``torch.load`` has raised; and the sha256 of the file.
    """

    def compute_sha256() -> str:
        found, place, descriptor = hashlib.sha256(), 0, file.fileno()
        # With positions of its own, because the other thread moves the file's.
        while chunk := os.pread(descriptor, _CHUNK, place):
            found.update(chunk)
            place += len(chunk)
        return found.hexdigest()

    if not hasattr(os, "pread"):  # on Windows, one after the other
        digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        file.seek(0)
        return _loaded(file), digest
    with ThreadPoolExecutor(1, "signalfire sha256") as pool:
        hashing = pool.submit(compute_sha256)
        return _loaded(file), hashing.result()


def _loaded(file: BinaryIO) -> Any:
    """The state in a file, or the exception that ``torch.load`` has raised."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        return error
