"""MixUp: training on convex combinations of samples."""

from __future__ import annotations

import torch
from torch import Tensor

from ._common.mixing import SampleMixing

__all__ = ["MixUp"]


class MixUp(SampleMixing):
    """Mixes each sample with another of its batch, ``lam * x + (1 - lam) * x[perm]``, and the losses of both targets likewise.

    The loss is ``lam * loss(output, y) + (1 - lam) * loss(output, y[perm])``, which serves any loss: the update's own is
    computed a second time. The batch keeps its targets ``y`` as they are, so that metrics such as accuracy see hard
    labels; they measure mixed samples.

    For each batch are drawn, from the handler's own generator on the CPU: two numbers of Gamma(alpha) in float64, whose
    first divided by their sum is lam, distributed as Beta(alpha, alpha); then ``perm``, a permutation of the batch.

    Args:
        alpha: the smaller, the nearer lam is to 0 or 1; the paper uses 0.1 to 0.4 for ImageNet and 1 for CIFAR.
        input: where the batch, a tuple, list or dict, has the inputs: floats of shape (N, ...).
        target: where it has the targets: a tensor of shape (N, ...).

    Attributes:
        lam: the share of each sample in the last mixed batch; None before the first.

    Errors:
        ValueError: at the start of a run, for an update that is a single function, since its loss cannot be computed again,
            and together with a handler that computes gradients from parts of the batch, which would tear the pairs apart.

    Source:
        Zhang, Cisse, Dauphin and Lopez-Paz, "mixup: Beyond Empirical Risk Minimization" (ICLR 2018).

    Example:
        >>> MixUp(0.4).alpha
        0.4
    """

    def __init__(
        self, alpha: float = 0.2, *, input: int | str = 0, target: int | str = 1, name: str | None = None
    ) -> None:
        super().__init__(alpha, input=input, target=target, name=name or "mixup")

    def mixed(
        self, inputs: Tensor, partner: Tensor, gammas: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, float]:
        if not inputs.is_floating_point():
            raise TypeError(f"{self.name!r}: the inputs are {inputs.dtype}, but only floats can be mixed")
        lam = (gammas[0] / gammas.sum()).item()
        return (inputs * lam).add_(inputs[partner].mul_(1 - lam)), lam
