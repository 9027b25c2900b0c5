"""Exports the weights, or the model as a program, at the end of a run or whenever a metric is the best so far."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from signalfire import AnyEvent, Engine, Events, Handler, Interval, Phase, on
from signalfire.authoring import Monitor, check_choice, check_every, check_local, warn
from signalfire.authoring.checks import check_parents
from signalfire.checkpoints import Files
from signalfire.distributed import is_sharded
from signalfire.weights import (
    check_average,
    export_program,
    export_weights,
    find_averaging,
    needs_onnx,
    needs_safetensors,
)

from ._common.options import events_if
from ._common.ranks import CHECK_METRIC, DECIDE_CHECKPOINTS, EXPORT

__all__ = ["Export"]

_PROGRAMS = (".pt2", ".onnx")
_READ = ["weights", "buffers", "modes", "modules", "batch"]


class Export(Handler):
    """Exports the model to a file: weights as safetensors, or a program for `torch.export` or ONNX.

    `export_weights` or `export_program` writes the file atomically, and checks it before replacing the previous one. Weights
    that cannot be written raise an error. If a program cannot be exported, a warning names the operation, training continues,
    and `error` contains the exception.

    Args:
        path: Path of the file; its suffix selects the format: ".safetensors" for weights, ".pt2" or ".onnx" for a program.
        at: When to write: "end" for the end of a run, even after a stop; "best" for each new best value of a metric.
        every: Interval, such as "1ep", at which the file is also written before the end.
        average: Name of the handler whose averages are written, such as "ema"; by default, the only handler that keeps
            averages; required if there are several. False writes the weights themselves.
        monitor: Name of the metric for ``at="best"``; by default, the metric that other handlers, such as `Checkpoint`,
            monitor, if there is only one.
        mode: Whether smaller ("min") or larger ("max") values are better; by default, the direction that the metric declares.
        example: Model input for exporting a program, as for `export_program`; by default, the input in the current batch,
            which must be (input, target).

    Attributes:
        best: Best value so far; None before the first.
        written: How many times the file was written.
        error: The exception that prevented the last program from being written; None if the program was written.

    Raises:
        ImportError: For weights without the package safetensors (``pip install signalfire[safetensors]``), and for ONNX without
            its packages (``pip install signalfire[onnx]``).

    Example:
        >>> import tempfile
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = engine.attach(Export(f"{folder}/model.pt2"))
        ...     _ = engine.run([(torch.ones(4, 2), torch.ones(4, 1))], max_epochs=2)
        ...     program = torch.export.load(f"{folder}/model.pt2").module()
        >>> # The program takes batches of any size.
        >>> torch.equal(program(torch.ones(3, 2)), engine.model(torch.ones(3, 2)))
        True
    """

    trains = True
    writes = True

    files: Files = Files()
    """File-system operations; tests record them or make them fail."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        at: Literal["end", "best"] = "end",
        every: str | Interval | AnyEvent | None = None,
        average: str | Literal[False] | None = None,
        monitor: str | None = None,
        mode: Literal["min", "max"] | None = None,
        example: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        check_choice(self, "at", at, ("end", "best"))
        self.average = check_average("Export", average)
        self.every = None if every is None else check_every(self, every)
        self._check_selection(at, every, monitor, mode)
        self.monitor = None if monitor is None else Monitor("Export", monitor, mode)
        self.mode = mode
        self._finds_metric = monitor is None
        self.at = at
        self.best: float | None = None
        self.written = 0
        self.error: Exception | None = None
        self._selected = False
        best_events = Events.STARTED, Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED, Events.EPOCH_COMPLETED
        self.start_event, self.select_event, self.check_event = events_if(at == "best", *best_events)
        self.end_event = Events.COMPLETED if at == "end" else None
        if not isinstance(path, str | os.PathLike) or not path:
            raise TypeError(f"Export(path={path!r}): expected a path, such as 'model.safetensors'")
        self.path = check_local(self, "path", path)
        check_parents(self, "path", self.path)
        if self.path.suffix not in (".safetensors", *_PROGRAMS):
            raise ValueError(
                f"Export(path={os.fspath(path)!r}): expected a name that ends in '.safetensors' for weights, or in "
                "'.pt2' or '.onnx' for a program"
            )
        self.is_program = self.path.suffix in _PROGRAMS
        if example is not None and not (self.is_program and _is_input(example)):
            raise TypeError(
                f"Export(example={example!r}): expected an input of the model, and a path that ends in '.pt2' or "
                "'.onnx'; for other paths, omit example="
            )
        self.example = example
        if not self.is_program:
            needs_safetensors("Export")
        elif self.path.suffix == ".onnx":
            needs_onnx("Export")

    def _check_selection(self, at: str, every: object, monitor: str | None, mode: str | None) -> None:
        if mode is not None:
            check_choice(self, "mode", mode, ("min", "max"))
        for argument, value in (("monitor", monitor), ("mode", mode)):
            if value is not None and at != "best":
                raise ValueError(
                    f'Export({argument}={value!r}): {argument}= applies only with at="best"; add at="best", or omit '
                    f"{argument}="
                )
        if every is not None and at == "best":
            raise ValueError(
                f'Export(every={every!r}, at="best"): with at="best", weights are exported at each new best value, so '
                "every= does not apply; omit every="
            )

    def settings(self) -> dict[str, Any]:
        """None: the weights do not depend on what is exported."""
        return {}

    @on(Events.STARTED, phase=Phase.CONTROL, reads=["modules"], writes=[])
    def check(self, engine: Engine) -> None:
        """Check before the first batch what would fail after the last one."""
        find_averaging(engine, self.average, f"{self.name!r}")
        parameters = (p for root in engine.modules.models.values() for p in root.parameters())
        if self.is_program and any(map(is_sharded, parameters)):
            raise ValueError(
                f"{self.name!r}: a sharded model cannot be exported as a program; export its weights instead"
            )

    @on("start_event", phase=Phase.CONTROL, reads=["metrics"], writes=[])
    def find_metric(self, engine: Engine) -> None:
        """Find the metric and its direction."""
        if self._finds_metric:
            other = self._other_monitor(engine)
            if self.monitor is None or self.monitor.metric != other.metric:
                self.monitor = Monitor("Export", other.metric, self.mode or other.given)
        assert self.monitor is not None
        self.monitor.start(engine, self.name)

    def _other_monitor(self, engine: Engine) -> Monitor:
        """That of the only metric that other handlers monitor."""
        others = [one for one in engine.handlers.values() if one.enabled and one is not self]
        monitors = [getattr(one, "monitor", None) for one in others]
        names = {one.metric: one for one in monitors if isinstance(one, Monitor)}
        if len(names) != 1:
            raise ValueError(
                f'{self.name!r}: at="best" needs exactly one monitored metric, but the other handlers monitor '
                f'{" and ".join(map(repr, names)) or "no metric"}; pass the name of the metric: Export(..., at="best", '
                'monitor="accuracy")'
            )
        (other,) = names.values()
        return other

    @on("select_event", phase=Phase.CONTROL, rank=DECIDE_CHECKPOINTS, reads=["metrics"], writes=[])
    def select(self, engine: Engine) -> None:
        """Select the current weights if the metric has a new value that is the best."""
        assert self.monitor is not None
        value = self.monitor.new_value(engine)
        if value is None:
            return
        self.monitor.report_nan(engine, value, self.name, "so these weights are not exported")
        if self.monitor.better(value, self.best):
            self.best, self._selected = value, True

    @on("check_event", phase=Phase.CONTROL, rank=CHECK_METRIC, reads=["metrics"], writes=[])
    def check_metric_exists(self, engine: Engine) -> None:
        """Raise a KeyError if nobody writes the metric."""
        assert self.monitor is not None
        self.monitor.require(engine)

    @on("select_event", phase=Phase.PERSIST, rank=EXPORT, reads=_READ, writes=["files"], repeatable=True)
    def write_best(self, engine: Engine) -> None:
        """Write the selected weights."""
        if self._selected:
            self.write(engine)
            self._selected = False

    @on("every", phase=Phase.PERSIST, rank=EXPORT, reads=_READ, writes=["files"])
    @on("end_event", phase=Phase.PERSIST, rank=EXPORT, reads=_READ, writes=["files"])
    def write(self, engine: Engine) -> None:
        """Write the file."""
        if not self.is_program:
            export_weights(engine, self.path, average=self.average, files=self.files)
            self.written += 1
            return
        self.error = None
        try:
            export_program(engine, self.path, self._input(engine), average=self.average, files=self.files)
            self.written += 1
        except (ValueError, RuntimeError) as error:
            self.error = error
            warn(f"{self.name}: the program was not exported: {error}", RuntimeWarning)

    def _input(self, engine: Engine) -> Any:
        if self.example is not None:
            return self.example
        batch = engine.state.batch
        return batch[0] if isinstance(batch, tuple | list) and batch else batch

    def state_dict(self) -> dict[str, Any]:
        if self.at == "end":
            return {}
        return {"best": self.best, "monitor": {} if self.monitor is None else self.monitor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.at == "end":
            super().load_state_dict(state)
            return
        self.best, self._selected = state["best"], False
        if self.monitor is not None:
            self.monitor.load_state_dict(state["monitor"] or {"seen": 0})


def _is_input(example: Any) -> bool:
    if isinstance(example, Mapping | tuple | list):
        return any(map(_is_input, example.values() if isinstance(example, Mapping) else example))
    return isinstance(example, Tensor)
