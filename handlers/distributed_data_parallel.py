"""Data parallel training: every process learns from batches of its own, and all make the same step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from signalfire import Engine, Events, Phase, UpdateState, on
from signalfire.acts import Override
from signalfire.checks import check_bool, check_choice, check_int

from ._common.distribution import Distribution, Shares, broadcast

__all__ = ["DistributedDataParallel"]

Compression = Literal["fp16", "bf16", "powersgd"] | tuple[object, Callable[..., Any]]


class DistributedDataParallel(Distribution):
    """Trains with all processes that ``torchrun`` launched; launched alone, it does nothing, and the same script runs unchanged.

    Each process takes its turn of the batches, torch's DistributedDataParallel reduces the gradients while they are computed,
    and all processes make the same step, which is that of the batches joined: also in the last turn, in which batches may be
    smaller or missing. What one process asks for (a stop, a skipped step, a preemption) all do. Metrics are those of all
    samples, none counted twice; logs and bars are written by rank 0 alone, and so are checkpoints, which hold what differs
    between the processes, too.

    In a run ``engine.model`` is the wrapped model; ``engine.modules`` stay the bare ones, whose names and states checkpoints
    have. The wrapper is gone when the run ends. Within an accumulation window only the last backward reduces (``no_sync``).
    The buffers of all processes are those of rank 0 after every step, as they are with torch's, and when an evaluation begins.
    Modules whose parameters belong to several updates are refused; a learned tensor that belongs to no module is reduced, too.

    So that a resumed run goes on bit for bit, gradients are put into the same buckets from the first step on.

    Args:
        shares: how data is shared out. "auto": the batches of a DataLoader over a map-style dataset and of a sequence are dealt
            in turn, by their indices, in the order that rank 0 draws; a loader with a DistributedSampler gives what its sampler
            says, and is told the epoch. "own": each process has data of its own. "deal": other data is read by all processes,
            of which each takes its turn. The size of a step is that of the loader's batches times the number of processes.
        backend: of torch.distributed; by default gloo for the CPU, and NCCL with it if there are GPUs.
        timeout: after how many seconds a process that does not come to what all do together counts as lost: the others end with
            an error that names it and the last event that it reached.
        sync_batch_norm: whether BatchNorm normalises over the batches of all processes; on GPUs only.
        broadcast_buffers: whether buffers are made those of rank 0; see above.
        compression: how gradients are compressed on their way: "fp16", "bf16" (not with gloo), "powersgd", or a state and a
            communication hook of your own for ``register_comm_hook``. PowerSGD's memory is saved with each checkpoint.
        powersgd_rank: of the matrices that PowerSGD sends.
        powersgd_start: the number of iterations before PowerSGD begins.
        find_unused_parameters: for models that do not use all of their parameters in every iteration.
        bucket_cap_mb: the size of what is reduced at once, in MiB.
        gradient_as_bucket_view: whether gradients live in the buckets, which spares a copy of them.

    Source:
        Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (VLDB 2020); Vogels et al.,
        "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization" (NeurIPS 2019).

    Example:
        >>> DistributedDataParallel(timeout=60).processes.size  # not launched by torchrun
        1
    """

    def __init__(
        self,
        *,
        shares: Shares = "auto",
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
        super().__init__(shares=shares, backend=backend, timeout=timeout, name=name)
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
        self._at_work = False
        self._bare: Any = None  # engine.model as it was before the run
        self._wrapped: dict[str, TorchDDP] = {}  # by the names of the modules
        self._trained: dict[str, list[nn.Parameter]] = {}  # what each wrapper reduces
        self._of_update: dict[str, list[TorchDDP]] = {}
        self._free: dict[str, list[Tensor]] = {}  # parameters of updates that are in no module
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []  # BatchNorm layers, with their parents and names
        self._powersgd: dict[str, Any] = {}
        self._powersgd_of: dict[str, list[list[int]]] = {}  # the shapes of what was trained when it was filled
        self._powersgd_loaded: Mapping[str, Any] = {}

    def attached(self, engine: Engine) -> None:
        super().attached(engine)
        self._at_work = self.processes.several and engine.training
        self.choosing = Events.FORWARD_STARTED if self._at_work else None
        self.noting = Events.BACKWARD_COMPLETED if self._at_work else None
        if self._at_work:
            engine.overrides.replace(Override.REDUCTION, self.reduce, by=self)
            if self.compression == "bf16" and dist.get_backend() == "gloo":
                raise ValueError(f"{self.name!r}: compression='bf16' does not work with gloo; use 'fp16'")

    @on(Events.MODEL_SETUP)
    def begin_alike(self, engine: Engine) -> None:
        """Give all processes the weights and buffers of rank 0."""
        if not self._at_work:
            return
        if self.sync_batch_norm:
            self._synchronise_norms(engine)
        shapes = [(f"{root}.{key}", tuple(value.shape), str(value.dtype))
                  for root, module in engine.modules.items() for key, value in module.state_dict().items()
                  if isinstance(value, Tensor)]  # fmt: skip
        for rank, other in enumerate(self.processes.gather(shapes)):
            if different := sorted({one[0] for one in set(shapes) ^ set(other)}):
                raise ValueError(
                    f"{self.name!r}: the model of rank {rank} differs from this one in {', '.join(different[:5])}"
                )
        self._buffers = (
            [b for module in engine.modules.values() for b in module.buffers()] if self.broadcast_buffers else []
        )
        with torch.no_grad():
            broadcast([t for module in engine.modules.values() for t in (*module.parameters(), *module.buffers())])

    @on(Events.STARTED, phase=Phase.FINALIZE)
    @on(Events.CHECKPOINT_LOADED, phase=Phase.FINALIZE)
    @on(Events.EPOCH_STARTED, phase=Phase.FINALIZE)
    def wrap(self, engine: Engine) -> None:
        """Wrap the modules that are trained, anew if other parameters are trained than before."""
        if not self._at_work:
            return
        trained = {root: [p for p in module.parameters() if p.requires_grad] for root, module in engine.modules.items()}
        owners = {root: self._owner(engine, root, parameters) for root, parameters in trained.items()}
        trained = {root: parameters for root, parameters in trained.items() if owners[root] is not None}
        if len(engine.updates) > 1:  # the backward of each gives gradients to its own parameters alone
            own = {update.name: set(update.parameters) for update in engine.updates}
            trained = {root: [p for p in held if p in own[owners[root] or ""]] for root, held in trained.items()}
        if self._bare is not None and _same(trained, self._trained):
            return
        if self._bare is None:
            self._bare = engine.model
            self._find_free(engine)
        self._trained = trained
        self._wrapped = {
            root: self._wrap(root, engine.modules[root], parameters) for root, parameters in trained.items()
        }
        self._of_update = {update.name: [self._wrapped[root] for root in trained if owners[root] == update.name]
                           for update in engine.updates}  # fmt: skip
        roots = {root: self._wrapped.get(root, module) for root, module in engine.modules.items()}
        if self._bare is not None:
            alone = [wrapper for root, wrapper in roots.items() if engine.modules[root] is self._bare]
            engine.model = alone[0] if alone else nn.ModuleDict(roots)

    def _owner(self, engine: Engine, root: str, parameters: list[nn.Parameter]) -> str | None:
        """The update that trains a module."""
        held = set(parameters)
        owners = [update.name for update in engine.updates if any(p in held for p in update.parameters)]
        if len(owners) > 1:
            raise ValueError(
                f"{self.name!r}: module {root!r} is trained by the updates {', '.join(map(repr, owners))}, whose gradients "
                "cannot be reduced apart: give the Engine a module for each, as model={'...': ..., '...': ...}"
            )
        return owners[0] if owners else None

    def _find_free(self, engine: Engine) -> None:
        known = {p for module in engine.modules.values() for p in module.parameters()}
        self._free = {update.name: [p for p in update.parameters if p not in known] for update in engine.updates}
        with torch.no_grad():
            broadcast([p for parameters in self._free.values() for p in parameters])

    def _wrap(self, root: str, module: nn.Module, parameters: list[nn.Parameter]) -> TorchDDP:
        # Weights and buffers are alike where they have to be; another wrapper in the middle of a run changes none.
        wrapper = TorchDDP(_Called(module, parameters), init_sync=False, forward_sync_buffers=False, **self.options)  # type: ignore[arg-type]
        held = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        # DDP orders its buckets anew after the first backward. It does so now, twice over nothing, so that a resumed run, which
        # begins with another backward, adds up the gradients in the same order.
        for _ in range(2):
            wrapper(_NOTHING).backward()
        for parameter, gradient in zip(parameters, held, strict=True):
            parameter.grad = gradient
        if self.compression is not None:
            wrapper.register_comm_hook(*self._hook(root))
        return wrapper

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
            if self._powersgd_of.setdefault(root, shapes) != shapes:  # what it remembers is of other buckets
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
                    f"{self.name!r}: sync_batch_norm=True needs module {root!r} on a GPU; torch's SyncBatchNorm "
                    "does not run on the CPU"
                )
            for parent in list(module.modules()):
                for key, child in list(parent.named_children()):
                    if isinstance(child, nn.modules.batchnorm._BatchNorm) and not isinstance(child, nn.SyncBatchNorm):
                        self._replaced.append((parent, key, child))
                        setattr(parent, key, nn.SyncBatchNorm.convert_sync_batchnorm(child))

    # ---- in every iteration ---------------------------------------------------------------------------------------

    @on("choosing", phase=Phase.PREPARE)
    def choose(self, engine: Engine) -> None:
        """Reduce in the backward that completes a window, and only what is this update's."""
        update = engine.state.update
        own = self._of_update.get(update.name, ())
        for wrapper in self._wrapped.values():
            wanted = update.completes and wrapper in own
            wrapper.module.__dict__["called"] = False  # another update may have called it
            if wrapper.require_backward_grad_sync is not wanted:
                wrapper.require_backward_grad_sync = wanted

    @on("noting", phase=Phase.PREPARE)
    def note(self, engine: Engine) -> None:
        """What was called for a backward that reduces is reduced now."""
        for wrapper in self._of_update.get(engine.state.update.name, ()):
            called = wrapper.module.__dict__
            called["reduced"] = called["called"] and wrapper.require_backward_grad_sync
            called["called"] = False

    def reduce(self, engine: Engine, update: UpdateState) -> None:
        """Reduce what no backward has: nothing was learned here, or only with the bare module, or memory might have run out."""
        for wrapper in self._of_update.get(update.name, ()):
            called = wrapper.module.__dict__
            if not called["reduced"]:
                if self.sync_batch_norm and not called["called"]:
                    raise RuntimeError(
                        f"{self.name!r}: rank {self.processes.rank} has no batch in iteration {engine.state.iteration}, but "
                        "sync_batch_norm needs one in each process: use a loader with drop_last=True whose batches can be dealt "
                        "evenly"
                    )
                wrapper.require_backward_grad_sync = True
                wrapper(_NOTHING).backward()
            called["reduced"] = called["called"] = False
        if free := self._free.get(update.name):
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in free]
            for parameter, gradient in zip(free, gradients, strict=True):
                dist.all_reduce(gradient)
                parameter.grad = gradient.div_(self.processes.size)

    @on(Events.ENDED, phase=Phase.FINALIZE)
    def unwrap(self, engine: Engine) -> None:
        """Put the plain model back, with the weights that were trained."""
        if self._bare is not None:
            engine.model, self._bare = self._bare, None
        for parent, key, norm in self._replaced:
            setattr(parent, key, norm)
        self._replaced, self._buffers, self._free = [], [], {}
        self._wrapped, self._trained, self._of_update = {}, {}, {}

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


_NOTHING = object()
"""What a wrapper is called with by a process that has nothing to learn from."""


class _Called(nn.Module):
    """What torch's DDP wraps: the module, and a loss of zero in which all of its parameters have a part.

    A gradient of nothing is how a process takes part in a reduction to which it has nothing to add.
    """

    def __init__(self, module: nn.Module, trained: list[nn.Parameter]) -> None:
        super().__init__()
        self.module = module
        reduced = set(trained)
        self._ddp_params_and_buffers_to_ignore = [key for key, p in self.named_parameters() if p not in reduced]
        # Not through nn.Module, which would look for parameters.
        self.__dict__.update(called=False, reduced=False, trained=trained)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        if inputs and inputs[0] is _NOTHING:
            return sum(p.flatten()[:0].sum() for p in self.__dict__["trained"])
        if torch.is_grad_enabled():
            self.__dict__["called"] = True
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
    """Without a saved state, begin anew."""
    saved = saved or {"iter": 0, "errors": {}, "p": {}, "q": {}, "rng": None}
    state.iter = saved["iter"]
    state.error_dict, state.p_memory_dict, state.q_memory_dict = (dict(saved[part]) for part in ("errors", "p", "q"))
    if saved["rng"] is None:
        state.rng.seed(0)
    else:
        state.rng.set_state(tuple(saved["rng"]))
