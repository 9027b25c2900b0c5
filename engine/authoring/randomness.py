"""Random numbers: deriving seeds, and seeding, saving and restoring the global generators."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any, cast

import numpy as np
import torch

from ..core.seeds import derived_seed

__all__ = [
    "check_seed",
    "derived_seed",
    "device_generators",
    "mixed",
    "packed",
    "random_state",
    "reseed",
    "seed_everything",
    "set_random_state",
    "unchanged_random_state",
]


def mixed(key: int, number: int) -> int:
    """A 63-bit number from two numbers, by the finalizer of SplitMix64: cheap enough for every iteration.

    Example:
        >>> mixed(0, 1) != mixed(0, 2) and mixed(0, 1) == mixed(0, 1)
        True
    """
    z = (key + number * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 1


def reseed(seed: int, others: Iterable[torch.Generator] = ()) -> None:
    """Seed the global generators of Python, NumPy and torch on the CPU, and ``others``, at the lowest cost.

    Args:
        seed: A number of up to 63 bits.
        others: Other generators to seed, such as those of `device_generators`.
    """
    torch.default_generator.manual_seed(seed)  # 1 us; torch.manual_seed takes 270
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    for generator in others:
        generator.manual_seed(seed)


def device_generators(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """The global generators of those devices that are accelerators: CUDA, XPU and MPS."""
    found = []
    for kind, index in {(device.type, device.index) for device in devices}:
        if kind == "mps":
            found.append(torch.mps._get_default_mps_generator())
        elif kind in ("cuda", "xpu"):
            module = getattr(torch, kind)
            found.append(module.default_generators[module.current_device() if index is None else index])
    return found


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch (on every device), now.

    This is for what is drawn before a run: call it before building the model. ``Engine(seed=)`` seeds only what handlers draw
    (mixing, noise) and changes no global generator; the handler `Seeding` seeds the global generators again when a run begins,
    so that dropout and shuffling do not depend on what was drawn before.

    Args:
        seed: An int, or one of NumPy's.

    Raises:
        ValueError: unless 0 <= seed < 2**32, the range of NumPy.
    """
    seed = check_seed("seed_everything", seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def check_seed(where: str, seed: object) -> int:
    """The seed as an int; raises ValueError for one that some global generator does not accept."""
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= int(seed) < 2**32:
        raise ValueError(f"{where}(seed={seed!r}): expected an int with 0 <= seed < 2**32")
    return int(seed)


def random_state() -> dict[str, Any]:
    """The state of the global generators; after `packed`, ``torch.load(weights_only=True)`` accepts it."""
    name, words, position, has_gauss, cached = cast(tuple[str, Any, int, int, float], np.random.get_state(legacy=True))
    state: dict[str, Any] = {
        "python": list(random.getstate()),
        "numpy": [name, words.astype("<u4", copy=False).tobytes(), int(position), int(has_gauss), float(cached)],
        "torch": torch.default_generator.get_state(),
    }
    if torch.cuda.is_initialized() and torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.xpu.is_initialized() and torch.xpu.is_available():
        state["xpu"] = torch.xpu.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def packed(state: dict[str, Any]) -> dict[str, Any]:
    """A random state to be saved: the 625 words of Python's generator as bytes, since saving visits every object of a state."""
    if "python" not in state:
        return state
    version, words, gauss = state["python"]
    if not isinstance(words, bytes):
        # A tensor takes twice as long to create and four times as long to save.
        words = struct.pack(f"<{len(words)}I", *words)
    return state | {"python": [version, words, gauss]}


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the global generators from what `random_state` returned; generators missing from it are not changed."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    if "xpu" in state and torch.xpu.is_available():
        torch.xpu.set_rng_state_all(state["xpu"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
    if "python" not in state:
        return
    version, words, gauss = state["python"]
    words = words if isinstance(words, list | tuple) else _words(words).tolist()
    random.setstate((version, tuple(words), gauss))
    name, words, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, _words(words), position, has_gauss, cached))


def _words(saved: bytes | torch.Tensor) -> Any:
    """The words of a generator's state, 4 bytes each, little-endian; earlier files store them as a tensor."""
    return saved.numpy().astype(np.uint32) if isinstance(saved, torch.Tensor) else np.frombuffer(saved, dtype="<u4")


@contextmanager
def unchanged_random_state(*generators: torch.Generator | None) -> Iterator[None]:
    """Restore the state of the global generators, and of ``generators``, at the end of the ``with`` block."""
    state = random_state()
    own = [(one, one.get_state()) for one in generators if isinstance(one, torch.Generator)]
    try:
        yield
    finally:
        set_random_state(state)
        for generator, before in own:
            generator.set_state(before)
