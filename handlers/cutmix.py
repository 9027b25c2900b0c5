"""CutMix: training on samples of which a box is cut from another sample."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._common.mixing import SampleMixing

__all__ = ["CutMix"]


class CutMix(SampleMixing):
    """Cuts a box out of each sample, fills it from another sample of the batch, and mixes the losses of both targets by area.

    The loss is ``lam * loss(output, y) + (1 - lam) * loss(output, y[perm])``, where lam is the share of the sample that was
    left; the update's own loss is computed a second time. The batch keeps its targets ``y`` as they are, so that metrics
    such as accuracy see hard labels; they measure mixed samples.

    For each batch are drawn, from the handler's own generator on the CPU: two numbers of Gamma(alpha) in float64, whose
    first divided by their sum is distributed as Beta(alpha, alpha); then ``perm``, a permutation of the batch; then the
    box's centre, in each dimension in turn. A side of the box is that of the sample times ``(1 - beta) ** (1 / d)`` in d
    dimensions. What reaches over the border is cut off, and lam is what is left in fact.

    Args:
        alpha: the smaller, the more often the box is nearly nothing or nearly all; the paper uses 1.
        input: where the batch, a tuple, list or dict, has the inputs: (N, C, L), (N, C, H, W) or (N, C, D, H, W).
        target: where it has the targets: a tensor of shape (N, ...).

    Attributes:
        lam: the share that was left of each sample in the last mixed batch; None before the first.

    Errors:
        ValueError: at the start of a run, for an update that is a single function, since its loss cannot be computed again,
            and together with a handler that computes gradients from parts of the batch, which would tear the pairs apart.

    Source:
        Yun et al., "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features" (ICCV 2019).

    Example:
        >>> CutMix().alpha
        1.0
    """

    def __init__(
        self, alpha: float = 1.0, *, input: int | str = 0, target: int | str = 1, name: str | None = None
    ) -> None:
        super().__init__(alpha, input=input, target=target, name=name or "cutmix")

    def mixed(
        self, inputs: Tensor, partner: Tensor, gammas: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, float]:
        if inputs.dim() < 3:
            raise ValueError(
                f"{self.name!r}: the inputs have shape {tuple(inputs.shape)}, but have to have (N, C, length), "
                "(N, C, height, width) or more"
            )
        sizes = inputs.shape[2:]
        share = math.pow((gammas[1] / gammas.sum()).item(), 1 / len(sizes))
        box = []
        for size in sizes:
            centre = int(torch.randint(size, (), generator=generator))
            half = int(size * share) // 2
            box.append(slice(max(centre - half, 0), min(centre + half, size)))
        region = (slice(None), slice(None), *box)
        mixed = inputs.clone()
        mixed[region] = inputs[region][partner]
        return mixed, 1 - math.prod(side.stop - side.start for side in box) / math.prod(sizes)
