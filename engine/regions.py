"""Cleaning up: regions, which are always left, and errors that come up meanwhile, which are always told."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, TypeVar

__all__ = ["Regions", "note_problems"]

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
        """Leave what was entered since the depth was ``outside``: last in, first out, every one, also after an error.

        Args:
            outside: the depth to come back to.
            error: what is leaving. It goes on leaving, whatever a manager answers; what goes wrong here is noted on it.
        """
        leaving = error
        while self.depth > outside:
            manager = self._open.pop()
            self.depth -= 1
            try:
                if leaving is None:
                    manager.__exit__(None, None, None)
                else:
                    manager.__exit__(type(leaving), leaving, leaving.__traceback__)
            except BaseException as problem:
                if leaving is None or (isinstance(leaving, Exception) and not isinstance(problem, Exception)):
                    leaving = problem  # an interrupt is never swallowed
                elif problem is not leaving:
                    leaving.add_note(f"besides, {type(problem).__name__}: {problem}")
        if leaving is not error and leaving is not None:
            raise leaving


def note_problems(problems: list[BaseException], error: BaseException | None) -> None:
    """Tell the errors of cleaning up: as notes on the error that is leaving, or the first of them by itself.

    An interrupt is never swallowed: it leaves in place of an error.
    """
    leaving = error
    if error is None or isinstance(error, Exception):
        interrupt = next((problem for problem in problems if not isinstance(problem, Exception)), None)
        leaving = interrupt or error or next(iter(problems), None)
    for problem in problems:
        if leaving is not None and problem is not leaving:
            notes = "; ".join(getattr(problem, "__notes__", ()))
            leaving.add_note(f"besides, {type(problem).__name__}: {problem} ({notes})")
    if leaving is not None and leaving is not error:
        raise leaving
