"""Truncated back-propagation through time: long sequences in chunks, between which the hidden state goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from signalfire import Engine, Events, Handler, Phase, UpdateState, on
from signalfire.acts import Override
from signalfire.batches import parts, rebuilt
from signalfire.checks import check_int

from ._common.updates import updates_meant

__all__ = ["TruncatedBPTT"]


class TruncatedBPTT(Handler):
    """Splits each batch along time, so that gradients and memory reach back over one chunk instead of the whole sequence.

    Every chunk is one would-be step: forward, loss, backward and, unless gradients are accumulated, the optimizer's step. The
    forward takes ``engine.state.update.hidden``, which is None in front of a new batch, and puts the new hidden state there;
    between two chunks it is detached. `GradientAccumulation` counts chunks; its windows straddle batches, but not epochs.

    What is split, in nested tuples, lists, dicts and dataclasses: tensors in the dimension ``dim``; a list that is not the
    batch itself and whose items are tensors of one shape, as a sequence of time steps; a ``PackedSequence``. How long the
    sequences are says the first of them that the batch holds. Whatever has no time dimension or another length there, such as
    labels of shape (N,), is given to every chunk. A label whose length happens to be the same would be split, too: then give
    ``split``.

    Chunks of a packed batch hold the sequences that still run, in their order; the hidden state (of shape (..., N, features),
    as that of torch's recurrent layers) is narrowed to them. Sequences that end leave; none joins before the next batch.

    A step that is skipped, such as for an overflow, is that of its chunk (or window of chunks); the next chunk goes on. An
    update that is skipped before its first chunk is skipped for the whole batch.

    After the last chunk ``state.batch`` is the whole batch again, ``update.loss`` the mean of the chunks' losses, weighted by
    their lengths (packed: by their number of elements), and ``update.output`` the chunks' outputs joined in the dimension
    ``dim``, detached, if each is a tensor with the length of its chunk there; otherwise that of the last chunk. Return a tuple
    to keep an output from being joined.

    Args:
        steps: how many time steps make a chunk; the last chunk of a batch may be shorter.
        dim: the time dimension: 1 for tensors of shape (N, T, ...), 0 for (T, N, ...).
        split: instead of ``steps``, called as ``split(batch)``, returns the list of chunks. How long they are is found as above;
            if it cannot be found, they count the same and their outputs are not joined. Hidden states are not narrowed.
        update: the name of the update whose batches are split; all by default.

    Errors:
        An optimizer with a closure, or a handler that computes gradients again, is refused: the hidden states in front of
        earlier chunks are gone by then. How many steps a run makes is not known beforehand, so that a schedule such as
        OneCycleLR has to be given its number of steps.

    Source:
        Williams and Peng, "An efficient gradient-based algorithm for on-line training of recurrent network trajectories"
        (Neural Computation, 1990), with as many steps forward as back.

    Example:
        >>> def forward(engine, batch):
        ...     update = engine.state.update
        ...     output, hidden = engine.model(batch[0], update.hidden)
        ...     if update.more:  # there is a next chunk; without this handler, there never is
        ...         update.hidden = hidden
        ...     return output
        >>> TruncatedBPTT(20).steps
        20
    """

    def __init__(
        self,
        steps: int | None = None,
        *,
        dim: int = 1,
        split: Callable[[Any], Sequence[Any]] | None = None,
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if (steps is None) == (split is None):
            raise TypeError(
                f"TruncatedBPTT(steps={steps!r}, split={split!r}): give one of them: the length of a chunk, or a "
                "function that splits a batch"
            )
        if split is not None and not callable(split):
            raise TypeError(f"TruncatedBPTT(split={split!r}): it has to be a function of the batch: [chunk, ...]")
        self.steps = None if steps is None else check_int(self, "steps", steps)
        self.dim = check_int(self, "dim", dim, least=0)
        self.split = split
        self.update = update
        self._forget()

    def _forget(self) -> None:
        self._whole: Any = None
        self._chunks: Sequence[Any] = ()
        self._lengths: list[int] | None = None  # of the chunks, along time
        self._weights: list[int] = []
        self._running: list[Tensor | None] = []  # in front of each chunk: which sequences go on, if not all of them do
        self._planned: dict[str, int] = {}  # how many chunks each update takes in this iteration
        self._left: dict[str, int] = {}  # how many of them are still to come
        self._begin()

    def _begin(self) -> None:
        self._turn = 0  # of the chunk
        self._skipped: str | None = None  # why the batch is skipped as a whole
        self._losses: list[tuple[Tensor, int]] = []
        self._outputs: list[Tensor] | None = []  # None: they cannot be joined

    def attached(self, engine: Engine) -> None:
        updates = updates_meant(engine, self.update)
        for update in updates:
            engine.overrides.claim(Override.TIME_CHUNKS, by=self, target=f"of update {update.name!r}")
        for update in updates:
            update.regular = False

    def detached(self, engine: Engine) -> None:
        for update in updates_meant(engine, self.update):
            update.regular, update.more, update.hidden = True, False, None

    @on(Events.STARTED, phase=Phase.PREPARE)
    def check(self, engine: Engine) -> None:
        """Refuse steps that compute their gradients more than once."""
        for update in updates_meant(engine, self.update):
            update.regular = False  # another handler may have said otherwise when it left
            self._refuse_again(update)

    def _refuse_again(self, update: UpdateState) -> None:
        if update.window.kept is not None:
            raise ValueError(
                f"{self.name!r}: steps of update {update.name!r} compute their gradients more than once, because its "
                f"{type(update.optimizer).__name__} takes a closure or a handler asks for it, and the hidden states in front "
                "of earlier chunks are gone by then; use another optimizer, or detach one of the two handlers"
            )

    @on(Events.ITERATION_STARTED)
    def split_batch(self, engine: Engine) -> None:
        """Split the batch, and plan each update once for every chunk."""
        self._forget()
        state = engine.state
        planned = [update for update in state.plan if self.update in (None, update.name)]
        if (state.batch is None and not engine.processes.several) or not planned:
            return
        for update in planned:
            self._refuse_again(update)
        self._whole = state.batch
        if state.batch is None:
            self._chunks, self._lengths, self._weights = [], [], []
        elif self.split is None:
            self._split(state.batch)
        else:
            self._chunks = self._split_by_user(state.batch, self.split)
        count = len(self._chunks)
        if (
            engine.processes.several
        ):  # all make the same steps: a process with a shorter batch learns nothing in the last ones
            count = max(1, *engine.processes.gather(count))
            self._chunks = [*self._chunks, *[None] * (count - len(self._chunks))]
        state.plan = [
            update
            for update in state.plan
            for _ in range(count if self.update in (None, update.name) else 1)
        ]  # fmt: skip
        self._planned = {update.name: state.plan.count(update) for update in planned}
        self._left = dict(self._planned)

    def _split(self, batch: Any) -> None:
        assert self.steps is not None
        timed, total = next(_timed(batch, self.dim), (None, None))
        if total is None:
            raise ValueError(
                f"{self.name!r}: nothing in the batch has a time dimension: no tensor has more than dim={self.dim} dimensions; "
                "give TruncatedBPTT(dim=) or TruncatedBPTT(split=), a function that splits the batch"
            )
        begins = range(0, max(total, 1), self.steps)
        ends = [min(begin + self.steps, total) for begin in begins]
        self._chunks = [_cut(batch, self.dim, total, begin, end) for begin, end in zip(begins, ends, strict=True)]
        self._lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
        self._weights = self._lengths
        if isinstance(timed, PackedSequence):
            packs = [_cut_packed(timed, begin, end) for begin, end in zip(begins, ends, strict=True)]
            self._weights = [len(pack.data) for pack in packs]
            self._running = [None, *map(_going_on, packs, packs[1:])]

    def _split_by_user(self, batch: Any, split: Callable[[Any], Sequence[Any]]) -> Sequence[Any]:
        chunks = split(batch)
        if not isinstance(chunks, list | tuple) or not chunks:
            raise ValueError(
                f"{self.name!r}: split={split!r} returned {type(chunks).__name__} of "
                f"{len(chunks) if isinstance(chunks, list | tuple) else 'unknown'} chunks; it has to be a list of at least one"
            )
        lengths = [next(_timed(chunk, self.dim), (None, None))[1] for chunk in chunks]
        known = [length for length in lengths if length is not None]
        self._lengths = known if len(known) == len(chunks) else None
        self._weights = self._lengths or [1] * len(chunks)
        return chunks

    @on(Events.UPDATE_STARTED, phase=Phase.PREPARE)
    def take_chunk(self, engine: Engine) -> None:
        """The chunk whose turn it is, and the hidden state in front of it, cut off from what led to it."""
        state = engine.state
        update = state.update
        if update.name not in self._planned:
            return
        if self._turn == 0:
            if list(state.plan).count(update) != self._planned[update.name]:
                raise RuntimeError(
                    f"{self.name!r}: state.plan was changed after update {update.name!r} had been planned for each chunk; "
                    "change it in an earlier phase of ITERATION_STARTED: phase=Phase.PREPARE"
                )
            update.hidden = None
            self._skipped = update.skipped
        else:
            update.skipped = self._skipped  # a step that was skipped was that of an earlier chunk
            running = self._running[self._turn] if self._turn < len(self._running) else None
            update.hidden = _detached(update.hidden, running)
        self._left[update.name] -= 1
        update.more = self._left[update.name] > 0
        state.batch = self._chunks[self._turn]

    @on(Events.UPDATE_COMPLETED, phase=Phase.PREPARE)
    def note_chunk(self, engine: Engine) -> None:
        """Keep what the chunk gave; after the last one, show the whole batch and what it gave."""
        update = engine.state.update
        if update.name not in self._planned:
            return
        if update.loss is not None:
            self._losses.append((update.loss, self._weights[self._turn]))
        output, dim = update.output, self.dim
        if self._outputs is not None and self._chunks[self._turn] is not None:
            joins = self._lengths is not None and isinstance(output, Tensor) and output.dim() > dim
            if joins and output.size(dim) == self._lengths[self._turn]:  # type: ignore[index]
                self._outputs.append(output.detach())
            else:
                self._outputs = None
        self._turn += 1
        if self._turn == len(self._chunks):
            self._finish(engine, update)

    def _finish(self, engine: Engine, update: UpdateState) -> None:
        if self._turn > 1:
            update.loss = _mean(self._losses)
            if self._outputs is not None and _alike(self._outputs, self.dim):
                update.output = torch.cat(self._outputs, self.dim)
        engine.state.batch = self._whole
        update.hidden = None
        self._begin()

    @on(Events.ITERATION_COMPLETED, phase=Phase.PREPARE)
    def finish(self, engine: Engine) -> None:
        """A run that is stopped inside a batch shows it whole, too, with what its chunks gave until then."""
        if self._turn:
            self._finish(engine, engine.state.update)
        self._forget()

    @on(Events.ENDED)
    def let_go(self, engine: Engine) -> None:
        """Keep no batch after an error."""
        self._forget()


def _timed(value: Any, dim: int, *, outermost: bool = True) -> Iterator[tuple[Any, int]]:
    """The parts of a batch that have a time dimension, and how long they are."""
    if isinstance(value, PackedSequence):
        yield value, len(value.batch_sizes)
    elif isinstance(value, Tensor):
        if value.dim() > dim:
            yield value, value.size(dim)
    elif not outermost and _is_sequence_of_steps(value):
        yield value, len(value)
    elif (container := parts(value)) is not None:
        for item in container[0]:
            yield from _timed(item, dim, outermost=False)


def _is_sequence_of_steps(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, Tensor) and item.shape == value[0].shape for item in value)
    )


def _cut(value: Any, dim: int, total: int, begin: int, end: int, *, outermost: bool = True) -> Any:
    """The steps from ``begin`` to ``end`` of everything that is ``total`` steps long; all of everything else."""
    if isinstance(value, PackedSequence):
        return _cut_packed(value, begin, end) if len(value.batch_sizes) == total else value
    if isinstance(value, Tensor):
        return value.narrow(dim, begin, end - begin) if value.dim() > dim and value.size(dim) == total else value
    if not outermost and _is_sequence_of_steps(value):
        return value[begin:end] if len(value) == total else value
    return rebuilt(value, lambda item: _cut(item, dim, total, begin, end, outermost=False))


def _cut_packed(packed: PackedSequence, begin: int, end: int) -> PackedSequence:
    # The data are in the order of time, and at each step of the longest sequences first: a chunk is a slice.
    before, inside = packed.batch_sizes[:begin], packed.batch_sizes[begin:end]
    first = int(before.sum())
    data = packed.data[first : first + int(inside.sum())]
    if packed.sorted_indices is None or not len(inside):
        return PackedSequence(data, inside)
    # Those that still run are numbered anew, in the order that they have in the batch.
    order = packed.sorted_indices[: int(inside[0])].argsort()
    return PackedSequence(data, inside, order.argsort(), order)


def _going_on(before: PackedSequence, now: PackedSequence) -> Tensor | None:
    """Which sequences of a chunk go on in the next one; None if all do."""
    count = int(now.batch_sizes[0])
    if count == int(before.batch_sizes[0]):
        return None
    if before.sorted_indices is None:
        return torch.arange(count, device=now.data.device)
    return before.sorted_indices[:count].sort().values


def _detached(hidden: Any, running: Tensor | None) -> Any:
    if isinstance(hidden, Tensor):
        return hidden.detach() if running is None else hidden.detach().index_select(-2, running)
    return rebuilt(hidden, lambda item: _detached(item, running))


def _mean(losses: list[tuple[Tensor, int]]) -> Tensor | None:
    if len(losses) < 2:
        return losses[0][0] if losses else None
    weighted = torch.stack([loss * weight for loss, weight in losses]).sum()
    mean: Tensor = weighted / max(sum(weight for _, weight in losses), 1)
    return mean


def _alike(outputs: list[Tensor], dim: int) -> bool:
    shapes = {(*output.shape[:dim], *output.shape[dim + 1 :]) for output in outputs}
    return len(shapes) == 1
