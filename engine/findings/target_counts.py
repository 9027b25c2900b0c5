"""How many targets a loss is a mean over: where micro-steps of one window have different numbers, their mean is another loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from ..engine import Engine
    from ..update import UpdateState

__all__ = ["Mean", "TargetCalls", "TargetCounts", "are_averaged", "mean_over"]


@dataclass(frozen=True)
class Mean:
    """What a loss function averages over.

    Attributes:
        number: the number of targets that are not ignored; the sum of their weights, if the classes have weights.
        ignored: the class that is ignored.
        ignores: whether some targets are of that class.
        weighted: whether the classes have weights.
    """

    number: float
    ignored: int
    ignores: bool
    weighted: bool


def mean_over(args: Any, named: Any, result: Any) -> Mean | None:
    """What a call of ``cross_entropy`` or ``nll_loss`` averages over; None if it does not, or has no classes as targets."""
    target = args[1] if len(args) > 1 else named["target"]
    weight, ignored = named.get("weight"), int(named.get("ignore_index", -100))
    if target.is_floating_point() or named.get("reduction", "mean") != "mean" or not result.requires_grad:
        return None
    counted = target.detach()[target != ignored]
    number = float(len(counted)) if weight is None else float(weight.detach()[counted].sum())
    return Mean(number, ignored, len(counted) < target.numel(), weight is not None)


def are_averaged(engine: Engine, update: UpdateState) -> bool:
    """Whether several losses of an update make one step, so that it matters how many targets each has."""
    several = update.window.length > 1 or engine.group.data.world_size > 1
    return several or engine.overrides.gradients is not None


class TargetCalls(TorchFunctionMode):
    """Notes what the losses inside the ``with`` block are means over.

    Attributes:
        means: one for each call, in order.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.means: list[Mean] = []
        self._engine = engine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        result = func(*args, **named)
        if getattr(func, "__name__", "") in ("cross_entropy", "nll_loss") and not torch.compiler.is_compiling():
            self._engine.findings.look(self._note, args, named, result)
        return result

    def _note(self, args: Any, named: Any, result: Tensor) -> None:
        if (mean := mean_over(args, named, result)) is not None:
            self.means.append(mean)


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
        self._seen.append((means, float(update.weight)))
        first, weight = self._seen[0]
        if len(first) != len(means):
            return
        for one, other in zip(first, means, strict=True):
            uneven = one.ignores or other.ignores or (pieces and other.weighted)
            numbers = one.number * float(update.weight), other.number * weight
            if uneven and min(numbers) > 0 and not math.isclose(*numbers, rel_tol=1e-3):
                what = "pieces of a batch" if pieces else "batches of a window" if window > 1 else "batches"
                self._report(engine, update, one, other, what, weight)
                return

    @staticmethod
    def _report(engine: Engine, update: UpdateState, one: Mean, other: Mean, what: str, weight: float) -> None:
        own = float(update.weight)
        count = "alike" if own == weight else f"as {weight:.3g} and {own:.3g}"
        ranks = engine.group.data.world_size
        alike = f"they count {count}" if ranks == 1 else f"those of {ranks} ranks count {count}"
        over, number = (
            ("the weights of the classes of its targets", "weights[targets].sum()")
            if other.weighted
            else (f"the targets that are not {other.ignored}", f"(targets != {other.ignored}).sum()")
        )
        engine.findings.report(
            "W96",
            f"update {update.name!r}: the loss is a mean over {over}, of which two {what} have {one.number:.6g} and "
            f"{other.number:.6g}, but {alike}",
            f"weight them by that number: GradientAccumulation({update.window.length}, weight=lambda engine: {number})",
            key=update.name,
        )
