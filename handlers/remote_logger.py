"""What a logger for a tracking service of your own is made of; `RemoteLogger` says how."""

from __future__ import annotations

from ._common.remote_logging import Item, RemoteLogger, Status, Stored

__all__ = ["Item", "RemoteLogger", "Status", "Stored"]
