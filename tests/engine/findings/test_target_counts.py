"""Means over different numbers of targets: reported where they are counted, and silent where they are equal or weighted."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from signalfire import Engine, FindingWarning, Update
from signalfire.handlers import GradientAccumulation, MicroBatching
from tests.kit import build, linear

WEIGHTS = torch.tensor([1.0, 2.0, 5.0])
weighted = nn.CrossEntropyLoss(weight=WEIGHTS)
Pairs = list[tuple[Tensor, Tensor]]


def padded(ignored: Sequence[int]) -> Pairs:
    """Batches of four samples, of which so many have no target."""
    torch.manual_seed(0)
    targets = [torch.tensor([-100] * one + [0, 1, 2, 0][one:]) for one in ignored]
    return [(torch.randn(4, 5), one) for one in targets]


def trained(data: Pairs, *handlers: Any, loss: Callable[..., Tensor] = cross_entropy) -> Engine:
    engine = build(linear(5, 3), *handlers, loss=loss)
    engine.run(data, max_epochs=1)
    return engine


def by_class(engine: Engine) -> Tensor:
    return WEIGHTS[engine.state.batch[1]].sum()


@pytest.mark.parametrize(
    ("ignored", "handlers", "loss"),
    [
        ([1, 1, 1, 1], [GradientAccumulation(2)], cross_entropy),
        ([1, 1, 2, 2], [GradientAccumulation(2)], cross_entropy),  # alike in each window
        ([1, 2, 1, 2], [], cross_entropy),
        ([0, 0], [MicroBatching(2)], cross_entropy),
        ([0, 0], [MicroBatching(3)], cross_entropy),
        ([0, 0], [GradientAccumulation(2)], weighted),
        ([0, 0], [MicroBatching(2), GradientAccumulation(1, weight=by_class)], weighted),
    ],
)
def test_what_is_weighted_by_its_targets_or_has_as_many_is_no_mistake(
    ignored: list[int], handlers: list[Any], loss: Callable[..., Tensor]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FindingWarning)
        trained(padded(ignored), *handlers, loss=loss)


def by_number(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output, target) * (target != -100).sum() / 4


logged: list[Tensor] = []


def sum_and_log(output: Tensor, target: Tensor) -> Tensor:
    logged.append(cross_entropy(output, target))
    return cross_entropy(output, target, reduction="sum") / 4


@pytest.mark.parametrize("loss", [by_number, sum_and_log])
def test_means_that_a_loss_multiplies_with_their_numbers_or_leaves_out_count_right(loss: Callable[..., Tensor]) -> None:
    engine = trained(padded([0, 2]), GradientAccumulation(2), loss=loss)
    logged.clear()
    assert not engine.findings.of_run()


def test_the_way_out_can_be_pasted() -> None:
    with pytest.warns(FindingWarning) as caught:
        trained(padded([1, 2]), GradientAccumulation(2))
    handler = str(caught[0].message).split("weight each batch by ")[1].split(": ", 1)[1]
    trained(padded([1, 2]), eval(handler, {"GradientAccumulation": GradientAccumulation}))


def next_tokens(engine: Engine, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a language model, which predicts each token from those before it."""
    scores = engine.model(batch[0])
    return cross_entropy(scores[:, :-1].transpose(1, 2), batch[1][:, 1:])


def with_sequences(handler: GradientAccumulation) -> Engine:
    torch.manual_seed(0)
    labels = [torch.tensor([[-100] * one + [0, 1, 2, 0, 1][one:]] * 2) for one in (0, 3)]
    engine = Engine(Update.from_function(next_tokens, torch.optim.SGD, lr=0.1), model=linear(5, 3), seed=0)
    engine.attach(handler)
    engine.run([(torch.randn(2, 5, 5), one) for one in labels], max_epochs=1)
    return engine


def test_the_way_out_counts_the_targets_of_a_loss_that_shifts_them() -> None:
    with pytest.warns(FindingWarning, match=r"W96.*\(engine.state.batch\[1\]\[:, 1:\] != -100\).sum\(\)") as caught:
        with_sequences(GradientAccumulation(2))
    handler = str(caught[0].message).split("weight each batch by ")[1].split(": ", 1)[1]
    engine = with_sequences(eval(handler, {"GradientAccumulation": GradientAccumulation}))
    assert not engine.findings.of_run().of("W96")


@pytest.mark.parametrize(
    ("ignored", "handler", "loss", "numbers"),
    [
        (
            [1, 2],
            GradientAccumulation(2),
            cross_entropy,
            r"\(3 and 2 in two batches of a window\), but the two have equal weights",
        ),
        (
            [1, 1],
            MicroBatching(2),
            cross_entropy,
            r"\(1 and 2 in two pieces of a batch\), but the two have equal weights",
        ),
        (
            [0, 0],
            MicroBatching(2),
            weighted,
            r"\(3 and 6 in two pieces of a batch\), but the two have equal weights",
        ),
    ],
)
def test_means_over_different_numbers_are_reported_with_these(
    ignored: list[int], handler: Any, loss: Callable[..., Tensor], numbers: str
) -> None:
    with pytest.warns(FindingWarning, match=f"W96: .*{numbers}"):
        trained(padded(ignored), handler, loss=loss)


def test_the_way_out_gives_the_weights_of_a_plain_loop() -> None:
    data, model = padded([0, 0]), linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in data:
        weighted(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    handlers = MicroBatching(2), GradientAccumulation(1, weight=by_class)
    engine = build(linear(5, 3), *handlers, loss=weighted, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    engine.run(data, max_epochs=1)
    torch.testing.assert_close(engine.model.weight, model.weight)
