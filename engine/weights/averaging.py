"""Averages the weights of several checkpoints or files: a model soup."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .naming import plain_name
from .reading import WeightFile, read_weights

__all__ = ["average_weights"]

_WHERE = "average_weights"
_MOST_NAMED = 8


def average_weights(sources: Iterable[str | os.PathLike[str] | Mapping[str, Any]]) -> dict[str, Tensor]:
    """Average the weights of several checkpoints or files (model soup), by name, in main memory.

    Use it as ``model.load_state_dict(average_weights(...))``, as the source of a `WarmStart`, or save it. The mean is computed in
    float64 and rounded to the dtype of each tensor. Integers, such as the number of batches that BatchNorm has seen, are those of
    the last source. BatchNorm's running statistics are averaged, too, but differ from those of the averaged weights: recompute
    them.

    Args:
        sources: At least two sources as for `read_weights`; for example the kept checkpoints of a `Checkpoint`:
            ``[checkpoint.folder / name for name, _ in checkpoint.kept]``. One is in memory at a time.

    Raises:
        ValueError: If names, shapes or dtypes differ between the sources, naming what differs; for fewer than two sources.
        FileNotFoundError, ImportError: As `read_weights`.

    Source:
        Wortsman et al., "Model soups: averaging weights of multiple fine-tuned models improves accuracy without increasing
        inference time" (ICML 2022), the uniform soup.

    Example:
        >>> one, other = {"weight": torch.tensor([1.0, 2.0])}, {"weight": torch.tensor([3.0, 2.0])}
        >>> average_weights([one, other])
        {'weight': tensor([2., 2.])}
    """
    if isinstance(sources, str | os.PathLike | Mapping) or not isinstance(sources, Iterable):
        raise TypeError(f"{_WHERE}({sources!r}): expected several sources, such as ['first.pt', 'second.pt']")
    sums: dict[str, Tensor] = {}
    first: WeightFile | None = None
    tensors: dict[str, Tensor] = {}
    count = 0
    for source in sources:
        file = read_weights(source, where=f"{_WHERE}()")
        tensors = {plain_name(name): tensor for name, tensor in file.tensors.items()}
        label = f"source {count + 1}" if isinstance(source, Mapping) else file.label
        if first is None:
            first = WeightFile(label, {name: tensor.to("meta") for name, tensor in tensors.items()})
            sums = {name: _wide(tensor) for name, tensor in tensors.items() if _is_averaged(tensor)}
        else:
            _compare(first, label, tensors)
            for name, total in sums.items():
                total += _wide(tensors[name])
        count += 1
    if count < 2:
        raise ValueError(f"{_WHERE}(): expected at least two sources, got {count}")
    return {
        name: (sums[name] / count).to(tensor.dtype) if name in sums else tensor.clone()
        for name, tensor in tensors.items()
    }


def _is_averaged(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.complex128 if tensor.is_complex() else torch.float64, copy=True)


def _compare(first: WeightFile, label: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a source differs from the first one in names, shapes or dtypes."""
    differences = [f"{name} is only in {first.label!r}" for name in first.tensors if name not in tensors]
    for name, tensor in tensors.items():
        own = first.tensors.get(name)
        if own is None:
            differences.append(f"{name} is only in {label!r}")
        elif own.shape != tensor.shape:
            differences.append(f"{name} has shapes {list(own.shape)} and {list(tensor.shape)}")
        elif own.dtype != tensor.dtype:
            differences.append(f"{name} has dtypes {own.dtype} and {tensor.dtype}")
    if differences:
        more = f"; and {len(differences) - _MOST_NAMED} more" if len(differences) > _MOST_NAMED else ""
        raise ValueError(
            f"{_WHERE}(): {first.label!r} and {label!r} cannot be averaged: {'; '.join(differences[:_MOST_NAMED])}{more}"
        )
