"""The state of an engine: gathered from its parts and handlers by name, and restored in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..authoring.randomness import (
    derived_seed,
    packed,
    random_state,
    seed_everything,
    set_random_state,
    unchanged_random_state,
)
from ..core.blame import warn
from ..core.regions import note_problems
from ..distributed.differences import for_rank, gather_shards, of_all, own_alone
from ..distributed.sharded import read_shards, spread_like
from ..models.fit import check_parameters, parameter_names
from ..models.modules import bare_state, differences, unwrapped
from ..updates.optimizers import optimizers_of
from .changeable import Unsaved, buffer_names, going_back
from .frozen import fill_in
from .keys import STEP_SHARDS, UNSAVED
from .loads import ModuleTensors, OptimizerParts, load_each, naming, refusal
from .metric_names import renamed_metrics
from .state_parts import check_complete, composition
from .windows import put_window_back, window_state

if TYPE_CHECKING:
    from ..core.update import UpdateState
    from ..engine import Engine

__all__ = ["FORMAT", "check_fit", "copied", "gather", "put_back"]

FORMAT = 1


def gather(engine: Engine, *, at_once: bool = False, alone: bool = False) -> dict[str, Any]:
    """Everything that an exact resume needs; in distributed runs, rank 0 gets the state of all ranks.

    Args:
        engine: The engine.
        at_once: Whether the state is written before anything can change, so that it may share tensors with the engine.
            Otherwise its tensors are copies.
        alone: Whether each rank gets its own state, without communication.
    """
    taken = partial(copied, tensor=_itself) if at_once else copied
    own = {
        "format": FORMAT,
        **_beside_weights(engine, taken),
        "modules": {name: taken(bare_state(root)) for name, root in engine.modules.items()},
        "updates": {update.name: _update_state(engine, update, taken) for update in engine.updates},
        "data": taken(engine.feed.state_dict()),
        "composition": composition(engine),
        **({} if engine.group.shards is None else {STEP_SHARDS: engine.group.shards.world_size}),
    }
    unsaved = {} if at_once else {UNSAVED: Unsaved(engine)}
    if alone:
        return own_alone(own, engine.processes) | unsaved if engine.group.shards is None else own | unsaved
    if past := engine.past.state_dict():  # not copied: nothing changes a state that is kept
        own["past"] = past
    if engine.group.shards is not None:  # the same on all ranks, however many there are
        return gather_shards(own, engine.processes) | unsaved
    if (shares := engine.group.data.world_size) != engine.processes.world_size:
        own["shares"] = shares  # over how many ranks the data is sharded
    return of_all(own, engine.processes) | unsaved


def _beside_weights(engine: Engine, taken: Callable[[Any], Any]) -> dict[str, Any]:
    """What has a state besides the modules, the optimizers and the data."""
    position = engine.state.state_dict() | engine.boundary.state_dict()
    return {
        "engine": position
        | {
            "seed": engine.seed,
            "fired": engine.signals.state_dict(),
            "metrics": taken(engine.state.metrics.state_dict()),
        },
        "handlers": {name: taken(state) for name, state in engine.handlers.state_dict().items()},
        "random": packed(random_state()),
    }


def put_back(
    engine: Engine, saved: Mapping[str, Any], *, allowed: frozenset[str], resumes: bool = True, goes_back: bool = False
) -> Mapping[str, Any]:
    """Restore a loaded state in place, and return this rank's part of it: its data and its past are for the caller.

    Args:
        engine: The engine.
        saved: The state.
        allowed: Handlers that may be in only one of the two.
        resumes: Whether the run continues where the state was taken; otherwise it begins with the first batch.
        goes_back: Whether the engine goes back to a state of its own, with what no ``state_dict()`` of its modules holds.

    Raises:
        ValueError: for a state that does not fit. Then everything is as it was before.
    """
    with going_back(engine, saved if goes_back else {}):
        return _put_all_back(engine, saved, allowed, resumes=resumes)


def _put_all_back(
    engine: Engine, saved: Mapping[str, Any], allowed: frozenset[str], *, resumes: bool
) -> Mapping[str, Any]:
    saved = fill_in(engine.modules, unwrapped(engine.modules, _own_part(engine, saved)), "load_state_dict()")
    check_fit(engine, saved, allowed)
    if engine.training:
        engine.feed.check_extent(saved)
    saved = read_shards(saved, parameters=engine.modules.parameters(), device=engine.device)
    if not resumes:
        saved = {**saved, "engine": saved["engine"] | _BEGINNING, "data": None}
    undo = _undo(engine)
    try:
        # A loss whose parameters only an optimizer held is among the update's own.
        load_each({root: saved["modules"][name] for name, root in engine.modules.items() if name in saved["modules"]})
        for update in engine.updates:
            with naming(f"update {update.name!r}"):
                _put_update_back(engine, update, saved["updates"][update.name])
        for name, state in saved["handlers"].items():
            with naming(f"handler {_described(engine, name, saved)}"):
                engine.handlers.load_state_dict({name: copied(state)})
        with naming("the position of the run"):
            _put_position_back(engine, saved)
    except BaseException as error:
        note_problems(undo(), error)
        raise
    return saved


def _undo(engine: Engine) -> Callable[[], list[BaseException]]:
    """What puts everything back as it is now, and returns what cannot be; windows are discarded after an error."""
    modules = ModuleTensors(engine.modules.values())
    optimizers = OptimizerParts(one for update in engine.updates for one in optimizers_of(update.optimizer))
    steps = [(update, update.steps) for update in engine.updates]
    names = _names(engine)
    own = [(p, p.detach().clone()) for update in engine.updates for p in update.parameters if p not in names]
    before = _beside_weights(engine, copied)

    def put_updates_back() -> None:
        optimizers.put_back()
        for update, count in steps:
            update.steps = count
            update.discard()
            update.window.filled = 0
        with torch.no_grad():
            for parameter, value in own:
                parameter.copy_(value)

    def undo() -> list[BaseException]:
        acts: list[Callable[[], object]] = [modules.put_back]
        acts += [partial(engine.handlers.load_state_dict, {name: state}) for name, state in before["handlers"].items()]
        acts += [put_updates_back, partial(_put_position_back, engine, before)]  # handlers may have changed rates
        problems: list[BaseException] = []
        for act in acts:
            try:
                act()
            except Exception as problem:
                problems.append(problem)
        return problems

    return undo


def _described(engine: Engine, name: str, saved: Mapping[str, Any]) -> str:
    """A handler by its name, with its class where that was another one."""
    then = saved.get("composition", {}).get("handlers", {}).get(name)
    here = type(engine.handlers[name]).__name__ if name in engine.handlers else then
    return repr(name) if then in (None, here) else f"{name!r}, whose class was {then} and is now {here}"


def _put_position_back(engine: Engine, saved: Mapping[str, Any]) -> None:
    position = saved["engine"]
    engine.state.load_state_dict(position)
    engine.boundary.load_state_dict(position)
    engine.seed = position["seed"]
    engine.state.metrics.load_state_dict(copied(position["metrics"]), renamed_metrics(engine, saved))
    engine.signals.load_state_dict(position["fired"])
    set_random_state(saved["random"])


_BEGINNING: dict[str, Any] = {"epoch": 0, "iteration": 0, "epoch_start": 0, "epoch_open": False, "stop_reason": None,
              "stops": {}, "epoch_stop": None}  # fmt: skip


def _put_update_back(engine: Engine, update: UpdateState, part: Mapping[str, Any]) -> None:
    update.steps = part["steps"]
    _put_optimizer_back(update, part["optimizer"])
    update.discard()
    update.window.filled = 0
    with torch.no_grad():
        for index, value in part["own_parameters"].items():
            update.parameters[index].copy_(value)
    put_window_back(engine, update, part["window"], copied)


def _put_optimizer_back(update: UpdateState, state: Any) -> None:
    if update.optimizer is None or state is None:
        return
    before = [dict(group) for group in update.optimizer.param_groups]
    update.optimizer.load_state_dict(_spread_over(update.parameters, copied(state)))
    # What a schedule of this run has added, such as `max_lr`, is not in the state of a run without it.
    for group, own in zip(update.optimizer.param_groups, before, strict=False):
        for key, value in own.items():
            group.setdefault(key, value)


def _own_part(engine: Engine, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """This rank's part of a saved state; for another world size, the part from which a run can continue approximately.

    Raises:
        ValueError: for a state that another rank saved, or if the ranks have loaded different states.
    """
    processes = engine.processes
    before = saved.get("processes", 1)
    if processes.distributed:
        _check_same_state(engine, saved)
    if STEP_SHARDS in saved or engine.group.shards is not None:
        return _part_with_shards(engine, saved)
    if before == 1 == processes.world_size:
        return saved
    shares = saved.get("shares", before)
    own = for_rank(saved, processes.rank)
    if shares == engine.group.data.world_size == 1:  # each rank has seen all of the data, and draws the same numbers
        return own
    if before == processes.world_size and shares == engine.group.data.world_size:
        if own["rank"] != processes.rank:
            raise ValueError(
                f"the loaded state contains only the part of rank {own['rank']}, not the part of rank "
                f"{processes.rank}; load the state that rank 0 saved, which contains the parts of all ranks"
            )
        return own
    size = engine.group.data.world_size
    warn(
        f"the loaded state was saved with world size {before}, and the run resumes with world size "
        f"{processes.world_size}"
        + (f"; the number of data shards changes from {shares} to {size}" if before == processes.world_size else "")
        + ". The resume is not exact: open accumulation windows are discarded, and if the run resumes partway through "
        "an epoch, batches may be repeated, including batches that rewind() left out",
        RuntimeWarning,
    )
    return _for_new_world_size(own, shares, engine)


def _part_with_shards(engine: Engine, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state of steps with shards, or for them: it is the same for all ranks, if there are as many shards."""
    shards = saved.get(STEP_SHARDS), engine.group.shards and engine.group.shards.world_size
    if shards[0] == shards[1]:
        return saved
    then, now = ("steps without shards" if one is None else f"steps with {one} shards" for one in shards)
    warn(
        f"the loaded state was saved with {then}, and the run resumes with {now}. The resume is not exact: open "
        "accumulation windows are discarded, and if the run resumes partway through an epoch, batches may be repeated",
        RuntimeWarning,
    )
    before = shards[0] or saved.get("shares", saved.get("processes", 1))
    return _for_new_world_size(for_rank(saved, engine.processes.rank), before, engine)


def _check_same_state(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Raise ValueError if the ranks have loaded states of different positions, or from different checkpoints."""
    position, origin = saved.get("engine", {}), saved.get("origin") or {}
    place = [position.get(key) for key in ("epoch", "iteration", "epoch_open", "seed")]
    files = origin.get("manifest", {}).get("files")  # contains the sha256 of the state
    loaded = engine.processes.gather((place, files, origin.get("path")))
    different = any(place != loaded[0][0] for place, *_ in loaded)
    read = [files for _, files, _ in loaded if files is not None]
    if different or any(files != read[0] for files in read):
        which = ", ".join(
            f"rank {rank} is at epoch {place[0]}, iteration {place[1]}" + ("" if path is None else f" (from {path!r})")
            for rank, (place, _, path) in enumerate(loaded)
        )
        raise ValueError(f"the ranks have loaded different states: {which}; load the same checkpoint on all ranks")


def _for_new_world_size(saved: Mapping[str, Any], before: int, engine: Engine) -> Mapping[str, Any]:
    """Convert a state of data sharded over ``before`` ranks: the samples read so far become rounds of the new number of ranks."""
    processes = engine.group.data
    position, data = dict(saved["engine"]), saved["data"]
    source = engine.feed.source
    if data is not None and source is not None and source.policy != "own":
        iteration: int = position["iteration"]
        then, now = data.get("batch_size_now"), source.batch_size
        if then is None or now is None:
            then = now = 1  # the batches themselves are the same

        def converted(start: int) -> int:
            rounds: int = (iteration - start) * before * then // (processes.world_size * now)
            return iteration - rounds

        position["epoch_start"] = converted(position["epoch_start"])
        data = {key: value for key, value in data.items() if key != "left_out_now"}  # they are other batches now
        extent = data.get("extent_now", {})  # batches of another size are meant, if the number of ranks is another one
        data = dict(data) | {"extent_now": {"samples": extent["samples"]} if "samples" in extent else {}}
        if "started_at" in data:
            data["started_at"] = converted(data["started_at"])
    elif data is not None:
        data = dict(data) | {"extent_now": {}}
    updates = {name: dict(part) | {"window": None} for name, part in saved["updates"].items()}
    random = saved["random"]
    if processes.rank:  # each rank has its own random stream
        with unchanged_random_state():
            seed_everything(derived_seed(saved["engine"]["seed"], position["iteration"], processes.rank) % 2**32)
            random = random_state()
    return dict(saved) | {"engine": position, "data": data, "updates": updates, "random": random}


def _spread_over(parameters: Sequence[Tensor], state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state, in which tensors of the shape of their parameter are sharded like it.

    A state that does not have torch's form, such as that of several optimizers in one, is left as the optimizer gave it.
    """
    parts = state.get("state") if isinstance(state, dict) else None
    for place, part in parts.items() if isinstance(parts, dict) else ():
        known = isinstance(place, int) and 0 <= place < len(parameters)
        for key, value in part.items() if known and isinstance(part, dict) else ():
            if isinstance(value, Tensor) and value.shape == parameters[place].shape:
                part[key] = spread_like(value, parameters[place])
    return state


def _names(engine: Engine) -> dict[Tensor, str]:
    return {p: f"{root}.{key}" for root, module in engine.modules.items() for key, p in module.named_parameters()}


def _update_state(engine: Engine, update: UpdateState, taken: Callable[[Any], Any]) -> dict[str, Any]:
    optimizer, names = update.optimizer, _names(engine)
    window = None
    if update.window.filled:
        window = window_state(engine, update, taken)
    return {
        "steps": update.steps,
        "optimizer": None if optimizer is None else taken(optimizer.state_dict()),
        "kind": update.kind,
        "parameters": parameter_names(engine, update, engine.modules),
        # Parameters of no module, such as a learned temperature, are saved here only.
        "own_parameters": {i: taken(p) for i, p in enumerate(update.parameters) if p not in names},
        "window": window,
    }


def check_fit(engine: Engine, saved: Mapping[str, Any], allowed: frozenset[str], *, goes_back: bool = False) -> None:
    """Raise ValueError for a state whose modules, updates or handlers are not those of the engine.

    A state of the engine itself, to which it goes back, may have buffers of other shapes: `Unsaved` puts them in place first.
    """
    goes_back = goes_back and isinstance(unsaved := saved.get(UNSAVED), Unsaved) and unsaved.belongs_to(engine)
    check_complete(saved, "load_state_dict()")
    # Before losses were modules, their parameters were among an update's own.
    modules = [name for name in engine.modules if name in saved["modules"] or name not in engine.modules.losses]
    _check_names(engine, modules, saved, allowed)
    for name in modules:
        if different := _different(engine.modules[name], saved["modules"][name], goes_back=goes_back):
            raise ValueError(
                f"the loaded state does not match this engine: module {name!r} differs in {different}; to start a new run "
                "from the weights that match, use WarmStart(path, allow=...)"
            )
    for update in engine.updates:
        check_parameters(engine, update, saved["updates"][update.name], saved["modules"])


def _check_names(engine: Engine, modules: list[str], saved: Mapping[str, Any], allowed: frozenset[str]) -> None:
    """Raise ValueError for modules, updates and handlers that only the state or only the engine has."""
    own: dict[str, set[str]] = {"modules": set(modules), "updates": {update.name for update in engine.updates}}
    there = {part: set(saved[part]) for part in own}
    with_state = {name for name, handler in engine.handlers.items() if handler.state_dict()}
    own["handlers"] = with_state - allowed
    there["handlers"] = {name for name, state in saved["handlers"].items() if state} - allowed
    for part in own:
        # A handler may have a state now and have had none when the checkpoint was saved, or the reverse.
        missing = own[part] - set(saved[part])
        unknown = there[part] - (set(engine.handlers) if part == "handlers" else own[part])
        if missing or unknown:
            problems = [f"only in this engine: {', '.join(sorted(missing))}"] if missing else []
            problems += [f"only in the state: {', '.join(sorted(unknown))}"] if unknown else []
            names = sorted(missing | unknown)
            way_out = (
                f"; to allow the difference, call engine.load_state_dict(state, allow={names})"
                if part == "handlers"
                else ""
            )
            raise ValueError(f"the loaded state does not match this engine: {part} {'; '.join(problems)}{way_out}")


def _different(root: nn.Module, state: Mapping[str, Any], *, goes_back: bool) -> str:
    """Why a module does not take a state, apart from its buffers where it goes back to one of its own; empty if it does."""
    if not goes_back:
        return refusal(root, state)
    buffers = buffer_names(root)
    own, given = ({key: one for key, one in part.items() if key not in buffers} for part in (root.state_dict(), state))
    return differences(own, given)


_ATOMS = {bool, bytes, float, int, str, NoneType}


def _cloned(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _itself(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of a view: torch.save writes the whole storage of a view."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return tensor.detach() if plain and tensor.untyped_storage().nbytes() == tensor.nbytes else _cloned(tensor)


def copied(value: Any, tensor: Callable[[Tensor], Tensor] = _cloned) -> Any:
    """A deep copy of a state, with ``tensor(item)`` for each tensor in it: a clone by default."""
    if type(value) in _ATOMS:
        return value
    if isinstance(value, Tensor):
        return tensor(value)
    if isinstance(value, dict):
        same = copy.copy(value)  # keeps the type: a module's state has metadata, a scheduler's may hold a Counter
        for key, item in value.items():
            if type(item) not in _ATOMS:  # atoms are copied already: half of the items, and one call less for each
                try:
                    same[key] = copied(item, tensor)
                except TypeError as error:
                    error.add_note(f"in the state's entry {key!r}")
                    raise
        return same
    if isinstance(value, np.generic):  # torch.load(weights_only=True) accepts no NumPy types
        return value.item()
    if isinstance(value, np.ndarray):
        raise TypeError(
            f"a NumPy array of shape {value.shape} cannot be saved, because torch.load(weights_only=True) rejects it; "
            "convert it to a tensor (torch.from_numpy) or a list"
        )
    if isinstance(value, list | tuple):
        items = [copied(item, tensor) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return copy.deepcopy(value)
