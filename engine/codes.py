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
    "W01": ("warning", "a metric is monitored against its own direction"),
    "W02": ("warning", "a monitored metric is NaN, which is never an improvement"),
    "W03": ("warning", "a batch of an unknown class is counted as one sample"),
    "W04": ("warning", "the values of a metric cannot be means of batches"),
    "W05": ("warning", "Accuracy has a threshold for probabilities, but the scores are none"),
    "W06": ("info", "a metric of the training is monitored although a validation measures the same"),
    "W07": ("info", "the patience is longer than the run"),
    # W1x: steps and optimizers
    "W10": ("warning", "nothing is trained: no update has an optimizer, but the bounds are those of a training run"),
    # W2x: data
    # W3x: checkpoints and resuming
    # W4x: how things are attached and connected
    # W5x: evaluation
    # W6x: logs and progress
    "W61": ("warning", "a metric that should be shown is produced by nobody"),
    "W62": ("warning", "a logger on an evaluator starts its log again with each evaluation"),
    "W63": ("info", "the interval of a logger is longer than the run"),
    # W7x: what training changes: gradients, rates, averages
    # W8x: studies, ported loops, authors of handlers
    # C: what `Engine.check` finds before a run
    # G: what `handlers.Guards` finds in a run
}
"""For each code its default severity and what it means, in words that fit every case of it."""
