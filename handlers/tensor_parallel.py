"""Tensor parallelism: splits layers over several ranks, which train together on the same batches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Phase, UpdateState, on
from signalfire.authoring import Override, check_int, did_you_mean, random_state, set_random_state
from signalfire.authoring.versions import NO_SOURCE
from signalfire.core.update import needs_closure
from signalfire.distributed import expected_processes, is_sharded, is_unit, like_parameter, local_part
from signalfire.distributed.sums import broadcast

from ._common.distribution import Distribution
from ._common.hooks import modules_by_path
from ._common.ranks import SAME_RANDOM_STATE, SPLIT_LAYERS
from ._common.replicated import ReplicatedParameters

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

__all__ = ["TensorParallel"]


class TensorParallel(Distribution):
    """Tensor parallelism: splits layers over several ranks, for layers too large or too slow for one device.

    With the processes launched by torchrun, each rank holds a part of the layers in the plan and computes its part of their
    outputs, with torch's DTensor. All ranks read the same batches in the order of rank 0 and draw the same random numbers, so
    they train like one process, up to the rounding of sums. In a single process, the handler does nothing, so the same script
    runs unchanged.

    The model is split in place at MODEL_SETUP, before optimizers are built, from the weights of rank 0. Parameters outside the
    plan also become DTensors, with a copy on each rank, so clipping, norms and averages see one kind of parameter; their
    modules compute on plain tensors. The model stays split after the run; `unsplit` restores plain modules. `Checkpoint` writes
    the parts as shards that any number of ranks can load.

    With a ``size`` smaller than the number of ranks, each group of ``size`` consecutive ranks splits the layers and reads the
    same batches. In this case, also attach `FullyShardedDataParallel`, which shards the model and the data over the groups.

    Each sample counts once in metrics, speeds and the progress bar, since all ranks read the same batches. Dropout between two
    split layers acts on a part of the features, and draws the same mask for each part.

    Args:
        plan: Layers to split, and how: styles of ``torch.distributed.tensor.parallel``, such as ``ColwiseParallel()``, by the
            path of the module, where ``*`` matches one name: "blocks.*.up". With several modules, paths begin with the module's
            name. A style is used for all modules that its path matches.
        size: Number of ranks that split the layers; None uses all.
        backend: Backend of torch.distributed; by default gloo for the CPU, and NCCL for GPUs.
        timeout: Seconds after which a rank that does not reach a collective operation counts as lost.

    Raises:
        ValueError: Before the first batch, if a path matches no module, or two paths match the same module; if a style does not
            fit its module; if a layer of the plan shares a parameter with another layer; for an optimizer instance instead of a
            factory, and for optimizers with a closure (LBFGS); if ``size`` does not divide the number of ranks, or if no handler
            shards the data over the groups. In the first step, if a parameter outside the plan is used with a part of the
            features, so its gradient differs between ranks; add its module to the plan.

    Source:
        Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019). The
        implementation is ``torch.distributed.tensor.parallel.parallelize_module``.

    Example:
        >>> from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
        >>> from signalfire import Engine, Update
        >>> class Block(nn.Module):
        ...     def __init__(self) -> None:
        ...         super().__init__()
        ...         self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        ...
        ...     def forward(self, x: Tensor) -> Tensor:
        ...         return x + self.down(self.up(x).relu())
        >>> model = nn.ModuleDict({"blocks": nn.Sequential(Block(), Block())})
        >>> model.forward = lambda x: model["blocks"](x)
        >>> update = Update.supervised(nn.functional.mse_loss, torch.optim.SGD)
        >>> engine = Engine(update, model=model, seed=0)
        >>> plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        >>> split = TensorParallel(plan)
        >>> _ = engine.attach(split)
        >>> data = [(torch.ones(4, 8), torch.ones(4, 8))] * 3
        >>> engine.run(data, max_epochs=1).iteration  # the same with each number of ranks
        3
        >>> # With torchrun --nproc-per-node 2: 2, and half of the rows.
        >>> split.processes.world_size, model["blocks"][0].up.weight.shape
        (1, torch.Size([32, 8]))
    """

    trains = True
    _decisive = ()

    def __init__(
        self,
        plan: Mapping[str, ParallelStyle],
        *,
        size: int | None = None,
        backend: str | None = None,
        timeout: float = 300.0,
        name: str | None = None,
    ) -> None:
        super().__init__(shard_policy="auto", backend=backend, timeout=timeout, name=name)
        self.size = None if size is None else check_int(self, "size", size)
        self.plan = _checked(plan)
        self._replicated: list[ReplicatedParameters] = []  # one for each of the engine's modules
        self._hooks: list[tuple[dict[int, Any], int]] = []  # torch's, on split modules: where they are registered
        self._names: dict[Tensor, str] = {}  # of the parameters with a copy on each rank
        self._compared: set[tuple[str, int]] = set()  # updates, and how many parameters they had

    def attached(self, engine: Engine) -> None:
        self._check_factories(engine, "split")
        ranks = expected_processes().world_size
        self._joins = self.size in (None, ranks)  # else beside a handler that shards the data
        super().attached(engine)
        self.loss_event = self.buffers_event = None  # of a group that reads the same, buffers are the same, too
        self.compare_event = None if self._joins else Events.GRADIENTS_READY
        if not self.processes.distributed:
            return
        if ranks % self._size:
            raise ValueError(
                f"{self.name!r}: size={self.size} does not divide the number of ranks, {ranks}; launch a multiple of "
                f"{self.size} processes, or split over all ranks with size={ranks}"
            )
        engine.group.read_alike(self._size, by=self)
        if self._joins:
            engine.overrides.replace(Override.REDUCTION, self.reduce, by=self)

    @property
    def _size(self) -> int:
        """The number of ranks over which layers are split."""
        return self.processes.world_size if self._joins or self.size is None else self.size

    # ---- set-up ---------------------------------------------------------------------------------------------------

    @on(
        Events.MODEL_SETUP,
        phase=Phase.FINALIZE,
        rank=SPLIT_LAYERS,
        reads=["device", "trainable", "weights", "modules", "processes"],
        writes=["modules", "weights"],
    )
    def split(self, engine: Engine) -> None:
        """Split the layers of the plan, and replicate all other parameters, from the weights of rank 0."""
        self._compared = set()
        chosen = self._chosen(engine)  # also in a single process, so that a mistake in the plan shows there
        self._check_shared(engine, chosen)
        if not self.processes.distributed:
            return
        self._check_device(engine)
        if not engine.processes.distributed:
            raise ValueError(
                f"{self.name!r}: size={self.size} splits layers over only some of the {self.processes.world_size} "
                "ranks; attach FullyShardedDataParallel to shard the model and the data over the other ranks, or split "
                f"over all ranks with size={self.processes.world_size}"
            )
        if not self._are_split(engine):
            self._check_same_model(engine)
            self._check_same("plan", {path: type(self.plan[key]).__name__ for path, key in chosen.values()})
            self._split_all(engine, chosen)

    def _split_all(self, engine: Engine, chosen: Mapping[nn.Module, tuple[str, str]]) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        roots = list(engine.modules.values())
        with torch.no_grad():
            broadcast([t for root in roots for t in (*root.parameters(), *root.buffers())])
        groups = self.processes.world_size // self._size
        shape, names = ((groups, self._size), ("shard", "layers")) if groups > 1 else ((self._size,), ("layers",))
        mesh = init_device_mesh(engine.device.type, shape, mesh_dim_names=names)["layers"]
        trained = {(m, key): p.requires_grad for root in roots for m in root.modules() for key, p in _own(m)}
        for module, (path, key) in chosen.items():
            self._split(module, path, key, mesh)
        self._replicated = [ReplicatedParameters(root, mesh) for root in roots]
        for (module, key), requires_grad in trained.items():  # torch's SequenceParallel trains all
            module._parameters[key].requires_grad_(requires_grad)  # type: ignore[union-attr]

    def _chosen(self, engine: Engine) -> dict[nn.Module, tuple[str, str]]:
        """The modules of the plan, with their path and their key in the plan."""
        paths = modules_by_path(engine)
        chosen: dict[nn.Module, tuple[str, str]] = {}
        for key in self.plan:
            pattern = re.escape(key).replace(r"\*", "[^.]+")
            found = {path: module for path, module in paths.items() if path and re.fullmatch(pattern, path)}
            if not found:
                known = [path for path in paths if path]
                raise ValueError(f"{self.name!r}: plan={{{key!r}: ...}} matches no module{did_you_mean(key, known)}")
            for path, module in found.items():
                if module in chosen:
                    raise ValueError(
                        f"{self.name!r}: plan={{{key!r}: ...}} matches {path!r}, which {chosen[module][1]!r} already "
                        "matches; a module can be split only once, so omit one of the two patterns"
                    )
                chosen[module] = path, key
        return chosen

    def _are_split(self, engine: Engine) -> bool:
        """Whether the model was split by this handler in an earlier run."""
        parameters = [p for root in engine.modules.values() for p in root.parameters()]
        if not any(map(is_sharded, parameters)):
            self._forget_split(engine)  # FSDP has made the model plain
            return False
        if not self._replicated or not all(map(is_sharded, parameters)):
            raise ValueError(
                f"{self.name!r}: the model was split or sharded by a different handler, or a part of the model was "
                "replaced after this handler split it; build the model again, or call unsplit(engine) on the handler "
                "that split it"
            )
        for one in self._replicated:
            one.forget_units()
        return True

    def _check_shared(self, engine: Engine, chosen: Mapping[nn.Module, tuple[str, str]]) -> None:
        """Raise ValueError for parameters that a split module shares with a different module; they would be duplicated."""
        inside = {part: path for module, (path, _) in chosen.items() for part in module.modules()}
        owners: dict[nn.Parameter, tuple[str, nn.Module]] = {}
        for path, module in modules_by_path(engine).items():
            for key, parameter in _own(module):
                full = f"{path}.{key}".lstrip(".")
                other, holder = owners.setdefault(parameter, (full, module))
                if holder is not module and (module in inside or holder in inside):
                    raise ValueError(
                        f"{self.name!r}: {full!r} is the same parameter as {other!r}, and the plan would split one of "
                        "the two; shared weights cannot be split, so omit their modules from the plan, or give each "
                        "module its own weights"
                    )

    def _split(self, module: nn.Module, path: str, key: str, mesh: Any) -> None:
        from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

        registered = [module._forward_pre_hooks, module._forward_hooks]
        before = [set(hooks) for hooks in registered]
        style, ranks = self.plan[key], self._size
        if isinstance(style, RowwiseParallel) and isinstance(module, nn.Linear) and module.in_features % ranks:
            raise ValueError(
                f"{self.name!r}: plan={{{key!r}: RowwiseParallel()}}: the {module.in_features} input features of "
                f"{path!r} cannot be divided evenly among {ranks} ranks"
            )
        try:
            parallelize_module(module, mesh, style, **NO_SOURCE)
        except Exception as error:
            raise ValueError(
                f"{self.name!r}: plan={{{key!r}: {type(style).__name__}()}} cannot be applied to {path!r}, a "
                f"{type(module).__name__}: {error}"
            ) from error
        for hooks, earlier in zip(registered, before, strict=True):
            self._hooks += [(hooks, number) for number in hooks if number not in earlier]

    @on(Events.STARTED, phase=Phase.PREPARE, rank=SAME_RANDOM_STATE, reads=["processes"], writes=["random"])
    def share_random_state(self, engine: Engine) -> None:
        """Draw the numbers of the first rank on all ranks that split layers between them."""
        if self.processes.distributed:
            states = self.processes.gather(random_state())
            set_random_state(states[self.processes.rank // self._size * self._size])

    @on(Events.STARTED, phase=Phase.PREPARE, reads=["optimizer", "modules"], writes=[])
    def check_parameters(self, engine: Engine) -> None:
        """Raise an error for anything that cannot be trained on a split model."""
        if not self.processes.distributed:
            return
        self._check_sharded(engine, "be a separate copy on each rank")
        for update in engine.updates:
            if update.optimizer is not None and needs_closure(update.optimizer):
                raise ValueError(
                    f"{self.name!r}: the {type(update.optimizer).__name__} of update {update.name!r} flattens all "
                    "parameters into one vector, which is not possible for a split model; use a different optimizer"
                )
        self._names = {
            p: f"{engine.modules.prefix(name)}.{key}".lstrip(".")
            for name, root in engine.modules.items()
            for key, p in root.named_parameters()
            if p.placements[-1].is_replicate()  # type: ignore[attr-defined]
        }

    # ---- in every window ------------------------------------------------------------------------------------------

    def reduce(self, engine: Engine, update: UpdateState) -> None:
        """Overrides REDUCTION: sums partial gradients of the ranks, so each gradient is placed like its parameter."""
        for parameter in update.parameters:
            if parameter.grad is not None:
                parameter.grad = like_parameter(parameter.grad, parameter)  # in the same order on all ranks
        self._compare_gradients(update)

    @on("compare_event", phase=Phase.PREPARE, reads=["gradients", "processes"], writes=[])
    def compare_gradients(self, engine: Engine) -> None:
        """Compare the copies' gradients if a different handler reduces them."""
        self._compare_gradients(engine.state.update)

    def _compare_gradients(self, update: UpdateState) -> None:
        """Raise ValueError if the copies of a parameter get different gradients on the ranks, and so diverge."""
        key = update.name, len(update.parameters)  # more of them with gradual unfreezing
        if key in self._compared:
            return
        self._compared.add(key)
        own = {
            self._names[p]: float(torch.linalg.vector_norm(local_part(p.grad).detach().float()))
            for p in update.parameters
            if p in self._names and p.grad is not None and not p.grad.is_sparse
        }
        norms = self.processes.gather(own)
        for name, first in ((name, first) for name in own for first in range(0, len(norms), self._size)):
            others = [one.get(name, 0.0) for one in norms[first : first + self._size]]
            if max(others) - min(others) > 1e-3 * max(others):
                raise ValueError(
                    f"{self.name!r}: the gradient of {name!r} differs between ranks (the norms are "
                    f"{', '.join(f'{one:.4g}' for one in others)}; on this rank, {own[name]:.4g}). Its module is not "
                    "in the plan, but receives only some of the features; add the module to the plan, or gather its "
                    "input with ColwiseParallel(output_layouts=Replicate())"
                )

    @on(Events.ENDED, phase=Phase.FINALIZE, reads=[], writes=[])
    def release(self, engine: Engine) -> None:
        """Release the references to parameters."""
        self._names = {}

    # ---- after a run ----------------------------------------------------------------------------------------------

    def unsplit(self, engine: Engine) -> None:
        """Convert the engine's modules back to plain ones with the current weights. All ranks must call it after a run.

        Every rank then holds the full weights. The next run builds new optimizers, and splits the modules again unless the
        handler is detached. To resume training exactly, load a checkpoint into a new engine instead.

        Raises:
            RuntimeError: If called during a run, if a rank is missing, or while the model is still sharded; call
                `FullyShardedDataParallel.unshard` first.
        """
        if engine.running:
            raise RuntimeError(f"{self.name!r}: unsplit() was called during a run; call it after run()")
        modules = [module for root in engine.modules.values() for module in root.modules()]
        if any(map(is_unit, modules)):
            raise RuntimeError(
                f"{self.name!r}: unsplit() was called while the model is still sharded; call unshard(engine) on "
                "FullyShardedDataParallel first"
            )
        if not self._replicated:
            return
        engine.processes.barrier()  # a missing rank raises an error before anything is changed
        self._forget_split(engine)
        plain: dict[Tensor, nn.Parameter] = {}
        for module in modules:
            for key, parameter in list(_own(module)):
                if is_sharded(parameter):
                    if parameter not in plain:
                        full = parameter.detach().full_tensor()  # type: ignore[attr-defined]
                        plain[parameter] = nn.Parameter(full.clone(), requires_grad=parameter.requires_grad)
                    setattr(module, key, plain[parameter])
        for update in engine.updates:
            update.optimizer = None

    def _forget_split(self, engine: Engine) -> None:
        """Remove all hooks and marks from the modules."""
        for one in self._replicated:
            one.remove()
        for hooks, number in self._hooks:
            hooks.pop(number, None)
        self._replicated, self._hooks = [], []
        for module in (part for root in engine.modules.values() for part in root.modules()):
            vars(module).pop("_distribute_module_applied", None)  # torch splits a module once


def _own(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a module itself, including those that a different module also holds."""
    return ((key, p) for key, p in module._parameters.items() if p is not None)


def _checked(plan: Any) -> dict[str, Any]:
    if not isinstance(plan, Mapping) or not plan or not all(isinstance(key, str) and key for key in plan):
        raise TypeError(
            f"TensorParallel(plan={plan!r}): expected a mapping from module paths to styles of "
            "torch.distributed.tensor.parallel, such as {'up': ColwiseParallel(), 'down': RowwiseParallel()}"
        )
    from torch.distributed.tensor.parallel import ParallelStyle

    for key, style in plan.items():
        if "ContextParallel" in type(style).__name__:
            raise ValueError(
                f"TensorParallel(plan={{{key!r}: {type(style).__name__}(...)}}): context parallelism is not supported, "
                "because it shards sequences, but TensorParallel needs whole sequences on all ranks; split the layers "
                "with ColwiseParallel() and RowwiseParallel()"
            )
        if not isinstance(style, ParallelStyle):
            raise TypeError(
                f"TensorParallel(plan={{{key!r}: {style!r}}}): expected a style of torch.distributed.tensor.parallel, such as "
                "ColwiseParallel()"
            )
    return dict(plan)
