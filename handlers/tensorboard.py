"""TensorBoard logs: losses, learning rates, metrics, images, figures, texts, histograms and hyperparameters."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from tensorboardX import SummaryWriter
from tensorboardX import summary as summaries
from tensorboardX.proto.summary_pb2 import Summary
from torch import nn
from torch.utils.hooks import RemovableHandle

from signalfire import Engine, Events, Interval, Phase, on
from signalfire.authoring import Histogram, check_bool, unchanged_random_state, warn
from signalfire.distributed import is_sharded
from signalfire.runs.restore import Buffers, Modes

from ._common.claims import FILE
from ._common.event_files import EventWriter, drawn, png
from ._common.folders import check_folder, open_folder
from ._common.scalars import Record, ScalarLogger

__all__ = ["TensorBoardLogger"]


class TensorBoardLogger(ScalarLogger):
    """Logs losses, learning rates, metrics and values from ``engine.log`` to TensorBoard.

    Training losses and metrics are under "train/", those of evaluations under "val/", and learning rates under "lr". The
    horizontal axis is the iteration. Hyperparameters (``engine.log.hyperparameters``) and the last values of the metrics form
    one row of the HPARAMS tab, in the same file. `Histograms` logs the distributions of weights and gradients.

    A resumed run hides the values that an earlier run logged after the resumed checkpoint, and a new training run hides all
    earlier values, so each curve is clean. The earlier files are kept. The file is closed when the run ends, even after an
    exception, and flushed to disk before a checkpoint refers to it.

    Args:
        folder: TensorBoard's log folder, created if it does not exist.
        every: Interval in iterations, such as "10it", for losses, learning rates and per-iteration metrics. All other new metric
            values are written with the iteration that measured them.
        graph: Whether to write the graph of the model, traced in eval mode with the first batch, without any effect on the
            training. A model that cannot be traced is reported, and training continues.

    Raises:
        ImportError: If ``graph`` is True and the package tensorboard, which torch needs for tracing, is not installed.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from pathlib import Path
        >>> from signalfire import Engine, Events, Phase, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> @engine.on(Events.EPOCH_COMPLETED, phase=Phase.PREPARE)
        ... def measure(engine):
        ...     engine.log("accuracy", 0.5)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = engine.attach(TensorBoardLogger(folder, every="1it"))
        ...     _ = engine.run([(torch.ones(4, 2), torch.ones(4, 1))] * 3, max_epochs=1)
        ...     written = next(Path(folder).glob("events.out.tfevents.*")).read_bytes()
        >>> # The numbers of values in the file.
        >>> {tag: written.count(tag.encode()) for tag in ("train/loss", "train/accuracy")}
        {'train/loss': 3, 'train/accuracy': 1}
    """

    other_names = {
        "save_dir": "the first argument, the folder",
        "log_dir": "the first argument, the folder",
        "every_n_steps": 'every="10it"',
        "log_every_n_steps": 'every="10it"',
        "log_graph": "graph=",
    }

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: str | Interval = "10it",
        graph: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(every=every, name="tensorboard" if name is None else name)
        self.graph = check_bool(self, "graph", graph)
        self.trace_event = Events.FORWARD_STARTED(once=1) if graph else None
        self.draw_event = Events.ITERATION_COMPLETED(once=1) if graph else None
        self._writer: EventWriter | None = None
        self._purge_from: int | None = None  # the step from which TensorBoard purges the entries of other files
        self._running = False
        self._last: list[bytes] = []  # the summaries written at the last step
        self._last_step = 0
        self._session = False  # whether the hyperparameters are in the file
        self._hook: RemovableHandle | None = None
        self._inputs: tuple[Any, ...] | None = None  # of the model in the first forward
        if graph and find_spec("tensorboard") is None:
            raise ImportError(
                "TensorBoardLogger(graph=True): torch needs the tensorboard package to trace a model: pip install "
                "tensorboard"
            )
        self.folder = check_folder(self, folder)

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(FILE, by=self, target=f"for events in {os.path.abspath(self.folder)!r}")
        if self.graph and len(engine.modules.models) != 1:
            raise ValueError(
                f"{self.name!r}: TensorBoard shows only one graph, so graph=True does not work for an engine with "
                f"several modules: {list(engine.modules.models)}; omit graph=True"
            )

    @property
    def writer(self) -> SummaryWriter | None:
        """The tensorboardX writer during a run, for custom entries; None otherwise."""
        if not self._running:
            return None
        engine = self.engine
        return self._open(purge=engine is not None and engine.state.epoch > 0)

    @on(Events.STARTED, phase=Phase.RECORD, reads=["metrics"], writes=["files"])
    def begin(self, engine: Engine) -> None:
        super().begin(engine)
        self._running = True
        open_folder(self, self.folder)
        new_run = engine.state.iteration == 0
        if not new_run:
            self._purge_from = engine.state.iteration + 1
        elif engine.training and any("tfevents" in file for file in os.listdir(self.folder)):
            self._purge_from = 0
        else:
            self._purge_from = None
        if not engine.snapshots.has_loaded_state:
            self.write_hyperparameters(engine)

    @on(Events.CHECKPOINT_LOADED, phase=Phase.RECORD, reads=[], writes=["files"])
    def resume(self, engine: Engine) -> None:
        """Purge entries of the stopped run from the loaded iteration on, and rewrite the checkpoint's last values."""
        known = self._seen_loaded
        super().resume(engine)
        iteration = engine.state.iteration
        self._purge_from = iteration if known else iteration + 1
        if known and self._last_step == iteration:
            for summary in self._last:
                self._open().add(Summary.FromString(summary), iteration)

    def _open(self, *, purge: bool = True) -> EventWriter:
        opened = self._writer is None
        if self._writer is None:
            self._writer = EventWriter(str(self.folder))
        if purge and self._purge_from is not None:
            # Keep the user's own entries from before the first batch.
            self._writer.purge_from(self._purge_from if opened else max(self._purge_from, 1))
            self._purge_from = None
        return self._writer

    def record(self, record: Record) -> None:
        """Write the values of a row as one event."""
        self._write(_row(record.values), record.iteration)

    def _write(self, summary: Summary, step: int) -> None:
        if step != self._last_step:
            self._last, self._last_step = [], step
        self._last.append(summary.SerializeToString())
        self._open().add(summary, step)

    @on(Events.IMAGE_LOGGED, phase=Phase.RECORD, reads=["metrics"], writes=["files"])
    def write_image(self, engine: Engine) -> None:
        """Write an image."""
        self._write_entry(engine, _image)

    @on(Events.FIGURE_LOGGED, phase=Phase.RECORD, reads=["metrics"], writes=["files"])
    def write_figure(self, engine: Engine) -> None:
        """Write a figure as an image."""
        self._write_entry(engine, lambda tag, figure: _image(tag, drawn(figure)))

    def _write_entry(self, engine: Engine, summary_of: Callable[[str, Any], Summary]) -> None:
        if (entry := engine.log.entry) is not None:
            _, summary = self.converted(engine, partial(summary_of, _clean(entry.tag)))
            if summary is not None:
                self._write(summary, engine.state.iteration)

    @on(Events.TEXT_LOGGED, phase=Phase.RECORD, reads=["metrics"], writes=["files"])
    def write_text(self, engine: Engine) -> None:
        """Write a text, which TensorBoard shows as Markdown."""
        self._write_entry(engine, summaries.text)

    @on(Events.HISTOGRAM_LOGGED, phase=Phase.RECORD, reads=["metrics"], writes=["files"])
    def write_histogram(self, engine: Engine) -> None:
        """Write a histogram."""
        self._write_entry(engine, _histogram)

    @on(Events.HYPERPARAMETERS_LOGGED, phase=Phase.RECORD, reads=[], writes=["files"])
    def write_hyperparameters(self, engine: Engine) -> None:
        """Write the hyperparameters that are known when the run starts, because TensorBoard accepts no others afterwards."""
        if not self._running or not engine.log.given:
            return
        if self._session:
            warn(
                f"{self.name!r}: TensorBoard shows only the hyperparameters that are logged when a run starts; log all "
                "hyperparameters in a single call before run()"
            )
            return
        tags = [f"train/loss/{one.name}" for one in engine.updates] if len(engine.updates) > 1 else ["train/loss"]
        tags += [self.tag_of(engine, metric) for metric in engine.state.metrics.owners]
        experiment, start, _ = summaries.hparams(engine.log.given, dict.fromkeys(map(_clean, tags)))
        for summary in (experiment, start):
            self._open().add(summary, 0)
        self._session = True

    @on(Events.COMPLETED, phase=Phase.PERSIST, reads=[], writes=["files"])
    def end_session(self, engine: Engine) -> None:
        """Mark the run as complete in the HPARAMS tab, unless it was stopped to be resumed."""
        if self._session and not engine.boundary.preempted:
            self._open().add(summaries.hparams({}, {})[2], engine.state.iteration)

    @on(Events.ENDED, phase=Phase.PERSIST, reads=["metrics"], writes=["files"])
    def close(self, engine: Engine) -> None:
        """Flush and close the file."""
        super().close(engine)
        self._running = self._session = False
        self._forget_inputs()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._writer is not None:
            self._writer.flush()
        state |= {"step": self._last_step, "summaries": list(self._last)} if self._last else {}
        return state | ({"session": True} if self._session else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._last_step, self._last = state.get("step", 0), list(state.get("summaries", ()))
        if "values" in state:  # of version 0.1.0
            self._last = [_row(state["values"]).SerializeToString()]
        self._session = "session" in state

    # ---- the graph of the model -----------------------------------------------------------------------------------

    @on("trace_event", phase=Phase.RECORD, reads=["modules"], writes=["modules"])
    def watch_inputs(self, engine: Engine) -> None:
        """Record the model's inputs in its first forward."""
        (model,) = engine.modules.models.values()

        def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if self._inputs is None:
                self._inputs = tuple(one.detach() if isinstance(one, torch.Tensor) else one for one in inputs)

        self._hook = model.register_forward_pre_hook(note)

    @on("draw_event", phase=Phase.RECORD, reads=["batch", "weights", "buffers"], writes=["files", "modules"])
    def write_graph(self, engine: Engine) -> None:
        """Trace the model, and write its graph."""
        inputs, (model,) = self._inputs, engine.modules.models.values()
        self._forget_inputs()
        if any(map(is_sharded, model.parameters())):
            problem = "its parameters are sharded over the ranks"
        elif not inputs:
            problem = "the model was not called with tensors, or is compiled, so its inputs are not known"
        else:
            problem = self._trace(engine, model, inputs)
        if problem:
            warn(f"{self.name!r}: could not write the graph of the model: {problem}")

    def _trace(self, engine: Engine, model: nn.Module, inputs: tuple[Any, ...]) -> str:
        """Write the graph; returns what prevented it."""
        from torch.utils.tensorboard._pytorch_graph import graph

        modes = Modes([model])
        try:
            with (
                Buffers([model]).unchanged(), unchanged_random_state(), torch.no_grad(), redirect_stdout(io.StringIO()),
                warnings.catch_warnings(),
            ):  # fmt: skip
                warnings.simplefilter("ignore")
                drawn, _ = graph(model, inputs, use_strict_trace=False)
        except Exception as error:  # whatever a model raises when it is traced
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        finally:
            modes.put_back()
        self._open().write_graph(drawn)
        return ""

    def _forget_inputs(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._inputs = None


def _image(tag: str, pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> Summary:
    height, width, _ = pixels.shape
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png(pixels))
    return Summary(value=[Summary.Value(tag=tag, image=image)])


def _histogram(tag: str, histogram: Histogram) -> Summary:
    counts, edges, total, squares, _ = histogram
    return summaries.histogram_raw(tag, edges[0], edges[-1], sum(counts), total, squares, edges[1:], counts)


def _row(values: Mapping[str, float]) -> Summary:
    """Scalars as one summary, so as one event."""
    return Summary(value=[Summary.Value(tag=_clean(tag), simple_value=value) for tag, value in values.items()])


def _clean(tag: str) -> str:
    """A tag as TensorBoard takes it."""
    cleaned: str = summaries._clean_tag(tag)
    return cleaned
