"""Whose versions they are: a run replaces and removes its own, and those of the runs that it continues."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from signalfire.checkpoints import Files, Ownership, commit, read_manifest
from signalfire.checkpoints.manifest import NewVersion
from signalfire.checkpoints.ownership import find_owned_versions
from signalfire.checkpoints.state_file import SerializedState
from signalfire.distributed.liveness import identity
from signalfire.handlers import Checkpoint
from tests.kit import batches, build, linear

FILES = Files()
DATA = batches(3, 2)


def trained(folder: Path, iterations: int = 3, **options: Any) -> list[Path]:
    """The versions that a short run leaves, the oldest first."""
    handler = Checkpoint(folder, every="1it", **{"keep": 9, **options})
    build(linear(2, 1), handler).run(DATA, max_iters=iterations)
    return [folder / name for name, _ in handler.kept]


def resumed(folder: Path, iterations: int, source: Path | None = None, **options: Any) -> Checkpoint:
    handler = Checkpoint(folder, every="1it", **options)
    engine = build(linear(2, 1), handler)
    engine.load_state_dict(Checkpoint.load(source or folder))
    engine.run(DATA, max_iters=iterations)
    return handler


def visible(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


# ---- a version ----------------------------------------------------------------------------------------------------


def write(folder: Path, name: str, *, run: str, iteration: int = 1, handler: str = "checkpoint") -> dict[str, Any]:
    """Write a version of such a run, and return its manifest."""
    about = {"handler": handler, "run": run, "lineage": [], "kind": "weights", "epoch": 1, "iteration": iteration,
             "epoch_open": True, "environment": {}}  # fmt: skip
    commit(folder, name, NewVersion(SerializedState({}), about), files=FILES, may_replace=lambda path: False)
    return read_manifest(folder / name, FILES)


def test_what_a_living_process_wrote_is_nobody_elses_though_it_goes_on_from_there() -> None:
    manifest = {"name": "a", "handler": "checkpoint", "run": "before", "writer": identity(), "iteration": 1}
    after = Ownership("checkpoint", "after", frozenset({"before"}))
    assert after.owns("a", manifest), "this process wrote both"
    parent = os.getppid()
    began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    assert not after.owns("a", {**manifest, "writer": f"{identity().split('~')[0]}~{parent}~{began}"})
    assert after.owns("a", {**manifest, "writer": f"{identity().split('~')[0]}~{parent}~1"}), "it has ended"
    assert not after.owns("a", {**manifest, "handler": "best"})
    assert not after.owns("a", {**manifest, "run": "another"})
    assert not after.owns("b", manifest), "a copy"


def test_one_of_the_same_iteration_is_replaced_unless_it_is_the_source_or_damaged(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path, name, run="mine", iteration=3)
    ownership = Ownership("checkpoint", "mine", source="b")
    assert ownership.may_replace(tmp_path / "a", 3, FILES)
    assert not ownership.may_replace(tmp_path / "a", 4, FILES)
    assert not ownership.may_replace(tmp_path / "b", 3, FILES)
    assert not Ownership("checkpoint", "another").may_replace(tmp_path / "a", 3, FILES)
    (tmp_path / "a" / "manifest.json").write_bytes(b"")
    assert not ownership.may_replace(tmp_path / "a", 3, FILES)


# ---- those of a folder --------------------------------------------------------------------------------------------


def test_a_run_finds_its_own_and_those_of_the_runs_it_continues(tmp_path: Path) -> None:
    manifests = {name: write(tmp_path, name, run=name.partition("-")[0]) for name in ("b-1", "c-1", "other")}
    write(tmp_path, "b-best", run="b", handler="best")
    shutil.copytree(tmp_path / "b-1", tmp_path / "b-copy")
    origin = {"path": str(tmp_path / "c-1"), "damaged": [], "manifest": {"run": "c", "lineage": ["a", "b"]}}
    ownership, found = find_owned_versions(tmp_path, handler="checkpoint", run="d", origin=origin, files=FILES)
    assert found == {name: manifests[name] for name in ("b-1", "c-1")}
    assert ownership.lineage == {"b", "c"}, "of a, nothing is left here"
    assert ownership.may_remove("b-1", found["b-1"])
    assert not ownership.may_remove("c-1", found["c-1"])


def test_only_damaged_ones_of_this_folder_are_set_aside(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    for folder in ("runs", "elsewhere"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, "a", run="before")
    damaged = [str(tmp_path / folder / name) for folder in ("link", "elsewhere") for name in ("a", "gone since")]
    origin = {"path": str(tmp_path / "elsewhere" / "b"), "damaged": damaged,
              "manifest": {"run": "before", "lineage": []}}  # fmt: skip
    ownership, found = find_owned_versions(
        tmp_path / "runs", handler="checkpoint", run="now", origin=origin, files=FILES
    )
    assert visible(tmp_path / "runs") == ["a.damaged"]
    assert visible(tmp_path / "elsewhere") == ["a"]
    assert (ownership, found) == (Ownership("checkpoint", "now"), {}), "the source lies elsewhere, too"


# ---- resumed runs -------------------------------------------------------------------------------------------------


def test_one_that_a_user_copied_or_renamed_stays(tmp_path: Path) -> None:
    first, second = trained(tmp_path, 2, keep=2)
    shutil.copytree(first, tmp_path / "favourite")
    first.rename(tmp_path / "renamed")
    handler = resumed(tmp_path, 5, keep=1)
    assert [name[-1] for name, _ in handler.kept] == ["5"]
    assert visible(tmp_path) == sorted([second.name, handler.kept[0][0], "favourite", "renamed"])


def test_the_one_that_a_run_was_resumed_from_stays(tmp_path: Path) -> None:
    source = trained(tmp_path, 2, keep=1)[0]
    before = {path: path.read_bytes() for path in source.iterdir()}
    handler = resumed(tmp_path, 5, keep=1)
    assert [name[-1] for name, _ in handler.kept] == ["5"]
    assert visible(tmp_path) == [source.name, handler.kept[0][0]]
    assert {path: path.read_bytes() for path in source.iterdir()} == before
    # The next one resumes from another, so that the sources of many restarts do not pile up.
    handler = resumed(tmp_path, 7, keep=1)
    assert [name[-1] for name in visible(tmp_path)] == ["5", "7"]
    # A run that was resumed and wrote nothing has removed nothing.
    with pytest.warns(UserWarning, match="nothing to do"):
        resumed(tmp_path, 7, keep=1)
    assert [name[-1] for name in visible(tmp_path)] == ["5", "7"]


def test_the_source_stays_where_it_was_found_under_its_hidden_name(tmp_path: Path) -> None:
    """A run was killed between the two renames of a replacement; the next one resumes from what was to be replaced."""
    (source,) = trained(tmp_path, 3, keep=1)
    source.rename(source.with_name(f".{source.name}.{identity()}~999.replaced"))
    resumed(tmp_path, 5, keep=1)
    assert source.is_dir()


@pytest.mark.moderate
def test_many_restarts_leave_no_more_than_few_and_the_manifest_does_not_grow(tmp_path: Path) -> None:
    trained(tmp_path, 1, keep=2)
    for iterations in range(3, 23, 2):
        handler = resumed(tmp_path, iterations, keep=2)
        assert len(visible(tmp_path)) <= 3
    assert handler.last is not None
    assert len(read_manifest(handler.last, FILES)["lineage"]) <= 3


def test_a_run_that_went_on_from_an_older_one_writes_the_newer_ones_anew(tmp_path: Path) -> None:
    paths = trained(tmp_path, 4, keep=3)
    handler = resumed(tmp_path, 5, source=paths[0], keep=3)
    assert [name[-1] for name, _ in handler.kept] == ["3", "4", "5"]
    assert [name[-1] for name in visible(tmp_path)] == ["2", "3", "4", "5"]
    assert len({read_manifest(tmp_path / name, FILES)["run"] for name, _ in handler.kept}) == 1


def test_a_state_that_nobody_knows_the_origin_of_owns_nothing(tmp_path: Path) -> None:
    _, second = trained(tmp_path, 2)
    handler = Checkpoint(tmp_path, every="1it", keep=1)
    engine = build(linear(2, 1), handler)
    engine.load_state_dict(torch.load(second / "state.pt", weights_only=True))
    engine.run(DATA, max_iters=3)
    assert [name[-1] for name in visible(tmp_path)] == ["1", "2", "3"]
    assert [name[-1] for name, _ in handler.kept] == ["3"]


def test_resumed_into_another_folder_the_first_one_stays_as_it_is(tmp_path: Path) -> None:
    paths = trained(tmp_path / "one", 3, keep=2)
    handler = resumed(tmp_path / "two", 4, source=tmp_path / "one", keep=2)
    assert visible(tmp_path / "one") == [path.name for path in paths]
    assert [name[-1] for name, _ in handler.kept] == ["4"], "what is kept is what is there"
    assert visible(tmp_path / "two") == [name for name, _ in handler.kept]
