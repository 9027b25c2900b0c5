"""The engine: a loop that only emits events. What it emits, and when, stands in `Events`; what it performs, in `updater`."""

from __future__ import annotations

import copy
import secrets
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from .bus import Phase
from .data.loading import generators_of
from .data.source import END, DataError, Source
from .distributed.processes import ALONE, Processes, lost_another
from .distributed.sharded import read_shards
from .events import EventEnum, Events
from .handler import Handler
from .host import HandlerHost
from .interval import Interval
from .randomness import (
    check_seed,
    cuda_generators,
    derived_seed,
    random_state,
    reseed,
    set_random_state,
    unchanged_random_state,
)
from .regions import Regions, note_problems
from .saving import FORMAT, copied, gather, put_back, spread_over
from .setup import build_optimizers, check_modules, check_windows
from .state import State
from .update import IterationSignals, Update, UpdateState, needs_closure, updater

__all__ = ["Engine"]

T = TypeVar("T")

_ACTS = ("window", "gradients", "step", "data", "reduction")
_TOGETHER = "how the model is distributed over processes"
_ONCE = "how often a step computes its gradients"
_STREAMS = ("shared", "separate")


class Engine(HandlerHost):
    """Runs updates over data and emits an event at every step of the way; every feature is a handler of those events.

    Training, evaluation and prediction are engines alike: one whose updates have no optimizer evaluates, that is, it runs in
    eval mode without gradients, and every run of it starts anew.

    Args:
        update: what to do in every iteration, or several of them in order.
        model: a module, or several by name (then ``engine.model`` is a ``ModuleDict`` of them); None if the update's
            functions need none.
        seed: from which the handlers' random draws derive; torch's initial seed by default. It does not seed the global
            generators: `Seeding` does.
        training: whether to train; by default, if any update has an optimizer.
        streams: where the model's and the data's draws from the global generators (Python, NumPy, torch) come from. "shared":
            one stream for all, as in a plain loop. "separate": the generators are reseeded from (seed, epoch) before an
            epoch's data is iterated, and from (seed, update's name, iteration) before each update, so that a handler which
            changes how often the model draws, such as SharpnessAwareMinimization, shifts no later draw. For ablations: the
            difference that a handler makes varies less. It costs 10 to 25 us an update. Outside a run, the attribute may be set.

    Attributes:
        state: where the run stands.
        model: what the forward calls, perhaps wrapped or sharded.
        modules: the bare modules by name, for state, averages and optimizers.
        updates: the updates at work.
        handlers: the attached handlers by name.
        dry_run: whether handlers that write files (`Handler.writes`) are left out of every run.
        run_id: tells this run from every other, also from those that it was resumed from or that go on from it. Drawn by
            chance, it belongs to no saved state.
        origin: what the loaded state said, under "origin", of where it came from; None for a run that began anew.

    Example:
        >>> import torch
        >>> from functools import partial
        >>> from signalfire import Engine, Update
        >>> model = torch.nn.Linear(2, 1)
        >>> update = Update.supervised(torch.nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1))
        >>> trainer = Engine(update, model=model, seed=0)
        >>> trainer.run([(torch.ones(4, 2), torch.ones(4, 1))], max_epochs=3).iteration
        3
    """

    # Slots are quicker than a dict of more than thirty attributes; a user may still set attributes of their own.
    __slots__ = (
        "__dict__",
        "__weakref__",
        "_agreed_stops",
        "_agreed_time",
        "_allowed",
        "_begun",
        "_completed",
        "_deadline",
        "_epoch_stop",
        "_evaluating",
        "_held_states",
        "_loaded",
        "_position",
        "_preemption",
        "_seed_given",
        "_setting_up",
        "_shares",
        "_snapshot",
        "_source",
        "_stopped_bounds",
        "_stops",
        "_streams",
        "_usual",
        "asks_to_skip",
        "dry_run",
        "epoch_end",
        "has_data",
        "iteration_signals",
        "model",
        "modules",
        "origin",
        "processes",
        "regions",
        "replaced_data",
        "replaced_gradients",
        "replaced_reduction",
        "replaced_step",
        "run_id",
        "seed",
        "state",
        "training",
        "updates",
    )  # fmt: skip

    def __init__(
        self,
        update: Update | Sequence[Update],
        *,
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        seed: int | None = None,
        training: bool | None = None,
        streams: Literal["shared", "separate"] = "shared",
    ) -> None:
        specs = [update] if isinstance(update, Update) else list(update) if isinstance(update, Sequence) else []
        if not specs or not all(isinstance(spec, Update) for spec in specs):
            raise TypeError(
                f"Engine: update={update!r} has to be an Update or a sequence of them; "
                "for a single function use Update.from_function(function, optimizer=...)"
            )
        names = [spec.name for spec in specs]
        if len(set(names)) < len(names):
            raise ValueError(f"Engine: the updates' names {names} have to differ; give Update(..., name=)")
        if seed is not None:
            check_seed("Engine", seed)
        self.processes: Processes = ALONE
        super().__init__()
        self.streams = streams
        self.modules = _named_modules(model)
        self.model: Any = model if model is None or isinstance(model, nn.Module) else nn.ModuleDict(self.modules)
        self.training = any(spec.optimizer is not None for spec in specs) if training is None else training
        if self.training and any(spec.optimizer is None for spec in specs):
            raise ValueError(
                "Engine: to train, every update needs an optimizer; "
                f"{next(spec.name for spec in specs if spec.optimizer is None)!r} has none"
            )
        self.seed: int = torch.initial_seed() if seed is None else seed
        self._seed_given = seed is not None
        self.updates = tuple(UpdateState(spec, training=self.training) for spec in specs)
        self.state = State(self.updates[0])
        self.iteration_signals = IterationSignals(self.signals, specs, training=self.training)
        self.regions = Regions()
        self.dry_run = False
        self.replaced_data: Callable[[Engine, Any], Any] | None = None
        self.replaced_gradients: Callable[..., None] | None = None
        self.replaced_reduction: Callable[[Engine, UpdateState], None] | None = None
        self.replaced_step: Callable[..., None] | None = None
        self.has_data = False
        self.run_id = ""
        self.origin: Mapping[str, Any] | None = None
        self._begin_lineage(None)
        self._stops: dict[str, str] = {}
        self._begun = True  # False where an iteration has not come to its updates
        self._usual = True  # the iteration is one update, and no stop was asked for
        self._preemption: str | None = None  # why the run is to be saved and stopped at the next boundary
        self._evaluating = False
        self._epoch_stop: str | None = None
        self._completed = 0  # the last iteration whose updates were all made
        self._loaded: dict[str, Any] | None = None  # held until STARTED's receivers have run
        self._allowed: frozenset[str] = frozenset()
        self._held_states: dict[str, Mapping[str, Any]] = {}  # loaded for handlers that are switched off now
        # Of which iteration, whether its tensors are copies, the state.
        self._snapshot: tuple[int, bool, dict[str, Any]] | None = None
        self._source: Source | None = None
        self._position: dict[str, Any] | None = None  # where the data of an earlier run stood
        self._deadline: float | None = None
        self._shares = "auto"  # how data comes to several processes; see `join`
        self._agreed_stops: dict[str, str] = {}
        self._agreed_time = 0.0
        self.epoch_end = 0  # the epoch's last iteration; 0 where nobody knows it
        self.asks_to_skip = False  # whether several processes have to ask each other once the gradients are ready
        self._setting_up = False  # the events of a run have begun, and a state can still be loaded
        self._stopped_bounds: list[int | None] | None = None

    # ---- the loop -------------------------------------------------------------------------------------------------

    def _loop(self, source: Source) -> None:
        """The whole loop. A signal's ``due`` is the next count at which somebody may listen, and one comparison does for all
        events of an iteration up to its completion: who connects in an iteration that nobody listens to is heard in the next."""
        state, updates, run_update = self.state, self.updates, updater(self)
        first, one_update = updates[0], len(updates) == 1
        signals, iteration_completed = self.iteration_signals, self._boundary
        while not self._bound_reached() or self._epoch_to_be_told(source):
            plan: Sequence[UpdateState] = updates
            self._usual = one_update
            iterator, epoch_end = self._begin_epoch(source)
            for iteration in range(state.iteration + 1, epoch_end + 1):
                listened = False
                if signals.due <= iteration:  # stored by itself, the comparison costs twice as much
                    listened = True
                    if signals.batch_started.due <= iteration:
                        signals.batch_started.emit(self, iteration)
                        if self._stops_now() and self._attend():  # before a batch is read that would be lost
                            break
                try:
                    batch = next(iterator)
                except StopIteration:
                    iterator, batch = self._data_ended(source)
                    if batch is END:
                        break
                state.iteration = iteration
                state.batch = batch
                if listened:
                    self._begun = False
                    if signals.batch_completed.due <= iteration:
                        signals.batch_completed.emit(self, iteration)
                    if signals.iteration_started.due <= iteration:
                        state.plan = updates
                        signals.iteration_started.emit(self, iteration)
                        plan = state.plan
                        self._usual = self._usual and plan is updates
                    self._begun = True
                if self._usual:  # a loop over a single one costs 50 ns
                    run_update(first, batch, iteration, listened)
                else:
                    if self._stops_now():  # the iteration was not begun: it is not made
                        state.iteration = self._completed
                        if self._attend():
                            break
                        state.iteration = iteration
                    for update in updates:
                        update.left_out = iteration
                    for update in plan:
                        if self._stops_now():
                            break
                        state.update, update.left_out = update, 0
                        run_update(update, state.batch, iteration, listened)
                    plan, self._usual = updates, one_update
                self._completed = iteration
                if iteration_completed.due <= iteration:
                    iteration_completed.emit(self, iteration)
                    if iteration_completed.awaited and self._attend():
                        break
            if self._epoch_is_over(source):
                state.epoch_open = False
                if any(update.filled for update in updates):  # left out of the epoch's last plan
                    self._discard_windows()
                self._emit(Events.EPOCH_COMPLETED)
                if self._attention:
                    self._attend()

    def run(
        self,
        data: Iterable[Any] | None = None,
        *,
        max_epochs: int | None = None,
        max_iters: int | None = None,
        max_steps: int | None = None,
        max_time: str | Interval | None = None,
        min_epochs: int = 0,
        min_iters: int = 0,
        epoch_length: int | None = None,
    ) -> State:
        """Run up to the given bounds, whichever is reached first; called again with larger ones, it continues.

        Args:
            data: an iterable of batches: a DataLoader, a list, a generator function's result. None for a run without data.
                A batch of None is skipped. A resumed run skips by index in a DataLoader over a map-style dataset and in a
                sequence; other data may have ``batches_from(start)``, or ``state_dict()`` and ``load_state_dict()``, to begin
                in its middle, and is read again if it has not. Samples of a map-style dataset are fetched with the global
                generators seeded from (seed, epoch, index), and samplers with ``set_epoch`` are told the epoch.
            max_epochs: up to this epoch. An engine that evaluates runs one epoch unless told otherwise.
            max_iters: up to this iteration over all epochs.
            max_steps: up to this many optimizer steps of the first update.
            max_time: up to this much wall-clock time in this call, such as "15min".
            min_epochs: a stop asked for with `terminate` is held back until this many epochs are complete.
            min_iters: likewise for iterations.
            epoch_length: iterations in an epoch. By default the data's length, or until unsized data ends. If it is given,
                the data goes on across epochs, and starts again (DATA_EXHAUSTED) when it is exhausted.

        Returns:
            The state. An error always leaves: with the handler, event, epoch and iteration in its notes, after
            EXCEPTION_RAISED (or INTERRUPTED) and ENDED.

        Raises:
            ValueError: for bounds that make no sense, or data that is empty or shorter than its length.
        """
        if self.running:
            raise RuntimeError(
                "run() was called on an engine that is running; evaluate with another engine: "
                "engine.evaluate(evaluator, data)"
            )
        if self.dry_run and (writers := [name for name, one in self.handlers.items() if one.writes and one.enabled]):
            with self.without(*writers):
                return self.run(
                    data,
                    max_epochs=max_epochs,
                    max_iters=max_iters,
                    max_steps=max_steps,
                    max_time=max_time,
                    min_epochs=min_epochs,
                    min_iters=min_iters,
                    epoch_length=epoch_length,
                )
        if self.replaced_data is not None:
            data = self.replaced_data(self, data)
        self.state.set_bounds(
            training=self.training,
            has_data=data is not None,
            max_epochs=max_epochs,
            max_iters=max_iters,
            max_steps=max_steps,
            max_time=max_time,
            min_epochs=min_epochs,
            min_iters=min_iters,
            epoch_length=epoch_length,
        )
        self._begin_together()
        source = Source(
            data, epoch_length, self.seed, epoch=max(self.state.epoch - 1, 0), processes=self.processes, shares=self._shares,
            whole=not self.training,
        )  # fmt: skip
        if self._streams == "separate":
            source.reseed = partial(self._begin_stream, "batch")
        self.state.epoch_length = source.epoch_length
        self.has_data = data is not None
        self._deadline = None if self.state.max_seconds is None else self.now() + self.state.max_seconds
        self._attention = self._always_attend()
        self._stops.clear()
        self._begun = True
        self._preemption = self._snapshot = None
        if not self.training:
            self.state.restart()
            self._completed = 0
        modes = [(module, module.training) for root in self.modules.values() for module in root.modules()]
        error: BaseException | None = None
        self.running = True
        try:
            with torch.set_grad_enabled(self.training):
                self._start(source)
                self._loop(source)
                self._finish()
        except BaseException as caught:
            error = caught
            self._report(caught)
            raise
        finally:
            try:
                problems = self._clean_up(error, modes)
            finally:
                self.running = self._attention = self._setting_up = False
            note_problems(problems, error)
            del error, problems
        return self.state

    def _clean_up(self, error: BaseException | None, modes: list[tuple[nn.Module, bool]]) -> list[BaseException]:
        """Put everything back after a run; what goes wrong is collected, so that nothing is left out."""
        problems = self.signal(Events.ENDED).emit_to_all(self)
        for module, mode in modes:
            module.training = mode
        self.running = False
        for act in (partial(self.regions.close, 0, error), self._settle):
            try:
                act()
            except BaseException as problem:
                problems.append(problem)
        state = self.state
        if self.training:
            state.iteration = self._completed  # an iteration that an error cut short was not made
        self._completed = state.iteration
        state.exception = state.batch = self._snapshot = None
        for update in self.updates:
            update.output, update.backward_loss, update.loss = None, None, update.loss  # let go of the graph
            if error is not None:
                update.weight, update.undecided = 1, True
        return problems

    # ---- the parts of the loop ------------------------------------------------------------------------------------

    def _start(self, source: Source) -> None:
        previous, self._source = self._source, source
        if previous is not None and self.training:
            self._position = previous.state_dict()
            if previous.given is source.given and isinstance(source.data, Iterator):
                source.adopt(previous)
        for root in self.modules.values():
            root.train(self.training)
        self._rewind()
        self.epoch_end = 0
        self._setting_up = True
        self._emit(Events.MODEL_SETUP)
        self._setting_up = False
        self._emit(Events.OPTIMIZER_SETUP)
        build_optimizers(self)
        check_modules(self)
        for update in self.updates:
            update.left_out = 0
            if update.filled == 0:
                update.discard()
        self._emit(Events.STARTED)
        was_loaded = self._loaded is not None
        if len(set(loaded := self.processes.gather(was_loaded))) > 1:
            raise ValueError(
                f"a state was loaded by rank {loaded.index(True)}, and not by rank {loaded.index(False)}: let all load the same "
                "checkpoint"
            )
        if self._loaded is not None:
            self._position = put_back(self, self._loaded, allowed=self._allowed)
            if (origin := self._loaded.get("origin")) is not None:
                self._begin_lineage(origin)
                self.run_id = self.processes.broadcast(self.run_id)
            self._loaded = None  # only now: what could not be put in place is tried again, and never forgotten
            source.load(max(self.state.epoch - 1, 0))
            self.state.epoch_length = source.epoch_length
            self._completed = self.state.iteration
            source.seed = self.seed
            self._rewind()
        self._give_held_states()
        self._reconsider_stop()
        if self._bound_reached() and not self._epoch_to_be_told(source):
            warnings.warn(self._nothing_to_run(), stacklevel=4)
        if was_loaded:
            self._emit(Events.CHECKPOINT_LOADED)
        if self._attention:
            self._attend()

    def _begin_epoch(self, source: Source) -> tuple[Iterator[Any], int]:
        """Enter the next epoch, or go on in an open one; the batches to come, and the iteration at which they end."""
        state = self.state
        position, self._position = self._position, None
        resumed = state.epoch_open
        if not resumed:
            self._epoch_stop = None
            state.epoch += 1
            state.epoch_start = state.iteration
            state.epoch_open = True
        for update in self.updates:
            update.window = 1 if update.window_of is None else update.window_of(state.epoch)
        check_windows(self)
        if not resumed:
            source.announce(state.epoch - 1)
            state.epoch_length = source.epoch_length
        self.epoch_end = 0 if source.epoch_length is None else state.epoch_start + source.epoch_length
        if not resumed:
            self._emit(Events.EPOCH_STARTED)
        if source.iterator is not None and isinstance(source.data, Iterator):
            iterator = source.iterator
        elif (
            position is not None
            and source.fits(position, state.epoch, state.epoch_start)
            and (resumed or source.continues)
        ):
            with unchanged_random_state():
                iterator = source.resume(position, state.iteration)
        elif source.iterator is None or not source.continues:
            if position is not None:
                with unchanged_random_state():
                    source.go_on(position, announced=resumed)
            ahead = any(update.window > 1 for update in self.updates)
            self._begin_stream("data", state.epoch, state.epoch_iteration)
            iterator = source.begin(state.iteration, state.epoch - 1, ahead=ahead)
        else:
            iterator = source.iterator
        if (self._attention and self._attend()) or self._epoch_stop is not None:
            return iterator, state.iteration
        if self._bound_reached():  # only the epoch's end is to be told
            return iterator, state.iteration
        ends = [self.epoch_end] if self.epoch_end else []
        if state.max_iters is not None:
            ends.append(state.max_iters)
        return iterator, min(ends, default=sys.maxsize - 1)

    def _data_ended(self, source: Source) -> tuple[Iterator[Any], Any]:
        """The data gave no more batches: the end of an unsized epoch, a new start, or an error."""
        state = self.state
        kind = type(source.data).__name__
        in_epoch = state.iteration - state.epoch_start
        taken = state.iteration - source.started_at
        if source.epoch_length is None:
            if in_epoch == 0:
                again = "" if state.epoch == 1 else (f"; it gave batches in epoch 1 but cannot be iterated again in epoch "
                                                     f"{state.epoch}: give an iterable, not an iterator")  # fmt: skip
                raise DataError(f"the data ({kind}) is empty: it gave no batch{again}")
            assert source.iterator is not None
            return source.iterator, END
        if taken == 0:
            raise DataError(f"the data ({kind}) is empty: it gave no batch, or cannot be iterated again")
        if source.length is not None and taken != source.length:
            raise DataError(
                f"the data ({kind}) says that its length is {source.length} but ended after {taken} batches"
            )
        if not source.continues:
            raise DataError(f"the data ({kind}) ended after {in_epoch} of the epoch's {source.epoch_length} batches")
        self._emit(Events.DATA_EXHAUSTED)
        self._begin_stream("data", state.epoch, in_epoch)
        iterator = source.begin(state.iteration, state.epoch - 1, ahead=False)
        batch = next(iterator, END)
        return self._data_ended(source) if batch is END else (iterator, batch)

    def on_last_batch(self) -> bool:
        """Whether the current batch is the epoch's last; for unsized data, one batch is read ahead to know."""
        if self.epoch_end:
            return self.state.iteration >= self.epoch_end
        assert self._source is not None
        return self._source.last()

    def _epoch_is_over(self, source: Source) -> bool:
        if self.state.stop_reason is not None:
            return False
        if self._epoch_stop is not None:
            self._epoch_stop = None
            return True
        if source.epoch_length is not None:
            return self.state.epoch_iteration >= source.epoch_length
        with unchanged_random_state():  # one batch may be read to know, and is read again if the run goes on
            return source.ended()

    def _attend(self) -> bool:
        """What had to wait for the end of the iteration: toggles, stops, bounds. True if the epoch does not go on."""
        for update in self.updates:
            update.skipped = None
        self._snapshot = None
        self._attention = self._always_attend()
        preemption = self._agree() if self.processes.several else self._preemption
        if preemption is not None:
            self._emit(Events.PREEMPTED)  # the state knows nothing of the stop, and an open window is still held
            self._stop(preemption)
            return True
        if self._pending:
            if any(update.filled for update in self.updates):
                self._attention = True
            else:
                self._settle()
        if stops := self._agreed_stops if self.processes.several else self._stops:
            if self._may_stop():
                self._stop(stops[min(stops)])
                return True
            self._attention = True
        if self._epoch_stop is not None:
            self._discard_windows()
            return True
        return self._attention and self._bound_reached()

    def _stop(self, reason: str) -> None:
        state = self.state
        state.stop_reason = reason
        self._stopped_bounds = [state.max_epochs, state.max_iters, state.max_steps]
        self._stops.clear()
        self._preemption = None
        self._discard_windows()

    def _always_attend(self) -> bool:
        return self._deadline is not None or self.state.max_steps is not None or self.processes.several

    def _begin_together(self) -> None:
        """What several processes have to have in common before a run."""
        if self.processes.several:
            self._agreed_stops = {}
            first = self.run_id, self.seed, time.monotonic()
            try:
                self.run_id, self.seed, self._agreed_time = self.processes.broadcast(first)
            except Exception as error:
                if lost_another(error):
                    error.add_note(
                        "the processes could not begin a run together: one of them has ended, or an error of the run before has "
                        "cut their connections; start the script again"
                    )
                raise
            self.asks_to_skip = True

    def _agree(self) -> str | None:
        """Let what one process asks for be what all do, and the clock of rank 0 be that of all; gives why they are preempted."""
        processes = self.processes
        # Looked at once: what a signal asks for while the processes agree waits for the next boundary.
        own = dict(self._stops), self._epoch_stop, self._preemption
        asked = bool(own[0]) or own[1] is not None or own[2] is not None
        now = time.monotonic() if processes.first else 0.0
        asking, self._agreed_time, skipping = processes.sum(asked, now, self._may_skip_alone())
        self.asks_to_skip = skipping > 0
        self._agreed_stops = {}
        preemption: str | None = None
        if asking:
            for rank, (stops, *others) in enumerate(processes.gather(own)):
                for by, reason in stops.items():
                    # What all have asked for needs no rank; what one asks for is its own.
                    self._agreed_stops.setdefault(by, reason if rank == 0 else f"{reason} (rank {rank})")
                self._epoch_stop = self._epoch_stop if self._epoch_stop is not None else others[0]
                preemption = preemption if preemption is not None else others[1]
        return preemption

    def _may_skip_alone(self) -> bool:
        """Whether somebody listens here who may skip a step once the gradients are ready, and not in each of the processes."""
        return any(
            one.phase < Phase.RECORD and (one.owner is None or not self.handlers[one.owner].decides_alike)
            for signal in (self.iteration_signals.gradients_ready, self.iteration_signals.step_started)
            for one in signal.connections
        )

    def now(self) -> float:
        """The wall-clock time in seconds, for differences: of several processes, that of rank 0 at the last boundary."""
        return self._agreed_time if self.processes.several else time.monotonic()

    def _may_stop(self) -> bool:
        """Whether the minimum bounds let a stop take effect."""
        state = self.state
        return state.epoch - state.epoch_open >= state.min_epochs and self._completed >= state.min_iters

    def _stops_now(self) -> bool:
        """Whether a stop takes effect inside an iteration. Of several processes all go on: others may not have asked for it."""
        return bool(self._stops) and not self.processes.several and self._may_stop()

    def _emit(self, event: EventEnum) -> None:
        self._snapshot = None  # a snapshot is that of one event
        try:
            super()._emit(event)
        finally:
            self._snapshot = None

    def _bound_reached(self) -> bool:
        state = self.state
        return (
            state.stop_reason is not None
            or (state.max_epochs is not None and state.epoch - state.epoch_open >= state.max_epochs)
            or (state.max_iters is not None and state.iteration >= state.max_iters)
            or (state.max_steps is not None and self.updates[0].steps >= state.max_steps)
            or (self._deadline is not None and self.now() >= self._deadline)
        )

    def _epoch_to_be_told(self, source: Source) -> bool:
        """Whether every batch of the epoch was taken while its end was not told; a saved run may stop just there."""
        state = self.state
        if not state.epoch_open or state.stop_reason is not None or self._position is None:
            return False
        if source.epoch_length is not None:
            return state.epoch_iteration >= source.epoch_length
        if isinstance(source.data, Iterator) or not source.fits(self._position, state.epoch, state.epoch_start):
            return False
        with unchanged_random_state():
            source.resume(self._position, state.iteration)
            return source.last()

    def _begin_stream(self, *what: object) -> None:
        """With separate streams, let what is drawn next depend on the run's seed, the rank and this alone."""
        if self._streams == "separate":
            devices = {p.device for root in self.modules.values() for p in root.parameters()}
            reseed(derived_seed(self.seed, *what, self.processes.rank), cuda_generators(devices))

    def _finish(self) -> None:
        if self.state.stop_reason is not None:
            self._emit(Events.TERMINATED)
        self._emit(Events.COMPLETED)

    def _report(self, error: BaseException) -> None:
        self._discard_windows()
        state = self.state
        if not getattr(error, "__notes__", None):
            begun = f"in epoch {state.epoch}, after iteration {state.iteration} had begun"
            error.add_note(begun if state.epoch else "before the first epoch")
        state.exception = error
        event = Events.INTERRUPTED if isinstance(error, KeyboardInterrupt) else Events.EXCEPTION_RAISED
        note_problems(self.signal(event).emit_to_all(self), error)

    def attend_to_skips(self) -> None:
        """Forget, once the iteration is complete, why an update was skipped in it."""
        self._attention = True

    def _discard_windows(self) -> None:
        for update in self.updates:
            update.discard()
            update.forget_questions()
            update.skipped = None
            update.filled = update.evaluation = 0
            update.hidden, update.more = None, False

    def _reconsider_stop(self) -> None:
        """A stopped run goes on if it is now given larger bounds than those it was stopped under."""
        state = self.state
        if state.stop_reason is None:
            return
        now = [state.max_epochs, state.max_iters, state.max_steps]
        before = self._stopped_bounds or now
        larger = [old is not None and (new is None or new > old) for new, old in zip(now, before, strict=True)]
        if any(larger) or before == [None] * 3:  # stopped under a bound of time, which every run has anew
            state.stop_reason = None

    def _give_held_states(self) -> None:
        """Handlers that were switched off when a state was loaded get theirs once they take part."""
        for name in [name for name in self._held_states if name in self._connected]:
            self.handlers[name].load_state_dict(self._held_states.pop(name))

    def _nothing_to_run(self) -> str:
        state = self.state
        why = f"it was stopped ({state.stop_reason})" if state.stop_reason else "it reached its bounds"
        return (
            f"run(): nothing to do: {why} at epoch {state.epoch}, iteration {state.iteration}. "
            "Give larger bounds to continue, or call engine.reset() to begin anew"
        )

    # ---- what handlers ask for ------------------------------------------------------------------------------------

    def terminate(self, reason: str, *, by: str = "user") -> None:
        """Stop the run once all receivers of this event have run. An open window is discarded; COMPLETED still comes.

        Inside an iteration, a step that was not made yet is skipped, and updates that were not begun are left out; an
        iteration of which no update was begun is not made at all. Of several processes one may ask: then all stop, at the end of
        the iteration, whose other updates are made.

        Args:
            reason: told in ``state.stop_reason``.
            by: who asks; the same name may take it back with `withdraw_termination` before it takes effect, as while
                ``min_epochs`` or ``min_iters`` hold it back.
        """
        if not self.running:
            raise RuntimeError(f"terminate({reason!r}): the engine is not running")
        if not isinstance(reason, str) or not reason:
            raise TypeError(f"terminate({reason!r}): say why, in a few words")
        self._stops.setdefault(by, reason)
        self._attention = True
        self._usual = False
        if self._completed != self.state.iteration and (self._begun or self.processes.several) and self._may_stop():
            self.state.update.skip(f"the run is stopped: {reason}")

    def preempt(self, reason: str) -> None:
        """Save and stop the run at the next iteration boundary, so that another process goes on as if it had not been stopped.

        Other than with `terminate`, the iteration under way is made whole, ``min_epochs`` and ``min_iters`` do not hold the
        stop back, and PREEMPTED is told before an open window is discarded: the `snapshot` that its receivers take is that of a
        run which goes on. TERMINATED, COMPLETED and ENDED follow. A signal handler may call it at any moment.

        Args:
            reason: told in ``state.stop_reason``.
        """
        if not self.running:
            raise RuntimeError(f"preempt({reason!r}): the engine is not running")
        self._preemption = reason  # in this order: whoever looks in between sees it at the next boundary
        self._attention = True

    def ask_again(self, stops: Mapping[str, str], epoch_stop: str | None) -> None:
        """Let stops take effect that were asked for when a state was saved."""
        self._stops = {**stops, **self._stops}
        self._epoch_stop = epoch_stop
        if stops or epoch_stop is not None:
            self._attention = True

    def withdraw_termination(self, by: str = "user") -> None:
        """Take back a stop that has not taken effect. A step that was skipped for it, or an update left out, stays so."""
        self._stops.pop(by, None)

    def terminate_epoch(self, reason: str) -> None:
        """End the epoch once all receivers of this event have run; EPOCH_COMPLETED comes, and then the next epoch."""
        if not self.running or not self.state.epoch_open:
            raise RuntimeError(f"terminate_epoch({reason!r}): no epoch is going on")
        self._epoch_stop = reason
        self._attention = True

    def evaluate(
        self, evaluator: Engine, data: Iterable[Any] | None, *, prefix: str = "", **bounds: Any
    ) -> dict[str, Any]:
        """Run another engine inside this one; what it measures lands in this engine's metrics.

        It changes no random stream, no gradient, no module's train or eval flag. What receivers of EVALUATION_STARTED `enter`
        is left as soon as the other run has ended.

        Args:
            evaluator: an engine that evaluates.
            data: its data.
            prefix: put before the names of its metrics.
            bounds: for ``evaluator.run``.

        Returns:
            The metrics under their names here.
        """
        if not isinstance(evaluator, Engine) or evaluator.training:
            raise ValueError(
                f"evaluate({evaluator!r}): it has to be an Engine that does not train; give its Update no "
                "optimizer: Update.evaluation() makes such a one"
            )
        outside = self.regions.depth
        seen = dict(evaluator.state.metrics.serials)
        if self.replaced_data is not None:
            data = self.replaced_data(evaluator, data)
        was_evaluating, self._evaluating = self._evaluating, True
        was_dry, evaluator.dry_run = evaluator.dry_run, self.dry_run or evaluator.dry_run
        was_with = evaluator.processes, evaluator._shares
        evaluator._share_with(self.processes, self._shares)
        if not evaluator._seed_given:
            evaluator.seed = self.seed  # what its data draws is that of the run, also after a resume in another process
        try:
            self._emit(Events.EVALUATION_STARTED)
            with unchanged_random_state(*generators_of(data)):
                self._begin_stream("evaluation", self.state.iteration)
                evaluator.run(data, **bounds)
        except BaseException as error:
            self.regions.close(outside, error)
            raise
        finally:
            self._evaluating = was_evaluating
            evaluator.dry_run = was_dry
            evaluator._share_with(*was_with)
        self.regions.close(outside)
        measured = {prefix + name: value for name, value in evaluator.state.metrics.new_since(seen).items()}
        self.state.metrics.update(measured)
        self._emit(Events.EVALUATION_COMPLETED)
        return measured

    def prepared(self, batch: Any) -> Any:
        """The batch as the loop would hand it to an update: placed, converted, by what prepares batches here.

        For data that a handler reads for itself. It calls the receivers of GET_BATCH_COMPLETED's PREPARE phase that are not
        filtered, and leaves ``state.batch`` as it is.
        """
        state = self.state
        current, state.batch = state.batch, batch
        try:
            for connection in self.signal(Events.GET_BATCH_COMPLETED).connections:
                if connection.phase is Phase.PREPARE and connection.filter is None:
                    connection.receiver(self)
            return state.batch
        finally:
            state.batch = current

    @property
    def device(self) -> torch.device:
        """Where the model's first parameter is; the CPU without a model."""
        for root in self.modules.values():
            for parameter in root.parameters():
                return parameter.device
        return torch.device("cpu")

    @property
    def streams(self) -> Literal["shared", "separate"]:
        """Whether model and data draw from one stream, or each update and each epoch from its own; see the class."""
        return self._streams

    @streams.setter
    def streams(self, streams: Literal["shared", "separate"]) -> None:
        if streams not in _STREAMS:
            raise ValueError(f"Engine: streams={streams!r} has to be one of {', '.join(map(repr, _STREAMS))}")
        if self.running:
            raise RuntimeError(f"Engine: streams={streams!r} cannot be set inside a run; set it before")
        self._streams: Literal["shared", "separate"] = streams

    def steps_to_come(self, update: UpdateState) -> int | None:
        """The optimizer steps that an update will make from here up to the run's bounds; None if nobody can know.

        No step is taken to be skipped. Without further knowledge each batch is one would-be step; where it is not, as with
        time chunks, only `max_steps` bounds the first update's.
        """
        state = self.state
        if not update.regular:
            known = update is self.updates[0] and state.max_steps is not None
            return max(0, (state.max_steps or 0) - update.steps) if known else None
        length, last_epoch = state.epoch_length, state.max_epochs
        window_of = update.window_of or (lambda epoch: 1)
        most = None if state.max_steps is None else max(0, state.max_steps - self.updates[0].steps)
        left = None if state.max_iters is None else max(0, state.max_iters - state.iteration)
        if length is None:
            if left is None or last_epoch is not None or update.window_of is not None:
                return most  # how many epochs, and so how many windows, these iterations are is not known
            return left if most is None else min(left, most)
        if last_epoch is None and left is None:
            return most
        steps, filled = 0, update.filled
        epoch, size = state.epoch + 1, length
        if state.epoch_open:
            epoch, size = state.epoch, length - state.epoch_iteration
        while (last_epoch is None or epoch <= last_epoch) and (left is None or left > 0):
            taken = size if left is None else min(size, left)
            window = window_of(epoch)
            steps += -(-(filled + taken) // window) if taken == size else (filled + taken) // window
            left = None if left is None else left - taken
            epoch, size, filled = epoch + 1, length, 0
        return steps if most is None else min(steps, most)

    def enter(self, region: AbstractContextManager[T]) -> T:
        """Enter a context manager that is left at the end of the innermost open region, also when something raises.

        The regions are the run, an evaluation, an update, and the forward with its loss; see `Events`.
        """
        if not self.running and not self._evaluating:
            raise RuntimeError(f"enter({region!r}): no region is open outside a run")
        self.state.update.unsettled = True
        return self.regions.enter(region)

    def replace(
        self, act: str, function: Callable[..., Any], *, by: Handler, update: str | None = None, again: bool = False
    ) -> None:
        """Perform an act of the loop with a function of the handler's own, until the handler is detached.

        The acts, and how their replacements are called:

        - "window": ``function(epoch) -> int``, over how many would-be steps gradients are accumulated;
        - "gradients": ``function(engine, update, compute)``, where ``compute()`` is what it replaces: forward, loss and backward
          of ``state.batch``, adding to the gradients that the window holds;
        - "step": ``function(engine, update, step)``, where ``step()`` is the optimizer's;
        - "data": ``function(engine, data) -> data`` gives what this engine, or one that it evaluates, iterates instead;
        - "reduction": ``function(engine, update)``, with several processes only, called when the gradients of a complete window
          are there: it sees to it that they are the mean over the processes, also if the backward did not do it, because this
          process had nothing to learn from.

        Args:
            act: which act.
            function: what performs it.
            by: the handler.
            update: for "window", the name of the update; all by default.
            again: for "step": whether the function calls ``update.again()``, which computes the gradients of the whole window
                once more, at the weights as they are then, and returns its mean loss. The window's batches are kept for it.

        Raises:
            ValueError: if another handler replaces the same act, naming both; for the gradients of an engine that computes none.
        """
        if act not in _ACTS:
            raise ValueError(f"{by!r} replaces {act!r}; it has to be one of {', '.join(_ACTS)}")
        if act == "gradients" and not self.training:
            raise ValueError(f"{by!r} replaces 'gradients', but this engine only evaluates: it computes none")
        if act == "window":
            for target in self.updates if update is None else (self.find_update(update),):
                self.claim(f"the act 'window' of update {target.name!r}", by=by)
                target.window_of = function
                if self.running and self.state.epoch:
                    target.window = function(self.state.epoch)
            return
        self.claim(f"the act {act!r}", by=by)
        if again:
            self.claim(_ONCE, by=by)
            for target in self.updates:
                target.kept = []
        setattr(self, f"replaced_{act}", function)

    def join(self, processes: Processes, *, by: Handler, shares: str = "auto") -> None:
        """Train together with other processes, until the handler is detached.

        From then on, what the processes decide in a run they decide alike, data is shared out, metrics are those of all, and
        handlers with ``rank_zero_only`` take part on rank 0 alone.

        Args:
            processes: what `together` gave.
            by: the handler, which also has to see to it that gradients are reduced (the act "reduction").
            shares: how data is shared out. "deal": the batches of the data, which is the same in each process, are dealt in
                turn, by their indices, or else by reading all of them. "own": each process has data of its own. "auto":
                DataLoaders over map-style datasets and sequences are dealt, unless a sampler has done it; other data is refused.

        Raises:
            ValueError: if another handler does the same, naming both.
        """
        if self.running:
            raise RuntimeError(f"join({processes!r}): not inside a run")
        self.claim(_TOGETHER, by=by)
        self._share_with(processes, shares)

    def _share_with(self, processes: Processes, shares: str) -> None:
        before, self.processes, self._shares = self.processes, processes, shares
        if processes is not before:
            self._pending += [handler for handler in self.handlers.values() if handler.rank_zero_only]
            self._settle()

    def compute_gradients_once(self, *, by: Handler) -> None:
        """Say that a handler cannot do with steps that compute their gradients several times, as closures and SAM do.

        Raises:
            ValueError: if another handler needs just that, naming both; for optimizers with a closure, at the next run.
        """
        self.claim(_ONCE, by=by)

    def _released(self, handler: Handler, claims: list[str]) -> None:
        self._stops.pop(handler.name, None)
        self.state.metrics.withdraw(handler.name)
        for act in ("gradients", "step", "data", "reduction"):
            if f"the act {act!r}" in claims:
                setattr(self, f"replaced_{act}", None)
        if _TOGETHER in claims:
            self._share_with(ALONE, "auto")
        for target in self.updates:
            if _ONCE in claims:
                target.kept = [] if target.optimizer is not None and needs_closure(target.optimizer) else None
            if f"the act 'window' of update {target.name!r}" in claims:
                target.window_of = None
                target.window = 1

    def attempt(self, update: UpdateState, compute: Callable[[], None]) -> bool:
        """Compute gradients; if the memory runs out, put everything back as it was, tell UPDATE_RETRIED and return False.

        Of several processes, all fail if one does; ``compute`` must not reduce over them (``update.completes``).

        What is put back: the gradients that the window holds, buffers, random states, the batch. Regions that the failed attempt
        had entered are closed.
        """
        state = self.state
        batch, held, extra_weight, hidden = state.batch, update.held, update.extra_weight, update.hidden
        weight = update.weight
        gradients = [None if p.grad is None else p.grad.clone() for p in update.parameters]
        modules = [module for root in self.modules.values() for module in root.modules()]
        buffers = [
            (m._buffers, key, b, None if b is None else b.clone()) for m in modules for key, b in m._buffers.items()
        ]
        random = random_state()
        failed = False
        try:
            compute()
        except torch.OutOfMemoryError:
            failed = True  # what the traceback holds has to go before anything is tried again
        if not self.processes.any(failed):
            return True
        state.batch, update.held, update.extra_weight, update.hidden = batch, held, extra_weight, hidden
        update.weight = weight
        update.output = update.raw_loss = update.backward_loss = None
        for parameter, gradient in zip(update.parameters, gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for own, key, buffer, before in buffers:
                if buffer is not None and before is not None:
                    buffer.copy_(before)
                own[key] = buffer  # a forward may have put another tensor in its place
        set_random_state(random)
        self._emit(Events.UPDATE_RETRIED)
        return False

    def share(self) -> float:
        """How much this process's batch counts beside those that other processes were dealt with it.

        1, unless they differ in their number of samples, as the last ones do: then more than 1 for one that has more. With it as
        the weight of the loss, the gradients are those of the batches joined.
        """
        return 1 if self._source is None else self._source.share(self.state.iteration)

    def find_update(self, name: str | None = None) -> UpdateState:
        """The update with this name; the first without one."""
        for update in self.updates:
            if name is None or update.name == name:
                return update
        raise KeyError(f"no update is named {name!r}; there are: {', '.join(update.name for update in self.updates)}")

    # ---- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that is needed to go on: position, modules, optimizers, handlers, random states; all copied.

        Of several processes each has to call it. On rank 0 it is the state of all; on the others, their own, which goes on in the
        same process only.

        Raises:
            RuntimeError: inside an iteration, where half of it would be saved.
        """
        return self._state()

    def _state(self, *, at_once: bool = False) -> dict[str, Any]:
        if self._completed != self.state.iteration:
            raise RuntimeError("state_dict(): not inside an iteration; take it at ITERATION_COMPLETED or later")
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        return gather(self, at_once=at_once)

    def snapshot(self, *, at_once: bool = False) -> dict[str, Any]:
        """The `state_dict` of this event, taken once and shared by everybody who asks in the phase PERSIST of the same event.

        Args:
            at_once: whether it is written, and let go of, before the receiver returns: then tensors need not be copied for it.
        """
        iteration = self.state.iteration
        if not self.running:
            return self._state(at_once=at_once)
        # That of GET_BATCH_STARTED is one iteration older.
        if self._snapshot is None or self._snapshot[0] != iteration or not (at_once or self._snapshot[1]):
            self._attention = True  # it is dropped with the event
            self._snapshot = iteration, not at_once, self._state(at_once=at_once)
        return self._snapshot[2]

    def tell_saved(self) -> None:
        """Emit CHECKPOINT_SAVED; for handlers that have written a checkpoint."""
        snapshot = self._snapshot
        self._emit(Events.CHECKPOINT_SAVED)
        if snapshot is not None and (snapshot[1] or not self.signal(Events.CHECKPOINT_SAVED).receivers):
            self._snapshot = snapshot  # others may still have to write what this event comes to

    def weights(self) -> dict[str, Any]:
        """The states of the modules by name, as they are to be used: with averages in place, where a handler has them.

        Receivers of CHECKPOINT_SAVING may `enter` what puts them there; it is left before this returns.
        """
        outside = self.regions.depth
        was_evaluating, self._evaluating = self._evaluating, True
        try:
            self._emit(Events.CHECKPOINT_SAVING)
            weights = {name: copied(root.state_dict()) for name, root in self.modules.items()}
        except BaseException as error:
            self.regions.close(outside, error)
            raise
        finally:
            self._evaluating = was_evaluating
        self.regions.close(outside)
        return weights

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Put weights in place, and nothing else: what `weights` gave, or the modules' part of a `state_dict`.

        Raises:
            ValueError: for what does not fit the engine's modules, naming it; then nothing was changed.
        """
        parameters = (p for root in self.modules.values() for p in root.parameters())
        weights = read_shards(weights, parameters=parameters, device=self.device)
        weights = weights.get("modules", weights) if "format" in weights else weights
        if set(weights) != set(self.modules):
            raise ValueError(f"load_weights(): weights of {sorted(weights)} for an engine with {sorted(self.modules)}")
        for name, root in self.modules.items():
            own = {key: value.shape for key, value in root.state_dict().items() if isinstance(value, torch.Tensor)}
            given = {key: value.shape for key, value in weights[name].items() if isinstance(value, torch.Tensor)}
            if different := sorted(key for key in own.keys() | given.keys() if own.get(key) != given.get(key)):
                raise ValueError(f"load_weights(): module {name!r} differs in {', '.join(different)}")
        for name, root in self.modules.items():
            root.load_state_dict(spread_over(root, weights[name]))
        self._emit(Events.WEIGHTS_LOADED)

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Iterable[str] = ()) -> None:
        """Continue from a saved state at the next `run`, once the receivers of STARTED have run; at MODEL_SETUP, in this one.

        Args:
            state: what `state_dict` returned, perhaps saved and loaded in between.
            allow: names of handlers that may be in only one of the saved run and this one.

        Raises:
            ValueError: for what is not such a state. What does not fit this engine is an error at the next run, before
                anything is changed.
        """
        if self.running and not self._setting_up:
            raise RuntimeError("load_state_dict(): not inside a run; load before run(), or at MODEL_SETUP")
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            raise ValueError(
                "load_state_dict(): this is not the state of a Signalfire engine, which Engine.state_dict() gives"
            )
        if isinstance(allow, str):
            raise TypeError(f"load_state_dict(allow={allow!r}): give a list of names: [{allow!r}]")
        self._loaded = dict(state)
        self._allowed = frozenset(allow)
        self._held_states.clear()

    @property
    def has_loaded_state(self) -> bool:
        """Whether a state was loaded that is to be put in place at the next run."""
        return self._loaded is not None

    def _begin_lineage(self, origin: Mapping[str, Any] | None) -> None:
        self.run_id = secrets.token_hex(8)
        self.origin = origin

    def reset(self) -> None:
        """Begin anew: counters and handlers as new, optimizers built by factories anew, weights kept.

        An optimizer that was given built keeps its state: there is no knowing how to build it.
        """
        if self.running:
            raise RuntimeError("reset(): not inside a run")
        self._loaded = self._source = self._position = self._stopped_bounds = None
        self._begin_lineage(None)
        self._held_states.clear()
        self.state.restart()
        self._completed = 0
        self.state.metrics.clear()
        for signal in self.signals.all():
            signal.fired = 0
        for update in self.updates:
            if not isinstance(update.spec.optimizer, Optimizer):
                update.optimizer = None
            update.restart()
        for name, handler in self.handlers.items():
            handler.load_state_dict(copy.deepcopy(self._initial[name]))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an Engine can be neither copied nor pickled, since its handlers and receivers belong to it; build another one with "
            "the same function, and give it this one's state_dict()"
        )

    def __repr__(self) -> str:
        kind = "trains" if self.training else "evaluates"
        return f"<Engine {kind} {', '.join(update.name for update in self.updates)}; {len(self.handlers)} handlers>"


def _named_modules(model: nn.Module | Mapping[str, nn.Module] | None) -> dict[str, nn.Module]:
    if model is None:
        return {}
    if isinstance(model, nn.Module):
        return {"model": model}
    if not isinstance(model, Mapping) or not all(isinstance(m, nn.Module) for m in model.values()):
        raise TypeError(f"Engine: model={model!r} has to be a torch module, or a mapping from names to modules")
    return dict(model)
