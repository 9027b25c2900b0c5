"""How a function computes a metric of a batch: whether the mean over batches is the metric, and what it compares."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ..authoring.functions import codes_of, names_in
from .dropout import EagerMode
from .loss_graph import Problem

__all__ = ["MetricCalls"]


class MetricCalls(EagerMode):
    """Looks at how a function computes a metric of one batch inside the ``with`` block.

    Attributes:
        problems: what looked wrong.
    """

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[Problem] = []
        self._last: tuple[str, Any] = ("", None)
        self._unsqueezed: list[Tensor] = []  # as scores[:, None] is, which is meant to meet all
        self._samples: int | None = None  # of the first tensor that is used

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [one for one in args[:2] if isinstance(one, Tensor)]
        self._note(getattr(func, "__name__", ""), given, result)
        if len(given) == 2 and isinstance(result, Tensor) and result.dim() == 2 and len(result) > 1:
            self.problems += self._pairs(given, result)
        return result

    def _pairs(self, given: list[Tensor], result: Tensor) -> Iterator[Problem]:
        """A result for each pair of samples, of two tensors with a value for each sample."""
        shapes = sorted(tuple(one.shape) for one in given)
        of_one = given[0].untyped_storage().data_ptr() == given[1].untyped_storage().data_ptr()
        meant = of_one or any(one is other for one in given for other in self._unsqueezed)
        if not meant and shapes == [(len(result),), (len(result), 1)] and result.shape[1] == len(result):
            yield (
                "W73",
                f"an output and targets of shapes {list(shapes[1])} and {list(shapes[0])} are broadcast to "
                f"{list(result.shape)}, so every sample is compared with the targets of all samples",
                "give output and targets the same shape, for example with squeeze(-1)",
            )

    def _note(self, name: str, given: list[Tensor], result: Any) -> None:
        """Note the last function that computes something; not of a parameter alone, such as a temperature, or of one sample."""
        if self._samples is None and given and given[0].dim():
            self._samples = len(given[0])
        if name not in _SAME:
            of_parameter = given and isinstance(given[0], nn.Parameter)
            self._last = "" if of_parameter or self._samples == 1 else name, result
        if name in ("__getitem__", "unsqueeze") and given and result.dim() > given[0].dim():
            self._unsqueezed.append(result)

    def averages(self, function: Any, value: Any) -> Problem | None:
        """What is wrong about averaging what the function returned over batches; None if nothing is known to be."""
        name, result = self._last
        over_samples = names_in(function) & _OVER_SAMPLES
        of_mean = name in _OF_MEANS and isinstance(result, Tensor) and result.dim() == 0
        if over_samples and _scores_parts(function):
            return None
        if not over_samples and not (of_mean and value is not None and float(result) == float(value)):
            return None
        what = sorted(over_samples)[0] if over_samples else f"the {name.strip('_')} of a mean"
        return (
            "W04",
            f"its values are averaged over batches, and this average differs from {what} over all samples",
            "use a torchmetrics metric, which accumulates over batches; or average the inner value and apply exp or "
            "sqrt afterwards, as Perplexity() does",
        )


def _scores_parts(function: Any) -> bool:
    """Whether a function takes the mean over samples itself: in a loop, or by the argument of scikit-learn."""
    codes = codes_of(function)
    loops = any(one.opname == "FOR_ITER" for code in codes for one in dis.get_instructions(code))
    return loops or any("samples" in map(str, code.co_consts) for code in codes)


_SAME = {"detach", "clone", "item", "__float__", "float", "double", "cpu"}
_OF_MEANS = {"sqrt", "exp", "pow", "__pow__", "log"}
_OVER_SAMPLES = {
    "f1_score", "fbeta_score", "precision_score", "recall_score", "roc_auc_score", "average_precision_score", "r2_score",
    "matthews_corrcoef", "cohen_kappa_score", "balanced_accuracy_score", "jaccard_score", "pearsonr", "spearmanr", "corrcoef",
    "root_mean_squared_error", "explained_variance_score",
}  # fmt: skip
"""Functions of all samples whose values in batches have another mean."""
