"""What each handler costs an iteration, beside the same engine without it.

    python tests/benchmarks/costs.py [--rounds 20] [--only EMA]

Two models are trained, in one thread: a perceptron of 64-256-10 with 32 samples a batch, and the convolutional network of
examples/main.py with 100. An engine and a plain loop take turns, iteration by iteration. The ratio of their times, with the
handler and without it, gives what it adds; printed are medians over rounds of 100 iterations. "Calls more" counts the calls of
Python and C functions that the handler adds to an iteration of the perceptron, on average over 200 iterations.
"""

from __future__ import annotations

import argparse
import statistics
import sys
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
from watching import ROUND, SGD, Batch, rounds, with_nothing

from signalfire import Engine, Update
from signalfire.handlers import (
    EMA,
    L1,
    SWA,
    Accuracy,
    ActivationStatistics,
    AdaptiveGradientClipping,
    AutoClip,
    Average,
    Checkpoint,
    CSVLogger,
    CutMix,
    Cutout,
    Deterministic,
    DeviceStatistics,
    DeviceTransfer,
    Distillation,
    EarlyStopping,
    Freezing,
    GarbageCollection,
    GradientAccumulation,
    GradientCentralization,
    GradientClipping,
    GradientNoise,
    GradientNorms,
    Guards,
    Histograms,
    History,
    JSONLinesLogger,
    LabelSmoothing,
    Lookahead,
    LRScheduling,
    Metrics,
    MicroBatching,
    MixedPrecision,
    MixUp,
    NonFiniteGuard,
    OptimizerStatistics,
    ParameterScheduling,
    ParameterStatistics,
    Preemption,
    Profiler,
    ProgressBar,
    Pruning,
    RandomErasing,
    Rewindable,
    SharpnessAwareMinimization,
    SpikeGuard,
    TensorBoardLogger,
    Throughput,
)

COUNTED = 200  # iterations whose calls are counted


def mlp() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), processes.mlp()), (torch.randn(32, 1, 64), torch.randint(10, (32,)))


def cnn() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return nn.Sequential(*list(processes.cnn().children())[1:]), (torch.randn(100, 1, 40), torch.randint(10, (100,)))


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100_000)


def handlers(folder: str, make: Callable[[], tuple[nn.Module, Batch]]) -> dict[str, Callable[[], Any]]:
    """What is measured, by the text of its call."""
    first = next(name for name, _ in make()[0].named_parameters()).removesuffix(".weight")
    return {
        "ActivationStatistics()": ActivationStatistics,
        "AdaptiveGradientClipping()": AdaptiveGradientClipping,
        "AutoClip()": AutoClip,
        "Checkpoint(folder, every='1000it')": lambda: Checkpoint(f"{folder}/saved", every="1000it"),
        "CSVLogger(path)": lambda: CSVLogger(f"{folder}/log.csv"),
        "CutMix()": CutMix,
        "Cutout(8)": lambda: Cutout(8),
        "Deterministic()": Deterministic,
        "DeviceStatistics()": DeviceStatistics,
        "DeviceTransfer('cpu')": lambda: DeviceTransfer("cpu"),
        "Distillation(teacher)": lambda: Distillation(make()[0]),
        "EarlyStopping('loss')": lambda: [Metrics(loss=Average()), EarlyStopping("loss")],
        "EMA()": EMA,
        "Freezing(part)": lambda: Freezing(first),
        "GarbageCollection()": GarbageCollection,
        "GradientAccumulation(4)": lambda: GradientAccumulation(4),
        "GradientCentralization()": GradientCentralization,
        "GradientClipping(1.0)": lambda: GradientClipping(1.0),
        "GradientNoise()": GradientNoise,
        "GradientNorms()": GradientNorms,
        "Guards()": Guards,
        "Histograms()": Histograms,
        "History()": History,
        "JSONLinesLogger(path)": lambda: JSONLinesLogger(f"{folder}/log.jsonl"),
        "L1(1e-4)": lambda: L1(1e-4),
        "LabelSmoothing()": LabelSmoothing,
        "Lookahead()": Lookahead,
        "LRScheduling(cosine)": lambda: LRScheduling(schedule, every="1step"),
        "Metrics(loss=Average())": lambda: Metrics(loss=Average()),
        "Metrics(accuracy=Accuracy())": lambda: Metrics(accuracy=Accuracy()),
        "MicroBatching(pieces=2)": lambda: MicroBatching(pieces=2),
        "MixedPrecision()": MixedPrecision,
        "MixUp()": MixUp,
        "NonFiniteGuard()": NonFiniteGuard,
        "OptimizerStatistics()": OptimizerStatistics,
        "ParameterScheduling('weight_decay', function)": lambda: ParameterScheduling("weight_decay", lambda step: 0.01),
        "ParameterStatistics()": ParameterStatistics,
        "Preemption()": Preemption,
        "Profiler(file=file)": lambda: Profiler(file=open(f"{folder}/profile", "w")),
        "ProgressBar(file=file)": lambda: ProgressBar(file=open(f"{folder}/bar", "w")),
        "Pruning(0.5)": lambda: Pruning(0.5),
        "RandomErasing()": RandomErasing,
        "Rewindable()": Rewindable,
        "SharpnessAwareMinimization()": SharpnessAwareMinimization,
        "SpikeGuard()": SpikeGuard,
        "SWA(2)": lambda: SWA(2),
        "TensorBoardLogger(folder)": lambda: TensorBoardLogger(f"{folder}/board"),
        "Throughput()": Throughput,
    }


def attach(make: Callable[[], Any], engine: Engine) -> None:
    made = make()
    engine.attach(*made) if isinstance(made, list) else engine.attach(made)


class Counted:
    """Data in whose iterations, but the first ten, calls are counted."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.calls = batch, 0

    def __len__(self) -> int:
        return 10 + COUNTED

    def __iter__(self) -> Iterator[Batch]:
        for number in range(10 + COUNTED):
            if number == 10:
                sys.setprofile(self.count)
            yield self.batch
        sys.setprofile(None)

    def count(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event in ("call", "c_call")


def calls(make: Callable[[], Any] | None) -> float:
    """The calls of Python and C functions in an iteration of the perceptron."""
    model, batch = mlp()
    engine = Engine(Update.supervised(F.cross_entropy, SGD), model=model, seed=0)
    if make is not None:
        attach(make, engine)
    data = Counted(batch)
    engine.run(data, max_epochs=1)
    return data.calls / COUNTED


def us_of(make: Callable[[], tuple[nn.Module, Any]]) -> float:
    """The microseconds of a step of the plain loop."""
    model, (x, y) = make()
    optimizer = SGD(model.parameters())
    took = []
    for _ in range(3 * ROUND):
        begun = time.perf_counter()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        took.append(time.perf_counter() - begun)
    return statistics.median(took) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what each handler costs an iteration.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="the handlers whose names contain this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    steps = {make: us_of(make) for make in (mlp, cnn)}
    bare = {make: statistics.median(one for one, _ in rounds(make, arguments.rounds, with_nothing)) for make in steps}
    none = calls(None)
    print(f"a step of the plain loop: {steps[mlp]:.0f} us (perceptron), {steps[cnn]:.0f} us (network)\n")
    print(f"{'':<47}{'calls more':>10}{'perceptron: us more':>21}{'network: us more':>18}{'of its step':>13}")
    with tempfile.TemporaryDirectory() as folder:
        for name in handlers(folder, mlp):
            if arguments.only not in name:
                continue
            more = []
            for make, step in steps.items():
                one = handlers(f"{folder}/{make.__name__}", make)[name]
                with_it = [ratio for ratio, _ in rounds(make, arguments.rounds, partial(attach, one))]
                more.append((statistics.median(with_it) - bare[make]) * step)
            counted = calls(handlers(f"{folder}/counted", mlp)[name]) - none
            print(
                f"{name:<47}{counted:>10.1f}{more[0]:>21.1f}{more[1]:>18.0f}{more[1] / steps[cnn]:>12.1%}",
                flush=True,
            )


if __name__ == "__main__":
    figures.run(main)
