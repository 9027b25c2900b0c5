"""The modules of an engine: models without wrappers, and losses with parameters."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.functional import cross_entropy, normalize

from signalfire import Engine, Update
from signalfire.authoring.versions import TORCH
from signalfire.distributed import process_group, whole_tensor
from signalfire.handlers import (
    EMA,
    DeviceTransfer,
    DistributedDataParallel,
    Freezing,
    FullyShardedDataParallel,
    GradientClipping,
    History,
    Metrics,
    MixedPrecision,
    Validation,
)
from signalfire.handlers.metrics import Average
from tests.kit import SGD, assert_same, batches, linear, mlp, quick
from tests.processes import assert_alike, run_together

ADAM = partial(torch.optim.Adam, lr=1e-2)
DATA = batches(6, inputs=5, targets=(), classes=3)


class Centers(nn.Module):
    """A loss with a learned vector for each class, as in ArcFace and the center loss."""

    def __init__(self, seed: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(4 * normalize(output) @ normalize(self.weight).T, target)


def build(optimizer: Any = SGD, **options: Any) -> tuple[Engine, Centers]:
    loss = Centers()
    return Engine(Update.supervised(loss, optimizer, **options), model=mlp(5, 8, 4), seed=0), loss


def plain_loop(epochs: int) -> tuple[nn.Module, nn.Module]:
    model, loss = mlp(5, 8, 4), Centers()
    optimizer = SGD([*model.parameters(), *loss.parameters()])
    for _ in range(epochs):
        for x, y in DATA:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    return model, loss


def test_the_parameters_of_a_loss_are_trained_as_in_a_plain_loop() -> None:
    engine, loss = build()
    engine.run(DATA, max_epochs=2)
    model, expected = plain_loop(2)
    assert_same(engine.modules["model"], model)
    assert_same(loss, expected)
    (found,) = engine.findings.of_run()
    assert (found.code, found.severity) == ("W43", "info")
    assert engine.model is engine.modules["model"], "the forward calls the model alone"


def test_the_parameters_of_a_loss_are_saved_and_loaded() -> None:
    whole, loss = build()
    whole.run(DATA, max_epochs=2)
    half, _ = build()
    half.run(DATA, max_iters=8)
    file = io.BytesIO()
    torch.save(half.state_dict(), file)
    file.seek(0)
    resumed, resumed_loss = build()
    resumed.load_state_dict(torch.load(file, weights_only=True))
    resumed.run(DATA, max_epochs=2)
    assert_same(resumed_loss, loss)
    other, other_loss = build()
    other.load_weights(whole.weights())
    assert_same(other_loss, loss)


@pytest.mark.parametrize("wrapped", ["partial", "method"])
def test_a_loss_behind_a_partial_or_a_method_is_found(wrapped: str) -> None:
    loss = Centers()
    function = partial(loss) if wrapped == "partial" else loss.forward
    engine = Engine(Update.supervised(function, SGD), model=mlp(5, 8, 4))
    assert engine.modules["loss"] is loss


def test_a_loss_without_parameters_or_with_frozen_ones_changes_nothing() -> None:
    for loss in (cross_entropy, nn.CrossEntropyLoss(weight=torch.ones(4)), Centers().requires_grad_(False)):
        engine = Engine(Update.supervised(loss, SGD), model=mlp(5, 8, 4))
        engine.run(DATA, max_epochs=1)
        assert list(engine.modules) == list(engine.state_dict()["modules"]) == ["model"]
        assert not engine.findings.of_run()


def test_a_loss_that_is_among_the_models_is_not_listed_twice() -> None:
    loss = Centers()
    engine = Engine(
        Update(lambda engine, batch: engine.model["net"](batch[0]), lambda engine, output, batch: loss(output, batch[1]), SGD),
        model={"net": mlp(5, 8, 4), "head": loss},
    )  # fmt: skip
    assert list(engine.modules) == ["net", "head"]


def test_the_losses_of_several_updates_are_named_after_them() -> None:
    updates = [Update.supervised(Centers(seed), SGD, name=name) for seed, name in enumerate("ab")]
    assert list(Engine(updates, model=linear(5, 4)).modules) == ["model", "a_loss", "b_loss"]
    with pytest.raises(
        ValueError, match="a model is named 'loss', but the parameters of the loss Centers of update 'main'"
    ):
        Engine(Update.supervised(Centers(), SGD), model={"loss": linear(5, 4)})


def test_names_of_the_models_parameters_stay_without_a_prefix() -> None:
    engine, loss = build()
    engine.attach(Freezing(["0.weight"]))
    before = engine.model[0].weight.clone()
    centers = loss.weight.clone()
    engine.run(DATA, max_epochs=1)
    assert torch.equal(engine.model[0].weight, before)
    assert not torch.equal(loss.weight, centers)


@pytest.mark.filterwarnings("ignore:C14:signalfire.FindingWarning")
def test_other_handlers_take_the_loss_along() -> None:
    engine, loss = build()
    evaluator = Engine(Update.supervised(loss), model=engine.model)
    evaluator.attach(Metrics(loss=Average()))
    engine.attach(EMA(0.5), GradientClipping(max_norm=0.1), MixedPrecision("bf16"), DeviceTransfer("cpu"), History())
    engine.attach(Validation(evaluator, DATA[:2]))
    engine.run(DATA, max_epochs=2)
    assert list(engine.weights()) == ["model", "loss"]
    assert not torch.equal(engine.weights()["loss"]["weight"], loss.weight), "the average"


def test_a_state_from_before_losses_were_modules_is_loaded() -> None:
    whole, loss = build()
    whole.run(DATA, max_epochs=2)
    half, half_loss = build()
    half.run(DATA, max_epochs=1)
    state = half.state_dict()
    held = state["modules"].pop("loss")  # as it was saved then: by the optimizer alone
    part = state["updates"]["main"]
    part["own_parameters"] = {4: held["weight"]}
    part["parameters"][4] = ""
    resumed, resumed_loss = build()
    resumed.load_state_dict(state)
    resumed.run(DATA, max_epochs=2)
    assert_same(resumed_loss, loss)
    assert not torch.equal(half_loss.weight, loss.weight)


def test_a_model_that_torch_wraps_keeps_its_names_and_its_earlier_states_load() -> None:
    data = batches(6, inputs=5, targets=())
    bare = Engine(Update.supervised(lambda o, t: (o[:, 0] - t).square().mean(), SGD), model=mlp(5, 8, 1))
    wrapped = Engine(bare.updates[0].spec, model=nn.DataParallel(mlp(5, 8, 1)))
    bare.run(data, max_epochs=1)
    wrapped.run(data, max_epochs=1)
    assert isinstance(wrapped.model, nn.DataParallel)
    assert_same(wrapped.weights()["model"], bare.weights()["model"])
    state = wrapped.state_dict()
    earlier = {f"module.{key}": value for key, value in state["modules"]["model"].items()}
    state["modules"]["model"] = earlier
    part = state["updates"]["main"]
    part["parameters"] = [name.replace("model.", "model.module.") for name in part["parameters"]]
    for engine in (bare, wrapped):
        engine.load_state_dict(state)
        engine.run(data, max_epochs=2)
        engine.load_weights({"model": earlier})
        assert_same(engine.weights()["model"], {key.removeprefix("module."): v for key, v in earlier.items()})


def test_a_path_in_place_of_weights_is_refused_with_the_way_to_load_it() -> None:
    engine = Engine(Update.supervised(cross_entropy, SGD), model=mlp(5, 8, 3))
    with pytest.raises(TypeError, match=r"load_weights\(3\): expected a dict of weights, or a checkpoint path"):
        engine.load_weights(3)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match=r"load_weights\(\): 'no-such-folder'"):
        engine.load_weights("no-such-folder")


def test_weights_that_are_not_by_module_are_refused_with_what_to_write() -> None:
    engine = Engine(Update.supervised(cross_entropy, SGD), model=mlp(5, 8, 3))
    with pytest.raises(
        ValueError, match=r"not match the engine's modules; write load_weights\(\{'model': model\.state_dict\(\)\}\)$"
    ):
        engine.load_weights(mlp(5, 8, 3).state_dict())


def test_what_wraps_the_model_in_ddp_itself_refuses_a_wrapped_one_by_name() -> None:
    engine = Engine(Update.supervised(cross_entropy, SGD), model=nn.DataParallel(mlp(5, 8, 3)))
    with pytest.raises(
        ValueError, match="'distributed_data_parallel': the model 'model' is already wrapped in torch's DataParallel"
    ):
        engine.attach(DistributedDataParallel())


@pytest.mark.moderate
@pytest.mark.parametrize(
    "wrapper", quick([DistributedDataParallel, FullyShardedDataParallel], FullyShardedDataParallel)
)
def test_over_two_processes_a_loss_trains_as_over_one(wrapper: Any) -> None:
    if wrapper is FullyShardedDataParallel and TORCH < (2, 13):
        pytest.skip("FullyShardedDataParallel needs torch 2.13")
    if wrapper is FullyShardedDataParallel and not torch.distributed.is_available():
        pytest.skip("needs torch.distributed")
    assert_alike(run_together(_trained_together, 2, wrapper))


def _trained_together(wrapper: Any) -> dict[str, Tensor]:
    engine, loss = build()
    engine.attach(wrapper(timeout=60))
    engine.run(DATA, max_epochs=2)
    model, expected = Engine(Update.supervised(Centers(), SGD), model=mlp(5, 8, 4)), Centers()
    optimizer = SGD([*model.model.parameters(), *expected.parameters()])
    for _ in range(2):
        for one, other in zip(DATA[::2], DATA[1::2], strict=True):
            optimizer.zero_grad()
            x, y = torch.cat([one[0], other[0]]), torch.cat([one[1], other[1]])
            expected(model.model(x), y).backward()
            optimizer.step()
    found = {name: whole_tensor(value) for name, value in loss.state_dict().items()}
    torch.testing.assert_close(found["weight"], expected.weight.detach())
    return found


def compiled(model: nn.Module) -> nn.Module:
    wrapped: nn.Module = torch.compile(model, backend="eager")  # type: ignore[assignment]
    return wrapped


def compiled_parts(model: nn.Module) -> nn.Module:
    return nn.Sequential(*(compiled(part) for part in model.children()))


def checkpointed(model: nn.Module) -> nn.Module:
    return nn.Sequential(*(checkpoint_wrapper(part) for part in model.children()))


def parallel_and_compiled(model: nn.Module) -> nn.Module:
    return compiled(nn.DataParallel(model))


def parallel_of_compiled(model: nn.Module) -> nn.Module:
    return nn.DataParallel(compiled(model))


WRAPPINGS = [compiled, compiled_parts, checkpointed, parallel_and_compiled]


@pytest.mark.moderate
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch, as it compiles
@pytest.mark.parametrize("wrap", WRAPPINGS)
@pytest.mark.parametrize("wrapped_first", [True, False])
def test_names_states_and_weights_are_those_of_the_model_without_wrappers(
    wrap: Callable[[nn.Module], nn.Module], wrapped_first: bool
) -> None:
    def trained(wraps: bool, epochs: int, state: Any = None) -> Engine:
        model = mlp(5, 8, 3, nn.Tanh())
        engine = Engine(Update.supervised(cross_entropy, ADAM), model=wrap(model) if wraps else model, seed=0)
        engine.attach(Freezing(["0.bias"]), EMA(0.5))
        if state is not None:
            engine.load_state_dict(state)
        engine.run(DATA, max_epochs=epochs)
        return engine

    whole = trained(not wrapped_first, 2)
    state = trained(wrapped_first, 1).state_dict()
    assert "_orig_mod" not in repr(state)
    resumed = trained(not wrapped_first, 2, state)
    for one, other in zip(whole.modules["model"].parameters(), resumed.modules["model"].parameters(), strict=True):
        assert torch.equal(one, other)
    fresh = Engine(Update.supervised(cross_entropy, ADAM), model=wrap(mlp(5, 8, 3, nn.Tanh(), seed=9)), seed=0)
    plain = mlp(5, 8, 3, nn.Tanh(), seed=4)
    fresh.load_weights({"model": plain.state_dict()})
    assert all(torch.equal(a, b) for a, b in zip(fresh.modules["model"].parameters(), plain.parameters(), strict=True))


class Versioned(nn.Linear):
    """A layer with names of its own for states of an older version."""

    _version = 3

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *more: Any) -> None:
        assert metadata.get("version") == 3
        super()._load_from_state_dict(state, prefix, metadata, *more)


@pytest.mark.parametrize("wrap", [*WRAPPINGS, parallel_of_compiled])
@pytest.mark.parametrize("names", ["own", "wrapped"])
def test_a_state_has_the_models_own_names_and_versions_and_loads_with_those_of_wrappers_too(
    wrap: Callable[[nn.Module], nn.Module], names: str
) -> None:
    plain = nn.Sequential(Versioned(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    wrapped = wrap(plain)
    engine = Engine(Update.supervised(cross_entropy, torch.optim.SGD(plain.parameters(), 0.1)), model=wrapped)
    state, weights, parameters = engine.state_dict(), engine.weights(), dict(plain.named_parameters())
    assert state["modules"]["model"].keys() == weights["model"].keys() == plain.state_dict().keys()
    assert weights["model"]._metadata == plain.state_dict()._metadata  # type: ignore[attr-defined]
    assert state["updates"]["main"]["parameters"] == [f"model.{name}" for name in parameters]
    if names == "wrapped":
        state["modules"]["model"] = wrapped.state_dict()
        weights["model"] = wrapped.state_dict()
    before = [p.detach().clone() for p in plain.parameters()]
    loads: list[Callable[[Engine], None]] = [
        lambda one: one.load_weights(weights),
        lambda one: one.load_state_dict(state),
    ]
    for load in loads:
        for again in (wrap, lambda model: model):
            fresh = nn.Sequential(Versioned(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
            load(Engine(Update.supervised(cross_entropy, ADAM), model=again(fresh), seed=0))
            assert all(torch.equal(one, other) for one, other in zip(fresh.parameters(), before, strict=True))
    plain.load_state_dict(engine.weights()["model"])


def test_a_state_of_a_compiled_wrapper_loads_into_the_model_itself() -> None:
    plain, other = mlp(5, 8, 3, nn.Tanh(), seed=4), mlp(5, 8, 3, nn.Tanh(), seed=9)
    engine = Engine(Update.supervised(cross_entropy, ADAM), model=other, seed=0)
    for wrapped in (parallel_and_compiled(plain), nn.DataParallel(compiled(plain))):
        engine.load_weights({"model": {name: 2 * one for name, one in other.state_dict().items()}})
        engine.load_weights({"model": wrapped.state_dict()})
        assert_same(other, plain)


def pipelines_are_refused() -> list[str]:
    from torch.distributed import pipelining

    process_group()
    stage = pipelining.PipelineStage(nn.Linear(2, 1), 0, 1, torch.device("cpu"))
    found = []
    for one in (stage, pipelining.ScheduleGPipe(stage, 2), pipelining.Pipe):
        for model in (one, {"first": nn.Linear(2, 1), "second": one}):
            with pytest.raises(TypeError, match=r"pipelines are not supported\. A pipeline schedule") as caught:
                Engine(Update.supervised(cross_entropy, SGD), model=model)  # type: ignore[arg-type]
            found.append(str(caught.value).partition(" of ")[0])
    return found


@pytest.mark.moderate
def test_stages_and_schedules_of_torchs_pipelines_are_refused_with_the_reason() -> None:
    (found,) = run_together(pipelines_are_refused, 1)
    assert [*dict.fromkeys(found)] == [
        f"Engine: model= is a {kind}" for kind in ("PipelineStage", "ScheduleGPipe", "Pipe")
    ]
