"""What the inputs of layers show: samples that are taken for steps of time, and normalization over a single sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler

from ..authoring.batches import tensors_in
from .dropout import LookingHook

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["looking_at_inputs", "samples_of"]


@contextmanager
def looking_at_inputs(engine: Engine, samples: int | None) -> Iterator[None]:
    """Look at the inputs of layers inside the ``with`` block.

    Layers without ``batch_first`` that get the samples of a batch as steps of time are reported, and trained batch normalization
    of a single sample.
    """
    layers = {
        part: path
        for path, part in engine.modules.parts()
        if (isinstance(part, nn.RNNBase | nn.MultiheadAttention) and not part.batch_first and samples is not None)
        or isinstance(part, _NORMS)
    }

    def look(layer: Any, args: tuple[Any, ...]) -> None:
        first = args[0] if args else None
        if isinstance(layer, _NORMS):
            _look_at_norm(engine, layers[layer], layer, first)
            return
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
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(LookingHook(hook)).remove)
        yield


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def _look_at_norm(engine: Engine, path: str, layer: nn.Module, inputs: Any) -> None:
    trained = layer.training and any(parameter.requires_grad for parameter in layer.parameters())
    several = engine.state.epoch_length != 1  # else there is a single sample on purpose, as for a deep image prior
    if trained and several and isinstance(inputs, Tensor) and inputs.dim() > 2 and len(inputs) == 1:
        engine.findings.report(
            "W27",
            f"the layer {path!r} ({type(layer).__name__}) normalizes over the batch, but its input of shape "
            f"{list(inputs.shape)} has a single sample",
            "use a larger DataLoader(batch_size=), or replace the layer, for example with GroupNorm",
        )


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
    # In order, rows may be the time steps of a series that was cut into columns.
    by_size = (
        isinstance(data, DataLoader) and data.batch_size == length and not isinstance(data.sampler, SequentialSampler)
    )
    return length if _has_lists(tensors) or by_size else None


def _has_lists(tensors: list[Tensor]) -> bool:
    """Whether there is a list with one value for each sample. One of times may be that of samples that come second."""
    lists = [one for one in tensors if one.dim() == 1]
    seconds = [one.shape[1] for one in tensors if one.dim() > 1]
    if len(seconds) > 1 and len(set(seconds)) == 1:
        lists = [one for one in lists if not one.is_floating_point()]
    return bool(lists)
