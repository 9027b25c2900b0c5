"""Keeps all metric values of a run in memory, to be queried, tabulated or plotted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.checks import check_int

from ._common.new_values import NewValues

__all__ = ["History"]


class History(Handler):
    """Records every new value of every scalar metric, with the epoch and iteration in which it was measured.

    Values may come in every iteration, as those of `GradientNorms` do, or with evaluations and epochs. The history is part of
    every checkpoint, so its length is limited: of a metric with more than ``keep`` values, every second one of the older half is
    dropped, as often as necessary. The newest half is always complete, and the first value stays.

    Args:
        keep: Values to keep of each metric at most, at least 4; 10,000 take about 250 kB of a checkpoint. None keeps all.

    Attributes:
        dropped: Number of values dropped, by metric; empty while the history is complete.

    Example:
        >>> history = History()
        >>> history.names
        []
    """

    def __init__(self, *, keep: int | None = 10_000, name: str | None = None) -> None:
        super().__init__(name=name)
        self.keep = None if keep is None else check_int(self, "keep", keep, least=4)
        self.dropped: dict[str, int] = {}
        self._records: dict[str, list[tuple[int, int, float]]] = {}
        self._new = NewValues()

    @on(Events.STARTED, phase=Phase.RECORD, reads=["metrics"], writes=[])
    def begin(self, engine: Engine) -> None:
        """Collect the values of this run; those of an earlier one that are not recorded yet are kept as new."""
        self._new.start(engine, keep_seen=True)

    @on(
        Events.EVALUATION_COMPLETED | Events.EPOCH_COMPLETED | Events.COMPLETED,
        phase=Phase.RECORD,
        reads=["metrics"],
        writes=[],
    )
    def record(self, engine: Engine) -> None:
        """Record the new values."""
        for epoch, iteration, _, values in self._new.take(engine):
            for name, value in values.items():
                records = self._records.setdefault(name, [])
                records.append((epoch, iteration, value))
                self._thin_out(name)

    def _thin_out(self, name: str) -> None:
        """While there are too many values of a metric, drop every second of the older half."""
        while self.keep is not None and len(records := self._records[name]) > self.keep:
            half = len(records) // 2
            older = records[:half:2]
            self._records[name] = older + records[half:]
            self.dropped[name] = self.dropped.get(name, 0) + half - len(older)

    @on(Events.ENDED, phase=Phase.RECORD, reads=["metrics"], writes=[])
    def end(self, engine: Engine) -> None:
        """Record what is left, also after an error."""
        self.record(engine)
        self._new.stop()

    @property
    def records(self) -> dict[str, list[tuple[int, int, float]]]:
        """A list of (epoch, iteration, value) for each name, in the order of recording."""
        if (engine := self.engine) is not None and self._new.collects:
            self.record(engine)
        return self._records

    @property
    def names(self) -> list[str]:
        """The names of the recorded metrics."""
        return list(self.records)

    @property
    def latest(self) -> dict[str, float]:
        """The latest value of every metric."""
        return {name: records[-1][2] for name, records in self.records.items()}

    def __getitem__(self, name: str) -> list[float]:
        """All kept values of one metric.

        Raises:
            KeyError: If the metric was not recorded; the message names those that were.
        """
        if name not in self.records:
            raise KeyError(f"no metric {name!r} was recorded; recorded metrics: {', '.join(self.records) or 'none'}")
        return [value for _, _, value in self.records[name]]

    def table(self) -> str:
        """A text table: one row per epoch, with the last kept value of each metric in that epoch."""
        rows: dict[int, dict[str, float]] = {}
        for name, records in self.records.items():
            for epoch, _, value in records:
                rows.setdefault(epoch, {})[name] = value
        cells = [["epoch", *self.records]]
        for epoch in sorted(rows):
            cells.append(
                [str(epoch), *(f"{rows[epoch][name]:.4g}" if name in rows[epoch] else "" for name in self.records)]
            )
        widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)

    def plot(self, path: str | Path, *names: str) -> None:
        """Plot metrics over iterations, in panels below each other.

        Args:
            path: Path of the image; its extension selects the format.
            names: Metrics to plot, one panel each; all by default. "train_loss,loss" plots two metrics in one panel.

        Raises:
            ImportError: If matplotlib is not installed; the extra ``examples`` includes it.
            ValueError: If nothing was recorded.
        """
        from matplotlib.figure import Figure

        panels = [name.split(",") for name in names or self.names]
        if not panels:
            raise ValueError("History.plot(): nothing was recorded; attach Metrics or Validation and run")
        figure = Figure(figsize=(7, 2.6 * len(panels)), layout="constrained")
        for place, panel in enumerate(panels, start=1):
            axes = figure.add_subplot(len(panels), 1, place)
            for name in panel:
                values = self[name]
                iterations = [iteration for _, iteration, _ in self.records[name]]
                axes.plot(iterations, values, label=name, marker="." if len(values) < 40 else None)
            axes.set(xlabel="iteration", ylabel=panel[0] if len(panel) == 1 else None)
            axes.grid(alpha=0.3)
            if len(panel) > 1:
                axes.legend()
        figure.savefig(path, dpi=120)

    def state_dict(self) -> dict[str, Any]:
        state = {
            "records": {name: [list(record) for record in records] for name, records in sorted(self.records.items())},
            "seen": dict(sorted(self._new.seen.items())),
        }
        return state | ({"dropped": dict(sorted(self.dropped.items()))} if self.dropped else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._records = {name: [(e, i, v) for e, i, v in records] for name, records in state["records"].items()}
        self._new.load(state)
        self.dropped = dict(state.get("dropped", {}))
        for name in self._records:
            self._thin_out(name)
