"""What compilation, activation checkpointing and channels-last buy on this machine: bytes kept for the backward, time of a step.

    python tests/benchmarks/modes.py [--steps 20] [--rounds 3] [--only Compile]

Each row is a run of an engine with one more handler beside the run without it, in turns; times are medians of the rounds, in
milliseconds of one thread's processor time a step, after the first steps, which compile. The first step is in seconds that pass.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import figures
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Handler, Update
from signalfire.handlers import ActivationCheckpointing, ChannelsLast, Compile

Batch = tuple[Tensor, Tensor]
Made = tuple[nn.Module, Batch]


def mlp() -> Made:
    """Eight blocks, each four times as wide inside."""
    blocks = (nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(8))
    return nn.Sequential(*blocks), (torch.randn(256, 128), torch.randn(256, 128))


def transformer() -> Made:
    layers = [nn.TransformerEncoderLayer(64, 4, 256, 0.1, batch_first=True, norm_first=True) for _ in range(4)]
    return nn.Sequential(*layers), (torch.randn(16, 64, 64), torch.randn(16, 64, 64))


def block() -> Made:
    """One block of a transformer, without dropout."""
    layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True, norm_first=True)
    return nn.Sequential(layer), (torch.randn(16, 64, 64), torch.randn(16, 64, 64))


def sequence() -> Made:
    """A small convolutional network over time."""
    model = nn.Sequential(
        nn.Conv1d(4, 32, 5, padding=2), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 32, 5, padding=2), nn.BatchNorm1d(32),
        nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 1),
    )  # fmt: skip
    return model, (torch.randn(32, 4, 256), torch.randn(32, 1))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.layers(x)
        return result


def residual() -> Made:
    """Like a small ResNet."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), *(Residual(32) for _ in range(4)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 1)
    )  # fmt: skip
    return model, (torch.randn(16, 3, 32, 32), torch.randn(16, 1))


def built(make: Callable[[], Made], *handlers: Handler) -> tuple[Engine, Batch]:
    torch.manual_seed(0)
    model, batch = make()
    engine = Engine(Update.supervised(nn.functional.mse_loss, partial(torch.optim.SGD, lr=1e-3)), model=model, seed=0)
    engine.attach(*handlers)
    return engine, batch


def kept_bytes(make: Callable[[], Made], *handlers: Handler) -> int:
    """What the forward of a step keeps for the backward: each storage once, without weights."""
    engine, batch = built(make, *handlers)
    weights = {p.untyped_storage().data_ptr() for p in engine.modules["model"].parameters()}
    sizes: dict[int, int] = {}
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    engine.connect(Events.FORWARD_STARTED, lambda engine: engine.regions.enter(hooks(pack, lambda tensor: tensor)))
    engine.run([batch], max_epochs=1)
    return sum(sizes.values())


def endless(batch: Batch) -> Iterator[Batch]:
    while True:
        yield batch


def times(make: Callable[[], Made], make_handler: Callable[[], Handler], steps: int, rounds: int) -> list[float]:
    """Milliseconds of a step, without the handler and with it, in turns; and seconds of the first step with it."""
    found: list[list[float]] = [[], []]
    first = 0.0
    for _ in range(rounds):
        for place, handlers in enumerate(([], [make_handler()])):
            engine, batch = built(make, *handlers)
            stamps: list[float] = []
            engine.connect(Events.ITERATION_COMPLETED, lambda engine, stamps=stamps: stamps.append(time.process_time()))
            passed: list[float] = [time.perf_counter()]
            engine.connect(
                Events.ITERATION_COMPLETED(once=1), lambda engine, passed=passed: passed.append(time.perf_counter())
            )
            engine.run(endless(batch), max_iters=steps + 3, epoch_length=steps + 3)
            first = max(first, passed[1] - passed[0]) if place else first
            found[place].append(1e3 * statistics.median(b - a for a, b in pairwise(stamps[2:])))
    return [*map(statistics.median, found), first]


ROWS: list[tuple[str, Callable[[], Made], Callable[[], Handler]]] = [
    ("ActivationCheckpointing, MLP of 8 blocks", mlp, lambda: ActivationCheckpointing("?")),
    ("ActivationCheckpointing(every=2), MLP", mlp, lambda: ActivationCheckpointing(every=2)),
    ("the same, linear products kept", mlp, lambda: ActivationCheckpointing("?", keep_operations=["addmm"])),
    ("ActivationCheckpointing, transformer of 4", transformer, lambda: ActivationCheckpointing("?")),
    ("Compile, CNN over time", sequence, Compile),
    ("Compile, block of a transformer", block, Compile),
    ("Compile, MLP of 8 blocks", mlp, Compile),
    ("ChannelsLast, like a ResNet", residual, ChannelsLast),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="a part of the names of rows")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':44} {'ms a step':>10} {'with it':>9} {'ratio':>6} {'1st step, s':>12} {'MB kept':>8} {'with it':>8}")
    for name, make, handler in (row for row in ROWS if given.only in row[0]):
        before, after, first = times(make, handler, given.steps, given.rounds)
        bytes_ = ["", ""]
        if "Activation" in name:  # what keep_operations keeps, no hook sees
            bytes_ = [f"{kept / 1e6:.2f}" for kept in (kept_bytes(make), kept_bytes(make, handler()))]
        print(
            f"{name:44} {before:10.2f} {after:9.2f} {after / before:6.2f} {first:12.1f} {bytes_[0]:>8} {bytes_[1]:>8}"
        )


if __name__ == "__main__":
    figures.run(main)
