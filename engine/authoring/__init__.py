"""Everything that authors of handlers import, from one place.

Of the engine, a handler uses these parts:

- ``engine.log``: log a number, an image or a text; ``engine.state.metrics.announce``: metrics that only this handler writes
- `engine.regions.enter`: enter a context manager that is left at the end of the innermost open region
- `engine.overrides.claim`: claim something for this handler alone (`Claim`): a second handler that does so is refused
- `engine.overrides.replace`: put a function in place of the window's length, the gradient computation, the optimizer step,
  the data, or the reduction over ranks
- `engine.overrides.compute_gradients_once`: refuse steps that compute their gradients several times
- `engine.snapshots.take`: the state of this event, shared by all handlers that save it
- `engine.snapshots.restore`: put a state back in place at the end of this iteration
- `engine.snapshots.saving`: the region of a save, which CHECKPOINT_STARTED opens; ``report_saved`` emits CHECKPOINT_SAVED
- `engine.snapshots.add_write`: a write in a thread; ``wait_for_earlier_writes`` before a state that refers to it
- `engine.snapshots.run_id`: what distinguishes this run from every other; ``origin`` says where a loaded state came from
- `engine.boundary.preempt`: save and stop at the next boundary, also from a signal handler
- `engine.boundary.withdraw`: cancel a stop of `Engine.terminate` that has not taken effect
- `engine.processes`: the ranks: sums, and what each of them has
- `update.window`: the accumulation window of ``engine.state.update``; between two windows its ``filled`` is 0
- `engine.group.join`: train together with other processes; ``read_alike`` lets groups of them read the same data; ``now()`` is
  a clock on which the ranks agree
- `engine.feed.on_last_batch`: whether the batch is the epoch's last; ``has_data``, ``epoch_end`` and ``share()`` stand beside
  it
- `engine.signals.call_through`: call every receiver through a function, as the profiler does

From here, it imports:

- `Handler`, `on`, `Phase`: a feature, its subscriptions and their order
- `Claim`, `Override`: what one handler at a time may do, and the functions of the loop that it may replace
- `check_int`, `check_number`, `check_bool`, `check_choice`, `check_function`, `check_name`, `check_local`, `check_seed`: errors
  that name the handler, the argument and its value
- `check_every`, `Interval`: an interval that a user wrote
- `Monitor`: a metric that a handler decides by
- `map_leaves`, `tensors_in`, `samples_in`: nested batches: a function of every leaf, their tensors, the number of their samples
- `derived_seed`, `unchanged_random_state`: seeds, and random states that are left as they were
- `comes_up`, `last_epoch`, `last_iteration`, `steps_to_come`: how long the run will be, and whether an interval comes up in it
- `DeviceFeature`, `refusal`, `is_readable`: what works on which device, and a refusal in one sentence
- `Capture`: what a handler's operations within a step are to a CUDA graph of it
- `warn`: a warning at the line of the user

Elsewhere are:

- `Handler.findings`: what looks wrong about a handler in its composition, for `Engine.check`
- ``signalfire.runs.evaluation``: `prepare_batch`, a batch that the handler reads itself, moved and converted as in the loop;
  `inherited`, what evaluators inherit: receivers of GET_BATCH_COMPLETED in Phase.PREPARE, and of the precision
- ``signalfire.runs.restore``: `attempt`, which puts everything back if the memory runs out; `Buffers` and `Modes`
- ``signalfire.distributed``, ``checkpoints``, ``weights``: processes and sharded tensors, versions on disk, weights of others

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
