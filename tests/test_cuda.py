"""The host never waits for the device, and on one the weights are those of a plain loop.

A GPU computes while the host runs ahead of it; whoever reads a value back makes the host wait. On the CPU nothing waits, but
what would wait elsewhere can be counted: each read of a tensor's value passes through torch's function and dispatch modes,
and tensors on the meta device have no values that could be read. So most of this is tested on every machine; what only a
CUDA device can show is skipped without one.
"""

from __future__ import annotations

import io
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR, OneCycleLR
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from signalfire import Engine, Events, Handler, Phase, Update
from signalfire.core.state import as_numbers
from signalfire.handlers import (
    EMA,
    Accuracy,
    AdaptiveGradientClipping,
    Average,
    Checkpoint,
    CSVLogger,
    CutMix,
    Cutout,
    DeviceStatistics,
    DeviceTransfer,
    EarlyStopping,
    Freezing,
    GradientAccumulation,
    GradientClipping,
    GradientNoise,
    GradientNorms,
    History,
    JSONLinesLogger,
    LabelSmoothing,
    LRScheduling,
    Metrics,
    MicroBatching,
    MixedPrecision,
    MixUp,
    NonFiniteGuard,
    OptimizerStatistics,
    ParameterScheduling,
    ParameterStatistics,
    ProgressBar,
    SharpnessAwareMinimization,
    TensorBoardLogger,
    Throughput,
    Trace,
    TruePrecision,
    Validation,
)
from signalfire.handlers._common.ranks import AFTER_ALL
from signalfire.resuming.copies import Copies
from signalfire.traces import digests
from tests import kit
from tests.kit import assert_same

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
# Said once in a process, when the mode is first set.
prototype = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")

ROOT = Path(__file__).parent.parent
LENGTH, EPOCHS, LOGGED = 12, 2, 10  # iterations of an epoch; epochs; the loggers' interval
Batches = list[tuple[Tensor, Tensor]]


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3)
    )


def batches(*, pinned: bool = False, count: int = LENGTH) -> Batches:
    data = kit.batches([8] * count, (2, 6, 6), (), classes=3, seed=5)
    return [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in data] if pinned else data


def build(*handlers: Handler, optimizer: Any = None, model: nn.Module | None = None) -> Engine:
    optimizer = optimizer or partial(torch.optim.AdamW, lr=1e-2, fused=True)
    return kit.build(model or network(), *handlers, loss=F.cross_entropy, optimizer=optimizer)


def stack(device: str, folder: Path, *, precision: Any = "bf16") -> list[Handler]:
    """Everything at once that makes sense in one training run, and that reads nothing for its purpose alone."""
    return [
        DeviceTransfer(device, prefetch=True),
        MixedPrecision(precision),
        GradientAccumulation(2),
        GradientClipping(max_norm=1.0, max_value=0.5),
        AdaptiveGradientClipping(exclude="*6.*"),  # also of a compiled model, whose names begin with _orig_mod
        GradientNoise(1e-4),
        GradientNorms(per_parameter=True),
        LabelSmoothing(0.1),
        LRScheduling(partial(OneCycleLR, max_lr=1e-2)),
        EMA(0.9),
        Metrics(loss=Average(), accuracy=Accuracy(), error=lambda output, target: F.nll_loss(output, target)),
        EarlyStopping("loss", patience=5, restore_best=True),
        Checkpoint(folder / "checkpoints", monitor="loss", keep=2),
        CSVLogger(folder / "log.csv", every=f"{LOGGED}it"),
        JSONLinesLogger(folder / "log.jsonl", every=f"{LOGGED}it"),
        TensorBoardLogger(folder / "board", every=f"{LOGGED}it"),
        History(),
        ProgressBar(file=io.StringIO()),
    ]


def quiet(iteration: int) -> bool:
    """Whether nothing is due in an iteration that has to show or write a value: no log, no end of an epoch."""
    return iteration % LOGGED != 0 and iteration % LENGTH != 0


# ---- what would wait for a device, counted on the CPU -------------------------------------------------------------

READS = {
    "item", "tolist", "numpy", "cpu", "equal", "allclose", "__bool__", "__float__", "__int__", "__index__", "__complex__",
    "__array__", "__contains__", "__repr__", "__format__",
}  # fmt: skip
READING = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique_consecutive", "_unique2",
    "unique_dim", "repeat_interleave.Tensor", "bincount", "histc",
}  # fmt: skip


class Waiting(TorchDispatchMode):
    """Notes the places where the host would wait for a device: reads of values, and copies to it that block.

    Args:
        device: tensors there are those whose values are read; copies to it are noted unless it is the CPU.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.engine: Engine | None = None
        self.places: list[tuple[int, str]] = []  # iteration, and what is read where
        self._functions = _Functions(self)
        self._noted = False  # the function above has noted it

    def __enter__(self) -> Waiting:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._functions.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._functions.__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if not self._noted:
            if {name, f"{name}.{func._overloadname}"} & READING and self._is_there(args[0]):
                self.note(name)
            if name == "index" and any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]):
                self.note("index by a mask")
            if name in ("_to_copy", "copy_") and self.device != "cpu":
                source = args[0] if name == "_to_copy" else args[1]
                to = kwargs.get("device") if name == "_to_copy" else args[0].device
                blocks = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
                if blocks and to is not None and source.device.type == "cpu" and torch.device(to).type == self.device:
                    self.note("a copy that blocks")
        return func(*args, **kwargs)

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "")
        made = name in ("tensor", "as_tensor", "new_tensor") and "device" in kwargs and self.device != "cpu"
        if made and torch.device(kwargs["device"]).type == self.device:
            self.note(f"{name}(device=)")
        if name not in READS or self._noted or not (args and self._is_there(args[0])):
            return func(*args, **kwargs)
        self.note(name)
        self._noted = True
        try:
            return func(*args, **kwargs)
        finally:
            self._noted = False

    def _is_there(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device.type == self.device

    def note(self, what: str) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and not _ours(frame.f_code.co_filename):
            frame = frame.f_back
        place = Path(frame.f_code.co_filename)
        iteration = 0 if self.engine is None else self.engine.state.iteration
        self.places.append((iteration, f"{place.parent.name}/{place.name}:{frame.f_lineno} {what}"))


class _Functions(TorchFunctionMode):
    """Sees what is not dispatched: on the CPU `tolist` and `numpy` look into the memory itself."""

    def __init__(self, waiting: Waiting) -> None:
        super().__init__()
        self.waiting = waiting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.waiting.called(func, args, kwargs or {})


def _ours(file: str) -> bool:
    path = Path(file)
    return path != Path(__file__) and ROOT in path.resolve().parents and "site-packages" not in file


_LOOKS = "calls", "epoch_checks", "evaluation_findings", "given_gradients", "model_rules", "target_counts"
ONCE = tuple(f"findings/{name}.py" for name in _LOOKS)
"""What reads values at the start of a run or at the ends of epochs, to find mistakes."""


def waits(engine: Engine, data: Any, *, device: str = "cpu", **bounds: Any) -> list[tuple[int, str]]:
    """Where a run would wait for the device, and in which iterations; what is read between two iterations is the former's.

    What is read to find mistakes is left out.
    """
    waiting = Waiting(device)
    waiting.engine = engine
    with waiting:
        engine.run(data, **bounds)
    return [one for one in waiting.places if not one[1].startswith(ONCE)]


@pytest.mark.parametrize(
    "read",
    [
        lambda tensor: tensor.sum().item(),
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor.detach().numpy(),
        lambda tensor: bool(tensor.sum() > 0),
        lambda tensor: float(tensor.sum()),
        lambda tensor: int(tensor.sum()),
        lambda tensor: math.isfinite(tensor.sum()),
        lambda tensor: f"{tensor.sum():.3f}",
        lambda tensor: tensor[tensor > 0],
        lambda tensor: tensor.nonzero(),
        lambda tensor: torch.equal(tensor, tensor),
        lambda tensor: repr(tensor),
    ],
)
def test_each_way_of_reading_a_value_is_noticed_once(read: Callable[[Tensor], Any]) -> None:
    engine = build()

    @engine.on(Events.GRADIENTS_READY(once=2))
    def look(engine: Engine) -> None:
        read(engine.model[0].weight.grad)

    found = waits(engine, batches(count=3), max_epochs=1)
    assert [iteration for iteration, _ in found] == [2], found


@pytest.mark.moderate
def test_nothing_in_an_iteration_waits_for_the_device_in_bf16(tmp_path: Path) -> None:
    engine = build(*stack("cpu", tmp_path))
    found = waits(engine, batches(), max_epochs=EPOCHS)
    assert [place for place in found if quiet(place[0])] == []
    assert {10, 12, 20, 24} <= {iteration for iteration, _ in found}, "where something is written, values are read"
    assert engine.updates[0].steps == LENGTH


def statistics() -> list[Handler]:
    """What is measured in every iteration: rates, memory, weights, hyperparameters."""
    return [
        Throughput(every="1it", warmup=1, waiting=True, flops="count", peak=1e12),
        DeviceStatistics(every="1it"),
        ParameterStatistics(every="1st"),
        OptimizerStatistics(every="1st"),
    ]


@pytest.mark.moderate
def test_statistics_in_every_iteration_wait_for_nothing() -> None:
    engine = build(*statistics())
    assert waits(engine, batches(), max_epochs=1) == []
    for name in ("samples_per_second", "mfu", "process_mib", "update_ratio", "momentum"):
        assert engine.state.metrics.serials[name] >= LENGTH - 2


@pytest.mark.moderate
@pytest.mark.parametrize("detail", ["step", "tensor"])
def test_a_recorded_iteration_of_a_trace_waits_once(
    tmp_path: Path, detail: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small tensors of the CPU are hashed there; those of a device, whose way is counted here, are not.
    monkeypatch.setattr(digests, "_is_near", lambda tensor: False)
    engine = build(Trace(tmp_path / "trace.jsonl", every="5it", detail=detail), EMA(0.9))
    found = waits(engine, batches(), max_epochs=1)
    reads = Counter(iteration for iteration, _ in found)
    assert (reads[5], reads[10]) == (1, 1), found
    assert reads.keys() <= {0, 5, 10, LENGTH}


@pytest.mark.moderate
@pytest.mark.parametrize("guard_first", [True, False])
@pytest.mark.parametrize("check", ["gradients", "loss", "both"])
def test_scaling_and_the_guard_wait_once_a_window_together(tmp_path: Path, check: Any, guard_first: bool) -> None:
    handlers = stack("cpu", tmp_path, precision="fp16")
    guard = NonFiniteGuard(check=check, action="raise")
    engine = build(*([guard, *handlers] if guard_first else [*handlers, guard]))
    found = waits(engine, batches(), max_epochs=EPOCHS)
    counted = Counter(iteration for iteration, _ in found if quiet(iteration))
    windows = [iteration for iteration in range(1, LENGTH * EPOCHS + 1) if iteration % 2 == 0 and quiet(iteration)]
    assert counted == dict.fromkeys(windows, 1), found
    assert engine.updates[0].steps == LENGTH


@pytest.mark.moderate
@pytest.mark.parametrize("alone", [MixedPrecision("fp16"), NonFiniteGuard(check="both")], ids=["scaling", "guard"])
def test_each_of_the_two_alone_waits_once_a_window(alone: Handler) -> None:
    engine = build(alone, GradientAccumulation(3))
    found = waits(engine, batches(), max_epochs=1)
    assert [iteration for iteration, _ in found] == [3, 6, 9, 12], found


def test_a_read_in_a_handler_is_reported_with_its_place() -> None:
    loss = Average()
    loss._FOLD_AT = 1  # so that it reads each of the values
    found = waits(build(Metrics(loss=loss)), batches(count=2), max_epochs=1)
    assert [place.split(":")[0] for _, place in found] == ["_common/measures.py"] * 2


# ---- tensors without values ---------------------------------------------------------------------------------------


def on_meta(model: nn.Module, data: Batches) -> tuple[nn.Module, Batches]:
    return model.to("meta"), [(inputs.to("meta"), targets.to("meta")) for inputs, targets in data]


def count_samples(engine: Engine) -> Tensor:
    """A weight that is only known on the device."""
    weight: Tensor = (engine.state.batch[1] >= 0).sum()
    return weight


ON_META: dict[str, Callable[[], list[Handler]]] = {
    "AdaptiveGradientClipping": lambda: [AdaptiveGradientClipping(exclude="6")],
    "CutMix": lambda: [CutMix()],
    "Cutout": lambda: [Cutout(2)],
    "EMA": lambda: [EMA(0.9, warmup=True, buffers="average")],
    "EarlyStopping": lambda: [EarlyStopping("loss"), Metrics(loss=Average())],
    "Freezing": lambda: [Freezing("0", unfreeze_at=2)],
    "GradientAccumulation": lambda: [GradientAccumulation(3)],
    "GradientAccumulation, weighted": lambda: [GradientAccumulation(3, weight=count_samples)],
    "GradientClipping": lambda: [GradientClipping(max_norm=1.0, max_value=0.1)],
    "GradientNorms": lambda: [GradientNorms(per_parameter=True)],
    "LRScheduling": lambda: [LRScheduling(partial(LinearLR, total_iters=5))],
    "LabelSmoothing": lambda: [LabelSmoothing(0.1)],
    "Metrics": lambda: [Metrics(loss=Average(), accuracy=Accuracy(), top=lambda output, target: output.max())],
    "MicroBatching": lambda: [MicroBatching(2)],
    "MicroBatching, accumulated": lambda: [MicroBatching(3), GradientAccumulation(2)],
    "MixUp": lambda: [MixUp()],
    "OptimizerStatistics": lambda: [OptimizerStatistics(every="1st")],
    "ParameterScheduling": lambda: [ParameterScheduling("weight_decay", lambda step: 0.1 / (1 + step))],
    "ParameterStatistics": lambda: [ParameterStatistics(every="1st")],
    "SharpnessAwareMinimization": lambda: [SharpnessAwareMinimization(adaptive=True)],
    "Throughput": lambda: [Throughput(every="1it", warmup=1, waiting=True, flops="count", peak=1e12)],
    "TruePrecision": lambda: [TruePrecision("bf16")],
}


@pytest.mark.moderate
@pytest.mark.parametrize("name", ON_META)
def test_an_iteration_needs_no_values_and_no_copy_that_blocks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(
        "signalfire.models.environment.check_modules", lambda engine: None
    )  # which refuses the meta device
    model, data = on_meta(network(), batches())
    engine = build(*ON_META[name](), optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9), model=model)
    found = waits(engine, data, device="meta", max_iters=7)
    assert found == []
    assert engine.state.iteration == 7


# ---- the same weights as a plain loop ---------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": partial(torch.optim.Adam, lr=1e-2, fused=True),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "SGD": partial(torch.optim.SGD, lr=1e-1, momentum=0.9, fused=True),
}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def plain_loop(
    device: str,
    precision: str,
    factory: Callable[..., torch.optim.Optimizer],
    data: Batches,
    *,
    model: nn.Module | None = None,
) -> nn.Module:
    """Autocast, windows of two batches, scaling for float16, a clip by norm, a schedule."""
    model = (model or network()).to(device)
    optimizer = factory(model.parameters())
    schedule = LinearLR(optimizer, total_iters=LENGTH)
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")
    for _ in range(EPOCHS):
        for number, (inputs, targets) in enumerate(data, 1):
            with torch.autocast(device, dtype=TYPES[precision]):
                loss = F.cross_entropy(model(inputs.to(device)), targets.to(device))
            scaler.scale(loss).backward()
            if number % 2 == 0:
                torch._foreach_div_([p.grad for p in model.parameters() if p.grad is not None], 2)
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                schedule.step()
                optimizer.zero_grad()
    return model


def in_the_same_way(device: str, precision: Any) -> list[Handler]:
    return [
        DeviceTransfer(device, prefetch=True),
        MixedPrecision(precision),
        GradientAccumulation(2),
        GradientClipping(max_norm=1.0),
        LRScheduling(partial(LinearLR, total_iters=LENGTH)),
        EMA(0.9),
        Metrics(loss=Average(), accuracy=Accuracy()),
    ]


@pytest.fixture
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU's convolutions, those that add up in the same order each time."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.mark.moderate
@pytest.mark.usefixtures("_deterministic")
@devices
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fused_optimizers_under_autocast_equal_a_plain_loop(device: str, precision: str, optimizer: str) -> None:
    factory = OPTIMIZERS[optimizer]
    data = batches(pinned=device == "cuda")
    engine = build(*in_the_same_way(device, precision), optimizer=factory)
    engine.run(data, max_epochs=EPOCHS)
    assert_same(engine.model, plain_loop(device, precision, factory, data))
    assert engine.updates[0].steps == LENGTH
    assert next(engine.model.parameters()).device.type == device


# ---- a compiled model ---------------------------------------------------------------------------------------------

# The inductor takes most of a minute on a small machine, and nothing that the engine does depends on who compiles.
compilers = pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=needs_cuda)]
)
# torch's compiler imports parts of torch that are deprecated, and has advice on precision and small GPUs.
advice = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch._inductor")


def compiled(model: nn.Module, backend: str) -> Any:
    return torch.compile(model, backend=backend, fullgraph=True)


class Compilations:
    """How many graphs were compiled up to the end of each iteration."""

    def __init__(self, engine: Engine) -> None:
        torch._dynamo.utils.counters.clear()
        self.graphs: list[int] = []
        engine.connect(Events.ITERATION_COMPLETED, self.note, phase=Phase.PERSIST, rank=AFTER_ALL)

    def note(self, engine: Engine) -> None:
        self.graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    def breaks(self) -> dict[str, int]:
        return dict(torch._dynamo.utils.counters["graph_break"])


@pytest.mark.filterwarnings("ignore:C14:signalfire.FindingWarning")
@pytest.mark.usefixtures("_deterministic")
@devices
def test_an_evaluator_inherits_device_and_precision_as_in_a_plain_loop(device: str) -> None:
    model, data = network(), batches(pinned=device == "cuda", count=4)
    evaluator = Engine(Update.supervised(F.cross_entropy), model=model)
    evaluator.attach(Metrics(loss=Average()))
    engine = build(DeviceTransfer(device, prefetch=True), MixedPrecision(), Validation(evaluator, data), model=model)
    engine.run(data, max_epochs=1)
    inside = engine.state.metrics["loss"]
    with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
        model.eval()
        losses = [F.cross_entropy(model(x.to(device)), y.to(device)).item() for x, y in data]
    model.train()
    assert inside == engine.evaluate(evaluator, data)["loss"] == sum(loss * 8 for loss in losses) / 32


@pytest.fixture
def _compiler() -> Iterator[None]:
    """What was compiled in one test is not what is compiled in another."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("_compiler", "_deterministic")
@advice
@compilers
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_compiled_model_equals_a_plain_loop_and_is_compiled_once(device: str, backend: str, precision: str) -> None:
    data = batches(pinned=device == "cuda")
    factory = OPTIMIZERS["AdamW"]
    engine = build(*in_the_same_way(device, precision), optimizer=factory, model=compiled(network(), backend))
    compilations = Compilations(engine)
    engine.run(data, max_epochs=EPOCHS)
    assert compilations.graphs == [1] * (LENGTH * EPOCHS)
    assert compilations.breaks() == {}
    torch._dynamo.reset()
    assert_same(engine.model, plain_loop(device, precision, factory, data, model=compiled(network(), backend)))


@pytest.mark.slow
@pytest.mark.usefixtures("_compiler", "_deterministic")
@advice
@compilers
def test_a_compiled_step_equals_a_plain_loop_and_is_compiled_once(device: str, backend: str) -> None:
    data = batches(pinned=device == "cuda")
    factory = OPTIMIZERS["SGD"]

    def compiled_step(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(model(inputs), targets)

        return torch.compile(step, backend=backend, fullgraph=True)

    model = network()
    step = compiled_step(model)
    engine = Engine(Update.from_function(lambda engine, batch: step(*batch), factory), model=model, seed=0)
    engine.attach(DeviceTransfer(device), MixedPrecision(), Metrics(loss=Average()), EMA(0.9))
    compilations = Compilations(engine)
    engine.run(data, max_epochs=EPOCHS)
    assert compilations.graphs == [1] * (LENGTH * EPOCHS)
    assert compilations.breaks() == {}

    torch._dynamo.reset()
    reference = network().to(device)
    plain_step, optimizer = compiled_step(reference), factory(reference.parameters())
    for inputs, targets in data * EPOCHS:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = plain_step(inputs.to(device), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model, reference)


@pytest.mark.slow
@pytest.mark.usefixtures("_compiler")
@advice
@compilers
def test_a_whole_stack_with_validation_compiles_two_graphs_in_the_first_epoch_and_none_later(
    device: str, backend: str, tmp_path: Path
) -> None:
    model = compiled(network(), backend)
    evaluator = Engine(Update.supervised(F.cross_entropy), model=model)
    evaluator.attach(DeviceTransfer(device), MixedPrecision(), Metrics(score=Accuracy()))
    engine = build(*stack(device, tmp_path), Validation(evaluator, batches(count=2)), model=model)
    compilations = Compilations(engine)
    engine.run(batches(), max_epochs=3)
    assert compilations.graphs == [1] * LENGTH + [2] * (2 * LENGTH), "one that trains, one that evaluates"
    assert compilations.breaks() == {}


# ---- what only a CUDA device shows --------------------------------------------------------------------------------

# Iterations of the second epoch in which nothing is shown or written: what is loaded late was loaded in the first.
BEGIN, END = LENGTH + 1, 2 * LOGGED - 1


@needs_cuda
@prototype
def test_cuda_sees_no_synchronisation_in_an_iteration_in_bf16(tmp_path: Path) -> None:
    engine = build(*stack("cuda", tmp_path))
    modes: list[int] = []

    def forbid(engine: Engine) -> None:
        torch.cuda.set_sync_debug_mode("error")

    def note(engine: Engine) -> None:
        modes.append(torch.cuda.get_sync_debug_mode())

    def allow(engine: Engine) -> None:
        torch.cuda.set_sync_debug_mode("default")

    engine.connect(Events.ITERATION_COMPLETED(once=BEGIN), forbid, phase=Phase.PERSIST, rank=AFTER_ALL)
    engine.connect(Events.FORWARD_STARTED, note)
    engine.connect(Events.ITERATION_COMPLETED(once=END), allow, phase=Phase.PERSIST, rank=AFTER_ALL)
    try:
        engine.run(batches(pinned=True), max_epochs=EPOCHS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    forbidden = range(BEGIN + 1, END + 1)
    assert modes == [2 if iteration in forbidden else 0 for iteration in range(1, LENGTH * EPOCHS + 1)]
    assert engine.updates[0].steps == LENGTH


@needs_cuda
@prototype
def test_cuda_sees_no_synchronisation_in_an_iteration_with_statistics() -> None:
    engine = build(DeviceTransfer("cuda", prefetch=True), *statistics())

    def forbid(engine: Engine) -> None:
        torch.cuda.set_sync_debug_mode("error")

    def allow(engine: Engine) -> None:
        torch.cuda.set_sync_debug_mode("default")

    engine.connect(Events.ITERATION_COMPLETED(once=BEGIN), forbid, phase=Phase.PERSIST, rank=AFTER_ALL)
    engine.connect(Events.ITERATION_COMPLETED(once=END), allow, phase=Phase.PERSIST, rank=AFTER_ALL)
    try:
        engine.run(batches(pinned=True), max_epochs=EPOCHS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name in ("samples_per_second", "mfu", "gpu_allocated_mib", "update_ratio", "momentum"):
        assert engine.state.metrics.serials[name] >= LENGTH * EPOCHS - 2


@needs_cuda
@prototype
@pytest.mark.parametrize("check", ["gradients", "both"])
def test_cuda_sees_one_synchronisation_a_window_with_scaling_and_the_guard(tmp_path: Path, check: Any) -> None:
    guard = NonFiniteGuard(check=check, action="raise")
    engine = build(*stack("cuda", tmp_path, precision="fp16"), guard)
    seen: list[int] = []

    def note(engine: Engine) -> None:
        seen.append(sum("called a synchronizing CUDA operation" in str(one.message) for one in reported))
        torch.cuda.set_sync_debug_mode("warn" if engine.state.iteration < END else "default")

    between = Events.ITERATION_COMPLETED(after=BEGIN - 1, before=END + 1)
    engine.connect(between, note, phase=Phase.PERSIST, rank=AFTER_ALL)
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        try:
            engine.run(batches(pinned=True), max_epochs=EPOCHS)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    each = [after - before for before, after in pairwise(seen)]
    assert each == [int(iteration % 2 == 0) for iteration in range(BEGIN + 1, END + 1)]


@needs_cuda
@prototype
def test_the_values_of_a_row_are_read_together() -> None:
    values: dict[str, Any] = {
        f"value{n}": torch.tensor([n / 3], device="cuda").reshape([1] * (n % 3)) for n in range(50)
    }
    values |= {
        "half": values["value1"].half(),
        "count": torch.tensor(3, device="cuda"),
        "many": torch.ones(2, device="cuda"),
    }
    values |= {"host": torch.tensor(0.1), "number": 7}
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as reported:
            warnings.simplefilter("always")
            numbers = as_numbers(values)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [one for one in reported if "called a synchronizing CUDA operation" in str(one.message)]
    assert len(waits) == 3  # float32, float16, int64
    assert numbers == {name: float(value) for name, value in sorted(values.items()) if name != "many"}


@needs_cuda
@pytest.mark.parametrize("prefetch", [True, False])
def test_prefetched_copies_overlap_with_the_computation(prefetch: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(4096, 1024, generator=generator).pin_memory(), torch.zeros(4096, 1).pin_memory())] * 6
    computed: list[torch.cuda.Event] = []
    copied: list[torch.cuda.Event] = []
    transfer = DeviceTransfer("cuda", prefetch=prefetch)

    def marked(stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream())
        return event

    def forward(engine: Engine, batch: Any) -> Any:
        torch.cuda._sleep(10**8)  # cycles: some 50 ms, in which the host continues
        return engine.model(batch[0])

    update = Update(forward, lambda engine, output, batch: F.mse_loss(output, batch[1]), OPTIMIZERS["SGD"])
    engine = Engine(update, model=nn.Linear(1024, 1), seed=0)
    engine.attach(transfer)
    engine.connect(Events.GET_BATCH_COMPLETED, lambda engine: copied.append(marked(transfer._copy_stream)))
    engine.connect(Events.FORWARD_COMPLETED, lambda engine: computed.append(marked()))
    begin = marked()
    engine.run(data, max_epochs=1)
    torch.cuda.synchronize()
    # The copy of each batch is complete before the computation on the one before has ended; the first ones load kernels.
    ahead = [
        begin.elapsed_time(copy) < begin.elapsed_time(compute)
        for compute, copy in zip(computed, copied[1:], strict=False)
    ]
    assert ahead[2:] == [prefetch] * 3


@needs_cuda
def test_a_copy_for_a_write_in_a_thread_is_in_pinned_main_memory_and_is_used_again() -> None:
    copies = Copies()
    places = []
    for value in (1.0, 2.0):
        copy = copies.make({"weight": torch.full((1000, 1000), value, device="cuda")})
        copy.users = 1
        weight = copy.state["weight"]
        assert weight.device.type == "cpu"
        assert weight.is_pinned()
        assert bool((weight == value).all())
        places.append(weight.data_ptr())
        copy.release()
    assert places[0] == places[1]
