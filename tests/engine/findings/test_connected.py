"""Handlers whose methods are never called, and those that are called or connected in another way."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from signalfire import Attachment, Engine, Events, FindingWarning, Handler, on
from tests.kit import batches, build, linear


class Connecting(Handler):
    """Connects a method itself."""

    calls = 0

    def attached(self, engine: Engine) -> None:
        self.connection: Attachment = engine.connect(Events.EPOCH_COMPLETED, self.on_epoch_completed)

    def on_epoch_completed(self, engine: Engine) -> None:
        self.calls += 1


class Template(Handler):
    """Leaves what is done to a method of the class that is made of it."""

    calls = 0

    @on(Events.EPOCH_COMPLETED)
    def finish(self, engine: Engine) -> None:
        self.on_epoch_completed(engine)

    def on_epoch_completed(self, engine: Engine) -> None:
        raise NotImplementedError


class Filled(Template):
    def on_epoch_completed(self, engine: Engine) -> None:
        self.calls += 1


def test_a_method_that_another_one_calls_or_connects_is_not_said_to_be_never_called() -> None:
    handlers = Connecting(), Filled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = build(linear(5, 1), *handlers)
    engine.run(batches(2), max_epochs=2)
    assert [handler.calls for handler in handlers] == [2, 2]


@pytest.mark.parametrize("decorator", [staticmethod, classmethod])
def test_a_decorator_that_hides_on_is_named_and_below_on_it_hides_nothing(decorator: Any) -> None:
    calls: list[Any] = []

    class Hidden(Handler):
        count = decorator(on(Events.EPOCH_COMPLETED)(lambda *given: calls.append(given)))

    class Shown(Handler):
        count = on(Events.EPOCH_COMPLETED)(decorator(lambda *given: calls.append(given)))

    with pytest.warns(
        FindingWarning, match=r"W41: Hidden.count is never called, because a decorator above @on.* hides it"
    ):
        build(linear(5, 1), Hidden()).run(batches(2), max_epochs=2)
    assert not calls
    build(linear(5, 1), Shown()).run(batches(2), max_epochs=2)
    assert len(calls) == 2


class Counter(Handler):
    """Has a method that is connected from outside."""

    calls = 0

    def count(self, engine: Engine) -> None:
        self.calls += 1


def test_a_method_that_is_connected_from_outside_is_called() -> None:
    engine, counter = build(linear(5, 1)), Counter()
    with pytest.warns(FindingWarning, match="W41: Counter has no method decorated .* connects none of its methods"):
        engine.attach(counter)
    engine.connect(Events.EPOCH_COMPLETED, counter.count)
    engine.run(batches(2), max_epochs=2)
    assert counter.calls == 2
