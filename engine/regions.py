"""Cleaning up: context managers that are always left, and errors that come up meanwhile, which are never lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

__all__ = ["Regions", "note_problems"]

T = TypeVar("T")


class Regions:
    """The context managers that are open around what the engine is doing.

    A region is a part of a run at whose end everything that was entered inside it is left: the run itself, an evaluation, an
    update, the forward with its loss.

    Attributes:
        depth: how many context managers are open; a region remembers it when it opens.
    """

    __slots__ = ("_entered", "_regions", "depth")

    def __init__(self) -> None:
        self._entered: list[AbstractContextManager[Any]] = []
        self._regions = 0  # how many regions are open, those inside an iteration not counted
        self.depth = 0

    def enter(self, manager: AbstractContextManager[T]) -> T:
        """Enter a context manager that is left at the end of the innermost open region, also after an error.

        The regions are the run, an evaluation, an update, and the forward with its loss; see `Events`.
        """
        if not self._regions:
            raise RuntimeError(f"enter({manager!r}): no region is open outside a run")
        value = manager.__enter__()
        self._entered.append(manager)
        self.depth += 1
        return value

    def open(self) -> None:
        """Open a region, which is closed with `close_all`, or with the ``with`` block of `region`."""
        self._regions += 1

    @contextmanager
    def region(self) -> Iterator[None]:
        """A region around the ``with`` block."""
        outside = self.depth
        self._regions += 1
        try:
            yield
        except BaseException as error:
            self._regions -= 1
            self.close(outside, error)
            raise
        self._regions -= 1
        self.close(outside)

    def close_all(self, error: BaseException | None) -> None:
        """Close the outermost region."""
        self._regions = 0
        self.close(0, error)

    def close(self, outside: int, error: BaseException | None = None) -> None:
        """Leave what was entered since the depth was ``outside``: last in, first out, all of it, also after an error.

        Args:
            outside: the depth to return to.
            error: the error that is being raised. No manager can suppress it; what goes wrong here is added to its notes.
        """
        leaving = error
        while self.depth > outside:
            manager = self._entered.pop()
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
    """Report the errors of cleaning up: in the notes of the error that is being raised, or by raising the first of them.

    An interrupt is never swallowed: it is raised in place of an error.
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
