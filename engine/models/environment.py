"""What a run needs of devices, shards and optimizers: looked at before it begins, and errors then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..authoring.devices import refusal
from ..core.connection import Phase
from ..core.events import Events, Lifecycle
from ..core.handler import Handler, Service, on
from ..distributed.sharded import is_sharded
from ..updates.optimizer_modes import put_in_training_mode

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["Environment", "check_device"]


class Environment(Service):
    """Refuses what the model's device lacks, shards without a group, and parameters without values."""

    essential = True

    def __init__(self) -> None:
        super().__init__(name="environment")

    @on(Events.MODEL_SETUP, phase=Phase.PERSIST, rank=10**9)
    def check_devices(self, engine: Engine) -> None:
        """Refuse handlers that need what the model's device does not offer."""
        for handler in engine.handlers.values():
            if handler.enabled:
                check_device(engine, handler)

    @on(Lifecycle.JOINING)
    def check_joining(self, engine: Engine, handler: Handler) -> None:
        """Refuse such a handler that joins a run."""
        check_device(engine, handler)

    @on(Lifecycle.BUILT, rank=-2)
    def look(self, engine: Engine) -> None:
        """Put optimizers in training mode, and refuse modules that cannot be trained."""
        if engine.training:
            put_in_training_mode(engine)
        check_modules(engine)


def check_modules(engine: Engine) -> None:
    """Raise ValueError for parameters on the meta device, and for sharded ones in a single process."""
    for name, root in engine.modules.items():
        sharded = [p for p in root.parameters() if is_sharded(p) and p.device_mesh.size() > 1]  # type: ignore[attr-defined]
        if sharded and not engine.processes.distributed:
            raise ValueError(
                f"the model {name!r} is sharded over ranks, but the handler that sharded it is not attached; attach "
                "the handler again, or call handler.unshard(engine) before detaching it"
            )
        meta = next((key for key, p in root.named_parameters() if p.device.type == "meta"), None)
        if meta is not None:
            raise ValueError(
                f"the model {name!r} is on the meta device, where parameters such as {meta!r} have no values; "
                "materialize the model with model.to_empty(device=...), and initialize it"
            )


def check_device(engine: Engine, handler: Handler) -> None:
    """Raise ValueError if the handler needs what the model's device does not offer."""
    if handler.device_features and (refused := refusal(engine.device, *handler.device_features)) is not None:
        raise ValueError(f"{handler.name!r}: {refused}")
