"""Whether the optimizer of an update can take a saved state: the same class, parameters and groups of them."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from ..updates.optimizers import JointOptimizer
from .modules import bare_name

if TYPE_CHECKING:
    from ..core.update import UpdateState
    from ..engine import Engine

__all__ = ["check_parameters", "parameter_names"]

_MOST_NAMED = 3

_WAY_OUT = (
    "build the optimizer as in the run that saved the state, or start a new run with the saved weights: "
    "load_weights(state)"
)


def parameter_names(engine: Engine, update: UpdateState, modules: Container[str]) -> list[str]:
    """The names of an optimizer's parameters, which it saves by position; empty for one of none of these modules."""
    roots = {name: root for name, root in engine.modules.items() if name in modules}
    names: dict[Tensor, str] = {
        p: f"{name}.{bare_name(key)}" for name, root in roots.items() for key, p in root.named_parameters()
    }
    return [names.get(p, "") for p in update.parameters]


def check_parameters(engine: Engine, update: UpdateState, part: Mapping[str, Any], modules: Mapping[str, Any]) -> None:
    """Raise ValueError if an optimizer held other parameters, or in other groups, or was of another class.

    Args:
        engine: The engine.
        update: The update.
        part: Its saved state.
        modules: The saved states of the modules.
    """
    if part["optimizer"] is None or update.optimizer is None:
        return  # one side has no optimizer: nothing to compare
    where = f"the loaded state does not match this engine: update {update.name!r}"
    if part["kind"] != update.kind:
        raise ValueError(f"{where} used the optimizer {part['kind']}, but now uses {update.kind}")
    then, here = part["parameters"], parameter_names(engine, update, modules)
    groups_then, groups_here = _groups_saved(part["optimizer"]), _groups_of(update)
    if groups_then is None or _decides_itself(update.optimizer):
        groups_then = groups_here  # the optimizer itself decides
    if problem := _different_groups(groups_then, groups_here, then, here):
        raise ValueError(f"{where} {problem}; {_WAY_OUT}")
    if not _same(then, here, modules, update.parameters):
        raise ValueError(f"{where} optimized the parameters {then}, but now optimizes {here}")
    for place, value in part["own_parameters"].items():
        if (shape := update.parameters[place].shape) != value.shape:
            raise ValueError(
                f"{where} optimized a parameter that belongs to no module (parameter {place}); its shape was "
                f"{tuple(value.shape)}, but is now {tuple(shape)}; {_WAY_OUT}"
            )


def _groups_saved(state: Any) -> list[list[int]] | None:
    """The places of the parameters in each group of a saved optimizer; None for one that saves in a form of its own."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not isinstance(groups, list) or not all(isinstance(one, Mapping) and "params" in one for one in groups):
        return None
    return [list(group["params"]) for group in groups]


def _groups_of(update: UpdateState) -> list[list[int]]:
    places = {parameter: place for place, parameter in enumerate(update.parameters)}
    assert update.optimizer is not None
    return [[places[parameter] for parameter in group["params"]] for group in update.optimizer.param_groups]


def _decides_itself(optimizer: Optimizer) -> bool:
    """Whether an optimizer may take a state with other groups, by a load of its own or by hooks."""
    own = type(optimizer).load_state_dict is not Optimizer.load_state_dict
    return not isinstance(optimizer, JointOptimizer) and (
        own or bool(getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None))
    )


def _different_groups(
    groups_then: Sequence[Sequence[int]], groups_here: Sequence[Sequence[int]], then: Sequence[str], here: Sequence[str]
) -> str:
    """How the parameters are split over groups in another way; empty if they are not."""
    if len(groups_then) != len(groups_here):
        return f"had {_sizes(groups_then)}, but now has {_sizes(groups_here)}"
    for number, (before, now) in enumerate(zip(groups_then, groups_here, strict=True)):
        if len(before) != len(now):
            return (
                f"had {_sizes(groups_then)}, but now has {_sizes(groups_here)}; group {number} held "
                f"{_listed(before, then)}, but now holds {_listed(now, here)}"
            )
        if sorted(then) == sorted(here) and {then[place] for place in before} != {here[place] for place in now}:
            return f"had the parameters {_listed(before, then)} in group {number}, but now has {_listed(now, here)}"
    return ""


def _sizes(groups: Sequence[Sequence[int]]) -> str:
    sizes = [str(len(group)) for group in groups]
    if len(sizes) == 1:
        return f"1 parameter group with {sizes[0]} parameters"
    return f"{len(sizes)} parameter groups with {', '.join(sizes[:-1])} and {sizes[-1]} parameters"


def _listed(places: Sequence[int], names: Sequence[str]) -> str:
    found = [names[place] or "a parameter in no module" for place in places if place < len(names)]
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return f"{', '.join(found[:_MOST_NAMED]) or 'none'}{more}"


def _same(then: Sequence[str], here: Sequence[str], modules: Mapping[str, Any], parameters: Sequence[Tensor]) -> bool:
    """Whether parameters are the same in the same order, apart from names that wrappers add or a module's load replaces."""
    if len(then) != len(here):
        return False
    before, now = [*map(bare_name, then)], [*map(bare_name, here)]
    saved = {
        f"{root}.{bare_name(key)}": value
        for root, state in modules.items()
        if isinstance(state, Mapping)
        for key, value in state.items()
    }
    return all(
        one == other or (one not in now and other not in saved and _has_shape(saved.get(one), parameter))
        for one, other, parameter in zip(before, now, parameters, strict=True)
    )


def _has_shape(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape
