"""Metrics that are not handlers: averages over samples, moving averages over batches, and accuracy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import log
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from signalfire.authoring import (
    as_signed,
    check_bool,
    check_int,
    check_number,
    rebuilt,
    samples_in,
    tensors_in,
    widened,
)

from .ignored import IGNORED, all_ignored, ignored_class

__all__ = ["Accuracy", "Average", "MovingAverage", "in_float32"]

_IN_FLOAT32 = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


def in_float32(value: Any) -> Any:
    """A batch or an output with half-precision tensors in float32, in any nesting; other objects stay the same."""
    if isinstance(value, Tensor):
        return value.to(_IN_FLOAT32[value.dtype]) if value.dtype in _IN_FLOAT32 else value
    if any(one.dtype in _IN_FLOAT32 for one in tensors_in(value)):
        return rebuilt(value, in_float32)
    return value


def _loss_of_torch(function: Any) -> bool:
    """Whether a function is one of torch's losses, of which smaller is better."""
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, torch.nn.Module):
        return type(function).__module__ == "torch.nn.modules.loss"
    name = getattr(function, "__name__", "")
    return getattr(torch.nn.functional, name, None) is function and ("loss" in name or "entropy" in name)


def _reduction_of(function: Any) -> str | None:
    """The reduction of a torch loss: "mean", "sum" or "none"; None if it is not known."""
    if isinstance(function, partial):
        return function.keywords.get("reduction") or _reduction_of(function.func)
    reduction: Any = getattr(function, "reduction", None) if isinstance(function, torch.nn.Module) else None
    return reduction if isinstance(reduction, str) else None


class Average:
    """The mean of a quantity over all samples: batches are weighted by their size, so a short last batch is exact.

    A batch with weight 0 does not count, even if its value is NaN. A batch whose value is NaN also does not count if all of its
    targets are the class that the loss ignores: its ``ignore_index``, also where the function passes it to a torch loss, or
    -100. For the update's loss, `Update` (``target``) defines where the targets are.

    The values of the batches are copied on their device, and summed in double precision when the mean is computed, because a
    running mean in tensor arithmetic would cost several microseconds per iteration.

    Args:
        function: Function called as ``function(output, target)`` that returns the batch's mean as a scalar tensor or number, or
            several means by name as a mapping. A loss module with half-precision weights is evaluated with float32 copies of
            these weights. By default, the update's loss is averaged, in the precision in which it was computed.
        higher_is_better: Whether greater values are better, for monitors of this metric. By default, smaller values are better
            for the update's loss and torch's losses, and the direction of other functions is not known.

    Raises:
        ValueError: For a torch loss with ``reduction="sum"`` or "none".

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> from signalfire.handlers import Average, Metrics
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD)
        >>> evaluator = Engine(update.evaluation(), model=torch.nn.Identity())
        >>> _ = evaluator.attach(Metrics(loss=Average()))
        >>> large = torch.zeros(30, 1), torch.full((30, 1), 1.0)  # a loss of 1
        >>> small = torch.zeros(10, 1), torch.full((10, 1), 2.0)  # a loss of 4
        >>> evaluator.run([large, small]).metrics["loss"]
        1.75
    """

    _FOLD_AT = 1024  # the number of pending values at which they are added to the sum
    carries_over = False  # whether an epoch of training continues from the one before

    def __init__(self, function: Callable[..., Any] | None = None, *, higher_is_better: bool | None = None) -> None:
        if function is not None and not callable(function):
            raise TypeError(f"Average({function!r}): expected a function that maps (output, target) to the batch mean")
        if (reduction := _reduction_of(function)) in ("sum", "none"):
            raise ValueError(
                f"Average({function!r}): Average weights the batch mean by the batch size, but with reduction={reduction!r} "
                "the function does not return the mean; use reduction='mean'"
            )
        self.function = function
        self.higher_is_better = (
            higher_is_better if higher_is_better is None else check_bool(self, "higher_is_better", higher_is_better)
        )
        if higher_is_better is None:
            smaller = function is None or _loss_of_torch(function)
            self.higher_is_better = False if smaller else getattr(function, "higher_is_better", None)
        self.ignored = ignored_class(function)
        self.reset()

    def reset(self) -> None:
        self._clear_pending()
        function = self.function
        self._half = function if isinstance(function, torch.nn.Module) and _wide_tensors(function) else None
        self._sum = 0.0
        self._weight = 0.0
        self._counts = False  # whether all values were whole numbers up to the size of their batches
        self._parts: dict[str, Average] = {}

    def _clear_pending(self) -> None:
        self._pending: list[tuple[Any, float, Tensor | None]] = []  # value, weight, and whether all targets are ignored
        self._room = self._FOLD_AT

    def add(self, value: Any, weight: float, ignored: Tensor | None = None) -> None:
        """Add a batch's mean, weighted by the batch's size.

        Args:
            value: The mean, as a scalar tensor or a number.
            weight: The size of the batch.
            ignored: Whether all of its targets are ignored, so the mean may be NaN.
        """
        if value.__class__ is Tensor or isinstance(value, Tensor):
            # A copy: the memory of a parameter, a buffer, or a CUDA graph's output changes later.
            value = value.detach().clone()
        elif isinstance(value, np.ndarray):
            value = value.copy()
        self._pending.append((value, weight, ignored))
        self._room -= 1
        if self._room <= 0:
            self._fold()

    def update(self, *inputs: Any, **named: Any) -> None:
        """Add the function's value of a batch, weighted by the length of the first tensor in its arguments."""
        self.measure(inputs, named, samples_in(inputs or named))

    def measure(self, inputs: Sequence[Any], named: Mapping[str, Any], weight: float) -> None:
        """Add the function's value for these arguments.

        Raises:
            TypeError: If the function returns None.
        """
        assert self.function is not None
        ignored = all_ignored(inputs[1] if len(inputs) > 1 else named.get("target"), self.ignored)
        if self._half is not None:
            value = torch.func.functional_call(self._half, _wide_tensors(self._half), tuple(inputs), dict(named))
        else:
            value = self.function(*inputs, **named)
        if isinstance(value, Mapping):
            for key, part in value.items():
                self._part(key).add(part, weight, ignored)
        elif value is None:
            raise TypeError(
                f"Average({self.function!r}): the function returned None, possibly because it has no return statement; "
                "return the mean of the batch"
            )
        else:
            self.add(value, weight, ignored)

    @property
    def latest(self) -> Any:
        """The value of the latest batch if it has not been added up yet; None otherwise."""
        return self._pending[-1][0] if self._pending else None

    def _part(self, key: str) -> Average:
        if key not in self._parts:
            self._parts[key] = Average(higher_is_better=self.higher_is_better)
        return self._parts[key]

    def compute(self) -> Any:
        """The mean so far, NaN without any sample; a mapping if the function returns one."""
        if self._parts:
            return {key: part.compute() for key, part in self._parts.items()}
        self._fold()
        return self._sum / self._weight if self._weight else float("nan")

    def _take_pending(self) -> list[tuple[float, float]]:
        """The pending values with their weights, without those that count nothing."""
        pending = self._pending
        numbers = self._numbers([value for value, *_ in pending])
        self._clear_pending()
        return [
            (number, weight)
            for number, (_, weight, ignored) in zip(numbers, pending, strict=True)
            if weight and not (number != number and ignored is not None and bool(ignored))
        ]

    @staticmethod
    def _numbers(values: list[Any]) -> list[float]:
        if not any(isinstance(value, Tensor) for value in values):
            return [float(value) for value in values]
        # `map` with C functions is faster than a loop.
        uniform = set(map(type, values)) == {Tensor} and len(set(map(attrgetter("dtype"), values))) == 1
        if not uniform or set(map(Tensor.dim, values)) != {0}:
            values = [widened(torch.as_tensor(value)) for value in values]
            if wrong := [tuple(value.shape) for value in values if value.numel() != 1 or value.dim() > 1]:
                raise ValueError(
                    f"Average: the value of a batch has shape {max(wrong)}; expected a scalar, such as the mean"
                )
            values = [value.reshape(()) for value in values]
        numbers: list[float] = widened(torch.stack(values)).tolist()
        return numbers

    def _fold(self) -> None:
        # Values are added one by one, so that the sum does not depend on where the folds occur.
        total, weights = self._sum, self._weight
        first = self._pending[0][0] if self._pending else None
        values = self._take_pending()
        if isinstance(first, Tensor) and not (
            first.is_floating_point() or first.is_complex() or first.dtype == torch.bool
        ):
            self._counts = all(0 <= value <= weight for value, weight in values)
        for value, weight in values:
            total += value * weight
            weights += weight
        self._sum, self._weight = total, weights

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Replace the sums with those of all ranks, given as one `state_dict` per rank."""
        counts = self._counts
        self.reset()
        self._counts = counts
        for key in dict.fromkeys(key for state in states for key in state.get("parts", ())):
            self._part(key).merge([state["parts"][key] for state in states if key in state.get("parts", ())])
        for state in states:
            self._sum += state["sum"]
            self._weight += state["weight"]

    def doubt(self) -> tuple[str, str, str] | None:
        """A finding about the values: code, sentence and fix."""
        if not self._counts or self._weight == 0 or self._sum <= self._weight:
            return None
        return (
            "W04",
            "the function returns whole numbers, such as counts, so their mean is not the value over all samples",
            "return a mean, such as (predicted == target).float().mean(); or use Accuracy or a torchmetrics metric",
        )

    def state_dict(self) -> dict[str, Any]:
        self._fold()
        parts = {key: part.state_dict() for key, part in self._parts.items()}
        return {"sum": self._sum, "weight": self._weight} | ({"parts": parts} if parts else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        self._sum, self._weight = state["sum"], state["weight"]
        for key, part in state.get("parts", {}).items():
            self._part(key).load_state_dict(part)


class MovingAverage(Average):
    """An exponential moving average over batches: a smoothed running loss, for a progress bar.

    The start is corrected, so the first value is that of the first batch. All batches count equally, whatever their size. In
    training the average continues across epochs; each evaluation restarts it.

    Args:
        function: As for `Average`; by default the update's loss.
        decay: Weight of the previous average, from 0 to below 1; 0.98 averages over about the last 50 batches.
        higher_is_better: As for `Average`.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> from signalfire.handlers import Metrics
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> evaluator = Engine(update.evaluation(), model=torch.nn.Identity())
        >>> _ = evaluator.attach(Metrics(mean=Average(), smooth=MovingAverage(decay=0.5)))
        >>> # The losses are 4 and 1.
        >>> batches = [(torch.full((1, 1), error), torch.zeros(1, 1)) for error in (2.0, 1.0)]
        >>> evaluator.run(batches).metrics
        {'mean': 2.5, 'smooth': 2.0}
    """

    carries_over = True

    def __init__(
        self, function: Callable[..., Any] | None = None, *, decay: float = 0.98, higher_is_better: bool | None = None
    ) -> None:
        self.decay = check_number(self, "decay", decay, least=0, most=1)
        if decay == 1:
            raise ValueError(
                "MovingAverage(decay=1): no batch would contribute to the average; use a decay below 1, such as 0.98"
            )
        super().__init__(function, higher_is_better=higher_is_better)

    def _part(self, key: str) -> Average:
        if key not in self._parts:
            self._parts[key] = MovingAverage(decay=self.decay, higher_is_better=self.higher_is_better)
        return self._parts[key]

    def _fold(self) -> None:
        for value, _ in self._take_pending():
            self._sum = self.decay * self._sum + (1 - self.decay) * value
            self._weight = self.decay * self._weight + (1 - self.decay)

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Average over all ranks, given as one `state_dict` per rank; each continues from the average."""
        super().merge(states)
        self._sum, self._weight = self._sum / len(states), self._weight / len(states)


def _wide_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of half precision, in float32."""
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: one.detach().to(_IN_FLOAT32[one.dtype]) for name, one in named if one.dtype in _IN_FLOAT32}


_MOST_CLASSES = 1000  # of which the frequencies are counted


class Accuracy:
    """The fraction of samples whose predicted class is the target.

    The output has scores of shape (N, C, ...), the largest of which is the prediction, or predicted classes of the target's
    shape. Targets are integers of shape (N, ...). With ``threshold``, the scores have the target's shape, and scores greater than
    the threshold predict class 1.

    Args:
        threshold: The score above which class 1 is predicted.
        ignore_index: Class of targets that do not count, such as padding; by default the ``ignore_index`` of the update's loss,
            or -100, and beside scores of classes also any negative one. None counts all targets.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> from signalfire.handlers import Accuracy, Metrics
        >>> update = Update.supervised(torch.nn.functional.cross_entropy, torch.optim.SGD)
        >>> evaluator = Engine(update.evaluation(), model=torch.nn.Identity())
        >>> _ = evaluator.attach(Metrics(accuracy=Accuracy()))
        >>> scores = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.7, 0.3]])
        >>> first = scores, torch.tensor([1, 1, 1])  # one of three is right
        >>> second = torch.tensor([[0.6, 0.4]]), torch.tensor([0])
        >>> evaluator.run([first, second]).metrics["accuracy"]  # two of four
        0.5
    """

    higher_is_better = True

    def __init__(self, *, threshold: float | None = None, ignore_index: int | Literal["loss"] | None = "loss") -> None:
        self.threshold = None if threshold is None else check_number(self, "threshold", threshold)
        self.follows_loss = ignore_index == "loss"  # whether `Metrics` sets the class
        self.ignore_index: int | None = IGNORED
        if not self.follows_loss:
            self.ignore_index = (
                None if ignore_index is None else check_int(self, "ignore_index", ignore_index, least=-sys.maxsize)
            )
        self.reset()

    def reset(self) -> None:
        self._range: tuple[Tensor, Tensor] | None = None  # of the scores in the first batch
        self._correct: list[Tensor] = []  # of each batch, how many targets are predicted
        self._counted: list[Tensor] = []  # and how many count, unless all do
        self._hits = self._count = 0
        self._classes: Tensor | None = None  # how often each class is the target

    def update(self, output: Tensor, target: Tensor) -> None:
        output, target = as_signed(output), as_signed(target)
        predicted = output
        if self.threshold is not None:
            output = in_float32(output)  # in half precision, the threshold would be rounded
            predicted = output > self.threshold
            if self._range is None and 0 < self.threshold < 1 and output.numel():
                self._range = output.detach().min(), output.detach().max()
        elif output.dim() == target.dim() + 1 and output.shape[1] > 1:
            predicted = output.argmax(1)
            self._count_classes(target, output.shape[1])
        elif output.is_floating_point():
            raise ValueError(
                f"Accuracy: the predicted class cannot be determined from scores of shape {tuple(output.shape)} for "
                f"targets of shape {tuple(target.shape)}; pass scores of shape (N, C, ...) for targets of shape "
                "(N, ...) or, if there is one score per target, set threshold="
            )
        if predicted.shape != target.shape:
            raise ValueError(
                f"Accuracy: an output of shape {tuple(output.shape)} does not match targets of shape "
                f"{tuple(target.shape)}; expected scores of shape (N, C, ...) for targets of shape (N, ...)"
            )
        correct = predicted == target
        if self.ignore_index is None:
            self._count += target.numel()
        else:
            counted = self._counts(target, self.ignore_index, of_scores=output.dim() > target.dim())
            correct = correct & counted
            self._counted.append(counted.sum())
        self._correct.append(correct.sum())
        if len(self._correct) >= Average._FOLD_AT:
            self._fold()

    def _counts(self, target: Tensor, ignored: int, *, of_scores: bool = False) -> Tensor:
        """Which targets count. In a small integer type, the ignored class would become a different class."""
        small = target.dtype is not torch.int64 and not target.is_floating_point()
        counted = (target.long() if small else target) != ignored
        return counted & (target >= 0) if of_scores and self.follows_loss else counted

    def _count_classes(self, target: Tensor, classes: int) -> None:
        if target.is_floating_point() or classes > _MOST_CLASSES:
            return
        if self._classes is None or len(self._classes) != classes:
            self._classes = torch.zeros(classes, dtype=torch.int64, device=target.device)
        flat = target.flatten().long()
        inside = (flat >= 0) & (flat < classes)  # others, such as padding, are no class
        if self.ignore_index is not None:
            inside &= self._counts(flat, self.ignore_index)
        self._classes.scatter_add_(0, flat.where(inside, 0), inside.long())

    @property
    def most_frequent(self) -> tuple[float, int] | None:
        """The share of the most frequent class among the targets, and the number of targets; None if it is not known."""
        counts = None if self._classes is None else self._classes.tolist()
        return None if not counts or sum(counts) == 0 else (max(counts) / sum(counts), sum(counts))

    def compute(self) -> float:
        """The fraction of correct samples so far; NaN without any sample."""
        self._fold()
        return self._hits / self._count if self._count else float("nan")

    def _fold(self) -> None:
        if self._correct:
            self._hits += int(torch.stack(self._correct).sum())
            self._correct = []
        if self._counted:
            self._count += int(torch.stack(self._counted).sum())
            self._counted = []

    def doubt(self) -> tuple[str, str, str] | None:
        """A finding about the scores: code, sentence and fix."""
        if self._range is None or self.threshold is None:
            return None
        least, largest = (float(value) for value in self._range)
        if least >= 0 and largest <= 1:
            return None
        return (
            "W05",
            f"Accuracy(threshold={self.threshold}) expects probabilities, but the scores range from {least:.4g} to "
            f"{largest:.4g}",
            "if they are logits, apply a sigmoid first, or set "
            f"threshold={round(log(self.threshold / (1 - self.threshold)), 3)}, the logit of this threshold",
        )

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Replace the counts with those of all ranks, given as one `state_dict` per rank."""
        seen, classes = self._range, self._classes
        self.reset()
        self._range, self._classes = seen, classes  # those of this rank
        self._hits = sum(state["hits"] for state in states)
        self._count = sum(state["count"] for state in states)

    def state_dict(self) -> dict[str, Any]:
        self._fold()
        return {"hits": self._hits, "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        self._hits, self._count = state["hits"], state["count"]
