"""What handlers that spread the model over processes have in common. Not a handler that is attached itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from signalfire import Attachment, Engine, Events, Handler, Phase, on
from signalfire.checks import check_choice, check_number
from signalfire.distributed import ALONE, Processes, Watch, lost_another, note_failure, together

from .ranks import NOTE_EVENT, SAME_BUFFERS

__all__ = ["Distribution", "Shares", "broadcast"]

Shares = Literal["auto", "own", "deal"]

_NOTED = (
    Events.MODEL_SETUP, Events.STARTED, Events.CHECKPOINT_LOADED, Events.EPOCH_STARTED, Events.GET_BATCH_STARTED,
    Events.GET_BATCH_COMPLETED, Events.FORWARD_STARTED, Events.LOSS_COMPUTED, Events.BACKWARD_STARTED,
    Events.BACKWARD_COMPLETED, Events.GRADIENTS_READY, Events.OPTIMIZER_STEP_STARTED, Events.OPTIMIZER_STEP_COMPLETED,
    Events.ITERATION_COMPLETED, Events.EVALUATION_STARTED, Events.EVALUATION_COMPLETED, Events.CHECKPOINT_SAVED,
    Events.EPOCH_COMPLETED, Events.COMPLETED,
)  # fmt: skip


class Distribution(Handler):
    """Joins the processes that were launched together, and tells what became of one that is lost.

    Args:
        shares: how data is shared out; see `Engine.join`.
        backend: of torch.distributed.
        timeout: in seconds; see `together`.

    Attributes:
        processes: those that train together: this one alone before the handler is attached, and unless it was launched by
            torchrun.
        watch: what tells the other processes where this one is; None outside a run, and alone.
    """

    def __init__(self, *, shares: Shares, backend: str | None, timeout: float, name: str | None) -> None:
        super().__init__(name=name)
        self.shares = check_choice(self, "shares", shares, ("auto", "own", "deal"))
        if backend is not None and (not isinstance(backend, str) or not backend):
            raise TypeError(
                f"{type(self).__name__}(backend={backend!r}): it has to be a name, such as 'gloo' or 'nccl'"
            )
        self.backend = backend
        self.timeout = check_number(self, "timeout", timeout, least=1)
        self.processes: Processes = ALONE
        self.watch: Watch | None = None
        self._last = ""  # the event that was told last
        self._failed_at: str | None = None
        self._noting: list[Attachment] = []
        self._buffers: list[Tensor] = []  # of which every process is to have the values of rank 0

    def attached(self, engine: Engine) -> None:
        self.processes = together(backend=self.backend, timeout=self.timeout)
        engine.group.join(self.processes, by=self, shares=self.shares)
        several = self.processes.several  # alone, nothing is done in an iteration
        self.weighing = Events.LOSS_COMPUTED if several else None
        self.sharing = Events.OPTIMIZER_STEP_COMPLETED | Events.EVALUATION_STARTED if several else None

    def detached(self, engine: Engine) -> None:
        self.processes = ALONE

    @on(Events.MODEL_SETUP, phase=Phase.PREPARE, rank=NOTE_EVENT)
    def begin_watch(self, engine: Engine) -> None:
        """Tell the others from now on where this process is."""
        if not self.processes.several:
            return
        self._last = Events.MODEL_SETUP.name
        for event in _NOTED:
            # Where a step may be skipped, whoever may change something is asked about; this only records.
            phase = Phase.RECORD if event in (Events.GRADIENTS_READY, Events.OPTIMIZER_STEP_STARTED) else Phase.PREPARE
            self._noting.append(engine.connect(event, partial(self._note, event.name), phase=phase, rank=NOTE_EVENT))
        self._failed_at = None
        self.watch = self.processes.watch(partial(self._where, engine))

    def _where(self, engine: Engine) -> str:
        return self._failed_at or f"{self._last}, epoch {engine.state.epoch}, iteration {engine.state.iteration}"

    def _note(self, event: str, engine: Engine) -> None:
        self._last = event

    @on("weighing", phase=Phase.PREPARE)
    def weigh(self, engine: Engine) -> None:
        """Let a batch count by its samples where those of the other processes have more or fewer."""
        update = engine.state.update
        if update.share != 1:
            update.weight = update.weight * update.share

    @on("sharing", phase=Phase.PREPARE, rank=SAME_BUFFERS)
    def share_buffers(self, engine: Engine) -> None:
        """Give all processes the buffers of rank 0."""
        if self._buffers:
            with torch.no_grad():
                broadcast(self._buffers)

    @on(Events.EXCEPTION_RAISED | Events.INTERRUPTED, phase=Phase.PREPARE, rank=NOTE_EVENT)
    def explain(self, engine: Engine) -> None:
        """Tell the others that this process fails; if it fails because of them, which of them it was, and where."""
        error = engine.state.exception
        if self.watch is None or error is None:
            return
        note_failure()
        self._failed_at = self._where(engine)  # the counts are set back before others ask
        if lost_another(error):
            for line in self.watch.explain():
                error.add_note(line)
        self.watch.failed(error)

    @on(Events.ENDED, phase=Phase.PERSIST, rank=NOTE_EVENT)
    def end_watch(self, engine: Engine) -> None:
        """A run that ended well needs no watch; after one that did not, the others may still ask."""
        for attachment in self._noting:
            attachment.detach()
        watch, self.watch, self._noting = self.watch, None, []
        if watch is not None and engine.state.exception is None:
            watch.stop()


def broadcast(tensors: Sequence[Tensor]) -> None:
    """Give all processes the values that tensors have on rank 0; of one kind at once."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in kinds.values():
        flat = torch.cat([tensor.detach().flatten() for tensor in alike])
        dist.broadcast(flat.view(torch.uint8), src=0)  # gloo knows fewer types
        for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
            tensor.detach().copy_(part.view_as(tensor))
