"""Cutout: trains on samples in which boxes are masked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from signalfire import Engine, Events, Handler, on
from signalfire.authoring import check_int, check_number
from signalfire.updates.places import with_value_at

from ._common.batches import check_place, tensor_at
from ._common.claims import CUTOUT

__all__ = ["Cutout"]


class Cutout(Handler):
    """Cutout: masks random boxes of each sample with a constant.

    Boxes are clipped at the border. For each spatial dimension in turn, integer centers of shape (holes, N) are drawn from the
    handler's own CPU generator. A box starts ``length // 2`` before its center. MixUp and CutMix, if attached, mix the samples
    first.

    Args:
        length: Side length of the box in pixels, or one length per spatial dimension.
        holes: Number of boxes per sample; they may overlap.
        fill: Value of the masked pixels; 0 is the mean of normalized inputs.
        input: Index or key of the inputs in the batch, a tuple, list or dict: (N, C, L), (N, C, H, W) or (N, C, D, H, W).

    Source:
        DeVries and Taylor, "Improved Regularization of Convolutional Neural Networks with Cutout" (2017).

    Example:
        >>> import torch
        >>> from signalfire import Engine, Events, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.Conv2d(1, 1, 1), seed=0)
        >>> _ = engine.attach(Cutout(2))
        >>> @engine.on(Events.FORWARD_STARTED)
        ... def show(engine):
        ...     print(engine.state.batch[0][0, 0])
        >>> _ = engine.run([(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 4, 4))], max_epochs=1)
        tensor([[1., 1., 1., 1.],
                [1., 1., 1., 1.],
                [1., 1., 0., 0.],
                [1., 1., 0., 0.]])
    """

    by_shard = True
    trains = True

    def __init__(
        self,
        length: int | Sequence[int],
        *,
        holes: int = 1,
        fill: float = 0.0,
        input: int | str = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.length: int | tuple[int, ...]
        if isinstance(length, Sequence) and not isinstance(length, str | bytes):
            if not length:
                raise ValueError(
                    f"Cutout(length={length!r}): expected an int of at least 1, or one such int per spatial dimension"
                )
            self.length = tuple(check_int(self, f"length[{place}]", one) for place, one in enumerate(length))
        else:
            self.length = check_int(self, "length", length)
        self.holes = check_int(self, "holes", holes)
        self.fill = check_number(self, "fill", fill, infinite=True)
        self.input = check_place(self, "input", input)

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(CUTOUT, by=self)

    @on(Events.GET_BATCH_COMPLETED, reads=["batch"], writes=["batch"])
    def cut(self, engine: Engine) -> None:
        """Fill the boxes of the batch's inputs."""
        batch = engine.state.batch
        if batch is None:
            return
        inputs = tensor_at(self, batch, "input")
        sizes = inputs.shape[2:]
        lengths = [self.length] * len(sizes) if isinstance(self.length, int) else self.length
        if not sizes or len(lengths) != len(sizes):
            raise ValueError(
                f"{self.name!r}: inputs of shape {tuple(inputs.shape)} have {max(len(sizes), 0)} spatial "
                f"dimensions after (N, C), which does not match length={self.length!r}"
            )
        # Each rank draws other boxes; rank 0 draws those of a single process.
        generator = self.generator(engine, of_rank=engine.group.data.rank or None)
        covered: Tensor | None = None
        for size, length in zip(sizes, lengths, strict=True):
            centers = torch.randint(size, (self.holes, len(inputs)), generator=generator)
            centers = centers.to(inputs.device, non_blocking=True)
            begin = (centers - length // 2).unsqueeze(-1)
            places = torch.arange(size, device=inputs.device)
            side = (places >= begin) & (places < begin + length)  # (holes, N, size)
            if covered is None:
                covered = side
            else:
                covered = covered.unsqueeze(-1) & side.view(*side.shape[:2], *[1] * (covered.dim() - 2), size)
        assert covered is not None
        filled = inputs.masked_fill(covered.any(0).unsqueeze(1), self.fill)
        engine.state.batch = with_value_at(batch, self.input, filled)
