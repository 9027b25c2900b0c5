"""What watching a run costs an iteration: SpikeGuard, and TensorBoard with 50 values, beside the same engine without them.

    python tests/benchmarks/watching.py [--rounds 60]

An engine, a plain PyTorch loop, and one that also reads the loss and the norm of the gradients take turns, iteration by iteration
in one thread. The last one does what a guard on these two values has to do, with torch's own functions alone. A round has
100 iterations; printed are the medians of the ratios over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import figures
import processes
import torch
import torch.nn.functional as F
from torch import nn

from signalfire import Engine, Events, Handler, Update
from signalfire.handlers import SpikeGuard, TensorBoardLogger

ROUND = 100  # iterations
SGD = partial(torch.optim.SGD, lr=0.01)
Batch = tuple[torch.Tensor, torch.Tensor]


def tiny() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return nn.Linear(10, 10), (torch.randn(32, 10), torch.randint(10, (32,)))


def cnn() -> tuple[nn.Module, Batch]:
    """The convolutional network of examples/main.py."""
    torch.manual_seed(0)
    return processes.cnn(), (torch.randn(100, 40), torch.randint(10, (100,)))


def plain(make: Callable[[], tuple[nn.Module, Batch]], *, reads: bool) -> Iterator[None]:
    """A plain loop, one iteration at a time; it may read the loss and the norm of the gradients."""
    model, (x, y) = make()
    parameters = list(model.parameters())
    optimizer = SGD(parameters)
    while True:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if reads:
            norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            torch.stack([loss.detach(), norm]).tolist()
        optimizer.step()
        optimizer.zero_grad()
        yield


class Turns:
    """Data that lets other loops make an iteration before each of its batches, and notes how long all of them take."""

    def __init__(self, batch: Batch, *others: Iterator[None]) -> None:
        self.batch, self.others = batch, others
        self.seconds: list[list[float]] = []  # of each iteration: the reader's, and those of the others

    def __len__(self) -> int:
        return 10**9

    def __iter__(self) -> Iterator[Batch]:
        while True:
            took = []
            for other in self.others:
                begun = time.perf_counter()
                next(other)
                took.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            yield self.batch
            self.seconds.append([time.perf_counter() - begun, *took])


def rounds(
    make: Callable[[], tuple[nn.Module, Batch]], count: int, attach: Callable[[Engine], object]
) -> list[list[float]]:
    """For each round, the time of an engine's iterations, and of those of the loop that reads, over the plain loop's."""
    model, batch = make()
    turns = Turns(batch, plain(make, reads=False), plain(make, reads=True))
    engine = Engine(Update.supervised(F.cross_entropy, SGD), model=model, seed=0)
    attach(engine)
    engine.run(turns, max_iters=ROUND * (count + 2))
    found = []
    for first in range(2 * ROUND, ROUND * (count + 2), ROUND):  # the first two warm up
        mine, bare, reading = (sum(column) for column in zip(*turns.seconds[first : first + ROUND], strict=False))
        found.append([mine / bare, reading / bare])
    return found


def with_nothing(engine: Engine) -> None:
    """The engine alone."""


def with_guard(policy: Any, engine: Engine) -> None:
    engine.attach(SpikeGuard(policy))


def log_50(engine: Engine) -> None:
    for number in range(50):
        engine.log(f"value{number}", float(number))


def with_values(engine: Engine, *handlers: Handler) -> None:
    engine.connect(Events.ITERATION_COMPLETED, log_50)
    engine.attach(*handlers)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what watching a run costs.")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", default="", help="the cases whose names contain this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        board = partial(TensorBoardLogger, folder, every="10it")
        cases: list[tuple[str, Any, Callable[[Engine], object], Callable[[Engine], object]]] = [
            (f"SpikeGuard, {policy}, {name}", make, with_nothing, partial(with_guard, policy))
            for name, make in (("tiny", tiny), ("CNN", cnn))
            for policy in ("skip", "rewind")
        ]
        cases.append(("TensorBoard, 50 values, CNN", cnn, with_values, lambda engine: with_values(engine, board())))
        print(f"{'over a plain loop':<34}{'without':>9}{'with':>9}{'ratio':>9}{'plain loop that reads':>24}")
        for name, make, without, attach in cases:
            if arguments.only not in name:
                continue
            before = [one for one, _ in rounds(make, arguments.rounds, without)]
            after, reading = zip(*rounds(make, arguments.rounds, attach), strict=True)
            a, b, c = map(statistics.median, (before, after, reading))
            print(f"{name:<34}{a:>9.3f}{b:>9.3f}{b / a:>9.3f}{c:>24.3f}", flush=True)


if __name__ == "__main__":
    figures.run(main)
