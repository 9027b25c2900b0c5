"""Random erasing: replaces a random rectangle of samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from signalfire import Engine, Events, Handler, on
from signalfire.authoring import check_int, check_number
from signalfire.updates.places import with_value_at

from ._common.batches import check_place, tensor_at
from ._common.claims import CUTOUT

__all__ = ["RandomErasing"]

ATTEMPTS = 10
"""Rectangles that are tried for a sample, of which the first that fits is erased; as in torchvision and timm."""


class RandomErasing(Handler):
    """Random erasing: replaces a rectangle of random size, shape and position in a share of the samples.

    Rectangles are erased in whole batches on their device, separately for each sample, after mixing handlers such as MixUp. The
    arguments are those of ``torchvision.transforms.RandomErasing``. Inputs should be normalized, so that a value of 0 is the
    mean. In sequences, a segment is erased; ``scale`` is the share of the length, and ``ratio`` is ignored.

    All draws come from the handler's own CPU generator, as float32 from 0 to 1. The first tensor, of shape (N), erases the
    samples whose number is below ``p``. The second, of shape (4, count, 10, N), has the areas, aspect ratios, rows and columns of
    all attempts; for sequences it has no columns. "random" values are drawn on the inputs' device.

    Args:
        p: Probability that a sample is erased.
        scale: Smallest and largest share of the image's area that is erased.
        ratio: Smallest and largest aspect ratio, height to width; its logarithm is drawn uniformly.
        value: Replacement value: a number, one per channel, or "random" for standard normal numbers in every element ("pixel" in
            timm).
        count: Number of rectangles per sample, which may overlap.
        input: Index or key of the inputs in the batch, a tuple, list or dict: (N, C, H, W) or (N, C, L).

    Source:
        Zhong, Zheng, Kang, Li and Yang, "Random Erasing Data Augmentation" (AAAI 2020), Algorithm 1.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Events, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.01)
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(8, 1))
        >>> engine = Engine(update, model=model, seed=0)
        >>> # A quarter to a half of each sequence is erased.
        >>> _ = engine.attach(RandomErasing(1.0, scale=(0.25, 0.5)))
        >>> @engine.on(Events.FORWARD_STARTED)
        ... def show(engine):
        ...     print(engine.state.batch[0].int().tolist())
        >>> _ = engine.run([(torch.ones(2, 1, 8), torch.ones(2, 1))], max_epochs=1)
        [[[1, 1, 1, 0, 0, 0, 1, 1]], [[1, 1, 1, 0, 0, 0, 0, 1]]]
    """

    by_shard = True
    trains = True

    def __init__(
        self,
        p: float = 0.5,
        *,
        scale: Sequence[float] = (0.02, 0.33),
        ratio: Sequence[float] = (0.3, 3.3),
        value: float | Sequence[float] | Literal["random"] = 0.0,
        count: int = 1,
        input: int | str = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.p = check_number(self, "p", p, above=0, most=1)
        self.scale = self._range("scale", scale, most=1.0)
        self.ratio = self._range("ratio", ratio)
        self.value: float | tuple[float, ...] | None  # None for random ones
        if isinstance(value, str):
            if value != "random":
                raise ValueError(
                    f"RandomErasing(value={value!r}): expected a number, a list with one number per channel, or "
                    "'random'"
                )
            self.value = None
        elif isinstance(value, list | tuple):
            if not value:
                raise ValueError(
                    f"RandomErasing(value={value!r}): expected a number, or a list with one number per channel"
                )
            self.value = tuple(check_number(self, f"value[{place}]", one) for place, one in enumerate(value))
        else:
            self.value = check_number(self, "value", value)
        self.count = check_int(self, "count", count)
        self.input = check_place(self, "input", input)

    def _range(self, argument: str, given: Sequence[float], most: float | None = None) -> tuple[float, float]:
        if not isinstance(given, list | tuple) or len(given) != 2:
            raise TypeError(f"RandomErasing({argument}={given!r}): expected two numbers, the minimum and the maximum")
        least, largest = (
            check_number(self, f"{argument}[{n}]", one, above=0, most=most) for n, one in enumerate(given)
        )
        if least > largest:
            raise ValueError(f"RandomErasing({argument}={given!r}): the minimum is larger than the maximum; swap them")
        return least, largest

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(CUTOUT, by=self)

    @on(Events.GET_BATCH_COMPLETED, reads=["batch"], writes=["batch"])
    def erase(self, engine: Engine) -> None:
        """Erase the rectangles of the batch's inputs."""
        batch = engine.state.batch
        if batch is None:
            return
        inputs = tensor_at(self, batch, "input")
        if inputs.dim() not in (3, 4):
            raise ValueError(
                f"{self.name!r}: the inputs have shape {tuple(inputs.shape)}; expected (N, C, H, W) or (N, C, L)"
            )
        of_rank = engine.group.data.rank or None
        generator = self.generator(engine, of_rank=of_rank)
        erased = self._draw(inputs.shape[2:], len(inputs), generator).to(inputs.device, non_blocking=True).unsqueeze(1)
        if self.value is None:
            if not inputs.is_floating_point():
                raise TypeError(
                    f"{self.name!r}: inputs of dtype {inputs.dtype} cannot hold random values; convert the inputs to "
                    "a floating-point dtype first, or pass numbers as value="
                )
            if inputs.device.type != "cpu":
                generator = self.generator(engine, inputs.device, of_rank=of_rank)
            values = torch.empty_like(inputs).normal_(generator=generator)
        else:
            values = torch.tensor(self.value, dtype=inputs.dtype).to(inputs.device, non_blocking=True)
            values = values.view(-1, *[1] * (inputs.dim() - 2))
            if len(values) not in (1, inputs.shape[1]):
                raise ValueError(
                    f"{self.name!r}: value={self.value!r} has {len(values)} numbers, but the inputs have "
                    f"{inputs.shape[1]} channels; pass a single number, or one number per channel"
                )
        engine.state.batch = with_value_at(batch, self.input, torch.where(erased, values, inputs))

    def _draw(self, sizes: Sequence[int], samples: int, generator: torch.Generator) -> Tensor:
        """Where each sample is erased: (N, H, W) or (N, L)."""
        chosen = torch.rand(samples, generator=generator) < self.p
        areas, shapes, *starts = torch.rand(2 + len(sizes), self.count, ATTEMPTS, samples, generator=generator)
        area = math.prod(sizes) * (self.scale[0] + (self.scale[1] - self.scale[0]) * areas)
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        aspect = torch.exp(low + (high - low) * shapes)
        sides = [(area * aspect).sqrt(), (area / aspect).sqrt()] if len(sizes) == 2 else [area]
        sides = [side.round() for side in sides]
        fits = torch.stack([side < size for side, size in zip(sides, sizes, strict=True)]).all(0)
        first = fits.int().argmax(1, keepdim=True)  # of equal ones the first; of none that fits, any
        covered = chosen & fits.any(1)  # (count, N), then one dimension after the other
        for side, start, size in zip(sides, starts, sizes, strict=True):
            length, drawn = (one.gather(1, first).squeeze(1) for one in (side, start))
            begin = (drawn * (size - length + 1)).floor().unsqueeze(-1)
            places = torch.arange(size)
            inside = (places >= begin) & (places < begin + length.unsqueeze(-1))
            covered = covered.unsqueeze(-1) & inside.view(*inside.shape[:2], *[1] * (covered.dim() - 2), size)
        return covered.any(0)
