"""What torch's errors mean inside a training step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..authoring.batches import tensors_in
from ..core.events import Lifecycle
from ..core.handler import Service, on

if TYPE_CHECKING:
    from ..core.update import UpdateState
    from ..engine import Engine

__all__ = ["ErrorHints", "is_out_of_memory"]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error reports that the memory of a device or of the process ran out.

    On a CPU torch raises a plain RuntimeError, as do the libraries of CUDA, which is recognized by its message.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


_OUT_OF_MEMORY = "can't allocate memory", "bad_alloc", "CUDA error: out of memory", "_STATUS_ALLOC_FAILED"


def _meaning_without_model(error: Exception, part: str, engine: Engine) -> str | None:
    if part != "forward" or engine.model is not None or "NoneType" not in str(error):
        return None
    return "this forward function calls the engine's model, but the engine has none; pass model= to Engine"


def _meaning_without_update(error: Exception, engine: Engine) -> str | None:
    """For an update that the trainer has, and the engine that evaluates does not."""
    trainer = engine.findings.parent
    if (
        trainer is None
        or len(trainer.updates) == 1
        or not isinstance(error, KeyError)
        or "no update is named" not in str(error)
    ):
        return None
    names = ", ".join(repr(update.name) for update in engine.updates)
    return (
        f"the evaluator has only the trainer's update {names}; build an evaluator with all updates that the evaluation "
        "needs, and pass it: Validation(evaluator, data)"
    )


def _shapes(error: Exception, engine: Engine) -> str | None:
    """The tensors of the batch, for what torch raises for wrong shapes and dtypes."""
    if not isinstance(error, RuntimeError | IndexError | ValueError):
        return None
    shapes = [f"{str(one.dtype).removeprefix('torch.')} {tuple(one.shape)}" for one in tensors_in(engine.state.batch)]
    return f"the tensors of the batch: {', '.join(shapes[:4]) or 'none'}{', ...' if shapes[4:] else ''}"


def _meaning_of_devices(engine: Engine) -> str | None:
    batch = {str(one.device) for one in tensors_in(engine.state.batch)}
    weights = {str(one.device) for one in engine.modules.parameters()}
    if not batch or not weights or batch == weights:
        return None
    batches, model = ", ".join(sorted(batch)), ", ".join(sorted(weights))
    return f"the batch is on {batches} and the model is on {model}; attach DeviceTransfer() to move the batches"


def _meaning_of_dtypes(error: Exception, engine: Engine) -> str | None:
    if "dtype" not in str(error) and "same type" not in str(error):
        return None
    batch = {str(one.dtype) for one in tensors_in(engine.state.batch) if one.is_floating_point()}
    weights = {str(one.dtype) for one in engine.modules.parameters() if one.is_floating_point()}
    if not batch or not weights or batch == weights:
        return None
    return (
        f"the batch has dtype {', '.join(sorted(batch))} and the model has dtype {', '.join(sorted(weights))}; attach "
        "TruePrecision() with the model's dtype, or evaluate with the trainer: trainer.evaluate(evaluator, data)"
    )


def _meaning_in_backward(update: UpdateState) -> str | None:
    loss, weight = update.backward_loss, update.window.extra_weight
    if not isinstance(loss, Tensor):
        return f"the loss of update {update.name!r} is {loss!r}; return a scalar tensor or None"
    if isinstance(weight, Tensor) and weight.numel() != 1:
        shape = tuple(weight.shape)
        return f"the weight of update {update.name!r} has shape {shape}; set it to one number, such as a token count"
    if loss.dim() > 0 and loss.numel() != 1:
        return f"the loss of update {update.name!r} has shape {tuple(loss.shape)}; return a scalar, such as its mean"
    if not any(p.requires_grad for p in update.parameters):
        return f"no parameter of update {update.name!r} requires a gradient; unfreeze at least one of them"
    if not loss.requires_grad:
        return f"the loss of update {update.name!r} does not depend on any parameter that requires a gradient"
    return None


class ErrorHints(Service):
    """Adds to the errors of a step what they mean."""

    def __init__(self) -> None:
        super().__init__(name="error_hints")

    @on(Lifecycle.FAILED)
    def explain(self, engine: Engine, error: Exception, part: str, update: UpdateState) -> None:
        """Add what one means that was raised in the forward, the loss or the backward of a micro-step."""
        if part == "backward":
            meanings = [_meaning_in_backward(update)]
        else:
            meanings = [
                _meaning_of_dtypes(error, engine),
                _meaning_without_model(error, part, engine),
                _meaning_without_update(error, engine),
                _shapes(error, engine),
            ]
        for meaning in (*meanings, _meaning_of_devices(engine)):
            if meaning is not None:
                error.add_note(meaning)
