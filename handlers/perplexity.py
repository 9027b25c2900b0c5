"""Perplexity: how many tokens a language model hesitates between, on average."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from signalfire.authoring import check_int
from signalfire.authoring.devices import widened

__all__ = ["Perplexity"]


class Perplexity:
    """Perplexity of a language model, a metric for `Metrics` and `Validation`: the exponential of the mean loss per token.

    The mean is over all tokens of all batches, except ignored ones.

    Args:
        ignore_index: Class of targets that do not count, such as padding; as in `torch.nn.functional.cross_entropy`.

    Shapes: - output: scores (logits) of shape (N, C, ...) as for `torch.nn.functional.cross_entropy`, or with the classes last,
    (N, ..., C), as language models return them. Half precision is computed in float32. - target: classes of shape (N, ...), of
    any integer dtype.

    Raises:
        ValueError: For shapes that do not fit, or that fit both ways, such as scores of shape (N, 8, 8) for 8 tokens.

    Source:
        Jelinek, Mercer, Bahl and Baker, "Perplexity - a measure of the difficulty of speech recognition tasks" (1977).

    Example:
        >>> metric = Perplexity()
        >>> # The scores of 4 tokens are equally likely.
        >>> metric.update(torch.zeros(2, 3, 4), torch.tensor([[0, 1, 2], [3, -100, -100]]))
        >>> round(metric.compute(), 6)
        4.0
    """

    higher_is_better = False

    def __init__(self, *, ignore_index: int = -100) -> None:
        self.ignore_index = check_int(self, "ignore_index", ignore_index, least=-(2**62))
        self.reset()

    def reset(self) -> None:
        self._losses: list[Tensor] = []  # of each batch, the sum over its tokens, and how many count
        self._total = 0.0
        self._count = 0

    def update(self, output: Tensor, target: Tensor) -> None:
        scores = _classes_first(output, target).float()
        target = target.long()
        loss = cross_entropy(scores, target, ignore_index=self.ignore_index, reduction="sum")
        counted = (target != self.ignore_index).sum()
        self._losses.append(torch.stack([widened(loss), widened(counted)]).detach())
        if len(self._losses) >= 64:
            self._fold()

    def compute(self) -> float:
        """The perplexity of the tokens so far; NaN without any, and infinite if it is too large for a float."""
        self._fold()
        if not self._count:
            return math.nan
        mean = self._total / self._count
        return math.exp(mean) if mean < 700 else math.inf

    def _fold(self) -> None:
        if self._losses:
            total, count = torch.stack([one.cpu() for one in self._losses]).sum(0).tolist()
            self._total, self._count, self._losses = self._total + total, self._count + int(count), []

    def state_dict(self) -> dict[str, Any]:
        self._fold()
        return {"total": self._total, "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        self._total, self._count = state["total"], state["count"]

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Combine the tokens of all ranks."""
        self.reset()
        self._total = math.fsum(state["total"] for state in states)
        self._count = sum(state["count"] for state in states)


def _classes_first(output: Tensor, target: Tensor) -> Tensor:
    """The scores with the classes in the second dimension."""
    first = output.dim() == target.dim() + 1 and (*output.shape[:1], *output.shape[2:]) == tuple(target.shape)
    last = output.dim() == target.dim() + 1 and output.shape[:-1] == target.shape
    shapes = f"scores of shape {tuple(output.shape)} for targets of shape {tuple(target.shape)}"
    if first and last and output.dim() > 2:
        raise ValueError(
            f"Perplexity: {shapes} are ambiguous, because the class dimension could be the second or the last; flatten "
            "the scores to (tokens, C) and the targets to (tokens,)"
        )
    if not first and not last:
        raise ValueError(
            f"Perplexity: got {shapes}; expected scores of shape (N, C, ...) or (N, ..., C) and targets of shape "
            "(N, ...)"
        )
    return output if first else output.movedim(-1, 1)
