"""The codes of findings: what each one means, and how serious it is.

A code's letter says where it comes from: C from `Engine.check`, which reads a composition before it runs; G from
`handlers.Guards`, which watches a run; W from the engine and its handlers as they run. Codes are never used twice: one that is
dropped stays unused.
"""

from __future__ import annotations

from typing import Literal

__all__ = ["CODES", "Severity"]

Severity = Literal["info", "warning", "error"]

CODES: dict[str, tuple[Severity, str]] = {
    # W0x: metrics and what monitors them
    # W1x: steps and optimizers
    "W10": ("warning", "nothing is trained: no update has an optimizer, but the bounds are those of a training run"),
    "W11": ("warning", "parameters of the model are in no optimizer: a layer was made or replaced after it was built"),
    "W12": ("warning", "steps were made, but no parameter got a gradient"),
    "W13": (
        "warning",
        "parameters in the optimizer got no gradient in an epoch; information if they are the smaller part",
    ),
    "W14": ("warning", "modules were put into eval mode during training and left in it"),
    "W15": ("warning", "weights are NaN"),
    "W16": ("warning", "gradients were cleared inside an accumulation window"),
    "W17": ("warning", "something else than the engine calls optimizer.step()"),
    "W18": ("warning", "the learning rate is 0 for an epoch"),
    # W2x: data
    # W3x: checkpoints and resuming
    # W4x: how things are attached and connected
    # W5x: evaluation
    # W6x: logs and progress
    # W7x: what training changes: gradients, rates, averages
    # W8x: studies, ported loops, authors of handlers
    # C: what `Engine.check` finds before a run
    # G: what `handlers.Guards` finds in a run
}
"""For each code its default severity and what it means, in words that fit every case of it."""
