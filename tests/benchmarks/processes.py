"""What an iteration costs with several processes, beside a plain loop with torch's DDP or FSDP2.

    python tests/benchmarks/processes.py [--sizes 2,4] [--rounds 60] [--latency 10] [--device cuda]

Both loops run in the same processes and take turns, iteration by iteration: the plain one makes one before the engine gets its
next batch. Measured are the CPU time of a process, its threads included, and the wall time; what is printed is the median of the
ratios over epochs of 100 iterations, in rank 0.
With ``--latency`` each collective takes so many milliseconds at least, as over a slow network; not of FSDP2. Where there are more
processes than cores, wall times say little. With ``--device cuda`` each process has a GPU, and NCCL reduces the gradients.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import figures
import slow_network
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.lr_scheduler import StepLR

from signalfire import Engine, Handler, Update
from signalfire.distributed import process_group
from signalfire.handlers import (
    EMA,
    Accuracy,
    Checkpoint,
    DistributedDataParallel,
    EarlyStopping,
    FullyShardedDataParallel,
    GradientAccumulation,
    GradientClipping,
    LRScheduling,
    Metrics,
    Validation,
)

Batch = tuple[Tensor, Tensor]
Loop = Callable[[], Iterator[None]]
"""An endless plain loop, one iteration at a time."""
SGD = partial(torch.optim.SGD, lr=0.01)
SPLIT = partial(DistributedDataParallel, shard_policy="own")  # each rank has its own batches
SAMPLES, EPOCH, WARM_UP = 32, 100, 2


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def cnn() -> nn.Module:
    """The convolutional network of examples/main.py."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 40)),
        nn.Conv1d(1, 25, 5, stride=2, padding=1), nn.ReLU(),
        nn.Conv1d(25, 25, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv1d(25, 25, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(125, 10),
    )  # fmt: skip


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return nn.Sequential(nn.Unflatten(1, (-1, 64)), layers, nn.Flatten(), nn.Linear(16 * 64, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "MLP": (mlp, 64),
    "CNN": (cnn, 40),
    "transformer": (transformer, 1024),
}


def device() -> torch.device:
    """That of this process; with several GPUs, the current one."""
    return torch.device(os.environ.get("SIGNALFIRE_DEVICE", "cpu"))


def seeded(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().to(device())


def batches(name: str, count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    width = MODELS[name][1]
    drawn = [(torch.randn(SAMPLES, width, generator=generator), torch.randint(0, 10, (SAMPLES,), generator=generator))
             for _ in range(count)]  # fmt: skip
    return [(x.to(device()), y.to(device())) for x, y in drawn]


# ---- the loops -------------------------------------------------------------------------------------------------------


def plain(name: str, wrap: Callable[[nn.Module], nn.Module], size: int, *, accumulate: int = 1) -> Iterator[None]:
    model = wrap(seeded(name))
    optimizer = SGD(model.parameters())
    own = batches(name, EPOCH * size)[dist.get_rank() :: size]
    while True:
        for place, (x, y) in enumerate(own, 1):
            closes = place % accumulate == 0
            if accumulate > 1:
                model.require_backward_grad_sync = closes  # type: ignore[assignment]
            loss = F.cross_entropy(model(x), y)
            (loss if accumulate == 1 else loss / accumulate).backward()
            if closes:
                optimizer.step()
                optimizer.zero_grad()
            yield


def plain_stack(name: str, size: int, folder: Path) -> Iterator[None]:
    """EMA, clipping, a schedule, validation at the end of each epoch, patience, and a checkpoint."""
    model = TorchDDP(seeded(name))
    optimizer = SGD(model.parameters())
    schedule = StepLR(optimizer, 1000)
    own, held_out = (
        batches(name, EPOCH * size)[dist.get_rank() :: size],
        batches(name, 4 * size)[dist.get_rank() :: size],
    )
    average = [p.detach().clone() for p in model.parameters()]
    best, waited = 0.0, 0
    while True:
        for place, (x, y) in enumerate(own, 1):
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            with torch.no_grad():
                torch._foreach_lerp_(average, list(model.parameters()), 0.01)
            if place == len(own):
                right = torch.zeros(2)
                model.eval()
                with torch.no_grad():
                    for x, y in held_out:
                        right += torch.tensor([(model.module(x).argmax(1) == y).sum(), len(y)])
                model.train()
                dist.all_reduce(right)
                accuracy = float(right[0] / right[1])
                best, waited = (accuracy, 0) if accuracy > best else (best, waited + 1)
                if dist.get_rank() == 0:
                    state = {
                        "model": model.module.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "average": average,
                    }
                    with (folder / "plain.pt").open("wb") as file:
                        torch.save(state, file)
                        file.flush()
                        os.fsync(file.fileno())
            yield


def composed(name: str, *handlers: Callable[[], Handler]) -> Engine:
    engine = Engine(Update.supervised(F.cross_entropy, SGD), model=seeded(name), seed=0)
    engine.attach(*(make() for make in handlers))
    return engine


def with_stack(name: str, size: int, folder: Path) -> Engine:
    engine = composed(name, SPLIT)
    evaluator = Engine(Update.supervised(F.cross_entropy), model=engine.modules["model"])
    evaluator.attach(Metrics(accuracy=Accuracy()))
    engine.attach(
        EMA(0.99, evaluate=False),
        GradientClipping(1.0),
        LRScheduling(partial(StepLR, step_size=1000)),
        Validation(evaluator, batches(name, 4 * size)),
        EarlyStopping("accuracy", patience=10**6),
        Checkpoint(folder / "engine", keep=1),
    )
    return engine


def cases(size: int, folder: Path) -> dict[str, tuple[str, Callable[[], Iterator[None]], Callable[[], Engine]]]:
    """By name: the model, the plain loop and the engine that does the same."""

    def sharded(model: nn.Module) -> nn.Module:
        for layer in model[1].layers:  # type: ignore[index]
            fully_shard(layer)
        fully_shard(model)
        return model

    found: dict[str, tuple[str, Callable[[], Iterator[None]], Callable[[], Engine]]] = {
        name: (name, partial(plain, name, TorchDDP, size), partial(composed, name, SPLIT)) for name in ("MLP", "CNN")
    }
    found["MLP, accumulation of 4"] = (
        "MLP",
        partial(plain, "MLP", TorchDDP, size, accumulate=4),
        partial(composed, "MLP", SPLIT, partial(GradientAccumulation, 4)),
    )
    found["CNN, the usual handlers"] = (
        "CNN",
        partial(plain_stack, "CNN", size, folder),
        partial(with_stack, "CNN", size, folder),
    )
    found["transformer, FSDP2"] = (
        "transformer",
        partial(plain, "transformer", sharded, size),
        partial(
            composed,
            "transformer",
            partial(FullyShardedDataParallel, units=nn.TransformerEncoderLayer, shard_policy="own"),
        ),
    )
    return found


# ---- measuring -------------------------------------------------------------------------------------------------------


def clocks() -> tuple[float, float]:
    if device().type != "cpu":
        torch.accelerator.synchronize()
    return time.process_time(), time.perf_counter()


def since(begun: tuple[float, float]) -> tuple[float, float]:
    cpu, wall = clocks()
    return cpu - begun[0], wall - begun[1]


class Turns:
    """The data of this rank. Before each batch the plain loop makes an iteration; the rest of the time is the engine's."""

    def __init__(self, loop: Iterator[None], batches: list[Batch]) -> None:
        self.loop, self.batches = loop, batches
        self.begun: tuple[float, float] | None = None  # the engine's part
        self.spent = [(0.0, 0.0), (0.0, 0.0)]  # by the engine and by the plain loop, of an epoch
        self.epochs: list[list[tuple[float, float]]] = []

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        for place, batch in enumerate(self.batches):
            if self.begun is not None:
                self._add(0, since(self.begun))
            if place == 0 and self.begun is not None:  # what the end of an epoch costs has been added to it
                self.epochs.append(self.spent)
                self.spent = [(0.0, 0.0), (0.0, 0.0)]
            begun = clocks()
            next(self.loop)
            self._add(1, since(begun))
            self.begun = clocks()
            yield batch

    def _add(self, which: int, took: tuple[float, float]) -> None:
        cpu, wall = self.spent[which]
        self.spent[which] = cpu + took[0], wall + took[1]


def turns(
    loop: Iterator[None], build: Callable[[], Engine], name: str, size: int, rounds: int
) -> list[tuple[float, float, float]]:
    """The ratios of CPU and wall time of the engine's epochs to the plain loop's, and the CPU seconds of the latter."""
    data = Turns(loop, batches(name, EPOCH * size)[dist.get_rank() :: size])
    build().run(data, max_epochs=WARM_UP + rounds + 1)
    found = data.epochs[WARM_UP:]
    return [(cpu / of_plain, wall / wall_of_plain, of_plain) for (cpu, wall), (of_plain, wall_of_plain) in found]


def work(rank: int, size: int, port: int, rounds: int, only: str, latency: float, folder: Path, results: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # fmt: skip
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if latency:
        slow_network.use(latency / 1000)
    on_cpu = os.environ["SIGNALFIRE_DEVICE"] == "cpu"
    process_group(backend="slow" if latency else "gloo" if on_cpu else None, timeout=300.0)
    for case, (name, loop, build) in cases(size, folder).items():
        if only not in case or (latency and "FSDP2" in case):
            continue
        # A turn of the transformer is long enough for few to do.
        found = turns(loop(), build, name, size, rounds // 6 if name == "transformer" else rounds)
        if rank == 0:
            cpu, wall, of_plain_loop = map(statistics.median, zip(*found, strict=True))
            results.put((case, cpu, wall, of_plain_loop / EPOCH * 1e6))
    dist.barrier()
    results.put(None)


def free_port() -> int:
    with closing(socket.socket()) as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what an iteration costs with several processes.")
    parser.add_argument("--sizes", default="2,4", help="numbers of processes")
    parser.add_argument("--rounds", type=int, default=60, help="turns; of the transformer a sixth")
    parser.add_argument(
        "--latency", type=float, default=0, help="milliseconds that a collective takes at least; not of FSDP2"
    )
    parser.add_argument("--device", default="cpu", help="cpu, or cuda with as many GPUs as processes")
    parser.add_argument("--only", default="", help="the cases whose names contain this")
    arguments = parser.parse_args()
    os.environ["SIGNALFIRE_DEVICE"] = arguments.device
    context = multiprocessing.get_context("spawn")
    print(f"{'':<28}{'ranks':>6}{'CPU':>8}{'wall':>8}{'plain, us of CPU':>20}")
    for size in map(int, arguments.sizes.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            results, port = context.Queue(), free_port()
            given = (
                size,
                port,
                arguments.rounds,
                arguments.only,
                arguments.latency,
                Path(folder),
                results,
            )
            ranks = [context.Process(target=work, args=(rank, *given)) for rank in range(size)]
            for one in ranks:
                one.start()
            ended = 0
            while ended < size:
                try:
                    found = results.get(timeout=1)
                except queue.Empty:
                    if any(one.exitcode for one in ranks):
                        raise SystemExit("a rank has failed") from None
                    continue
                if found is None:
                    ended += 1
                    continue
                case, cpu, wall, of_plain_loop = found
                print(f"{case:<28}{size:>6}{cpu:>8.2f}{wall:>8.2f}{of_plain_loop:>20.0f}", flush=True)
            for one in ranks:
                one.join()


if __name__ == "__main__":
    figures.run(main)
