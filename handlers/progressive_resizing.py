"""Progressive resizing: training starts with small images, which cost less, and ends with whole ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from signalfire import Engine, Events, Handler, on
from signalfire.authoring import Capture, Claim, check_choice, check_int, check_number, last_iteration
from signalfire.updates.places import with_value_at

from ._common.batches import check_place, tensor_at
from ._common.ranks import RESIZE

__all__ = ["ProgressiveResizing"]

_LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}  # by the number of dimensions
_ANTIALIASED = ("bilinear", "bicubic")


class ProgressiveResizing(Handler):
    """Progressive resizing: trains on small images first, which cost less, and on full-size images at the end.

    Batches are interpolated on the device, before samples are mixed or cut out. The size depends only on the epoch or the
    iteration, so a resumed run continues with the right one. At full size, batches are unchanged. Evaluations use whole images.
    The model has to accept any size: convolutions, and pooling to a fixed size before the head.

    Without ``sizes``, the scale is ``initial`` for the first share ``delay`` of the run's iterations, then grows linearly, and
    is 1 for the last share ``final``. The number of iterations comes from the first run's bounds (``max_epochs`` or
    ``max_iters``) and is part of the state, so extending a run later does not shrink its images again.

    Args:
        sizes: Alternatively, a mapping from the epoch or iteration, counted from 1, to the size that applies from then on: a
            float is a scale of at most 1, an int the length of the shorter side in pixels. Images are never enlarged.
        unit: Unit of the keys of ``sizes``: "ep" for epochs or "it" for iterations.
        initial, delay, final: Initial scale, and shares of the run at the initial scale and at full size; see above. ``delay +
            final`` is at most 1.
        increment: Number of pixels; sides are rounded down to a multiple of it, except at full size. Each new size may compile
            and benchmark kernels again.
        mode: Interpolation mode: "bilinear" or "bicubic", with antialiasing for images, "area" or "nearest". For signals (N, C,
            L) and volumes (N, C, D, H, W), "bilinear" means linear and trilinear, without antialiasing.
        input: Index or key of the images in the batch, a tuple, list or dict: floats of shape (N, C, H, W).
        target: Index or key of targets with the same sides, such as masks (N, H, W), which are resized by nearest neighbors; by
            default no targets are resized.

    Attributes:
        scale: Scale of the last batch; None before the first.

    Raises:
        ValueError: At the start of a run whose number of iterations is not known, without ``sizes``.
        TypeError: In a run, for inputs that are not floats.

    Source:
        Tan and Le, "EfficientNetV2: Smaller Models and Faster Training" (ICML 2021); Howard, "Training Imagenet in 3 hours"
        (fast.ai, 2018).

    Example:
        >>> import torch
        >>> from signalfire import Engine, Events, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> layers = torch.nn.Conv2d(3, 1, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
        >>> model = torch.nn.Sequential(*layers)
        >>> engine = Engine(update, model=model, seed=0)
        >>> _ = engine.attach(ProgressiveResizing(initial=0.5, delay=0.25, final=0.25, increment=4))
        >>> sides = []
        >>> @engine.on(Events.FORWARD_STARTED)
        ... def look(engine):
        ...     sides.append(engine.state.batch[0].shape[-1])
        >>> _ = engine.run([(torch.ones(2, 3, 32, 32), torch.ones(2, 1))] * 2, max_epochs=4)
        >>> sides
        [16, 16, 16, 20, 24, 28, 32, 32]
    """

    by_shard = True
    capture = Capture.FORBIDDEN
    trains = True

    def __init__(
        self,
        sizes: Mapping[int, int | float] | None = None,
        *,
        unit: Literal["ep", "it"] = "ep",
        initial: float = 0.5,
        delay: float = 0.5,
        final: float = 0.2,
        increment: int = 4,
        mode: Literal["bilinear", "bicubic", "area", "nearest"] = "bilinear",
        input: int | str = 0,
        target: int | str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.sizes = None if sizes is None else self._checked(sizes)
        self.unit = check_choice(self, "unit", unit, ("ep", "it"))
        self.initial = check_number(self, "initial", initial, above=0, most=1)
        self.delay = check_number(self, "delay", delay, least=0, most=1)
        self.final = check_number(self, "final", final, least=0, most=1)
        if self.delay + self.final > 1:
            raise ValueError(
                f"ProgressiveResizing(delay={delay!r}, final={final!r}): the sum of delay= and final= must be at most 1"
            )
        self.increment = check_int(self, "increment", increment)
        self.mode = check_choice(self, "mode", mode, ("bilinear", "bicubic", "area", "nearest"))
        self.input = check_place(self, "input", input)
        self.target = None if target is None else check_place(self, "target", target)
        if target == input and target is not None:
            raise ValueError(
                f"ProgressiveResizing(input={input!r}, target={target!r}): input= and target= must be different "
                "indices or keys"
            )
        self.scale: float | None = None
        self._iterations: int | None = None  # of the run

    def _checked(self, sizes: Any) -> dict[int, int | float]:
        if not isinstance(sizes, Mapping) or 1 not in sizes:
            raise ValueError(
                f"ProgressiveResizing(sizes={sizes!r}): expected a mapping from epochs or iterations to sizes, "
                "starting with the key 1, such as {1: 0.5, 10: 1.0}"
            )
        found: dict[int, int | float] = {}
        for place, size in sizes.items():
            key = check_int(self, "sizes: key", place)
            argument = f"sizes[{place!r}]"
            is_scale = isinstance(size, float)
            found[key] = (
                check_number(self, argument, size, above=0, most=1) if is_scale else check_int(self, argument, size)
            )
        return dict(sorted(found.items()))

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(Claim("the size of images"), by=self)

    def side(self, length: int, *, iteration: int, of: int) -> int:
        """The resized side in pixels of a side of ``length`` pixels, at this iteration of a run of this many iterations."""
        return self._side(length, self._ramp(iteration, of))

    def _ramp(self, iteration: int, of: int) -> float:
        done, start, end = iteration - 1, self.delay * of, (1 - self.final) * of
        if done >= end:
            return 1.0
        if done <= start:
            return self.initial
        return self.initial + (1 - self.initial) * (done - start) / (end - start)

    def _side(self, length: int, scale: float) -> int:
        if scale >= 1:
            return length
        whole = int(length * scale + 1e-6)  # 1e-6 of a pixel: 0.7 * 10 is less than 7
        return min(length, max(self.increment, whole - whole % self.increment))

    @on(Events.STARTED | Events.CHECKPOINT_LOADED, reads=["bounds"], writes=[])
    def find_length(self, engine: Engine) -> None:
        """Find the number of iterations of the run, unless a loaded state contains it."""
        if self.sizes is not None or self._iterations is not None or engine.snapshots.has_loaded_state:
            return
        self._iterations = last_iteration(engine)
        if self._iterations is None:
            raise ValueError(
                f"{self.name!r}: the number of iterations in the run is not known; pass max_iters= or epoch_length= to "
                "run(), or pass sizes= to ProgressiveResizing"
            )

    @on(Events.GET_BATCH_COMPLETED, rank=RESIZE, reads=["batch"], writes=["batch"])
    def resize(self, engine: Engine) -> None:
        """Resize the images of the batch, and its targets if ``target`` is set."""
        batch = engine.state.batch
        if batch is None:
            return
        images = tensor_at(self, batch, "input")
        sides = list(images.shape[2:])
        if images.dim() not in _LINEAR or 0 in sides:
            raise ValueError(
                f"{self.name!r}: inputs of shape {tuple(images.shape)} are not images; expected (N, C, L), "
                "(N, C, H, W), or (N, C, D, H, W)"
            )
        self.scale = self._scale(engine, min(sides))
        wanted = [self._side(side, self.scale) for side in sides]
        if wanted == sides:
            return
        batch = with_value_at(batch, self.input, self._resized(images, wanted))
        if self.target is not None:
            targets = tensor_at(self, batch, "target")
            if list(targets.shape[-len(sides) :]) != sides or targets.dim() <= len(sides):
                raise ValueError(
                    f"{self.name!r}: the targets have shape {tuple(targets.shape)}, whose last dimensions differ from "
                    f"the spatial dimensions of the inputs, {tuple(sides)}"
                )
            batch = with_value_at(batch, self.target, _nearest(targets, wanted))
        engine.state.batch = batch

    def _scale(self, engine: Engine, shortest: int) -> float:
        state = engine.state
        if self.sizes is None:
            assert self._iterations is not None
            return self._ramp(state.iteration, self._iterations)
        now = state.epoch if self.unit == "ep" else state.iteration
        size = [size for start, size in self.sizes.items() if start <= now][-1]
        return size if isinstance(size, float) else min(1.0, size / shortest)

    def _resized(self, images: Tensor, sides: list[int]) -> Tensor:
        if not images.is_floating_point():
            raise TypeError(
                f"{self.name!r}: the inputs have dtype {images.dtype}, but only floating-point inputs can be resized; "
                "convert the inputs to a floating-point dtype"
            )
        if self.mode == "bicubic" and images.dim() != 4:
            raise ValueError(
                f"{self.name!r}: mode='bicubic' needs inputs of shape (N, C, H, W), but the inputs have shape "
                f"{tuple(images.shape)}; use mode='bilinear'"
            )
        mode = _LINEAR[images.dim()] if self.mode == "bilinear" else self.mode
        if mode in _ANTIALIASED:
            return F.interpolate(images, sides, mode=mode, antialias=True)
        return F.interpolate(images, sides, mode="nearest-exact" if mode == "nearest" else mode)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._iterations is None else {"iterations": self._iterations}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._iterations = state.get("iterations")


def _nearest(targets: Tensor, sides: list[int]) -> Tensor:
    """Nearest neighbors as in "nearest-exact" of `F.interpolate`, for any dtype."""
    for dim, side in zip(range(-len(sides), 0), sides, strict=True):
        length = targets.shape[dim]
        places = ((torch.arange(side, dtype=torch.float64) + 0.5) * (length / side)).long()
        targets = targets.index_select(dim, places.to(targets.device))
    return targets
