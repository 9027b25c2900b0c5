"""What receivers declare to read and write: ``@on(event, reads=..., writes=...)``, for `Engine.check`.

A handler declares what belongs to the run, not what it keeps for itself. What is used through the same object but does not
conflict has names of its own: moving a batch changes its device, converting it its precision, mixing it the batch.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["THINGS", "Things", "check_things"]

Things = frozenset[str]

THINGS: dict[str, str] = {
    "batch": "values of state.batch",
    "device": "the devices of the batch and the model",
    "precision": "the dtypes of the batch and the model, and contexts that convert dtypes, such as autocast",
    "output": "the result of the forward pass, and the contexts and functions that wrap the forward pass",
    "loss": "update.loss and backward_loss",
    "loss_weight": "update.weight: the weight of a loss in its window",
    "scale": "the factor that scales the loss and therefore the gradients",
    "gradients": "the parameters' gradients",
    "trainable": "requires_grad of the parameters",
    "weights": "the parameters' values",
    "buffers": "the modules' buffers",
    "modes": "which modules are in training mode",
    "modules": "the modules themselves, such as wrappers around them and hooks in them",
    "rates": "the optimizers' learning rates, and the momentum if a schedule cycles it with them",
    "groups": "other hyperparameters of the optimizers",
    "optimizer": "the optimizers and their state",
    "step": "whether the step runs, the step count, and whether each batch is a step",
    "plan": "which updates and micro-steps an iteration runs",
    "window": "the accumulation window",
    "metrics": "state.metrics, including announced names",
    "stop": "requests to stop the run or the epoch",
    "bounds": "the bounds of the run",
    "state": "the engine's whole state, as in a checkpoint",
    "files": "files, folders, the terminal and the network",
    "random": "the global random generators",
    "processes": "communication between ranks",
    "signals": "signal handlers, and functions that wrap receivers",
    "flags": "flags on a device that are read together: UpdateState.read_later",
    "error": "state.exception",
}
"""The things that a receiver may declare, and what each one covers."""


def check_things(where: str, things: Iterable[str] | None) -> Things | None:
    """The names as a set; None for a receiver that declares nothing.

    Raises:
        TypeError: for a single string in place of a sequence.
        ValueError: for a name that is not in `THINGS`.
    """
    if things is None:
        return None
    if isinstance(things, str):
        raise TypeError(f"{where}={things!r}: expected a list of names: [{things!r}]")
    found = frozenset(things)
    if unknown := sorted(str(one) for one in found if one not in THINGS):
        raise ValueError(f"{where}: {unknown[0]!r} is not one of {', '.join(THINGS)}")
    return found
