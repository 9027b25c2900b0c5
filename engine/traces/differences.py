"""What two traces have differently, in words and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..core.words import listed

__all__ = ["Difference", "Row", "in_words"]


@dataclass(frozen=True)
class Difference:
    """A difference between two runs at an event.

    Attributes:
        iteration: The iteration.
        event: The name of the event.
        update: The name of the update; None at events of the whole iteration.
        shard: The shard; None without shards.
        thing: The thing that differs, such as "parameters" or "handlers/ema".
        others: Other things that differ in the same record.
        numbers: The loss or the norm of what differs, in both runs, where they were measured.
    """

    iteration: int
    event: str
    update: str | None
    shard: int | None
    thing: str
    others: tuple[str, ...] = ()
    numbers: tuple[float, float] | None = None

    def __str__(self) -> str:
        at = (
            f"iteration {self.iteration}, {self.event}"
            if self.iteration
            else f"before the first iteration, {self.event}"
        )
        places = [at]
        if self.update not in (None, "main"):
            places.append(f"update {self.update!r}")
        if self.shard is not None:
            places.append(f"shard {self.shard}")
        numbers = "" if self.numbers is None else f" ({self.numbers[0]!r} and {self.numbers[1]!r})"
        others = f"; also different: {listed(self.others)}" if self.others else ""
        return f"{', '.join(places)}: {in_words(self.thing)}{numbers}{others}"


@dataclass(frozen=True)
class Row:
    """An iteration of both runs.

    Attributes:
        iteration: The iteration.
        equal: Whether all that both have recorded of it is equal.
        apart: Distances of the loss and the norms of gradients and parameters, as fractions of the larger one.
    """

    iteration: int
    equal: bool
    apart: Mapping[str, float]


def in_words(thing: str) -> str:
    """What differs, in words."""
    kind, _, name = thing.partition("/")
    words = {
        "handlers": f"the state of handler {name!r}",
        "metrics": f"the metric {name!r}",
        "random": f"the random numbers of {name}",
        "optimizer": "the optimizer's state or options",
        "parameters": "the parameters",
        "buffers": "the buffers",
        "gradients": "the gradients",
    }
    found = words.get(kind, f"the {kind}")
    return found if name in ("", kind) or kind in _NAMED else f"{found} ({name})"


_NAMED = ("handlers", "metrics", "random")
