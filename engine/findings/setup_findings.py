"""What looks wrong about an engine that is set up: what it trains, and events that it never emits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

from ..authoring.functions import called_by, is_users, names_in
from ..core.events import EventEnum, Events
from ..core.words import listed
from .epoch_checks import held_by_optimizers
from .other_optimizers import held_by_any_optimizer

if TYPE_CHECKING:
    from ..core.update import UpdateState
    from ..engine import Engine

__all__ = [
    "Parts", "report_loss_parameters", "report_never_emitted", "report_parts_in_eval", "report_shared_parameters",
    "report_untrained", "report_wrapped",
]  # fmt: skip


_OF_TRAINING = (
    Events.BACKWARD_STARTED, Events.BACKWARD_COMPLETED, Events.GRADIENTS_READY, Events.OPTIMIZER_STEP_STARTED,
    Events.OPTIMIZER_STEP_COMPLETED,
)  # fmt: skip


def report_untrained(engine: Engine) -> None:
    """Report a run of several epochs by an engine that evaluates: an optimizer was probably forgotten."""
    state = engine.state
    if engine.training or not (state.max_epochs or 0) > 1:
        return
    by_hand = any(is_users(one) and _CHANGES & names_in(one) for one in called_by(engine))
    if not by_hand and any(parameter.requires_grad for parameter in engine.modules.parameters()):
        engine.findings.report(
            "W10",
            f"run(max_epochs={state.max_epochs}): the engine trains nothing, because no update has an optimizer",
            "give the Update an optimizer: Update.supervised(loss, torch.optim.AdamW, lr=1e-3); to evaluate, run one "
            "epoch; if your own code changes the weights, build the Engine with allow=['W10']",
        )


_CHANGES = {"step", "add_", "sub_", "mul_", "copy_", "lerp_", "data", "vector_to_parameters"}
"""Names in functions that change the weights themselves, such as a step of their own optimizer, or an evolution strategy."""

Parts = Mapping[str, nn.Module]


def report_parts_in_eval(engine: Engine, found: tuple[Parts, Parts] | None) -> None:
    """Report parts of the model that were in eval mode before a training: frozen ones, and others, which it has changed."""
    frozen, others = found if found is not None and engine.training else ({}, {})
    others = {path: part for path, part in others.items() if part.training}
    for parts, what in (
        (frozen, "stay in eval mode, because they are frozen"),
        (others, "are set to training mode, because they are not frozen"),
    ):
        if parts:
            engine.findings.report(
                "W52",
                f"parts of the model are in eval mode and {what}: {', '.join(parts)}",
                "to keep a part in eval mode during training, freeze it with requires_grad_(False) or, if it has no "
                "parameters, call its eval() at EPOCH_STARTED; otherwise, call train() before run()",
                key=what,
                severity="warning" if parts is others and any(map(_knows_modes, parts.values())) else "info",
            )


def _knows_modes(module: nn.Module) -> bool:
    """Whether a module does something else in training."""
    return any(isinstance(part, _DropoutNd | _NormBase) for part in module.modules())


def report_shared_parameters(engine: Engine) -> None:
    """Report updates whose optimizers hold the same parameters of several modules, because none was given its own."""
    if not engine.training or len(engine.updates) < 2 or len(engine.modules) < 2:
        return
    everything = [update for update in engine.updates if not _chooses(engine, update)]
    for place, update in enumerate(everything):
        for other in everything[place + 1 :]:
            if shared := len({*update.parameters} & {*other.parameters}):
                engine.findings.report(
                    "W71",
                    f"updates {update.name!r} and {other.name!r} both train the same {shared} parameters, so the loss "
                    "of each update also changes parameters that the other update trains",
                    "build each optimizer with the parameters of its own module; if both updates should train a shared "
                    "module, give each Update an optimizer factory and the names of its modules: parameters=[...]",
                    key=(update.name, other.name),
                )


def _chooses(engine: Engine, update: UpdateState) -> bool:
    """Whether it was said what an update trains: by ``parameters=``, or by an optimizer of some of the parameters."""
    if update.spec.parameters is not None:
        return True
    return isinstance(update.spec.optimizer, Optimizer) and not {*update.parameters} >= {*engine.modules.parameters()}


def report_never_emitted(engine: Engine) -> None:
    """Report functions of the user that are connected only to events that this engine never emits."""
    never = _never_emitted(engine)
    late = [one for event in never for one in engine.signal(event).connections if one.owner is None and one.is_foreign]
    for connection in late:
        events = [signal.event for signal in engine.signals.all() if signal.has(connection.receiver)]
        if never.keys() >= set(events):
            engine.findings.report(
                "W49",
                f"{connection!r} is connected to {' and '.join(map(str, events))}, which this engine never emits, "
                f"because {never[events[0]]}",
                "connect it to a different event, such as Events.ITERATION_COMPLETED, or to the trainer",
                key=repr(connection),
            )


def _never_emitted(engine: Engine) -> dict[EventEnum, str]:
    """The events that an engine never emits, and why."""
    of_training = () if engine.training else _OF_TRAINING
    never: dict[EventEnum, str] = dict.fromkeys(of_training, "an evaluation runs no backward pass and no steps")
    if all(update.forward is None for update in engine.updates):
        never[Events.FORWARD_COMPLETED] = "its updates are single functions without an output"
    if all(update.loss_function is None and update.function is None for update in engine.updates):
        never[Events.LOSS_COMPUTED] = "its updates have no loss"
    return never


def report_wrapped(engine: Engine) -> None:
    """Report a model that the user has distributed over processes of which the engine knows nothing."""
    if engine.modules.wrapper != "DistributedDataParallel" or engine.processes.distributed:
        return
    if dist.is_initialized() and (size := dist.get_world_size()) > 1:
        engine.findings.report(
            "W46",
            f"the model is wrapped in DistributedDataParallel over {size} processes, but the engine runs as a single "
            f"process. Each rank measures, saves and logs as if it were alone{_consequences(engine)}",
            "build the Engine with the model itself, and attach signalfire.handlers.DistributedDataParallel()",
        )


def _consequences(engine: Engine) -> str:
    """What this rank does for itself: its data may be that of all, and what its handlers write may be written by all."""
    shares = isinstance(getattr(engine.feed.current.data, "sampler", None), DistributedSampler)
    writers = [name for name, handler in engine.handlers.items() if handler.writes and handler.enabled]
    does = [] if shares else ["may read all of the data"]
    if writers:
        does.append(f"writes with {listed(map(repr, writers))}")
    return f": this one {' and '.join(does)}" if does else ""


def _trained_otherwise(loss: nn.Module, parameters: set[Tensor]) -> set[Tensor]:
    """Parameters of a loss that an optimizer of the user's trains; all of them if it is only evaluated, such as a teacher."""
    if {"no_grad", "inference_mode"} & names_in(type(loss).forward):
        return parameters
    return held_by_any_optimizer(parameters)


def report_loss_parameters(engine: Engine) -> None:
    """Report the parameters of losses: as information that they are trained, as a warning where no optimizer holds them."""
    if not engine.training:
        return
    held = held_by_optimizers(engine)
    for name in engine.modules.losses:
        loss = engine.modules[name]
        trained = {key: p for key, p in loss.named_parameters() if p.requires_grad}
        left = {key: p for key, p in trained.items() if p not in held}
        otherwise = _trained_otherwise(loss, {*left.values()})
        missing = [key for key, p in left.items() if p not in otherwise]
        kind = type(loss).__name__
        if missing:
            engine.findings.report(
                "W42",
                f"the loss {kind} has parameters that no optimizer of the engine holds, so the engine does not train "
                f"them: {', '.join(missing)}",
                f"pass the optimizer as a factory (if you also pass parameters=, add {name!r} to it), or build the optimizer "
                f"with these parameters as well: [*model.parameters(), *{name}.parameters()]; if they should stay "
                "constant, call requires_grad_(False) on them; if your own code trains them, allow W42",
                key=name,
            )
        elif trained and not left:
            engine.findings.report(
                "W43",
                f"the parameters of the loss {kind} are trained, moved and saved with those of the model, under the "
                f"name {name!r}: {', '.join(trained)}",
                "if some of them should stay constant, call requires_grad_(False) on these before you build the Engine",
                key=name,
            )
