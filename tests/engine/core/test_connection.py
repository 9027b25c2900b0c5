"""One connection: phases, which receivers are the same, the predicate of its own; and the plan of calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from signalfire import Engine, Events, Phase
from signalfire.core.connection import Connection, Plan, Receiver, do_nothing, is_same
from signalfire.core.events import Filter
from tests.kit import idle_engine, recorder


def connection(
    receiver: Receiver, *, when: Callable[[Engine], object] | None = None, owner: str | None = None
) -> Connection:
    return Connection(receiver, Phase.CHANGE, 0, None if when is None else Filter(when=when), owner)


def test_the_phases_are_these_in_this_order() -> None:
    assert [phase.name for phase in Phase] == ["PREPARE", "CHANGE", "FINALIZE", "RECORD", "CONTROL", "PERSIST"]


def test_a_bound_method_is_known_again() -> None:
    class Counter:
        calls = 0

        def count(self, engine: Engine) -> None:
            self.calls += 1

    engine, counter = idle_engine(), Counter()
    engine.connect(Events.STARTED, counter.count)
    with pytest.raises(ValueError, match="already connected"):
        engine.connect(Events.STARTED, counter.count)
    engine.signal(Events.STARTED).disconnect(counter.count)
    engine.run(max_iters=1)
    assert counter.calls == 0


def test_receivers_are_the_same_by_identity_and_not_by_equality() -> None:
    class Equal:
        def __eq__(self, other: object) -> bool:
            return True

        def __call__(self, engine: Engine) -> None: ...

        def method(self, engine: Engine) -> None: ...

    one, other = Equal(), Equal()
    assert is_same(one, one)
    assert not is_same(one, other)
    assert is_same(one.method, one.method)
    assert not is_same(one.method, one)


class EverySecond:
    """A predicate that counts by itself, from where it was restarted."""

    asked = 0

    def __call__(self, engine: Engine) -> bool:
        self.asked += 1
        return self.asked % 2 == 0

    def restart(self, engine: Engine) -> None:
        self.asked = engine.state.iteration


def test_each_connection_has_a_predicate_of_its_own() -> None:
    engine, log, when = idle_engine(), list[str](), EverySecond()
    one, other = (connection(recorder(log, name), when=when) for name in ("one", "other"))
    one.call(engine)
    other.call(engine)
    assert log == []
    one.call(engine)
    assert log == ["one"]
    assert when.asked == 0


def test_a_predicate_that_counts_is_restarted_from_the_current_counts() -> None:
    engine, log = idle_engine(), list[str]()
    engine.state.iteration = 1
    one = connection(recorder(log, "one"), when=EverySecond())
    one.restart(engine)
    connection(recorder(log, "plain"), when=bool).restart(engine)  # one that stores nothing
    one.call(engine)
    assert log == ["one"]


def test_a_connection_shows_its_owner_and_its_receiver() -> None:
    class Named:
        def __call__(self, engine: Engine) -> None: ...

        def look(self, engine: Engine) -> None: ...

    assert repr(connection(Named())) == "Named"
    assert repr(connection(Named().look)) == "look"
    assert repr(connection(Named().look, owner="careful")) == "careful.look"


def test_what_is_silenced_in_a_plan_is_skipped_and_still_known_by_its_call() -> None:
    log: list[str] = []
    stays, leaves = (connection(recorder(log, name)) for name in ("stays", "leaves"))
    plan = Plan([stays, leaves], [stays.call, leaves.call])
    plan.silence((stays,))
    for call in plan:
        call(idle_engine())
    assert log == ["stays"]
    assert plan.connection(leaves.call) is leaves
    assert plan.connection(do_nothing) is None
    assert plan.connection(None) is None
