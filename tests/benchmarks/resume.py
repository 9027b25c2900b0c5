"""What one resume in the middle of a large epoch costs: indices skipped, beside reading the batches again.

    python tests/benchmarks/resume.py [--samples 1000000] [--microseconds 20]

A shuffled DataLoader over a map-style dataset whose every sample takes some microseconds to fetch stands in the middle of its
epoch. Measured is the time from the start of the resumed run to its first batch, in three ways: skipping, as the engine does;
reading again, as a loop does that calls ``next`` for each batch that was taken; and beginning at the first batch, which is what
neither can undercut. Ratios within one run: the machine's speed cancels out.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import figures
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from signalfire import Engine, Events, RereadingWarning, Update

BATCH = 100


class Slow(Dataset[tuple[Tensor, Tensor]]):
    """Samples that take some time to fetch, as decoding a picture does."""

    def __init__(self, samples: int, microseconds: float) -> None:
        self.samples = samples
        self.seconds = microseconds / 1e6
        self.sample = (torch.ones(4), torch.ones(1))

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        until = time.perf_counter() + self.seconds
        while time.perf_counter() < until:
            pass
        return self.sample


class Plain:
    """The same loader, of which the engine does not know that indices can be skipped."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def build() -> Engine:
    torch.manual_seed(0)
    update = Update.supervised(nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1))
    return Engine(update, model=nn.Linear(4, 1), seed=0)


def seconds_to_the_first_batch(data: Callable[[], Any], state: dict[str, Any] | None) -> float:
    engine = build()
    if state is not None:
        engine.load_state_dict(state)
    came: list[float] = []
    engine.connect(
        Events.GET_BATCH_COMPLETED(once=engine_iteration(state) + 1), lambda engine: came.append(time.perf_counter())
    )
    loader = data()
    begun = time.perf_counter()
    engine.run(loader, max_iters=engine_iteration(state) + 1)
    return came[0] - begun


def engine_iteration(state: dict[str, Any] | None) -> int:
    return 0 if state is None else int(state["engine"]["iteration"])


def state_in_the_middle(data: Callable[[], Any], taken: int) -> dict[str, Any]:
    """What a run saves that has taken so many batches, without making it take them: its first one, moved on."""
    engine = build()
    engine.run(data(), max_iters=1)
    state = engine.state_dict()
    state["engine"]["iteration"] = taken
    return state


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a resume in the middle of a large epoch costs.")
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--microseconds", type=float, default=20.0, help="that a sample takes to be fetched")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    def loader() -> DataLoader[Any]:
        return DataLoader(Slow(arguments.samples, arguments.microseconds), BATCH, shuffle=True)

    taken = arguments.samples // BATCH // 2
    state = state_in_the_middle(loader, taken)
    again = state_in_the_middle(lambda: Plain(loader()), taken)
    rows: dict[str, Callable[[], float]] = {
        "beginning anew": lambda: seconds_to_the_first_batch(loader, None),
        "indices skipped": lambda: seconds_to_the_first_batch(loader, state),
        "batches read again": lambda: seconds_to_the_first_batch(lambda: Plain(loader()), again),
    }
    print(f"{arguments.samples:,} samples of {arguments.microseconds:g} us, {taken:,} batches of {BATCH} taken")
    warnings.simplefilter("ignore", RereadingWarning)
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(arguments.rounds):
        for name, measure in rows.items():
            times[name].append(measure())
    best = {name: min(found) for name, found in times.items()}
    for name, found in best.items():
        print(f"{name:<20}{found:>10.3f} s   {found / best['batches read again']:>8.2%} of reading again")


if __name__ == "__main__":
    figures.run(main)
