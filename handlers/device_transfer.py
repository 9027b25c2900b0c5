"""Device placement: the model once, every batch as it comes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.acts import Override
from signalfire.batches import map_leaves, tensors_in
from signalfire.checks import check_bool

__all__ = ["DeviceTransfer"]


class DeviceTransfer(Handler):
    """Moves the model to a device before its optimizers are built, and every batch when it has been read.

    A batch may be a tensor, tuples, lists, dicts, named tuples or dataclasses of such, or anything with a ``to`` method, as
    packed sequences have; what has none stays as it is. The model stays on the device after the run.

    With ``prefetch`` batches are copied on a CUDA stream of their own. The host is ahead of the GPU as long as nothing reads a
    value back (``loss.item()``), so that the next batch is on its way while the GPU still works on this one; nothing is read
    ahead of its turn, and no random number moves. It needs batches in pinned memory: ``DataLoader(pin_memory=True)``.

    Args:
        device: such as "cuda", "cuda:1", "cpu"; by default the accelerator that there is, else the CPU.
        non_blocking: whether copies from pinned memory may overlap with what the host does next.
        prefetch: whether they may overlap with what a CUDA device does, too; elsewhere it has no effect.

    Source: "CUDA semantics" in PyTorch's documentation, for `Tensor.record_stream`.

    Example:
        >>> DeviceTransfer("cpu").device
        device(type='cpu')
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        *,
        non_blocking: bool = True,
        prefetch: bool = False,
        name: str | None = None,
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
        self.non_blocking = check_bool(self, "non_blocking", non_blocking)
        self.prefetch = check_bool(self, "prefetch", prefetch)
        if prefetch and not non_blocking:
            raise ValueError(
                "DeviceTransfer(prefetch=True, non_blocking=False): a copy that blocks overlaps with nothing"
            )
        self._copying: torch.cuda.Stream | None = None  # where batches are copied, while a run goes on

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(Override.DEVICE, by=self)

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
        if self.prefetch and self.device.type == "cuda":
            self._copying = torch.cuda.Stream(self.device)

    @on(Events.GET_BATCH_COMPLETED, phase=Phase.PREPARE)
    def place_batch(self, engine: Engine) -> None:
        """Move the batch."""
        batch = engine.state.batch
        if self._copying is None:
            engine.state.batch = map_leaves(self._moved, batch)
            return
        with torch.cuda.stream(self._copying):
            batch = map_leaves(lambda leaf: self._moved(leaf) if _owns_its_memory(leaf) else leaf, batch)
        computing = torch.cuda.current_stream(self.device)
        computing.wait_stream(self._copying)
        for tensor in tensors_in(batch):
            if tensor.is_cuda:
                tensor.record_stream(computing)  # its memory is not given to a later copy while it is still worked on
        engine.state.batch = map_leaves(self._moved, batch)

    @on(Events.ENDED)
    def let_go(self, engine: Engine) -> None:
        """Keep no stream beyond the run."""
        self._copying = None

    def _moved(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if value.device == self.device else value.to(self.device, non_blocking=self.non_blocking)
        return value.to(self.device) if hasattr(value, "to") else value


def _owns_its_memory(value: Any) -> bool:
    """Whether the tensors in it are known, so that their memory can be kept for as long as it is used."""
    return isinstance(value, Tensor | PackedSequence)


def _default_device() -> torch.device:
    device = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if device is None else device
