"""The file of a state, which ``torch.load`` reads; its sha256 is computed beside the write, and beside the load.

`torch.load` does not detect a flipped bit, and computing a sha256 takes about as long as writing: another thread does it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

import torch

__all__ = ["SerializedState", "load_and_hash"]

_SMALL = 2**16  # bytes that are hashed sooner than another thread is asked to
_CHUNK = 2**20


class SerializedState:
    """The content of a state's file, for `Files.write`: serialized while it is written, so that no second copy is in memory.

    Args:
        state: The state.

    Attributes:
        entry: The manifest entry, once it is written: size and sha256 of what was handed to the file.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.state = state
        self.entry: dict[str, Any] = {}

    def __call__(self, file: BinaryIO) -> None:
        """Write the state.

        Raises:
            BaseException: what the file has raised, such as an OSError, which ``torch.save`` turns into a RuntimeError.
        """
        with ThreadPoolExecutor(1, "signalfire sha256") as pool:
            hashed = _Hashed(file, pool)
            try:
                torch.save(dict(self.state), hashed)  # type: ignore[arg-type]  # all that it needs is write()
            except BaseException as error:
                if hashed.error is None or hashed.error is error:
                    raise
                raise hashed.error from None
        self.entry = {"size": hashed.size, "sha256": hashed.sha256.hexdigest()}


class _Hashed:
    """A file whose content is hashed while it is written."""

    def __init__(self, file: BinaryIO, pool: ThreadPoolExecutor) -> None:
        self.file, self.pool = file, pool
        self.size = 0
        self.sha256 = hashlib.sha256()
        self.error: BaseException | None = None

    def write(self, data: memoryview) -> int:
        try:
            if len(data) < _SMALL:
                self.sha256.update(data)
                self.file.write(data)
            else:
                hashing = self.pool.submit(self.sha256.update, data)
                try:
                    self.file.write(data)
                finally:
                    hashing.result()  # afterwards the memory may be freed
        except BaseException as error:
            self.error = self.error or error
            raise
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()


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

    with ThreadPoolExecutor(1, "signalfire sha256") as pool:
        hashing = pool.submit(compute_sha256)
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            state = error
        return state, hashing.result()
