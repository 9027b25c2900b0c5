"""On an accelerator: exact resumption, finders, rewinding, and what handlers do to kernels, as on a CPU.

`test_cuda.py` says that nothing waits for the device; here are the handlers whose work depends on it. What a CPU can show runs
there as well.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, Handler, Phase
from signalfire.authoring.capture import Capture
from signalfire.handlers import (
    EMA,
    Accuracy,
    ActivationCheckpointing,
    Average,
    ChannelsLast,
    Compile,
    DeviceTransfer,
    GradientAccumulation,
    GradientClipping,
    History,
    LRScheduling,
    Metrics,
    MixedPrecision,
    MixUp,
    Precision32,
    Rewindable,
    SpikeGuard,
    Throughput,
)
from signalfire.handlers._common.ranks import AFTER_ALL
from signalfire.testing import fingerprint
from signalfire.tuning import find_batch_size, find_learning_rate
from tests import kit
from tests.handlers.test_capture import TRIED
from tests.kit import assert_same, digest
from tests.test_invariants import CASES, Classifier

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=needs_cuda)]
)
ADAM = partial(torch.optim.AdamW, lr=1e-2)
LENGTH = 10  # batches of an epoch


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Of a GPU's convolutions, those that add up in the same order each time."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


def network() -> nn.Sequential:
    """With all that draws or keeps statistics on the device."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(128, 3)
    )  # fmt: skip


def loader_of(samples: int = 8 * LENGTH, batch_size: int = 8) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 2, 6, 6, generator=generator)
    targets = torch.randint(0, 3, (samples,), generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size, shuffle=True, generator=generator)


def build(device: str, *handlers: Handler, model: nn.Module | None = None) -> Engine:
    return kit.build(
        model or network(), DeviceTransfer(device, prefetch=True), *handlers, loss=F.cross_entropy, optimizer=ADAM
    )


def full_engine(device: str) -> Engine:
    return build(
        device,
        MixedPrecision("fp16" if device == "cuda" else "bf16"),
        GradientAccumulation(3),
        GradientClipping(max_norm=1.0),
        LRScheduling(partial(OneCycleLR, max_lr=1e-2, total_steps=12)),
        EMA(0.9),
        MixUp(),
        Metrics(loss=Average(), accuracy=Accuracy()),
        History(),
    )


def run(engine: Engine, data: Any, **bounds: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of short runs, about which this is not
        engine.run(data, **bounds)


# ---- resuming, finders, rewinding -----------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize("cut", [4, 10, 17])
def test_a_run_that_is_cut_anywhere_ends_with_the_same_bits(device: str, cut: int) -> None:
    whole, file = full_engine(device), io.BytesIO()
    save = Events.ITERATION_COMPLETED(once=cut)
    whole.connect(save, lambda engine: torch.save(engine.state_dict(), file), phase=Phase.PERSIST, rank=AFTER_ALL)
    run(whole, loader_of(), max_epochs=3)
    file.seek(0)
    torch.manual_seed(99)  # nothing of the process that saved is left
    second = full_engine(device)
    second.load_state_dict(torch.load(file, weights_only=True))
    run(second, loader_of(), max_epochs=3)
    assert next(second.model.parameters()).device.type == device
    assert digest(second.state_dict()) == digest(whole.state_dict())
    assert second.find(History).table() == whole.find(History).table()


@devices
@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained"])
def test_the_learning_rate_finder_leaves_no_trace(device: str, trained: bool) -> None:
    found = []
    for sweeps in (0, 2):
        engine, data = full_engine(device), loader_of()
        if trained:
            run(engine, data, max_iters=14)
        before = digest(engine.state_dict()), fingerprint(engine)
        curves = [find_learning_rate(engine, data, steps=3, low=1e-4, high=1.0) for _ in range(sweeps)]
        assert (digest(engine.state_dict()), fingerprint(engine)) == before
        assert len(set(curves)) <= 1
        run(engine, data, max_epochs=3)
        found.append(digest(engine.state_dict()))
    assert found[0] == found[1]


@devices
def test_a_rewound_run_is_one_without_the_batches_that_were_left_out(device: str) -> None:
    def data() -> list[tuple[Tensor, Tensor]]:
        made = kit.batches([16] * 60, 5, 1, seed=0)
        return [
            (x, x.sin().sum(1, keepdim=True) * (100.0 if number == 40 else 1.0))
            for number, (x, _) in enumerate(made, 1)
        ]

    def engine(*handlers: Handler) -> Engine:
        model = kit.mlp(5, 16, 1, nn.Tanh(), nn.Dropout(0.1))
        return kit.build(
            model, DeviceTransfer(device), EMA(0.9), *handlers, optimizer=partial(torch.optim.Adam, lr=1e-3)
        )

    guarded = engine(SpikeGuard("rewind", window=16, rewind=6))
    run(guarded, data(), max_epochs=1)
    (action,) = guarded.find(SpikeGuard).actions
    assert action["iteration"] == 40
    left_out = {index for _, index in action["batches"]}
    assert 39 in left_out

    again = engine(SpikeGuard("rewind", window=16, rewind=6))
    run(again, data(), max_epochs=1)
    assert digest(again.state_dict()) == digest(guarded.state_dict())
    kept = engine()
    run(kept, [batch for index, batch in enumerate(data()) if index not in left_out], max_epochs=1)
    assert_same(kept.model, guarded.model)


@devices
def test_a_replayed_iteration_is_that_of_the_run(device: str) -> None:
    engine = build(device, Rewindable(every="6it", keep=3), GradientClipping(0.5), EMA(0.9))
    losses: dict[int, float] = {}

    @engine.on(Events.GRADIENTS_READY)
    def note(engine: Engine) -> None:
        loss = engine.state.update.loss
        assert loss is not None
        losses[engine.state.iteration] = loss.item()

    run(engine, loader_of(), max_iters=27)
    seen = dict(losses)
    for iteration in (19, 20, 24, 27):
        remade = engine.replay(iteration).run()
        assert remade.times[0].loss == seen[iteration]
        assert remade.times[0] == remade.times[1]


@needs_cuda
def test_the_largest_batch_of_a_gpu_is_found_with_its_peak() -> None:
    torch.cuda.empty_cache()
    limit = 4 << 30
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        model = nn.Sequential(nn.Linear(64, 8192), nn.ReLU(), nn.Linear(8192, 8192), nn.ReLU(), nn.Linear(8192, 3))
        engine = kit.build(model, DeviceTransfer("cuda"), loss=F.cross_entropy, optimizer=ADAM)
        generator = torch.Generator().manual_seed(0)
        samples = TensorDataset(torch.randn(1 << 16, 64, generator=generator), torch.zeros(1 << 16, dtype=torch.long))
        engine.run(DataLoader(samples, 8), max_iters=1)  # the model is moved, and the libraries have their buffers
        before = fingerprint(engine)
        allocated = torch.cuda.memory_allocated()
        sizes = find_batch_size(engine, lambda size: DataLoader(samples, size), start=256, margin=0.0)
        assert fingerprint(engine) == before
        assert abs(torch.cuda.memory_allocated() - allocated) < 1 << 20
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    fits = {one.size: one.ok for one in sizes.trials}
    assert fits[sizes.largest]
    assert not fits[2 * sizes.largest]
    peaks = [one.peak or 0 for one in sizes.trials if one.ok]
    assert all(peaks)
    assert 0.25 * limit < max(peaks) <= limit


# ---- what handlers do to kernels ------------------------------------------------------------------------------------


def plain(device: str, model: nn.Module, prepare: Callable[[Tensor], Tensor] = lambda x: x) -> nn.Module:
    """One epoch of a plain loop."""
    model = model.to(device)
    optimizer = ADAM(model.parameters())
    torch.manual_seed(0)
    for inputs, targets in loader_of():
        F.cross_entropy(model(prepare(inputs.to(device))), targets.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def without_dropout() -> nn.Module:
    model = network()
    del model[3]
    return model


@devices
def test_channels_last_is_a_plain_loop_in_that_layout(device: str) -> None:
    engine = build(device, ChannelsLast(), model=without_dropout())
    run(engine, loader_of(), max_epochs=1)
    layout = torch.channels_last
    other: Any = without_dropout()
    other = plain(device, other.to(memory_format=layout), lambda x: x.contiguous(memory_format=layout))
    assert_same(engine.model, {name: value.contiguous() for name, value in other.state_dict().items()})


@devices
def test_activation_checkpointing_draws_the_same_random_numbers(device: str) -> None:
    models = []
    for handlers in ([], [ActivationCheckpointing(nn.Dropout)]):
        engine = build(device, *handlers)
        run(engine, loader_of(), max_epochs=2)
        models.append(engine.model)
    assert_same(*models)


@needs_cuda
def test_a_model_that_the_inductor_compiles_rounds_a_little_and_is_compiled_once() -> None:
    torch._dynamo.reset()
    engine = build("cuda", Compile(), model=without_dropout())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.run(loader_of(), max_epochs=1)
    assert len(engine.find(Compile).sizes) == 1
    reference = plain("cuda", without_dropout())
    for ours, theirs in zip(engine.model.state_dict().values(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    torch._dynamo.reset()


@needs_cuda
def test_tf32_rounds_products_inside_the_run_only() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(512, 512, generator=generator).cuda() for _ in range(2))

    def error() -> float:
        return ((one @ other).double() - one.double() @ other.double()).abs().max().item()

    before = error()
    inside: list[float] = []
    engine = build("cuda", Precision32("high"))
    engine.connect(Events.FORWARD_STARTED(once=1), lambda engine: inside.append(error()))
    run(engine, loader_of(), max_epochs=1)
    assert error() == before < 1e-3 < inside[0]


@needs_cuda
def test_the_speed_of_a_gpu_is_compared_with_its_peak() -> None:
    model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)])
    data = [(torch.randn(4096, 4096).pin_memory(), torch.randn(4096, 4096).pin_memory())] * 40
    throughput = Throughput(every="10it", warmup=5, flops="count")
    engine = kit.build(model, DeviceTransfer("cuda", prefetch=True), MixedPrecision("bf16"), throughput)
    run(engine, data, max_epochs=1)
    assert 0.05 < engine.state.metrics["mfu"] < 1.0, dict(engine.state.metrics)


DETERMINISTIC = """
import os, sys, torch
from signalfire import Engine, Update
from signalfire.handlers import Deterministic, DeviceTransfer

if sys.argv[1] == "started":
    torch.cuda.init()
model = torch.nn.Linear(64, 64)
engine = Engine(Update.supervised(torch.nn.functional.mse_loss, torch.optim.Adam), model=model, seed=0)
engine.attach(DeviceTransfer("cuda"), Deterministic())
engine.run([(torch.ones(8, 64), torch.zeros(8, 64))] * 2, max_epochs=1, check=False)
print("trained", torch.cuda.is_initialized(), os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
"""


@needs_cuda
def test_deterministic_products_need_their_variable_before_cuda_starts() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    fresh = kit.finished("-c", DETERMINISTIC, "fresh", env=environment)
    assert fresh.stdout.strip() == "trained True None", fresh.stderr
    started = kit.finished("-c", DETERMINISTIC, "started", env=environment)
    assert "`export CUBLAS_WORKSPACE_CONFIG=:4096:8`" in started.stderr


# ---- graphs ---------------------------------------------------------------------------------------------------------

CAPTURABLE = [case for case in TRIED if CASES[case].make().capture is not Capture.FORBIDDEN]
NOT_HERE = {"Compile", "DistributedDataParallel", "ElasticDataParallel", "FullyShardedDataParallel", "TensorParallel"}
NOT_HERE |= {"DeviceTransfer", "Deterministic"}  # is there already; needs a variable before CUDA starts


def run_in_a_stream(case: str, *, captured: int) -> Engine:
    """Train with a handler for three epochs; the steps of one of them are recorded as graphs, which then make the steps."""
    torch.manual_seed(0)
    engine = kit.build(
        Classifier(),
        DeviceTransfer("cuda"),
        Metrics(train_loss=Average(), name="train_metrics"),
        CASES[case].make(),
        loss=F.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1, device="cuda"), weight_decay=0.01, fused=True),
    )
    stream = torch.cuda.Stream()
    graphs: list[tuple[torch.cuda.CUDAGraph, Any, Any]] = []

    def begin(engine: Engine) -> None:
        if engine.state.epoch == captured:
            graph = torch.cuda.CUDAGraph()
            graphs.append((graph, torch.cuda.graph(graph, stream=stream), engine.state.batch))
            graphs[-1][1].__enter__()

    def end(engine: Engine) -> None:
        if engine.state.epoch == captured:
            graph, capturing, _ = graphs[-1]
            capturing.__exit__(None, None, None)
            graph.replay()

    engine.connect(Events.UPDATE_STARTED, begin, phase=list(Phase)[-1], rank=10**6)
    engine.connect(Events.OPTIMIZER_STEP_COMPLETED, end, phase=next(iter(Phase)), rank=-(10**6))
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(5, 2, 6, generator=generator), torch.arange(5) % 2) for _ in range(4)]
    with torch.cuda.stream(stream):
        run(engine, data, max_epochs=3)
    torch.cuda.synchronize()
    assert bool(graphs) == (0 < captured <= engine.state.epoch)  # some end the run before
    return engine


@needs_cuda
@pytest.mark.parametrize("case", [case for case in CAPTURABLE if case.split(",")[0] not in NOT_HERE])
def test_steps_that_are_recorded_as_graphs_give_the_same_bits(case: str) -> None:
    eager, captured = (run_in_a_stream(case, captured=epoch) for epoch in (0, 3))
    assert_same(captured.model, eager.model)
