"""Checks of the guarantees that every handler gives, for built-in and custom handlers.

from signalfire.testing import check_handler

def test_my_handler_gives_its_guarantees():
    check_handler(build, lambda: MyHandler(), data, max_epochs=3)
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .connection import Phase
from .distributed.sharded import local_part
from .engine import Engine
from .events import Events
from .findings import allow
from .handler import Handler, never_called
from .plugins import find_handler
from .randomness import seed_everything

__all__ = ["check_handler", "fingerprint", "trace"]

Build = Callable[[], Engine]


def fingerprint(engine: Engine, *, handlers: bool = True) -> dict[str, str]:
    """A sha256 of each part of an engine's state; equal fingerprints mean bitwise equal states, of this rank's shards.

    Args:
        engine: Engine after a run.
        handlers: Whether to include the states of the handlers.
    """
    state = engine.state_dict()
    parts = {f"modules.{name}": part for name, part in state["modules"].items()}
    parts |= {f"updates.{name}": part for name, part in state["updates"].items()}
    parts |= {
        "engine": {key: value for key, value in state["engine"].items() if key != "fired"},
        "random": state["random"],
    }
    if handlers:
        parts |= {f"handlers.{name}": part for name, part in state["handlers"].items()}
    return {name: _digest(part) for name, part in parts.items()}


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
    **bounds: Any,
) -> str:
    """Assert that a handler subscribes to events, has no effect when disabled, resumes exactly, and cleans up after an error.

    A resumed run is compared by its weights, optimizers, metrics and the states of handlers. Give data and bounds with which
    each receiver is called, and with which what the handler keeps shows in one of these. The runs use one thread of torch, since
    the tensors of a test are small.

    Args:
        build: Builds a new, identical engine on each call.
        make: Makes a new handler on each call; or the name under which an installed package announces a handler that needs no
            arguments (an entry point of the group ``signalfire.handlers``).
        data: Data to run on; it must yield the same batches each time it is iterated after ``seed_everything(0)``.
        changes_training: Whether the handler may change the result of the training.
        bounds: Bounds for `Engine.run`; use more than one epoch, so that there is something to resume.

    Returns:
        What was checked, to be printed: how many runs were made, and what held in them.

    Raises:
        AssertionError: naming the broken guarantee and the part that differs.
        TypeError: for an engine in place of ``build``, or a handler in place of ``make``.

    Example:
        >>> from functools import partial
        >>> from signalfire import Update
        >>> from signalfire.handlers import EMA
        >>> def build():
        ...     torch.manual_seed(0)
        ...     update = Update.supervised(torch.nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1))
        ...     return Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> print(check_handler(build, EMA, [(torch.ones(4, 2), torch.ones(4, 1))] * 2, max_epochs=2))
        ema: 14 runs
        - attached and detached, or disabled, it has no effect
        - two runs with the same seed are equal
        - on another engine it begins as new
        - resumed after iterations 1, 2, 3, 4 the run ends in the same state
        - after an error no region is open, and detaching removes all receivers
    """
    if isinstance(make, str):
        make = find_handler(make)
    if isinstance(build, Engine) or not callable(build):
        raise TypeError(
            f"check_handler(build={build!r}): expected a function that builds a new, identical engine on each call"
        )
    if not callable(make):
        raise TypeError(
            f"check_handler(make={make!r}): expected a function that makes a new handler on each call, or a class"
        )
    check = _Check(build, make, data, bounds)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # W10: a handler of evaluators runs for several epochs here, so that there is something to resume.
        # W41, W44: what they report fails a check here.
        with allow("W10", "W41", "W44"):
            plain = check.plain()
            check.called()
            check.absent(plain)
            whole = check.repeated(plain, changes_training=changes_training)
            resumed = check.resumed(whole)
            check.moved(whole)
            check.failed()
    finally:
        torch.set_num_threads(threads)
    held = [
        "attached and detached, or disabled, it has no effect",
        "two runs with the same seed are equal" + ("" if changes_training else ", and train as without it"),
        "on another engine it begins as new",
        f"resumed after iterations {', '.join(map(str, resumed))} the run ends in the same state",
        "after an error no region is open, and detaching removes all receivers",
    ]
    return "\n- ".join([f"{check.name}: {check.runs} runs", *held])


class _Check:
    """The checks of one handler; each raises an AssertionError that names the broken guarantee.

    Args:
        build, make, data, bounds: As for `check_handler`.
    """

    def __init__(self, build: Build, make: Callable[[], Handler], data: Iterable[Any], bounds: dict[str, Any]) -> None:
        self.build = build
        self.make = make
        self.data = data
        self.bounds = bounds
        self.name = make().name
        self.runs = 0

    def engine(self) -> Engine:
        """A new engine with a new handler."""
        engine = self.build()
        engine.attach(self.make())
        return engine

    def run(self, engine: Engine, seed: int = 0) -> Engine:
        """Run an engine with the global generators seeded."""
        self.runs += 1
        seed_everything(seed)
        with allow("W10", "W55"):  # runs are short here, and evaluators run for several epochs
            engine.run(self.data, **self.bounds)
        return engine

    def plain(self) -> dict[str, str]:
        """The fingerprint of a run without the handler, which must depend only on the seed."""
        plain = fingerprint(self.run(self.build()), handlers=False)
        again = fingerprint(self.run(self.build()), handlers=False)
        _same(
            plain,
            again,
            "build() or the data differ on each call; seed every generator that they use",
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
        after = fingerprint(self.run(engine), handlers=False)
        _same(plain, after, f"{self.name}: attaching and detaching it changes the run")
        engine = self.engine()
        with engine.without(self.name):
            _same(before, _receivers(engine), f"{self.name}: it leaves receivers behind while disabled")
            after = fingerprint(self.run(engine), handlers=False)
            _same(plain, after, f"{self.name}: it changes the run while disabled")

    def repeated(self, plain: dict[str, str], *, changes_training: bool) -> dict[str, str]:
        """Two runs with the same seed are equal, and an observer changes nothing; returns the fingerprint of a run."""
        whole = fingerprint(self.run(self.engine()))
        _same(whole, fingerprint(self.run(self.engine())), f"{self.name}: two runs with the same seed differ")
        if not changes_training:
            without = {part: digest for part, digest in whole.items() if part in plain and part != "engine"}
            _same({part: plain[part] for part in without}, without, f"{self.name}: it changes training")
        return whole

    def moved(self, whole: dict[str, str]) -> None:
        """Attached to another engine after a run, the handler begins as new."""
        handler = self.make()
        for _ in range(2):
            engine = self.build()
            with engine.attach(handler):
                after = fingerprint(self.run(engine))
        _same(
            whole,
            after,
            f"{self.name}: after a run on another engine it does not begin as new; load_state_dict() has to",
        )

    def resumed(self, whole: dict[str, str]) -> list[int]:
        """A run that is saved after any iteration and resumed in a new engine ends like an uninterrupted run; which ones."""
        saved: list[tuple[int, bytes]] = []

        def save(engine: Engine) -> None:
            buffer = io.BytesIO()
            torch.save(engine.state_dict(), buffer)
            saved.append((engine.state.iteration, buffer.getvalue()))

        engine = self.engine()
        engine.connect(Events.ITERATION_COMPLETED, save, phase=Phase.PERSIST)
        self.run(engine)
        for iteration, file in saved:
            resumed = self.engine()
            resumed.load_state_dict(torch.load(io.BytesIO(file), weights_only=True))
            self.run(resumed, seed=1)  # a new process starts with other random states
            _same(
                whole,
                fingerprint(resumed),
                f"{self.name}: a run resumed after iteration {iteration} ends with another state",
            )
        return [iteration for iteration, _ in saved]

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
                raise AssertionError(f"{self.name}: an error in another receiver was not raised by run()")
        assert engine.regions.depth == 0, f"{self.name}: a region is open after an error"
        engine.detach(self.name)
        _same(before, _receivers(engine), f"{self.name}: detaching it after an error leaves receivers behind")


class _Failure(Exception):
    pass


def _receivers(engine: Engine) -> dict[str, str]:
    counts = {
        f"signal {name}": str(len(signal.receivers)) for name, signal in engine.signals.items() if signal.receivers
    }
    return counts | {f"replaced {what}": "yes" for what in engine.overrides.replaced()}


def _same(expected: dict[str, str], found: dict[str, str], guarantee: str) -> None:
    different = sorted(part for part in expected.keys() | found.keys() if expected.get(part) != found.get(part))
    assert not different, f"{guarantee}: {', '.join(different)}"


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
