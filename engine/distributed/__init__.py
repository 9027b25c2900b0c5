"""Processes that train together, and tensors that are sharded over them. Nothing here knows the loop.

`processes` holds what ranks ask each other; `rendezvous` lets them find each other under torchrun; `watch` notices a rank that
died; `liveness` says whether a process of this machine still runs; `sharded` reads and writes DTensors; `differences` merges
the states of all ranks into one.
"""

from .processes import SINGLE_PROCESS, Processes, lost_another, process_group
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
from .watch import Watch

__all__ = [
    "SHARDS",
    "SINGLE_PROCESS",
    "Processes",
    "ShardFiles",
    "Watch",
    "discard_unreduced",
    "is_sharded",
    "local_part",
    "lost_another",
    "norms_over_ranks",
    "note_failure",
    "process_group",
    "reshard",
    "sha256_of",
    "split_shards",
    "spread_like",
    "unsharded",
    "whole_tensor",
]
