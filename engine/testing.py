"""Checks of the guarantees that every handler gives, for built-in and custom handlers.

from signalfire.testing import check_handler

def test_my_handler_gives_its_guarantees():
    check_handler(build, lambda: MyHandler(), data, max_epochs=3)
"""

from __future__ import annotations

import hashlib
import io
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from .authoring.interval import event_of
from .authoring.plugins import find_handler
from .authoring.randomness import random_state, seed_everything
from .core.connection import Phase
from .core.events import Events, resolve
from .core.handler import Handler
from .distributed.sharded import local_part
from .engine import Engine
from .findings import allow
from .findings.connected import never_called
from .resuming.keys import UNSAVED

__all__ = ["check_handler", "fingerprint", "trace"]

Build = Callable[[], Engine]


def fingerprint(engine: Engine, *, handlers: bool = True) -> dict[str, str]:
    """Compute a sha256 of each part of an engine's state; equal fingerprints mean bitwise equal states, of this rank's shards.

    Args:
        engine: Engine after a run.
        handlers: Whether to include the states of the handlers.
    """
    return {name: _digest(part) for name, part in _parts(engine, handlers=handlers).items()}


def _parts(engine: Engine, *, handlers: bool) -> dict[str, Any]:
    state = engine.state_dict()
    parts = {f"modules.{name}": part for name, part in state["modules"].items()}
    parts |= {f"updates.{name}": part for name, part in state["updates"].items()}
    parts |= {
        "engine": {key: value for key, value in state["engine"].items() if key != "fired"},
        "random": state["random"],
    }
    if handlers:
        parts |= {f"handlers.{name}": part for name, part in state["handlers"].items()}
    return parts


def trace(engine: Engine) -> list[tuple[str, int, int]]:
    """Record (event, epoch, iteration) for every event that the engine emits from now on."""
    seen: list[tuple[str, int, int]] = []
    for event in Events:

        def record(engine: Engine, event: Events = event) -> None:
            seen.append((event.name, engine.state.epoch, engine.state.iteration))

        engine.connect(event, record, phase=Phase.PREPARE)
    return seen


def check_handler(
    build: Build,
    make: Callable[[], Handler] | str,
    data: Iterable[Any],
    *,
    changes_training: bool = True,
    draws: bool = False,
    uncalled: Iterable[str] = (),
    per_run: Iterable[str] = (),
    **bounds: Any,
) -> str:
    """Assert that a handler subscribes to events, has no effect when disabled, resumes exactly, and cleans up after an error.

    A resumed run is compared after each iteration by its metrics and the handler's state. At its end, weights, optimizers,
    metrics, the states of handlers and certain attributes of the handler are compared: numbers, strings, tensors and containers
    of these that are the same in two equal runs. This reveals attributes that the state lacks, even if nothing depends on them
    yet. Choose data and bounds that call each receiver. The runs use one torch thread, since the tensors of a test are small.

    Args:
        build: Function that builds a new, identical engine on each call.
        make: Function that returns a new handler on each call; or the name of a handler without required arguments that an
            installed package registers (an entry point of the group ``signalfire.handlers``).
        data: Data to run on; it must yield the same batches each time it is iterated after ``seed_everything(0)``.
        changes_training: Whether the handler may change the result of the training.
        draws: Whether the handler's methods may draw from the global random generators, or seed them, as `handlers.Seeding` does;
            others draw from `Handler.generator`.
        uncalled: Names of methods that need not be called in these runs. Methods whose events are not emitted need not be listed.
        per_run: Names of attributes that restart in a resumed run, such as its start time.
        bounds: Bounds for `Engine.run`; use more than one epoch, so the check can resume.

    Returns:
        A summary to print: the number of runs, and the guarantees that hold.

    Raises:
        AssertionError: naming the broken guarantee and the part that differs.
        TypeError: for an engine in place of ``build``, or a handler in place of ``make``.

    Example:
        >>> from functools import partial
        >>> from signalfire import Update
        >>> from signalfire.handlers import GradientClipping
        >>> def build():
        ...     torch.manual_seed(0)
        ...     update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        ...     return Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> data = [(torch.ones(4, 2), torch.ones(4, 1))] * 2
        >>> print(check_handler(build, partial(GradientClipping, 1.0), data, max_epochs=2))
        gradient_clipping: 14 runs
        - after it is detached, or while it is disabled, a run equals one without it
        - two runs with the same seed are equal
        - attached to a different engine, it starts in its initial state
        - every receiver whose event is emitted is called
        - resumed after iterations 1, 2, 3, 4, the run equals an uninterrupted run
        - after an error, no region is open, and detaching removes all receivers
    """
    if isinstance(make, str):
        make = find_handler(make)
    if isinstance(build, Engine) or not callable(build):
        raise TypeError(
            f"check_handler(build={build!r}): expected a function that builds a new, identical engine on each call"
        )
    if not callable(make):
        raise TypeError(
            f"check_handler(make={make!r}): expected a function that returns a new handler on each call, or a class"
        )
    check = _Check(build, make, data, bounds, per_run=frozenset(per_run))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # W10: a handler of evaluators runs for several epochs here, so that there is something to resume.
        # W41, W44: what they report fails a check here.
        with allow("W10", "W41", "W44"):
            return check.all(frozenset(uncalled), changes_training=changes_training, draws=draws)
    finally:
        torch.set_num_threads(threads)


class _Check:
    """The checks of one handler; each raises an AssertionError that names the broken guarantee.

    Args:
        build, make, data, bounds, per_run: As for `check_handler`.
    """

    def __init__(
        self,
        build: Build,
        make: Callable[[], Handler],
        data: Iterable[Any],
        bounds: dict[str, Any],
        *,
        per_run: frozenset[str],
    ) -> None:
        self.build = build
        self.make = make
        self.data = data
        self.bounds = bounds
        self.name = make().name
        self.runs = 0
        self._per_run = per_run
        self._called: set[str] = set()  # methods
        self._subscribed: dict[str, str] = {}  # methods, with their events
        self._drawing: set[str] = set()  # methods that draw from the global generators
        self._expected: set[str] = set()  # methods whose events were emitted
        self._attributes: dict[str, str] = {}  # of the handler after a run, if two runs agree on them

    def all(self, uncalled: frozenset[str], *, changes_training: bool, draws: bool) -> str:
        """Make all checks; returns what held."""
        plain = self.plain()
        self.called()
        self.absent(plain)
        whole = self.repeated(plain, changes_training=changes_training, draws=draws)
        effect = "" if changes_training else ", and train like a run without the handler"
        if changes_training and all(
            whole.get(path) == leaf for path, leaf in plain.items() if path.startswith("modules.")
        ):
            effect = ", and end with the same weights as without the handler"
        resumed = self.resumed(whole)
        self.moved(whole)
        self.failed()
        silent = self.reached(uncalled)
        held = [
            "after it is detached, or while it is disabled, a run equals one without it",
            f"two runs with the same seed are equal{effect}",
            "attached to a different engine, it starts in its initial state",
            f"every receiver whose event is emitted is called{silent}",
            f"resumed after iterations {', '.join(map(str, resumed))}, the run equals an uninterrupted run",
            "after an error, no region is open, and detaching removes all receivers",
        ]
        return "\n- ".join([f"{self.name}: {self.runs} runs", *held])

    def engine(self) -> Engine:
        """A new engine with a new handler."""
        engine, handler = self.build(), self.make()
        for name in {one.method for one in handler.subscriptions}:
            function = getattr(handler, name).__func__
            vars(handler)[name] = MethodType(self._noting(name, function), handler)
        engine.attach(handler)
        return engine

    def _noting(self, name: str, method: Callable[[Handler, Engine], None]) -> Callable[[Handler, Engine], None]:
        @wraps(method)
        def noted(handler: Handler, engine: Engine) -> None:
            self._called.add(name)
            before = _digest(random_state())
            method(handler, engine)
            if _digest(random_state()) != before:
                self._drawing.add(name)

        return noted

    def _expect(self, engine: Engine) -> None:
        """Note in a run which of the handler's receivers ought to be called."""
        handler = engine.handlers[self.name]
        for one in handler.subscriptions:
            event = getattr(handler, one.event) if isinstance(one.event, str) else one.event
            if event is None:
                continue
            self._subscribed.setdefault(one.method, str(event))

            def note(engine: Engine, method: str = one.method) -> None:
                self._expected.add(method)

            for plain in dict.fromkeys(plain for plain, _ in resolve(event_of(event))):
                engine.connect(plain, note)

    def run(self, engine: Engine, seed: int = 0) -> Engine:
        """Run an engine with the global generators seeded."""
        self.runs += 1
        seed_everything(seed)
        # Runs are short here, evaluators run for several epochs, and what is not saved is found by comparing.
        with allow("W10", "W47", "W55"):
            engine.run(self.data, **self.bounds)
        return engine

    def plain(self) -> dict[str, str]:
        """The fingerprint of a run without the handler, which must depend only on the seed."""
        plain = _leaves(self.run(self.build()), handlers=False)
        again = _leaves(self.run(self.build()), handlers=False)
        _same(
            plain,
            again,
            "two runs without the handler differ, so build() or the data is not deterministic; seed every generator "
            "that they use",
        )
        return plain

    def called(self) -> None:
        """The handler subscribes to something, or overrides something, and no method lacks its `on`."""
        never = never_called(self.make())
        assert never is None, "; ".join(never or ())

    def absent(self, plain: dict[str, str]) -> None:
        """After attach and detach, or while disabled, the handler has no effect on the run."""
        engine = self.build()
        before = _receivers(engine)
        engine.attach(self.make()).detach()
        _same(before, _receivers(engine), f"{self.name}: attaching and detaching it leaves receivers behind")
        after = _leaves(self.run(engine), handlers=False)
        _same(plain, after, f"{self.name}: attaching and detaching it changes the run")
        engine = self.engine()
        with engine.without(self.name):
            _same(before, _receivers(engine), f"{self.name}: it leaves receivers behind while disabled")
            after = _leaves(self.run(engine), handlers=False)
            _same(plain, after, f"{self.name}: it changes the run while disabled")

    def repeated(self, plain: dict[str, str], *, changes_training: bool, draws: bool) -> dict[str, str]:
        """Two runs with the same seed are equal, and an observer changes nothing; returns the fingerprint of a run."""
        engine, again = self.engine(), self.engine()
        self._expect(engine)
        whole = _leaves(self.run(engine))
        _same(whole, _leaves(self.run(again)), f"{self.name}: two runs with the same seed differ")
        of_both = (_flat("", vars(one.handlers[self.name])) for one in (engine, again))
        self._attributes = dict(set.intersection(*(set(one.items()) for one in of_both)))
        if not changes_training:
            without = {path: leaf for path, leaf in whole.items() if path in plain and not path.startswith("engine.")}
            _same(
                {path: plain[path] for path in without},
                without,
                f"{self.name}: it changes training. Draw random numbers from self.generator(engine), and do not "
                "change the batch, the gradients or the weights; if the handler is meant to change training, set "
                "changes_training=True",
            )
        assert draws or not self._drawing, (
            f"{self.name}: {', '.join(sorted(self._drawing))} draws from the global generators or seeds them, so the "
            "random numbers of other code change; draw from self.generator(engine) instead, or set draws=True if this "
            "is intended"
        )
        return whole

    def moved(self, whole: dict[str, str]) -> None:
        """Attached to another engine after a run, the handler begins as new."""
        handler = self.make()
        for _ in range(2):
            engine = self.build()
            with engine.attach(handler):
                after = _leaves(self.run(engine))
        _same(
            whole,
            after,
            f"{self.name}: after a run on a different engine, the handler does not start in its initial state; "
            "load_state_dict() must reset the state",
        )

    def resumed(self, whole: dict[str, str]) -> list[int]:
        """A run that is saved after any iteration and resumed in a new engine equals an uninterrupted run; after which ones.

        The metrics and the handler's state are compared after each iteration, everything at the end.
        """
        saved: list[tuple[int, bytes]] = []

        def save(engine: Engine) -> None:
            buffer = io.BytesIO()
            torch.save(engine.state_dict(), buffer)
            saved.append((engine.state.iteration, buffer.getvalue()))

        engine = self.engine()
        engine.connect(Events.ITERATION_COMPLETED, save, phase=Phase.PERSIST)
        uninterrupted = self._followed(engine)
        self.run(engine)
        for iteration, file in saved:
            resumed = self.engine()
            resumed.load_state_dict(torch.load(io.BytesIO(file), weights_only=True))
            followed = self._followed(resumed)
            try:
                self.run(resumed, seed=1)  # a new process starts with other random states
            except Exception as error:
                error.add_note(f"{self.name}: raised in a run that resumed after iteration {iteration}")
                raise
            what = f"{self.name}: a run that resumed after iteration {iteration}"
            for place, leaves in followed.items():
                _same(uninterrupted[place], leaves, f"{what} differs in iteration {place}", _RESUMED)
            _same(whole, _leaves(resumed), f"{what} ends in a different state", _RESUMED)
            if iteration == saved[len(saved) // 2][0]:
                self._remembered(resumed.handlers[self.name], iteration)
        return [iteration for iteration, _ in saved]

    def _followed(self, engine: Engine) -> dict[int, dict[str, str]]:
        """What the metrics and the handler's state will be after each iteration of a run."""
        found: dict[int, dict[str, str]] = {}

        def follow(engine: Engine) -> None:
            metrics = _flat("engine.metrics", engine.state.metrics.state_dict(), all_of_it=True)
            state = _flat(f"handlers.{self.name}", engine.handlers[self.name].state_dict(), all_of_it=True)
            found[engine.state.iteration] = metrics | state

        engine.connect(Events.ITERATION_COMPLETED, follow, phase=Phase.PERSIST)
        return found

    def _remembered(self, handler: Handler, iteration: int) -> None:
        """What the handler keeps in attributes is that of a whole run."""
        found = _flat("", vars(handler))
        kept = {key: leaf for key, leaf in self._attributes.items() if _first(key) not in self._per_run}
        _same(
            {key: leaf for key, leaf in kept.items() if key in found},
            {key: leaf for key, leaf in found.items() if key in kept},
            f"{self.name}: attributes are not restored when a run resumes after iteration {iteration}; return them in "
            "state_dict() and restore them in load_state_dict(), or list them in per_run= if they describe a single "
            "run",
            _RESUMED,
        )

    def reached(self, uncalled: frozenset[str]) -> str:
        """Each receiver was called whose event was emitted in a run; returns which events were not."""
        missing = [name for name in self._subscribed if name in self._expected - self._called - uncalled]
        assert not missing, (
            f"{self.name}: some methods were never called in these runs, although their events were emitted: "
            f"{self._with_events(missing)}; choose data and bounds for which the methods are called, or list them in "
            "uncalled="
        )
        silent = [name for name in self._subscribed if name not in self._expected | self._called]
        return f"; not emitted: {self._with_events(silent)}" if silent else ""

    def _with_events(self, methods: Iterable[str]) -> str:
        return ", ".join(f"{name} ({self._subscribed[name]})" for name in methods)

    def failed(self) -> None:
        """After an error, no region is left open, and detaching the handler removes all of its receivers."""

        def fail(engine: Engine) -> None:
            raise _Failure

        before = _receivers(self.build())
        engine = self.engine()
        with engine.connect(Events.ITERATION_COMPLETED(once=2), fail):
            try:
                self.run(engine)
            except _Failure:
                pass
            else:
                raise AssertionError(f"{self.name}: an error in another receiver did not propagate out of run()")
        assert engine.regions.depth == 0, f"{self.name}: a region is open after an error"
        engine.detach(self.name)
        _same(before, _receivers(engine), f"{self.name}: detaching it after an error leaves receivers behind")


_RESUMED = "uninterrupted", "resumed"
_NAMED, _LISTED, _SHOWN = 5, 50, 40
"""How many differences are named, how long a list is whose items are compared by themselves, and how long a shown value."""
_PLAIN = (bool, int, float, complex, str, Tensor)
"""The attributes of a handler that are compared, and what is made of these."""


class _Failure(Exception):
    pass


def _receivers(engine: Engine) -> dict[str, str]:
    counts = {
        f"signal {name}": str(len(signal.receivers)) for name, signal in engine.signals.items() if signal.receivers
    }
    return counts | {f"replaced {what}": "yes" for what in engine.overrides.replaced()}


def _same(
    expected: dict[str, str], found: dict[str, str], guarantee: str, named: tuple[str, str] = ("expected", "found")
) -> None:
    one, other = named
    different = sorted(path for path in expected.keys() | found.keys() if expected.get(path) != found.get(path))
    shown = [
        f"{path} ({one} {expected.get(path, 'nothing')}; {other} {found.get(path, 'nothing')})"
        for path in different[:_NAMED]
    ]
    more = f" and {len(different) - _NAMED} more" if len(different) > _NAMED else ""
    assert not different, f"{guarantee}: {', '.join(shown)}{more}"


def _leaves(engine: Engine, *, handlers: bool = True) -> dict[str, str]:
    """What `fingerprint` compares, one by one: short descriptions by their paths."""
    leaves: dict[str, str] = {}
    for name, part in _parts(engine, handlers=handlers).items():
        leaves |= _flat(name, part, all_of_it=True)
    return leaves


def _flat(path: str, value: Any, *, all_of_it: bool = False) -> dict[str, str]:
    """Descriptions of the values in nested containers, by path; of numbers, texts and tensors alone, or of all."""
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple | deque) and len(value) <= _LISTED:
        items = enumerate(value)
    elif all_of_it or isinstance(value, _PLAIN):
        shown = f"{value!r}"
        return {
            path: shown if not isinstance(value, Tensor | list | tuple) and len(shown) < _SHOWN else _described(value)
        }
    else:
        return {}
    leaves = {f"{path}.length": str(len(value))} if path else {}
    for key, item in list(items):
        if key == UNSAVED:  # is empty in a file
            continue
        leaves |= _flat(f"{path}.{key}" if path else f"{key}", item, all_of_it=all_of_it)
    return leaves


def _described(value: Any) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return f"{type(value).__name__}{shape}, sha256 {_digest(value)[:8]}"


def _first(path: str) -> str:
    return path.split(".")[0]


def _digest(value: Any) -> str:
    digest = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            local = local_part(value.detach()).cpu().contiguous()
            digest.update(local.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, item in sorted(value.items(), key=lambda pair: str(pair[0])):
                digest.update(f"{key}:".encode())
                feed(item)
        elif isinstance(value, list | tuple):
            digest.update(b"[")
            for item in value:
                feed(item)
        else:
            digest.update(f"{value!r};".encode())

    feed(value)
    return digest.hexdigest()
