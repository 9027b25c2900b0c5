"""Signalfire: a PyTorch training engine whose loop only emits events, and whose every feature is a handler."""

if __name__ != "signalfire":
    raise ImportError(
        f"this package is installed as 'signalfire', but was imported as {__name__!r}; "
        "write `from signalfire import ...` (after `pip install -e .`): a second copy of every class would not fit the first"
    )

from .connection import Connection, Phase
from .data import CombinedData, DataError, ReloadedData, RereadingWarning
from .engine import Engine
from .events import AnyEvent, EventEnum, Events, EventUnion, FilteredEvent
from .findings import Finding, FindingError, Findings, FindingWarning, allow
from .handler import Handler, on
from .interval import Interval
from .optimizers import groups
from .randomness import seed_everything
from .registry import Attachment
from .signals import Signal
from .state import MetricStore, State
from .update import Update, UpdateState
from .wiring import Wiring

__version__ = "0.2.0"

__all__ = [
    "AnyEvent",
    "Attachment",
    "CombinedData",
    "Connection",
    "DataError",
    "Engine",
    "EventEnum",
    "EventUnion",
    "Events",
    "FilteredEvent",
    "Finding",
    "FindingError",
    "FindingWarning",
    "Findings",
    "Handler",
    "Interval",
    "MetricStore",
    "Phase",
    "ReloadedData",
    "RereadingWarning",
    "Signal",
    "State",
    "Update",
    "UpdateState",
    "Wiring",
    "allow",
    "groups",
    "on",
    "seed_everything",
]
