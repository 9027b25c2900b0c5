"""The values of a run that `divergence` watches, by kind, and in what two of them differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from signalfire import Engine
from signalfire.authoring.batches import tensors_in
from signalfire.resuming.changeable import own_parameters

__all__ = ["difference", "optimizers_of", "parameters_of", "values_of"]


def values_of(engine: Engine, state: Mapping[str, Any], kind: str) -> Iterator[tuple[str, Any]]:
    """The values of one kind, by name.

    Args:
        engine: The engine of the run.
        state: The global random states of the run.
        kind: One of the kinds that `divergence` watches, except "files".
    """
    return _random_states(state) if kind == "random" else _OF_ENGINE[kind](engine)


def parameters_of(engine: Engine) -> list[tuple[str, Tensor]]:
    """The parameters of the modules, and other trained ones, by name."""
    found = [pair for root, module in engine.modules.items() for pair in module.named_parameters(prefix=root)]
    return [*found, *own_parameters(engine, [one for _, one in found]).items()]


def _weights(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    yield from parameters_of(engine)
    for root, module in engine.modules.items():
        yield from ((f"{root}.{key}", buffer) for key, buffer in module.named_buffers())


def _random_states(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((kind, state[kind]) for kind in ("python", "numpy", "torch"))
    for kind in ("cuda", "xpu"):
        yield from ((f"{kind}:{place}", one) for place, one in enumerate(state.get(kind, ())))
    if state.get("mps") is not None:
        yield "mps", state["mps"]


def _handlers(engine: Engine) -> Iterator[tuple[str, Any]]:
    for handler in engine.handlers.values():
        if handler.enabled and not handler.writes:
            yield from _leaves(handler.state_dict(), handler.name)


def _metrics(engine: Engine) -> Iterator[tuple[str, Any]]:
    metrics = engine.state.metrics
    return ((name, value) for name, value in metrics.items() if name not in metrics.unsaved)


def _loss(engine: Engine) -> Iterator[tuple[str, Any]]:
    update = engine.state.update
    if update.backward_loss is not None:
        yield f"of update {update.name!r}", update.backward_loss


def _leaves(state: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The values in a nested state, by the way to each."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from _leaves(value, f"{name}: {key}" if ":" not in name else f"{name}.{key}")
    elif isinstance(state, list | tuple):
        for place, value in enumerate(state):
            yield from _leaves(value, f"{name}[{place}]")
    else:
        yield name, state


def optimizers_of(engine: Engine) -> Iterator[tuple[str, Any]]:
    optimizers = [(update.name, update.optimizer) for update in engine.updates if update.optimizer is not None]
    with_state = any(optimizer.state for _, optimizer in optimizers)
    names = {id(p): name for name, p in parameters_of(engine)} if with_state else {}
    for owner, optimizer in optimizers:
        yield from _options(owner, optimizer)
        for p, state in optimizer.state.items():
            for key, value in state.items():
                yield f"{key} of {names.get(id(p), '?')}", value


def _options(owner: str, optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                yield f"{key} of group {number} (update {owner!r})", value


_OF_ENGINE: Mapping[str, Callable[[Engine], Iterator[tuple[str, Any]]]] = {
    "parameters": _weights,
    "gradients": lambda engine: ((name, p.grad) for name, p in parameters_of(engine)),
    "optimizer": optimizers_of,
    "handlers": _handlers,
    "metrics": _metrics,
    "batch": lambda engine: ((f"tensor {place}", one) for place, one in enumerate(tensors_in(engine.state.batch))),
    "loss": _loss,
}


def difference(ours: Any, theirs: Any, rtol: float) -> tuple[float | None, str] | None:
    """The difference of two values as a number, if there is one, and a detail; None if they are equal."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return _tensors_difference(ours.detach(), theirs.detach(), rtol)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple) and len(ours) == len(theirs):
        pairs = (difference(one, other, rtol) for one, other in zip(ours, theirs, strict=True))
        return next(filter(None, pairs), None)
    if isinstance(ours, int | float) and isinstance(theirs, int | float):
        return _numbers_difference(ours, theirs, rtol)
    if type(ours) is type(theirs) and ours == theirs:
        return None
    if ours is None or theirs is None:
        return None, f"only run {'b' if ours is None else 'a'!r} has one"
    return None, f"{ours!r} and {theirs!r}"


def _numbers_difference(ours: float, theirs: float, rtol: float) -> tuple[float, str] | None:
    if ours == theirs or (ours != ours and theirs != theirs):
        return None
    number = abs(ours - theirs)
    return None if number <= rtol * max(abs(ours), abs(theirs)) else (number, f"{ours:g} and {theirs:g}")


def _tensors_difference(ours: Tensor, theirs: Tensor, rtol: float) -> tuple[float | None, str] | None:
    if ours.shape != theirs.shape:
        return None, f"shapes {tuple(ours.shape)} and {tuple(theirs.shape)}"
    if ours.dtype != theirs.dtype:
        return None, f"dtypes {ours.dtype} and {theirs.dtype}"
    if ours.device == theirs.device and torch.equal(ours, theirs):
        return None
    kind = torch.complex128 if ours.is_complex() else torch.float64
    one, other = ours.to("cpu", kind), theirs.to("cpu", kind)
    alike = (one == other) | (one.isnan() & other.isnan())
    if alike.all():
        return None
    number = float((one - other).abs()[~alike].max())
    largest = float(torch.maximum(one.abs(), other.abs()).nan_to_num(0, 0).max())
    return None if math.isfinite(number) and number <= rtol * largest else (number, "")
