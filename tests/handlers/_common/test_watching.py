"""What `Guards` asks of batches, models and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from signalfire import Engine, Update
from signalfire.handlers._common.watching import (
    Facts,
    batch_of,
    frozen_last_layer,
    gradient_facts,
    ignores_all,
    inputs_of,
    labels_of,
    out_of_range,
    same_for_all,
    total,
)
from tests.kit import build, mlp


def test_batches_are_told_apart_by_shapes_and_values_in_their_places() -> None:
    one = torch.arange(6.0).view(2, 3)
    assert batch_of((one, one)) == batch_of((one.clone(), one.clone()))
    assert batch_of(one) != batch_of(one.flip(0))
    assert batch_of(one) != batch_of(one.view(3, 2))
    assert batch_of("no tensor") is None


def test_batches_are_told_apart_by_all_of_their_parts_or_not_at_all() -> None:
    same = torch.ones(3)
    assert batch_of((["a", "b"], same)) == batch_of((["a", "b"], same)) != batch_of((["a", "c"], same))
    assert batch_of((torch.tensor([1 + 2j]), same)) != batch_of((torch.tensor([1 + 3j]), same))
    for unreadable in (same.to_sparse(), same.numpy(), object()):
        assert batch_of((unreadable, same)) is None


def test_inputs_are_the_first_floats_and_labels_the_integers_of_a_pair() -> None:
    x, y = torch.randn(4, 2), torch.tensor([0, 1, 2, 1])
    assert inputs_of({"ids": y, "x": x}) is x
    assert inputs_of((y, y)) is None
    assert labels_of((x, y)) is y
    for other in ((x, x), (x, y > 0), (x, y, y), {"x": x, "y": y}, (x, y[:0])):
        assert labels_of(other) is None


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        ([0, 1, 2], None),
        ([1, 2, 3], (1, 3, 3)),
        ([-100, 0, 1], None),
        ([255, 0, 1], None),
        ([-1, 0, 1], None),
        ([-2, 0, 1], (-2, 1, 3)),
    ],
)
def test_labels_outside_of_the_classes_are_found_but_not_those_that_losses_ignore(
    labels: list[int], found: tuple[int, int, int] | None
) -> None:
    assert out_of_range(torch.randn(3, 3), torch.tensor(labels)) == found


def of_another_width(output: Tensor, labels: Tensor) -> Tensor:
    return nn.AdaptiveLogSoftmaxWithLoss(3, 6, [3], div_value=1.0)(output, labels).loss  # type: ignore[no-any-return]


def of_the_others(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output[labels < 3], labels[labels < 3])


def of_thresholds(output: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, (labels[:, None] > torch.arange(3)).float())


def of_one_hot(output: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, (labels[:, None] == torch.arange(3)).float())


def of_products(output: Tensor, labels: Tensor) -> Tensor:
    return -(output.log_softmax(1) * (labels[:, None] == torch.arange(3))).sum()


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (of_another_width, False),
        (of_the_others, False),
        (of_thresholds, False),
        (of_one_hot, True),
        (of_products, True),
    ],
)
def test_labels_without_a_class_are_found_where_the_loss_gives_them_none(loss: Any, found: bool) -> None:
    output, labels = torch.randn(3, 3, requires_grad=True) * 1, torch.tensor([1, 2, 3])
    assert (out_of_range(output, labels, loss(output, labels)) is not None) == found


@pytest.mark.parametrize(
    ("labels", "options", "found"),
    [
        ([-100, -100], {}, True),
        ([-100, 1], {}, False),
        ([-100, -100], {"reduction": "sum"}, False),
        ([1, 1], {"ignore_index": 1}, True),
    ],
)
def test_a_mean_over_no_target(labels: list[int], options: dict[str, Any], found: bool) -> None:
    assert ignores_all(F.cross_entropy(torch.randn(2, 3, requires_grad=True), torch.tensor(labels), **options)) == found


def norm_of(*sizes: int) -> float:
    """The norm of gradients of zeros, of parameters with so many elements."""
    own = [nn.Parameter(torch.ones(size)) for size in sizes]
    engine = Engine(Update.supervised(F.mse_loss, torch.optim.SGD(own, lr=0.1)), model=nn.ParameterList(own))
    for parameter in own:
        parameter.grad = torch.zeros_like(parameter)
    return gradient_facts(engine.updates[0])[2]


def test_a_rank_without_elements_knows_no_norm() -> None:
    assert math.isnan(norm_of(0))
    assert norm_of(0, 2) == 0.0


def test_outputs_that_are_alike_though_the_inputs_differ() -> None:
    x = torch.randn(4, 2)
    assert same_for_all(torch.ones(4, 3), x)
    assert not same_for_all(torch.ones(4, 3), x[:1].expand(4, 2))
    assert not same_for_all(x, x)
    assert not same_for_all(torch.ones(()), x)
    assert not same_for_all(torch.ones(4), x)


def test_a_model_of_which_only_norms_are_trained() -> None:
    model = mlp(5, 8, 1, nn.BatchNorm1d(8))
    engine = build(model)
    assert frozen_last_layer(engine) is None
    model.requires_grad_(False)
    assert frozen_last_layer(engine) is None
    model.get_submodule("1").requires_grad_(True)
    assert frozen_last_layer(engine) == "2"


def test_norms_and_streaks() -> None:
    assert total([torch.tensor([3.0]), None, torch.tensor([4.0])]) == 5.0
    assert total([]) == 0.0
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([3.0, 1.0]), (4,), check_invariants=True)
    assert total([sparse]) == 4.0
    facts = Facts()
    assert [facts.again("G02", seen) for seen in (True, True, False, True)] == [1, 2, 0, 1]
