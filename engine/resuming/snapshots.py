"""Taking the whole state of a run, sharing it, loading it, and putting it back in place."""

from __future__ import annotations

import copy
import reprlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..core.events import Events, Lifecycle
from ..core.part import Part
from ..core.setup import check_initialized
from ..core.words import listed
from ..distributed.group import PROCESS_GROUP
from ..distributed.processes import lost_another
from ..distributed.sharded import SHARDS, is_sharded, read_shards
from ..models.modules import bare_state, unwrapped
from ..updates.optimizer_modes import has_modes, weights_to_evaluate
from .changeable import Unsaved, given_parameters, going_back, own_parameters
from .copies import Copies, Copy
from .frozen import fill_in, leave_out, without
from .keys import OWN_PARAMETERS, UNSAVED
from .loads import load_modules, refusal
from .saving import FORMAT, check_fit, copied, gather, put_back
from .state_parts import check_complete

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["Snapshots"]


class _Snapshot(NamedTuple):
    """A state that was taken at an event, and whether its tensors are copies."""

    iteration: int
    is_copy: bool
    state: dict[str, Any]


class Snapshots(Part["Engine"]):
    """The states of an engine: those that it returns, and those that were loaded into it.

    Attributes:
        run_id: a random id that distinguishes this run from all others, including those it resumed from. It is not saved.
        origin: the loaded state's entry "origin", which says where the state came from; None for a run that began at the start.
        left_out: the position of the full state of which `load_weights` last loaded only the weights; None if there is none.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.run_id = ""
        self.origin: Mapping[str, Any] | None = None
        self.left_out: Mapping[str, Any] | None = None
        self._shared: _Snapshot | None = None  # the one that all receivers of an event share
        self._lent: dict[frozenset[str], Copy] = {}  # those of this event, by what they leave out
        self._copies = Copies()
        self._loaded: dict[str, Any] | None = None  # put in place once STARTED's receivers have run
        self._allowed: frozenset[str] = frozenset()
        self._goes_back = False  # whether the loaded state is one of this engine, with all that it has changed
        self._writes: list[tuple[tuple[int, bool], Callable[[], object]]] = []  # in threads, by event
        self._before: dict[str, dict[str, Any]] | None = None  # the weights that those of `_loaded` have replaced
        self._in_place: dict[str, Any] = {}  # those, as far as the modules have them as they are in the state
        self._changed = False  # whether the loaded weights were changed before the run
        self._accepting = False  # whether a state may be loaded though the run has begun
        self._evaluations = 0  # how many are under way, with averages in place of the weights
        engine.signals.between_events = self.drop
        self.begin_lineage(None)

    # ---- taking ---------------------------------------------------------------------------------------------------

    def state_dict(self, *, at_once: bool = False) -> dict[str, Any]:
        """Everything that is needed to resume; see `Engine.state_dict`.

        Args:
            at_once: True if the caller writes it immediately: its tensors are then the engine's own, and not copied.
        """
        engine = self.engine
        self.check_trained_weights("state_dict()")
        if engine.state.completed != engine.state.iteration:
            raise RuntimeError(
                "state_dict() was called inside an iteration, so the state would be incomplete; call state_dict() at "
                "ITERATION_COMPLETED or later"
            )
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        if not at_once:  # else `saving_events` says when
            engine.unfinished.report_missing()
        try:
            state = gather(engine, at_once=at_once)
        except Exception as error:
            if lost_another(error):
                error.add_note("state_dict() gathers the parts of all ranks; call it on every rank")
            raise
        engine.signals.notify(engine, Lifecycle.STATE_TAKEN, state, at_once)
        return state

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """The block in which the model has the weights that evaluations see: neither a state is taken nor weights are put in.

        Without averages they are the trained ones, with which everything may be done.
        """
        others = self._has_averages()
        self._evaluations += others
        try:
            yield
        finally:
            self._evaluations -= others

    def _has_averages(self) -> bool:
        """Whether a handler, or an optimizer, puts other weights in place for evaluations."""
        swaps = (one.writes or () for one in self.engine.signal(Events.EVALUATION_STARTED).connections)
        return any("weights" in writes for writes in swaps) or has_modes(self.engine)

    def check_trained_weights(self, call: str) -> None:
        """Raise RuntimeError while the model has the weights that evaluations see, which may be averages."""
        if self._evaluations:
            raise RuntimeError(
                f"{call} was called during an evaluation, while the model holds averages instead of the trained "
                "weights; call it after the evaluation, or after the `with engine.evaluating()` block"
            )

    def own_state(self) -> dict[str, Any]:
        """A copy of the state of this rank, to be put back in place within this run: no rank waits for another."""
        return gather(self.engine, alone=True)

    def take(self, *, at_once: bool = False) -> dict[str, Any]:
        """The `state_dict` at this event, taken once and shared by all receivers that call this in Phase.PERSIST of the event.

        Args:
            at_once: whether the state is written and released before the receiver returns; its tensors then need no copy.
        """
        engine = self.engine
        if not engine.running:
            return self.state_dict(at_once=at_once)
        shared = self._shared
        # A snapshot of GET_BATCH_STARTED is one iteration older.
        if shared is None or shared.iteration != engine.state.iteration or not (at_once or shared.is_copy):
            engine.boundary.wake()  # it is dropped with the event
            shared = _Snapshot(engine.state.iteration, not at_once, self.state_dict(at_once=at_once))
            self._shared = shared
        return shared.state

    def lend(self, left_out: frozenset[str] = frozenset()) -> Copy:
        """A copy of the state of this event for a write in a thread, shared by all who ask at the same event.

        Each of them releases it, once it is written: its memory is kept for the next one until the run ends.

        Args:
            left_out: Names of parameters that are left out, such as "model.0.weight".
        """
        if (copy := self._lent.get(left_out)) is None or copy.users == 0:
            copy = self._copies.make(without(self.take(at_once=True), left_out))
            if self.engine.running:
                self._lent[left_out] = copy
        copy.users += 1
        return copy

    def lend_weights(self, left_out: frozenset[str] = frozenset()) -> Copy:
        """A copy of the `weights` like that of `lend`, for the caller alone."""
        copy: Copy = self._weights(lambda states: self._copies.make(leave_out(states, left_out)))
        copy.users += 1
        return copy

    def drop(self) -> None:
        """Forget the shared snapshots: the next event has others."""
        self._shared = None
        self._lent = {}

    def end_run(self) -> None:
        """Free what the run has kept."""
        self.drop()
        self._copies.free()
        self._writes = []  # handlers have waited for them

    @contextmanager
    def saving(self) -> Iterator[None]:
        """The region in which a handler takes and writes a checkpoint, or waits for one that a thread writes."""
        with self.engine.regions.region():
            self._emit(Events.CHECKPOINT_STARTED)
            yield

    def report_saved(self) -> None:
        """Emit CHECKPOINT_SAVED, for handlers that have written a checkpoint."""
        self._emit(Events.CHECKPOINT_SAVED)

    def _emit(self, event: Events) -> None:
        engine, shared, lent = self.engine, self._shared, self._lent
        engine.signals.emit(engine, event)
        self._lent = lent
        if shared is not None and (shared.is_copy or not engine.signal(event).receivers):
            self._shared = shared  # other handlers may still have to write the state of this event

    def add_write(self, join: Callable[[], object]) -> None:
        """Register a write of this event's state that continues in a thread; ``join`` waits for the write."""
        self._writes.append((self._event(), join))

    def wait_for_earlier_writes(self) -> None:
        """Wait for the writes of earlier events, so that a state is written only after the versions that it lists as kept."""
        now = self._event()
        for event, join in self._writes:
            if event != now:
                join()
        self._writes = [one for one in self._writes if one[0] == now]

    def _event(self) -> tuple[int, bool]:
        return self.engine.state.iteration, self.engine.state.epoch_open

    # ---- loading --------------------------------------------------------------------------------------------------

    @property
    def has_loaded_state(self) -> bool:
        """Whether a state was loaded that the next run will apply."""
        return self._loaded is not None

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Iterable[str] = (), goes_back: bool = False) -> None:
        """Put saved weights in place now, and everything else at the next run; see `Engine.load_state_dict`.

        Args:
            state: The state.
            allow: Names of handlers that may be in only one of the saved run and this one.
            goes_back: Whether the next run goes back to a state of this engine, as `restore` does.
        """
        if self.engine.running and not self._accepting:
            raise RuntimeError(
                "load_state_dict() was called during a run; call it before run(), or from a MODEL_SETUP receiver"
            )
        self.check_trained_weights("load_state_dict()")
        _check_is_state(state, "load_state_dict()")
        if isinstance(allow, str):
            raise TypeError(f"load_state_dict(allow={allow!r}): expected a list of names, such as [{allow!r}]")
        if not self.engine.training and _is_of_training(state):
            self.load_weights(state)  # its position and its handlers are those of the training
            return
        check_complete(state, "load_state_dict()")
        if not self.engine.running:
            if not self.engine.signal(Events.MODEL_SETUP).receivers:  # which may call the model with a first batch
                check_initialized(self.engine, "load_state_dict()")
            state = self._with_shards(state)
        self._loaded = {key: value for key, value in state.items() if key != UNSAVED or isinstance(value, Unsaved)}
        self._allowed = frozenset(allow)
        self._goes_back = goes_back
        self.engine.handlers.drop_held_states()
        if not self.engine.running:
            self._put_weights_in_place(state)

    def _with_shards(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A state with its sharded tensors, whole, unless the run will read this rank's shards alone."""
        engine = self.engine
        joins = any(PROCESS_GROUP in engine.overrides.owned_by(one) for one in engine.handlers)
        if SHARDS not in state or joins or any(is_sharded(p) for p in engine.modules.parameters()):
            return state
        return read_shards(state, parameters=(), device=torch.device("cpu"))

    def _put_weights_in_place(self, state: Mapping[str, Any]) -> None:
        """Let the model be used before the next run. Weights that do not fit stay where they are: they are an error there."""
        engine = self.engine
        if SHARDS in state or any(is_sharded(p) or p.is_meta or is_lazy(p) for p in engine.modules.parameters()):
            return  # the run puts them in place
        state = unwrapped(engine.modules, state)
        try:
            state = fill_in(engine.modules, state, "load_state_dict()")
        except ValueError:
            return  # the base may be loaded at MODEL_SETUP
        roots, saved = engine.modules, state["modules"]
        if any(name not in saved or refusal(root, saved[name]) for name, root in roots.items()):
            return
        before = {name: _on_cpu(root.state_dict()) for name, root in roots.items()}
        load_modules({root: saved[name] for name, root in roots.items()})
        # A module whose load changes values cannot be compared with them.
        self._in_place = {name: saved[name] for name, root in roots.items() if not _differ(root, saved[name])}
        if self._before is None:
            self._before = before

    def begin_run(self) -> None:
        """Put the weights back that loaded ones have replaced, so that the run begins as if these were not in place yet."""
        self.check_trained_weights("run()")
        before, self._before = self._before, None
        if before is None or self._loaded is None:
            return
        for name, root in self.engine.modules.items():
            self._changed = self._changed or _differ(root, self._in_place.get(name, {}))
            if not refusal(root, before[name]):
                root.load_state_dict(before[name])
        self._in_place = {}

    def loaded_state_of(self, handler: str) -> Mapping[str, Any] | None:
        """The state of a handler that was loaded, and is put in place at the next run; None without one."""
        states = None if self._loaded is None else self._loaded.get("handlers")
        return None if states is None else states.get(handler)

    def accept(self, accepting: bool) -> None:
        """Whether a state may be loaded though the run has begun."""
        self._accepting = accepting

    def apply_loaded(self) -> bool:
        """Put the loaded state in place; False if there is none."""
        engine, loaded = self.engine, self._loaded
        others = engine.processes.gather(loaded is not None)
        if len(set(others)) > 1:
            raise ValueError(
                f"rank {others.index(True)} loaded a state, but rank {others.index(False)} did not; load the same "
                "checkpoint on all ranks"
            )
        if loaded is None:
            return False
        engine.unfinished.reset()
        seed = engine.seed
        # An evaluation has no position to return to: it measures all of its data.
        saved = put_back(engine, loaded, allowed=self._allowed, resumes=engine.training, goes_back=self._goes_back)
        engine.past.reset()  # its states are those of another run
        engine.past.load_state_dict(saved.get("past", {}))
        if engine.training:
            engine.signals.notify(engine, Lifecycle.RESUMED, loaded, self._allowed, seed, self._changed)
        self._changed = False
        if (origin := loaded.get("origin")) is not None:
            self.begin_lineage(origin)
            self.run_id = engine.processes.broadcast(self.run_id)
        if not self._goes_back and isinstance(unsaved := loaded.get(UNSAVED), Unsaved):
            unsaved.report()
        self._loaded = None  # only now: what could not be put in place is tried again, and never forgotten
        engine.feed.load(saved["data"], engine.seed)
        engine.signals.rewind(engine)
        return True

    # ---- putting back in place ------------------------------------------------------------------------------------

    def restore(self, state: Mapping[str, Any], *, allow: Iterable[str] = ()) -> None:
        """Restore a state of this engine within the same process, at the end of the current iteration.

        The run continues exactly, bit for bit, as it did after the state was taken: modules, optimizers, handlers, generators
        and the position in the data are restored, and CHECKPOINT_LOADED is emitted. Outside a run, the next run starts from the
        state. With several ranks, each rank must call this with its own state.

        Receivers are called again, so one that restores under ``once=`` must remember that it did. A checkpoint written in the
        same iteration contains the state before the restore. A requested stop of the run remains; a requested stop of the epoch
        is undone. Of two calls in one iteration, the last one counts.

        Args:
            state: what `take` or `Engine.state_dict` returned. It is not changed, and can be restored again.
            allow: names of handlers that may be missing from either the state or this engine.

        Raises:
            ValueError: if this is not such a state, does not match this engine, or was taken before the first run.
            DataError: for data that cannot return to an earlier position, such as a generator.
            RuntimeError: after the last iteration of a run.
        """
        engine = self.engine
        if not engine.running:
            self.load_state_dict(state, allow=allow, goes_back=True)
            return
        if engine.current_run is not None and engine.current_run.over:
            raise RuntimeError(
                "restore() was called after the last iteration of a run, when it is too late to rewind the run; call "
                "load_state_dict() after run() returns instead"
            )
        _check_is_state(state, "restore()")
        check_complete(state, "restore()")
        if not engine.processes.distributed:  # which merge their parts first
            check_fit(engine, unwrapped(engine.modules, state), frozenset(allow), goes_back=True)
        if engine.training and any(part["optimizer"] is None for part in state["updates"].values()):
            raise ValueError(
                "restore(): the state was taken before the first run, when the engine had no optimizers; take the "
                "state at STARTED or later"
            )
        engine.feed.check_can_go_back(state.get("data"))
        engine.boundary.go_back(partial(self.apply_restored, copied(dict(state)), frozenset(allow)))

    def apply_restored(self, saved: Mapping[str, Any], allowed: frozenset[str]) -> None:
        """Do at the boundary what `restore` has asked for."""
        engine, reached = self.engine, self.engine.state.iteration
        try:
            saved = put_back(engine, saved, allowed=allowed, goes_back=True)
        except RuntimeError as error:
            if engine.processes.distributed:
                error.add_note("rewind() and restore() must be called on all ranks in the same iteration")
            raise
        engine.past.load_state_dict(saved.get("past", {}))
        engine.feed.begin_again_at(saved["data"], engine.seed)
        engine.past.went_back(reached, saved)
        engine.signals.rewind(engine)
        engine.boundary.reconsider_stop()
        engine.signals.emit(engine, Events.CHECKPOINT_LOADED)

    # ---- weights --------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Any]:
        """The states of the modules by name, as they are to be used; see `Engine.weights`.

        Trained tensors in no module, such as a temperature, are under "own_parameters", if there are any.
        Receivers of CHECKPOINT_SAVING may enter what puts averages in place (`Regions.enter`); it is left before this returns.
        """
        copies: dict[str, Any] = self._weights(copied)
        return copies

    def hold_weights(self) -> dict[str, Any]:
        """The `weights`, and what only this engine can put back; for `load_weights`, later in this process."""
        held: dict[str, Any] = self._weights(
            lambda states: copied(states) | {UNSAVED: Unsaved(self.engine, attributes=False)}
        )
        return held

    def _weights(self, copy: Callable[[dict[str, Any]], Any]) -> Any:
        engine = self.engine
        with weights_to_evaluate(engine), engine.regions.region():
            engine.signals.emit(engine, Events.CHECKPOINT_SAVING)
            states: dict[str, Any] = {name: bare_state(root) for name, root in engine.modules.items()}
            if own := own_parameters(engine):
                states[OWN_PARAMETERS] = own
            return copy(states)

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Put weights in place, and nothing else; see `Engine.load_weights`."""
        self.check_trained_weights("load_weights()")
        given = self.put_weights(weights)
        self.engine.signals.notify(self.engine, Lifecycle.WEIGHTS_GIVEN, given)
        self.left_out = given.get("engine")
        self.engine.signals.emit(self.engine, Events.WEIGHTS_LOADED)

    def put_weights(self, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """Put weights in place without an event; returns the whole state that they are of, empty without one."""
        if not isinstance(weights, Mapping):
            raise TypeError(f"load_weights({reprlib.repr(weights)}): expected a dict of weights, or a checkpoint path")
        engine, given = self.engine, weights if "format" in weights else {}
        weights = read_shards(weights, parameters=engine.modules.parameters(), device=engine.device)
        weights = weights.get("modules", weights) if "format" in weights else weights
        own = given_parameters(engine, weights, given)
        with going_back(engine, weights):
            self._put_modules_back(weights, given)
        with torch.no_grad():
            for parameter, value in own:
                parameter.copy_(value)
        return given

    def _put_modules_back(self, weights: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Let the modules load weights, of which some may be missing or frozen in the whole state that is given with them."""
        engine = self.engine
        weights = {name: state for name, state in weights.items() if name not in (OWN_PARAMETERS, UNSAVED)}
        saved = unwrapped(engine.modules, {**given, "modules": weights})
        weights = fill_in(engine.modules, saved, "load_weights()", weights=True)["modules"]
        # A loss with parameters may be in the weights or in the engine alone.
        models = engine.modules.models
        modules = {name: root for name, root in engine.modules.items() if name in weights or name in models}
        unknown = {name for name in weights if name != "loss" and not name.endswith("_loss")} - modules.keys()
        if unknown or modules.keys() - weights.keys():
            wanted = ", ".join(f"{name!r}: {name}.state_dict()" for name in sorted(modules))
            raise ValueError(
                f"load_weights(): got the entries [{listed(sorted(weights))}], which do not match the engine's "
                f"modules; write load_weights({{{wanted}}})"
            )
        for name, root in modules.items():
            if different := refusal(root, weights[name]):
                raise ValueError(f"load_weights(): module {name!r} differs in {different}; use WarmStart(allow=...)")
        load_modules({root: weights[name] for name, root in modules.items()})

    # ---- lineage --------------------------------------------------------------------------------------------------

    def begin_lineage(self, origin: Mapping[str, Any] | None, run_id: str | None = None) -> None:
        """Begin a run with an id of its own, or with the one that the ranks have agreed on."""
        self.run_id = secrets.token_hex(8) if run_id is None else run_id
        self.origin = origin

    def reset(self) -> None:
        """Forget what was loaded."""
        self._loaded = self._before = None
        self.begin_lineage(None)


def _is_of_training(state: Mapping[str, Any]) -> bool:
    return any(part.get("optimizer") is not None for part in state.get("updates", {}).values())


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of a module's state, in the main memory."""
    kept = copy.copy(state)  # a copy keeps the metadata
    for key, value in state.items():
        kept[key] = value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
    return kept


def _check_is_state(state: object, where: str) -> None:
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        raise ValueError(f"{where}: expected the state of a Signalfire engine, as returned by Engine.state_dict()")


def _differ(root: nn.Module, loaded: Mapping[str, Any]) -> bool:
    """Whether parameters have other values than in a loaded state."""
    return any(
        isinstance(value := loaded.get(name), Tensor)
        and not torch.allclose(parameter.cpu(), value.to("cpu", parameter.dtype), rtol=0, atol=0, equal_nan=True)
        for name, parameter in root.named_parameters()
    )
