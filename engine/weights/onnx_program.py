"""Programs as ONNX: written by torch's exporter, and run by ONNX Runtime to compare them."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["needs_onnx", "onnx_bytes", "open_onnx"]

_LARGEST = 2**31 - 1
"""Bytes that a protobuf message can hold; torch would write the tensors into files beside it."""


def needs_onnx(where: str) -> None:
    """Raise ImportError if a package that ONNX needs is missing.

    Args:
        where: Caller, for the message.
    """
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"{where}: ONNX files require packages that are not installed: {' and '.join(missing)}; run: pip install "
            "signalfire[onnx]"
        )


def onnx_bytes(exported: ExportedProgram) -> bytes:
    """The content of an ONNX file with this program and its weights.

    Raises:
        ValueError: If it is too large for a single file.
    """
    with _quiet():
        program: Any = torch.onnx.export(exported, dynamo=True, verbose=False)
    size = sum(tensor.nbytes for tensor in exported.state_dict.values())
    if size > _LARGEST:
        raise ValueError(
            f"the weights take {size / 2**30:.1f} GiB, but an ONNX file can hold at most 2 GiB; export a '.pt2' file "
            "instead"
        )
    content: bytes = program.model_proto.SerializeToString()
    return content


def open_onnx(path: Path) -> Callable[..., list[Tensor]]:
    """The program of a file, which takes what the model takes, and gives the tensors of its output in their order."""
    import onnxruntime

    session = onnxruntime.InferenceSession(os.fspath(path), providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def run(*args: Any, **kwargs: Mapping[str, Any]) -> list[Tensor]:
        tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if len(tensors) != len(names):
            raise ValueError(f"the model uses only {names} of its {len(tensors)} input tensors")
        feeds = {name: tensor.cpu().numpy() for name, tensor in zip(names, tensors, strict=True)}
        return [torch.from_numpy(value) for value in session.run(None, feeds)]

    return run


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch's exporter logs about packages that it does not need, and its own deprecations."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
