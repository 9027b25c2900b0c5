"""The stream of batches: sized, unsized, infinite or no data, with its position."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, count, islice, repeat
from typing import Any

import torch
from torch.utils.data import default_collate, default_convert

from ..distributed.processes import ALONE, Processes
from ..randomness import derived_seed, packed, random_state, seed_everything, set_random_state, unchanged_random_state
from .loading import SkippingLoader, epochs_of, generators_of, has_torchs_order, is_plain, set_epochs, skippable
from .sharding import agreed, deal, draws_as_it_is_read, manner_of, padding_left_out, turns

__all__ = ["END", "DataError", "FirstBatches", "RereadingWarning", "Source", "Streamed"]


class _End:
    def __repr__(self) -> str:
        return "END"


END: Any = _End()
"""What the iterator gives when the data is exhausted; None is a batch to be skipped."""


class DataError(ValueError):
    """The data is empty, shorter than it says, or cannot be iterated again."""


class RereadingWarning(UserWarning):
    """Data that can neither be skipped nor keep its own position is read again up to where a saved run stood."""


class FirstBatches:
    """The first batches of data, taken anew each time; it has a length if the data has one.

    Args:
        data: the data.
        count: how many.
    """

    def __init__(self, data: Any, count: int) -> None:
        self.data = data
        self.count = count

    @property
    def limited_data(self) -> Any:
        """What it takes them from, whose samplers and generators are a part of the position."""
        return self.data

    def __len__(self) -> int:
        return min(self.count, len(self.data))

    def __iter__(self) -> Iterator[Any]:
        return self.limited(iter(self.data), 0)

    def limited(self, batches: Iterator[Any] | None, start: int, count: int | None = None) -> Iterator[Any]:
        """The batches that are left of an iterator which begins at batch ``start``; up to another count, if one is given."""
        count = self.count if count is None else count
        for taken in range(start + 1, count + 1):
            assert batches is not None
            try:
                batch = next(batches)
            except StopIteration:
                return
            if taken == count:
                batches = None  # a DataLoader's workers end now, and not when this iterator is let go of
            yield batch


class Source:
    """One run's data, and how far it was read; of several processes, what this one takes of it.

    Without an explicit epoch_length every epoch iterates the data anew. With one, the iteration goes on across epochs and
    starts again when the data is exhausted.

    Attributes:
        length: the data's own length, or None.
        continues: whether the iteration goes on across epochs.
        started_at: the run's iteration count when the data was last iterated anew.
        number: which pass over the data this is, counted from 0.
        manner: how the data is shared out to processes.
    """

    def __init__(
        self,
        data: Any,
        epoch_length: int | None,
        seed: int,
        *,
        epoch: int = 0,
        processes: Processes = ALONE,
        shares: str = "auto",
        whole: bool = False,
    ) -> None:
        self.processes = processes
        self.shares = shares
        self.whole = whole  # whether samples that only pad are left out
        self.given = data
        self.given_length = epoch_length
        self.seed = seed
        self.load(epoch)
        self.iterator: Iterator[Any] | None = None
        self.started_at = 0
        self.number = 0
        self.saved: dict[str, Any] = {}
        self.turn_shares: dict[int, float] = {}  # how much the batches of a turn count, of those that are dealt
        # Called with the pass and the batch before each batch but the first, so that draws do not go on from the model's.
        self.reseed: Callable[[int, int], None] | None = None

    def load(self, epoch: int) -> None:
        """Take the data of this epoch, counted from 0: the same for all, unless it is made anew every few epochs."""
        of_epoch = getattr(self.given, "of_epoch", None)
        self.data = of_epoch(epoch) if callable(of_epoch) else self.given
        first_of = getattr(self.given, "first_of", None)
        self.first = first_of(epoch) if callable(first_of) else 0
        self.manner = manner_of(_inner(self.data), self.processes, self.shares)
        self.length = self._turns(self.data)
        if self.manner == "own":
            lengths = self.processes.gather(self.length)
            self.length = None if None in lengths else max(lengths)
        self.epoch_length = self.length if self.given_length is None else self.given_length
        self.continues = self.given_length is not None and self.given_length != self.length

    def _turns(self, data: Any) -> int | None:
        """How many batches this process takes of the data; None if nobody knows."""
        if isinstance(data, FirstBatches):
            inner = self._turns(data.data)
            return None if inner is None else min(self._most(data), inner)
        length = _length_of(data)
        if length is not None and self.manner == "deal":
            return turns(length, self.processes)
        if length is not None and self.manner == "own" and (samples := self._samples(data)) is not None:
            return min(length, -(-samples // (data.batch_size or 1)))
        return length

    def _most(self, data: FirstBatches) -> int:
        """How many batches this process takes of limited data."""
        return turns(data.count, self.processes) if self.manner == "deal" else data.count

    def _samples(self, data: Any) -> int | None:
        """How many samples of the data are this process's own, where others only pad it, and are to be left out."""
        return padding_left_out(data) if self.whole and skippable(data) and data.batch_size is not None else None

    def share(self, iteration: int) -> float:
        """How much the batch of this process counts in an iteration: 1, unless those dealt with it have other sizes."""
        return self.turn_shares.get(iteration - self.started_at - 1, 1)

    def announce(self, epoch: int) -> None:
        """Take the data of this epoch, and tell samplers that want to know it that it is about to begin."""
        self.load(epoch)
        if not self.continues:
            set_epochs(self.data, epoch)

    def begin(self, iteration: int, epoch: int, *, ahead: bool) -> Iterator[Any]:
        """Iterate the data anew; with ``ahead``, unsized data is read one batch ahead of its use.

        Args:
            iteration: how many were made in the run.
            epoch: which one begins, counted from 0. Where the data goes on across epochs, its passes are counted instead.
            ahead: whether a window needs to know the last batch.
        """
        if self.continues:
            epoch = self.number + 1 if self.saved else 0
            set_epochs(self.data, epoch)
        # What the order is drawn from, so that a resumed run can draw it again.
        states = _state_of_draws(self.data), [generator.get_state() for generator in generators_of(self.data)]
        if self.manner == "deal":  # what is dealt has the order that rank 0 draws
            states = self.processes.broadcast(states)
            self._set_generators(states[1])
        self.saved = {
            "started_at": iteration,
            "number": epoch,
            "ahead": ahead,
            "random": states[0],
            "generators": states[1],
            "epochs": epochs_of(self.data),
        }
        if self.manner != "deal" or self.processes.first:
            return self._iterate(0)
        with unchanged_random_state():
            set_random_state(states[0])
            return self._iterate(0)

    def _iterate(self, start: int) -> Iterator[Any]:
        """The batches of the pass that is saved, from one of them on if they can be skipped."""
        self.started_at, self.number = self.saved["started_at"], self.saved["number"]
        self.skips = True
        self.turn_shares = {}
        alike = self.manner == "deal" and self.data is not None and draws_as_it_is_read(_inner(self.data))
        if self.data is None:
            self.iterator = repeat(None)
        elif self.epoch_length is None or _keeps_position(_inner(self.data)) or alike:
            own_streams = self.saved["ahead"] or _keeps_position(_inner(self.data)) or alike
            seed = derived_seed(self.seed, "data", self.started_at) if own_streams else None
            self.iterator = Streamed(self.data, seed, lambda: self._reseeded(start))
            if start and self.skips and (place := self.saved.get("place")) is not None:
                self.iterator.streams = place["streams"]
        else:
            self.iterator = self._reseeded(start)
        return self.iterator

    def _reseeded(self, start: int) -> Iterator[Any]:
        """The batches; with `reseed`, each of what may draw as it is read is drawn from a stream of its own."""
        batches = self._batches(self.data, start)
        return batches if self.reseed is None or not may_draw(_inner(self.data)) else self._reseeding(batches, start)

    def _reseeding(self, batches: Iterator[Any], start: int) -> Iterator[Any]:
        assert self.reseed is not None
        for taken in count(start if self.skips else 0):
            if taken:  # the first is drawn as the pass begins
                self.reseed(self.number, taken)
            batch = next(batches, END)
            if batch is END:
                return
            yield batch

    def _batches(self, data: Any, start: int, limit: int | None = None) -> Iterator[Any]:
        """The batches from one of them on; where they cannot be skipped, all of them, and `skips` becomes False."""
        if isinstance(data, FirstBatches):
            inner = self._batches(data.data, start, data.count)
            return data.limited(inner, start if self.skips else 0, self._most(data))
        if self.manner == "deal":
            length = _length_of(data)
            return deal(data, start, length, limit, self.processes, self.seed, self.number, self.turn_shares)
        if self.manner == "own":
            return self._own_batches(data, start)
        return self._all_batches(data, start)

    def _own_batches(self, data: Any, start: int) -> Iterator[Any]:
        """The batches of this process, with as many turns as the others have."""
        batches = self._all_batches(data, start)
        if self.length is None:
            return agreed(batches, self.processes)
        own = self._turns(data)
        assert own is not None
        return chain(batches, repeat(None, max(0, self.length - max(own, start))))

    def _all_batches(self, data: Any, start: int) -> Iterator[Any]:
        if skippable(data):
            return SkippingLoader.of(data).iterate(self.seed, self.number, start, samples=self._samples(data))
        if callable(begin := getattr(data, "batches_from", None)):
            batches: Iterator[Any] = begin(start)
            return batches
        if isinstance(data, Sequence) or not hasattr(type(data), "__iter__"):
            return islice(iter(data), start, None) if isinstance(data, list | tuple) else _items(data, start)
        self.skips = start == 0 or (self.saved.get("place") is not None and _keeps_position(data))
        if start and self.skips:
            data.load_state_dict(self.saved["place"]["position"])
        return iter(data)

    def fits(self, saved: Mapping[str, Any], epoch: int, epoch_start: int) -> bool:
        """Whether a saved position is inside what is iterated now: data that starts anew in each epoch has that of its epoch."""
        return "random" in saved and (
            self.continues or (saved["started_at"] == epoch_start and saved["number"] == epoch - 1)
        )

    def adopt(self, other: Source) -> None:
        """Go on with an iterator that an earlier run has begun, and with what was read ahead of it: it cannot begin again."""
        self.iterator, self.started_at, self.saved = other.iterator, other.started_at, other.saved
        self.turn_shares = other.turn_shares

    def resume(self, saved: Mapping[str, Any], iteration: int) -> Iterator[Any]:
        """Iterate as the saved run did, past the batches that it had taken: skipped where they can be, else read again."""
        set_random_state(saved["random"])
        self._set_generators(saved["generators"])
        set_epochs(self.data, saved["epochs"])
        self.saved = {key: value for key, value in saved.items() if not key.endswith("_now")}
        wanted = iteration - saved["started_at"]
        if isinstance(self.data, FirstBatches) and wanted > self._most(self.data):
            raise DataError(
                f"the saved run had taken {wanted} batches of its epoch, and this data is limited to the first {self.data.count} "
                "by a handler: begin anew, without the loaded state, or detach the handler that limits it"
            )
        iterator = self._iterate(wanted)
        if self.skips:
            return iterator
        warnings.warn(
            f"the data ({type(self.data).__name__}) cannot begin in its middle: {wanted} batches are read again. A DataLoader "
            "over a map-style dataset skips them; other data may have state_dict() and load_state_dict() to keep its own "
            "position, or batches_from(start) to begin at a batch",
            RereadingWarning,
            stacklevel=2,
        )
        for taken in range(wanted):
            if next(iterator, END) is END:
                raise DataError(
                    f"the run had taken {wanted} batches when it stopped, but this data ends after {taken}; "
                    "go on with the data of that run"
                )
        return iterator

    @property
    def batch_size(self) -> int | None:
        """The samples of a batch of a DataLoader; None if it does not say."""
        inner = _inner(self.data)
        size = getattr(inner, "batch_size", None) or getattr(getattr(inner, "batch_sampler", None), "batch_size", None)
        return size if isinstance(size, int) else None

    def state_dict(self) -> dict[str, Any]:
        now = {
            "generators_now": [generator.get_state() for generator in generators_of(self.data)],
            "epochs_now": epochs_of(self.data),
            "batch_size_now": self.batch_size,
            "first": self.first,
        }
        if not self.saved:
            return now
        saved = self.saved | {"random": packed(self.saved["random"])}
        iterator = self.iterator
        if not isinstance(iterator, Streamed) or not _keeps_position(_inner(self.data)):
            return saved | now
        place = iterator.place()
        return saved | now | {"place": iterator.before if iterator.read else place, "place_now": place}

    def go_on(self, saved: Mapping[str, Any], *, announced: bool) -> None:
        """Let the next `begin` draw what it would have drawn in the saved run.

        Args:
            saved: the saved position.
            announced: whether the saved run had announced the epoch that is to begin.
        """
        if saved["first"] != self.first:
            return  # other data, which was made anew for the epoch that is to begin
        self._set_generators(saved["generators_now"])
        if announced:
            set_epochs(self.data, saved["epochs_now"])
        data = _inner(self.data)
        if saved.get("place_now") is not None and _keeps_position(data):
            data.load_state_dict(saved["place_now"]["position"])
            if self.length is not None:  # all of its batches were taken, but it was not asked for one more
                next(iter(data), END)

    def _set_generators(self, states: list[Any]) -> None:
        generators = generators_of(self.data)
        if len(generators) != len(states):
            raise DataError(
                f"the data of the saved run drew from {len(states)} generator(s) of its own, and this data "
                f"({type(self.data).__name__}) from {len(generators)}; go on with the data of that run"
            )
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    def last(self) -> bool:
        """Whether unsized data ends after the current batch; reads one ahead to know."""
        return isinstance(self.iterator, Streamed) and self.iterator.exhausted()

    def ended(self) -> bool:
        """As `last`, but what can be read only once is not read ahead: what was read would be lost."""
        if isinstance(self.data, Iterator):
            return isinstance(self.iterator, Streamed) and self.iterator.read == [END]
        return self.last()


class Streamed:
    """An iterator over data that can be asked whether more is coming, and where the data stands.

    With a seed, the data draws from random streams of its own, so that neither reading ahead nor going back to a position
    changes what the model draws.

    Attributes:
        read: what was read ahead.
        before: where the data stood before that, if it keeps its own position.
    """

    def __init__(self, data: Any, seed: int | None, begin: Callable[[], Iterator[Any]]) -> None:
        self.read: list[Any] = []
        self.before: dict[str, Any] | None = None
        self.data = _inner(data)
        self.streams: dict[str, Any] | None = None
        if seed is not None:
            with unchanged_random_state():
                seed_everything(seed % 2**32)
                self.streams = random_state()
        self.iterator: Iterator[Any] = self._with_streams(begin)

    def place(self) -> dict[str, Any]:
        """Where data that keeps its own position stands, with its streams."""
        return {"position": self._with_streams(self.data.state_dict), "streams": self.streams}

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = self.read.pop() if self.read else self._with_streams(lambda: next(self.iterator, END))
        if batch is END:
            self.read = [END]
            raise StopIteration
        return batch

    def exhausted(self) -> bool:
        if not self.read:
            self.before = self.place() if _keeps_position(self.data) else None
            self.read.append(self._with_streams(lambda: next(self.iterator, END)))
        return self.read[0] is END

    def _with_streams(self, act: Callable[[], Any]) -> Any:
        if self.streams is None:
            return act()
        with unchanged_random_state():
            set_random_state(self.streams)
            result = act()
            self.streams = random_state()
        return result


def may_draw(data: Any) -> bool:
    """Whether data may draw from the global generators between its batches: what a plain DataLoader fetches does not."""
    return not (is_plain(data) or (skippable(data) and data.collate_fn in (default_collate, default_convert)))


def _state_of_draws(data: Any) -> dict[str, Any]:
    """The state of those global generators that data may draw its order from: to read NumPy's alone takes 50 us."""
    if is_plain(data):
        return {}
    if skippable(data) and has_torchs_order(data):
        return {"torch": torch.get_rng_state()}
    return random_state()


def _inner(data: Any) -> Any:
    return data.data if isinstance(data, FirstBatches) else data


def _keeps_position(data: Any) -> bool:
    return callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))


def _items(data: Any, start: int) -> Iterator[Any]:
    """What data without an iterator of its own gives by index, as `iter` would."""
    for index in count(start):
        try:
            item = data[index]
        except IndexError:
            return
        yield item


def _length_of(data: Any) -> int | None:
    if data is None:
        return None
    try:
        iter_ = type(data).__iter__
    except AttributeError:
        iter_ = getattr(type(data), "__getitem__", None)
    if iter_ is None:
        raise TypeError(
            f"the data {data!r} cannot be iterated: give a DataLoader, a list of batches or another iterable, "
            "or None with epoch_length= for a run without data"
        )
    try:
        length = len(data)
    except (TypeError, NotImplementedError):  # an IterableDataset's loader has __len__ but refuses to tell
        return None
    if length == 0:
        raise DataError(f"the data ({type(data).__name__}) is empty: it has length 0")
    return length
