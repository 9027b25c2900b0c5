"""``python -m signalfire handlers``: the handlers that come with Signalfire, and those that installed packages announce."""

from __future__ import annotations

import inspect

import signalfire.handlers

from ..authoring.plugins import GROUP, find_handler, handlers_of_packages, package_of
from ..core.handler import Handler

__all__ = ["list_handlers"]


def list_handlers() -> list[str]:
    """The lines that the command prints."""
    public = [getattr(signalfire.handlers, name) for name in signalfire.handlers.__all__]
    included = [one for one in public if inspect.isclass(one) and issubclass(one, Handler)]
    lines = [_line(one.__name__, one) for one in included]
    others = handlers_of_packages()
    lines += ["", f"from installed packages (entry points in the group {GROUP!r}):" + ("" if others else " none")]
    for name, entry in others.items():
        version = "" if entry.dist is None else f" {entry.dist.version}"
        origin = f"  [{package_of(entry)}{version}, {entry.value}]"
        try:
            lines.append(_line(name, find_handler(name)) + origin)
        except Exception as error:
            lines.append(f"{name}: cannot be loaded ({type(error).__name__}: {error}){origin}")
    return lines


def _line(name: str, kind: type[Handler]) -> str:
    """A handler with the first sentence of its docstring."""
    text = " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
    return f"{name}: {text}" if text else name
