"""Fully sharded data parallelism: every process holds a part of the weights, the gradients and the optimizer's state."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from signalfire import Engine, Events, Phase, UpdateState, on
from signalfire.acts import Override
from signalfire.batches import tensors_in
from signalfire.checks import check_bool, check_choice
from signalfire.distributed import discard_unreduced, is_sharded, reshard, unsharded
from signalfire.randomness import unchanged_random_state
from signalfire.restore import Buffers

from ._common.distribution import Distribution, Shares, broadcast
from ._common.ranks import PUT_TOGETHER

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = ["FullyShardedDataParallel"]

Units = str | type[nn.Module] | Iterable[str | type[nn.Module]] | Callable[[str, nn.Module], bool]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class FullyShardedDataParallel(Distribution):
    """Trains one model in several processes, each of which holds a part of it: for models that are too large for one device.

    Launched by torchrun, the processes share the data out, and train as one would with their batches joined. Just before a
    part of the model (a unit) is used, its weights are gathered from the processes, and let go of afterwards; its gradients
    are reduced to the part that each process holds. A process that has no batch, or no loss, takes part with a stand-in of its
    last batch that counts nothing. Alone, the handler does nothing, and the same script runs unchanged.

    The model is sharded at MODEL_SETUP, in place, before optimizers are built, and starts from the weights of rank 0. It stays
    sharded after the run: `unshard` makes it a plain one. Modules, optimizers and averages then hold DTensors, and `Checkpoint`
    writes those as shards, which load on any number of processes, also on one alone.

    The buffers of all processes are those of rank 0 after every step, and when an evaluation begins. Within an accumulation
    window nothing is reduced, and what a window holds cannot be saved before it is complete: `Engine.state_dict` refuses to,
    unless ``reduce_every_batch``. While the trainer evaluates, the weights are whole in every process, so that each may have as
    many batches as it likes.

    Args:
        units: which submodules are gathered as one, besides the rest: their paths, such as "encoder" or "blocks.*", where ``*``
            stands for one name; their classes; several of these; or a function ``(path, module) -> bool``. By default the
            children of the model that have parameters, and the items of those that are lists. The larger a unit, the fewer the
            messages, and the more memory; ``()`` makes the whole model one unit. A unit's weights are there only
            while it is called: what others use of it has to be in one unit with them.
        reshard_after_forward: whether weights are let go of after the forward, and gathered again for the backward. Without,
            each step sends a third less, and the weights are whole from the forward to the backward.
        param_dtype: the type in which weights are gathered and used: "bf16", "fp16" or "fp32"; by default their own. The parts
            that the optimizer sees stay in their own. An alternative to `MixedPrecision`, which casts for each operation.
        reduce_dtype: the type in which gradients are reduced; by default ``param_dtype``.
        reduce_every_batch: whether gradients are reduced with each batch of an accumulation window, which takes less memory, as
            no process holds whole gradients, and lets open windows be saved.
        gather_to_evaluate: whether the weights are whole while the trainer evaluates. Without, a model that does not fit into
            one process can be evaluated, and every process has to have the same number of batches.
        shares: how data comes to the processes; see `Engine.join`.
        backend: of torch.distributed; by default gloo for the CPU, and NCCL besides it if there are GPUs.
        timeout: after how many seconds a process that does not come to what all do together counts as lost.

    Errors:
        ValueError: for optimizers that were given built, for several updates, for units that share parameters, and for
            what computes gradients in pieces.

    Source:
        Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (VLDB 2023); Rajbhandari et al., "ZeRO:
        Memory Optimizations Toward Training Trillion Parameter Models" (SC 2020). ``torch.distributed.fsdp.fully_shard``
        does the work.

    Example:
        >>> FullyShardedDataParallel(units="blocks.*", param_dtype="bf16", reduce_dtype="fp32").param_dtype
        torch.bfloat16
    """

    trains = True

    def __init__(
        self,
        *,
        units: Units | None = None,
        reshard_after_forward: bool = True,
        param_dtype: Literal["bf16", "fp16", "fp32"] | None = None,
        reduce_dtype: Literal["bf16", "fp16", "fp32"] | None = None,
        reduce_every_batch: bool = False,
        gather_to_evaluate: bool = True,
        shares: Shares = "auto",
        backend: str | None = None,
        timeout: float = 300.0,
        name: str | None = None,
    ) -> None:
        super().__init__(shares=shares, backend=backend, timeout=timeout, name=name)
        self.units = _checked(units)
        self.reshard_after_forward = check_bool(self, "reshard_after_forward", reshard_after_forward)
        self.param_dtype = self._dtype("param_dtype", param_dtype)
        self.reduce_dtype = self._dtype("reduce_dtype", reduce_dtype)
        self.reduce_every_batch = check_bool(self, "reduce_every_batch", reduce_every_batch)
        self.gather_to_evaluate = check_bool(self, "gather_to_evaluate", gather_to_evaluate)
        self._roots: list[FSDPModule] = []
        self._hooks: list[Any] = []
        self._syncs = True  # whether the next backward reduces
        self._unreduced = False  # whether modules hold gradients that no backward has reduced
        self._dirty = False  # whether modules were used
        self._forwards = self._backwards = False  # whether this would-be step made its forward, and its backward
        self._outputs: list[Tensor] = []  # from which a backward can start, should there be no loss
        self._batch: Any = None  # the last one

    def _dtype(self, argument: str, value: str | None) -> torch.dtype | None:
        return None if value is None else _DTYPES[check_choice(self, argument, value, tuple(_DTYPES))]

    def attached(self, engine: Engine) -> None:
        for update in engine.updates:
            if isinstance(update.spec.optimizer, Optimizer):
                kind = type(update.spec.optimizer).__name__
                raise ValueError(
                    f"{self.name!r}: the {kind} of update {update.name!r} was built before the model is sharded, with parameters "
                    f"that will be replaced; give a factory instead, such as partial(torch.optim.{kind}, lr=1e-3)"
                )
        super().attached(engine)
        several = self.processes.several
        if len(engine.updates) > 1 and several:
            raise ValueError(
                f"{self.name!r}: an engine with several updates ({', '.join(u.name for u in engine.updates)}) cannot be "
                "sharded; use DistributedDataParallel"
            )
        self.beginning = Events.UPDATE_STARTED if several else None
        self.forwarding = Events.FORWARD_STARTED if several else None
        self.learning = Events.BACKWARD_COMPLETED if several else None
        self.completing = Events.UPDATE_COMPLETED if several else None
        self.gathering = Events.EVALUATION_STARTED if several and self.gather_to_evaluate else None
        if several:
            engine.overrides.replace(Override.REDUCTION, self.reduce, by=self)
            # Pieces of a batch are forwards of their own, of which every process would have to make as many.
            engine.overrides.claim(Override.GRADIENTS, by=self)

    # ---- setting up -----------------------------------------------------------------------------------------------

    @on(Events.MODEL_SETUP, phase=Phase.FINALIZE)
    def shard(self, engine: Engine) -> None:
        """Shard the modules, from the weights of rank 0, once they are where they belong and of the right type."""
        self._roots = []
        if not engine.processes.several:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule

        self._check_units(engine)
        for name, root in engine.modules.items():
            if not isinstance(root, FSDPModule) and any(True for _ in root.parameters()):
                mesh = init_device_mesh(engine.device.type, (engine.processes.size,))
                self._shard(root, name if len(engine.modules) > 1 else "", mesh)
            if isinstance(root, FSDPModule):
                self._roots.append(root)
                self._hooks.append(root.register_forward_hook(self._note_output))
        reshard(engine.modules.values())
        if self._dirty and not any(update.window.filled for update in engine.updates):
            self._reset()  # an error may have left it in the middle of something
        self._buffers = [buffer for root in self._roots for buffer in root.buffers()]  # type: ignore[attr-defined]
        self._set_sync(True)

    def _check_units(self, engine: Engine) -> None:
        several = len(engine.modules) > 1
        paths = {
            path: module
            for name, root in engine.modules.items()
            for path, module in root.named_modules(prefix=name if several else "")
            if module is not root
        }
        for one in self.units if isinstance(self.units, tuple) else ():
            if not any(_matches(one, path, module) for path, module in paths.items()):
                there = ", ".join(list(paths)[:8])
                raise ValueError(f"{self.name!r}: units={one!r} matches no module; there are: {there or 'none'}")

    def _shard(self, root: nn.Module, name: str, mesh: Any) -> None:
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        units = self._units_of(root, name)
        with torch.no_grad():
            broadcast([*root.parameters(), *root.buffers()])
        policy = MixedPrecisionPolicy(self.param_dtype, self.reduce_dtype)
        for unit in [*units, root]:
            fully_shard(unit, mesh=mesh, reshard_after_forward=self.reshard_after_forward, mp_policy=policy)
            assert isinstance(unit, FSDPModule)

    def _units_of(self, root: nn.Module, name: str) -> list[nn.Module]:
        """The units inside of a module, inner ones first."""
        paths = {module: path for path, module in root.named_modules(prefix=name) if module is not root}
        units = self.units
        if units is None:
            chosen = list(_children(root))
        elif callable(units) and not isinstance(units, tuple):
            chosen = [module for module, path in paths.items() if units(path, module)]
        else:
            chosen = []
            for one in units:
                chosen += [module for module, path in paths.items() if _matches(one, path, module)]
        chosen = [module for module in paths if module in set(chosen) and any(True for _ in module.parameters())]
        owners: dict[nn.Parameter, nn.Module] = {}
        for unit in reversed(chosen):  # the innermost unit that a parameter is in has it
            for parameter in unit.parameters():
                owners.setdefault(parameter, unit)
        for module, path in {root: name, **paths}.items():
            if isinstance(module, nn.ModuleList | nn.ModuleDict) and module in chosen:
                raise ValueError(
                    f"{self.name!r}: {path!r} is a {type(module).__name__}, which is never called; name its items"
                )
            inside = next((u for u in reversed(chosen) if _contains(u, module)), root)
            for key, parameter in module.named_parameters(recurse=False):
                if owners.get(parameter, root) is not inside:
                    other = paths.get(owners[parameter], "the rest of the model")
                    raise ValueError(
                        f"{self.name!r}: {f'{path}.{key}'.lstrip('.')!r} is shared with the unit {other!r}; weights that are "
                        "shared have to be in one unit: choose others with units=, or units=() for one"
                    )
        return list(reversed(chosen))

    @on(Events.STARTED, phase=Phase.PREPARE)
    def check(self, engine: Engine) -> None:
        """Refuse parameters that nobody would reduce the gradients of."""
        for update in engine.updates if self._roots else ():
            for place, parameter in enumerate(update.parameters):
                if not is_sharded(parameter):
                    raise ValueError(
                        f"{self.name!r}: parameter {place} of update {update.name!r} belongs to none of the engine's modules, "
                        "and would not be sharded; make it a parameter of the model"
                    )

    # ---- the would-be step ----------------------------------------------------------------------------------------

    @on("beginning", phase=Phase.PREPARE)
    def begin(self, engine: Engine) -> None:
        """Nothing of this would-be step was made yet."""
        self._forwards = self._backwards = False
        self._outputs.clear()

    @on("forwarding", phase=Phase.PREPARE)
    def prepare(self, engine: Engine) -> None:
        """Say whether the backward reduces, which depends on whether it completes its window."""
        update = engine.state.update
        self._forwards, self._backwards, self._batch = True, False, engine.state.batch
        self._outputs.clear()
        self._begin_backward(update)
        self._dirty = True

    def _begin_backward(self, update: UpdateState) -> None:
        if self._unreduced and update.window.held == 0:  # of a window that was discarded here
            self._reset()
        syncs = update.completes or self.reduce_every_batch
        if syncs is not self._syncs:
            self._set_sync(syncs)

    def _reset(self) -> None:
        for root in self._roots:
            root.reset_iter_state()
        discard_unreduced(self._roots)  # type: ignore[arg-type]
        self._dirty = self._unreduced = False

    def _set_sync(self, syncs: bool) -> None:
        for root in self._roots:
            root.set_requires_gradient_sync(syncs)
        self._syncs = syncs

    @on("learning", phase=Phase.PREPARE)
    def note_backward(self, engine: Engine) -> None:
        """This process took part."""
        self._backwards, self._unreduced = True, not self._syncs
        self._outputs.clear()

    def reduce(self, engine: Engine, update: UpdateState) -> None:
        """The act "reduction": the backward has done it, or a stand-in does."""
        self._take_part(engine, update)
        if update.window.kept is not None and update.evaluation == 0:
            kept = engine.processes.gather(len(update.window.kept))
            if len(set(kept)) > 1:
                raise ValueError(
                    f"{self.name!r}: the window of update {update.name!r} is to be computed again, and the processes have "
                    f"{kept} batches of it; give every process as many, by a DataLoader with drop_last=True, or do without what "
                    "computes gradients several times in a step"
                )

    @on("completing", phase=Phase.PREPARE)
    def stand_in(self, engine: Engine) -> None:
        """Inside a window, take part in what the others did; discard together what a process discards."""
        update = engine.state.update
        if update.completes:
            return
        self._take_part(engine, update)
        if self.reduce_every_batch and engine.processes.any(update.skipped is not None):
            update.discard()  # a process that skipped has discarded its part, which is a part of everybody's gradients

    def _take_part(self, engine: Engine, update: UpdateState) -> None:
        if not self._roots or self._backwards:
            return
        if not self._forwards:
            self._forward_again(engine, update)
        if not self._backwards and (outputs := [one for one in self._outputs if one.requires_grad]):
            torch.autograd.backward(outputs, [torch.zeros_like(one) for one in outputs])
        self._unreduced = self._unreduced and not self._syncs
        self._backwards = True
        self._outputs.clear()

    def _forward_again(self, engine: Engine, update: UpdateState) -> None:
        """The forward, and the backward of nothing, of the last batch: no event, no metric and no trace of it."""
        if self._batch is None:
            raise RuntimeError(
                f"{self.name!r}: rank {engine.processes.rank} has no batch, and had none before, with which it could take part; "
                "use fewer processes, or smaller batches"
            )
        state = engine.state
        current, state.batch = state.batch, self._batch
        output, loss, backward_loss, hidden = update.output, update.raw_loss, update.backward_loss, update.hidden
        try:
            with unchanged_random_state(), Buffers(engine.modules.values()).unchanged():
                self._begin_backward(update)
                if update.forward is None:
                    update.function(engine, state.batch)
                else:
                    update.output = update.forward(engine, state.batch)
                    if update.loss_function is not None:  # it may call the model, too
                        update.loss_function(engine, update.output, state.batch)
        finally:
            state.batch = current
            update.output, update.raw_loss, update.backward_loss, update.hidden = output, loss, backward_loss, hidden

    def _note_output(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._outputs += [one for one in tensors_in(output) if one.requires_grad]

    # ---- evaluating, and ending -----------------------------------------------------------------------------------

    @on("gathering", phase=Phase.PREPARE, rank=PUT_TOGETHER)
    def gather(self, engine: Engine) -> None:
        """Hold whole weights until the evaluation is over."""
        engine.regions.enter(unsharded(engine.modules.values()))

    @on(Events.ENDED)
    def let_go(self, engine: Engine) -> None:
        """Hold nothing beyond the run."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._roots, self._buffers, self._batch = [], [], [], None
        self._outputs.clear()

    def unshard(self, engine: Engine) -> None:
        """Make the engine's modules plain ones, with the weights as they are. Every process has to call it, after a run.

        Each process then holds all of them. Optimizers are built anew by the next run; to go on as if nothing had happened, load
        a checkpoint into a new engine instead. Detach the handler to go on without it, or else the next run shards the modules
        again.

        Raises:
            RuntimeError: inside a run, or if a process is missing.
        """
        if engine.running:
            raise RuntimeError(f"{self.name!r}: unshard() is for after the run")
        from torch.distributed.fsdp import FSDPModule

        reshard(engine.modules.values())
        sharded = [root for root in engine.modules.values() if isinstance(root, FSDPModule)]
        if not sharded:
            return
        engine.processes.barrier()  # a group that is not whole shows before anything is changed
        plain: dict[nn.Parameter, nn.Parameter] = {}
        for root in sharded:
            for parameter in root.parameters():
                if is_sharded(parameter):
                    full = parameter.detach().full_tensor()  # type: ignore[attr-defined]
                    plain[parameter] = nn.Parameter(full, requires_grad=parameter.requires_grad)
        for root in sharded:
            for module in root.modules():
                for key, own in module._parameters.items():
                    if own is not None and own in plain:
                        module._parameters[key] = plain[own]
                _make_plain(module)
        for update in engine.updates:
            update.optimizer = None


def _checked(units: Any) -> Any:
    if units is None or (callable(units) and not isinstance(units, type)):
        return units
    several = (units,) if isinstance(units, str | type) else units
    several = tuple(several) if isinstance(several, Iterable) else (several,)
    for one in several:
        if not isinstance(one, str) and not (isinstance(one, type) and issubclass(one, nn.Module)):
            raise TypeError(
                f"FullyShardedDataParallel(units={units!r}): {one!r} has to be the path of a module or a class of modules; or "
                "give a function (path, module) -> bool"
            )
    return several


def _matches(unit: str | type[nn.Module], path: str, module: nn.Module) -> bool:
    if isinstance(unit, type):
        return isinstance(module, unit)
    return re.fullmatch(re.escape(unit).replace(r"\*", "[^.]+"), path) is not None


def _children(root: nn.Module) -> Iterator[nn.Module]:
    """The children of a module; of one that is only a list of modules, its items."""
    for child in root.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _children(child)
        else:
            yield child


def _contains(unit: nn.Module, module: nn.Module) -> bool:
    return any(one is module for one in unit.modules())


def _make_plain(module: nn.Module) -> None:
    """Take off what `fully_shard` put on a module, for which torch has no function."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed.fsdp import FSDPModule

    if isinstance(module, FSDPModule):
        module.__class__ = type(module).__mro__[FSDPModule._orig_cls_mro_index]
    for key in (STATE_KEY, REGISTRY_KEY, "_is_fsdp_managed_module", "_fsdp_use_orig_params"):
        module.__dict__.pop(key, None)
    for key, hooks in module.__dict__.items():
        if key.endswith("_hooks") and isinstance(hooks, dict):
            for number in [number for number, hook in hooks.items() if _is_of_fsdp(hook)]:
                del hooks[number]
                for options in (
                    "_forward_hooks_with_kwargs",
                    "_forward_hooks_always_called",
                    "_forward_pre_hooks_with_kwargs",
                ):
                    module.__dict__.get(options, {}).pop(number, None)


def _is_of_fsdp(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # torch wraps some
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")
