"""Forward and loss of models that take a batch by keyword and return their loss; see `Update.from_model`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .places import described, keyword_arguments

if TYPE_CHECKING:
    from ..core.kernel import Kernel

__all__ = ["call_by_keyword", "loss_in_output", "model_by_keyword"]


def model_by_keyword(engine: Kernel, batch: Any) -> Any:
    """The forward ``model(**batch)``."""
    if batch.__class__ is dict:
        try:
            return engine.model(**batch)
        except TypeError as error:
            _note_arguments(error, batch)
            raise
    return call_by_keyword(engine.model, batch, f"update {engine.state.update.name!r}")


def call_by_keyword(model: nn.Module, batch: Any, where: str) -> Any:
    """Call a model with a batch by keyword.

    Raises:
        TypeError: for a batch without names.
    """
    arguments = keyword_arguments(batch)
    if arguments is None:
        raise TypeError(
            f"{where} passes its batches to the model by keyword, but this batch is {described(batch)}; pass data that "
            "yields mappings, or use Update.supervised for batches of (input, target)"
        )
    try:
        return model(**arguments)
    except TypeError as error:
        _note_arguments(error, arguments)
        raise


def _note_arguments(error: TypeError, arguments: Mapping[str, Any]) -> None:
    """Say what the batch holds, if the model does not take it."""
    if "argument" in str(error):
        error.add_note(
            f"the batch is passed to the model by keyword: {', '.join(map(str, arguments.keys()))}; remove from the "
            "batch the keys that the model's forward does not take, or pass your own forward to Update"
        )


def loss_in_output(engine: Kernel, output: Any, batch: Any) -> Tensor | None:
    """The loss that a model has returned: the output's ``loss``, the first element of a tuple, or the output itself.

    Raises:
        ValueError: if there is none, in training; an engine that evaluates makes predictions then.
    """
    loss: Any = output.get("loss") if output.__class__ is dict else getattr(output, "loss", None)
    if loss.__class__ is Tensor:  # the usual case
        return loss
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    elif loss is None and isinstance(output, Tensor | tuple | list):
        first = output if isinstance(output, Tensor) else output[0] if output else None
        loss = first if isinstance(first, Tensor) and not first.dim() else None
    if loss is not None:
        return loss  # type: ignore[no-any-return]
    if not engine.training:
        return None
    raise ValueError(
        f"update {engine.state.update.name!r} takes the loss from the model's output, but the output, "
        f"{described(output)}, has no loss (the batch is {described(batch)}); put the targets into the batch under the name "
        "that the model expects, such as 'labels', or pass Update.from_model(loss=)"
    )
