"""The process group that an engine trains in, and what its ranks agree on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from .acts import Override
from .connection import Phase
from .distributed.processes import SINGLE_PROCESS, Processes, lost_another
from .part import Part

if TYPE_CHECKING:
    from .engine import Engine
    from .handler import Handler

__all__ = ["Group"]


class Group(Part):
    """Which processes train together, and the answers that have to be the same on all of them.

    Attributes:
        processes: the ranks that train together; `SINGLE_PROCESS` for a single process.
        shard_policy: how data is sharded over them; see `join`.
        sync_skips: whether the ranks have to agree on skipping a step once the gradients are ready.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.processes: Processes = SINGLE_PROCESS
        self.shard_policy = "auto"
        self.sync_skips = False
        self._time = 0.0  # rank 0's clock at the last boundary

    def join(self, processes: Processes, *, by: Handler, shard_policy: str = "auto") -> None:
        """Train together with other processes, until the handler is detached.

        From then on the ranks decide alike what they decide in a run, data is sharded over them, metrics are those of all, and
        handlers with ``rank_zero_only`` take part on rank 0 only.

        Args:
            processes: what `process_group` returned.
            by: the handler, which also has gradients reduced (`Override.REDUCTION`).
            shard_policy: how data is sharded. "round_robin": the batches of the data, which is the same on each rank, go to the
                ranks in turn, by index, or else by reading all of them. "own": each rank has data of its own. "auto":
                DataLoaders over map-style datasets and sequences are sharded, unless a sampler does it; other data is refused.

        Raises:
            ValueError: if another handler does the same, naming both.
        """
        engine = self.engine
        if engine.running:
            raise RuntimeError(f"join({processes!r}) was called during a run; call it before run()")
        engine.overrides.claim(Override.PROCESS_GROUP, by=by)
        self.use(processes, shard_policy)

    def leave(self) -> None:
        """Train as a single process again."""
        self.use(SINGLE_PROCESS, "auto")

    def use(self, processes: Processes, shard_policy: str) -> None:
        """Take these processes, and connect the handlers of rank 0 where this is rank 0 now."""
        before, self.processes, self.shard_policy = self.processes, processes, shard_policy
        if processes is not before:
            self.engine.handlers.settle_rank_zero_only()

    def begin_run(self, run_id: str, seed: int) -> tuple[str, int]:
        """Agree on what the ranks have to have in common before a run: rank 0's id of the run, seed and clock."""
        if not self.processes.distributed:
            return run_id, seed
        try:
            run_id, seed, self._time = self.processes.broadcast((run_id, seed, time.monotonic()))
        except Exception as error:
            if lost_another(error):
                error.add_note(
                    "the ranks could not begin a run together: one of them has ended, or an error of the run before has cut "
                    "their connections; start the script again"
                )
            raise
        self.sync_skips = True
        return run_id, seed

    def agree(self, asked: bool, own: Any) -> list[Any]:
        """Let the ranks agree at a boundary: the clock of rank 0 is that of all, and what some ask for is gathered.

        Args:
            asked: whether this rank asks for anything.
            own: what it asks for.

        Returns:
            What each rank asks for; nothing if none does.
        """
        now = time.monotonic() if self.processes.is_rank_zero else 0.0
        asking, self._time, skipping = self.processes.sum(asked, now, self._may_skip_alone())
        self.sync_skips = skipping > 0
        return self.processes.gather(own) if asking else []

    def _may_skip_alone(self) -> bool:
        """Whether a receiver on this rank may skip a step once the gradients are ready, and not on all ranks."""
        engine = self.engine
        return any(
            one.phase < Phase.RECORD and (one.owner is None or not engine.handlers[one.owner].decides_alike)
            for signal in (engine.iteration_signals.gradients_ready, engine.iteration_signals.step_started)
            for one in signal.connections
        )

    def now(self) -> float:
        """The wall-clock time in seconds, for differences; with several ranks, that of rank 0 at the last boundary."""
        return self._time if self.processes.distributed else time.monotonic()
