"""Scores that are written after those who monitor them have looked: they are read one event late, with other weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..authoring.monitor import Monitor

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["LateScores"]


class LateScores:
    """Notes in which iteration monitored metrics are written, but for those of included handlers; `Monitor` compares.

    Args:
        engine: the engine; its handlers have announced their metrics.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._listeners = engine.state.metrics.listeners
        handlers = engine.handlers.values() if engine.training else ()
        monitored = {one.metric for handler in handlers for one in vars(handler).values() if isinstance(one, Monitor)}
        self._watched = {metric for metric in monitored if not _is_included(engine, metric)}
        if self._watched:
            self._listeners.append(self._note)

    def _note(self, name: str, value: Any) -> None:
        if name in self._watched:
            self._engine.state.metrics.written[name] = self._engine.state.iteration

    def stop(self) -> None:
        """Leave the metrics as they were."""
        if self._watched:
            self._listeners.remove(self._note)
            self._engine.state.metrics.written.clear()


def _is_included(engine: Engine, metric: str) -> bool:
    """Whether an included handler writes a metric."""
    writer = engine.handlers.get(engine.state.metrics.owners.get(metric, ""))
    return writer is not None and type(writer).__module__.startswith("signalfire.")
