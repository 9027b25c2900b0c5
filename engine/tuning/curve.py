"""The loss curve of a learning-rate sweep, and the learning rate that it suggests."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any, Literal

from ..authoring.checks import check_choice
from ..authoring.markup import preformatted

__all__ = ["LearningRateCurve"]

Method = Literal["steepest", "minimum"]


@dataclass(frozen=True)
class LearningRateCurve:
    """Results of the LR finder: the loss at each learning rate of a sweep.

    Attributes:
        rates: The learning rate of each step, rising: that of the parameter group with the largest one.
        losses: The loss of each step's window at the weights before the step; NaN or infinite ones included.
        low, high: The bounds of the sweep, which ends before ``high`` if the loss diverges.
        diverged: Whether the loss diverged.
        passes: Number of passes over the data that the sweep started.
        update: The name of the update whose learning rate was swept.

    Example:
        >>> curve = LearningRateCurve(
        ...     (0.001, 0.01, 0.1, 1.0), (2.3, 2.2, 1.4, 1.35), low=0.001, high=1.0
        ... )
        >>> curve.suggestion()
        0.01
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    low: float
    high: float
    diverged: bool = False
    passes: int = 1
    update: str = "main"

    def suggestion(self, method: Method = "steepest", *, smoothing: float = 2.0) -> float:
        """Suggest a learning rate, one of those that were tried.

        Args:
            method: "steepest": the learning rate where the loss falls fastest before its minimum, by the derivative over the
                logarithm of the learning rate, which scales with the problem. "minimum": a tenth of the learning rate of the
                smallest loss, or the next one below that was tried.
            smoothing: Standard deviation, in points, of the Gaussian window that first averages the losses, at most a tenth of
                the points; 0 for none. The window is centered, so it does not shift the curve as a running average does.

        Raises:
            ValueError: for an unknown method, for fewer than three finite losses, or if the loss never falls.

        Source:
            Smith, "Cyclical Learning Rates for Training Neural Networks" (WACV 2017), for the sweep.
        """
        check_choice("suggestion", "method", method, ("steepest", "minimum"))
        if isinstance(smoothing, bool) or not isinstance(smoothing, int | float) or not 0 <= smoothing < math.inf:
            raise ValueError(f"suggestion(smoothing={smoothing!r}): expected a number of points, 0 or more")
        rates, losses = self._finite()
        if self.losses and not losses:
            raise ValueError(
                f"no loss in the sweep is finite, not even the first ({self.losses[0]}, computed before any step), so "
                "no learning rate can help; check the data and the loss"
            )
        if len(rates) < 3:
            raise ValueError(
                f"only {len(rates)} of the {len(self.losses)} losses in the sweep are finite, which is too few for a "
                f"suggestion; set low= below {self.low:g}, or increase steps="
            )
        losses = _smoothed(losses, smoothing)
        lowest = losses.index(min(losses))
        if method == "minimum":
            target = rates[lowest] / 10
            return max((rate for rate in rates if rate <= target * (1 + 1e-9)), default=rates[0])
        slopes = _slopes([math.log(rate) for rate in rates], losses)
        steepest = min(range(lowest + 1), key=slopes.__getitem__)
        if slopes[steepest] >= 0:
            raise ValueError(
                f"the loss never falls between the learning rates {rates[0]:g} and {rates[-1]:g}; set high= above "
                f"{self.high:g} or low= below {self.low:g}, or check that the update trains the model"
            )
        return rates[steepest]

    def table(self) -> str:
        """A table of learning rates and losses, one per line; the suggestion is marked.

        Example:
            >>> print(
            ...     LearningRateCurve(
            ...         (0.001, 0.01, 0.1, 1.0), (2.3, 2.2, 1.4, 1.35), low=0.001, high=1.0
            ...     ).table()
            ... )
                  rate        loss
                 0.001         2.3
                  0.01         2.2 <- suggestion
                   0.1         1.4
                     1        1.35
        """
        marked = self._suggested()
        lines = [f"{'rate':>10}  {'loss':>10}"]
        for rate, loss in zip(self.rates, self.losses, strict=True):
            lines.append(f"{rate:>10.4g}  {loss:>10.4g}{' <- suggestion' if rate == marked else ''}")
        return "\n".join(lines)

    def plot(self, path: str | PathLike[str]) -> None:
        """Plot the losses over the learning rates, on a logarithmic axis, with the suggestion.

        Args:
            path: File to write; its extension sets the format, such as .png, .pdf or .svg.
        """
        self._figure().savefig(fspath(path), dpi=150)

    def __len__(self) -> int:
        return len(self.rates)

    def __str__(self) -> str:
        ended = f"diverged at {self.rates[-1]:.3g}" if self.diverged else f"ended at {self.rates[-1]:.3g}"
        marked = self._suggested()
        suggested = "no suggestion" if marked is None else f"suggestion {marked:.3g}"
        again = "" if self.passes == 1 else f"; {self.passes} passes over the data"
        return f"learning rates from {self.rates[0]:.3g}, {len(self)} steps, {ended}: {suggested}{again}"

    def _repr_html_(self) -> str:
        try:
            written = io.BytesIO()
            self._figure().savefig(written, format="png", dpi=100)
            content = base64.b64encode(written.getvalue()).decode()
            picture = f'<img alt="losses over learning rates" src="data:image/png;base64,{content}"/>'
        except ImportError:  # without Matplotlib
            picture = preformatted(self.table())
        return f"<div>{preformatted(self)}{picture}</div>"

    def _suggested(self) -> float | None:
        try:
            return self.suggestion()
        except ValueError:
            return None

    def _finite(self) -> tuple[list[float], list[float]]:
        finite = [pair for pair in zip(self.rates, self.losses, strict=True) if math.isfinite(pair[1])]
        return [rate for rate, _ in finite], [loss for _, loss in finite]

    def _figure(self) -> Any:
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("plotting a curve needs Matplotlib: pip install 'signalfire[ablation]'") from error
        rates, losses = self._finite()
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot(rates, losses, "-", color="0.7", linewidth=1)
        axes.plot(rates, _smoothed(losses, 2.0), "-", color="#0072B2", linewidth=2)
        if losses:  # what diverges would flatten all the rest
            top = max(losses[0], sorted(losses)[len(losses) // 2])
            spread = max(top - min(losses), 1e-12)
            axes.set_ylim(min(losses) - 0.08 * spread, top + 0.4 * spread)
        if (marked := self._suggested()) is not None:
            axes.axvline(marked, color="#D55E00", linewidth=1.5, linestyle="--")
            axes.annotate(
                f"suggestion {marked:.3g}", (marked, 1), xycoords=("data", "axes fraction"), xytext=(4, -4), color="#D55E00",
                textcoords="offset points", va="top",
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_xlabel("learning rate")
        axes.set_ylabel("loss")
        axes.spines[["top", "right"]].set_visible(False)
        return figure


def _smoothed(values: Sequence[float], deviation: float) -> list[float]:
    """The values averaged with Gaussian weights around each of them; the deviation is at most a tenth of the values."""
    deviation = min(deviation, len(values) / 10)
    if deviation == 0:
        return list(values)
    reach = math.ceil(3 * deviation)
    weights = [math.exp(-0.5 * (step / deviation) ** 2) for step in range(reach + 1)]
    found = []
    for place in range(len(values)):
        near = range(max(0, place - reach), min(len(values), place + reach + 1))
        total = sum(weights[abs(other - place)] for other in near)
        found.append(sum(weights[abs(other - place)] * values[other] for other in near) / total)
    return found


def _slopes(places: Sequence[float], values: Sequence[float]) -> list[float]:
    """The derivative at each place: central differences, one-sided at the ends."""
    last = len(places) - 1
    ends = [(max(0, place - 1), min(last, place + 1)) for place in range(len(places))]
    return [(values[right] - values[left]) / (places[right] - places[left]) for left, right in ends]
