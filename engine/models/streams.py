"""Separate random streams: how often one handler makes the model draw does not shift any later draw.

With ``Engine(streams="separate")`` the global generators (Python, NumPy, torch) are reseeded from (seed, epoch) before an epoch's
data is iterated, and from (seed, update's name, iteration) before each update. A handler that changes how often the model draws,
such as SharpnessAwareMinimization, then shifts no other draw, so that the difference that it makes varies less: for ablations.
It costs 10 to 25 us an update. ``engine.streams`` may be set between runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

from ..authoring.randomness import derived_seed, device_generators, mixed, reseed
from ..core.connection import Connection, Phase
from ..core.events import Events, Lifecycle
from ..core.handler import Service, on

if TYPE_CHECKING:
    from ..core.signals import Signal
    from ..core.update import UpdateState
    from ..engine import Engine

__all__ = ["SeparateStreams", "Streams", "StreamsSetting", "batch_streams", "begin_stream", "model_streams"]

Streams = Literal["shared", "separate"]


class StreamsSetting:
    """The attribute ``engine.streams``: "shared" or "separate"; it is set between runs."""

    def __get__(self, engine: Engine, owner: type[Engine]) -> Streams:
        streams: Streams = engine.__dict__["streams"]
        return streams

    def __set__(self, engine: Engine, streams: Streams) -> None:
        if streams not in get_args(Streams):
            raise ValueError(f"Engine(streams={streams!r}): expected {' or '.join(map(repr, get_args(Streams)))}")
        if engine.running:
            raise RuntimeError(f"Engine: streams={streams!r} was set during a run; set it between runs")
        engine.__dict__["streams"] = streams


def begin_stream(engine: Engine, *what: object) -> None:
    """With separate streams, reseed the global generators from the run's seed, the rank and ``what``."""
    if engine.streams == "separate":
        devices = {p.device for root in engine.modules.values() for p in root.parameters()}
        reseed(derived_seed(engine.seed, *what, engine.group.data.rank), device_generators(devices))


def batch_streams(engine: Engine) -> Callable[[int, int], None]:
    """A function that begins the stream of a batch, of which the data may outlive the run; it holds the engine weakly."""
    reference = weakref.ref(engine)

    def begin(number: int, taken: int) -> None:
        if (running := reference()) is not None:
            begin_stream(running, "batch", number, taken)

    return begin


def model_streams(engine: Engine) -> Callable[[UpdateState, int], None]:
    """A function that begins the stream of a micro-step, or of a further evaluation of it.

    The stream depends on the run's seed, the update's name, the iteration and the rank; then on which micro-step of the update in
    this iteration it is (time chunks), and on which evaluation. However much one draws, the others stay the same.
    """
    keys = {one.name: derived_seed(engine.seed, "model", one.name, engine.group.data.rank) for one in engine.updates}
    places = dict.fromkeys(keys, (0, 0))  # by update: the last iteration, and its last micro-step in it
    on_devices = device_generators(p.device for p in engine.modules.parameters())

    def begin(update: UpdateState, iteration: int) -> None:
        name = update.name
        last, place = places[name]
        if update.evaluation == 0:
            place = place + 1 if last == iteration else 0
            places[name] = iteration, place
        seed = mixed(keys[name], iteration)
        if place or update.evaluation:
            seed = mixed(mixed(seed, place), update.evaluation)
        reseed(seed, on_devices)

    return begin


_FIRST = -(2**62)  # before all that may draw random numbers


class SeparateStreams(Service):
    """Begins the streams of an engine with ``streams="separate"``; of another it is not called in an iteration."""

    essential = True

    def __init__(self) -> None:
        super().__init__(name="random_streams")

    _begin: Callable[[UpdateState, int], None] | None = None
    _connected: tuple[Signal, Connection] | None = None

    @on(Lifecycle.STARTING)
    def begin_run(self, engine: Engine) -> None:
        """Take part in this run if its streams are separate."""
        if engine.streams == "separate":
            self._begin = model_streams(engine)
            signal = engine.signal(Events.UPDATE_STARTED)
            connection = Connection(self.begin_update, Phase.PREPARE, _FIRST, None, None, internal=True)
            signal.add(connection)
            self._connected = signal, connection

    @on(Lifecycle.EPOCH_BEGAN)
    def begin_epoch(self, engine: Engine, resumed: bool) -> None:
        """Count micro-steps from 0: a run that goes back by one iteration repeats it, and makes no second micro-step of it."""
        if self._begin is not None:
            self._begin = model_streams(engine)

    @on(Lifecycle.PASS_BEGINS)
    def begin_pass(self, engine: Engine) -> None:
        """Begin the stream of the data's order."""
        begin_stream(engine, "data", engine.state.epoch, engine.state.epoch_iteration)

    def begin_update(self, engine: Engine) -> None:
        """Begin the stream of a micro-step."""
        self.begin_again(engine, engine.state.update, engine.state.iteration)

    @on(Lifecycle.RECOMPUTING)
    def begin_again(self, engine: Engine, update: UpdateState, iteration: int) -> None:
        """Begin that of a further evaluation."""
        if self._begin is not None:
            self._begin(update, iteration)

    @on(Lifecycle.CLOSED)
    def end_run(self, engine: Engine) -> None:
        """Take part no more."""
        if self._connected is not None:
            signal, connection = self._connected
            signal.remove(connection)
        self._begin = self._connected = None
