"""Data made of data: several side by side, and data that is loaded anew every few epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from ..checks import check_choice, check_int
from ..randomness import derived_seed, seed_everything, unchanged_random_state
from .loading import SkippingLoader, generators_of, skippable
from .source import Streamed

__all__ = ["CombinedData", "ReloadedData"]


class CombinedData:
    """Several data iterated side by side: each batch holds a batch of each.

    The order of each part, and what it draws, depend on the run's seed and state where the epoch begins, on the part and on how
    often it began in this epoch, and on nothing that the others draw. A resumed run skips to its place in every part that can
    be skipped to (see `Engine.run`), and reads the others again.

    Args:
        parts: the data by name, which makes batches dicts, or a sequence of data, which makes them tuples.
        mode: how long an epoch is. "min": as the shortest part; "max": as the longest, with None in place of batches of parts
            that are exhausted; "cycle": as the longest, while shorter ones begin again. Parts without a length are possible
            with "min", as long as one has a length.

    Raises:
        TypeError: for a part that cannot be iterated, or one without a length where it is needed.

    Example:
        >>> list(CombinedData({"a": [1, 2, 3], "b": [10, 20]}, mode="cycle"))
        [{'a': 1, 'b': 10}, {'a': 2, 'b': 20}, {'a': 3, 'b': 10}]
    """

    def __init__(
        self, parts: Mapping[str, Any] | Sequence[Any], *, mode: Literal["min", "max", "cycle"] = "cycle"
    ) -> None:
        if not isinstance(parts, Mapping | list | tuple) or not parts:
            raise TypeError(f"CombinedData(parts={parts!r}): it has to be a mapping or a sequence of data, not empty")
        self.mode = check_choice(self, "mode", mode, ("min", "max", "cycle"))
        self.names = list(parts) if isinstance(parts, Mapping) else None
        self.parts = list(parts.values() if isinstance(parts, Mapping) else parts)
        self._lengths = [self._length(place, part) for place, part in enumerate(self.parts)]
        if all(length is None for length in self._lengths):
            raise TypeError(
                "CombinedData(mode='min'): one of the parts has to have a length, which is that of the epoch"
            )

    def _length(self, place: int, part: Any) -> int | None:
        name = self.names[place] if self.names is not None else place
        if isinstance(part, Iterator) or not (hasattr(part, "__iter__") or hasattr(part, "__getitem__")):
            raise TypeError(
                f"CombinedData(parts[{name!r}]={part!r}): it has to be data that can be iterated again and again"
            )
        try:
            length = len(part)
        except (TypeError, NotImplementedError):
            if self.mode == "min":
                return None
            raise TypeError(
                f"CombinedData(parts[{name!r}], mode={self.mode!r}): the {type(part).__name__} has no length; use mode='min'"
            ) from None
        if length == 0:
            raise ValueError(f"CombinedData(parts[{name!r}]): the data is empty")
        return length

    def __len__(self) -> int:
        return (min if self.mode == "min" else max)(length for length in self._lengths if length is not None)

    def __iter__(self) -> Iterator[Any]:
        return self.batches_from(0)

    def batches_from(self, start: int) -> Iterator[Any]:
        """The batches of one epoch from one of them on. Where it begins, one number is drawn, as a DataLoader draws one."""
        key = int(torch.empty((), dtype=torch.int64).random_().item())
        return self._batches(start, key)

    def _batches(self, start: int, key: int) -> Iterator[Any]:
        columns = [self._column(place, start, key) for place in range(len(self.parts))]
        for _ in range(start, len(self)):
            batch = [next(column) for column in columns]
            yield tuple(batch) if self.names is None else dict(zip(self.names, batch, strict=True))

    def _column(self, place: int, start: int, key: int) -> Iterator[Any]:
        """What one part contributes, without an end."""
        length = self._lengths[place]
        times, offset = divmod(start, length) if length is not None else (0, start)
        while times == 0 or self.mode == "cycle":
            yield from _from(self.parts[place], offset, derived_seed(key, place, times), times)
            if length is None:
                raise ValueError(f"CombinedData: part {place} ended before the shortest of those that have a length")
            times, offset = times + 1, 0
        while True:
            yield None


def _from(data: Any, start: int, seed: int, number: int) -> Iterator[Any]:
    """A pass over data from one of its batches on, which draws from streams of its own."""
    own = generators_of(data)
    with unchanged_random_state(*own):
        seed_everything(seed % 2**32)
        for generator in own:
            generator.manual_seed(seed)
        if skippable(data):
            return SkippingLoader.of(data).iterate(seed, number, start, at_once=True)
    batches = Streamed(data, seed, lambda: iter(data))
    for _ in range(start):
        next(batches, None)
    return batches


class ReloadedData:
    """Data that is made anew every few epochs, as when files are replaced or a curriculum goes on.

    Args:
        load: called with the number of the epoch, counted from 0, that it is for; returns the data.
        every: for how many epochs it is used. A resumed run loads that of its epoch.

    Example:
        >>> ReloadedData(lambda epoch: [epoch] * 3, every=2).of_epoch(5)
        [4, 4, 4]
    """

    def __init__(self, load: Callable[[int], Any], *, every: int = 1) -> None:
        if not callable(load):
            raise TypeError(f"ReloadedData(load={load!r}): it has to be a function of the number of the epoch")
        self.load = load
        self.every = check_int(self, "every", every)
        self._loaded: tuple[int, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.of_epoch(0) if self._loaded is None else self._loaded[1])

    def first_of(self, epoch: int) -> int:
        """For which epoch the data of this one was made."""
        return epoch - epoch % self.every

    def of_epoch(self, epoch: int) -> Any:
        """The data of an epoch."""
        first = self.first_of(epoch)
        if self._loaded is None or self._loaded[0] != first:
            self._loaded = first, self.load(first)
        return self._loaded[1]
