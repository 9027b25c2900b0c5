"""Predictions: what an engine's forward gives for every batch, in memory or on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from signalfire import Engine, Events, Handler, Phase, on

from ._common.folders import check_folder, open_folder
from ._common.updates import only_update

__all__ = ["Predictions"]


class Predictions(Handler):
    """Collects the output of every batch of an engine that evaluates: ``Engine(Update.prediction(), model=model)``.

    Tensors are detached and brought to the CPU, which waits for the device once a batch. In memory they are joined in the end;
    with a folder, every batch is one file, ``<name>-00000001.pt`` and so on, and nothing is kept in memory. A file is
    written aside and renamed, so that one that is there is whole. Every run begins anew: the files of an earlier one under
    this name are removed.

    Args:
        folder: where to write; made if it is not there. None to collect in memory.
        inputs: whether the inputs are collected, too: the batch's first part, or what ``inputs(batch)`` returns.
        targets: the same for the targets, by default the batch's second part.
        update: the name of the update whose output is collected; it has to be given if there are several.

    Attributes:
        files: the files of the last run, in order.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> engine = Engine(Update.prediction(), model=torch.nn.Linear(2, 3))
        >>> predictions = Predictions()
        >>> _ = engine.attach(predictions)
        >>> _ = engine.run([(torch.ones(4, 2),), (torch.ones(1, 2),)])
        >>> predictions.outputs.shape
        torch.Size([5, 3])
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        inputs: bool | Callable[[Any], Any] = False,
        targets: bool | Callable[[Any], Any] = False,
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        for argument, value in (("inputs", inputs), ("targets", targets)):
            if not isinstance(value, bool) and not callable(value):
                raise TypeError(f"Predictions({argument}={value!r}): it has to be a bool, or a function of the batch")
        self.folder = None if folder is None else check_folder(self, folder)
        # In memory there is nothing that a dry run would have to do without.
        self.writes = self.folder is not None
        self.update = update
        self.files: list[Path] = []
        self._parts: dict[str, Callable[[Any], Any]] = {}
        for place, (part, wanted) in enumerate((("inputs", inputs), ("targets", targets))):
            if wanted is not False:
                self._parts[part] = wanted if callable(wanted) else itemgetter(place)
        self._collected: dict[str, list[Any]] = {}
        self._iterations: list[int] = []  # of what was collected
        self._number = 0  # of the last file

    def attached(self, engine: Engine) -> None:
        if engine.training:
            raise ValueError(
                f"{self.name!r}: this engine trains; predict with one of its own: Engine(Update.prediction(), model=model)"
            )
        update = only_update(engine, self.update, by=self, does="predicts")
        if update.forward is None:
            raise ValueError(
                f"{self.name!r}: update {update.name!r} is a single function, which shows no output; give it a forward="
            )

    @on(Events.STARTED, phase=Phase.PREPARE)
    def begin(self, engine: Engine) -> None:
        """Begin with nothing collected."""
        self._collected = {part: [] for part in ("outputs", *self._parts)}
        self.files, self._iterations, self._number = [], [], 0
        if self.folder is not None:
            open_folder(self, self.folder)
            for file in self.folder.glob(f"{self.name}-{'[0-9]' * 8}.pt") if engine.processes.first else ():
                file.unlink()
            engine.processes.barrier()

    @on(Events.FORWARD_COMPLETED, phase=Phase.RECORD)
    def collect(self, engine: Engine) -> None:
        """Take the output of this batch, or of the part of it that the forward saw."""
        state = engine.state
        if self.update not in (None, state.update.name):
            return
        found = {"outputs": _on_cpu(state.update.output)}
        found |= {part: _on_cpu(function(state.batch)) for part, function in self._parts.items()}
        self._iterations.append(state.iteration)
        if self.folder is None:
            for part, value in found.items():
                self._collected[part].append(value)
            return
        if engine.processes.several:  # numbered as the batches are in the data, which are dealt in turn
            size, rank = engine.processes.size, engine.processes.rank
            in_turn = (state.iteration - 1) * size + rank + 1
            self._number = max(in_turn, self._number + size) if self.files else in_turn
        else:
            self._number += 1
        path = self.folder / f"{self.name}-{self._number:08d}.pt"
        aside = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            torch.save(found, aside)
            os.replace(aside, path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        self.files.append(path)

    @on(Events.COMPLETED, phase=Phase.PREPARE)
    def put_together(self, engine: Engine) -> None:
        """Give every process what all have collected, in the order of the data."""
        if not engine.processes.several:
            return
        iterations = engine.processes.gather(self._iterations)

        def in_order(own: list[Any]) -> list[Any]:
            of_all = engine.processes.gather(own)
            told = [
                (iteration, rank, place)
                for rank, several in enumerate(iterations)
                for place, iteration in enumerate(several)
            ]
            return [of_all[rank][place] for _, rank, place in sorted(told)]

        if self.folder is None:
            self._collected = {part: in_order(own) for part, own in self._collected.items()}
        else:
            self.files = in_order(self.files)

    @property
    def outputs(self) -> Any:
        """Of the last run: joined along the first dimension if they are tensors that fit, else a list with one item a batch.

        Raises:
            RuntimeError: if they were not collected in memory.
        """
        return self._joined("outputs")

    @property
    def inputs(self) -> Any:
        """The inputs, as `outputs`."""
        return self._joined("inputs")

    @property
    def targets(self) -> Any:
        """The targets, as `outputs`."""
        return self._joined("targets")

    def _joined(self, part: str) -> Any:
        if self.folder is not None:
            raise RuntimeError(f"{self.name!r}: the {part} are in the files that {self.name}.files lists, one a batch")
        if part not in self._collected:
            way_out = f"Predictions({part}=True)" if part != "outputs" and part not in self._parts else "run the engine"
            raise RuntimeError(f"{self.name!r}: no {part} were collected; {way_out}")
        values = self._collected[part]
        shapes = {value.shape[1:] if value.dim() else None for value in values if isinstance(value, Tensor)}
        if len(shapes) != 1 or not all(isinstance(value, Tensor) for value in values):
            return values
        return torch.stack(values) if None in shapes else torch.cat(values)


def _on_cpu(value: Any) -> Any:
    """A copy that no later batch changes, in the types that a safe load accepts."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, tuple | list):
        return [_on_cpu(item) for item in value] if isinstance(value, list) else tuple(_on_cpu(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, Mapping):
        return {key: _on_cpu(item) for key, item in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.tensor(value)
    return value
