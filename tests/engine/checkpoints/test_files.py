"""The file-system operations of checkpoints: nothing is overwritten, and a removal goes as far as it can."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import pytest

from signalfire.checkpoints.files import Files, make_folders, remove_folder


class Making(Files):
    """Notes the folders that are made and synced; another process makes one of them first."""

    def __init__(self, made_by_another: Path | None = None) -> None:
        self.made_by_another = made_by_another
        self.log: list[tuple[str, Path]] = []

    def make_folder(self, path: Path) -> None:
        self.log.append(("make_folder", path))
        if path == self.made_by_another:
            path.mkdir()
        super().make_folder(path)

    def sync(self, path: Path) -> None:
        self.log.append(("sync", path))
        super().sync(path)


def test_a_new_folder_is_on_the_disk_with_those_that_it_lies_in(tmp_path: Path) -> None:
    files = Making()
    make_folders(tmp_path / "a" / "b", files)
    expected = [
        ("make_folder", tmp_path / "a"),
        ("sync", tmp_path),
        ("make_folder", tmp_path / "a" / "b"),
        ("sync", tmp_path / "a"),
    ]
    assert files.log == expected
    make_folders(tmp_path / "a" / "b", files)
    assert files.log == expected, "there is nothing left to make"


def test_a_folder_that_another_process_makes_meanwhile_is_as_good(tmp_path: Path) -> None:
    files = Making(tmp_path / "a")
    make_folders(tmp_path / "a" / "b", files)
    assert (tmp_path / "a" / "b").is_dir()
    assert files.log[1] == ("sync", tmp_path), "it may not have synced it yet"


def test_a_file_is_never_written_over_another(tmp_path: Path) -> None:
    def first(file: BinaryIO) -> None:
        file.write(b"fi")
        file.write(b"rst")

    Files().write(tmp_path / "file", first)
    with pytest.raises(FileExistsError):
        Files().write(tmp_path / "file", b"second")
    assert Files().read(tmp_path / "file", 100) == b"first"


def test_a_version_is_never_renamed_over_another(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.pt").write_text(name)
    with pytest.raises(OSError, match="not empty"):
        Files().rename(tmp_path / "new", tmp_path / "old")
    assert [(tmp_path / name / "state.pt").read_text() for name in Files().list(tmp_path)] == ["new", "old"]


def test_a_link_that_leads_nowhere_takes_a_name_too(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert Files().exists(tmp_path / "link")
    assert not Files().exists(tmp_path / "gone")


def test_a_folder_is_removed_as_far_as_possible_and_what_stays_is_returned(tmp_path: Path) -> None:
    folder = tmp_path / "version"
    (folder / "b").mkdir(parents=True)
    for name in ("a", "c"):
        (folder / name).write_text("")
    problems = remove_folder(folder, Files())
    assert Files().list(folder) == ["b"]
    assert [problem.filename for problem in problems] == [str(folder / "b"), str(folder)]
    (folder / "b").rmdir()
    assert remove_folder(folder, Files()) == []
    assert not folder.exists()


def test_what_another_process_removes_at_the_same_time_is_no_problem(tmp_path: Path) -> None:
    class Together(Files):
        def list(self, path: Path) -> list[str]:
            found = super().list(path)
            (path / found[0]).unlink()
            return found

    folder = tmp_path / "version"
    assert remove_folder(folder, Files()) == []
    folder.mkdir()
    for name in ("a", "b"):
        (folder / name).write_text("")
    assert remove_folder(folder, Together()) == []
    assert not folder.exists()


def test_what_is_no_folder_stays_and_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (problem,) = remove_folder(tmp_path / "file", Files())
    assert isinstance(problem, NotADirectoryError)
    assert (tmp_path / "file").exists()
