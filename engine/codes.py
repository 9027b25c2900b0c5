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
    "W41": ("warning", "a handler is never called, or not where it seems to expect it: a method lacks its `on`"),
    "W42": ("warning", "a loss has parameters that no optimizer holds, and that are not trained"),
    "W43": ("info", "the parameters of a loss are trained, moved and saved with the model's"),
    "W44": ("warning", "one function is called twice at an event: it was connected, or defined and connected, twice"),
    "W45": ("warning", "`Engine.without` was called without `with`, so that nothing was disabled"),
    "W46": ("warning", "the user's own DistributedDataParallel runs over processes of which the engine knows nothing"),
    "W47": ("warning", "a handler saves a state and cannot load it"),
    "W48": ("warning", "`Engine.on` was called and decorates no function"),
    "W49": ("warning", "a function is connected to events that this engine never emits"),
    # W5x: evaluation
    # W6x: logs and progress
    # W7x: what training changes: gradients, rates, averages
    # W8x: studies, ported loops, authors of handlers
    # C: what `Engine.check` finds before a run
    # G: what `handlers.Guards` finds in a run
}
"""For each code its default severity and what it means, in words that fit every case of it."""
