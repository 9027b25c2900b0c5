"""Channels-last memory format: images are stored pixel by pixel, as fast convolution kernels read them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.authoring import Claim, map_leaves
from signalfire.distributed import is_sharded
from signalfire.models.modules import bare_name

from ._common.parameters import moments_of
from ._common.ranks import LAYOUT

__all__ = ["ChannelsLast"]

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_CONVOLUTIONS = {4: (nn.Conv2d, nn.ConvTranspose2d), 5: (nn.Conv3d, nn.ConvTranspose3d)}
"""By the number of dimensions of a batch: samples, channels, and two or three more."""

Strides = tuple[int, ...]


class ChannelsLast(Handler):
    """Trains in the channels-last memory format (NHWC), which speeds up convolutions, and restores the layout afterwards.

    The channels of a pixel are adjacent in memory, while shapes and indices stay NCHW. Half-precision convolutions are faster
    on GPUs with tensor cores, and often on CPUs as well. Sums run in a different order, so results differ by rounding. Batches
    are converted once they are on the device, including the batches of evaluations that the trainer starts.

    Four-dimensional tensors are converted if the model has two-dimensional convolutions, and five-dimensional tensors if it has
    three-dimensional convolutions. A model with neither stays unchanged, and a line on standard error reports this. Parameters
    stay the same objects. After the run, parameters, buffers, gradients, optimizer states and weight averages have the strides
    that they would have without the handler.

    Raises:
        ValueError: At the start of a run, for weights sharded by `FullyShardedDataParallel`, which does not support this format.

    Source:
        "Channels Last Memory Format in PyTorch", a tutorial of PyTorch.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Events, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> model = torch.nn.Conv2d(2, 2, 3)
        >>> engine = Engine(update, model=model, seed=0)
        >>> _ = engine.attach(ChannelsLast())
        >>> @engine.on(Events.FORWARD_STARTED)
        ... def show(engine):  # the channels, the second dimension, are adjacent
        ...     print(model.weight.stride(), engine.state.batch[0].stride())
        >>> _ = engine.run([(torch.ones(1, 2, 4, 4), torch.ones(1, 2, 2, 2))], max_epochs=1)
        (18, 1, 6, 2) (32, 1, 8, 2)
        >>> model.weight.stride()  # as before
        (18, 9, 3, 1)
    """

    by_shard = True

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self._dimensions: list[int] = []  # of tensors that are converted, only during a run
        self._strides: dict[tuple[str, str], tuple[Tensor, Strides]] = {}  # original ones by names of module and tensor

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(Claim("the memory format"), by=self)

    @on(
        Events.STARTED,
        phase=Phase.PREPARE,
        rank=LAYOUT,
        reads=["modules", "weights", "optimizer"],
        writes=["files"],
    )
    def convert(self, engine: Engine) -> None:
        """Convert parameters, buffers, and optimizer states of an earlier run."""
        parts = [part for root in engine.modules.values() for part in root.modules()]
        self._dimensions = [
            count for count, kinds in _CONVOLUTIONS.items() if any(isinstance(part, kinds) for part in parts)
        ]
        if not self._dimensions:
            line = f"{self.name}: the model has no two- or three-dimensional convolutions, so nothing is converted"
            engine.processes.print(line, file=sys.stderr)
        for root, key, tensor in self._tensors(engine):
            if is_sharded(tensor):
                raise ValueError(
                    f"{self.name!r}: the memory format of sharded weights, such as {key!r}, cannot be changed; detach "
                    f"{self.name!r}, or use DistributedDataParallel"
                )
            strides = tensor.stride()
            tensor.data = _converted(tensor.data)
            if tensor.stride() != strides:
                self._strides[root, key] = tensor, strides
        for tensor, _ in self._belonging(engine):
            tensor.data = _converted(tensor.data)

    @on(
        Events.CHECKPOINT_LOADED,
        phase=Phase.PREPARE,
        rank=LAYOUT,
        reads=["gradients", "optimizer"],
        writes=["optimizer"],
    )
    def convert_loaded(self, engine: Engine) -> None:
        """Convert a loaded state that was saved in a different format."""
        for tensor, _ in self._belonging(engine):
            tensor.data = _converted(tensor.data)

    @on(Events.GET_BATCH_COMPLETED, phase=Phase.PREPARE, rank=LAYOUT, reads=["batch"], writes=[])
    def convert_batch(self, engine: Engine) -> None:
        """Convert the batch's tensors, once they are on the device."""
        if self._dimensions:
            engine.state.batch = map_leaves(self._converted_leaf, engine.state.batch)

    def _converted_leaf(self, value: Any) -> Any:
        return _converted(value) if isinstance(value, Tensor) and value.dim() in self._dimensions else value

    @on(Events.ENDED, reads=["weights", "gradients", "optimizer"], writes=[])
    def restore(self, engine: Engine) -> None:
        """Restore the strides."""
        for tensor, strides in self._belonging(engine):
            tensor.data = _strided(tensor.data, strides)
        for tensor, strides in self._strides.values():
            tensor.data = _strided(tensor.data, strides)
        self._dimensions, self._strides = [], {}

    def _tensors(self, engine: Engine) -> Iterator[tuple[str, str, Tensor]]:
        """Parameters and buffers that are to be converted."""
        for root, module in engine.modules.items():
            for key, tensor in (*module.named_parameters(), *module.named_buffers()):
                if tensor.dim() in self._dimensions and tensor.layout is torch.strided:
                    yield root, bare_name(key), tensor

    def _belonging(self, engine: Engine) -> Iterator[tuple[Tensor, Strides]]:
        """Gradients, moments and averages of converted parameters, with the strides of the parameter."""
        original = dict(self._strides.values())
        for tensor, strides in original.items():
            if tensor.grad is not None and tensor.grad.layout is torch.strided:
                yield tensor.grad, strides
        for parameter, moment in moments_of(engine, original):
            yield moment, original[parameter]
        for handler in engine.handlers.values():
            for name, copy in handler.parameter_copies().items():
                root, _, key = name.partition(".")
                if (found := self._strides.get((root, key))) is not None and copy.shape == found[0].shape:
                    yield copy, found[1]


def _converted(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=_FORMATS[tensor.dim()])


def _strided(tensor: Tensor, strides: Strides) -> Tensor:
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
