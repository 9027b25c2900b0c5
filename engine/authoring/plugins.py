"""Handlers of other packages, which announce them as entry points of the group ``signalfire.handlers``.

In the ``pyproject.toml`` of such a package:

    [project.entry-points."signalfire.handlers"]
    weight_norm = "my_package.handlers:WeightNorm"
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..core.handler import Handler
from .checks import did_you_mean

__all__ = ["GROUP", "find_handler", "handlers_of_packages", "package_of"]

GROUP = "signalfire.handlers"


def handlers_of_packages() -> dict[str, EntryPoint]:
    """The entry points of installed packages by name; where two packages have the same name, ``package.name`` for both."""
    found = sorted(entry_points(group=GROUP), key=lambda one: (one.name, package_of(one)))
    names = [one.name for one in found]
    return {one.name if names.count(one.name) == 1 else f"{package_of(one)}.{one.name}": one for one in found}


def package_of(entry: EntryPoint) -> str:
    """The name of the package that announces a handler."""
    return entry.dist.name if entry.dist is not None else entry.module.partition(".")[0]


def find_handler(name: str) -> type[Handler]:
    """The handler class that a package announces under a name.

    Raises:
        LookupError: if none does, naming those that there are.
        TypeError: if what is announced is no handler class.
    """
    known = handlers_of_packages()
    if name not in known:
        there = ", ".join(known) or "none"
        raise LookupError(
            f"no installed package has an entry point {name!r} in the group {GROUP!r}{did_you_mean(name, known)}; "
            f"available entry points: {there}"
        )
    found: Any = known[name].load()
    if not isinstance(found, type) or not issubclass(found, Handler):
        raise TypeError(
            f"the entry point {name!r} of {package_of(known[name])!r}, {known[name].value}, is {found!r}; expected a class "
            "derived from signalfire.Handler"
        )
    return found
