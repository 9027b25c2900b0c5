"""A state is loaded whole or not at all, and what fits a module is for the module to decide."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD

from signalfire import Engine, Events, Handler, Update, on
from signalfire.handlers import EMA, SWA
from signalfire.resuming.loads import ModuleTensors
from tests.kit import assert_same, batches

SCHEDULED = partial(SGD, lr=0.1, momentum=0.9)


def trained(model: nn.Module, *handlers: Handler) -> Engine:
    engine = Engine(Update.supervised(mse_loss, SCHEDULED), model=model, seed=0)
    engine.attach(*handlers)
    return engine


class Renamed(nn.Module):
    """A model whose layer had another name before."""

    def __init__(self, *, before: bool = False) -> None:
        super().__init__()
        self.name = "old" if before else "layer"
        setattr(self, self.name, nn.Linear(5, 1))
        self.register_load_state_dict_pre_hook(self._rename)  # type: ignore[no-untyped-call]

    def _rename(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}old.")]:
            state[key.replace("old.", f"{self.name}.")] = state.pop(key)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = getattr(self, self.name)(inputs)
        return output


class Range(nn.Module):
    """Observes the smallest values of each channel, as torch's observers do: their buffers have no shape before a first batch."""

    least: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("least", torch.empty(0))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        self.least.resize_(state[f"{prefix}least"].shape)
        super()._load_from_state_dict(state, prefix, *args)

    def forward(self, inputs: Tensor) -> Tensor:
        seen = inputs.detach().amin(0)
        self.least.resize_(seen.shape).copy_(seen)
        return inputs


def observed() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 1), Range())


def quantized() -> nn.Module:
    from torch.ao import quantization

    model = nn.Sequential(quantization.QuantStub(), nn.Linear(5, 1), quantization.DeQuantStub())
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    prepared: nn.Module = quantization.prepare_qat(model)
    return prepared


def normalized(*, before: bool = False) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the older one is deprecated
        return (nn.utils.weight_norm if before else nn.utils.parametrizations.weight_norm)(nn.Linear(5, 1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "an observer whose buffers grow": (observed, observed),
    "a hook that renames keys": (partial(Renamed, before=True), Renamed),
    "a parametrization in place of hooks": (partial(normalized, before=True), normalized),
    "quantization-aware training": (quantized, quantized),
}
QUICK = [kind for kind in MODELS if kind != "quantization-aware training"]


@pytest.mark.parametrize("kind", [*QUICK, pytest.param("quantization-aware training", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Please use quant_min", "ignore:_aminmax")
def test_what_a_module_itself_takes_is_resumed_as_in_a_plain_loop(kind: str) -> None:
    before, now = MODELS[kind]
    data = batches(4)
    first = trained(before())
    first.run(data, max_epochs=1)
    state = copy.deepcopy(first.state_dict())

    model = now()
    model.load_state_dict(state["modules"]["model"])
    optimizer = SCHEDULED(model.parameters())
    optimizer.load_state_dict(copy.deepcopy(state["updates"]["main"]["optimizer"]))
    for inputs, targets in data:
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()

    resumed = trained(now())
    resumed.load_state_dict(state)
    resumed.run(data, max_epochs=2)
    assert_same(dict(resumed.model.state_dict()), dict(model.state_dict()))
    other = trained(now())
    other.load_weights(state["modules"])
    again = now()
    again.load_state_dict(state["modules"]["model"])
    assert_same(dict(other.model.state_dict()), dict(again.state_dict()))


def everything(engine: Engine) -> dict[str, Any]:
    return {key: plain(value) for key, value in engine.state_dict().items() if key not in ("data", "composition")}


def plain(value: Any) -> Any:
    """A state without tensors, to be compared."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


class Failing(Handler):
    """A handler that takes no state but its first one."""

    trains = True

    def state_dict(self) -> dict[str, Any]:
        return {"value": 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise KeyError("what it needs")

    @on(Events.STARTED)
    def look(self, engine: Engine) -> None:
        pass


def deep(optimizer: Any = SCHEDULED) -> Engine:
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    engine = Engine(Update.supervised(mse_loss, optimizer), model=model, seed=0)
    engine.attach(EMA(0.9, name="ema"))
    return engine


def split(*groups: tuple[int, ...]) -> Callable[[Any], SGD]:
    def made(parameters: Any) -> SGD:
        own = list(parameters)
        return SGD([{"params": [own[i] for i in group]} for group in groups], lr=0.1)

    return made


REFUSED: dict[str, tuple[Callable[[], Engine], Callable[[], Engine], str]] = {
    "a handler that takes no state": (
        lambda: _with(deep(), Failing()),
        lambda: _with(deep(), Failing()),
        "handler 'failing': KeyError: 'what it needs'",
    ),
    "a handler of another class": (
        lambda: _with(deep(), EMA(0.5, evaluate=False, name="average")),
        lambda: _with(deep(), SWA(start=1, bn_batches=0, evaluate=False, name="average")),
        "handler 'average', whose class was EMA and is now SWA: KeyError: 'statistics_of'",
    ),
    "more groups": (
        partial(deep, split((0, 1), (2, 3, 4, 5))),
        deep,
        "update 'main' had 2 parameter groups with 2 and 4 parameters, but now has 1 parameter group with 6 "
        "parameters; build the",
    ),
    "other groups": (
        partial(deep, split((0, 1), (2, 3, 4, 5))),
        partial(deep, split((0,), (1, 2, 3, 4, 5))),
        r"group 0 held model.0.weight, model.0.bias, but now holds model.0.weight; build the optimizer as",
    ),
    "groups of other parameters": (
        partial(deep, split((0, 1, 2), (3, 4, 5))),
        partial(deep, split((0, 1, 3), (2, 4, 5))),
        "had the parameters model.0.weight, model.0.bias, model.1.weight in group 0, but now",
    ),
}


def _with(engine: Engine, handler: Handler) -> Engine:
    engine.attach(handler)
    return engine


@pytest.mark.parametrize("kind", REFUSED)
def test_a_load_that_fails_names_the_part_and_leaves_everything_as_it_was(kind: str) -> None:
    saved, here, message = REFUSED[kind]
    first = saved()
    first.run(batches(4), max_epochs=1)
    engine = here()
    engine.run(batches(2), max_epochs=2)
    before = everything(engine)
    engine.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=f"the loaded state does not match this engine: .*{message}"):
        engine.run(batches(4), max_epochs=3)
    engine.snapshots.reset()
    assert everything(engine) == before


class Half(nn.Linear):
    """A layer whose own load fails after it has changed the values."""

    fails = False

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if self.fails:
            raise RuntimeError("it is of another format")


def test_weights_that_the_last_module_refuses_change_none() -> None:
    model: dict[str, Any] = {"one": nn.Linear(5, 1), "two": Half(5, 1)}
    engine = Engine(Update.from_function(lambda engine, x: model["one"](x).sum(), SCHEDULED), model=model, seed=0)
    before = copy.deepcopy(engine.weights())
    given = {name: {key: value + 1 for key, value in state.items()} for name, state in before.items()}
    model["two"].fails = True
    with pytest.raises(ValueError, match="Half rejects its state: RuntimeError: it is of another format"):
        engine.load_weights(given)
    assert plain(engine.weights()) == plain(before)
    model["two"].fails = False
    engine.load_weights(given)
    assert plain(engine.weights()) == plain(given)


def test_tensors_are_put_back_with_their_shapes_identities_and_kinds() -> None:
    model: Any = nn.Sequential(nn.BatchNorm1d(3), nn.LazyLinear(2))
    mean, weight, lazy = model[0].running_mean, model[0].weight, model[1].weight
    kept = ModuleTensors([model])
    model[0].running_mean = torch.ones(3)
    model[0].register_buffer("more", torch.ones(1))
    weight.data = torch.ones(5)
    lazy.materialize((2, 3))
    kept.put_back()
    assert model[0].running_mean is mean
    assert mean.tolist() == [0, 0, 0]
    assert weight.tolist() == [1, 1, 1]
    assert "more" not in model[0].state_dict()
    assert isinstance(lazy, nn.UninitializedParameter)
    assert model(torch.ones(4, 3)).shape == (4, 2)


def test_a_state_for_a_model_that_no_batch_has_initialised_is_refused_in_the_words_of_a_run() -> None:
    data = batches(4)
    lazy = (
        "parameters of 'model' are not initialized yet: weight, bias. Lazy modules take their shapes from the first "
        "batch"
    )
    first = trained(nn.LazyLinear(1))
    first.model(data[0][0])
    first.run(data, max_epochs=1)
    engine = trained(nn.LazyLinear(1))
    with pytest.raises(ValueError, match=rf"load_state_dict\(\): {lazy}"):
        engine.load_state_dict(first.state_dict())
    engine.model(data[0][0])
    engine.load_state_dict(first.state_dict())
    assert_same(dict(engine.model.state_dict()), dict(first.model.state_dict()))

    later = trained(nn.LazyLinear(1))
    later.connect(Events.MODEL_SETUP, lambda engine: engine.model(data[0][0]))
    later.load_state_dict(first.state_dict())
    later.run(data, max_epochs=2)
    first.run(data, max_epochs=2)
    assert_same(dict(later.model.state_dict()), dict(first.model.state_dict()))


def test_an_evaluator_whose_model_is_lazy_takes_weights() -> None:
    first = trained(nn.Linear(5, 1))
    first.run(batches(4), max_epochs=1)
    evaluator = Engine(Update.supervised(mse_loss), model=nn.LazyLinear(1))
    evaluator.load_state_dict(first.state_dict())
    assert_same(dict(evaluator.model.state_dict()), dict(first.model.state_dict()))
