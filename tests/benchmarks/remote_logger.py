"""What a remote logger costs the training thread: the time in which a row of 50 values is put into the queue, and a checkpoint
of a run whose service does not answer."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import figures
import torch

from signalfire import Engine, Events, Phase, Update
from signalfire.handlers import RemoteLogger
from signalfire.handlers.remote_logger import Item


class Hanging(RemoteLogger):
    """A service that takes everything, or does not answer."""

    answers = threading.Event()

    def open(self, run_id: str, hyperparameters: Mapping[str, Any]) -> None:
        self.answers.wait()

    def send(self, items: Sequence[Item]) -> None:
        self.answers.wait()


class Timed(Hanging):
    """Notes how long each row takes; the base class's `record` alone is measured, beside the whole receiver."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.seconds: list[float] = []
        self.kept: list[float] = []

    def record(self, record: Any) -> None:
        begin = time.perf_counter()
        super().record(record)
        self.seconds.append(time.perf_counter() - begin)


def measure(iterations: int, values: int, *, answers: bool, capacity: int) -> tuple[list[float], list[float]]:
    """Microseconds for each row, and for all that an iteration's logging takes."""
    Timed.answers = threading.Event()
    if answers:
        Timed.answers.set()
    model = torch.nn.Linear(2, 1)
    update = Update.supervised(torch.nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1))
    with tempfile.TemporaryDirectory() as folder:
        logger = Timed(Path(folder), every="1it", capacity=capacity, timeout=0.0 if not answers else 30.0)
        engine = Engine(update, model=model, seed=0)
        engine.attach(logger)
        begun: list[float] = []
        took: list[float] = []

        def log(engine: Engine) -> None:
            for i in range(values):
                engine.log(f"value{i}", float(i))

        engine.connect(Events.ITERATION_COMPLETED, log)
        engine.connect(
            Events.ITERATION_COMPLETED, lambda engine: begun.append(time.perf_counter()), phase=Phase.RECORD, rank=-10
        )
        engine.connect(
            Events.ITERATION_COMPLETED,
            lambda engine: took.append(time.perf_counter() - begun[-1]),
            phase=Phase.RECORD,
            rank=10,
        )
        engine.run([(torch.ones(4, 2), torch.ones(4, 1))], max_iters=iterations)
    return [1e6 * one for one in logger.seconds], [1e6 * one for one in took]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=5000)
    parser.add_argument("--values", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for what, answers, capacity in (
        ("the service answers", True, 1000),
        ("it hangs, rows in memory", False, 10**9),
        ("it hangs, rows in the file", False, 1),
    ):
        rows, iterations = measure(options.iterations, options.values, answers=answers, capacity=capacity)
        numbers = [
            statistics.median(rows),
            statistics.fmean(rows),
            statistics.median(iterations),
            statistics.fmean(iterations),
        ]
        row, iteration = "us a row {:6.1f} (mean {:6.1f})", "us an iteration with its numbers {:6.1f} (mean {:6.1f})"
        print(f"{what:26}", row.format(*numbers[:2]), iteration.format(*numbers[2:]))


if __name__ == "__main__":
    figures.run(main)
