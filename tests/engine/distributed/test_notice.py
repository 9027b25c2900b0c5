"""A backward with a notice beside the loss against torch.autograd.backward: the same bits, and torch's own messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from signalfire.distributed.notice import backward_beside


class Marked(Tensor):
    """A subclass of Tensor, whose functions torch dispatches."""


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def scalar(model: nn.Module) -> Tensor:
    output: Tensor = model(torch.linspace(-1, 1, 12).view(3, 4))
    return output.square().mean()


LOSSES: dict[str, Callable[[nn.Module], Tensor]] = {
    "a scalar": scalar,
    "one element in two dimensions": lambda model: scalar(model).view(1, 1),
    "bfloat16": lambda model: scalar(model).bfloat16(),
    "a subclass of Tensor": lambda model: scalar(model).as_subclass(Marked),
    "complex": lambda model: scalar(model) * 1j,
    "two elements": lambda model: model(torch.ones(1, 4))[0],
    "no elements": lambda model: model(torch.ones(0, 4)),
    "whole numbers": lambda model: torch.tensor(3),
    "without gradient": lambda model: scalar(model).detach(),
}


def gradients(
    backward: Callable[[Tensor, Tensor, Tensor, Sequence[Tensor] | None], None], loss_of: str, only: bool
) -> list[Tensor | None] | str:
    """The gradients of the parameters and of the notice, or the message of the error."""
    model, notice = a_model(), nn.Parameter(torch.zeros(3))
    inputs: Sequence[Tensor] | None = [*model.parameters()][2:] if only else None
    try:
        backward(LOSSES[loss_of](model), notice, torch.tensor([1.0, 0.0, 2.0]), inputs)
    except RuntimeError as error:
        return str(error)
    return [each.grad for each in (*model.parameters(), notice)]


def as_torch(loss: Tensor, notice: Tensor, value: Tensor, inputs: Sequence[Tensor] | None) -> None:
    torch.autograd.backward((loss, notice), (None, value), inputs=inputs and [*inputs, notice])


def ours(loss: Tensor, notice: Tensor, value: Tensor, inputs: Sequence[Tensor] | None) -> None:
    backward_beside(loss, notice, value, inputs=inputs)


@pytest.mark.parametrize("only", [False, True], ids=["all", "some parameters"])
@pytest.mark.parametrize("loss_of", LOSSES)
def test_the_gradients_and_the_messages_are_those_of_torch(loss_of: str, only: bool) -> None:
    expected, got = gradients(as_torch, loss_of, only), gradients(ours, loss_of, only)

    if isinstance(expected, str):
        assert got == expected
    else:
        assert not isinstance(got, str), got
        for one, other in zip(expected, got, strict=True):
            assert (one is None and other is None) or (
                one is not None and other is not None and torch.equal(one, other)
            )
        assert got[-1] is not None, "the notice has its value"


@pytest.mark.parametrize(
    ("loss_of", "message"),
    [
        ("two elements", "grad can be implicitly created only for scalar outputs"),
        ("without gradient", "does not require grad"),
        ("whole numbers", "does not require grad"),
    ],
)
def test_a_loss_that_has_no_gradient_is_refused(loss_of: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        backward_beside(LOSSES[loss_of](a_model()), nn.Parameter(torch.zeros(1)), torch.zeros(1), inputs=None)
