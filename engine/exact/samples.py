"""Samples whose random numbers depend on nothing but seed, epoch and index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from ..authoring.randomness import check_seed, derived_seed
from ..data.seeded import Collating, Keyed, Seeded

__all__ = ["SeededSamples"]


class SeededSamples(Dataset[Any]):
    """A map-style dataset that fetches each sample with the global generators seeded by (seed, epoch, index).

    It is for trainers that build the DataLoader themselves. Samples are the same in a resumed run and with any number of workers,
    and fetching them leaves the global generators as they were. Where you build the DataLoader, take `ResumableData`, which does
    this and keeps the position as well.

    Args:
        dataset: the dataset; its attributes are found here, too.
        seed: seed of what samples draw.

    Raises:
        TypeError: for an iterable dataset, which has no indices.

    Example:
        >>> class Noise(Dataset):
        ...     def __len__(self):
        ...         return 2
        ...
        ...     def __getitem__(self, index):
        ...         return torch.rand(()).item()
        >>> samples = SeededSamples(Noise(), seed=0)
        >>> first = [samples[0], samples[1]]
        >>> first == [samples[0], samples[1]], samples[0] == samples[1]
        (True, False)
        >>> samples.set_epoch(1)
        >>> first == [samples[0], samples[1]]
        False
    """

    def __init__(self, dataset: Any, seed: int = 0) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"SeededSamples({type(dataset).__name__}): the seed of a sample depends on its index, but the samples "
                "of an iterable dataset have no indices; pass a dataset with __getitem__ and __len__"
            )
        self.dataset = dataset
        self.seed = check_seed("SeededSamples", seed)
        self._seeded = Seeded(dataset)
        self._collated = False
        # Shared, since persistent workers keep their copy of the dataset over epochs.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, counted from 0; call it before the epoch's iteration begins."""
        self._epoch.fill_(epoch)

    def collating(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """This collate function, continuing the random numbers of a batch's last sample: masking of tokens draws there.

        Give the result to every DataLoader of these samples.
        """
        self._collated = True
        return collate_fn if isinstance(collate_fn, Collating) else Collating(collate_fn, self._seeded)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._seeded[Keyed(self._key(), index)]

    def __getitems__(self, indices: Any) -> Any:
        samples = self._seeded.batch(self._key(), indices)
        if not self._collated:
            self._seeded.put_back()
        return samples

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # during unpickling
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def _key(self) -> int:
        return derived_seed(self.seed, "sample", int(self._epoch))
