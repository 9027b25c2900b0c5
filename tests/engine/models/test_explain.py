"""Errors in a micro-step say where they were raised, and those of torch what they mean there."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Update
from signalfire.handlers import GradientAccumulation
from tests import kit
from tests.kit import linear

Batch = tuple[Tensor, Tensor]
mse = nn.functional.mse_loss
SGD = partial(torch.optim.SGD, lr=0.1)


def make_data() -> list[Batch]:
    return kit.batches(3, 3, 2)


def make_trainer(update: Update | None = None) -> Engine:
    return Engine(update or Update.supervised(mse, SGD), model=linear(3, 2), seed=0)


def notes_of(trainer: Engine, data: Any, error: type[Exception]) -> str:
    with pytest.raises(error) as caught:
        trainer.run(data, max_epochs=1)
    return "\n".join(caught.value.__notes__)


def test_a_loss_that_is_no_scalar_is_explained() -> None:
    trainer = make_trainer(Update.supervised(partial(mse, reduction="none"), SGD))
    notes = notes_of(trainer, make_data(), RuntimeError)
    assert "in the backward of update 'main', epoch 1, iteration 1" in notes
    assert "has shape (4, 2); return a scalar, such as its mean" in notes


def test_a_loss_that_is_no_tensor_is_explained() -> None:
    trainer = make_trainer(Update.supervised(lambda output, target: 0.5, SGD))  # type: ignore[arg-type, return-value]
    assert "is 0.5; return a scalar tensor or None" in notes_of(trainer, make_data(), AttributeError)


def test_a_loss_without_a_gradient_is_explained() -> None:
    trainer = make_trainer(Update.supervised(lambda output, target: mse(output.detach(), target), SGD))
    notes = notes_of(trainer, make_data(), RuntimeError)
    assert "does not depend on any parameter that requires a gradient" in notes


def test_a_batch_on_another_device_than_the_model_is_explained() -> None:
    data = [(x.to("meta"), y.to("meta")) for x, y in make_data()]
    notes = notes_of(make_trainer(), data, RuntimeError)
    assert "in the forward of update 'main', epoch 1, iteration 1" in notes
    assert "the batch is on meta and the model is on cpu; attach DeviceTransfer()" in notes


def test_an_error_that_has_nothing_to_do_with_devices_is_not_explained_by_them() -> None:
    data = [(torch.randn(4, 7), torch.ones(4, 2, dtype=torch.int64))]
    notes = notes_of(make_trainer(), data, RuntimeError).splitlines()
    assert notes[0] == "in the forward of update 'main', epoch 1, iteration 1"
    assert notes[1:] == ["the tensors of the batch: float32 (4, 7), int64 (4, 2)"]


def test_labels_that_do_not_fit_are_explained_by_the_shapes_of_the_batch() -> None:
    trainer = make_trainer(Update.supervised(nn.functional.cross_entropy, SGD))
    notes = notes_of(trainer, [(torch.randn(4, 3), torch.tensor([0, 1, 2, 1]))], IndexError)
    assert (
        "in the loss of update 'main', epoch 1, iteration 1\nthe tensors of the batch: float32 (4, 3), int64 (4,)"
        in notes
    )
    many = [(torch.randn(4, 3), torch.zeros(4, dtype=torch.int64)[:3], *torch.ones(3))]
    assert "float32 (4, 3), int64 (3,), float32 (), float32 (), ..." in notes_of(trainer, many, ValueError)


def test_a_forward_that_calls_a_model_that_is_not_there_is_explained() -> None:
    notes = notes_of(Engine(Update.supervised(mse)), make_data(), TypeError)
    assert "this forward function calls the engine's model, but the engine has none; pass model= to Engine" in notes


@pytest.mark.parametrize("where", ["forward", "loss"])
def test_an_error_says_in_which_act_it_was_raised(where: str) -> None:
    def fail(engine: Engine, place: str) -> None:
        if place == where and engine.state.iteration == 2:
            raise ArithmeticError("on purpose")

    def forward(engine: Engine, batch: Batch) -> Tensor:
        fail(engine, "forward")
        output: Tensor = engine.model(batch[0])
        return output

    def loss(engine: Engine, output: Tensor, batch: Batch) -> Tensor:
        fail(engine, "loss")
        return mse(output, batch[1])

    notes = notes_of(make_trainer(Update(forward, loss, SGD)), make_data(), ArithmeticError)
    assert notes == f"in the {where} of update 'main', epoch 1, iteration 2"


def test_a_weight_that_is_no_single_number_is_explained() -> None:
    trainer = make_trainer()
    trainer.attach(GradientAccumulation(2, weight=lambda engine: torch.ones(2)))
    notes = notes_of(trainer, make_data(), RuntimeError)
    assert "weight of update 'main' has shape (2,); set it to one number" in notes


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_loss_of_one_element_is_not_what_is_wrong_with_it(shape: tuple[int, ...]) -> None:
    trainer = make_trainer(Update.supervised(lambda output, target: mse(output, target).reshape(shape).detach(), SGD))
    notes = notes_of(trainer, make_data(), RuntimeError)
    assert "does not depend on any parameter that requires a gradient" in notes
    assert "return a scalar" not in notes


def test_an_error_of_a_backward_in_which_nothing_is_wrong_is_only_placed() -> None:
    def hooked(output: Tensor, target: Tensor) -> Tensor:
        def fail(gradient: Tensor) -> None:
            raise ArithmeticError("in a hook")

        output.register_hook(fail)
        return mse(output, target)

    notes = notes_of(make_trainer(Update.supervised(hooked, SGD)), make_data(), ArithmeticError)
    assert notes == "in the backward of update 'main', epoch 1, iteration 1"


def test_an_interrupt_is_placed_and_not_explained() -> None:
    trainer = make_trainer()
    trainer.state.batch = torch.ones(1, device="meta")
    step, notes = trainer.group.step(trainer), "in the backward of update 'main', epoch 0, iteration 0"
    interrupt, error = KeyboardInterrupt(), RuntimeError()
    step.note(interrupt, "backward", trainer.updates[0])
    step.note(error, "backward", trainer.updates[0])
    assert interrupt.__notes__ == [notes]
    assert (error.__notes__[0], len(error.__notes__)) == (notes, 3)


def test_without_a_model_no_batch_is_on_the_wrong_device() -> None:
    def fail(engine: Engine, batch: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")

    notes = notes_of(Engine(Update.from_function(fail)), [torch.ones(1, device="meta")], ArithmeticError)
    assert notes == "in the forward of update 'main', epoch 1, iteration 1"
