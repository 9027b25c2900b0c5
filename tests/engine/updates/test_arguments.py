"""What users give an update in place of functions: the options of an optimizer's class, and names of modules."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW

from signalfire import Engine, Update
from signalfire.handlers import CSVLogger
from signalfire.testing import fingerprint
from tests.kit import batches, linear, mlp

BUILT = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


class WithAny(SGD):
    """An optimizer that takes any option."""

    def __init__(self, params: Any, nane: str = "", **options: Any) -> None:
        super().__init__(params, lr=options["lr"])


def weights(update: Update) -> Any:
    engine = Engine(update, model=linear(5, 1), seed=0)
    engine.run(batches(3), max_epochs=2)
    return fingerprint(engine)


def loss_of(engine: Engine, batch: Any) -> torch.Tensor:
    return F.mse_loss(engine.model(batch[0]), batch[1])


def test_an_optimizers_class_with_options_is_the_partial_of_it() -> None:
    made = weights(Update.supervised(F.mse_loss, AdamW, lr=0.02, weight_decay=0.1))
    assert made == weights(Update.supervised(F.mse_loss, partial(AdamW, lr=0.02, weight_decay=0.1)))
    assert made == weights(Update.from_function(loss_of, AdamW, lr=0.02, weight_decay=0.1))
    assert made == weights(Update.supervised(F.mse_loss, partial(AdamW, lr=0.02), weight_decay=0.1))
    assert made != weights(Update.supervised(F.mse_loss, AdamW, lr=0.02))
    assert Update.from_model(AdamW, lr=0.5).optimizer.keywords == {"lr": 0.5}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        (
            SGD,
            {"paramters": "head"},
            "paramters= is neither an option of SGD nor an argument; did you mean 'parameters'?",
        ),
        (SGD, {"momentun": 0.9}, "momentun= is neither an option of SGD nor an argument; did you mean 'momentum'?"),
        (
            SGD,
            {"learning_rate": 0.1},
            "learning_rate= is neither an option of SGD nor an argument; the options are lr, momentum",
        ),
        (
            lambda p: SGD(p),
            {"lr": 0.1},
            "lr= is neither an option of <lambda> nor an argument; the factory takes no options; set them in the "
            "factory",
        ),
        (
            "adamw",
            {"lr": 0.1},
            "lr=0.1 requires an optimizer, but optimizer='adamw' is not one; pass the optimizer's class",
        ),
        (None, {"lr": 0.1}, "lr=0.1 needs an optimizer"),
        (BUILT, {"lr": 0.2}, "lr=0.2 cannot be combined with an optimizer that is already built"),
        (partial(SGD, lr=0.1), {"lr": 0.2}, "lr= is passed twice"),
        ({"a": SGD, "b": SGD}, {"lr": 0.2}, "lr=0.2 cannot be combined with several optimizers"),
        (BUILT, {"nme": "x"}, "nme= is not an argument; did you mean 'name'?"),
        (BUILT, {"parameter": "all"}, "parameter= is not an argument; did you mean 'parameters'?"),
        (
            WithAny,
            {"lr": 0.1, "nme": "x"},
            "nme= is not an argument; did you mean 'name'? For an option of WithAny, write partial(WithAny, nme=...)",
        ),
    ],
)
def test_options_that_nobody_takes_are_refused(optimizer: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError) as error:
        Update.supervised(F.mse_loss, optimizer, **options)
    assert str(error.value).startswith(f"Update.supervised: {message}")


@pytest.mark.parametrize("slip", ["optimiser", "optim", "optimzer"])
def test_the_optimizer_by_a_wrong_name(slip: str) -> None:
    arguments: dict[str, Any] = {"lr": 0.1, slip: SGD}
    with pytest.raises(TypeError, match=r"needs an optimizer; .*; did you mean 'optimizer'\?$"):
        Update.supervised(F.mse_loss, **arguments)


def test_a_class_that_takes_any_option_gets_its_own() -> None:
    assert Update.supervised(F.mse_loss, WithAny, lr=0.1, nane="x", foo=3).name == "main"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("0", ["0.weight", "0.bias"]),
        (["1", "0"], ["1.weight", "1.bias", "0.weight", "0.bias"]),
        ("all", ["0.weight", "0.bias", "1.weight", "1.bias"]),
        (None, ["0.weight", "0.bias", "1.weight", "1.bias"]),
    ],
)
def test_parameters_are_those_of_parts_of_the_only_model(given: Any, expected: list[str]) -> None:
    model = mlp(5, 4, 1)
    engine = Engine(Update.supervised(F.mse_loss, SGD, lr=0.1, parameters=given), model=model, allow=["C08"])
    engine.run(batches(1), max_epochs=1)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert [names[one] for one in engine.optimizer.param_groups[0]["params"]] == expected


def test_parameters_are_those_of_a_module_or_of_a_part_of_it() -> None:
    modules = {"encoder": mlp(5, 4, 3), "head": linear(3, 1)}
    updates = [
        Update.from_function(
            lambda engine, batch: engine.modules["encoder"](batch[0]).mean(), SGD, parameters="encoder.1"
        ),
        Update.from_function(loss_of_both, SGD, parameters="head", name="head"),
    ]
    engine = Engine(updates, model=modules, allow=["C08"])
    engine.run(batches(1), max_epochs=1)
    held = [
        set(update.optimizer.param_groups[0]["params"]) for update in engine.updates if update.optimizer is not None
    ]
    assert held == [set(modules["encoder"].get_submodule("1").parameters()), set(modules["head"].parameters())]


def loss_of_both(engine: Engine, batch: Any) -> torch.Tensor:
    return F.mse_loss(engine.modules["head"](engine.modules["encoder"](batch[0])), batch[1])


@pytest.mark.parametrize(
    ("parameters", "kind", "message"),
    [
        (
            "haed",
            ValueError,
            "Update(parameters='haed'): the engine has no such module; the modules are one, head; did you mean 'head'?",
        ),
        ("head.x", ValueError, "Update(parameters='head.x'): the engine has no such module; the modules are one, head"),
    ],
)
def test_a_name_that_is_no_module_lists_those_that_are(parameters: Any, kind: type[Exception], message: str) -> None:
    update = Update.from_function(loss_of, SGD, parameters=parameters)
    with pytest.raises(kind) as error:
        Engine(update, model={"one": linear(5, 1), "head": linear(5, 1)}).run(batches(1), max_epochs=1)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("parameters", "kind"),
    [(3, TypeError), (linear(1, 1), TypeError), ([linear(1, 1)], TypeError), ([], ValueError), ("", ValueError)],
)
def test_parameters_that_are_no_names_are_refused(parameters: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"Update 'main': parameters="):
        Update.from_function(loss_of, SGD, parameters=parameters)


@pytest.mark.parametrize("parameters", [None, "all"])
def test_two_updates_that_train_all_of_several_modules_are_refused_unless_it_is_meant(parameters: Any) -> None:
    updates = [Update.from_function(loss_of_both, SGD, name=name, parameters=parameters) for name in ("d", "g")]
    modules = {"encoder": linear(5, 3), "head": linear(3, 1)}
    if parameters == "all":
        assert Engine(updates, model=modules).run(batches(1), max_epochs=1).iteration == 1
        return
    with pytest.raises(
        ValueError, match=r"'d', 'g' each train all of the modules 'encoder', 'head'.*parameters='encoder'"
    ):
        Engine(updates, model=modules)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["backbone", "head"], ["lr/backbone", "lr/head"]),
        (["backbone", None], ["lr/backbone", "lr/group1"]),
        ([None, None], ["lr/group0", "lr/group1"]),
        (["same", "same"], ["lr/group0", "lr/group1"]),
        (["group1", None], ["lr/group0", "lr/group1"]),
        (["backbone"], ["lr/backbone"]),
        ([None], ["lr"]),
    ],
)
def test_rates_of_groups_with_names_are_logged_by_them(
    names: list[str | None], expected: list[str], tmp_path: Any
) -> None:
    def groups(engine: Engine) -> list[dict[str, Any]]:
        named = [{} if name is None else {"name": name} for name in names]
        return [{"params": engine.model[i].parameters(), "lr": 0.5**i} | named[i] for i in range(len(names))]

    engine = Engine(Update.supervised(F.mse_loss, SGD, parameters=groups), model=mlp(5, 4, 1), allow=["C08"])
    engine.attach(CSVLogger(tmp_path / "log.csv", every="1it"))
    engine.run(batches(1), max_epochs=1)
    rows = (tmp_path / "log.csv").read_text().splitlines()
    assert [row for row in rows if ",lr" in row] == [f"1,1,1,{name},{0.5**i}" for i, name in enumerate(expected)]


def test_the_rate_of_a_named_group_of_one_of_several_updates(tmp_path: Any) -> None:
    updates = [
        Update.from_function(loss_of_both, SGD, lr=0.5, name="d", parameters="head"),
        Update.from_function(
            loss_of_both,
            SGD,
            lr=0.5,
            name="g",
            parameters=lambda engine: [{"params": engine.modules["encoder"].parameters(), "name": "body"}],
        ),
    ]
    engine = Engine(updates, model={"encoder": linear(5, 3), "head": linear(3, 1)})
    engine.attach(CSVLogger(tmp_path / "log.csv", every="1it"))
    engine.run(batches(1), max_epochs=1)
    names = [row.split(",")[3] for row in (tmp_path / "log.csv").read_text().splitlines()]
    assert [name for name in names if name.startswith("lr")] == ["lr/d", "lr/g/body"]


def test_updates_over_several_modules_are_not_refused_where_functions_choose_the_parameters_or_nothing_trains() -> None:
    modules = {"encoder": nn.Linear(2, 2), "head": nn.Linear(2, 1)}

    def update(name: str, optimizer: Any) -> Update:
        return Update.from_function(lambda engine, batch: None, optimizer, name=name)

    def own(name: str) -> Any:
        return lambda parameters: torch.optim.SGD(modules[name].parameters(), lr=0.1)

    Engine([update(name, own(name)) for name in modules], model=modules)
    Engine([update(name, partial(torch.optim.SGD, lr=0.1)) for name in modules], model=modules, training=False)


class WithParts(nn.Module):
    """A model whose parts are called as the engine calls the model, and as all parameters are called."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.all = linear(5, 4), linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.all(self.model(inputs))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("parameters", "readings"),
    [
        ("model", ["parameters='model.model' for the part", "engine.modules['model'].parameters() for the module"]),
        ("all", ["omit parameters= for all parameters", 'engine.model.get_submodule("all").parameters()']),
    ],
)
def test_a_name_that_could_mean_two_parts_is_refused_with_both(parameters: str, readings: list[str]) -> None:
    engine = Engine(Update.supervised(F.mse_loss, SGD, lr=0.1, parameters=parameters), model=WithParts())
    with pytest.raises(ValueError, match="this could mean") as error:
        engine.run(batches(1), max_epochs=1)
    assert all(reading in str(error.value) for reading in readings)


@pytest.mark.parametrize(("parameters", "shape"), [("model.model", (4, 5)), ("model.all", (1, 4))])
def test_a_part_of_that_name_is_chosen_by_its_path(parameters: str, shape: tuple[int, int]) -> None:
    engine = Engine(Update.supervised(F.mse_loss, SGD, lr=0.1, parameters=parameters), model=WithParts(), allow=["C08"])
    engine.run(batches(1), max_epochs=1)
    assert engine.optimizer.param_groups[0]["params"][0].shape == shape


def test_tensors_are_not_printed_in_an_error() -> None:
    tensors = list(linear(5, 1).parameters())
    with pytest.raises(TypeError, match=r"parameters=a list of Parameter; expected the name of a module"):
        Update.supervised(F.mse_loss, SGD, lr=0.1, parameters=tensors)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"optimizer= is a list of Parameter; expected optimizers"):
        Update.supervised(F.mse_loss, tensors)  # type: ignore[arg-type]
