"""Helpers for the options of a handler."""

from __future__ import annotations

from typing import TypeVar

from signalfire import AnyEvent

__all__ = ["check_function", "events_if"]

F = TypeVar("F")


def check_function(owner: object, argument: str, function: F, expected: str) -> F:
    """Check that an argument is a function, or None.

    Args:
        owner: The object that takes the argument.
        argument: Name of the argument.
        function: Its value.
        expected: What it is to be, such as "a function of the batch".

    Raises:
        TypeError: If it is neither.
    """
    if function is not None and not callable(function):
        raise TypeError(f"{type(owner).__name__}({argument}={function!r}): expected {expected}")
    return function


def events_if(wanted: object, *events: AnyEvent) -> tuple[AnyEvent | None, ...]:
    """The events that an option needs: these if it is wanted, else None for each, which connects no receiver.

    Example:
        >>> from signalfire import Events
        >>> begin_event, end_event = events_if(False, Events.STARTED, Events.ENDED)
        >>> begin_event is None
        True
    """
    return events if wanted else (None,) * len(events)
