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
    # W6x: logs and progress
    # W7x: what training changes: gradients, rates, averages
    # W8x: studies, ported loops, authors of handlers
    # C: what `Engine.check` finds before a run
    "C01": ("warning", "a metric is monitored that nobody produces"),
    "C02": ("info", "metrics are produced that nobody reads"),
    "C03": (
        "warning",
        "two handlers use one thing at one event, phase and rank, so that their order of attaching matters",
    ),
    "C04": ("warning", "gradients are clipped twice"),
    "C05": ("warning", "a schedule counts in another unit than it was written for"),
    "C06": ("warning", "a schedule is longer or shorter than the run"),
    "C07": ("warning", "an optimizer holds parameters that the model does not have"),
    "C08": ("warning", "trainable parameters are held by no optimizer"),
    "C09": ("warning", "parameters are frozen"),
    "C10": ("warning", "two handlers write one file"),
    "C11": ("warning", "a checkpoint is called the best, but is not selected by a metric"),
    "C12": ("warning", "batches are on another device than the model, and nothing moves them"),
    "C13": ("info", "training data is not shuffled"),
    "C14": ("warning", "the validation data is the training data"),
    "C15": ("warning", "an evaluator shares no parameters with the model that is trained"),
    "C16": ("warning", "random augmentation comes from generators that a resumed run does not restore"),
    "C17": ("warning", "an interval does not come up in this run"),
    "C18": ("warning", "weights are averaged, but not within this run"),
    "C19": ("info", "patience is longer than the run"),
    "C20": ("warning", "an evaluation measures nothing"),
    "C21": ("warning", "the last batch has one sample, of which BatchNorm has no variance"),
    "C22": ("warning", "an accumulation window is longer than an epoch"),
    "C23": ("info", "a schedule changes the rates of some optimizers only"),
    "C24": ("warning", "data that can be read only once is used for several epochs"),
    # G: what `handlers.Guards` finds in a run
}
"""For each code its default severity and what it means, in words that fit every case of it."""
