"""Elastic data parallel training: bit-identical weights for any number of processes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from signalfire import Engine, Events, Phase, on
from signalfire.authoring import check_choice, check_int
from signalfire.distributed.shard_rules import functions_of_shards
from signalfire.distributed.sums import broadcast
from signalfire.findings import Finding, finding

from ._common.distribution import Distribution

__all__ = ["ElasticDataParallel"]


class ElasticDataParallel(Distribution):
    """Elastic data parallel training: bit-identical weights for any number of processes.

    A step consists of a fixed number of batches, ``shards``. A single process computes all of them in turn; with two
    processes, each computes half of them. Each shard has its own batch, random numbers and gradient, like a rank with
    `DistributedDataParallel`. The gradients are added in a binary tree whose form does not depend on the number of processes.
    A run that loses a node continues on the other nodes as if nothing had happened, and a step with eight processes can be
    repeated with one.

    If there are more processes than shards, or if the number of processes is not a power of two, the shards are computed by the
    largest possible power-of-two number of processes. The other processes wait and keep the same weights.

    GET_BATCH_STARTED, GET_BATCH_COMPLETED and the events of forward, loss and backward are emitted for each shard of this
    process, with the shard's number in ``state.shard``; all other events are emitted once per step. From GRADIENTS_READY on,
    the gradients and ``state.update.loss`` cover all shards. A handler that acts at the events of a shard must keep nothing
    from one shard to the next, and must declare ``by_shard = True`` in its class. Without this declaration, the run raises an
    error that names the handler.

    BatchNorm normalizes over the batch of each shard; its running statistics after a step come from shard 0.

    Args:
        shards: Number of shards, a power of two. The effective batch size is the loader's batch size times this number.
        shard_policy: How data is sharded: "auto" or "round_robin"; see `DistributedDataParallel`. Step t reads the batches
            ``t * shards`` to ``(t + 1) * shards - 1``; the last step of an epoch may have fewer.
        threads: Number of torch threads during a run. This number determines how sums are split, and launchers set different
            values.
        backend: Backend of torch.distributed; see `DistributedDataParallel`.
        timeout: Seconds after which a rank that does not take part counts as lost; see `DistributedDataParallel`.

    Source:
        Li et al., "EasyScale: Elastic Training with Consistent Accuracy and Improved Utilization on GPUs" (SC 2023).

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> _ = engine.attach(ElasticDataParallel(shards=4))
        >>> data = [(torch.ones(4, 2), torch.ones(4, 1))] * 8
        >>> engine.run(data, max_epochs=1).iteration  # with 1, 2 or 4 processes
        2
    """

    _decisive = ("shards", "shard_policy", "threads")

    def __init__(
        self,
        *,
        shards: int,
        shard_policy: str = "auto",
        threads: int = 1,
        backend: str | None = None,
        timeout: float = 300.0,
        name: str | None = None,
    ) -> None:
        check_choice(self, "shard_policy", shard_policy, ("auto", "round_robin"))
        super().__init__(shard_policy=shard_policy, backend=backend, timeout=timeout, name=name)  # type: ignore[arg-type]
        self.shards = self._shards = check_int(self, "shards", shards)
        if shards & (shards - 1):
            raise ValueError(f"ElasticDataParallel(shards={shards}): expected a power of two, such as 8")
        self.threads = check_int(self, "threads", threads)
        self._threads_before: int | None = None

    def attached(self, engine: Engine) -> None:
        super().attached(engine)
        self.loss_event = Events.LOSS_COMPUTED
        self.buffers_event = None

    def findings(self, engine: Engine) -> Iterable[Finding]:
        shards, processes = engine.group.shards, self.processes.world_size
        if not engine.training or shards is None:
            return
        if idle := processes - shards.readers:
            count, few = shards.world_size, processes > shards.world_size
            reason = f"the {count} shards can be divided evenly only among a power-of-two number of processes"
            yield finding(
                "C41",
                f"{self.name!r}: {idle} of {processes} processes {'is' if idle == 1 else 'are'} idle, because "
                + (f"there are more processes than shards ({count})" if few else reason),
                f"set the number of processes to {shards.readers}{', or use more shards' * few}",
                [self.name],
            )
        for function in functions_of_shards(engine) if processes > 1 else ():
            yield finding(
                "C42",
                f"{function!r} is called for {shards.each} of {shards.world_size} shards in each process, so anything "
                "that this function counts or stores depends on the number of processes",
                "instead, read values that cover the whole step, such as engine.loss, at ITERATION_COMPLETED",
                [self.name],
            )

    @on(Events.MODEL_SETUP, reads=["device", "modules", "processes"], writes=["weights", "buffers"])
    def broadcast_weights(self, engine: Engine) -> None:
        """Broadcast the weights and buffers of rank 0, and set the number of threads."""
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        if self.processes.distributed and engine.training:
            self._check_device(engine)
            self._check_same_model(engine)
            with torch.no_grad():
                broadcast([t for module in engine.modules.values() for t in (*module.parameters(), *module.buffers())])

    @on(Events.STARTED, phase=Phase.FINALIZE, reads=["modules", "optimizer"], writes=["weights"])
    def broadcast_free(self, engine: Engine) -> None:
        """Broadcast the trained tensors outside the modules."""
        if not self.processes.distributed or not engine.training:
            return
        known = {p for module in engine.modules.values() for p in module.parameters()}
        free: list[Tensor] = [p for update in engine.updates for p in update.parameters if p not in known]
        with torch.no_grad():
            broadcast(free)

    @on(Events.ENDED, phase=Phase.FINALIZE, reads=[], writes=[])
    def put_threads_back(self, engine: Engine) -> None:
        """Restore the number of threads."""
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None
