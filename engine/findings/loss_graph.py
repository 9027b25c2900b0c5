"""What the autograd graph of a loss shows about how the loss was made.

A few of its nodes tell what no shape and no dtype does: that a cross entropy was given probabilities, that an output of shape
[N, 1] was broadcast against targets of shape [N], or that a loss was divided by the length of the accumulation window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from .loss_nodes import (
    ELEMENTWISE,
    MOST_NODES,
    SCALES,
    child_of,
    kind_of_node,
    nodes_of,
    number_of,
    saved_at,
    shape_of,
    signed,
)

__all__ = ["Problem", "note_operands", "problems_of"]

Problem = tuple[str, str, str]
"""The code of a finding, its sentence, and the fix."""

_SAMPLES = 64  # of a batch whose values are looked at
_PROBABILITIES = {"SoftmaxBackward0": "softmax", "SigmoidBackward0": "sigmoid"}
_RANGES = {"TanhBackward0": ("tanh", -1.0, 1.0), "ReluBackward0": ("relu", 0.0, float("inf"))} | {
    node: (name, 0.0, 1.0) for node, name in _PROBABILITIES.items()
}
_NEVER_NEGATIVE = frozenset(
    ("NllLoss", "NllLoss2D", "MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy")
) | {"BinaryCrossEntropyWithLogits"}
_DISTANCES = frozenset(f"{name}Backward0" for name in ("MseLoss", "SmoothL1Loss", "HuberLoss"))
_OF_A_CROSS_ENTROPY = frozenset(
    f"{name}Backward{number}"
    for name in ("Neg", "Div", "Mul", "Sum", "Mean", "NllLoss", "NllLoss2D")
    for number in (0, 1)
)


def problems_of(
    loss: Tensor, window: int, samples: int | None = None, *, adversarial: bool = False, received: bool = False
) -> Iterator[Problem]:
    """What looks wrong about a loss before its backward.

    Args:
        loss: with its graph.
        window: the length of the accumulation window, over which the gradients are averaged.
        samples: the number of samples in the batch; None if it is unknown, or if the window weights its batches.
        adversarial: whether other updates may train against it, so that it may be meant to grow.
        received: whether a receiver has made it of the loss that the update computed.

    Example:
        >>> output = torch.zeros(4, 1, requires_grad=True) * 2
        >>> [
        ...     code
        ...     for code, _, _ in problems_of(torch.nn.functional.mse_loss(output, output) / 4, 4)
        ... ]
        ['W74']
    """
    if loss.grad_fn is None:
        return
    if not adversarial:
        yield from _negated(loss.grad_fn)
    yield from _divided(loss.grad_fn, window, received=received)
    yield from _summed(loss.grad_fn, window, samples)
    yield from _single_class(loss.grad_fn)
    scored = set()  # what a negative log-likelihood receives
    for node in nodes_of(loss.grad_fn):
        name = node.name()
        if name == "LogSoftmaxBackward0":
            yield from _log_softmax(node, scored=node in scored)
        elif name in ("NllLossBackward0", "NllLoss2DBackward0"):
            scored.add(child_of(node))
            yield from _nll_loss(node)
        elif name == "BinaryCrossEntropyWithLogitsBackward0":
            yield from _takes_logits(node, "binary_cross_entropy_with_logits")
            yield from _targets(node, "binary_cross_entropy_with_logits", 0.0, 1.0)
        elif name == "SoftMarginLossBackward0":
            yield from _targets(node, "soft_margin_loss", -1.0, 1.0)
        elif name in _PROBABILITIES and child_of(node).name() == name:
            yield (
                "W72",
                f"{_PROBABILITIES[name]} is applied twice in a row, in the loss or right before it",
                f"remove the {_PROBABILITIES[name]} either from the end of the model or from the loss function",
            )
        elif name in _DISTANCES:
            yield from _out_of_reach(node)
        elif name in ELEMENTWISE:
            yield from _broadcast(node)


def note_operands(args: Any, result: Any) -> None:
    """Note the shapes of operands at the node of their result, which shows only those that have a gradient."""
    node = getattr(result, "grad_fn", None)
    if node is not None and result.dim() == 2 and node.name() in ELEMENTWISE:
        node.metadata[_OPERANDS] = sorted(tuple(one.shape) for one in args if isinstance(one, Tensor))


_OPERANDS = "signalfire operands"


def _log_softmax(node: Any, *, scored: bool) -> Iterator[Problem]:
    """What a log_softmax receives; unless a loss scores its classes, only a softmax is surely wrong there."""
    if not scored:
        if kind_of_node(child_of(node)) == "Softmax":
            yield from _takes_logits(node, "log_softmax")
        return
    yield from _takes_logits(node, "cross_entropy, which applies log_softmax first,")
    if child_of(node).name() == "ReluBackward0":
        yield (
            "W72",
            "cross_entropy receives the output of relu, so the logits cannot be negative",
            "remove the relu after the last layer",
        )
    if (result := saved_at(node, "result")) is None or not result.dim():
        return
    # One score for each sample is a list, and has no classes.
    if result.dim() == 2 and _dimension(node) == 0 and result.shape[1] not in (1, result.shape[0]):
        yield (
            "W72",
            f"log_softmax is applied over dimension 0 of a tensor of shape {list(result.shape)}, so the samples of a "
            "batch compete with each other, not the classes",
            "apply log_softmax over the classes: dim=1",
        )


def _single_class(root: Any) -> Iterator[Problem]:
    """A loss that is nothing but a cross entropy of one class; that of one sample may have one pair, or one option."""
    node = root
    while node.name() in _OF_A_CROSS_ENTROPY:
        node = child_of(node)
    result = saved_at(node, "result") if kind_of_node(node) == "LogSoftmax" else None
    if result is not None and result.numel() > 1 and result.shape[_dimension(node)] == 1:
        yield (
            "W79",
            f"the softmax in the loss is over a single class (its input has shape {list(result.shape)}), so the loss "
            "of this batch is constant, whatever the model returns",
            "give the model one output per class; for a single output, use binary_cross_entropy_with_logits",
        )


def _dimension(node: Any) -> int:
    """The saved dimension, which torch gives as an unsigned number."""
    return signed(node._saved_dim)


def _takes_logits(node: Any, function: str) -> Iterator[Problem]:
    if (found := _PROBABILITIES.get(child_of(node).name())) is not None:
        yield (
            "W72",
            f"{function} expects logits, but receives the probabilities that {found} returns",
            f"remove the {found}, because the loss already applies it",
        )


def _nll_loss(node: Any) -> Iterator[Problem]:
    scores = saved_at(node, "self")
    child = child_of(node)
    if scores is None or _is_made_of_logs(child, depth=4):
        return
    classes = 1 if scores.dim() > 1 else 0
    sums = scores[:_SAMPLES].detach().float().exp().sum(classes)
    if sums.numel() and not torch.allclose(sums, torch.ones_like(sums), atol=0.02):
        yield (
            "W72",
            "nll_loss expects log-probabilities, but the exponentials of its input add up to "
            f"{float(sums.flatten()[0]):.3g} instead of 1",
            "use cross_entropy for logits, or apply log_softmax",
        )


def _is_made_of_logs(node: Any, depth: int) -> bool:
    """Whether log-probabilities are among the operands, also weighted ones, as with rewards, or a mean of several."""
    if node is None or depth == 0:
        return False
    kind = kind_of_node(node)
    if kind in ("LogSoftmax", "Log", "LogSigmoid"):
        return True
    return kind in _COMBINE and any(_is_made_of_logs(one, depth - 1) for one, _ in node.next_functions)


_COMBINE = {"Mul", "Div", "Add", "Sub", "Neg"}


def _out_of_reach(node: Any) -> Iterator[Problem]:
    target, last = saved_at(node, "target"), _RANGES.get(child_of(node).name())
    if target is None or last is None or target.numel() == 0 or _may_be_masked(node):
        return
    function, least, most = last
    smallest, largest = (float(one) for one in target.detach().float().aminmax())
    near = max(1e-3, 0.05 * min(most - least, largest - smallest))  # as noisy values are
    if smallest < least - near or largest > most + near:
        yield (
            "W77",
            f"{kind_of_node(node)} compares the output of {function}, which lies between {least:g} and {most:g}, with values "
            f"that lie between {smallest:.4g} and {largest:.4g} in the first batch",
            f"remove this {function}, or scale the targets",
        )


def _targets(node: Any, function: str, least: float, most: float) -> Iterator[Problem]:
    """Targets far outside of a range, since noisy labels may be near it; for margins, whose targets are -1 and 1, zeros."""
    target = saved_at(node, "target")
    if target is None or target.numel() == 0 or _may_be_masked(node):
        return
    values = target.detach().float()
    smallest, largest = (float(one) for one in values.aminmax())
    between = least == -1.0 and bool((values == 0).any())
    if smallest < least - _NOISE or largest > most + _NOISE or between:
        expected = "that are -1 or 1" if least == -1.0 else "from 0 to 1"
        found = f"those of the first batch lie between {smallest:.4g} and {largest:.4g}"
        yield "W77", f"{function} expects targets {expected}, but {found}", f"convert the targets to numbers {expected}"


_NOISE = 0.3


def _may_be_masked(node: Any) -> bool:
    """Whether a loss function leaves its values, or weights them: those of missing targets may be left out."""
    return getattr(node, "_saved_reduction", None) == _NONE or saved_at(node, "weight") is not None


def _summed(node: Any, window: int, samples: int | None) -> Iterator[Problem]:
    """A sum over the samples of a batch, where a window averages."""
    if window < 2 or samples is None:
        return
    terms = [*_terms(node)]
    if any(_is_sum(one, samples) for one in terms) and not any(map(_is_averaged, terms)):
        yield (
            "W83",
            f"the loss is a sum over the {samples} samples of a batch, and the gradients of the {window} batches of a "
            "window are averaged, so the step matches neither the sum nor the mean over the window",
            "use reduction='mean', or pass GradientAccumulation(weight=)",
        )


def _terms(node: Any) -> Iterator[Any]:
    """The nodes that a sum of numbers adds, such as those of a reconstruction and of a divergence."""
    queue = [node]
    for one in islice(queue, MOST_NODES):  # grows meanwhile
        if one.name() in ("AddBackward0", "SubBackward0") and shape_of(one, 0) == ():
            queue.extend(child for child, _ in one.next_functions if child is not None)
        else:
            yield one


def _is_averaged(node: Any) -> bool:
    """Whether a term is a mean, beside which a sum is an activity that is penalized."""
    while node.name() in SCALES:
        node = child_of(node)
    return kind_of_node(node) == "Mean" or getattr(node, "_saved_reduction", None) == _MEAN


def _is_sum(node: Any, samples: int) -> bool:
    """Whether a term is a sum over the samples, which no factor makes a mean."""
    if node.name() != "MulBackward0":
        return _sums(node, samples)
    total = child_of(node)
    if not _sums(total, samples):
        return False
    factor = number_of(saved_at(node, "other"))
    return factor is None or not _makes_a_mean(total, factor, samples)


def _sums(node: Any, samples: int) -> bool:
    """Whether a node is a sum over the samples."""
    if getattr(node, "_saved_reduction", None) == _SUM:
        return samples > 1
    sizes: tuple[int, ...] = getattr(node, "_saved_self_sym_sizes", ())
    over_samples = node.name() == "SumBackward0" and len(sizes) > 0 and int(sizes[0]) == samples > 1
    return over_samples and not _is_mean(child_of(node)) and not _is_weighted(child_of(node), samples)


def _makes_a_mean(node: Any, factor: float, samples: int) -> bool:
    """Whether a sum is multiplied with one over the number of samples, or of values."""
    given = saved_at(node, "self")
    values = math.prod(map(int, getattr(node, "_saved_self_sym_sizes", ()))) if given is None else given.numel()
    return any(math.isclose(factor * count, 1.0) for count in (samples, values))


def _is_mean(node: Any) -> bool:
    """Whether a node is a mean over the samples."""
    sizes = getattr(node, "_saved_self_sym_sizes", ())
    return kind_of_node(node) == "Mean" and any(
        signed(one) in (0, -len(sizes)) for one in getattr(node, "_saved_dim", ())
    )


def _is_weighted(node: Any, samples: int) -> bool:
    """Whether values are divided by the number of samples, or multiplied with weights of their own, such as rewards."""
    if node.name() == "DivBackward0":
        return number_of(saved_at(node, "other")) == samples
    weights = [saved_at(node, name) for name in ("self", "other")] if node.name() == "MulBackward0" else []
    constant = [one for one in weights if one is not None and one.dim() and not one.requires_grad]
    return any(bool(((one != 0) & (one != 1)).any()) for one in constant)


_NONE, _MEAN, _SUM = 0, 1, 2  # what torch's kernels call reduction="none", reduction="mean" and reduction="sum"


def _broadcast(node: Any) -> Iterator[Problem]:
    """An output of shape [N] or [N, 1] that meets something constant of the other one of these shapes."""
    operands = [(child, place) for child, place in node.next_functions if child is not None]
    own = shape_of(node, 0)
    if len(operands) != 1 or own[:1] < (2,) or node.metadata.get(_OPERANDS) != [own[:1], (own[0], 1)]:
        return  # with [1, N], or a mask of pairs, each sample is meant to meet all
    child, place = operands[0]
    before = shape_of(child, place)
    if child.name() == "UnsqueezeBackward0" or getattr(child, "_saved_keepdim", False):
        return  # as in output[:, None], or in squares that make distances of all pairs
    other = f"[{own[0]}]" if len(before) == 2 else f"[{own[0]}, 1]"
    yield (
        "W73",
        f"in the loss, the output of shape {list(before)} is combined with a tensor of shape {other}, and both are "
        f"broadcast to {list(own)}, so every sample is combined with the targets or weights of all samples",
        "give both tensors the same shape, for example with squeeze(-1) or unsqueeze(-1)",
    )


def _negated(node: Any) -> Iterator[Problem]:
    factor = number_of(saved_at(node, "other")) if node.name() == "MulBackward0" else None
    child = child_of(node)
    kind = kind_of_node(child)
    if factor is not None and kind == "NllLoss" and (factor != -1 or _is_of_one_target(child)):
        return  # the reward of an action
    negative = node.name() == "NegBackward0" or (factor is not None and factor < 0)
    if negative and kind in _NEVER_NEGATIVE:
        yield (
            "W90",
            f"the loss is the negative of {kind}, so training maximizes {kind}",
            "remove the minus sign; if the factor is a reward, or the loss should grow, allow W90",
        )


def _is_of_one_target(node: Any) -> bool:
    target = saved_at(node, "target")
    return target is not None and target.numel() == 1


def _divided(node: Any, window: int, *, received: bool) -> Iterator[Problem]:
    if window < 2 or node.name() not in SCALES:
        return
    number, child = number_of(saved_at(node, "other")), child_of(node)
    child = child_of(child) if kind_of_node(child) == "Neg" else child
    if number is None or _is_of_several(child, window):
        return
    if not received and _may_be_weighted(node, kind_of_node(child), window):
        return
    factor = number if node.name() == "DivBackward0" else 1.0 / (number or float("inf"))
    if abs(factor - window) < 1e-6:
        yield _divided_twice(window, node, number)


def _divided_twice(window: int, node: Any, number: float) -> Problem:
    if node.name() == "DivBackward0":
        what = f"the loss is divided by {window}, the length of the accumulation window, although"
        way_out = "return the loss without dividing it, because the gradients are now divided twice"
    else:
        what = (
            f"the loss is multiplied by {number:.3g}, which is 1 over the accumulation window's length of {window}, but"
        )
        way_out = "if this factor averages over the window, return the loss without it; if it is a weight, allow W74"
    return "W74", f"{what} the engine already averages the gradients over the window", way_out


def _is_of_several(node: Any, number: int) -> bool:
    """Whether a node is a sum of so many terms, or over a batch, which a division makes a mean."""
    if kind_of_node(node) == "Add":
        return len([*_terms(node)]) == number
    return kind_of_node(node) in ("Sum", "") or getattr(node, "_saved_reduction", None) == _SUM


def _may_be_weighted(node: Any, kind: str, window: int) -> bool:
    """Whether the factor belongs to the loss, as in half of a square, or is the weight of a loss that you wrote yourself."""
    if kind in _NEVER_NEGATIVE:
        return kind in ("MseLoss", "SmoothL1Loss", "HuberLoss") and window == 2
    return window == 2 or node.name() == "MulBackward0"
