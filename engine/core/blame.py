"""Warnings that name the line of the user's code which led to them."""

from __future__ import annotations

import sys
import warnings

__all__ = ["place_of_user", "warn"]


def warn(message: str | Warning, category: type[Warning] | None = None) -> None:
    """Emit a warning of the innermost line that is neither in this package nor in torch."""
    warnings.warn(message, category, stacklevel=_depth_of_user())


def place_of_user() -> tuple[str, int]:
    """The file and the line of the user's code that is being run."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _depth_of_user() -> int:
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        depth, frame = depth + 1, frame.f_back
    return depth


def _is_ours(module: str) -> bool:
    return module == "signalfire" or module.startswith(("signalfire.", "contextlib", "torch."))
