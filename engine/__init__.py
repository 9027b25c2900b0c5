"""Signalfire: a PyTorch training engine whose loop only emits events, and whose every feature is a handler."""

if __name__ != "signalfire":
    raise ImportError(
        f"this package is installed as 'signalfire', but was imported as {__name__!r}. Classes that are imported under "
        "both names are not compatible with each other; run `pip install -e .`, and write `from signalfire import ...`"
    )

from typing import TYPE_CHECKING

from .authoring.elsewhere import install as _hint_at_names
from .authoring.elsewhere import missing_attribute as _missing_attribute
from .authoring.interval import Interval
from .authoring.randomness import seed_everything
from .commands.moved import install as _find_moved
from .core.connection import Connection, Phase
from .core.events import AnyEvent, EventEnum, Events, EventUnion, FilteredEvent
from .core.handler import Handler, on
from .core.registry import Attachment
from .core.signals import Signal
from .core.state import MetricStore, State
from .core.update import UpdateState
from .data import CombinedData, DataError, ReloadedData, RereadingWarning
from .engine import Engine
from .findings import Finding, FindingError, Findings, FindingWarning, allow
from .runs.wiring import Wiring
from .updates.optimizers import groups
from .updates.spec import Update

__version__ = "0.3.0"

_find_moved()
_hint_at_names()

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

if not TYPE_CHECKING:  # type checkers would accept any name of a module that has a __getattr__

    def __getattr__(name: str) -> object:
        raise _missing_attribute(__name__, name)
