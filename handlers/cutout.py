"""Cutout: training on samples with a hole."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from signalfire import Engine, Events, Handler, on

__all__ = ["Cutout"]


class Cutout(Handler):
    """Covers boxes of each sample with a constant, each sample's at places of its own; what reaches over the border is lost.

    For each batch are drawn, from the handler's own generator on the CPU, the boxes' centres: for each spatial dimension in
    turn, integers of shape (holes, N). A box begins ``length // 2`` before its centre. Samples that are mixed are mixed first.

    Args:
        length: the box's side in pixels, or its sides, one for each spatial dimension.
        holes: how many boxes, which may overlap.
        fill: the constant; zero is the mean of inputs that were normalised.
        input: where the batch, a tuple, list or dict, has the inputs: (N, C, L), (N, C, H, W) or (N, C, D, H, W).

    Source:
        DeVries and Taylor, "Improved Regularization of Convolutional Neural Networks with Cutout" (2017).

    Example:
        >>> Cutout(16).length
        16
    """

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
        lengths = [length] if isinstance(length, int) or not isinstance(length, Sequence) else list(length)
        if not lengths or not all(_is_count(one) for one in lengths):
            raise ValueError(f"Cutout(length={length!r}): it has to be an int of 1 or more, or one for each dimension")
        if not _is_count(holes):
            raise ValueError(f"Cutout(holes={holes!r}): it has to be an int of 1 or more")
        if isinstance(fill, bool) or not isinstance(fill, int | float):
            raise TypeError(f"Cutout(fill={fill!r}): it has to be a number")
        if isinstance(input, bool) or not isinstance(input, int | str):
            raise TypeError(f"Cutout(input={input!r}): it has to be a place in a tuple or a key of a dict")
        self.length = length
        self.holes = holes
        self.fill = fill
        self.input = input

    def attached(self, engine: Engine) -> None:
        engine.claim("cutting parts out of samples", by=self)

    @on(Events.GET_BATCH_COMPLETED)
    def cut(self, engine: Engine) -> None:
        """Cover parts of the batch's inputs."""
        batch = engine.state.batch
        if batch is None:
            return
        inputs = self._inputs(batch)
        sizes = inputs.shape[2:]
        lengths = [self.length] * len(sizes) if isinstance(self.length, int) else self.length
        if not sizes or len(lengths) != len(sizes):
            raise ValueError(
                f"{self.name!r}: the inputs have shape {tuple(inputs.shape)}, that is {max(len(sizes), 0)} spatial "
                f"dimensions after (N, C), which does not go with length={self.length!r}"
            )
        generator = self.generator(engine)
        covered: Tensor | None = None
        for size, length in zip(sizes, lengths, strict=True):
            centres = torch.randint(size, (self.holes, len(inputs)), generator=generator).to(inputs.device)
            begin = (centres - length // 2).unsqueeze(-1)
            places = torch.arange(size, device=inputs.device)
            side = (places >= begin) & (places < begin + length)  # (holes, N, size)
            if covered is None:
                covered = side
            else:
                covered = covered.unsqueeze(-1) & side.view(*side.shape[:2], *[1] * (covered.dim() - 2), size)
        assert covered is not None
        filled = inputs.masked_fill(covered.any(0).unsqueeze(1), self.fill)
        engine.state.batch = _changed(batch, self.input, filled)

    def _inputs(self, batch: Any) -> Tensor:
        place: Any = self.input
        try:
            inputs: Any = batch[place] if isinstance(batch, tuple | list | dict) else None
        except (IndexError, KeyError, TypeError):
            inputs = None
        if not isinstance(inputs, Tensor):
            raise TypeError(
                f"{self.name!r}: the batch ({type(batch).__name__}) has no tensor at {place!r}; "
                "say where it is with Cutout(input=)"
            )
        return inputs


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _changed(batch: Any, place: Any, value: Tensor) -> Any:
    """A copy of the batch with another tensor in this place."""
    if isinstance(batch, tuple):
        items = list(batch)
        items[place] = value
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    batch = copy.copy(batch)
    batch[place] = value
    return batch
