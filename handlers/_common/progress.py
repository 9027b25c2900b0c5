"""The state of a progress bar between two drawings: the smoothed loss, the speed, and the time left."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from signalfire import Engine

__all__ = ["Bound", "Forecast", "Pace", "SmoothedLoss"]


class SmoothedLoss:
    """An exponential average of losses with bias correction, kept on their device, so adding a loss does not wait.

    Losses that are not finite are left out.

    Args:
        decay: Weight of the average so far when a loss is added; with 0 it is the last loss.

    Example:
        >>> smoothed = SmoothedLoss(0.5)
        >>> smoothed.add(torch.tensor(1.0))
        >>> smoothed.add(torch.tensor(4.0))
        >>> smoothed.value()  # (0.5 * 1 + 1 * 4) / 1.5
        3.0
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self._sums: Tensor | None = None  # the weighted sum of losses, and that of their weights

    def add(self, loss: Tensor) -> None:
        """Add a loss of one element; it is detached."""
        if loss.numel() != 1:
            return
        with torch.no_grad():
            value = loss.detach().float().reshape(())
            new = torch.stack((value, torch.ones_like(value)))
            if self._sums is None or self._sums.device != new.device:
                self._sums = torch.zeros_like(new)
            self._sums = torch.where(torch.isfinite(value), self._sums.lerp(new, 1 - self.decay), self._sums)

    def value(self) -> float | None:
        """The average; it waits for the device. None without a finite loss."""
        total, weight = (0.0, 0.0) if self._sums is None else self._sums.tolist()
        return total / weight if weight else None


class Pace:
    """Iterations and samples per second, averaged exponentially over about five seconds of training.

    Attributes:
        iterations_per_second: None until two readings at different times.
        samples_per_second: 0.0 while no batch was counted.
    """

    span = 5.0

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None
        self._seconds = self._iterations = self._samples = 0.0
        self._batch_size = 0

    def look(self, now: float, iteration: int, batch_size: int | None) -> None:
        """Read the clock. A ``batch_size`` of None means the previous one."""
        self._batch_size = self._batch_size if batch_size is None else batch_size
        if self._last is not None:
            seconds, made = now - self._last[0], iteration - self._last[1]
            decay = math.exp(-max(seconds, 0.0) / self.span)
            self._seconds = decay * self._seconds + seconds
            self._iterations = decay * self._iterations + made
            self._samples = decay * self._samples + made * self._batch_size
        self._last = now, iteration

    def pause(self, seconds: float) -> None:
        """Leave out this many seconds since the last reading."""
        if self._last is not None:
            self._last = self._last[0] + seconds, self._last[1]

    @property
    def iterations_per_second(self) -> float | None:
        return self._iterations / self._seconds if self._seconds > 0 and self._iterations > 0 else None

    @property
    def samples_per_second(self) -> float:
        return self._samples / self._seconds if self._seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Bound:
    """The progress of a run towards one of its bounds.

    Attributes:
        fraction: Between 0 and 1.
        count: The same as a count: "120/500".
        seconds: Seconds that are left; None while that is not known.
        iterations: The last iteration, if that is known.
    """

    fraction: float
    count: str
    seconds: float | None
    iterations: float | None = None


class Forecast:
    """The progress of the run towards each of its bounds, and the time left.

    The time per iteration is the mean since the first iteration of this run, including all evaluations and checkpoints. The
    iterations per step are those of this run; for data without a length, an epoch is as long as the last one.

    Args:
        engine: The engine whose run begins.
        now: The time in seconds.
    """

    def __init__(self, engine: Engine, now: float) -> None:
        self._began = now
        first = engine.updates[0]
        self._start = engine.state.completed, first.steps
        self._usual = 1.0 if first.one_step_per_batch and first.window.length_of is None else None
        self._first: tuple[float, int] | None = None  # when the first iteration was made
        self._learned: int | None = None

    def look(self, engine: Engine, now: float) -> None:
        """Note when the first iteration of the run is complete."""
        if self._first is None:
            self._first = now, engine.state.iteration

    def learn_length(self, engine: Engine) -> None:
        """Note the length of an epoch that is complete."""
        self._learned = engine.state.epoch_iteration

    def epoch_length(self, engine: Engine) -> int | None:
        """Iterations in an epoch, as given or as in the last epoch; None if not known."""
        return self._learned if engine.state.epoch_length is None else engine.state.epoch_length

    def seconds_of_iteration(self, engine: Engine, now: float) -> float | None:
        """Mean seconds of an iteration; None before the first."""
        if self._first is None:
            return None
        since, first = self._first
        made = engine.state.iteration - first
        return (now - since) / made if made > 0 else now - self._began

    def bounds(self, engine: Engine, now: float) -> list[Bound]:
        """All bounds of the run whose progress is known, the nearest first."""
        state, each = engine.state, self.seconds_of_iteration(engine, now)
        found = []
        ends = [state.max_iters]
        if state.max_epochs is not None and (length := self.epoch_length(engine)) is not None:
            begun = state.epoch_start if state.epoch_open else state.iteration
            ends.append(begun + (state.max_epochs - state.epoch + state.epoch_open) * length)
        for end in ends:
            if end is not None and end > 0:
                left = None if each is None else max(0, end - state.iteration) * each
                found.append(Bound(min(1.0, state.iteration / end), f"{state.iteration}/{end}", left, end))
        if state.max_steps is not None:
            found.append(self._steps(engine, state.max_steps, each))
        if state.max_seconds and (seconds := engine.boundary.seconds_left) is not None:
            fraction = min(1.0, max(0.0, 1 - seconds / state.max_seconds))
            found.append(Bound(fraction, f"{state.iteration}it", max(0.0, seconds)))
        return sorted(found, key=lambda one: (math.inf if one.seconds is None else one.seconds, -one.fraction))

    def _steps(self, engine: Engine, most: int, each: float | None) -> Bound:
        first, (iteration, steps) = engine.updates[0], self._start
        made = first.steps - steps
        ratio = (engine.state.iteration - iteration) / made if made > 0 else self._usual
        iterations = None if ratio is None else max(0, most - first.steps) * ratio
        return Bound(
            min(1.0, first.steps / most),
            f"{first.steps}/{most} steps",
            None if iterations is None or each is None else iterations * each,
            None if iterations is None else engine.state.iteration + iterations,
        )
