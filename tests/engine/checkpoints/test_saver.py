"""Saves, one at a time: whichever operation fails, what is kept is on the disk, and the next save can follow."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from signalfire import Engine, Events
from signalfire.checkpoints import Content, Entry, Files, Retention, Saver, SavingRun, read_manifest
from signalfire.checkpoints.writer import Write
from signalfire.distributed import SINGLE_PROCESS, process_group
from signalfire.handlers import Checkpoint
from tests.kit import batches, build, content_of, linear
from tests.processes import run_together

DATA = batches(2, 2)


def engine_of(handler: Checkpoint) -> Engine:
    return build(linear(2, 1), handler)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- when an operation fails --------------------------------------------------------------------------------------


class Failing(Files):
    """Counts the operations that change something, and lets the n-th fail, or all from the n-th on."""

    def __init__(self, at: int = 0, *, and_after: bool = False, error: type[BaseException] = OSError) -> None:
        self.at, self.and_after, self.error = at, and_after, error
        self.log: list[tuple[str, str]] = []

    def _count(self, operation: str, path: Path) -> None:
        self.log.append((operation, path.name))
        if len(self.log) == self.at or (self.and_after and len(self.log) > self.at > 0):
            raise self.error(f"{operation} of {path.name} fails")

    def make_folder(self, path: Path) -> None:
        self._count("make_folder", path)
        super().make_folder(path)

    def write(self, path: Path, content: Content) -> None:
        try:
            self._count("write", path)
        except BaseException:
            super().write(path, content_of(content)[: len(content_of(content)) // 2])  # as a full disk does
            raise
        super().write(path, content)

    def sync(self, path: Path) -> None:
        self._count("sync", path)
        super().sync(path)

    def rename(self, old: Path, new: Path) -> None:
        self._count("rename", old)
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._count("remove", path)
        super().remove(path)

    def remove_folder(self, path: Path) -> None:
        self._count("remove_folder", path)
        super().remove_folder(path)


def operations(folder: Path) -> list[tuple[str, str]]:
    """Those of the third checkpoint of a run that keeps one."""
    handler = Checkpoint(folder, keep=1)
    engine = engine_of(handler)
    engine.run(DATA, max_epochs=2)
    handler.files = failing = Failing()
    engine.run(DATA, max_epochs=3)
    return failing.log


def test_the_order_of_operations(tmp_path: Path) -> None:
    log = operations(tmp_path)
    plain = [(operation, re.sub(r"~\d+\.", ".", re.sub(r"\.[0-9a-f]{8}~\d+~\d+", "", name))) for operation, name in log]
    new, old = "checkpoint-epoch0003-iter00000006", "checkpoint-epoch0002-iter00000004"
    folder = tmp_path.name
    assert plain == [
        ("make_folder", f".{new}.new"),
        ("write", "state.pt"),
        ("sync", "state.pt"),
        ("write", "manifest.json"),
        ("sync", "manifest.json"),
        ("sync", f".{new}.new"),
        ("rename", f".{new}.new"),
        ("sync", folder),
        ("rename", old),
        ("sync", folder),
        ("remove", "manifest.json"),
        ("remove", "state.pt"),
        ("remove_folder", f".{old}.old"),
    ]


@pytest.mark.parametrize(
    ("error", "and_after"),
    [(OSError, False), (OSError, True), (KeyboardInterrupt, False)],
    ids=["an error", "errors from then on", "an interrupt"],
)
@pytest.mark.parametrize("at", range(1, 14))
def test_whichever_operation_fails_nothing_is_lost_and_the_run_can_go_on(
    at: int, error: type[BaseException], and_after: bool, tmp_path: Path
) -> None:
    handler = Checkpoint(tmp_path, keep=1)
    engine = engine_of(handler)
    engine.run(DATA, max_epochs=2)
    before = list(handler.kept)
    handler.files = Failing(at, and_after=and_after, error=error)
    caught: list[BaseException] = []
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        try:
            engine.run(DATA, max_epochs=3)
        except error as problem:
            caught.append(problem)
    handler.files = Files()
    committed = at >= 9  # the eighth makes the disk have it
    if error is OSError:
        assert bool(caught) != committed
        assert bool(reported) == committed, "what could not be removed is reported"
    else:
        assert caught
    if caught and not committed:
        assert any("earlier checkpoints are unchanged" in note for note in caught[0].__notes__)
    expected = [("checkpoint-epoch0003-iter00000006", None)] if committed else before
    assert handler.kept == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, _ in expected:
            assert Checkpoint.load(tmp_path / name)["engine"]["iteration"] == int(name[-8:])
        # When nothing more can be done, not even undoing, the newest whole one may be either.
        assert Checkpoint.load(tmp_path)["engine"]["iteration"] in ((6,) if committed else (4, 6))
    if not and_after and not committed:
        assert sorted(os.listdir(tmp_path)) == [name for name, _ in before], "no rest"
    engine.run(DATA, max_epochs=4)
    visible = [name for name in files(tmp_path) if not name.startswith(".")]
    assert visible == [name for name, _ in handler.kept] == ["checkpoint-epoch0004-iter00000008"]


@pytest.mark.parametrize("at", range(1, 13))
def test_whichever_operation_fails_when_one_is_written_again_the_first_or_the_second_is_there(
    at: int, tmp_path: Path
) -> None:
    handler = Checkpoint(tmp_path, every=Events.ITERATION_COMPLETED(every=2) | Events.EPOCH_COMPLETED)
    engine = engine_of(handler)

    @engine.on(Events.EPOCH_COMPLETED)
    def fail(engine: Engine) -> None:
        handler.files = Failing(at)

    try:
        engine.run(DATA, max_epochs=1)
        assert at >= 10, "the ninth makes the disk have it"
    except OSError:
        assert at < 10
    name = "checkpoint-epoch0001-iter00000002"
    assert handler.kept == [(name, None)]
    assert [one for one in os.listdir(tmp_path) if not one.startswith(".")] == [name]
    assert Checkpoint.load(tmp_path / name)["engine"]["epoch_open"] is (at < 10)
    if at < 10:
        assert len(os.listdir(tmp_path)) == 1, "no rest"


# ---- what is written ----------------------------------------------------------------------------------------------


def test_a_value_that_is_not_finite_leaves_a_manifest_of_plain_json(tmp_path: Path) -> None:
    handler = Checkpoint(tmp_path, monitor="score", mode="min")
    engine = engine_of(handler)
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.state.metrics.update(score=float("inf")))
    engine.run(DATA, max_epochs=1)
    assert handler.best is not None

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads((handler.best / "manifest.json").read_text(), parse_constant=refuse)["value"] == "inf"
    assert Checkpoint.load(handler.best)["engine"]["iteration"] == 2


def saver_of(folder: Path, keep: int = 2, *, weights_only: bool = False) -> Saver:
    folder.mkdir(exist_ok=True)
    return Saver(
        folder,
        Retention(keep),
        handler="checkpoint",
        weights_only=weights_only,
        monitor=None,
        hyperparameters=None,
        sync=False,
    )


def run_at(iteration: int, id: str = "run", **options: Any) -> SavingRun:
    """A run at this iteration, of one process unless it is given others."""
    position = {"epoch": 9, "iteration": iteration, "epoch_open": True, "steps": {"main": iteration}}
    options = {"origin": None, "device": torch.device("cpu"), "processes": SINGLE_PROCESS, "files": Files()} | options
    return SavingRun(id, position=position, **options)


def state_at(iteration: int) -> dict[str, Any]:
    position = {"epoch": 1, "iteration": iteration, "epoch_open": False}
    return {"engine": position, "updates": {"main": {"steps": 2 * iteration}}}


def begin(
    saver: Saver, run: SavingRun, state: Mapping[str, Any], *, counted: bool = True, asynchronous: bool = False
) -> Write:
    """Begin to save a state as the last one, or as one that does not count."""
    iteration = run.position["iteration"]
    entry = Entry(f"{iteration}" if counted else f"{iteration}-exception", None, iteration)
    if counted:
        saver.retention.select_last(entry)
        saver.retention.take_selected()
    write = saver.prepare(run, entry, state, counted=counted)
    saver.start(write, asynchronous=asynchronous)
    return write


def save(saver: Saver, run: SavingRun, state: Mapping[str, Any], **options: Any) -> Write:
    begin(saver, run, state, **options)
    return saver.collect(run.processes)


def test_the_manifest_has_the_position_of_the_state_and_with_weights_that_of_the_run(tmp_path: Path) -> None:
    save(saver_of(tmp_path / "states"), run_at(4), state_at(3))
    save(saver_of(tmp_path / "weights", weights_only=True), run_at(4), {"model": {}})
    state, weights = (read_manifest(tmp_path / folder / "4", Files()) for folder in ("states", "weights"))
    keys = ("kind", "epoch", "iteration", "epoch_open", "steps")
    assert [state[key] for key in keys] == ["state", 1, 3, False, {"main": 6}]
    assert [weights[key] for key in keys] == ["weights", 9, 4, True, {"main": 4}]


def test_one_that_does_not_count_takes_no_place_and_removes_nothing(tmp_path: Path) -> None:
    saver = saver_of(tmp_path, keep=1)
    save(saver, run_at(1), state_at(1))
    assert save(saver, run_at(1), state_at(1), counted=False).name == "1-exception"
    assert [name for name, _ in saver.retention.kept] == ["1"]
    assert files(tmp_path) == ["1", "1-exception"]
    save(saver, run_at(2), state_at(2))
    assert files(tmp_path) == ["1-exception", "2"]


# ---- one at a time ------------------------------------------------------------------------------------------------


def test_a_write_is_pending_until_it_is_collected_or_abandoned(tmp_path: Path) -> None:
    saver = saver_of(tmp_path)
    first = begin(saver, run_at(1), state_at(1), asynchronous=True)
    assert saver.pending is first
    assert saver.retention.kept == []
    assert saver.collect(SINGLE_PROCESS) is first
    assert not first.in_progress
    assert saver.pending is None
    assert begin(saver, run_at(2), state_at(2)).thread is None
    assert files(tmp_path) == ["1", "2"]
    saver.abandon()
    assert saver.pending is None
    assert [name for name, _ in saver.retention.kept] == ["1"], "nobody has seen what became of the second"


def test_the_versions_of_a_run_are_looked_up_once_and_again_for_another_run_or_state(tmp_path: Path) -> None:
    save(saver_of(tmp_path), run_at(1), state_at(1))
    saver = saver_of(tmp_path)
    ownership = saver.ownership(run_at(2))
    assert saver.retention.superseded == ["1"], "the run has written it, but keeps it no longer"
    assert saver.ownership(run_at(3)) is ownership
    assert saver.ownership(run_at(3, "another")) != ownership
    assert saver.retention.superseded == []
    saver.ownership(run_at(0))
    assert saver.retention.superseded == [], "it was written after the iteration from which the run resumes"
    saver.forget()
    saver.ownership(run_at(1))
    assert saver.retention.superseded == ["1"]


def _saved_together(folder: Path) -> list[Any]:
    processes = process_group()
    saver = saver_of(folder, keep=1)
    for iteration in (1, 2):
        save(saver, run_at(iteration, processes=processes), state_at(iteration))
    found: list[Any] = [saver.retention.kept]
    try:
        save(saver, run_at(3, processes=processes, files=Failing(2)), state_at(3))
    except Exception as error:
        found += [type(error), str(error), saver.pending, saver.retention.kept, saver.retention.planned]
    if processes.is_rank_zero:  # after an error, the others are anywhere
        begin(saver, run_at(3, processes=processes), state_at(3), counted=False)
        found.append(saver.collect(processes, rank_local=True).name)
    return found


@pytest.mark.moderate
def test_every_rank_knows_what_is_on_the_disk_though_only_one_writes(tmp_path: Path) -> None:
    entry = Entry("2", None, 2)
    ours, others = run_together(_saved_together, 2, tmp_path)
    assert ours == [[("2", entry)], OSError, "write of state.pt fails", None, [("2", entry)], [entry], "3-exception"]
    reported = "rank 0 could not write the checkpoint '3': OSError: write of state.pt fails"
    assert others == [[("2", entry)], RuntimeError, reported, None, [("2", entry)], [entry]]
    assert files(tmp_path) == ["2", "3-exception"]
