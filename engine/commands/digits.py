"""One-dimensional digits, made in a moment: data for a first run, without a further package."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["one_dimensional_digits"]

CLASSES, STROKE, LENGTH = 10, 12, 40


def one_dimensional_digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Signals of shape (count, 40), float32, and their classes from 0 to 9, int64.

    Each class is a smooth stroke of 12 values; a sample has it somewhere, stronger or weaker, in noise. A linear model finds
    little of it, since the stroke moves; the idea is that of MNIST-1D (Greydanus and Kobak, https://arxiv.org/abs/2011.14439).

    Args:
        count: Number of samples.
        seed: The same seed gives the same samples; the strokes are the same for all seeds.

    Example:
        >>> x, y = one_dimensional_digits(100, seed=0)
        >>> x.shape, y.shape
        (torch.Size([100, 40]), torch.Size([100]))
    """
    strokes = _smooth(torch.randn(CLASSES, STROKE, generator=torch.Generator().manual_seed(7)), 3)
    strokes = strokes / strokes.std(1, keepdim=True)
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (count,), generator=generator)
    places = torch.randint(LENGTH - STROKE + 1, (count, 1), generator=generator) + torch.arange(STROKE)
    strength = 1 + 0.4 * torch.randn(count, 1, generator=generator)
    signals = 0.6 * _smooth(torch.randn(count, LENGTH, generator=generator), 3)
    return signals.scatter_add(1, places, strength * strokes[classes]), classes


def _smooth(signals: Tensor, width: int) -> Tensor:
    """The moving average over so many values, of the same length."""
    padded = torch.nn.functional.pad(signals[:, None], (width // 2, width // 2), mode="circular")
    return torch.nn.functional.avg_pool1d(padded, width, stride=1)[:, 0]
