"""The base class of every handler: one class, one feature, declared subscriptions.

`signalfire.authoring` has everything that authors of handlers import, and lists the parts of the engine that they use.
"""

from __future__ import annotations

import copy
import os
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from .blame import place_of_user
from .connection import Phase, check_place
from .declarations import Things, check_things
from .events import AnyEvent, resolve
from .seeds import derived_seed
from .settings import check_arguments, plain_arguments

if TYPE_CHECKING:
    from .kernel import Kernel

__all__ = ["Handler", "Made", "Service", "Subscription", "begin_with", "bind", "made", "on"]

M = TypeVar("M", bound=Callable[..., Any])
_Declared = tuple[AnyEvent | str, Phase, int, Things | None, Things | None, bool]


@dataclass(frozen=True, slots=True)
class Subscription:
    """A method declared with `on`, with its event, phase and rank.

    ``event`` is an event, or the name of an attribute of the handler that holds an event or an interval. ``reads`` and
    ``writes`` are names of `declarations.THINGS`; None if nothing is declared. ``repeatable`` is as in `on`.
    """

    method: str
    event: AnyEvent | str
    phase: Phase
    rank: int
    reads: Things | None = None
    writes: Things | None = None
    repeatable: bool = False


def on(
    event: AnyEvent | str,
    *,
    phase: Phase = Phase.CHANGE,
    rank: int = 0,
    reads: Iterable[str] | None = None,
    writes: Iterable[str] | None = None,
    repeatable: bool = False,
) -> Callable[[M], M]:
    """Declare that a handler's method is called as ``method(engine)`` at this event.

    Args:
        event: An event, filtered event or union, or the name of a handler attribute that holds an event or an interval.
        phase: Phase of the event that the method runs in.
        rank: Order within the phase; smaller runs earlier.
        reads, writes: Parts of the run that the method uses and changes, as names of `declarations.THINGS`, such as
            ``["gradients"]``; `Engine.check` then reports receivers whose order is left to chance. If you give one, the other is
            empty; give neither if they are not known.
        repeatable: Whether a call that an error or Ctrl-C cut short leaves nothing behind, so the next run in the same process
            can call the method again for this event. Otherwise that run calls only the following methods, and reports it.

    Raises:
        TypeError, ValueError: for an object that is not an event, and for names that are not in `declarations.THINGS`.

    Example:
        >>> from signalfire import Events, Handler, Phase, on
        >>> class Counter(Handler):
        ...     steps = 0
        ...
        ...     @on(Events.OPTIMIZER_STEP_COMPLETED, phase=Phase.RECORD)
        ...     def count(self, engine):
        ...         self.steps += 1
        >>> Counter.subscriptions[0].method
        'count'
    """
    if not isinstance(event, str):
        resolve(event)  # raises here, where the mistake is
    phase = check_place(f"on({event})", phase, rank)
    known = check_things("on(reads)", reads), check_things("on(writes)", writes)
    if (known[0] is None) != (known[1] is None):
        known = known[0] or frozenset(), known[1] or frozenset()

    def declare(method: M) -> M:
        if isinstance(method, type) or not (callable(method) or isinstance(method, classmethod)):
            raise TypeError(
                f"on({event}): {method!r} is not a method; put the decorator directly above a method of a Handler"
            )
        declared: list[_Declared] = method.__dict__.setdefault("_signalfire_subscriptions", [])
        if any(event == one for one, *_ in declared):
            raise ValueError(
                f"on({event}): {method.__name__} is declared with this event twice, so it would be called twice"
            )
        declared.insert(0, (event, phase, rank, *known, repeatable))  # decorators are applied from the bottom up
        return method

    return declare


@dataclass(slots=True)
class Made:
    """A handler that was made: of which class, by which line of the user's code, in which process."""

    kind: str
    file: str
    line: int
    process: int
    attached: bool = False


made: weakref.WeakKeyDictionary[Handler, Made] = weakref.WeakKeyDictionary()
"""The handlers that write files and were never attached."""


class Handler:
    """Base class of all features that you attach to an engine, detach, or toggle.

    A subclass declares its subscriptions with `on`, and calls ``super().__init__`` only if it takes a ``name``. A handler is
    attached to at most one engine. Attached to a different engine later, it restarts from the state that it had when it was first
    attached; attached to the same engine again, it keeps its state.

    If attached during a run, it joins at the next iteration boundary without an open window, and its STARTED and EPOCH_STARTED
    methods are called there; if detached during a run, its ENDED methods are called. Handlers draw random numbers from
    `generator`, never from the global generators.

    Attributes:
        subscriptions: The subscriptions that the class declares, in the order of its methods.
        trains: Whether the handler can only be attached to an engine that trains.
        writes: Whether the handler writes files or sends data elsewhere; a dry run disables it then.
        decides_alike: Whether it skips steps and requests stops based only on values that are equal on all ranks (counters,
            reduced gradients, weights, metrics), so the ranks need not synchronize the decision.
        other_names: Names of its arguments in other libraries, mapped to the names here, for errors about unknown arguments.
        rank_zero_only: Whether the handler takes part on rank 0 only, as loggers and progress bars do.
        device_features: Device features that it needs beyond tensor operations; an instance may need fewer than its class. If the
            model's device lacks one (see `devices.TABLE`), the run raises an error before the first batch.
        capture: How a CUDA graph of the step treats its operations within the step; None if it is not known.
    """

    subscriptions: ClassVar[tuple[Subscription, ...]] = ()
    trains: ClassVar[bool] = False
    writes: bool = False
    decides_alike: ClassVar[bool] = False
    other_names: ClassVar[Mapping[str, str]] = {}
    rank_zero_only: ClassVar[bool] = False
    device_features: frozenset[Any] = frozenset()
    capture: Any = None
    _name: str | None = None
    _enabled: bool = True
    _engine: weakref.ref[Kernel] | None = None
    _generators: dict[str, torch.Generator] | None = None
    _home: weakref.ref[Kernel] | None = None  # the engine that its state comes from
    _initial: dict[str, Any] | None = None  # its state when it was first attached
    _arguments: Mapping[str, Any] = {}

    def __new__(cls, /, *args: Any, **kwargs: Any) -> Self:
        handler = super().__new__(cls)
        handler._arguments = plain_arguments(cls, args, kwargs)
        if kwargs and not handler._arguments:
            check_arguments(cls, kwargs, cls.other_names)
        if cls.writes:
            made[handler] = Made(type(handler).__name__, *place_of_user(), os.getpid())
        return handler

    def __init__(self, *, name: str | None = None) -> None:
        if name is not None and (not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]+", name)):
            raise ValueError(
                f"{type(self).__name__}: name={name!r}: expected only ASCII letters, digits, '_', '-' and '.'"
            )
        self._name = name

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        declared: dict[str, list[_Declared]] = {}
        for base in reversed(
            cls.__mro__
        ):  # an overriding method inherits the subscriptions, unless it declares its own
            for method, function in vars(base).items():
                if isinstance(own := getattr(function, "_signalfire_subscriptions", None), list):
                    declared[method] = own
        cls.subscriptions = tuple(Subscription(method, *one) for method, several in declared.items() for one in several)

    @property
    def name(self) -> str:
        """Name to find, toggle and save the handler by; by default the class name in snake case."""
        return (
            self._name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(self).__name__).lower()
        )

    @name.setter
    def name(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}.name cannot be set; pass it to super().__init__(name={name!r})")

    @property
    def enabled(self) -> bool:
        """Whether the handler is active. A disabled handler leaves the run the same as without it.

        During a run, a change takes effect for all subscriptions at the next iteration boundary without an open window. The flag
        is not saved: a script that toggles handlers during a run must toggle them again after a load (CHECKPOINT_LOADED).
        """
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        if enabled is not True and enabled is not False:
            raise TypeError(f"{type(self).__name__}.enabled = {enabled!r}: expected True or False")
        before, self._enabled = self._enabled, enabled
        if self._enabled != before and (engine := self.engine) is not None:
            try:
                engine.toggle(self)
            except BaseException:
                self._enabled = before
                raise

    @property
    def engine(self) -> Any:
        """The engine that the handler is attached to, or None. The reference is weak, so both are freed together."""
        return None if self._engine is None else self._engine()

    @engine.setter
    def engine(self, engine: object) -> None:
        raise AttributeError(
            f"{type(self).__name__}.engine cannot be set, because it is the engine that the handler is attached to; "
            "rename your attribute"
        )

    def attached(self, engine: Any) -> None:
        """Called when the handler joins: check the engine, and register overrides with `Overrides.replace`."""

    def detached(self, engine: Any) -> None:
        """Called when the handler leaves: undo what `attached` changed."""

    def rehearse(self, engine: Any) -> None:
        """Called at the end of a `FastDevRun`: act once if the handler's interval was longer than its few batches."""

    def state_dict(self) -> dict[str, Any]:
        """The state that an exact resume needs, in types that ``torch.load(weights_only=True)`` accepts."""
        return {}

    def sync_written(self) -> None:
        """Flush files that `state_dict` refers to; called before a checkpoint that must survive a power failure is written."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state:
            raise ValueError(
                f"{self.name!r} ({type(self).__name__}) has no state to load, but the saved state holds {sorted(state)}"
            )

    def settings(self) -> Mapping[str, Any]:
        """Settings whose changes a resumed run reports: numbers, strings and lists of them.

        By default these are the handler's arguments. Leave out those that do not affect the weights.
        """
        return self._arguments

    def parameter_copies(self) -> Mapping[str, Tensor]:
        """Copies of parameters that the handler keeps, such as averages, by module and name: "model.0.weight".

        Permanent changes that other handlers make to the weights, such as setting some to zero, apply to these as well.
        """
        return {}

    def metric_names(self, engine: Any) -> Iterable[str]:
        """Names of the metrics that the handler writes, as far as they are known before a run; for `Engine.check`."""
        return [name for name, owner in engine.state.metrics.owners.items() if owner == self.name]

    def findings(self, engine: Any) -> Iterable[Any]:
        """Report problems of this handler in this setup; called by `Engine.check`, and when the first run starts.

        The bounds of the run are in ``engine.state`` as far as they are known, and `planning` derives the length of the run from
        them. The method must not change anything.

        Example:
            >>> from signalfire.findings import finding
            >>> class Warmup(Handler):
            ...     steps = 500
            ...
            ...     def findings(self, engine):
            ...         if (engine.state.max_steps or self.steps) < self.steps:
            ...             yield finding(
            ...                 "C17", "the warm-up is longer than the run", "shorten it", [self.name]
            ...             )
        """
        return ()

    def generator(
        self, engine: Any, device: torch.device | str = "cpu", *, of_rank: int | None = None
    ) -> torch.Generator:
        """A generator for this handler's random numbers in this iteration.

        Each call returns a freshly seeded generator; call it once per iteration. The seed depends only on the run's seed, the
        handler's name, the iteration and, if given, the rank. So no state has to be saved, and other handlers do not change the
        numbers.

        Args:
            engine: The running engine.
            device: Device that the random numbers are drawn on.
            of_rank: The rank, if the numbers should differ between ranks; None gives all ranks the same. Numbers of a step's
                shards always differ.
        """
        if self._generators is None:
            self._generators = {}
        generator = self._generators.get(str(device))
        if generator is None:
            generator = self._generators[str(device)] = torch.Generator(device)
        rank = (engine.state.shard or None) if of_rank is None else of_rank
        parts = (engine.seed, self.name, engine.state.iteration, *(() if rank is None else (rank,)))
        return generator.manual_seed(derived_seed(*parts))

    def __getstate__(self) -> dict[str, Any]:
        """A copied or unpickled handler is not attached."""
        return {key: value for key, value in vars(self).items() if key not in ("_engine", "_generators", "_home")}

    def __repr__(self) -> str:
        off = "" if self._enabled else ", disabled"
        return f"<{type(self).__name__} {self.name!r}{off}>"


def bind(handler: Handler, engine: Kernel | None) -> None:
    """Set the engine that a handler is attached to; for the engine's registry."""
    handler._engine = None if engine is None else weakref.ref(engine)
    if engine is not None and (found := made.pop(handler, None)) is not None:
        found.attached = True


class Service(Handler):
    """A handler that an engine installs itself: it is found by its name, and neither listed, saved nor shown.

    Attributes:
        essential: whether runs depend on it, so that it can be neither disabled nor detached.
    """

    essential: ClassVar[bool] = False


def begin_with(handler: Handler, engine: Any) -> dict[str, Any]:
    """The state that a handler has as new; one that comes from another engine is put back to it."""
    initial = handler._initial
    if initial is None:
        initial = handler._initial = copy.deepcopy(handler.state_dict())
    elif (handler._home is None or handler._home() is not engine) and (initial or handler.state_dict()):
        handler.load_state_dict(copy.deepcopy(initial))
    handler._home = weakref.ref(engine)
    return initial
