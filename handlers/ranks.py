"""The order of shipped receivers that share a phase of an event and whose order would matter, with the reasons."""

from __future__ import annotations

SEED = -10
"""STARTED / PREPARE: seeding comes before anything that might draw."""

DECIDE_CHECKPOINTS = 10
"""CONTROL of the completed events: which checkpoints to keep is decided last, since a best one of this event has to hold
what the schedules and the patience decided in it."""

MIX = -10
"""GET_BATCH_COMPLETED / CHANGE: samples are mixed before parts of them are cut out, as the papers do."""

CHOOSE_UPDATES = -10
"""ITERATION_STARTED / CHANGE: which updates are made is chosen before each is repeated for its time chunks."""

MIX_LOSS, SMOOTH_LOSS = -20, -10
"""LOSS_COMPUTED / CHANGE: the loss of mixed targets first, then its smoothing, then what users and penalties add."""

MEASURE_GRADIENTS = 10
"""GRADIENTS_READY / PREPARE: norms are measured on unscaled gradients, before anything changes them."""

ADD_NOISE, CLIP_ADAPTIVELY = -20, -10
"""GRADIENTS_READY / CHANGE: noise first, so that clips bound what the step sees; then the adaptive clip of each unit; then
the clips by value and by global norm, which hold for all that was done before."""

GUARD = 10
"""GRADIENTS_READY / FINALIZE: the guard looks after the gradient scaler, whose overflows are its own to handle."""

AVERAGE = -10
"""EPOCH_COMPLETED and OPTIMIZER_STEP_COMPLETED / PREPARE: averages are updated before a validation uses them."""

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
