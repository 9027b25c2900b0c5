"""Combined data: multiple data sets iterated in parallel, and one that is reloaded every few epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from ..authoring.checks import check_choice, check_int
from ..authoring.randomness import derived_seed, seed_everything, unchanged_random_state
from .loading import SkippingLoader, generators_of, skippable
from .streamed import Streamed

__all__ = ["CombinedData", "ReloadedData"]


class CombinedData:
    """Multiple data sets iterated in parallel: each batch contains one batch of each.

    The order and the random numbers of a part depend on the random state at the start of the epoch, on the part, and on how
    often it began in this epoch, but not on the other parts. A resumed run skips to its position in each part that supports it
    (see `Engine.run`), and re-reads the others.

    Args:
        parts: Data sets by name, for batches that are dicts, or a sequence of data sets, for batches that are tuples.
        mode: Length of an epoch. "min": that of the shortest part. "max": that of the longest, with None in place of the batches
            of exhausted parts. "cycle": that of the longest, and shorter parts start again. With "min", parts may have no
            length, if at least one has.

    Raises:
        TypeError: for a part that cannot be iterated repeatedly, or has no length where one is needed.

    Example:
        >>> list(CombinedData({"a": [1, 2, 3], "b": [10, 20]}, mode="cycle"))
        [{'a': 1, 'b': 10}, {'a': 2, 'b': 20}, {'a': 3, 'b': 10}]
    """

    def __init__(
        self, parts: Mapping[str, Any] | Sequence[Any], *, mode: Literal["min", "max", "cycle"] = "cycle"
    ) -> None:
        if not isinstance(parts, Mapping | list | tuple) or not parts:
            raise TypeError(
                f"CombinedData(parts={parts!r}): expected a non-empty sequence of data, or a non-empty mapping from "
                "names to data"
            )
        self.mode = check_choice(self, "mode", mode, ("min", "max", "cycle"))
        self.names = list(parts) if isinstance(parts, Mapping) else None
        self.parts = list(parts.values() if isinstance(parts, Mapping) else parts)
        if all(length is None for length in self._measure()):
            raise TypeError(
                "CombinedData(mode='min'): no part has a length, so the epoch has no length either; pass at least "
                "one part that has a length"
            )

    def _measure(self) -> list[int | None]:
        """The lengths of the parts, which samplers may change from epoch to epoch."""
        return [self._length(place, part) for place, part in enumerate(self.parts)]

    def _length(self, place: int, part: Any) -> int | None:
        name = self.names[place] if self.names is not None else place
        if isinstance(part, Iterator) or not (hasattr(part, "__iter__") or hasattr(part, "__getitem__")):
            raise TypeError(f"CombinedData(parts[{name!r}]={part!r}): expected data that can be iterated repeatedly")
        if isinstance(part, ReloadedData):
            raise TypeError(
                f"CombinedData(parts[{name!r}]): ReloadedData cannot be a part; combine the data that it loads: "
                "ReloadedData(lambda epoch: CombinedData(...))"
            )
        try:
            length = len(part)
        except (TypeError, NotImplementedError):
            if self.mode == "min":
                return None
            raise TypeError(
                f"CombinedData(parts[{name!r}], mode={self.mode!r}): this mode needs the length of each part, but the "
                f"{type(part).__name__} has none; use mode='min'"
            ) from None
        if length == 0:
            raise ValueError(f"CombinedData(parts[{name!r}]): the data is empty")
        return length

    def __len__(self) -> int:
        return self._shared_length(self._measure())

    def _shared_length(self, lengths: list[int | None]) -> int:
        return (min if self.mode == "min" else max)(length for length in lengths if length is not None)

    def __iter__(self) -> Iterator[Any]:
        return self.batches_from(0)

    def batches_from(self, start: int) -> Iterator[Any]:
        """The batches of one epoch, starting at ``start``. Draws one random number at once, as a DataLoader does."""
        key = int(torch.empty((), dtype=torch.int64).random_().item())
        return self._batches(start, key)

    def _batches(self, start: int, key: int) -> Iterator[Any]:
        lengths = self._measure()
        columns = [self._column(place, start, key, length) for place, length in enumerate(lengths)]
        for _ in range(start, self._shared_length(lengths)):
            batch = [next(column) for column in columns]
            yield tuple(batch) if self.names is None else dict(zip(self.names, batch, strict=True))

    def _column(self, place: int, start: int, key: int, length: int | None) -> Iterator[Any]:
        """The batches of one part, without end."""
        times, offset = divmod(start, length) if length is not None else (0, start)
        while times == 0 or self.mode == "cycle":
            yield from _from(self.parts[place], offset, derived_seed(key, place, times), times)
            if length is None:
                raise ValueError(
                    f"CombinedData: part {place} has no length, and ran out of batches before the shortest part with a "
                    "known length; define its __len__"
                )
            times, offset = times + 1, 0
        while True:
            yield None


def _from(data: Any, start: int, seed: int, number: int) -> Iterator[Any]:
    """A pass over data with separate random streams, starting at batch ``start``."""
    own = generators_of(data)
    with unchanged_random_state(*own):
        seed_everything(seed % 2**32)
        for generator in own:
            generator.manual_seed(seed)
        if skippable(data):
            return SkippingLoader.of(data).iterate(data, seed, number, start, at_once=True)
    batches = Streamed(data, seed, lambda: iter(data))
    for _ in range(start):
        next(batches, None)
    return batches


class ReloadedData:
    """Data that is reloaded every few epochs, for example when files are replaced, or for a curriculum.

    Args:
        load: Called with the number of the epoch, counted from 0, in which the data is first used; returns the data.
        every: Number of epochs for which it is used. A resumed run loads the data of its epoch.

    Example:
        >>> ReloadedData(lambda epoch: [epoch] * 3, every=2).of_epoch(5)
        [4, 4, 4]
    """

    def __init__(self, load: Callable[[int], Any], *, every: int = 1) -> None:
        if not callable(load):
            raise TypeError(f"ReloadedData(load={load!r}): expected a function that takes the epoch number")
        self.load = load
        self.every = check_int(self, "every", every)
        self._loaded: tuple[int, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.of_epoch(0) if self._loaded is None else self._loaded[1])

    def first_of(self, epoch: int) -> int:
        """The epoch in which the data of this epoch was first used."""
        return epoch - epoch % self.every

    def of_epoch(self, epoch: int) -> Any:
        """The data of an epoch."""
        first = self.first_of(epoch)
        if self._loaded is None or self._loaded[0] != first:
            self._loaded = first, self.load(first)
        return self._loaded[1]

    def of_pass(self, epoch: int) -> Any:
        """As `of_epoch`; an iterator, which ends with its first pass, is loaded again."""
        if self._loaded is not None and isinstance(self._loaded[1], Iterator):
            self._loaded = None
        return self.of_epoch(epoch)
