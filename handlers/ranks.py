"""The order of shipped receivers that share a phase of an event and whose order would matter, with the reasons."""

from __future__ import annotations

SEED = -10
"""STARTED / PREPARE: seeding comes before anything that might draw."""

DECIDE_CHECKPOINTS = 10
"""CONTROL of the completed events: which checkpoints to keep is decided last, since a best one of this event has to hold
what the schedules and the patience decided in it."""

COMMUTING = {
    (
        "EPOCH_COMPLETED",
        "PREPARE",
    ): "Metrics and Validation write metrics of different names; the same name is an error",
    (
        "EPOCH_COMPLETED",
        "CONTROL",
    ): "LRScheduling moves rates, EarlyStopping asks for a stop: neither reads what the other writes",
    ("ITERATION_COMPLETED", "CONTROL"): "as in EPOCH_COMPLETED",
    ("ITERATION_COMPLETED", "PERSIST"): "Checkpoints write different files of one shared snapshot",
    ("EPOCH_COMPLETED", "PERSIST"): "as in ITERATION_COMPLETED",
    (
        "STARTED",
        "PREPARE",
    ): "each prepares something of its own: a folder, scalers, announced names; Seeding has a rank",
    ("EPOCH_STARTED", "PREPARE"): "Metrics sets its own sums back; Validation runs another engine",
}
"""Cells of (event, phase) in which several kinds of shipped receivers meet at the same rank, and why that is harmless."""
