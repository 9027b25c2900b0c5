"""The nodes of a loss in the graph of autograd: what they are, what they hold, and which numbers a loss is a sum of."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ELEMENTWISE", "LINEAR", "MOST_NODES", "SAME_VALUES", "SCALES", "are_scaled", "child_of", "factor_in", "functions_of",
    "ignored_by", "is_term_of", "kind_of_node", "leaves_of", "nodes_of", "note_factor", "number_of", "saved_at",
    "shape_of", "signed",
]  # fmt: skip

MOST_NODES = 64  # from the loss backwards; what a loss function adds is among the first
SAME_VALUES = frozenset(
    f"{name}Backward0"
    for name in (
        *("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "T", "Transpose", "Permute", "Slice", "Select"),
        *("ToCopy", "Clone", "Expand", "Alias", "Index"),
    )
)
ELEMENTWISE = frozenset(("SubBackward0", "RsubBackward1", "MulBackward0", "AddBackward0", "DivBackward0"))
LINEAR = ELEMENTWISE | {"NegBackward0"}
SCALES = frozenset(("MulBackward0", "DivBackward0"))
_LARGEST_GRAPH = 20_000


def functions_of(loss: Tensor) -> set[str]:
    """The functions of torch nearest to a loss, by the names of their nodes, such as "MseLoss" and "LogSoftmax".

    Example:
        >>> sorted(
        ...     functions_of(
        ...         torch.nn.functional.mse_loss(torch.zeros(2, requires_grad=True), torch.ones(2))
        ...     )
        ... )
        ['MseLoss', 'torch::autograd::AccumulateGrad']
    """
    return set() if loss.grad_fn is None else {kind_of_node(node) for node in nodes_of(loss.grad_fn)}


def ignored_by(loss: Tensor) -> int | None:
    """The class that a negative log-likelihood nearest to a loss ignores; None without one.

    Example:
        >>> ignored_by(
        ...     torch.nn.functional.cross_entropy(
        ...         torch.ones(1, 2, requires_grad=True), torch.zeros(1).long()
        ...     )
        ... )
        -100
    """
    nodes = nodes_of(loss.grad_fn) if loss.grad_fn is not None else ()
    found = (getattr(node, "_saved_ignore_index", None) for node in nodes)
    return next((signed(index) for index in found if index is not None), None)


def leaves_of(loss: Tensor) -> list[Tensor]:
    """The tensors that the backward of a loss gives gradients to; of a very large graph, those nearest to the loss.

    Example:
        >>> one = torch.ones(1, requires_grad=True)
        >>> leaves_of((one * one).sum()) == [one]
        True
    """
    queue: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    seen, leaves = set(queue), []
    for node in islice(queue, _LARGEST_GRAPH):  # grows meanwhile
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                queue.append(child)
    return leaves


def is_term_of(term: Tensor, loss: Tensor) -> bool:
    """Whether a loss is a sum of numbers, weighted or not, of which this one is a part.

    Example:
        >>> term = torch.ones((), requires_grad=True) * 2
        >>> is_term_of(term, 0.5 * term + 1), is_term_of(term, (term * torch.ones(2)).sum())
        (True, False)
    """
    return _way_to(term, loss) is not None


def factor_in(loss: Tensor, term: Tensor) -> float | None:
    """The factor of a number in a loss of which it is a term; None if it is no term, NaN if a tensor is a part of the factor.

    Example:
        >>> term = torch.ones((), requires_grad=True) * 2
        >>> factor_in(0.5 * term + 1, term)
        0.5
    """
    way = _way_to(term, loss)
    return None if way is None else math.prod(map(_scale, way))


def note_factor(args: Any, result: Any) -> None:
    """Note a number that a number was multiplied with or divided by, at the node of the result, which has it as a tensor."""
    node = getattr(result, "grad_fn", None)
    if node is not None and result.dim() == 0 and node.name() in SCALES:
        node.metadata[_FACTOR] = next((float(one) for one in args if isinstance(one, int | float)), None)


_FACTOR = "signalfire factor"


def _way_to(term: Tensor, loss: Tensor) -> tuple[Any, ...] | None:
    """The nodes between a loss and a term of it; None if it is no term."""
    queue: list[tuple[Any, tuple[Any, ...]]] = [] if loss.grad_fn is None else [(loss.grad_fn, ())]
    for node, above in islice(queue, MOST_NODES):  # grows meanwhile
        if node is term.grad_fn:
            return above
        queue += [(one, (*above, node)) for one in _summands(node)]
    return None


def _summands(node: Any) -> list[Any]:
    """The numbers that a node adds up, or scales; of a product of two that are trained, each is the weight of the other."""
    if node.name() not in LINEAR | SAME_VALUES:
        return []
    numbers = [one for one, place in node.next_functions if one is not None and shape_of(one, place) == ()]
    return [] if node.name() in SCALES and len(numbers) > 1 else numbers


def _scale(node: Any) -> float:
    """What the first operand of a node is multiplied with; 1 if the node does not scale it, NaN if a tensor does."""
    factors = [saved_at(node, name) for name in ("other", "self")] if node.name() in SCALES else []
    scale = node.metadata.get(_FACTOR) or next(
        (number_of(one) for one in factors if one is not None and one.dim() == 0), 1.0
    )
    if scale is None:
        return math.nan
    return 1.0 / scale if scale and node.name() == "DivBackward0" else scale


def are_scaled(scores: Tensor) -> bool:
    """Whether scores are multiplied with a number, or divided by a temperature, so that they are meant to be large.

    Example:
        >>> cosines = torch.ones(2, 3, requires_grad=True) * torch.ones(3)
        >>> are_scaled(cosines), are_scaled((cosines / 0.07).T)
        (False, True)
    """
    node: Any = scores.grad_fn
    if node is None:
        return False
    node = child_of(node) if node.name() in SAME_VALUES else node
    factors = [saved_at(node, name) for name in ("self", "other")] if node.name() in SCALES else []
    return any(one is not None and one.dim() == 0 for one in factors)


def nodes_of(root: Any) -> Iterator[Any]:
    """The nodes nearest to the loss, each once."""
    queue, seen = [root], {root}
    for node in queue:
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen and len(queue) < MOST_NODES:
                seen.add(child)
                queue.append(child)


def child_of(node: Any) -> Any:
    """The node from which the first operand comes, past those that only give it another shape or dtype."""
    while node.next_functions and (child := node.next_functions[0][0]) is not None:
        if child.name() not in SAME_VALUES:
            return child
        node = child
    return _Leaf()


def kind_of_node(node: Any) -> str:
    """The function of torch that made a node."""
    return re.sub(r"Backward\d+$", "", node.name())


def number_of(operand: Tensor | None) -> float | None:
    """The number that a loss was multiplied with or divided by; None for a tensor.

    A number becomes a tensor of one of these types; what is float32 is a tensor already, such as a gradient scaler's scale.
    """
    if operand is None or operand.dtype not in (torch.int64, torch.float64) or operand.dim():
        return None
    return float(operand) if operand.device.type == "cpu" else None


def shape_of(node: Any, place: int) -> tuple[int, ...]:
    """The shape of one of a node's results."""
    metadata = getattr(node, "_input_metadata", ())
    return tuple(int(size) for size in metadata[place].shape) if place < len(metadata) else ()


def saved_at(node: Any, name: str) -> Tensor | None:
    """A tensor that a node saved for its backward; None if it has none, or if a backward has freed it."""
    try:
        value = getattr(node, f"_saved_{name}", None)
    except RuntimeError:
        return None
    return value if isinstance(value, Tensor) else None


def signed(number: int) -> int:
    return number if number < 2**63 else number - 2**64


class _Leaf:
    """What stands in for a node that is not there."""

    next_functions: tuple[Any, ...] = ()

    def name(self) -> str:
        return ""
