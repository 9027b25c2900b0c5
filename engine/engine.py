"""The engine: what users call. Its parts do the work; `Loop.iterate` in `loop.py` is the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn

from .acts import Overrides
from .boundary import Boundary
from .bus import Bus, Decorator
from .connection import Phase, Receiver
from .data.feed import Feed
from .distributed.processes import Processes
from .evaluation import evaluate
from .events import AnyEvent, EventEnum
from .findings import Findings, Reports
from .findings.check import check
from .group import Group
from .handler import Handler
from .interval import Interval
from .log import Log
from .loop import Loop
from .modules import Modules, model_of
from .past import Past, Place
from .randomness import check_seed
from .regions import Regions
from .registry import Attachment, Registry
from .replay import Replay
from .signals import Signal
from .snapshots import Snapshots
from .state import State
from .step import IterationSignals
from .streams import Streams, StreamsSetting
from .unfinished import Unfinished
from .update import Update, UpdateState
from .wiring import Wiring

__all__ = ["Engine"]

F = TypeVar("F", bound=Receiver)
H = TypeVar("H", bound=Handler)


class Engine:
    """Runs updates over data and emits an event at every step; every feature is a handler of those events.

    An engine whose updates have no optimizer evaluates: it runs in eval mode without gradients, and each run starts anew.

    Args:
        update: what to do in every iteration, or several updates in order.
        model: a module, or several by name (then ``engine.model`` is a ``ModuleDict`` of them); None if no update needs one.
        seed: the seed of what handlers draw; torch's initial seed by default. It leaves the global generators as they are:
            `seed_everything` seeds them at once, for the model's weights, and `Seeding` when a run begins.
        training: whether to train; by default, if any update has an optimizer.
        streams: "shared": model and data draw from one stream of the global generators, as in a plain PyTorch loop.
            "separate": the generators are reseeded before each epoch's data and each update, for ablations; see `streams.py`.
        allow: codes of findings, such as "W10", that are meant and are not reported; see `findings.py`.

    Attributes:
        state: where the run stands.
        model: what the forward calls, perhaps wrapped or sharded.
        modules: the bare modules by name, for state, averages and optimizers; with the losses that have parameters.
        updates, handlers: the updates at work; the attached handlers by name.
        signals: the blinker namespace of the signals.
        seed, training: as given, or as derived from torch and from the updates.
        findings: what looked wrong in the latest run (`Reports.of_run`).
        log: logs users' own values: ``engine.log("kl", value)``; see `Log`.
        dry_run: whether handlers that write files (`Handler.writes`) are disabled in every run.

    Authors of handlers find more on the parts; `signalfire.handler` lists it.

    Example:
        >>> from functools import partial
        >>> model = torch.nn.Linear(2, 1)
        >>> update = Update.supervised(torch.nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1))
        >>> trainer = Engine(update, model=model, seed=0)
        >>> trainer.run([(torch.ones(4, 2), torch.ones(4, 1))], max_epochs=3).iteration
        3
    """

    streams = StreamsSetting()

    def __init__(
        self,
        update: Update | Sequence[Update],
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        *,
        seed: int | None = None,
        training: bool | None = None,
        streams: Streams = "shared",
        allow: Sequence[str] = (),
    ) -> None:
        specs = _checked_specs(update)
        self.training = _trains(specs, training)
        self.loop: Loop | None = None
        self.findings = Reports(self, allow)
        self.streams = streams
        self.modules = Modules(model, specs)
        self.model: Any = model_of(model, self.modules)
        self.seed: int = torch.initial_seed() if seed is None else check_seed("Engine", seed)
        self.seed_given = seed is not None
        self.dry_run = False
        self.updates = tuple(UpdateState(spec, training=self.training) for spec in specs)
        for one in self.updates:
            one.order_parameters(p for root in self.modules.values() for p in root.parameters())
        self.state = State(self.updates[0])
        self.signals = Bus()
        self.iteration_signals = IterationSignals(self.signals, specs, training=self.training)
        self.regions = Regions()
        self.overrides = Overrides(self)
        self.handlers = Registry(self)
        self.boundary = Boundary(self)
        self.group = Group(self)
        self.feed = Feed(self.state)
        self.snapshots = Snapshots(self)
        self.log, self.past, self.unfinished = Log(self), Past(self), Unfinished(self)

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
        check: bool = True,
    ) -> State:
        """Run up to the first of the given bounds; called again with larger ones, it continues.

        Args:
            data: an iterable of batches: a DataLoader, a list, a generator. None for a run without data. A batch of None is
                skipped. `signalfire.data` says how a resumed run finds its place in it.
            max_epochs, max_iters: up to this epoch or iteration, counted over all runs. Evaluation runs one epoch by default.
            max_steps: up to this many optimizer steps of the first update.
            max_time: up to this much wall-clock time in this call, its start included, such as "15min". No bound saves anything.
            min_epochs, min_iters: `terminate` takes effect only once this many are complete.
            epoch_length: iterations in an epoch. By default the data's length, or until unsized data ends. If it is given,
                the data continues across epochs, and starts again (DATA_EXHAUSTED) when it is exhausted.
            check: whether the first run reports what `check` finds without a batch.

        Returns:
            The state. An error always leaves: with the handler, event, epoch and iteration in its notes, after
            EXCEPTION_RAISED (or INTERRUPTED) and ENDED.

        Raises:
            ValueError: for bounds that make no sense, or data that is empty or shorter than its length.
        """
        if self.running:
            raise RuntimeError("run() was called during a run; to evaluate, call engine.evaluate(evaluator, data)")
        with self.without(*(self.handlers.writers() if self.dry_run else ())):
            given, data = data, self.overrides.data_of(self, data)
            self.state.set_bounds(self.training, data is not None, max_epochs, max_iters, max_steps, max_time, min_epochs,
                                  min_iters, epoch_length)  # fmt: skip
            self.loop = Loop(self, data, epoch_length, check=check, given=given)
            try:
                self.loop.run()
            finally:
                self.loop = None
        return self.state

    def evaluate(
        self, evaluator: Engine, data: Iterable[Any] | None, *, prefix: str = "", inherit: bool = True, **bounds: Any
    ) -> dict[str, Any]:
        """Run an evaluator on data, store what it measures in this engine's metrics, and return it.

        It changes no random stream, no gradient, no module's train or eval flag.

        Args:
            evaluator: an engine that does not train.
            data: its data.
            prefix: put before the names of its metrics.
            inherit: whether its batches are moved and converted, and its precision is, as in this engine: see `inherited`.
            bounds: for ``evaluator.run``.
        """
        return evaluate(self, evaluator, data, prefix=prefix, inherit=inherit, **bounds)

    def terminate(self, reason: str, *, by: str = "user") -> None:
        """Stop the run, inside an iteration without the step that is not made yet; COMPLETED is still emitted.

        Args:
            reason: stored in ``state.stop_reason``.
            by: who asks; the same name may cancel it with `Boundary.withdraw` before it takes effect. See `Boundary.stop`.
        """
        self.boundary.stop(reason, by=by)

    def terminate_epoch(self, reason: str, *, by: str = "user") -> None:
        """End the epoch after this iteration. An open window is discarded; EPOCH_COMPLETED is emitted as usual."""
        self.boundary.end_epoch(reason, by=by)

    @property
    def running(self) -> bool:
        """Whether a run is under way."""
        return self.loop is not None and self.loop.running

    @property
    def processes(self) -> Processes:
        """The ranks that train together; a single process unless a handler has joined a process group."""
        return self.group.processes

    @property
    def device(self) -> torch.device:
        """Where the model's first parameter is; the CPU without a model."""
        first = next((parameter for root in self.modules.values() for parameter in root.parameters()), None)
        return torch.device("cpu") if first is None else first.device

    def find_update(self, name: str | None = None) -> UpdateState:
        """The update with this name; the first without one."""
        names = [update.name for update in self.updates]
        if name is not None and name not in names:
            raise KeyError(f"no update is named {name!r}; there are: {', '.join(names)}")
        return self.updates[0 if name is None else names.index(name)]

    # ---- events ---------------------------------------------------------------------------------------------------

    def signal(self, event: EventEnum) -> Signal:
        """The blinker signal of an event without a filter, whose catalogue is registered."""
        return self.signals.of(event)

    def register_events(self, *catalogues: type[EventEnum]) -> None:
        """Make events of your own known, so that receivers can be connected to them and `fire` can emit them."""
        for catalogue in catalogues:
            self.signals.register(catalogue)

    def fire(self, event: EventEnum) -> None:
        """Emit an event of your own: its receivers run now, in the order of phases."""
        self.signals.fire(self, event)

    def connect(self, event: AnyEvent, receiver: Receiver, *, phase: Phase = Phase.CHANGE, rank: int = 0) -> Attachment:
        """Call ``receiver(engine)`` at an event; the returned handle disconnects it, also as a context manager."""
        return Attachment(self.signals.connect(self, event, receiver, phase, rank))

    def on(self, event: AnyEvent, *, phase: Phase = Phase.CHANGE, rank: int = 0) -> Callable[[F], F]:
        """Decorate a function to be called as ``function(engine)`` at an event, as `Wiring` shows."""
        return Decorator(self, event, phase, rank)

    # ---- handlers -------------------------------------------------------------------------------------------------

    def attach(self, *handlers: Handler) -> Attachment:
        """Attach all of these handlers, or none if one fails; the order never matters for those that come with Signalfire.

        The returned handle detaches them, by ``handle.detach()`` or as a context manager.
        """
        return self.handlers.attach(handlers)

    def detach(self, handler: Handler | str | Receiver) -> None:
        """Detach a handler, by itself or by name, or a function from all of its events; an error if it is not attached."""
        if isinstance(handler, Handler | str):
            self.handlers.detach(handler)
        else:
            self.signals.disconnect(handler)

    def has(self, handler: Handler | str | Receiver, event: EventEnum | None = None) -> bool:
        """Whether a handler, by itself or by name, or a function is attached (at this event, if one is given)."""
        if isinstance(handler, Handler | str):
            return self.handlers.has(handler, event)
        return self.signals.has(handler, event)

    def find(self, kind: type[H]) -> H:
        """The one attached handler of a class, typed as such: ``engine.find(History).table()``.

        Raises:
            KeyError: if there is none or more than one, listing what is attached.
        """
        return self.handlers.of_class(kind)

    def without(self, *names: str) -> AbstractContextManager[None]:
        """Disable these handlers inside the ``with`` block, as if they had never been attached."""
        return self.handlers.without(names)

    def toggle(self, handler: Handler) -> None:
        """Make what is connected agree with ``handler.enabled``; setting ``enabled`` calls this."""
        self.handlers.toggle(handler)

    def wiring(self) -> Wiring:
        """Event, phase, handlers, in the order in which they run; ``print`` it or ``draw`` it."""
        return Wiring(self)

    def check(self, data: Iterable[Any] | None = None, **bounds: Any) -> Findings:
        """What looks wrong about the composition and the data, as a table for ``print``; nothing is trained or changed.

        ``bounds`` are those of `run`; without them, rules about its length are omitted. One batch at most is read.
        """
        return check(self, data, bounds)

    # ---- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that is needed to resume: position, modules, optimizers, handlers, random states; all copied.

        With several ranks each has to call it. On rank 0 it is the state of all; on the others, their own.

        Raises:
            RuntimeError: inside an iteration, where half of it would be saved.
        """
        return self.snapshots.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Iterable[str] = ()) -> None:
        """Put saved weights in place; resume at the next `run` once the receivers of STARTED have run; at MODEL_SETUP, in this.

        An engine that evaluates takes the weights of a trainer's state, and never a position: it evaluates all of its data.

        Args:
            state: what `state_dict` returned, perhaps saved and loaded in between.
            allow: names of handlers that may be in only one of the saved run and this one.

        Raises:
            ValueError: for what is not such a state. What does not fit this engine is an error at the next run, before
                anything is changed.
        """
        self.snapshots.load_state_dict(state, allow=allow)

    def rewind(self, to: int, *, leave_out: int = 0) -> list[Place]:
        """Go back to the end of iteration ``to``, in this run, and leave out the ``leave_out`` batches that follow it.

        At the end of the iteration under way the newest state from before is put back in place, and the run continues from there
        bit for bit as before, up to ``to``; what calls this comes up again, and has to remember it. A handler has to keep states:
        `Rewindable`, or `SpikeGuard`, which calls this itself.

        Returns:
            The batches that are left out.
        """
        return self.past.rewind(to, leave_out=leave_out)

    def replay(self, iteration: int) -> Replay:
        """An iteration of the last run, to be made again: was it the data, or a fault that does not repeat? See `Replay`."""
        return Replay(self, iteration)

    def weights(self) -> dict[str, Any]:
        """The states of the modules by name, as they are to be used: with averages in place, where a handler has them."""
        return self.snapshots.weights()

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Put weights in place, and nothing else: what `weights` or `state_dict` returned, or `handlers.Checkpoint.load`.

        Raises:
            ValueError: for what does not fit the engine's modules, naming it; then nothing was changed.
        """
        self.snapshots.load_weights(weights)

    def reset(self) -> None:
        """Begin anew: counters, handlers and optimizers as new (but for optimizers that were given built), weights kept."""
        if self.running:
            raise RuntimeError("reset() was called during a run; call it between runs")
        for part in (self.snapshots, self.feed, self.boundary, self.state, self.signals, self.past, self.unfinished):
            part.reset()
        for update in self.updates:
            update.reset()
        self.handlers.reset()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an Engine can be neither copied nor pickled; build another, and give it this one's state_dict()"
        )

    def __str__(self) -> str:
        return str(self.wiring())

    def __repr__(self) -> str:
        kind = "trains" if self.training else "evaluates"
        return f"<Engine {kind} {', '.join(update.name for update in self.updates)}; {len(self.handlers)} handlers>"


def _checked_specs(update: Update | Sequence[Update]) -> list[Update]:
    specs = [update] if isinstance(update, Update) else list(update) if isinstance(update, Sequence) else []
    if not specs or not all(isinstance(spec, Update) for spec in specs):
        raise TypeError(
            f"Engine: update={update!r} is not an Update or a sequence of them; for a single function use "
            "Update.from_function(function, optimizer=...)"
        )
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise ValueError(f"Engine: two updates have the same name in {names}; give Update(..., name=)")
    return specs


def _trains(specs: Sequence[Update], training: bool | None) -> bool:
    trains = any(spec.optimizer is not None for spec in specs) if training is None else training
    if trains and (missing := [spec.name for spec in specs if spec.optimizer is None]):
        raise ValueError(f"Engine: update {missing[0]!r} has no optimizer; to train, every update needs one")
    return trains
