"""Clean-up: context managers that are always exited, and errors during that, which are never lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

__all__ = ["Regions", "note_problems"]

T = TypeVar("T")


class Regions:
    """The context managers that are currently entered.

    A region is a part of a run: the run itself, an evaluation, an update, or the forward pass with its loss. At the end of a
    region, every context manager entered inside it is exited.

    Attributes:
        depth: Number of entered context managers.
    """

    __slots__ = ("_entered", "_regions", "depth")

    def __init__(self) -> None:
        self._entered: list[AbstractContextManager[Any]] = []
        self._regions = 0  # number of open regions, without those inside an iteration
        self.depth = 0

    def enter(self, manager: AbstractContextManager[T]) -> T:
        """Enter a context manager; it is exited at the end of the innermost open region, even after an error.

        The regions are the run, an evaluation, an update, and the forward pass with its loss; see `Events`.
        """
        if not self._regions:
            raise RuntimeError(
                f"enter({manager!r}): no region is open outside a run; call enter() from a handler during a run"
            )
        value = manager.__enter__()
        self._entered.append(manager)
        self.depth += 1
        return value

    def open(self) -> None:
        """Open the region of a run, which `close_all` closes."""
        self._regions += 1

    @contextmanager
    def region(self) -> Iterator[None]:
        """A region around the ``with`` block."""
        outside, regions = self.depth, self._regions
        self._regions += 1
        try:
            yield
        except BaseException as error:
            self._regions = regions
            self.close(outside, error)
            raise
        self._regions = regions
        self.close(outside)

    def close_all(self, error: BaseException | None) -> None:
        """Exit every context manager, and close all regions."""
        self._regions -= 1
        self.close(0, error)

    def close(self, outside: int, error: BaseException | None = None) -> None:
        """Exit the context managers entered since the depth was ``outside``, in reverse order, even if some raise.

        Args:
            outside: Depth to return to.
            error: The error that is being raised. No context manager can suppress it; errors on exit are added to its notes.
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
                    leaving.add_note(f"another error: {type(problem).__name__}: {problem}")
        if leaving is not error and leaving is not None:
            raise leaving


def note_problems(problems: list[BaseException], error: BaseException | None) -> None:
    """Add the errors of clean-up to the notes of the error that is being raised; without one, raise the first of them.

    An interrupt among them is never swallowed: it is raised in place of an error.
    """
    leaving = error
    if error is None or isinstance(error, Exception):
        interrupt = next((problem for problem in problems if not isinstance(problem, Exception)), None)
        leaving = interrupt or error or next(iter(problems), None)
    for problem in problems:
        if leaving is not None and problem is not leaving:
            notes = "; ".join(getattr(problem, "__notes__", ()))
            leaving.add_note(f"another error: {type(problem).__name__}: {problem} ({notes})")
    if leaving is not None and leaving is not error:
        raise leaving
