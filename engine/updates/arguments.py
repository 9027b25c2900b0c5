"""What users give an update in place of functions: an optimizer's class with its options, and names of modules."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..authoring.checks import did_you_mean

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["NamedParameters", "parameters_named", "with_options"]


def with_options(where: str, optimizer: Any, options: Mapping[str, Any], own: Iterable[str]) -> Any:
    """A factory that builds an optimizer with these options; without options, the optimizer as it was given.

    Args:
        where: what an error begins with.
        optimizer: a class or another factory.
        options: its keyword arguments.
        own: the keyword arguments of whoever takes the options, one of which may be meant.

    Raises:
        TypeError: for options that no factory takes, or that it has already.
    """
    if not options:
        return optimizer
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    if optimizer is None:
        hint = next(filter(None, map(did_you_mean, options, repeat(["optimizer", *own]))), "")
        raise TypeError(
            f"{where}: {given} needs an optimizer; pass the optimizer's class, such as torch.optim.AdamW{hint}"
        )
    if isinstance(optimizer, str) or not (callable(optimizer) or isinstance(optimizer, Optimizer | Mapping | Sequence)):
        raise TypeError(
            f"{where}: {given} requires an optimizer, but optimizer={optimizer!r} is not one; pass the optimizer's "
            "class, such as torch.optim.AdamW"
        )
    _check_options(where, optimizer, options, own)
    if (why := _why_not_a_factory(optimizer)) is not None:
        raise TypeError(f"{where}: {given} cannot be combined with {why}")
    if isinstance(optimizer, partial) and (twice := [name for name in options if name in optimizer.keywords]):
        raise TypeError(f"{where}: {twice[0]}= is passed twice, in the partial and as an argument; omit one of the two")
    return partial(optimizer, **options)


def _check_options(where: str, optimizer: Any, options: Iterable[str], own: Iterable[str]) -> None:
    """Raise TypeError for an option that a factory does not have, or that is surely a slip of an argument."""
    names, takes_others = _options_of(optimizer)
    unknown = [name for name in options if name not in names]
    if takes_others:
        _refuse_slips(where, optimizer, unknown, own)
    elif unknown:
        there = ", ".join(names)
        there = f"the options are {there}" if names else "the factory takes no options; set them in the factory"
        hint = did_you_mean(unknown[0], [*own, *names]) or f"; {there}"
        raise TypeError(f"{where}: {unknown[0]}= is neither an option of {_name_of(optimizer)} nor an argument{hint}")


def _refuse_slips(where: str, optimizer: Any, options: Iterable[str], own: Iterable[str]) -> None:
    """Raise TypeError for an option that is almost the name of an argument."""
    for name in options:
        if meant := difflib.get_close_matches(name, own, n=1, cutoff=0.8):
            kind = _name_of(optimizer)
            other = f" For an option of {kind}, write partial({kind}, {name}=...)" if callable(optimizer) else ""
            raise TypeError(f"{where}: {name}= is not an argument; did you mean {meant[0]!r}?{other}")


def _why_not_a_factory(optimizer: Any) -> str | None:
    """What an optimizer is that takes no options, and what to write; None for a factory."""
    if isinstance(optimizer, Optimizer):
        return "an optimizer that is already built; set the options where you build the optimizer"
    if not callable(optimizer):
        return "several optimizers; give each optimizer its own options: partial(torch.optim.AdamW, lr=1e-3)"
    return None


def _options_of(optimizer: Any) -> tuple[list[str], bool]:
    """The names of the options that a factory takes, and whether it takes any others, or does not say."""
    if isinstance(optimizer, Optimizer):
        return [], True
    try:
        parameters = list(inspect.signature(optimizer, follow_wrapped=False).parameters.values())
    except (TypeError, ValueError):
        return [], True
    others = [one.name for one in parameters if one.kind is one.VAR_KEYWORD]
    return [one.name for one in parameters[1:] if one.name not in others], bool(others)


def _name_of(optimizer: Any) -> str:
    return str(getattr(getattr(optimizer, "func", optimizer), "__name__", optimizer))


class NamedParameters:
    """The parameters of parts of the model, as the ``parameters=`` of an update: called with the engine, it returns them.

    Args:
        names: names of the engine's modules, or paths in its only one; "all" for all parameters.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def __call__(self, engine: Engine) -> list[nn.Parameter]:
        """The parameters, each once.

        Raises:
            ValueError: for a name that there is not, saying which there are, or one that could mean two parts.
        """
        takes_all = self.names == ("all",)
        if takes_all:
            _refuse_part_called_all(engine)
        parts = list(engine.modules.values()) if takes_all else [_part(engine, name) for name in self.names]
        return list(dict.fromkeys(parameter for part in parts for parameter in part.parameters()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedParameters) and other.names == self.names

    def __hash__(self) -> int:
        return hash(self.names)

    def __repr__(self) -> str:
        return repr(self.names[0] if len(self.names) == 1 else list(self.names))


def _part(engine: Engine, name: str) -> nn.Module:
    """A module by its name, or by a path in the only model."""
    modules, models = engine.modules, [*engine.modules.models.values()]
    first, _, rest = name.partition(".")
    readings = {}
    for root, path in ((models[0] if len(models) == 1 else None, name), (modules.get(first), rest)):
        if root is not None and (path == "" or path in dict(root.named_modules())):
            readings[root.get_submodule(path)] = root, path
    if len(readings) > 1:
        key = next(iter(modules.models))
        of_module = f"engine.modules[{first!r}]" + (f".get_submodule({rest!r})" if rest else "")
        raise ValueError(
            f"Update(parameters={name!r}): this could mean the part {name!r} of the engine's only model, or the module {name!r} "
            f"of the engine; write parameters={f'{key}.{name}'!r} for the part, or parameters=lambda engine: "
            f"{of_module}.parameters() for the module"
        )
    if readings:
        return next(iter(readings))
    there = [child for child, _ in models[0].named_children()] if len(models) == 1 else [*modules]
    raise ValueError(
        f"Update(parameters={name!r}): the engine has no such module; the modules are "
        f"{', '.join(there)}{did_you_mean(name, there)}"
    )


def _refuse_part_called_all(engine: Engine) -> None:
    """Raise ValueError if "all" could be the name of a module, too."""
    models = engine.modules.models
    children = {name for model in models.values() for name, _ in model.named_children()} if len(models) == 1 else set()
    if "all" not in engine.modules and "all" not in children:
        return
    part = 'engine.modules["all"]' if "all" in engine.modules else 'engine.model.get_submodule("all")'
    raise ValueError(
        "Update(parameters='all'): this could mean all parameters, or the module 'all'; omit parameters= for all "
        f"parameters, or write parameters=lambda engine: {part}.parameters()"
    )


def parameters_named(
    where: str, parameters: str | Sequence[str] | Callable[[Any], Any] | None
) -> Callable[[Any], Any] | None:
    """The ``parameters=`` of an update as a function of the engine; None for all parameters.

    Raises:
        TypeError, ValueError: for what is neither a function nor names of modules.
    """
    if parameters is None or (callable(parameters) and not isinstance(parameters, nn.Module)):
        return parameters
    names = [parameters] if isinstance(parameters, str) else parameters
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{where}: parameters={_shown(parameters)}; expected the name of a module, a list of names, or a function "
            "that takes the engine and returns parameters or groups, such as lambda engine: "
            "engine.model.head.parameters()"
        )
    if not names or not all(names):
        raise ValueError(f"{where}: parameters={parameters!r} names no module")
    return NamedParameters(names)


def _shown(value: Any) -> str:
    """An argument in an error: names as they are, and of anything else its class, since tensors are long."""
    if isinstance(value, list | tuple) and not all(isinstance(one, str) for one in value):
        kinds = dict.fromkeys(type(one).__name__ for one in value)
        return f"a {type(value).__name__} of {', '.join(kinds)}"
    return f"a {type(value).__name__}" if isinstance(value, Tensor | nn.Module | Mapping) else repr(value)
