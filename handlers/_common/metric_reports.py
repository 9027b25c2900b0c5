"""Base of `Reporting` and `OptunaPruning`: each new value of a metric is reported, and the answer may stop the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.authoring import Monitor

from .ranks import CHECK_METRIC

__all__ = ["MetricReports"]


class MetricReports(Handler):
    """Calls `report` on rank 0 with each new value of a metric; all ranks get the answer, and stop if it is True.

    Attributes:
        reported: Number of values reported so far; kept when a run resumes.
        reason: The reason of a requested stop, in ``state.stop_reason``.
    """

    reason: ClassVar[str] = "pruned"
    trains = True
    decides_alike = True

    def __init__(self, monitor: str, *, mode: Literal["min", "max"] | None = None, name: str | None = None) -> None:
        super().__init__(name=name)
        self.monitor = Monitor(type(self).__name__, monitor, mode)
        self.reported = 0

    def report(self, value: float, step: int) -> bool:
        """Report a value; returns whether to stop the run.

        Args:
            value: The new value.
            step: Number of values before it.
        """
        raise NotImplementedError

    @on(Events.STARTED, phase=Phase.CONTROL, reads=["metrics"], writes=[])
    def check_metric(self, engine: Engine) -> None:
        """Find the metric's direction; raise an error for a name that nobody announced or writes."""
        self.monitor.start(engine, self.name)

    @on(
        Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED,
        phase=Phase.CONTROL,
        reads=["metrics", "processes"],
        writes=["stop"],
    )
    def report_value(self, engine: Engine) -> None:
        """Report a new value, and stop the run if asked to."""
        value = self.monitor.new_value(engine)
        if value is None:
            return
        step, self.reported = self.reported, self.reported + 1
        answer: tuple[bool, str | None] = False, None
        error: Exception | None = None
        if engine.processes.is_rank_zero:
            try:
                answer = bool(self.report(value, step)), None
            except Exception as problem:  # the other ranks wait for an answer, and end with this one
                error, answer = problem, (False, f"{type(problem).__name__}: {problem}")
        stop, failed = engine.processes.broadcast(answer)
        if error is not None:
            raise error
        if failed is not None:
            raise RuntimeError(f"{self.name!r} failed on rank 0: {failed}")
        if stop:
            engine.terminate(self.reason, by=self.name)

    @on(Events.EPOCH_COMPLETED, phase=Phase.CONTROL, rank=CHECK_METRIC, reads=["metrics"], writes=[])
    def check_metric_exists(self, engine: Engine) -> None:
        """Raise an error if the metric does not exist, or differs between the ranks of a distributed run."""
        self.monitor.require(engine)

    def state_dict(self) -> dict[str, Any]:
        return {"monitor": self.monitor.state_dict(), "reported": self.reported}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reported = state["reported"]
        self.monitor.load_state_dict(state["monitor"])
