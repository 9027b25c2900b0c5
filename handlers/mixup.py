"""MixUp: training on convex combinations of samples."""

from __future__ import annotations

import torch
from torch import Tensor

from ._common.mixing import SampleMixing

__all__ = ["MixUp"]


class MixUp(SampleMixing):
    """MixUp: mixes each sample with another of its batch, ``lam * x + (1 - lam) * x[perm]``, and the losses of both targets.

    The loss is ``lam * loss(output, y) + (1 - lam) * loss(output, y[perm])``, for which the update's loss function is called a
    second time. The batch keeps its targets ``y``, so metrics such as accuracy compare the outputs of mixed samples with hard
    labels.

    Each batch draws from the handler's own CPU generator, in this order: two float64 Gamma(alpha) variates a and b, so that
    ``lam = a / (a + b)`` has the distribution Beta(alpha, alpha); and ``perm``, a permutation of the batch.

    Args:
        alpha: Parameter of the Beta distribution. The smaller it is, the closer lam is to 0 or 1; the paper uses 0.1 to 0.4 for
            ImageNet and 1 for CIFAR.
        share: Relative share of the batches that MixUp mixes if `CutMix` is also attached. One of the two is drawn for each
            batch, from the run's seed and the iteration. Alone, the handler mixes every batch.
        input: Index, key or name of the inputs in the batch: floats of shape (N, ...).
        target: Index, key or name of the targets in the batch, a tensor of shape (N, ...); by default that of the update.

    Attributes:
        lam: Weight of each sample in the last mixed batch; None before the first.

    Errors:
        ValueError: At the start of a run, if an update is a single function or takes the loss from the model's output, because
            such a loss cannot be computed again, or if another handler computes gradients from parts of the batch, which would
            separate the pairs.

    Source:
        Zhang, Cisse, Dauphin and Lopez-Paz, "mixup: Beyond Empirical Risk Minimization" (ICLR 2018).

    Example:
        >>> import torch
        >>> from signalfire import Engine, Events, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine, mixup = Engine(update, model=torch.nn.Linear(2, 1), seed=0), MixUp(0.4)
        >>> _ = engine.attach(mixup)
        >>> @engine.on(Events.FORWARD_STARTED)
        ... def show(engine):
        ...     samples = engine.state.batch[0].tolist()
        ...     print(round(mixup.lam, 2), [[round(value, 2) for value in one] for one in samples])
        >>> _ = engine.run([(torch.eye(2), torch.ones(2, 1))], max_epochs=1)
        0.29 [[0.29, 0.71], [0.71, 0.29]]
    """

    def __init__(
        self,
        alpha: float = 0.2,
        *,
        share: float = 1.0,
        input: int | str = 0,
        target: int | str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(alpha, share=share, input=input, target=target, name="mixup" if name is None else name)

    def mixed(
        self, inputs: Tensor, partner: Tensor, gammas: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, float]:
        if not inputs.is_floating_point():
            raise TypeError(
                f"{self.name!r}: the inputs have dtype {inputs.dtype}, but only floating-point inputs can be mixed; "
                "convert the inputs to a floating-point dtype first"
            )
        lam = (gammas[0] / gammas.sum()).item()
        return (inputs * lam).add_(inputs[partner].mul_(1 - lam)), lam
