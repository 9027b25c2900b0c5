"""What a checkpoint costs: for how long training is blocked, and how long a load takes, beside plain torch.save and torch.load.

    python tests/benchmarks/checkpoint.py [--rounds 7] [--folder /tmp] [--megabytes 100]

All variants take turns in each round, so that what else the machine does hits them alike, each beginning with what was written
before synced. Times are medians over the rounds with the quartiles; the ratios are those of each round to the reference of the
same round. Blocked is the time that the receivers of the phase PERSIST take; of the asynchronous variant the first save, which
allocates the memory of the copy, is listed separately. "On disk" is when the version is in place.

Beside it: how long an iteration takes while a thread writes, to one while nothing is written, in one run of a plain loop in which
a thread calls torch.save, and in one of the engine.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import figures
import torch
from torch import nn

from signalfire import Engine, Events, Phase, Update
from signalfire.handlers import Checkpoint

Variant = Callable[[], tuple[float, float]]
"""Gives the seconds for which the caller is blocked, and those until the disk has it."""


def plain(model: nn.Module, path: Path, *, sync: bool = True) -> Variant:
    def save() -> tuple[float, float]:
        began = time.perf_counter()
        with open(path, "wb") as file:
            torch.save(model.state_dict(), file)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        seconds = time.perf_counter() - began
        return seconds, seconds if sync else float("nan")

    return save


def load(read: Callable[[], object]) -> Variant:
    def timed() -> tuple[float, float]:
        began = time.perf_counter()
        read()
        return time.perf_counter() - began, float("nan")

    return timed


class Run:
    """A run in a thread, which makes one iteration, and one save, when it is asked to."""

    def __init__(self, model: nn.ParameterList, folder: Path, *, asynchronous: bool) -> None:
        self.folder = folder
        self.batches: queue.Queue[int | None] = queue.Queue()
        self.saved = threading.Event()
        self.times: list[float] = []
        update = Update.from_function(
            lambda engine, batch: model[0].sum(),
            partial(torch.optim.SGD, lr=1e-6),
            parameters=lambda engine: [model[0]],
        )
        self.engine = Engine(update, model=model)
        self.engine.attach(Checkpoint(folder, every="1it", keep=1, asynchronous=asynchronous))
        for rank in (-100, 100):
            note = partial(Run.note, self)
            self.engine.connect(Events.ITERATION_COMPLETED, note, phase=Phase.PERSIST, rank=rank)
        self.thread = threading.Thread(
            target=self.engine.run, args=(self.data(),), kwargs={"max_epochs": 1}, daemon=True
        )
        self.thread.start()

    def data(self) -> Iterator[int]:
        yield from iter(self.batches.get, None)

    def note(self, engine: Engine) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) == 2:
            self.saved.set()

    def save(self) -> tuple[float, float]:
        self.times.clear()
        self.saved.clear()
        before = set(os.listdir(self.folder)) if self.folder.exists() else set()
        self.batches.put(1)
        self.saved.wait()
        while not any(name[0] != "." for name in set(os.listdir(self.folder)) - before):
            time.sleep(0.0005)
        return self.times[1] - self.times[0], time.perf_counter() - self.times[0]

    def end(self) -> None:
        self.batches.put(None)
        self.thread.join()


WRITER = "signalfire checkpoint"
"""The name of the thread that writes."""


class Beside:
    """The times of iterations beside a write, and of those without one. A save is due in every 20th iteration.

    The model has three layers, with Adam's two moments and a gradient beside each.
    """

    def __init__(self, megabytes: int) -> None:
        torch.manual_seed(0)
        width = int((megabytes * 1e6 / 4 / 4 / 3) ** 0.5)
        self.model = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
        )
        self.batch = torch.randn(64, width), torch.randn(64, width)
        self.times: dict[bool, list[float]] = {False: [], True: []}
        self.began = 0.0, False

    def begin(self, *_: object) -> None:
        self.began = time.perf_counter(), self.writes()

    def end(self, iteration: int) -> None:
        seconds = time.perf_counter() - self.began[0]
        if self.began[1] == self.writes() and iteration > 20:
            self.times[self.began[1]].append(seconds)

    def writes(self) -> bool:
        return any(thread.name == WRITER for thread in threading.enumerate())

    def ratio(self) -> float:
        return statistics.median(self.times[True]) / statistics.median(self.times[False])


def beside_ours(folder: Path, megabytes: int) -> float:
    """The time of an iteration beside a write of `Checkpoint(asynchronous=True)`, to one without."""
    timed = Beside(megabytes)
    update = Update.supervised(nn.functional.mse_loss, partial(torch.optim.Adam, lr=1e-4))
    engine = Engine(update, model=timed.model, seed=0)
    engine.attach(Checkpoint(folder, every="20it", keep=1, asynchronous=True))
    engine.connect(Events.ITERATION_STARTED, timed.begin, phase=Phase.PREPARE)
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: timed.end(engine.state.iteration), phase=Phase.PREPARE)
    engine.run([timed.batch] * 400, max_epochs=1)
    return timed.ratio()


def beside_plain(folder: Path, megabytes: int) -> float:
    """The same in a plain loop, which copies its tensors and lets a thread write them with torch.save and fsync."""
    timed = Beside(megabytes)
    optimizer = torch.optim.Adam(timed.model.parameters(), lr=1e-4)
    inputs, targets = timed.batch
    for iteration in range(1, 401):
        timed.begin()
        optimizer.zero_grad()
        nn.functional.mse_loss(timed.model(inputs), targets).backward()
        optimizer.step()
        timed.end(iteration)
        if iteration % 20 == 0:
            held = [
                value.clone()
                for state in (timed.model.state_dict(), *optimizer.state_dict()["state"].values())
                for value in state.values()
            ]
            threading.Thread(target=write, args=(held, folder / "plain.pt"), name=WRITER).start()
    return timed.ratio()


def write(tensors: list[torch.Tensor], path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def spread(values: list[float], unit: float) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle * unit:7.2f} [{low * unit:.2f}, {high * unit:.2f}]"


def report(title: str, rounds: list[dict[str, tuple[float, float]]], reference: str) -> None:
    print(f"{title:32}{'ms [quartiles]':28}{'times ' + reference:28}on disk, ms")
    for name in rounds[0]:
        ratios = [one[name][0] / one[reference][0] for one in rounds]
        durable = [one[name][1] for one in rounds]
        until = spread(durable, 1000) if durable[0] == durable[0] else "      -"
        print(f"{name:32}{spread([one[name][0] for one in rounds], 1000):28}{spread(ratios, 1):28}{until}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--megabytes", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = nn.ParameterList(torch.randn(250_000) for _ in range(arguments.megabytes))
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    runs = {
        "Checkpoint": Run(model, folder / "synchronous", asynchronous=False),
        "Checkpoint(asynchronous=True)": Run(model, folder / "asynchronous", asynchronous=True),
    }
    saves = {"torch.save, fsync": plain(model, folder / "plain.pt")} | {name: run.save for name, run in runs.items()}
    loads = {
        "torch.load": load(lambda: torch.load(folder / "plain.pt", weights_only=True)),
        "Checkpoint.load": load(lambda: Checkpoint.load(folder / "synchronous")),
    }

    def turn(variants: dict[str, Variant]) -> dict[str, tuple[float, float]]:
        found = {}
        for name, variant in variants.items():
            os.sync()
            found[name] = variant()
        return found

    try:
        first = turn(saves)
        written = [turn(saves) for _ in range(arguments.rounds)]
        for run in runs.values():
            run.end()
        turn(loads)
        read = [turn(loads) for _ in range(arguments.rounds)]
        report(f"saving {arguments.megabytes} MB", written, "torch.save, fsync")
        print(f"{'the first asynchronous save':32}{first['Checkpoint(asynchronous=True)'][0] * 1000:7.2f}")
        report(f"loading {arguments.megabytes} MB", read, "torch.load")
        print("an iteration beside a write, times one without")
        beside = folder / "beside"
        beside.mkdir()
        for name, ratio in (
            ("  torch.save in a thread", beside_plain),
            ("  Checkpoint(asynchronous=True)", beside_ours),
        ):
            print(f"{name:32}{spread([ratio(beside, arguments.megabytes) for _ in range(3)], 1)}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    figures.run(main)
