"""AutoClip: clips gradients to a percentile of their earlier norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.authoring import Capture, check_int, check_name, check_number
from signalfire.distributed import local_part

from ._common.claims import CLIPPING
from ._common.parameters import alike, any_sharded, gradients_of, norm_of_all
from ._common.updates import selected_updates

__all__ = ["AutoClip"]


class AutoClip(Handler):
    """AutoClip: clips the global gradient norm to a percentile of recent norms, so there is no threshold to tune.

    The percentile includes the current norm, so the first step is not clipped. The norms of unscaled gradients are measured
    once per optimizer step, before clipping; skipped steps and non-finite norms are left out. All values stay on the device, so
    no synchronization is needed. `GradientClipping` clips the same gradients, so attaching both raises an error.

    Args:
        percentile: Percentile of the norms, above 0 and at most 100, interpolated linearly.
        window: Number of most recent steps whose norms are used; each step sorts these norms. None uses all steps, as in the
            paper.
        update: Name of the update to clip; by default all, each with its own norms.

    Attributes:
        total_norm: Global norm before the last clipping, as a tensor; None before the first.
        max_norm: Norm to which the last step was clipped, as a tensor; None before the first.

    Raises:
        TypeError: If a gradient is sparse.

    Source:
        Seetharaman, Wichern, Pardo and Le Roux, "AutoClip: Adaptive Gradient Clipping for Source Separation Networks" (MLSP
        2020); the clipping uses the same arithmetic as ``torch.nn.utils.clip_grad_norm_``.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Events, Update
        >>> def loss(output, target):
        ...     return output.mean()  # its gradient is the mean of the inputs
        >>> update = Update.supervised(loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.Linear(1, 1, bias=False), seed=0)
        >>> clip = AutoClip(50)
        >>> _ = engine.attach(clip)
        >>> @engine.on(Events.ITERATION_COMPLETED)
        ... def show(engine):
        ...     print(f"norm {clip.total_norm:.0f}, clipped to {clip.max_norm:.0f}")
        >>> batches = [(torch.full((4, 1), scale), torch.zeros(4, 1)) for scale in (2.0, 2.0, 90.0)]
        >>> _ = engine.run(batches, max_epochs=1)
        norm 2, clipped to 2
        norm 2, clipped to 2
        norm 90, clipped to 2
    """

    capture = Capture.FORBIDDEN
    trains = True
    clips_gradients = True
    decides_alike = True

    def __init__(
        self,
        percentile: float = 10.0,
        *,
        window: int | None = 1000,
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.percentile = check_number(self, "percentile", percentile, above=0, most=100)
        self.window = None if window is None else check_int(self, "window", window)
        self.update = check_name(self, "update", update)
        self.total_norm: Tensor | None = None
        self.max_norm: Tensor | None = None
        self._norms: dict[str, _Norms] = {}  # by update

    def attached(self, engine: Engine) -> None:
        for update in selected_updates(engine, self.update):
            engine.overrides.claim(CLIPPING, by=self, target=f"of update {update.name!r}")

    @on(Events.STARTED, phase=Phase.PREPARE, reads=[], writes=[])
    def forget_open(self, engine: Engine) -> None:
        """Discard the norm of a step that ended with an error."""
        for norms in self._norms.values():
            norms.drop()

    @on(Events.GRADIENTS_READY, reads=["gradients", "trainable", "optimizer"], writes=["gradients"])
    def clip(self, engine: Engine) -> None:
        """Clip the gradients of the accumulation window."""
        update = engine.state.update
        if self.update not in (None, update.name):
            return
        gradients = gradients_of(update)
        if not gradients:
            return
        if any(gradient.is_sparse for gradient in gradients):
            raise TypeError(
                f"{self.name!r}: a gradient of update {update.name!r} is sparse and cannot be clipped; build the "
                "embedding with sparse=False"
            )
        together = any_sharded(gradients) or alike(gradients)
        total = norm_of_all(gradients, 2.0) if together else torch.nn.utils.get_total_norm(gradients)
        norms = self._norms.setdefault(update.name, _Norms(self.window))
        bound = norms.add(total, self.percentile / 100)
        factor = torch.clamp((total + 1e-6).reciprocal() * bound, max=1.0)  # as torch divides a number by a tensor
        factor = torch.where(bound.isnan(), torch.ones_like(factor), factor)  # no finite norm was seen yet
        if together:
            torch._foreach_mul_([local_part(gradient) for gradient in gradients], factor)
        else:  # of several devices or dtypes
            for gradient in gradients:
                gradient.mul_(factor.to(gradient.device))
        self.total_norm, self.max_norm = total, bound

    @on(Events.OPTIMIZER_STEP_COMPLETED, phase=Phase.PREPARE, reads=["step"], writes=[])
    def keep(self, engine: Engine) -> None:
        """Keep the norm of a completed step; discard that of a skipped one."""
        update = engine.state.update
        if update.name in self._norms:
            if update.skipped is None:
                self._norms[update.name].keep()
            else:
                self._norms[update.name].drop()

    def state_dict(self) -> dict[str, Any]:
        return {name: {"count": norms.count, "norms": norms.kept()} for name, norms in self._norms.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._norms = {name: _Norms(self.window, one["norms"], one["count"]) for name, one in state.items()}


class _Norms:
    """The norms of the last steps, in a ring on the device of the gradients; those that are not finite do not count.

    Attributes:
        count: Number of steps whose norms were kept.
    """

    def __init__(self, window: int | None, norms: Tensor | None = None, count: int = 0) -> None:
        self.window = window
        self.count = count
        self._ring = torch.empty(0) if norms is None else norms.detach().clone()
        self._replaced: Tensor | None = None  # what stood in the place of the step under way
        length = len(self._ring)
        if (count > length != window) or (window is not None and length > window):  # it was saved with another window
            self._ring = self._ring.roll(-(count % length))[-(window or length) :]
            self.count = len(self._ring)

    def add(self, norm: Tensor, share: float) -> Tensor:
        """Add the norm of the current step, and return the quantile of all norms; NaN if none is finite.

        A step that computes its gradients several times adds several norms; the last one stays.
        """
        place = self.count if self.window is None else self.count % self.window
        if place >= len(self._ring):  # twice the length, so that few steps copy
            length = 2 * place + 16
            longer = norm.new_full((length if self.window is None else min(length, self.window),), float("nan"))
            longer[: len(self._ring)] = self._ring
            self._ring = longer
        elif self._ring.device != norm.device:
            self._ring = self._ring.to(norm.device)
        if self._replaced is None:
            self._replaced = self._ring[place].clone()
        self._ring[place] = norm
        seen = self._ring[: self.count + 1]
        ordered = seen.sort().values  # what is not finite comes last
        rank = (seen.isfinite().sum() - 1) * share
        below = rank.floor()
        low, high = ordered.take(torch.stack((below, rank.ceil())).long().clamp(min=0)).unbind()
        return torch.lerp(low, high, (rank - below).to(low.dtype))

    def keep(self) -> None:
        """Keep the norm of the current step."""
        if self._replaced is not None:
            self.count += 1
            self._replaced = None

    def drop(self) -> None:
        """Leave out the norm of the current step."""
        if self._replaced is not None:
            self._ring[self.count if self.window is None else self.count % self.window] = self._replaced
            self._replaced = None

    def kept(self) -> Tensor:
        """The norms that count, in their places."""
        return self._ring[: self.count].clone()
