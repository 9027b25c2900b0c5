"""The batches of an engine's runs: what is iterated now, where an epoch ends, and where an earlier run stood."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..distributed.processes import Processes
from ..randomness import unchanged_random_state
from .source import DataError, Source

if TYPE_CHECKING:
    from ..state import State

__all__ = ["Feed"]


class Feed:
    """Gives the loop its batches, and knows how far the data was read.

    Attributes:
        source: the data of the run that is under way, or of the last one; None before the first run.
        position: where the data of an earlier run stood, until an epoch resumes there.
        has_data: whether the run has data. Without, every batch is None.
        epoch_end: the epoch's last iteration; 0 while it is not known.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.source: Source | None = None
        self.position: dict[str, Any] | None = None
        self.has_data = False
        self.epoch_end = 0

    @property
    def current(self) -> Source:
        """The data of the run."""
        assert self.source is not None, "no run has begun"
        return self.source

    # ---- a run ----------------------------------------------------------------------------------------------------

    def open(
        self, data: Any, epoch_length: int | None, *, seed: int, processes: Processes, shard_policy: str, training: bool,
        reseed: Callable[[int, int], None] | None,
    ) -> Source:  # fmt: skip
        """Take the data of the next run, which `begin_run` puts to use; what an earlier run had reached stays known.

        Raises:
            TypeError, ValueError: for data that cannot be iterated, is empty, or cannot be sharded.
        """
        source = Source(
            data, epoch_length, seed, epoch=max(self.state.epoch - 1, 0), processes=processes, shard_policy=shard_policy,
            omit_padding=not training,
        )  # fmt: skip
        source.reseed = reseed
        self.state.epoch_length = source.epoch_length
        self.has_data = data is not None
        return source

    def begin_run(self, source: Source, *, training: bool) -> None:
        """Continue where the run before stood in its data, if this engine trains."""
        previous, self.source = self.source, source
        self.epoch_end = 0
        if previous is not None and training:
            self.position = previous.state_dict()
            if previous.given is source.given and isinstance(source.data, Iterator):
                source.take_over_iterator(previous)

    def load(self, position: dict[str, Any] | None, seed: int) -> None:
        """Continue from a saved position; the state holds the epoch and the iteration of it."""
        source = self.current
        self.position = position
        source.load(max(self.state.epoch - 1, 0))
        self.state.epoch_length = source.epoch_length
        source.seed = seed

    # ---- an epoch -------------------------------------------------------------------------------------------------

    def announce_epoch(self) -> None:
        """Take the data of a new epoch."""
        self.current.announce(self.state.epoch - 1)
        self.state.epoch_length = self.current.epoch_length

    def find_epoch_end(self) -> None:
        """Work out the epoch's last iteration, where the data tells its length."""
        length = self.current.epoch_length
        self.epoch_end = 0 if length is None else self.state.epoch_start + length

    def take_position(self) -> dict[str, Any] | None:
        """Where an earlier run stood, which is asked once, as an epoch begins."""
        position, self.position = self.position, None
        return position

    def batches(
        self, position: dict[str, Any] | None, *, resumed: bool, ahead: bool, before_pass: Callable[[], None]
    ) -> Iterator[Any]:
        """The batches that are left of the epoch.

        Args:
            position: what `take_position` returned.
            resumed: whether the epoch began in an earlier run.
            ahead: whether an accumulation window has to know the last batch before it is used.
            before_pass: called before a new pass over the data draws its order.
        """
        state, source = self.state, self.current
        if source.iterator is not None and isinstance(source.data, Iterator):
            return source.iterator
        fits = position is not None and source.fits(position, state.epoch, state.epoch_start)
        if position is not None and fits and (resumed or source.continues):
            with unchanged_random_state():
                return source.resume(position, state.iteration)
        if source.iterator is not None and source.continues:
            return source.iterator
        if position is not None:
            with unchanged_random_state():
                source.prepare_next_pass(position, announced=resumed)
        before_pass()
        return source.begin(state.iteration, state.epoch - 1, ahead=ahead)

    def starts_again(self) -> bool:
        """Whether data that gave no more batches starts again within the epoch; False where an unsized epoch ends.

        Raises:
            DataError: for data that is empty, or ended before the length that it has.
        """
        state, source = self.state, self.current
        kind = type(source.data).__name__
        in_epoch = state.iteration - state.epoch_start
        taken = state.iteration - source.started_at
        if source.epoch_length is None:
            if in_epoch == 0:
                again = "" if state.epoch == 1 else (f"; it gave batches in epoch 1 but cannot be iterated again in epoch "
                                                     f"{state.epoch}: give an iterable, not an iterator")  # fmt: skip
                raise DataError(f"the data ({kind}) is empty: it gave no batch{again}")
            return False
        if taken == 0:
            raise DataError(f"the data ({kind}) is empty: it gave no batch, or cannot be iterated again")
        if source.length is not None and taken != source.length:
            raise DataError(
                f"the data ({kind}) says that its length is {source.length} but ended after {taken} batches"
            )
        if not source.continues:
            raise DataError(f"the data ({kind}) ended after {in_epoch} of the epoch's {source.epoch_length} batches")
        return True

    def begin_again(self) -> Iterator[Any]:
        """Begin another pass over the data within the epoch."""
        return self.current.begin(self.state.iteration, self.state.epoch - 1, ahead=False)

    def on_last_batch(self) -> bool:
        """Whether the current batch is the epoch's last; for unsized data, one batch is read ahead to know."""
        if self.epoch_end:
            return self.state.iteration >= self.epoch_end
        return self.current.last()

    def epoch_ended(self) -> bool:
        """Whether every batch of the epoch was taken."""
        source = self.current
        if source.epoch_length is not None:
            return self.state.epoch_iteration >= source.epoch_length
        with unchanged_random_state():  # one batch may be read to know, and is read again if the run continues
            return source.ended()

    def only_its_end_is_missing(self) -> bool:
        """Whether the epoch of an earlier run has no batch left, but was not completed; a saved run may stop just there."""
        state, source = self.state, self.current
        if not state.epoch_open or state.stop_reason is not None or self.position is None:
            return False
        if source.epoch_length is not None:
            return state.epoch_iteration >= source.epoch_length
        if isinstance(source.data, Iterator) or not source.fits(self.position, state.epoch, state.epoch_start):
            return False
        with unchanged_random_state():
            source.resume(self.position, state.iteration)
            return source.last()

    # ---- what else is asked ---------------------------------------------------------------------------------------

    def share(self) -> float:
        """How much this rank's batch counts beside those of the other ranks.

        1, unless they differ in their number of samples, as the last ones do: then more than 1 for one that has more. With it as
        the weight of the loss, the gradients are those of the batches joined.
        """
        return 1 if self.source is None else self.source.share(self.state.iteration)

    def state_dict(self) -> dict[str, Any] | None:
        """The position in the data; None before the first run."""
        if self.position is not None:  # loaded, or that of the run before: the data is not there yet
            return self.position
        return None if self.source is None else self.source.state_dict()

    def reset(self) -> None:
        """Forget the data of earlier runs."""
        self.source = self.position = None
