"""The order of shipped receivers that share a phase of an event and whose order would matter, with the reasons."""

from __future__ import annotations

BEFORE_ALL, AFTER_ALL = -(10**6), 10**6
"""What is measured lies between the last receiver of one event and the first of another."""

NOTE_EVENT = -1000
"""PREPARE: what a process does is noted before anything does it."""

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

NOTE_LOSS = -10
"""LOSS_COMPUTED / FINALIZE: the guard sees the loss before it is scaled."""

MEASURE_GRADIENTS = 10
"""GRADIENTS_READY / PREPARE: norms are measured on unscaled gradients, before anything changes them."""

ADD_NOISE, CLIP_ADAPTIVELY = -20, -10
"""GRADIENTS_READY / CHANGE: noise first, so that clips bound what the step sees; then the adaptive clip of each unit; then
the clips by value and by global norm, which hold for all that was done before."""

GUARD = 10
"""GRADIENTS_READY / FINALIZE: the guard looks after the gradient scaler, whose overflows are its own to handle."""

LOOK = 20
"""GRADIENTS_READY / FINALIZE: what was asked of the device is read when all have asked, in one synchronisation. A
receiver of one's own in this phase sees a skip for gradients that are not finite if its rank is greater."""

AVERAGE = -10
"""EPOCH_COMPLETED and OPTIMIZER_STEP_COMPLETED / PREPARE: averages are updated before a validation uses them."""

SAME_BUFFERS = -20
"""OPTIMIZER_STEP_COMPLETED and EVALUATION_STARTED / PREPARE: the buffers of all processes are made alike before averages take
them."""

PUT_TOGETHER = 10
"""EVALUATION_STARTED / PREPARE: sharded weights are gathered once averages are in their place."""

KEEP_BEST = -10
"""PERSIST of the completed events: the best weights are kept before a checkpoint holds them, as a part of its stopper's state."""

COMMUTING = {
    ("MODEL_SETUP", "PREPARE"): "moving a module and changing its dtype come to the same in either order",
    (
        "STARTED",
        "PREPARE",
    ): "each prepares something of its own: a folder, scalers, announced names; Seeding has a rank",
    (
        "STARTED",
        "CHANGE",
    ): "each looks up its own parameters, or builds its own schedule; none changes what another looks up",
    ("STARTED", "FINALIZE"): "DistributedDataParallel wraps modules; ParameterScheduling sets a field of the groups",
    ("CHECKPOINT_LOADED", "FINALIZE"): "as in STARTED",
    ("CHECKPOINT_LOADED", "CHANGE"): "LRScheduling compares numbers of steps; Freezing sets requires_grad",
    (
        "EPOCH_STARTED",
        "PREPARE",
    ): "Metrics sets its own sums back; Validation runs another engine; UpdateFrequency checks",
    ("GET_BATCH_COMPLETED", "PREPARE"): "moving a batch and changing its dtype come to the same in either order",
    ("EXCEPTION_RAISED", "PREPARE"): "those that distribute the model refuse each other",
    ("INTERRUPTED", "PREPARE"): "those that distribute the model refuse each other",
    ("GRADIENTS_READY", "FINALIZE"): "who looks first reads for all who asked, and leaves nothing to read",
    ("LOSS_COMPUTED", "CHANGE"): "MixUp and CutMix refuse each other",
    ("GET_BATCH_COMPLETED", "CHANGE"): "MixUp and CutMix refuse each other",
    ("UPDATE_COMPLETED", "PREPARE"): "TruncatedBPTT counts chunks; UpdateFrequency opens windows of its updates",
    ("OPTIMIZER_STEP_COMPLETED", "CONTROL"): "LRScheduling moves the rate, ParameterScheduling any other field",
    ("ITERATION_COMPLETED", "PREPARE"): "TruncatedBPTT lets its chunks go; Validation runs another engine",
    ("ITERATION_COMPLETED", "CONTROL"): "each moves a schedule or asks for a stop, and reads nothing of the others",
    (
        "EPOCH_COMPLETED",
        "PREPARE",
    ): "Metrics and Validation write metrics of different names; the same name is an error",
    ("EPOCH_COMPLETED", "CONTROL"): "as in ITERATION_COMPLETED; LRScheduling and SWA refuse each other over the rate",
    ("COMPLETED", "PREPARE"): "Checkpoint waits for its thread; Predictions, of an evaluation, joins what it has",
    ("EVALUATION_STARTED", "PREPARE"): "EMA and SWA refuse each other",
    ("CHECKPOINT_SAVING", "PREPARE"): "EMA and SWA refuse each other",
    (
        "ENDED",
        "PERSIST",
    ): "each closes a file of its own; Preemption puts signals back, and keeps nobody from running",
    ("WEIGHTS_LOADED", "CHANGE"): "EMA and SWA refuse each other",
    ("CHECKPOINT_LOADED", "PREPARE"): "Checkpoint looks at its folder; FastDevRun sets its bounds",
    ("ENDED", "CHANGE"): "each closes something of its own, or puts back what it changed",
}
"""Cells of (event, phase) in which different shipped handlers meet at the same rank, and why that is harmless. Two of the same
kind are harmless (Checkpoints write different files of one snapshot), or refuse each other (`Engine.claim`)."""
