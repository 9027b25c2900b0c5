"""TruePrecision against plain PyTorch loops with a converted model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from signalfire import Engine, Events, Update
from signalfire.handlers import (
    Average,
    DeviceTransfer,
    GradientAccumulation,
    GradientClipping,
    Metrics,
    MixedPrecision,
    TruePrecision,
    Validation,
)
from signalfire.testing import check_handler
from tests import kit
from tests.kit import assert_same, average_gradients, build, mlp, spread, windows

Batches = list[tuple[Tensor, Tensor]]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
Optimizer = Callable[[Any], torch.optim.Optimizer]
SGD: Optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM: Optimizer = partial(torch.optim.Adam, lr=0.05, eps=1e-4)  # its usual eps is zero in float16


def network() -> nn.Sequential:
    return mlp(5, 8, 2, nn.BatchNorm1d(8), nn.Tanh())


def batches(count: int = 5) -> Batches:
    return kit.batches(count, targets=2)


engine_of = partial(build, optimizer=SGD)


def plain_loop(
    dtype: torch.dtype, optimizer: Optimizer, *, epochs: int = 2, window: int = 1, max_norm: float | None = None
) -> nn.Sequential:
    model = network().to(dtype)
    stepper = optimizer(model.parameters())
    data = [(inputs.to(dtype), targets.to(dtype)) for inputs, targets in batches()]
    for _ in range(epochs):
        for chunk in windows(data, window):
            for inputs, targets in chunk:
                nn.functional.mse_loss(model(inputs), targets).backward()
            average_gradients(model, len(chunk))
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            stepper.step()
            stepper.zero_grad()
    return model


@pytest.mark.filterwarnings("ignore:C32")
@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("precision", DTYPES)
def test_it_equals_a_plain_loop(precision: Any, optimizer: Optimizer) -> None:
    model = network()
    engine_of(model, TruePrecision(precision), optimizer=optimizer).run(batches(), max_epochs=2)
    assert_same(model, plain_loop(DTYPES[precision], optimizer))


@pytest.mark.moderate
@pytest.mark.filterwarnings("ignore:C32")
@pytest.mark.parametrize("precision", DTYPES)
def test_with_windows_clipping_and_a_device_it_equals_a_plain_loop(precision: Any) -> None:
    for direction in (1, -1):
        model = network()
        handlers = [
            TruePrecision(precision),
            DeviceTransfer("cpu"),
            GradientClipping(max_norm=0.1),
            GradientAccumulation(2),
        ]
        engine_of(model, *handlers[::direction]).run(batches(), max_epochs=2)
        assert_same(model, plain_loop(DTYPES[precision], SGD, window=2, max_norm=0.1))


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
def test_an_optimizer_that_was_built_before_keeps_working(optimizer: Any) -> None:
    model = network()
    parameters = list(model.parameters())
    engine_of(model, TruePrecision("bf16"), optimizer=optimizer(parameters)).run(batches(), max_epochs=2)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert_same(model, plain_loop(torch.bfloat16, optimizer))


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
def test_attached_after_steps_in_float32_it_converts_the_optimizers_states(optimizer: Optimizer) -> None:
    model, reference = network(), network()
    engine = engine_of(model, optimizer=optimizer)
    engine.run(batches(), max_epochs=1)
    engine.attach(TruePrecision("bf16"))
    engine.run(batches(), max_epochs=2)

    stepper = optimizer(reference.parameters())
    for epoch in range(2):
        if epoch == 1:
            reference.to(torch.bfloat16)
            stepper.load_state_dict(stepper.state_dict())
        for inputs, targets in batches():
            dtype = next(reference.parameters()).dtype
            nn.functional.mse_loss(reference(inputs.to(dtype)), targets.to(dtype)).backward()
            stepper.step()
            stepper.zero_grad()
    assert_same(model, reference)


class Pair(NamedTuple):
    inputs: Tensor
    label: Tensor


@dataclass(frozen=True)
class Sample:
    inputs: Tensor
    text: str


def converted(batch: Any) -> Any:
    """The batch as the forward sees it."""
    seen: list[Any] = []
    engine = Engine(Update.prediction(lambda engine, batch: seen.append(batch)))
    engine.attach(TruePrecision("bf16"))
    engine.run([batch])
    return seen[0]


def test_floating_point_tensors_of_batches_of_every_form_are_converted_and_others_stay() -> None:
    floats, labels, mask = torch.randn(3, 2), torch.arange(3), torch.ones(3, dtype=torch.bool)
    pair = converted(Pair(floats, labels))
    assert type(pair) is Pair
    assert (pair.inputs.dtype, pair.label.dtype) == (torch.bfloat16, torch.int64)
    nested = converted(OrderedDict(a=[floats, labels], b=(mask, "text", 3, None)))
    assert type(nested) is OrderedDict
    assert nested["a"][0].dtype == torch.bfloat16
    assert nested["a"][1] is labels
    assert nested["b"] == (mask, "text", 3, None)
    sample = converted(Sample(floats, "text"))
    assert (sample.inputs.dtype, sample.text) == (torch.bfloat16, "text")
    packed = converted(pack_sequence([floats, floats[:2]]))
    assert packed.data.dtype == torch.bfloat16
    assert packed.batch_sizes.dtype == torch.int64
    assert torch.equal(converted(floats), floats.bfloat16())


def test_the_users_batch_is_not_changed() -> None:
    data = [{"inputs": torch.randn(2, 5)}]
    engine = Engine(Update.prediction(lambda engine, batch: engine.model(batch["inputs"])), model=network())
    engine.attach(TruePrecision("fp64"))
    engine.run(data)
    assert data[0]["inputs"].dtype == torch.float32


def test_integer_buffers_stay() -> None:
    model = network()
    engine_of(model, TruePrecision("bf16")).run(batches(), max_epochs=1)
    assert isinstance(model[1].num_batches_tracked, Tensor)
    assert model[1].num_batches_tracked.dtype == torch.int64
    assert isinstance(model[1].running_mean, Tensor)
    assert model[1].running_mean.dtype == torch.bfloat16


def test_conversion_stays_until_it_is_undone_explicitly() -> None:
    model = network()
    model[3].double()
    expected = {name: value.dtype for name, value in model.state_dict().items()}
    handler = TruePrecision("bf16")
    engine = engine_of(model, handler, optimizer=ADAM)
    engine.run(batches(), max_epochs=1)
    engine.detach(handler)
    assert next(model.parameters()).dtype == torch.bfloat16
    rounded = {name: value.clone() for name, value in model.state_dict().items()}
    handler.restore(engine)
    assert {name: value.dtype for name, value in model.state_dict().items()} == expected
    for name, value in model.state_dict().items():
        assert torch.equal(value, rounded[name].to(expected[name]))
    optimizer = engine.updates[0].optimizer
    assert optimizer is not None
    for parameter in model.parameters():
        assert optimizer.state[parameter]["exp_avg"].dtype == parameter.dtype
    handler.restore(engine)  # there is nothing left to undo
    assert {name: value.dtype for name, value in model.state_dict().items()} == expected


def test_it_is_not_undone_inside_a_run() -> None:
    handler = TruePrecision("bf16")
    engine = engine_of(network(), handler)
    engine.connect(Events.ITERATION_COMPLETED, handler.restore)
    with pytest.raises(RuntimeError, match=r"'true_precision': restore\(\)"):
        engine.run(batches(), max_epochs=1)


def test_an_evaluator_of_the_same_modules_converts_its_batches() -> None:
    model = network()
    evaluator = Engine(Update.supervised(nn.functional.mse_loss), model=model)
    evaluator.attach(Metrics(loss=Average()), TruePrecision("bf16"))
    engine = engine_of(model, TruePrecision("bf16"), Validation(evaluator, batches(2)))
    engine.run(batches(), max_epochs=2)
    reference = plain_loop(torch.bfloat16, SGD).eval()
    with torch.no_grad():
        losses = [nn.functional.mse_loss(reference(x.bfloat16()), y.bfloat16()).item() for x, y in batches(2)]
    assert engine.state.metrics["loss"] == sum(losses) / 2


def test_two_in_charge_of_the_precision_refuse_each_other() -> None:
    engine = engine_of(network(), TruePrecision("bf16"))
    with pytest.raises(ValueError, match="both 'true_precision' and 'mixed_precision'"):
        engine.attach(MixedPrecision("bf16"))


def test_complex_tensors_are_refused_by_name_before_anything_is_converted() -> None:
    model = nn.ParameterDict({"phase": nn.Parameter(torch.ones(2, dtype=torch.complex64))})
    engine = engine_of(model, TruePrecision("bf16"))
    with pytest.raises(ValueError, match=r"'true_precision'.*'phase'.*complex"):
        engine.run(batches(), max_epochs=1)
    assert model["phase"].dtype == torch.complex64


@pytest.mark.parametrize("precision", ["fp8", "32-true", 16, None])
def test_bad_arguments_are_refused(precision: Any) -> None:
    with pytest.raises(ValueError, match=rf"TruePrecision\(precision={precision!r}\)"):
        TruePrecision(precision)


@pytest.mark.moderate
@pytest.mark.filterwarnings("ignore:C32")
@pytest.mark.parametrize("precision", spread(DTYPES, 1))
def test_it_keeps_its_promises(precision: Any) -> None:
    check_handler(
        lambda: engine_of(network(), GradientAccumulation(2), optimizer=ADAM),
        lambda: TruePrecision(precision),
        batches(),
        max_epochs=2,
    )
