"""What handlers that spread the model over processes have in common. Not a handler that is attached itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from signalfire import ALONE, Engine, Handler, Processes, check_choice, check_number, together

__all__ = ["Distribution", "Shares", "broadcast"]

Shares = Literal["auto", "own", "deal"]


class Distribution(Handler):
    """Joins the processes that were launched together, and tells what became of one that is lost.

    Args:
        shares: how data is shared out; see `Engine.join`.
        backend: of torch.distributed.
        timeout: in seconds; see `together`.

    Attributes:
        processes: those that train together: this one alone before the handler is attached, and unless it was launched by torchrun.
    """

    def __init__(self, *, shares: Shares, backend: str | None, timeout: float, name: str | None) -> None:
        super().__init__(name=name)
        self.shares = check_choice(self, "shares", shares, ("auto", "own", "deal"))
        if backend is not None and (not isinstance(backend, str) or not backend):
            raise TypeError(
                f"{type(self).__name__}(backend={backend!r}): it has to be a name, such as 'gloo' or 'nccl'"
            )
        self.backend = backend
        self.timeout = check_number(self, "timeout", timeout, least=1)
        self.processes: Processes = ALONE

    def attached(self, engine: Engine) -> None:
        self.processes = together(backend=self.backend, timeout=self.timeout)
        engine.join(self.processes, by=self, shares=self.shares)

    def detached(self, engine: Engine) -> None:
        self.processes = ALONE


def broadcast(tensors: Sequence[Tensor]) -> None:
    """Give all processes the values that tensors have on rank 0; of one kind at once."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in kinds.values():
        flat = torch.cat([tensor.detach().flatten() for tensor in alike])
        dist.broadcast(flat, src=0)
        for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
            tensor.detach().copy_(part.view_as(tensor))
