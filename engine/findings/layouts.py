"""Whether layers take the dimension of the samples for that of time: recurrent layers and attention do, unless told otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..authoring.batches import tensors_in

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["looking_for_mixed_up_layouts", "samples_of"]


@contextmanager
def looking_for_mixed_up_layouts(engine: Engine, samples: int | None) -> Iterator[None]:
    """Report layers without ``batch_first`` that get the samples of a batch as steps of time inside the ``with`` block."""
    layers = {
        part: path
        for path, part in engine.modules.parts()
        if isinstance(part, nn.RNNBase | nn.MultiheadAttention) and not part.batch_first
    }

    def look(layer: Any, args: tuple[Any, ...]) -> None:
        first = args[0] if args else None
        if not isinstance(first, Tensor) or first.dim() != 3 or not len(first) == samples != first.shape[1]:
            return
        data = engine.feed.current.data
        loaded = isinstance(data, DataLoader) and data.batch_size == samples
        if first.shape[1] > 1 or loaded:  # another batch may be one sequence, with a target for each step
            engine.findings.report(
                "W88",
                f"the layer {layers[layer]!r} ({type(layer).__name__}) reads inputs of shape {list(first.shape)} as "
                f"{samples} time steps of {first.shape[1]} samples, but the batch has {samples} samples",
                "build the layer with batch_first=True, or transpose its inputs",
                key=layers[layer],
            )

    def hook(layer: Any, args: tuple[Any, ...]) -> None:
        engine.findings.look(look, layer, args)

    with ExitStack() as stack:
        for layer in layers if samples is not None else ():
            stack.callback(layer.register_forward_pre_hook(hook).remove)
        yield


def samples_of(engine: Engine, batch: Any) -> int | None:
    """The number of samples of a batch, where no other dimension can be meant; None if it is not known."""
    tensors = list(tensors_in(batch))
    lengths = {one.size(0) for one in tensors if one.dim() > 0}
    if len(lengths) != 1:
        return None
    (length,) = lengths
    data = engine.feed.current.data
    listed = any(one.dim() == 1 for one in tensors)  # one value for each sample
    return length if listed or (isinstance(data, DataLoader) and data.batch_size == length) else None
