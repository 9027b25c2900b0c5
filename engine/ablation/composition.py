"""The parts of an engine that decide what a run comes to: handlers, updates and modules."""

from __future__ import annotations

from dataclasses import fields

from signalfire import Engine, Handler

from .runs import writes_or_shows

__all__ = ["parts_of"]

_NOT_ARGUMENTS = {"_enabled", "_initial"}


def parts_of(engine: Engine) -> dict[str, tuple[object, ...]]:
    """Each handler that affects the training, each update and each module, by what it is, with what it is made of."""
    found: dict[str, tuple[object, ...]] = {"options": (engine.streams, engine.training)}
    for name, handler in engine.handlers.items():
        if handler.enabled and not writes_or_shows(handler):
            found[f"handler {name!r}"] = (type(handler), _state(handler))
    for update in engine.updates:
        spec = update.spec
        found[f"update {update.name!r}"] = tuple(getattr(spec, one.name) for one in fields(spec))
    for name, module in engine.modules.items():
        found[f"module {name!r}"] = (module,)
    return found


def _state(handler: Handler) -> dict[str, object]:
    return {name: value for name, value in sorted(handler.__getstate__().items()) if name not in _NOT_ARGUMENTS}
