"""One save: it takes the first free name, in this thread or another, and every rank learns the result."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.serialization import get_crc32_options

from signalfire import Events
from signalfire.checkpoints import Content, Entry, Files, Ownership, read_manifest
from signalfire.checkpoints.writer import Write
from signalfire.distributed import SINGLE_PROCESS
from signalfire.handlers import Checkpoint
from tests.kit import LIMIT, batches, build, linear

ABOUT = {"handler": "checkpoint", "kind": "weights", "run": "mine", "lineage": [], "epoch": 1, "iteration": 4,
         "epoch_open": True, "environment": {}}  # fmt: skip


def write_of(folder: Path, base: str = "a", **options: Any) -> Write:
    """The write of a version of the fourth iteration."""
    given: dict[str, Any] = {
        "files": Files(),
        "ownership": Ownership("checkpoint", "mine"),
        "superseded": [],
        "avoid": frozenset(),
        "is_rank_zero": True,
        **options,
    }
    return Write(
        folder,
        entry=Entry(base, None, 4),
        state={},
        about=ABOUT,
        planned=None,
        shards={},
        shard_files=None,
        sync=False,
        **given,
    )


def finished(write: Write) -> Write:
    write.run()
    return write


def visible(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


class Hooked(Files):
    """Calls a function first whenever something is written."""

    def __init__(self, before: Callable[[], object]) -> None:
        self.before = before

    def write(self, path: Path, content: Content) -> None:
        self.before()
        super().write(path, content)


def fail(error: BaseException) -> None:
    raise error


# ---- names --------------------------------------------------------------------------------------------------------


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file")
    (tmp_path / "a-2").mkdir()
    (tmp_path / "a-3").symlink_to("nowhere")
    write = finished(write_of(tmp_path))
    assert (write.name, write.tried, write.error) == ("a-4", ["a-4"], None)
    assert visible(tmp_path) == ["a", "a-2", "a-3", "a-4"]
    assert (tmp_path / "a").read_text() == "a file"
    assert list((tmp_path / "a-2").iterdir()) == []


def test_an_earlier_version_of_the_same_iteration_is_replaced_unless_its_name_is_to_be_avoided(tmp_path: Path) -> None:
    assert finished(write_of(tmp_path)).name == "a"
    before = read_manifest(tmp_path / "a", Files())
    (tmp_path / "a" / "left over").write_text("")
    assert finished(write_of(tmp_path, superseded=["a"])).name == "a"
    assert os.listdir(tmp_path) == ["a"], "it supersedes itself under its own name, and stays"
    assert read_manifest(tmp_path / "a", Files()) == before
    assert not (tmp_path / "a" / "left over").exists()
    assert finished(write_of(tmp_path, avoid=frozenset({"a", "a-2"}))).name == "a-3"
    assert finished(write_of(tmp_path, ownership=Ownership("checkpoint", "another"))).name == "a-2"


def test_a_name_that_another_process_takes_meanwhile_is_tried_and_left_to_it(tmp_path: Path) -> None:
    def take() -> None:
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / "state.pt").write_text("of another")

    write = finished(write_of(tmp_path, files=Hooked(take)))
    assert (write.name, write.tried) == ("a-2", ["a", "a-2"])
    assert sorted(os.listdir(tmp_path)) == ["a", "a-2"]
    assert (tmp_path / "a" / "state.pt").read_text() == "of another"


# ---- in a thread --------------------------------------------------------------------------------------------------


def test_a_write_in_a_thread_is_in_progress_until_it_is_joined(tmp_path: Path) -> None:
    gate = threading.Event()
    write = write_of(tmp_path, files=Hooked(lambda: gate.wait(LIMIT)))
    assert not write.in_progress
    write.start()
    assert write.in_progress
    assert write.name is None
    gate.set()
    write.join()
    assert not write.in_progress
    assert write.name == "a"


@pytest.mark.parametrize("error", [OSError("no room"), KeyboardInterrupt()], ids=["an error", "an interrupt"])
def test_an_error_is_kept_for_who_waits_and_what_was_superseded_stays(error: BaseException, tmp_path: Path) -> None:
    finished(write_of(tmp_path, "old"))
    write = write_of(tmp_path, files=Hooked(lambda: fail(error)), superseded=["old"])
    write.start()
    write.join()
    assert write.error is error
    assert (write.name, write.tried, write.left) == (None, ["a"], ["old"])
    assert os.listdir(tmp_path) == ["old"]


# ---- what is superseded -------------------------------------------------------------------------------------------


def test_what_it_supersedes_goes_and_the_source_of_the_run_stays(tmp_path: Path) -> None:
    for name in ("mine", "source"):
        finished(write_of(tmp_path, name))
    ownership = Ownership("checkpoint", "mine", source="source")
    write = finished(write_of(tmp_path, ownership=ownership, superseded=["mine", "source", "gone"]))
    assert (write.left, write.problems) == ([], [])
    assert visible(tmp_path) == ["a", "source"]


def test_what_cannot_be_removed_is_reported_and_tried_again(tmp_path: Path) -> None:
    class Sticky(Files):
        def rename(self, old: Path, new: Path) -> None:
            if new.name.endswith(".old"):
                raise PermissionError("it sticks")
            super().rename(old, new)

    handler = Checkpoint(tmp_path, every="1it", keep=1)
    engine = build(linear(2, 1), handler)
    saved: list[int] = []
    engine.connect(Events.CHECKPOINT_SAVED, lambda engine: saved.append(engine.state.iteration))
    handler.files = Sticky()
    with pytest.warns(RuntimeWarning, match=r"could not remove the older checkpoint.*iter00000002.*it sticks"):
        engine.run(batches(3, 2), max_iters=2)
    assert saved == [1, 2]
    assert [name[-1] for name in visible(tmp_path)] == ["1", "2"]
    assert [name[-1] for name, _ in handler.kept] == ["2"]
    handler.files = Files()
    engine.run(batches(3, 2), max_iters=3)
    assert [name[-1] for name in visible(tmp_path)] == ["3"]


# ---- between ranks ------------------------------------------------------------------------------------------------


def test_a_rank_takes_part_if_it_has_something_to_write(tmp_path: Path) -> None:
    assert write_of(tmp_path).takes_part
    assert not write_of(tmp_path, is_rank_zero=False).takes_part


def test_an_error_of_this_rank_stays_its_own_and_an_interrupt_ends_the_sharing(tmp_path: Path) -> None:
    error = OSError("no room")
    write = finished(write_of(tmp_path, files=Hooked(lambda: fail(error))))
    write.share(SINGLE_PROCESS)
    assert write.error is error
    interrupt = KeyboardInterrupt()
    write = finished(write_of(tmp_path, files=Hooked(lambda: fail(interrupt))))
    with pytest.raises(KeyboardInterrupt) as caught:
        write.share(SINGLE_PROCESS)
    assert caught.value is interrupt


def test_a_wait_that_is_interrupted_can_be_taken_up_again(tmp_path: Path) -> None:
    class Interrupted(Exception):
        """As by Ctrl-C."""

    def interrupt(*arguments: Any) -> None:
        raise Interrupted

    go_on = threading.Event()
    write = write_of(tmp_path, files=Hooked(lambda: go_on.wait(LIMIT)))
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        write.start()
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Interrupted):
            write.join()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert write.in_progress
    go_on.set()
    write.end()
    assert not write.in_progress
    assert visible(tmp_path) == ["a"]


def test_a_run_leaves_no_copy_of_its_state_and_no_option_behind(tmp_path: Path) -> None:
    engine = build(
        nn.Linear(3, 997),
        Checkpoint(tmp_path / "one", asynchronous=True, every="1it", name="one"),
        Checkpoint(tmp_path / "other", every="1it", name="other"),
    )
    for epochs in range(1, 5):
        engine.run([(torch.ones(2, 3), torch.ones(2, 997))] * 3, max_epochs=epochs)
        assert get_crc32_options()
    gc.collect()
    assert not [
        one for one in gc.get_objects() if type(one) is Tensor and one.shape == (997, 3) and not one.requires_grad
    ]
