"""What the loop costs: an empty step with 0, 1 and 10 handlers, a tiny supervised step, and the import, beside the bare loop.

    python tests/benchmarks/loop.py [--rounds 200]

Each loop is compared with a bare one. Empty loops take turns in many short rounds. The tiny step alternates with that of a
plain PyTorch loop, inside one run: the data makes a plain step before it gives a batch, so that other load hits both alike,
and the difference of two loops that are the same comes out as none. Times are medians, with the quartiles as the spread.
Beside them stands the number of Python and C calls that an iteration makes, counted under cProfile, which no noise moves:
`tests/test_calls.py` holds it fast.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import os
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import figures
import torch
import torch.nn.functional as F
from torch import nn

from signalfire import Engine, Events, Handler, Update, on
from signalfire.handlers import Guards

EMPTY_ITERATIONS, TINY_PAIRS, GUARDED_ITERATIONS, IMPORTS = 20_000, 50, 1_000, 15
Variant = Callable[[int], Any]


class Count:
    """Sized data that costs next to nothing: the numbers below n."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


class Idle(Handler):
    """A handler that is called in every iteration and does nothing."""

    @on(Events.ITERATION_COMPLETED)
    def act(self, engine: Engine) -> None:
        pass


class Rare(Handler):
    """A handler that listens everywhere in the loop, under filters that do not pass."""

    @on(
        Events.ITERATION_COMPLETED(every=10**6)
        | Events.ITERATION_STARTED(every=10**6)
        | Events.OPTIMIZER_STEP_COMPLETED(every=10**6)
    )
    def act(self, engine: Engine) -> None:
        pass


def nothing(engine: Any, batch: Any) -> None:
    """The empty step."""


def bare_empty(iterations: int) -> None:
    for batch in Count(iterations):
        nothing(None, batch)


def empty(handlers: int) -> Variant:
    engine = Engine(Update.from_function(nothing))
    engine.attach(*(Idle(name=f"idle{i}") for i in range(handlers)))
    return lambda iterations: engine.run(Count(iterations))


def tiny_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(32, 32)


def tiny_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(16, 32, generator=generator), torch.randn(16, 32, generator=generator)


def bare_step() -> Callable[[torch.Tensor, torch.Tensor], None]:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def bare_tiny() -> Variant:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = tiny_batch()

    def run(iterations: int) -> nn.Module:
        for x, y in [batch] * iterations:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    return run


def tiny(handlers: int) -> Variant:
    return tiny_with(*(Rare(name=f"rare{i}") for i in range(handlers)))


def tiny_with(*handlers: Handler) -> Variant:
    model = tiny_model()
    engine = Engine(Update.supervised(F.mse_loss, partial(torch.optim.SGD, lr=1e-3)), model=model)
    engine.attach(*handlers)
    batch = tiny_batch()

    def run(iterations: int) -> nn.Module:
        engine.run([batch] * iterations, max_iters=engine.state.iteration + iterations)
        return model

    return run


def calls(variant: Variant, iterations: int = 200) -> float:
    """Python and C calls an iteration, without what a run costs once."""

    def total(iterations: int) -> int:
        profile = cProfile.Profile()
        profile.runcall(variant, iterations)
        return pstats.Stats(profile).total_calls  # type: ignore[attr-defined, no-any-return]

    variant(10)  # what is worked out once
    return (total(2 * iterations) - total(iterations)) / iterations


def measure(variants: dict[str, Variant], iterations: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds an iteration for every round, the variants taking turns."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for variant in variants.values():
        variant(iterations // 10)
    for _ in range(rounds):
        for name, variant in variants.items():
            gc.collect()
            began = time.perf_counter()
            variant(iterations)
            times[name].append((time.perf_counter() - began) / iterations * 1e6)
    return times


class Turns:
    """Data that makes a step of a plain PyTorch loop before it gives a batch, and times it and what is done with the batch.

    Attributes:
        plain_loop, there: the microseconds of each.
    """

    def __init__(self, pairs: int) -> None:
        self.pairs = pairs
        self.plain_loop: list[float] = []
        self.there: list[float] = []

    def __len__(self) -> int:
        return self.pairs

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        step, batch = bare_step(), tiny_batch()
        clock, plain_loop, there = time.perf_counter, self.plain_loop, self.there
        for _ in range(self.pairs):
            began = clock()
            step(*batch)
            between = clock()
            yield batch
            ended = clock()
            plain_loop.append((between - began) * 1e6)
            there.append((ended - between) * 1e6)


def turns(pairs: int, handlers: int | None) -> Turns:
    """The tiny step in a plain loop and, by turns, in an engine with so many idle handlers; for None, in a plain loop again."""
    data = Turns(pairs)
    if handlers is None:
        step = bare_step()
        for x, y in data:
            step(x, y)
        return data
    engine = Engine(Update.supervised(F.mse_loss, partial(torch.optim.SGD, lr=1e-3)), model=tiny_model())
    engine.attach(*(Rare(name=f"rare{i}") for i in range(handlers)))
    engine.run(data, max_epochs=1)
    return data


def guarded_ratio(rounds: int) -> float:
    """The time of tiny steps with `Guards`, its looks included, over that without it, in runs that take turns."""
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(16, 32, generator=generator), torch.randn(16, 32, generator=generator)) for _ in range(50)]
    engines = [
        Engine(Update.supervised(F.mse_loss, partial(torch.optim.SGD, lr=1e-3)), model=tiny_model()) for _ in range(2)
    ]
    engines[1].attach(Guards())
    times: list[list[float]] = [[], []]
    for number in range(1, rounds + 1):
        for engine, taken in zip(engines, times, strict=True):
            gc.collect()
            began = time.perf_counter()
            engine.run(data, max_iters=number * GUARDED_ITERATIONS)
            taken.append(time.perf_counter() - began)
    plain, guarded = (statistics.median(taken[1:]) for taken in times)
    return guarded / plain


def seconds_to_import() -> float:
    """After torch, in a new process, with what Python compiled before: it keeps that, also where the environment forbids it."""
    code = "import time, torch; began = time.perf_counter(); import signalfire; print(time.perf_counter() - began)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout)


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:9.3f}  [{low:.3f}, {high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)

    variants: dict[str, Variant] = {"bare empty loop": bare_empty}
    variants |= {f"empty step, {n} handlers": empty(n) for n in (0, 1, 10)}
    times = measure(variants, EMPTY_ITERATIONS, rounds)
    print(f"{'':32}{'us an iteration  [quartiles]':36}{'calls':>7}")
    for name, variant in variants.items():
        print(f"{name:32}{spread(times[name]):36}{calls(variant):7.1f}")
    paired = list(zip(*times.values(), strict=True))
    over = [(none - bare) * 1000 for bare, none, _, _ in paired]
    each = statistics.median((ten - one) / 9 for _, _, one, ten in paired)
    low, middle, high = statistics.quantiles(over, n=4)
    print(f"over the bare loop, no handler: {middle:.0f} ns [{low:.0f}, {high:.0f}]")
    print(f"each further handler on one event: {each * 1000:.0f} ns\n")

    steps: dict[str, tuple[int | None, Variant]] = {
        "tiny step, plain loop again": (None, bare_tiny()),
        "tiny step, 0 handlers": (0, tiny(0)),
        "tiny step, 10 that do not fire": (10, tiny(10)),
    }
    found: dict[str, list[Turns]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, (handlers, _) in steps.items():
            gc.collect()
            found[name].append(turns(TINY_PAIRS, handlers))
    for name, (_, variant) in steps.items():
        there = [one for part in found[name] for one in part.there]
        plain_loop = [one for part in found[name] for one in part.plain_loop]
        ratio = statistics.median(there) / statistics.median(plain_loop)
        print(f"{name:32}{spread(there):36}{calls(variant):7.1f}")
        print(f"{'':32}{spread(plain_loop)} plain loop in between: {ratio:.4f} times that")

    print(f"tiny step with Guards(): {guarded_ratio(max(3, rounds // 5)):.4f} times that without it")
    seconds_to_import()  # what is compiled once
    over = [seconds_to_import() for _ in range(IMPORTS)]
    print(f"\nimporting signalfire, over importing torch:{spread(over)} s")


if __name__ == "__main__":
    figures.run(main)
