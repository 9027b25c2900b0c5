"""Logs a run to MLflow."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from signalfire import Interval
from signalfire.authoring import check_name

from ._common.remote_logging import Item, RemoteLogger, Status, Stored

__all__ = ["MLflowLogger"]

_METRICS, _PARAMS, _LENGTH = 1000, 100, 6000  # what one request of MLflow takes


class MLflowLogger(RemoteLogger):
    """Sends losses, rates, metrics and what is logged with ``engine.log`` to MLflow.

    `RemoteLogger` says what it guarantees.

    MLflow's step is the iteration. Images are artifacts, such as ``images/val/worst/200.png``; texts and histograms are, too.
    Hyperparameters are params; MLflow lets no param change, so that a new value of a resumed run is a tag, ``changed/lr``. Our id
    of the run is the tag ``signalfire.run``, and the text of an error the tag ``error``. MLflow stores infinity as the largest
    number that there is, and takes letters, digits and ``_-. :/`` in names: others become ``_``.

    Args:
        experiment: Name of the experiment; it is created if it does not exist.
        folder: Folder of the run, for the file of what was not sent.
        uri: Address of the tracking server or database, such as "sqlite:///mlflow.db". By default what MLflow is set to, as by
            MLFLOW_TRACKING_URI.
        title: Name of the run in MLflow; it makes one up by default.
        every, run_id, keep_different, capacity, timeout: As for `RemoteLogger`.

    Raises:
        ImportError: If MLflow, or SQLAlchemy for its databases, is not installed: ``pip install signalfire[mlflow]``.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from mlflow import MlflowClient
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.25)
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> engine = Engine(update, model=model, seed=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     database = f"sqlite:///{folder}/mlflow.db"
        ...     _ = engine.attach(MLflowLogger("ones", folder, uri=database, every="1it"))
        ...     _ = engine.run([(torch.ones(4, 1), torch.ones(4, 1))] * 3, max_epochs=1)
        ...     client = MlflowClient(database)
        ...     [run] = client.search_runs([client.get_experiment_by_name("ones").experiment_id])
        ...     rows = client.get_metric_history(run.info.run_id, "train/loss")
        >>> run.info.status, [(row.step, row.value) for row in rows]
        ('FINISHED', [(1, 1.0), (2, 0.25), (3, 0.0625)])
    """

    needs: ClassVar[tuple[Sequence[str], str]] = (("mlflow", "sqlalchemy"), "mlflow")

    def __init__(
        self,
        experiment: str,
        folder: str | os.PathLike[str],
        *,
        uri: str | None = None,
        title: str | None = None,
        every: str | Interval = "10it",
        run_id: str | None = None,
        keep_different: bool = False,
        capacity: int = 1000,
        timeout: float = 30.0,
        name: str | None = None,
    ) -> None:
        self.uri = check_name(self, "uri", uri)
        self.title = check_name(self, "title", title)
        if not isinstance(experiment, str) or not experiment:
            raise TypeError(f"MLflowLogger(experiment={experiment!r}): expected the name of an experiment")
        self.experiment = experiment
        self._client: Any = None
        self._mlflow_id = ""
        super().__init__(
            folder,
            every=every,
            run_id=run_id,
            keep_different=keep_different,
            capacity=capacity,
            timeout=timeout,
            name="mlflow_logger" if name is None else name,
        )

    def open(self, run_id: str, hyperparameters: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient

        if self._client is None:
            self._client = MlflowClient(self.uri)
        self._mlflow_id = self._find(run_id) or self._create(run_id)
        run = self._client.get_run(self._mlflow_id)
        if run.info.status != "RUNNING":
            self._client.update_run(self._mlflow_id, status="RUNNING")
        self._log_parameters(hyperparameters, run.data.params)

    def _experiment_id(self) -> str:
        experiment = self._client.get_experiment_by_name(self.experiment)
        return str(self._client.create_experiment(self.experiment) if experiment is None else experiment.experiment_id)

    def _find(self, run_id: str) -> str:
        found = self._client.search_runs([self._experiment_id()], f"tags.`signalfire.run` = '{run_id}'")
        return found[0].info.run_id if found else ""

    def _create(self, run_id: str) -> str:
        run = self._client.create_run(self._experiment_id(), run_name=self.title, tags={"signalfire.run": run_id})
        return str(run.info.run_id)

    def _log_parameters(self, given: Mapping[str, Any], logged: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        texts = {self.clean(name): str(value)[:_LENGTH] for name, value in given.items()}
        new = [Param(name, text) for name, text in texts.items() if name not in logged]
        for begin in range(0, len(new), _PARAMS):
            self._client.log_batch(self._mlflow_id, params=new[begin : begin + _PARAMS])
        for name, text in texts.items():
            if logged.get(name, text) != text:
                self._client.set_tag(self._mlflow_id, f"changed/{name}", text)

    def stored(self, run_id: str, after: int) -> Iterable[Stored]:
        mlflow_id = self._find(run_id)
        for name in self._client.get_run(mlflow_id).data.metrics if mlflow_id else ():
            points = self._client.get_metric_history(mlflow_id, name)
            for point in sorted(points, key=lambda point: (point.step, point.timestamp)):
                if point.step >= after:
                    yield name, point.step, point.value

    def send(self, items: Sequence[Item]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, _milliseconds(item), item.iteration)
            for item in items
            if item.kind == "numbers"
            for name, value in item.values.items()
        ]
        for begin in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._mlflow_id, metrics=metrics[begin : begin + _METRICS])
        for item in items:
            for name, value in item.values.items() if item.kind != "numbers" else ():
                self._send_file(item, name, value)

    def _send_file(self, item: Item, name: str, value: Any) -> None:
        place = f"{item.kind}s/{name}/{item.iteration}"
        if item.kind == "image":
            from PIL import Image

            self._client.log_image(self._mlflow_id, Image.open(io.BytesIO(value)), f"{place}.png")
        elif item.kind == "text":
            self._client.log_text(self._mlflow_id, value, f"{place}.md")
        else:
            counts, edges = value
            self._client.log_text(self._mlflow_id, json.dumps({"counts": counts, "edges": edges}), f"{place}.json")

    def close_run(self, status: Status, error: str | None) -> None:
        if error is not None:
            self._client.set_tag(self._mlflow_id, "error", error[:_LENGTH])
        if status != "RUNNING":
            self._client.set_terminated(self._mlflow_id, status)

    def clean(self, name: str) -> str:
        return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)

    def as_stored(self, value: float) -> float:
        return {float("inf"): 1.7976931348623157e308, float("-inf"): -1.7976931348623157e308}.get(value, value)


def _milliseconds(item: Item) -> int:
    """Later values of one iteration have later times, by which MLflow orders them."""
    return int(item.time * 1000) + max(item.before.values(), default=0)
