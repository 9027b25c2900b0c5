"""Batches on their way into the loop: what a run iterates, and how far it has read.

`feed` gives the loop its batches, from a `source`: one run's data with its position. `loading` begins a DataLoader at any
batch, `seeded` fetches its samples, `held_generators` finds the generators that they draw from, and `streamed` continues data
that saves its own position. `sharding` splits data over ranks, `combined` iterates several data sets side by side, or reloads one
every few epochs, and `first_batches` limits one. `extent` says how much data there is, `same` whether it is that of the run
before, `left_out` which batches a run leaves out, and `refusals` refuses what no run can iterate.

A resumed run skips by index in a DataLoader over a map-style dataset, and in a sequence. Other data may have
``batches_from(start)``, or ``state_dict()`` and ``load_state_dict()``, to begin in its middle; it is read again from its start if
it has neither. Samples of a map-style dataset are fetched with the global generators seeded from (seed, epoch, index), and
samplers with ``set_epoch`` receive the epoch.
"""

from .combined import CombinedData, ReloadedData
from .first_batches import FirstBatches
from .loading import generators_of
from .source import DataError, RereadingWarning

__all__ = ["CombinedData", "DataError", "FirstBatches", "ReloadedData", "RereadingWarning", "generators_of"]
