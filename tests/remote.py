"""A tracking service in memory for tests of `RemoteLogger`, and what tests of its adapters share."""

from __future__ import annotations

import csv
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import torch

from signalfire import Engine, Events, Phase
from signalfire.handlers import CSVLogger, MLflowLogger, RemoteLogger
from signalfire.handlers.remote_logger import Item, Status, Stored
from tests.kit import batches, build, finished, linear

__all__ = ["DATA", "Service", "ServiceLogger", "go_back_once", "rows_of_csv", "trainer"]

DATA = batches(6)

Row = tuple[str, int, float]


class Service:
    """What a tracking service has stored, and how it behaves.

    Attributes:
        runs: by id, the values in the order in which they came.
        fails: an error that every request raises while it is set.
        gate: requests wait until it is set.
        statuses: by id, how the run was closed.
    """

    def __init__(self) -> None:
        self.runs: dict[str, list[Stored]] = {}
        self.statuses: dict[str, tuple[Status, str | None]] = {}
        self.parameters: dict[str, dict[str, Any]] = {}
        self.fails: Exception | None = None
        self.answers_lost = 0  # so many times the items are stored, and the request fails all the same
        self.lost_at: list[int] = []  # at which requests
        self.requests = 0
        self.gate = threading.Event()
        self.gate.set()
        self.threads: set[int] = set()

    def ask(self) -> None:
        self.requests += 1
        self.threads.add(threading.get_ident())
        self.gate.wait()
        if self.fails is not None:
            raise self.fails

    def numbers(self, run_id: str) -> list[Row]:
        return [(name, at, value) for name, at, value in self.runs[run_id] if value is not None]


class ServiceLogger(RemoteLogger):
    """Sends to a `Service`."""

    backoff: ClassVar[tuple[float, float]] = (0.001, 0.01)

    def __init__(self, service: Service, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.service = service
        self.id = ""

    def open(self, run_id: str, hyperparameters: Mapping[str, Any]) -> None:
        self.service.ask()
        self.id = run_id
        self.service.runs.setdefault(run_id, [])
        self.service.statuses[run_id] = "RUNNING", None
        self.service.parameters[run_id] = dict(hyperparameters)

    def send(self, items: Sequence[Item]) -> None:
        self.service.ask()
        for item in items:
            for name, value in item.values.items():
                self.service.runs[self.id].append((name, item.iteration, value if item.kind == "numbers" else None))
        if self.service.answers_lost:
            self.service.answers_lost -= 1
            self.service.lost_at.append(self.service.requests)
            raise ConnectionError("the answer was lost")

    def stored(self, run_id: str, after: int) -> Iterable[Stored]:
        self.service.ask()
        return [one for one in self.service.runs.get(run_id, []) if one[1] >= after]

    def close_run(self, status: Status, error: str | None) -> None:
        self.service.ask()
        self.service.statuses[self.id] = status, error


def in_memory(kind: type[RemoteLogger], folder: Path, **options: Any) -> RemoteLogger:
    """A logger of this kind that needs no client: in place of its service it has a new one in memory."""
    first = {} if kind is RemoteLogger else {"experiment" if kind is MLflowLogger else "project": "x"}
    with patch.object(kind, "needs", ((), "")):
        logger = kind(**first, folder=folder, run_id="run", **options)  # type: ignore[arg-type]
    fields = SimpleNamespace(service=Service(), id="")
    for name in ("open", "send", "stored", "confirmed", "close_run"):
        setattr(logger, name, partial(getattr(ServiceLogger, name), fields))
    return logger


def rows_of_csv(path: Path) -> list[Row]:
    """What a `CSVLogger` has written: names, iterations and values."""
    with open(path, newline="") as file:
        return [(row["name"], int(row["iteration"]), float(row["value"])) for row in csv.DictReader(file)]


def trainer(*handlers: Any, folder: Path | None = None) -> Engine:
    """An engine with a metric in every second iteration and some that come twice in an iteration; with a `CSVLogger` if it has
    a folder."""
    engine = build(linear(5, 1), *handlers)
    if folder is not None:
        engine.attach(CSVLogger(folder / "log.csv", every="1it"))

    def measure(engine: Engine) -> None:
        engine.log("even", torch.tensor(0.1) * engine.state.iteration)

    engine.connect(Events.ITERATION_COMPLETED(every=2), measure)
    engine.connect(Events.EPOCH_COMPLETED, measure)
    return engine


def go_back_once(engine: Engine, at: int, to: int) -> None:
    """Put the run back once, from the end of one iteration to that of an earlier one."""
    states: list[Any] = []

    def take(engine: Engine) -> None:
        if not states:
            states.append(engine.state_dict())

    def restore(engine: Engine) -> None:
        if len(states) == 1:
            states.append(None)
            engine.snapshots.restore(states[0])

    engine.connect(Events.ITERATION_COMPLETED(once=to), take, phase=Phase.PERSIST)
    engine.connect(Events.ITERATION_COMPLETED(once=at), restore)


def first_send(logger: RemoteLogger, *, of: int = 1) -> threading.Event:
    """Set once a logger has sent something of an iteration, or of a later one."""
    sent, send = threading.Event(), logger.send

    def note(items: Sequence[Item]) -> None:
        send(items)
        if any(item.iteration >= of for item in items):
            sent.set()

    logger.send = note  # type: ignore[method-assign]
    return sent


PROGRAM = """
import importlib, os, random, signal, sys, threading, time, traceback
from pathlib import Path
from signalfire import Events
from signalfire.handlers import Checkpoint, MLflowLogger, TrackioLogger, WandbLogger
from tests.kit import LIMIT, batches
from tests.remote import trainer

kind, folder = sys.argv[1], Path(sys.argv[2])
importlib.import_module(kind)
for life in map(int, sys.argv[3:]):
    child = os.fork()  # from a process that has imported everything, and done nothing else
    if not child:
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("life of", life, "ended with", status, flush=True)
    if status != (-signal.SIGKILL if life else 0):
        sys.exit(1)
else:
    sys.exit()
logger = {
    "mlflow": lambda: MLflowLogger("x", folder, uri=f"sqlite:///{folder}/mlflow.db", every="1it"),
    "wandb": lambda: WandbLogger("x", folder, mode="offline", every="1it"),
    "trackio": lambda: TrackioLogger("x", folder, every="1it"),
}[kind]()
opened, opening = threading.Event(), logger.open

def note(*given):
    try:
        opening(*given)
    except Exception:
        traceback.print_exc()  # else only the last of several would be reported
        raise
    opened.set()

logger.open = note
engine = trainer(logger, Checkpoint(folder / "saved", every="4it", keep=1, resume=True, sync_files=False), folder=folder)
made = 0

def die():
    time.sleep(random.uniform(0, 0.04))
    os.kill(os.getpid(), signal.SIGKILL)

def live(engine):
    global made
    made += 1
    if made == 1 and not opened.wait(LIMIT):
        raise TimeoutError("the remote run was not opened in time")
    if made == life:
        threading.Thread(target=die).start()
    if made == life + 4 and life:
        threading.Event().wait()  # for the end, however late it comes on a busy machine
    time.sleep(0.02)

engine.connect(Events.ITERATION_COMPLETED, live)
engine.run(batches(6), max_epochs=12)
print("remote run", logger.remote_id, flush=True)
"""
"""Trains in one process after another, each from the last checkpoint if there is one: it kills itself soon after so many
iterations unless they are 0."""


def killed_and_resumed(kind: str, folder: Path, lives: Sequence[int]) -> str:
    """Kill a training soon after so many iterations, again and again, and let it end; returns the id of the remote run."""
    environment = {
        **os.environ,
        "TRACKIO_DIR": str(folder / "trackio"),
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }
    # Into a file: a service process that outlives the one that was killed holds its pipes open.
    with open(folder / "output", "w") as output:
        ended = finished(
            "-c", PROGRAM, kind, folder, *lives, 0, cwd=folder, env=environment, stdout=output, stderr=output
        )
    written = (folder / "output").read_text()
    assert ended.returncode == 0, written
    (run_id,) = re.findall(r"^remote run (.*)$", written, re.MULTILINE)
    return str(run_id)
