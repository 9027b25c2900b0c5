"""Building blocks of a logger for a custom tracking service; see `RemoteLogger`."""

from __future__ import annotations

from ._common.remote_logging import Item, RemoteLogger, Status, Stored

__all__ = ["Item", "RemoteLogger", "Status", "Stored"]
