"""What people of other engines type first is an error that says the name here."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

import signalfire
from signalfire import Engine, Events, handlers
from signalfire.authoring.elsewhere import ENGINE, HANDLERS, RUN
from tests.kit import batches, build, linear


@pytest.mark.parametrize("name", ENGINE)
def test_an_attribute_of_other_engines(name: str) -> None:
    assert not hasattr(Engine, name)
    with pytest.raises(AttributeError) as error:
        getattr(build(linear(5, 1)), name)
    assert str(error.value) == f"Engine has no attribute {name!r}; here it is {ENGINE[name]}"


def test_a_slip_in_an_attribute_and_a_private_one() -> None:
    engine = build(linear(5, 1))
    with pytest.raises(AttributeError, match=r"Engine has no attribute 'atach'; did you mean 'attach'\?"):
        engine.atach  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"^Engine has no attribute '_runn'$"):
        engine._runn  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", RUN)
def test_an_argument_of_run(name: str) -> None:
    arguments: dict[str, Any] = {name: 3}
    with pytest.raises(TypeError) as error:
        build(linear(5, 1)).run(batches(1), **arguments)
    assert str(error.value) == f"run() got an unexpected keyword argument {name!r}; {RUN[name]}"


def test_a_slip_in_an_argument_of_run() -> None:
    arguments: dict[str, Any] = {"max_epoch": 3}
    with pytest.raises(
        TypeError, match=r"run\(\) got an unexpected keyword argument 'max_epoch'; did you mean 'max_epochs'\?"
    ):
        build(linear(5, 1)).run(batches(1), **arguments)


@pytest.mark.parametrize("name", HANDLERS)
def test_a_class_of_handlers(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute {name!r}; here it is ") as error:
        getattr(handlers, name)
    assert HANDLERS[name] in str(error.value)
    first = HANDLERS[name].split(",")[0].split()[0]
    assert first in handlers.__all__ or not first[0].isupper(), first


EVENTS: dict[str, str] = vars(import_module("signalfire.core.events"))["_ELSEWHERE"] | {
    "on_train_batch_end": "ITERATION_COMPLETED",
    "ON_FIT_START": "STARTED",
}


@pytest.mark.parametrize(("name", "event"), EVENTS.items())
def test_an_event(name: str, event: str) -> None:
    with pytest.raises(AttributeError, match=rf"Events has no event {name!r}; did you mean '{event}'") as error:
        getattr(Events, name)
    assert event in Events.__members__, error


OTHER_NAMES = [
    (kind, name, here)
    for public in handlers.__all__
    if isinstance(kind := getattr(handlers, public), type) and issubclass(kind, signalfire.Handler)
    for name, here in kind.other_names.items()
]


@pytest.mark.parametrize(("kind", "name", "here"), OTHER_NAMES)
def test_an_argument_of_a_handler(kind: Any, name: str, here: str) -> None:
    with pytest.raises(TypeError) as error:
        kind(**{name: 3})
    assert str(error.value) == f"{kind.__name__}() got an unexpected keyword argument {name!r}; here it is {here}"


def test_a_slip_in_an_argument_of_a_handler() -> None:
    arguments: dict[str, Any] = {"decya": 0.5}
    with pytest.raises(TypeError, match=r"EMA\(\) got an unexpected keyword argument 'decya'; did you mean 'decay'\?"):
        handlers.EMA(**arguments)
