"""Base of the handlers that distribute training: process group, heartbeat to the other ranks, broadcast of buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from signalfire import Attachment, Engine, Events, Handler, Phase, on
from signalfire.authoring import Capture, DeviceFeature, check_choice, check_number, refusal
from signalfire.distributed import (
    SINGLE_PROCESS,
    Processes,
    Watch,
    expected_processes,
    is_sharded,
    lost_another,
    note_failure,
    process_group,
)
from signalfire.distributed.group import PROCESS_GROUP
from signalfire.distributed.sums import broadcast
from signalfire.findings import Finding, finding

from .displays import in_notebook
from .ranks import BROADCAST_BUFFERS, RECORD_EVENT

__all__ = ["Distribution", "ShardPolicy"]

ShardPolicy = Literal["auto", "own", "round_robin"]

_RECORDED = (
    Events.MODEL_SETUP, Events.STARTED, Events.CHECKPOINT_LOADED, Events.EPOCH_STARTED, Events.GET_BATCH_STARTED,
    Events.GET_BATCH_COMPLETED, Events.FORWARD_STARTED, Events.LOSS_COMPUTED, Events.BACKWARD_STARTED,
    Events.BACKWARD_COMPLETED, Events.GRADIENTS_READY, Events.OPTIMIZER_STEP_STARTED, Events.OPTIMIZER_STEP_COMPLETED,
    Events.ITERATION_COMPLETED, Events.EVALUATION_STARTED, Events.EVALUATION_COMPLETED, Events.CHECKPOINT_SAVED,
    Events.EPOCH_COMPLETED, Events.COMPLETED,
)  # fmt: skip
_MAY_SKIP = (Events.BACKWARD_COMPLETED, Events.GRADIENTS_READY, Events.OPTIMIZER_STEP_STARTED)


class Distribution(Handler):
    """Joins the process group, and reports which rank failed and where when one is lost.

    Args:
        shard_policy: Policy for sharding data over the ranks; see `Group.join`.
        backend: Backend of torch.distributed.
        timeout: Timeout in seconds; see `process_group`.

    Attributes:
        processes: The process group. Before the handler is attached, only the launcher's numbers are known: ``rank``,
            ``local_rank`` and ``world_size``. Without a launcher such as torchrun, it is a single process.
        watch: Reports this rank's progress to the others; None outside a run and in a single process.
    """

    by_shard = True
    capture = Capture.FORBIDDEN  # what the ranks tell each other is read in each step
    device_features = frozenset({DeviceFeature.COLLECTIVES})
    beside_split_layers: ClassVar[bool] = False  # whether it also distributes a model whose layers are split
    _decisive: ClassVar[tuple[str, ...]] = ("shard_policy",)  # arguments that the weights depend on
    _shards: int | None = None  # of how many a step consists, whichever processes compute them
    _joins = True  # whether it has the ranks train together; else it acts beside a handler that does

    def __init__(self, *, shard_policy: ShardPolicy, backend: str | None, timeout: float, name: str | None) -> None:
        super().__init__(name=name)
        self.shard_policy = check_choice(self, "shard_policy", shard_policy, ("auto", "own", "round_robin"))
        if backend is not None and (not isinstance(backend, str) or not backend):
            raise TypeError(f"{type(self).__name__}(backend={backend!r}): expected a name, such as 'gloo' or 'nccl'")
        self.backend = backend
        self.timeout = check_number(self, "timeout", timeout, least=1)
        self.processes: Processes = expected_processes()
        self.watch: Watch | None = None
        self._last_event = ""
        self._failed_at: str | None = None
        self._recording: list[Attachment] = []
        self._buffers: list[Tensor] = []  # broadcast from rank 0

    def attached(self, engine: Engine) -> None:
        if engine.modules.wrapped:
            raise ValueError(
                f"{self.name!r}: the model {engine.modules.wrapped[0]!r} is already wrapped in torch's "
                f"{engine.modules.wrapper}, but the handler {type(self).__name__} wraps the model itself during a "
                "run; pass the unwrapped model to the Engine"
            )
        other = engine.overrides.owner_of(PROCESS_GROUP)
        if self._joins and other not in (None, self.name):
            raise ValueError(
                f"both {other!r} and {self.name!r} control how the model is distributed over processes; detach one of "
                "the two. To combine TensorParallel with FullyShardedDataParallel, give TensorParallel a size= smaller "
                "than the number of ranks"
            )
        self.processes = process_group(backend=self.backend, timeout=self.timeout)
        if self._joins:
            engine.group.join(self.processes, by=self, shard_policy=self.shard_policy, shards=self._shards)
        several = self.processes.distributed  # a single process needs no work in an iteration
        self.device_features = type(self).device_features if several else frozenset()
        self.loss_event = Events.LOSS_COMPUTED if several else None
        self.buffers_event = Events.OPTIMIZER_STEP_COMPLETED | Events.EVALUATION_STARTED if several else None

    def _check_factories(self, engine: Engine, change: str) -> None:
        """Raise ValueError for an optimizer whose parameters are replaced when the model is sharded or split."""
        for update in engine.updates:
            if isinstance(update.spec.optimizer, Optimizer):
                kind = type(update.spec.optimizer).__name__
                raise ValueError(
                    f"{self.name!r}: the {kind} of update {update.name!r} holds parameters that are replaced when the "
                    f"model is {change}; pass the Update a factory for the optimizer instead, such as "
                    f"partial(torch.optim.{kind}, lr=1e-3)"
                )

    def _check_same_model(self, engine: Engine) -> None:
        """Raise ValueError if the ranks have different models. Collective."""
        shapes = {f"{root}.{key}": (tuple(value.shape), str(value.dtype))
                  for root, module in engine.modules.items() for key, value in module.state_dict().items()
                  if isinstance(value, Tensor)}  # fmt: skip
        self._check_same("model", shapes)

    def _check_same(self, what: str, mine: Mapping[str, Any]) -> None:
        """Raise ValueError if the ranks have built different ones. Collective."""
        for rank, other in enumerate(self.processes.gather(mine)):
            if different := [key for key in mine.keys() | other.keys() if mine.get(key) != other.get(key)]:
                raise ValueError(
                    f"{self.name!r}: the {what} on rank {rank} differs from the {what} on this rank in "
                    f"{', '.join(sorted(different)[:5])}; build the same {what} on all ranks"
                )

    def _check_sharded(self, engine: Engine, else_it: str) -> None:
        for update in engine.updates:
            for index, parameter in enumerate(update.parameters):
                if not is_sharded(parameter):
                    raise ValueError(
                        f"{self.name!r}: parameter {index} of update {update.name!r} does not belong to any of the "
                        f"engine's modules, so it would {else_it}; make it a parameter of the model"
                    )

    def _check_device(self, engine: Engine) -> None:
        """Raise ValueError before the first collective on a device without them."""
        if (refused := refusal(engine.device, *self.device_features)) is not None:
            raise ValueError(f"{self.name!r}: {refused}")

    def settings(self) -> dict[str, Any]:
        """The arguments that the weights depend on; a run may resume with a different backend or timeout."""
        return {name: value for name, value in super().settings().items() if name in self._decisive}

    def detached(self, engine: Engine) -> None:
        self.processes = SINGLE_PROCESS

    def findings(self, engine: Engine) -> Iterable[Finding]:
        if engine.training and not self.processes.distributed and in_notebook():
            yield finding(
                "C38",
                f"{self.name!r} has no effect in a notebook, because the kernel is a single process",
                "move the training to a script, and launch the script with torchrun --nproc-per-node 2 train.py",
                [self.name],
            )

    @on(Events.MODEL_SETUP, phase=Phase.PREPARE, rank=RECORD_EVENT, reads=[], writes=["processes"])
    def start_watch(self, engine: Engine) -> None:
        """Start reporting this rank's progress to the others."""
        if not self.processes.distributed or not self._joins:
            return
        if 1 < engine.group.alike < self.processes.world_size and not self.beside_split_layers:
            raise ValueError(
                f"{self.name!r} does not support a model whose layers are split across {engine.group.alike} ranks; use "
                "FullyShardedDataParallel instead, or split the layers across all ranks"
            )
        self._last_event = Events.MODEL_SETUP.name
        for event in _RECORDED:
            # RECORD, where the engine asks whether a receiver may skip the step; these receivers do not.
            phase = Phase.RECORD if event in _MAY_SKIP else Phase.PREPARE
            receiver = partial(self._record_event, event.name)
            self._recording.append(engine.connect(event, receiver, phase=phase, rank=RECORD_EVENT))
        self._failed_at = None
        self.watch = self.processes.watch(partial(self._where, engine))

    def _where(self, engine: Engine) -> str:
        return self._failed_at or f"{self._last_event}, epoch {engine.state.epoch}, iteration {engine.state.iteration}"

    def _record_event(self, event: str, engine: Engine) -> None:
        self._last_event = event

    @on("loss_event", phase=Phase.PREPARE, reads=[], writes=["loss_weight"])
    def set_weight(self, engine: Engine) -> None:
        """Weight the batch by its number of samples, where the ranks' batches differ in size."""
        update = engine.state.update
        if update.share != 1:
            update.weight = update.weight * update.share

    @on(
        "buffers_event", phase=Phase.PREPARE, rank=BROADCAST_BUFFERS, reads=["buffers", "processes"], writes=["buffers"]
    )
    def sync_buffers(self, engine: Engine) -> None:
        """Broadcast the buffers of rank 0."""
        if self._buffers:
            with torch.no_grad():
                broadcast(self._buffers)

    @on(
        Events.EXCEPTION_RAISED | Events.INTERRUPTED,
        phase=Phase.PREPARE,
        rank=RECORD_EVENT,
        reads=["error"],
        writes=["error", "processes"],
    )
    def report_failure(self, engine: Engine) -> None:
        """Report this rank's failure to the others; if a different rank caused it, the error names that rank and the place."""
        error = engine.state.exception
        if self.watch is None or error is None:
            return
        note_failure()
        self._failed_at = self._where(engine)  # now, since the counts are reset before the other ranks ask
        if lost_another(error):
            for line in self.watch.explain():
                error.add_note(line)
        self.watch.failed(error)

    @on(Events.ENDED, phase=Phase.PERSIST, rank=RECORD_EVENT, reads=["error"], writes=["processes"])
    def stop_watch(self, engine: Engine) -> None:
        """Stop reporting after a successful run; after a failed one, the other ranks may still ask."""
        for attachment in self._recording:
            attachment.detach()
        watch, self.watch, self._recording = self.watch, None, []
        if watch is not None and engine.state.exception is None:
            watch.stop()
