"""Traces: digests of a run's data, gradients, weights and states, to find where two runs diverge."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from signalfire import Engine, Events, Handler, Interval, Phase, UpdateState, on
from signalfire.authoring import Capture, check_choice, check_every, check_int, check_local
from signalfire.authoring.checks import check_parents
from signalfire.distributed import Processes
from signalfire.traces.contents import contents_of, described_environment, digests_of
from signalfire.traces.digests import Digests
from signalfire.traces.files import Record, header_line, ranks_of

from ._common.claims import FILE
from ._common.folders import open_folder
from ._common.ranks import RECORD_TRACE
from ._common.trace_file import Place, TraceWriter

__all__ = ["Trace"]

_Key = tuple[int, str, str | None, int | None, int]  # of a record

_KEPT = ("parameters", "buffers", "optimizer", "random", "handlers", "metrics")
_UNMEASURED = {"BACKWARD_COMPLETED", "OPTIMIZER_STEP_COMPLETED"}  # what is measured right after them
_ENDS = {"STARTED", "ITERATION_COMPLETED", "EPOCH_COMPLETED"}  # whose record is written with those before it
_OF_A_SHARD = {"GET_BATCH_COMPLETED", "FORWARD_COMPLETED", "LOSS_COMPUTED", "BACKWARD_COMPLETED"}


class Trace(Handler):
    """Records digests of a run's data, gradients, weights and states, to find where two runs diverge.

    `signalfire.traces.compare` or ``python -m signalfire compare A B`` names the first record that differs, across days,
    machines, versions and numbers of processes. A digest has 16 digits and depends on each bit and its position in a tensor.
    Digests are computed on the device of the tensors, and read in one transfer per recorded iteration.

    Each recorded iteration has a record at GET_BATCH_COMPLETED (the batch), LOSS_COMPUTED (the output, the loss), GRADIENTS_READY
    (the gradients) and ITERATION_COMPLETED (parameters, buffers, the optimizer, random numbers, handlers' states and metrics),
    each after all receivers of the event. ``detail="tensor"`` adds records at FORWARD_COMPLETED, BACKWARD_COMPLETED and
    OPTIMIZER_STEP_COMPLETED. The start of the run and the end of each epoch are also recorded.

    The records of an iteration are written together when it ends. If the process is killed, those of the open iteration are lost.

    A resumed run continues the file from the position of its checkpoint. In distributed runs, each process writes a separate
    file: ``trace.jsonl`` for rank 0, ``trace.rank1.jsonl`` for rank 1. A file of more than ``part_size`` bytes is continued in
    ``trace.part2.jsonl``.

    Args:
        path: Path of the file, such as "runs/trace.jsonl"; its folder is created.
        every: Interval between recorded iterations: "10it" records every tenth.
        detail: Level of detail: "step" for one digest of all parameters, or "tensor" for one per tensor, at all events.
        part_size: Size in bytes after which the trace continues in a new file.

    Example:
        >>> import tempfile, torch
        >>> from signalfire import Engine, Update
        >>> from signalfire.traces import compare
        >>> folder = tempfile.mkdtemp()
        >>> def train(name, lr):
        ...     torch.manual_seed(0)
        ...     update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=lr)
        ...     engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        ...     engine.attach(Trace(f"{folder}/{name}.jsonl", every="1it"))
        ...     engine.run([(torch.ones(4, 2), torch.ones(4, 1))] * 3, max_epochs=1)
        ...     return f"{folder}/{name}.jsonl"
        >>> found = compare(train("yesterday", lr=0.1), train("today", lr=0.2))
        >>> found.first.iteration, found.first.event, found.first.thing
        (0, 'STARTED', 'optimizer')
    """

    writes = True
    by_shard = True
    capture = Capture.FORBIDDEN

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: str | Interval = "10it",
        detail: Literal["step", "tensor"] = "step",
        part_size: int = 100 * 2**20,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"Trace(path={path!r}): expected the path of a file")
        self.path = check_local(self, "path", path)
        check_parents(self, "path", self.path)
        if self.path.is_dir():
            raise IsADirectoryError(f"Trace(path={str(path)!r}): this is a folder; pass the path of a file in it")
        self.every = check_every(self, every, units=["it"])
        self.detail = check_choice(self, "detail", detail, ("step", "tensor"))
        self.part_size = check_int(self, "part_size", part_size)
        count, every_event = int(self.every.value), detail == "tensor"
        self.batch_event = Events.GET_BATCH_COMPLETED(every=count)
        self.output_event = Events.FORWARD_COMPLETED(every=count) if every_event else None
        self.loss_event = Events.LOSS_COMPUTED(every=count)
        self.backward_event = Events.BACKWARD_COMPLETED(every=count) if every_event else None
        self.gradients_event = Events.GRADIENTS_READY(every=count)
        self.step_event = Events.OPTIMIZER_STEP_COMPLETED(every=count) if every_event else None
        self.end_event = Events.ITERATION_COMPLETED(every=count)
        self._writer: TraceWriter | None = None
        self._is_placed = False  # the file was in its place as the run was completed
        self._waiting: list[tuple[_Key, Digests]] = []  # records to be written with the next
        self._header = ""
        self._state: dict[str, Any] = {}  # of the file, as of a loaded state or of the last run
        self._place: Place | None = None  # of the last record in the file
        self._processes = 0, 1  # the rank, and how many there are
        self._counts: dict[tuple[Any, ...], int] = {}  # how often each event occurred in `_counted`
        self._counted: int | None = None  # the iteration of the last record
        self._evaluations = 0  # of a trainer that ran the engine

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(FILE, by=self, target=repr(os.path.abspath(self.path)))

    @on(
        Events.STARTED,
        phase=Phase.PERSIST,
        rank=RECORD_TRACE,
        reads=["weights", "buffers", "optimizer", "rates", "groups", "modules", "device"],
        writes=["files"],
    )
    def begin(self, engine: Engine) -> None:
        """Record the start of a run; a continued run already has it."""
        self._counts.clear()
        open_folder(self, self.path.parent)
        self._evaluations += engine.findings.is_within
        if self._evaluations > 1:
            engine.findings.report(
                "W62",
                f"{self.name!r} is attached to an evaluator that a trainer runs several times, so its trace "
                "restarts with each evaluation",
                "attach the handler to the training engine",
                self.name,
            )
        if engine.state.iteration == 0 and not engine.snapshots.has_loaded_state:
            self._state, self._place = {}, None
            self._record(engine, "STARTED", ("parameters", "buffers", "optimizer", "random", "handlers"))

    @on("batch_event", phase=Phase.PERSIST, rank=RECORD_TRACE, reads=["batch"], writes=["files"])
    def record_batch(self, engine: Engine) -> None:
        """Record the batch."""
        self._record(engine, "GET_BATCH_COMPLETED", ("batch", "random") if self.detail == "tensor" else ("batch",))

    @on("output_event", phase=Phase.PERSIST, rank=RECORD_TRACE, reads=["output"], writes=["files"])
    def record_output(self, engine: Engine) -> None:
        """Record the output of the forward."""
        self._record(engine, "FORWARD_COMPLETED", ("output",), engine.state.update)

    @on("loss_event", phase=Phase.PERSIST, rank=RECORD_TRACE, reads=["output", "loss"], writes=["files"])
    def record_loss(self, engine: Engine) -> None:
        """Record the output and the loss."""
        self._record(engine, "LOSS_COMPUTED", ("output", "loss"), engine.state.update)

    @on("backward_event", phase=Phase.PERSIST, rank=RECORD_TRACE, reads=["gradients", "modules"], writes=["files"])
    def record_backward(self, engine: Engine) -> None:
        """Record the gradients of the backward."""
        self._record(engine, "BACKWARD_COMPLETED", ("gradients",), engine.state.update)

    @on("gradients_event", phase=Phase.PERSIST, rank=RECORD_TRACE, reads=["gradients", "modules"], writes=["files"])
    def record_gradients(self, engine: Engine) -> None:
        """Record the gradients that the optimizer will use."""
        self._record(engine, "GRADIENTS_READY", ("gradients",), engine.state.update)

    @on("step_event", phase=Phase.PERSIST, rank=RECORD_TRACE, reads=["weights", "modules"], writes=["files"])
    def record_step(self, engine: Engine) -> None:
        """Record the parameters after the step."""
        self._record(engine, "OPTIMIZER_STEP_COMPLETED", ("parameters",), engine.state.update)

    @on(
        "end_event",
        phase=Phase.PERSIST,
        rank=RECORD_TRACE,
        reads=["weights", "buffers", "optimizer", "rates", "groups", "modules", "metrics"],
        writes=["files"],
    )
    def record_iteration(self, engine: Engine) -> None:
        """Record all state that is kept from one iteration to the next."""
        self._record(engine, "ITERATION_COMPLETED", _KEPT)

    @on(
        Events.EPOCH_COMPLETED,
        phase=Phase.PERSIST,
        rank=RECORD_TRACE,
        reads=["weights", "buffers", "optimizer", "rates", "groups", "modules", "metrics"],
        writes=["files"],
    )
    def record_epoch(self, engine: Engine) -> None:
        """Record all state that is kept from one epoch to the next."""
        self._record(engine, "EPOCH_COMPLETED", _KEPT)

    def _record(self, engine: Engine, event: str, things: tuple[str, ...], update: UpdateState | None = None) -> None:
        """Make a record of these things, which is written at the end of the iteration."""
        state = engine.state
        self._open(engine)
        if self._counted != state.iteration:
            self._counts.clear()
            self._counted = state.iteration
        of_shard = engine.group.shards is not None and event in _OF_A_SHARD
        key = state.iteration, event, None if update is None else update.name, state.shard if of_shard else None
        count = self._counts[key] = self._counts.get(key, 0) + 1
        how = {"by_tensor": self.detail == "tensor", "measures": event not in _UNMEASURED}
        self._waiting.append(((*key, count), digests_of(contents_of(engine, things), **how)))
        if event in _ENDS:
            self._write()

    def _write(self) -> None:
        """Write the records that wait."""
        if self._writer is None or not self._waiting:
            return
        keys = [key for key, _ in self._waiting]
        digests = [one for _, one in self._waiting]
        found = Digests.read_together(digests)
        records = [Record(*key, one, of.numbers) for key, one, of in zip(keys, found, digests, strict=True)]
        self._waiting.clear()  # if the file is full, they are lost
        self._writer.append("".join(record.line() for record in records))
        self._place = Place.of(records[-1])

    def _open(self, engine: Engine) -> TraceWriter:
        """The file: cut to where the run continues, or a new one."""
        if self._writer is not None:
            return self._writer
        processes = engine.processes
        open_folder(self, self.path.parent)
        self._header = header_line({**described_environment(engine), "detail": self.detail})
        self._writer = writer = TraceWriter(self.path, processes.rank, self._header, self.part_size)
        continues = bool(self._state) and self._resume(writer, processes)
        if not continues:
            writer.begin()
        elif self._header != self._state["header"]:
            writer.append(self._header)
        if processes.is_rank_zero:
            self._settle_others(processes, continues)
        if self._state and not continues and processes.rank < self._state["processes"]:
            engine.findings.report(
                "W34",
                f"the trace {str(writer.path)!r} of {self.name!r} does not pick up where the loaded state left off; "
                "the earlier records are in a different file or lost",
                "before resuming, restore the trace of the run that saved the state",
                self.name,
            )
        self._processes = processes.rank, processes.world_size
        return writer

    def _resume(self, writer: TraceWriter, processes: Processes) -> bool:
        """Cut the file to the state's place. A state that was saved with other processes may be that of another rank."""
        if processes.rank == self._state["rank"]:
            return writer.resume(self._state)
        return writer.resume_at(Place(*self._state["place"]))

    def _settle_others(self, processes: Processes, continues: bool) -> None:
        """Cut the files of ranks that this run is without, or keep them under other names if they are of another run."""
        for rank in ranks_of(self.path):
            if rank < processes.world_size:
                continue
            other = TraceWriter(self.path, rank, self._header, self.part_size)
            if continues and other.resume_at(Place(*self._state["place"])):
                other.close()
            else:
                other.retire()

    @on(Events.CHECKPOINT_LOADED, phase=Phase.RECORD, reads=[], writes=["files"])
    def resume(self, engine: Engine) -> None:
        """Cut the file to the checkpoint's position."""
        self._close()
        if self._state:
            self._open(engine)

    @on(Events.COMPLETED, phase=Phase.PREPARE, reads=[], writes=[])
    def note_place(self, engine: Engine) -> None:
        """Note whether the file is in its place as the run ends; it may be moved afterwards."""
        self._is_placed = self._writer is not None and self._writer.in_place

    @on(Events.ENDED, phase=Phase.PERSIST, reads=[], writes=["files"])
    def close(self, engine: Engine) -> None:
        """Flush the file to disk and close it."""
        self._close()

    def _close(self) -> None:
        if self._writer is None:
            return
        try:
            if not self._is_placed:
                self._check_place()
            self._write()
        finally:
            self._is_placed = False
            self._state = self._written()
            self._waiting.clear()
            writer, self._writer = self._writer, None
            writer.close()

    def _check_place(self) -> None:
        """Report a file that is no longer the one at its path, which later records do not reach."""
        writer, engine = self._writer, self.engine
        if writer is not None and engine is not None and not writer.in_place:
            engine.findings.report(
                "W38",
                f"{self.name!r}: the trace {str(writer.path)!r} was moved, replaced or removed during this run, so "
                "its later records are not at this path; another process may be writing to the same path",
                "use a separate folder for each run",
                self.name,
            )

    def _written(self) -> dict[str, Any]:
        """The state of what is in the file."""
        writer, place = self._writer, self._place
        if writer is None or place is None:
            return self._state
        return {
            "part": writer.part,
            "length": writer.length,
            "sha256": writer.digest,
            "place": list(place),
            "rank": self._processes[0],
            "processes": self._processes[1],
            "header": self._header,
        }

    def sync_written(self) -> None:
        """Flush the file to disk, before a checkpoint refers to it."""
        self._check_place()
        if self._writer is not None:
            self._writer.sync()

    def state_dict(self) -> dict[str, Any]:
        self._write()
        return dict(self._written())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._close()
        self._state = dict(state)
        self._place = Place(*state["place"]) if state else None
        self._counts.clear()
