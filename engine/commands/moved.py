"""Modules that have moved: for one minor version, the most used of their old names still work, with a DeprecationWarning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["MOVED", "install"]

MOVED = {
    "signalfire.acts": "signalfire.core.overrides",
    "signalfire.batches": "signalfire.authoring.batches",
    "signalfire.capture": "signalfire.authoring.capture",
    "signalfire.checks": "signalfire.authoring.checks",
    "signalfire.devices": "signalfire.authoring.devices",
    "signalfire.handler": "signalfire.core.handler",
    "signalfire.interval": "signalfire.authoring.interval",
    "signalfire.monitor": "signalfire.authoring.monitor",
    "signalfire.planning": "signalfire.authoring.planning",
    "signalfire.randomness": "signalfire.authoring.randomness",
}
"""The new name of a module by its old one."""


class _Moved(MetaPathFinder, Loader):
    """Finds a module under its new name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The specification of a module that has moved; None for all others."""
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module in place of the empty one that was made under its old name."""
        old, new = module.__name__, MOVED[module.__name__]
        place = "signalfire.authoring" if new.startswith("signalfire.authoring") or old == "signalfire.acts" else new
        warnings.warn(
            f"{old} has moved to {new}, and the old name will be removed in version 0.4.0; import from {place}",
            DeprecationWarning,
            stacklevel=2,
        )
        sys.modules[old] = import_module(new)


def install() -> None:
    """Let the old names be found, after all others."""
    if not any(type(finder).__qualname__ == _Moved.__qualname__ for finder in sys.meta_path):
        sys.meta_path.append(_Moved())
