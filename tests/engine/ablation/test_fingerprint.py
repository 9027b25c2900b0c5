"""A fingerprint leaves what it reads as it was, and counts what code reads from outside of the program."""

from __future__ import annotations

import abc
import argparse
import copy
import dataclasses
import enum
import functools
import json
import os
import sys
from collections.abc import Callable
from os import environ, getenv
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
import torch

from signalfire.ablation.fingerprint import NotDigestibleError, fingerprint

T = TypeVar("T")


class Plain:
    def __init__(self) -> None:
        self.value = 1


class Own:
    """A class that holds an instance of its own."""

    one: Own

    def __init__(self) -> None:
        self.value = 1


Own.one = Own()


class Slots:
    __slots__ = ("__dict__", "value")

    def __init__(self) -> None:
        self.value = 1


class Kind(enum.Flag):
    FIRST = 1
    SECOND = 2


class Box(Generic[T]):
    pass


class Base(abc.ABC):
    @abc.abstractmethod
    def value(self) -> int: ...


class Derived(Base):
    def value(self) -> int:
        return 1


@dataclasses.dataclass
class Config:
    width: int = 3


USED: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "copied": (Plain(), copy.copy),
    "an instance of its own": (Own, lambda kind: copy.copy(kind.one)),
    "with slots": (Slots(), copy.deepcopy),
    "annotated": (Plain, lambda kind: kind.__annotations__),
    "a combination of flags": (Kind.FIRST, lambda first: Kind(3) | first),
    "a generic class": (Box[int](), lambda box: (copy.copy(box), Box[float])),
    "an abstract class": (
        Derived(),
        lambda derived: (isinstance(3, Base), issubclass(Plain, Base), copy.copy(derived)),
    ),
    "a data class": (Config(), lambda config: (dataclasses.replace(config), repr(config))),
    "a module": (torch.nn.Linear(1, 1), lambda module: module(torch.ones(1, 1))),
}


@pytest.mark.parametrize("name", USED)
def test_it_is_the_same_after_what_it_reads_was_used(name: str) -> None:
    value, use = USED[name]
    kind = value if isinstance(value, type) else type(value)
    attributes = list(vars(kind))
    before = fingerprint(value, "build")
    assert list(vars(kind)) == attributes
    assert fingerprint(value, "build") == before
    use(value)
    assert fingerprint(value, "build") == before


# ---- what code reads from outside -------------------------------------------------------------------------------------

NAME = "SIGNALFIRE_TEST_WIDTH"


def subscript() -> Any:
    return os.environ["SIGNALFIRE_TEST_WIDTH"]


def got() -> Any:
    return int(os.environ.get("SIGNALFIRE_TEST_WIDTH", "3")) + 1


def got_by_name() -> Any:
    return environ.get(NAME)


def asked() -> Any:
    return os.getenv("SIGNALFIRE_TEST_WIDTH", "3")


def asked_alone() -> Any:
    return getenv(NAME)


def asked_inside() -> Any:
    import os

    return [os.getenv("SIGNALFIRE_TEST_WIDTH") for _ in range(2)]


def there() -> Any:
    return "SIGNALFIRE_TEST_WIDTH" in os.environ


class Reading:
    def __call__(self) -> Any:
        return os.environ["SIGNALFIRE_TEST_WIDTH"]


@pytest.mark.parametrize(
    "function",
    [subscript, got, got_by_name, asked, asked_alone, asked_inside, there, Reading(), functools.partial(subscript)],
    ids=["subscript", "got", "got by name", "asked", "asked alone", "asked inside", "there", "an object", "bound"],
)
def test_a_variable_of_the_environment_counts_with_its_value(
    function: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    digests: list[str] = []
    for value in ("4", "8", None, "4"):
        monkeypatch.setenv(NAME, value) if value else monkeypatch.delenv(NAME)
        monkeypatch.setenv("SIGNALFIRE_TEST_OTHER", f"{len(digests)}")
        digests.append(fingerprint(function, "run"))
    assert len({*digests}) == 3
    assert digests[0] == digests[3]


def sets() -> None:
    os.environ["SIGNALFIRE_TEST_WIDTH"] = "4"
    os.environ.update({"SIGNALFIRE_TEST_WIDTH": "8"})


def of_its_own(engine: Any) -> Any:
    return engine.environ["SIGNALFIRE_TEST_WIDTH"]


@pytest.mark.parametrize("function", [sets, of_its_own])
def test_a_variable_that_is_set_or_is_none_of_the_system_does_not_count(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprint(function, "run")
    monkeypatch.setenv(NAME, "4")
    assert fingerprint(function, "run") == before


def computed(name: str) -> Any:
    return os.environ[name + "_WIDTH"]


def all_of_them() -> Any:
    return dict(os.environ)


@pytest.mark.parametrize("function", [computed, all_of_them])
def test_a_variable_whose_name_is_not_in_the_code_asks_for_config(function: Callable[..., Any]) -> None:
    with pytest.raises(
        NotDigestibleError, match=r"the content of os\.environ cannot be .* reads environment variables whose names"
    ):
        fingerprint(function, "run")
    assert fingerprint(function, "run", strict=False)


def first_argument() -> Any:
    return sys.argv[1]


def parsed() -> Any:
    return argparse.ArgumentParser().parse_args()


@pytest.mark.parametrize("function", [first_argument, parsed])
def test_the_command_line_counts(function: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for script, width in (("a.py", "4"), ("a.py", "8"), ("b.py", "4")):
        monkeypatch.setattr(sys, "argv", [script, width])
        digests.append(fingerprint(function, "run"))
    assert digests[0] != digests[1]
    assert digests[0] == digests[2]


SETTINGS = Path("settings.json")


def opened() -> Any:
    with open("settings.json") as file:
        return file.read()


def text() -> Any:
    return Path("settings.json").read_text()


def text_of_a_global() -> Any:
    return SETTINGS.read_bytes()


def logs() -> None:
    with open("settings.json", "a") as file:
        print("more", file=file)


def one_key() -> Any:
    with open("settings.json") as file:
        return json.load(file)["a"]  # which is no mode of a file


def beside_a_log() -> Any:
    sys.stdout.write("reads")
    with open("log.txt", "a") as log:
        log.write("more")
    path = "settings.json"
    return open(path).read()


def of_numpy() -> Any:
    return np.loadtxt("settings.json")


@pytest.mark.parametrize("function", [opened, text, text_of_a_global, one_key, beside_a_log, of_numpy, logs])
def test_a_file_counts_with_its_content_where_the_code_names_it(
    function: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    digests = []
    for content in ("4", "8", "4"):
        SETTINGS.write_text(content)
        digests.append(fingerprint(function, "run"))
    assert (digests[0] != digests[1]) == (function is not logs)
    assert digests[0] == digests[2]
