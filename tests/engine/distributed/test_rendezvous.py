"""Joining and leaving with real processes: what dead ones have left, deaths while joining, restarts, the end of a job."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from signalfire.distributed import job, process_group
from signalfire.distributed.liveness import identity
from signalfire.distributed.rendezvous import agree, join, launched
from tests.kit import LIMIT, free_port, python, spread, wait_until
from tests.kit import finished as finished_program

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

WORKER = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from signalfire.distributed import rendezvous

torch.set_num_threads(1)
moment = sys.argv[1]
rank, first = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

class Fatal:
    '''A store in which an operation on a key that ends so kills.'''
    def __init__(self, store, end):
        self.store, self.end = store, end
    def set(self, key, value):
        return die() if key.endswith(self.end) else self.store.set(key, value)
    def __getattr__(self, name):
        return getattr(self.store, name)

if first and rank == 1 and moment == "acknowledged":
    follow = rendezvous._follow
    rendezvous._follow = lambda *arguments: die(follow(*arguments))
if first and rank == 0 and moment == "offer":
    lead = rendezvous._lead
    rendezvous._lead = lambda store, *rest: lead(Fatal(store, "agreed"), *rest)

rendezvous.join(timeout=60)
if moment == "nothing":  # what holds the group at the end; importing it takes as long as torch
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    model(torch.ones(4, 8)).sum().backward()
for step in range(5):
    dist.all_reduce(torch.ones(1))
    if first and rank == 1 and step == 3 and moment == "training":
        die()
    if moment == "raise" and rank == 1 and step == 3:
        raise ValueError("no more")
    if moment == "orphan":
        os.write(1, f"{os.getpid()}\\n".encode())  # at once: the other one writes there, too
        time.sleep(600)
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {rank} sees {int(total)}, attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}")
"""

# Imports torch once, and forks the programs: a few at a time, each with its output and exit status in files.
WARM = """
import json, os, sys
import torch.distributed.run
import signalfire.distributed.rendezvous

running = {}
def wait():
    pid, status = os.wait()
    with open(f"{running.pop(pid)}.status", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(status)))

for name, (kind, program) in json.loads(sys.argv[1]).items():
    if len(running) == 3:
        wait()
    if (pid := os.fork()) == 0:
        for number in (1, 2):
            os.dup2(os.open(f"{name}.{number}", os.O_CREAT | os.O_WRONLY), number)
        break
    running[pid] = name
else:
    while running:
        wait()
    sys.exit()
if kind == "torchrun":
    torch.distributed.run.main(program)
else:
    exec(program)
"""

SINGLE_PROCESS = """
import os, sys
import torch.distributed as dist
from signalfire.distributed.rendezvous import join, note_failure
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
join(timeout=20)
destroy = dist.destroy_process_group
def report():
    print("destroyed", flush=True)
    destroy()
dist.destroy_process_group = report
"""

KILLED = ["offer", "acknowledged", "training"]
JOBS = {**dict.fromkeys(KILLED, (2, 1)), "nothing": (3, 0), "raise": (2, 0)}
ENDS = ["pass", "sys.exit(3)", "note_failure()", "raise ValueError('x')"]


def launcher(script: Path, moment: str, size: int, restarts: int) -> list[str]:
    """Arguments of torchrun."""
    options = ["--standalone", f"--nproc-per-node={size}", f"--max-restarts={restarts}", "--monitor-interval=0.05"]
    return [*options, str(script), moment]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rendezvous") / "worker.py"
    path.write_text(WORKER)
    return path


class Finished:
    def __init__(self, folder: Path, name: str) -> None:
        self.status = int((folder / f"{name}.status").read_text())
        self.output, self.errors = ((folder / f"{name}.{number}").read_text() for number in (1, 2))


@pytest.fixture(scope="module")
def finished(script: Path) -> Callable[[str], Finished]:
    """What has become of the job or end of this name."""
    programs: dict[str, tuple[str, Any]] = {job: ("torchrun", launcher(script, job, *JOBS[job])) for job in JOBS}
    programs |= {end: ("python", f"{SINGLE_PROCESS}\n{end}") for end in ENDS}
    subprocess.run([sys.executable, "-c", WARM, json.dumps(programs)], cwd=script.parent, check=True, timeout=500)
    return lambda name: Finished(script.parent, name)


@pytest.mark.slow
@pytest.mark.parametrize("moment", KILLED)
def test_workers_that_are_killed_are_restarted_once(finished: Callable[[str], Finished], moment: str) -> None:
    job = finished(moment)
    assert job.status == 0, job.errors
    for rank in range(2):
        assert f"rank {rank} sees 2, attempt 1" in job.output


@pytest.mark.slow
def test_a_finished_job_exits_with_status_0(finished: Callable[[str], Finished]) -> None:
    job = finished("nothing")
    assert job.status == 0, job.errors
    assert job.output.count("sees 3, attempt 0") == 3
    assert "terminate called" not in job.errors


@pytest.mark.slow
def test_a_job_with_an_error_exits_with_another(finished: Callable[[str], Finished]) -> None:
    job = finished("raise")
    assert job.status == 1
    assert "ValueError: no more" in job.errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status", "destroyed"), [*zip(ENDS, [0, 3, 0, 1], [True, True, False, False], strict=True)]
)
def test_the_group_is_destroyed_after_a_good_end_only(
    finished: Callable[[str], Finished], end: str, status: int, destroyed: bool
) -> None:
    process = finished(end)
    assert process.status == status, process.errors
    assert ("destroyed" in process.output) is destroyed


@pytest.mark.slow
def test_workers_of_a_launcher_that_was_killed_end(script: Path) -> None:
    command = ["-m", "torch.distributed.run", *launcher(script, "orphan", 2, 0)]
    with python(*command, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        workers = [int(agent.stdout.readline()) for _ in range(2)]
        assert all(map(lives, workers))
        agent.kill()
    wait_until(lambda: not any(map(lives, workers)))


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# Agreeing, in threads of which each has its own connection to one store


class Server:
    def __init__(self) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))

    def client(self) -> Store:
        return TCPStore("127.0.0.1", self.store.port, is_master=False, timeout=timedelta(seconds=60))

    def agree(
        self, ranks: list[int], size: int, timeout: float = LIMIT, *, late: float = 0.0, in_turn: bool = False
    ) -> list[Any]:
        """What each rank gets: its store, or the error; the last one comes ``late`` seconds after the others.

        With ``in_turn``, each comes once the one after it has said its word.
        """

        def one(rank: int) -> Any:
            if rank == ranks[-1]:
                time.sleep(late)
            elif in_turn:
                following = ranks[ranks.index(rank) + 1]
                wait_until(lambda: self.left(f"signalfire/join/word/{following}") is not None)
            try:
                return agree(self.client(), rank, size, timeout=timeout)
            except TimeoutError as error:
                return error

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(one, ranks))

    def left(self, key: str) -> bytes | None:
        """What is in the store under a key."""
        return self.store.get(key) if self.store.check([key]) else None


def work_together(stores: list[Any]) -> bool:
    """Whether what one writes is what all others read, in a place where nothing was."""
    assert all(isinstance(store, Store) for store in stores), stores
    assert not any(store.check(["address/0"]) for store in stores)
    stores[0].set("address/0", "mine")
    return all(store.get("address/0") == b"mine" for store in stores)


def test_processes_agree() -> None:
    assert work_together(Server().agree([0, 1, 2], 3))


def test_one_process_agrees_with_itself() -> None:
    assert work_together(Server().agree([0], 1))


@pytest.mark.parametrize("late", [0, 1, 2])
def test_all_that_a_dead_attempt_left_does_no_harm(late: int) -> None:
    """Words, an offer, acknowledgements, the agreement and what was written under its prefix, of the same number of ranks."""
    server = Server()
    dead = server.agree([0, 1, 2], 3)
    dead[0].set("address/0", "a dead one's")
    before = server.store.num_keys()
    assert work_together(server.agree([rank for rank in range(3) if rank != late] + [late], 3, late=0.3))
    assert server.store.num_keys() > before


def test_what_ranks_left_that_died_while_joining_does_no_harm() -> None:
    server = Server()
    assert all(isinstance(error, TimeoutError) for error in server.agree([0, 1], 3, timeout=0.3))
    assert all(isinstance(error, TimeoutError) for error in server.agree([1, 2], 3, timeout=0.3))
    assert work_together(server.agree([0, 1, 2], 3))


def test_a_forged_agreement_with_the_words_of_dead_ones_is_not_followed() -> None:
    server = Server()
    words = ["a" * 32, "b" * 32]
    for key, value in {
        "offer": json.dumps({"prefix": "old", "words": words}),
        "word/0": words[0],
        "word/1": words[1],
        "old/ack/0": words[0],
        "old/ack/1": words[1],
        "old/agreed": words[0],
    }.items():
        server.store.set(f"signalfire/join/{key}", value)
    server.store.set("signalfire/old/address/0", "a dead one's")
    assert work_together(server.agree([0, 1], 2, late=0.3))


def test_a_rank_that_dies_after_its_word_is_replaced() -> None:
    """While rank 0 waits for its acknowledgement."""
    server = Server()
    server.store.set("signalfire/join/word/1", "of one that died since")
    results: list[Any] = []
    leader = threading.Thread(target=lambda: results.append(agree(server.client(), 0, 2, timeout=60.0)))
    leader.start()
    wait_until(lambda: server.left("signalfire/join/offer") is not None)
    results += server.agree([1], 2)
    leader.join()
    assert work_together(results)


def test_a_rank_whose_word_is_overwritten_by_one_that_still_lives_says_it_again() -> None:
    server = Server()
    results: list[Any] = []
    follower = threading.Thread(target=lambda: results.append(agree(server.client(), 1, 2, timeout=60.0)))
    follower.start()
    wait_until(lambda: server.left("signalfire/join/word/1") is not None)
    server.store.set("signalfire/join/word/1", "of one that is killed now")
    results += server.agree([0], 2)
    follower.join()
    assert work_together(results)


def test_another_number_of_processes_agrees_after_a_larger_one() -> None:
    server = Server()
    server.agree([0, 1, 2], 3)
    assert work_together(server.agree([0, 1], 2))


@pytest.mark.parametrize(
    ("come", "said"),
    [
        ([0, 2], "not all 4 ranks joined within 1.5 s; missing: rank 1, 3"),
        ([1, 2], "rank {rank} of 4 waited 1.5 s, but rank 0 did not answer"),
    ],
)
def test_those_that_do_not_come_are_named_everywhere(come: list[int], said: str) -> None:
    for rank, error in zip(come, Server().agree(come, 4, timeout=1.5, in_turn=True), strict=True):
        assert isinstance(error, TimeoutError)
        assert said.format(rank=rank) in str(error)


# Other jobs, and ranks that are there twice

JOINING = f"""
import torch
import torch.distributed as dist
from signalfire.distributed import process_group, rendezvous
rendezvous.LEAVING = {LIMIT}  # until the others know why rank 0 ends, however slow the machine is
process_group(timeout={LIMIT})
total = torch.ones(1)
dist.all_reduce(total)
print("together:", int(total))
"""


class Job:
    """Ranks of a job at an address, hosted by rank 0."""

    def __init__(self, folder: Path, port: int, program: str = "train.py", **variables: str) -> None:
        self.script = folder / program
        self.script.write_text(JOINING)
        self.variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **variables}

    def start(self, rank: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(self.script)],
            env=os.environ | self.variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, errors = process.communicate(timeout=LIMIT)
    return process.returncode, output + errors


@pytest.mark.slow
@pytest.mark.parametrize("known", ["SLURM_JOB_ID", "program"])
def test_a_rank_of_another_job_with_the_same_address_is_refused(known: str, tmp_path: Path) -> None:
    port = free_port()
    one, other = (
        Job(tmp_path, port, **({"program": f"{name}.py"} if known == "program" else {known: name}))
        for name in ("first", "second")
    )
    first = one.start(0)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LIMIT))
    store.wait(["signalfire/join/word/0"])
    stranger, host = other.start(1), other.start(0)
    status, said = ended(stranger)
    assert status == 1
    assert f"rank 1 (pid {stranger.pid} on" in said
    assert f"does not belong to the same job as the process at 127.0.0.1:{port} (pid {first.pid} on" in said
    status, said = ended(host)
    assert status == 1
    assert f"rank 0 could not host the store at 127.0.0.1:{port}, because another process" in said
    second = one.start(1)
    assert [ended(first), ended(second)] == [(0, "together: 2\n")] * 2
    del store


@pytest.mark.slow
def test_two_processes_of_one_rank_are_named(tmp_path: Path) -> None:
    port = free_port()
    three = Job(tmp_path, port, WORLD_SIZE="3")
    ranks = [three.start(rank) for rank in (0, 1)]
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LIMIT))
    store.wait(["signalfire/join/word/1"])
    ranks.append(three.start(1))
    for status, said in map(ended, ranks):
        assert status == 1
        assert f"have rank 1 in the group at 127.0.0.1:{port}: pid {ranks[1].pid} and pid {ranks[2].pid}" in said
    del store


def test_a_rank_of_another_job_that_came_first_does_not_hold_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    monkeypatch.setenv("SLURM_JOB_ID", "2")
    stranger = f"{'f' * 32} {identity()} "
    server.store.set(f"signalfire/join/job/{stranger.split()[0]}", json.dumps(job.describe()))
    server.store.set("signalfire/join/word/1", stranger)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert work_together(server.agree([0, 1], 2))


# Processes that are killed at their start

STARTED = """
import sys
from torch.distributed import TCPStore
from signalfire.distributed.rendezvous import agree
agree(TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False), int(sys.argv[2]), int(sys.argv[3]), timeout=60)
"""


def killed_at_its_start(server: Server, rank: int, size: int) -> int:
    """The id of a process that is killed once it has said its word."""
    before = server.left(f"signalfire/join/word/{rank}")
    process = subprocess.Popen([sys.executable, "-c", STARTED, str(server.store.port), str(rank), str(size)])
    wait_until(lambda: server.left(f"signalfire/join/word/{rank}") != before)
    process.kill()
    process.wait()
    return process.pid


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Free the stores here: one that the garbage collector finds in a forked process of a later test ends that process."""
    yield
    gc.collect()


def together(server: Server, ranks: list[int], size: int) -> list[Any]:
    """As `Server.agree`, and RuntimeErrors are returned as well."""

    def one(rank: int) -> Any:
        try:
            return agree(server.client(), rank, size, timeout=LIMIT)
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


@pytest.mark.moderate
@pytest.mark.parametrize("killed", spread([0, 1, 2], 1))
def test_a_rank_that_is_killed_at_its_start_is_named_within_seconds(killed: int) -> None:
    server = Server()
    others = [rank for rank in range(3) if rank != killed]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(together, server, others, 3)
        wait_until(lambda: all(server.left(f"signalfire/join/word/{rank}") is not None for rank in others))
        pid = killed_at_its_start(server, killed, 3)
        began = time.monotonic()
        errors = waiting.result()
    assert time.monotonic() - began < LIMIT / 2, "long before they would give up"
    for error in errors:
        assert isinstance(error, RuntimeError)
        assert f"rank {killed} (pid {pid}) ended before all ranks had joined" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_of_an_earlier_start_that_was_killed_does_no_harm(killed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    killed_at_its_start(server, killed, 2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert work_together(together(server, [0, 1], 2))


@pytest.mark.slow
def test_a_rank_of_this_start_is_named_though_it_was_killed_before_anybody_looked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    monkeypatch.setattr("signalfire.distributed.rendezvous.TOGETHER", 60_000)
    pid = killed_at_its_start(server, 1, 3)
    for error in together(server, [0, 2], 3):
        assert f"rank 1 (pid {pid}) ended" in str(error)


@pytest.mark.slow
def test_a_rank_that_is_killed_while_connections_are_made_is_named() -> None:
    """The others are waiting for it inside of torch, where nothing can interrupt them."""
    script = """
import os, signal, sys, time
import torch.distributed as dist
from signalfire.distributed import process_group, rendezvous
rendezvous.NOTICED = 0.5
if os.environ["RANK"] == "1":
    dist.init_process_group = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)
try:
    process_group(timeout=300)
except BaseException as error:
    print(*getattr(error, "__notes__", []), file=sys.stderr)
    raise
"""
    server = Server()
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    environment = os.environ | address | {"WORLD_SIZE": "3"}
    began = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    said = [rank.communicate(timeout=LIMIT)[1] for rank in ranks]
    assert time.monotonic() - began < 150, "long before the timeout"
    assert ranks[1].returncode == -signal.SIGKILL
    for rank in (0, 2):
        assert ranks[rank].returncode == 1
        assert f"rank 1 (pid {ranks[1].pid}) has ended" in said[rank]


# The environment


def test_without_a_launcher_there_is_nothing_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    assert not launched()
    with pytest.raises(
        RuntimeError, match="variables are not set: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"
    ):
        join(timeout=1.0)
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "0")
    assert launched()
    with pytest.raises(RuntimeError, match="RANK=0: expected a rank from 0 to WORLD_SIZE - 1, which is -1"):
        join(timeout=1.0)


@pytest.mark.parametrize(
    "environment", [{"RANK": "1"}, {"RANK": "0", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}]
)
def test_a_launch_of_several_that_does_not_say_where_they_are_is_no_process_alone(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    assert not process_group().distributed
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=r"variables are not set: .*MASTER_ADDR, MASTER_PORT\. Start .* torchrun"):
        process_group(timeout=1.0)


@pytest.mark.parametrize(
    "environment", [{"RANK": "0", "WORLD_SIZE": "1"}, {"LOCAL_RANK": "0"}, {"MASTER_ADDR": "127.0.0.1"}]
)
def test_a_launch_of_one_is_a_process_alone(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert not process_group(timeout=1.0).distributed


def test_a_group_of_the_user_is_left_as_it_is() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        join(timeout=1.0).set("key", "value")
        assert dist.group.WORLD is group
    finally:
        dist.destroy_process_group()


def _environment(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**defaults, **values}.items():
        monkeypatch.setenv(name, value)


def test_a_local_rank_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _environment(monkeypatch, LOCAL_RANK="99")
    with pytest.raises(RuntimeError, match="LOCAL_RANK=99 needs 100 GPUs on this host, but only"):
        join(backend="nccl", timeout=1.0)


def test_a_store_that_nobody_holds_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    _environment(monkeypatch, RANK="1", WORLD_SIZE="2")
    with pytest.raises(RuntimeError, match=r"rank 1 could not use the store at 127\.0\.0\.1:1, hosted by rank 0"):
        join(timeout=1.0)


@pytest.mark.slow
def test_a_process_whose_connections_are_not_made_in_time_is_left_and_says_so() -> None:
    script = (
        "import threading, time\nfrom signalfire.distributed import rendezvous\nrendezvous.GRACE = 0.1\n"
        "with rendezvous.bounded(60, 'rank 0 of 2'):\n    pass\n"
        "while threading.active_count() > 1:\n    time.sleep(0.001)\n"  # nobody waits any longer
        "print('continues', flush=True)\n"
        "with rendezvous.bounded(0.2, 'rank 1 of 2'):\n    time.sleep(600)\n"
    )
    ended = finished_program("-c", script)
    assert ended.returncode == 1
    assert ended.stdout == "continues\n"
    assert "rank 1 of 2 was not connected to the other ranks within 0.2 s" in ended.stderr
    assert "rank 0 of 2" not in ended.stderr
