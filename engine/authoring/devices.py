"""What works on which device: one table, the availability of a device, and float64 where there is any.

Each cell of the table is "tested" (a test of this package trains on such a device), "expected" (torch offers it, but no test has
run it) or "refused", with the reason. A refusal is an error before the first batch: see `refusal`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = [
    "DEVICES",
    "TABLE",
    "DeviceFeature",
    "Support",
    "as_signed",
    "first_wide",
    "is_readable",
    "refusal",
    "support",
    "unavailable",
    "widened",
]


class DeviceFeature(Enum):
    """What a handler may need from a device beyond tensor operations; see `Handler.device_features`."""

    TRANSFER = "transfer"
    AUTOCAST = "autocast"
    SCALER = "gradient scaling"
    PREFETCH = "prefetching"
    STATISTICS = "memory statistics"
    GENERATOR = "generator state"
    FLOAT64 = "float64"
    COLLECTIVES = "collectives between processes"


@dataclass(frozen=True, slots=True)
class Support:
    """A cell of the table; ``note`` says how far the support goes, or why it is refused."""

    status: Literal["tested", "expected", "refused"]
    note: str = ""


_NAMES = {"cpu": "CPU", "cuda": "CUDA", "mps": "MPS", "xpu": "XPU"}
_TESTED, _EXPECTED = Support("tested"), Support("expected")
_PREFETCH = Support("refused", "prefetching uses CUDA streams; omit prefetch=True")

DEVICES = tuple(_NAMES)
"""The devices of the table, by torch's name."""

_F = DeviceFeature
TABLE: Mapping[str, Mapping[DeviceFeature, Support]] = {
    "cpu": {
        **dict.fromkeys(_F, _TESTED),
        _F.PREFETCH: Support("tested", "nothing is copied"),
        _F.STATISTICS: Support("tested", "memory of the process"),
        _F.COLLECTIVES: Support("tested", "gloo"),
    },
    "cuda": {**dict.fromkeys(_F, _TESTED), _F.COLLECTIVES: Support("expected", "NCCL")},
    "mps": {
        **dict.fromkeys(_F, _EXPECTED),
        _F.PREFETCH: _PREFETCH,
        _F.STATISTICS: Support("expected", "only the current memory, because torch does not record the peak"),
        _F.FLOAT64: Support("refused", "MPS has no float64; convert the tensors to float32, or train on the CPU"),
        _F.COLLECTIVES: Support(
            "refused", "torch.distributed has no backend for MPS; train in a single process, or on the CPU with gloo"
        ),
    },
    "xpu": {
        **dict.fromkeys(_F, _EXPECTED),
        _F.PREFETCH: _PREFETCH,
        _F.SCALER: Support("expected", "on GPUs with float64"),
        _F.FLOAT64: Support("expected", "on GPUs with float64"),
        _F.COLLECTIVES: Support("expected", "backend='cpu:gloo,xpu:xccl'"),
    },
}
"""What works on which device. On any other device all is refused but tensor operations, on a model that is there already."""


def support(device: str | torch.device, feature: DeviceFeature) -> Support:
    """The cell of the table for a device, which need not be available on this machine.

    Example:
        >>> (
        ...     support("mps", DeviceFeature.FLOAT64).status,
        ...     support("cpu", DeviceFeature.AUTOCAST).status,
        ... )
        ('refused', 'tested')
    """
    kind = torch.device(device).type
    if kind in TABLE:
        return TABLE[kind][feature]
    return Support("refused", f"devices of type {kind} are not supported; use one of {', '.join(DEVICES)}")


def refusal(device: str | torch.device, *features: DeviceFeature) -> str | None:
    """Why one of these features cannot be used on this device of this machine, in one sentence; None if all can.

    Torch constructs autocasts and scalers for devices that are not there, and switches them off silently, so this asks for the
    device first.
    """
    device = torch.device(device)
    if device.type == "meta":  # where models stand without values
        return None
    if (absent := unavailable(device)) is not None:
        return absent
    for feature in features:
        cell = support(device, feature)
        if cell.status == "refused":
            return f"{device} does not support {feature.value}: {cell.note}"
        if device.type == "xpu" and feature in (_F.SCALER, _F.FLOAT64) and not _xpu_has_float64(device):
            return f"{device} does not support {feature.value}: this GPU has no float64; use bfloat16 or float32"
    return None


def _xpu_has_float64(device: torch.device) -> bool:
    return bool(torch.xpu.get_device_properties(device).has_fp64)


def unavailable(device: str | torch.device) -> str | None:
    """Why this machine lacks a device, in one sentence; None if it has it.

    Where torch lacks a device it raises ModuleNotFoundError, AssertionError, NotImplementedError or RuntimeError, depending on
    the device. Nothing is allocated on a device that is there.

    Example:
        >>> unavailable("hpu")
        'no hpu device is available: torch.hpu is not installed; import the package that adds it to torch'
    """
    device = torch.device(device)
    kind, name = device.type, _NAMES.get(device.type, device.type)
    if kind in ("cpu", "meta"):
        return None
    module: Any = getattr(torch, kind, None)
    if module is not None and getattr(module, "is_available", bool)():
        count = module.device_count()
        if device.index is None or device.index < count:
            return None
        there = f"the only device is {kind}:0" if count == 1 else f"the devices are {kind}:0 to {kind}:{count - 1}"
        return f"no device {str(device)!r} is available: {there}"
    try:
        torch.empty(0, device=device)
    except ImportError:
        why = f"torch.{kind} is not installed; import the package that adds it to torch"
    except (AssertionError, NotImplementedError):
        why = f"this build of torch ({torch.__version__}) has no {name} support"
    except (RuntimeError, TypeError) as error:  # such as a missing driver
        why = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
    else:
        return None
    return f"no {name} device is available: {why}"


# ---- float64 ------------------------------------------------------------------------------------------------------

_WIDE = (torch.float64, torch.complex128)


def widened(tensor: Tensor) -> Tensor:
    """A real tensor in float64, or in float32 on a device without it."""
    device = tensor.device
    lacks = device.type == "mps" or (device.type == "xpu" and not _xpu_has_float64(device))
    return tensor.to(torch.float32 if lacks else torch.float64)


def as_signed(tensor: Tensor) -> Tensor:
    """A tensor of uint16, uint32 or uint64, which torch neither orders nor compares with other types, in int64; others as are."""
    return tensor.long() if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64) else tensor


def is_readable(tensor: Tensor) -> bool:
    """Whether the values of a tensor can be looked at like those of any other: it is dense, and not quantized, nested or meta."""
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)


def first_wide(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor of float64 or complex128; None without one."""
    return next((name for name, tensor in named if tensor.dtype in _WIDE), None)
