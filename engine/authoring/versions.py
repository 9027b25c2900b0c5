"""What differs between the versions of torch that Signalfire runs with, 2.6 to 2.14, and what needs a newer one.

Each difference is here, and nowhere else, with the version from which it can go.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch.serialization import get_crc32_options, set_crc32_options

__all__ = [
    "LOAD_ALONE",
    "NEEDED",
    "NO_SOURCE",
    "NO_SYNC_AT_FIRST",
    "NO_SYNC_OF_BUFFERS",
    "TORCH",
    "Needed",
    "all_gather_single",
    "check_torch",
    "clone_of",
    "current_accelerator",
    "keys_of",
    "memory_of",
    "options_of_compile",
    "precisions_of_products",
    "usual_recompile_limit",
    "without_crc32",
]

_dist: Any = torch.distributed  # of whose names the type stubs of each version know others

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
"""The version of torch: (2, 13)."""


class Needed(NamedTuple):
    """From which version of torch on there is something, and why."""

    torch: tuple[int, int]
    why: str


NEEDED: Mapping[str, Needed] = {
    "FullyShardedDataParallel": Needed((2, 13), "older versions do not free gathered weights after evaluations"),
}
"""Handlers that need a newer torch than the oldest one."""


def check_torch(handler: object) -> None:
    """Refuse a handler that needs a newer torch than this.

    Raises:
        RuntimeError: With the version that it needs.
    """
    needed = NEEDED.get(type(handler).__name__)
    if needed is not None and needed.torch > TORCH:
        version = ".".join(map(str, needed.torch))
        raise RuntimeError(
            f"{type(handler).__name__} needs torch {version} or newer, but torch {torch.__version__} is installed: "
            f"{needed.why}; install torch>={version}"
        )


# From 2.9 on, a tensor that all ranks have is distributed without sending it from the first.
NO_SOURCE: Mapping[str, Any] = {"src_data_rank": None} if TORCH >= (2, 9) else {}
"""Arguments of ``distribute_tensor`` where all ranks have the whole tensor."""

# From 2.9 on, shards are loaded without collectives, which are not needed, also where there is a process group.
LOAD_ALONE: Mapping[str, Any] = {"no_dist": True} if TORCH >= (2, 9) else {}
"""Arguments of ``load`` of ``torch.distributed.checkpoint`` where all ranks have the metadata."""

# From 2.9 on, DDP can leave out the synchronization as it is built, after which the weights are the same here.
NO_SYNC_AT_FIRST: Mapping[str, Any] = {"init_sync": False} if TORCH >= (2, 9) else {}
"""Arguments of DDP where weights and buffers are alike already."""

# From 2.13 on, DDP has a keyword for the buffers of forwards alone.
NO_SYNC_OF_BUFFERS: Mapping[str, Any] = {"forward_sync_buffers" if TORCH >= (2, 13) else "broadcast_buffers": False}
"""Arguments of DDP that leave buffers as they are in forwards."""

# The name since 2.13.
all_gather_single = getattr(_dist, "all_gather_single", None) or _dist.all_gather_into_tensor


def clone_of(store: Any) -> Any:
    """Another connection to the same store, for a thread beside the main one, which may be waiting in the first.

    A store of 2.6 has no ``clone``: the connection then has the launcher's attempt as its prefix, in place of the store's.
    """
    if hasattr(store, "clone"):
        return store.clone()
    while isinstance(store, _dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, _dist.TCPStore):
        store = _dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=store.timeout)
    elif isinstance(store, _dist.FileStore):
        store = _dist.FileStore(store.path)
    return _dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def keys_of(store: Any) -> list[str]:
    """The keys of a store; none before 2.13, where it does not tell."""
    return list(store.list_keys()) if hasattr(store, "list_keys") else []


def current_accelerator() -> torch.device | None:
    """The accelerator of this machine; None if there is none."""
    # In 2.6, it is that of the build, which may have no device; later ones check.
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def memory_of(device: torch.device) -> Any:
    """The module with the functions for the memory of a device, such as ``max_memory_allocated``."""
    # Before 2.9, that of the kind of device; later ones have them for all.
    return torch.accelerator if hasattr(torch.accelerator, "max_memory_allocated") else getattr(torch, device.type)


def options_of_compile(recompile_limit: int | None) -> dict[str, Any]:
    """What ``torch.compile`` is given, so that a function has its own number of graphs.

    Raises:
        RuntimeError: For a limit before 2.13, where it is one of the process.
    """
    if TORCH >= (2, 13):
        return {"recompile_limit": recompile_limit, "isolate_recompiles": True}
    if recompile_limit is not None:
        raise RuntimeError(
            f"Compile(recompile_limit={recompile_limit}) needs torch 2.13 or newer, but torch {torch.__version__} is "
            "installed; set torch._dynamo.config.recompile_limit, or install torch>=2.13"
        )
    return {}


def usual_recompile_limit() -> int:
    """How many graphs of a function are compiled if nothing else is given."""
    config: Any = torch._dynamo.config
    return int(config.recompile_limit if hasattr(config, "recompile_limit") else config.cache_size_limit)  # in 2.6


@contextmanager
def without_crc32() -> Iterator[None]:
    """Save without the CRC-32 of each tensor, which ``torch.load`` ignores, and which takes a fifth of the time."""
    if TORCH < (2, 13):  # an option of the process, which a thread beside would leave behind; later one of the thread
        yield
        return
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def precisions_of_products() -> dict[str, Any]:
    """The backends that have a precision of float32 products each, by name; none before 2.9."""
    backends: Any = torch.backends  # whose modules are replaced by objects, of which a type checker does not know
    found = {"cuda.matmul": backends.cuda.matmul, "mkldnn.matmul": getattr(backends.mkldnn, "matmul", None)}
    return {name: one for name, one in found.items() if hasattr(one, "fp32_precision")}
