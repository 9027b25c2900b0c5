"""Digests of values that depend on positions, and that are read from the device together."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from enum import Enum
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from ..authoring.batches import field_names, parts
from ..authoring.devices import widened
from ..distributed.sharded import local_part

__all__ = ["Digests"]

_CHUNK = 2**18
"""Elements that are summed at once."""

_SMALL = 2**14
"""Elements up to which tensors are joined before they are summed; on the CPU they are hashed."""

_INTEGERS = {1: torch.uint8, 2: torch.int16}
_ATOMS = (type(None), bool, int, float, complex, str, range, Decimal, torch.dtype, torch.Size)

_MOST_KEPT = 2**20
"""The most elements that are kept until they are hashed."""

_DTYPES = {one for one in vars(torch).values() if isinstance(one, torch.dtype)}
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
_ORDINARY = {one for one in _DTYPES if not one.is_complex and one not in _QUANTIZED}
"""Of which a dtype and a shape describe a strided tensor."""

_OF_NUMPY = {torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool}

_SIZE = 16  # hexadecimal digits of a digest


_Content = tuple[list[bytes], list[Tensor]]
"""What describes a value, and copies of its tensors, which are hashed: for small ones, this is faster than a sum."""


class Digests:
    """Collects values under names, and reads a digest of each, in one transfer from each device.

    The digest of a tensor is a sum of its elements' bits, each times an odd number of 64 bits that depends on its position,
    modulo 2**64. Two rows that are swapped change it, as a single bit does. It is computed on the device of the tensor.
    Everything else, such as numbers, texts, keys, shapes and dtypes, goes into a SHA-256 hash beside it. Of a DTensor, the digest
    is that of the local shard.

    Example:
        >>> found = Digests()
        >>> _ = found.add("first", {"weight": torch.arange(3.0), "steps": 2})
        >>> _ = found.add("second", {"weight": torch.tensor([0.0, 2.0, 1.0]), "steps": 2})
        >>> first, second = found.read().values()
        >>> first == second, len(first)
        (False, 16)
    """

    def __init__(self) -> None:
        self._contents: dict[str, Any | _Content] = {}  # to be hashed, unless there is too much to keep
        self._kept = 0  # elements that are kept until then
        self._sums: dict[str, list[Tensor]] = {}
        self._norms: dict[str, Tensor] = {}  # of copies on the CPU
        self._numbers: dict[str, Tensor] = {}
        self._wide: dict[str, bool] = {}
        self.numbers: dict[str, float] = {}

    def add(self, name: str, value: Any) -> Tensor | None:
        """Add what is to be digested under a name; it may change afterwards.

        What is small is copied here and hashed when the digests are read: hashing one after the other takes half the time of
        hashing between other operations, because the code and data stay in the processor's caches.

        Returns:
            The elements of all tensors in it, joined; None unless they are small tensors of one dtype on the CPU.
        """
        tensors: list[Tensor] = []
        described: list[bytes] = []
        rest = _without_plain(value, described, tensors) if type(value) is dict else value
        if type(value) is not dict or rest:
            _describe(rest, described, tensors)
        near = [one for one in tensors if _is_near(one)]
        far = [one for one in tensors if not _is_near(one)] if len(near) < len(tensors) else []
        copies = _copied(near)
        self._keep(name, described, copies)
        self._sums[name] = [_positional_sum(bits) for bits in _flattened(far)]
        return copies[0] if len(copies) == 1 and not far else None

    def _keep(self, name: str, described: list[bytes], copies: list[Tensor]) -> None:
        """Keep what is to be hashed, or hash it if there is much."""
        self._kept += sum(one.numel() for one in copies)
        self._contents[name] = (described, copies) if self._kept <= _MOST_KEPT else _hashed(described, copies)

    def add_norm(self, name: str, copy: Tensor) -> None:
        """Add the norm of elements that `add` has returned, to be found in `numbers` once the digests are read."""
        self._norms[name] = copy

    def add_number(self, name: str, value: Tensor | float) -> None:
        """Add a number that is read with the digests, and is found in `numbers` then."""
        if not isinstance(value, Tensor):
            self.numbers[name] = value
            return
        if type(value) is Tensor and _is_near(value):
            self.numbers[name] = value.item()
            return
        number = widened(local_part(value.detach())).reshape(())
        self._wide[name] = number.dtype is torch.float64
        # A copy, since the number may change before it is read.
        self._numbers[name] = number.view(torch.int64).clone() if self._wide[name] else number.view(torch.int32).long()

    def read(self) -> dict[str, str]:
        """The digests by name, of 16 hexadecimal digits each."""
        return self.read_together([self])[0]

    @staticmethod
    def read_together(several: Sequence[Digests]) -> list[dict[str, str]]:
        """The digests of each, all of them in one transfer from each device."""
        read = iter(_read([one for digests in several for one in digests._on_devices()]))
        return [digests._finish(read) for digests in several]

    def _on_devices(self) -> Iterator[Tensor]:
        for several in self._sums.values():
            yield from several
        yield from self._numbers.values()

    def _finish(self, read: Iterator[int]) -> dict[str, str]:
        """The digests by name, given what was on devices, in its order."""
        found = {
            name: _hashed(*content) if isinstance(content, tuple) else content.copy()
            for name, content in self._contents.items()
        }
        for name, several in self._sums.items():
            for _ in several:
                found[name].update(struct.pack("<q", next(read)))
        for name, wide in self._wide.items():
            bits, number = ("<q", "<d") if wide else ("<i", "<f")
            (self.numbers[name],) = struct.unpack(number, struct.pack(bits, next(read)))
        self.numbers |= {name: torch.linalg.vector_norm(widened(one)).item() for name, one in self._norms.items()}
        return {name: content.hexdigest()[:_SIZE] for name, content in found.items()}


def _is_plain(value: Any) -> bool:
    """Whether this is an ordinary tensor, as most are: its description is known from its dtype and its shape."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.dtype in _ORDINARY
        and value.layout is torch.strided
        and not value.is_nested
    )


def _without_plain(value: dict[Any, Any], found: list[bytes], tensors: list[Tensor]) -> dict[Any, Any]:
    """Append what describes the ordinary tensors of a dict, and these; returns the rest of it."""
    ordinary = {key: one for key, one in value.items() if _is_plain(one)}
    tensors += ordinary.values()
    found.append(_of_plain(tuple(ordinary), tuple([(one.dtype, one.shape) for one in tensors])))
    return {} if len(ordinary) == len(value) else {key: one for key, one in value.items() if key not in ordinary}


@lru_cache(maxsize=64)
def _of_strided(dtype: torch.dtype, shape: torch.Size) -> bytes:
    """The dtype and the shape of an ordinary tensor, as text."""
    return f"{dtype}{torch.strided}{tuple(shape)};".encode()


@lru_cache(maxsize=64)
def _of_plain(names: tuple[Any, ...], kinds: tuple[tuple[torch.dtype, torch.Size], ...]) -> bytes:
    """The names, dtypes and shapes of ordinary tensors, as text: written once for those of a model."""
    parts = [f"{name!r}: {dtype}{tuple(shape)};" for name, (dtype, shape) in zip(names, kinds, strict=True)]
    return "".join(parts).encode()


def _is_near(tensor: Tensor) -> bool:
    """Whether this is a small tensor on the CPU."""
    return tensor.is_cpu and tensor.numel() <= _SMALL


def _copied(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of tensors: one flat tensor if they have a single dtype that NumPy also has."""
    with torch.no_grad():
        if len({one.dtype for one in tensors}) == 1 < len(tensors) and tensors[0].dtype in _OF_NUMPY:
            return [_flatten_dense_tensors(tensors)]  # under autocast, others cannot be joined
        return [_copy(one) for one in tensors]


def _copy(tensor: Tensor) -> Tensor:
    """A copy of the elements, as bytes unless NumPy has their dtype."""
    if tensor.dtype in _OF_NUMPY:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.resolve_neg().contiguous().reshape(-1).view(torch.uint8).clone()


def _hashed(described: list[bytes], copies: Iterable[Tensor]) -> Any:
    """The SHA-256 hash of a value, which most processors compute twice as fast as others."""
    content = hashlib.sha256(b"".join(described))
    for one in copies:
        elements: Any = one.numpy()
        content.update(elements)
    return content


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


def _describe(value: Any, found: list[bytes], tensors: list[Tensor]) -> None:
    """Append a description of a value to ``found``, and the tensors in it to ``tensors``."""
    if isinstance(value, _ATOMS):
        found.append(f"{value!r};".encode())
    elif _is_plain(value):
        found.append(_of_strided(value.dtype, value.shape))
        tensors.append(value)
    elif isinstance(value, Tensor):
        _describe_tensor(local_part(value.detach()), found, tensors)
    elif isinstance(value, bytes | bytearray):
        found += (f"bytes {len(value)};".encode(), bytes(value))
    elif type(value) in (list, tuple):
        found.append(f"{type(value).__qualname__}[".encode())
        for one in value:
            _describe(one, found, tensors)
        found.append(b"]")
    elif isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        found += (f"{value.dtype}{value.shape};".encode(), np.ascontiguousarray(value).tobytes())
    else:
        _describe_parts(value, found, tensors)


def _describe_parts(value: Any, found: list[bytes], tensors: list[Tensor]) -> None:
    """Append what a container consists of; of other objects, only the class is known to be the same in another run."""
    found.append(f"{type(value).__qualname__}[".encode())
    if isinstance(value, set | frozenset):
        found += sorted(_of_item(one, tensors) for one in value)
    elif isinstance(value, Enum):
        found.append(value.name.encode())
    elif isinstance(value, np.ndarray):
        _describe([value.shape, *value.flat], found, tensors)
    elif (container := parts(value)) is not None:
        keys = value.keys() if isinstance(value, Mapping) else field_names(value) or ()
        for one in (*keys, *container[0]):
            _describe(one, found, tensors)
    found.append(b"]")


def _of_item(value: Any, tensors: list[Tensor]) -> bytes:
    """What an item of a set consists of."""
    found: list[bytes] = []
    _describe(value, found, tensors)
    return b"".join(found)


def _describe_tensor(tensor: Tensor, found: list[bytes], tensors: list[Tensor]) -> None:
    """Append the dtype, the layout and the shape of a tensor, and its elements as one or several strided tensors."""
    if tensor.is_nested:
        rows = tensor.unbind()
        found.append(f"nested {len(rows)}[".encode())
        for row in rows:
            _describe_tensor(row, found, tensors)
        found.append(b"]")
        return
    found.append(f"{tensor.dtype}{tensor.layout}{tuple(tensor.shape)};".encode())
    if tensor.is_quantized:
        found.append(f"{tensor.qscheme()} {_scales(tensor)};".encode())
        tensor = tensor.int_repr()
    for one in _strided(tensor):
        if tensor.layout is not torch.strided:
            found.append(f"{tuple(one.shape)}".encode())
        tensors.append(torch.view_as_real(one.resolve_conj()) if one.is_complex() else one.resolve_neg())


def _scales(tensor: Tensor) -> object:
    """What the integers of a quantized tensor mean."""
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return tensor.q_scale(), tensor.q_zero_point()
    return tensor.q_per_channel_scales().tolist(), tensor.q_per_channel_zero_points().tolist()


def _strided(tensor: Tensor) -> list[Tensor]:
    """The strided tensors that hold the elements of one, and where they are."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.to_dense()]


def _flattened(tensors: list[Tensor]) -> Iterator[Tensor]:
    """The bits of tensors as integers: small ones of one device and dtype are joined, large ones are not copied."""
    small: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > _SMALL and not tensor.is_meta:
            yield _bits(tensor.detach().reshape(-1))
        elif tensor.numel() and not tensor.is_meta:
            small.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach().reshape(-1))
    for several in small.values():
        yield _bits(torch.cat(several) if len(several) > 1 else several[0])


def _bits(flat: Tensor) -> Tensor:
    return flat.resolve_neg().contiguous().view(_INTEGERS.get(flat.element_size(), torch.int32))


def _positional_sum(bits: Tensor) -> Tensor:
    """The sum of integers, each times the number of its position, modulo 2**64."""
    factors = _factors(bits.device)
    if bits.numel() <= _CHUNK:
        return (bits * factors[: bits.numel()]).sum()
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
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
