"""ChannelsLast: the layout of everything inside a run and after it, and the same training up to rounding."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Handler
from signalfire.handlers import (
    EMA,
    ChannelsLast,
    DeviceTransfer,
    DistributedDataParallel,
    FullyShardedDataParallel,
    GradientAccumulation,
)
from tests.kit import batches, build, evaluator_of, mlp
from tests.processes import Failed, assert_alike, run_together

ADAM = partial(torch.optim.Adam, lr=1e-2)


def network(dimensions: int = 2) -> nn.Module:
    torch.manual_seed(3)
    conv: Any = nn.Conv2d if dimensions == 2 else nn.Conv3d
    norm: Any = nn.BatchNorm2d if dimensions == 2 else nn.BatchNorm3d
    return nn.Sequential(conv(3, 8, 3, bias=False), norm(8), nn.ReLU(), conv(8, 4, 1), nn.Flatten(), nn.LazyLinear(1))


def made(dimensions: int = 2) -> nn.Module:
    """A network whose lazy layer has its weights."""
    model = network(dimensions)
    model(data(dimensions)[0][0])
    model[1].reset_running_stats()  # type: ignore[index]
    return model


def data(dimensions: int = 2, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    return batches(count, (3, *[6] * dimensions))


def layouts(engine: Engine) -> dict[str, tuple[int, ...]]:
    """The strides of parameters, buffers, gradients and moments."""
    model = engine.modules["model"]
    found = {name: tensor.stride() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"{name} gradient"] = parameter.grad.stride()
        optimizer = engine.updates[0].optimizer
        for key, value in ({} if optimizer is None else optimizer.state.get(parameter, {})).items():
            found[f"{name} {key}"] = value.stride()
    return found


@pytest.mark.parametrize(("dimensions", "memory_format"), [(2, torch.channels_last), (3, torch.channels_last_3d)])
def test_everything_is_channels_last_inside_the_run_and_as_before_after_it(dimensions: int, memory_format: Any) -> None:
    model = made(dimensions)
    parameters = dict(model.named_parameters())
    engine, seen = build(model, ChannelsLast(), optimizer=ADAM), {}

    @engine.on(Events.OPTIMIZER_STEP_COMPLETED)
    def look(engine: Engine) -> None:
        (weight,) = [p for name, p in model.named_parameters() if name == "0.weight"]
        assert weight.grad is not None
        optimizer = engine.updates[0].optimizer
        assert optimizer is not None
        tensors = {"weight": weight, "gradient": weight.grad, "batch": engine.state.batch[0], **optimizer.state[weight]}
        seen.update(
            {name: one.is_contiguous(memory_format=memory_format) for name, one in tensors.items() if one.dim()}
        )

    plain = build(made(dimensions), optimizer=ADAM)
    plain.run(data(dimensions), max_epochs=2)
    for epochs in (1, 2):
        engine.run(data(dimensions), max_epochs=epochs)
        assert seen == dict.fromkeys(("weight", "gradient", "batch", "exp_avg", "exp_avg_sq"), True)
        assert layouts(engine) == layouts(plain)
    assert all(model.get_parameter(name) is p for name, p in parameters.items())
    for name, value in plain.modules["model"].state_dict().items():
        assert torch.allclose(value, model.state_dict()[name], atol=1e-5), name


@pytest.mark.parametrize("how", ["detached", "disabled", "failed"])
def test_the_layout_is_as_before_however_the_handler_leaves(how: str) -> None:
    engine, handler = build(made(), optimizer=ADAM), ChannelsLast()
    engine.attach(handler)
    before = {name: one.stride() for name, one in engine.modules["model"].state_dict().items()}
    after: list[bool] = []

    def as_before() -> bool:
        found = layouts(engine)
        return all(
            strides == before[name.split()[0]]
            for name, strides in found.items()
            if name.split()[0] in before and len(strides) == 4
        )

    @engine.on(Events.LOSS_COMPUTED(once=2))
    def act(engine: Engine) -> None:
        after.append(as_before())
        if how == "failed":
            raise ValueError("for the test")
        if how == "detached":
            engine.detach(handler)
        else:
            handler.enabled = False

    engine.connect(Events.ITERATION_STARTED(once=4), lambda engine: after.append(as_before()))
    if how == "failed":
        with pytest.raises(ValueError, match="for the test"):
            engine.run(data(), max_epochs=1)
        after.append(True)
    else:
        engine.run(data(), max_epochs=1)
    assert after == [False, True]
    assert as_before()


def test_a_run_continues_from_a_run_in_the_other_layout() -> None:
    def engine(*handlers: Handler) -> Engine:
        return build(made(), *handlers, optimizer=ADAM)

    plain = engine()
    plain.run(data(), max_epochs=3)
    for first, second in ([ChannelsLast()], []), ([], [ChannelsLast()]):
        one, other = engine(*first), engine(*second)
        saved: list[Any] = []
        one.connect(Events.EPOCH_COMPLETED(once=1), lambda engine, saved=saved: saved.append(engine.state_dict()))
        one.run(data(), max_epochs=1)
        other.load_state_dict(saved[0])
        inside: list[bool] = []

        @other.on(Events.FORWARD_STARTED)
        def look(engine: Engine, inside: list[bool] = inside) -> None:
            optimizer = engine.updates[0].optimizer
            assert optimizer is not None
            weight = next(engine.model.parameters())
            inside.append(optimizer.state[weight]["exp_avg"].stride() == weight.stride())

        other.run(data(), max_epochs=3)
        if second:
            assert inside == [True] * 8
        for name, value in plain.modules["model"].state_dict().items():
            assert torch.allclose(value, other.modules["model"].state_dict()[name], atol=1e-5), name
        assert {k: v for k, v in layouts(other).items() if second} == (layouts(plain) if second else {})


def test_gradients_of_an_open_window_are_restored_too() -> None:
    found = []
    for handlers in ([], [ChannelsLast()]):
        engine = build(made(), GradientAccumulation(2), *handlers)
        engine.run(data(), max_iters=3)
        found.append(layouts(engine))
    assert "0.weight gradient" in found[0]
    assert found[0] == found[1]


def test_a_model_without_convolutions_is_left_as_it_is_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 1))
    engine, seen = build(model, ChannelsLast()), []
    engine.connect(Events.FORWARD_STARTED, lambda engine: seen.append(engine.state.batch[0].is_contiguous()))
    engine.run(data(), max_epochs=1)
    assert seen == [True] * 4
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["channels_last: the model has no two- or three-dimensional convolutions, so nothing is converted"]


def test_batches_are_converted_after_they_are_moved_whatever_was_attached_first() -> None:
    for handlers in ([ChannelsLast(), DeviceTransfer("cpu")], [DeviceTransfer("cpu"), ChannelsLast()]):
        engine = build(made(), *handlers)
        signal = engine.signal(Events.GET_BATCH_COMPLETED)
        assert [one.owner for one in signal.connections] == ["device_transfer", "channels_last"]


def test_an_evaluation_by_the_trainer_converts_its_batches_too_and_leaves_the_users() -> None:
    model, seen = made(), []
    evaluator = evaluator_of(model)
    evaluator.connect(
        Events.FORWARD_STARTED,
        lambda engine: seen.append(engine.state.batch[0].is_contiguous(memory_format=torch.channels_last)),
    )
    engine, own = build(model, ChannelsLast()), data()
    engine.connect(Events.EPOCH_COMPLETED, lambda engine: engine.evaluate(evaluator, own))
    engine.run(own, max_epochs=1)
    assert seen == [True] * 4
    assert all(inputs.is_contiguous() for inputs, _ in own)


def test_averages_have_the_layout_of_the_weights_afterwards() -> None:
    engine = build(made(), ChannelsLast(), EMA(0.5))
    engine.run(data(), max_epochs=1)
    strides = {name: p.stride() for name, p in engine.modules["model"].named_parameters()}
    averages = engine.find(EMA).parameter_copies()
    assert {name: averages[f"model.{name}"].stride() for name in strides} == strides


def of_ranks() -> dict[str, Any]:
    engine = build(made(), ChannelsLast(), DistributedDataParallel(timeout=60.0), optimizer=ADAM)
    engine.run(data(count=8), max_epochs=2)
    return {"weights": engine.modules["model"].state_dict(), "layouts": layouts(engine)}


@pytest.mark.slow
def test_two_ranks_stay_alike_and_the_layout_is_as_before() -> None:
    plain = build(made(), optimizer=ADAM)
    plain.run(data(), max_epochs=1)
    found = assert_alike(run_together(of_ranks, 2))
    assert found["layouts"] == layouts(plain)


def sharded() -> None:
    build(made(), ChannelsLast(), FullyShardedDataParallel(timeout=60.0), optimizer=ADAM).run(data(), max_epochs=1)


@pytest.mark.slow
def test_sharded_weights_are_refused_by_name() -> None:
    with pytest.raises(Failed, match=r"'channels_last': the memory format of sharded weights, such as '0"):
        run_together(sharded, 2)


def test_a_second_one_is_refused() -> None:
    with pytest.raises(ValueError, match="control the memory format"):
        build(mlp(5, 8, 1), ChannelsLast(), ChannelsLast(name="other"))
