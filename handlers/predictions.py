"""Predictions: collects the outputs of an engine for every batch, in memory or on disk."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from signalfire import Engine, Events, Handler, Phase, UpdateState, on
from signalfire.authoring import Capture, check_name, field_names
from signalfire.data.loading import is_shuffled
from signalfire.updates.places import Place, PlaceError, value_at

from ._common.folders import check_folder, open_folder
from ._common.updates import only_update

__all__ = ["Predictions"]


class Predictions(Handler):
    """Collects the model's predictions for every batch, in memory or on disk.

    Attach the handler to an evaluator: ``Engine(Update.prediction(), model=model)``. Tensors are detached and copied to the CPU,
    which synchronizes with the device once per batch. In memory, the batches are concatenated. With a folder, nothing is kept in
    memory: each batch is written to a separate file, ``<name>-00000001.pt`` and so on, under a temporary name first, so every
    file is complete. Each run first removes the files of an earlier run under this name.

    With several processes, every rank has the outputs of all ranks when the run completes, in the order of the data.

    Args:
        folder: Folder to write to, created if it does not exist; None to collect in memory.
        inputs: Whether to also collect the inputs. True uses the update's ``input``, by default the first element of the batch.
            Alternatively, pass a different index, key or name, or a function called as ``inputs(batch)``.
        targets: Whether to also collect the targets, specified like ``inputs``. True uses the update's ``target``, by default
            the second element of the batch.
        update: Name of the update whose output is collected; required if the engine has several.

    Attributes:
        files: The files of the last run, in order.

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

    capture = Capture.FORBIDDEN

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        inputs: bool | Place = False,
        targets: bool | Place = False,
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        for argument, value in (("inputs", inputs), ("targets", targets)):
            if not isinstance(value, bool | int | str) and not callable(value):
                raise TypeError(
                    f"Predictions({argument}={value!r}): expected a bool, an index or key, or a function of the batch"
                )
        self.folder = None if folder is None else check_folder(self, folder)
        self.writes = self.folder is not None  # only files are omitted in a dry run
        self.update = check_name(self, "update", update)
        self.files: list[Path] = []
        self._parts: dict[str, Place] = {}  # True where the update knows it
        for part, wanted in (("inputs", inputs), ("targets", targets)):
            if wanted is not False:
                self._parts[part] = wanted
        self._collected: dict[str, list[Any]] = {}
        self._iterations: list[int] = []  # one for each collected batch
        self._number = 0  # in the name of the last file

    def attached(self, engine: Engine) -> None:
        if engine.training:
            raise ValueError(
                f"{self.name!r}: this engine is for training; use a separate engine for predictions: Engine(Update.prediction(), "
                "model=model)"
            )
        update = only_update(engine, self.update, by=self, does="predicts")
        if update.forward is None:
            raise ValueError(
                f"{self.name!r}: update {update.name!r} is a single function and has no output; build the Update with "
                "forward="
            )

    @on(Events.STARTED, phase=Phase.PREPARE, reads=["processes"], writes=["files"])
    def begin(self, engine: Engine) -> None:
        """Start empty, and remove the files of an earlier run."""
        self._collected = {part: [] for part in ("outputs", *self._parts)}
        self.files, self._iterations, self._number = [], [], 0
        if not self._parts and is_shuffled(engine.feed.current.data):
            engine.findings.report(
                "W54",
                f"{self.name!r} collects outputs from shuffled data, so the outputs are not in the order of the "
                "dataset",
                "use a DataLoader with shuffle=False, or collect the targets together with the outputs: "
                "Predictions(targets=True)",
                self.name,
            )
        if self.folder is not None:
            open_folder(self, self.folder)
            for file in self.folder.glob(f"{self.name}-{'[0-9]' * 8}.pt") if engine.processes.is_rank_zero else ():
                file.unlink()
            engine.processes.barrier()

    @on(
        Events.FORWARD_COMPLETED,
        phase=Phase.RECORD,
        reads=["batch", "output"],
        writes=["files"],
    )
    def collect(self, engine: Engine) -> None:
        """Store the output of this batch, or of the piece that the forward computed."""
        state = engine.state
        if self.update not in (None, state.update.name):
            return
        found = {"outputs": _on_cpu(state.update.output_in(state.update.output))}
        found |= {part: _on_cpu(self._part(state.update, part, state.batch)) for part in self._parts}
        self._iterations.append(state.iteration)
        if self.folder is None:
            for part, value in found.items():
                self._collected[part].append(value)
            return
        if engine.group.data.distributed:  # numbered in the order of the data, which is sharded round robin
            size, rank = engine.group.data.world_size, engine.group.data.rank
            in_data = (state.iteration - 1) * size + rank + 1
            self._number = max(in_data, self._number + size) if self.files else in_data
        else:
            self._number += 1
        path = self.folder / f"{self.name}-{self._number:08d}.pt"
        temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            torch.save(found, temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self.files.append(path)

    def _part(self, update: UpdateState, part: str, batch: Any) -> Any:
        """The inputs or the targets of a batch."""
        place = self._parts[part]
        if place is True:
            return update.input_in(batch) if part == "inputs" else update.target_in(batch)
        try:
            return value_at(batch, place)
        except PlaceError as error:
            raise TypeError(f"{self.name!r}: {part}={place!r}: {error}") from None

    @on(Events.COMPLETED, phase=Phase.PREPARE, reads=["processes"], writes=[])
    def gather(self, engine: Engine) -> None:
        """Gather the batches of all ranks on every rank, in the order of the data."""
        if not engine.group.data.distributed:
            return
        iterations = engine.group.data.gather(self._iterations)

        def in_order(own: list[Any]) -> list[Any]:
            of_all = engine.group.data.gather(own)
            order = [
                (iteration, rank, place)
                for rank, several in enumerate(iterations)
                for place, iteration in enumerate(several)
            ]
            return [of_all[rank][place] for _, rank, place in sorted(order)]

        if self.folder is None:
            self._collected = {part: in_order(own) for part, own in self._collected.items()}
        else:
            self.files = in_order(self.files)

    @property
    def outputs(self) -> Any:
        """The outputs of the last run, concatenated along the first dimension.

        Dicts, and data classes as dicts, are joined by key, and tuples by position. Values that cannot be concatenated, such as
        tensors of different shapes, strings, or a list with an entry for each sample, become a list with an entry for each batch.

        Raises:
            RuntimeError: If they were not collected in memory.
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
            raise RuntimeError(
                f"{self.name!r}: the {part} are on disk, in one file per batch; load the files listed in "
                f"{self.name}.files"
            )
        if part not in self._collected:
            way_out = f"pass {part}=True" if part != "outputs" and part not in self._parts else "run the engine first"
            raise RuntimeError(f"{self.name!r}: no {part} were collected; {way_out}")
        return _concatenated(self._collected[part])


def _concatenated(batches: list[Any]) -> Any:
    """The values of all batches as one: tensors concatenated, dicts joined by key and tuples by place; else the list itself."""
    keys = _keys(batches[0]) if batches else ()
    if keys and all(_keys(one) == keys for one in batches):
        joined = {key: _concatenated([one[key] for one in batches]) for key in keys}
        return joined if isinstance(batches[0], dict) else tuple(joined.values())
    return _in_one(batches)


def _in_one(batches: list[Any]) -> Any:
    if not all(isinstance(value, Tensor) for value in batches):
        return batches
    shapes = {value.shape[1:] if value.dim() else None for value in batches}
    if len(shapes) != 1:
        return batches
    return torch.stack(batches) if None in shapes else torch.cat(batches)


def _keys(value: Any) -> Collection[Any]:
    """What the parts of a dict or a tuple are joined by."""
    if isinstance(value, dict):
        return value.keys()
    return range(len(value)) if isinstance(value, tuple) else ()


def _on_cpu(value: Any) -> Any:
    """A copy on the CPU, in types that ``torch.load(weights_only=True)`` accepts."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, tuple | list):
        items = [_on_cpu(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if (names := field_names(value)) is not None:
        value = {name: getattr(value, name) for name in names}
    if isinstance(value, Mapping):
        return {key: _on_cpu(item) for key, item in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.tensor(value) if value.dtype.kind in "biufc" else value.copy()
    return value
