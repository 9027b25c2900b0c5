"""Everything that authors of handlers import, from one place.

A handler uses these parts of the engine:

- ``engine.log``: log a number, an image or a text; ``engine.state.metrics.announce``: declare metrics that only it writes
- `engine.regions.enter`: enter a context manager that exits at the end of the innermost open region
- `engine.overrides.claim`: claim something for this handler alone (`Claim`); if a second handler claims it, an error is raised
- `engine.overrides.replace`: replace the window's length, the gradient computation, the optimizer step, the data, or the
  reduction over ranks with a function
- `engine.overrides.compute_gradients_once`: raise an error for steps that compute their gradients several times
- `engine.snapshots.take`: the state at this event, shared by all handlers that save it
- `engine.snapshots.restore`: restore a state in place at the end of this iteration
- `engine.snapshots.saving`: the region of a save, which CHECKPOINT_STARTED opens; ``report_saved`` emits CHECKPOINT_SAVED
- `engine.snapshots.add_write`: write in a thread; call ``wait_for_earlier_writes`` before writing a state that refers to it
- `engine.snapshots.run_id`: the unique id of this run; ``origin`` names the source of a loaded state
- `engine.boundary.preempt`: save and stop at the next boundary, even from a signal handler
- `engine.boundary.withdraw`: cancel a stop of `Engine.terminate` that has not taken effect
- `engine.processes`: the ranks; sum or gather their values
- `update.window`: the accumulation window of ``engine.state.update``; between two windows, its ``filled`` is 0
- `engine.group.join`: train together with other processes; with ``read_alike``, groups of ranks read the same data; ``now()``
  is a clock on which the ranks agree
- `engine.feed.on_last_batch`: whether the batch is the epoch's last; see also ``has_data``, ``epoch_end`` and ``share()``
- `engine.signals.call_through`: call every receiver through a function, as the profiler does

Import these from here:

- `Handler`, `on`, `Phase`: a feature, its subscriptions and their order
- `Claim`, `Override`: what only one handler at a time may do, and the functions of the loop that a handler may replace
- `check_int`, `check_number`, `check_bool`, `check_choice`, `check_function`, `check_name`, `check_local`, `check_seed`: raise
  errors that name the handler, the argument and its value
- `check_every`, `Interval`: an interval given by the user
- `Monitor`: a metric that a handler uses for decisions
- `map_leaves`, `tensors_in`, `samples_in`: nested batches: apply a function to every leaf, list the tensors, count the samples
- `derived_seed`, `unchanged_random_state`: derive seeds, and keep random states unchanged
- `comes_up`, `last_epoch`, `last_iteration`, `steps_to_come`: how long the run will be, and whether an interval occurs in it
- `DeviceFeature`, `refusal`, `is_readable`: which features work on which device, and the error message for one that does not
- `Capture`: whether a CUDA graph could record a handler's operations within a step
- `warn`: emit a warning that points to the user's line

In other modules:

- `Handler.findings`: warnings of a handler about the setup, for `Engine.check`
- ``signalfire.runs.evaluation``: `prepare_batch` moves and converts a batch that the handler reads itself, as the loop does;
  `inherited` returns what evaluators inherit: receivers of GET_BATCH_COMPLETED in Phase.PREPARE, and of device and precision
- ``signalfire.runs.restore``: `attempt` restores everything if memory runs out; `Buffers` and `Modes` restore their own part
- ``signalfire.distributed``, ``checkpoints``, ``weights``: processes and sharded tensors, checkpoints on disk, weights from files

`signalfire.testing.check_handler` tests what every handler guarantees. ``handlers/_common`` has base classes for loggers, weight
averages and the mixing of samples, and the claims that several included handlers share.
"""

from ..core.blame import warn
from ..core.connection import Phase
from ..core.events import AnyEvent, EventEnum, Events, FilteredEvent
from ..core.handler import Handler, on
from ..core.overrides import Claim, Override
from ..core.update import UpdateState
from ..core.words import as_int, did_you_mean, listed
from .batches import field_names, map_leaves, parts, rebuilt, samples_in, tensors_in
from .capture import Capture
from .checks import (
    check_bool,
    check_choice,
    check_function,
    check_int,
    check_local,
    check_name,
    check_number,
    check_stream,
)
from .devices import DeviceFeature, as_signed, first_wide, is_readable, refusal, support, unavailable, widened
from .interval import Interval, check_every, event_of, saving_events, unfiltered
from .log import Entry, Histogram, as_pixels
from .markup import preformatted, table
from .monitor import Monitor, check_announced, find_mode, find_name, no_direction
from .plain import fields_of, plain_mapping, plain_value
from .planning import comes_up, last_epoch, last_iteration, steps_to_come
from .randomness import (
    check_seed,
    derived_seed,
    device_generators,
    random_state,
    seed_everything,
    set_random_state,
    unchanged_random_state,
)

__all__ = [
    "AnyEvent",
    "Capture",
    "Claim",
    "DeviceFeature",
    "Entry",
    "EventEnum",
    "Events",
    "FilteredEvent",
    "Handler",
    "Histogram",
    "Interval",
    "Monitor",
    "Override",
    "Phase",
    "UpdateState",
    "as_int",
    "as_pixels",
    "as_signed",
    "check_announced",
    "check_bool",
    "check_choice",
    "check_every",
    "check_function",
    "check_int",
    "check_local",
    "check_name",
    "check_number",
    "check_seed",
    "check_stream",
    "comes_up",
    "derived_seed",
    "device_generators",
    "did_you_mean",
    "event_of",
    "field_names",
    "fields_of",
    "find_mode",
    "find_name",
    "first_wide",
    "is_readable",
    "last_epoch",
    "last_iteration",
    "listed",
    "map_leaves",
    "no_direction",
    "on",
    "parts",
    "plain_mapping",
    "plain_value",
    "preformatted",
    "random_state",
    "rebuilt",
    "refusal",
    "samples_in",
    "saving_events",
    "seed_everything",
    "set_random_state",
    "steps_to_come",
    "support",
    "table",
    "tensors_in",
    "unavailable",
    "unchanged_random_state",
    "unfiltered",
    "warn",
    "widened",
]
