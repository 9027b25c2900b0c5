"""Several optimizers that step together as one, and splitting a model's parameters over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.update import kind_of, needs_closure
from ..core.window import clear_gradients

__all__ = ["JointFactory", "JointOptimizer", "groups", "joined", "kind_of", "needs_closure", "optimizers_of"]

Factory = Callable[[Iterable[Any]], Optimizer]


class JointOptimizer(Optimizer):
    """Several optimizers as one, which is what clipping, scaling, schedules and saved states see.

    ``param_groups`` holds the groups of all of them, one optimizer after the other, and ``step()`` steps each.

    Args:
        optimizers: the optimizers by name.

    Raises:
        ValueError: if two hold the same parameter, or if one evaluates the loss inside its step.

    Attributes:
        optimizers: the optimizers by name.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        # Not that of the base, which would make groups of its own, and wrap step() once more.
        self.optimizers = dict(optimizers)
        self._order: dict[Tensor, int] = {}
        held: dict[Tensor, str] = {}
        for name, optimizer in self.optimizers.items():
            if needs_closure(optimizer):
                raise ValueError(
                    f"the optimizer {name!r} ({type(optimizer).__name__}) computes gradients inside its step, so it "
                    "cannot step together with other optimizers; give it its own Update"
                )
            for parameter in _parameters_of(optimizer):
                if (other := held.setdefault(parameter, name)) != name:
                    raise ValueError(
                        f"the optimizers {other!r} and {name!r} hold the same parameter of shape "
                        f"{tuple(parameter.shape)}, so each of them would change it; give each parameter to one "
                        "optimizer, for example with signalfire.groups"
                    )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The states of all parameters, to be read."""
        return {key: value for optimizer in self.optimizers.values() for key, value in optimizer.state.items()}

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The options that all of them have."""
        first, *others = [optimizer.defaults for optimizer in self.optimizers.values()]
        return {key: value for key, value in first.items() if all(key in other for other in others)}

    @property
    def kind(self) -> str:
        """The names of their classes."""
        return " + ".join(kind_of(optimizer) for optimizer in self.optimizers.values())

    def order_like(self, parameters: Iterable[Tensor]) -> None:
        """Order `parameters` like these: norms are then added up in the order of the model, as in a plain loop."""
        self._order = {parameter: place for place, parameter in enumerate(parameters)}

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of all optimizers, in the order of the model."""
        found = [parameter for optimizer in self.optimizers.values() for parameter in _parameters_of(optimizer)]
        return sorted(found, key=lambda parameter: self._order.get(parameter, len(self._order)))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise TypeError(
                "step(closure): optimizers that step together cannot use a closure; give an optimizer that needs a "
                "closure, such as LBFGS, its own Update"
            )
        for optimizer in self.optimizers.values():
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers.values():
            if set_to_none:
                clear_gradients(optimizer)
            else:
                optimizer.zero_grad(set_to_none=False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise TypeError(
            "these optimizers step together, so add the parameter group to one of them: "
            f"update.optimizer.optimizers[name], where name is one of {', '.join(self.optimizers)}"
        )

    def state_dict(self) -> dict[str, Any]:
        """The states of all of them in torch's form, with positions in `parameters`; by name if one has a form of its own."""
        states = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        if not all(_has_torch_form(states[name], one) for name, one in self.optimizers.items()):
            return {"optimizers": states}
        places = {parameter: place for place, parameter in enumerate(self.parameters)}
        state: dict[int, Any] = {}
        saved_groups = []
        for name, optimizer in self.optimizers.items():
            own = [places[parameter] for parameter in _parameters_of(optimizer)]
            state |= {own[key]: value for key, value in states[name]["state"].items()}
            saved_groups += [
                group | {"params": [own[key] for key in group["params"]], "optimizer": name}
                for group in states[name]["param_groups"]
            ]
        return {"state": state, "param_groups": saved_groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave.

        Raises:
            ValueError: for a state of other optimizers.
        """
        own_form = state_dict.get("optimizers")
        saved_groups = state_dict["param_groups"] if own_form is None else ()
        names = {*(own_form or ()), *(group.get("optimizer", "?") for group in saved_groups)}
        if names != set(self.optimizers):
            raise ValueError(
                f"the loaded state is for the optimizers {', '.join(sorted(names))}, but this update has "
                f"{', '.join(self.optimizers)}"
            )
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(_part_of(name, state_dict) if own_form is None else own_form[name])

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __repr__(self) -> str:
        return f"JointOptimizer({', '.join(f'{name}={one!r}' for name, one in self.optimizers.items())})"

    def _refuse_hook(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            "these optimizers step together, so register the hook with one of them: update.optimizer.optimizers[name]"
        )

    register_step_pre_hook = register_step_post_hook = _refuse_hook
    register_state_dict_pre_hook = register_state_dict_post_hook = _refuse_hook
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = _refuse_hook


class JointFactory:
    """Builds several optimizers that step together, each from the parameters under its name."""

    def __init__(self, where: str, factories: Mapping[str, Factory]) -> None:
        self.where = where
        self.factories = dict(factories)

    def __call__(self, parameters: Any) -> JointOptimizer:
        if not isinstance(parameters, Mapping) or set(parameters) != set(self.factories):
            found = f"the names {', '.join(map(str, parameters))}" if isinstance(parameters, Mapping) else "no mapping"
            raise TypeError(
                f"{self.where}: parameters= returned {found}; expected a mapping from the names of the optimizers "
                f"({', '.join(self.factories)}) to their parameters: lambda engine: groups(engine.model, {{...}})"
            )
        made = {}
        for name, factory in self.factories.items():
            made[name] = factory(parameters[name])
            if not isinstance(made[name], Optimizer):
                raise TypeError(
                    f"{self.where}: the factory {name!r} returned {made[name]!r}, which is not a torch optimizer"
                )
        return JointOptimizer(made)

    def __repr__(self) -> str:
        return repr(self.factories)


def joined(where: str, optimizers: Any, *, with_parameters: bool) -> Any:
    """What `Update` takes as its optimizer: several by name, or built ones in a sequence, as one; others unchanged.

    Raises:
        TypeError: for what are no optimizers or factories, or some of both.
        ValueError: for none, and for factories without parameters by name.
    """
    if not isinstance(optimizers, Mapping | list | tuple):
        return optimizers
    named = dict(optimizers) if isinstance(optimizers, Mapping) else {str(i): one for i, one in enumerate(optimizers)}
    if not named:
        raise ValueError(f"{where}: optimizer={optimizers!r} is empty; pass at least one optimizer")
    built = [isinstance(one, Optimizer) for one in named.values()]
    if all(built):
        return JointOptimizer(named)
    kinds = dict.fromkeys(getattr(one, "__name__", type(one).__name__) for one in named.values())
    if any(built) or not all(map(callable, named.values())) or not isinstance(optimizers, Mapping):
        raise TypeError(
            f"{where}: optimizer= is a {type(optimizers).__name__} of {', '.join(kinds)}; expected optimizers that are "
            "already built, or a mapping from names to factories such as partial(torch.optim.AdamW, lr=1e-3)"
        )
    if not with_parameters:
        raise ValueError(
            f"{where}: with several optimizer factories, pass the parameters of each optimizer: parameters=lambda "
            f"engine: groups(engine.model, {{{', '.join(f'{name!r}: ...' for name in named)}}})"
        )
    return JointFactory(where, named)


def groups(model: nn.Module, rules: Mapping[str, Any]) -> dict[str, list[nn.Parameter]]:
    """Split a model's parameters: each goes to the first group whose rule matches it.

    A parameter that the model has under several names, such as a tied embedding, is in one group only: its first name counts,
    the one that ``model.named_parameters()`` gives.

    Args:
        model: the model.
        rules: by name of the group, a function ``rule(name, parameter)``; or a pattern of names such as ``"*.bias"``, or several
            of them, in which ``*`` stands for any characters. ``"*"`` matches all that is left.

    Raises:
        ValueError: if a parameter is matched by no rule, or a group is left empty, naming them.

    Example:
        >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 2))
        >>> split = groups(
        ...     model,
        ...     {"matrices": lambda name, p: p.dim() == 2 and name != "0.weight", "rest": "*"},
        ... )
        >>> [tuple(p.shape) for p in split["rest"]]
        [(8, 4), (2,)]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"groups({model!r}): expected a model; pass engine.model, or a part of it")
    if not isinstance(rules, Mapping) or not rules:
        raise TypeError(f"groups(rules={rules!r}): expected a mapping from names of groups to rules")
    matches = {name: _matcher(name, rule) for name, rule in rules.items()}
    found: dict[str, list[nn.Parameter]] = {name: [] for name in rules}
    unmatched = []
    for path, parameter in model.named_parameters():
        name = next((name for name, matcher in matches.items() if matcher(path, parameter)), None)
        if name is None:
            unmatched.append(path)
        else:
            found[name].append(parameter)
    if unmatched:
        raise ValueError(
            f"groups(): no rule matches {', '.join(unmatched[:8])}{' ...' if len(unmatched) > 8 else ''}, so these "
            "parameters would not be trained; add a last rule for the rest: 'rest': '*'"
        )
    if empty := [name for name, parameters in found.items() if not parameters]:
        raise ValueError(
            f"groups(): no parameter is left for {', '.join(map(repr, empty))}. Either the rule matches no parameter, "
            "or earlier rules match the same ones; correct the rule, or move it up"
        )
    return found


def _matcher(name: str, rule: Any) -> Callable[[str, nn.Parameter], object]:
    if callable(rule):
        return rule  # type: ignore[no-any-return]
    patterns = [rule] if isinstance(rule, str) else rule
    if not isinstance(patterns, Sequence) or not patterns or not all(isinstance(one, str) for one in patterns):
        raise TypeError(
            f"groups({name}={rule!r}): expected a function (name, parameter) -> bool, or a pattern of names such as '*.bias'"
        )
    return lambda path, _: any(fnmatchcase(path, pattern) for pattern in patterns)


def optimizers_of(optimizer: Optimizer | None) -> list[Optimizer]:
    """The optimizers that step together, or the only one."""
    if optimizer is None:
        return []
    return list(optimizer.optimizers.values()) if isinstance(optimizer, JointOptimizer) else [optimizer]


def _part_of(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one of several optimizers, with its own positions of the parameters."""
    saved = [group for group in state["param_groups"] if group["optimizer"] == name]
    own = {place: key for key, place in enumerate(place for group in saved for place in group["params"])}
    groups = [{**group, "params": [own[place] for place in group["params"]]} for group in saved]
    for group in groups:
        del group["optimizer"]
    return {"state": {own[key]: value for key, value in state["state"].items() if key in own}, "param_groups": groups}


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _has_torch_form(state: Any, optimizer: Optimizer) -> bool:
    """Whether a state is in torch's form: positions of parameters in groups, and what belongs to each of them."""
    if not isinstance(state, dict) or set(state) != {"state", "param_groups"}:
        return False
    saved, own = state["param_groups"], optimizer.param_groups
    fits = len(saved) == len(own) and all(
        len(a.get("params", ())) == len(b["params"]) for a, b in zip(saved, own, strict=True)
    )
    return fits and isinstance(state["state"], dict) and all(isinstance(key, int) for key in state["state"])
