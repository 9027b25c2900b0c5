"""Ranks of the package's own receivers, which order them within a phase of an event where the order matters, with reasons."""

from __future__ import annotations

BEFORE_ALL, AFTER_ALL = -(10**6), 10**6
"""A profiled stage runs from after the last receiver of one event to before the first receiver of another."""

RECORD_EVENT = -1000
"""PREPARE: an event is recorded, for the report of a lost rank, before any other receiver runs."""

MEASURE_RATES = -900
"""PREPARE of the completed events: rates are measured before validations and averages take their time."""

LOG_HISTOGRAMS = -10
"""RECORD: a handler's logged values come before the row of losses in a log, whichever of the two is attached first."""

COLLECT, HOLD = -20, 10
"""PERSIST: a finished write is reported before anything else is written; the state to be saved after an error is held last."""

HOLD_STATE = -30
"""PERSIST: a state is held before a checkpoint is written, because a checkpoint includes the oldest state."""

REPORT_MISSING = 1000
"""PERSIST: metrics that are missing are reported after all receivers that may write them."""

RECORD_TRACE = -40
"""PERSIST: a trace is written after all other receivers have run, and before a checkpoint refers to the file."""

RESUME, WARM_START = -20, -10
"""MODEL_SETUP / PREPARE: a run that resumes is not warm-started; weights are loaded before the model is moved, converted or
frozen, and before anything wraps it."""

LIMIT_RUN = -30
"""STARTED / PREPARE: a trial run gets its bounds before any receiver reads them."""

SEED = -10
"""STARTED / PREPARE: generators are seeded before any receiver draws from them."""

CONVERT = 10
"""MODEL_SETUP / PREPARE: converted once they are on their device, which may lack the precision."""

LAYOUT = 10
"""STARTED / PREPARE and GET_BATCH_COMPLETED / PREPARE: tensors are laid out in memory once they are on their device."""

DECIDE_CHECKPOINTS = 10
"""CONTROL of the completed events: checkpoints are selected last, because a best checkpoint includes the decisions of schedules
and patience at this event."""

CUT_SEQUENCES, RESIZE = -30, -20
"""GET_BATCH_COMPLETED / CHANGE: batches get their size before samples are mixed or cut out."""

SAME_RANDOM_STATE = -5
"""STARTED / PREPARE: the ranks of a split model take the generators of rank 0 once these are seeded."""

SPLIT_LAYERS = -10
"""MODEL_SETUP / FINALIZE: layers are split over ranks once modules are moved and converted, and before they are wrapped."""

MIX = -10
"""GET_BATCH_COMPLETED / CHANGE: samples are mixed before parts of them are cut out, as in the papers."""

SELECT_UPDATES = -10
"""ITERATION_STARTED / CHANGE: updates are selected before they are repeated for their time chunks."""

ADD_EMBEDDING_NOISE, DROP_PATHS = -10, 10
"""UPDATE_STARTED / CHANGE: the hook on the embedding comes before the hooks on the blocks that follow."""

MIX_LOSS, SMOOTH_LOSS, DISTILL, ADD_PENALTY = -20, -10, -7, -5
"""LOSS_COMPUTED / CHANGE: first the loss of mixed targets, then label smoothing, which is for the labels only, then the teacher's
part, then penalties, whose gradients add up in one order, then terms that users add."""

RECORD_LOSS = -10
"""LOSS_COMPUTED / FINALIZE: the guard records the loss before it is scaled."""

MEASURE_GRADIENTS = 10
"""GRADIENTS_READY / PREPARE: norms are measured on unscaled gradients, before anything changes them."""

ADD_NOISE, CLIP_ADAPTIVELY = -20, -10
"""GRADIENTS_READY / CHANGE: noise first, so clipping bounds the gradients of the step; then the adaptive clip of each unit; then
the clips by value and by global norm, which bound everything before them."""

CENTRALIZE = -18
"""GRADIENTS_READY / CHANGE: gradients are centralized with their noise, before pruning and clipping."""

MASK_GRADIENTS = -15
"""GRADIENTS_READY / CHANGE: gradients of pruned weights are set to zero after noise is added, so clips do not count them."""

CHECK_FINITE = 10
"""GRADIENTS_READY / FINALIZE: the guard checks after the gradient scaler, which handles its own overflows."""

CHECK_SPIKES = 15
"""GRADIENTS_READY / FINALIZE: non-finite values are not spikes, and their steps are skipped first."""

READ_FLAGS = 20
"""GRADIENTS_READY / FINALIZE: all flags on the device are read together, in one synchronization. Your own receiver in this
phase sees a step skipped for non-finite gradients if its rank is greater."""

RECORD_GROUPS = -30
"""OPTIMIZER_STEP_COMPLETED / PREPARE: the values that the step has used are recorded before anything changes them."""

AVERAGE = -10
"""EPOCH_COMPLETED and OPTIMIZER_STEP_COMPLETED / PREPARE: averages are updated before a validation uses them."""

LOOK_AHEAD = -18
"""OPTIMIZER_STEP_COMPLETED / PREPARE: weights go back to the slow weights before pruned weights are set to zero again."""

TAKE_LOADED = 10
"""WEIGHTS_LOADED / CHANGE: slow weights start from the loaded weights once pruned weights are zero."""

PRUNE = -15
"""OPTIMIZER_STEP_COMPLETED / PREPARE: pruned weights are zero before averages take them. STARTED / FINALIZE: weights are pruned
once layers are frozen, and before they are wrapped."""

RECOMPUTE = -20
"""STARTED / FINALIZE: forwards are replaced before models are wrapped or compiled."""

COMPILE = 10
"""STARTED / FINALIZE, and events that may wrap a model again: the model is compiled once it is wrapped, and restored before."""

REHEARSE = 10
"""EPOCH_COMPLETED and COMPLETED / PREPARE: handlers that were not due in a trial run act after all others."""

BROADCAST_BUFFERS = -20
"""OPTIMIZER_STEP_COMPLETED and EVALUATION_STARTED / PREPARE: the buffers of rank 0 are broadcast before averages copy them."""

GATHER_WEIGHTS = 10
"""EVALUATION_STARTED / PREPARE: sharded weights are gathered after averages are swapped in."""

EXPORT = 20
"""PERSIST of the completed events: files for others are written after checkpoints, from which a run could resume."""

KEEP_BEST = -10
"""PERSIST of the completed events: EarlyStopping copies the best weights before a checkpoint saves them with its state."""

PUBLISH = -10
"""EPOCH_COMPLETED / PREPARE: training metrics are written before a validation, whatever was attached first."""

CHECK_METRIC = -10
"""EPOCH_COMPLETED / CONTROL: a monitored metric is checked on all ranks before anything is decided by it."""
