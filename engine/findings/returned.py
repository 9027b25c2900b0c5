"""What receivers return: nothing is done with it, which is reported where it seems meant to replace something."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..authoring.batches import tensors_in
from ..authoring.functions import names_in
from ..core.connection import Connection
from ..core.events import Events

if TYPE_CHECKING:
    from ..core.events import EventEnum
    from ..core.signals import Signal
    from ..engine import Engine

__all__ = ["look_at_return"]


def look_at_return(signal: Signal, connection: Connection) -> None:
    """Look at what a function returns in its first call; later calls cost nothing more."""
    if signal.event not in (Events.GET_BATCH_COMPLETED, Events.LOSS_COMPUTED) or connection.when is not None:
        return
    if "backward" in names_in(connection.receiver):  # it trains something itself
        return
    receiver, signal_event = connection.receiver, signal.event
    own, of = weakref.ref(connection), weakref.ref(signal)  # they hold what follows

    def first_call(engine: Engine, **kwargs: Any) -> Any:
        before = _current(engine, signal_event)
        returned = receiver(engine, **kwargs)
        connection, signal = own(), of()
        if connection is not None and signal is not None:
            connection.call = receiver
            signal.replan()
            if returned is not None and _current(engine, signal_event) is before:  # else it assigns what it makes
                _report(engine, signal, connection, returned)
        return returned

    connection.call = first_call


def _current(engine: Engine, event: EventEnum) -> Any:
    """What may be replaced at an event."""
    return engine.state.batch if event is Events.GET_BATCH_COMPLETED else engine.state.update.backward_loss


def _lengths(batch: Any) -> list[Any]:
    """The type of a batch, in which a list is as good as a tuple, and the lengths of its tensors."""
    return [list if type(batch) is tuple else type(batch), *(one.shape[:1] for one in tensors_in(batch))]


def _report(engine: Engine, signal: Signal, connection: Connection, returned: Any) -> None:
    batch = signal.event is Events.GET_BATCH_COMPLETED
    if batch:
        what, own = "a batch", engine.state.batch
        meant = _lengths(returned) == _lengths(own)
    else:
        update = engine.state.update
        what, own = "a loss", (update.loss, update.raw_loss, update.backward_loss)
        meant = isinstance(returned, Tensor) and returned.requires_grad and returned.dim() == 0
    tensors = list(tensors_in(returned))
    if meant and tensors and not {id(one) for one in tensors} <= {id(one) for one in tensors_in(own)}:
        engine.remark(
            "W85",
            f"{connection!r} returns {what} at {signal.event}, but return values are ignored",
            f"assign the value: {'engine.state.batch' if batch else 'engine.state.update.backward_loss'} = ...",
            key=(repr(connection), str(signal.event)),
        )
