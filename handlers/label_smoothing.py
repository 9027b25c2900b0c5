"""Label smoothing for classification."""

from __future__ import annotations

import torch
from torch import Tensor

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.acts import Override
from signalfire.checks import check_number

from ._common.ranks import SMOOTH_LOSS
from ._common.updates import updates_meant

__all__ = ["LabelSmoothing"]


class LabelSmoothing(Handler):
    """Keeps a classifier from being too sure: the loss becomes ``(1 - alpha) * loss + alpha * uniform``.

    ``uniform`` is the cross-entropy of the update's output against equal probabilities of all classes. So a loss that is
    the mean cross-entropy comes to ``cross_entropy(..., label_smoothing=alpha)``. Class weights and ``ignore_index`` are known
    to the loss alone: ``uniform`` counts every class and every place alike; where that matters, smooth in the loss. Samples that
    are mixed have their losses mixed first. It holds for training alone: an evaluation measures the loss as it is.

    Args:
        alpha: the share of the uniform distribution, above 0 and up to 1; usually 0.1.
        update: the name of the update whose loss is smoothed; all by default.

    Errors:
        ValueError: at the start of a run, for an update that is a single function, whose output nobody sees.
        TypeError: for an output that is not a tensor of logits of shape (N, C) or (N, C, ...), with at least two classes.

    Source:
        Szegedy et al., "Rethinking the Inception Architecture for Computer Vision" (CVPR 2016).

    Example:
        >>> LabelSmoothing(0.1).alpha
        0.1
    """

    trains = True

    def __init__(self, alpha: float = 0.1, *, update: str | None = None, name: str | None = None) -> None:
        super().__init__(name=name)
        self.alpha = check_number(self, "alpha", alpha, above=0, most=1)
        self.update = update

    def attached(self, engine: Engine) -> None:
        for update in updates_meant(engine, self.update):
            engine.overrides.claim(Override.LABEL_SMOOTHING, by=self, target=f"of update {update.name!r}")

    @on(Events.STARTED, phase=Phase.PREPARE)
    def check(self, engine: Engine) -> None:
        """Refuse an update without an output."""
        for update in updates_meant(engine, self.update):
            if update.loss_function is None:
                raise ValueError(
                    f"{self.name!r}: update {update.name!r} is a single function, whose output nobody sees; give its forward "
                    "and its loss, Update(forward, loss, ...), or update= another update"
                )

    @on(Events.LOSS_COMPUTED, rank=SMOOTH_LOSS)
    def smooth(self, engine: Engine) -> None:
        """Mix the loss with that of equal probabilities."""
        update = engine.state.update
        if self.update not in (None, update.name):
            return
        logits = update.output
        fits = isinstance(logits, Tensor) and logits.dim() > 1 and logits.is_floating_point() and logits.shape[1] > 1
        if not fits:
            found = f"of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            raise TypeError(
                f"{self.name!r}: the output of update {update.name!r} is {found}; it has to be a tensor of logits of shape "
                "(N, C) or (N, C, ...) with two classes or more"
            )
        # As in cross_entropy under autocast, half precision is not enough for the logarithm.
        half = logits.dtype in (torch.float16, torch.bfloat16)
        uniform = -torch.log_softmax(logits, dim=1, dtype=torch.float32 if half else None).mean()
        update.loss = update.backward_loss = (1 - self.alpha) * update.backward_loss + self.alpha * uniform
