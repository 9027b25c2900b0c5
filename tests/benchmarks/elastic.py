"""What a step of eight shards costs, beside plain loops.

    python tests/benchmarks/elastic.py [--epochs 30]

One process is compared with a plain loop that makes the same step: seeds by shard, eight backwards, a tree, one step of the
optimizer. Two and four are compared with torch's DDP that accumulates the gradients of 8 / W batches with ``no_sync``. The two
take turns, epoch by epoch, in the same processes. Printed are medians over the epochs of the ratios of CPU and of wall time, in
rank 0, with the quartiles. Where there are more processes than cores, wall times say little.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import figures
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from signalfire import Engine, Events, Update
from signalfire.distributed import process_group
from signalfire.distributed.shards import shard_seed
from signalfire.handlers import ElasticDataParallel

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.processes import run_together  # noqa: E402

SHARDS, SAMPLES, WARM_UP = 8, 32, 2
ADAM = partial(torch.optim.AdamW, lr=1e-3)
Batch = tuple[Tensor, Tensor]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))


def cnn() -> nn.Module:
    convolutions = [nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2)]
    return nn.Sequential(*convolutions, nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 12 * 12, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "MLP": (mlp, (64,), 30),  # the model, the shape of a sample, and the steps of an epoch
    "CNN": (cnn, (1, 28, 28), 4),
}


def batches(shape: tuple[int, ...], count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(SAMPLES, *shape, generator=generator), torch.randint(0, 10, (SAMPLES,), generator=generator))
        for _ in range(count)
    ]


def plain_shards(model: nn.Module, data: list[Batch]) -> Callable[[], None]:
    """An epoch of the plain loop over the shards."""
    parameters, buffers = list(model.parameters()), list(model.buffers())
    optimizer, step = ADAM(parameters), 0

    def epoch() -> None:
        nonlocal step
        for start in range(0, len(data), SHARDS):
            step, before = step + 1, [buffer.clone() for buffer in buffers]
            after, sums = before, list[tuple[int, list[Tensor]]]()
            for shard, (x, y) in enumerate(data[start : start + SHARDS]):
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)
                seed = shard_seed(0, step, shard)
                torch.default_generator.manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed & 0xFFFFFFFF)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                after = [buffer.clone() for buffer in buffers] if shard == 0 else after
                leaf, height = [p.grad for p in parameters if p.grad is not None], 0
                while sums and sums[-1][0] == height:
                    left = sums.pop()[1]
                    torch._foreach_add_(left, leaf)
                    leaf, height = left, height + 1
                sums.append((height, leaf))
            for buffer, value in zip(buffers, after, strict=True):
                buffer.copy_(value)
            torch._foreach_div_(sums[0][1], SHARDS)
            for parameter, gradient in zip(parameters, sums[0][1], strict=True):
                parameter.grad = gradient
            optimizer.step()
            optimizer.zero_grad()

    return epoch


def plain_ddp(model: nn.Module, data: list[Batch], rank: int, size: int) -> Callable[[], None]:
    """An epoch of torch's DDP, which accumulates the gradients of this rank's share of the batches of a step."""
    wrapped, optimizer, each = TorchDDP(model), ADAM(model.parameters()), SHARDS // size

    def epoch() -> None:
        for start in range(rank * each, len(data), SHARDS):
            own = data[start : start + each]
            for place, (x, y) in enumerate(own, 1):
                with nullcontext() if place == each else wrapped.no_sync():
                    (F.cross_entropy(wrapped(x), y) / each).backward()
            optimizer.step()
            optimizer.zero_grad()

    return epoch


def measured(name: str, epochs: int) -> list[tuple[float, float]]:
    """The ratios of CPU and wall time of each epoch."""
    warnings.simplefilter("ignore")
    make, shape, steps = MODELS[name]
    data, processes = batches(shape, steps * SHARDS), process_group()
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    distributed = processes.distributed
    plain = (
        plain_ddp(models[0], data, processes.rank, processes.world_size)
        if distributed
        else plain_shards(models[0], data)
    )
    engine = Engine(Update.supervised(F.cross_entropy, ADAM), model=models[1], seed=0)
    engine.attach(ElasticDataParallel(shards=SHARDS))
    begun: list[Any] = [0.0, 0.0]
    ratios: list[tuple[float, float]] = []

    def begin(engine: Engine) -> None:
        begun[:] = time.process_time(), time.perf_counter()

    def compare(engine: Engine) -> None:
        own = time.process_time() - begun[0], time.perf_counter() - begun[1]
        begin(engine)
        plain()
        ratios.append((own[0] / (time.process_time() - begun[0]), own[1] / (time.perf_counter() - begun[1])))

    engine.connect(Events.EPOCH_STARTED, begin, rank=10**6)
    engine.connect(Events.EPOCH_COMPLETED, compare, rank=-(10**6))
    engine.run(data, max_epochs=epochs + WARM_UP, check=False)
    return ratios[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    epochs = parser.parse_args().epochs
    torch.set_num_threads(1)
    print(f"{'':4} {'processes':>9}   {'CPU [quartiles]':>22}   {'wall [quartiles]':>22}")
    for name in MODELS:
        for size in (1, 2, 4):
            ratios = measured(name, epochs) if size == 1 else run_together(measured, size, name, epochs, timeout=600)[0]
            shown = [
                f"{statistics.median(one):.3f} [{quartiles[0]:.3f}, {quartiles[2]:.3f}]"
                for one in zip(*ratios, strict=True)
                for quartiles in [statistics.quantiles(one)]
            ]
            print(f"{name:4} {size:9}   {shown[0]:>22}   {shown[1]:>22}")


if __name__ == "__main__":
    figures.run(main)
