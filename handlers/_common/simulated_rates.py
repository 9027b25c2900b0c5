"""When a scheduler is stepped in a run that is simulated, and a plot of its rates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from signalfire import Interval
from signalfire.authoring import check_int

__all__ = ["plot_rates", "steps_of_scheduler"]


def steps_of_scheduler(
    every: Interval, steps: int, epochs: int | None, metric_values: Sequence[float] | None, *, by_metric: bool
) -> list[int]:
    """The optimizer steps, counted from 1, after which a scheduler is stepped.

    Args:
        every: Interval between the scheduler's steps.
        steps, epochs, metric_values: As for `LRScheduling.simulate`.
        by_metric: Whether it is stepped with the values of a metric.

    Raises:
        ValueError: If ``epochs`` or ``metric_values`` is missing, or not used.
    """
    for argument, value in (("steps", steps), ("epochs", epochs)):
        if value is not None:
            check_int("LRScheduling.simulate", argument, value)
    if (metric_values is not None) != by_metric:
        raise ValueError(
            "LRScheduling.simulate(): ReduceLROnPlateau needs a metric; pass metric_values="
            if metric_values is None
            else f"LRScheduling.simulate(metric_values={metric_values!r}): this schedule uses no metric; omit metric_values="
        )
    if metric_values is not None:
        return [value * steps // len(metric_values) for value in range(1, len(metric_values) + 1)]
    if every.unit == "st":
        return list(range(int(every.value), steps + 1, int(every.value)))
    if epochs is None or steps % epochs:
        raise ValueError(
            f"LRScheduling.simulate(steps={steps}, epochs={epochs!r}): this schedule is stepped at the end of each "
            "epoch; set epochs= to a number that divides steps= evenly"
        )
    length = steps // epochs * int(every.value)
    return list(range(length, steps + 1, length))


def plot_rates(path: str | Path, rates: Sequence[Sequence[float]]) -> None:
    """Plot learning rates over optimizer steps, a line for each parameter group.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "LRScheduling.plot() needs matplotlib (pip install matplotlib); simulate() returns the learning rates "
            "without matplotlib"
        ) from error
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.add_subplot()
    for number, used in enumerate(rates):
        axes.step(range(1, len(used) + 1), used, where="mid", label=f"group {number}")
    axes.set(xlabel="optimizer step", ylabel="learning rate")
    axes.grid(alpha=0.3)
    if len(rates) > 1:
        axes.legend()
    figure.savefig(path, dpi=120)
