"""The modules of an engine by name: its models as they are without wrappers, and losses that have parameters of their own."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from ..updates.spec import Update, loss_module

__all__ = [
    "Modules",
    "bare_name",
    "bare_state",
    "differences",
    "frozen_copies",
    "model_of",
    "named_like",
    "untrained_copies",
    "unwrapped",
]

_MOST_NAMED = 8
"""Tensors that a message names."""


class Modules(dict[str, nn.Module]):
    """The bare modules by name, for state, averages and optimizers.

    A loss with trainable parameters, such as class centers, is one of them: "loss", or with several updates the update's name
    and "_loss", unless the model holds these parameters already. So it is trained, moved, saved and averaged like the model.

    Attributes:
        losses: names of the modules that are losses.
        wrapped: names of the models that came wrapped in torch's DataParallel or DistributedDataParallel.
        wrapper: the name of that class.

    Raises:
        TypeError: for a model that is no module and no mapping from names to modules.
        ValueError: for a model that has the name of a loss.
    """

    def __init__(self, model: Any, updates: Sequence[Update]) -> None:
        given = _named(model)
        wrappers = {name: wrapper for name, module in given.items() if (wrapper := _wrapper(module)) is not None}
        super().__init__(given | {name: wrapper.module for name, wrapper in wrappers.items()})
        self.wrapper = min((type(one).__name__ for one in wrappers.values()), default="")
        self.wrapped = tuple(wrappers)
        self.losses: list[str] = []
        for update in updates:
            loss, known = loss_module(update), set(self.parameters())
            if loss is None or not any(p.requires_grad and p not in known for p in loss.parameters()):
                continue
            name = "loss" if len(updates) == 1 else f"{update.name}_loss"
            if name in self:
                raise ValueError(
                    f"Engine: a model is named {name!r}, but the parameters of the loss {type(loss).__name__} of "
                    f"update {update.name!r} are trained under this name; rename the model, or pass the loss in model= "
                    "under a different name"
                )
            self[name] = loss
            self.losses.append(name)

    @property
    def models(self) -> dict[str, nn.Module]:
        """Those that are no losses."""
        return {name: module for name, module in self.items() if name not in self.losses}

    def parts(self) -> Iterator[tuple[str, nn.Module]]:
        """All modules, with those inside of them, by their paths from the name of their root: "model.encoder.0"."""
        return (part for name, root in self.items() for part in root.named_modules(prefix=name))

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of all of them."""
        return (parameter for root in self.values() for parameter in root.parameters())

    def prefix(self, name: str) -> str:
        """What stands before the names of a module's parameters: nothing for the only model."""
        return "" if name not in self.losses and len(self) - len(self.losses) == 1 else name


def model_of(model: Any, modules: Modules) -> Any:
    """What the forward calls: the model, or a `ModuleDict` of several."""
    return model if model is None or isinstance(model, nn.Module) else nn.ModuleDict(modules.models)


def _named(model: Any) -> dict[str, nn.Module]:
    if model is None:
        return {}
    for one in model.values() if isinstance(model, Mapping) else (model,):
        _refuse_pipeline(one)
    if isinstance(model, nn.Module):
        return {"model": model}
    if not isinstance(model, Mapping) or not all(isinstance(m, nn.Module) for m in model.values()):
        hint = "; pass an instance, not the class" if isinstance(model, type) else ""
        raise TypeError(f"Engine: model={model!r} is neither a torch module nor a mapping from names to modules{hint}")
    return dict(model)


def _refuse_pipeline(model: Any) -> None:
    """Raise TypeError for a stage or a schedule of torch's pipelines, also for a class of the user that is one of them."""
    kind = model if isinstance(model, type) else type(model)
    if any(base.__module__.startswith("torch.distributed.pipelining") for base in kind.__mro__):
        raise TypeError(
            f"Engine: model= is a {kind.__name__} of torch.distributed.pipelining, but pipelines are not supported. "
            "A pipeline schedule runs the forward pass, loss and backward pass of all micro-batches in one "
            "call, so the engine could not emit the events in between; pass the whole model, and split it with "
            "TensorParallel or FullyShardedDataParallel"
        )


def _wrapper(module: nn.Module) -> DataParallel[nn.Module] | DistributedDataParallel | None:
    """The DataParallel or DistributedDataParallel around a module, also if it was compiled; None if there is none."""
    inside = getattr(module, "_orig_mod", module)
    return inside if isinstance(inside, DataParallel | DistributedDataParallel) else None


_WRAPPERS = "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"
"""What torch.compile, activation checkpointing and the first FSDP put between the parts of a name."""


def bare_name(name: str) -> str:
    """The name of a parameter without what wrappers of torch put into it: "_orig_mod.0.bias" is "0.bias"."""
    if not any(wrapper in name for wrapper in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def bare_state(module: nn.Module) -> dict[str, Any]:
    """The state of a module, under its own names: without what wrappers of torch put into them."""
    state: dict[str, Any] = module.state_dict()
    if not _has_wrappers(state):
        return state
    names = {name: bare_name(name) for name in state}
    if len({*names.values()}) < len(names):
        return state
    return _renamed(state, names, {bare_name(path): one for path, one in _versions(state).items()})


def named_like(own: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was given, under the names that it has here, where these differ by wrappers of torch alone."""
    if not _has_wrappers(own) and not _has_wrappers(given):
        return given
    names = {bare_name(name): name for name in own}
    versions = {bare_name(path): one for path, one in _versions(given).items()}  # a wrapper comes before what it wraps
    here = {path: versions[bare_name(path)] for path in _versions(own) if bare_name(path) in versions}
    return _renamed(given, {name: names.get(bare_name(name), name) for name in given}, here)


def _has_wrappers(state: Mapping[str, Any]) -> bool:
    names = " ".join((*state, *_versions(state)))
    return any(wrapper in names for wrapper in _WRAPPERS)  # a part of a name is renamed to itself


def _versions(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The metadata of a module's state, such as the versions of its parts, by their paths."""
    return getattr(state, "_metadata", {})


def _renamed(state: Mapping[str, Any], names: Mapping[str, str], versions: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a module's state with other names, and with this metadata if it has any."""
    renamed: Any = copy.copy(state)
    if not isinstance(renamed, dict):
        renamed = dict(state)
    renamed.clear()
    renamed.update((names[name], value) for name, value in state.items())
    if hasattr(state, "_metadata"):
        renamed._metadata = OrderedDict(versions)
    return renamed  # type: ignore[no-any-return]


def differences(own: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """In which tensors two states of a module differ, with their shapes; empty if their names and shapes are the same."""
    shapes, others = (
        {key: "?" if is_lazy(value) else list(value.shape) for key, value in state.items() if isinstance(value, Tensor)}
        for state in (own, given)
    )
    different = [key for key in {**shapes, **others} if shapes.get(key) != others.get(key)]
    named = [
        f"{key} (only in the state)" if key not in shapes
        else f"{key} (not in the state)" if key not in others
        else f"{key} ({others[key]} in the state, {shapes[key]} in the model)"
        for key in different[:_MOST_NAMED]
    ]  # fmt: skip
    more = [f"and {len(different) - _MOST_NAMED} more"] if len(different) > _MOST_NAMED else []
    return ", ".join(named + more)


def unwrapped(modules: Modules, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """A saved state without what torch's wrappers put into names, where these modules have no such names."""
    wrapped = {
        name: state
        for name, state in saved.get("modules", {}).items()
        if name in modules and isinstance(state, Mapping) and state and _was_wrapped(modules[name], state)
    }
    if not wrapped:
        return _compiled_alike(modules, saved)

    def bare(name: str) -> str:
        root, _, rest = name.partition(".")
        return f"{root}.{_inside(rest)}" if root in wrapped else name

    states = {name: _unwrapped_state(state) for name, state in wrapped.items()}
    updates = {
        name: {**part, "parameters": [*map(bare, part["parameters"])]}
        for name, part in saved.get("updates", {}).items()
    }
    return _compiled_alike(modules, {**saved, "modules": {**saved["modules"], **states}, "updates": updates})


def _was_wrapped(module: nn.Module, state: Mapping[str, Any]) -> bool:
    """Whether a state is that of a wrapper, and the module here is not wrapped."""
    then, now = ([bare_name(key).startswith("module.") for key in keys] for keys in (state, module.state_dict()))
    return all(then) and not any(now)


def _unwrapped_state(state: Mapping[str, Any]) -> dict[str, Any]:
    versions = {_inside(path): one for path, one in _versions(state).items()}
    return _renamed(state, {key: _inside(key) for key in state}, versions)


def _inside(name: str) -> str:
    """The name of a tensor or a part in the module that DataParallel or DistributedDataParallel wraps."""
    return bare_name(name).removeprefix("module").removeprefix(".")


def _compiled_alike(modules: Modules, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """A saved state whose names have the wrappers of torch in them, such as "_orig_mod.", where those of these modules do."""
    given = saved.get("modules", {})
    states = {
        name: named_like(modules[name].state_dict(), state) if name in modules and isinstance(state, Mapping) else state
        for name, state in given.items()
    }
    return saved if all(states[name] is given[name] for name in given) else {**saved, "modules": states}


def frozen_copies(module: nn.Module) -> set[Tensor]:
    """The parameters of parts that are frozen and built like another part that is trained, such as a teacher of its student."""
    parts = () if isinstance(module, nn.Sequential) else module.children()
    return untrained_copies(parts, lambda parameter: parameter.requires_grad)


def untrained_copies(parts: Iterable[nn.Module], is_trained: Callable[[Tensor], bool]) -> set[Tensor]:
    """The parameters of parts of which nothing is trained, and which are built like one of which something is."""
    shapes = {part: [(name, p.shape) for name, p in part.named_parameters()] for part in parts}
    trained = [part for part in shapes if any(map(is_trained, part.parameters()))]
    built = [shapes[part] for part in trained]
    return {p for part in shapes if part not in trained and shapes[part] in built for p in part.parameters()}
