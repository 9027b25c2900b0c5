"""Fully sharded data parallelism (FSDP): every rank holds a shard of weights, gradients and optimizer states."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Phase, UpdateState, on
from signalfire.authoring import Override, check_bool, check_choice, check_int, tensors_in, unchanged_random_state
from signalfire.authoring.versions import check_torch
from signalfire.distributed import discard_unreduced, gathered_until_backward, is_sharded, reshard, units_in, unsharded
from signalfire.distributed.sums import broadcast
from signalfire.runs.restore import Buffers

from ._common.distribution import Distribution, ShardPolicy
from ._common.ranks import GATHER_WEIGHTS

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = ["FullyShardedDataParallel"]

Units = str | type[nn.Module] | Iterable[str | type[nn.Module]] | Callable[[str, nn.Module], bool]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class FullyShardedDataParallel(Distribution):
    """Fully sharded data parallel training (FSDP2), for models that are too large for one device.

    Weights, gradients, optimizer states and data are sharded over the processes launched by torchrun. Each step equals a step
    on the union of the ranks' batches. The weights of a part of the model (a unit) are all-gathered just before use and freed
    afterwards, and its gradients are reduce-scattered. A rank without a batch or loss runs its last batch again, with zero
    gradients. In a single process, the handler does nothing, so the same script runs unchanged.

    The model is sharded in place at MODEL_SETUP, before optimizers are built, from the weights of rank 0. It stays sharded
    after the run; `unshard` restores plain modules. Modules, optimizers and averages hold DTensors, which `Checkpoint` writes
    as shards that any number of processes can load.

    All ranks receive the buffers of rank 0 after every step and at the start of an evaluation. Within an accumulation window,
    gradients are not reduced, so an open window cannot be saved: `Engine.state_dict` raises an error unless
    ``reduce_every_batch`` is set. During evaluations by the trainer, every rank holds the full weights, so the ranks may
    evaluate different numbers of batches.

    Args:
        units: Submodules gathered as one unit each; the rest of the model is one more unit. Give paths, such as "encoder" or
            "blocks.*", where ``*`` matches one name; classes; an iterable of these; or a function ``(path, module) -> bool``. By
            default the model's children that have parameters, and the items of module lists. Larger units need fewer messages and
            more memory; ``()`` makes the whole model one unit. A unit's weights exist only while it is called, so modules that
            share weights must be in the same unit.
        replicas: Number of copies of the model (HSDP); 1 shards over all ranks. The ranks are divided into this many groups of
            consecutive ranks, such as those of one machine, and each group shards one copy. Weights are gathered only inside a
            group, and gradients are also summed over the groups.
        reshard_after_forward: Whether units free their weights after the forward, and gather them again for the backward. False
            saves a third of the communication, but keeps the full weights from the forward to the backward.
        param_dtype: Data type in which weights are gathered and used: "bf16", "fp16" or "fp32"; by default their own. The
            shards that the optimizer sees keep their own type. An alternative to `MixedPrecision`, which casts per operation.
        reduce_dtype: Data type for reducing gradients; by default ``param_dtype``.
        reduce_every_batch: Whether to reduce gradients with every batch of an accumulation window. This takes less memory,
            because no rank holds full gradients, and allows saving open windows.
        gather_to_evaluate: Whether every rank holds the full weights during evaluations by the trainer. If False, models that
            do not fit on one device can be evaluated, but all ranks need the same number of batches.
        shard_policy: How data is sharded over ranks; see `DistributedDataParallel`.
        backend: Backend of torch.distributed; by default gloo for the CPU, and NCCL for GPUs.
        timeout: Seconds after which a rank that does not reach a collective operation counts as lost.

    Raises:
        ValueError: For ranks that do not divide into ``replicas`` groups of at least two, for an optimizer instance instead of a
            factory, for several updates, for units that share parameters, and with handlers that compute gradients from parts of
            the batch.

    Source:
        Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (VLDB 2023); Rajbhandari et al., "ZeRO:
        Memory Optimizations Toward Training Trillion Parameter Models" (SC 2020). The implementation is
        ``torch.distributed.fsdp.fully_shard``.

    Example:
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(nn.functional.mse_loss, torch.optim.SGD)
        >>> engine = Engine(update, model=nn.Linear(2, 2), seed=0)
        >>> _ = engine.attach(FullyShardedDataParallel())
        >>> data = [(torch.ones(4, 2), torch.ones(4, 2))] * 6
        >>> engine.run(data, max_epochs=1).iteration  # with two processes 3 each
        6
    """

    trains = True
    beside_split_layers = True
    _decisive = ("shard_policy", "param_dtype", "reduce_dtype", "replicas")

    def __init__(
        self,
        *,
        units: Units | None = None,
        replicas: int = 1,
        reshard_after_forward: bool = True,
        param_dtype: Literal["bf16", "fp16", "fp32"] | None = None,
        reduce_dtype: Literal["bf16", "fp16", "fp32"] | None = None,
        reduce_every_batch: bool = False,
        gather_to_evaluate: bool = True,
        shard_policy: ShardPolicy = "auto",
        backend: str | None = None,
        timeout: float = 300.0,
        name: str | None = None,
    ) -> None:
        super().__init__(shard_policy=shard_policy, backend=backend, timeout=timeout, name=name)
        self.units = _checked(units)
        self.replicas = check_int(self, "replicas", replicas)
        self.reshard_after_forward = check_bool(self, "reshard_after_forward", reshard_after_forward)
        self.param_dtype = self._dtype("param_dtype", param_dtype)
        self.reduce_dtype = self._dtype("reduce_dtype", reduce_dtype)
        self.reduce_every_batch = check_bool(self, "reduce_every_batch", reduce_every_batch)
        self.gather_to_evaluate = check_bool(self, "gather_to_evaluate", gather_to_evaluate)
        self._roots: list[FSDPModule] = []
        self._hooks: list[Any] = []
        self._syncs = True  # whether the next backward reduces
        self._unreduced = False  # whether modules hold gradients that no backward has reduced
        self._used = False  # whether modules were called since the last reset
        self._forward_done = self._backward_done = False  # in this micro-step
        self._outputs: list[Tensor] = []  # for a backward without a loss
        self._kept: list[FSDPModule] = []  # their own weights stay gathered from the forward to the backward
        self._gathered = ExitStack()  # closed once the backward has run
        self._batch: Any = None  # the last one

    def _dtype(self, argument: str, value: str | None) -> torch.dtype | None:
        return None if value is None else _DTYPES[check_choice(self, argument, value, tuple(_DTYPES))]

    def attached(self, engine: Engine) -> None:
        self._check_factories(engine, "sharded")
        super().attached(engine)
        distributed = self.processes.distributed
        self.update_started_event = Events.UPDATE_STARTED if distributed else None
        self.forward_event = Events.FORWARD_STARTED if distributed else None
        self.backward_event = Events.BACKWARD_COMPLETED if distributed else None
        self.update_completed_event = Events.UPDATE_COMPLETED if distributed else None
        self.gather_event = Events.EVALUATION_STARTED if distributed and self.gather_to_evaluate else None
        if distributed:
            self._check_shardable(engine)
            engine.overrides.replace(Override.REDUCTION, self.reduce, by=self)
            # Each part of a batch has its own forward, and all ranks would need the same number of forwards.
            engine.overrides.claim(Override.GRADIENTS, by=self)

    def _check_shardable(self, engine: Engine) -> None:
        size = self.processes.world_size
        if size % self.replicas or size == self.replicas:
            raise ValueError(
                f"{self.name!r}: replicas={self.replicas} does not split {size} ranks into equal groups of two or more"
                + ("; for a full replica on each rank, use DistributedDataParallel" if size == self.replicas else "")
            )
        if len(engine.updates) > 1:
            raise ValueError(
                f"{self.name!r}: an engine with several updates ({', '.join(u.name for u in engine.updates)}) cannot be "
                "sharded; use DistributedDataParallel"
            )

    # ---- set-up ---------------------------------------------------------------------------------------------------

    @on(
        Events.MODEL_SETUP,
        phase=Phase.FINALIZE,
        reads=["device", "trainable", "weights", "modules", "processes"],
        writes=["modules", "weights"],
    )
    def shard(self, engine: Engine) -> None:
        """Shard the modules from the weights of rank 0, after they have been moved and converted."""
        self._roots = []
        if not engine.processes.distributed:
            return
        check_torch(self)
        from torch.distributed.fsdp import FSDPModule

        self._check_device(engine)
        self._check_beside_split_layers(engine)
        self._check_units(engine)
        for name, root in engine.modules.items():
            if not isinstance(root, FSDPModule) and _has_parameters(root):
                self._shard(root, engine.modules.prefix(name), self._mesh(engine))
            if isinstance(root, FSDPModule):
                self._roots.append(root)
                self._hooks.append(root.register_forward_hook(self._record_output))
        self._kept = self._roots if self.reshard_after_forward else units_in(engine.modules.values())
        reshard(engine.modules.values())
        if self._used and not any(update.window.filled for update in engine.updates):
            self._reset()  # an error may have interrupted an iteration
        self._buffers = [buffer for root in self._roots for buffer in root.buffers()]  # type: ignore[attr-defined]
        self._set_sync(True)

    def _mesh(self, engine: Engine) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        alike = engine.group.alike
        size = engine.processes.world_size // (self.replicas * alike)
        sizes = {"replicate": self.replicas, "shard": size, "layers": alike}
        used = {key: ranks for key, ranks in sizes.items() if ranks > 1 or key == "shard"}
        mesh = init_device_mesh(engine.device.type, tuple(used.values()), mesh_dim_names=tuple(used))
        # Of split layers the other dimension is that of the parameters already.
        return mesh["shard"] if alike > 1 else mesh

    def _check_beside_split_layers(self, engine: Engine) -> None:
        if engine.group.alike == 1:
            return
        if self.replicas > 1:
            raise ValueError(
                f"{self.name!r}: replicas={self.replicas} with layers split across {engine.group.alike} ranks needs a "
                "three-dimensional mesh, which is not supported; use replicas=1, or detach TensorParallel"
            )
        if self.shard_policy == "own":
            raise ValueError(
                f"{self.name!r}: shard_policy='own' does not work with layers split across {engine.group.alike} ranks, "
                "which must read the same data; use 'auto' or 'round_robin'"
            )

    def _check_units(self, engine: Engine) -> None:
        paths = {
            path: module
            for name, root in engine.modules.items()
            for path, module in root.named_modules(prefix=engine.modules.prefix(name))
            if module is not root
        }
        for unit in self.units if isinstance(self.units, tuple) else ():
            if not any(_matches(unit, path, module) for path, module in paths.items()):
                known_paths = ", ".join(list(paths)[:8])
                raise ValueError(
                    f"{self.name!r}: units={unit!r} matches no module; available modules: {known_paths or 'none'}"
                )

    def _shard(self, root: nn.Module, name: str, mesh: Any) -> None:
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        units = self._units_of(root, name)
        with torch.no_grad():
            broadcast([one for one in (*root.parameters(), *root.buffers()) if not is_sharded(one)])
        policy = MixedPrecisionPolicy(self.param_dtype, self.reduce_dtype)
        for unit in [*units, root]:
            fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
            assert isinstance(unit, FSDPModule)

    def _units_of(self, root: nn.Module, name: str) -> list[nn.Module]:
        """The units inside a module, inner ones first."""
        paths = {module: path for path, module in root.named_modules(prefix=name) if module is not root}
        chosen = set(_children(root) if self.units is None else self._matching(paths))
        units = [module for module in reversed(paths) if module in chosen and _has_parameters(module)]
        self._check_weights(units, {root: name, **paths})
        return units

    def _matching(self, paths: Mapping[nn.Module, str]) -> list[nn.Module]:
        if isinstance(self.units, tuple):
            return [module for unit in self.units for module, path in paths.items() if _matches(unit, path, module)]
        return [module for module, path in paths.items() if self.units(path, module)]

    def _check_weights(self, units: list[nn.Module], paths: Mapping[nn.Module, str]) -> None:
        """Raise ValueError for a unit that is never called, and for weights that are in several units."""
        owners: dict[nn.Parameter, nn.Module] = {}
        for unit in units:  # a parameter belongs to the innermost unit that contains it
            for parameter in unit.parameters():
                owners.setdefault(parameter, unit)
        for module, path in paths.items():
            if isinstance(module, nn.ModuleList | nn.ModuleDict) and module in units:
                raise ValueError(
                    f"{self.name!r}: {path!r} is a {type(module).__name__}, which is never called; pass its items as "
                    "units instead"
                )
            inside = next((unit for unit in units if module in set(unit.modules())), None)
            for key, parameter in module.named_parameters(recurse=False):
                if owners.get(parameter) is not inside:
                    other = paths[owners[parameter]]
                    raise ValueError(
                        f"{self.name!r}: {f'{path}.{key}'.lstrip('.')!r} is shared with the unit {other!r}; shared "
                        "weights must be in the same unit, so choose different units=, or units=() for a single unit"
                    )

    @on(Events.STARTED, phase=Phase.PREPARE, reads=["optimizer"], writes=[])
    def check_parameters(self, engine: Engine) -> None:
        """Raise an error for parameters whose gradients would not be reduced."""
        if self._roots:
            self._check_sharded(engine, "not be sharded")

    # ---- the micro-step -------------------------------------------------------------------------------------------

    @on("update_started_event", phase=Phase.PREPARE, reads=[], writes=[])
    def reset_progress(self, engine: Engine) -> None:
        """Reset the flags for a new micro-step."""
        self._forward_done = self._backward_done = False
        self._outputs.clear()

    @on("forward_event", phase=Phase.PREPARE, reads=["window", "batch"], writes=["modules"])
    def set_gradient_sync(self, engine: Engine) -> None:
        """Set whether the backward reduces: if it completes its window, or with every batch."""
        self._used = self._forward_done = True
        self._backward_done, self._batch = False, engine.state.batch
        self._outputs.clear()
        self._prepare_backward(engine.state.update)

    def _prepare_backward(self, update: UpdateState) -> None:
        if self._unreduced and update.window.held == 0:  # gradients of a discarded window
            self._reset()
        self._gathered.enter_context(gathered_until_backward(self._kept))
        syncs = update.sync_gradients or self.reduce_every_batch
        if syncs is not self._syncs:
            self._set_sync(syncs)

    def _reset(self) -> None:
        for root in self._roots:
            root.reset_iter_state()
        discard_unreduced(self._roots)  # type: ignore[arg-type]
        self._used = self._unreduced = False

    def _set_sync(self, syncs: bool) -> None:
        for root in self._roots:
            root.set_requires_gradient_sync(syncs)
        self._syncs = syncs

    @on("backward_event", phase=Phase.PREPARE, reads=[], writes=[])
    def record_backward(self, engine: Engine) -> None:
        """Record that this rank has participated in the collectives of the backward."""
        self._backward_done, self._unreduced = True, not self._syncs
        self._outputs.clear()
        self._gathered.close()

    def reduce(self, engine: Engine, update: UpdateState) -> None:
        """Overrides REDUCTION: the backward has reduced already; a rank without one makes a dummy backward."""
        self._participate(engine, update)
        if update.window.kept is not None and update.evaluation == 0:
            kept = engine.processes.gather(len(update.window.kept))
            if len(set(kept)) > 1:
                raise ValueError(
                    f"{self.name!r}: the accumulation window of update {update.name!r} must be recomputed, but the "
                    f"number of batches in this window differs between ranks ({kept}); use DataLoader(drop_last=True), "
                    "or detach the handler that computes gradients several times per step"
                )

    @on("update_completed_event", phase=Phase.PREPARE, reads=["step", "window", "processes"], writes=["gradients"])
    def sync_open_window(self, engine: Engine) -> None:
        """Inside a window, make a dummy backward on ranks without one; discard a skipped batch on all ranks."""
        update = engine.state.update
        if update.sync_gradients:
            return
        self._participate(engine, update)
        if self.reduce_every_batch and engine.processes.any(update.skipped is not None):
            update.discard()  # the gradients are already summed over the ranks, so all of them have to be discarded

    def _participate(self, engine: Engine, update: UpdateState) -> None:
        """Make a dummy forward and backward with zero gradients where this rank has made none."""
        if not self._roots or self._backward_done:
            return
        if self._forward_done:
            self._dummy_backward()
        else:
            # Until after the backward: BatchNorm's needs its statistics as the forward has left them.
            with unchanged_random_state(), Buffers(engine.modules.values()).unchanged():
                self._dummy_forward(engine, update)
                self._dummy_backward()
        self._unreduced = self._unreduced and not self._syncs
        self._backward_done = True
        self._outputs.clear()
        self._gathered.close()

    def _dummy_backward(self) -> None:
        """Make a backward with zero gradients, unless a handler has made one."""
        if not self._backward_done and (outputs := [one for one in self._outputs if one.requires_grad]):
            torch.autograd.backward(outputs, [torch.zeros_like(one) for one in outputs])

    def _dummy_forward(self, engine: Engine, update: UpdateState) -> None:
        """Make a forward with the last batch, without events or metrics."""
        if self._batch is None:
            raise RuntimeError(
                f"{self.name!r}: rank {engine.processes.rank} has received no batch yet, so it cannot take part in the "
                "step; use fewer processes or smaller batches"
            )
        state = engine.state
        current, state.batch = state.batch, self._batch
        output, loss, backward_loss, hidden = update.output, update.raw_loss, update.backward_loss, update.hidden
        try:
            self._prepare_backward(update)
            if update.forward is None:
                update.function(engine, state.batch)
            else:
                update.output = update.forward(engine, state.batch)
                if update.loss_function is not None:  # it may call modules, too
                    update.loss_function(engine, update.output, state.batch)
        finally:
            state.batch = current
            update.output, update.raw_loss, update.backward_loss, update.hidden = output, loss, backward_loss, hidden

    def _record_output(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._outputs += [one for one in tensors_in(output) if one.requires_grad]

    # ---- evaluation and end ---------------------------------------------------------------------------------------

    @on(
        "gather_event",
        phase=Phase.PREPARE,
        rank=GATHER_WEIGHTS,
        reads=["trainable", "processes"],
        writes=["weights", "modules"],
    )
    def gather_weights(self, engine: Engine) -> None:
        """Gather the full weights for the duration of the evaluation."""
        engine.regions.enter(unsharded(engine.modules.values()))

    @on(Events.ENDED, phase=Phase.FINALIZE, reads=[], writes=["modules"])
    def release(self, engine: Engine) -> None:
        """Remove the hooks, and release modules, buffers and batch."""
        for hook in self._hooks:
            hook.remove()
        self._gathered.close()
        self._hooks, self._roots, self._kept, self._buffers, self._outputs, self._batch = [], [], [], [], [], None

    def unshard(self, engine: Engine) -> None:
        """Convert the engine's modules back to plain ones with the current weights. All ranks must call it after a run.

        Every rank then holds the full weights. The next run builds new optimizers, and shards the modules again unless the
        handler is detached. To resume training exactly, load a checkpoint into a new engine instead.

        Raises:
            RuntimeError: If called during a run, or if a rank is missing.
        """
        if engine.running:
            raise RuntimeError(f"{self.name!r}: unshard() was called during a run; call it after run()")
        from torch.distributed.fsdp import FSDPModule

        reshard(engine.modules.values())
        sharded = [root for root in engine.modules.values() if isinstance(root, FSDPModule)]
        if not sharded:
            return
        engine.processes.barrier()  # a missing rank raises an error before anything is changed
        own = [p for root in sharded for p in root.parameters() if is_sharded(p)]
        plain = {p: nn.Parameter(p.detach().full_tensor(), p.requires_grad) for p in own}  # type: ignore[attr-defined]
        for root in sharded:
            for module in root.modules():
                module._parameters.update(
                    {key: plain.get(p, p) for key, p in module._parameters.items() if p is not None}
                )
                _make_plain(module)
        self._used = self._unreduced = False
        for update in engine.updates:
            update.optimizer = None


def _checked(units: Any) -> Any:
    if units is None or (callable(units) and not isinstance(units, type)):
        return units
    collection = (units,) if isinstance(units, str | type) else units
    collection = tuple(collection) if isinstance(collection, Iterable) else (collection,)
    for unit in collection:
        if not isinstance(unit, str) and not (isinstance(unit, type) and issubclass(unit, nn.Module)):
            raise TypeError(
                f"FullyShardedDataParallel(units={units!r}): {unit!r} is neither a module path nor a module class; "
                "pass one of these, or a function (path, module) -> bool"
            )
    return collection


def _matches(unit: str | type[nn.Module], path: str, module: nn.Module) -> bool:
    if isinstance(unit, type):
        return isinstance(module, unit)
    return re.fullmatch(re.escape(unit).replace(r"\*", "[^.]+"), path) is not None


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _children(root: nn.Module) -> Iterator[nn.Module]:
    """The children of a module, with the items of a ModuleList or ModuleDict in its place."""
    for child in root.children():
        yield from _children(child) if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child]


def _make_plain(module: nn.Module) -> None:
    """Undo `fully_shard` for a module; torch has no function for this."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    if isinstance(module, FSDPModule):
        module.__class__ = type(module).__mro__[FSDPModule._orig_cls_mro_index]
    for key in (STATE_KEY, REGISTRY_KEY, "_is_fsdp_managed_module", "_fsdp_use_orig_params"):
        module.__dict__.pop(key, None)
    _module_state_mapping.pop(module, None)  # in which torch does not take it a second time
    for key, hooks in module.__dict__.items():
        if key.endswith("_hooks") and isinstance(hooks, dict):
            for number in [number for number, hook in hooks.items() if _is_of_fsdp(hook)]:
                del hooks[number]
                for options in _OPTIONS_OF_HOOKS:
                    module.__dict__.get(options, {}).pop(number, None)


_OPTIONS_OF_HOOKS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")


def _is_of_fsdp(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # torch wraps some
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")
