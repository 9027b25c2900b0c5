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
    # W3x: checkpoints and resuming
    # W4x: how things are attached and connected
    # W5x: evaluation
    "W51": ("warning", "an evaluator measures other weights than those that are trained"),
    "W52": ("info", "parts of the model are in eval mode as a training run begins"),
    "W53": ("warning", "an evaluator measures nothing"),
    "W54": ("warning", "predictions are collected in another order than that of the data"),
    "W55": ("warning", "an average of the weights consists mostly of those that the run began with"),
    "W56": ("warning", "an evaluator that is run by itself measures the weights in place of their averages"),
    "W57": ("warning", "modules are in training mode in an evaluation"),
    "W58": ("info", "a handler limits the data of this run"),
    "W59": ("info", "an evaluation leaves out the last samples of its data"),
    # W6x: logs and progress
    # W7x: what training changes: gradients, rates, averages
    # W8x: studies, ported loops, authors of handlers
    # C: what `Engine.check` finds before a run
    # G: what `handlers.Guards` finds in a run
}
"""For each code its default severity and what it means, in words that fit every case of it."""
