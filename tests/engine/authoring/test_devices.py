"""What works on which device: the table, refusals before the first batch, and generators of accelerators.

There is neither MPS nor XPU here, so that modules of torch stand for them in some tests; what they would compute is not tested.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import signalfire.handlers
from signalfire import Engine, Events, Handler, Phase
from signalfire.authoring.devices import DEVICES, TABLE, DeviceFeature, Support, refusal, support, unavailable, widened
from signalfire.authoring.randomness import device_generators, random_state, set_random_state
from signalfire.handlers import Checkpoint, DeviceTransfer, MixedPrecision, Seeding, TruePrecision
from tests.kit import batches, build, mlp, shipped

ROOT = Path(__file__).parents[3]
HANDLERS = sorted(shipped(), key=lambda kind: kind.__name__)


# ---- the table ----------------------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize("device", DEVICES)
def test_each_cell_says_tested_or_expected_or_why_it_is_refused(device: str) -> None:
    assert TABLE[device].keys() == set(DeviceFeature)
    for feature in DeviceFeature:
        cell = support(device, feature)
        assert cell.status in ("tested", "expected", "refused")
        assert cell.note or cell.status != "refused", f"{device}: {feature} is refused without a reason"


def test_a_device_that_is_not_in_the_table_is_refused_by_its_name() -> None:
    for feature in DeviceFeature:
        cell = support("hpu", feature)
        assert (cell.status, cell.note) == (
            "refused",
            "devices of type hpu are not supported; use one of cpu, cuda, mps, xpu",
        )


def test_the_guide_has_the_table() -> None:
    lines = (ROOT / "examples" / "guide" / "by_purpose.md").read_text().splitlines()
    rows = {cells[0]: cells[1:] for line in lines if (cells := [cell.strip() for cell in line.split("|")[1:-1]])}
    for feature in DeviceFeature:
        shown = [support(device, feature).status for device in DEVICES]
        assert [cell.split(" ")[0].strip(",") for cell in rows[feature.value]] == shown, feature.value


# What a handler's source may not use without declaring what it needs of the device.
SIGNS = {
    "GradScaler": DeviceFeature.SCALER,
    "autocast": DeviceFeature.AUTOCAST,
    "memory_stats": DeviceFeature.STATISTICS,
    "Stream": DeviceFeature.PREFETCH,
    "broadcast_weights": DeviceFeature.COLLECTIVES,
    "fully_shard": DeviceFeature.COLLECTIVES,
    "seed_everything": DeviceFeature.GENERATOR,
    "float64": DeviceFeature.FLOAT64,
}
# Draws on the CPU, whatever the device of the model.
ON_THE_CPU = {name: {"float64"} for name in ("CutMix", "MixUp", "ProgressiveResizing")}


@cache
def names_in(file: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(Path(file).read_text())))
    called = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return called | {node.id for node in nodes if isinstance(node, ast.Name)}


@pytest.mark.whole
@pytest.mark.parametrize("kind", HANDLERS, ids=lambda kind: kind.__name__)
def test_every_handler_answers_for_every_device(kind: type[Handler]) -> None:
    used = set()
    for base in kind.__mro__:
        if base.__module__.startswith("signalfire.handlers"):
            own = {sign for sign in SIGNS if sign in names_in(inspect.getfile(base))}
            used |= own - ON_THE_CPU.get(kind.__name__, set())
    assert {SIGNS[sign] for sign in used} <= kind.device_features, f"{kind.__name__} uses {used}"
    for device in DEVICES:
        answers = {feature: support(device, feature) for feature in kind.device_features}
        assert all(isinstance(answer, Support) for answer in answers.values())


def test_sums_are_widened_in_one_place_that_knows_which_device_has_float64() -> None:
    on_hosts = {"state", "divergence", "watching"}  # tensors that are in main memory
    for file in [*(ROOT / "engine").rglob("*.py"), *(ROOT / "handlers").rglob("*.py")]:
        calls = [line for line in file.read_text().splitlines() if ".double()" in line]
        if file.stem in on_hosts:
            calls = [line for line in calls if ".cpu().double()" not in line]
        assert calls == [], file


def test_widened_is_float64_where_there_is_any() -> None:
    assert widened(torch.ones(2)).dtype is torch.float64
    assert widened(torch.ones(2, dtype=torch.int64)).dtype is torch.float64


# ---- devices that are not there -----------------------------------------------------------------------------------


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*args: Any, **options: Any) -> Any:
        raise error

    return fail


@pytest.mark.whole
@pytest.mark.parametrize(
    ("device", "error", "sentence"),
    [
        ("hpu", ModuleNotFoundError("No module named 'torch.hpu'"), "torch.hpu is not installed"),
        ("xpu", AssertionError("Torch not compiled with XPU enabled"), "has no XPU support"),
        ("mps", NotImplementedError("Could not run 'aten::empty' with\nmany lines"), "has no MPS support"),
        ("cuda", RuntimeError("Found no NVIDIA driver on your system. Please check\nmore"), "Found no NVIDIA driver"),
    ],
)
def test_every_error_of_torch_becomes_one_sentence(
    monkeypatch: pytest.MonkeyPatch, device: str, error: Exception, sentence: str
) -> None:
    if device == "cuda":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "empty", raising(error))
    found = unavailable(device)
    assert found is not None
    assert sentence in found
    assert found.startswith(f"no {device if device == 'hpu' else device.upper()} device is available: ")
    assert "\n" not in found
    with pytest.raises(ValueError, match="DeviceTransfer.*" + sentence):
        DeviceTransfer(device)


def test_a_number_beyond_the_devices_is_refused_with_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert unavailable("cuda:1") is None
    with pytest.raises(ValueError, match="no device 'cuda:2' is available: the devices are cuda:0 to cuda:1"):
        DeviceTransfer("cuda:2")


class Elsewhere(nn.Parameter):
    """A parameter that says that it is on a CUDA device, where there is none."""

    device = torch.device("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_and_scalers_on_a_device_that_is_not_there_are_refused(precision: Any) -> None:
    model = mlp(5, 8, 1, nn.Tanh())
    model[0].weight = Elsewhere(torch.ones(8, 5))
    seen: list[int] = []
    engine = build(model)
    engine.attach(MixedPrecision(precision))
    engine.connect(Events.GET_BATCH_STARTED, lambda engine: seen.append(1))
    with pytest.raises(ValueError, match="'mixed_precision': no CUDA device is available"):
        engine.run(batches(2), max_epochs=1)
    assert seen == []


# ---- refusals before the first batch ------------------------------------------------------------------------------


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """Torch as if it had MPS, whose generator is one of the CPU; nothing can be computed there."""
    generator = torch.Generator()
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    monkeypatch.setattr(torch.mps, "_get_default_mps_generator", lambda: generator)
    monkeypatch.setattr(torch.mps, "manual_seed", generator.manual_seed)
    return generator


def test_float64_on_mps_is_refused_with_the_name_of_the_tensor(mps: torch.Generator) -> None:
    model = mlp(5, 8, 1, nn.Tanh())
    model.register_buffer("scale", torch.ones(3, dtype=torch.float64))
    engine, seen = build(model), []
    engine.attach(DeviceTransfer("mps"))
    engine.connect(Events.GET_BATCH_STARTED, lambda engine: seen.append(1))
    with pytest.raises(
        ValueError, match=r"'device_transfer': 'scale' in the model 'model' is float64.* MPS has no float64"
    ):
        engine.run(batches(2), max_epochs=1)
    assert seen == []
    assert engine.device.type == "cpu"


def test_a_batch_of_float64_on_mps_is_refused_with_its_dtype_and_shape(mps: torch.Generator) -> None:
    engine = Engine(signalfire.Update.prediction(lambda engine, batch: batch))
    engine.attach(DeviceTransfer("mps"))
    with pytest.raises(ValueError, match=r"torch.float64 tensor of shape \(2, 3\), but .*MPS has no float64"):
        engine.run([torch.ones(2, 3, dtype=torch.float64)])


def test_prefetching_is_refused_where_there_are_no_streams_of_cuda(mps: torch.Generator) -> None:
    with pytest.raises(ValueError, match=r"mps does not support prefetching: .*omit prefetch=True"):
        DeviceTransfer("mps", prefetch=True)
    assert DeviceTransfer("mps").device.type == "mps"


def lacking(monkeypatch: pytest.MonkeyPatch, feature: DeviceFeature) -> None:
    monkeypatch.setitem(TABLE["cpu"], feature, Support("refused", "it is not there"))


def test_what_the_device_lacks_is_refused_before_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch, DeviceFeature.SCALER)
    engine, seen = build(mlp(5, 8, 1, nn.Tanh())), []
    engine.attach(MixedPrecision("fp16"))
    engine.connect(Events.GET_BATCH_STARTED, lambda engine: seen.append(1))
    with pytest.raises(ValueError, match="'mixed_precision': cpu does not support gradient scaling: it is not there"):
        engine.run(batches(2), max_epochs=1)
    assert seen == []
    engine.find(MixedPrecision).enabled = False
    engine.run(batches(2), max_epochs=1)
    assert len(seen) == 2


def test_bfloat16_needs_no_scaler_and_true_precision_only_the_dtype_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lacking(monkeypatch, DeviceFeature.SCALER)
    lacking(monkeypatch, DeviceFeature.FLOAT64)
    for handler in (MixedPrecision("bf16"), TruePrecision("bf16")):
        engine = build(mlp(5, 8, 1, nn.Tanh()))
        engine.attach(handler)
        engine.run(batches(2), max_epochs=1)
    engine = build(mlp(5, 8, 1, nn.Tanh()))
    engine.attach(TruePrecision("fp64"))
    with pytest.raises(ValueError, match="'true_precision': cpu does not support float64"):
        engine.run(batches(2), max_epochs=1)
    assert next(engine.model.parameters()).dtype is torch.float32


def test_a_handler_that_joins_a_run_is_refused_there(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch, DeviceFeature.SCALER)
    engine = build(mlp(5, 8, 1, nn.Tanh()))
    engine.connect(Events.ITERATION_STARTED(once=2), lambda engine: engine.attach(MixedPrecision("fp16")))
    with pytest.raises(ValueError, match="cpu does not support gradient scaling"):
        engine.run(batches(4), max_epochs=1)


def test_a_gpu_of_xpu_without_float64_has_no_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        has_fp64 = False

    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: Properties)
    assert refusal("xpu", DeviceFeature.AUTOCAST, DeviceFeature.STATISTICS) is None
    assert "has no float64" in str(refusal("xpu", DeviceFeature.SCALER))
    Properties.has_fp64 = True
    assert refusal("xpu", DeviceFeature.SCALER) is None


# ---- generators ---------------------------------------------------------------------------------------------------


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> list[torch.Generator]:
    """Torch as if it had two XPUs."""
    generators = [torch.Generator(), torch.Generator()]

    def set_all(states: list[Tensor]) -> None:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 1,
        "default_generators": generators,
        "get_rng_state_all": lambda: [one.get_state() for one in generators],
        "set_rng_state_all": set_all,
        "manual_seed_all": lambda seed: [one.manual_seed(seed) for one in generators],
    }.items():
        monkeypatch.setattr(torch.xpu, name, value)
    return generators


def drawn(*generators: torch.Generator) -> list[float]:
    return [torch.rand((), generator=one).item() for one in generators]


def test_the_generators_of_mps_and_xpu_are_saved_and_restored(mps: torch.Generator, xpu: list[torch.Generator]) -> None:
    state = random_state()
    assert {"mps", "xpu"} <= state.keys()
    expected = drawn(mps, *xpu)
    assert drawn(mps, *xpu) != expected
    set_random_state(state)
    assert drawn(mps, *xpu) == expected
    set_random_state({"torch": state["torch"]})  # of a machine without them


def test_a_state_of_another_device_is_left_alone_where_there_is_none(
    mps: torch.Generator, xpu: list[torch.Generator], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = random_state()
    expected = drawn(mps, *xpu)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    set_random_state(state)
    assert random_state().keys().isdisjoint({"mps", "xpu"})
    assert drawn(mps, *xpu) != expected


def test_a_run_that_resumes_draws_on_them_what_the_uninterrupted_one_draws(
    mps: torch.Generator, xpu: list[torch.Generator], tmp_path: Path
) -> None:
    def run(folder: Path, *, epochs: int, resume: bool = False) -> list[float]:
        seen: list[float] = []
        engine = build(mlp(5, 8, 1, nn.Tanh()))
        engine.attach(Checkpoint(folder, every="1ep", resume=resume), Seeding(3))
        engine.connect(Events.ITERATION_STARTED, lambda engine: seen.extend(drawn(mps, *xpu)), phase=Phase.CHANGE)
        engine.run(batches(3), max_epochs=epochs)
        return seen

    whole = run(tmp_path / "whole", epochs=2)
    first = run(tmp_path / "parts", epochs=1)
    drawn(mps, *xpu)
    assert first + run(tmp_path / "parts", epochs=2, resume=True) == whole


def test_separate_streams_reseed_them(mps: torch.Generator, xpu: list[torch.Generator]) -> None:
    devices = [torch.device(one) for one in ("mps", "xpu:0", "xpu")]
    found = device_generators(devices)
    assert {id(one) for one in found} == {id(one) for one in (mps, *xpu)}
