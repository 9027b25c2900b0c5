"""Exports weights as one safetensors file, of which the same weights always give the same bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import torch
from torch import Tensor

from ..checkpoints import Files
from ..distributed.sharded import whole_tensor
from .averages import averages_in_place, check_average
from .naming import plain_name
from .placing import check_target, place_on_rank_zero
from .reading import needs_safetensors

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["export_weights"]

_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def export_weights(
    engine: Engine,
    path: str | os.PathLike[str],
    *,
    average: str | Literal[False] | None = None,
    files: Files | None = None,
) -> Path:
    """Export the weights and buffers of the models as one safetensors file, written atomically and read back.

    Names are those of ``model.state_dict()``, without the parts that DistributedDataParallel and torch.compile add; with several
    models they start with the model's name. A tensor that is shared under several names is written once, under the first, and the
    metadata has its other names, as ``safetensors.torch.save_model`` does. Losses with parameters are not exported.

    The bytes depend only on names, values, shapes and dtypes, not on the memory format, wrappers, compilation, sharding or the
    number of ranks. Weights, modes, hooks and random generators do not change.

    Args:
        engine: The engine, during a run or not. In distributed runs every rank must call this; rank 0 writes.
        path: The file, ending with ".safetensors"; its folder is created if necessary.
        average: Name of the handler whose averages are written, such as "ema"; by default those of the only such handler, or the
            weights if it has none yet. False writes the weights themselves.
        files: File-system operations, for tests.

    Returns:
        The path.

    Raises:
        ValueError: If several handlers keep averages and ``average`` is not given, or names none of them; for a tensor that
            safetensors cannot hold, naming it.
        OSError: If the file cannot be written. The previous one, if any, is unchanged.
        ImportError: Without the package safetensors: ``pip install signalfire[safetensors]``.

    Example:
        >>> import tempfile
        >>> from importlib.util import find_spec
        >>> from signalfire import Engine, Update
        >>> engine = Engine(Update.prediction(), model=torch.nn.Linear(2, 1))
        >>> if find_spec("safetensors"):
        ...     with tempfile.TemporaryDirectory() as folder:
        ...         size = export_weights(engine, f"{folder}/model.safetensors").stat().st_size
    """
    where = "export_weights"
    target = check_target(where, path, ".safetensors")
    average = check_average(where, average)
    needs_safetensors(f"{where}()")
    if not engine.modules.models:
        raise ValueError(f"{where}(): the engine has no model")
    with averages_in_place(engine, average, f"{where}()"), torch.no_grad():
        tensors, aliases = _collect(engine)
        metadata = {"format": "pt", **aliases}
        write, check = partial(_write, tensors, metadata), partial(_check, tensors)
        place_on_rank_zero(engine, target, write, check, Files() if files is None else files)
    return target


def _collect(engine: Engine) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors by name, contiguous and in main memory, on rank 0; and further names of shared ones."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for root, module in engine.modules.models.items():
        prefix = engine.modules.prefix(root)
        objects: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        objects |= dict(module.named_buffers(remove_duplicate=False))
        for key, value in module.state_dict().items():
            name = plain_name(f"{prefix}.{key}" if prefix else key)
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"export_weights(): {name!r} in the model's state is a {type(value).__name__}, but safetensors "
                    "stores only tensors; save the model with Checkpoint"
                )
            first = seen.setdefault(id(objects[key]) if key in objects else (root, key), name)
            if first != name:
                aliases[name] = first
                continue
            _check_kind(name, value)
            whole = whole_tensor(value.detach())
            if engine.processes.is_rank_zero:
                tensors[name] = whole.cpu().resolve_conj().resolve_neg().contiguous()
    return tensors, aliases


def _check_kind(name: str, tensor: Tensor) -> None:
    problem = (
        "is a tensor on the meta device, without values" if tensor.is_meta
        else f"has the layout {tensor.layout}" if tensor.layout is not torch.strided
        else f"has the dtype {tensor.dtype}" if tensor.dtype not in _CODES
        else ""
    )  # fmt: skip
    if problem:
        raise ValueError(f"export_weights(): {name!r} {problem}, which safetensors cannot store")


def _write(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], file: BinaryIO) -> None:
    """Write the format itself: the package orders metadata at random, and needs a second copy of everything in memory."""
    header: dict[str, Any] = {"__metadata__": metadata}
    # Wide dtypes first, so that each tensor is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    place = 0
    for name in names:
        tensor = tensors[name]
        header[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, place + tensor.nbytes],
        }
        place += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        file.write(_bits(tensors[name]).numpy().data)


def _check(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Compare what a reader finds in the file, bit for bit."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        found = set(file.keys())
        for name, tensor in tensors.items():
            if name not in found or not _equal(file.get_tensor(name), tensor):
                raise OSError(
                    f"export_weights(): {name!r} is missing from the written file, or differs from the tensor in the model"
                )


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
