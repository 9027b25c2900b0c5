"""The boundary of several ranks: what one of them asks for takes effect once all know of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core.boundary import Boundary

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["DistributedBoundary"]


class DistributedBoundary(Boundary):
    """A `Boundary` that may be one of several ranks'.

    What a handler asks for that decides on all ranks alike (`Handler.decides_alike`) takes effect at once, as in a single
    process. What else is asked for may be asked for on one rank only: this rank gives notice with the next gradients that are
    reduced (`Group.send_notice`), and it takes effect at the end of that iteration; or at the end of the epoch, where the ranks
    agree in any case. So what one rank asks for as an epoch begins takes effect after its first iteration. An evaluation stops
    between its epochs only.

    Of a stop, a single rank may ask, too: then all finish the window, or the next one if the gradients of this one are being
    reduced already, and stop as it ends.
    """

    if TYPE_CHECKING:

        @property
        def engine(self) -> Engine: ...

    _own_epoch_stop: str | None = None  # asked for here, and not agreed on

    @property
    def asks(self) -> bool:
        """Whether something is asked for that the other ranks cannot know of."""
        return (
            self.preemption is not None
            or self._own_epoch_stop is not None
            or (bool(self.stops) and not all(map(self.engine.group.decides_alike, self.stops)))
        )

    def agreed(self) -> tuple[dict[str, str], str | None]:
        """The stops and the preemption that all ranks know of."""
        group = self.engine.group
        if group.alone:
            return super().agreed()
        stops = {by: reason for by, reason in self.stops.items() if group.decides_alike(by)}
        if not group.asked:
            return stops, None
        # Read once: what a signal asks for while the ranks agree waits for their next agreement.
        own = {**self.stops}, self._own_epoch_stop, self.preemption
        preemption: str | None = None
        for rank, (asked, epoch_stop, preempted) in enumerate(group.gather(own)):
            for by, reason in asked.items():
                # The reason of rank 0 has no suffix; a reason that only another rank gives names that rank.
                stops.setdefault(by, reason if rank == 0 else f"{reason} (rank {rank})")
            self.epoch_stop = self.epoch_stop if self.epoch_stop is not None else epoch_stop
            preemption = preemption if preemption is not None else preempted
        self._own_epoch_stop = None
        return stops, preemption

    def decides(self, by: str | None) -> bool:
        """As `Boundary` does it; of several ranks, those must know that are not asked."""
        return self.engine.group.alone or self.engine.group.decides_alike(by)

    def ask_epoch_stop(self, reason: str, *, by: str) -> None:
        """As `Boundary` does it; what one rank asks for waits until all agree."""
        if self.decides(by):
            self.epoch_stop = reason
        else:
            self._own_epoch_stop = reason

    def stops_now(self) -> bool:
        """As `Boundary` does it; not with several ranks: others may not have asked for it."""
        return self.engine.group.alone and super().stops_now()

    def cuts_now(self) -> bool:
        """As `Boundary` does it; see `stops_now`."""
        return self.engine.group.alone and super().cuts_now()

    def take_epoch_stop(self) -> bool:
        """As `Boundary` does it."""
        self._own_epoch_stop = None
        return super().take_epoch_stop()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state | {"epoch_stop": self._own_epoch_stop if self.epoch_stop is None else self.epoch_stop}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `Boundary` does it; the ranks agree on the end of an epoch as if it were asked for now."""
        super().load_state_dict(state)
        if not self.engine.group.alone:
            self.epoch_stop, self._own_epoch_stop = None, state["epoch_stop"]
