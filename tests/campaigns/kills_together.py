"""Kills one of several processes that train together, starts all of them again, and compares the end with an undisturbed run.

    python tests/campaigns/kills_together.py [--kills 300] [--processes 2 3 4] [--seed 0] [--minutes 15] [--folder FOLDER]
                                             [--sharded]
    python tests/campaigns/kills_together.py --kills 0 --processes 3 --job 17 --json -    # one job alone, as it was drawn
    python tests/campaigns/kills_together.py --last

A parent that has imported everything forks the processes of a job, which find each other as those of torchrun do and resume from
``Checkpoint(resume=True)``. They leave as a script does, through the interpreter's end; those that fail do so in every fourth
start, since it takes long, and after the functions of ``atexit`` otherwise. One of them, drawn by chance, is ended
by SIGKILL. The others have to end by themselves, with an error; then all are started again, with the same store, until the job
was killed as often as was drawn (1 to 6 times) and comes to its end. Half of the moments are drawn uniformly over the time that
a run takes, or over half of it. The others are aimed: a process ends itself the n-th time that it comes to a place, such as an
operation of a save on the disk, a collective, or a step of its start. Jobs draw a recipe: checkpoints written in a thread or
not, windows of three batches with saves inside of them or none, data read by a worker or not. With ``--sharded`` the model is
sharded (FSDP2), each process writes its part, and in two of three recipes a validation has a batch for one process alone.

A failure is
- an end that differs from that of a run that was not disturbed, in one bit of any rank's weights, optimizer, schedule, averages,
  random states, metrics, history, in the log's rows, or in which checkpoints are kept and what is in them;
- a process that is still there a while after the timeout, though another one is gone, or that ends well, though another was
  lost in the run;
- a process that ends with an error, or with another status than 0, though none was killed, and any warning of those that end
  well;
- a checkpoint that was reported as saved and is not there to resume from; anything else that is left in the folder.

Controls follow, each broken in its own way, to show that it is noticed: each has to end in a failure.

What this cannot show: several machines, power cuts, GPUs, torchrun itself (tests/test_torchrun.py). With 0 failures in n kills
the rate is below 3/n with 95 % confidence.
"""

from __future__ import annotations

import atexit
import collections
import ctypes
import faulthandler
import gc
import hashlib
import json
import mmap
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo.distributed  # which torch's DDP imports late: here once, and not in every process
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DataLoader

from signalfire import Engine, Events, Phase, seed_everything
from signalfire.authoring.versions import NO_SYNC_OF_BUFFERS
from signalfire.checkpoints import Content, Files
from signalfire.distributed import whole_tensor
from signalfire.handlers import (
    Checkpoint,
    CSVLogger,
    DistributedDataParallel,
    FullyShardedDataParallel,
    History,
)
from signalfire.testing import fingerprint

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.campaigns.killing import (  # noqa: E402
    Augmented,
    attach_company,
    different_parts,
    ended,
    engine_of,
    environment,
    kept,
    options_of,
    show,
    wait,
    write,
)

RESULT = Path(__file__).parent / "results" / "kills_together.json"
SHARDED_RESULT = RESULT.with_name("kills_sharded.json")
BATCH, TURNS, EPOCHS = 4, 6, 3
"""In the last turn of an epoch the last process goes without a batch, and the one before has a short one."""

EVERY = "4it"
MOST_KILLS = 6
AIMED = 0.5
LIVES = (1.0, 0.5)
TIMEOUT, TIMEOUT_OF_KILLED = 60.0, 5.0
"""Of the collectives, in seconds; short where one is killed: those that wait for it at their start wait that long."""

LATE = 6.0
"""How much longer than the timeout a process may take to be gone, in seconds."""

BROKEN = ("no random states of rank 1", "buckets are put in order late", "outlives the others")
APART = "of a start that no other resumed from"
"""What may be left in the folder: the best of a start that was killed before it wrote one to resume from. The next start
resumes from an older one, and takes it for another run's. It does not count as a failure, and is reported."""

PARENT = os.getpid()
"""Of all: the one that forks them, and cleans up behind them."""

CONTROL_KILLS = 40
"""After so many without a failure, a control is given up."""

# ---- where a process is -----------------------------------------------------------------------------------------------

STARTING, RESUMING, LEAVING = "coming together", "resuming or beginning", "leaving"
REPORTING = "reporting what is left"
BATCHES, FORWARD, BACKWARD, STEP, CLOSING = "between iterations", "forward", "backward", "step", "closing an iteration"
EVALUATION, SAVING, COLLECTIVE = "evaluation", "in a save", "a collective"
MAIN = (STARTING, RESUMING, BATCHES, FORWARD, BACKWARD, STEP, CLOSING, EVALUATION, SAVING, REPORTING, LEAVING)
DISK = ("no file", "make a folder", "write state.pt", "write manifest.json", "sync a file", "sync a folder",
        "rename into place", "rename the superseded", "remove a file")  # fmt: skip
ENDING = (REPORTING, LEAVING)


class Shared:
    """What processes report while they live, in memory that their parent can read after their death: six numbers for each."""

    def __init__(self) -> None:
        self._slots = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
        self._start = 0
        self.aim: tuple[str, int] | None = None  # the place at which this process ends itself, and which time
        self.entered: collections.Counter[str] = collections.Counter()

    def of(self, rank: int) -> Shared:
        """The same memory, for what one rank reports."""
        one = Shared.__new__(Shared)
        one._slots, one._start, one.aim, one.entered = self._slots, 6 * rank, None, collections.Counter()
        return one

    def begin(self) -> None:
        """Before a process is forked."""
        for place in range(3):
            self._slots[self._start + place] = 0

    def at(self, place: str) -> None:
        """This process comes to a place."""
        if place in MAIN:
            self._slots[self._start] = MAIN.index(place)
        elif place in DISK:
            self._slots[self._start + 1] = DISK.index(place)
        else:
            self._slots[self._start + 2] += 1
        self.entered[place] += 1
        if self.aim is not None and self.aim == (place, self.entered[place]):
            os.kill(os.getpid(), signal.SIGKILL)

    def off_disk(self) -> None:
        self._slots[self._start + 1] = 0

    def out_of_collective(self) -> None:
        self._slots[self._start + 2] -= 1

    @property
    def main(self) -> str:
        return MAIN[self._slots[self._start]]

    @property
    def place(self) -> str:
        """What it did with the disk, or else where in the run it was."""
        on_disk = self._slots[self._start + 1]
        return DISK[on_disk] if on_disk else self.main

    @property
    def in_collective(self) -> bool:
        """Of those that a backward begins nothing is known."""
        return self._slots[self._start + 2] > 0

    @property
    def reported(self) -> int:
        """The iteration of the newest checkpoint to resume from that was reported as saved; 0 before the first."""
        return self._slots[self._start + 3]

    @reported.setter
    def reported(self, iteration: int) -> None:
        self._slots[self._start + 3] = iteration


class Watched(Files):
    """Reports each operation on the disk before it begins."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        self.shared.at(place)
        yield
        self.shared.off_disk()

    def make_folder(self, path: Path) -> None:
        with self.at("make a folder"):
            super().make_folder(path)

    def write(self, path: Path, content: Content) -> None:
        with self.at(f"write {path.name}"):
            super().write(path, content)

    def sync(self, path: Path) -> None:
        with self.at("sync a file" if path.suffix in (".pt", ".json") else "sync a folder"):
            super().sync(path)

    def rename(self, old: Path, new: Path) -> None:
        with self.at("rename into place" if old.suffix == ".new" else "rename the superseded"):
            super().rename(old, new)

    def remove(self, path: Path) -> None:
        with self.at("remove a file"):
            super().remove(path)


COLLECTIVES = ("all_reduce", "broadcast", "all_gather_object", "gather_object", "broadcast_object_list", "barrier",
               "all_gather_into_tensor", "reduce_scatter_tensor")  # fmt: skip


def watch_collectives(shared: Shared) -> None:
    """Let the process report when it is inside one."""

    def watched(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            shared.at(COLLECTIVE)
            try:
                return collective(*args, **options)
            finally:
                shared.out_of_collective()

        return call

    for name in COLLECTIVES:
        setattr(dist, name, watched(getattr(dist, name)))


def watch(engine: Engine, shared: Shared, last: Checkpoint) -> None:
    """Let the process report where it is."""
    for event, place in (
        (Events.GET_BATCH_STARTED, BATCHES),
        (Events.FORWARD_STARTED, FORWARD),
        (Events.BACKWARD_STARTED, BACKWARD),
        (Events.BACKWARD_COMPLETED, STEP),
        (Events.ITERATION_COMPLETED, CLOSING),
        (Events.EVALUATION_STARTED, EVALUATION),
        (Events.EVALUATION_COMPLETED, BATCHES),
    ):
        engine.connect(event, lambda engine, place=place: shared.at(place), phase=Phase.PREPARE, rank=-1000)

    def begin(engine: Engine) -> None:
        if any(isinstance(one, Checkpoint) and one.retention.selected is not None for one in engine.handlers.values()):
            shared.at(SAVING)

    def end(engine: Engine) -> None:
        if shared.main == SAVING:
            shared.at(BATCHES)

    def report_save(engine: Engine) -> None:
        shared.reported = max((one.iteration for one in last.retention.written), default=0)

    def look(engine: Engine) -> None:
        if engine.state.iteration < shared.reported:
            raise AssertionError(
                f"iteration {shared.reported} was reported as saved, and {engine.state.iteration} was found"
            )

    engine.connect(Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED, begin, phase=Phase.PERSIST, rank=-1000)
    engine.connect(Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED, end, phase=Phase.PERSIST, rank=1000)
    engine.connect(Events.CHECKPOINT_SAVED, report_save, phase=Phase.PERSIST)
    engine.connect(Events.CHECKPOINT_LOADED, look, phase=Phase.PREPARE)


# ---- the training -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """What differs between jobs."""

    asynchronous: bool
    window: int
    workers: int
    sharded: bool = False
    held_out: int = 20  # samples of a validation, in batches of eight

    def __str__(self) -> str:
        saves = "saves in a thread" if self.asynchronous else "saves in place"
        sharded = f", sharded, {self.held_out} samples held out" if self.sharded else ""
        return f"{saves}, windows of {self.window}, {self.workers} workers{sharded}"


RECIPES = [Recipe(False, 3, 0), Recipe(True, 3, 0), Recipe(False, 1, 1), Recipe(True, 3, 1)]
SHARDED = [Recipe(False, 3, 0, True, 8), Recipe(True, 3, 1, True, 20), Recipe(True, 1, 0, True, 8)]


class Model(nn.Module):
    """Its layers are registered neither in the order in which they are used nor in the opposite one.

    It draws from Python's and NumPy's global generators, too, as some layers of users do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.out, self.first, self.norm = nn.Linear(24, 3), nn.Linear(6, 24), nn.BatchNorm1d(24)
        self.third, self.second = nn.Linear(24, 24), nn.Linear(24, 24)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        if self.training:
            x = x * (1 + 0.1 * random.random()) + 0.1 * float(np.random.rand())
        return self.out(torch.tanh(self.third(self.dropout(torch.tanh(self.second(x))))))  # type: ignore[no-any-return]


class Late(DistributedDataParallel):
    """How it is not done: the buckets get their order in the first backward of each process."""

    def _wrap(self, root: str, module: nn.Module, parameters: list[nn.Parameter], *, carries: bool) -> Any:
        wrapped = super()._wrap(root, module, parameters, carries=carries)
        module = wrapped.ddp.module
        del wrapped.ddp
        gc.collect()  # with the wrapper that is ready go its hooks
        wrapped.ddp = TorchDDP(module, **NO_SYNC_OF_BUFFERS, **self.options)  # type: ignore[arg-type]
        return wrapped


def build(folder: Path, shared: Shared, recipe: Recipe, timeout: float, broken: str) -> tuple[Engine, History]:
    """The engine, with everything that has a state."""
    # Several buckets, though the model is small: their sizes, in MiB, cannot be given as fractions.
    vars(dist)["_DEFAULT_FIRST_BUCKET_BYTES"] = 512
    distribution: DistributedDataParallel | FullyShardedDataParallel
    if recipe.sharded:
        distribution = FullyShardedDataParallel(
            timeout=timeout, reduce_every_batch=True
        )  # so that open windows can be saved
    else:
        distribution = (Late if broken == BROKEN[1] else DistributedDataParallel)(timeout=timeout)
        distribution.options["bucket_cap_mb"] = 0.001  # type: ignore[assignment]
    engine = engine_of(Model())
    engine.attach(distribution)
    shared.at(RESUMING)
    last = Checkpoint(folder, every=EVERY, keep=2, name="last", resume=True, asynchronous=recipe.asynchronous)
    best = Checkpoint(folder, monitor="loss", keep=2, name="best", asynchronous=recipe.asynchronous)
    last.files = best.files = Watched(shared)
    history = attach_company(
        engine, CSVLogger(folder / "log.csv", every="1it"), window=recipe.window, held_out=recipe.held_out
    )
    engine.attach(last, best)
    watch(engine, shared, last)
    return engine, history


def train(folder: Path, shared: Shared, recipe: Recipe, seed: int, timeout: float, broken: str) -> dict[str, Any]:
    """In one of the processes: resume the run in the folder to its end, and report what it has left."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", r"run\(\): nothing to do")  # it was killed when it was over
    seed_everything(seed)
    engine, history = build(folder, shared, recipe, timeout, broken)
    rank, size = engine.processes.rank, engine.processes.world_size
    if broken == BROKEN[0] and rank == 1:
        engine.connect(Events.CHECKPOINT_LOADED, lambda engine: seed_everything(seed), phase=Phase.PREPARE)
    samples = BATCH * (TURNS * size - 1) - 2
    loader = DataLoader(Augmented(samples), BATCH, shuffle=True, num_workers=recipe.workers)
    engine.run(loader, max_epochs=EPOCHS)
    shared.at(REPORTING)
    parts = fingerprint(engine)  # all processes take part
    parts["history"] = hashlib.sha256(repr(history.records).encode()).hexdigest()
    values = [whole_tensor(value) for value in engine.modules["model"].state_dict().values()]
    weights = b"".join(value.numpy().tobytes() for value in values)
    found: dict[str, Any] = {
        "parts": parts,
        "metrics": {name: repr(value) for name, value in engine.state.metrics.items()},
    }
    found |= {"weights": hashlib.sha256(weights).hexdigest(), "iteration": engine.state.iteration}
    if rank == 0:
        parts["log"] = hashlib.sha256((folder / "log.csv").read_bytes()).hexdigest()
        found |= {
            "kept": kept(engine),
            "left": left(engine, folder),
            "rows": (folder / "log.csv").read_text().count("\n"),
        }
    return found


def left(engine: Engine, folder: Path) -> list[str]:
    """What is in the folder besides the log, what is kept, what is to be removed with the next save, and what the last
    processes resumed from, which stays."""
    known, ours = {"log.csv"}, {engine.snapshots.run_id}
    for one in engine.handlers.values():
        if isinstance(one, Checkpoint):
            known |= {name for name, _ in one.kept} | set(one.retention.superseded)
    if engine.snapshots.origin is not None:
        known.add(Path(engine.snapshots.origin["path"]).name)
        ours |= {engine.snapshots.origin["manifest"]["run"], *engine.snapshots.origin["manifest"]["lineage"]}
    rest = sorted(set(os.listdir(folder)) - known)
    manifests = {name: folder / name / "manifest.json" for name in rest}
    apart = {
        name for name, path in manifests.items() if path.exists() and json.loads(path.read_text())["run"] not in ours
    }
    return [f"{APART}: {name}" if name in apart else name for name in rest]


# ---- the processes ----------------------------------------------------------------------------------------------------


class Host:
    """A process that hosts the store of a job's processes through all of their starts, as torchrun's agent does."""

    def __init__(self) -> None:
        read, write = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            end_with_parent()
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(write, f"{store.port}\n".encode())
            while True:
                signal.pause()
        os.close(write)
        with open(read) as stream:
            self.port = int(stream.readline())

    def end(self) -> None:
        os.kill(self.process, signal.SIGKILL)
        wait(self.process)


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Leaving(BaseException):
    """Takes a forked process out of what its parent was doing, to the end of its interpreter."""


@dataclass
class Kill:
    """One that is to come."""

    rank: int
    after: float | None = None  # seconds
    place: str = ""
    time: int = 0  # how often it came to the place


@dataclass
class Attempt:
    """How the processes of one start ended."""

    statuses: list[int]
    killed: bool = False
    late: list[int] = field(default_factory=list)
    noticed: float = 0.0  # seconds from the kill until the last other one was gone


class Job:
    """The processes that train together, and are started again.

    Args:
        folder: of the run.
        size: how many processes.
        recipe: what they do.
        broken: one of `BROKEN`.
    """

    def __init__(self, folder: Path, size: int, recipe: Recipe, broken: str = "") -> None:
        self.folder, self.size, self.recipe, self.broken = folder, size, recipe, broken
        folder.mkdir(parents=True)
        self.outside = folder.with_name(f"{folder.name}-output")
        self.outside.mkdir()
        self.shared = Shared()
        self.ranks = [self.shared.of(rank) for rank in range(size)]
        self.host = Host()
        self.starts = 0
        self.thorough = True  # whether those that fail leave through the interpreter's end

    def end(self) -> None:
        if os.getpid() != PARENT:
            return  # one of the processes is on its way to its end
        self.host.end()
        self._end_workers()
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.outside, ignore_errors=True)

    def _end_workers(self) -> None:
        """End the data's workers of processes that were killed: those that had not quite begun then never notice."""
        for name in os.listdir("/proc"):
            with suppress(OSError):
                if name.isdigit() and os.readlink(f"/proc/{name}/fd/1").startswith(f"{self.outside}/"):
                    os.kill(int(name), signal.SIGKILL)

    @property
    def anew(self) -> bool:
        return not any(re.match(r"last-[^.]*$", name) for name in os.listdir(self.folder))

    def report(self, rank: int) -> Path:
        return self.outside / f"{rank}.json"

    def output(self, rank: int) -> str:
        path = self.outside / f"{rank}.err"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self, seed: int, kill: Kill | None) -> Attempt:
        """Start all, kill one, and wait until none is left."""
        timeout = TIMEOUT if kill is None else TIMEOUT_OF_KILLED
        self.starts += 1
        began = time.perf_counter()
        running = {rank: self._fork(rank, seed, timeout, kill) for rank in range(self.size)}
        pids = dict(running)
        found = Attempt([0] * self.size)
        killed_at: float | None = None
        while running:
            for rank, pid in list(running.items()):
                if (status := ended(pid)) is not None:
                    del running[rank]
                    found.statuses[rank] = status
                    if kill is not None and rank == kill.rank and status == -signal.SIGKILL:
                        found.killed = True
                        killed_at = killed_at or time.perf_counter()
            now = time.perf_counter()
            if kill is not None and kill.after is not None and killed_at is None and now - began >= kill.after:
                if kill.rank not in running:
                    kill = None
                    continue
                os.kill(pids[kill.rank], signal.SIGKILL)
                killed_at = now
            latest = (killed_at or began) + (timeout if killed_at else 2 * TIMEOUT) + LATE
            if running and now > latest:
                found.late = sorted(running)
                for pid in running.values():
                    os.kill(pid, signal.SIGUSR1)  # it prints where it is
                time.sleep(0.5)
                for pid in running.values():
                    os.kill(pid, signal.SIGKILL)
                    wait(pid)
                break
            time.sleep(0.001)
        if killed_at is not None:
            found.noticed = time.perf_counter() - killed_at
        return found

    def _fork(self, rank: int, seed: int, timeout: float, kill: Kill | None) -> int:
        shared = self.ranks[rank]
        shared.begin()
        shared.aim = (kill.place, kill.time) if kill is not None and kill.rank == rank and kill.place else None
        shared.entered.clear()
        with suppress(FileNotFoundError):
            self.report(rank).unlink()
        sys.stdout.flush()
        process = os.fork()
        if process:
            return process
        end_with_parent()
        file = os.open(self.outside / f"{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(self.size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                          MASTER_PORT=str(self.host.port), TORCHELASTIC_USE_AGENT_STORE="True",
                          TORCHELASTIC_RESTART_COUNT=str(self.starts))  # fmt: skip
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        try:
            shared.at(STARTING)
            watch_collectives(shared)
            found = train(self.folder, shared, self.recipe, seed + rank, timeout, self.broken)
            found["entered"] = dict(shared.entered)
            self.report(rank).write_text(json.dumps(found))
            shared.at(LEAVING)
        except Exception as error:
            if self.broken == BROKEN[2]:
                time.sleep(600)
            if not self.thorough:
                sys.excepthook(type(error), error, error.__traceback__)
                sys.last_value = error
                atexit._run_exitfuncs()
                os._exit(1)
            raise Leaving from error
        raise Leaving

    def outcome(self) -> list[dict[str, Any]]:
        return [json.loads(self.report(rank).read_text()) for rank in range(self.size)]


# ---- killing ----------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What is counted over a campaign."""

    jobs: int = 0
    starts: int = 0
    anew: int = 0
    finished: int = 0  # jobs of which all processes ended with 0
    killed: collections.Counter[str] = field(default_factory=collections.Counter)
    places: collections.Counter[str] = field(default_factory=collections.Counter)
    ranks: collections.Counter[int] = field(default_factory=collections.Counter)
    recipes: collections.Counter[str] = field(default_factory=collections.Counter)
    in_collectives: int = 0
    apart: int = 0
    named: int = 0  # kills of which one of the others reported whose it was
    survivors: collections.Counter[str] = field(default_factory=collections.Counter)
    noticed: dict[str, list[float]] = field(
        default_factory=lambda: {"at the start": [], "in the run": [], "at the end": []}
    )
    failures: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return self.killed.total()


class Campaign:
    """Job after job, each killed again and again.

    Args:
        folder: where they write.
        size: the number of processes of each.
        seed: each job draws from (seed, size, its number) alone.
        broken: one of `BROKEN`; it is given up with its first failure.
        recipes: the ones that its jobs draw from.
        measured: how many runs of each recipe are not killed, timed and compared; the quickest counts.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        *,
        seed: int,
        broken: str = "",
        recipes: Sequence[Recipe] = RECIPES,
        measured: int = 1,
    ) -> None:
        folder.mkdir(parents=True)
        self.recipes = recipes
        self.measured = measured
        self.folder, self.size, self.seed, self.broken = folder, size, seed, broken
        self.tally = Tally()
        self.expected: dict[Recipe, list[dict[str, Any]]] = {}
        self.seconds: dict[Recipe, float] = {}

    def undisturbed(self, recipe: Recipe) -> list[dict[str, Any]]:
        """What a run leaves that is not killed, by rank."""
        if recipe not in self.expected:
            reference: list[dict[str, Any]] | None = None
            for number in range(self.measured):
                job = Job(self.folder / f"expected{len(self.expected)}-{number}", self.size, recipe, self.broken)
                try:
                    began = time.perf_counter()
                    attempt = job.start(100, None)
                    seconds = time.perf_counter() - began
                    if any(attempt.statuses):
                        raise RuntimeError("\n".join(job.output(rank) for rank in range(self.size)))
                    found = job.outcome()
                finally:
                    job.end()
                if reference is not None and (problem := different(reference, found)):
                    raise RuntimeError(f"two runs that were not killed differ: {problem}")
                reference = reference or found
                self.seconds[recipe] = min(seconds, self.seconds.get(recipe, seconds))
            assert reference is not None
            self.expected[recipe] = reference
        return self.expected[recipe]

    def run(self, kills: int, deadline: float) -> None:
        """Job after job, until there were so many kills or the time is over."""
        while self.tally.kills < kills and time.monotonic() < deadline:
            self.job(self.tally.jobs, kills - self.tally.kills)
            if self.broken and self.tally.failures:
                return

    def job(self, number: int, most: int = MOST_KILLS) -> None:
        draw = random.Random(f"{self.seed} {self.size} {number}")
        recipe = draw.choice(self.recipes)
        self.undisturbed(recipe)
        job = Job(self.folder / f"job{number}", self.size, recipe, self.broken)
        self.tally.jobs += 1
        self.tally.recipes[str(recipe)] += 1
        try:
            problem = self._job(job, draw, min(most, draw.randint(1, MOST_KILLS)))
        except Exception:
            problem = traceback.format_exc()
        finally:
            job.end()
        if problem:
            self.tally.failures.append(f"seed {self.seed}, {self.size} processes, job {number} ({recipe}): {problem}")

    def _job(self, job: Job, draw: random.Random, kills: int) -> str:
        """Kill and resume until the job is over; says what went wrong."""
        lives = draw.choice(LIVES) * self.seconds[job.recipe]
        begun_anew = 0
        for number in range(kills + 1):
            other = draw.randrange(1000, 2**31)
            seed = 100 if (anew := job.anew) else other
            if anew and job.ranks[0].reported:
                return (
                    f"start {number + 1}: iteration {job.ranks[0].reported} was reported as saved, and nothing is there"
                )
            begun_anew += anew
            self.tally.starts += 1
            self.tally.anew += anew
            kill = self._draw_kill(draw, job.recipe, lives) if number < kills else None
            job.thorough = other % 4 == 0
            attempt = job.start(seed, kill)
            if kill is not None and attempt.killed:
                if problem := self._lost(job, kill, attempt):
                    return f"start {number + 1}, {kill}: {problem}"
                continue
            if attempt.late or any(attempt.statuses):
                printed = "\n".join(f"rank {rank}: {job.output(rank)[-1500:]}" for rank in range(job.size))
                return f"start {number + 1}, {kill}: nobody was killed; {attempt}\n{printed}"
            found = job.outcome()
            self.tally.finished += 1
            aside = [name for name in found[0]["left"] if re.fullmatch(r"log\.\d+\.csv", name)]
            apart = [name for name in found[0]["left"] if name.startswith(APART)]
            self.tally.apart += len(apart)
            if rest := sorted(set(found[0]["left"]) - set(aside) - set(apart)):
                return f"left in the folder: {', '.join(rest)}"
            if len(aside) >= begun_anew:
                return f"begun anew {begun_anew} times, and left {', '.join(aside)}"
            printed = "".join(job.output(rank) for rank in range(job.size))
            if printed := re.sub(r"(?m)^last: resuming from .*\n", "", printed):
                return f"it ended well, and printed: {printed[-1500:]}"
            return different(self.expected[job.recipe], found)
        raise AssertionError("the last start is not killed")

    def _draw_kill(self, draw: random.Random, recipe: Recipe, lives: float) -> Kill:
        rank = draw.randrange(self.size)
        if draw.random() >= AIMED:
            return Kill(rank, after=draw.uniform(0, lives))
        entered = self.expected[recipe][rank]["entered"]
        place = draw.choice([place for place in (*MAIN, *DISK, COLLECTIVE) if place in entered])
        return Kill(rank, place=place, time=draw.randint(1, max(1, round(entered[place] * draw.choice((1, 0.5))))))

    def _lost(self, job: Job, kill: Kill, attempt: Attempt) -> str:
        """Count a kill; says what is wrong with how the others ended."""
        tally, one = self.tally, job.ranks[kill.rank]
        tally.killed["even" if kill.after is not None else "aimed"] += 1
        tally.places[one.place] += 1
        tally.ranks[kill.rank] += 1
        tally.in_collectives += one.in_collective
        when = "at the start" if one.main == STARTING else "at the end" if one.main in ENDING else "in the run"
        tally.noticed[when].append(attempt.noticed)
        others = [rank for rank in range(job.size) if rank != kill.rank]
        printed = {rank: job.output(rank) for rank in others}
        tally.named += any(re.search(rf"\brank {kill.rank}\b", text) for text in printed.values())
        tally.survivors.update(str(attempt.statuses[rank]) for rank in others)
        if attempt.late:
            texts = "\n".join(f"rank {rank}: {printed.get(rank, '')[-4000:]}" for rank in attempt.late)
            return f"killed in {one.place!r}; still there after {attempt.noticed:.1f} s: {attempt.late}\n{texts}"
        for rank in others:
            if attempt.statuses[rank] == 0 and one.main not in ENDING:
                return f"killed in {one.place!r}; rank {rank} ended well all the same"
            if attempt.statuses[rank] not in (0, 1):
                return (
                    f"killed in {one.place!r}; rank {rank} ended with {attempt.statuses[rank]}\n{printed[rank][-1500:]}"
                )
        return ""


def different(expected: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> str:
    """What differs in the ends of two runs."""
    problems = []
    for rank, (one, other) in enumerate(zip(expected, found, strict=True)):
        parts = different_parts(one, other)
        parts += [part for part in ("weights", "metrics", "iteration", "rows") if one.get(part) != other.get(part)]
        if one.get("kept") != other.get("kept"):
            parts.append(f"kept {other['kept']} and not {one['kept']}")
        if parts:
            problems.append(f"rank {rank}: {', '.join(parts)}")
    return f"it ends elsewhere: {'; '.join(problems)}" if problems else ""


# ---- reporting -------------------------------------------------------------------------------------------------------


def result(campaign: Campaign, seconds: float) -> dict[str, Any]:
    """What is written as JSON, of one number of processes."""
    tally = campaign.tally
    noticed = {when: {"kills": len(times), "median": round(statistics.median(times), 3), "max": round(max(times), 3)}
               for when, times in tally.noticed.items() if times}  # fmt: skip
    return {
        "kills": tally.kills,
        "even": tally.killed["even"],
        "aimed": tally.killed["aimed"],
        "inside_saves": sum(tally.places[place] for place in (SAVING, *DISK)),
        "in_collectives": tally.in_collectives,
        "jobs": tally.jobs,
        "finished_with_status_0": tally.finished,
        "starts": tally.starts,
        "began_anew": tally.anew,
        "left_apart": tally.apart,
        "failures": len(tally.failures),
        "failed": tally.failures[:10],
        "rate_below": None if tally.failures or not tally.kills else round(3 / tally.kills, 5),
        "seconds": round(seconds, 1),
        "seconds_of_a_run": {str(recipe): round(took, 2) for recipe, took in sorted(campaign.seconds.items(), key=str)},
        "noticed_seconds": noticed,
        "named_by_another": tally.named,
        "statuses_of_others": dict(sorted(tally.survivors.items())),
        "by_rank": {str(rank): tally.ranks[rank] for rank in range(campaign.size)},
        "places": {place: tally.places[place] for place in (*MAIN, *DISK[1:])},
        "recipes": dict(sorted(tally.recipes.items())),
    }


def summary(found: Mapping[str, Any]) -> str:
    """For people."""
    lines = []
    for size, one in found["processes"].items():
        bound = f": below {one['rate_below']:.2%} with 95 % confidence" if one["rate_below"] else ""
        lines += [
            f"{size} processes: {one['kills']} kills ({one['even']} at even moments, {one['aimed']} aimed), "
            f"{one['inside_saves']} of them inside a save, {one['in_collectives']} inside a collective; {one['jobs']} jobs, "
            f"{one['finished_with_status_0']} of which ended with status 0, {one['starts']} starts, {one['seconds']:.0f} s",
            f"  {one['failures']} failures{bound}",
            *(
                f"  {times['kills']} {when}: all gone after {times['median']:.2f} s (median), {times['max']:.2f} s (max)"
                for when, times in one["noticed_seconds"].items()
            ),
            f"  {one['left_apart']} checkpoints left {APART}",
            f"  of {one['named_by_another']} the others reported which rank was lost",
            *(f"  {number:5d}  {place}" for place, number in one["places"].items() if number),
            *(f"  failed: {text}" for text in one["failed"]),
        ]
    lines += [f"control, {broken}: {one['failures']} failure after {one['kills']} kills"
              for broken, one in found["controls"].items()]  # fmt: skip
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options_of(__doc__, RESULT)
    parser.add_argument("--kills", type=int, default=300, help="for each number of processes (300)")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--job", type=int, default=None, help="this job alone, without the others")
    parser.add_argument("--minutes", type=float, default=15, help="for each number; no new job begins after that (15)")
    parser.add_argument(
        "--controls", nargs="*", choices=BROKEN, default=None, help="which of them (all that there are)"
    )
    parser.add_argument("--sharded", action="store_true", help="the model is sharded over the processes (FSDP2)")
    options = parser.parse_args(arguments)
    recipes = SHARDED if options.sharded else RECIPES
    if options.sharded and options.json == RESULT:
        options.json = SHARDED_RESULT
    if options.controls is None:
        options.controls = [one for one in BROKEN if not options.sharded or one != BROKEN[1]]  # which is one of DDP
    if options.last:
        print(summary(json.loads((SHARDED_RESULT if options.sharded else RESULT).read_text())))
        return 0
    torch.set_num_threads(1)
    # A name server that does not answer would hold up the store, which looks up the name of each address that connects to it, by
    # 5 s: as long as the timeout.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    folder = Path(tempfile.mkdtemp(prefix="kills-together-", dir=options.folder))
    found: dict[str, Any] = {"processes": {}, "controls": {}, "seed": options.seed}
    try:
        with warnings.catch_warnings():  # torch imports much of itself in the first step only
            train(folder / "warm", Shared().of(0), recipes[0], 100, TIMEOUT, "")
        gc.freeze()  # what is there already needs not be looked through at the end of each process: most of its time
        for size in options.processes:
            began = time.monotonic()
            measured = 2 if options.kills > 100 else 1
            campaign = Campaign(folder / str(size), size, seed=options.seed, recipes=recipes, measured=measured)
            if options.job is not None:
                campaign.job(options.job)
            campaign.run(options.kills, began + 60 * options.minutes)
            found["processes"][str(size)] = result(campaign, time.monotonic() - began)
            write(found, options.json)  # also what is there until now: a campaign takes a while
        for broken in options.controls:
            size = 3 if broken == BROKEN[1] else 2  # two add up in one order only
            place = folder / broken.replace(" ", "-")
            control = Campaign(place, size, seed=options.seed, broken=broken, recipes=recipes)
            control.run(CONTROL_KILLS, float("inf"))
            texts = [text.strip()[:300] for text in control.tally.failures]
            found["controls"][broken] = {"kills": control.tally.kills, "failures": len(texts), "failed": texts}
    finally:
        if os.getpid() == PARENT:
            shutil.rmtree(folder, ignore_errors=True)
    found["environment"] = environment()
    show(found, options.json, summary)
    failed = any(one["failures"] for one in found["processes"].values())
    return 1 if failed or not all(one["failures"] for one in found["controls"].values()) else 0


if __name__ == "__main__":
    try:
        status = main()
    except Leaving as leaving:
        if leaving.__cause__ is not None:
            raise leaving.__cause__ from None
        status = 0
    sys.exit(status)
