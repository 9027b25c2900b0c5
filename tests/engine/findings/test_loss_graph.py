"""What the graph of a loss shows: the mistakes, and the many right losses of which it must say nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from signalfire.findings.loss_graph import note_operands, problems_of


def codes(loss: Tensor, window: int = 1, samples: int | None = None) -> list[str]:
    return [code for code, _, _ in problems_of(loss, window, samples)]


class Noting(TorchFunctionMode):
    """Notes operands, as the look at the first calls does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        note_operands(args, result)
        return result


def scores(*shape: int) -> Tensor:
    """What comes out of a layer, and needs a gradient."""
    return torch.randn(*shape[:-1], 5) @ torch.randn(5, shape[-1], requires_grad=True)


LABELS, PIXELS = torch.tensor([0, 1, 2, 0]), torch.zeros(2, 3, 3, dtype=torch.int64)
MISSING = torch.tensor([[0.0, 1.0, -1.0]] * 4)

WRONG: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "softmax, cast and reshaped": (
        "W72",
        lambda: F.cross_entropy(scores(2, 2, 3).bfloat16().softmax(-1).float().reshape(4, 3), LABELS),
    ),
    "softmax before pixels": ("W72", lambda: F.cross_entropy(scores(2, 3, 3, 3).softmax(1), PIXELS)),
    "softmax before soft targets": ("W72", lambda: F.cross_entropy(scores(4, 3).softmax(-1), torch.ones(4, 3) / 3)),
    "one of two terms": (
        "W72",
        lambda: F.mse_loss(scores(4, 1), torch.zeros(4, 1)) + 0.5 * F.cross_entropy(scores(4, 3).sigmoid(), LABELS),
    ),
    "relu before cross entropy": ("W72", lambda: F.cross_entropy(scores(4, 3).relu(), LABELS)),
    "logits of pixels in nll_loss": ("W72", lambda: F.nll_loss(scores(2, 3, 3, 3), PIXELS)),
    "sigmoid twice": ("W72", lambda: F.binary_cross_entropy(scores(4, 1).sigmoid().sigmoid(), torch.ones(4, 1))),
    "one class": ("W79", lambda: F.cross_entropy(scores(4, 1), LABELS * 0)),
    "one class of soft targets": ("W79", lambda: F.cross_entropy(scores(4, 1), torch.ones(4, 1))),
    "output of one dimension more": ("W73", lambda: (scores(4, 1) - torch.zeros(4)).abs().mean()),
    "target of one dimension more": ("W73", lambda: (torch.zeros(4, 1) - scores(4, 1).squeeze(-1)).square().mean()),
    "weights of one dimension more": (
        "W73",
        lambda: (F.mse_loss(scores(4, 1), torch.zeros(4, 1), reduction="none") * torch.ones(4)).mean(),
    ),
    "sigmoid for percentages": ("W77", lambda: F.mse_loss(scores(4, 1).sigmoid(), torch.full((4, 1), 50.0))),
    "relu for differences": ("W77", lambda: F.huber_loss(scores(4, 1).relu(), torch.full((4, 1), -0.5))),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loss_is_known_by_its_graph(name: str) -> None:
    code, loss = WRONG[name]
    with Noting():
        made = loss()
    assert code in codes(made)


def attention() -> Tensor:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    return F.cross_entropy(layer(torch.randn(4, 1, 8))[:, 0, :3], LABELS)


def pairwise(unsqueezed: bool) -> Tensor:
    output = scores(4, 1)
    differences = output - output.T if unsqueezed else output.squeeze(-1)[:, None] - output.squeeze(-1)[None]
    return differences.sigmoid().mean()


RIGHT: dict[str, Callable[[], Tensor]] = {
    "cross entropy": lambda: F.cross_entropy(scores(4, 3), LABELS),
    "cross entropy of pixels": lambda: F.cross_entropy(scores(2, 3, 3, 3), PIXELS),
    "log_softmax and nll_loss": lambda: F.nll_loss(scores(4, 3).log_softmax(-1), LABELS),
    "nll_loss of the logarithm of a softmax": lambda: F.nll_loss(scores(4, 3).softmax(-1).log(), LABELS),
    "log_softmax and cross entropy": lambda: F.cross_entropy(scores(4, 3).log_softmax(-1), LABELS),
    "a mixture of experts": lambda: F.cross_entropy(
        (scores(4, 2).softmax(-1)[:, :, None] * scores(4, 2, 3)).sum(1), LABELS
    ),
    "a gate": lambda: F.cross_entropy(scores(4, 3).sigmoid() * scores(4, 3), LABELS),
    "attention over one position": attention,
    "distillation": lambda: F.kl_div(
        scores(4, 3).log_softmax(-1), scores(4, 3).softmax(-1).detach(), reduction="batchmean"
    ),
    "probabilities in binary cross entropy": lambda: F.binary_cross_entropy(scores(4, 1).sigmoid(), torch.ones(4, 1)),
    "logits": lambda: F.binary_cross_entropy_with_logits(scores(4, 1), torch.ones(4, 1)),
    "Brier score": lambda: F.mse_loss(scores(4, 3).softmax(-1), F.one_hot(LABELS, 3).float()),
    "pictures from a tanh": lambda: F.l1_loss(scores(4, 3).tanh(), torch.rand(4, 3) * 2 - 1),
    "counts from a relu": lambda: F.mse_loss(scores(4, 1).relu(), torch.tensor([[0.0], [3.0], [1.0], [2.0]])),
    "pairs": lambda: pairwise(True),
    "pairs, the other way": lambda: pairwise(False),
    "contrast": lambda: F.cross_entropy(F.normalize(scores(4, 3)) @ F.normalize(scores(4, 3)).T / 0.1, torch.arange(4)),
    "distances": lambda: torch.cdist(scores(4, 3), scores(4, 3)).mean(),
    "a square output": lambda: (scores(4, 4) - torch.zeros(4, 4)).square().mean(),
    "a bias for each class": lambda: (scores(4, 4) - torch.zeros(4)).square().mean(),
    "a weight for each sample": lambda: (scores(4, 1) * torch.ones(4, 1)).mean(),
    "one sample": lambda: (scores(1, 1) - torch.zeros(1)).square().mean(),
    "a relu before the last pooling": lambda: F.cross_entropy(scores(4, 2, 3).relu().mean(1), LABELS),
    "a mask": lambda: (scores(4, 1).squeeze(-1) * torch.ones(4)).sum() / 4,
    "a list of documents": lambda: -(torch.ones(4, 1) / 4 * scores(4, 1).log_softmax(0)).sum(),
    "logarithms with their rewards": lambda: F.nll_loss(scores(4, 3).log_softmax(1) * torch.tensor([[2.0]]), LABELS),
    "labels of which some are missing": lambda: (
        F.binary_cross_entropy_with_logits(scores(4, 3), MISSING, reduction="none") * (MISSING >= 0)
    ).mean(),
    "missing labels of no weight": lambda: F.binary_cross_entropy_with_logits(
        scores(4, 3), MISSING, weight=(MISSING >= 0).float()
    ),
    "depths of which some are missing": lambda: (
        F.mse_loss(scores(4, 3).sigmoid(), MISSING, reduction="none") * (MISSING >= 0)
    ).mean(),
    "an action with a negative reward": lambda: F.cross_entropy(scores(4, 3), LABELS) * -0.5,
    "classes that are not those of the samples": lambda: F.nll_loss((1 - scores(4, 3).softmax(-1)).log(), LABELS),
    "one class against all others": lambda: F.nll_loss(F.logsigmoid(scores(4, 3)), LABELS),
    "pictures for each caption": lambda: -scores(4, 12).log_softmax(0)[torch.arange(12) // 3, torch.arange(12)].mean(),
    "a mixture of one component": lambda: -(scores(4, 1).log_softmax(1) - scores(4, 1).square()).logsumexp(1).mean(),
    "bounded gates of a mixture": lambda: -(scores(4, 3).sigmoid().log_softmax(1) - scores(4, 3)).logsumexp(1).mean(),
    "rectified gates of a mixture": lambda: -(scores(4, 3).relu().log_softmax(1) - scores(4, 3)).logsumexp(1).mean(),
    "a head of one class beside another": lambda: (
        F.cross_entropy(scores(4, 3), LABELS) + F.cross_entropy(scores(4, 1), LABELS * 0)
    ),
    "a batch of one pair": lambda: F.cross_entropy(scores(1, 1), torch.zeros(1, dtype=torch.int64)),
    "distances between two sets": lambda: (scores(4, 1) - torch.zeros(4, 1).T).abs().mean(),
    "distances between two lists": lambda: (torch.zeros(4) - scores(4, 1).squeeze(-1)[:, None]).abs().mean(),
    "a focal loss": lambda: 0.25 * ((1 - scores(4, 3)).square() * scores(4, 3)).mean(),
    "one action with a negative reward": lambda: F.cross_entropy(scores(1, 3), LABELS[:1]) * -1.0,
}


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("name", RIGHT)
def test_of_a_right_loss_nothing_is_said(name: str, window: int) -> None:
    with Noting():
        loss = RIGHT[name]()
    assert codes(loss, window) == []


def test_operands_that_were_not_noted_may_be_pairs() -> None:
    assert codes((scores(4, 1) - torch.zeros(4)).abs().mean()) == []


def test_a_loss_that_is_divided_by_the_window_is_known_however_it_is_written() -> None:
    loss = F.mse_loss(scores(4, 1), torch.zeros(4, 1))
    assert codes(loss / 4, 4) == codes(loss * 0.25, 4) == codes(0.25 * loss, 4) == ["W74"]
    assert codes(loss / 4, 1) == codes(loss / 3, 4) == codes(loss, 4) == []
    assert codes((loss + loss) / 2, 2) == [], "the mean of two terms"
    assert codes(F.cross_entropy(scores(4, 3), LABELS) / 2, 2) == ["W74"]
    assert codes(loss * torch.tensor(4.0), 4) == codes(loss * torch.tensor(0.25), 4) == [], "a scale"


def test_half_of_a_mean_square_is_a_loss_of_its_own() -> None:
    output = scores(4, 1)
    for loss in (F.mse_loss(output, torch.zeros(4, 1)), (output - 1).square().mean()):
        assert codes(0.5 * loss, 2) == codes(loss / 2, 2) == []
        halved = [code for code, _, _ in problems_of(loss / 2, 2, received=True)]
        assert halved == ["W74"], "a receiver knows the loss without its factor"


HALVES: dict[str, Callable[[], Tensor]] = {
    "a Gaussian likelihood": lambda: 0.5 * (scores(4, 1) + scores(4, 1).square() / scores(4, 1).exp()).mean(),
    "squares of rows": lambda: 0.5 * scores(4, 3).square().sum(1).mean(),
    "two cosines": lambda: -(scores(4, 1).mean() + scores(4, 1).mean()) * 0.5,
}


@pytest.mark.parametrize("name", HALVES)
def test_half_of_a_loss_of_ones_own_may_be_meant(name: str) -> None:
    assert codes(HALVES[name](), 2) == []


WEIGHTS = torch.tensor([0.1, 0.2, 0.3, 0.4])
MEANS: dict[str, Callable[[], Tensor]] = {
    "weights that add up to one": lambda: (WEIGHTS * F.cross_entropy(scores(4, 3), LABELS, reduction="none")).sum(),
    "one over the number of samples": lambda: (
        1 / 4 * F.mse_loss(scores(4, 3), torch.zeros(4, 3), reduction="sum") * 1.0
    ),
    "one over the number of values": lambda: scores(4, 3).square().sum() * (1 / 12),
    "a mean over the samples": lambda: scores(4, 4).square().mean(0).sum(),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_sum_that_makes_a_mean_is_no_sum_over_the_samples(name: str) -> None:
    assert codes(MEANS[name](), 2, samples=4) == []


def test_a_sum_over_the_samples_is_known_however_it_is_written() -> None:
    for loss in (
        scores(4, 3).square().sum(),
        0.01 * scores(4, 3).square().sum(),
        scores(4, 3).square().mean(1).sum(),
        (torch.ones(4) * scores(4, 1).squeeze(-1)).sum(),
    ):
        assert codes(loss, 2, samples=4) == ["W83"]


def test_the_range_of_targets_is_that_of_all() -> None:
    targets = torch.zeros(100, 1)
    targets[80] = 9.0
    ((_, sentence, _),) = problems_of(F.mse_loss(scores(100, 1).tanh(), targets), 1)
    assert "MseLoss compares the output of tanh" in sentence
    assert "between 0 and 9" in sentence


def test_a_loss_without_a_graph_or_whose_graph_was_freed_has_none_to_read() -> None:
    assert codes(torch.ones(())) == []
    assert codes(torch.ones((), requires_grad=True)) == []
    loss = F.nll_loss(scores(4, 3), LABELS)
    loss.backward()
    assert codes(loss) == []


def test_a_large_graph_is_read_near_the_loss_only() -> None:
    output = scores(4, 3)
    for _ in range(2000):
        output = output + 0.001
    assert codes(F.cross_entropy(output.softmax(-1), LABELS)) == ["W72"]
