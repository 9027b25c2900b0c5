"""States with objects that `torch.load` refuses: they are written without an error, and no run could resume from them."""

from __future__ import annotations

import io
import pickle
import pkgutil
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ..resuming.keys import UNSAVED
from ..resuming.saving import copied

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["report_unloadable"]


def report_unloadable(engine: Engine, state: Mapping[str, Any]) -> None:
    """Report what ``torch.load(weights_only=True)`` refuses in a state, with the place of the first such object.

    Args:
        engine: The engine.
        state: Its state; tensors are left out of what is tried.
    """
    content = io.BytesIO()
    try:
        written = {key: value for key, value in state.items() if key != UNSAVED}
        torch.save(copied(written, lambda tensor: torch.empty(0)), content)
    except (pickle.PicklingError, AttributeError, TypeError):
        return  # whoever writes the state gets this error
    content.seek(0)
    if refused := sorted(get_unsafe_globals_in_checkpoint(content)):
        place, kind = next(((place, kind) for place, kind in _types(state) if kind in refused), ("", refused[0]))
        engine.remark(
            "W47",
            f"the state holds a {kind} ({place}), which torch.load refuses: no run can resume from what is saved",
            f"if you trust {', '.join(refused)}, pass it to torch.serialization.add_safe_globals before the run, and before "
            "it resumes"
            if _loads(content, refused)
            else "keep lists, tuples, dicts, numbers, strings and tensors only",
            key="unloadable",
        )


def _loads(content: io.BytesIO, refused: list[str]) -> bool:
    """Whether a state can be loaded once these types are told to be safe."""
    content.seek(0)
    with safe_globals([pkgutil.resolve_name(name) for name in refused]):
        try:
            torch.load(content, weights_only=True)
        except pickle.UnpicklingError:
            return False
    return True


def _types(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """The places in a state, and the types of what is there."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _types(item, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _types(item, f"{place}[{number}]")
    else:
        yield place, f"{type(value).__module__}.{type(value).__qualname__}"
