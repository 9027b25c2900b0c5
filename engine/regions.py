"""Regions: context managers that are open around a part of the loop, and always left."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

__all__ = ["Regions"]

T = TypeVar("T")


class Regions:
    """The context managers that are open around what the engine does now.

    Attributes:
        depth: how many are open; a region that opens remembers it, and closes what was entered since.
    """

    __slots__ = ("_open", "depth")

    def __init__(self) -> None:
        self._open: list[AbstractContextManager[Any]] = []
        self.depth = 0

    def enter(self, manager: AbstractContextManager[T]) -> T:
        value = manager.__enter__()
        self._open.append(manager)
        self.depth += 1
        return value

    def close(self, outside: int, error: BaseException | None = None) -> None:
        """Leave what was entered since the depth was ``outside``: last in, first out, every one, also after an error."""
        stack = ExitStack()
        for manager in self._open[outside:]:
            stack.push(manager)
        del self._open[outside:]
        self.depth = outside
        # What a manager answers is not asked: an error always leaves.
        stack.__exit__(*((None, None, None) if error is None else (type(error), error, error.__traceback__)))
