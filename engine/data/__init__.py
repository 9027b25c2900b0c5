"""Batches on their way into the loop: what a run iterates, and how far it has read.

`source` is one run's data with its position; `loading` begins a DataLoader at any batch; `combined` iterates several data
sets side by side, or reloads one every few epochs; `sharding` splits data over ranks. Nothing here knows of the loop.
"""

from .combined import CombinedData, ReloadedData
from .loading import generators_of
from .source import DataError, FirstBatches, RereadingWarning

__all__ = ["CombinedData", "DataError", "FirstBatches", "ReloadedData", "RereadingWarning", "generators_of"]
