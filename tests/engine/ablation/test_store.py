"""The store: each line survives, a line that was cut off does no harm, and two studies do not write at once."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest

from signalfire.ablation import StoreError
from signalfire.ablation.store import Store
from tests.kit import python


def line(key: str, seed: int = 0, **more: Any) -> dict[str, Any]:
    return {"key": key, "configuration": "c", "off": [], "seed": seed, "swapped": {}} | more


def test_what_was_appended_is_read_and_the_last_line_of_a_key_counts(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "store.jsonl")
    assert store.read() == {}
    with store.writing():
        for one in (line("a", value=0.1), line("b"), line("a", value=float("nan"))):
            store.append(one)
    assert list(store.read()) == ["b", "a"]
    assert store.read()["a"]["value"] == "nan"
    assert store.path is not None
    assert len(store.path.read_bytes().splitlines()) == 3


def test_a_line_that_was_cut_off_anywhere_is_ignored_and_then_removed(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    with Store(path).writing():
        pass
    store = Store(path)
    with store.writing():
        store.append(line("a"))
        whole = path.read_bytes()
        store.append(line("b", error="a \n b"))
    both = path.read_bytes()
    for end in range(len(whole), len(both)):
        path.write_bytes(both[:end])
        store = Store(path)
        complete = end == len(both) - 1  # without its newline only
        assert list(store.read()) == ["a", "b"][: 1 + complete]
        with store.writing():
            store.append(line("c"))
        assert list(Store(path).read()) == ["a", "b", "c"] if complete else ["a", "c"]
        assert path.read_bytes().endswith(b"}\n")
        for one in path.read_bytes().splitlines():
            json.loads(one)


def test_settled_it_does_not_depend_on_which_was_finished_first(tmp_path: Path) -> None:
    lines = [
        line("a", 1),
        line("b", 0),
        line("c", 0, off=["x"]),
        line("d", 0, swapped={"x": "y"}),
        line("e", 0, configuration="b"),
    ]
    contents: list[bytes] = []
    for order in (lines, lines[::-1], [line("b", 7), *lines]):
        path = tmp_path / f"store{len(contents)}.jsonl"
        store = Store(path)
        with store.writing():
            for one in order:
                store.append(one)
            store.settle()
            store.append(line("f", 9))
            store.settle()
        contents.append(path.read_bytes())
    assert contents[0] == contents[1] == contents[2]
    assert [json.loads(one)["key"] for one in contents[0].splitlines()] == ["e", "b", "d", "c", "a", "f"]
    assert not list(tmp_path.glob(".*.new"))


def test_lines_of_others_keep_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    foreign = b'{"swapped": {},   "seed": 3, "off": [], "configuration": "z", "key": "q", "note": 1e2}\n'
    path.write_bytes(foreign)
    store = Store(path)
    with store.writing():
        store.append(line("a"))
        store.settle()
    assert foreign in path.read_bytes()


@pytest.mark.parametrize("bad", [b"{'a': 1}\n", b'{"key": "a"}\n', b"[]\n", b"\n"])
def test_a_line_that_is_no_run_is_named(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "store.jsonl"
    good = json.dumps(line("a")).encode() + b"\n"
    path.write_bytes(good + bad + good)
    with pytest.raises(StoreError, match=r"line 2 of the store .* is not a run of a study"):
        Store(path).read()


def test_two_studies_of_one_process_do_not_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    with Store(path).writing(), pytest.raises(StoreError, match="another study of this process"), Store(path).writing():
        pass
    with Store(path).writing():
        pass


@pytest.mark.slow
def test_two_processes_do_not_write_at_once_and_one_that_was_killed_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    holding = (
        "import sys, time\nfrom signalfire.ablation.store import Store\n"
        "with Store(sys.argv[1]).writing():\n    print('holding', flush=True)\n    time.sleep(600)\n"
    )
    with python("-c", holding, path, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "holding\n"
        with pytest.raises(StoreError, match=rf"process {other.pid}\); wait until it finishes"), Store(path).writing():
            pass
        other.kill()
        other.wait()
    with Store(path).writing():
        pass


def test_without_a_path_it_is_kept_in_memory() -> None:
    store = Store(None)
    with store.writing():
        store.append(line("b", 1))
        store.append(line("a", 0))
        store.settle()
    assert list(store.read()) == ["a", "b"]


def test_a_path_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="use a file in it"):
        Store(tmp_path)
    with pytest.raises(TypeError, match="expected a path"):
        Store(cast(Any, 3))


def test_it_is_written_inside_writing_only(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"outside `with store\.writing"):
        Store(tmp_path / "store.jsonl").append(line("a"))
    assert not os.listdir(tmp_path)
