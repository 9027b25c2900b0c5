"""Truncated back-propagation through time (TBPTT): long sequences in chunks that pass on the hidden state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from signalfire import Engine, Events, Handler, Phase, UpdateState, on
from signalfire.authoring import Capture, check_function, check_int, check_name, parts, rebuilt

from ._common.claims import TIME_CHUNKS
from ._common.updates import selected_updates

__all__ = ["TruncatedBPTT"]


class TruncatedBPTT(Handler):
    """Truncated back-propagation through time (TBPTT): trains on long sequences in chunks that pass on the hidden state.

    Each batch is split along time, so gradients and memory reach back over only one chunk. Each chunk is one micro-step:
    forward, loss, backward and, unless gradients are accumulated, the optimizer's step. The forward reads
    ``engine.state.update.hidden``, which is None at the start of a batch, and stores the new hidden state there; it is detached
    between chunks. `GradientAccumulation` counts chunks; its windows may span batches, but not epochs.

    In nested tuples, lists, dicts and dataclasses, the handler splits tensors along ``dim``, ``PackedSequence`` objects, and
    lists of tensors of one shape (as sequences of time steps, unless the list is the batch itself). The first of these defines
    the length of the sequences. Everything without a time dimension or of a different length, such as labels of shape (N,), is
    passed to every chunk. For a label that happens to have this length, use ``split``.

    Chunks of a packed batch hold the sequences that have not ended, in their order, and the hidden state (of shape (..., N,
    features), as in torch's recurrent layers) is narrowed to them. No sequence is added before the next batch.

    A skipped step, for example after an overflow, skips only its chunk (or window of chunks). An update that is skipped before
    its first chunk is skipped for the whole batch. With several updates, each goes through all chunks of a batch before the next
    begins.

    After the last chunk, ``state.batch`` is the whole batch again, and ``update.loss`` the mean of the chunks' losses, weighted
    by their lengths (packed: by their numbers of elements). ``update.output`` is the concatenation of the chunks' outputs along
    ``dim``, detached, if each is a tensor with the length of its chunk there; otherwise the output of the last chunk. To prevent
    the concatenation, return a tuple.

    Args:
        steps: Number of time steps in a chunk; the last chunk of a batch may be shorter.
        dim: Time dimension: 1 for tensors of shape (N, T, ...), 0 for (T, N, ...).
        split: Function called as ``split(batch)`` instead of using ``steps``, that returns the list of chunks. Their lengths are
            found as above; if none is found, all chunks have equal weight and their outputs are not concatenated. Hidden states
            are not narrowed.
        update: Name of the update whose batches are split; all by default.

    Errors:
        ValueError: For an optimizer with a closure, or a handler that recomputes gradients, because the hidden states of earlier
            chunks are no longer available. Since the number of steps in a run is not known in advance, a schedule such as
            OneCycleLR must be given its number of steps.

    Source:
        Williams and Peng, "An efficient gradient-based algorithm for on-line training of recurrent network trajectories"
        (Neural Computation, 1990), with as many steps forward as back.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> def loss(engine, batch):
        ...     update = engine.state.update
        ...     print(tuple(batch[0].shape), update.hidden is not None, update.more)
        ...     output, hidden = engine.model(batch[0], update.hidden)
        ...     # Without this handler, more is always False.
        ...     update.hidden = hidden if update.more else None
        ...     return torch.nn.functional.mse_loss(output, batch[1])
        >>> update = Update.from_function(loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.RNN(1, 1, batch_first=True), seed=0)
        >>> _ = engine.attach(TruncatedBPTT(20))
        >>> _ = engine.run([(torch.ones(4, 50, 1), torch.ones(4, 50, 1))], max_epochs=1)
        (4, 20, 1) False True
        (4, 20, 1) True True
        (4, 10, 1) True False
    """

    capture = Capture.FORBIDDEN

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
                f"TruncatedBPTT(steps={steps!r}, split={split!r}): pass exactly one of steps= (the length of a "
                "chunk) and split= (a function that splits a batch)"
            )
        self.steps = None if steps is None else check_int(self, "steps", steps)
        self.dim = check_int(self, "dim", dim, least=0)
        self.split = check_function(self, "split", split, "batch", optional=True)
        self.update = check_name(self, "update", update)
        self._watched: set[str] = set()  # the updates whose states were looked at
        self._hooks: dict[nn.Module, Any] = {}
        self._carried: list[bool] = []  # whether the first calls of layers in a second chunk got a state
        self._clear()

    def _clear(self) -> None:
        self._forget_states()
        self._whole: Any = None
        self._chunks: Sequence[Any] = ()
        self._lengths: list[int] | None = None  # of the chunks, in time steps
        self._weights: list[int] = []
        self._continuing: list[
            Tensor | None
        ] = []  # for each chunk, indices of the sequences that continue; None for all
        self._planned: dict[str, int] = {}  # number of chunks of each update in this iteration
        self._left: dict[str, int] = {}  # number of chunks still to come
        self._begin()

    def _begin(self) -> None:
        self._index = 0  # of the chunk
        self._skipped: str | None = None  # the reason to skip the whole batch
        self._losses: list[tuple[Tensor, int]] = []
        self._outputs: list[Tensor] | None = []  # None: they cannot be concatenated

    def attached(self, engine: Engine) -> None:
        updates = selected_updates(engine, self.update)
        for update in updates:
            engine.overrides.claim(TIME_CHUNKS, by=self, target=f"of update {update.name!r}")
        for update in updates:
            update.one_step_per_batch = False

    def detached(self, engine: Engine) -> None:
        for update in selected_updates(engine, self.update):
            update.one_step_per_batch, update.more, update.hidden = True, False, None

    @on(Events.STARTED, phase=Phase.PREPARE, reads=["window"], writes=["step"])
    def check(self, engine: Engine) -> None:
        """Raise an error for steps that compute their gradients more than once."""
        for update in selected_updates(engine, self.update):
            update.one_step_per_batch = False  # another handler may have set it when it was detached
            self._check_gradients_once(update)

    def _check_gradients_once(self, update: UpdateState) -> None:
        if update.window.kept is not None:
            raise ValueError(
                f"{self.name!r}: each step of update {update.name!r} computes gradients more than once, because "
                f"{type(update.optimizer).__name__} takes a closure or another handler requires it. The hidden states "
                "of earlier chunks are no longer available after the first computation; use a different "
                f"optimizer, or detach either {self.name!r} or the other handler"
            )

    @on(Events.ITERATION_STARTED, reads=["batch", "plan", "window"], writes=["plan"])
    def split_batch(self, engine: Engine) -> None:
        """Split the batch, and plan each update once for every chunk."""
        self._clear()
        state = engine.state
        planned = [update for update in state.plan if self.update in (None, update.name)]
        if (state.batch is None and not engine.processes.distributed) or not planned:
            return
        for update in planned:
            self._check_gradients_once(update)
        self._whole = state.batch
        if state.batch is None:
            self._chunks, self._lengths, self._weights = [], [], []
        elif self.split is None:
            self._split(state.batch)
        else:
            self._chunks = self._split_by_user(state.batch, self.split)
        count = len(self._chunks)
        if (
            engine.processes.distributed
        ):  # all ranks make the same steps: one with a shorter batch has None in the last ones
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
                f"{self.name!r}: dim={self.dim} is out of range for every tensor in the batch; set "
                "TruncatedBPTT(dim=) to the index of the time dimension, or use TruncatedBPTT(split=) to pass a "
                "function that splits the batch"
            )
        begins = range(0, max(total, 1), self.steps)
        ends = [min(begin + self.steps, total) for begin in begins]
        self._chunks = [_cut(batch, self.dim, total, begin, end) for begin, end in zip(begins, ends, strict=True)]
        self._lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
        self._weights = self._lengths
        if isinstance(timed, PackedSequence):
            packs = [_cut_packed(timed, begin, end) for begin, end in zip(begins, ends, strict=True)]
            self._weights = [len(pack.data) for pack in packs]
            self._continuing = [None, *map(_continuing, packs, packs[1:])]

    def _split_by_user(self, batch: Any, split: Callable[[Any], Sequence[Any]]) -> Sequence[Any]:
        chunks = split(batch)
        if not isinstance(chunks, list | tuple) or not chunks:
            raise ValueError(
                f"{self.name!r}: split={split!r} returned "
                f"{'an empty' if isinstance(chunks, list | tuple) else 'a'} {type(chunks).__name__}; return a list of "
                "at least one chunk"
            )
        lengths = [next(_timed(chunk, self.dim), (None, None))[1] for chunk in chunks]
        known = [length for length in lengths if length is not None]
        self._lengths = known if len(known) == len(chunks) else None
        self._weights = self._lengths or [1] * len(chunks)
        return chunks

    @on(Events.UPDATE_STARTED, phase=Phase.PREPARE, reads=["step", "plan"], writes=["batch", "plan"])
    def take_chunk(self, engine: Engine) -> None:
        """Set the batch to the next chunk, and detach the hidden state."""
        state = engine.state
        update = state.update
        if update.name not in self._planned:
            return
        if self._index == 0:
            if list(state.plan).count(update) != self._planned[update.name]:
                raise RuntimeError(
                    f"{self.name!r}: state.plan was changed too late: the chunks of update {update.name!r} have "
                    "already been planned; change state.plan earlier, at ITERATION_STARTED with phase=Phase.PREPARE"
                )
            update.hidden = None
            self._skipped = update.skipped
        else:
            if update.hidden is None and self._index == 1:
                self._watch_states(engine, update)
            update.skipped = self._skipped  # drop the reason of an earlier chunk
            continuing = self._continuing[self._index] if self._index < len(self._continuing) else None
            update.hidden = _detached(update.hidden, continuing)
        self._left[update.name] -= 1
        update.more = self._left[update.name] > 0
        state.batch = self._chunks[self._index]

    def _watch_states(self, engine: Engine, update: UpdateState) -> None:
        """Look at what the recurrent layers start the second chunk from, where the forward of the first sets no hidden state."""
        parts = [part for root in engine.modules.values() for part in root.modules()]
        layers = [part for part in parts if isinstance(part, nn.RNNBase | nn.RNNCellBase)]
        if update.raw_loss is not None and update.name not in self._watched:
            self._watched.add(update.name)
            self._hooks = {one: one.register_forward_pre_hook(self._note_state, with_kwargs=True) for one in layers}

    def _note_state(self, layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Note whether the first call of a layer is given a state; a cell is called again in the same chunk."""
        self._hooks.pop(layer).remove()
        state = args[1] if len(args) > 1 else named.get("hx")
        tensors = [one for one in (state if isinstance(state, tuple) else (state,)) if one is not None]
        self._carried.append(any(bool(one.any()) for one in tensors))

    def _report_no_hidden(self, engine: Engine, update: UpdateState) -> None:
        """Report recurrent layers that have started the second chunk from zero."""
        if self._carried and not any(self._carried):
            engine.findings.report(
                "W69",
                f"{self.name!r}: the forward of update {update.name!r} sets no hidden state, so the recurrent layers "
                "start each chunk from zero",
                "in the forward pass, start from engine.state.update.hidden, and set engine.state.update.hidden to the new "
                "hidden state",
                self.name,
            )
        self._forget_states()

    def _forget_states(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks, self._carried = {}, []

    @on(
        Events.UPDATE_COMPLETED,
        phase=Phase.PREPARE,
        reads=["output", "loss"],
        writes=["loss", "output", "batch"],
    )
    def record_chunk(self, engine: Engine) -> None:
        """Record the chunk's loss and output; after the last chunk, set those of the whole batch."""
        update = engine.state.update
        if update.name not in self._planned:
            return
        self._report_no_hidden(engine, update)
        if update.loss is not None:
            self._losses.append((update.loss, self._weights[self._index]))
        output, dim = update.output, self.dim
        if self._outputs is not None and self._chunks[self._index] is not None:
            timed = self._lengths is not None and isinstance(output, Tensor) and output.dim() > dim
            if timed and output.size(dim) == self._lengths[self._index]:  # type: ignore[index]
                self._outputs.append(output.detach())
            else:
                self._outputs = None
        self._index += 1
        if self._index == len(self._chunks):
            self._finish(engine, update)

    def _finish(self, engine: Engine, update: UpdateState) -> None:
        if self._index > 1:
            update.loss = _mean(self._losses)
            if self._outputs is not None and _alike(self._outputs, self.dim):
                update.output = torch.cat(self._outputs, self.dim)
        engine.state.batch = self._whole
        update.hidden = None
        self._begin()

    @on(Events.ITERATION_COMPLETED, phase=Phase.PREPARE, reads=[], writes=["batch", "loss", "output"])
    def finish(self, engine: Engine) -> None:
        """Restore the whole batch with the results of the chunks so far, even if the run stops inside the batch."""
        if self._index:
            self._finish(engine, engine.state.update)
        self._clear()

    @on(Events.ENDED, reads=[], writes=[])
    def release(self, engine: Engine) -> None:
        """Drop the batch, even after an error."""
        self._clear()


def _timed(value: Any, dim: int, *, outermost: bool = True) -> Iterator[tuple[Any, int]]:
    """The parts of a batch that have a time dimension, and their lengths."""
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
    # The data are ordered by time, and at each time step by descending length of the sequences: a chunk is a slice.
    before, inside = packed.batch_sizes[:begin], packed.batch_sizes[begin:end]
    first = int(before.sum())
    data = packed.data[first : first + int(inside.sum())]
    if packed.sorted_indices is None or not len(inside):
        return PackedSequence(data, inside)
    # Renumber the sequences that have not ended, in their order in the batch.
    order = packed.sorted_indices[: int(inside[0])].argsort()
    return PackedSequence(data, inside, order.argsort(), order)


def _continuing(before: PackedSequence, now: PackedSequence) -> Tensor | None:
    """The indices of a chunk's sequences that continue in the next one; None if all do."""
    count = int(now.batch_sizes[0])
    if count == int(before.batch_sizes[0]):
        return None
    if before.sorted_indices is None:
        return torch.arange(count, device=now.data.device)
    return before.sorted_indices[:count].sort().values


def _detached(hidden: Any, continuing: Tensor | None) -> Any:
    if isinstance(hidden, Tensor):
        return hidden.detach() if continuing is None else hidden.detach().index_select(-2, continuing)
    return rebuilt(hidden, lambda item: _detached(item, continuing))


def _mean(losses: list[tuple[Tensor, int]]) -> Tensor | None:
    if len(losses) < 2:
        return losses[0][0] if losses else None
    losses = [one for one in losses if one[1]] or losses[:1]  # the loss of an empty chunk may be NaN
    weighted = torch.stack([loss * weight for loss, weight in losses]).sum()
    mean: Tensor = weighted / max(sum(weight for _, weight in losses), 1)
    return mean


def _alike(outputs: list[Tensor], dim: int) -> bool:
    shapes = {(*output.shape[:dim], *output.shape[dim + 1 :]) for output in outputs}
    return len(shapes) == 1
