"""Helpers for the options of a handler."""

from __future__ import annotations

from signalfire import AnyEvent

__all__ = ["events_if"]


def events_if(wanted: object, *events: AnyEvent) -> tuple[AnyEvent | None, ...]:
    """The events that an option needs; None for each if the option is off, which connects no receiver.

    Example:
        >>> from signalfire import Events
        >>> begin_event, end_event = events_if(False, Events.STARTED, Events.ENDED)
        >>> begin_event is None
        True
    """
    return events if wanted else (None,) * len(events)
