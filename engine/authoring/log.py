"""What users log themselves: numbers, and what is more than a number."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, overload

import numpy as np
import torch
from torch import Tensor

from ..core.events import EventEnum, Events, resolve
from ..core.part import Part
from .devices import widened
from .plain import fields_of, plain_value

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["Entry", "Histogram", "Layout", "Log", "as_pixels"]

Layout = Literal["CHW", "HWC", "HW", "NCHW", "NHWC"]


_BINS = 64


class Histogram(NamedTuple):
    """The distribution of the finite values of a tensor; of complex ones, that of their magnitudes.

    Attributes:
        counts: how many values each of the bins holds, which are equally wide.
        edges: the bins' edges: one more than there are bins.
        total, squares: the sum of the values, and of their squares.
        left_out: how many values were not finite.
    """

    counts: list[int]
    edges: list[float]
    total: float
    squares: float
    left_out: int

    @classmethod
    def of(cls, values: Tensor) -> Histogram:
        """Count the values on their device; one transfer brings the counts to the host."""
        values = values.detach()
        values = (values.abs() if values.is_complex() else values).flatten().float()
        finite = values[values.isfinite()]
        if finite.numel() == 0:
            return cls([], [], 0.0, 0.0, values.numel())
        wide = widened(finite)
        sums = torch.stack([wide.min(), wide.max(), wide.sum(), (wide * wide).sum()])
        low, high, total, squares, *counts = torch.cat([sums, widened(torch.histc(finite, _BINS))]).tolist()
        if low == high:  # histc widens the range by 1 to both sides
            low, high = low - 1, high + 1
        edges = np.linspace(low, high, _BINS + 1).tolist()
        return cls([int(one) for one in counts], edges, total, squares, values.numel() - finite.numel())


class Entry(NamedTuple):
    """Something that was logged, for receivers of IMAGE_LOGGED, FIGURE_LOGGED, TEXT_LOGGED and HISTOGRAM_LOGGED.

    Attributes:
        name: the name that the user gave.
        value: an image as a uint8 array of shape (height, width, 3); a matplotlib figure; a str; a `Histogram`.
        group: "train", or "val" for what was logged in an evaluation.
    """

    name: str
    value: Any
    group: str

    @property
    def tag(self) -> str:
        """The name as loggers write it: under its group, unless it comes from the training and has a group of its own."""
        own = "/" in self.name if self.group == "train" else self.name.startswith("val/")
        return self.name if own else f"{self.group}/{self.name}"


class Log(Part["Engine"]):
    """Logs values from receivers and step functions; every attached logger writes them at the iteration at which they came.

    Called, it logs a number. What is more than a number is emitted as an event, which loggers receive, and others may, too: they
    read `entry`. In an evaluation that an engine runs, all of it goes to the loggers of that engine. With several ranks, what
    rank 0 logs is written.

    Attributes:
        entry: what is being logged, during the event; None otherwise.
        given: the hyperparameters logged so far, by name.

    Example:
        >>> from signalfire import Engine, Events, Update
        >>> engine = Engine(Update.prediction(lambda engine, batch: batch))
        >>> @engine.on(Events.ITERATION_COMPLETED)
        ... def log_largest(engine):
        ...     engine.log("largest", max(engine.state.batch))
        >>> engine.run([[1, 5], [2, 3]]).metrics["largest"]
        3
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.entry: Entry | None = None
        self.given: dict[str, Any] = {}

    @overload
    def __call__(self, name: str, value: float | Tensor) -> None: ...

    @overload
    def __call__(self, name: Mapping[str, float | Tensor]) -> None: ...

    def __call__(self, name: str | Mapping[str, float | Tensor], value: Any = None) -> None:
        """Log a number, or several by name: ``log({"kl": kl, "entropy": entropy})``.

        It is the metric of that name, so that monitors, `History` and the progress bar know it as well.

        A tensor stays on its device until a logger writes the row. Of a number that is logged in each iteration, loggers write
        those of every ``every=``; others are all written.

        Args:
            name: its name; or a mapping from names to numbers, without ``value``.
            value: a number, or a tensor of one element.

        Raises:
            TypeError: for what is not one number.
            ValueError: for a metric that a handler writes.
            RuntimeError: outside a run.
        """
        if isinstance(name, Mapping):
            if value is not None:
                raise TypeError(
                    f"log({name!r}, {value!r}): expected a name and a number, or a mapping from names to numbers"
                )
            for one, number in name.items():
                self(one, number)
            return
        engine = self.engine
        if not isinstance(value, Real) and not (
            isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
        ):
            value = _as_number(name, value)
        metrics = engine.state.metrics
        if not engine.running or metrics.owners.get(name) != "user":
            self._check("log", name)
            metrics.announce("user", [name])
        metrics[name] = value

    def image(self, name: str, image: Any, *, layout: Layout | None = None) -> None:
        """Log an image, or several of one size side by side.

        Values out of their range are clamped. What is no image is not logged. Both are reported, and the run goes on.

        Args:
            name: its name.
            image: a tensor or array of integers from 0 to 255 or floats from 0 to 1, with 1 or 3 channels, or a PIL image.
            layout: the order of its dimensions: number, channels, height, width. By default "HW", "CHW" or "NCHW", by their
                number.

        Raises:
            ValueError: for another layout.
        """
        if layout is not None and layout not in get_args(Layout):
            expected = ", ".join(map(repr, get_args(Layout)))
            raise ValueError(f"log.image({name!r}, layout={layout!r}): expected one of {expected}")
        if not self._receives(Events.IMAGE_LOGGED, "image", name):
            return
        try:
            pixels, problem = as_pixels(image, layout)
        except (TypeError, ValueError, RuntimeError) as error:
            way_out = "pass 1 or 3 channels, and layout= if the channels do not come first"
            if isinstance(error, TypeError):
                way_out = "pass a tensor or an array of real numbers, or a PIL image"
            self._report("image", name, f"the image is not logged: {error}", way_out)
            return
        if problem is not None:
            self._report("image", name, *problem)
        self._emit(Events.IMAGE_LOGGED, name, pixels)

    def figure(self, name: str, figure: Any, *, close: bool = True) -> None:
        """Log a matplotlib figure.

        Args:
            name: its name.
            figure: the figure.
            close: whether to close it afterwards, if it belongs to pyplot, which keeps every open figure in memory.
        """
        if not hasattr(figure, "savefig"):
            raise TypeError(f"log.figure({name!r}, {figure!r}): expected a matplotlib figure")
        if self._receives(Events.FIGURE_LOGGED, "figure", name):
            self._emit(Events.FIGURE_LOGGED, name, figure)
        if close and (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
            pyplot.close(figure)

    def text(self, name: str, text: str) -> None:
        """Log a text; TensorBoard shows it as Markdown."""
        if not isinstance(text, str):
            raise TypeError(f"log.text({name!r}, {text!r}): expected a str")
        if self._receives(Events.TEXT_LOGGED, "text", name):
            self._emit(Events.TEXT_LOGGED, name, text)

    def histogram(self, name: str, values: Any) -> None:
        """Log the distribution of the values of a tensor, an array, or a sequence of numbers."""
        if not self._receives(Events.HISTOGRAM_LOGGED, "histogram", name):
            return
        try:
            histogram = Histogram.of(_as_tensor(values))
        except (TypeError, ValueError, RuntimeError) as error:  # of what torch cannot count, such as a sparse tensor
            self._report("histogram", name, f"no histogram is logged: {error}", "pass a dense tensor of numbers")
            return
        if histogram.left_out or not histogram.counts:
            left_out = f"the histogram leaves out {histogram.left_out} NaN or infinite values"
            what = left_out if histogram.left_out else "there are no values, so no histogram is logged"
            self._report("histogram", name, what, "check how these values are computed, or skip the call")
        if histogram.counts:
            self._emit(Events.HISTOGRAM_LOGGED, name, histogram)

    def hyperparameters(self, values: Any = None, /, **more: Any) -> None:
        """Log what distinguishes this run, before it or in it: each logger writes it once, with the last values of the metrics.

        A value in a nested mapping gets the names of both, such as "optimizer/lr"; what is no number, str or bool is written as
        its ``str``. They are in ``given`` as plain values.

        Args:
            values: a mapping, or an object with fields: a dataclass, ``argparse.Namespace``, OmegaConf, pydantic or attrs; see
                `plain_mapping`.
            more: further values by name.

        Raises:
            TypeError: for what is no configuration.
        """
        named = {} if values is None else fields_of(values)
        if named is None:
            raise TypeError(
                f"log.hyperparameters({values!r}): expected a mapping from names to values, or an object with fields, such as a "
                "dataclass; for any other object, pass vars(obj)"
            )
        self.given.update(_flat({**named, **more}, ""))
        if self.engine.running:  # what is given before is checked as the run starts
            self._receives(Events.HYPERPARAMETERS_LOGGED, "hyperparameters", "...")
        self.engine.signals.emit(self.engine, Events.HYPERPARAMETERS_LOGGED)

    def _receives(self, event: EventEnum, kind: str, name: str) -> bool:
        """Whether an event has a receiver; it is reported if it has none."""
        self._check(f"log.{kind}", name)
        engine = self._outer
        if engine.dry_run or self.engine.dry_run:
            return False
        if not engine.signal(event).receivers and engine.processes.is_rank_zero and not _has_disabled(engine, event):
            engine.findings.report(
                "W39",
                f"log.{kind}({name!r}) was called, but no attached handler receives {event}, so the value is lost",
                "attach a logger that writes it, such as TensorBoardLogger, or connect a function that reads "
                "engine.log.entry to the event",
                key=kind,
            )
        return bool(engine.signal(event).receivers)

    def _report(self, kind: str, name: str, problem: str, way_out: str) -> None:
        self._outer.findings.report("W40", f"log.{kind}({name!r}): {problem}", way_out, key=(kind, name))

    def _emit(self, event: EventEnum, name: str, value: Any) -> None:
        engine = self._outer
        engine.log.entry = Entry(name, value, "train" if engine is self.engine else "val")
        try:
            engine.signals.emit(engine, event)
        finally:
            engine.log.entry = None

    def _check(self, what: str, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"{what}({name!r}): expected a name, such as {what}('kl', ...)")
        if not self.engine.running:
            raise RuntimeError(
                f"{what}({name!r}) was called outside a run, where no logger is active; call it in a function "
                "connected to an event, such as Events.COMPLETED"
            )

    @property
    def _outer(self) -> Engine:
        """The engine whose loggers write: the one that runs this one inside its own run, if there is one."""
        engine = self.engine
        while (parent := engine.findings.parent) is not None:
            engine = parent
        return engine


def _has_disabled(engine: Engine, event: EventEnum) -> bool:
    """Whether a handler that would receive an event is disabled."""
    return any(
        event is one
        for handler in engine.handlers.values()
        for subscription in (() if handler.enabled else handler.subscriptions)
        for one, _ in ([] if isinstance(subscription.event, str) else resolve(subscription.event))
    )


def _as_tensor(values: Any) -> Tensor:
    """Values as a tensor; arrays that torch cannot share, such as flipped ones, are copied."""
    if isinstance(values, np.ndarray):
        values = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
    return torch.as_tensor(values)


def _as_number(name: str, value: object) -> float:
    """An array of one real number as that number; an error for anything else."""
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "biuf":
        return float(value.item())
    if isinstance(value, Tensor) and value.is_complex():
        raise TypeError(f"log({name!r}, ...): {value} is complex; log its real part, or its absolute value")
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise TypeError(
        f"log({name!r}, ...): a {type(value).__name__}{shape} is not a single number; log its mean, or call "
        "log.histogram, log.image, log.figure or log.text"
    )


def as_pixels(image: Any, layout: str | None) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], tuple[str, str] | None]:
    """An image as uint8, of shape (height, width, 3), and what is wrong about its values, with the fix.

    Several images stand side by side. Values out of their range are clamped, and NaN is 0.

    Raises:
        ValueError: for other shapes.
        TypeError: for what is no image.
    """
    if hasattr(image, "convert"):
        image, layout = np.array(image.convert("RGB")), "HWC"
    pixels = _as_pixels(image)
    layout = {2: "HW", 3: "CHW", 4: "NCHW"}.get(pixels.dim(), "") if layout is None else layout
    if layout not in get_args(Layout) or len(layout) != pixels.dim():
        raise ValueError(
            f"its shape {tuple(pixels.shape)} does not match layout={layout!r}, because a layout has one letter for "
            "each dimension"
        )
    pixels = pixels.permute([layout.index(letter) for letter in "NHWC" if letter in layout])
    pixels = pixels if "N" in layout else pixels.unsqueeze(0)
    pixels = pixels if "C" in layout else pixels.unsqueeze(-1)
    count, height, width, channels = pixels.shape
    if channels not in (1, 3) or pixels.numel() == 0:
        raise ValueError(f"an image of {height} x {width} pixels with {channels} channels ({layout}) cannot be shown")
    if pixels.is_complex():
        raise TypeError("complex numbers cannot be shown")
    real, most = pixels.is_floating_point(), 1 if pixels.is_floating_point() or pixels.dtype is torch.bool else 255
    problem = _out_of_range(widened(pixels), real)
    pixels = pixels if pixels.dtype in (torch.float32, torch.float64) else widened(pixels)
    shown = (pixels.nan_to_num(0.0) * (255 / most)).round().clamp(0, 255).to(torch.uint8).expand(-1, -1, -1, 3)
    return shown.permute(1, 0, 2, 3).reshape(height, count * width, 3).numpy(), problem


def _as_pixels(image: Any) -> Tensor:
    try:
        return _as_tensor(image).detach().cpu()
    except TypeError as error:
        raise TypeError(f"a {type(image).__name__} cannot be read as pixels ({error})") from error


def _out_of_range(pixels: Tensor, real: bool) -> tuple[str, str] | None:
    """What is wrong about the values of an image, and the fix; None if nothing is."""
    if pixels.isnan().any():
        return "some of its values are NaN and are shown as 0", "find the source of the NaN values"
    low, high = (one.item() for one in pixels.aminmax())
    most, slack = (1, 0.5 / 255) if real else (255, 0)  # less than a step of what is shown
    if low >= -slack and high <= most + slack:
        return None
    return (
        f"its values range from {low:.4g} to {high:.4g}, but the expected range for {'floats' if real else 'integers'} "
        f"is 0 to {most}; values outside it are clamped",
        "scale the image, e.g. x / 255, or (x - x.min()) / (x.max() - x.min()) unless all values are equal",
    )


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The values by name, those of nested mappings under the names of both; other objects as their ``str``."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if (inner := fields_of(value)) is not None:
            found |= _flat(inner, f"{prefix}{key}/")
        elif isinstance(value, list | tuple | set):
            found[f"{prefix}{key}"] = str(value)
        else:
            with suppress(TypeError):  # others are written as their str
                value = plain_value("log.hyperparameters(", value)
            found[f"{prefix}{key}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return found
