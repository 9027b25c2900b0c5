"""Distributed training: the process group, sharded tensors, and the step of several ranks.

`processes` provides the collectives; `rendezvous` joins the process group under torchrun; `watch` detects failed and dead ranks;
`job` proves that they belong together; `liveness` checks whether a process of this machine is running; `sharded` reads and
writes DTensors; `differences` merges the states of all ranks into one. `group`, `step`, `boundary` and `notice` are what the
loop calls in place of the kernel's own.
"""

from .processes import SINGLE_PROCESS, DataGroups, Processes, SameData, expected_processes, lost_another, process_group
from .rendezvous import note_failure
from .sharded import (
    SHARDS,
    ShardFiles,
    discard_unreduced,
    gathered_until_backward,
    is_sharded,
    is_unit,
    like_parameter,
    local_part,
    norms_over_ranks,
    reshard,
    sha256_of,
    split_shards,
    spread_like,
    units_in,
    unsharded,
    whole_tensor,
)
from .watch import Watch

__all__ = [
    "SHARDS",
    "SINGLE_PROCESS",
    "DataGroups",
    "Processes",
    "SameData",
    "ShardFiles",
    "Watch",
    "discard_unreduced",
    "expected_processes",
    "gathered_until_backward",
    "is_sharded",
    "is_unit",
    "like_parameter",
    "local_part",
    "lost_another",
    "norms_over_ranks",
    "note_failure",
    "process_group",
    "reshard",
    "sha256_of",
    "split_shards",
    "spread_like",
    "units_in",
    "unsharded",
    "whole_tensor",
]
