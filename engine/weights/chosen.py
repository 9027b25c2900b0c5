"""Measuring weights that were chosen before, such as those of the best checkpoint, without a trace in the engine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checkpoints import Files, load
from ..core.words import did_you_mean, listed
from ..distributed.sharded import read_shards
from ..resuming.changeable import own_parameters
from ..resuming.keys import holds_averages
from ..resuming.loads import ModuleTensors
from ..runs.evaluation import measure
from ..updates.optimizer_modes import has_modes

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["read_state", "test"]


def test(
    engine: Engine,
    data: Iterable[Any] | Mapping[str, Iterable[Any]],
    weights: Any,
    *,
    validation: str | None,
    metrics: Mapping[str, Any] | None,
    named: Mapping[str, Any],
    inherit: bool,
) -> dict[str, Any]:
    """Measure data as a validation does, with the weights of a checkpoint; see `Engine.test`."""
    if engine.running:
        raise RuntimeError("test() was called during a run; call engine.evaluate(evaluator, data) instead")
    measures = _validation_of(engine, validation, data, given=bool(metrics) or bool(named))
    evaluator = measures.evaluator_for(engine, metrics, named)
    data_sets = measures.data_sets_of(data)
    path = None if weights is None else _path_of(engine, weights)
    measured: dict[str, Any] = {}
    with nullcontext() if path is None else _in_place(engine, read_state(path, "test()"), path):
        for prefix, one in data_sets.items():
            values = measure(engine, evaluator, one, inherit=inherit, averages=path is None)
            measured |= {prefix + name: value for name, value in values.items()}
    return measured


def read_state(path: str | os.PathLike[str], where: str) -> dict[str, Any]:
    """The state of a checkpoint, or of the newest one in a folder.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it is damaged.
    """
    return load(path, name=None, where=f"{where}: {os.fspath(path)!r}", files=Files())


def _validation_of(engine: Engine, name: str | None, data: Any, *, given: bool) -> Any:
    """The handler that knows what is measured; one that is not attached where none is, but metrics are given."""
    known = {key: one for key, one in engine.handlers.items() if hasattr(type(one), "evaluator_for")}
    found = {key: one for key, one in known.items() if one.enabled}
    if name is not None:
        return _validation_called(name, known, found)
    if len(found) == 1:
        return next(iter(found.values()))
    if not found and given and len(engine.updates) == 1:
        return import_module("signalfire.handlers").Validation(data)  # by name: the rooms of the engine know no handler
    raise ValueError(_none_or_several(engine, list(found), given=given))


def _validation_called(name: str, known: Mapping[str, Any], enabled: Mapping[str, Any]) -> Any:
    if name in enabled:
        return enabled[name]
    why = "this Validation is disabled" if name in known else "no Validation has this name"
    raise ValueError(
        f"test(validation={name!r}): {why}; available validations: {', '.join(map(repr, enabled)) or 'none'}"
    )


def _none_or_several(engine: Engine, names: list[str], *, given: bool) -> str:
    """What is wrong where no validation, or several of these names, could say what is measured."""
    if names:
        shown = ", ".join(map(repr, names))
        return f"test(): several validations are attached: {shown}; choose one of them, such as validation={names[0]!r}"
    if given:
        return (
            f"test(): the engine has several updates ({', '.join(one.name for one in engine.updates)}), and no "
            "attached Validation chooses one; attach Validation(data, update=...)"
        )
    return (
        "test(): no Validation is attached, so nothing defines what to measure; pass metrics to test(), such as "
        "accuracy=Accuracy(), attach Validation(data, accuracy=Accuracy()), or build an evaluator and call "
        "engine.evaluate(evaluator, data)"
    )


def _path_of(engine: Engine, weights: Any) -> Path:
    """The checkpoint that is meant: a path, a handler that writes checkpoints, or "best"."""
    if isinstance(weights, str) and weights == "best":
        weights = _only_one_that_chooses(engine)
    if isinstance(weights, str | os.PathLike):
        return _existing(weights)
    if not hasattr(weights, "best") or not hasattr(weights, "last"):
        kind = type(weights).__name__
        raise TypeError(
            f"test(weights={kind}(...)): expected 'best', a Checkpoint handler, or the path of a checkpoint"
        )
    path = engine.processes.broadcast(weights.best if weights.monitor is not None else weights.last)
    if path is None:
        raise ValueError(
            f"test(weights={weights!r}): the handler has written no checkpoint in this process; pass the path of a "
            f"checkpoint in {os.fspath(weights.folder)!r}"
        )
    return Path(path)


def _only_one_that_chooses(engine: Engine) -> Any:
    """The one enabled handler that writes checkpoints of which a metric chooses the best."""
    writers = {name: one for name, one in engine.handlers.items() if one.enabled and _chooses(one)}
    if len(writers) != 1:
        found = f"found {listed(map(repr, writers))}" if writers else "found none"
        raise ValueError(
            f"test(weights='best'): expected exactly one Checkpoint with monitor=, but {found}; pass a Checkpoint "
            "handler or the path of a checkpoint as weights="
        )
    return next(iter(writers.values()))


def _existing(weights: str | os.PathLike[str]) -> Path:
    """The path of a checkpoint; a word that is no path may be a slip."""
    path = Path(weights).expanduser()
    if isinstance(weights, str) and not os.path.lexists(path):
        way_out = did_you_mean(weights, ["best"]) or "; pass 'best', a Checkpoint handler, or the path of a checkpoint"
        raise FileNotFoundError(f"test(weights={weights!r}): no such checkpoint{way_out}")
    return path


def _chooses(handler: Any) -> bool:
    """Whether a handler writes checkpoints, of which a metric chooses the best."""
    return hasattr(handler, "best") and hasattr(handler, "last") and getattr(handler, "monitor", None) is not None


@contextmanager
def _in_place(engine: Engine, state: Mapping[str, Any], path: Path) -> Iterator[None]:
    """Put the weights of a checkpoint in place, as an evaluation saw them when it was written, and afterwards the own ones."""
    before = ModuleTensors(engine.modules.values())
    trained = [(parameter, parameter.detach().clone()) for parameter in own_parameters(engine).values()]
    try:
        engine.snapshots.put_weights(_as_evaluated(engine, state, path))
        yield
    finally:
        before.put_back()
        with torch.no_grad():
            for parameter, value in trained:
                parameter.copy_(value)


def _as_evaluated(engine: Engine, state: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The weights in a checkpoint; of a whole state with the averages that evaluations had put in place of them.

    Raises:
        ValueError: where they cannot be found in the state.
    """
    if "handlers" not in state:
        return state  # what `Engine.weights` gave, with averages in place
    if has_modes(engine):
        raise ValueError(
            f"test(weights={str(path)!r}): the checkpoint contains the weights of the optimizer's training mode, but "
            "evaluations need the weights of its eval mode; attach a second handler, Checkpoint(..., "
            "weights_only=True), and test a checkpoint that this handler writes"
        )
    whole = read_shards(state, parameters=_parameters(engine), device=engine.device)
    modules = {name: dict(tensors) for name, tensors in whole["modules"].items()}
    for name, part in whole["handlers"].items():
        handler: Any = engine.handlers.get(name)
        if handler is None and holds_averages(part):
            engine.findings.report(
                "W56",
                f"the checkpoint {str(path)!r} contains weight averages from the handler {name!r}, which is not "
                "attached, so test() measures the weights of the last step instead",
                "before you call test(), attach the handler that keeps the averages",
                key=name,
            )
        if handler is None or not handler.enabled or not hasattr(handler, "evaluated_in"):
            continue
        for key, value in handler.evaluated_in(part).items():
            module, _, place = key.partition(".")
            if place in modules.get(module, {}):
                modules[module][place] = value
    return {**whole, "modules": modules}


def _parameters(engine: Engine) -> Iterator[Tensor]:
    return (parameter for root in engine.modules.values() for parameter in root.parameters())
