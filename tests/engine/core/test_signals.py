"""Signals: an explicit order, receivers that come and go while an event is sent, blinker's interface, and what is due."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import itertools
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import blinker
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from signalfire import Engine, EventEnum, Events, FilteredEvent, Handler, Phase, Signal, Update, on
from signalfire.core.signals import SignalGroup
from tests.kit import idle_engine, recorder, spread


class Talk(EventEnum):
    SPOKEN = "spoken"


# ---- order ----------------------------------------------------------------------------------------------------------


PLACES = [(Phase.PREPARE, 1), (Phase.CHANGE, -5), (Phase.CHANGE, 0), (Phase.RECORD, 0), (Phase.PERSIST, -9)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(len(PLACES))))[::7], ids=str)
def test_receivers_run_by_phase_and_rank_in_whatever_order_they_were_connected(order: tuple[int, ...]) -> None:
    engine = idle_engine()
    log: list[str] = []
    for place in order:
        phase, rank = PLACES[place]
        engine.connect(Events.ITERATION_COMPLETED, recorder(log, str(place)), phase=phase, rank=rank)
    engine.run(max_iters=2)
    assert log == ["0", "1", "2", "3", "4"] * 2


def test_receivers_of_one_phase_and_rank_run_as_they_were_connected() -> None:
    engine = idle_engine()
    log: list[str] = []
    names = [str(n) for n in range(50)]
    for name in names:
        engine.connect(Events.STARTED, recorder(log, name))
    engine.run(max_iters=1)
    assert log == names


def test_filtered_receivers_keep_their_place_among_the_others() -> None:
    engine = idle_engine()
    log: list[str] = []
    engine.connect(Events.ITERATION_COMPLETED, recorder(log, "b"))
    engine.connect(Events.ITERATION_COMPLETED(every=2), recorder(log, "a"), rank=-1)
    engine.connect(Events.ITERATION_COMPLETED(every=2), recorder(log, "c"))
    engine.connect(Events.ITERATION_COMPLETED(when=lambda engine: True), recorder(log, "d"))
    engine.run(max_iters=2)
    assert log == ["b", "d", "a", "b", "c", "d"]


def test_a_receiver_connected_again_goes_to_the_end() -> None:
    engine = idle_engine()
    log: list[str] = []
    first, second = recorder(log, "first"), recorder(log, "second")
    engine.connect(Events.STARTED, first)
    engine.connect(Events.STARTED, second)
    engine.signal(Events.STARTED).disconnect(first)
    engine.connect(Events.STARTED, first)
    engine.run(max_iters=1)
    assert log == ["second", "first"]


def test_what_blinker_inherits_does_not_call_past_the_order() -> None:
    # Stock blinker would call these in the order of their ids, which `set` gives; ours may never do so.
    engine = idle_engine(Talk)
    log: list[str] = []
    names = [str(n) for n in range(30)]
    for name in names:
        engine.connect(Talk.SPOKEN, recorder(log, name))
    signal = engine.signal(Talk.SPOKEN)
    assert isinstance(signal, Signal)
    signal.send(engine)
    engine.fire(Talk.SPOKEN)
    assert log == names * 2
    assert [receiver(engine) for receiver in signal.receivers_for(engine)] == names


# ---- added and removed while an event is sent -----------------------------------------------------------------------


KINDS = [Events.ITERATION_COMPLETED, Events.ITERATION_COMPLETED(every=1), Events.ITERATION_COMPLETED(when=bool)]


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "counted", "when"])
def test_a_receiver_added_while_the_event_is_sent_waits_for_the_next(kind: Events | FilteredEvent) -> None:
    engine = idle_engine()
    log: list[str] = []
    late = recorder(log, "late")

    @engine.on(Events.ITERATION_COMPLETED)
    def add(engine: Engine) -> None:
        log.append(f"add {engine.state.iteration}")
        if engine.state.iteration == 1:
            engine.connect(kind, late)

    engine.connect(kind, recorder(log, "there"))
    engine.run(max_iters=2)
    assert log == ["add 1", "there", "add 2", "there", "late"]


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "counted", "when"])
def test_a_receiver_removed_while_the_event_is_sent_does_not_run_any_more(kind: Events | FilteredEvent) -> None:
    engine = idle_engine()
    log: list[str] = []
    victim, other = recorder(log, "victim"), recorder(log, "other")

    @engine.on(Events.ITERATION_COMPLETED)
    def remove(engine: Engine) -> None:
        if engine.state.iteration == 2:
            engine.signal(Events.ITERATION_COMPLETED).disconnect(victim)

    engine.connect(kind, victim)
    engine.connect(kind, other)
    engine.run(max_iters=3)
    assert log == ["victim", "other", "other", "other"]


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "counted", "when"])
def test_two_receivers_removed_one_by_one_while_the_event_is_sent_do_not_run_any_more(
    kind: Events | FilteredEvent,
) -> None:
    engine = idle_engine()
    log: list[str] = []
    victims = [recorder(log, f"victim {n}") for n in range(3)]

    @engine.on(Events.ITERATION_COMPLETED)
    def remove(engine: Engine) -> None:
        for victim in victims:
            engine.signal(Events.ITERATION_COMPLETED).disconnect(victim)

    for victim in victims:
        engine.connect(kind, victim)
    engine.run(max_iters=1)
    assert log == []


def test_a_receiver_added_and_one_removed_while_the_event_is_sent() -> None:
    engine = idle_engine()
    log: list[str] = []
    victim = recorder(log, "victim")

    @engine.on(Events.ITERATION_COMPLETED(once=1))
    def swap(engine: Engine) -> None:
        engine.connect(Events.ITERATION_COMPLETED, recorder(log, "new"))
        engine.signal(Events.ITERATION_COMPLETED).disconnect(victim)

    engine.connect(Events.ITERATION_COMPLETED, victim)
    engine.run(max_iters=2)
    assert log == ["new"]


def test_a_receiver_may_remove_itself() -> None:
    engine = idle_engine()
    log: list[str] = []

    @engine.on(Events.ITERATION_COMPLETED)
    def once(engine: Engine) -> None:
        log.append("once")
        engine.detach(once)

    engine.connect(Events.ITERATION_COMPLETED, recorder(log, "next"))
    engine.run(max_iters=2)
    assert log == ["once", "next", "next"]


@pytest.mark.parametrize("event", [Events.ENDED, Events.EXCEPTION_RAISED], ids=str)
def test_a_receiver_removed_while_the_run_is_cleaned_up_does_not_run_any_more(event: Events) -> None:
    engine = idle_engine(Talk)
    log: list[str] = []
    victim = recorder(log, "victim")

    @engine.on(event)
    def remove(engine: Engine) -> None:
        log.append("remove")
        engine.signal(event).disconnect(victim)

    @engine.on(Events.ITERATION_COMPLETED)
    def fail(engine: Engine) -> None:
        raise RuntimeError("on purpose")

    engine.connect(event, victim)
    with pytest.raises(RuntimeError, match="on purpose"):
        engine.run(max_iters=1)
    assert log == ["remove"]


@pytest.mark.parametrize("kind", [Talk.SPOKEN, Talk.SPOKEN(every=1)], ids=["plain", "counted"])
def test_an_event_may_be_fired_from_its_own_receiver(kind: Talk | FilteredEvent) -> None:
    engine = idle_engine(Talk)
    log: list[str] = []
    victim = recorder(log, "victim")

    @engine.on(Talk.SPOKEN)
    def again(engine: Engine) -> None:
        if engine.signal(Talk.SPOKEN).fired < 3:
            engine.fire(Talk.SPOKEN)
        else:
            engine.signal(Talk.SPOKEN).disconnect(victim)

    engine.connect(kind, recorder(log, "last"))
    engine.connect(kind, victim)
    engine.fire(Talk.SPOKEN)
    assert log == ["last"] * 3  # the innermost removed the victim, also for those outside


# ---- some of the receivers ------------------------------------------------------------------------------------------


def test_the_receivers_of_one_handler_or_of_some_phases_are_called_alone() -> None:
    engine, log = idle_engine(), list[str]()
    signal = Signal(Events.ITERATION_COMPLETED)
    for name, owner, phase in [("a", "ema", Phase.CHANGE), ("b", "ema", Phase.RECORD), ("c", None, Phase.RECORD)]:
        signal.connect(recorder(log, name), owner=owner, phase=phase)
    signal.emit(engine, 1, owner="ema")
    assert log == ["a", "b"]
    signal.emit(engine, 1, phases=(Phase.RECORD, Phase.CONTROL))
    assert log == ["a", "b", "b", "c"]
    signal.emit(engine, 1, owner="ema", phases=(Phase.RECORD,))
    assert log == ["a", "b", "b", "c", "b"]


def test_without_a_count_only_receivers_without_a_filter_are_called() -> None:
    engine, log = idle_engine(), list[str]()
    signal = Signal(Events.ITERATION_COMPLETED)
    signal.connect(recorder(log, "plain"))
    for chosen in (Events.ITERATION_COMPLETED(every=2), Events.ITERATION_COMPLETED(when=lambda engine: True)):
        signal.connect(recorder(log, str(chosen.filter)), filter=chosen.filter)
    signal.emit(engine, None)
    assert log == ["plain"]


def test_while_gradients_are_recomputed_nothing_is_recorded() -> None:
    engine, log = idle_engine(), list[str]()
    signals = [Signal(Events.LOSS_COMPUTED), Signal(Events.FORWARD_COMPLETED)]
    group = SignalGroup(*signals)
    for signal in signals:
        for phase in Phase:
            signal.connect(recorder(log, phase.name), phase=phase)
    with suppress(LookupError), group.without_recording():
        for signal in signals:
            signal.emit(engine, 1)
        raise LookupError
    assert log == ["PREPARE", "CHANGE", "FINALIZE"] * 2
    log.clear()
    signals[0].emit(engine, 2)
    assert log == [phase.name for phase in Phase]


# ---- what blinker offers --------------------------------------------------------------------------------------------


def test_sender_filters_are_refused() -> None:
    signal = idle_engine().signal(Events.STARTED)
    with pytest.raises(ValueError, match="sender='me'"):
        signal.connect(lambda engine: None, "me")
    with pytest.raises(ValueError, match="sender='me'"):
        signal.connect_via("me")(lambda engine: None)
    with pytest.raises(ValueError, match="sender='me'"):
        signal.disconnect(lambda engine: None, sender="me")
    with pytest.raises(ValueError, match="sender='me'"), signal.connected_to(lambda engine: None, sender="me"):
        pass
    assert not signal.receivers


def test_weak_connections_are_refused() -> None:
    signal = idle_engine().signal(Events.STARTED)
    with pytest.raises(ValueError, match="weak=True"):
        signal.connect(lambda engine: None, weak=True)
    assert not signal.receivers


def test_disconnecting_a_stranger_changes_nothing() -> None:
    engine = idle_engine()
    log: list[str] = []
    engine.connect(Events.STARTED, recorder(log, "there"))
    engine.signal(Events.STARTED).disconnect(recorder(log, "stranger"))
    engine.run(max_iters=1)
    assert log == ["there"]


def test_connected_to_connects_for_a_while() -> None:
    engine = idle_engine()
    log: list[str] = []
    receiver = recorder(log, "x")
    with engine.signal(Events.STARTED).connected_to(receiver):
        assert engine.has(receiver, Events.STARTED)
        engine.run(max_iters=1)
    assert log == ["x"]
    assert not engine.has(receiver)
    engine.run(max_iters=1)
    assert log == ["x"]


def test_muted_silences_a_signal_for_a_while() -> None:
    engine = idle_engine()
    log: list[str] = []
    engine.connect(Events.ITERATION_COMPLETED(every=1), recorder(log, "filtered"))
    engine.connect(Events.ITERATION_COMPLETED, recorder(log, "plain"))
    signal = engine.signal(Events.ITERATION_COMPLETED)
    with signal.muted():
        assert signal.is_muted
        engine.connect(Events.ITERATION_COMPLETED, recorder(log, "joined while muted"))
        engine.run(max_iters=2)
        assert signal.send(engine) == []
    assert log == []
    engine.run(max_iters=1)
    assert log == ["filtered", "plain", "joined while muted"]


def test_receiver_connected_and_receiver_disconnected_report_changes() -> None:
    engine = idle_engine()
    log: list[tuple[str, Any, dict[str, Any]]] = []

    def connected(signal: Any, /, **kwargs: Any) -> None:
        log.append(("connected", signal, kwargs))

    def disconnected(signal: Any, /, **kwargs: Any) -> None:
        log.append(("disconnected", signal, kwargs))

    def receiver(engine: Engine) -> None:
        pass

    signal = engine.signal(Events.STARTED)
    signal.receiver_connected.connect(connected)
    signal.receiver_disconnected.connect(disconnected)
    handle = engine.connect(Events.STARTED, receiver)
    reported: dict[str, Any] = {"receiver": receiver, "sender": blinker.ANY}
    assert log == [("connected", signal, reported | {"weak": False})]
    handle.detach()
    assert log[1:] == [("disconnected", signal, reported)]


def test_receivers_says_whether_anybody_is_connected() -> None:
    engine = idle_engine()
    signal = engine.signal(Events.STARTED)
    assert not signal.receivers
    assert not signal.has_receivers_for(engine)
    with engine.connect(Events.STARTED, recorder([], "x")) as handle:
        assert signal.receivers
        assert signal.has_receivers_for(engine)
    handle.detach()  # a second time changes nothing
    assert not signal.receivers
    assert not signal.has_receivers_for(engine)


def test_send_returns_receivers_and_results_in_order_and_honours_filters() -> None:
    engine = idle_engine(Talk)
    log: list[str] = []
    last, first = recorder(log, "last"), recorder(log, "first")
    filtered, refused = recorder(log, "filtered"), recorder(log, "refused")
    engine.connect(Talk.SPOKEN, last, phase=Phase.RECORD)
    engine.connect(Talk.SPOKEN(every=2), filtered)
    engine.connect(Talk.SPOKEN, first, phase=Phase.PREPARE)
    engine.connect(Talk.SPOKEN(every=3), refused)
    engine.signal(Talk.SPOKEN).fired = 4
    assert engine.signal(Talk.SPOKEN).send(engine) == [(first, "first"), (filtered, "filtered"), (last, "last")]
    assert log == ["first", "filtered", "last"]


def test_send_passes_keyword_arguments_on() -> None:
    engine = idle_engine(Talk)

    def receiver(engine: Engine, *, word: str = "none") -> str:
        return word

    engine.connect(Talk.SPOKEN(when=lambda engine: True), receiver)
    assert engine.signal(Talk.SPOKEN).send(engine, word="hello") == [(receiver, "hello")]


def test_send_to_nobody_gives_nothing() -> None:
    assert idle_engine().signal(Events.STARTED).send() == []


def asynchronous(receiver: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Makes a plain receiver one that can be awaited, for ``send_async``."""

    async def call(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return receiver(*args, **kwargs)

    return call


def test_send_async_runs_plain_receivers_in_order_through_a_wrapper() -> None:
    engine = idle_engine(Talk)
    log: list[str] = []
    receivers = [recorder(log, str(n)) for n in range(5)]
    for n in (3, 0, 4, 1, 2):
        engine.connect(Talk.SPOKEN, receivers[n], rank=n)
    results = asyncio.run(engine.signal(Talk.SPOKEN).send_async(engine, _sync_wrapper=asynchronous))
    assert results == [(receivers[n], str(n)) for n in range(5)]
    assert log == ["0", "1", "2", "3", "4"]


def test_send_async_without_a_wrapper_is_refused_as_by_blinker() -> None:
    engine = idle_engine(Talk)
    engine.connect(Talk.SPOKEN, recorder([], "x"))
    with pytest.raises(RuntimeError, match="non-coroutine"):
        asyncio.run(engine.signal(Talk.SPOKEN).send_async(engine))


def test_send_async_honours_filters_as_send_does() -> None:
    engine = idle_engine(Talk)
    log: list[str] = []
    engine.connect(Talk.SPOKEN(every=2), recorder(log, "second"))
    engine.connect(Talk.SPOKEN(when=lambda engine: False), recorder(log, "never"))
    engine.connect(Talk.SPOKEN, recorder(log, "always"))
    engine.signal(Talk.SPOKEN).fired = 1
    asyncio.run(engine.signal(Talk.SPOKEN).send_async(engine, _sync_wrapper=asynchronous))
    assert log == ["always"]


def test_a_signal_is_sent_by_an_engine() -> None:
    signal = idle_engine(Talk).signal(Talk.SPOKEN)
    signal.connect(lambda engine: None)
    with pytest.raises(TypeError, match=r"Talk\.SPOKEN: send\('me'\): the sender must be the engine"):
        signal.send("me")


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_an_error_says_which_receiver_raised_it_and_when() -> None:
    engine = idle_engine()
    log: list[str] = []

    def fails(engine: Engine) -> None:
        if engine.state.iteration == 5:
            raise RuntimeError("on purpose")

    engine.connect(Events.ITERATION_COMPLETED, recorder(log, "before"))
    engine.connect(Events.ITERATION_COMPLETED, fails)
    engine.connect(Events.ITERATION_COMPLETED, recorder(log, "after"))
    with pytest.raises(RuntimeError, match="on purpose") as caught:
        engine.run(max_epochs=2, epoch_length=3)
    assert caught.value.__notes__ == ["raised by fails at Events.ITERATION_COMPLETED, epoch 2, iteration 5"]
    assert log == ["before", "after"] * 4 + ["before"]


def test_an_error_names_the_handler_and_its_method() -> None:
    class Careless(Handler):
        @on(Events.EPOCH_COMPLETED(every=2))
        def look(self, engine: Engine) -> None:
            raise ZeroDivisionError("on purpose")

    engine = idle_engine()
    engine.attach(Careless(name="careful"))
    with pytest.raises(ZeroDivisionError) as caught:
        engine.run(max_epochs=3, epoch_length=2)
    assert caught.value.__notes__ == ["raised by careful.look at Events.EPOCH_COMPLETED, epoch 2, iteration 4"]


def test_an_error_of_the_predicate_is_reported_as_its_receivers() -> None:
    engine = idle_engine()

    def wrong(engine: Engine) -> bool:
        raise LookupError("on purpose")

    def receiver(engine: Engine) -> None:
        pass

    engine.connect(Events.ITERATION_STARTED, lambda engine: None)
    engine.connect(Events.ITERATION_STARTED(when=wrong), receiver)
    with pytest.raises(LookupError) as caught:
        engine.run(max_iters=1)
    assert caught.value.__notes__ == ["raised by receiver at Events.ITERATION_STARTED, epoch 1, iteration 1"]


def test_an_error_is_reported_as_that_of_the_right_one_of_many() -> None:
    engine = idle_engine()
    for n in range(6):

        def receiver(engine: Engine, n: int = n) -> None:
            if n == engine.state.iteration:
                raise RuntimeError(str(n))

        receiver.__name__ = f"number_{n}"
        engine.connect(Events.ITERATION_COMPLETED(every=1) if n % 2 else Events.ITERATION_COMPLETED, receiver)
    with pytest.raises(RuntimeError) as caught:
        engine.run(max_iters=3)
    assert caught.value.__notes__[0].startswith("raised by number_1 at")


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "counted", "when"])
def test_an_error_of_a_receiver_that_has_just_removed_itself_is_reported_as_its_own(
    kind: Events | FilteredEvent,
) -> None:
    engine = idle_engine()

    def leaves(engine: Engine) -> None:
        engine.detach(leaves)
        raise RuntimeError("on purpose")

    engine.connect(kind, leaves)
    with pytest.raises(RuntimeError) as caught:
        engine.run(max_iters=1)
    assert caught.value.__notes__ == ["raised by leaves at Events.ITERATION_COMPLETED, epoch 1, iteration 1"]


def test_all_receivers_of_ended_run_and_their_errors_are_reported_together() -> None:
    engine = idle_engine()
    log: list[str] = []

    def one(engine: Engine) -> None:
        raise RuntimeError("first")

    def two(engine: Engine) -> None:
        raise LookupError("second")

    engine.connect(Events.ENDED, one)
    engine.connect(Events.ENDED, two)
    engine.connect(Events.ENDED, recorder(log, "cleaned up"))
    with pytest.raises(RuntimeError, match="first") as caught:
        engine.run(max_iters=1)
    assert log == ["cleaned up"]
    assert caught.value.__notes__[0] == "raised by one at Events.ENDED, epoch 1, iteration 1"
    assert "another error: LookupError: second (raised by two at Events.ENDED" in caught.value.__notes__[1]


# ---- the base class -------------------------------------------------------------------------------------------------


# The first 16 digits of the sha256 of each source that `Signal` overrides, inherits or relies on, as of blinker 1.9.0.
SOURCES = {
    "Signal.__init__": "6a0793a185ba35d8",
    "Signal._clear_state": "82580e5b05d7edda",
    "Signal._disconnect": "05b70bdd93dcd373",
    "Signal.connect": "483737d5e0e4d182",
    "Signal.connect_via": "3b7022f5655f3582",
    "Signal.connected_to": "0518db119c64ba3d",
    "Signal.disconnect": "4a01cc83b35db30e",
    "Signal.has_receivers_for": "eb6b15b91100afac",
    "Signal.muted": "e38ef84095c4d6bf",
    "Signal.receiver_connected": "dcce0d64d1e1c79d",
    "Signal.receiver_disconnected": "8db4147f2888a6af",
    "Signal.receivers_for": "8e8dc8810c01283e",
    "Signal.send": "bdb20e622a851e12",
    "Signal.send_async": "2c696fffad5a2d11",
    "NamedSignal.__init__": "bd6688c136963013",
    "Namespace.signal": "7c7574ab911ea078",
}


@pytest.mark.parametrize("name", SOURCES)
def test_blinkers_base_class_is_the_one_that_the_bus_was_written_for(name: str) -> None:
    owner, method = name.split(".")
    function = vars(getattr(blinker, owner))[method]
    source = inspect.getsource(getattr(function, "func", function))  # a cached_property holds its function
    found = hashlib.sha256(source.encode()).hexdigest()[:16]
    assert found == SOURCES[name], (
        f"blinker.{name} is not what it was in blinker 1.9.0. Read what changed, see whether signalfire.Signal in "
        "engine/core/signals.py still overrides everything that chooses or calls receivers (connect, disconnect, _clear_state, "
        "is_muted, send, receivers_for) and still keeps `receivers` and `_by_sender` as blinker expects, run this file, "
        f"then widen the range in setup.cfg and write {found!r} here"
    )


def test_blinkers_signals_have_no_methods_that_the_bus_does_not_know() -> None:
    known = {name.split(".")[1] for name in SOURCES if name.startswith("Signal.")}
    harmless = {"ANY", "set_class", "_cleanup_bookkeeping", "_make_cleanup_receiver", "_make_cleanup_sender"}
    found = {name for name in vars(blinker.Signal) if not name.startswith("__")} | {"__init__"}
    assert found == known | harmless, (
        "see whether signalfire.Signal in engine/core/signals.py has to override what is new"
    )


# ---- what is due ----------------------------------------------------------------------------------------------------


def learn(engine: Engine, batch: Tensor) -> Tensor:
    loss: Tensor = engine.model(batch).mean()
    return loss


ENGINES: dict[str, Callable[[], Engine]] = {
    "training": lambda: Engine(
        Update(lambda engine, batch: engine.model(batch), lambda engine, output, batch: output.mean(), SGD),
        model=nn.Linear(1, 1),
    ),
    "training a function": lambda: Engine(Update.from_function(learn, SGD), model=nn.Linear(1, 1)),
    "training two": lambda: Engine(
        [
            Update.from_function(learn, SGD, name="function"),
            Update(lambda engine, batch: engine.model(batch), lambda engine, output, batch: output.mean(), SGD),
        ],
        model=nn.Linear(1, 1),
    ),
    "evaluating": lambda: Engine(
        Update(lambda engine, batch: engine.model(batch), lambda engine, output, batch: output.mean()),
        model=nn.Linear(1, 1),
    ),
    "evaluating a function": lambda: Engine(Update.from_function(learn), model=nn.Linear(1, 1)),
    "predicting": lambda: Engine(Update.prediction(lambda engine, batch: engine.model(batch)), model=nn.Linear(1, 1)),
}


@pytest.mark.moderate
@pytest.mark.parametrize("event", spread([event for event in Events if event.counter == "iteration"], 3), ids=str)
@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.filterwarnings("ignore:W49")
def test_an_iteration_that_nobody_listens_to_is_known_by_one_comparison(kind: str, event: Events) -> None:
    """Nothing is looked at where a filter does not pass, or where the event is one that this engine never emits."""
    data = [torch.ones(2, 1)] * 3
    log: list[str] = []
    engine = ENGINES[kind]()
    signals = engine.iteration_signals
    never = signals.due  # nobody listens
    assert never > 10**9
    engine.connect(event, recorder(log, "heard"))
    engine.run(data, max_epochs=1)
    inside = event is not Events.ITERATION_COMPLETED
    assert (signals.due <= 1) == (bool(log) and inside)
    engine.detach(engine.signal(event).connections[0].receiver)
    assert signals.due == never
    in_an_iteration, log[:] = len(log) // len(data), []
    engine = ENGINES[kind]()
    signals = engine.iteration_signals
    engine.connect(event(every=1000), recorder(log, "heard"))
    engine.run(data, max_epochs=1)
    assert log == []
    assert signals.due == (1000 if in_an_iteration and inside else never)
    engine.run(data, max_iters=1001, epoch_length=3)
    assert log == ["heard"] * in_an_iteration


def test_once_a_filter_has_passed_the_next_count_at_which_it_may_pass_is_known() -> None:
    engine = idle_engine()
    log: list[int] = []
    engine.connect(Events.ITERATION_COMPLETED(every=10), lambda engine: log.append(engine.state.iteration))
    engine.connect(Events.ITERATION_COMPLETED(once=[13, 20]), lambda engine: log.append(-engine.state.iteration))
    signal = engine.signal(Events.ITERATION_COMPLETED)
    known = []
    for last in (9, 10, 13, 20):
        log.clear()
        engine.run(max_iters=last)  # from the first on, since it only evaluates
        known.append(signal.due)
    assert known == [10, 13, 20, 30]
    assert log == [10, -13, 20, -20]
    signal.send(engine)  # directly, at the same count
    assert log == [10, -13, 20, -20, 20, -20]


def test_an_event_that_has_not_come_yet_is_not_due_before_its_filter_passes() -> None:
    engine = idle_engine()  # which gives no loss
    engine.connect(Events.LOSS_COMPUTED(every=1000), lambda engine: None)
    assert engine.iteration_signals.due == 1000
    engine.run(max_iters=10)
    assert engine.iteration_signals.due == 1000


def test_a_group_of_signals_is_due_where_its_first_signal_is() -> None:
    signals = [Signal(event) for event in (Events.LOSS_COMPUTED, Events.FORWARD_COMPLETED, Events.BACKWARD_COMPLETED)]
    signals[0].connect(recorder([], "there before"), filter=Events.LOSS_COMPUTED(once=50).filter)
    group = SignalGroup(*signals)
    assert group.due == 50
    tenth, receiver = Events.FORWARD_COMPLETED(once=10).filter, recorder([], "tenth")
    signals[1].connect(receiver, filter=tenth)
    signals[2].connect(recorder([], "seventieth"), filter=Events.BACKWARD_COMPLETED(once=70).filter)
    assert group.due == 10
    signals[1].disconnect(receiver)
    assert group.due == 50
    signals[0].wait(True)
    assert group.due == 0


def test_an_event_that_is_waited_for_is_due_until_it_no_longer_is() -> None:
    engine, log = idle_engine(), list[str]()
    signal = Signal(Events.ITERATION_COMPLETED)
    never = signal.due
    signal.wait(True)
    assert signal.due == 0
    signal.connect(recorder(log, "tenth"), filter=Events.ITERATION_COMPLETED(every=10).filter)
    signal.emit(engine, 9)
    assert (signal.due, log) == (0, []), "also where a filter is due later"
    signal.wait(False)
    assert signal.due == 10
    signal.disconnect(signal.connections[0].receiver)
    assert signal.due == never


# ---- many receivers -------------------------------------------------------------------------------------------------


def calls_to_connect(count: int) -> int:
    """How many functions are called to connect so many receivers to one event, and to disconnect the last."""
    engine, calls = idle_engine(), 0
    receivers = [recorder([], str(number)) for number in range(count)]

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        for receiver in receivers:
            engine.connect(Events.ITERATION_COMPLETED, receiver)
    finally:
        sys.setprofile(None)
    return calls


def test_the_work_to_connect_grows_with_the_number_of_receivers_and_not_with_its_cube() -> None:
    assert calls_to_connect(200) < 5 * calls_to_connect(50)


def test_a_built_in_method_is_known_again() -> None:
    engine = idle_engine()
    seen: list[Engine] = []
    other: list[Engine] = []
    engine.connect(Events.ITERATION_COMPLETED, seen.append)
    assert engine.has(seen.append)
    assert not engine.has(other.append), "an equal list is another one"
    with pytest.raises(ValueError, match="already connected"):
        engine.connect(Events.ITERATION_COMPLETED, seen.append)
    engine.detach(seen.append)
    assert not engine.has(seen.append)
    assert not engine.signal(Events.ITERATION_COMPLETED).receivers
