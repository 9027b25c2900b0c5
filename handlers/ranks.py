"""The order of shipped receivers that share a phase of an event and whose order would matter, with the reasons."""

from __future__ import annotations

SEED = -10
"""STARTED / PREPARE: seeding comes before anything that might draw."""

DECIDE_CHECKPOINTS = 10
"""CONTROL of the completed events: which checkpoints to keep is decided last, since a best one of this event has to hold
what the schedules and the patience decided in it."""

COMMUTING = {
    (
        "STARTED",
        "PREPARE",
    ): "each prepares something of its own: a folder, scalers, announced names; Seeding has a rank",
    ("EPOCH_STARTED", "PREPARE"): "Metrics sets its own sums back; Validation runs another engine",
    (
        "EPOCH_COMPLETED",
        "PREPARE",
    ): "Metrics and Validation write metrics of different names; the same name is an error",
    (
        "EPOCH_COMPLETED",
        "CONTROL",
    ): "LRScheduling moves a rate and EarlyStopping asks for a stop: neither reads the other's",
    ("ITERATION_COMPLETED", "CONTROL"): "as in EPOCH_COMPLETED",
    ("ENDED", "CHANGE"): "each closes something of its own",
}
"""Cells of (event, phase) in which different shipped handlers meet at the same rank, and why that is harmless. Two of the same
kind are harmless (Checkpoints write different files of one snapshot), or refuse each other (`Engine.claim`)."""
