"""Logs a run to Weights & Biases."""

from __future__ import annotations

import contextlib
import html
import io
import json
import os
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from signalfire import Interval
from signalfire.authoring import check_choice, check_name

from ._common.remote_logging import Item, RemoteLogger, Status, Stored

__all__ = ["WandbLogger", "read_history", "read_records"]

_EXIT_CODES = {"FINISHED": 0, "FAILED": 1, "KILLED": 255, "RUNNING": 1}
_BLOCK = 2**15  # of a .wandb file
_PATIENCE = 20  # seconds to wait for it
_SETTLED = 0.5  # seconds in which a file does not grow once nobody writes to it


class WandbLogger(RemoteLogger):
    """Sends losses, rates, metrics and what is logged with ``engine.log`` to Weights & Biases.

    `RemoteLogger` says what it guarantees.

    Each row has the value ``step``, the iteration, which is the horizontal axis of all charts. Images and histograms are W&B's,
    texts are Html. A resumed run continues the W&B run of the same id in another part: its files are in ``<folder>/wandb``, and
    are needed to resume, since what is written already is read from there. ``wandb sync <folder>/wandb/offline-run-*`` uploads
    the parts of runs that were offline, in their order.

    W&B shows FAILED for an exit code of 1, with the error in the summary; KILLED, after Ctrl-C, for 255; and a preempted run as
    preempting.

    Args:
        project: Name of the project.
        folder: Folder of the run, for W&B's files and the file of what was not sent.
        entity: User or team; W&B's default by default.
        title: Name of the run in W&B; it makes one up by default.
        mode: "online", or "offline", which only writes files. By default what W&B is set to, as by WANDB_MODE.
        every, run_id, keep_different, capacity, timeout: As for `RemoteLogger`.

    Raises:
        ImportError: If wandb is not installed: ``pip install signalfire[wandb]``.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from pathlib import Path
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.25)
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> engine = Engine(update, model=model, seed=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = engine.attach(WandbLogger("ones", folder, run_id="first", mode="offline", every="1it"))
        ...     _ = engine.run([(torch.ones(4, 1), torch.ones(4, 1))] * 3, max_epochs=1)
        ...     [file] = Path(folder).glob("wandb/offline-run-*-first/run-first.wandb")
        ...     rows = read_history(file)
        >>> [(row["step"], row["train/loss"]) for row in rows]
        [(1, 1), (2, 0.25), (3, 0.0625)]
    """

    needs: ClassVar[tuple[Sequence[str], str]] = (("wandb",), "wandb")

    def __init__(
        self,
        project: str,
        folder: str | os.PathLike[str],
        *,
        entity: str | None = None,
        title: str | None = None,
        mode: Literal["online", "offline"] | None = None,
        every: str | Interval = "10it",
        run_id: str | None = None,
        keep_different: bool = False,
        capacity: int = 1000,
        timeout: float = 30.0,
        name: str | None = None,
    ) -> None:
        self.entity = check_name(self, "entity", entity)
        self.title = check_name(self, "title", title)
        self.mode = None if mode is None else check_choice(self, "mode", mode, ["online", "offline"])
        if not isinstance(project, str) or not project:
            raise TypeError(f"WandbLogger(project={project!r}): expected the name of a project")
        self.project = project
        self._run_object: Any = None
        self._file: _History | None = None  # what the open part has
        super().__init__(
            folder,
            every=every,
            run_id=run_id,
            keep_different=keep_different,
            capacity=capacity,
            timeout=timeout,
            name="wandb_logger" if name is None else name,
        )

    def open(self, run_id: str, hyperparameters: Mapping[str, Any]) -> None:
        import wandb

        if self._run_object is not None and self._run_object.id == run_id:
            self._run_object.config.update(dict(hyperparameters), allow_val_change=True)
            return
        if self._run_object is not None:
            self.close_run("RUNNING", None)
        self._wait_for_other_process(run_id)
        try:
            run = wandb.init(
                project=self.project,
                entity=self.entity,
                name=self.title,
                id=run_id,
                resume="allow",
                reinit="create_new",
                mode=self.mode,
                dir=self.folder,
                config=dict(hyperparameters),
                settings=wandb.Settings(console="off", silent=True, quiet=True),
            )
        except Exception as error:
            of_another_folder = "in use" in str(error) and not self._parts(run_id)
            if not of_another_folder:
                _release(run_id)
            raise
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        self._run_object = run
        self._file = _History(Path(run.settings.sync_file))

    def _parts(self, run_id: str) -> list[Path]:
        """The files of a run, in their order."""
        found = (self.folder / "wandb").glob(f"*run-*-{run_id}*/run-{run_id}.wandb")
        return sorted(found, key=lambda path: path.parent.name.removeprefix("offline-"))

    def _wait_for_other_process(self, run_id: str) -> None:
        """W&B's process outlives one that was killed until it has written; and names parts by the second."""
        parts = self._parts(run_id)
        while parts and time.time() - parts[-1].stat().st_mtime < _SETTLED:
            time.sleep(0.05)
        second = time.strftime("%Y%m%d_%H%M%S")
        while parts and f"-{second}-" in parts[-1].parent.name and time.strftime("%Y%m%d_%H%M%S") == second:
            time.sleep(0.05)

    def stored(self, run_id: str, after: int) -> Iterable[Stored]:
        for path in self._parts(run_id):
            for row in read_history(path):
                iteration = row.pop("step", None)
                if isinstance(iteration, int) and iteration >= after:
                    for name, value in row.items():
                        yield name, iteration, float(value) if isinstance(value, int | float) else None

    def send(self, items: Sequence[Item]) -> None:
        for item in items:
            values = {name: _as_wandb(item, value) for name, value in item.values.items()}
            self._run_object.log({**values, "step": item.iteration})  # never step=: W&B drops what does not rise

    def confirmed(self) -> int | None:
        return 0 if self._file is None else self._file.count()

    def close_run(self, status: Status, error: str | None) -> None:
        run, file = self._run_object, self._file
        self._run_object = self._file = None
        if run is None or file is None:
            return
        if error is not None:
            run.summary["error"] = error
        if status == "RUNNING":
            run.mark_preempting()
        run.finish(exit_code=_EXIT_CODES[status])
        file.wait_for_end()


def _release(run_id: str) -> None:
    """End a run in W&B's process, which would refuse its id for as long as it lives.

    It has runs that failed to begin; and, if it belongs to a process that started this one, those of a process that was killed.
    """
    import wandb

    with contextlib.suppress(
        Exception
    ):  # it may not know the run, or may not live; the first error is the one that counts
        wandb.attach(run_id).finish(exit_code=_EXIT_CODES["RUNNING"])


def _as_wandb(item: Item, value: Any) -> Any:
    import wandb

    if item.kind == "image":
        from PIL import Image

        return wandb.Image(Image.open(io.BytesIO(value)))
    if item.kind == "text":
        return wandb.Html(f"<pre>{html.escape(value)}</pre>", inject=False)
    return wandb.Histogram(np_histogram=tuple(value)) if item.kind == "histogram" else value


def read_history(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a .wandb file: numbers by name, None for what is no number, and ``step``, the iteration."""
    return list(_History(Path(path)).rows())


def read_records(path: str | os.PathLike[str]) -> list[Any]:
    """All records of a .wandb file, as W&B's class of that name."""
    return list(_History(Path(path)).records())


class _History:
    """The rows of a .wandb file, which another process writes: a file of blocks, as LevelDB's logs are, with W&B's records."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 7  # the header of the file
        self._begun = b""  # of a record in several pieces
        self._count = 0
        self._ended = False

    def count(self) -> int:
        """How many rows there are."""
        self._count += sum(1 for _ in self.rows())
        return self._count

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows that are new since the last call."""
        for record in self.records():
            if record.WhichOneof("record_type") != "history":
                continue
            row: dict[str, Any] = {}
            for item in record.history.item:
                name = item.key or item.nested_key[0]
                if not name.startswith("_"):
                    value = json.loads(item.value_json) if len(item.nested_key) < 2 else None
                    row[name] = float(value) if value in ("NaN", "Infinity", "-Infinity") else value
            if "step" in row:
                yield row

    def records(self) -> Iterator[Any]:
        """The records of all kinds that are new."""
        from wandb.proto.wandb_internal_pb2 import Record

        for content in self._contents():
            record = Record()
            record.ParseFromString(content)
            self._ended = self._ended or record.WhichOneof("record_type") == "exit"
            yield record

    def wait_for_end(self) -> None:
        """Wait until the file is complete: W&B's process writes its last block some time after a run was finished.

        Raises:
            TimeoutError: if it does not.
        """
        end = time.monotonic() + _PATIENCE
        while not self._ended:
            if time.monotonic() > end:
                raise TimeoutError(f"{str(self.path)!r} was not completed within {_PATIENCE} s")
            self.count()
            time.sleep(0.005)

    def _contents(self) -> Iterator[bytes]:
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return
        begin, place = self._offset, 0
        while place + 7 <= len(content):
            left = _BLOCK - (begin + place) % _BLOCK
            if left < 7:
                place += left
                continue
            _, length, kind = struct.unpack_from("<IHB", content, place)
            if kind == 0 or place + 7 + length > len(content):
                break
            self._begun += content[place + 7 : place + 7 + length]
            place += 7 + length
            self._offset = begin + place
            if kind in (1, 4):  # whole, or the last piece
                record, self._begun = self._begun, b""
                yield record
