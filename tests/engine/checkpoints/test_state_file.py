"""The file of a state: its sha256 is that of what is on disk, and errors of the disk are told as they are."""

from __future__ import annotations

import errno
import hashlib
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

from signalfire.checkpoints import Files
from signalfire.checkpoints.state_file import SerializedState, load_and_hash
from tests.kit import assert_same

FILES = Files()


def state_of(size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    weight = torch.randn(size, 7)
    return {
        "weights": {"one": weight, "tied": weight, "part": weight[1:3], "half": weight.half(), "turned": weight.t()},
        "numbers": [torch.tensor(3), torch.empty(0), 1.5, None, "text", (True, b"bytes")],
    }


@pytest.mark.parametrize("size", [3, 5_000, 100_000])  # of tensors that are hashed in this thread, and in the other one
def test_the_entry_is_of_what_is_on_disk_and_torch_loads_it(size: int, tmp_path: Path) -> None:
    state = SerializedState(state_of(size))
    FILES.write(tmp_path / "state.pt", state)
    content = (tmp_path / "state.pt").read_bytes()
    assert state.entry == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert_same(loaded["weights"], state_of(size)["weights"])
    assert loaded["numbers"][2:] == state_of(size)["numbers"][2:]
    assert loaded["weights"]["one"].data_ptr() == loaded["weights"]["tied"].data_ptr()


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
        assert state.entry == {}
