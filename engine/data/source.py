"""The data of a run and its position, for sized, unsized, infinite or no data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, count, islice, repeat
from typing import Any

from ..authoring.randomness import derived_seed, packed, set_random_state, unchanged_random_state
from ..core.blame import warn
from ..distributed.processes import SINGLE_PROCESS, Processes, SameData
from .extent import DataError, check_same_extent, extent_of, length_of
from .first_batches import FirstBatches
from .held_generators import HeldGenerators, draws_in_workers
from .left_out import LeftOut
from .loading import (
    SkippingLoader,
    epochs_of,
    generators_of,
    is_plain,
    may_draw,
    set_epochs,
    skippable,
    state_before_order,
)
from .sharding import draws_while_read, rounds, samples_without_padding, shard, shard_policy, until_all_end
from .streamed import END, RereadingWarning, Streamed, inner, items, keeps_position

__all__ = ["DataError", "RereadingWarning", "Source"]


class Source:
    """The data of one run, sharded over the ranks, and the position in it.

    Without an explicit epoch_length, every epoch is a new pass over the data. With one, a pass continues across epochs, and
    another begins when the data is exhausted.

    Attributes:
        batches: Number of this rank's batches in a pass, with those that are left out; None if unknown.
        left_out: The batches that are left out; None if there are none.
        before: Number of iterations of the run before the last pass but this one; None if there was none.
        continues: Whether passes continue across epochs.
        started_at: Number of iterations of the run before this pass.
        number: Number of this pass, counted from 0.
        policy: Shard policy of the data.
        of_user: The data that the user gave to the run, before handlers changed it.
    """

    def __init__(
        self,
        data: Any,
        epoch_length: int | None,
        seed: int,
        *,
        epoch: int = 0,
        processes: Processes = SINGLE_PROCESS,
        shard_policy: str = "auto",
        evaluates: bool = False,
        left_out: LeftOut | None = None,
    ) -> None:
        self.left_out = left_out
        self.number = 0
        self.before: int | None = None
        self.processes = processes
        self.shard_policy = shard_policy
        self.evaluates = evaluates  # without the samples that a DistributedSampler repeats
        self.given = self.of_user = data
        self.given_length = epoch_length
        self.seed = seed
        self.load(epoch)
        self.iterator: Iterator[Any] | None = None
        self.iterated: Any = None  # the data that the iterator belongs to: `ReloadedData` changes it
        self.completed = False  # whether the pass was read to its end
        self.started_at = 0
        self.saved: dict[str, Any] = {}
        self.loaded = False  # whether the position comes from a loaded state
        self._held: tuple[Any, HeldGenerators] | None = None
        self.left: dict[str, Any] | None = None  # the position at which the iterator was released
        # Shares of this rank's batches where the sizes of a round differ, by the places of the batches in the data.
        self.round_shares: dict[int, float] = {}
        # Called with pass and batch before each batch except the first: data must not continue the model's random stream.
        self.reseed: Callable[[int, int], None] | None = None

    def check_can_go_back(self, position: Mapping[str, Any] | None) -> None:
        """Raise DataError for data that can be read only once, or whose own position is not known there."""
        data = inner(self.data)
        if isinstance(data, Iterator):
            raise DataError(
                f"restore(): the data ({type(data).__name__}) is an iterator, which cannot be rewound; pass an "
                "iterable to run(), such as a DataLoader or a list"
            )
        if keeps_position(data) and "random" not in (position or {}):
            raise DataError(
                f"restore(): the data ({type(data).__name__}) saves its own position, but the state was taken before "
                "the first pass over this data, so it contains no position; take the state at ITERATION_COMPLETED or "
                "later"
            )

    def begun_again(self, epoch: int) -> Source:
        """The same data, as before the first pass over it."""
        source = Source(
            self.given,
            self.given_length,
            self.seed,
            epoch=epoch,
            processes=self.processes,
            shard_policy=self.shard_policy,
            evaluates=self.evaluates,
            left_out=self.left_out,
        )
        source.reseed, source.of_user = self.reseed, self.of_user
        return source

    def load(self, epoch: int, epochs: list[Any] | None = None) -> None:
        """Set the data of this epoch, counted from 0. It is the same in all epochs, except for `ReloadedData`.

        Args:
            epoch: The epoch.
            epochs: What `epochs_of` returned in a saved run that stood in this epoch.
        """
        self._choose(epoch)
        if epochs is not None and len(epochs) == len(epochs_of(self.data)):
            set_epochs(self.data, epochs, epoch)
        self.measure()

    def _choose(self, epoch: int) -> None:
        given = inner(self.given)
        of_epoch = getattr(given, "of_epoch", None)
        self.data = self.given
        if callable(of_epoch):
            data = of_epoch(epoch)
            self.data = FirstBatches(data, self.given.count) if isinstance(self.given, FirstBatches) else data
        first_of = getattr(given, "first_of", None)
        self.first = first_of(epoch) if callable(first_of) else 0
        self.policy = shard_policy(inner(self.data), self.processes, self.shard_policy)
        self.epoch = epoch

    def measure(self) -> None:
        """Read the length of the data: samplers may have another one in each epoch."""
        self.batches = self._rounds(self.data)
        if self.policy == "own":
            lengths = self.processes.gather(self.batches)
            self.batches = None if None in lengths else max(lengths)
        self.continues = self.given_length is not None and self.given_length != self.batches
        self.epoch_length = self.given_length if self.continues else self.length

    def measure_again(self) -> None:
        """As `measure`, after what receivers of EPOCH_STARTED have changed; not where the ranks would have to agree on it."""
        if self.policy != "own" and not self.continues:
            self.measure()

    @property
    def length(self) -> int | None:
        """Number of this rank's batches that are used in the pass; None if unknown."""
        if self.batches is None or self.left_out is None:
            return self.batches
        return self.batches - self.left_out.count(self.number if self.continues else self.epoch)

    def _rounds(self, data: Any) -> int | None:
        """Number of this rank's batches of the data; None if unknown."""
        if isinstance(data, FirstBatches):
            of_all = self._rounds(data.data)
            return None if of_all is None else min(self._limit(data), of_all)
        length = length_of(data)
        if length is not None and self.policy == "round_robin":
            return rounds(length, self.processes)
        if length is not None and self.policy == "own" and (samples := self._own_samples(data)) is not None:
            return min(length, -(-samples // (data.batch_size or 1)))
        return length

    def _limit(self, data: FirstBatches) -> int:
        """Largest number of this rank's batches of limited data."""
        return rounds(data.count, self.processes) if self.policy == "round_robin" else data.count

    def _own_samples(self, data: Any) -> int | None:
        """Number of this rank's samples without the padding of a DistributedSampler; None if there is none to omit."""
        return (
            samples_without_padding(data)
            if self.evaluates and skippable(data) and data.batch_size is not None
            else None
        )

    def share(self, iteration: int) -> float:
        """Share of this rank's batch in an iteration: 1, unless the batches of the round differ in size."""
        read = iteration - self.started_at
        read = read if self.left_out is None else self.left_out.read(self.number, read)
        return self.round_shares.get((read - 1) * self.processes.world_size + self.processes.rank, 1)

    def place_of(self, iteration: int) -> tuple[int, int] | None:
        """The pass and the index in it of the batch of an iteration of this pass or the one before; None of an earlier one."""
        started_at, number = self.started_at, self.number
        if iteration <= started_at:
            if self.before is None or iteration <= self.before:
                return None
            started_at, number = self.before, number - 1
        read = iteration - started_at
        return number, (read if self.left_out is None else self.left_out.read(number, read)) - 1

    def announce(self, epoch: int) -> None:
        """Set the data of a new epoch, and call ``set_epoch`` of its samplers."""
        self._choose(epoch)
        if self.given_length is None or not self.continues:
            set_epochs(self.data, epoch)
        self.measure()

    def begin(self, iteration: int, epoch: int, *, ahead: bool) -> Iterator[Any]:
        """Begin a new pass over the data.

        Args:
            iteration: Number of iterations made in the run.
            epoch: The epoch that begins, counted from 0. Where passes continue across epochs, passes are counted instead.
            ahead: Whether to read unsized data one batch ahead, since an accumulation window must know the last batch.
        """
        if self.continues:
            epoch = self.number + 1 if self.saved else 0
            set_epochs(self.data, epoch)
            self.measure()
        # The generators before the order is drawn, so that a resumed run draws the same order.
        states = state_before_order(self.data), [generator.get_state() for generator in generators_of(self.data)]
        same = self.policy == "round_robin" or isinstance(self.processes, SameData)
        if same and not is_plain(self.data):  # all ranks use the order that rank 0 draws
            states = self.processes.broadcast(states)
            self._set_generators(states[1])
        self.before = self.started_at if self.saved else self.before
        self.saved = {
            "started_at": iteration,
            "number": epoch,
            "ahead": ahead,
            "random": states[0],
            "generators": states[1],
            "epochs": epochs_of(self.data),
        }
        if self.held:
            self.saved["held"] = self.held.states()
        if self.policy != "round_robin" or self.processes.is_rank_zero:
            return self._iterate(0)
        with unchanged_random_state():
            set_random_state(states[0])
            return self._iterate(0)

    def _iterate(self, start: int) -> Iterator[Any]:
        """The batches of the pass described by `saved`, starting at batch ``start`` if they can be skipped."""
        self.started_at, self.number = self.saved["started_at"], self.saved["number"]
        self.skips = True
        self.round_shares = {}
        self.iterated, self.completed, self.left = self.data, False, None
        read_by_all = self.policy == "round_robin" and self.data is not None and draws_while_read(inner(self.data))
        if self.data is None:
            self.iterator = repeat(None)
        elif self.epoch_length is None or keeps_position(inner(self.data)) or read_by_all:
            own_streams = self.saved["ahead"] or keeps_position(inner(self.data)) or read_by_all
            seed = derived_seed(self.seed, "data", self.started_at) if own_streams else None
            self.iterator = Streamed(self.data, seed, lambda: self._reseeded(start), self.held)
            if start and self.skips and (place := self.saved.get("place")) is not None:
                self.iterator.streams = place["streams"]
        else:
            self.iterator = self._reseeded(start)
        return self.iterator

    def _reseeded(self, start: int) -> Iterator[Any]:
        """The batches; with `reseed`, data that may draw random numbers has a separate stream for each batch."""
        batches = self._batches(self.data, start)
        if self.reseed is not None and may_draw(inner(self.data)):
            batches = self._reseeding(batches, start)
        if self.left_out is None:
            return batches
        return self.left_out.without(self.number, batches, start if self.skips else 0)

    def _reseeding(self, batches: Iterator[Any], start: int) -> Iterator[Any]:
        assert self.reseed is not None
        for taken in count(start if self.skips else 0):
            if taken:  # the first batch is seeded as the pass begins
                self.reseed(self.number, taken)
            batch = next(batches, END)
            if batch is END:
                return
            yield batch

    def _batches(self, data: Any, start: int, limit: int | None = None) -> Iterator[Any]:
        """The batches, starting at ``start``; where they cannot be skipped, all of them, and `skips` becomes False."""
        if isinstance(data, FirstBatches):
            batches = self._batches(data.data, start, data.count)
            return data.limited(batches, start if self.skips else 0, self._limit(data))
        if self.policy == "round_robin":
            length = length_of(data)
            return shard(data, start, length, limit, self.processes, self.seed, self.number, self.round_shares)
        if self.policy == "own":
            return self._own_batches(data, start)
        return self._all_batches(data, start)

    def _own_batches(self, data: Any, start: int) -> Iterator[Any]:
        """The batches of data that belongs to this rank, padded with None to the number of the other ranks."""
        batches = self._all_batches(data, start)
        if self.batches is None:
            return until_all_end(batches, self.processes)
        own = self._rounds(data)
        assert own is not None
        return chain(batches, repeat(None, max(0, self.batches - max(own, start))))

    def _all_batches(self, data: Any, start: int) -> Iterator[Any]:
        if skippable(data):
            return SkippingLoader.of(data).iterate(data, self.seed, self.number, start, samples=self._own_samples(data))
        if callable(begin := getattr(data, "batches_from", None)):
            batches: Iterator[Any] = begin(start)
            return batches
        if isinstance(data, Sequence) or not hasattr(type(data), "__iter__"):
            return islice(iter(data), start, None) if isinstance(data, list | tuple) else items(data, start)
        self.skips = start == 0 or (self.saved.get("place") is not None and keeps_position(data))
        if start and self.skips:
            data.load_state_dict(self.saved["place"]["position"])
        return iter(data)

    def fits(self, saved: Mapping[str, Any], epoch: int, epoch_start: int) -> bool:
        """Whether a saved position belongs to the current pass: without ``continues``, to the pass of this epoch.

        That pass began with the epoch, unless the epoch's first batches were those of other data.
        """
        return "random" in saved and (
            self.continues or (saved["started_at"] >= epoch_start and saved["number"] == epoch - 1)
        )

    def take_over_iterator(self, other: Source) -> None:
        """Continue the iterator of an earlier run, which cannot be restarted, with the batches read ahead."""
        self.iterator, self.started_at, self.saved = other.iterator, other.started_at, other.saved
        self.number, self.before = other.number, other.before
        self.iterated, self.round_shares = other.iterated, other.round_shares

    def has_iterator(self) -> bool:
        """Whether there is an iterator of the data of this epoch."""
        return self.iterator is not None and self.iterated is self.data

    def read_to_end(self) -> Any:
        """Read the end of a sized pass, as ``for batch in data`` does; returns a batch too many, or END.

        Only then do a DataLoader's workers end, and does the code behind the last ``yield`` of a generator run.
        """
        if self.continues or self.length is None or is_plain(self.data) or self.completed:
            return END
        if isinstance(self.data, Iterator) or not self.has_iterator():
            return END
        assert self.iterator is not None
        self.completed = True
        return next(self.iterator, END)

    def give_back(self, batch: Any) -> None:
        """Have the iterator yield a batch again that it has just yielded."""
        if isinstance(self.iterator, Streamed):
            self.iterator.read.append(batch)
        elif self.iterator is not None:
            self.iterator = chain([batch], self.iterator)

    def release(self, *, persistent: bool) -> None:
        """Let go of the iterator and its workers as a run ends, also of ``persistent`` ones; the position stays."""
        if not isinstance(self.data, Iterator) and self.iterator is not None:
            self.left = self.state_dict()
            self.iterator = None
        if persistent and skippable(inner(self.data)):
            SkippingLoader.forget(inner(self.data))

    @property
    def held(self) -> HeldGenerators:
        """The generators that the data of a training run holds; those of an evaluation are left as they are."""
        data = None if self.evaluates else inner(self.data)
        if self._held is None or self._held[0] is not data:
            self._held = data, HeldGenerators(data)
        return self._held[1]

    def check_extent(self, saved: Mapping[str, Any], place: str) -> None:
        """Raise ValueError if a position inside an epoch was saved with data of another length or batch size."""
        if callable(getattr(inner(self.given), "of_epoch", None)):
            return
        kind = type(inner(self.data)).__name__
        check_same_extent(saved.get("extent_now", {}), self.extent_at(saved), place, kind)

    def extent_at(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """What `extent_of` returns where samplers have the epochs of a saved position, on which their length may depend."""
        before = epochs_of(self.data)
        try:
            if before and len(saved.get("epochs", ())) == len(before):
                set_epochs(self.data, saved["epochs"], saved["number"])
            return extent_of(inner(self.data))
        finally:
            set_epochs(self.data, before, self.epoch)

    def resume(self, saved: Mapping[str, Any], iteration: int) -> Iterator[Any]:
        """Continue the pass of a saved run after the batches it had read: these are skipped if possible, else read again."""
        self.held.put_back(saved.get("held", {}))
        iterator = self._resume(saved, iteration)
        data = inner(self.data)
        # With workers only samplers draw here, as far ahead as they did; `batches_from` may draw the order as it begins.
        if not draws_in_workers(data) and not (self.skips and hasattr(data, "batches_from")):
            self.held.put_back(saved.get("held_now", {}))
        return iterator

    def _resume(self, saved: Mapping[str, Any], iteration: int) -> Iterator[Any]:
        set_random_state(saved["random"])
        self._set_generators(saved["generators"])
        set_epochs(self.data, saved["epochs"], saved["number"])
        self.saved = {key: value for key, value in saved.items() if not key.endswith("_now")}
        wanted = iteration - saved["started_at"]
        if isinstance(self.data, FirstBatches) and wanted > self._limit(self.data):
            raise DataError(
                f"the saved run had read {wanted} batches of its epoch, but a handler limits this data to its first "
                f"{self.data.count} batches; start without the loaded state, or detach the handler"
            )
        iterator = self._iterate(wanted if self.left_out is None else self.left_out.read(saved["number"], wanted))
        if self.skips:
            return iterator
        warn(
            f"the data ({type(self.data).__name__}) cannot skip batches, so {wanted} batches are read again. A "
            "DataLoader over a map-style dataset can skip batches; other data can implement batches_from(start), or "
            "state_dict() and load_state_dict()",
            RereadingWarning,
        )
        for taken in range(wanted):
            if next(iterator, END) is END:
                raise DataError(
                    f"the saved run had read {wanted} batches, but this data ends after {taken}; resume with the data "
                    "of the saved run"
                )
        return iterator

    @property
    def batch_size(self) -> int | None:
        """Batch size of a DataLoader; None if unknown."""
        data = inner(self.data)
        size = getattr(data, "batch_size", None) or getattr(getattr(data, "batch_sampler", None), "batch_size", None)
        return size if isinstance(size, int) else None

    def state_dict(self) -> dict[str, Any]:
        if self.left is not None:
            return self.left
        now = {
            "generators_now": [generator.get_state() for generator in generators_of(self.data)],
            "epochs_now": epochs_of(self.data),
            "batch_size_now": self.batch_size,
            "first": self.first,
            "extent_now": extent_of(inner(self.data)),
        }
        if self.left_out is not None:
            now["left_out_now"] = self.left_out.state_dict()
        if self.held:
            ahead = isinstance(self.iterator, Streamed) and self.iterator.read and self.iterator.held
            now["held_now"] = ahead or self.held.states()
        if not self.saved:
            return now
        if self.completed:
            now["completed"] = True
        return self.saved | {"random": packed(self.saved["random"])} | now | self._places()

    def _places(self) -> dict[str, Any]:
        """The places in data that keeps its position: of the last batch, and the one that was reached."""
        iterator = self.iterator
        if not isinstance(iterator, Streamed) or not keeps_position(inner(self.data)):
            return {}
        place = iterator.place()
        return {} if place is None else {"place": iterator.before if iterator.read else place, "place_now": place}

    def prepare_next_pass(self, saved: Mapping[str, Any], *, announced: bool) -> None:
        """Set the generators so that the next `begin` draws the order that the saved run would have drawn.

        Args:
            saved: The saved position.
            announced: Whether the saved run had announced the epoch that begins.
        """
        if saved["first"] != self.first:
            return  # the data was reloaded for this epoch
        self._set_generators(saved["generators_now"])
        self.before = saved.get("started_at")
        if self.loaded:
            self.held.put_back(saved.get("held_now", {}))
        if announced:
            set_epochs(self.data, saved["epochs_now"], self.epoch)
        data = inner(self.data)
        if saved.get("place_now") is not None and keeps_position(data):
            data.load_state_dict(saved["place_now"]["position"])
            if self.length is not None and not saved.get("completed"):  # all of its batches were read, but not its end
                next(iter(data), END)

    def _set_generators(self, states: list[Any]) -> None:
        generators = generators_of(self.data)
        if len(generators) != len(states):
            raise DataError(
                f"the data of the saved run had {len(states)} random generator(s), but this data "
                f"({type(self.data).__name__}) has {len(generators)}; resume with the data of the saved run"
            )
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    def last(self) -> bool:
        """Whether unsized data ends after the current batch; reads one batch ahead."""
        return isinstance(self.iterator, Streamed) and self.iterator.exhausted()

    def ended(self) -> bool:
        """As `last`, but does not read ahead from an iterator, since the batch would be lost."""
        if isinstance(self.data, Iterator):
            return isinstance(self.iterator, Streamed) and self.iterator.read == [END]
        return self.last()
