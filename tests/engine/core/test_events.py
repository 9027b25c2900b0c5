"""Events: filters, unions, refusals where they are written, and events of one's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
from torch import Tensor

from signalfire import AnyEvent, Engine, EventEnum, Events, EventUnion, FilteredEvent, Update
from tests import kit


def nothing(engine: Engine, batch: Any) -> Tensor | None:
    return None


def idle_engine() -> Engine:
    """An engine whose iterations do nothing, so that only the events count."""
    return Engine(Update.from_function(nothing))


def counts_of(event: AnyEvent, *, epochs: int = 3, epoch_length: int = 10) -> list[int]:
    """The iterations in which a receiver of this event runs."""
    engine = idle_engine()
    seen: list[int] = []
    engine.connect(event, lambda engine: seen.append(engine.state.iteration))
    engine.run(range(epoch_length), max_epochs=epochs)
    return seen


# ---- at which counts filters fire ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (Events.ITERATION_COMPLETED(every=1), list(range(1, 31))),
        (Events.ITERATION_COMPLETED(every=7), [7, 14, 21, 28]),
        (Events.ITERATION_COMPLETED(once=1), [1]),
        (Events.ITERATION_COMPLETED(once=30), [30]),
        (Events.ITERATION_COMPLETED(once=31), []),
        (Events.ITERATION_COMPLETED(once=[12, 3, 3]), [3, 12]),
        (Events.ITERATION_COMPLETED(once=(n for n in (2, 4))), [2, 4]),
        (Events.ITERATION_COMPLETED(after=27), [28, 29, 30]),
        (Events.ITERATION_COMPLETED(after=0), list(range(1, 31))),
        (Events.ITERATION_COMPLETED(before=4), [1, 2, 3]),
        (Events.ITERATION_COMPLETED(after=3, before=7), [4, 5, 6]),
        (Events.ITERATION_COMPLETED(every=5, after=5), [10, 15, 20, 25, 30]),
        (Events.ITERATION_COMPLETED(every=5, before=20), [5, 10, 15]),
        (Events.ITERATION_COMPLETED(every=4, after=4, before=17), [8, 12, 16]),
        (Events.ITERATION_COMPLETED(once=[2, 9, 28], after=2, before=28), [9]),
        (Events.ITERATION_STARTED(every=10), [10, 20, 30]),
        (Events.GET_BATCH_COMPLETED(once=11), [11]),
        (Events.EPOCH_COMPLETED(every=2), [20]),
        (Events.EPOCH_STARTED(once=[1, 3]), [0, 20]),
        (Events.UPDATE_STARTED(every=15), [15, 30]),
        (Events.FORWARD_STARTED(after=28), [29, 30]),
    ],
    ids=str,
)
def test_a_filter_passes_exactly_these_counts(event: AnyEvent, expected: list[int]) -> None:
    assert counts_of(event) == expected


def test_the_batch_is_counted_as_that_of_the_iteration_it_is_for() -> None:
    # At GET_BATCH_STARTED the iteration has not begun, but the third batch is the third iteration's.
    assert counts_of(Events.GET_BATCH_STARTED(once=3)) == [2]


def test_when_is_asked_in_every_occurrence_and_with_the_engine() -> None:
    engine = idle_engine()
    asked: list[int] = []
    ran: list[int] = []

    def odd(engine: Engine) -> bool:
        asked.append(engine.state.iteration)
        return engine.state.iteration % 2 == 1

    engine.connect(Events.ITERATION_COMPLETED(when=odd), lambda engine: ran.append(engine.state.iteration))
    engine.run(max_iters=5)
    assert asked == [1, 2, 3, 4, 5]
    assert ran == [1, 3, 5]


def test_when_is_asked_last_only_where_the_counts_pass() -> None:
    engine = idle_engine()
    asked: list[int] = []
    ran: list[int] = []

    def second_time(engine: Engine) -> bool:
        asked.append(engine.state.iteration)
        return len(asked) == 2

    engine.connect(
        Events.ITERATION_COMPLETED(every=3, after=3, when=second_time),
        lambda engine: ran.append(engine.state.iteration),
    )
    engine.run(max_iters=12)
    assert asked == [6, 9, 12]
    assert ran == [9]


def test_when_is_asked_at_the_receivers_turn() -> None:
    engine = idle_engine()
    switch: list[bool] = []
    ran: list[str] = []
    engine.connect(Events.ITERATION_COMPLETED, lambda engine: switch.append(True))
    engine.connect(Events.ITERATION_COMPLETED(when=lambda engine: bool(switch)), lambda engine: ran.append("after"))
    engine.connect(
        Events.ITERATION_COMPLETED(when=lambda engine: bool(switch)), lambda engine: ran.append("before"), rank=-1
    )
    engine.run(max_iters=1)
    assert ran == ["after"]


def test_when_may_filter_an_event_without_a_count() -> None:
    engine = idle_engine()
    ran: list[str] = []
    engine.connect(Events.STARTED(when=lambda engine: True), lambda engine: ran.append("yes"))
    engine.connect(Events.COMPLETED(when=lambda engine: False), lambda engine: ran.append("no"))
    engine.run(max_iters=1)
    assert ran == ["yes"]


def test_counts_go_on_over_two_runs() -> None:
    engine = idle_engine()
    seen: list[int] = []
    engine.connect(Events.ITERATION_COMPLETED(every=4), lambda engine: seen.append(engine.state.iteration))
    Engine.run(engine, max_epochs=1, epoch_length=6)
    assert seen == [4]
    engine.run(max_epochs=1, epoch_length=6)  # an engine that evaluates starts anew in every run
    assert seen == [4, 4]


def test_a_filtered_receiver_connected_in_the_middle_waits_for_its_next_count() -> None:
    engine = idle_engine()
    seen: list[int] = []

    @engine.on(Events.ITERATION_COMPLETED(once=5))
    def join(engine: Engine) -> None:
        engine.connect(Events.ITERATION_COMPLETED(every=5), lambda engine: seen.append(engine.state.iteration))

    engine.run(max_iters=15)
    assert seen == [10, 15]


def test_filters_of_several_receivers_do_not_disturb_each_other() -> None:
    engine = idle_engine()
    seen: list[tuple[str, int]] = []

    def record(name: str) -> Callable[[Engine], None]:
        return lambda engine: seen.append((name, engine.state.iteration))

    engine.connect(Events.ITERATION_COMPLETED(every=4), record("four"))
    engine.connect(Events.ITERATION_COMPLETED(once=5), record("once"))
    engine.connect(Events.ITERATION_COMPLETED(every=3), record("three"))
    engine.connect(Events.ITERATION_COMPLETED(after=11), record("late"))
    engine.run(max_iters=12)
    assert seen == [
        ("three", 3),
        ("four", 4),
        ("once", 5),
        ("three", 6),
        ("four", 8),
        ("three", 9),
        ("four", 12),
        ("three", 12),
        ("late", 12),
    ]


# ---- unions -------------------------------------------------------------------------------------------------------


def test_a_union_runs_at_each_of_its_members() -> None:
    engine = idle_engine()
    seen: list[tuple[int, int]] = []
    engine.connect(
        Events.STARTED | Events.ITERATION_COMPLETED(every=3) | Events.EPOCH_COMPLETED,
        lambda engine: seen.append((engine.state.epoch, engine.state.iteration)),
    )
    engine.run(max_epochs=2, epoch_length=4)
    assert seen == [(0, 0), (1, 3), (1, 4), (2, 6), (2, 8)]


def test_a_function_runs_once_for_each_filter_that_passes() -> None:
    event = Events.ITERATION_COMPLETED(every=2) | Events.ITERATION_COMPLETED(every=3)
    assert counts_of(event, epochs=1, epoch_length=6) == [2, 3, 4, 6, 6]


def test_a_union_changes_neither_operand() -> None:
    left = Events.STARTED | Events.ENDED
    right = Events.ITERATION_COMPLETED(every=2)
    before = (repr(left), repr(right))
    both = left | right
    assert (repr(left), repr(right)) == before
    assert both.members == (Events.STARTED, Events.ENDED, right)
    assert left.members == (Events.STARTED, Events.ENDED)


def test_unions_are_equal_however_they_are_bracketed_and_hold_each_member_once() -> None:
    one, two, three = Events.STARTED, Events.EPOCH_STARTED(every=2), Events.ENDED
    assert (one | two) | three == one | (two | three)
    assert (one | two | one | two).members == (one, two)


@pytest.mark.parametrize("other", ["started", None, 3, Events])
def test_a_union_with_something_else_is_refused_where_it_is_written(other: Any) -> None:
    for operand in (Events.STARTED, Events.EPOCH_COMPLETED(every=2), Events.STARTED | Events.ENDED):
        with pytest.raises(TypeError, match="is not an event"):
            operand | other


def test_events_show_as_they_are_written() -> None:
    assert repr(Events.STARTED) == "Events.STARTED"
    assert repr(Events.EPOCH_COMPLETED(every=2, after=4)) == "Events.EPOCH_COMPLETED(every=2, after=4)"
    assert repr(Events.EPOCH_COMPLETED(once=[5, 3])) == "Events.EPOCH_COMPLETED(once=[3, 5])"
    assert repr(Events.STARTED | Events.EPOCH_COMPLETED(once=5)) == "Events.STARTED | Events.EPOCH_COMPLETED(once=5)"


def test_equal_filters_make_equal_events() -> None:
    assert Events.EPOCH_COMPLETED(every=2) == Events.EPOCH_COMPLETED(every=2)
    assert Events.EPOCH_COMPLETED(every=2) != Events.EPOCH_COMPLETED(every=3)
    assert Events.EPOCH_COMPLETED(every=2) != Events.ITERATION_COMPLETED(every=2)
    assert isinstance(Events.EPOCH_COMPLETED(every=2), FilteredEvent)
    assert isinstance(Events.STARTED | Events.ENDED, EventUnion)


# ---- refused where they are written -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every": 0}, ValueError, "every=0"),
        ({"every": -2}, ValueError, "every=-2"),
        ({"every": 2.0}, TypeError, "every=2.0"),
        ({"every": "2ep"}, TypeError, "every='2ep'"),
        ({"every": True}, TypeError, "every=True"),
        ({"once": 0}, ValueError, "=0"),
        ({"once": True}, TypeError, "=True"),
        ({"once": [3, -1]}, ValueError, "=-1"),
        ({"once": [3, 4.0]}, TypeError, "=4.0"),
        ({"once": []}, ValueError, "once=[]"),
        ({"once": 1.5}, TypeError, "once=1.5"),
        ({"after": -1}, ValueError, "after=-1"),
        ({"after": 1.5}, TypeError, "after=1.5"),
        ({"before": 0}, ValueError, "before=0"),
        ({"before": 1}, ValueError, "before=1"),
        ({"before": "x"}, TypeError, "before='x'"),
        ({"when": 3}, TypeError, "when: 3 is not callable"),
        ({"when": True}, TypeError, "when: True is not callable"),
        ({}, TypeError, "expected every=, once="),
        ({"every": 2, "once": 3}, ValueError, "every=2 and once=[3]"),
        ({"after": 5, "before": 6}, ValueError, "after=5, before=6"),
        ({"after": 7, "before": 3}, ValueError, "after=7, before=3"),
        ({"every": 10, "before": 10}, ValueError, "every=10, before=10"),
        ({"every": 10, "after": 10, "before": 20}, ValueError, "every=10, after=10, before=20"),
        ({"once": 5, "after": 5}, ValueError, "after=5, once=5"),
        ({"once": [5, 7], "before": 5}, ValueError, "before=5, once=[5, 7]"),
    ],
    ids=str,
)
def test_a_filter_that_makes_no_sense_is_refused_where_it_is_written(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        Events.ITERATION_COMPLETED(**arguments)
    assert message in str(caught.value)
    assert "Events.ITERATION_COMPLETED" in str(caught.value)


@pytest.mark.parametrize("event", [Events.STARTED, Events.COMPLETED, Events.ENDED, Events.EXCEPTION_RAISED])
@pytest.mark.parametrize("arguments", [{"every": 2}, {"once": 1}, {"after": 1}, {"before": 9}], ids=str)
def test_an_event_without_a_count_refuses_filters_on_it(event: Events, arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=rf"{event}: the event has no counter") as caught:
        event(**arguments)  # type: ignore[arg-type]
    (name, value) = next(iter(arguments.items()))
    assert f"{name}={value}" in str(caught.value)


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="evry"):
        Events.ITERATION_COMPLETED(evry=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("event", ["iteration_completed", "STARTED", None, 5, Events, [Events.STARTED]], ids=str)
def test_what_is_no_event_is_refused(event: Any) -> None:
    engine = idle_engine()
    with pytest.raises(TypeError, match="is not an event"):
        engine.connect(event, lambda engine: None)
    with pytest.raises(TypeError, match="is not an event"):
        engine.on(event)(lambda engine: None)
    with pytest.raises(TypeError, match="is not an event"):
        engine.fire(event)


def test_a_filtered_event_has_no_signal_and_is_not_fired() -> None:
    engine = idle_engine()
    filtered: Any = Events.EPOCH_COMPLETED(every=2)
    with pytest.raises(TypeError, match="has a filter"):
        engine.signal(filtered)
    with pytest.raises(TypeError, match="has a filter"):
        engine.fire(filtered)


# ---- events of one's own ------------------------------------------------------------------------------------------


class Talk(EventEnum):
    SPOKEN = "spoken"
    HEARD = "heard", "iteration"
    PAUSED = "paused", "epoch"
    SILENT = "silent", None
    WRITTEN = "written", lambda engine: len(engine.state.metrics)
    IN_EPOCH = "in_epoch", lambda engine: engine.state.epoch_iteration


class Unregistered(EventEnum):
    NEVER_MADE_KNOWN = "never_made_known"


def talking_engine(event: EventEnum, times: int = 1) -> Engine:
    """An engine that fires the event so many times in every iteration."""
    engine = idle_engine()
    engine.register_events(Talk)

    @engine.on(Events.ITERATION_COMPLETED)
    def fire(engine: Engine) -> None:
        for _ in range(times):
            engine.fire(event)

    return engine


def test_an_own_event_runs_its_receivers_when_it_is_fired() -> None:
    engine = talking_engine(Talk.SPOKEN, times=2)
    seen: list[int] = []
    engine.connect(Talk.SPOKEN, lambda engine: seen.append(engine.state.iteration))
    engine.run(max_iters=2)
    assert seen == [1, 1, 2, 2]


def test_an_own_event_is_counted_by_how_often_it_was_fired() -> None:
    engine = talking_engine(Talk.SPOKEN, times=4)
    every_third: list[int] = []
    first: list[int] = []
    engine.connect(Talk.SPOKEN(every=3), lambda engine: every_third.append(engine.signal(Talk.SPOKEN).fired))
    engine.connect(Talk.SPOKEN(once=1), lambda engine: first.append(engine.state.iteration))
    engine.run(max_iters=3)
    assert every_third == [3, 6, 9, 12]
    assert first == [1]


def test_an_own_event_counts_also_while_nobody_listens() -> None:
    engine = talking_engine(Talk.SPOKEN)
    seen: list[int] = []
    engine.connect(
        Events.ITERATION_COMPLETED(once=3),
        lambda engine: engine.connect(Talk.SPOKEN(every=2), lambda engine: seen.append(engine.state.iteration)),
    )
    engine.run(max_iters=6)
    assert seen == [4, 6]


def test_an_own_event_may_be_counted_by_iterations_or_epochs() -> None:
    for event, expected in ((Talk.HEARD(every=4), [4, 8]), (Talk.PAUSED(once=2), [5, 6, 7, 8])):
        engine = talking_engine(event.event)
        seen: list[int] = []
        engine.connect(event, lambda engine, seen=seen: seen.append(engine.state.iteration))
        engine.run(max_epochs=2, epoch_length=4)
        assert seen == expected, event


def test_an_own_event_without_a_count_takes_only_when() -> None:
    with pytest.raises(ValueError, match="the event has no counter"):
        Talk.SILENT(every=2)
    engine = talking_engine(Talk.SILENT)
    seen: list[int] = []
    engine.connect(
        Talk.SILENT(when=lambda engine: engine.state.iteration > 2), lambda engine: seen.append(engine.state.iteration)
    )
    engine.run(max_iters=4)
    assert seen == [3, 4]


def test_an_own_event_may_have_a_counter_function() -> None:
    engine = talking_engine(Talk.WRITTEN)
    seen: list[int] = []

    @engine.on(Events.ITERATION_STARTED)
    def write(engine: Engine) -> None:
        if engine.state.iteration % 2 == 0:
            engine.state.metrics[f"metric{engine.state.iteration}"] = 1.0

    engine.connect(Talk.WRITTEN(every=2, after=0), lambda engine: seen.append(engine.state.iteration))
    engine.run(max_iters=9)
    assert seen == [4, 5, 8, 9]  # there are two metrics in the iterations 4 and 5, four in 8 and 9


def test_an_own_counter_may_begin_again() -> None:
    engine = talking_engine(Talk.IN_EPOCH)
    seen: list[tuple[int, int]] = []
    engine.connect(
        Talk.IN_EPOCH(every=3), lambda engine: seen.append((engine.state.epoch, engine.state.epoch_iteration))
    )
    engine.run(max_epochs=3, epoch_length=5)
    assert seen == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("counter", ["steps", 3, ""], ids=repr)
def test_a_counter_that_does_not_exist_is_refused_where_it_is_written(counter: Any) -> None:
    with pytest.raises(ValueError, match="'x' has the counter") as caught:

        class Wrong(EventEnum):
            X = "x", counter

    assert repr(counter) in str(caught.value)
    assert "Wrong" in str(caught.value)


def test_an_event_whose_catalogue_was_not_registered_is_refused() -> None:
    engine = idle_engine()
    for act in (
        lambda: engine.connect(Unregistered.NEVER_MADE_KNOWN, lambda engine: None),
        lambda: engine.fire(Unregistered.NEVER_MADE_KNOWN),
        lambda: engine.signal(Unregistered.NEVER_MADE_KNOWN),
    ):
        with pytest.raises(ValueError, match=r"register_events\(Unregistered\)"):
            act()


def test_a_union_with_an_unregistered_event_connects_to_none_of_its_members() -> None:
    engine = idle_engine()
    ran: list[str] = []
    with pytest.raises(ValueError, match="register_events"):
        engine.connect(Events.STARTED | Unregistered.NEVER_MADE_KNOWN, lambda engine: ran.append("started"))
    engine.run(max_iters=1)
    assert ran == []


@pytest.mark.parametrize("catalogue", [Talk.SPOKEN, "Talk", int, None], ids=repr)
def test_what_is_no_catalogue_is_not_registered(catalogue: Any) -> None:
    with pytest.raises(TypeError, match="register_events"):
        idle_engine().register_events(catalogue)


def test_registering_twice_changes_nothing() -> None:
    engine = talking_engine(Talk.SPOKEN)
    seen: list[int] = []
    engine.connect(Talk.SPOKEN, lambda engine: seen.append(engine.state.iteration))
    engine.register_events(Talk)
    engine.run(max_iters=1)
    assert seen == [1]


def test_the_engines_own_events_are_not_fired_by_users() -> None:
    with pytest.raises(ValueError, match=r"fire\(Events.STARTED\)"):
        idle_engine().fire(Events.STARTED)


def test_two_engines_do_not_hear_each_other() -> None:
    one, two = talking_engine(Talk.SPOKEN), idle_engine()
    two.register_events(Talk)
    heard: list[str] = []
    one.connect(Talk.SPOKEN, lambda engine: heard.append("one"))
    two.connect(Talk.SPOKEN, lambda engine: heard.append("two"))
    one.run(max_iters=1)
    assert heard == ["one"]


def test_a_decorated_receiver_is_checked_as_it_is_called() -> None:
    engine = kit.build(kit.linear(5, 1))
    seen: list[int] = []

    def inner(engine: Any, extra: int) -> bool:
        seen.append(extra)
        return True

    @wraps(inner)
    def fills_in(engine: Any) -> bool:
        return inner(engine, 3)

    @wraps(fills_in)
    def needs_more(engine: Any, extra: int) -> None: ...

    class Counter:
        def method(self, engine: Any) -> None:
            seen.append(4)

    @wraps(Counter.method)
    def of_an_object(engine: Any) -> None:
        Counter().method(engine)

    engine.connect(Events.STARTED(when=fills_in), fills_in)
    engine.connect(Events.STARTED, of_an_object)
    with pytest.raises(TypeError, match="cannot be called with only the engine: missing a required argument: 'extra'"):
        engine.connect(Events.STARTED, needs_more)
    engine.run(kit.batches(1), max_epochs=1)
    assert sorted(seen) == [3, 3, 4]
