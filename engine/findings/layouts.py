"""Whether layers take the dimension of the samples for that of time: recurrent layers and attention do, unless told otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler

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
        if _has_samples_first(first, engine.feed.current.data):
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


def _has_samples_first(inputs: Tensor, data: Any) -> bool:
    """Whether inputs of as many rows as samples surely have a row for each of them."""
    samples, others = inputs.shape[:2]
    if others > 1:
        return others % samples > 0  # else the samples may come second, as with the rows of pictures
    # One sequence, with a target for each step, may be a batch as well, or be read from one long series.
    is_batch = isinstance(data, DataLoader) and data.batch_size == samples
    return is_batch and not isinstance(data.sampler, SequentialSampler)


def samples_of(engine: Engine, batch: Any) -> int | None:
    """The number of samples of a batch, where no other dimension can be meant; None if it is not known."""
    tensors = list(tensors_in(batch))
    lengths = {one.size(0) for one in tensors if one.dim() > 0}
    if len(lengths) != 1:
        return None
    (length,) = lengths
    data = engine.feed.current.data
    return length if _has_lists(tensors) or (isinstance(data, DataLoader) and data.batch_size == length) else None


def _has_lists(tensors: list[Tensor]) -> bool:
    """Whether there is a list with one value for each sample. One of times may be that of samples that come second."""
    lists = [one for one in tensors if one.dim() == 1]
    seconds = [one.shape[1] for one in tensors if one.dim() > 1]
    if len(seconds) > 1 and len(set(seconds)) == 1:
        lists = [one for one in lists if not one.is_floating_point()]
    return bool(lists)
