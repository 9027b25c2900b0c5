"""Out-of-fold predictions: what each run of a cross-validation says of the samples that it has not seen."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from signalfire import Engine
from signalfire.runs.restore import Modes

__all__ = ["Predict", "Predicting", "decoded", "out_of_fold"]

Predict = Callable[[Engine, Sequence[int]], Any]
"""Called with the engine, once it has run, and the indices of the samples; returns a prediction for each."""


@dataclass(frozen=True)
class Predicting:
    """Predicts the samples of one fold, in evaluation mode and without gradients, and packs the predictions for the store.

    Args:
        predict: The function.
        test: Indices of the samples.
    """

    predict: Predict
    test: tuple[int, ...]

    def __call__(self, engine: Engine) -> dict[str, Any]:
        modes = Modes(engine.modules.values())
        try:
            for module in engine.modules.values():
                module.eval()
            with torch.no_grad():
                found = self.predict(engine, self.test)
        finally:
            modes.put_back()
        if isinstance(found, Tensor):
            found = found.detach().cpu()
            found = (found.float() if found.dtype in (torch.bfloat16, torch.float16) else found).numpy()
        if not isinstance(found, np.ndarray) or found.dtype.kind not in "biuf":
            raise TypeError(
                f"KFold(predict=...) returned {type(found).__name__}; expected a tensor or an array of numbers"
            )
        if found.shape[:1] != (len(self.test),):
            raise ValueError(
                f"KFold(predict=...) returned predictions of shape {found.shape} for {len(self.test)} samples; "
                "expected one row for each sample, in the order of the indices"
            )
        data = np.ascontiguousarray(found, dtype=found.dtype.newbyteorder("<"))
        return {
            "data": base64.b64encode(data.tobytes()).decode(),
            "dtype": data.dtype.str,
            "shape": list(data.shape),
        }


def decoded(packed: Mapping[str, Any]) -> Tensor:
    """The predictions of one fold, from the store."""
    values = np.frombuffer(base64.b64decode(packed["data"]), dtype=np.dtype(packed["dtype"])).reshape(packed["shape"])
    is_unsigned = values.dtype.kind == "u" and values.dtype.itemsize > 1  # torch neither adds nor indexes these
    return torch.from_numpy(values.astype(np.int64 if is_unsigned else values.dtype.newbyteorder("=")))


def out_of_fold(predicted: Mapping[int, Tensor], tests: Sequence[Sequence[int]], samples: int) -> Tensor:
    """The predictions of all samples by their indices.

    A sample that several folds predict, as with a repeated splitter, gets the mean; one that none has predicted, because its fold
    failed or was not trained, gets NaN.

    Args:
        predicted: Predictions of each fold that was trained, by number.
        tests: Indices of the samples of each fold.
        samples: Number of samples.

    Raises:
        ValueError: if there are no predictions, if the folds' differ in shape, or if they are whole numbers, such as classes, of
            which neither a mean nor NaN can be taken, and not each sample has exactly one.
    """
    if not predicted:
        raise ValueError("predictions: no fold has predictions; set KFold(predict=...), and train at least one fold")
    kinds = {(one.dtype, tuple(one.shape[1:])) for one in predicted.values()}
    if len(kinds) > 1:
        listing = ", ".join(sorted(f"{dtype} of shape {shape}" for dtype, shape in kinds))
        raise ValueError(
            f"predictions: the predictions of the folds differ in dtype, or in the shape of a single prediction: {listing}"
        )
    ((dtype, shape),) = kinds
    counts = torch.zeros(samples, dtype=torch.int64)
    total = torch.zeros((samples, *shape), dtype=dtype)
    for fold, values in sorted(predicted.items()):
        places = torch.tensor(tests[fold])
        counts[places] += 1
        total[places] += values
    if not dtype.is_floating_point:
        if not bool((counts == 1).all()):
            raise ValueError(
                f"predictions: {int((counts == 0).sum())} samples have no prediction and {int((counts > 1).sum())} "
                "have several, but integer predictions cannot be averaged or set to NaN; either predict "
                "probabilities, or train all folds with a splitter that puts each sample in exactly one test fold"
            )
        return total
    found: Tensor = total / counts.reshape(-1, *[1] * len(shape))
    return found.masked_fill((counts == 0).reshape(-1, *[1] * len(shape)), math.nan)
