"""Micro-batching: computes the gradients of a batch piece by piece, with the memory of one piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from signalfire import Engine, Events, Handler, Phase, Signal, UpdateState, on
from signalfire.authoring import Capture, Override, check_bool, check_function, check_int, check_name, parts, rebuilt
from signalfire.models.explain import is_out_of_memory
from signalfire.runs.restore import attempt

__all__ = ["MicroBatching"]

Split = Callable[[Any, int], Sequence[Any]]


class MicroBatching(Handler):
    """Micro-batching: computes each batch's gradients in pieces to save memory, and halves the pieces if memory runs out.

    The gradients of the pieces, weighted by their numbers of samples, add up to those of the batch, which is split as evenly as
    possible. For a loss that is a mean over the samples, training matches training on whole batches up to rounding. Operations
    across samples (BatchNorm) and random ones (dropout) see single pieces. The events from FORWARD_STARTED to
    BACKWARD_COMPLETED are emitted for each piece, with the piece in ``state.batch``. Afterwards ``state.batch`` is the whole
    batch again, ``update.loss`` its mean loss, and ``update.output`` the joined outputs.

    A batch that runs out of memory is retried with pieces of half the size, which is kept for the rest of the run. Buffers,
    random states and the window's gradients are restored (UPDATE_RETRIED), and receivers that record outputs and losses see
    only the successful attempt. This requires a copy of the buffers and of the gradients accumulated so far for each batch.

    Args:
        size: Largest number of samples in a piece. Without ``size`` and ``pieces``, batches stay whole until memory runs out.
        pieces: Number of pieces of each batch, instead of ``size``.
        split: Function called as ``split(batch, n)`` that returns the batch as a list of n batches of about the same size. By
            default, tensors and arrays in nested tuples, lists, dicts, namedtuples and dataclasses are split along their first
            dimension, which must be as long as that of the batch's first tensor. Lists of that length without tensors are also
            split. Each piece gets everything else unchanged.
        samples: Function called as ``samples(batch)`` that returns the number of samples in a batch or a piece, for batches where
            this is not the first dimension of the first tensor. Requires ``split``.
        halve_on_oom: Whether to retry with pieces of half the size when memory runs out, on a GPU or a CPU.
        update: Name of the update whose batches are split; all by default.

    Attributes:
        reduced: Largest number of samples in a piece since the memory last ran out; None if it never did.

    Raises:
        ValueError: For a batch that cannot be split.
        torch.OutOfMemoryError: If the memory does not suffice for a single sample.

    Source:
        Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (NeurIPS 2019), for the
        name and the equivalence.

    Example:
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> trainer = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> _ = trainer.attach(MicroBatching(4))
        >>> sizes = []
        >>> @trainer.on(Events.FORWARD_STARTED)
        ... def count(engine):
        ...     sizes.append(len(engine.state.batch[0]))
        >>> _ = trainer.run([(torch.ones(10, 2), torch.ones(10, 1))], max_epochs=1)
        >>> sizes
        [4, 3, 3]
    """

    capture = Capture.INSIDE
    trains = True
    by_shard = True
    splits_by_samples = True

    def __init__(
        self,
        size: int | None = None,
        *,
        pieces: int | None = None,
        split: Split | None = None,
        samples: Callable[[Any], int] | None = None,
        halve_on_oom: bool = True,
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.size = None if size is None else check_int(self, "size", size)
        self.pieces = None if pieces is None else check_int(self, "pieces", pieces)
        self.halve_on_oom = check_bool(self, "halve_on_oom", halve_on_oom)
        if size is not None and pieces is not None:
            raise ValueError(f"MicroBatching(size={size}, pieces={pieces}): pass only one of the two")
        check_function(self, "split", split, "batch", "n", optional=True)
        check_function(self, "samples", samples, "batch", optional=True)
        if samples is not None and split is None:
            raise ValueError(
                f"MicroBatching(samples={samples!r}): samples= requires split=; pass both, or omit samples="
            )
        if size is None and pieces is None and not halve_on_oom:
            raise ValueError("MicroBatching(halve_on_oom=False): no batch would be split; pass size= or pieces=")
        self.split = split
        self.samples = samples or _samples
        self.update = check_name(self, "update", update)
        self.reduced: int | None = None
        self._ran_out = False  # on this rank

    def attached(self, engine: Engine) -> None:
        engine.find_update(self.update)
        engine.overrides.replace(Override.GRADIENTS, self.compute, by=self)

    @on(Events.STARTED, reads=[], writes=[])
    def check(self, engine: Engine) -> None:
        """Raise an error in a run without data, which has no batches to split, and for sizes that would differ by process."""
        if self.halve_on_oom and engine.group.shards is not None:
            raise ValueError(
                f"{self.name!r}: halve_on_oom=True does not work with shards, because the size of the pieces would "
                "depend on the memory of the process that computes a shard; pass size= or pieces= together with "
                "halve_on_oom=False"
            )
        if not engine.feed.has_data:
            raise ValueError(
                f"{self.name!r}: this run has no data, so there are no batches to split; detach {self.name!r}"
            )

    def compute(self, engine: Engine, update: UpdateState, compute: Callable[[], None]) -> None:
        """Compute the gradients of ``state.batch`` in pieces; retry with smaller ones if the memory runs out."""
        batch, processes = engine.state.batch, engine.processes
        if self.update not in (None, update.name) or (
            batch is None and not (processes.distributed and self.halve_on_oom)
        ):
            compute()
            return
        samples = 0 if batch is None else self.samples(batch)
        failed = math.inf  # size of the last attempt's largest piece
        while True:
            batches, sizes = self._cut(batch, samples)
            largest = max(sizes, default=0)
            seen: list[_Piece] = []
            work = partial(self._compute, engine, update, compute, batches, sizes, seen)
            smallest = largest <= 1 or largest >= failed
            if not self.halve_on_oom or (smallest and not processes.distributed):
                self._compute_or_explain(work, largest, samples)
                break
            signals = self._recording_signals(engine, update)
            with _recording_suspended(signals):
                done = attempt(engine, update, partial(self._reduce_on_oom, work, largest))
            if done:
                self._emit_recording(engine, update, seen, signals)
                break
            failed = largest
            if processes.distributed:
                self._sync_reduced(engine, smallest=smallest and largest > 0)
        engine.state.batch = batch
        _combine(update, seen)

    def _compute_or_explain(self, work: Callable[[], None], largest: int, samples: int) -> None:
        """Compute the gradients where nothing smaller is left to try, and say so if the memory runs out."""
        try:
            work()
        except Exception as error:
            if is_out_of_memory(error):
                error.add_note(f"{self.name!r}: out of memory with {largest} of the batch's {samples} samples; "
                               + self._way_out(largest))  # fmt: skip
            raise

    def _sync_reduced(self, engine: Engine, *, smallest: bool) -> None:
        """Use the smallest size of all ranks; raise an error if one of them cannot reduce its pieces further."""
        reduced, exhausted = zip(*engine.processes.gather((self.reduced, smallest and self._ran_out)), strict=True)
        self.reduced = min(size for size in reduced if size is not None)
        if any(exhausted):
            raise torch.OutOfMemoryError(
                f"{self.name!r}: out of memory on rank {exhausted.index(True)} with a single sample, which cannot be "
                "split further; use a smaller model or smaller samples"
            )

    def _cut(self, batch: Any, samples: int) -> tuple[Sequence[Any], list[int]]:
        """The pieces of a batch, and the number of samples of each; none of a missing batch."""
        if batch is None:
            return [], []
        number = self.pieces or 1
        for size in (self.size, self.reduced):
            if size is not None:
                number = max(number, -(-samples // size))
        number = max(1, min(number, samples))
        if number == 1:
            return [batch], [samples]
        if self.split is None:
            small, larger = divmod(samples, number)
            sizes = [small + (place < larger) for place in range(number)]
            return _split(batch, sizes, samples), sizes
        batches = list(self.split(batch, number))
        sizes = [self.samples(piece) for piece in batches]
        if sum(sizes) != samples:
            raise ValueError(
                f"{self.name!r}: split= divided a batch of {samples} samples into pieces of {sizes} samples, "
                f"{sum(sizes)} in total; return each sample in exactly one piece, and pass samples= if the first "
                "dimension of the first tensor is not the number of samples"
            )
        return batches, sizes

    def _compute(
        self, engine: Engine, update: UpdateState, compute: Callable[[], None],
        batches: Sequence[Any], sizes: list[int], seen: list[_Piece],
    ) -> None:  # fmt: skip
        """Compute the pieces one by one, append their results to ``seen``, and count all of them as one batch."""
        completes = update.sync_gradients
        held, extra_weight = update.window.held, update.window.extra_weight
        total, several = sum(sizes), len(sizes) > 1
        before = held  # the earlier pieces count as held, so that receivers do not see a new window with each piece
        try:
            for place, (batch, size) in enumerate(zip(batches, sizes, strict=True), 1):
                # Gradients are all-reduced with the last piece, or, where a rank may have to retry, after all pieces.
                update.sync_gradients = completes and place == len(batches) and not self.halve_on_oom
                share = size / total if several else 1
                engine.state.batch = batch
                update.window.held, update.window.extra_weight, update.weight = before, 0, share
                compute()
                piece = _finished(update, batch, size, share, gave=update.window.held > before)
                seen.append(piece)
                before += piece.gave
                if several:
                    self._release_graph(update, piece)
                if update.skipped is not None:
                    break
        finally:
            update.weight, update.sync_gradients = 1, completes
        gave = [piece for piece in seen if piece.gave]
        update.window.held, update.window.extra_weight = held + bool(gave), extra_weight
        # The shares of all pieces sum to 1 by definition; their rounded sum may not.
        if gave and [piece.own for piece in gave] != [True] * len(sizes):
            update.window.extra_weight = extra_weight + (sum(piece.extra for piece in gave) + (len(gave) - 1))

    def _release_graph(self, update: UpdateState, piece: _Piece) -> None:
        """Keep only the values of a piece, so its activations are freed before the next one."""
        piece.output = _detached(piece.output)
        if update.hidden is not None:
            raise RuntimeError(
                f"{self.name!r}: update {update.name!r} sets update.hidden for the next time chunk, but {self.name!r} "
                "splits each batch, so the next piece of the same batch would receive the hidden state; detach "
                f"{self.name!r}, or do not set update.hidden"
            )
        if piece.raw_loss is not None:
            piece.raw_loss = _without_graph(piece.raw_loss)
            piece.backward_loss = _without_graph(piece.backward_loss)

    def _reduce_on_oom(self, work: Callable[[], None], largest: int) -> None:
        self._ran_out = False
        try:
            work()
        except Exception as error:
            if is_out_of_memory(error):
                self._ran_out = True
                self.reduced = max(1, largest // 2)  # before UPDATE_RETRIED is emitted
            raise

    def _way_out(self, largest: int) -> str:
        if largest <= 1:
            return "a single sample cannot be split further; use a smaller model or smaller samples"
        if not self.halve_on_oom:
            return "use a smaller size=, more pieces=, or halve_on_oom=True in MicroBatching"
        return "let split= return smaller pieces when it is asked for more of them"

    # Receivers that record outputs and losses must see the successful attempt only, which is known at its end. They are
    # suspended during an attempt, and called afterwards for each piece.

    def _recording_signals(self, engine: Engine, update: UpdateState) -> list[Signal]:
        if update.evaluation > 0:  # the engine does not call them in a recomputation
            return []
        signals = (engine.signal(Events.FORWARD_COMPLETED), engine.signal(Events.LOSS_COMPUTED))
        return [one for one in signals if any(connection.phase > Phase.FINALIZE for connection in one.connections)]

    def _emit_recording(self, engine: Engine, update: UpdateState, seen: list[_Piece], signals: list[Signal]) -> None:
        state = engine.state
        for piece in seen if signals else ():
            state.batch, update.output, update.weight = piece.batch, piece.output, piece.weight
            update.raw_loss, update.backward_loss = piece.raw_loss, piece.backward_loss
            for signal in signals:
                if piece.raw_loss is None if signal.event is Events.LOSS_COMPUTED else update.forward is None:
                    continue
                signal.emit(engine, state.iteration, phases=_RECORDING_PHASES)
        update.weight = 1

    def state_dict(self) -> dict[str, Any]:
        return {} if self.reduced is None else {"reduced": self.reduced}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reduced = state.get("reduced")


@dataclass(slots=True)
class _Piece:
    """The results of a piece of a batch.

    Attributes:
        batch: The piece.
        size: Its number of samples.
        weight: Its weight: the share of the samples, unless a receiver of LOSS_COMPUTED changed it.
        extra: The weight minus 1, as accumulated in ``update.window.extra_weight``.
        own: Whether the weight is the share of the samples.
        gave: Whether it had a gradient.
    """

    batch: Any
    size: int
    weight: Any
    extra: Any
    own: bool
    gave: bool
    output: Any
    raw_loss: Any
    backward_loss: Any


def _finished(update: UpdateState, batch: Any, size: int, share: float, *, gave: bool) -> _Piece:
    """The results of a piece whose gradients were computed."""
    extra = update.window.extra_weight  # read after the piece: a receiver of LOSS_COMPUTED may have changed it
    own = not gave or (isinstance(extra, int | float) and extra == share - 1)
    weight = share if own else 1 + extra
    if not gave and update.raw_loss is not None and update.skipped is None:
        own, weight = False, 0  # of weight 0, as one without targets is: its loss may be NaN
    return _Piece(batch, size, weight, extra, own, gave, update.output, update.raw_loss, update.backward_loss)


def _combine(update: UpdateState, seen: list[_Piece]) -> None:
    """Set the update's output and losses to those of the whole batch."""
    if not seen:
        update.output = update.raw_loss = None
        return
    if len(seen) == 1:
        update.output, update.raw_loss, update.backward_loss = seen[0].output, seen[0].raw_loss, seen[0].backward_loss
        return
    if update.forward is not None:
        update.output = _join([piece.output for piece in seen], [piece.size for piece in seen])
    _combine_losses(update, seen)


def _combine_losses(update: UpdateState, seen: list[_Piece]) -> None:
    lossy = [piece for piece in seen if piece.raw_loss is not None]
    if not lossy:
        update.raw_loss = None
        return
    # Weights set by a receiver, such as numbers of tokens, are those of a weighted mean.
    update.raw_loss = sum([_weighted(piece.raw_loss, piece.weight) for piece in lossy])
    update.backward_loss = sum([_weighted(piece.backward_loss, piece.weight) for piece in lossy])
    if len(lossy) < len(seen) or not all(piece.own for piece in seen):
        total = sum(piece.weight for piece in lossy)
        if isinstance(total, Tensor) or total != 0:
            update.raw_loss, update.backward_loss = update.raw_loss / total, update.backward_loss / total


def _weighted(loss: Any, weight: Any) -> Any:
    """The loss of a piece times its weight; 0 for weight 0, even if the loss is NaN, as a mean over no targets is."""
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, torch.zeros_like(loss), loss * weight)
    return loss * weight if weight != 0 else torch.zeros_like(loss)


_RECORDING_PHASES = tuple(phase for phase in Phase if phase > Phase.FINALIZE)


@contextmanager
def _recording_suspended(signals: list[Signal]) -> Iterator[None]:
    for signal in signals:
        signal.last_phase = Phase.FINALIZE
    try:
        yield
    finally:
        for signal in signals:
            signal.last_phase = Phase.PERSIST


def _without_graph(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


# ---- batches and outputs: tensors, nested in tuples, lists, dicts and dataclasses ----------------------------------------


def _arrays(value: Any) -> Iterator[Any]:
    """The tensors and arrays that have a first dimension."""
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim:
            yield value
    elif (container := parts(value)) is not None:
        for part in container[0]:
            yield from _arrays(part)


def _samples(batch: Any) -> int:
    first = next(_arrays(batch), None)
    if first is None:
        raise ValueError(
            f"MicroBatching: a batch of type {type(batch).__name__} has no tensor with a first dimension to split "
            "along; pass split= and samples="
        )
    return int(first.shape[0])


def _is_list_of(value: Any, length: int) -> bool:
    return type(value) in (tuple, list) and len(value) == length and next(_arrays(value), None) is None


def _split(value: Any, sizes: list[int], samples: int) -> list[Any]:
    """The value for each piece: split if it has one entry for each sample, else the value itself."""
    if isinstance(value, Tensor | np.ndarray) and value.ndim:
        if value.shape[0] != samples:
            raise ValueError(
                f"MicroBatching: a batch of {samples} samples holds a tensor of shape {tuple(value.shape)}, which "
                f"cannot be split into samples; pass split=, and samples= if {samples} is not the number of samples"
            )
        if isinstance(value, Tensor):
            return list(value.split(sizes))
        return np.split(value, list(accumulate(sizes))[:-1])
    if isinstance(value, PackedSequence):
        raise ValueError("MicroBatching: the first dimension of a PackedSequence mixes its samples; pass split=")
    if _is_list_of(value, samples):
        ends = list(accumulate(sizes))
        return [value[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    if (container := parts(value)) is None:
        return [value] * len(sizes)
    held, remake = container
    columns = [_split(part, sizes, samples) for part in held]
    return [remake([column[place] for column in columns]) for place in range(len(sizes))]


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else rebuilt(value, _detached)


def _join(values: list[Any], sizes: list[int]) -> Any:
    """The joined outputs of the pieces, with None for each part that cannot be joined."""
    first = values[0]
    if all(isinstance(value, Tensor) for value in values):
        return _join_tensors(values, sizes)
    if len(set(map(type, values))) > 1 or isinstance(first, PackedSequence):
        return None
    if all(map(_is_list_of, values, sizes)):
        return type(first)(chain.from_iterable(values))
    if isinstance(first, bool | int | float | str):
        return first if all(value == first for value in values) else None
    return _join_parts(values, sizes)


def _join_tensors(values: list[Tensor], sizes: list[int]) -> Tensor | None:
    fits = [value.shape[:1] for value in values] == [(size,) for size in sizes]
    kinds = {(value.shape[1:], value.dtype, value.device) for value in values}
    return torch.cat(values) if fits and len(kinds) == 1 else None


def _join_parts(values: list[Any], sizes: list[int]) -> Any:
    first = values[0]
    containers = [parts(value) for value in values]
    rows = [container[0] for container in containers if container is not None]
    if len(rows) < len(values) or len(set(map(len, rows))) > 1:
        return None
    if isinstance(first, Mapping) and any(list(value) != list(first) for value in values):
        return None
    assert containers[0] is not None
    return containers[0][1]([_join(list(column), sizes) for column in zip(*rows, strict=True)])
