"""Device placement of the model and of every batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.authoring import (
    Claim,
    DeviceFeature,
    check_bool,
    first_wide,
    map_leaves,
    refusal,
    tensors_in,
    unavailable,
)
from signalfire.authoring.versions import current_accelerator

__all__ = ["DeviceTransfer"]


class DeviceTransfer(Handler):
    """Moves the model to a device before its optimizers are built, and every batch after it is loaded.

    A batch may be a tensor, an object with a ``to`` method, such as a packed sequence, or nested containers of these.
    Containers are tuples, lists, deques, mappings, named tuples, dataclasses, namespaces, and the classes of attrs and
    pydantic. A ``to`` method that returns None must move the object in place. Objects without ``to`` are left unchanged, and
    W22 reports those that hold tensors. The model stays on the device after the run. An evaluator that the trainer runs
    (`Validation`, `Engine.evaluate`) inherits this handler.

    With ``prefetch``, batches are copied on a separate CUDA stream. The host runs ahead of the GPU until something reads a value
    back (``loss.item()``), so the next batch is copied while the GPU still computes. The order of loading and the random number
    streams do not change. Batches must be in pinned memory: ``DataLoader(pin_memory=True)``.

    Args:
        device: Device to train on, for example "cuda", "cuda:1" or "cpu"; by default, the available accelerator, or the CPU if
            there is none. With several processes, "cuda" and the default select the GPU of each process's LOCAL_RANK.
        non_blocking: Whether copies from pinned memory may overlap with work on the host.
        prefetch: Whether copies may also overlap with work on a CUDA device; no effect on the CPU, where nothing is copied.

    Raises:
        ValueError: If the device is not available or lacks a required feature, such as float64 on MPS; see `devices.TABLE`.

    Source: "CUDA semantics" in PyTorch's documentation, for `Tensor.record_stream`.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> class Sample:
        ...     def to(self, device):
        ...         print("moved to", device)
        ...         return torch.ones(4, 2, device=device), torch.ones(4, 1, device=device)
        >>> engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> _ = engine.attach(DeviceTransfer("cpu"))
        >>> _ = engine.run([Sample()], max_epochs=2)
        moved to cpu
        moved to cpu
    """

    by_shard = True
    device_features = frozenset({DeviceFeature.TRANSFER, DeviceFeature.PREFETCH})

    def __init__(
        self,
        device: str | torch.device | None = None,
        *,
        non_blocking: bool = True,
        prefetch: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.device = _default_device() if device is None else _device_of(device)
        if (absent := unavailable(self.device)) is not None:
            raise ValueError(f"DeviceTransfer(device={device!r}): {absent}; omit device= to use the available device")
        self.non_blocking = check_bool(self, "non_blocking", non_blocking)
        self.prefetch = check_bool(self, "prefetch", prefetch)
        if prefetch and not non_blocking:
            raise ValueError(
                "DeviceTransfer(prefetch=True, non_blocking=False): prefetching needs non-blocking copies; omit "
                "non_blocking="
            )
        if prefetch:
            if (refused := refusal(self.device, DeviceFeature.PREFETCH)) is not None:
                raise ValueError(f"DeviceTransfer(device={device!r}, prefetch=True): {refused}")
        else:
            self.device_features -= {DeviceFeature.PREFETCH}
        self._no_float64 = refusal(self.device, DeviceFeature.FLOAT64)
        self._copy_stream: torch.cuda.Stream | None = None  # only during a run
        self._left: set[type] = set()  # classes of objects that were left where they were in this run

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(Claim("the device", inherited=True), by=self)

    def settings(self) -> dict[str, Any]:
        """None: a run may resume on a different device."""
        return {}

    @on(Events.MODEL_SETUP, phase=Phase.PREPARE, reads=["modules"], writes=["device"])
    def move_model(self, engine: Engine) -> None:
        """Move the modules to the device. The parameters stay the same objects, so existing optimizers remain valid."""
        for name, module in engine.modules.items():
            if any(p.device.type == "meta" for p in module.parameters()):
                raise ValueError(
                    f"{self.name!r}: the model {name!r} is on the meta device, where parameters have no values; "
                    "materialize it first with model.to_empty(device=...), then initialize it"
                )
            if self._no_float64 is not None:
                named = (*module.named_parameters(), *module.named_buffers())
                if (wide := first_wide(named)) is not None:
                    raise ValueError(
                        f"{self.name!r}: {wide!r} in the model {name!r} is float64 or complex128, but "
                        f"{self._no_float64}"
                    )
            module.to(self.device)
        if self.prefetch and self.device.type == "cuda" and engine is self.engine:  # not an evaluator that inherits it
            self._copy_stream = torch.cuda.Stream(self.device)

    @on(Events.GET_BATCH_COMPLETED, phase=Phase.PREPARE, reads=["batch"], writes=["device"])
    def move_batch(self, engine: Engine) -> None:
        """Move the batch to the device."""
        batch = engine.state.batch
        if self._copy_stream is None:
            engine.state.batch = map_leaves(self._to_device, batch)
            return
        with torch.cuda.stream(self._copy_stream):
            batch = map_leaves(lambda leaf: self._to_device(leaf) if _has_known_tensors(leaf) else leaf, batch)
        compute_stream = torch.cuda.current_stream(self.device)
        compute_stream.wait_stream(self._copy_stream)
        for tensor in tensors_in(batch):
            if tensor.is_cuda:
                tensor.record_stream(compute_stream)  # keeps its memory from being reused for a later copy too early
        engine.state.batch = map_leaves(self._to_device, batch)

    @on(Events.ENDED, reads=[], writes=[])
    def release(self, engine: Engine) -> None:
        """Release the copy stream."""
        self._copy_stream = None
        self._left.clear()

    def _to_device(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if self._no_float64 is not None and first_wide([("", value)]) is not None:
                raise ValueError(
                    f"{self.name!r}: the batch has a {value.dtype} tensor of shape {tuple(value.shape)}, but "
                    f"{self._no_float64}"
                )
            return value if value.device == self.device else value.to(self.device, non_blocking=self.non_blocking)
        if hasattr(value, "to"):
            moved = value.to(self.device)
            return value if moved is None else moved  # moved in place
        if type(value) not in self._left:
            self._report_unless_known(value)
        return value

    def _report_unless_known(self, value: Any) -> None:
        """Report a class that holds tensors, but cannot be moved; each class is looked at once a run."""
        kind = type(value)
        self._left.add(kind)
        held = getattr(value, "__dict__", {}).values()
        if self.engine is not None and any(tensor.device.type != self.device.type for tensor in tensors_in(list(held))):
            self.engine.findings.report(
                "W22",
                f"{self.name!r}: a batch holds a {kind.__name__}, whose tensors are not moved to {self.device}",
                f"define a to(device) method in {kind.__name__}, or make {kind.__name__} a dataclass",
                self.name,
                key=kind,
            )


def _has_known_tensors(value: Any) -> bool:
    """Whether the tensors in a value can be found, so that their memory can be kept while it is in use."""
    return isinstance(value, Tensor | PackedSequence)


def _device_of(device: Any) -> torch.device:
    """The device that is meant; torch's own errors list names that no user knows."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"DeviceTransfer(device={device!r}): expected a device, such as 'cuda', 'cuda:1', 'mps' or 'cpu'; omit "
            "device= to use the available device"
        ) from None


def _default_device() -> torch.device:
    return current_accelerator() or torch.device("cpu")
