"""Keeps all metric values of a run in memory, to be queried, tabulated or plotted."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.authoring import check_bool, check_int, check_stream, table
from signalfire.core.state import as_number

from ._common.new_values import NewValues

__all__ = ["History"]

STAGE = re.compile(r"^(train|training|val|valid|validation|test|eval|evaluation)[/_.-](?=.)", re.IGNORECASE)
"""The prefixes of metric names that give the stage of a measurement."""


class History(Handler):
    """Keeps every value of every scalar metric in memory, with its epoch and iteration, to query, tabulate or plot.

    Values may come in every iteration, as from `GradientNorms`, or with evaluations and epochs. Checkpoints contain the history,
    so its length is limited. If a metric has more than ``keep`` values, every second value of the older half is dropped, as often
    as necessary; the first value stays.

    Args:
        keep: Maximum number of values to keep per metric, at least 4; 10,000 take about 250 kB of a checkpoint. None keeps all.
        print_epochs: Whether rank 0 prints a table row at the end of each epoch, even if the last epoch does not complete. The
            columns are the recorded or announced metrics; the header is repeated only when a metric is new.
        file: Stream to print to; standard output by default.

    Attributes:
        dropped: Number of values dropped, by metric; empty while the history is complete.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Events, Phase, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine, history = Engine(update, model=torch.nn.Linear(2, 1), seed=0), History()
        >>> _ = engine.attach(history)
        >>> @engine.on(Events.EPOCH_COMPLETED, phase=Phase.PREPARE)
        ... def measure(engine):
        ...     engine.log("score", [0.5, 0.75, 0.625][engine.state.epoch - 1])
        >>> _ = engine.run([(torch.ones(4, 2), torch.ones(4, 1))] * 10, max_epochs=3)
        >>> history["score"]
        [0.5, 0.75, 0.625]
        >>> history.records["score"][1]  # its epoch, its iteration and the value
        (2, 20, 0.75)
    """

    def __init__(
        self,
        *,
        keep: int | None = 10_000,
        print_epochs: bool = False,
        file: TextIO | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.keep = None if keep is None else check_int(self, "keep", keep, least=4)
        self.file = check_stream(self, "file", file)
        self.print_event = (
            Events.EPOCH_COMPLETED | Events.COMPLETED if check_bool(self, "print_epochs", print_epochs) else None
        )
        self.dropped: dict[str, int] = {}
        self._records: dict[str, list[tuple[int, int, float]]] = {}
        self._new = NewValues()
        self._columns: list[str] = []  # of the printed table
        self._printed: tuple[int, int] | None = None  # the epoch and the iteration of the last row

    @on(Events.CHECKPOINT_LOADED, phase=Phase.PREPARE, reads=["metrics"], writes=[])
    def rename(self, engine: Engine) -> None:
        """Continue the records of a state that used different metric names."""
        renamed = engine.state.metrics.renamed
        self._records = {renamed.get(name, name): records for name, records in self._records.items()}
        self._new.seen = {renamed.get(name, name): count for name, count in self._new.seen.items()}

    @on(Events.STARTED, phase=Phase.RECORD, reads=["metrics"], writes=[])
    def begin(self, engine: Engine) -> None:
        """Collect the values of this run; unrecorded values of an earlier one are kept as new."""
        self._new.start(engine, keep_seen=True)
        self._columns, self._printed = [], None

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

    @on("print_event", phase=Phase.RECORD, reads=["metrics"], writes=["files"])
    def print_row(self, engine: Engine) -> None:
        """Print the row of this epoch, unless it was printed already or nothing was measured in it."""
        state = engine.state
        row = self._by_epoch().get(state.epoch)
        if row is None or self._printed == (state.epoch, state.iteration) or not engine.processes.is_rank_zero:
            return
        self._printed = state.epoch, state.iteration
        numbers = [
            one for one in state.metrics.owners if one not in state.metrics or as_number(state.metrics[one]) is not None
        ]
        lines = []
        if new := [one for one in dict.fromkeys([*self.records, *numbers]) if one not in self._columns]:
            self._columns += new
            lines.append("  ".join(["epoch", *(f"{name:>10}" for name in self._columns)]))
        cells = (f"{_shown(row.get(name)):>{max(10, len(name))}}" for name in self._columns)
        lines.append("  ".join([f"{state.epoch:>5}", *cells]))
        print("\n".join(lines), file=self.file, flush=True)

    def _thin_out(self, name: str) -> None:
        """While there are too many values of a metric, drop every second of the older half."""
        while self.keep is not None and len(records := self._records[name]) > self.keep:
            half = len(records) // 2
            older = records[:half:2]
            self._records[name] = older + records[half:]
            self.dropped[name] = self.dropped.get(name, 0) + half - len(older)

    @on(Events.ENDED, phase=Phase.RECORD, reads=["metrics"], writes=[])
    def end(self, engine: Engine) -> None:
        """Record the remaining values, even after an error."""
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
        if name not in self.records:  # "val/loss" is "val_loss"
            name = next((one for one in self.records if one.replace("/", "_") == name.replace("/", "_")), name)
        if name not in self.records:
            raise KeyError(f"no metric {name!r} was recorded; recorded metrics: {', '.join(self.records) or 'none'}")
        return [value for _, _, value in self.records[name]]

    def frame(self) -> Any:
        """The recorded values, one row per iteration that has any, with the columns "epoch", "iteration" and the metrics.

        Returns:
            A ``pandas.DataFrame`` if pandas is installed, with NaN where a metric was not measured; otherwise a dict of columns,
            which are lists of equal length, with None in these places. If a metric was recorded twice in an iteration, the last
            value counts.
        """
        rows: dict[tuple[int, int], dict[str, float]] = {}
        for name, records in self.records.items():
            for epoch, iteration, value in records:
                rows.setdefault((iteration, epoch), {})[name] = value
        places = sorted(rows)
        columns: dict[str, list[Any]] = {
            "epoch": [epoch for _, epoch in places],
            "iteration": [iteration for iteration, _ in places],
        }
        try:
            import pandas
        except ImportError:
            return columns | {name: [rows[place].get(name) for place in places] for name in self.records}
        metrics = {name: [rows[place].get(name, math.nan) for place in places] for name in self.records}
        return pandas.DataFrame(columns | metrics)

    def table(self) -> str:
        """A text table: one row per epoch, with the last kept value of each metric in that epoch."""
        cells = self._cells()
        widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)

    def _repr_html_(self) -> str:
        return table(self._cells())

    def _cells(self) -> list[list[str]]:
        rows, names = self._by_epoch(), self.names
        return [
            ["epoch", *names],
            *([str(epoch), *(_shown(rows[epoch].get(name)) for name in names)] for epoch in sorted(rows)),
        ]

    def _by_epoch(self) -> dict[int, dict[str, float]]:
        rows: dict[int, dict[str, float]] = {}
        for name, records in self.records.items():
            for epoch, _, value in records:
                rows.setdefault(epoch, {})[name] = value
        return rows

    def plot(self, path: str | Path | BinaryIO, *names: str) -> None:
        """Plot metrics over iterations, in stacked panels.

        Training and validation values of a metric share a panel, such as "loss", "train_loss", "val/loss" and "test-loss". If
        one of these exists, "digits/loss" of a data set "digits" shares its panel.

        Args:
            path: Path of the image, whose extension selects the format; or an open binary file, for a PNG.
            names: Metrics to plot, each with the metrics that share its panel; all by default. "train_loss,norm" plots both in
                one panel, and "loss," plots "loss" alone.

        Raises:
            ImportError: If matplotlib is not installed; the extra ``examples`` includes it.
            KeyError: For a name that was not recorded.
            ValueError: If nothing was recorded.
        """
        from matplotlib.figure import Figure

        if isinstance(path, str) and path in self.names:
            raise ValueError(
                f"History.plot({path!r}): {path!r} is a metric name, but the first argument is the path of the plot; "
                f"write plot('curves.png', {path!r})"
            )
        if (wrong := next((one for one in names if not isinstance(one, str)), None)) is not None:
            raise TypeError(
                f"History.plot(..., {wrong!r}): expected metric names, as in plot('curves.png', 'loss', 'accuracy')"
            )
        panels = self._panels(names)
        if not panels:
            raise ValueError("History.plot(): nothing was recorded; attach Metrics or Validation before run()")
        figure = Figure(figsize=(8, 0.6 + 2.4 * len(panels)), layout="constrained")
        for axes, (title, panel) in zip(
            figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0], panels, strict=True
        ):
            for name, color in zip(panel, _colors(panel), strict=True):
                self._draw(axes, name, color)
            axes.set_title(_wrapped(title, 60), loc="left", fontsize="large")
            axes.grid(alpha=0.3)
            if len(panel) > 1:  # beside the panel, where it covers no curve
                axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        axes.set_xlabel("iteration")
        axes.xaxis.get_major_locator().set_params(integer=True)
        figure.savefig(path, dpi=120)

    def _draw(self, axes: Any, name: str, color: str) -> None:
        """Draw the values of a metric, and a star at the best one of a validation, where it is known which is best."""
        values = self[name]
        iterations = [iteration for _, iteration, _ in self.records[name]]
        best = None
        if _stage(name) == "validation" and self.engine is not None:
            best = {"min": min, "max": max}.get(self.engine.state.metrics.directions.get(name, ""))
        label = _wrapped(name, 28)
        finite = [
            (value, iteration) for value, iteration in zip(values, iterations, strict=True) if math.isfinite(value)
        ]
        if best is not None and finite:
            value, iteration = best(finite, key=lambda one: one[0])
            axes.plot(iteration, value, "*", color=color, markersize=11, zorder=3)
            label += f"\nbest {value:.4g} at {iteration}"
        axes.plot(iterations, values, label=label, color=color, marker="." if len(values) < 40 else None)

    def _panels(self, chosen: tuple[str, ...]) -> list[tuple[str, list[str]]]:
        """Titles of panels, each with its metrics."""
        stages = {STAGE.sub("", name) for name in self.names}
        groups: dict[str, list[str]] = {}
        for name in self.names:
            last = name.rpartition("/")[2]
            groups.setdefault(
                last if STAGE.sub("", last) == last and last in stages else STAGE.sub("", name), []
            ).append(name)
        if not chosen:
            return list(groups.items())
        panels = list(self._chosen_panels(chosen, groups))
        return [panel for place, panel in enumerate(panels) if panel not in panels[:place]]

    def _chosen_panels(self, chosen: tuple[str, ...], groups: dict[str, list[str]]) -> Iterator[tuple[str, list[str]]]:
        for name in chosen:
            if "," in name:
                panel = [one.strip() for one in name.split(",") if one.strip()]
                if not panel:
                    raise ValueError(f"History.plot(..., {name!r}): expected metric names separated by commas")
                yield ", ".join(panel), panel
                continue
            found = [(title, panel) for title, panel in groups.items() if name == title or name in panel]
            yield found[0] if found else (name, [name])

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


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


_STAGES = {"train": "training", "training": "training", "test": "test"}
_COLORS = {"training": "C0", "validation": "C1", "test": "C2"}
"""The same color for the same stage, in each panel and each plot."""


def _stage(name: str) -> str | None:
    """The stage in which a metric is measured, by its name: "training", "validation" or "test"."""
    found = STAGE.match(name.rpartition("/")[2]) or STAGE.match(name)
    return None if found is None else _STAGES.get(found[1].lower(), "validation")


def _colors(panel: list[str]) -> list[str]:
    """The color of each curve: that of its stage, and others where two curves have the same stage, or none."""
    colors: list[str] = []
    others = iter(f"C{number % 10}" for number in range(3, 3 + len(panel)))
    for name in panel:
        color = _COLORS[_stage(name) or "training"]
        colors.append(next(others) if color in colors else color)
    return colors


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width))
