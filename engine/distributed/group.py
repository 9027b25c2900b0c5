"""The process group that an engine trains in, and what its ranks agree on."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..core.connection import Connection, Phase
from ..core.overrides import Claim
from ..core.single_process import SingleProcess
from ..core.step import Step
from ..core.window import ONE, ZERO
from .notice import Carrier, SeparateCarrier
from .processes import SINGLE_PROCESS, Processes, lost_another
from .shards import VirtualShards
from .step import DistributedStep

if TYPE_CHECKING:
    from ..core.handler import Handler
    from ..core.update import UpdateState
    from ..engine import Engine

__all__ = ["PROCESS_GROUP", "Group"]

PROCESS_GROUP = Claim("how the model is distributed over processes")
_SAME_DATA = Claim("which ranks read the same data")


class Group(SingleProcess):
    """The processes that train together, and the decisions that must be the same on all of them.

    Attributes:
        processes: the ranks that train together; `SINGLE_PROCESS` for a single process.
        alike: how many consecutive ranks read the same data; see `read_alike`.
        data: the ranks by which data is sharded: `processes`, unless several (`DataGroups`) or all (`SameData`) read the same.
        shards: the shards that a step consists of, if there are any; `data` is then the same object. None if there are none.
        parts: the number of ranks, or shards, over which each step is split.
        shard_policy: how data is sharded over them; see `join`.
        sync_skips: whether the ranks must agree on skipping the current step.
        asked: whether any rank has made a request, as known to all ranks.
        has_sent: whether this rank has sent its notice for the current window.
        met: when the gradients were last reduced: this rank's wall-clock time without the time in `Processes.waited`, and the
            CPU time of its thread.
        carrier: sends the notices; a handler that reduces gradients may send them along with the gradients.
    """

    if TYPE_CHECKING:

        @property
        def engine(self) -> Engine: ...

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.processes: Processes = SINGLE_PROCESS
        self.alike = 1
        self.data: Processes = SINGLE_PROCESS
        self.shards: VirtualShards | None = None
        self.parts = 1
        self.shard_policy = "auto"
        self.sync_skips = False
        self.asked = False
        self.has_sent = False
        self.met = 0.0, 0.0
        self.carrier: Carrier = SeparateCarrier(SINGLE_PROCESS)
        self._time = 0.0  # rank 0's clock when the ranks last agreed
        self._awaited = math.inf  # the moment at which rank 0 gives notice
        self._looked_at: tuple[tuple[Connection, ...], ...] = ((), (), ())
        self._skips_alone = False

    def join(self, processes: Processes, *, by: Handler, shard_policy: str = "auto", shards: int | None = None) -> None:
        """Train together with other processes, until the handler is detached.

        From then on, the ranks make the same decisions in a run, data is sharded over them, metrics cover all ranks, and
        handlers with ``rank_zero_only`` take part only on rank 0.

        Args:
            processes: what `process_group` returned.
            by: the handler, which also reduces gradients (`Override.REDUCTION`).
            shard_policy: how data is sharded. "round_robin": all ranks have the same data and take turns using its batches,
                found by index or else by reading all of them. "own": each rank has its own data. "auto": DataLoaders over
                map-style datasets and sequences are sharded, unless a sampler already does this; other data raises an error.
            shards: how many shards a step consists of, regardless of which processes compute them; None for one per process.

        Raises:
            ValueError: if another handler does the same, naming both.
        """
        engine = self.engine
        if engine.running:
            raise RuntimeError(f"join({processes!r}) was called during a run; call it before run()")
        engine.overrides.claim(PROCESS_GROUP, by=by, given_back=self.leave)
        self.use(
            processes,
            shard_policy,
            processes.of_data(self.alike) if shards is None else VirtualShards(processes, shards),
        )

    def read_alike(self, ranks: int, *, by: Handler) -> None:
        """Make groups of consecutive ranks read the same data and draw the same random numbers, until the handler is detached.

        Collective. The data is sharded over groups of ``ranks`` ranks; a sample that a whole group reads counts once in
        metrics.

        Raises:
            ValueError: if another handler does the same, naming both.
        """
        self.engine.overrides.claim(_SAME_DATA, by=by, given_back=self.read_apart)
        self._set_alike(ranks)

    def read_apart(self) -> None:
        """Let each rank read data of its own again."""
        self._set_alike(1)

    def _set_alike(self, ranks: int) -> None:
        self.alike = ranks
        self._set_data(self.processes.of_data(ranks))

    def _set_data(self, data: Processes) -> None:
        self.data = data
        self.shards = data if isinstance(data, VirtualShards) else None
        self.parts = self.processes.world_size if self.shards is None else self.shards.world_size

    def leave(self) -> None:
        """Train as a single process again."""
        self.use(SINGLE_PROCESS, "auto")

    def use(self, processes: Processes, shard_policy: str, data: Processes | None = None) -> None:
        """Take these processes, and connect the handlers of rank 0 where this is rank 0 now."""
        before, self.processes, self.shard_policy = self.processes, processes, shard_policy
        self._set_data(processes if data is None else data)
        if processes is not before:
            self.carrier = SeparateCarrier(processes)
            self.engine.handlers.settle_rank_zero_only()

    @property
    def alone(self) -> bool:  # type: ignore[override]
        """Whether there is nobody to agree with."""
        # One process that computes all shards decides as several processes do.
        return not self.processes.distributed and self.shards is None

    def takes_part(self, handler: Handler) -> bool:
        """Whether a handler takes part in this process."""
        return not handler.rank_zero_only or self.processes.is_rank_zero

    def begin_run(self) -> None:
        """Agree on what the ranks have to have in common before a run: rank 0's id of the run, seed and clock."""
        engine = self.engine
        self.asked = self.sync_skips = self.has_sent = False
        self._awaited = math.inf
        if not self.processes.distributed:
            return
        try:
            given = engine.snapshots.run_id, engine.seed, time.monotonic()
            run_id, engine.seed, self._time = self.processes.broadcast(given)
        except Exception as error:
            if lost_another(error):
                error.add_note(
                    "the ranks could not start a run together. Call run() and evaluate() either on all ranks or on "
                    "none. If your script already does this, then either a rank has ended or an error in the previous "
                    "run closed the connections; restart the script"
                )
                for rank in self.processes.ended():
                    error.add_note(f"{rank} has ended")
            raise
        engine.snapshots.begin_lineage(engine.snapshots.origin, run_id)

    # ---- inside an iteration --------------------------------------------------------------------------------------

    def send_notice(self, update: UpdateState, *, computed: bool = False) -> tuple[Tensor, Tensor] | None:
        """Tell the other ranks whether this one has anything to say that they cannot know.

        It is sent once in a window, before the gradients are reduced. What is asked for later waits for the next one.

        Args:
            update: the update whose window closes.
            computed: whether the gradients of this rank are complete; else the backward of one more loss is to come.

        Returns:
            What the backward starts from beside the loss; see `Carrier.send`.
        """
        self.has_sent = True
        return self.carrier.send(update, self.notice(update, computed=computed))

    def notice(self, update: UpdateState, *, computed: bool) -> bool:
        """Whether this rank has anything to say; see `send_notice`."""
        window = update.window
        return (
            window.held + (not computed) != window.size
            or update.weight is not ONE
            or window.extra_weight is not ZERO
            or update.skipped is not None
            or self.has_question()
        )

    def has_question(self) -> bool:
        """Whether this rank asks for anything, may skip the step once the gradients are ready, or knows of a moment that came."""
        return (
            self._may_skip_alone()
            or self.engine.boundary.asks
            or (self.processes.is_rank_zero and time.monotonic() >= self._awaited)
        )

    def noticed(self, update: UpdateState) -> bool:
        """Whether any rank has anything to say, once the gradients are reduced; if so, the ranks go on with `sum`."""
        self.has_sent = self.sync_skips = False
        noticed = self.carrier.receive(update)
        self.met = time.perf_counter() - self.processes.waited, time.thread_time()
        return noticed

    def sum(self, *numbers: float) -> list[float]:
        """The sums of these numbers over the ranks; they learn with it whether one asks for anything, and the time."""
        now = time.monotonic() if self.processes.is_rank_zero else 0.0
        *sums, asking, skipping, now = self.processes.sum(
            *numbers, self.engine.boundary.asks, self._may_skip_alone(), now
        )
        self._learn(asking > 0, skipping > 0, now)
        return sums

    def exchange(self, value: Any) -> list[Any]:
        """As `sum`, for any value: that of each rank, in their order."""
        said = value, self.engine.boundary.asks, self._may_skip_alone(), time.monotonic()
        values, asking, skipping, times = zip(*self.processes.gather(said), strict=True)
        self._learn(any(asking), any(skipping), times[0])
        return list(values)

    def _learn(self, asking: bool, skipping: bool, now: float) -> None:
        """Note what the ranks have exchanged: whether one asks for anything or may skip the step, and rank 0's clock."""
        self._time, self._awaited = now, math.inf
        self.sync_skips = skipping
        if asking:
            self.asked = True
            self.engine.boundary.wake()

    @property
    def step(self) -> type[Step]:
        """The kind of step that a run makes, chosen once as it begins."""
        if self.shards is not None:
            from .shard_step import ShardedStep  # a run without shards does not load it

            return ShardedStep
        return DistributedStep if self.processes.distributed else Step

    def agree(self) -> None:
        """Let the ranks agree on whether one asks for anything, outside of an iteration and unless the run is stopped."""
        if not self.alone and self.engine.state.stop_reason is None:
            self.sum()

    def gather(self, own: Any) -> list[Any]:
        """What each rank asks for, by rank; where all know that one does."""
        self.asked = False
        return self.processes.gather(own)

    def _may_skip_alone(self) -> bool:
        """Whether a receiver on this rank may skip a step once the gradients are ready, and not on all ranks."""
        signals = self.engine.iteration_signals
        after_notice = (
            signals.backward_completed.connections,
            signals.gradients_ready.connections,
            signals.step_started.connections,
        )
        if any(one is not other for one, other in zip(after_notice, self._looked_at, strict=False)):
            self._looked_at = after_notice
            self._skips_alone = any(self._skips(one) for connections in after_notice for one in connections)
        return self._skips_alone

    def _skips(self, connection: Connection) -> bool:
        return (
            connection.phase < Phase.RECORD
            and (connection.writes is None or not connection.writes.isdisjoint({"step", "stop"}))
            and not self.decides_alike(connection.owner)
        )

    def decides_alike(self, name: str | None) -> bool:
        """Whether this is the name of a handler that decides on all ranks alike; see `Handler.decides_alike`."""
        handlers = self.engine.handlers
        return name is not None and name in handlers and handlers[name].decides_alike

    # ---- the clock ------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """The wall-clock time in seconds, for measuring durations; with several ranks, rank 0's time when they last agreed."""
        return self._time if self.processes.distributed else time.monotonic()

    def has_come(self, moment: float) -> bool:
        """Whether a time has been reached, the same on all ranks; if not, rank 0 notifies the others once it has."""
        if not self.processes.distributed:
            return time.monotonic() >= moment
        if self._time < moment:
            self._awaited = min(self._awaited, moment)
        return self._time >= moment
