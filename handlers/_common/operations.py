"""Counts floating-point operations, by torch's formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop

__all__ = ["OperationCounter"]


class OperationCounter(TorchDispatchMode):
    """The floating-point operations inside this context: matrix products, convolutions and attention.

    Unlike ``torch.utils.flop_counter.FlopCounterMode`` it takes operations as they are, without decomposing any, counts the
    attention of the CPU, and leaves no hooks on the graph.

    Attributes:
        total: The number of operations; a multiplication and an addition are two.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        formula = _FORMULAS.get(func._overloadpacket)
        if formula is not None:
            self.count(formula(*args, **(kwargs or {}), out_val=output))
        return output

    def count(self, operations: int) -> None:
        """Add the operations of one call."""
        self.total += operations


def _attention_on_cpu(query: Tensor, key: Tensor, value: Tensor, *args: Any, out_val: Any, **options: Any) -> int:
    flops: int = sdpa_flop(query.shape, key.shape, value.shape)
    return flops


_FORMULAS: dict[Any, Any] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_on_cpu,
}
