"""Label smoothing for classification."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.authoring import Capture, Claim, check_name, check_number
from signalfire.findings import Finding, finding
from signalfire.findings.loss_nodes import functions_of

from ._common.loss_terms import check_losses
from ._common.ranks import SMOOTH_LOSS
from ._common.updates import selected_updates

__all__ = ["LabelSmoothing"]


class LabelSmoothing(Handler):
    """Label smoothing for classification, against overconfidence: ``(1 - alpha) * loss + alpha * uniform``.

    ``uniform`` is the cross-entropy of the update's output against the uniform distribution over all classes. With a mean
    cross-entropy loss, the result equals ``cross_entropy(..., label_smoothing=alpha)``. ``uniform`` weights all classes and
    positions equally, without the class weights and the ``ignore_index`` of the loss. If those matter, use the loss's built-in
    smoothing. MixUp and CutMix, if attached, mix the losses first. Evaluations report the original loss.

    Args:
        alpha: Weight of the uniform distribution, above 0 and at most 1; usually 0.1.
        update: Name of the update whose loss is smoothed; all by default.
        dim: Dimension of the classes in the logits: 1, or -1 for language models with logits of shape (N, T, C).

    Raises:
        ValueError: At the start of a run, for an update that is a single function, whose output is not available.
        TypeError: If the output (see `Update`, ``output``) is not a tensor of logits with at least two classes, or if the loss
            is not a cross entropy over classes (binary_cross_entropy and mse_loss are not).

    Source:
        Szegedy et al., "Rethinking the Inception Architecture for Computer Vision" (CVPR 2016).

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.cross_entropy, torch.optim.SGD, lr=1.0)
        >>> def train(*handlers):
        ...     model = torch.nn.Linear(1, 2)
        ...     _ = torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
        ...     engine = Engine(update, model=model, seed=0)
        ...     _ = engine.attach(handlers)
        ...     data = [(torch.zeros(4, 1), torch.zeros(4, dtype=torch.long))]
        ...     _ = engine.run(data, max_epochs=1)
        ...     return [round(one, 2) for one in model.bias.tolist()]
        >>> # The targets are (1, 0) or (0.9, 0.1), and the prediction is (0.5, 0.5).
        >>> train(), train(LabelSmoothing(0.2))
        ([0.5, -0.5], [0.4, -0.4])
    """

    by_shard = True
    capture = Capture.INSIDE
    trains = True

    other_names = {
        "label_smoothing": "alpha=",
        "smoothing": "alpha=",
    }

    def __init__(self, alpha: float = 0.1, *, update: str | None = None, dim: int = 1, name: str | None = None) -> None:
        super().__init__(name=name)
        self.alpha = check_number(self, "alpha", alpha, above=0, most=1)
        if isinstance(dim, bool) or not isinstance(dim, int) or dim == 0:
            raise ValueError(f"LabelSmoothing(dim={dim!r}): expected the index of the class dimension, such as 1 or -1")
        self.dim = dim
        self.update = check_name(self, "update", update)
        self._checked: set[str] = set()  # updates whose loss was looked at in this run

    def attached(self, engine: Engine) -> None:
        for update in selected_updates(engine, self.update):
            engine.overrides.claim(Claim("label smoothing"), by=self, target=f"of update {update.name!r}")

    def findings(self, engine: Engine) -> Iterator[Finding]:
        for update in selected_updates(engine, self.update):
            loss = getattr(update.spec.loss, "loss", None) or update.spec.loss
            if (own := _smoothing_of(loss)) > 0:
                yield finding(
                    "C29",
                    f"the loss of update {update.name!r} already smooths labels (label_smoothing={own:g}), and "
                    f"{self.name!r} smooths them again",
                    f"set label_smoothing=0 in the loss, or detach {self.name!r}",
                    [self.name],
                )

    @on(Events.STARTED, phase=Phase.PREPARE, reads=[], writes=[])
    def check_output(self, engine: Engine) -> None:
        """Raise an error for an update whose output is not available."""
        self._checked = set()
        check_losses(self, selected_updates(engine, self.update))

    @on(Events.LOSS_COMPUTED, rank=SMOOTH_LOSS, reads=["output", "loss"], writes=["loss"])
    def smooth(self, engine: Engine) -> None:
        """Mix the loss with that against the uniform distribution."""
        update = engine.state.update
        if self.update not in (None, update.name):
            return
        logits = update.output_in(update.output)
        fits = isinstance(logits, Tensor) and logits.dim() > 1 and logits.is_floating_point()
        fits = fits and logits.dim() > max(self.dim, -self.dim - 1) and logits.shape[self.dim] > 1
        if not fits:
            kind = type(logits).__name__
            found = f"has shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"is of type {kind}"
            raise TypeError(
                f"{self.name!r}: the output of update {update.name!r} {found}; expected a tensor of logits of shape "
                f"(N, C) or (N, C, ...) with at least two classes in dimension dim={self.dim}; if the forward returns "
                "more than the logits, select the logits with Update(..., output='logits')"
            )
        if update.name not in self._checked:
            self._check_loss(update.backward_loss, update.name)
        # Half precision is not enough for the logarithm; cross_entropy under autocast computes in float32, too.
        half = logits.dtype in (torch.float16, torch.bfloat16)
        uniform = -torch.log_softmax(logits, dim=self.dim, dtype=torch.float32 if half else None).mean()
        update.loss = update.backward_loss = (1 - self.alpha) * update.backward_loss + self.alpha * uniform

    def _check_loss(self, loss: Any, update: str) -> None:
        """Raise an error for a loss that is not a cross entropy over classes."""
        self._checked.add(update)
        functions = functions_of(loss) if isinstance(loss, Tensor) else set()
        if (other := functions & _NOT_OVER_CLASSES) and "LogSoftmax" not in functions:
            raise TypeError(
                f"{self.name!r}: the loss of update {update!r} is computed by {min(other)}, but label smoothing needs "
                "a cross-entropy loss over classes; detach the handler, or smooth the targets yourself"
            )


_NOT_OVER_CLASSES = {"BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "MseLoss", "HuberLoss", "SmoothL1Loss"}


def _smoothing_of(loss: Any) -> float:
    """How much a loss smooths labels, or one that it holds."""
    parts = loss.modules() if isinstance(loss, nn.Module) else [loss]
    found = [getattr(part, name, 0.0) for part in parts for name in ("label_smoothing", "smoothing")]
    found.append(getattr(loss, "keywords", {}).get("label_smoothing", 0.0))
    return max((one for one in found if isinstance(one, float)), default=0.0)
