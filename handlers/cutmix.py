"""CutMix: training on samples of which a box is cut from another sample."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from signalfire import Engine, Events, Handler, Phase, on

from .ranks import MIX, MIX_LOSS

__all__ = ["CutMix"]


class CutMix(Handler):
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

    trains = True

    def __init__(
        self, alpha: float = 1.0, *, input: int | str = 0, target: int | str = 1, name: str | None = None
    ) -> None:
        super().__init__(name=name or "cutmix")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
            raise ValueError(f"CutMix(alpha={alpha!r}): it has to be a number above zero")
        for argument, place in (("input", input), ("target", target)):
            if isinstance(place, bool) or not isinstance(place, int | str):
                raise TypeError(f"CutMix({argument}={place!r}): it has to be a place in a tuple or a key of a dict")
        if input == target:
            raise ValueError(f"CutMix(input={input!r}, target={target!r}): inputs and targets have different places")
        self.alpha = alpha
        self.input = input
        self.target = target
        self.lam: float | None = None
        # By the targets of a batch, as long as somebody holds it: lam, and the targets that were mixed in. A step that
        # computes its gradients again comes back to earlier batches of its window.
        self._mixed: WeakTensorKeyDictionary | None = None

    def attached(self, engine: Engine) -> None:
        engine.claim("the mixing of samples", by=self)

    @on(Events.STARTED, phase=Phase.PREPARE)
    def begin(self, engine: Engine) -> None:
        """Refuse what cannot be mixed."""
        for update in engine.updates:
            if update.loss_function is None:
                raise ValueError(
                    f"{self.name!r}: update {update.name!r} is a single function, whose loss cannot be computed again for the "
                    "targets that are mixed in; give its forward and its loss: Update(forward, loss, ...)"
                )
        if engine.replaced_gradients is not None:
            other = getattr(engine.replaced_gradients, "__self__", engine.replaced_gradients)
            raise ValueError(
                f"{self.name!r} mixes the samples of a whole batch, but {other!r} may compute gradients from parts of "
                "it; detach one of the two, or use smaller batches with GradientAccumulation"
            )
        self._mixed = WeakTensorKeyDictionary()

    @on(Events.GET_BATCH_COMPLETED, rank=MIX)
    def mix(self, engine: Engine) -> None:
        """Mix the inputs of the batch; its targets stay."""
        batch = engine.state.batch
        if batch is None:
            return
        inputs, targets = _part(self, batch, "input"), _part(self, batch, "target")
        if inputs.dim() < 3:
            raise ValueError(
                f"{self.name!r}: the inputs have shape {tuple(inputs.shape)}, but have to have (N, C, length), "
                "(N, C, height, width) or more"
            )
        if inputs.shape[:1] != targets.shape[:1]:
            raise ValueError(f"{self.name!r}: inputs of shape {tuple(inputs.shape)}, targets {tuple(targets.shape)}")
        generator = self.generator(engine)
        gammas = torch._standard_gamma(torch.full((2,), self.alpha, dtype=torch.float64), generator=generator)
        partner = torch.randperm(len(inputs), generator=generator).to(inputs.device)
        sizes = inputs.shape[2:]
        share = math.pow((gammas[1] / gammas.sum()).item(), 1 / len(sizes))
        box = []
        for size in sizes:
            centre = int(torch.randint(size, (), generator=generator))
            half = int(size * share) // 2
            box.append(slice(max(centre - half, 0), min(centre + half, size)))
        self.lam = lam = 1 - math.prod(side.stop - side.start for side in box) / math.prod(sizes)
        region = (slice(None), slice(None), *box)
        mixed = inputs.clone()
        mixed[region] = inputs[region][partner]
        assert self._mixed is not None
        own = targets.view_as(targets)  # an object of its own, also if the data gives the same one again
        self._mixed[own] = (lam, targets[partner.to(targets.device)])
        engine.state.batch = _changed(_changed(batch, self.input, mixed), self.target, own)

    @on(Events.LOSS_COMPUTED, rank=MIX_LOSS)
    def mix_loss(self, engine: Engine) -> None:
        """Mix the loss of the batch's targets with that of the targets that were mixed in."""
        update, batch = engine.state.update, engine.state.batch
        assert self._mixed is not None
        found = self._mixed.get(_part(self, batch, "target"))
        if found is None:
            raise RuntimeError(
                f"{self.name!r}: the batch's targets are not those that were mixed; what replaces or cuts them has to come "
                "before: at GET_BATCH_COMPLETED in Phase.PREPARE, or in the data"
            )
        lam, targets = found
        other = update.loss_function(engine, update.output, _changed(batch, self.target, targets))
        update.loss = update.backward_loss = lam * update.backward_loss + (1 - lam) * other

    @on(Events.ENDED)
    def forget(self, engine: Engine) -> None:
        """Let go of the batches."""
        self._mixed = None


def _part(handler: CutMix, batch: Any, argument: str) -> Tensor:
    place = getattr(handler, argument)
    try:
        part = batch[place] if isinstance(batch, tuple | list | dict) else None
    except (IndexError, KeyError, TypeError):
        part = None
    if not isinstance(part, Tensor) or part.dim() == 0:
        raise TypeError(
            f"{handler.name!r}: the batch ({type(batch).__name__}) has no tensor at {place!r}; "
            f"say where it is with CutMix({argument}=)"
        )
    return part


def _changed(batch: Any, place: Any, value: Tensor) -> Any:
    """A copy of the batch with another tensor in this place."""
    if isinstance(batch, tuple):
        items = list(batch)
        items[place] = value
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    batch = copy.copy(batch)
    batch[place] = value
    return batch
