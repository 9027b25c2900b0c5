"""What an engine asks of those that train together, and how one that trains alone answers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .part import Part
from .step import Step

if TYPE_CHECKING:
    from .handler import Handler
    from .kernel import Kernel  # noqa: F401  (in the base class)

__all__ = ["SingleProcess"]


class SingleProcess(Part["Kernel"]):
    """The group of a single process. A room that joins several takes its place; see `distributed.group`.

    Attributes:
        alone: whether there is nobody to agree with.
    """

    alone = True

    @property
    def step(self) -> type[Step]:
        """The kind of step that a run makes, chosen once as it begins."""
        return Step

    def begin_run(self) -> None:
        """Agree on what has to be the same for all before a run: its id, seed and clock."""

    def agree(self) -> None:
        """Agree on whether anybody asks for anything, outside of an iteration and unless the run is stopped."""

    def takes_part(self, handler: Handler) -> bool:
        """Whether a handler takes part in this process."""
        return True

    def now(self) -> float:
        """The wall-clock time in seconds, for differences."""
        return time.monotonic()

    def has_come(self, moment: float) -> bool:
        """Whether a moment has come."""
        return time.monotonic() >= moment
