"""Seals of folders that other libraries write: what is torn or damaged is passed over, and named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from signalfire.exact.seals import fingerprint, newest_sealed, seal


def write(path: Path, number: int, *, sealed: bool = True) -> Path:
    folder = path / f"checkpoint-{number}"
    (folder / "inner").mkdir(parents=True)
    (folder / "weights.bin").write_bytes(bytes(range(256)))
    (folder / "inner" / "state.json").write_text(f"{number}")
    if sealed:
        seal(folder)
    return folder


def test_the_newest_sealed_folder_is_found_by_its_number(tmp_path: Path) -> None:
    assert newest_sealed(tmp_path / "none", "checkpoint-") is None
    assert newest_sealed(tmp_path, "checkpoint-") is None
    write(tmp_path, 9)
    ten = write(tmp_path, 10)
    (tmp_path / "checkpoint-best").mkdir()
    assert newest_sealed(tmp_path, "checkpoint-") == ten


def test_a_folder_without_a_seal_is_passed_over(tmp_path: Path) -> None:
    one = write(tmp_path, 1)
    write(tmp_path, 2, sealed=False)
    with pytest.warns(UserWarning, match="checkpoint-2: the folder has no checksums"):
        assert newest_sealed(tmp_path, "checkpoint-") == one


@pytest.mark.parametrize("damage", ["changed", "missing", "added", "seal"])
def test_a_damaged_folder_is_passed_over_and_the_last_one_is_an_error(tmp_path: Path, damage: str) -> None:
    one, two = write(tmp_path, 1), write(tmp_path, 2)
    if damage == "changed":
        (two / "weights.bin").write_bytes(bytes(255))
    elif damage == "missing":
        (two / "inner" / "state.json").unlink()
    elif damage == "added":
        (two / "later.txt").write_text("")
    else:
        (two / "seal.json").write_text("{")
    with pytest.warns(UserWarning, match="checkpoint-2: .*the folder is damaged"):
        assert newest_sealed(tmp_path, "checkpoint-") == one
    (one / "weights.bin").write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="the folder is damaged"),
        pytest.raises(ValueError, match="all 2 checkpoint folders are damaged"),
    ):
        newest_sealed(tmp_path, "checkpoint-")


def test_a_folder_that_is_written_once_more_is_not_complete_until_it_is_sealed(tmp_path: Path) -> None:
    one, two = write(tmp_path, 1), write(tmp_path, 2)
    (two / "weights.bin").write_bytes(b"new")
    with pytest.warns(UserWarning, match="checkpoint-2"):
        assert newest_sealed(tmp_path, "checkpoint-") == one
    seal(two)
    assert newest_sealed(tmp_path, "checkpoint-") == two


def test_a_model_with_an_extra_state_has_a_fingerprint_of_its_tensors() -> None:
    class Scaled(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"scale": 1}

    model = Scaled(2, 1)
    before = fingerprint(model)
    assert fingerprint(model) == before
    with torch.no_grad():
        model.bias.add_(1)
    assert fingerprint(model) != before
