"""The wiring of an engine: which receivers run at which event, in which order."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..authoring.markup import preformatted
from ..core.connection import Connection, Phase
from ..core.events import EventEnum, Events
from .evaluation import inherited

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["Wiring"]


class Wiring:
    """A snapshot of the receivers of every event, in the order in which they run, and which of them evaluators inherit.

    Example:
        >>> from signalfire import Engine, Events, Update
        >>> engine = Engine(Update.from_function(lambda engine, batch: None))
        >>> @engine.on(Events.ITERATION_COMPLETED(every=100))
        ... def show(engine):
        ...     print(engine.state.iteration)
        >>> print(engine.wiring())
        ITERATION_COMPLETED
          CHANGE    show (every=100)
    """

    def __init__(self, engine: Engine) -> None:
        signals = [signal for signal in engine.signals.all() if signal.connections]
        place = {event: number for number, event in enumerate(Events)}
        signals.sort(key=lambda signal: place.get(signal.event, len(place)))  # type: ignore[call-overload]
        self.rows: list[tuple[EventEnum, tuple[Connection, ...]]] = [(one.event, one.connections) for one in signals]
        self.inherited = list(dict.fromkeys(repr(one) for _, one in (inherited(engine) if engine.training else ())))
        self.disabled = [name for name, handler in engine.handlers.items() if not handler.enabled]

    def __str__(self) -> str:
        lines = []
        for event, connections in self.rows:
            lines.append(event.name if type(event) is Events else str(event))
            lines += [f"  {one.phase.name:<9} {describe(one)}" for one in connections]
        if self.inherited:
            lines.append(f"inherited by evaluators: {', '.join(self.inherited)}")
        if self.disabled:
            lines.append(f"disabled: {', '.join(self.disabled)}")
        return "\n".join(lines) or "nothing is attached"

    def _repr_html_(self) -> str:
        return preformatted(self)

    def draw(self, path: str | Path, *, internals: bool = False) -> None:
        """Plot the wiring: a row for each event in the order of the loop, a column for each phase.

        Args:
            path: Path of the image; the suffix selects the format, such as ``.png`` or ``.svg``.
            internals: Whether to plot receivers, too, that only check something and write nothing.

        Raises:
            ImportError: without matplotlib, which the extra ``examples`` installs.
        """
        from matplotlib.figure import Figure

        rows = self._drawn(internals)
        heights = [max(len(labels) for labels in by_phase) for _, by_phase in rows]
        total = sum(heights) + 1
        figure = Figure(figsize=(9.5, 0.42 * total + 0.3), layout="constrained")
        axes = figure.add_subplot()
        axes.set(xlim=(-1.6, 6), ylim=(total, 0))
        axes.axis("off")
        for phase in Phase:
            axes.text(phase + 0.5, 0.5, phase.name, ha="center", va="center", weight="bold", size=10)
        y = 1.0
        for number, ((name, by_phase), height) in enumerate(zip(rows, heights, strict=True)):
            if number % 2 == 0:
                axes.axhspan(y, y + height, color="#f2f2f2", lw=0)
            axes.text(-1.55, y + 0.5, name, va="center", size=8, weight="bold")
            for phase, labels in zip(Phase, by_phase, strict=True):
                for row, label in enumerate(labels):
                    axes.text(phase + 0.5, y + row + 0.5, label, ha="center", va="center", size=7.5,
                              bbox={"boxstyle": "round,pad=0.25", "fc": f"C{phase}", "alpha": 0.25, "lw": 0})  # fmt: skip
            y += height
        figure.savefig(path, dpi=120)

    def _drawn(self, internals: bool) -> list[tuple[str, list[list[str]]]]:
        """The name of each event that is drawn, with the labels of its receivers in each phase."""
        found = []
        for event, connections in self.rows:
            chosen = [one for one in connections if internals or one.writes is None or one.writes]
            # The handler, and its method below.
            labels = [[describe(one).replace(".", "\n", 1) for one in chosen if one.phase is phase] for phase in Phase]
            if chosen:
                found.append((event.name, labels))
        return found


def describe(connection: Connection) -> str:
    """The receiver with its filter: ``checkpoint.save (every=2)``."""
    return f"{connection!r}" if connection.filter is None else f"{connection!r} ({connection.filter})"
