"""The file of a state: its sha256 is that of the file on disk, and errors of the disk are raised unchanged."""

from __future__ import annotations

import errno
import hashlib
import threading
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.serialization import get_crc32_options, set_crc32_options

from signalfire.checkpoints import Files, state_file
from signalfire.checkpoints.state_file import SerializedState, load_and_hash
from tests.kit import LIMIT, assert_same, content_of

FILES = Files()


def state_of(size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    weight = torch.randn(size, 7)
    return {
        "weights": {"one": weight, "tied": weight, "part": weight[1:3], "half": weight.half(), "turned": weight.t()},
        "numbers": [torch.tensor(3), torch.empty(0), 1.5, None, "text", (True, b"bytes")],
    }


@pytest.mark.parametrize("memory", ["hashed in this thread", "lasting", "freed after the write"])
@pytest.mark.parametrize("size", [3, 5_000, 100_000])
def test_the_entry_is_of_what_is_on_disk_and_torch_loads_it(
    size: int, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if memory == "freed after the write":  # as that of copies from a GPU is
        monkeypatch.setattr("signalfire.checkpoints.state_file._addresses", lambda state: set())
    state = SerializedState(state_of(size), in_thread=memory != "hashed in this thread")
    FILES.write(tmp_path / "state.pt", state)
    content = (tmp_path / "state.pt").read_bytes()
    assert state.entry == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert_same(loaded["weights"], state_of(size)["weights"])
    assert loaded["numbers"][2:] == state_of(size)["numbers"][2:]
    assert loaded["weights"]["one"].data_ptr() == loaded["weights"]["tied"].data_ptr()


def test_many_small_tensors_are_hashed_in_their_order() -> None:
    torch.manual_seed(0)
    state = SerializedState({str(number): torch.randn(4_000) for number in range(200)})
    content = content_of(state)
    assert state.entry == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.mark.parametrize("lasts", [True, False])
def test_a_write_waits_for_the_hash_of_memory_that_is_freed_afterwards_alone(
    lasts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not lasts:
        monkeypatch.setattr("signalfire.checkpoints.state_file._addresses", lambda state: set())
    parts: Any = vars(state_file)
    hashed, large = parts["_Hashed"]._hash, []

    def noted(self: Any, data: memoryview) -> Any:
        to_wait_for = hashed(self, data)
        if len(data) > 2**16:
            large.append(to_wait_for)
        return to_wait_for

    monkeypatch.setattr(parts["_Hashed"], "_hash", noted)
    content_of(SerializedState(state_of(5_000)))
    assert [hashing is None for hashing in large] == [lasts, lasts]  # of "one", which others share, and of "turned"


@pytest.mark.parametrize("option", [True, False])
def test_the_users_option_for_checksums_of_the_zip_is_put_back(option: bool) -> None:
    before = get_crc32_options()
    set_crc32_options(option)
    try:
        inside, go_on = threading.Event(), threading.Event()

        class Slow(BytesIO):
            def write(self, data: Any) -> int:
                inside.set()
                go_on.wait(LIMIT)
                return super().write(data)

        slow = threading.Thread(target=SerializedState(state_of(3)), args=(Slow(),))
        slow.start()
        assert inside.wait(LIMIT)
        content_of(SerializedState(state_of(3)))  # begins and ends while the other one is under way
        go_on.set()
        slow.join()
        assert get_crc32_options() is option
        with pytest.raises(OSError, match="full"):
            SerializedState(state_of(3))(Full(0, OSError("full")))
        assert get_crc32_options() is option
    finally:
        set_crc32_options(before)


@pytest.mark.parametrize("size", [3, 100_000])
def test_a_state_is_loaded_and_hashed_at_once(size: int, tmp_path: Path) -> None:
    torch.save(state_of(size), tmp_path / "state.pt")
    with FILES.open(tmp_path / "state.pt") as file:
        state, sha256 = load_and_hash(file)
    assert_same(state["weights"], state_of(size)["weights"])
    assert sha256 == hashlib.sha256((tmp_path / "state.pt").read_bytes()).hexdigest()


def test_of_what_cannot_be_loaded_there_is_the_error_and_the_sha256(tmp_path: Path) -> None:
    (tmp_path / "state.pt").write_bytes(b"no state")
    with FILES.open(tmp_path / "state.pt") as file:
        error, sha256 = load_and_hash(file)
    assert isinstance(error, Exception)
    assert sha256 == hashlib.sha256(b"no state").hexdigest()


class Full(BytesIO):
    """A disk on which so many writes succeed."""

    def __init__(self, writes: int, error: BaseException) -> None:
        super().__init__()
        self.writes, self.full = writes, error

    def write(self, data: Any) -> int:
        self.writes -= 1
        if self.writes < 0:
            raise self.full
        return super().write(data)


@pytest.mark.moderate
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("size", [3, 100_000])
def test_an_error_of_the_disk_is_raised_as_it_is_at_each_write(size: int, error: BaseException) -> None:
    whole = Full(1000, error)
    SerializedState(state_of(size))(whole)
    for writes in range(1000 - whole.writes):
        state = SerializedState(state_of(size))
        with pytest.raises(type(error)) as caught:
            state(Full(writes, error))
        assert caught.value is error
