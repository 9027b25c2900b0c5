"""The kernel of an engine: the loop, the bus, the registry and their parts. It knows none of the rooms beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Never, TypeVar

import torch
from torch import nn

from .boundary import Boundary
from .bus import Bus, Decorator
from .connection import Phase, Receiver
from .events import AnyEvent, EventEnum, Lifecycle
from .feed import PlainFeed
from .handler import Handler
from .iteration import IterationSignals
from .overrides import Overrides
from .regions import Regions
from .registry import Attachment, Registry
from .run import Run
from .signals import Signal
from .single_process import SingleProcess
from .state import State
from .update import UpdateState

__all__ = ["Kernel"]

F = TypeVar("F", bound=Receiver)
H = TypeVar("H", bound=Handler)
_ONE = (Handler, str, Mapping)  # what `attach` takes as one handler, though it may be iterable


class Kernel:
    """Runs updates over data and emits an event at every step; every feature is a handler of those events.

    The kernel is complete without the rooms that users expect, which `Engine` adds.
    """

    current_run: Run | None = None

    def __init__(
        self,
        update: Any,
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        *,
        seed: int | None = None,
        training: bool | None = None,
    ) -> None:
        specs = list(update) if isinstance(update, Sequence) else [update]
        self.training = _trains(specs, training)
        self.modules = self._modules_of(model, specs)
        self.model: Any = model
        self.seed: int = torch.initial_seed() if seed is None else seed
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
        self._furnish()

    def _modules_of(self, model: Any, specs: Sequence[Any]) -> dict[str, nn.Module]:
        return {} if model is None else dict(model) if isinstance(model, Mapping) else {"model": model}

    def event_of(self, every: AnyEvent) -> AnyEvent:
        """The event of a handler's attribute that holds an event; rooms also accept intervals."""
        return every

    def seconds_in(self, max_time: Any) -> float | None:
        """The seconds of `run`'s ``max_time``; rooms also accept intervals."""
        seconds: float | None = max_time
        return seconds

    def _misuse(self, unnamed: Sequence[Any], unknown: Iterable[str]) -> str:
        """The error for arguments that `run` does not take; rooms also suggest the right ones."""
        return f"run() takes the data by position and all bounds by keyword, but was also given {[*unnamed, *unknown]}"

    def _furnish(self) -> None:
        self.boundary = Boundary(self)
        self.group = SingleProcess(self)
        self.feed = PlainFeed(self.state)

    def run(
        self,
        data: Iterable[Any] | None = None,
        *unnamed: Never,
        max_epochs: int | None = None,
        max_iters: int | None = None,
        max_steps: int | None = None,
        max_time: Any = None,
        min_epochs: int = 0,
        min_iters: int = 0,
        epoch_length: int | None = None,
        check: bool = True,
        **unknown: Never,
    ) -> State:
        """Run up to the first of the given bounds; called again with larger ones, it continues.

        Args:
            data: an iterable of batches: a DataLoader, a list, a generator. None for a run without data. A batch of None is
                skipped. `signalfire.data` explains how a resumed run finds its place in the data.
            max_epochs, max_iters: up to this epoch or iteration, counted over all runs. Evaluation runs one epoch by default.
            max_steps: up to this many optimizer steps of the first update.
            max_time: up to this much wall-clock time in this call, its start included, such as "15min". No bound saves a
                checkpoint.
            min_epochs, min_iters: `terminate` takes effect only once this many are complete.
            epoch_length: iterations in an epoch; by default the data's length, or until unsized data ends. If given, the data
                continues across epochs, and restarts (DATA_EXHAUSTED) when it is exhausted.
            check: whether the first run reports what `check` finds without a batch.

        Returns:
            The state.

        Raises:
            ValueError: for invalid bounds, or data that is empty or shorter than its length.
            Exception: any error in a handler, the model or the data, after EXCEPTION_RAISED (or INTERRUPTED) and ENDED were
                emitted. Its notes name the handler, the event, the epoch and the iteration.
        """
        if unnamed or unknown:
            raise TypeError(self._misuse(unnamed, unknown))
        if self.running:
            raise RuntimeError("run() was called during a run; to evaluate, call engine.evaluate(evaluator, data)")
        with self.without(*(self.handlers.writers() if self.dry_run else ())):
            given, data = data, self.overrides.data_of(self, data)
            self.state.set_bounds(self.training, data is not None, max_epochs, max_iters, max_steps, self.seconds_in(max_time),
                                  min_epochs, min_iters, epoch_length)  # fmt: skip
            self.current_run = Run(self, data, epoch_length, check=check, given=given)
            try:
                self.current_run.run()
            finally:
                self.current_run = None
        return self.state

    def terminate(self, reason: str, *, by: str = "user") -> None:
        """Stop the run at the end of this iteration, whose remaining steps are skipped, or before the next one. An iteration in
        which no update has started does not run. TERMINATED and COMPLETED are emitted as usual.

        Args:
            reason: stored in ``state.stop_reason``.
            by: who asks; the same name may cancel it with `Boundary.withdraw` before it takes effect. See `Boundary.stop`.
        """
        self.boundary.stop(reason, by=by)

    def terminate_epoch(self, reason: str, *, by: str = "user") -> None:
        """End the epoch after this iteration; an iteration in which no update has started does not run. An open accumulation
        window is discarded, and EPOCH_COMPLETED is emitted as usual."""
        self.boundary.end_epoch(reason, by=by)

    @property
    def running(self) -> bool:
        """Whether a run is in progress."""
        return self.current_run is not None and self.current_run.running

    def find_update(self, name: str | None = None) -> UpdateState:
        """The update with this name; without a name, the first update."""
        names = [update.name for update in self.updates]
        if name is not None and name not in names:
            raise KeyError(f"no update is named {name!r}; the updates are {', '.join(names)}")
        return self.updates[0 if name is None else names.index(name)]

    def signal(self, event: EventEnum) -> Signal:
        """The blinker signal of an event without a filter, whose catalogue is registered."""
        return self.signals.of(event)

    def register_events(self, *catalogues: type[EventEnum]) -> None:
        """Register your own events, so receivers can be connected to them and `fire` can emit them."""
        for catalogue in catalogues:
            self.signals.register(catalogue)

    def fire(self, event: EventEnum) -> None:
        """Emit your own event; its receivers run now, in the order of phases."""
        self.signals.fire(self, event)

    def remark(self, code: str, sentence: str, way_out: str, *handlers: str, **how: Any) -> None:
        """Report something that looks wrong but may be intended; see `Reports.report`."""
        self.signals.notify(self, Lifecycle.REMARKED, code, sentence, way_out, handlers, how)

    def connect(self, event: AnyEvent, receiver: Receiver, *, phase: Phase = Phase.CHANGE, rank: int = 0) -> Attachment:
        """Call ``receiver(engine)`` at an event; the returned handle disconnects it, also as a context manager."""
        return Attachment(self.signals.connect(self, event, receiver, phase, rank))

    def on(self, event: AnyEvent, *, phase: Phase = Phase.CHANGE, rank: int = 0) -> Callable[[F], F]:
        """Decorate a function to be called as ``function(engine)`` at an event, as `Wiring` shows."""
        return Decorator(self, event, phase, rank)

    def attach(self, *handlers: Handler | Iterable[Handler]) -> Attachment:
        """Attach all of these handlers, or none if one fails; the order never matters for handlers that come with Signalfire.

        An iterable, such as a list, stands for the handlers in it. The returned handle detaches them, by ``handle.detach()`` or
        as a context manager.
        """
        given: Any = [[one] if isinstance(one, _ONE) or not isinstance(one, Iterable) else one for one in handlers]
        return self.handlers.attach([handler for several in given for handler in several])

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
        """The only attached handler of a class, typed as this class: ``engine.find(History).table()``.

        Raises:
            KeyError: if there is none or more than one, listing what is attached.
        """
        return self.handlers.of_class(kind)

    def without(self, *names: str) -> AbstractContextManager[None]:
        """Disable these handlers inside the ``with`` block, as if they had never been attached."""
        return self.handlers.without(names)

    def toggle(self, handler: Handler) -> None:
        """Connect or disconnect a handler according to ``handler.enabled``; setting ``enabled`` calls this."""
        self.handlers.toggle(handler)


def _trains(specs: Sequence[Any], training: bool | None) -> bool:
    trains = any(spec.optimizer is not None for spec in specs) if training is None else training
    if trains and (missing := [spec.name for spec in specs if spec.optimizer is None]):
        raise ValueError(f"Engine: update {missing[0]!r} has no optimizer; to train, every update needs an optimizer")
    return trains
