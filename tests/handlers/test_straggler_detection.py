"""Stragglers in real processes: who is named, for what, how often, and at what cost.

The ranks have clocks of their own, which the work in the tests moves, and waiting for others: however busy the machine is, they
measure the same. A campaign measures undisturbed runs by the real clocks.
"""

from __future__ import annotations

import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from signalfire import Engine, Events, Handler, Phase
from signalfire.distributed import expected_processes, process_group
from signalfire.distributed import group as group_of_ranks
from signalfire.distributed import processes as collectives
from signalfire.handlers import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    StragglerDetection,
    straggler_detection,
)
from signalfire.handlers.straggler_detection import Times, find_stragglers
from tests import kit
from tests.kit import quick
from tests.processes import run_together

USUAL = 0.001
DELAY = 0.02
TIMEOUT = 60.0
Slow = Callable[[int], bool]
"""Whether the rank under test is slow in an iteration."""


class Clocks:
    """The clocks of a rank: work moves them, and who waits for the others in a collective comes to the time of the last of them.

    Attributes:
        wall: seconds that have passed.
        cpu: seconds of the processor, which do not pass while this rank sleeps or waits.
    """

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0
        self.ranks: Any = None

    def sleep(self, seconds: float) -> None:
        self.wall += seconds

    def burn(self, seconds: float) -> None:
        self.wall += seconds
        self.cpu += seconds

    def meet(self, *arguments: Any) -> None:
        """Wait for the last rank."""
        last = torch.tensor(self.wall, dtype=torch.float64)
        dist.all_reduce(last, op=dist.ReduceOp.MAX, group=self.ranks)
        self.wall = last.item()

    def install(self) -> None:
        """Have the package read these clocks in this process, which is forked, and whose collectives of its own move them."""
        process_group(timeout=TIMEOUT)
        self.ranks = dist.new_group(backend="gloo")
        for module in (straggler_detection, collectives):
            module.perf_counter = lambda: self.wall  # type: ignore[attr-defined]
        straggler_detection.thread_time = lambda: self.cpu  # type: ignore[attr-defined]
        collectives.dist = _Collectives(self)  # type: ignore[attr-defined]
        clocks = {"perf_counter": lambda: self.wall, "thread_time": lambda: self.cpu, "monotonic": time.monotonic}
        group_of_ranks.time = SimpleNamespace(**clocks)  # type: ignore[attr-defined]


class _Collectives:
    """The functions of `torch.distributed`, of which those that wait for the other ranks move the clocks."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks

    def __getattr__(self, name: str) -> Any:
        function = getattr(dist, name)
        if name not in ("all_gather", "all_reduce", "barrier", "broadcast"):
            return function

        def called(*arguments: Any, async_op: bool = False, **options: Any) -> Any:
            if not async_op:
                self.clocks.meet()
            return function(*arguments, async_op=async_op, **options)

        return called


CLOCKS = Clocks()


def on_rank(rank: int, slow: Slow) -> Slow:
    own = expected_processes().rank == rank
    return lambda iteration: own and slow(iteration)


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Samples in the order of their indices, of which those of a slow iteration take a while."""

    def __init__(self, iterations: int, slow: Slow) -> None:
        self.size = 4
        self.iterations = iterations
        self.slow = slow
        self.values = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.iterations * self.size * expected_processes().world_size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        iteration, place = divmod(index, self.size * expected_processes().world_size)
        if place % self.size == 0:
            CLOCKS.sleep(DELAY if self.slow(iteration + 1) else USUAL)
        sample = self.values[index % 64]
        return sample[:5], sample[5:]

    def loader(self) -> DataLoader[Any]:
        return DataLoader(self, batch_size=self.size)


class Stream:
    """Data of each rank's own, of a length that nobody knows: the ranks agree on its end batch by batch."""

    def __init__(self, iterations: int, slow: Slow) -> None:
        self.samples = Samples(iterations, slow)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        samples, rank = self.samples, expected_processes().rank
        for first in range(0, samples.iterations * samples.size, samples.size):
            CLOCKS.sleep(DELAY if samples.slow(first // samples.size + 1) else USUAL)
            values = samples.values[[(first + 17 * rank + place) % 64 for place in range(samples.size)]]
            yield values[:, :5], values[:, 5:]


PLACES: dict[str, tuple[Any, Callable[[float], None]]] = {
    "forward": (Events.FORWARD_COMPLETED, CLOCKS.burn),
    "backward": (Events.BACKWARD_COMPLETED, CLOCKS.burn),
    "handlers": (Events.ITERATION_COMPLETED, CLOCKS.sleep),
}


def build(*handlers: Handler, distributing: Handler | None = None) -> Engine:
    engine = kit.build(kit.mlp(5, 8, 1, nn.Tanh()), optimizer=partial(torch.optim.SGD, lr=0.01))
    engine.attach(distributing or DistributedDataParallel(timeout=TIMEOUT), *handlers)
    return engine


def told(engine: Engine, data: Any, **bounds: Any) -> list[str]:
    """The warnings of a run."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        engine.run(data, **{"max_epochs": 1} | bounds)
    return [str(one.message) for one in seen]


def working(engine: Engine, seconds: Callable[[str, int], float], sharded: bool = False) -> None:
    """Let each part but the data take so many seconds in each iteration, and the ranks wait for each other where they do."""
    for part, (event, work) in PLACES.items():
        engine.connect(event, lambda engine, part=part, work=work: work(seconds(part, engine.state.iteration)))
    # The ranks meet in the forward of a sharded model, in the backward, and in a collective at the end of each iteration.
    if sharded:
        engine.model.register_forward_pre_hook(CLOCKS.meet)
    next(engine.model.parameters()).register_hook(CLOCKS.meet)
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: engine.processes.barrier(), phase=Phase.PERSIST)


def watched(part: str, kind: str, every: int, slow_windows: int) -> tuple[list[str], list[float], list[dict[int, str]]]:
    """Rank 1 is slow in so many windows of ``every`` iterations; there is one before, and there are three after them."""
    CLOCKS.install()
    end = every * (slow_windows + 1)
    slow = on_rank(1, lambda iteration: every <= iteration < end)
    in_data: Slow = slow if part == "data" else lambda iteration: False
    handler = StragglerDetection(every=f"{every}it")
    own = DistributedDataParallel(timeout=TIMEOUT, shard_policy="own")
    sharded = FullyShardedDataParallel(timeout=TIMEOUT)
    engine = build(handler, distributing={"own": own, "sharded": sharded}.get(kind))
    working(engine, lambda of, iteration: DELAY if of == part and slow(iteration) else USUAL, kind == "sharded")
    found: list[dict[int, str]] = []
    compared = Events.ITERATION_COMPLETED(every=every)
    engine.connect(compared, lambda engine: found.append(dict(handler.stragglers)), phase=Phase.RECORD)
    seen = kit.new_metrics(engine)
    data: Any = Stream(end + 3 * every, in_data) if kind == "own" else Samples(end + 3 * every, in_data).loader()
    return told(engine, data), [values["straggler_ratio"] for _, values in seen], found


SCENARIOS = [
    ("data", "auto", 10, 2),
    ("data", "auto", 10, 1),
    ("data", "own", 10, 1),
    ("data", "sharded", 10, 1),
    ("forward", "auto", 10, 1),
    ("backward", "auto", 10, 1),
    ("handlers", "own", 10, 1),
]


@pytest.mark.moderate
@pytest.mark.parametrize(("part", "kind", "every", "slow_windows"), quick(SCENARIOS, SCENARIOS[0]))
def test_a_slow_rank_is_named_once_with_its_part_and_once_when_it_is_back_to_normal(
    part: str, kind: str, every: int, slow_windows: int
) -> None:
    (messages, ratios, found), *others = run_together(watched, 3, part, kind, every, slow_windows)
    slow, normal = messages
    assert f"iteration {2 * every}: rank 1 is a straggler" in slow
    assert f"The slow part is {part} (" in slow
    assert found == [{}, *[{1: part}] * slow_windows, {}, {}, {}]
    assert f"iteration {(slow_windows + 2) * every}: rank 1 is back to normal" in normal
    # Each of the four parts takes the usual time, but for the one that is slow.
    slow_ratio = (3 * USUAL + DELAY) / (4 * USUAL)
    assert ratios == pytest.approx([1, *[slow_ratio] * slow_windows, 1, 1, 1])
    for other in others:
        assert other == ([], ratios, found)


def stalled() -> list[str]:
    """What is said of ranks that others on a busy machine hold up: rank 1 in most iterations, and the others in some."""
    CLOCKS.install()
    rank = expected_processes().rank
    draws = random.Random(rank)

    def seconds(part: str, iteration: int) -> float:
        return draws.uniform(0.9, 1.1) * USUAL + (DELAY if draws.random() < (0.6 if rank == 1 else 0.2) else 0.0)

    engine = build(StragglerDetection())
    working(engine, seconds)
    return told(engine, Samples(300, lambda iteration: draws.random() < 0.2).loader())


@pytest.mark.slow
def test_nobody_is_named_whom_a_busy_machine_holds_up_in_some_iterations() -> None:
    assert run_together(stalled, 3) == [[]] * 3


def undisturbed(runs: int, iterations: int) -> list[list[str]]:
    return [
        told(build(StragglerDetection()), Samples(iterations, lambda iteration: False).loader()) for _ in range(runs)
    ]


@pytest.mark.campaign
@pytest.mark.parametrize(("runs", "iterations"), [(3, 400), (10, 1000)])
def test_nobody_is_named_in_undisturbed_runs(runs: int, iterations: int) -> None:
    for found in run_together(undisturbed, 3, runs, iterations):
        assert found == [[]] * runs


def calls_of(*handlers: Handler) -> float:
    """Python calls of an iteration, without the first and the last ones."""
    engine, counts = build(*handlers), [0]
    begin, end = 10, 100

    def count(frame: Any, event: str, argument: Any) -> None:
        counts[0] += event == "call"

    engine.connect(Events.ITERATION_COMPLETED(once=begin), lambda engine: sys.setprofile(count))
    engine.connect(Events.ITERATION_COMPLETED(once=end), lambda engine: sys.setprofile(None))
    engine.run(list(kit.batches(400)), max_epochs=1)
    return counts[0] / (end - begin)


def more_calls() -> float:
    return calls_of(StragglerDetection(every="190it")) - calls_of()


@pytest.mark.slow
def test_between_two_comparisons_an_iteration_makes_three_calls_more() -> None:
    assert run_together(more_calls, 2) == [pytest.approx(3, abs=0.05)] * 2


def ends_of_two() -> list[str]:
    engines = [build(), build(StragglerDetection(every="9it"))]
    for engine in engines:
        engine.run(Samples(40, lambda iteration: False).loader(), max_epochs=1)
    assert "straggler_ratio" in engines[1].state.metrics
    assert not engines[1].state_dict()["engine"]["metrics"]["values"], (
        "a speed is no part of what a resumed run repeats"
    )
    return [kit.digest(engine.modules["model"].state_dict()) for engine in engines]


@pytest.mark.slow
def test_the_weights_are_those_of_a_run_without_it() -> None:
    for with_it, without in run_together(ends_of_two, 2):
        assert with_it == without


def test_in_a_single_process_no_iteration_calls_it_and_no_metric_is_announced() -> None:
    engine = build(StragglerDetection())
    engine.run(kit.batches(3), max_epochs=1)
    assert not [
        one
        for event in Events
        if event not in (Events.STARTED, Events.ENDED)
        for one in engine.signal(event).connections
        if one.owner == "straggler_detection"
    ]
    assert not list(engine.handlers["straggler_detection"].metric_names(engine))


def rank(data: float, forward: float, quick_forward: float | None = None) -> dict[str, Times]:
    """Of a rank, in milliseconds: the medians, and the lower quartile of the forward if it is another."""
    low = forward if quick_forward is None else quick_forward
    return {"data": Times(data * 1e-3, data * 1e-3), "forward": Times(forward * 1e-3, low * 1e-3)}


@pytest.mark.parametrize(
    ("ranks", "before", "expected"),
    [
        ([rank(1, 10), rank(1, 10.5), rank(1, 12.1)], {}, {}),  # 1.14 times the median
        ([rank(1, 10), rank(1, 10), rank(1, 13)], {}, {2: "forward"}),
        ([rank(1, 10), rank(1, 10), rank(1, 20, 11)], {}, {}),  # as fast as the others in some iterations
        ([rank(1, 10), rank(1, 10), rank(1, 20, 13)], {}, {2: "forward"}),
        ([rank(4, 10), rank(1, 10), rank(1, 10)], {}, {0: "data"}),
        ([rank(0.1, 0.2), rank(0.1, 0.2), rank(1, 0.2)], {}, {}),  # four times the median, and less than 1 ms more
        ([rank(0.1, 0.2), rank(0.1, 0.2), rank(1.2, 0.2)], {}, {2: "data"}),
        ([rank(1, 10), rank(1, 10), rank(1, 12)], {2: "data"}, {2: "data"}),  # near the threshold it stays what it was
        ([rank(1, 10), rank(1, 10), rank(1, 20, 9)], {2: "data"}, {2: "data"}),
        ([rank(1, 10), rank(1, 10), rank(1, 11)], {2: "data"}, {}),
        ([rank(1, 10), rank(9, 10)], {}, {1: "data"}),  # of two ranks, the median is between them
        ([rank(1, 10), rank(1, 20), rank(9, 10), rank(1, 10), rank(1, 10)], {}, {1: "forward", 2: "data"}),
        ([rank(0, 0), rank(0, 0)], {}, {}),  # nothing was measured
    ],
)
def test_a_straggler_is_far_above_the_median_in_ratio_in_time_and_most_of_the_time(
    ranks: list[dict[str, Times]], before: dict[int, str], expected: dict[int, str]
) -> None:
    assert find_stragglers(ranks, 1.2, before) == expected


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"every": "1ep"}, "every='1ep'"),
        ({"every": "4it"}, "every='4it'"),
        ({"threshold": 1}, "threshold=1"),
        ({"threshold": "much"}, "threshold='much'"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"StragglerDetection\({message}"):
        StragglerDetection(**wrong)
