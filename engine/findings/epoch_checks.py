"""What the engine compares at the ends of epochs: facts that show that an epoch did not train what it seems to train.

Nothing is done in an iteration. Whether a parameter was updated is read from its version, which torch counts up with every
change in place; optimizers whose kernels do not count are compared by values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..authoring.batches import tensors_in
from ..authoring.devices import is_readable, widened
from ..authoring.functions import called_by, is_users, names_reached
from ..core.events import Events
from ..core.update import needs_closure
from ..distributed.sharded import is_sharded, local_part
from ..updates.optimizers import optimizers_of
from .data_checks import steps_itself
from .evaluation_findings import effect_of_training
from .loss_nodes import ignored_by
from .other_optimizers import held_by_none

if TYPE_CHECKING:
    from ..core.connection import Connection
    from ..core.update import UpdateState
    from ..engine import Engine

__all__ = [
    "EpochChecks",
    "counted",
    "counts_versions",
    "has_nan",
    "held_by_optimizers",
    "names_of",
    "rates_of",
    "shown",
    "trainable",
]

_INFINITY = float("inf")
_LATE = {
    (True, True): "requires_grad was set to True",
    (False, False): "a layer was created or replaced",
    (False, True): "layers were created, replaced or unfrozen",
}
"""Why parameters are in no optimizer, by whether all of them were unfrozen, and whether any was."""

_NORMS = nn.modules.batchnorm._NormBase


class EpochChecks:
    """The checks of one run of an engine that trains.

    Args:
        engine: the engine, set up: what its modules hold now is what its optimizers were built for.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._known = _parameters(_parts(engine))
        self._known_ids = [id(p) for p in self._known]
        self._trainable = [p.requires_grad for p in self._known]
        self._roots: dict[str, bool] | None = None
        self._parts: list[nn.Module] = []
        self._modes: list[bool] = []
        self._before: list[_Before] = []
        self._unheld: dict[Tensor, int] = {}  # the versions of what no optimizer holds, as the epoch began

    def begin_epoch(self) -> None:
        """Note how the epoch begins; called after EPOCH_STARTED."""
        engine = self.engine
        if not engine.training:
            return
        if self._roots is None:
            self._roots = {name: root.training for name, root in engine.modules.items()}
        self._parts = _parts(engine)
        self._modes = [part.training for part in self._parts]
        self._before = [_Before(engine, update) for update in engine.updates]
        held = held_by_optimizers(engine)
        self._unheld = {p: p._version for p in trainable(engine) if p not in held}

    def end_epoch(self, *, whole: bool = True) -> None:
        """Compare how the epoch ends; called before EPOCH_COMPLETED.

        Args:
            whole: whether the epoch is complete; a run may end within one.
        """
        if not self.engine.training or not self._before:
            return
        before, self._before = self._before, []
        stale: list[Tensor] = []
        for one in before:
            stale += self._check_updated(one, whole=whole)
        now = _parameters(_parts(self.engine))
        if stale or list(map(id, now)) != self._known_ids or [p.requires_grad for p in now] != self._trainable:
            self._check_held(stale)
        if [part.training for part in self._parts] != self._modes or False in self._modes:
            self._check_modes()
        for one in before:
            self._check_loss(one.update)
            self._check_optimizer(one)

    def finish(self) -> None:
        """Look at all weights as the run ends: those that the last step has spoilt no loss shows; and at what never ran."""
        for update in self.engine.updates if self.engine.training else ():
            self._check_finite(update)
            self._check_made(update)

    def _check_made(self, update: UpdateState) -> None:
        """Report an update that no iteration has made, unless this is a part of a run, or was seen before it."""
        engine = self.engine
        made = engine.state.completed
        limited = engine.dry_run or engine.overrides.data is not None or bool(engine.findings.of_run().of("C17"))
        if made > 1 and update.omitted_in == made and update.steps == 0 and update.raw_loss is None and not limited:
            engine.findings.report(
                "C17",
                f"update {update.name!r} never ran, because it was left out of all {made} iterations of this run",
                "choose a smaller number in UpdateFrequency(every=), or a longer run",
                key=update.name,
            )

    def _check_updated(self, before: _Before, *, whole: bool) -> list[Tensor]:
        """Which parameters the steps of this epoch left alone; returns those that are in no module."""
        engine, update = self.engine, before.update
        steps = update.steps - before.steps
        if steps < 1:
            return []
        if not (left := before.left_alone()):
            self._check_moved(before, steps)
            return []
        parameters = [p for p in update.parameters if p.requires_grad]
        if list(map(id, parameters)) != list(map(id, before.parameters)):
            return []
        assert update.optimizer is not None
        if needs_closure(update.optimizer) or (before.values and not any(before.rates)):
            return []  # at an optimum L-BFGS changes nothing; rates of zero are reported as such
        if not before.counts_versions and before.steps:
            return []  # once steps have changed the weights, gradients of zero leave them as they are
        self._report_left(before, parameters, left, steps, whole=whole)
        return list(set(left).difference(names_of(engine)))

    def _report_left(
        self, before: _Before, parameters: list[Tensor], left: list[Tensor], steps: int, *, whole: bool
    ) -> None:
        """Report parameters that the steps of an epoch left alone: all of them, or some."""
        engine, update = self.engine, before.update
        names = names_of(engine)
        said = f"update {update.name!r} ran {counted(steps, 'step')} in epoch {engine.state.epoch}"
        if len(left) == len(parameters):
            engine.remark(
                "W12",
                f"{said}, but none of its {counted(len(parameters), 'parameter')} "
                + ("had a gradient at any step" if before.counts_versions else "changed"),
                "check that the optimizer's step() changes its parameters; "
                * (not before.counts_versions)
                + "in the forward pass, use engine.model, not an older model or a copy; do not call no_grad(), detach() "
                "or item() between the parameters and the loss; and leave zero_grad() to the engine",
                key=update.name,
            )
        elif whole and before.counts_versions:
            total, missing = (sum(p.numel() for p in several) for several in (parameters, left))
            engine.remark(
                "W13",
                f"{said}, but {len(left)} of its {len(parameters)} parameters ({shown(left, names)}) had no "
                "gradient at any step",
                "if these parameters should train, look for detach(), no_grad() or an unused module in the forward "
                "pass; if not, freeze them with requires_grad_(False) or Freezing, or leave them out of the optimizer",
                key=(update.name, 2 * missing >= total),
                severity="warning" if 2 * missing >= total else "info",
            )

    def _check_moved(self, before: _Before, steps: int) -> None:
        """Report steps that were all rounded away, in the epoch of the first; what has converged may stay as it is."""
        engine, update = self.engine, before.update
        if before.samples and all(before.rates) and all(map(torch.equal, before.samples, _samples(before.sampled))):
            types = ", ".join(sorted({str(p.dtype) for p in before.sampled}))
            engine.remark(
                "W84",
                f"update {update.name!r} ran {counted(steps, 'step')} in epoch {engine.state.epoch}, but no weight "
                f"changed: the gradients are zero, the steps are below the precision of {types}, or your code puts the "
                "weights back",
                "use a larger learning rate, check the clipping bound and the loss, or keep the weights in float32",
                key=update.name,
            )

    def _check_held(self, stale: Sequence[Tensor]) -> None:
        """Report parameters that appeared in the model after the optimizers were built, or in place of what they hold."""
        engine, names = self.engine, names_of(self.engine)
        held = held_by_optimizers(engine)
        unheld = [p for p in trainable(engine) if p not in held and not self._is_changed(p)]
        known = {p for p, trained in zip(self._known, self._trainable, strict=True) if trained}
        if new := held_by_none(unheld if stale else [p for p in unheld if p not in known]):
            unfrozen = {*new} & ({*self._known} - known)
            what = _LATE[len(unfrozen) == len(new), bool(unfrozen)]
            engine.remark(
                "W11",
                f"{counted(len(new), 'parameter')} of the model ({shown(new, names)}) "
                f"{'is' if len(new) == 1 else 'are'} in no optimizer and not trained, "
                f"because {what} after the optimizer was built",
                "create all layers before run() and pass the Update an optimizer factory, such as "
                "partial(torch.optim.AdamW, lr=1e-3); or call optimizer.add_param_group() for the new parameters",
            )

    def _is_changed(self, parameter: Tensor) -> bool:
        """Whether something beside the engine's optimizers has changed a parameter in this epoch."""
        return self._unheld.get(parameter, parameter._version) != parameter._version

    def _check_modes(self) -> None:
        """Report modules that were put into another mode and left in it; a step or forward that calls train() puts them back."""
        engine, roots = self.engine, self._roots or {}
        held = held_by_optimizers(engine)
        off = [
            name
            for name, root in engine.modules.items()
            if roots.get(name) and not root.training and not _untrained(root, held) and _knows_modes(root)
        ]
        parts = self._put_in_eval_mode(held)
        if (off or parts) and not any("train" in names_reached(one) for one in called_by(engine)):
            what = f"the model {off[0]!r}" if off else f"the part {parts[0]!r} of the model"
            engine.remark(
                "W14",
                f"{what} was set to eval mode during training and was still in eval mode at the end of epoch "
                f"{engine.state.epoch}. Unless a receiver calls train() before the next forward pass, dropout is off and "
                "batch statistics do not update",
                "call model.train() after evaluating, or evaluate with engine.evaluate(), which restores the modes",
            )

    def _put_in_eval_mode(self, held: set[Tensor]) -> list[str]:
        """The parts that are in eval mode and were not; untrained ones and normalization layers are often meant to be."""
        names = {part: path for root in self.engine.modules.values() for path, part in root.named_modules()}
        changed = [part for part, was in zip(self._parts, self._modes, strict=True) if was and not part.training]
        untrained = {inner for part in self._parts if _untrained(part, held) for inner in part.modules()}
        left = [one for one in changed if not isinstance(one, _NORMS) and _knows_modes(one)]
        return [names.get(part, type(part).__name__) for part in left if part not in untrained]

    def _check_loss(self, update: UpdateState) -> None:
        """Look at the weights if the last loss of the epoch is NaN, as it is once they are."""
        loss = update.raw_loss
        if isinstance(loss, Tensor) and not loss.is_meta and loss.numel() == 1 and math.isnan(loss.item()):
            self._check_finite(update)

    def _check_finite(self, update: UpdateState) -> None:
        """Report NaN in what the optimizer holds, and in the loss."""
        engine, loss = self.engine, update.raw_loss
        parameters = [*filter(_requires_grad, update.parameters)]
        guarded = any(map(_is_guard, (one for event in _BEFORE_STEP for one in engine.signal(event).connections)))
        losses = [loss.detach()] if isinstance(loss, Tensor) and not guarded and not self._ignores_all(loss) else []
        if not has_nan([*parameters, *losses]):
            return
        if bad := [p for p in parameters if has_nan([p])]:
            what = f"{len(bad)} of the {len(parameters)} parameters of update {update.name!r} are NaN"
            what += f" ({shown(bad, names_of(engine))})"
            way_out = (
                "attach NonFiniteGuard() to skip such steps and report their cause; look for NaN in the data, a logarithm "
                "or division by zero, or a learning rate that is too high"
            )
        else:
            what = f"the loss of update {update.name!r} is NaN"
            way_out = (
                "look for NaN in the data, or a logarithm or division by zero, such as the mean of no samples; "
                "NonFiniteGuard(check='both') skips the steps of such losses"
            )
        engine.remark("W15", f"after iteration {engine.state.iteration}, {what}", way_out)

    def _ignores_all(self, loss: Tensor) -> bool:
        """Whether all targets of the last batch are of the class that its loss ignores: their mean is NaN, without gradients."""
        ignored = ignored_by(loss)
        classes = [one for one in tensors_in(self.engine.state.batch) if one.dtype is torch.int64 and is_readable(one)]
        return ignored is not None and any(bool((one == ignored).all()) for one in classes)

    def _check_optimizer(self, before: _Before) -> None:
        """Report steps that the engine did not make, rates of zero, and windows that lost gradients."""
        engine, update = self.engine, before.update
        steps = _steps_of(engine, update) - before.steps_of_optimizer
        counted_now = None if engine.findings.of_run().of("W17") else _steps_counted(update)
        made = before.counted_since(counted_now)
        if made > steps and not (steps == 0 and steps_itself(update)):
            engine.remark(
                "W17",
                f"the optimizer of update {update.name!r} counted {made} steps in epoch {engine.state.epoch}, but the engine "
                f"ran only {steps}",
                "if your code calls optimizer.step(), remove the call, because the engine calls it once per "
                "accumulation window",
                key=update.name,
            )
        rates = [*before.rates, *rates_of(update)]
        if update.steps > before.steps and rates and not any(rates) and before.is_unchanged():
            engine.remark(
                "W18",
                f"the learning rate of update {update.name!r} was 0 at the start and the end of epoch {engine.state.epoch}",
                "check lr=, the warm-up of the schedule, and the unit of its length (steps or epochs)",
                key=update.name,
            )
        if negative := before.negative_rates():
            engine.remark(
                "W18",
                f"the learning rate of update {update.name!r} is negative ({min(negative):.3g}) in epoch "
                f"{engine.state.epoch}, so steps increase the loss",
                "check the schedule, whose factor becomes negative",
                key=update.name,
            )


class _Before:
    """An update and its parameters at the start of an epoch."""

    def __init__(self, engine: Engine, update: UpdateState) -> None:
        self.update, self.steps, self.counted = update, update.steps, _steps_counted(update)
        self.states = _states_of(update)
        self.steps_of_optimizer = _steps_of(engine, update)
        self.rates = rates_of(update)
        self.counts_versions = engine.overrides.step is None and counts_versions(update)
        self.parameters = parameters = [p for p in update.parameters if p.requires_grad]
        self.versions = [p._version for p in parameters]
        self.values = [] if self.counts_versions and any(self.rates) else _samples(parameters)
        is_first = self.counts_versions and not update.steps
        self.sampled = [p for p in parameters if is_first and p.numel() and not p.is_meta]
        self.samples = _samples(self.sampled)

    def counted_since(self, now: int | None) -> int:
        """The steps that the optimizer has counted since; 0 where it does not count, and if another state was loaded."""
        if self.counted is None or now is None or self.states != _states_of(self.update):
            return 0
        return now - self.counted

    def negative_rates(self) -> list[float]:
        """Rates below 0 that steps have used; not those that a schedule gives after its last step, a step below 0."""
        steps = max(1, self.update.steps - self.steps)
        pairs = zip(self.rates, rates_of(self.update), strict=False)
        used = [now for before, now in pairs if now < 1.5 * (now - before) / steps]
        return [rate for rate in (*self.rates, *used) if rate < 0]

    def left_alone(self) -> list[Tensor]:
        """The parameters that did not change; by values it is all of them or none."""
        if self.counts_versions:
            return [p for p, version in zip(self.parameters, self.versions, strict=True) if p._version == version]
        return list(self.parameters) if self.is_unchanged() else []

    def is_unchanged(self) -> bool:
        """Whether all parameters have the values that they had, of which samples are compared; not where this rank holds none."""
        if not any(sample.numel() for sample in self.values[::2]):
            return False
        now = _samples(self.parameters)
        return all(not a.is_meta and bool(torch.equal(a, b)) for a, b in zip(self.values, now, strict=True))


def counts_versions(update: UpdateState) -> bool:
    """Whether the optimizer's step counts up the versions of what it changes: torch's do, but for fused kernels."""
    optimizer = update.optimizer
    return (
        optimizer is not None
        and type(optimizer).__module__.startswith("torch.optim.")
        and ("step" not in vars(optimizer) or hasattr(optimizer.step, "_wrapped_by_lr_sched"))
        and not any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
        and not any(is_sharded(p) for p in update.parameters)
    )


def _samples(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Copies of some values, and the norm, of each parameter."""
    found = []
    for parameter in parameters:
        own = local_part(parameter).detach()
        flat = own.reshape(-1)
        real = torch.view_as_real(own) if own.is_complex() else own
        found += [flat[:: max(1, flat.numel() // 16)].clone(), widened(real).norm() if own.numel() else own.sum()]
    return found


def _steps_of(engine: Engine, update: UpdateState) -> int:
    """How many steps the engine has made with the optimizer of an update, which several may share."""
    return sum(one.steps for one in engine.updates if one.optimizer is update.optimizer)


def _states_of(update: UpdateState) -> list[int]:
    """Which objects are the states of the optimizers, but for those made at each access: a loaded one is another object."""
    states = [(one, one.state) for one in optimizers_of(update.optimizer)]
    return [id(state) for one, state in states if one.state is state]


def _steps_counted(update: UpdateState) -> int | None:
    """The number of steps that the optimizer itself has counted, as those of Adam's kind do; None for others."""
    if update.optimizer is None:
        return None
    known = [state["step"] for state in update.optimizer.state.values() if isinstance(state, dict) and "step" in state]
    counts = [
        int(step) for step in known[:1] if isinstance(step, int) or (isinstance(step, Tensor) and step.numel() == 1)
    ]
    return counts[0] if counts else (None if update.optimizer.state or update.steps else 0)


def rates_of(update: UpdateState) -> list[float]:
    """The learning rates of an optimizer's groups; groups without one are omitted."""
    groups: list[dict[str, Any]] = [] if update.optimizer is None else update.optimizer.param_groups
    rates = [group["lr"] for group in groups if "lr" in group]
    return [rate if type(rate) is float else float(rate) for rate in rates if rate is not None]


def has_nan(parameters: Sequence[Tensor]) -> bool:
    """Whether any element is NaN; this rank's part of sharded parameters. It waits for the device once."""
    own = [p if type(p) is nn.Parameter else local_part(p) for p in parameters]
    parts = [p for p in own if 0 not in p.shape and p.dtype.is_floating_point and not p.is_meta]
    if not parts:
        return False
    largest = torch._foreach_norm(parts, _INFINITY)  # NaN where an element is
    if len({(one.device, one.dtype) for one in largest}) > 1:
        largest = tuple(one.to(largest[0].device, torch.float32) for one in largest)
    return bool(torch.stack(largest).isnan().any())


def _parts(engine: Engine) -> list[nn.Module]:
    """All modules, in any order; a shared one may come twice."""
    parts = list(engine.modules.values())
    for part in parts:  # grows meanwhile
        parts += [child for child in part._modules.values() if child is not None]
    return parts


_BEFORE_STEP = Events.LOSS_COMPUTED, Events.BACKWARD_COMPLETED, Events.GRADIENTS_READY
_LOOKS, _MENDS = {"isfinite", "isnan", "isinf"}, {"zero_grad", "zero_", "skip", "nan_to_num", "nan_to_num_"}


def _is_guard(connection: Connection) -> bool:
    """Whether a receiver skips steps, or looks for NaN itself and drops such gradients."""
    names = names_reached(connection.receiver) if is_users(connection.receiver) else set()
    return "step" in (connection.writes or ()) or bool(_LOOKS & names and _MENDS & names)


def _requires_grad(parameter: Tensor) -> bool:
    return parameter.requires_grad


def _parameters(parts: Iterable[nn.Module]) -> list[Tensor]:
    return [p for part in parts for p in part._parameters.values() if p is not None]


def trainable(engine: Engine) -> list[Tensor]:
    """The parameters of the engine's modules that require gradients."""
    return [p for p in engine.modules.parameters() if p.requires_grad]


def held_by_optimizers(engine: Engine) -> set[Tensor]:
    """The parameters of all updates' optimizers."""
    return {p for update in engine.updates for p in update.parameters}


def names_of(engine: Engine) -> dict[Tensor, str]:
    """The name of each parameter; several modules prefix the names with their own."""
    several = len(engine.modules) > 1
    return {
        parameter: name
        for root, module in engine.modules.items()
        for name, parameter in module.named_parameters(prefix=root if several else "")
    }


def shown(parameters: Sequence[Tensor], names: dict[Tensor, str], most: int = 3) -> str:
    """The names of a few parameters."""
    listed = [repr(names[p]) if p in names else f"one of shape {tuple(p.shape)} outside the model" for p in parameters]
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def counted(number: int, what: str) -> str:
    """A number of things, such as "1 step" or "2 steps"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _untrained(part: nn.Module, held: set[Tensor]) -> bool:
    """Whether all parameters of a module are frozen, or in no optimizer."""
    parameters: list[Any] = list(part.parameters())
    return bool(parameters) and not any(p.requires_grad and p in held for p in parameters)


def _knows_modes(module: nn.Module) -> bool:
    """Whether a module does something else in training mode."""
    return any(effect_of_training(part) for part in module.modules())
