"""Random numbers: seeds derived from names, and the global generators saved, restored and seeded."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch

__all__ = [
    "cuda_generators",
    "derived_seed",
    "mixed",
    "packed",
    "random_state",
    "reseed",
    "seed_everything",
    "set_random_state",
    "unchanged_random_state",
]


def derived_seed(*parts: object) -> int:
    """A 63-bit seed that depends on nothing but the given parts: sha256 of their text.

    Example:
        >>> derived_seed(0, "mixup", 12) == derived_seed(0, "mixup", 12) != derived_seed(0, "mixup", 13)
        True
    """
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def mixed(key: int, number: int) -> int:
    """A number of 63 bits from two, for what is done in every iteration: the finaliser of SplitMix64.

    Example:
        >>> mixed(0, 1) != mixed(0, 2) and mixed(0, 1) == mixed(0, 1)
        True
    """
    z = (key + number * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 1


def reseed(seed: int, others: Iterable[torch.Generator] = ()) -> None:
    """Seed the global generators of Python, NumPy and torch on the CPU, and these others, at the least cost.

    Args:
        seed: a number of up to 63 bits.
        others: such as those that `cuda_generators` gives.
    """
    torch.default_generator.manual_seed(seed)  # 1 us, where torch.manual_seed takes 270
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    for generator in others:
        generator.manual_seed(seed)


def cuda_generators(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """The global generators of the CUDA devices among these."""
    places = {device.index for device in devices if device.type == "cuda"}
    return [torch.cuda.default_generators[torch.cuda.current_device() if n is None else n] for n in places]


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch (on every device).

    Raises:
        ValueError: unless 0 <= seed < 2**32, which is what NumPy accepts.
    """
    check_seed("seed_everything", seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def check_seed(where: str, seed: object) -> None:
    """Refuse a seed that one of the global generators would refuse later."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"{where}: seed={seed!r} has to be an int with 0 <= seed < 2**32")


def random_state() -> dict[str, Any]:
    """The state of the global generators; `packed`, it is in types that ``torch.load(weights_only=True)`` reads."""
    name, words, position, has_gauss, cached = cast(tuple[str, Any, int, int, float], np.random.get_state(legacy=True))
    state: dict[str, Any] = {
        "python": list(random.getstate()),
        "numpy": [name, words.astype("<u4", copy=False).tobytes(), int(position), int(has_gauss), float(cached)],
        "torch": torch.default_generator.get_state(),
    }
    if torch.cuda.is_initialized() and torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def packed(state: dict[str, Any]) -> dict[str, Any]:
    """A random state for a file: the 625 words of Python's generator as bytes, since what is saved is walked through."""
    if "python" not in state:
        return state
    version, words, gauss = state["python"]
    if not isinstance(words, bytes):
        words = struct.pack(f"<{len(words)}I", *words)  # a tensor takes twice as long to make, and four times to save
    return state | {"python": [version, words, gauss]}


def set_random_state(state: dict[str, Any]) -> None:
    """Put the global generators back to what `random_state` returned; those that are not in the state stay as they are."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    if "python" not in state:
        return
    version, words, gauss = state["python"]
    words = words if isinstance(words, list | tuple) else _words(words).tolist()
    random.setstate((version, tuple(words), gauss))
    name, words, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, _words(words), position, has_gauss, cached))


def _words(saved: bytes | torch.Tensor) -> Any:
    """The words of a generator's state, 4 bytes each with the least first; earlier files hold them as a tensor."""
    return saved.numpy().astype(np.uint32) if isinstance(saved, torch.Tensor) else np.frombuffer(saved, dtype="<u4")


@contextmanager
def unchanged_random_state(*generators: torch.Generator | None) -> Iterator[None]:
    """Whatever draws from the global generators (and these) inside, they go on afterwards as if it had not."""
    state = random_state()
    own = [(one, one.get_state()) for one in generators if isinstance(one, torch.Generator)]
    try:
        yield
    finally:
        set_random_state(state)
        for generator, before in own:
            generator.set_state(before)
