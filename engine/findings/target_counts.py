"""How many targets a loss is a mean over: where micro-steps of one window have different numbers, their mean is another loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..authoring.batches import tensors_in
from ..authoring.devices import is_readable
from .dropout import EagerMode
from .loss_nodes import factor_in, note_factor

if TYPE_CHECKING:
    from ..core.update import UpdateState
    from ..engine import Engine

__all__ = [
    "Mean", "TargetCalls", "TargetCounts", "are_averaged", "is_among", "mean_over", "rows_of", "terms_of",
]  # fmt: skip


@dataclass(frozen=True)
class Mean:
    """What a loss function averages over. The targets are read, and a device is waited for, only once their number is asked for.

    Attributes:
        target: the classes.
        ignored: the class that is ignored.
        weight: the weights of the classes; None if all count alike.
        factor: what the mean is multiplied with in the loss.
    """

    target: Tensor
    ignored: int
    weight: Tensor | None
    factor: float = 1.0

    @cached_property
    def number(self) -> float:
        """The number of targets that are not ignored; the sum of their weights, if the classes have weights."""
        counted = self.target[self.target != self.ignored]
        return float(len(counted)) if self.weight is None else float(self.weight.detach()[counted].sum())

    @cached_property
    def ignores(self) -> bool:
        """Whether some targets are of the class that is ignored."""
        return bool((self.target == self.ignored).any())


def mean_over(args: Any, named: Any, result: Any) -> Mean | None:
    """What a call of ``cross_entropy`` or ``nll_loss`` averages over; None if it does not, or has no classes as targets."""
    target = args[1] if len(args) > 1 else named["target"]
    is_mean = named.get("reduction", "mean") == "mean" and result.requires_grad
    if not is_mean or target.is_floating_point() or not is_readable(target):
        return None
    return Mean(target, int(named.get("ignore_index", -100)), named.get("weight"))


def terms_of(loss: Tensor | None, means: list[tuple[Mean, Tensor]]) -> list[Mean]:
    """The means that are terms of a loss, and not only logged, with their factors.

    Args:
        loss: the loss.
        means: each with the value that it gave.
    """
    factors = [None if loss is None else factor_in(loss, value) for _, value in means]
    return [replace(one, factor=by) for (one, _), by in zip(means, factors, strict=True) if by is not None]


def are_averaged(engine: Engine, update: UpdateState) -> bool:
    """Whether several losses of an update make one step, so that it matters how many targets each has."""
    several = update.window.length > 1 or engine.group.data.world_size > 1
    return several or engine.overrides.gradients is not None


class TargetCalls(EagerMode):
    """Notes what the losses inside the ``with`` block are means over.

    Attributes:
        means: one for each call, in order, with the value that it gave.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.means: list[tuple[Mean, Tensor]] = []
        self._engine = engine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        result = func(*args, **named)
        if getattr(func, "__name__", "") in ("cross_entropy", "nll_loss"):
            self._engine.findings.look(self._note, args, named, result)
        elif isinstance(result, Tensor):
            note_factor(args, result)
        return result

    def _note(self, args: Any, named: Any, result: Tensor) -> None:
        if (mean := mean_over(args, named, result)) is not None:
            self.means.append((mean, result))


def _differ(one: Mean, other: Mean, weight: float, own: float) -> bool:
    """Whether two means count otherwise than by their numbers of targets, with which the loss may multiply them itself."""
    numbers = one.number * own, other.number * weight
    scaled = numbers[0] * other.factor, numbers[1] * one.factor
    known = min(numbers) > 0 and not math.isnan(sum(scaled))
    return known and not any(math.isclose(*several, rel_tol=0.05) for several in (numbers, scaled))


class TargetCounts:
    """The means of the first losses of an update, with the weights with which they count."""

    def __init__(self) -> None:
        self._seen: list[tuple[list[Mean], float]] = []
        self._steps = -1

    def add(self, engine: Engine, update: UpdateState, means: list[Mean]) -> None:
        """Note a loss, and report it if it counts otherwise than by its number of targets."""
        window, ranks = update.window.length, engine.group.data.world_size
        pieces = engine.overrides.gradients is not None
        if update.steps != self._steps and ranks == 1:
            self._seen = []
        self._steps = update.steps
        if not are_averaged(engine, update):
            return
        self._seen.append((means, float(update.weight)))
        first, weight = self._seen[0]
        if len(first) != len(means):
            return
        for one, other in zip(first, means, strict=True):
            uneven = one.ignores or other.ignores or (pieces and other.weight is not None)
            if uneven and _differ(one, other, weight, float(update.weight)):
                what = "pieces of a batch" if pieces else "batches of a window" if window > 1 else "batches"
                self._report(engine, update, one, other, what, weight)
                return

    @staticmethod
    def _report(engine: Engine, update: UpdateState, one: Mean, other: Mean, what: str, weight: float) -> None:
        own = float(update.weight)
        count = "have equal weights" if own == weight else f"have the weights {weight:.3g} and {own:.3g}"
        ranks, place = engine.group.data.world_size, 1 if update.spec.target is None else update.spec.target
        targets = f"engine.state.batch[{place!r}]" + "[:, 1:]" * _are_shifted(engine.state.batch, place, other)
        alike = f"the two {count}" if ranks == 1 else f"the batches of {ranks} ranks {count}"
        over, number = (
            ("the sum of the class weights of its targets", f"weights[{targets}].sum()")
            if other.weight is not None
            else (f"the number of targets that are not {other.ignored}", f"({targets} != {other.ignored}).sum()")
        )
        engine.findings.report(
            "W96",
            f"update {update.name!r}: the loss is divided by {over} ({one.number:.6g} and "
            f"{other.number:.6g} in two {what}), but {alike}",
            f"weight each batch by {over}: GradientAccumulation({update.window.length}, weight=lambda engine: "
            f"{number})",
            key=update.name,
        )


def _are_shifted(batch: Any, place: Any, mean: Mean) -> bool:
    """Whether a loss takes the targets of a batch without the first of each row, as language models do that shift them."""
    try:
        targets = batch[place]
    except (IndexError, KeyError, TypeError):
        return False
    if mean.weight is not None or not isinstance(targets, Tensor) or targets.dim() != 2:
        return False
    if torch.equal(targets.flatten(), mean.target.flatten()):
        return False
    shifted, own = (one[one != mean.ignored] for one in (targets[:, 1:], mean.target))
    return torch.equal(shifted, own)


def is_among(inputs: list[Tensor], target: Tensor) -> bool:
    """Whether targets that are rows of several values are equal to one of these tensors; those of images are not looked at."""
    if target.dim() != 2:
        return False
    alike = [one for one in inputs if one.shape == target.shape and one.dtype == target.dtype]
    return any(torch.equal(one, target) for one in alike) and bool((target != target.flatten()[0]).any())


def rows_of(target: Tensor, batch: Any) -> Tensor:
    """Targets with a row for each sequence, also those that a loss received flat; only one if the sequences are not known."""
    if target.dim() > 1:
        return target
    found = [one for one in tensors_in(batch) if one.dim() == 2]
    steps = [number for one in found for number in (one.shape[1], one.shape[1] - 1) if len(one) * number == len(target)]
    return target.view(-1, steps[0]) if steps and steps[0] > 1 else target[:1]
