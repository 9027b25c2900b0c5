"""The engine's whole state: gathered from the loop, the components and the handlers by name, and put back in place."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from .bus import Phase
from .distributed.differences import for_rank, of_all
from .distributed.sharded import read_shards, spread_like
from .events import Events
from .randomness import derived_seed, packed, random_state, seed_everything, set_random_state, unchanged_random_state

if TYPE_CHECKING:
    from .engine import Engine
    from .update import UpdateState

__all__ = ["FORMAT", "copied", "gather", "put_back", "spread_over"]

FORMAT = 1


def gather(engine: Engine, *, at_once: bool = False) -> dict[str, Any]:
    """Everything that is needed to resume; with several ranks, that of all on rank 0.

    Args:
        engine: whose state it is.
        at_once: whether it is written before anything can change: then its tensors may be the engine's own. Otherwise it shares
            none with the engine.
    """
    taken = partial(copied, tensor=_itself) if at_once else copied
    position = engine.state.state_dict() | engine.boundary.state_dict()
    own = {
        "format": FORMAT,
        "engine": position
        | {
            "seed": engine.seed,
            "fired": engine.signals.state_dict(),
            "metrics": taken(engine.state.metrics.state_dict()),
        },
        "modules": {name: taken(root.state_dict()) for name, root in engine.modules.items()},
        "updates": {update.name: _update_state(engine, update, taken) for update in engine.updates},
        "handlers": {name: taken(state) for name, state in engine.handlers.state_dict().items()},
        "data": taken(engine.feed.state_dict()),
        "random": packed(random_state()),
    }
    return of_all(own, engine.processes)


def put_back(engine: Engine, saved: Mapping[str, Any], *, allowed: frozenset[str]) -> dict[str, Any] | None:
    """Put a loaded state in place; returns the position of its data."""
    saved = _own_part(engine, saved)
    _check_fit(engine, saved, allowed)
    parameters = (p for root in engine.modules.values() for p in root.parameters())
    saved = read_shards(saved, parameters=parameters, device=engine.device)
    for name, root in engine.modules.items():
        root.load_state_dict(spread_over(root, saved["modules"][name]))
    for update in engine.updates:
        _put_update_back(engine, update, saved["updates"][update.name])
    engine.handlers.load_state_dict({name: copied(state) for name, state in saved["handlers"].items()})
    position = saved["engine"]
    engine.state.load_state_dict(position)
    engine.boundary.load_state_dict(position)
    engine.seed = position["seed"]
    engine.state.metrics.load_state_dict(copied(position["metrics"]))
    engine.signals.load_state_dict(position["fired"])
    set_random_state(saved["random"])
    data: dict[str, Any] | None = saved["data"]
    return data


def _put_update_back(engine: Engine, update: UpdateState, part: Mapping[str, Any]) -> None:
    update.steps = part["steps"]
    if update.optimizer is not None and part["optimizer"] is not None:
        update.optimizer.load_state_dict(_spread_over(update.parameters, copied(part["optimizer"])))
    update.discard()
    update.window.filled = 0
    with torch.no_grad():
        for index, value in part["own_parameters"].items():
            update.parameters[index].copy_(value)
    window = part["window"]
    if window is None:
        return
    if missing := sorted(set(window["made_with"]) - set(_changing_gradients(engine))):
        warnings.warn(
            f"the gradients of the open accumulation window of update {update.name!r} were made with "
            f"{', '.join(map(repr, missing))}, which this run does without: they are discarded",
            stacklevel=2,
        )
        return
    update.window.load_state_dict(copied({key: window[key] for key in ("filled", "held", "extra_weight", "kept")}))
    for parameter, gradient in zip(update.parameters, window["gradients"], strict=True):
        parameter.grad = None if gradient is None else spread_like(gradient.clone().to(parameter.device), parameter)


def _own_part(engine: Engine, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the state of all processes says for this one; of another number of processes, as much as can be gone on from."""
    processes = engine.processes
    before = saved.get("processes", 1)
    if processes.several:
        _check_alike(engine, saved)
    if before == 1 == processes.size:
        return saved
    own = for_rank(saved, processes.rank)
    if before == processes.size:
        if own["rank"] != processes.rank:
            raise ValueError(
                f"the loaded state is that of rank {own['rank']} alone, and not of rank {processes.rank}: load what rank 0 "
                "saved, which holds all"
            )
        return own
    warnings.warn(
        f"the loaded state was saved by {before} process(es), and goes on with {processes.size}: not as it would have, bit for "
        "bit. Open accumulation windows are discarded, and inside an epoch some batches may be seen again",
        RuntimeWarning,
        stacklevel=2,
    )
    return _moved(own, before, engine)


def _check_alike(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Refuse states of different positions, and, where they were read from checkpoints, of different ones."""
    position, origin = saved.get("engine", {}), saved.get("origin") or {}
    place = [position.get(key) for key in ("epoch", "iteration", "epoch_open", "seed")]
    files = origin.get("manifest", {}).get("files")  # tells the sha256 of the state
    told = engine.processes.gather((place, files, origin.get("path")))
    different = any(place != told[0][0] for place, *_ in told)
    read = [files for _, files, _ in told if files is not None]
    if different or any(files != read[0] for files in read):
        which = ", ".join(
            f"rank {rank} epoch {place[0]}, iteration {place[1]}" + ("" if path is None else f" from {path!r}")
            for rank, (place, _, path) in enumerate(told)
        )
        raise ValueError(f"the processes have loaded different states: {which}; let all load the same checkpoint")


def _moved(saved: Mapping[str, Any], before: int, engine: Engine) -> Mapping[str, Any]:
    """A state for another number of processes: the dealt samples that were taken count as so many turns of these."""
    processes = engine.processes
    position, data = dict(saved["engine"]), saved["data"]
    source = engine.feed.source
    if data is not None and source is not None and source.manner != "own":
        iteration: int = position["iteration"]
        then, now = data.get("batch_size_now"), source.batch_size
        if then is None or now is None:
            then = now = 1  # whatever the batches are, they are the same ones

        def moved(start: int) -> int:
            turns: int = (iteration - start) * before * then // (processes.size * now)
            return iteration - turns

        position["epoch_start"] = moved(position["epoch_start"])
        if "started_at" in data:
            data = dict(data) | {"started_at": moved(data["started_at"])}
    updates = {name: dict(part) | {"window": None} for name, part in saved["updates"].items()}
    random = saved["random"]
    if processes.rank:  # each process has a random stream of its own
        with unchanged_random_state():
            seed_everything(derived_seed(saved["engine"]["seed"], position["iteration"], processes.rank) % 2**32)
            random = random_state()
    return dict(saved) | {"engine": position, "data": data, "updates": updates, "random": random}


def spread_over(root: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """A module's state, spread over processes as the module is."""
    own, spread = root.state_dict(), copy.copy(state)  # which keeps the metadata
    for key, value in state.items():
        spread[key] = spread_like(value, own.get(key))
    return spread


def _spread_over(parameters: Sequence[Tensor], state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state, spread over processes as its parameters are: what has their shapes."""
    for place, part in state["state"].items():
        for key, value in part.items():
            if isinstance(value, Tensor) and value.shape == parameters[place].shape:
                part[key] = spread_like(value, parameters[place])
    return state


_MAKING_GRADIENTS = (
    Events.GET_BATCH_COMPLETED,
    Events.UPDATE_STARTED,
    Events.FORWARD_STARTED,
    Events.FORWARD_COMPLETED,
    Events.LOSS_COMPUTED,
    Events.BACKWARD_STARTED,
    Events.BACKWARD_COMPLETED,
)


def _changing_gradients(engine: Engine) -> list[str]:
    """The handlers that have a hand in gradients: those that change anything from the batch to the end of the backward."""
    connections = [one for event in _MAKING_GRADIENTS for one in engine.signal(event).connections]
    return sorted({one.owner for one in connections if one.owner is not None and one.phase < Phase.RECORD})


def _check_reduced(update: UpdateState, gradients: Sequence[Tensor | None]) -> None:
    """Refuse gradients that are out of reach: those of a sharded model are, until a backward has reduced them."""
    if update.window.held and not any(gradient is not None for gradient in gradients):
        raise RuntimeError(
            f"the open window of update {update.name!r} holds gradients that were not reduced over the processes yet, and cannot "
            "be saved: save where windows end, as epochs do, or have every batch reduced "
            "(FullyShardedDataParallel(reduce_every_batch=True))"
        )


def _check_kept(update: UpdateState) -> None:
    """Refuse batches, kept for a step that looks at them again, whose types no safe load accepts."""
    for batch, *_ in update.window.kept or ():
        if (found := _unsafe(batch)) is not None:
            raise TypeError(
                f"the open window of update {update.name!r} keeps batches with a {type(found).__name__}, which cannot be saved "
                "in a way that loads safely: use tuples, lists and dicts, or save where windows end"
            )


def _unsafe(value: Any) -> Any:
    if type(value) in (tuple, list):
        return next((found for item in value if (found := _unsafe(item)) is not None), None)
    if type(value) is dict:
        return next((found for item in value.values() if (found := _unsafe(item)) is not None), None)
    return None if value is None or isinstance(value, Tensor | int | float | str | np.generic) else value


def _update_state(engine: Engine, update: UpdateState, taken: Callable[[Any], Any]) -> dict[str, Any]:
    optimizer = update.optimizer
    names = {p: f"{root}.{key}" for root, module in engine.modules.items() for key, p in module.named_parameters()}
    window = None
    if update.window.filled:
        gradients = [taken(p.grad) for p in update.parameters]
        _check_reduced(update, gradients)
        _check_kept(update)
        window = {key: taken(value) for key, value in update.window.state_dict().items()}
        window |= {"gradients": gradients, "made_with": _changing_gradients(engine)}
    return {
        "steps": update.steps,
        "optimizer": None if optimizer is None else taken(optimizer.state_dict()),
        "kind": None if optimizer is None else type(optimizer).__name__,
        "parameters": [names.get(p, "") for p in update.parameters],  # type: ignore[call-overload]
        # Those that belong to no module, such as a learned temperature: nobody else would save them.
        "own_parameters": {i: taken(p) for i, p in enumerate(update.parameters) if p not in names},
        "window": window,
    }


def _check_fit(engine: Engine, saved: Mapping[str, Any], allowed: frozenset[str]) -> None:
    missing_parts = [part for part in ("engine", "modules", "updates", "handlers", "random") if part not in saved]
    if missing_parts:
        raise ValueError(f"the loaded state is not whole: it has no {', '.join(missing_parts)}")
    own: dict[str, set[str]] = {"modules": set(engine.modules), "updates": {update.name for update in engine.updates}}
    there = {part: set(saved[part]) for part in own}
    with_state = {name for name, handler in engine.handlers.items() if handler.state_dict()}
    own["handlers"] = with_state - allowed
    there["handlers"] = {name for name, state in saved["handlers"].items() if state} - allowed
    for part in own:
        # A handler may have had nothing to save when it was saved, and the other way round.
        missing = own[part] - set(saved[part])
        unknown = there[part] - (set(engine.handlers) if part == "handlers" else own[part])
        if missing or unknown:
            told = [f"without a saved state: {', '.join(sorted(missing))}"] if missing else []
            told += [f"saved but not here: {', '.join(sorted(unknown))}"] if unknown else []
            way_out = "; load_state_dict(state, allow=[...]) lets them differ" if part == "handlers" else ""
            raise ValueError(f"the loaded state does not fit: {part} {'; '.join(told)}{way_out}")
    for name, root in engine.modules.items():
        own_shapes = {key: value.shape for key, value in root.state_dict().items() if isinstance(value, Tensor)}
        shapes = {key: value.shape for key, value in saved["modules"][name].items() if isinstance(value, Tensor)}
        if own_shapes != shapes:
            different = sorted(
                key for key in own_shapes.keys() | shapes.keys() if own_shapes.get(key) != shapes.get(key)
            )
            raise ValueError(f"the loaded state does not fit: module {name!r} differs in {', '.join(different)}")
    for update in engine.updates:
        part = saved["updates"][update.name]
        part_names = part["parameters"]
        names = _update_state(engine, update, copied)["parameters"]
        if part["optimizer"] is None or update.optimizer is None:
            continue  # it was saved before its optimizer was built
        kind = type(update.optimizer).__name__
        if part["kind"] != kind:
            raise ValueError(
                f"the loaded state does not fit: update {update.name!r} was optimized by {part['kind']}, and here by {kind}"
            )
        if part_names != names:
            raise ValueError(
                f"the loaded state does not fit: update {update.name!r} optimized {part_names}, "
                f"and here it optimizes {names}"
            )


_ATOMS = {bool, bytes, float, int, str, NoneType}


def _cloned(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _itself(tensor: Tensor) -> Tensor:
    """The tensor, unless its file would be another one than its copy's: of a view, all that it is a view of is written."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return tensor.detach() if plain and tensor.untyped_storage().nbytes() == tensor.nbytes else _cloned(tensor)


def copied(value: Any, tensor: Callable[[Tensor], Tensor] = _cloned) -> Any:
    """A copy of a state that shares no tensor with what it was taken from; or with what ``tensor`` gives for each of them."""
    if type(value) in _ATOMS:
        return value
    if isinstance(value, Tensor):
        return tensor(value)
    if isinstance(value, dict):
        same = copy.copy(value)  # keeps its type: a module's state has metadata, and a scheduler's may hold a Counter
        for key, item in value.items():
            if type(item) not in _ATOMS:  # the others are in it; half of what a state holds is such, and a call each
                same[key] = copied(item, tensor)
        return same
    if isinstance(value, np.generic):  # a safe load accepts none of NumPy's types
        return value.item()
    if isinstance(value, np.ndarray):
        raise TypeError(
            f"a NumPy array of shape {value.shape} cannot be saved in a way that loads safely: make it a tensor "
            "(torch.from_numpy) or a list"
        )
    if isinstance(value, list | tuple):
        items = [copied(item, tensor) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return copy.deepcopy(value)
