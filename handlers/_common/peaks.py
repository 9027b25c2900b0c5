"""The peak performance of GPUs, by the names that their drivers report."""

from __future__ import annotations

import re

import torch

__all__ = ["name_of", "peak_of"]

TERA = 1e12
PEAKS = {  # of dense matrix products in bfloat16, by NVIDIA's data sheets
    r"NVIDIA A100[- ](SXM4[- ]\d+GB|\d+GB PCIe|PCIe[- ]\d+GB)": 312 * TERA,
    r"NVIDIA H100 80GB HBM3": 989 * TERA,
    r"NVIDIA H100 PCIe": 756 * TERA,
    r"NVIDIA H100 NVL": 835 * TERA,
    r"NVIDIA H200": 989 * TERA,
    r"NVIDIA B200": 2250 * TERA,
    r"NVIDIA L4": 121 * TERA,
    r"NVIDIA L40S": 362 * TERA,
}


def name_of(device: torch.device) -> str:
    """The name of a device: that of the GPU, or the type of any other device, such as "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_of(name: str) -> float | None:
    """The peak performance of a device in operations per second; None if it is not known, as for parts of a GPU (MIG).

    Example:
        >>> part = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
        >>> peak_of("NVIDIA H100 80GB HBM3"), peak_of(part), peak_of("cpu")
        (989000000000000.0, None, None)
    """
    return next((peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, name)), None)
