"""What a checkpoint of 100 MB costs: for how long training is blocked, beside a plain torch.save.

    python tests/benchmarks/checkpoint.py [--rounds 15] [--folder /tmp] [--megabytes 100]

All variants take turns in many rounds, so that what else the machine does hits them alike, each beginning with what was written
before synced. Times are medians over the rounds with the quartiles; the ratios are those of each round to the torch.save of the
same round. Blocked is the time that the receivers of the phase PERSIST take. For the asynchronous one, "on the disk" is when
its thread has ended.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from signalfire import Engine, Events, Phase, Update
from signalfire.handlers import Checkpoint

Variant = Callable[[], tuple[float, float]]
"""Gives the seconds for which training is blocked, and those until the disk has it."""


def plain(model: nn.Module, path: Path, *, sync: bool) -> Variant:
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


def copy(model: nn.Module) -> Variant:
    def save() -> tuple[float, float]:
        began = time.perf_counter()
        kept = [value.clone() for value in model.state_dict().values()]
        seconds = time.perf_counter() - began
        del kept
        return seconds, float("nan")

    return save


def memory(model: nn.Module) -> Variant:
    def save() -> tuple[float, float]:
        began = time.perf_counter()
        torch.save(model.state_dict(), io.BytesIO())
        return time.perf_counter() - began, float("nan")

    return save


def handler(model: nn.Module, folder: Path, *, asynchronous: bool) -> Variant:
    def nothing(engine: Engine, batch: object) -> None:
        return None

    engine = Engine(Update.from_function(nothing, lambda parameters: torch.optim.SGD(parameters, lr=0.1)), model=model)
    engine.attach(Checkpoint(folder, every="1it", keep=1, asynchronous=asynchronous))
    times: list[float] = []
    for rank in (-100, 100):
        engine.connect(
            Events.ITERATION_COMPLETED, lambda engine: times.append(time.perf_counter()), phase=Phase.PERSIST, rank=rank
        )

    def save() -> tuple[float, float]:
        times.clear()
        engine.run(max_iters=engine.state.iteration + 1)
        return times[1] - times[0], time.perf_counter() - times[0]

    return save


def spread(values: list[float], unit: float) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle * unit:7.2f} [{low * unit:.2f}, {high * unit:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--megabytes", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = nn.ParameterList(torch.randn(250_000) for _ in range(arguments.megabytes))
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    variants = {
        "torch.save": plain(model, folder / "plain.pt", sync=False),
        "torch.save, fsync": plain(model, folder / "synced.pt", sync=True),
        "torch.save into memory": memory(model),
        "a copy": copy(model),
        "Checkpoint": handler(model, folder / "synchronous", asynchronous=False),
        "Checkpoint(asynchronous=True)": handler(model, folder / "asynchronous", asynchronous=True),
    }
    blocked: dict[str, list[float]] = {name: [] for name in variants}
    durable: dict[str, list[float]] = {name: [] for name in variants}
    try:
        for number in range(arguments.rounds + 1):
            for name, variant in variants.items():
                os.sync()
                times = variant()
                if number:  # the first round warms up
                    blocked[name].append(times[0])
                    durable[name].append(times[1])
    finally:
        shutil.rmtree(folder)
    print(f"{'':32}{'blocked, ms [quartiles]':28}{'times torch.save':28}on the disk, ms")
    for name in variants:
        ratios = [mine / other for mine, other in zip(blocked[name], blocked["torch.save"], strict=True)]
        until = spread(durable[name], 1000) if durable[name][0] == durable[name][0] else "      -"
        print(f"{name:32}{spread(blocked[name], 1000):28}{spread(ratios, 1):28}{until}")


if __name__ == "__main__":
    main()
