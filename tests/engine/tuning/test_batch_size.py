"""The batch-size finder: which sizes it tries, what it finds where memory is short, and that it leaves no trace."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, Update
from signalfire.handlers import Accuracy, DistributedDataParallel, GradientAccumulation, Metrics, MicroBatching
from signalfire.testing import fingerprint
from signalfire.tuning import BatchSizes, Trial, find_batch_size
from tests import kit
from tests.processes import run_together


def data_set(samples: int = 2000) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(samples, 4, generator=generator), torch.randint(0, 3, (samples,), generator=generator)
    )


def loader_of(samples: int = 2000) -> Callable[[int], DataLoader[Any]]:
    generator = torch.Generator().manual_seed(1)
    return partial(DataLoader, data_set(samples), shuffle=True, generator=generator)


class Limited(nn.Module):
    """A model for which the memory runs out as a GPU's does: from so many samples on, in training or in evaluation."""

    def __init__(self, least: int, *, mode: str = "training", call: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.least = least
        self.of_training = mode == "training"
        self.calls_left = call

    def forward(self, x: Tensor) -> Tensor:
        if self.training is self.of_training and len(x) >= self.least:
            self.calls_left -= 1
            if self.calls_left <= 0:
                raise torch.OutOfMemoryError("out of memory, as the allocator of a GPU says it")
        return self.layer(x)  # type: ignore[no-any-return]


def build(model: nn.Module, *handlers: Any, lr: float = 0.1) -> Engine:
    return kit.build(model, *handlers, loss=F.cross_entropy, optimizer=partial(torch.optim.Adam, lr=lr))


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("options", "found"),
    kit.quick(
        [
            ({"margin": 0.0}, 64),
            ({"margin": 0.0, "mode": "bisect"}, 99),
            ({"margin": 0.05, "mode": "bisect"}, 94),
            ({"margin": 0.05}, 60),
            ({"margin": 0.0, "start": 500}, 62),
            ({"margin": 0.0, "start": 500, "mode": "bisect"}, 99),
            ({"margin": 0.0, "start": 3, "mode": "bisect"}, 99),
        ],
        ({"margin": 0.05, "mode": "bisect"}, 94),
    ),
    ids=str,
)
def test_the_largest_size_that_fits_is_found_and_was_tried(options: dict[str, Any], found: int) -> None:
    sizes = find_batch_size(build(Limited(100)), loader_of(), **options)
    assert sizes.largest == found
    assert {one.size: one.ok for one in sizes.trials} == {one.size: one.size < 100 for one in sizes.trials}
    assert next(one for one in sizes.trials if one.size == found).ok
    assert sizes.limit == ""


@pytest.mark.slow
def test_no_size_is_tried_beyond_the_samples_or_the_maximum() -> None:
    sizes = find_batch_size(build(Limited(10**6)), loader_of(50))
    assert [one.size for one in sizes.trials] == [2, 4, 8, 16, 32, 50]
    assert (sizes.largest, sizes.limit) == (50, "the data has 50 samples")
    sizes = find_batch_size(build(Limited(10**6)), loader_of(), maximum=16)
    assert [one.size for one in sizes.trials] == [2, 4, 8, 16]
    assert (sizes.largest, sizes.limit) == (16, "maximum=16")
    sizes = find_batch_size(build(Limited(10**6)), loader_of(50), start=500)
    assert [one.size for one in sizes.trials] == [50]


@pytest.mark.slow
def test_memory_that_runs_out_in_the_second_step_or_in_the_evaluation_is_noticed() -> None:
    in_second = find_batch_size(build(Limited(100, call=2)), loader_of(), margin=0.0)
    assert in_second.largest == 64
    model = Limited(40, mode="evaluation")
    update = Update.supervised(F.cross_entropy, partial(torch.optim.Adam, lr=0.1))
    evaluator = Engine(update.evaluation(), model=model)
    evaluator.attach(Metrics(accuracy=Accuracy()))
    engine = Engine(update, model=model, seed=0)
    before = fingerprint(engine), fingerprint(evaluator)
    sizes = find_batch_size(engine, loader_of(), margin=0.0, evaluation=(evaluator, loader_of(300)))
    assert sizes.largest == 32
    assert (fingerprint(engine), fingerprint(evaluator)) == before


def test_memory_that_does_not_suffice_for_a_sample_is_an_error() -> None:
    engine = build(Limited(1))
    before = fingerprint(engine)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory with a batch of one sample"):
        find_batch_size(engine, loader_of())
    assert fingerprint(engine) == before


def test_another_error_leaves_with_everything_as_before() -> None:
    engine = build(Limited(10**6))
    engine.run(loader_of()(8), max_iters=5)
    before = fingerprint(engine)

    def fail(engine: Engine) -> None:
        if len(engine.state.batch[0]) >= 16:
            raise ArithmeticError("not a matter of memory")

    with engine.connect(Events.ITERATION_STARTED, fail), pytest.raises(ArithmeticError, match="memory") as raised:
        find_batch_size(engine, loader_of())
    assert raised.value.__notes__[-1] == "in a trial of find_batch_size() with batches of 16"
    assert fingerprint(engine) == before


@pytest.mark.moderate
def test_the_run_that_follows_is_the_same_and_losses_are_those_of_a_new_run() -> None:
    ends: list[dict[str, str]] = []
    losses: list[tuple[int, float]] = []
    of_new: list[tuple[int, float]] = []

    def record(into: list[tuple[int, float]]) -> Callable[[Engine], None]:
        return lambda engine: into.append((len(engine.state.batch[0]), float(engine.state.update.loss)))  # type: ignore[arg-type]

    for search in (True, False):
        engine, loaders = build(Limited(20), GradientAccumulation(2)), loader_of()
        if search:
            with engine.connect(Events.LOSS_COMPUTED, record(losses)):
                find_batch_size(engine, loaders, margin=0.0)
        engine.run(loaders(8), max_epochs=1)
        ends.append(fingerprint(engine))
    assert ends[0] == ends[1]
    for size in (2, 4, 8, 16):
        engine = build(Limited(20), GradientAccumulation(2))
        engine.connect(Events.LOSS_COMPUTED, record(of_new))
        engine.run(loader_of()(size), max_iters=6)
    assert losses == of_new


def of_two() -> tuple[Any, ...]:
    import torch.distributed as dist

    engine = build(Limited(10**6), DistributedDataParallel(timeout=60.0))
    engine.model.least = 33 if dist.get_rank() == 1 else 10**6
    before = fingerprint(engine)
    sizes = find_batch_size(engine, loader_of(), margin=0.0)
    assert fingerprint(engine) == before
    engine.run(loader_of()(8), max_iters=5)
    return sizes.largest, [(one.size, one.ok) for one in sizes.trials], engine.state.iteration


@pytest.mark.moderate
def test_the_smallest_memory_of_two_processes_counts() -> None:
    found = run_together(of_two, 2)
    assert found[0] == found[1] == (32, [(2, True), (4, True), (8, True), (16, True), (32, True), (64, False)], 5)


PROGRAM = """
import resource
from functools import partial
import torch
from torch import nn
from signalfire import Engine, Update
from signalfire.testing import fingerprint
from signalfire.tuning import find_batch_size

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(50, 4000), nn.ReLU(), nn.Linear(4000, 1))
update = Update.supervised(nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.01))
engine = Engine(update, model=model, seed=0)
data = torch.utils.data.TensorDataset(torch.randn(1, 50).expand(60_000, -1), torch.zeros(60_000, 1))
loader_of = lambda size: torch.utils.data.DataLoader(data, batch_size=size)
before = fingerprint(engine)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 400 * 2**20,) * 2)
sizes = find_batch_size(engine, loader_of, start=512, mode="bisect", steps=3, margin=0.1)
assert fingerprint(engine) == before
engine.run(loader_of(sizes.largest), max_iters=3)
print(sizes)
print("largest", sizes.largest, "fastest", sizes.fastest)
"""


@pytest.mark.slow
def test_a_limit_of_the_memory_of_a_process_is_found() -> None:
    # So that what is freed counts no more: else the allocator keeps parts of it, differently each time.
    ended = kit.finished("-c", PROGRAM, env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"})
    assert ended.returncode == 0, ended.stderr
    printed = ended.stdout
    found = re.search(r"largest (\d+) fastest (\d+)", printed)
    assert found is not None, printed
    largest = int(found[1])
    # Two tensors of 4,000 numbers a sample, and their gradients: some 48 kB a sample, of 400 MB.
    assert 2000 < largest < 20000, printed
    assert " no " in printed


@pytest.mark.slow
def test_the_sizes_are_shown_with_peak_and_speed() -> None:
    sizes = find_batch_size(build(Limited(100)), loader_of(), margin=0.0)
    lines = str(sizes).splitlines()
    assert len(lines) == len(sizes.trials) + 1
    assert sum("largest" in line for line in lines) == 1
    assert sizes.fastest in {one.size for one in sizes.trials if one.ok}
    assert all(one.samples_per_second > 0 for one in sizes.trials if one.ok)  # type: ignore[operator]
    assert all(one.peak is None and one.samples_per_second is None for one in sizes.trials if not one.ok)
    assert "<pre>" in sizes._repr_html_()
    by_hand = BatchSizes((Trial(2, True, None, 10.0), Trial(4, True, None, 30.0), Trial(8, True, None, 20.0)), 8)
    assert by_hand.fastest == 4


@pytest.mark.slow
def test_what_a_failed_trial_held_is_freed() -> None:
    engine = build(Limited(100))
    find_batch_size(engine, loader_of())
    gc.collect()
    large = [one for one in gc.get_objects() if isinstance(one, Tensor) and one.dim() == 2 and len(one) in (64, 128)]
    assert large == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 0}, r"find_batch_size\(start=0\): expected an int of 1 or more"),
        ({"steps": 1}, r"steps=1\): expected an int of 2 or more"),
        ({"maximum": 0}, "maximum=0"),
        ({"mode": "binary"}, r"mode='binary'\): expected 'power' or 'bisect'"),
        ({"margin": 1.0}, r"margin=1.0\): expected a fraction"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_batch_size(build(Limited(10)), loader_of(), **options)


@pytest.mark.slow
def test_data_that_does_not_grow_with_the_size_is_refused_and_smaller_data_is_a_limit() -> None:
    fixed = kit.batches([8] * 5, 4, (), classes=3)
    with pytest.raises(
        ValueError, match=r"loader_of\(16\) returned batches of 8 samples; return batches of the requested size"
    ):
        find_batch_size(build(Limited(10**6)), lambda size: fixed, start=8)
    with pytest.raises(ValueError, match=r"loader_of\(4\) returned batches of 8 samples"):
        find_batch_size(build(Limited(10**6)), lambda size: fixed, start=4)
    sizes = find_batch_size(build(Limited(10**6)), lambda size: kit.batches([min(size, 20)] * 5, 4, (), classes=3))
    assert [one.size for one in sizes.trials] == [2, 4, 8, 16, 20]
    assert sizes.limit == "the batches have at most 20 samples"


@pytest.mark.moderate
def test_micro_batching_and_engines_that_do_not_train_are_refused() -> None:
    engine = build(Limited(10), MicroBatching(2))
    with pytest.raises(
        ValueError, match=r"'micro_batching' computes the gradients in pieces.*; detach the handler, or disable it"
    ):
        find_batch_size(engine, loader_of())
    with engine.without("micro_batching"):
        assert find_batch_size(engine, loader_of(), margin=0.0).largest == 8
    with pytest.raises(ValueError, match="does not train"):
        find_batch_size(Engine(Update.supervised(F.cross_entropy), model=Limited(10)), loader_of())


def test_what_is_no_function_of_the_size_is_named() -> None:
    engine = kit.build(kit.linear(4, 1))
    with pytest.raises(TypeError, match=r"loader_of=list\): expected a function that takes a batch size"):
        find_batch_size(engine, [])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"evaluation=Engine\): expected a pair: an evaluator, and a function"):
        find_batch_size(engine, lambda size: [], evaluation=engine)  # type: ignore[arg-type]
