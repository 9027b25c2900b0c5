"""What a study is made of: variants of a composition, and what each of their runs came to."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Result", "Variant"]

BASELINE = "baseline"


@dataclass(frozen=True)
class Variant:
    """A composition with some handlers switched off, or exchanged for others.

    Attributes:
        name: by which it is told, such as "baseline", "- ema" or "mixup = cutmix".
        off: the names of the handlers that are switched off.
        swapped: pairs of the name of a handler and that of the alternative which takes its place.
        level: for factorial designs, whether each factor is on, by its name.
    """

    name: str
    off: frozenset[str] = frozenset()
    swapped: tuple[tuple[str, str], ...] = ()
    level: tuple[tuple[str, bool], ...] = ()


@dataclass(frozen=True)
class Result:
    """What one run came to; one line of the store.

    Attributes:
        variant: the name of the variant.
        seed: of the run.
        value: the metric's last value; None if the run failed.
        metrics: all metrics that are one number, at the end of the run.
        steps: optimizer steps that were made.
        seconds: wall-clock time of the run.
        memory: the peak memory of the process in bytes.
        error: the traceback of a run that failed.
    """

    variant: str
    seed: int
    value: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0
    memory: int = 0
    error: str | None = None
