"""Real processes that fail, die, stop, hang or leave in the middle of training: all others say which one, and where it was.

This file is also the program that forks them all at once, so that torch is imported once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.distributed_c10d import _set_pg_timeout

from signalfire.distributed import watch as watching
from signalfire.distributed.rendezvous import join
from signalfire.distributed.watch import Watch, cut_connections
from tests.kit import free_port, needs_torch, wait_until

TIMEOUT = 5.0  # of the collectives, where that it expires is the point
FOREVER = 300.0  # what never expires: all that is waited for comes long before
INTERVAL = 1.0  # one that has not reported for two of them counts as stopped
BAD = 5  # the iteration in which it happens

ROOT = Path(__file__).parents[3]

# What happens, the rank that does it, the number of processes.
CASES = {
    f"{what}, rank {rank} of {size}": (what, rank, size)
    for what, rank, size in [
        ("raises and ends", 1, 2),
        ("raises and ends", 1, 3),
        ("raises and lives", 1, 2),
        ("raises and lives", 1, 3),
        ("raises and lives", 0, 2),
        ("is killed", 1, 2),
        ("is killed", 2, 3),
        ("is killed", 0, 2),  # which holds the store
        ("is stopped", 1, 2),
        ("is stopped", 1, 3),
        ("is stopped", 0, 2),
        ("hangs", 1, 2),
        ("hangs", 1, 3),
        ("leaves", 1, 3),
        ("raises and cannot be cut", 1, 2),
    ]
}


def train(what: str, culprit: int, rank: int, size: int) -> Any:
    """What the process has to report at the end."""
    watch: Watch
    event = "STARTED"
    timeout = TIMEOUT if what in ("is stopped", "hangs", "leaves") else FOREVER
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as mine:
        peer, _ = server.accept()  # connections of the user's, which nobody may cut
        store = join(timeout=FOREVER)
        dist.barrier()  # a busy machine may take longer to start a process than a collective may take below
        _set_pg_timeout(timedelta(seconds=timeout))
        watch = Watch(store, rank, size, timeout=timeout, interval=INTERVAL, where=lambda: event, grace=1.0)
        watch.start()
        if what == "raises and cannot be cut":
            watching.cut_connections = lambda: 0
        reported: dict[str, Any] = {"pid": os.getpid()}
        try:
            for iteration in range(1, 100):
                event = f"FORWARD_STARTED, epoch 1, iteration {iteration}"
                if rank == culprit and iteration == BAD:
                    wait_until(partial(all_know, watch, event, f"BACKWARD_STARTED, epoch 1, iteration {BAD}", {}))
                    happen(what, watch)
                    return reported
                event = f"BACKWARD_STARTED, epoch 1, iteration {iteration}"
                if iteration == BAD:  # before the timeout of the collective begins
                    wait_until(happened_file().exists)
                dist.all_reduce(torch.ones(1000))
        except RuntimeError as error:
            reported |= {"raised": time.time(), "error": str(error), "lines": watch.explain(), "explained": time.time()}
            watch.failed(error)
        mine.sendall(b"whole")
        reported["untouched"] = peer.recv(5) == b"whole"
        peer.close()
    return reported


def all_know(watch: Watch, own: str, others: str, since: dict[int, int]) -> bool:
    """Whether all ranks have read this one's position, and it has read theirs.

    Each reads what the others report after its own report: the third one that is new tells that it has read this one's.
    """
    if watch._own.get("where") != own or len(watch.reports) < watch.size - 1:
        return False
    for rank, report in list(watch.reports.items()):
        since.setdefault(rank, report["reports"])
    return all(
        report["where"] == others and report["reports"] >= since[rank] + 3 for rank, report in watch.reports.items()
    )


def happened_file() -> Path:
    return Path(f"{os.environ['FOLDER']}.time")


def happen(what: str, watch: Watch) -> None:
    unfinished = happened_file().with_suffix(".new")
    unfinished.write_text(str(time.time()))
    unfinished.rename(happened_file())
    if what == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "hangs":
        time.sleep(FOREVER)
    elif what == "leaves":
        watch.stop()
        time.sleep(FOREVER)
    else:
        try:
            raise ValueError("the labels are out of range\nand more")
        except ValueError as error:
            watch.failed(error)
        if what != "raises and ends":
            time.sleep(FOREVER)


def process(folder: Path, what: str, culprit: int, rank: int, size: int, port: int) -> None:
    """In the child: never returns."""
    with open(folder / f"{rank}.err", "w") as file:
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "FOLDER": str(folder)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        reported = train(what, culprit, rank, size)
        (folder / f"{rank}.new").write_text(json.dumps(reported))
        (folder / f"{rank}.new").rename(folder / f"{rank}.json")
        if rank != culprit:  # the others ask about this one until they know
            others = [folder / f"{other}.json" for other in range(size) if other != culprit]
            wait_until(lambda: all(other.exists() for other in others))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(3)


def main(root: Path, numbers: list[int]) -> None:
    running: dict[int, tuple[Path, int]] = {}
    for number in numbers:
        what, culprit, size = list(CASES.values())[number]
        folder = root / str(number)
        folder.mkdir()
        port = free_port()
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                process(folder, what, culprit, rank, size, port)
            running[pid] = folder, rank
    hangs = {pid for pid, (folder, rank) in running.items() if _is_culprit(folder, rank)}
    while running.keys() - hangs:
        pid, status = os.wait()
        folder, rank = running.pop(pid)
        (folder / f"{rank}.status").write_text(str(os.waitstatus_to_exitcode(status)))
        hangs.discard(pid)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def _is_culprit(folder: Path, rank: int) -> bool:
    return list(CASES.values())[int(folder.name)][1] == rank


@pytest.fixture(scope="module")
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes of all cases that this session tests have left what they found."""
    folder = tmp_path_factory.mktemp("watch")
    of_this_file = (item for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec"))
    asked = [item.callspec.params.get("case") for item in of_this_file]
    numbers = [str(number) for number, case in enumerate(CASES) if case in asked]
    command = [sys.executable, "-m", "tests.engine.distributed.test_watch", str(folder), *numbers]
    subprocess.run(command, cwd=ROOT, check=True, timeout=550)
    return folder


class Found:
    """What the processes of one case have left."""

    def __init__(self, root: Path, case: str) -> None:
        self.folder = root / str(list(CASES).index(case))
        self.what, self.culprit, self.size = CASES[case]
        self.others = [rank for rank in range(self.size) if rank != self.culprit]
        happened = Path(f"{self.folder}.time")
        assert happened.exists(), {file.name: file.read_text() for file in self.folder.glob("*.err")}
        self.happened = float(happened.read_text())

    def reported(self, rank: int) -> Any:
        assert (self.folder / f"{rank}.json").exists(), (self.folder / f"{rank}.err").read_text()
        return json.loads((self.folder / f"{rank}.json").read_text())

    def first_lines(self) -> Iterator[str]:
        """Of each other rank, what it gives as the first cause."""
        for rank in self.others:
            yield self.reported(rank)["lines"][0]


def of(what: str) -> pytest.MarkDecorator:
    first, *others = (case for case in CASES if CASES[case][0] == what)
    slow = (pytest.param(case, marks=pytest.mark.slow) for case in others)
    return pytest.mark.parametrize("case", [first, *slow])


BEFORE = f"FORWARD_STARTED, epoch 1, iteration {BAD}"


@pytest.mark.moderate
@of("raises and ends")
def test_the_others_report_the_error_of_one_that_ended(root: Path, case: str) -> None:
    found = Found(root, case)
    for line in found.first_lines():
        assert line.startswith(f"rank {found.culprit} (pid ")
        assert line.endswith(f"failed with ValueError: the labels are out of range at {BEFORE}")
    for rank in found.others:
        assert found.reported(rank)["explained"] - found.happened < FOREVER / 2


@needs_torch(2, 13, why="list_keys() of a store, to end the collectives of the others")
@pytest.mark.moderate
@of("raises and lives")
def test_the_others_are_brought_out_of_the_collective(root: Path, case: str) -> None:
    """Though its process lives on, and long before the collective would time out."""
    found = Found(root, case)
    for line in found.first_lines():
        assert line.endswith(f"failed with ValueError: the labels are out of range at {BEFORE}")
    for rank in found.others:
        assert "Timed out" not in found.reported(rank)["error"]
        assert found.reported(rank)["raised"] - found.happened < FOREVER / 2
        assert found.reported(rank)["untouched"]


@pytest.mark.moderate
@of("raises and cannot be cut")
def test_a_process_that_cannot_be_brought_out_says_why_and_ends(root: Path, case: str) -> None:
    found = Found(root, case)
    (other,) = found.others
    assert (found.folder / f"{other}.status").read_text() == "1"
    said = (found.folder / f"{other}.err").read_text()
    assert f"rank {other} cannot continue at BACKWARD_STARTED, epoch 1, iteration {BAD} and exits" in said
    assert f"failed with ValueError: the labels are out of range at {BEFORE}" in said


@pytest.mark.moderate
@of("is killed")
def test_one_that_was_killed_is_noticed_at_once(root: Path, case: str) -> None:
    found = Found(root, case)
    for line in found.first_lines():
        assert line.startswith(f"rank {found.culprit} (pid ")
        assert line.endswith(f"died; its last reported event was {BEFORE}")
    for rank in found.others:
        assert found.reported(rank)["explained"] - found.happened < FOREVER / 2


@needs_torch(2, 13, why="list_keys() of a store, to end the collectives of the others")
@pytest.mark.moderate
@of("is stopped")
def test_one_that_is_stopped_is_named_after_the_timeout(root: Path, case: str) -> None:
    found = Found(root, case)
    for rank in found.others:
        assert found.reported(rank)["raised"] - found.happened < FOREVER / 2
        lines = found.reported(rank)["lines"]
        assert f"rank {found.culprit} (pid " in "\n".join(lines)
        (line,) = (line for line in lines if line.startswith(f"rank {found.culprit} (pid "))
        assert "it is suspended or disconnected" in line
        assert line.endswith(f"its last reported event was {BEFORE}")
    if found.culprit == 0:
        assert lines[0].startswith("the store of the process group does not answer")


@needs_torch(2, 13, why="list_keys() of a store, to end the collectives of the others")
@pytest.mark.moderate
@of("hangs")
def test_one_that_hangs_is_the_one_that_was_waited_for(root: Path, case: str) -> None:
    found = Found(root, case)
    for rank in found.others:
        assert found.reported(rank)["raised"] - found.happened < FOREVER / 2
        lines = found.reported(rank)["lines"]
        assert lines[0].startswith(f"rank {found.culprit} (pid ")
        assert f"is alive, and has been at {BEFORE} for " in lines[0]
        assert [line.endswith("the other ranks waited for this rank") for line in lines] == [True] + [False] * (
            len(lines) - 1
        )


@pytest.mark.moderate
@of("leaves")
def test_one_that_has_ended_its_run_is_named(root: Path, case: str) -> None:
    found = Found(root, case)
    for line in found.first_lines():
        assert line.endswith(f"has ended its run; its last event was {BEFORE}")


def test_of_several_that_were_not_there_the_one_behind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks, in threads: a collective has raised in rank 0 and, an iteration earlier, in rank 3."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    events = ["BACKWARD_STARTED, epoch 2, iteration 10", "BACKWARD_STARTED, epoch 2, iteration 9"]
    watches = []
    events += ["FORWARD_STARTED, epoch 2, iteration 9", "BACKWARD_STARTED, epoch 2, iteration 8"]
    for rank, event in enumerate(events):
        monkeypatch.setattr(Watch, "made", 1000)  # the first of each process
        watches.append(Watch(store, rank, 4, timeout=1.0, interval=0.2, where=partial(str, event)))
        watches[-1].start()
    watches[3].explain()
    lines = watches[0].explain()
    for watch in watches:
        watch.stop()
    assert lines[0].startswith("rank 2 ")
    assert "is alive, and has been at FORWARD_STARTED, epoch 2, iteration 9 for " in lines[0]
    assert [line.endswith("the other ranks waited for this rank") for line in lines] == [True, False, False]


@pytest.mark.moderate
def test_one_that_leaves_while_it_reports_is_known_to_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, in threads; the report under way as one of them leaves does not say so, and another has to follow."""
    store = HashStore()
    for number in range(50):
        one, other = (_started(monkeypatch, store, number, rank) for rank in range(2))
        time.sleep(number % 10 / 10000)
        other.stop()
        one.explain()
        one.stop()
        assert one.reports[1]["left"], number


def _started(monkeypatch: pytest.MonkeyPatch, store: HashStore, number: int, rank: int) -> Watch:
    monkeypatch.setattr(Watch, "made", 2000 + number)
    watch = Watch(store, rank, 2, timeout=1.0, interval=0.0, where=lambda: "STARTED")
    watch.start()
    return watch


def test_a_process_alone_has_nobody_to_watch() -> None:
    watch = Watch(HashStore(), 0, 1, timeout=1.0, where=lambda: "STARTED")
    watch.start()
    watch.failed(ValueError("x"))
    assert watch.explain() == []
    watch.stop()


LEAVES = """
import os, time
from torch.distributed import TCPStore
from signalfire.distributed.watch import Watch

for _ in range(3):
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    raise SystemExit(0)
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
watch = Watch(store, 0, 2, timeout=5, interval=0, where=str)
watch.start()
while watch._own["reports"] < 100:
    assert watch.gone is None, watch.gone
    time.sleep(0.001)
watch.failed(ValueError("the labels are out of range"))
raise SystemExit(1)
"""


@pytest.mark.slow
def test_a_process_that_leaves_with_an_error_is_not_aborted() -> None:
    """Its thread, which the others may still ask, uses the store without a pause, and is in it when the interpreter ends."""
    left = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=300)
    assert left.stdout.split() == ["1"] * 3, left.stderr
    assert left.returncode == 0
    assert "Traceback" not in left.stderr


def test_nothing_is_cut_where_there_is_no_group() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))):
        assert cut_connections() == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), [*map(int, sys.argv[2:])])
