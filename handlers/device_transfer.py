"""Device placement: the model once, every batch as it comes."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from signalfire import Engine, Events, Handler, Phase, on

__all__ = ["DeviceTransfer"]


class DeviceTransfer(Handler):
    """Moves the model to a device before its optimizers are built, and every batch when it has been read.

    A batch may be a tensor, tuples, lists, dicts, named tuples or dataclasses of such, or anything with a ``to`` method, as
    packed sequences have; what has none stays as it is. The model stays on the device after the run.

    Args:
        device: such as "cuda", "cuda:1", "cpu"; by default the accelerator that there is, else the CPU.
        non_blocking: whether copies from pinned memory may overlap with what the host does next.

    Example:
        >>> DeviceTransfer("cpu").device
        device(type='cpu')
    """

    def __init__(
        self, device: str | torch.device | None = None, *, non_blocking: bool = True, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        try:
            self.device = _default_device() if device is None else torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"DeviceTransfer(device={device!r}): {str(error).splitlines()[0]}") from None
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"DeviceTransfer(device={device!r}): no CUDA device can be used here; leave out the device for the "
                "one that there is"
            )
        self.non_blocking = non_blocking

    def attached(self, engine: Engine) -> None:
        engine.claim("the device", by=self)

    @on(Events.MODEL_SETUP, phase=Phase.PREPARE)
    def place_model(self, engine: Engine) -> None:
        """Move the modules; an optimizer that was built before keeps working, since the parameters stay the same objects."""
        for name, module in engine.modules.items():
            if any(p.device.type == "meta" for p in module.parameters()):
                raise ValueError(
                    f"{self.name!r}: the model {name!r} is on the meta device, where parameters have no values; "
                    "materialise it first: model.to_empty(device=...) and initialise it"
                )
            module.to(self.device)

    @on(Events.GET_BATCH_COMPLETED, phase=Phase.PREPARE)
    def place_batch(self, engine: Engine) -> None:
        """Move the batch."""
        engine.state.batch = self._placed(engine.state.batch)

    def _placed(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if value.device == self.device else value.to(self.device, non_blocking=self.non_blocking)
        if isinstance(value, tuple) and hasattr(value, "to"):  # a packed sequence
            return value.to(self.device)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._placed(item) for item in value))
        if isinstance(value, tuple | list):
            return type(value)(self._placed(item) for item in value)
        if isinstance(value, dict):
            placed = copy.copy(value)
            for key, item in value.items():
                placed[key] = self._placed(item)
            return placed
        if is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "to"):
            return replace(
                value, **{one.name: self._placed(getattr(value, one.name)) for one in fields(value) if one.init}
            )
        return value.to(self.device) if hasattr(value, "to") else value


def _default_device() -> torch.device:
    device = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if device is None else device
