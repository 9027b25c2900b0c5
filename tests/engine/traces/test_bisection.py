"""What made two runs differ is named: a receiver, a part of the step, a module or an operation."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader, Dataset, TensorDataset

from signalfire import Engine, Events, Handler, Phase, Update, on
from signalfire.handlers import (
    EMA,
    Accuracy,
    Checkpoint,
    CSVLogger,
    ElasticDataParallel,
    GradientAccumulation,
    GradientClipping,
    Metrics,
    MicroBatching,
    SharpnessAwareMinimization,
    Trace,
    Validation,
)
from signalfire.traces import bisect
from tests.kit import digest

ADAM = partial(torch.optim.AdamW, lr=1e-2)
Plant = Callable[[Engine], object]


def table(**options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(64, 6, generator=generator), torch.randint(0, 3, (64,), generator=generator))
    return DataLoader(data, batch_size=8, shuffle=True, **options)


def layers(middle: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), middle(), nn.Dropout(0.1), nn.Linear(16, 3))


def build(
    *handlers: Handler,
    plant: Plant | None = None,
    middle: Callable[[], nn.Module] = nn.ReLU,
    data: Any = None,
    epochs: int = 1,
) -> tuple[Engine, Callable[[Engine], object]]:
    """An engine, and what trains it."""
    torch.manual_seed(0)
    engine = Engine(Update.supervised(F.cross_entropy, ADAM), model=layers(middle), seed=0)
    engine.attach(EMA(0.9), Metrics(accuracy=Accuracy()), *handlers)
    if plant is not None:
        plant(engine)
    loader = table() if data is None else data()
    return engine, lambda engine: engine.run(loader, max_epochs=epochs)


def heavier(engine: Engine) -> None:
    with torch.no_grad():
        engine.model[0].weight[2, 3] += 1e-3


def planted(event: Events, iteration: int) -> Plant:
    def plant(engine: Engine) -> None:
        engine.connect(event(once=iteration), heavier)

    return plant


EVENTS = [
    *(Events.GET_BATCH_COMPLETED, Events.FORWARD_STARTED, Events.BACKWARD_COMPLETED, Events.OPTIMIZER_STEP_STARTED),
    Events.ITERATION_COMPLETED,
]


@pytest.mark.moderate
@pytest.mark.parametrize("event", EVENTS)
def test_the_function_that_changes_a_weight_is_named_with_its_event(event: Events) -> None:
    found = bisect(build, lambda: build(plant=planted(event, 5)))
    assert (found.iteration, found.event, found.receiver) == (5, event.name, "heavier")
    assert found.things == ("parameters/model.0.weight",)
    assert "which only run 'b' calls here" in str(found)
    other_way = bisect(lambda: build(plant=planted(event, 5)), build)
    assert (other_way.iteration, other_way.event, other_way.receiver) == (5, event.name, "heavier")


def reseed(engine: Engine) -> None:
    random.random()


def test_a_draw_and_the_change_of_a_state_are_named() -> None:
    found = bisect(build, lambda: build(plant=lambda e: e.connect(Events.LOSS_COMPUTED(once=3), reseed)))
    assert (found.iteration, found.event, found.receiver, found.things) == (
        3,
        "LOSS_COMPUTED",
        "reseed",
        ("random/python",),
    )


@pytest.mark.moderate
def test_a_handler_that_only_one_run_has_is_named_where_it_first_changes_anything() -> None:
    found = bisect(lambda: build(GradientClipping(max_norm=100.0)), lambda: build(GradientClipping(max_norm=0.1)))
    assert (found.iteration, found.receiver) == (1, "gradient_clipping.clip")
    assert "which both runs call here" in found.cause
    found = bisect(build, lambda: build(GradientClipping(max_norm=0.1)))
    assert (found.event, found.receiver) == ("GRADIENTS_READY", "gradient_clipping.clip")
    assert bisect(build, lambda: build(GradientClipping(max_norm=1e9))).iteration is None


class Tanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


class Noisy(nn.Module):
    """Adds numbers that no seed makes again."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.uint8)


def test_a_module_that_computes_something_else_is_named() -> None:
    found = bisect(lambda: build(middle=nn.GELU), lambda: build(middle=Tanh))
    assert (found.iteration, found.event, found.receiver) == (1, "FORWARD_COMPLETED", None)
    assert (found.module, found.operation) == ("model.1", "aten.gelu.default")
    assert "the forward" in found.cause


@pytest.mark.moderate
def test_one_run_that_does_not_repeat_itself_is_made_twice() -> None:
    assert bisect(build).iteration is None
    assert "do not differ" in str(bisect(build))
    found = bisect(lambda: build(middle=Noisy))
    assert (found.iteration, found.event, found.module) == (1, "FORWARD_COMPLETED", "model.1")
    assert found.operation == "aten.add.Tensor"


class Unrepeatable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * (1 + torch.frombuffer(bytearray(os.urandom(1)), dtype=torch.uint8) / 100)


class OddBackward(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return Unrepeatable.apply(x)  # type: ignore[no-untyped-call]


@pytest.mark.moderate
def test_a_backward_that_does_not_repeat_itself_is_named_by_its_operation() -> None:
    found = bisect(lambda: build(middle=OddBackward))
    assert (found.iteration, found.event) == (1, "BACKWARD_COMPLETED")
    assert "the backward pass; operation" in found.cause
    assert found.operation is not None


class Shuffled(Dataset[Any]):
    """Data of which one sample is another one each time."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((6,), float(index)) + (os.urandom(1)[0] if index == 40 else 0), index % 3


@pytest.mark.moderate
def test_data_that_do_not_repeat_themselves_are_named() -> None:
    found = bisect(lambda: build(data=lambda: DataLoader(Shuffled(), batch_size=8)))
    assert (found.iteration, found.event, found.things) == (6, "GET_BATCH_COMPLETED", ("batch/batch",))
    assert "the data" in found.cause


class Drifting(Handler):
    """Multiplies the learning rate."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    @on(Events.EPOCH_COMPLETED, phase=Phase.CONTROL)
    def multiply(self, engine: Engine) -> None:
        for group in engine.optimizer.param_groups:
            group["lr"] *= self.factor


@pytest.mark.moderate
@pytest.mark.parametrize(
    "handlers",
    [
        lambda: [GradientAccumulation(2)],
        lambda: [SharpnessAwareMinimization()],
        lambda: [MicroBatching(4)],
        lambda: [ElasticDataParallel(shards=4)],
        lambda: [Validation(table(), accuracy=Accuracy(), every="3it")],
    ],
)
def test_it_is_found_beside_other_handlers(handlers: Callable[[], list[Handler]]) -> None:
    assert bisect(lambda: build(*handlers())).iteration is None
    found = bisect(lambda: build(*handlers(), Drifting(0.5)), lambda: build(*handlers(), Drifting(0.9)))
    assert (found.event, found.receiver) == ("EPOCH_COMPLETED", "drifting.multiply")


def train(folder: Path, **options: Any) -> Callable[[], Any]:
    """Train with a trace and checkpoints, and return the build."""

    def built() -> Any:
        return build(
            Trace(folder / "trace.jsonl", every="5it"),
            Checkpoint(folder / "checkpoints", every="4it", keep=20),
            CSVLogger(folder / "log.csv"),
            epochs=4,
            **options,
        )

    engine, run = built()
    run(engine)
    return built


@pytest.mark.moderate
def test_with_traces_the_runs_begin_at_the_newest_checkpoint_before_the_difference(tmp_path: Path) -> None:
    builds = train(tmp_path / "a"), train(tmp_path / "b", plant=planted(Events.BACKWARD_COMPLETED, 13))
    traces = [tmp_path / name / "trace.jsonl" for name in "ab"]
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    found = bisect(*builds, traces=traces, checkpoints=tmp_path / "a" / "checkpoints")
    assert "iter00000008" in (found.begun or "")
    assert found.compared is not None
    assert found.compared.equal_until == 10
    assert (found.iteration, found.event, found.receiver) == (13, "BACKWARD_COMPLETED", "heavier")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files  # nothing is written
    with pytest.raises(ValueError, match="the traces do not differ"):
        bisect(*builds, traces=[traces[0], traces[0]])


@pytest.mark.moderate
def test_a_difference_in_a_shard_is_found_within_its_iteration() -> None:
    def swap(engine: Engine) -> None:
        if engine.state.shard == 1:
            engine.state.batch = engine.state.batch[0].flip(0), engine.state.batch[1].flip(0)

    plant = lambda engine: engine.connect(Events.GET_BATCH_COMPLETED(once=1), swap)  # noqa: E731
    found = bisect(
        lambda: build(ElasticDataParallel(shards=4)), lambda: build(ElasticDataParallel(shards=4), plant=plant), until=1
    )
    assert (found.iteration, found.event, found.receiver) == (1, "GET_BATCH_COMPLETED", "swap")


def test_the_memory_that_dropout_fills_is_no_difference() -> None:
    def with_dropout(middle: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(nn.Dropout(0.2), nn.Linear(16, 16), middle())

    found = bisect(lambda: build(middle=with_dropout(nn.GELU)), lambda: build(middle=with_dropout(Tanh)), until=1)
    assert (found.operation, found.module) == ("aten.gelu.default", "model.1.2")


NUMBERS = count(1)


def dirty(memory: Tensor) -> Tensor:
    """Memory with something else in it in each run, unless it is filled while operations are recorded."""
    if _get_current_dispatch_mode() is None:
        storage = memory.untyped_storage()
        ctypes.memset(storage.data_ptr(), 56 + next(NUMBERS) % 8, storage.nbytes())
    return memory


class InEmptyMemory(nn.Module):
    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(dirty(torch.empty(2, *x.shape)), x)


class Irregular(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 1e-3 * next(NUMBERS))


def by_masks(memory: Tensor, x: Tensor) -> Tensor:
    even = torch.arange(2 * len(x)).view(2, -1) % 2 == 0
    memory[even] = x[even[0]].repeat(2, 1)
    memory[~even] = x[~even[0]].repeat(2, 1)
    return memory.sum(0)


def by_numbers(memory: Tensor, x: Tensor) -> Tensor:
    memory.index_copy_(0, torch.tensor([1]), x[None])
    memory.index_copy_(0, torch.tensor([0]), x[None])
    return memory.sum(0)


def beside_nested_and_quantized(memory: Tensor, x: Tensor) -> Tensor:
    torch.empty_like(torch.nested.nested_tensor([x.detach()[:3], x.detach()[3:]])).zero_()
    torch.empty_like(torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8))
    torch.empty_like(x.detach().to_sparse())
    return x * 1


FILLED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "whole": lambda memory, x: memory.copy_(x)[0],
    "a view of the whole": lambda memory, x: memory.view(-1).view_as(memory).copy_(x)[0],
    "a view in place": lambda memory, x: memory.unsqueeze_(0).copy_(x)[0, 0],
    "parts": lambda memory, x: (memory[0].copy_(x), memory[1].copy_(x), memory.sum(0))[2],
    "masks": by_masks,
    "numbers": by_numbers,
    "another of its shape": lambda memory, x: torch.empty_like(memory).copy_(x)[0],
    "by out": lambda memory, x: x + 0 * torch.mul(x.detach(), 2, out=memory[0]),
    "by beta=0": lambda memory, x: torch.addmm(memory[0], torch.eye(len(x)), x, beta=0),
    "not at all": lambda memory, x: x * 1,
    "other layouts": beside_nested_and_quantized,
}


@pytest.mark.moderate
@pytest.mark.parametrize("fill", FILLED)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize")
def test_empty_memory_that_is_filled_does_not_hide_the_operation_that_differs(fill: str) -> None:
    found = bisect(lambda: build(middle=lambda: nn.Sequential(InEmptyMemory(FILLED[fill]), Irregular())), until=1)
    assert (found.operation, found.module) == ("aten.mul.Tensor", "model.1.1")
    assert "different arguments" in found.cause


def half_filled(memory: Tensor, x: Tensor) -> Tensor:
    memory[torch.arange(2 * len(x)).view(2, -1) % 2 == 0] = 0.0
    return memory + x


class OnScratch(nn.Module):
    """Computes in memory that was made before the run."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = torch.empty(100, 16).fill_(float(next(NUMBERS)))

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * self.scratch[: len(x)].copy_(x.detach())


class Outside(nn.Module):
    """Changes a weight that nothing reads, without an operation of torch."""

    def __init__(self, values: Iterator[int]) -> None:
        super().__init__()
        self.weight, self.values = nn.Parameter(torch.zeros(1)), values

    def forward(self, x: Tensor) -> Tensor:
        self.weight.detach().numpy()[0] = next(self.values)
        return x


@pytest.mark.moderate
def test_what_is_filled_or_not_read_is_not_named() -> None:
    found = bisect(lambda: build(middle=lambda: nn.Sequential(OnScratch(), Irregular())), until=1)
    assert (found.operation, found.module) == ("aten.mul.Tensor", "model.1.1")


def without_dropout(engine: Engine) -> None:
    engine.model[2] = nn.Identity()


# What the weight is in the two runs that are compared, in those whose operations are, and in those with other memory.
BY_CHANCE = {
    "never the same": ([0, 1, 2, 3, *range(4, 8)], None),
    "the same operations": ([0, 1, 2, 2, *range(4, 8)], None),
    "the same with other memory": ([0, 1, *[2] * 6], None),
    "no memory that is filled": ([0, 1, 2, 2, *[3] * 4], without_dropout),
}


@pytest.mark.moderate
@pytest.mark.parametrize("case", BY_CHANCE)
def test_memory_is_not_named_for_what_no_operation_does(case: str) -> None:
    values, plant = BY_CHANCE[case]
    found = bisect(partial(build, middle=partial(Outside, iter(values)), plant=plant), until=1)
    assert (found.event, found.things) == ("FORWARD_COMPLETED", ("parameters/model.1.weight",))
    assert found.operation is None
    assert "comparing each of its operations finds no difference" in found.cause


READ: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "as an argument": (lambda memory, x: x + memory[1], "aten.add.Tensor"),
    "through a view": (lambda memory, x: x + memory.view(2, -1).view_as(memory)[1], "aten.add.Tensor"),
    "in place": (lambda memory, x: memory.add_(1)[0] + x, "aten.add_.Tensor"),
    "a part that was not filled": (lambda memory, x: memory[0].copy_(x) + memory[1], "aten.add.Tensor"),
    "what a mask leaves": (lambda memory, x: half_filled(memory, x).sum(0), "aten.add.Tensor"),
    "after a view in place": (lambda memory, x: memory.unsqueeze_(0)[0, 0] + x, "aten.add.Tensor"),
    "after it was ignored": (
        lambda memory, x: torch.addmm(memory[0], torch.eye(len(x)), x, beta=0) + memory[0],
        "aten.add.Tensor",
    ),
}


@pytest.mark.moderate
@pytest.mark.parametrize("read", READ)
def test_an_operation_that_reads_empty_memory_is_named(read: str) -> None:
    compute, operation = READ[read]
    found = bisect(lambda: build(middle=lambda: InEmptyMemory(compute)), until=1)
    assert (found.operation, found.module) == (operation, "model.1")
    assert "reads uninitialized memory from torch.empty" in found.cause


class Forgetful(torch.autograd.Function):
    """A backward that fills one half of a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        found = dirty(torch.empty(16))
        found[:8].copy_(gradients[0][0, :8])
        return gradients[0], found


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Forgetful.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return found


@pytest.mark.moderate
def test_empty_memory_that_is_a_gradient_is_named() -> None:
    found = bisect(lambda: build(middle=Scaled), until=1)
    assert (found.event, found.things) == ("BACKWARD_COMPLETED", ("gradients/model.1.weight",))
    assert found.operation is not None
    assert "returns uninitialized memory from torch.empty" in found.cause


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GELU()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


def test_the_same_operation_in_another_module_is_no_difference() -> None:
    assert bisect(lambda: build(middle=nn.GELU), lambda: build(middle=Wrapped), until=2).iteration is None

    def twice(first: Callable[[], nn.Module], second: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(first(), nn.Linear(16, 16), second())

    found = bisect(lambda: build(middle=twice(nn.GELU, nn.GELU)), lambda: build(middle=twice(Wrapped, Tanh)), until=1)
    assert (found.operation, found.module) == ("aten.gelu.default", "model.1.2")


def test_nothing_of_the_caller_changes() -> None:
    before = digest([torch.get_rng_state(), list(random.getstate()[1])])
    bisect(build, lambda: build(middle=Tanh))
    assert digest([torch.get_rng_state(), list(random.getstate()[1])]) == before


def test_what_cannot_be_made_again_is_refused() -> None:
    with pytest.raises(TypeError, match="expected an Engine or"):
        bisect(lambda: 3)
    with pytest.raises(TypeError, match="expected a function run"):
        bisect(lambda: build()[0])
    made = build()
    with pytest.raises(ValueError, match="returned an engine that has already run"):
        bisect(lambda: made, until=1)
    with pytest.raises(ValueError, match="1 or more"):
        bisect(build, until=0)
    with pytest.raises(ValueError, match="before any iteration"):
        bisect(lambda: (build()[0], lambda engine: None))
