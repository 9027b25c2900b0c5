"""Logs a run to Trackio."""

from __future__ import annotations

import io
import os
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any, ClassVar

from signalfire import Interval

from ._common.remote_logging import Item, RemoteLogger, Status, Stored

__all__ = ["TrackioLogger"]

_LEVELS = {"FINISHED": "INFO", "FAILED": "ERROR", "KILLED": "WARN"}


class TrackioLogger(RemoteLogger):
    """Logs losses, learning rates, metrics and values from ``engine.log`` to Trackio's local database.

    See `RemoteLogger` for the guarantees.

    Trackio's step is the iteration, and the run's name is its id. Images, histograms and texts (as Markdown) have Trackio's
    types. Trackio has no run status, so an alert has the outcome of the run as its title, and the error as its text. Its database
    is in the folder given by TRACKIO_DIR; ``trackio sync`` uploads it.

    Args:
        project: Name of the project.
        folder: Folder of the run, for the file of unsent records.
        every, run_id, keep_different, capacity, timeout: As for `RemoteLogger`.

    Raises:
        ImportError: If trackio is not installed: ``pip install signalfire[trackio]``.

    Example:
        >>> import contextlib
        >>> import os
        >>> import tempfile
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.25)
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> engine = Engine(update, model=model, seed=0)
        >>> # Trackio prints how to show it.
        >>> with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        ...     os.environ["TRACKIO_DIR"] = folder
        ...     logger = TrackioLogger("ones", folder, run_id="first", every="1it")
        ...     _ = engine.attach(logger)
        ...     _ = engine.run([(torch.ones(4, 1), torch.ones(4, 1))] * 3, max_epochs=1)
        ...     stored = list(logger.stored("first", after=0))
        >>> [(step, value) for name, step, value in stored if name == "train/loss"]
        [(1, 1.0), (2, 0.25), (3, 0.0625)]
    """

    needs: ClassVar[tuple[Sequence[str], str]] = (("trackio",), "trackio")

    def __init__(
        self,
        project: str,
        folder: str | os.PathLike[str],
        *,
        every: str | Interval = "10it",
        run_id: str | None = None,
        keep_different: bool = False,
        capacity: int = 1000,
        timeout: float = 30.0,
        name: str | None = None,
    ) -> None:
        if not isinstance(project, str) or not project:
            raise TypeError(f"TrackioLogger(project={project!r}): expected the name of a project")
        self.project = project
        self._run_object: Any = None
        self._count_before = 0
        super().__init__(
            folder,
            every=every,
            run_id=run_id,
            keep_different=keep_different,
            capacity=capacity,
            timeout=timeout,
            name=name,
        )

    def open(self, run_id: str, hyperparameters: Mapping[str, Any]) -> None:
        import trackio

        if self._run_object is not None:
            self._run_object.finish()
        self._run_object = trackio.init(
            self.project,
            name=run_id,
            resume="allow",
            config=dict(hyperparameters),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._count_before = self._count()

    def _rows(self, run_id: str) -> list[dict[str, Any]]:
        from trackio.sqlite_storage import SQLiteStorage

        return list(SQLiteStorage.get_logs(self.project, run_id))

    def stored(self, run_id: str, after: int) -> Iterable[Stored]:
        for row in self._rows(run_id):
            if row["step"] >= after:
                for name, value in row.items():
                    if name not in ("step", "timestamp"):
                        yield name, row["step"], float(value) if isinstance(value, int | float) else None

    def send(self, items: Sequence[Item]) -> None:
        for item in items:
            values = {name: _as_trackio(item, value) for name, value in item.values.items()}
            self._run_object.log(values, step=item.iteration)

    def confirmed(self) -> int | None:
        return self._count() - self._count_before

    def _count(self) -> int:
        """How many rows of the run are in the database; Trackio writes them in a separate thread."""
        from trackio.sqlite_storage import SQLiteStorage

        path = SQLiteStorage.get_project_db_path(self.project)
        if self._run_object is None or not path.exists():
            return 0
        with closing(sqlite3.connect(path, timeout=10)) as connection:
            query = "SELECT COUNT(*) FROM metrics WHERE run_id = ?"
            return int(connection.execute(query, [self._run_object.id]).fetchone()[0])

    def close_run(self, status: Status, error: str | None) -> None:
        import trackio

        run, self._run_object = self._run_object, None
        if run is None:
            return
        if status != "RUNNING":
            run.alert(status, error, level=trackio.AlertLevel[_LEVELS[status]])
        run.finish()


def _as_trackio(item: Item, value: Any) -> Any:
    import trackio

    if item.kind == "image":
        from PIL import Image

        return trackio.Image(Image.open(io.BytesIO(value)))
    if item.kind == "text":
        return trackio.Markdown(value)
    return trackio.Histogram(np_histogram=tuple(value)) if item.kind == "histogram" else value
