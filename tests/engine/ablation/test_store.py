"""The store: each line survives, one that was cut off or damaged does no harm, and two studies do not write at once."""

from __future__ import annotations

import json
import os
import random
import subprocess
import warnings
from pathlib import Path
from typing import Any, cast

import pytest

from signalfire.ablation import LeaveOneOut, StoreError, StoreWarning
from signalfire.ablation.store import Store
from tests.engine.ablation.builds import make_study
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


# ---- damage ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The store of a small study."""
    path = tmp_path_factory.mktemp("whole") / "store.jsonl"
    make_study(store=path).run(LeaveOneOut(["ema"]), workers=0)
    return path.read_bytes()


def numbers_of(path: Path) -> dict[str, Any]:
    return {key: {**one, "timing": None} for key, one in Store(path).read().items()}


@pytest.mark.moderate
@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_flipped_bit_never_gives_other_numbers(count: int, whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    path.write_bytes(whole)
    right = numbers_of(path)
    draws = random.Random(count)
    lost = named = 0
    for _ in range(count):
        damaged = bytearray(whole)
        damaged[draws.randrange(len(whole))] ^= 1 << draws.randrange(8)
        path.write_bytes(damaged)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = numbers_of(path)
        assert all(right[key] == one for key, one in found.items())
        assert 2 <= len(found) < len(right)
        lost += 1
        named += bool(caught)
        assert all(isinstance(one.message, StoreWarning) for one in caught)
    assert lost == count
    assert named >= 0.99 * count  # the newline at the very end makes its line one that was cut off


def test_a_damaged_line_is_named_and_its_run_is_made_again(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    place = whole.index(b'"metrics": {"val_loss": ', whole.index(b"\n")) + 30  # a digit of the second line's number
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    variant = json.loads(whole.splitlines()[1])["variant"]
    study = make_study(store=path)
    with pytest.warns(
        StoreWarning, match=rf"line 2 of the store .* is damaged: .*\(variant '{variant}', seed 0\). The line"
    ):
        plan = study.plan(LeaveOneOut(["ema"]))
    assert [(run.variant.name, run.seed) for run in plan.to_make] == [(variant, 0)]
    study.run(LeaveOneOut(["ema"]), workers=0)
    apart_from_timings = [{**json.loads(one), "timing": None, "sum": None} for one in path.read_bytes().splitlines()]
    assert apart_from_timings == [{**json.loads(one), "timing": None, "sum": None} for one in whole.splitlines()]


@pytest.mark.parametrize("name", ["metrics", "steps", "handlers", "error"])
def test_two_lines_of_one_run_with_different_numbers_are_an_error_that_names_both(name: str, tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    first = line("a", metrics={"loss": 0.5}, steps=3, handlers=["ema"], error=None, variant="- ema", timing=1)
    other = {"metrics": {"loss": 0.25}, "steps": 4, "handlers": [], "error": "ValueError"}[name]
    store = Store(path)
    with store.writing():
        store.append(first)
        store.append(line("b", 1))
        store.append(first | {"timing": 2})  # made twice, with one result
        assert list(store.read()) == ["b", "a"]
        store.append(first | {name: other})
    with pytest.raises(StoreError) as caught:
        store.read()
    said = str(caught.value)
    assert "lines 3 and 4 of the store" in said
    assert "the run of '- ema' with seed 0, but with different results" in said
    assert str(first[name]) in said
    assert str(other) in said


def test_a_failed_run_is_followed_by_its_second_attempt(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.jsonl")
    with store.writing():
        store.append(line("a", metrics={}, error="ValueError"))
        store.append(line("a", metrics={"loss": 0.5}, error=None))
        assert store.read()["a"]["metrics"] == {"loss": 0.5}
        store.settle()
    assert len((tmp_path / "store.jsonl").read_bytes().splitlines()) == 1


@pytest.mark.moderate
def test_lines_of_version_0_1_are_kept_and_not_used(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    newer = ("begins", "format", "history", "metric", "mode", "provenance", "sum", "variant")
    old = [{name: value for name, value in json.loads(one).items() if name not in newer} for one in whole.splitlines()]
    lines = [json.dumps(one, sort_keys=True).encode() for one in old]
    path.write_bytes(b"".join(one + b"\n" for one in lines))
    study = make_study(store=path)
    plan = study.plan(LeaveOneOut(["ema"]))
    assert len(plan.to_make) == 4
    assert (
        "4 stored runs with these variants and seeds were written by version 0.1, which recorded neither code nor"
        in str(plan)
    )
    study.run(LeaveOneOut(["ema"]), workers=0)
    after = path.read_bytes().splitlines()
    assert len(after) == 8
    assert set(lines) < set(after)


NESTED = b"[" * 10**5
NO_RUNS = {
    "no JSON": b"{'a': 1}",
    "another record": b'{"key": "a"}',
    "a list": b"[]",
    "an empty line": b"",
    "brackets": NESTED,
    "closed brackets": NESTED + b"]" * 10**5,
    "nested records": b'{"a":' * 10**5,
    "no text": b"\xff\xfe",
}


@pytest.mark.parametrize("bad", [one + b"\n" for one in NO_RUNS.values()], ids=list(NO_RUNS))
def test_a_line_that_is_no_run_is_named(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "store.jsonl"
    good = json.dumps(line("a")).encode() + b"\n"
    path.write_bytes(good + bad + good)
    with pytest.raises(StoreError, match=r"line 2 of the store .* does not hold a run of a study"):
        Store(path).read()


@pytest.mark.parametrize("wrong", [{"seed": [0]}, {"off": 3}, {"swapped": ["x"]}], ids=str)
def test_a_line_with_values_of_other_kinds_is_damaged(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = tmp_path / "store.jsonl"
    path.write_text(json.dumps(line("a")) + "\n" + json.dumps(line("b") | wrong) + "\n")
    store = Store(path)
    with pytest.warns(StoreWarning, match="line 2 of the store"):
        assert store.read() == {}
    with store.writing():
        store.settle()
    assert path.read_text() == json.dumps(line("a")) + "\n"


def test_two_studies_of_one_process_do_not_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    with Store(path).writing(), pytest.raises(StoreError, match="another study of this process"), Store(path).writing():
        pass
    with Store(path).writing():
        pass


@pytest.mark.parametrize("kind", ["file", "relative", "two", "folder", "dangling"])
def test_a_symbolic_link_stands_for_its_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "there" / "store.jsonl"
    path.parent.mkdir()
    link = tmp_path / "link.jsonl"
    if kind == "folder":
        (tmp_path / "other").symlink_to(path.parent)
        link = tmp_path / "other" / "store.jsonl"
    elif kind == "two":
        (tmp_path / "between.jsonl").symlink_to(path)
        link.symlink_to(tmp_path / "between.jsonl")
    else:
        link.symlink_to("there/store.jsonl" if kind == "relative" else path)
    if kind != "dangling":
        path.write_bytes(b"")
    links = [one for one in tmp_path.rglob("*") if one.is_symlink()]
    through = Store(link)
    with through.writing():
        for one in (line("b", 1), line("a", 0)):
            through.append(one)
        with pytest.raises(StoreError, match="another study of this process"), Store(path).writing():
            pass
        through.settle()
        through.append(line("c", 2))
    with Store(path).writing(), pytest.raises(StoreError, match="another study of this process"), through.writing():
        pass
    assert list(Store(path).read()) == list(through.read()) == ["a", "b", "c"]
    assert all(one.is_symlink() for one in links)
    assert not path.is_symlink()


def test_a_file_with_two_names_is_not_written(tmp_path: Path) -> None:
    path, other = tmp_path / "store.jsonl", tmp_path / "other.jsonl"
    with Store(path).writing():
        pass
    os.link(path, other)
    for one in (path, other):
        store = Store(one)
        with pytest.raises(StoreError, match=rf"{one.name}' has 2 hard links"), store.writing():
            pass
    other.unlink()
    with Store(path).writing():
        pass


@pytest.mark.skipif(os.name != "posix", reason="limits of processes")
def test_a_store_that_the_system_refuses_to_write_is_named_and_keeps_its_lines(tmp_path: Path) -> None:
    import resource

    path = tmp_path / "store.jsonl"
    store = Store(path)
    with store.writing():
        store.append(line("b", 1))
        store.append(line("a", 0))
        before = path.read_bytes()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))  # as a full disk
        try:
            with pytest.raises(OSError, match="could not write to the store") as appended:
                store.append(line("c", 2))
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
            with pytest.raises(OSError, match="could not write to the store") as settled:
                store.settle()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert appended.value.filename == settled.value.filename == str(path)
        assert path.read_bytes() == before
        assert sorted(os.listdir(tmp_path)) == [".store.jsonl.lock", "store.jsonl"]
        store.append(line("d", 3))
    assert list(Store(path).read()) == ["b", "a", "d"]


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
    with pytest.raises(IsADirectoryError, match="pass a file in this folder"):
        Store(tmp_path)
    with pytest.raises(TypeError, match="expected a path"):
        Store(cast(Any, 3))


def test_it_is_written_inside_writing_only(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"outside `with store\.writing"):
        Store(tmp_path / "store.jsonl").append(line("a"))
    assert not os.listdir(tmp_path)
