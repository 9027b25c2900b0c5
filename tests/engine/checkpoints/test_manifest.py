"""Manifests: every byte of a version counts, what is damaged says how, and JSON gives back what it was given."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from signalfire import Engine
from signalfire.checkpoints import Damaged, Files, check_json, encode, read_manifest, warn_if_environment_changed
from signalfire.checkpoints.manifest import environment, read_manifest_or_none, read_state
from signalfire.checkpoints.state_file import SerializedState
from signalfire.handlers import Checkpoint
from tests.kit import batches, build, content_of, linear

FILES = Files()
CPU = torch.device("cpu")


def engine_of(folder: Path) -> Engine:
    return build(linear(2, 1), Checkpoint(folder, every="1it"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A version that a run has written."""
    engine_of(tmp_path).run(batches(1, 2), max_iters=1)
    (path,) = tmp_path.iterdir()
    return path


def change(path: Path, **entries: Any) -> dict[str, Any]:
    """Give the manifest of a version other entries, and make its sha256 right again."""
    manifest = {**json.loads((path / "manifest.json").read_bytes()), **entries}
    (path / "manifest.json").write_bytes(encode(manifest))
    return manifest


# ---- the manifest -------------------------------------------------------------------------------------------------


def test_equal_manifests_are_equal_bytes_whatever_their_order_and_the_sha256_they_had() -> None:
    one = encode({"epoch": 1, "files": {"a": 1, "b": 2}})
    assert encode({"sha256": "of before", "files": {"b": 2, "a": 1}, "epoch": 1}) == one
    assert encode({"epoch": 2, "files": {"a": 1, "b": 2}}) != one


def test_a_manifest_in_an_earlier_layout_is_still_read_and_every_byte_of_it_counts(path: Path) -> None:
    """Indented, and with the sha256 of the rest in its place among the sorted names."""
    file = path / "manifest.json"
    plain = {key: value for key, value in json.loads(file.read_bytes()).items() if key != "sha256"}
    digest = hashlib.sha256((json.dumps(plain, indent=1, sort_keys=True) + "\n").encode()).hexdigest()
    earlier = (json.dumps(plain | {"sha256": digest}, indent=1, sort_keys=True) + "\n").encode()
    file.write_bytes(earlier)
    assert read_manifest(path, FILES)["iteration"] == 1
    for place in range(len(earlier)):
        file.write_bytes(earlier[:place] + bytes([earlier[place] ^ 1]) + earlier[place + 1 :])
        with pytest.raises(Damaged, match=r"manifest\.json has changed since it was written"):
            read_manifest(path, FILES)


@pytest.mark.parametrize("rest", [b'"epoch": 1\n', b'"epoch": ' + b"[" * 200_000], ids=["not JSON", "too deep"])
def test_what_another_program_has_sealed_is_damaged_too(rest: bytes, path: Path) -> None:
    digest = hashlib.sha256(b"{\n" + rest).hexdigest().encode()
    (path / "manifest.json").write_bytes(b'{\n "sha256": "' + digest + b'",\n' + rest)
    with pytest.raises(Damaged, match="sha256 differs"):
        read_manifest(path, FILES)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"epoch": "1"}, "epoch"),
        ({"lineage": None, "run": 3}, "run, lineage"),
        ({"files": {}}, "files"),
        ({"files": {"state.pt": {"size": 3}}}, "files"),
    ],
    ids=str,
)
def test_entries_that_are_missing_or_of_another_type_are_named(entries: dict[str, Any], named: str, path: Path) -> None:
    change(path, **entries)
    with pytest.raises(Damaged, match=rf"has changed since it was written; invalid entries: {named}$"):
        read_manifest(path, FILES)


def test_what_is_no_version_has_no_manifest(path: Path) -> None:
    (path.parent / "file").write_text("")
    with pytest.raises(Damaged, match="it is not a folder"):
        read_manifest(path.parent / "file", FILES)
    assert read_manifest_or_none(path.parent / "file", FILES) is None
    assert read_manifest_or_none(path.parent, FILES) is None
    assert read_manifest_or_none(path, FILES) == read_manifest(path, FILES)


# ---- the state ----------------------------------------------------------------------------------------------------


def test_a_damaged_one_says_what_is_wrong(path: Path) -> None:
    state, manifest = (path / name for name in ("state.pt", "manifest.json"))
    whole, reported = state.read_bytes(), manifest.read_bytes()
    state.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=rf"{path.name}.*state\.pt has {len(whole) - 1} bytes, but {len(whole)}"):
        Checkpoint.load(path)
    state.write_bytes(whole[:-1] + b"x")
    with pytest.raises(ValueError, match=r"state\.pt has changed since it was written: its sha256 differs"):
        Checkpoint.load(path)
    state.unlink()
    with pytest.raises(ValueError, match=r"state\.pt is missing"):
        Checkpoint.load(path)
    with pytest.raises(ValueError, match=r"state\.pt is missing"):
        Checkpoint.load(state)
    state.write_bytes(whole)
    manifest.write_bytes(reported.replace(b'"epoch": 1', b'"epoch": 2'))
    with pytest.raises(ValueError, match=r"manifest\.json has changed since it was written: its sha256 differs"):
        Checkpoint.load(path)
    manifest.write_bytes(encode({**json.loads(reported), "format": 9}))
    with pytest.raises(ValueError, match=r"manifest\.json has the format 9"):
        Checkpoint.load(path)
    manifest.unlink()
    with pytest.raises(ValueError, match=r"manifest\.json is missing"):
        Checkpoint.load(path)


@pytest.mark.parametrize("key", ["epoch", "iteration"])
def test_a_manifest_of_another_position_than_the_state_is_damaged(key: str, path: Path) -> None:
    manifest = change(path, **{key: 7})
    with pytest.raises(Damaged, match=rf"manifest\.json has {key} 7, but state\.pt has {key} 1"):
        read_state(path, manifest, FILES)


def test_what_torch_cannot_load_is_damaged_and_the_error_of_torch_is_told(path: Path) -> None:
    state = SerializedState({"engine": object()})  # not without running code
    (path / "state.pt").write_bytes(content_of(state))
    manifest = change(path, files={"state.pt": state.entry})
    with pytest.raises(Damaged, match=r"state\.pt cannot be loaded: UnpicklingError: ") as caught:
        read_state(path, manifest, FILES)
    assert caught.value.__cause__ is not None


def entry_of(content: bytes) -> dict[str, Any]:
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("shard", "shard has 5 bytes, but 4 were written"),
        ("gone", "gone is missing"),
        ("../shard", r"manifest\.json lists '\.\./shard', which is not a valid name for a file in a checkpoint"),
    ],
    ids=["size", "missing", "outside"],
)
def test_each_further_file_is_verified_and_none_outside_of_the_folder(name: str, wrong: str, path: Path) -> None:
    for folder in (path, path.parent):
        (folder / "shard").write_bytes(b"12345")
    files = read_manifest(path, FILES)["files"]
    read_state(path, change(path, files={**files, "shard": entry_of(b"12345")}), FILES)
    manifest = change(path, files={**files, name: entry_of(b"1234")})
    with pytest.raises(Damaged, match=wrong):
        read_state(path, manifest, FILES)


# ---- the environment ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["threads", "torch", "python", "device"])
def test_a_run_that_goes_on_elsewhere_is_warned_that_it_may_not_be_exact(what: str, path: Path) -> None:
    then = {"threads": 64, "device": "Some GPU"}.get(what, "1.0")
    change(path, environment={**read_manifest(path, FILES)["environment"], what: then})
    engine = engine_of(path.parent)
    engine.load_state_dict(Checkpoint.load(path))
    with pytest.warns(RuntimeWarning, match=rf"{path.name}.*{what}: {then} when saved.*may not be bit-exact"):
        engine.run(batches(1, 2), max_iters=2)


def test_a_run_that_goes_on_where_it_was_is_not_warned_and_one_process_was_the_rule() -> None:
    saved = {key: value for key, value in environment(CPU, 1).items() if key != "processes"}
    origin = {"path": "a", "manifest": {"environment": saved}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_environment_changed(None, CPU, 2)
        warn_if_environment_changed(origin, CPU, 1)
    with pytest.warns(RuntimeWarning, match=r"environment \(processes: 1 when saved, 2 now\)"):
        warn_if_environment_changed(origin, CPU, 2)


# ---- JSON ---------------------------------------------------------------------------------------------------------


def test_what_json_stores_is_copied_as_it_is() -> None:
    value = {"lr": 0.1, "layers": [8, {"deep": None}], "amp": False, "name": "adam"}
    copy = check_json("here", value)
    assert copy == value == json.loads(json.dumps(copy))
    value["layers"].append(9)  # type: ignore[attr-defined]
    assert copy["layers"] == [8, {"deep": None}]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"sizes": (1, 2)}, r"\['sizes'\]=\(1, 2\)"),
        ({"lr": math.nan}, r"\['lr'\]=nan"),
        ({"a": {"b": [1, torch.ones(1)]}}, r"\['a'\]\['b'\]\[1\]=tensor"),
        ({1: 2}, "the key 1"),
    ],
    ids=["tuple", "nan", "tensor", "key"],
)
def test_what_json_would_not_give_back_is_refused_and_the_part_is_named(value: Any, named: str) -> None:
    with pytest.raises(TypeError, match=rf"^Checkpoint\(hyperparameters\).*{named}"):
        check_json("Checkpoint(hyperparameters)", value)
