"""What a checkpoint costs: for how long training is blocked, and how long a load takes, beside plain torch.save and torch.load.

    python tests/benchmarks/checkpoint.py [--rounds 7] [--folder /tmp] [--megabytes 100]

All variants take turns in each round, so that what else the machine does hits them alike, each beginning with what was written
before synced. Times are medians over the rounds with the quartiles; the ratios are those of each round to the reference of the
same round. Blocked is the time that the receivers of the phase PERSIST take; of the asynchronous variant the first save, which
allocates the memory of the copy, is listed separately. "On disk" is when the version is in place.

Beside it: how long an iteration takes while a thread writes, to one while nothing is written, in one run.
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


def beside(folder: Path, megabytes: int) -> float:
    """The time of an iteration beside a write, to one without."""
    torch.manual_seed(0)
    width = int(
        (megabytes * 1e6 / 4 / 4 / 3) ** 0.5
    )  # three layers, with Adam's two moments and a gradient beside each
    model = nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
    )
    update = Update.supervised(nn.functional.mse_loss, partial(torch.optim.Adam, lr=1e-4))
    engine = Engine(update, model=model, seed=0)
    engine.attach(Checkpoint(folder, every="20it", keep=1, asynchronous=True))
    times: dict[bool, list[float]] = {False: [], True: []}
    began = [0.0, False]

    def writes() -> bool:
        return any(thread.name == "signalfire checkpoint" for thread in threading.enumerate())

    def begin(engine: Engine) -> None:
        began[:] = [time.perf_counter(), writes()]

    def end(engine: Engine) -> None:
        seconds = time.perf_counter() - began[0]
        if began[1] == writes() and engine.state.iteration > 20:
            times[writes()].append(seconds)

    engine.connect(Events.ITERATION_STARTED, begin, phase=Phase.PREPARE)
    engine.connect(Events.ITERATION_COMPLETED, end, phase=Phase.PREPARE)
    batch = torch.randn(64, width), torch.randn(64, width)
    engine.run([batch] * 400, max_epochs=1)
    return statistics.median(times[True]) / statistics.median(times[False])


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
        print(
            f"{'an iteration beside a write':32}{beside(folder / 'beside', arguments.megabytes):7.2f} times one without"
        )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
