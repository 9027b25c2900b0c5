"""The batches of an engine's runs: the current iterator, the end of the epoch, and the saved position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ..authoring.randomness import unchanged_random_state
from ..core.blame import warn
from ..core.feed import PlainFeed
from ..models.streams import batch_streams
from .left_out import LeftOut
from .loading import is_plain
from .same import same_data
from .source import DataError, Source
from .streamed import END, inner, is_own_iterator

if TYPE_CHECKING:
    from weakref import ref

    from torch import Tensor

    from ..core.state import State
    from ..engine import Engine

__all__ = ["Feed"]

_NONE_LEFT_OUT = LeftOut(), 0, 0


class Feed(PlainFeed):
    """Provides the batches of a run, and tracks the position in the data.

    Attributes:
        source: Data of the current or last run; None before the first run.
        position: Saved position in the data, until an epoch resumes there.
        has_data: Whether the run has data. Without data, every batch is None.
        epoch_end: Last iteration of the epoch; 0 while unknown.
        made_with_other_data: Number of iterations of the open epoch whose batches came from the data of an earlier run.
        contents: The contents of each rank's data, as far as they have been compared.
        versions: How often the tensors of a list of batches had been changed in place when the run began; None if not known.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.source: Source | None = None
        self.position: dict[str, Any] | None = None
        self.has_data = self.one_batch = False
        self.epoch_end = 0
        self.made_with_other_data = 0
        self._begun_at = -1  # the iteration after which a pass was begun again
        self.versions: list[tuple[ref[Tensor], int]] | None = None
        self.contents: list[Any] = []

    @property
    def current(self) -> Source:
        """The data of the run."""
        assert self.source is not None, "no run has started"
        return self.source

    # ---- a run ----------------------------------------------------------------------------------------------------

    def open(self, engine: Engine, data: Any, epoch_length: int | None, given: Any) -> Source:
        """Build the source of the next run, which `begin_run` installs; the position of an earlier run is kept.

        Raises:
            TypeError, ValueError: for data that cannot be iterated, is empty, or cannot be sharded.
        """
        source = Source(
            data, epoch_length, engine.seed, epoch=max(self.state.epoch - 1, 0), processes=engine.group.data,
            shard_policy=engine.group.shard_policy, evaluates=not engine.training,
            left_out=self.source.left_out if engine.training and self.source is not None else None,
        )  # fmt: skip
        source.reseed = batch_streams(engine) if engine.streams == "separate" else None
        source.of_user = given
        self.has_data = data is not None
        self.one_batch = self.has_data and engine.group.shards is None
        return source

    def begin_run(self, source: Source, *, training: bool) -> bool:
        """Set the source of the run; returns whether its data is that of the previous run, if there was one.

        A training engine continues at the position of the previous run, but reads other data from its beginning.
        """
        previous, position, self.source = self.source, self.state_dict(), source
        self.epoch_end = self.made_with_other_data = 0
        self._begun_at = -1
        same = previous is None or not training or self._continues_with(previous.of_user)
        if previous is None or not training:
            pass
        elif same:
            self.position = position  # also of a run that ended before its first epoch: the one that it was given
            source.loaded = previous.loaded and not previous.saved
            self.made_with_other_data = self._made_before(position)
            if previous.given is source.given and isinstance(source.data, Iterator):
                source.take_over_iterator(previous)
        else:
            self.position = source.left_out = None
            self.made_with_other_data = self.state.epoch_iteration if self.state.epoch_open else 0
        self._set_epoch_length()
        return same

    def _continues_with(self, earlier: Any) -> bool:
        """Whether the data is that of an earlier run; warns where that is not known, and the run stopped inside an epoch."""
        data = self.current.of_user
        same = same_data(earlier, data)
        if same is None and self.state.epoch_open and self.state.epoch_iteration:
            warn(
                f"run(): the previous run stopped partway through epoch {self.state.epoch}, after "
                f"{self.state.epoch_iteration} iterations. This {type(data).__name__} is a different object, so it "
                "is read from the beginning. To continue where the previous run stopped, pass the same data object",
            )
        return bool(same)

    def _made_before(self, position: Mapping[str, Any] | None) -> int:
        """Number of iterations that the open epoch had before the pass of a position."""
        state, source = self.state, self.current
        if not state.epoch_open or source.continues or position is None:
            return 0
        fits = source.fits(position, state.epoch, state.epoch_start)
        return position["started_at"] - state.epoch_start if fits else 0

    def _set_epoch_length(self) -> None:
        length = self.current.epoch_length
        self.state.epoch_length = None if length is None else length + self.made_with_other_data

    def load(self, position: dict[str, Any] | None, seed: int) -> None:
        """Continue from a saved position; the epoch and iteration are those in the state."""
        source = self.current
        self.position = position
        left_out = (position or {}).get("left_out_now")
        source.left_out = LeftOut(left_out) if left_out else None
        epochs = position.get("epochs") if position is not None and self.state.epoch_open else None
        source.load(max(self.state.epoch - 1, 0), epochs)
        source.loaded = True
        source.seed = seed
        self.made_with_other_data = self._made_before(position)
        self._set_epoch_length()

    def check_extent(self, saved: Mapping[str, Any]) -> None:
        """Raise ValueError if a saved run stood inside an epoch of data with another length or batch size."""
        position, source, place = saved.get("data"), self.source, saved["engine"]
        if position is None or source is None or "random" not in position:
            return
        if not (place["epoch_open"] or source.continues):
            return
        left_out = LeftOut(position.get("left_out_now"))
        read = left_out.read(position["number"], place["iteration"] - position["started_at"])
        if read > 0 and (source.continues or read != position.get("extent_now", {}).get("batches")):
            source.check_extent(position, f"epoch {place['epoch']}, iteration {place['iteration']}")

    def check_can_go_back(self, position: Mapping[str, Any] | None) -> None:
        """Raise DataError if the data cannot go back to a position within this run."""
        self.current.check_can_go_back(position)

    def places_of(self, iterations: Iterable[int]) -> list[tuple[int, int]]:
        """The pass over the data, and the index in it, of each iteration's batch; not of those before the last pass but one."""
        places = (self.current.place_of(iteration) for iteration in iterations)
        return [place for place in places if place is not None]

    def begin_again_at(self, position: dict[str, Any] | None, seed: int) -> None:
        """Go back to a position of this run, or of an earlier one, in the same data."""
        self.source = self.current.begun_again(max(self.state.epoch - 1, 0))
        self.load(position, seed)

    # ---- an epoch -------------------------------------------------------------------------------------------------

    def announce_epoch(self) -> None:
        """Select the data of a new epoch."""
        self.current.announce(self.state.epoch - 1)
        self.made_with_other_data = 0
        self._set_epoch_length()

    def measure_again(self) -> None:
        """Read the epoch's length again, since receivers of EPOCH_STARTED may have changed the data."""
        self.current.measure_again()
        self._set_epoch_length()
        self.find_epoch_end()

    def find_epoch_end(self) -> None:
        """Determine the last iteration of the epoch, if its length is known."""
        length = self.state.epoch_length
        self.epoch_end = 0 if length is None else self.state.epoch_start + length

    def batches_read(self, iterations: int) -> int:
        """How many batches of the epoch were read by the time that these iterations of it were made.

        Those that are left out are read, too: of an iteration before them this stays the same, though the epoch is shorter. In
        the last iteration it is all of them.
        """
        left_out, number, before = self._left_out()
        if iterations == self.state.epoch_length:
            return iterations + left_out.count(number)
        return before + left_out.read(number, iterations - before) if iterations > before else iterations

    def iterations_until(self, batches: int) -> int:
        """The first iteration in the epoch, counted from 1, by which so many of its batches were read."""
        left_out, number, before = self._left_out()
        if batches <= before:
            return batches
        wanted = before + left_out.used(number, batches - before - 1) + 1
        length = self.state.epoch_length
        return wanted if length is None or batches > self.batches_read(length) else min(wanted, length)

    def _left_out(self) -> tuple[LeftOut, int, int]:
        """The batches that are left out, the pass of this epoch, and the iterations that the epoch had before this pass.

        Where passes continue across epochs, an epoch has as many iterations as without any that are left out.
        """
        source = self.source
        if source is None or source.left_out is None or source.continues:
            return _NONE_LEFT_OUT
        return source.left_out, source.epoch, self.made_with_other_data

    def take_position(self) -> dict[str, Any] | None:
        """Return the position of an earlier run, and clear it."""
        position, self.position = self.position, None
        return position

    def batches(
        self, position: dict[str, Any] | None, *, resumed: bool, ahead: bool, before_pass: Callable[[], None]
    ) -> Iterator[Any]:
        """The remaining batches of the epoch.

        Args:
            position: Return value of `take_position`.
            resumed: Whether the epoch began in an earlier run.
            ahead: Whether to read one batch ahead, because an accumulation window must recognize the last batch.
            before_pass: Called before a new pass over the data draws its order.
        """
        state, source = self.state, self.current
        if source.iterator is not None and source.has_iterator() and isinstance(source.data, Iterator):
            return source.iterator
        fits = position is not None and source.fits(position, state.epoch, state.epoch_start)
        if position is not None and fits and (resumed or source.continues):
            with unchanged_random_state():
                return source.resume(position, state.iteration)
        if source.iterator is not None and source.has_iterator() and source.continues:
            return source.iterator
        if position is not None:
            with nullcontext() if is_plain(source.data) else unchanged_random_state():
                source.prepare_next_pass(position, announced=resumed)
        before_pass()
        return source.begin(state.iteration, state.epoch - 1, ahead=ahead)

    def starts_again(self) -> bool:
        """Whether exhausted data starts again within the epoch; False if an unsized epoch ends.

        An evaluation in one process ends where its data does, whatever its length said. Data that is its own iterator, and was
        read to its end before, starts again if `iter` lets it.

        Raises:
            DataError: for data that is empty, or that ended before its length.
        """
        state, source = self.state, self.current
        kind = type(inner(source.data)).__name__
        in_epoch = state.iteration - state.epoch_start
        taken = state.iteration - source.started_at
        if in_epoch == 0 and self._begun_at != state.iteration and is_own_iterator(inner(source.data)):
            return True
        is_read = in_epoch == 0 and isinstance(inner(source.data), Iterator)
        if source.epoch_length is None or is_read:
            if in_epoch == 0 or taken == 0:
                raise DataError(_without_batches(kind, state.epoch))
            return False
        if taken == 0:
            raise DataError(f"the data ({kind}) yielded no batch: it is empty, or it cannot be iterated again")
        if source.continues:
            return True  # with epoch_length=, the data may be as long as it is
        if source.evaluates and not source.processes.distributed:
            state.epoch_length = in_epoch
            return False
        same = (
            f", because epoch_length={source.length} equals the length and keeps each epoch to one pass over the data"
        )
        raise DataError(
            f"the data ({kind}) has length {source.length} but ended after {taken} batches; correct its __len__; or, "
            f"if the length is only an estimate, pass an epoch_length= other than {source.length}, such as "
            f"run(epoch_length={taken})" + same * bool(source.given_length)
        )

    def begin_again(self) -> Iterator[Any]:
        """Start another pass over the data within the epoch."""
        self._begun_at = self.state.iteration
        return self.current.begin(self.state.iteration, self.state.epoch - 1, ahead=False)

    def on_last_batch(self) -> bool:
        """Whether the current batch is the epoch's last; for unsized data, this reads one batch ahead."""
        if self.epoch_end:
            return self.state.iteration >= self.epoch_end
        return self.current.last()

    def epoch_ended(self) -> bool:
        """Whether every batch of the epoch was used."""
        source = self.current
        if self.state.epoch_length is not None:
            return self.state.epoch_iteration >= self.state.epoch_length
        with unchanged_random_state():  # may read one batch ahead, which is read again if the run continues
            return source.ended()

    def read_to_end(self) -> bool:
        """Read the end of the epoch's data, as ``for batch in data`` does; whether there is one, and no further batch."""
        return self.current.read_to_end() in (END, None)

    def give_back(self, batch: Any) -> None:
        """Let a batch that was read, but of which no iteration was made, come first where the data continues."""
        self.current.give_back(batch)

    def end_run(self, *, last: bool) -> None:
        """Let go of the iterator and its workers; of persistent ones in the ``last`` run, which evaluations are not."""
        if self.source is not None:
            self.source.release(persistent=last)

    def only_its_end_is_missing(self) -> bool:
        """Whether the resumed epoch has no batches left, but EPOCH_COMPLETED has not been emitted."""
        state, source = self.state, self.current
        if not state.epoch_open or state.stop_reason is not None or self.position is None:
            return False
        if state.epoch_length is not None:
            return state.epoch_iteration >= state.epoch_length
        if isinstance(source.data, Iterator) or not source.fits(self.position, state.epoch, state.epoch_start):
            return False
        with unchanged_random_state():
            source.resume(self.position, state.iteration)
            return source.last()

    # ---- weight and state -----------------------------------------------------------------------------------------

    def share(self) -> float:
        """The weight of this rank's batch relative to those of the other ranks.

        It is 1 unless the batches differ in their number of samples, as the last ones may; larger batches then have a weight
        above 1. Losses weighted in this way produce the gradients of the concatenated batches.
        """
        return 1 if self.source is None else self.source.share(self.state.iteration)

    def state_dict(self) -> dict[str, Any] | None:
        """The position in the data; None before the first run."""
        if self.position is not None:  # loaded, or of the previous run: the data is not yet iterated
            return self.position
        return None if self.source is None else self.source.state_dict()

    def reset(self) -> None:
        """Discard the data and position of earlier runs."""
        self.source = self.position = None


def _without_batches(kind: str, epoch: int) -> str:
    """The error for data that has no batch in this epoch."""
    if epoch == 1:
        return f"the data ({kind}) is empty: it yielded no batch"
    return (
        f"the data ({kind}) yielded no batch in epoch {epoch}, although it had batches in epoch 1, so it cannot be "
        "iterated again; pass an iterable, not an iterator"
    )
