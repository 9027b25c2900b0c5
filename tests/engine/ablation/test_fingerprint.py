"""A fingerprint leaves what it reads as it was, and does not depend on what Python notes in it meanwhile."""

from __future__ import annotations

import abc
import copy
import dataclasses
import enum
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import pytest
import torch

from signalfire.ablation.fingerprint import fingerprint

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
    "an abstract class": (Derived(), lambda derived: (isinstance(3, Base), issubclass(Plain, Base), copy.copy(derived))),
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
