"""Distributed data parallel (DDP) training: every rank trains on its own batches, and all take the same step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from signalfire import Engine, Events, Phase, UpdateState, on
from signalfire.authoring import Override, check_bool, check_choice, check_int
from signalfire.authoring.versions import NO_SYNC_AT_FIRST, NO_SYNC_OF_BUFFERS
from signalfire.distributed.notice import Carrier
from signalfire.distributed.sums import broadcast

from ._common.distribution import Distribution, ShardPolicy

__all__ = ["DistributedDataParallel"]

Compression = Literal["fp16", "bf16", "powersgd"] | tuple[object, Callable[..., Any]]


class DistributedDataParallel(Distribution):
    """Distributed data parallel training (DDP) on all processes launched by ``torchrun``; does nothing in a single process.

    Batches are sharded over the ranks, torch's DistributedDataParallel reduces the gradients during the backward pass, and all
    ranks take the same step. This step equals a step on the union of the ranks' batches, even in the last round, where batches
    may be smaller or missing. A stop, a skipped step or a preemption on one rank applies to all ranks. Metrics count every
    sample once. Only rank 0 writes logs, progress bars and checkpoints, which include the states that differ between ranks.

    During a run, ``engine.model`` is the wrapped model; the wrapper is removed at the end. ``engine.modules`` are the original
    modules, whose names and states are saved in checkpoints. Within an accumulation window, only the last backward pass
    reduces gradients (``no_sync``). All ranks receive the buffers of rank 0 after every step, as in torch's DDP, and at the
    start of an evaluation. The gradients of trained tensors outside the modules are also reduced. A module with parameters in
    several updates raises an error.

    Gradients are assigned to the same buckets from the first step on, so a resumed run is bit-exact.

    Args:
        shard_policy: How data is sharded. "auto" distributes the batches of a sequence, or of a DataLoader over a map-style
            dataset, round robin by index, in the order drawn by rank 0. A loader with a DistributedSampler keeps its sampler,
            and the engine sets the sampler's epoch. With "own", each rank has its own data. With "round_robin", all ranks read
            all of the data and use its batches in turn. For other data, such as a loader over an IterableDataset, "auto"
            raises an error; use "round_robin", or "own" if the dataset shards itself. The effective batch size is the loader's
            batch size times the number of processes.
        backend: Backend of torch.distributed; by default gloo for the CPU, and NCCL for GPUs.
        timeout: Seconds after which a rank that does not reach a collective operation counts as lost. The other ranks then
            raise an error that names the lost rank and its last event.
        sync_batch_norm: Whether BatchNorm normalizes over the batches of all ranks; on GPUs only.
        broadcast_buffers: Whether all ranks receive the buffers of rank 0; see above.
        compression: Compression of the gradients sent between ranks: "fp16", "bf16" (not with gloo), "powersgd", or a tuple of
            state and communication hook for ``register_comm_hook``. Checkpoints contain PowerSGD's state.
        powersgd_rank: Rank of the matrices sent by PowerSGD.
        powersgd_start: Number of iterations before PowerSGD starts.
        find_unused_parameters: Whether to search for unused parameters in every iteration, for models that do not always use
            all of them.
        bucket_cap_mb: Size in MiB of a bucket, a group of gradients that are reduced together.
        gradient_as_bucket_view: Whether gradients are views of the buckets, which saves a copy.

    Source:
        Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (VLDB 2020); Vogels et al.,
        "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization" (NeurIPS 2019).

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> _ = engine.attach(DistributedDataParallel())
        >>> state = engine.run([(torch.ones(4, 2), torch.ones(4, 1))] * 6, max_epochs=1)
        >>> # With two processes (0, 2, 3) and (1, 2, 3).
        >>> engine.processes.rank, engine.processes.world_size, state.iteration
        (0, 1, 6)
    """

    _decisive = (
        "shard_policy",
        "sync_batch_norm",
        "broadcast_buffers",
        "compression",
        "powersgd_rank",
        "powersgd_start",
    )

    def __init__(
        self,
        *,
        shard_policy: ShardPolicy = "auto",
        backend: str | None = None,
        timeout: float = 300.0,
        sync_batch_norm: bool = False,
        broadcast_buffers: bool = True,
        compression: Compression | None = None,
        powersgd_rank: int = 1,
        powersgd_start: int = 1000,
        find_unused_parameters: bool = False,
        bucket_cap_mb: int = 25,
        gradient_as_bucket_view: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(shard_policy=shard_policy, backend=backend, timeout=timeout, name=name)
        self.sync_batch_norm = check_bool(self, "sync_batch_norm", sync_batch_norm)
        self.broadcast_buffers = check_bool(self, "broadcast_buffers", broadcast_buffers)
        if compression is not None and not _is_hook(compression):
            check_choice(self, "compression", compression, ("fp16", "bf16", "powersgd"))
        self.compression = compression
        self.powersgd_rank = check_int(self, "powersgd_rank", powersgd_rank)
        self.powersgd_start = check_int(self, "powersgd_start", powersgd_start, least=2)
        self.options = {
            "find_unused_parameters": check_bool(self, "find_unused_parameters", find_unused_parameters),
            "bucket_cap_mb": check_int(self, "bucket_cap_mb", bucket_cap_mb),
            "gradient_as_bucket_view": check_bool(self, "gradient_as_bucket_view", gradient_as_bucket_view),
        }
        self._active = False  # whether the engine trains on more than one rank
        self._separate: Carrier | None = None  # of notices that cannot travel with the gradients
        self._original_model: Any = None  # engine.model before the run
        self._wrapped: dict[str, _Wrapped] = {}  # by module name
        self._trained: dict[str, list[nn.Parameter]] = {}  # the parameters that each wrapper reduces
        self._of_update: dict[str, list[_Wrapped]] = {}
        self._carrying: dict[str, _Wrapped] = {}  # by update: with whose gradients its notices travel
        self._free: dict[str, list[Tensor]] = {}  # by update: parameters that are in no module
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []  # BatchNorm layers, with their parents and names
        self._powersgd: dict[str, Any] = {}
        self._powersgd_of: dict[str, list[list[int]]] = {}  # the shapes of the parameters that each state belongs to
        self._powersgd_loaded: Mapping[str, Any] = {}

    def attached(self, engine: Engine) -> None:
        super().attached(engine)
        self._active = self.processes.distributed and engine.training
        self.forward_event = Events.FORWARD_STARTED if self._active else None
        self.backward_event = Events.BACKWARD_COMPLETED if self._active else None
        if self._active:
            engine.overrides.replace(Override.REDUCTION, self.reduce, by=self)
            self._separate, engine.group.carrier = engine.group.carrier, self
            if self.compression == "bf16" and dist.get_backend() == "gloo":
                raise ValueError(f"{self.name!r}: compression='bf16' does not work with gloo; use 'fp16'")

    @on(Events.MODEL_SETUP, reads=["device", "modules", "processes"], writes=["weights", "buffers"])
    def broadcast_weights(self, engine: Engine) -> None:
        """Broadcast the weights and buffers of rank 0."""
        if not self._active:
            return
        self._check_device(engine)
        if self.sync_batch_norm:
            self._synchronise_norms(engine)
        self._check_same_model(engine)
        self._buffers = (
            [b for module in engine.modules.values() for b in module.buffers()] if self.broadcast_buffers else []
        )
        with torch.no_grad():
            broadcast([t for module in engine.modules.values() for t in (*module.parameters(), *module.buffers())])

    @on(
        Events.STARTED | Events.CHECKPOINT_LOADED | Events.EPOCH_STARTED,
        phase=Phase.FINALIZE,
        reads=["gradients", "trainable", "weights", "modules", "optimizer"],
        writes=["modules"],
    )
    def wrap(self, engine: Engine) -> None:
        """Wrap the trained modules in torch's DDP; rebuild the wrappers if the trained parameters have changed."""
        if not self._active:
            return
        trained, owners = self._find_trained(engine)
        if self._original_model is None:
            self._original_model = engine.model
            self._find_free(engine)
        elif _same(trained, self._trained):
            return
        self._trained = trained
        wrapped: dict[str, _Wrapped] = {}
        of_update: dict[str, list[_Wrapped]] = {update.name: [] for update in engine.updates}
        for root, parameters in trained.items():
            siblings = of_update[owners[root]]  # notices travel with the first module of each update
            wrapped[root] = self._wrap(root, engine.modules[root], parameters, carries=not siblings)
            siblings.append(wrapped[root])
        self._wrapped, self._of_update = wrapped, of_update
        first = {name: several[0] for name, several in of_update.items() if several}
        self._carrying = {name: one for name, one in first.items() if one.message is not None}
        if self._original_model is not None:
            engine.model = self._wrapped_model(engine)

    def _wrapped_model(self, engine: Engine) -> nn.Module:
        roots: dict[str, nn.Module] = {**engine.modules, **{root: one.ddp for root, one in self._wrapped.items()}}
        single = [wrapper for root, wrapper in roots.items() if engine.modules[root] is self._original_model]
        return single[0] if single else nn.ModuleDict({root: roots[root] for root in engine.modules.models})

    def _find_trained(self, engine: Engine) -> tuple[dict[str, list[nn.Parameter]], dict[str, str]]:
        """The parameters that a backward reduces, and the update that trains them, both by module."""
        trained: dict[str, list[nn.Parameter]] = {}
        owners: dict[str, str] = {}
        for root, module in engine.modules.items():
            parameters = [p for p in module.parameters() if p.requires_grad]
            if (owner := self._owner(engine, root, parameters)) is not None:
                own = set(owner.parameters)
                # With several updates, the backward of one computes gradients of its own parameters only.
                trained[root] = parameters if len(engine.updates) == 1 else [p for p in parameters if p in own]
                owners[root] = owner.name
        return trained, owners

    def _owner(self, engine: Engine, root: str, parameters: list[nn.Parameter]) -> UpdateState | None:
        """The update that trains a module."""
        held = set(parameters)
        owners = [update for update in engine.updates if any(p in held for p in update.parameters)]
        if len(owners) > 1:
            names = ", ".join(repr(update.name) for update in owners)
            raise ValueError(
                f"{self.name!r}: module {root!r} is trained by the updates {names}, but gradients can be reduced "
                "for only one update per module; pass the Engine a separate module for each update: "
                "model={'...': ..., '...': ...}"
            )
        return owners[0] if owners else None

    def _find_free(self, engine: Engine) -> None:
        known = {p for module in engine.modules.values() for p in module.parameters()}
        self._free = {update.name: [p for p in update.parameters if p not in known] for update in engine.updates}
        with torch.no_grad():
            broadcast([p for parameters in self._free.values() for p in parameters])

    def _wrap(self, root: str, module: nn.Module, parameters: list[nn.Parameter], *, carries: bool) -> _Wrapped:
        # On a device, reading a notice would wait for the gradients; a hook of the user may do anything with it; and a search for
        # unused parameters takes it for one.
        carries &= parameters[0].device.type == "cpu"
        carries &= not self.options["find_unused_parameters"] and not isinstance(self.compression, tuple)
        wrapped = _Wrapped(module, parameters, carries=carries, options=self.options)
        held = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        # DDP rebuilds its buckets after the first backward. Two dummy backwards trigger it here, so that a resumed run, whose
        # first backward is another one, sums the gradients in the same order.
        for _ in range(2):
            wrapped.backward_of_nothing()
        for parameter, gradient in zip(parameters, held, strict=True):
            parameter.grad = gradient
        if self.compression is not None:
            wrapped.ddp.register_comm_hook(*self._hook(root))
        return wrapped

    def _hook(self, root: str) -> tuple[object, Callable[..., Any]]:
        if self.compression == "fp16":
            return None, default_hooks.fp16_compress_hook
        if self.compression == "bf16":
            return None, default_hooks.bf16_compress_hook
        if self.compression == "powersgd":
            if root not in self._powersgd:
                self._powersgd[root] = powerSGD_hook.PowerSGDState(
                    None, matrix_approximation_rank=self.powersgd_rank, start_powerSGD_iter=self.powersgd_start
                )
                _load_powersgd(self._powersgd[root], self._powersgd_loaded.get(root))
            state, shapes = self._powersgd[root], [list(p.shape) for p in self._trained[root]]
            if self._powersgd_of.setdefault(root, shapes) != shapes:  # its memory belongs to other buckets
                for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
                    memory.clear()
                self._powersgd_of[root] = shapes
            return self._powersgd[root], powerSGD_hook.powerSGD_hook
        assert isinstance(self.compression, tuple)
        return self.compression

    def _synchronise_norms(self, engine: Engine) -> None:
        for root, module in engine.modules.items():
            if any(p.device.type == "cpu" for p in module.parameters()):
                raise ValueError(
                    f"{self.name!r}: sync_batch_norm=True, but module {root!r} is on the CPU, where torch's "
                    "SyncBatchNorm does not run; move the module to a GPU"
                )
            for parent in list(module.modules()):
                for key, child in list(parent.named_children()):
                    if isinstance(child, nn.modules.batchnorm._BatchNorm) and not isinstance(child, nn.SyncBatchNorm):
                        self._replaced.append((parent, key, child))
                        setattr(parent, key, nn.SyncBatchNorm.convert_sync_batchnorm(child))

    # ---- in every iteration ---------------------------------------------------------------------------------------

    @on("forward_event", phase=Phase.PREPARE, reads=["window"], writes=[])
    def set_gradient_sync(self, engine: Engine) -> None:
        """Enable the reduction for the backward that completes a window, for the modules of this update only."""
        update = engine.state.update
        own = self._of_update.get(update.name, ())
        for one in self._wrapped.values():
            one.use.called = False  # another update may have called it
            syncs = update.sync_gradients and one in own
            if one.ddp.require_backward_grad_sync is not syncs:  # setting an attribute of a module takes a while
                one.ddp.require_backward_grad_sync = syncs

    @on("backward_event", phase=Phase.PREPARE, reads=[], writes=[])
    def record_backward(self, engine: Engine) -> None:
        """Record which modules the backward has reduced: those called for it, if it synchronizes."""
        for one in self._of_update.get(engine.state.update.name, ()):
            one.use.reduced = one.use.called and one.ddp.require_backward_grad_sync
            one.use.called = False

    def reduce(self, engine: Engine, update: UpdateState) -> None:
        """Reduce modules that no backward has reduced.

        Either this rank has no loss, or only the original module was called, or the batch may have run out of memory.
        """
        for one in self._of_update.get(update.name, ()):
            if not one.use.reduced:
                if self.sync_batch_norm and not one.use.called:
                    raise RuntimeError(
                        f"{self.name!r}: rank {self.processes.rank} has no batch in iteration "
                        f"{engine.state.iteration}, but sync_batch_norm=True needs a batch on every rank; use a loader "
                        "with drop_last=True and a number of batches that is divisible by the number of processes"
                    )
                one.ddp.require_backward_grad_sync = True
                one.backward_of_nothing(notice=one.message is not None and engine.group.notice(update, computed=True))
            one.use.reduced = one.use.called = False
        if free := self._free.get(update.name):
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in free]
            for parameter, gradient in zip(free, gradients, strict=True):
                dist.all_reduce(gradient)
                parameter.grad = gradient.div_(self.processes.world_size)

    # ---- notices: see `Carrier` -----------------------------------------------------------------------------------

    def send(self, update: UpdateState, notice: bool) -> tuple[Tensor, Tensor] | None:
        """Let the backward carry a notice with the gradients of a module; if it does not call that module, `reduce` does."""
        one = self._carrying.get(update.name)
        if one is None:
            assert self._separate is not None
            return self._separate.send(update, notice)
        return one.message_with_gradient(notice) if one.use.called and one.ddp.require_backward_grad_sync else None

    def receive(self, update: UpdateState) -> bool:
        """Whether any rank gave notice, which makes the mean over the ranks nonzero."""
        one = self._carrying.get(update.name)
        if one is None:
            assert self._separate is not None
            return self._separate.receive(update)
        assert one.message is not None
        assert one.message.grad is not None
        mean, one.message.grad = one.message.grad.item(), None
        return mean != 0

    @on(Events.ENDED, phase=Phase.FINALIZE, reads=[], writes=["modules"])
    def unwrap(self, engine: Engine) -> None:
        """Restore the original model, which has the trained weights."""
        if self._original_model is not None:
            engine.model, self._original_model = self._original_model, None
        for parent, key, norm in self._replaced:
            setattr(parent, key, norm)
        self._replaced, self._buffers, self._free = [], [], {}
        self._wrapped, self._trained, self._of_update, self._carrying = {}, {}, {}, {}

    # ---- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if not self._powersgd:
            return {}
        return {
            "powersgd": {root: _powersgd_state(one) for root, one in self._powersgd.items()},
            "powersgd_of": {root: [list(shape) for shape in shapes] for root, shapes in self._powersgd_of.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._powersgd_loaded = state.get("powersgd", {})
        self._powersgd_of = {
            root: [list(shape) for shape in shapes] for root, shapes in state.get("powersgd_of", {}).items()
        }
        for root, one in self._powersgd.items():
            _load_powersgd(one, self._powersgd_loaded.get(root))


_DUMMY = object()
"""The input of a wrapper on a rank without a loss; the output is a zero that depends on all parameters."""


class _Use:
    """What is known of a wrapped module in a window.

    Attributes:
        called: Whether it was called through the wrapper since the last backward.
        reduced: Whether the last backward has reduced its gradients.
    """

    __slots__ = ("called", "reduced")

    def __init__(self) -> None:
        self.called = self.reduced = False


class _Wrapped:
    """A module in torch's DDP.

    Attributes:
        ddp: The wrapper.
        use: What was done with it in this window. The wrapper holds this as well, but nothing that holds the wrapper, so that
            its hooks on the parameters are removed as soon as it is released.
        message: A parameter that no output depends on: its gradient carries this rank's notice to the others in the first
            bucket. None if notices travel separately.
    """

    def __init__(
        self, module: nn.Module, trained: list[nn.Parameter], *, carries: bool, options: Mapping[str, Any]
    ) -> None:
        self.use = _Use()
        self.message = nn.Parameter(torch.zeros(1, dtype=trained[0].dtype)) if carries else None
        if self.message is not None:
            self._values = torch.zeros_like(self.message), torch.ones_like(self.message)
        tracker = _CallTracker(module, trained, self.message, self.use)
        # Without init_sync: weights and buffers are the same on all ranks, and a wrapper rebuilt in a run must not change them.
        self.ddp = TorchDDP(tracker, **NO_SYNC_AT_FIRST, **NO_SYNC_OF_BUFFERS, **options)

    def message_with_gradient(self, notice: bool) -> tuple[Tensor, Tensor]:
        """The message, and its gradient on a rank with a notice or without one."""
        assert self.message is not None
        return self.message, self._values[notice]

    def backward_of_nothing(self, *, notice: bool = False) -> None:
        """A backward with zero gradients, which reduces those that the parameters hold, and carries a notice."""
        nothing = self.ddp(_DUMMY)
        if self.message is None:
            nothing.backward()
        else:
            message, value = self.message_with_gradient(notice)
            torch.autograd.backward((nothing, message), (None, value))


class _CallTracker(nn.Module):
    """The module that torch's DDP wraps: tracks whether the original module was called, and provides a dummy output.

    With the dummy's zero gradients, a rank without a loss participates in the reduction.
    """

    def __init__(self, module: nn.Module, trained: list[nn.Parameter], message: nn.Parameter | None, use: _Use) -> None:
        super().__init__()
        self.module = module
        self.message = message
        self._trained = tuple(trained)
        self._use = use
        reduced = {*trained, message}
        self._ddp_params_and_buffers_to_ignore = [key for key, p in self.named_parameters() if p not in reduced]

    def forward(self, *inputs: Any, **options: Any) -> Any:
        if inputs and inputs[0] is _DUMMY:
            return sum(p.flatten()[:0].sum() for p in self._trained)
        if torch.is_grad_enabled():
            self._use.called = True
        return self.module(*inputs, **options)


def _same(one: Mapping[str, list[nn.Parameter]], other: Mapping[str, list[nn.Parameter]]) -> bool:
    return one.keys() == other.keys() and all(
        len(one[key]) == len(other[key]) and all(a is b for a, b in zip(one[key], other[key], strict=True))
        for key in one
    )


def _is_hook(compression: object) -> bool:
    return isinstance(compression, tuple) and len(compression) == 2 and callable(compression[1])


def _powersgd_state(state: Any) -> dict[str, Any]:
    kind, keys, position, has_gauss, cached = state.rng.get_state(legacy=True)
    return {
        "iter": state.iter,
        "errors": dict(state.error_dict),
        "p": dict(state.p_memory_dict),
        "q": dict(state.q_memory_dict),
        "rng": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
    }


def _load_powersgd(state: Any, saved: Mapping[str, Any] | None) -> None:
    """Load a saved state; reset without one."""
    saved = saved or {"iter": 0, "errors": {}, "p": {}, "q": {}, "rng": None}
    state.iter = saved["iter"]
    state.error_dict, state.p_memory_dict, state.q_memory_dict = (dict(saved[part]) for part in ("errors", "p", "q"))
    if saved["rng"] is None:
        state.rng.seed(0)
    else:
        state.rng.set_state(tuple(saved["rng"]))
