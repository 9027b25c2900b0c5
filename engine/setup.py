"""Before a run starts: building optimizers, and refusing models and windows that cannot be trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from .devices import refusal
from .distributed.sharded import is_sharded
from .events import Events
from .optimizer_modes import put_in_training_mode
from .optimizers import kind_of, needs_closure

if TYPE_CHECKING:
    from .engine import Engine
    from .handler import Handler

__all__ = [
    "build_optimizers", "check_device", "check_devices", "check_initialised", "check_modules", "check_surroundings",
    "check_windows", "report_never_emitted", "report_shared_parameters", "report_untrained", "set_modes",
]  # fmt: skip


def check_surroundings(engine: Engine) -> None:
    """Raise RuntimeError for a run inside of a block of torch's in which nothing can be trained."""
    if engine.training and torch.is_inference_mode_enabled():
        raise RuntimeError("run(): nothing can be trained inside torch.inference_mode(); call it outside of that block")
    attention = getattr(nn.functional.scaled_dot_product_attention, "__module__", None) or ""
    if "_context_parallel" in attention:
        raise RuntimeError(
            "run(): context parallelism is not supported: context_parallel() shards the sequences of a single batch in place, a "
            "run reads many, and the backward pass needs the block, too; call run() outside of it, and split the model with "
            "TensorParallel or FullyShardedDataParallel"
        )


def check_initialised(engine: Engine, where: str) -> None:
    """Raise ValueError for lazy modules that no forward has initialised: their parameters can be neither copied nor trained."""
    if not engine.training:
        return
    for root, model in engine.modules.items():
        if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
            raise ValueError(
                f"{where}: parameters of {root!r} are not initialised yet: {', '.join(lazy[:4])}{', ...' if lazy[4:] else ''}. "
                "Lazy modules take their shapes from a first batch: call the model with one before the run, under "
                "torch.no_grad()"
            )


def build_optimizers(engine: Engine) -> None:
    """Call the optimizer factories, now that the model is set up, and check the optimizers.

    Raises:
        ValueError: for an optimizer without parameters, or with none of the model's.
    """
    for update in engine.updates if engine.training else ():
        spec = update.spec
        where = f"update {spec.name!r}"
        if update.optimizer is None:
            assert spec.optimizer is not None
            assert callable(spec.optimizer)
            parameters: Any
            if spec.parameters is not None:
                parameters = spec.parameters(engine)
                parameters = parameters if isinstance(parameters, Mapping) else list(parameters)
            else:
                parameters = list(dict.fromkeys(p for root in engine.modules.values() for p in root.parameters()))
            if not parameters:
                raise ValueError(
                    f"{where}: there is nothing to optimize; pass a model= with parameters to Engine, "
                    "or parameters= to Update"
                )
            update.take_optimizer(spec.optimizer(parameters))
        optimizer = update.optimizer
        assert optimizer is not None
        update.order_parameters(p for root in engine.modules.values() for p in root.parameters())
        if update.window.kept is None and needs_closure(optimizer):
            update.window.kept = []
        known = {p for root in engine.modules.values() for p in root.parameters()}
        if known and not any(p in known for p in update.parameters):
            raise ValueError(
                f"{where}: its {kind_of(optimizer)} holds none of the model's parameters; it was built "
                "for another model, or before the model's parameters were replaced: pass a factory instead, "
                f"such as partial(torch.optim.{type(optimizer).__name__}, lr=...)"
            )
    if engine.training:
        put_in_training_mode(engine)


def report_shared_parameters(engine: Engine) -> None:
    """Report updates whose optimizers hold the same parameters of several modules, because none was given its own."""
    if not engine.training or len(engine.updates) < 2 or len(engine.modules) < 2:
        return
    everything = [update for update in engine.updates if update.spec.parameters is None]
    for place, update in enumerate(everything):
        for other in everything[place + 1 :]:
            if shared := len({*update.parameters} & {*other.parameters}):
                engine.findings.report(
                    "W71",
                    f"updates {update.name!r} and {other.name!r} both train {shared} parameters, so that each loss changes what "
                    "the other one trains",
                    "give each its own: Update(..., parameters=lambda engine: engine.modules['generator'].parameters())",
                    key=(update.name, other.name),
                )


def check_windows(engine: Engine) -> None:
    """Raise ValueError if updates that share parameters accumulate: each would clear the gradients of the other."""
    if len(engine.updates) > 1 and any(update.window.length > 1 for update in engine.updates):
        seen: dict[object, str] = {}
        for update in engine.updates:
            for parameter in update.parameters:
                other = seen.setdefault(parameter, update.name)
                if other != update.name:
                    raise ValueError(
                        f"updates {other!r} and {update.name!r} share parameters, so that gradients cannot be "
                        "accumulated for one of them; give each its own with Update(..., parameters=), or "
                        "detach GradientAccumulation"
                    )


def check_modules(engine: Engine) -> None:
    """Raise ValueError for parameters on the meta device, and for sharded ones in a single process."""
    for name, root in engine.modules.items():
        sharded = [p for p in root.parameters() if is_sharded(p) and p.device_mesh.size() > 1]  # type: ignore[attr-defined]
        if sharded and not engine.processes.distributed:
            raise ValueError(
                f"the model {name!r} is sharded over ranks, but the handler that sharded it is not attached: attach it again, or "
                "call handler.unshard(engine) before detaching it"
            )
        meta = next((key for key, p in root.named_parameters() if p.device.type == "meta"), None)
        if meta is not None:
            raise ValueError(
                f"the model {name!r} is on the meta device, where parameters ({meta!r} among them) have no "
                "values; materialise it with model.to_empty(device=...) and initialise it"
            )


def check_devices(engine: Engine) -> None:
    """Raise ValueError for an enabled handler that needs what the model's device does not offer."""
    for handler in engine.handlers.values():
        if handler.enabled:
            check_device(engine, handler)


def check_device(engine: Engine, handler: Handler) -> None:
    """Raise ValueError if the handler needs what the model's device does not offer."""
    if handler.device_features and (refused := refusal(engine.device, *handler.device_features)) is not None:
        raise ValueError(f"{handler.name!r}: {refused}")


def report_untrained(engine: Engine) -> None:
    """Report a run of several epochs by an engine that evaluates: an optimizer was probably forgotten."""
    state = engine.state
    if engine.training or not (state.max_epochs or 0) > 1:
        return
    if any(parameter.requires_grad for root in engine.modules.values() for parameter in root.parameters()):
        engine.findings.report(
            "W10",
            f"run(max_epochs={state.max_epochs}): nothing is trained, since no update has an optimizer",
            "give the Update an optimizer, such as partial(torch.optim.AdamW, lr=1e-3); to evaluate, run one epoch",
        )


def set_modes(engine: Engine) -> None:
    """Put the modules in training or eval mode; in training, frozen parts that were in eval mode alone stay in it.

    A part is in eval mode alone if the module around it is in training mode, so that it is meant: a backbone whose statistics
    and dropout are to rest. A model that is in eval mode as a whole was evaluated before, and is trained.
    """
    if not engine.training:
        for root in engine.modules.values():
            root.train(False)
        return
    kept: dict[str, nn.Module] = {}
    trained: dict[str, nn.Module] = {}
    for name, root in engine.modules.items():
        if root.training:
            for path, part in _in_eval_alone(root, name):
                (kept if _is_frozen(part) else trained)[path] = part
        elif len(engine.modules) > 1 and engine.model.training and _is_frozen(root):
            kept[name] = root
    modes = {module: module.training for part in kept.values() for module in part.modules()}
    for root in engine.modules.values():
        root.train()
    for module, mode in modes.items():
        module.training = mode
    trained = {path: part for path, part in trained.items() if part.training}
    for parts, what in ((kept, "frozen, and stay so"), (trained, "not frozen, and are put in training mode")):
        if parts:
            engine.findings.report(
                "W52",
                f"parts of the model are in eval mode, {what}: {', '.join(parts)}",
                "freeze a part (requires_grad_(False)) to keep it in eval mode in training, or call train() before run()",
                key=what,
                severity="warning" if parts is trained and any(map(_knows_modes, parts.values())) else "info",
            )


def _in_eval_alone(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if child.training:
            yield from _in_eval_alone(child, f"{path}.{name}")
        else:
            yield f"{path}.{name}", child


def _knows_modes(module: nn.Module) -> bool:
    """Whether a module does something else in training."""
    return any(isinstance(part, _DropoutNd | _NormBase) for part in module.modules())


def _is_frozen(module: nn.Module) -> bool:
    """Whether a module has weights or statistics, and none of them is trained."""
    tensors = [*module.parameters(), *module.buffers()]
    return bool(tensors) and not any(tensor.requires_grad for tensor in tensors)


_OF_TRAINING = (
    Events.BACKWARD_STARTED, Events.BACKWARD_COMPLETED, Events.GRADIENTS_READY, Events.OPTIMIZER_STEP_STARTED,
    Events.OPTIMIZER_STEP_COMPLETED,
)  # fmt: skip


def report_never_emitted(engine: Engine) -> None:
    """Report functions of the user that are connected only to events that this engine never emits."""
    never = set() if engine.training else set(_OF_TRAINING)
    if all(update.forward is None for update in engine.updates):
        never.add(Events.FORWARD_COMPLETED)
    if all(update.loss_function is None and update.function is None for update in engine.updates):
        never.add(Events.LOSS_COMPUTED)
    late = [one for event in never for one in engine.signal(event).connections if one.owner is None and one.is_foreign]
    for connection in late:
        events = [signal.event for signal in engine.signals.all() if signal.has(connection.receiver)]
        if not never.issuperset(events):
            continue
        why = (
            "an engine that evaluates makes no backward and no steps"
            if events[0] in _OF_TRAINING
            else "its updates are single functions, without an output"
            if events[0] is Events.FORWARD_COMPLETED
            else "its updates have no loss"
        )
        engine.findings.report(
            "W49",
            f"{connection!r} is connected to {' and '.join(map(str, events))}, which this engine never emits: {why}",
            "connect it to another event, such as Events.ITERATION_COMPLETED, or to the trainer",
            key=repr(connection),
        )
