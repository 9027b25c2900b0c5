"""What looks wrong as a function is connected or a handler attached: connected twice, never called, or without effect."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..authoring.functions import names_in
from ..core.connection import Connection
from ..core.events import Events
from ..core.handler import Handler

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["never_called", "report_double", "report_handler"]


def report_handler(engine: Engine, handler: Handler) -> None:
    """Report a handler that is never called, or whose state a resumed run would refuse."""
    if (never := never_called(handler)) is not None:
        engine.remark("W41", *never, handler.name)
    kind = type(handler)
    if kind.state_dict is not Handler.state_dict and kind.load_state_dict is Handler.load_state_dict:
        engine.remark(
            "W47",
            f"{kind.__name__} overrides state_dict but not load_state_dict, so a resumed run cannot load its state",
            "also override load_state_dict",
            handler.name,
        )


_OPTIONAL = (
    *("attached", "detached", "findings", "metric_names", "parameter_copies", "rehearse"),
    *("state_dict", "load_state_dict", "sync_written"),
)
_LABELS = frozenset(event.label for event in Events)


def never_called(handler: Handler) -> tuple[str, str] | None:
    """What of a handler is never called though it seems to be meant to, and the fix; None if there is nothing."""
    kind = type(handler)
    subscribed = {subscription.method for subscription in handler.subscriptions}
    if (found := _without_on(kind, subscribed) or _covered(kind)) is not None:
        return found
    if subscribed or any(getattr(kind, name) is not getattr(Handler, name) for name in _OPTIONAL):
        return None
    return (
        f"{kind.__name__} has no method decorated with @on(...), so attaching it connects none of its methods",
        "decorate the methods that should be called, for example with @on(Events.EPOCH_COMPLETED)",
    )


def _without_on(kind: type, subscribed: set[str]) -> tuple[str, str] | None:
    """A method with the name of an event that is not decorated, and the fix."""
    for name in dir(kind):
        label = name.removeprefix("on_")
        if (
            label in _LABELS
            and name not in subscribed
            and (name != label or "_" in label)
            and callable(getattr(kind, name))
            and not _is_named(kind, name)
        ):
            return (
                f"{kind.__name__}.{name} has the name of an event but is not decorated with @on(...), so attaching the "
                "handler does not connect this method",
                f"put @on(Events.{label.upper()}) above the method, or rename it",
            )
    return None


def _covered(kind: type) -> tuple[str, str] | None:
    """A method whose `on` another decorator hides, and the fix."""
    for name, method in vars(kind).items():
        inner = getattr(method, "__wrapped__", None)
        if hasattr(inner, "_signalfire_subscriptions") and not hasattr(method, "_signalfire_subscriptions"):
            return (
                f"{kind.__name__}.{name} is never called, because a decorator above @on(...), such as @staticmethod, "
                "hides it",
                f"remove the decorator, and define {name}(self, engine); or put @on(...) above it",
            )
    return None


def _is_named(kind: type, name: str) -> bool:
    """Whether another method of a handler names this one, to call or to connect it."""
    own = (base for base in kind.__mro__ if not base.__module__.startswith(("signalfire.", "builtins")))
    return any(name in names_in(method) for base in own for key, method in vars(base).items() if key != name)


def report_double(engine: Engine, event: object, added: Connection, others: Iterable[Connection]) -> None:
    """Report a function that is about to be called twice at an event: connected twice, or defined again and connected again."""
    for other in others:
        if other.filter is not None and added.filter is not None:
            continue  # "every 100, and at the first": meant
        if event is Events.GRADIENTS_READY and added.phase != other.phase:
            continue  # before and after clipping
        if added.of(other.receiver):
            what = f"{added!r} is connected to {event} twice, so it is called twice"
        elif _replaces(added.receiver, other.receiver):
            what = f"a second {added!r} is connected to {event} while the first is still connected, so both are called"
        else:
            continue
        engine.remark(
            "W44",
            what,
            f"detach the earlier one first, with engine.detach({added!r}) or the handle that connect() returned; in a "
            "notebook, build the engine in the cell that connects the function; in a loop, use functools.partial to "
            "bind the arguments that differ",
            key=(event, repr(added)),
        )
        return


def _replaces(one: object, other: object) -> bool:
    """Whether a function is another one once more, of one `Connection.kind`.

    Either they cannot differ, as they have one code, captured variables and defaults; or both have one name in a module, where
    the second definition replaced the first, as in a notebook's cell that was changed and run again.
    """
    if not (inspect.isfunction(one) and inspect.isfunction(other)) or one.__globals__ is not other.__globals__:
        return False
    return one.__code__ == other.__code__ or (
        one.__name__ == one.__qualname__ and one.__name__ not in ("_", "<lambda>")
    )
