"""Digests of values that depend on positions, and that are read from the device together."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..authoring.batches import parts
from ..authoring.devices import is_readable, widened
from ..distributed.sharded import local_part

__all__ = ["Digests"]

_CHUNK = 2**18
"""Elements that are summed at once."""

_SMALL = 2**14
"""Elements up to which tensors are joined before they are summed."""

_INTEGERS = {1: torch.uint8, 2: torch.int16}
_ATOMS = (type(None), bool, int, float, complex, str)

_SIZE = 8  # bytes of a digest


class Digests:
    """Collects values under names, and reads a digest of each, in one transfer from each device.

    The digest of a tensor is a sum of its elements' bits, each times an odd number of 64 bits that depends on its position,
    modulo 2**64. Two rows that are swapped change it, as a single bit does. It is computed on the device of the tensor.
    Everything else, such as numbers, texts, keys, shapes and dtypes, goes into a BLAKE2 hash beside it. Of a DTensor, the digest
    is that of the local shard.

    Example:
        >>> found = Digests()
        >>> found.add("first", {"weight": torch.arange(3.0), "steps": 2})
        >>> found.add("second", {"weight": torch.tensor([0.0, 2.0, 1.0]), "steps": 2})
        >>> first, second = found.read().values()
        >>> first == second, len(first)
        (False, 16)
    """

    def __init__(self) -> None:
        self._contents: dict[str, bytes] = {}
        self._sums: dict[str, list[Tensor]] = {}
        self._numbers: dict[str, Tensor] = {}
        self._wide: dict[str, bool] = {}
        self.numbers: dict[str, float] = {}

    def add(self, name: str, value: Any) -> None:
        """Add what is to be digested under a name; it may change afterwards."""
        tensors: list[Tensor] = []
        content = hashlib.blake2b(digest_size=_SIZE)
        for part in _described(value, tensors):
            content.update(part)
        self._contents[name] = content.digest()
        self._sums[name] = [_positional_sum(flat) for flat in _flattened(tensors)]

    def add_number(self, name: str, value: Tensor | float) -> None:
        """Add a number that is read with the digests, and is found in `numbers` then."""
        number = widened(local_part(torch.as_tensor(value).detach())).reshape(())
        self._wide[name] = number.dtype is torch.float64
        self._numbers[name] = number.view(torch.int64) if self._wide[name] else number.view(torch.int32).long()

    def read(self) -> dict[str, str]:
        """The digests by name, of 16 hexadecimal digits each."""
        sums = [*(one for several in self._sums.values() for one in several), *self._numbers.values()]
        read = iter(_read(sums))
        found = {}
        for name, several in self._sums.items():
            content = hashlib.blake2b(self._contents[name], digest_size=_SIZE)
            for _ in several:
                content.update(struct.pack("<q", next(read)))
            found[name] = content.hexdigest()
        for name, wide in self._wide.items():
            self.numbers[name] = struct.unpack("<d" if wide else "<f", struct.pack("<q" if wide else "<i", next(read)))[
                0
            ]
        return found


def _read(sums: list[Tensor]) -> list[int]:
    """The values of these tensors, in their order; those of each device in one transfer."""
    places: dict[torch.device, list[int]] = {}
    for place, one in enumerate(sums):
        places.setdefault(one.device, []).append(place)
    found = [0] * len(sums)
    for several in places.values():
        for place, value in zip(several, torch.stack([sums[place] for place in several]).tolist(), strict=True):
            found[place] = value
    return found


def _described(value: Any, tensors: list[Tensor]) -> Iterator[bytes]:
    """What a value consists of beside the elements of its tensors, which are appended to a list."""
    if isinstance(value, Tensor):
        value = _dense(local_part(value.detach()))
        tensors.append(value)
        yield f"{value.dtype}{tuple(value.shape)};".encode()
    elif isinstance(value, bytes):
        yield value + b";"
    elif isinstance(value, _ATOMS):
        yield f"{value!r};".encode()
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield f"{value.dtype}{value.shape};".encode() + np.ascontiguousarray(value).tobytes()
    else:
        yield from _described_parts(value, tensors)


def _described_parts(value: Any, tensors: list[Tensor]) -> Iterator[bytes]:
    """What a container consists of; of other objects, nothing but the class is known to be the same in another run."""
    keys = list(value) if isinstance(value, Mapping) else ""
    yield f"{type(value).__qualname__}{keys!r}[".encode()
    container = parts(value)
    for one in () if container is None else container[0]:
        yield from _described(one, tensors)
    yield b"]"


def _dense(tensor: Tensor) -> Tensor:
    if tensor.is_sparse or tensor.is_sparse_csr:
        tensor = tensor.to_dense()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _flattened(tensors: list[Tensor]) -> Iterator[Tensor]:
    """The elements of tensors: small ones of one device and dtype are joined, large ones are not copied."""
    small: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if not is_readable(tensor) or tensor.numel() == 0:  # such as a quantized one, of which the shape alone is known
            continue
        if tensor.numel() > _SMALL:
            yield tensor.reshape(-1)
        else:
            small.setdefault((tensor.device, tensor.dtype), []).append(tensor.reshape(-1))
    for several in small.values():
        yield several[0] if len(several) == 1 else torch.cat(several)


def _positional_sum(flat: Tensor) -> Tensor:
    """The sum of the elements' bits, each times the number of its position, modulo 2**64."""
    bits = flat.view(_INTEGERS.get(flat.element_size(), torch.int32))
    factors = _factors(flat.device)
    if bits.numel() <= _CHUNK:
        return (bits * factors[: bits.numel()]).sum()
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for chunk in bits.split(_CHUNK):
        total = total * 0x9E3779B97F4A7C1 + (chunk * factors[: chunk.numel()]).sum()
    return total


@cache
def _factors(device: torch.device) -> Tensor:
    """An odd number of 64 bits for each position in a chunk, by the finalizer of SplitMix64."""
    z = np.arange(1, _CHUNK + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64)).to(device)
