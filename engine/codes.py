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
    # W2x: data
    "W21": ("warning", "the data gives more batches than its length"),
    "W22": ("warning", "a batch holds an object whose tensors are not moved to the device"),
    "W23": ("warning", "the data gives samples, or whole arrays, in place of batches"),
    "W24": ("warning", "workers have copies of a generator that the data set holds"),
    "W25": ("warning", "ranks that share data have other data each, of which a part is never used"),
    "W26": ("warning", "each worker reads all of the data set, so that samples come several times"),
    "W27": ("warning", "normalisation over batches of one sample"),
    "W28": ("warning", "the batches of the data were changed in place"),
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
