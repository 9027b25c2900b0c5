"""Before a run: optimizers are built from the model as it is then, and what cannot be trained is refused."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events, FindingWarning, Update
from signalfire.handlers import GradientAccumulation
from tests import kit
from tests.kit import linear, mlp, same

Batch = tuple[Tensor, Tensor]
mse = nn.functional.mse_loss
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def make_data() -> list[Batch]:
    return kit.batches(6, 3, 2)


def make_model() -> nn.Module:
    return mlp(3, 5, 2, nn.Tanh(), seed=0)


def make_trainer(update: Update | None = None) -> Engine:
    return Engine(update or Update.supervised(mse, SGD), model=make_model(), seed=0)


def test_an_optimizer_of_another_model_is_refused() -> None:
    trainer = make_trainer(Update.supervised(mse, SGD(make_model().parameters())))
    with pytest.raises(ValueError, match="update 'main': its SGD holds none of the model's parameters"):
        trainer.run(make_data(), max_epochs=1)


def test_a_built_optimizer_of_the_same_model_trains_as_a_factory_does() -> None:
    data, model = make_data(), make_model()
    trainer = Engine(Update.supervised(mse, SGD(model.parameters())), model=model)
    trainer.run(data, max_epochs=1)
    other = make_trainer()
    other.run(data, max_epochs=1)
    assert same(model, other.model)


def test_a_model_on_the_meta_device_is_refused() -> None:
    trainer = Engine(Update.supervised(mse, SGD), model=make_model().to("meta"))
    with pytest.raises(ValueError, match=r"the model 'model' is on the meta device.*'0.weight'.*to_empty"):
        trainer.run(make_data(), max_epochs=1)


def test_nothing_to_optimize_is_an_error() -> None:
    trainer = Engine(Update.from_function(lambda engine, batch: None, SGD))
    with pytest.raises(ValueError, match="there are no parameters to optimize"):
        trainer.run(make_data(), max_epochs=1)


def test_parameters_may_be_chosen_and_the_others_stay() -> None:
    model = make_model()
    update = Update.supervised(mse, SGD, parameters=lambda engine: engine.model[2].parameters())
    trainer = Engine(update, model=model)
    trainer.run(make_data(), max_epochs=1)
    before = make_model()
    assert torch.equal(model.get_parameter("0.weight"), before.get_parameter("0.weight"))
    assert not torch.equal(model.get_parameter("2.weight"), before.get_parameter("2.weight"))


def test_updates_that_share_parameters_cannot_accumulate() -> None:
    model = linear(3, 2)

    def update(name: str) -> Update:
        return Update.supervised(mse, SGD, name=name)

    engine = Engine([update("a"), update("b")], model=model)
    engine.run(make_data(), max_epochs=1)
    engine.attach(GradientAccumulation(2, update="a"))
    with pytest.raises(ValueError, match="updates 'a' and 'b' share parameters"):
        engine.run(make_data(), max_epochs=2)


def test_a_factory_is_called_with_the_parameters_of_the_model_that_was_set_up() -> None:
    trainer = make_trainer()

    @trainer.on(Events.MODEL_SETUP)
    def replace_head(engine: Engine) -> None:
        engine.model[2] = linear(5, 2, seed=8)

    trainer.run(make_data(), max_epochs=1)
    assert trainer.updates[0].parameters == list(trainer.model.parameters())
    assert not torch.equal(trainer.model[2].weight, linear(5, 2, seed=8).weight)


def test_a_built_optimizer_whose_parameters_were_all_replaced_is_refused() -> None:
    model = nn.Sequential(linear(3, 2))
    trainer = Engine(Update.supervised(mse, SGD(model.parameters())), model=model)

    @trainer.on(Events.MODEL_SETUP)
    def replace_layer(engine: Engine) -> None:
        engine.model[0] = linear(3, 2)

    with pytest.raises(ValueError, match=r"before the model's parameters were replaced.*partial\(torch\.optim\.SGD"):
        trainer.run(make_data(), max_epochs=1)


def test_a_parameter_that_two_modules_share_is_optimized_once() -> None:
    encoder, decoder = linear(3, 3), linear(3, 3)
    decoder.weight = encoder.weight
    given: list[list[Any]] = []

    def factory(parameters: Any) -> torch.optim.Optimizer:
        given.append(list(parameters))
        return SGD(given[0])

    update = Update.from_function(lambda engine, batch: decoder(encoder(batch[0])).sum(), factory)
    Engine(update, model={"encoder": encoder, "decoder": decoder}).run(make_data(), max_epochs=1)
    assert [[id(p) for p in parameters] for parameters in given] == [[*map(id, (*encoder.parameters(), decoder.bias))]]


def test_an_engine_that_evaluates_builds_no_optimizer() -> None:
    evaluator = Engine(
        Update.supervised(mse, lambda parameters: pytest.fail("built")), model=make_model(), training=False
    )
    evaluator.run(make_data())
    assert evaluator.updates[0].optimizer is None


# ---- modes --------------------------------------------------------------------------------------------------------


class Backboned(nn.Module):
    """A model with a backbone that has statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout())
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.backbone(x))
        return result


def modes_in_training(model: nn.Module | dict[str, nn.Module]) -> tuple[dict[str, bool], Engine]:
    engine = Engine(Update.from_function(lambda engine, batch: _loss_of(engine, batch), SGD), model=model, seed=0)
    modes: dict[str, bool] = {}

    def note(engine: Engine) -> None:
        for root in engine.modules:
            modes.update((f"{root}.{name}", part.training) for name, part in engine.modules[root].named_modules())

    engine.connect(Events.FORWARD_STARTED(once=1), note)
    engine.run(make_data(), max_epochs=1)
    return modes, engine


def _loss_of(engine: Engine, batch: Batch) -> Tensor:
    total: Tensor = sum((root(batch[0]) - batch[1]).square().mean() for root in engine.modules.values())
    return total


def test_a_frozen_part_in_eval_mode_stays_in_it_as_in_a_plain_loop() -> None:
    torch.manual_seed(0)
    model = Backboned()
    model.backbone.requires_grad_(False).eval()
    plain = copy.deepcopy(model)
    modes, engine = modes_in_training(model)
    assert modes == {"model.": True, "model.backbone": False, "model.backbone.0": False, "model.backbone.1": False,
                     "model.backbone.2": False, "model.head": True}  # fmt: skip
    assert [one.severity for one in engine.findings.of_run().of("W52")] == ["info"]
    optimizer = SGD(plain.parameters())
    for x, y in make_data():
        (plain(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same(model, plain)


def test_a_part_that_is_trained_and_a_model_that_was_evaluated_are_put_in_training_mode() -> None:
    model = Backboned()
    model.backbone.eval()  # not frozen, such as a pretrained one
    with pytest.warns(FindingWarning, match="W52"):
        modes, engine = modes_in_training(model)
    assert all(modes.values())
    assert "are set to training mode, because they are not frozen: model.backbone" in str(engine.findings.of_run())
    model = Backboned()
    model.backbone.requires_grad_(False)
    model.eval()  # all of it
    modes, engine = modes_in_training(model)
    assert all(modes.values())
    assert not engine.findings.of_run().of("W52")


def test_a_frozen_teacher_in_eval_mode_stays_in_it() -> None:
    student, teacher = Backboned(), Backboned().requires_grad_(False).eval()
    modes, _ = modes_in_training({"student": student, "teacher": teacher})
    assert {name.partition(".")[0]: mode for name, mode in modes.items()} == {"student": True, "teacher": False}
    engine = Engine(Update.from_function(_loss_of, SGD), model={"student": student, "teacher": teacher})
    engine.model.eval()  # all of it was evaluated
    seen: list[bool] = []
    engine.connect(Events.FORWARD_STARTED(once=1), lambda engine: seen.append(teacher.training))
    engine.run(make_data(), max_epochs=1)
    assert seen == [True]


def test_a_model_that_keeps_a_part_in_eval_mode_by_itself_is_left_to_do_so() -> None:
    class Keeping(Backboned):
        def train(self, mode: bool = True) -> Keeping:
            super().train(mode)
            self.backbone.eval()
            return self

    modes, engine = modes_in_training(Keeping().train())
    assert [modes["model.backbone"], modes["model.head"]] == [False, True]
    assert not engine.findings.of_run().of("W52")
