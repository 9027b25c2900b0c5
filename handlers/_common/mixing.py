"""Base of MixUp and CutMix: mixes samples in pairs, and the losses of their targets with the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.authoring import Capture, Claim, check_number, derived_seed
from signalfire.updates.from_model import loss_in_output
from signalfire.updates.places import with_value_at

from .batches import check_place, find_target, tensor_at
from .ranks import MIX, MIX_LOSS

__all__ = ["SampleMixing"]


class SampleMixing(Handler):
    """Mixes each sample with another sample of its batch (see `mixed`), and the losses of both targets with the same weights.

    Each batch draws from the handler's own CPU generator: two float64 Gamma(alpha) variates, the first of which divided by their
    sum is Beta(alpha, alpha) distributed; then a permutation of the batch; then the draws of `mixed`.

    Args:
        alpha: Parameter of the Beta distribution; greater than 0.
        share: Relative share of the batches that the handler mixes if other handlers also mix; one of them mixes each batch.
        input: Index, key or name of the inputs in the batch.
        target: Index, key or name of the targets: a tensor of shape (N, ...). By default that of the update.

    Attributes:
        lam: Weight of each sample in the last mixed batch; None before the first.
    """

    by_shard = True
    capture = Capture.FORBIDDEN  # the ratio is a Python number
    trains = True

    def __init__(
        self, alpha: float, *, share: float, input: int | str, target: int | str | None, name: str | None
    ) -> None:
        super().__init__(name=name)
        self.alpha = check_number(self, "alpha", alpha, above=0)
        self.share = check_number(self, "share", share, above=0)
        self.input = check_place(self, "input", input)
        self.target = 1 if target is None else check_place(self, "target", target)
        self._given_target = target
        if target is not None:
            self._check_places()
        self.lam: float | None = None
        # lam and the targets that were mixed in, by the batch's own targets and for as long as these live: a step that
        # recomputes its gradients needs those of all batches of its window.
        self._mixed: WeakTensorKeyDictionary | None = None

    def _check_places(self) -> None:
        if self.input == self.target:
            raise ValueError(
                f"{type(self).__name__}(input={self.input!r}, target={self.target!r}): input= and target= must "
                "be different indices or keys"
            )

    def mixed(
        self, inputs: Tensor, partner: Tensor, gammas: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, float]:
        """The mixed inputs, and the weight lam of each sample itself.

        Args:
            inputs: Inputs of shape (N, ...).
            partner: Permutation on the inputs' device: the index of the sample that each one is mixed with.
            gammas: The two numbers from Gamma(alpha).
            generator: Generator for further draws.
        """
        raise NotImplementedError

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(Claim("the mixing of samples"), by=self, target=f"by {type(self).__name__}")

    @on(Events.STARTED, phase=Phase.PREPARE, reads=[], writes=[])
    def check(self, engine: Engine) -> None:
        """Raise an error if the loss or the gradients are computed in a way that rules out mixing."""
        self.target = find_target(self, engine, self._given_target)
        self._check_places()
        for update in engine.updates:
            if update.loss_function is loss_in_output:
                raise ValueError(
                    f"{self.name!r}: update {update.name!r} takes the loss from the model's output, so the loss cannot "
                    "be computed for the mixed-in targets; pass a loss: Update.from_model(optimizer, "
                    "loss=cross_entropy)"
                )
            if update.loss_function is None:
                raise ValueError(
                    f"{self.name!r}: update {update.name!r} is a single function, so its loss cannot be computed for "
                    "the mixed-in targets; pass forward and loss separately: Update(forward, loss, ...)"
                )
        if engine.overrides.gradients is not None:
            other = getattr(engine.overrides.gradients, "__self__", engine.overrides.gradients)
            if not getattr(other, "splits_by_samples", False):
                raise ValueError(
                    f"{self.name!r} mixes samples across the whole batch, but {other!r} may compute gradients from "
                    "parts of the batch; detach one of the two. If you split batches to save memory, use smaller "
                    "batches with GradientAccumulation instead"
                )
        if self._mixed is None:
            self._mixed = WeakTensorKeyDictionary()

    @on(Events.GET_BATCH_COMPLETED, rank=MIX, reads=["batch"], writes=["batch"])
    def mix(self, engine: Engine) -> None:
        """Mix the inputs of the batch; its targets stay."""
        batch = engine.state.batch
        if batch is None or not self._is_its_turn(engine):
            return
        inputs, targets = tensor_at(self, batch, "input"), tensor_at(self, batch, "target")
        if inputs.shape[:1] != targets.shape[:1]:
            raise ValueError(
                f"{self.name!r}: inputs of shape {tuple(inputs.shape)} and targets of shape {tuple(targets.shape)} "
                "must have the same number of samples"
            )
        # Each rank has a stream of its own; that of rank 0 is the one of a single process.
        generator = self.generator(engine, of_rank=engine.group.data.rank or None)
        gammas = torch._standard_gamma(torch.full((2,), self.alpha, dtype=torch.float64), generator=generator)
        partner = torch.randperm(len(inputs), generator=generator).to(inputs.device, non_blocking=True)
        mixed, self.lam = self.mixed(inputs, partner, gammas, generator)
        assert self._mixed is not None
        own = targets.view_as(targets)  # a new tensor object as the key, even if the data yields the same one again
        self._mixed[own] = (self.lam, targets[partner.to(targets.device, non_blocking=True)])
        engine.state.batch = with_value_at(with_value_at(batch, self.input, mixed), self.target, own)

    def _is_its_turn(self, engine: Engine) -> bool:
        """Whether this handler mixes the current batch: of several, one is drawn for each batch, whatever their order."""
        mixing = _mixing(engine)
        if len(mixing) == 1:
            return True
        seed = derived_seed(engine.seed, "mixing", engine.state.iteration)
        place = torch.rand((), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).item()
        for handler in mixing:
            place -= handler.share / sum(one.share for one in mixing)
            if place < 0:
                return handler is self
        return mixing[-1] is self

    @on(Events.LOSS_COMPUTED, rank=MIX_LOSS, reads=["batch", "output", "loss"], writes=["loss"])
    def mix_loss(self, engine: Engine) -> None:
        """Mix the loss for the batch's targets with the loss for the targets that were mixed in."""
        update, batch = engine.state.update, engine.state.batch
        found = self._mixed_into(own := tensor_at(self, batch, "target"))
        if found is None:
            if any(one._mixed_into(own) is not None for one in _mixing(engine) if one is not self):
                return
            raise RuntimeError(
                f"{self.name!r}: the targets of the batch were replaced after samples were mixed; replace them "
                "earlier, either in the data or at GET_BATCH_COMPLETED in Phase.PREPARE. If you use "
                "MicroBatching(split=), the function passed as split= must slice the targets instead of copying them; "
                "with TruncatedBPTT, samples can be mixed only if each sequence has a single target"
            )
        lam, targets = found
        other = update.loss_function(engine, update.output, with_value_at(batch, self.target, targets))
        update.loss = update.backward_loss = lam * update.backward_loss + (1 - lam) * other

    def _mixed_into(self, targets: Tensor) -> tuple[float, Tensor] | None:
        """lam and the targets that were mixed into these, which are those of a batch or a slice of them."""
        if self._mixed is None:
            return None
        found: tuple[float, Tensor] | None = self._mixed.get(targets)
        if found is None:
            for whole, (lam, others) in list(self._mixed.items()):
                if (start := _place_in(targets, whole)) is not None:
                    return lam, others[start : start + len(targets)]
        return found

    @on(Events.ENDED, reads=["window"], writes=[])
    def release(self, engine: Engine) -> None:
        """Drop the batches, except those of an open window, whose gradients the next run may recompute."""
        if not any(update.window.kept for update in engine.updates):
            self._mixed = None

    def state_dict(self) -> dict[str, Any]:
        """The targets mixed into the batches of open windows, whose gradients may be recomputed."""
        windows, mixed = {}, self._mixed
        for update in () if self.engine is None else self.engine.updates:
            if update.window.kept and mixed is not None:
                found = [mixed.get(tensor_at(self, batch, "target")) for batch, *_ in update.window.kept]
                windows[update.name] = [None if one is None else list(one) for one in found]
        return {"windows": windows} if windows else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._mixed = WeakTensorKeyDictionary()
        for update in () if self.engine is None else self.engine.updates:
            for (batch, *_), one in zip(
                update.window.kept or (), state.get("windows", {}).get(update.name, ()), strict=False
            ):
                if one is not None:
                    own = tensor_at(self, batch, "target")
                    self._mixed[own] = (one[0], one[1].to(own.device))

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts without mixed batches."""
        return super().__getstate__() | {"_mixed": None}


def _place_in(part: Tensor, whole: Tensor) -> int | None:
    """Where a slice of samples begins in the tensor that it is a view of; None if it is not a slice."""
    if part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        return None
    if part.shape[1:] != whole.shape[1:] or part.stride() != whole.stride() or not whole.stride(0):
        return None
    start, between = divmod(int(part.storage_offset()) - int(whole.storage_offset()), whole.stride(0))
    return start if not between and 0 <= start <= len(whole) - len(part) else None


def _mixing(engine: Engine) -> list[SampleMixing]:
    """The handlers that mix the batches of an engine in turn, by name."""
    found = [one for one in engine.handlers.values() if isinstance(one, SampleMixing) and one.enabled]
    return sorted(found, key=lambda one: one.name)
