"""The base class of every handler: one class, one feature, declared subscriptions."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from .bus import Phase
from .events import AnyEvent, resolve
from .randomness import derived_seed

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Handler", "Subscription", "bind", "on"]

M = TypeVar("M", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Subscription:
    """A declared wish to be called: which method, at which event, in which phase.

    ``event`` is an event, or the name of the handler's attribute that holds one, or an interval.
    """

    method: str
    event: AnyEvent | str
    phase: Phase
    rank: int


def on(event: AnyEvent | str, *, phase: Phase = Phase.CHANGE, rank: int = 0) -> Callable[[M], M]:
    """Declare that a handler's method is called as ``method(engine)`` at this event.

    Args:
        event: an event, filtered or a union, or the name of an attribute of the handler that holds an event or an interval.
        phase: when the method runs within the event.
        rank: its place within the phase; smaller runs earlier.

    Example:
        >>> from signalfire import Events, Handler, Phase, on
        >>> class Counter(Handler):
        ...     steps = 0
        ...     @on(Events.OPTIMIZER_STEP_COMPLETED, phase=Phase.RECORD)
        ...     def count(self, engine):
        ...         self.steps += 1
        >>> Counter.subscriptions[0].method
        'count'
    """
    if not isinstance(event, str):
        resolve(event)  # a mistake shows where it is written
    phase = Phase(phase)

    def declare(method: M) -> M:
        declared: list[tuple[AnyEvent | str, Phase, int]] = method.__dict__.setdefault("_signalfire_subscriptions", [])
        declared.insert(0, (event, phase, rank))  # decorators apply from the bottom up; read them from the top down
        return method

    return declare


class Handler:
    """A feature that can be attached to an engine, detached from it, and toggled.

    A subclass declares with `on` what it subscribes to. It need not call ``super().__init__`` unless it takes a ``name``.
    A handler belongs to one engine at a time. Attached to a running engine, it joins at the next iteration boundary without
    an open window, and its own STARTED and EPOCH_STARTED methods are called then; one that leaves a running engine gets its
    ENDED. It never draws from the global random generators: `generator` gives it one of its own.

    Attributes:
        subscriptions: what the class declared, in the order of its methods.
        trains: whether the handler only makes sense on an engine that trains.
        writes: whether the handler writes files or sends something away, so that a dry run does without it.
        decides_alike: whether, of several processes, it decides the same in each when the gradients are ready, because it looks
            at nothing but what is the same in all of them: counters, reduced gradients, weights, metrics. Then the processes need
            not ask each other whether it skips the step.
        rank_zero_only: of several processes, only that of rank 0 has the handler take part, as for logs and progress bars.
    """

    subscriptions: ClassVar[tuple[Subscription, ...]] = ()
    trains: ClassVar[bool] = False
    writes: bool = False
    decides_alike: ClassVar[bool] = False
    rank_zero_only: ClassVar[bool] = False
    _name: str | None = None
    _enabled: bool = True
    _engine: weakref.ref[Engine] | None = None
    _generators: dict[str, torch.Generator] | None = None

    def __init__(self, *, name: str | None = None) -> None:
        if name is not None and (not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]+", name)):
            raise ValueError(
                f"{type(self).__name__}: name={name!r} has to consist of letters, digits, '_', '-' and '.'"
            )
        self._name = name

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        declared: dict[str, list[tuple[AnyEvent | str, Phase, int]]] = {}
        for base in reversed(
            cls.__mro__
        ):  # a method that overrides a subscribed one stays subscribed, unless it says anew
            for method, function in vars(base).items():
                if isinstance(own := getattr(function, "_signalfire_subscriptions", None), list):
                    declared[method] = own
        cls.subscriptions = tuple(Subscription(method, *one) for method, several in declared.items() for one in several)

    @property
    def name(self) -> str:
        """By which the handler is found, toggled and saved; the class's name in snake case unless given."""
        return (
            self._name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(self).__name__).lower()
        )

    @name.setter
    def name(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}.name cannot be set: give it to super().__init__(name={name!r})")

    @property
    def enabled(self) -> bool:
        """Whether the handler takes part. Off, the run is what it would be without the handler.

        Changed inside a run, all of its subscriptions change together, at the next iteration boundary without an open window.
        It is no part of a saved state: who resumes a run says what takes part in it. A run that switches handlers as it goes
        does so again after a load (CHECKPOINT_LOADED).
        """
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        before, self._enabled = self._enabled, bool(enabled)
        if self._enabled != before and (engine := self.engine) is not None:
            try:
                engine.toggle(self)
            except BaseException:
                self._enabled = before
                raise

    @property
    def engine(self) -> Engine | None:
        """The engine that the handler is attached to. Held weakly: engine and handlers are freed together."""
        return None if self._engine is None else self._engine()

    @engine.setter
    def engine(self, engine: object) -> None:
        raise AttributeError(
            f"{type(self).__name__}.engine cannot be set: it is the engine that the handler is attached to; name an attribute of "
            "your own otherwise"
        )

    def attached(self, engine: Engine) -> None:
        """Called when the handler takes part from now on: check what is known already, and `Engine.replace` acts."""

    def detached(self, engine: Engine) -> None:
        """Called when the handler takes no part any more: put back what `attached` changed."""

    def state_dict(self) -> dict[str, Any]:
        """What has to be saved to go on as if the run had not been stopped; only types that a safe load accepts."""
        return {}

    def sync_written(self) -> None:
        """Have on the disk what `state_dict` tells of; called before a state is written that is to outlive a power failure."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        if state:
            raise ValueError(
                f"{self.name!r} ({type(self).__name__}) has no state to load, but was given {sorted(state)}"
            )

    def generator(
        self, engine: Engine, device: torch.device | str = "cpu", *, of_rank: int | None = None
    ) -> torch.Generator:
        """A generator for this handler's draws in this iteration.

        Its seed depends on the run's seed, the handler's name and the iteration (and the rank, if given) alone, so that
        there is no state to save, and switching another handler on or off shifts no number here.

        Args:
            engine: the running engine.
            device: where the draws are used.
            of_rank: give the process's rank if the draws should differ between ranks.
        """
        if self._generators is None:
            self._generators = {}
        generator = self._generators.get(str(device))
        if generator is None:
            generator = self._generators[str(device)] = torch.Generator(device)
        parts = (engine.seed, self.name, engine.state.iteration, *(() if of_rank is None else (of_rank,)))
        return generator.manual_seed(derived_seed(*parts))

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle of a handler is attached to nothing."""
        return {key: value for key, value in vars(self).items() if key not in ("_engine", "_generators")}

    def __repr__(self) -> str:
        off = "" if self._enabled else ", disabled"
        return f"<{type(self).__name__} {self.name!r}{off}>"


def bind(handler: Handler, engine: Engine | None) -> None:
    """Say which engine a handler is attached to; for the engine's registry."""
    handler._engine = None if engine is None else weakref.ref(engine)
