"""CutMix: replaces a box of each sample with the same box of another sample."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._common.mixing import SampleMixing

__all__ = ["CutMix"]


class CutMix(SampleMixing):
    """CutMix: pastes a box of another sample into each sample of the batch and mixes the losses by area.

    The loss is ``lam * loss(output, y) + (1 - lam) * loss(output, y[perm])``, where ``lam`` is the fraction of the sample that
    is kept. The update's loss function is therefore called twice. The batch keeps its targets ``y``, so metrics such as
    accuracy compare the outputs of mixed samples with hard labels.

    Each batch draws from the handler's own CPU generator, in this order: two float64 Gamma(alpha) variates a and b, so that
    ``beta = a / (a + b)`` has the distribution Beta(alpha, alpha); ``perm``, a permutation of the batch; and the center of the
    box, one dimension after the other. In d spatial dimensions, each side of the box is the sample's side times
    ``(1 - beta) ** (1 / d)``. The box is clipped at the border, and ``lam`` is computed from the clipped box.

    Args:
        alpha: Parameter of the Beta distribution. The smaller it is, the more often the box covers almost nothing or almost
            everything; the paper uses 1.
        share: Relative share of the batches that CutMix mixes if `MixUp` is also attached. One of the two is drawn for each
            batch, from the run's seed and the iteration. Without `MixUp`, every batch is mixed.
        input: Index, key or name of the inputs in the batch: (N, C, L), (N, C, H, W) or (N, C, D, H, W).
        target: Index, key or name of the targets in the batch, a tensor of shape (N, ...); by default, the update's own
            ``target``.

    Attributes:
        lam: Fraction of each sample kept in the last mixed batch; None before the first.

    Raises:
        ValueError: At the start of a run, if an update is a single function, whose loss cannot be computed again, or if
            another handler computes gradients from parts of the batch, which would separate the mixed pairs.

    Source:
        Yun et al., "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features" (ICCV 2019).

    Example:
        >>> import torch
        >>> from signalfire import Engine, Events, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine, mix = Engine(update, model=torch.nn.Conv2d(1, 1, 1), seed=0), CutMix()
        >>> _ = engine.attach(mix)
        >>> @engine.on(Events.FORWARD_STARTED)
        ... def show(engine):
        ...     print(engine.state.batch[0][0, 0], mix.lam)
        >>> # The first image gets a box of the second.
        >>> images = torch.stack([torch.zeros(1, 4, 4), torch.ones(1, 4, 4)])
        >>> _ = engine.run([(images, images)], max_epochs=1)
        tensor([[0., 0., 0., 0.],
                [1., 1., 0., 0.],
                [1., 1., 0., 0.],
                [0., 0., 0., 0.]]) 0.75
    """

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        share: float = 1.0,
        input: int | str = 0,
        target: int | str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(alpha, share=share, input=input, target=target, name="cutmix" if name is None else name)

    def mixed(
        self, inputs: Tensor, partner: Tensor, gammas: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, float]:
        if inputs.dim() < 3:
            raise ValueError(
                f"{self.name!r}: the inputs have shape {tuple(inputs.shape)}; expected (N, C, length), (N, C, height, "
                "width) or a shape with more dimensions"
            )
        sizes = inputs.shape[2:]
        share = math.pow((gammas[1] / gammas.sum()).item(), 1 / len(sizes))
        box = []
        for size in sizes:
            center = int(torch.randint(size, (), generator=generator))
            half = int(size * share) // 2
            box.append(slice(max(center - half, 0), min(center + half, size)))
        region = (slice(None), slice(None), *box)
        mixed = inputs.clone()
        mixed[region] = inputs[region][partner]
        return mixed, 1 - math.prod(side.stop - side.start for side in box) / math.prod(sizes)
