"""The bus: strong references, what is refused when it is connected, and the signal of each event by its name."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import blinker
import pytest

from signalfire import Engine, EventEnum, Events, Handler, Phase, on
from tests.kit import idle_engine, recorder

# ---- strong references --------------------------------------------------------------------------------------------


def test_a_lambda_that_nobody_else_holds_survives_garbage_collection() -> None:
    engine = idle_engine()
    log: list[str] = []
    engine.connect(Events.STARTED, lambda engine: log.append("connected"))
    engine.signal(Events.STARTED).connect(lambda engine: log.append("blinker's way"))
    gc.collect()
    engine.run(max_iters=1)
    assert log == ["connected", "blinker's way"]


def test_a_disconnected_receiver_is_freed() -> None:
    engine = idle_engine()

    def receiver(engine: Engine) -> None:
        pass

    alive = weakref.ref(receiver)
    handle = engine.connect(Events.STARTED(when=lambda engine: True) | Events.ITERATION_COMPLETED(every=2), receiver)
    engine.run(max_iters=2)
    handle.detach()
    del receiver, handle
    engine.run(max_iters=2)
    gc.collect()
    assert alive() is None


def test_an_engine_and_its_receivers_are_freed_together() -> None:
    engine = idle_engine()
    engine.connect(Events.STARTED, lambda _, engine=engine: None)
    engine.run(max_iters=1)
    alive = weakref.ref(engine)
    del engine
    gc.collect()
    assert alive() is None


# ---- what is refused when it is connected -------------------------------------------------------------------------


async def coroutine(engine: Engine) -> None: ...


async def async_generator(engine: Engine) -> AsyncIterator[int]:
    yield 1


def generator(engine: Engine) -> Iterator[int]:
    yield 1


class AsyncCall:
    async def __call__(self, engine: Engine) -> None: ...


class GeneratorCall:
    def __call__(self, engine: Engine) -> Iterator[int]:
        yield 1


class AsyncMethod:
    async def method(self, engine: Engine) -> None: ...


def takes_nothing() -> None: ...


def takes_two(engine: Engine, other: int) -> None: ...


def needs_a_keyword(engine: Engine, *, name: str) -> None: ...


REFUSED: list[tuple[Any, str]] = [
    (coroutine, "is a coroutine function"),
    (async_generator, "is a coroutine function"),
    (AsyncCall(), "is a coroutine function"),
    (AsyncMethod().method, "is a coroutine function"),
    (functools.partial(coroutine), "is a coroutine function"),
    (generator, "is a generator function"),
    (GeneratorCall(), "is a generator function"),
    (takes_nothing, "takes_nothing() -> 'None'"),
    (takes_two, "cannot be called with only the engine"),
    (needs_a_keyword, "missing a required argument: 'name'"),
    ("not callable", "'not callable' is not callable"),
    (None, "None is not callable"),
]


@pytest.mark.parametrize(("receiver", "message"), REFUSED, ids=[repr(one).split(" at 0x")[0] for one, _ in REFUSED])
def test_what_could_not_be_called_is_refused_when_it_is_connected(receiver: Any, message: str) -> None:
    engine = idle_engine()
    signal = engine.signal(Events.STARTED)
    for connect in (lambda: engine.connect(Events.STARTED, receiver), lambda: signal.connect(receiver)):
        with pytest.raises(TypeError) as caught:
            connect()
        assert message.replace("'None'", "None") in str(caught.value).replace("'None'", "None")
        assert "Events.STARTED" in str(caught.value)
    assert not signal.receivers
    assert signal.connections == ()


def test_a_handlers_coroutine_method_is_refused_when_it_is_attached() -> None:
    class Wrong(Handler):
        @on(Events.STARTED)
        async def start(self, engine: Engine) -> None: ...

    engine = idle_engine()
    with pytest.raises(TypeError, match=r"Wrong.start at Events.STARTED.*coroutine function"):
        engine.attach(Wrong())
    assert engine.handlers == {}


def test_an_unknown_phase_is_refused() -> None:
    with pytest.raises(ValueError, match="17"):
        idle_engine().connect(Events.STARTED, lambda engine: None, phase=17)  # type: ignore[arg-type]


def test_a_partial_and_a_callable_object_and_a_builtin_are_receivers() -> None:
    class Call:
        def __call__(self, engine: Engine) -> None:
            log.append("object")

    log: list[Any] = []
    engine = idle_engine()
    engine.connect(Events.STARTED, functools.partial(lambda name, engine: log.append(name), "partial"))
    engine.connect(Events.STARTED, Call())
    engine.connect(Events.STARTED, log.append)
    engine.run(max_iters=1)
    assert log == ["partial", "object", engine]


# ---- one function under several filters ---------------------------------------------------------------------------


def test_one_function_may_listen_under_two_filters_and_disconnect_removes_both() -> None:
    engine = idle_engine()
    log: list[int] = []

    def record(engine: Engine) -> None:
        log.append(engine.state.iteration)

    engine.connect(Events.ITERATION_COMPLETED(every=2), record)
    engine.connect(Events.ITERATION_COMPLETED(once=3), record)
    engine.connect(Events.ITERATION_COMPLETED(every=2), record, phase=Phase.RECORD)
    engine.run(max_iters=4)
    assert log == [2, 2, 3, 4, 4]
    log.clear()
    engine.signal(Events.ITERATION_COMPLETED).disconnect(record)
    assert not engine.has(record)
    engine.run(max_iters=4)
    assert log == []


def test_a_handle_takes_off_only_what_it_stands_for() -> None:
    engine = idle_engine()
    log: list[int] = []

    def record(engine: Engine) -> None:
        log.append(engine.state.iteration)

    engine.connect(Events.ITERATION_COMPLETED(once=3), record)
    with engine.connect(Events.ITERATION_COMPLETED(every=2), record):
        engine.run(max_iters=4)
    assert log == [2, 3, 4]
    engine.run(max_iters=4)
    assert log == [2, 3, 4, 3]
    assert engine.has(record)


def test_connecting_the_same_twice_is_refused_by_the_engine_and_ignored_by_the_signal() -> None:
    engine = idle_engine()
    log: list[str] = []
    receiver = recorder(log, "x")
    engine.connect(Events.STARTED, receiver)
    with pytest.raises(ValueError, match=r"receiver is already connected to Events.STARTED"):
        engine.connect(Events.STARTED, receiver)
    assert engine.signal(Events.STARTED).connect(receiver) is receiver
    engine.run(max_iters=1)
    assert log == ["x"]


# ---- a blinker namespace ------------------------------------------------------------------------------------------


def test_the_signals_are_blinkers_in_a_blinker_namespace() -> None:
    engine = idle_engine()
    signal = engine.signal(Events.STARTED)
    assert isinstance(signal, blinker.NamedSignal)
    assert isinstance(engine.signals, blinker.Namespace)
    assert engine.signals["Events.STARTED"] is signal
    assert engine.signals.signal("Events.STARTED") is signal
    assert signal is engine.signal(Events.STARTED)
    assert signal.name == "started"
    assert signal is not idle_engine().signal(Events.STARTED)


def test_a_signal_is_not_made_from_a_name() -> None:
    with pytest.raises(KeyError, match=r"'Events.STRATED'"):
        idle_engine().signals.signal("Events.STRATED")


def test_events_of_two_catalogues_with_the_same_label_have_signals_of_their_own() -> None:
    class Other(EventEnum):
        STARTED = "started", None

    engine = idle_engine()
    engine.register_events(Other)
    assert engine.signal(Other.STARTED) is not engine.signal(Events.STARTED)
