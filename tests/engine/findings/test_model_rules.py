"""What a model holds without registering it, and options of optimizers with which nothing converges."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR

from signalfire import Engine, Update
from signalfire.handlers import Freezing, LRScheduling
from tests.kit import SGD, batches, linear, mlp


class Holding(nn.Module):
    """Holds something in an attribute, and uses a layer of its own."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)
        self.held = held

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.layer(input)
        return output


def found(model: nn.Module, code: str, optimizer: Any = SGD) -> list[str]:
    engine = Engine(Update.supervised(nn.functional.mse_loss, optimizer), model=model)
    return [one.sentence for one in engine.check(batches(), max_epochs=1) if one.code == code]


FROZEN = linear(5, 1).requires_grad_(False)


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ([nn.Linear(5, 5), nn.Linear(5, 1)], "model.held is a list of layers with 4 trainable parameters"),
        ((nn.Linear(5, 5),), "model.held is a tuple of layers with 2 trainable parameters"),
        ({"one": nn.Linear(5, 5)}, "model.held is a dict of layers with 2 trainable parameters"),
        (torch.ones(3, requires_grad=True), "model.held is a tensor that requires gradients but is not a parameter"),
    ],
)
def test_what_is_held_where_torch_does_not_find_it_is_reported(held: Any, words: str) -> None:
    [sentence] = found(Holding(held), "C27")
    assert sentence.startswith(words)


def test_it_is_found_inside_a_layer_too() -> None:
    [sentence] = found(nn.Sequential(Holding([nn.Linear(1, 1)])), "C27")
    assert sentence.startswith("model.0.held is a list")


@pytest.mark.parametrize(
    "held", [[FROZEN], torch.ones(3), nn.ModuleList([nn.Linear(1, 1)]), nn.Parameter(torch.ones(1)), [1, 2], {"a": "b"}]
)
def test_what_is_registered_frozen_or_something_else_is_not(held: Any) -> None:
    assert found(Holding(held), "C27") == []


def test_layers_that_are_listed_twice_are_registered_once() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 1))
    model.order = [model[1], model[0]]  # type: ignore[assignment]
    assert found(model, "C27") == []


def test_what_another_optimizer_trains_is_the_users_to_hide() -> None:
    hidden = nn.Linear(1, 1)
    model = Holding([hidden])
    optimizer = torch.optim.SGD([*model.parameters(), *hidden.parameters()], lr=0.1)
    assert found(model, "C27", optimizer) == []


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (partial(torch.optim.SGD, lr=0.1, momentum=1.0), "with momentum=1, past gradients never decay"),
        (partial(torch.optim.SGD, lr=0.1, weight_decay=5), "shrink each weight by 50% in every step"),
        (partial(torch.optim.AdamW, lr=0.5, weight_decay=0.2), "shrink each weight by 10%"),
        (partial(torch.optim.AdamW, lr=1.0), "moves each weight by about 1 in every step"),
        (partial(torch.optim.Adam, lr=0.01, weight_decay=0.5), "may outweigh them"),
    ],
)
def test_options_with_which_nothing_converges_are_reported(optimizer: Any, words: str) -> None:
    [sentence] = found(linear(5, 1), "C28", optimizer)
    assert words in sentence


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.99, weight_decay=1e-2),
        partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.3),
        partial(torch.optim.Adam, lr=0.1, weight_decay=0.01),
        partial(torch.optim.Adagrad, lr=0.1),
        partial(torch.optim.Adafactor, lr=None),  # type: ignore[arg-type]
        partial(torch.optim.AdamW, lr=torch.tensor(0.1), weight_decay=0.1),
    ],
)
def test_usual_options_are_not(optimizer: Any) -> None:
    assert found(linear(5, 1), "C28", optimizer) == []


def tiny(step: int) -> float:
    return 1e-3 / (step + 1)


def test_a_rate_of_one_that_a_schedule_multiplies_with_a_small_factor_is_usual() -> None:
    model = linear(5, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    LambdaLR(optimizer, tiny)
    assert found(model, "C28", optimizer) == []
    adam = partial(torch.optim.Adam, lr=1.0)
    engine = Engine(Update.supervised(nn.functional.mse_loss, adam), model=linear(5, 1), seed=0)
    engine.attach(LRScheduling(partial(LambdaLR, lr_lambda=tiny), every="1step"))
    engine.run(batches(), max_epochs=1)
    assert not engine.findings.of_run().of("C28")


class Branches(nn.Module):
    """Two layers beside each other that begin as means, as those of a linear forecast do."""

    def __init__(self) -> None:
        super().__init__()
        self.trend, self.season = nn.Linear(5, 3), nn.Linear(5, 3)
        for layer in (self.trend, self.season):
            nn.init.constant_(layer.weight, 0.2)

    def forward(self, input: Tensor) -> Tensor:
        return self.trend(input.cumsum(1)) + self.season(input)  # type: ignore[no-any-return]


def test_units_that_begin_alike_and_get_gradients_of_their_own_do_not_stay_alike() -> None:
    blur = nn.Conv2d(4, 4, 3, groups=4)
    nn.init.constant_(blur.weight, 1 / 9)
    assert found(nn.Sequential(nn.Conv2d(1, 4, 3), blur, nn.Conv2d(4, 1, 1)), "C33") == []
    assert found(Branches(), "C33") == []


def test_an_activation_with_a_parameter_may_stand_at_several_places() -> None:
    activation = nn.PReLU()
    assert found(nn.Sequential(nn.Linear(5, 5), activation, nn.Linear(5, 5), activation), "C36") == []


class Applying(nn.Module):
    """Holds layers in a `Sequential`, and applies them in one of several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1))


class Iterating(Applying):
    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers[:-1]:  # type: ignore[attr-defined]
            inputs = torch.relu(layer(inputs))
        return self.layers[-1](inputs)  # type: ignore[no-any-return]


class Enumerating(Applying):
    def forward(self, inputs: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            inputs = layer(torch.tanh(inputs) if place else inputs)
        return inputs


class Calling(Applying):
    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)  # type: ignore[no-any-return]


class Between(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        for layer in self:
            input = torch.tanh(layer(input))
        return input


class Several(nn.Module):
    """Applies the layers of networks in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleDict({"a": nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1))})

    def forward(self, inputs: Tensor) -> Tensor:
        for net in self.nets.values():
            for layer in net:  # type: ignore[attr-defined]
                inputs = torch.tanh(layer(inputs))
        return inputs


def layer_by_layer(engine: Engine, batch: Any) -> Tensor:
    hidden = batch[0]
    for layer in engine.model:
        hidden = torch.tanh(layer(hidden))
    return nn.functional.mse_loss(hidden, batch[1])


def as_a_whole(engine: Engine, batch: Any) -> Tensor:
    return nn.functional.mse_loss(engine.model(batch[0]), batch[1])


def test_a_function_that_applies_the_layers_may_have_activations_between_them() -> None:
    codes = []
    for function in (layer_by_layer, as_a_whole):
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1))
        engine = Engine(Update.from_function(function, SGD), model=model)
        codes.append([one.code for one in engine.check(batches(), max_epochs=1)])
    assert codes == [[], ["C37"]]


def test_hooks_may_be_activations() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1))
    assert len(found(model, "C37")) == 1
    for layer in model:
        layer.register_forward_hook(lambda layer, inputs, output: output.relu())
    assert found(model, "C37") == []


def test_layers_that_a_module_applies_itself_may_have_activations_between_them() -> None:
    assert found(Iterating(), "C37") == found(Enumerating(), "C37") == found(Several(), "C37") == []
    assert found(Between(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1)), "C37") == []
    [sentence] = found(Calling(), "C37")
    assert "in layers, 3 Linear layers" in sentence


def test_units_that_the_next_layer_weights_differently_do_not_stay_alike() -> None:
    hidden, convolutions = mlp(5, 8, 1, nn.ReLU()), nn.Conv1d(1, 4, 2)
    for layer in (hidden[0], convolutions):
        nn.init.constant_(layer.weight, 0.1)  # type: ignore[arg-type]
    assert found(hidden, "C33") == []
    assert found(nn.Sequential(nn.Unflatten(1, (1, 5)), convolutions, nn.Flatten(), nn.Linear(16, 1)), "C33") == []


def test_units_of_which_only_the_biases_differ_are_not_said_to_stay_alike() -> None:
    model = mlp(5, 8, 1, nn.ReLU())
    for place in (0, 2):
        nn.init.constant_(model[place].weight, 0.1)  # type: ignore[arg-type]
    [sentence] = found(model, "C33")
    assert "they differ only in their biases" in sentence
    nn.init.zeros_(model[0].bias)  # type: ignore[arg-type]
    [sentence] = found(model, "C33")
    assert "they get the same gradients and stay equal" in sentence


def test_units_that_dropout_parts_are_not_said_to_stay_alike() -> None:
    for between in (nn.ReLU(), nn.Dropout(0.5)):
        first, last = linear(5, 8), linear(8, 1)
        for parameter in (*first.parameters(), *last.parameters()):
            nn.init.constant_(parameter, 0.1)
        [sentence] = found(nn.Sequential(first, between, last), "C33")
        assert ("dropout makes them differ" in sentence) is isinstance(between, nn.Dropout)


class Switched(nn.Module):
    """Has an attribute of its own with the name of a parameter's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.requires_grad = nn.Linear(5, 1), True

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(inputs)
        return output if self.requires_grad else output.detach()


class Asking(Switched):
    """Reads its attribute in another method."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.features(inputs)

    def features(self, inputs: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.requires_grad and torch.is_grad_enabled()):
            output: Tensor = self.layer(inputs)
            return output


class Storing(Holding):
    """Stores an option that nothing reads."""

    def __init__(self, requires_grad: bool) -> None:
        super().__init__(None)
        self.requires_grad = requires_grad


def test_an_attribute_that_a_method_reads_or_that_says_how_the_parameters_are_has_an_effect() -> None:
    for reading in (Switched(), Asking()):
        reading.requires_grad = False
        assert found(reading, "C35") == []
    assert len(found(Storing(False), "C35")) == 1
    model = linear(5, 1)
    model.requires_grad = False  # type: ignore[assignment]
    assert len(found(model, "C35")) == 1
    model.requires_grad_(False)
    assert found(nn.Sequential(model, nn.Linear(1, 1)), "C35") == []


class Keeping(nn.Module):
    """Keeps its normalization layer in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(5, momentum=0.99), nn.Linear(5, 1)

    def train(self, mode: bool = True) -> Keeping:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.head(self.norm(inputs))
        return output


def test_statistics_of_layers_that_the_run_keeps_in_eval_mode_do_not_move() -> None:
    assert found(Keeping(), "C34") == []
    codes = []
    for handlers in ([Freezing("0")], []):
        model = nn.Sequential(nn.BatchNorm1d(5, momentum=0.99), nn.Linear(5, 1))
        engine = Engine(Update.supervised(nn.functional.mse_loss, SGD), model=model)
        engine.attach(*handlers)
        codes.append([one.code for one in engine.check(batches(), max_epochs=1)])
    assert codes == [[], ["C34"]]


def test_looking_at_weights_makes_no_power_iteration_of_a_spectral_norm() -> None:
    weights = []
    for check in (True, False):
        torch.manual_seed(0)
        layer = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 64))
        model = nn.Sequential(layer, nn.ReLU(), nn.Linear(64, 1)).train()
        engine = Engine(Update.supervised(nn.functional.mse_loss, SGD), model=model, seed=0)
        engine.run(batches(8), max_epochs=1, check=check)
        weights.append(engine.model.state_dict())
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())


@pytest.mark.parametrize(("optimizer", "words"), [
    (partial(torch.optim.SGD, lr=1e-8), "hardly changes any weight unless its gradient is very large"),
    (partial(torch.optim.Adam, lr=1e-8), "lr=1e-08 hardly changes any weight"),
])  # fmt: skip
def test_a_tiny_rate_says_no_more_than_what_the_optimizer_does(optimizer: Any, words: str) -> None:
    [sentence] = found(linear(5, 1), "C28", optimizer)
    assert sentence.endswith(words)


def by_depth(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [one], "lr": 1e-4 * 1e-4**depth} for depth, one in enumerate(parameters)])


def test_the_lowest_layers_may_have_tiny_rates() -> None:
    assert found(mlp(5, 8, 1), "C28", by_depth(mlp(5, 8, 1).parameters())) == []


@pytest.mark.parametrize(
    ("rate", "schedule"), [(1e-8, partial(ExponentialLR, gamma=1.5)), (1.0, partial(LambdaLR, lr_lambda=tiny))]
)
def test_a_schedule_may_begin_with_any_rate(rate: float, schedule: Any) -> None:
    adam = partial(torch.optim.Adam, lr=rate)
    engine = Engine(Update.supervised(nn.functional.mse_loss, adam), model=linear(5, 1), seed=0)
    engine.attach(LRScheduling(schedule, every="1step"))
    assert not engine.check(batches(), max_epochs=1).of("C28")


class Heads(nn.Module):
    """Two linear heads beside each other that begin with zeros, as for linear actors and critics."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(4, actions), nn.Linear(4, 1)
        for layer in (self.actor, self.critic):
            nn.init.zeros_(layer.weight)

    def forward(self, input: Tensor) -> Tensor:
        return self.actor(input) + self.critic(input)  # type: ignore[no-any-return]


def test_heads_beside_each_other_may_begin_with_zeros() -> None:
    assert found(Heads(actions=2), "C33") == []


def test_points_of_an_equation_need_not_be_trained() -> None:
    engine = Engine(Update.supervised(nn.functional.mse_loss, SGD), model=Holding(torch.ones(3, requires_grad=True)))
    [problem] = engine.check(batches(), max_epochs=1).of("C27")
    assert problem.way_out.startswith("if it should train, ")
