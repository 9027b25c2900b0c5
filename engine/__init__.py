"""Signalfire: a PyTorch training engine whose loop only emits events, and whose every feature is a handler."""

if __name__ != "signalfire":
    raise ImportError(
        f"this package is installed as 'signalfire', but was imported as {__name__!r}; "
        "write `from signalfire import ...` (after `pip install -e .`): a second copy of every class would not fit the first"
    )

from .batches import map_leaves, parts, rebuilt, samples_in, tensors_in
from .bus import Connection, Phase, Signal
from .checks import check_bool, check_choice, check_int, check_number
from .combined import CombinedData, ReloadedData
from .data import DataError, FirstBatches, RereadingWarning
from .engine import Engine
from .events import AnyEvent, EventEnum, Events, EventUnion, FilteredEvent
from .handler import Handler, on
from .host import Attachment
from .interval import Interval, check_every, unfiltered
from .loading import generators_of
from .monitor import Monitor
from .processes import ALONE, Processes, lost_another, together
from .randomness import derived_seed, seed_everything, unchanged_random_state
from .rendezvous import note_failure
from .sharded import (
    SHARDS,
    ShardFiles,
    discard_unreduced,
    is_sharded,
    local_part,
    norms_over_ranks,
    reshard,
    sha256_of,
    split_shards,
    spread_like,
    unsharded,
    whole_tensor,
)
from .state import MetricStore, State, as_number
from .update import Update, UpdateState, needs_closure
from .watch import Watch
from .wiring import Wiring

__version__ = "0.1.0"

__all__ = [
    "ALONE",
    "SHARDS",
    "AnyEvent",
    "Attachment",
    "CombinedData",
    "Connection",
    "DataError",
    "Engine",
    "EventEnum",
    "EventUnion",
    "Events",
    "FilteredEvent",
    "FirstBatches",
    "Handler",
    "Interval",
    "MetricStore",
    "Monitor",
    "Phase",
    "Processes",
    "ReloadedData",
    "RereadingWarning",
    "ShardFiles",
    "Signal",
    "State",
    "Update",
    "UpdateState",
    "Watch",
    "Wiring",
    "as_number",
    "check_bool",
    "check_choice",
    "check_every",
    "check_int",
    "check_number",
    "derived_seed",
    "discard_unreduced",
    "generators_of",
    "is_sharded",
    "local_part",
    "lost_another",
    "map_leaves",
    "needs_closure",
    "norms_over_ranks",
    "note_failure",
    "on",
    "parts",
    "rebuilt",
    "reshard",
    "samples_in",
    "seed_everything",
    "sha256_of",
    "split_shards",
    "spread_like",
    "tensors_in",
    "together",
    "unchanged_random_state",
    "unfiltered",
    "unsharded",
    "whole_tensor",
]
