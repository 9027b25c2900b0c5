"""Perplexity against the exponential of torch's own mean loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from signalfire import Engine, Update
from signalfire.handlers import History, Perplexity, Validation
from tests.processes import run_together

CLASSES, TOKENS = 7, 5


def sequences(lengths: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Batches of two sequences, padded with -100 after their lengths."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for length in lengths:
        inputs = torch.randint(CLASSES, (2, TOKENS), generator=generator)
        targets = torch.randint(CLASSES, (2, TOKENS), generator=generator)
        targets[1, length:] = -100
        batches.append((inputs, targets))
    return batches


BATCHES = sequences([5, 1, 3])


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES))


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1), targets.flatten())


def plain(model: nn.Module) -> float:
    with torch.no_grad():
        scores = torch.cat([model(inputs).flatten(0, 1) for inputs, _ in BATCHES])
    return math.exp(cross_entropy(scores, torch.cat([targets.flatten() for _, targets in BATCHES])).item())


def test_it_is_the_exponential_of_the_mean_loss_of_all_tokens_in_a_validation() -> None:
    model, history = language_model(), History()
    engine = Engine(Update.supervised(loss, torch.optim.SGD, lr=0.5), model=model, seed=0)
    engine.attach(Validation(BATCHES, perplexity=Perplexity()), history)
    engine.run(sequences([5, 4]), max_epochs=1)
    assert history["val_perplexity"] == [pytest.approx(plain(model), rel=1e-6)]
    assert engine.state.metrics.directions["val_perplexity"] == "min"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_classes_are_second_or_last(dtype: torch.dtype) -> None:
    scores, target = torch.randn(2, TOKENS, CLASSES).to(dtype), torch.randint(CLASSES, (2, TOKENS))
    expected = math.exp(cross_entropy(scores.float().flatten(0, 1), target.flatten()).item())
    for output in (scores, scores.movedim(-1, 1)):
        metric = Perplexity()
        metric.update(output, target.to(torch.int16))
        assert metric.compute() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("shape", "target", "message"),
    [
        ((2, 5, 5), (2, 5), "are ambiguous, because the class dimension could be the second or the last; flatten"),
        (
            (2, 4, 7),
            (2, 5),
            r"scores of shape \(2, 4, 7\) for targets of shape \(2, 5\); expected scores of shape \(N, C, ...\)",
        ),
        ((2, 5), (2, 5), "expected scores"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shape: Any, target: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Perplexity().update(torch.zeros(shape), torch.zeros(target, dtype=torch.int64))


def test_without_a_token_there_is_none_and_a_huge_one_is_infinite() -> None:
    metric = Perplexity()
    assert math.isnan(metric.compute())
    metric.update(torch.zeros(1, 3), torch.tensor([-100]))
    assert math.isnan(metric.compute())
    metric.update(torch.tensor([[0.0, 1e4]]), torch.tensor([0]))
    assert metric.compute() == math.inf


def test_its_state_continues_it() -> None:
    whole, first, second = Perplexity(), Perplexity(), Perplexity()
    for place, (_, target) in enumerate(sequences([5, 1, 3, 2])):
        scores = torch.randn(2, TOKENS, CLASSES, generator=torch.Generator().manual_seed(place))
        whole.update(scores, target)
        (first if place < 2 else second).update(scores, target)
        if place == 1:
            second.load_state_dict(first.state_dict())
    assert second.compute() == whole.compute()


def _measured() -> float:
    from signalfire.handlers import DistributedDataParallel

    torch.set_num_threads(1)
    engine = Engine(Update.supervised(loss, torch.optim.SGD, lr=0.0), model=language_model(), seed=0, allow=["W18"])
    engine.attach(DistributedDataParallel(timeout=60), Validation([*BATCHES, *sequences([2])], perplexity=Perplexity()))
    return float(engine.run(sequences([5, 4]), max_epochs=1).metrics["val_perplexity"])


@pytest.mark.moderate
def test_several_ranks_count_their_tokens_together() -> None:
    first, second = run_together(_measured, 2)
    model = language_model()
    with torch.no_grad():
        scores = torch.cat([model(inputs).flatten(0, 1) for inputs, _ in [*BATCHES, *sequences([2])]])
    targets = torch.cat([targets.flatten() for _, targets in [*BATCHES, *sequences([2])]])
    assert first == second == pytest.approx(math.exp(cross_entropy(scores, targets).item()), rel=1e-6)
