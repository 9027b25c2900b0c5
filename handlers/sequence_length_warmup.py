"""Sequence-length warm-up: training starts with short sequences, which is more stable and cheaper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor

from signalfire import Engine, Events, Handler, Interval, on
from signalfire.authoring import Capture, Claim, check_choice, check_every, check_int, comes_up, rebuilt, tensors_in
from signalfire.findings import Finding, finding

from ._common.claims import TIME_CHUNKS
from ._common.ranks import CUT_SEQUENCES

__all__ = ["SequenceLengthWarmup"]


class SequenceLengthWarmup(Handler):
    """Sequence-length warm-up: trains on short sequences first, which is more stable and cheaper.

    The length grows linearly and depends only on the run's counters, so a resumed run continues with the right one. All tensors
    of the batch that are as long as its first tensor in dimension ``dim`` are changed alike: tokens, labels, masks. Evaluations
    use whole sequences. The two modes are:

    - "cut" keeps the first tokens of each sequence and drops the others, so a batch has fewer tokens. A
      ``GradientAccumulation(weight=)`` that counts tokens counts only those kept.
    - "split" turns each sequence into several rows, so a batch keeps all of its tokens. The length is the largest divisor of the
      batch's length that the warm-up has reached. Batches with values for whole sequences, such as classes, cannot be split.

    Learning-rate schedules count steps, not tokens, so with "cut" a learning-rate warm-up should last longer than this warm-up.

    Args:
        start: Initial length, in tokens.
        end: Final length, in tokens; from then on, longer batches are unchanged.
        over: Amount of training over which the length grows, such as "1000it", "500steps" or "2ep".
        increment: Step of the length in tokens: lengths are rounded down to a multiple of it, but not below ``start``; 8 fits
            tensor cores.
        mode: How sequences are shortened: "cut" or "split"; see above.
        dim: Dimension of time in the tensors; 1 for (N, T) and (N, T, C).

    Attributes:
        current: Length that the last batch was reduced to; None if it was not.

    Raises:
        ValueError: At the start of a run, for "split" with a handler that splits batches into time chunks; in a run, for a
            batch without a time dimension, or one that cannot be split.

    Source:
        Li, Zhang and He, "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT Models"
        (NeurIPS 2022).

    Example:
        >>> import torch
        >>> from signalfire import Engine, Events, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.01)
        >>> engine = Engine(update, model=torch.nn.Linear(3, 1), seed=0)
        >>> _ = engine.attach(SequenceLengthWarmup(2, 8, over="4it", increment=2))
        >>> lengths = []
        >>> @engine.on(Events.FORWARD_STARTED)
        ... def look(engine):
        ...     lengths.append(engine.state.batch[0].shape[1])
        >>> _ = engine.run([(torch.ones(4, 8, 3), torch.ones(4, 8, 1))] * 6, max_epochs=1)
        >>> lengths
        [2, 2, 4, 6, 8, 8]
    """

    by_shard = True
    capture = Capture.FORBIDDEN
    trains = True

    def __init__(
        self,
        start: int,
        end: int,
        *,
        over: str | Interval = "1000it",
        increment: int = 8,
        mode: Literal["cut", "split"] = "cut",
        dim: int = 1,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.start = check_int(self, "start", start)
        self.end = check_int(self, "end", end, least=self.start)
        self.over = check_every(self, over, argument="over", units=["it", "st", "ep"])
        self.increment = check_int(self, "increment", increment)
        self.mode = check_choice(self, "mode", mode, ("cut", "split"))
        self.dim = check_int(self, "dim", dim, least=1 if mode == "split" else 0)
        self.current: int | None = None

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(Claim("the length of sequences"), by=self)

    def findings(self, engine: Engine) -> Iterator[Finding]:
        """Report a warm-up that ends after the run."""
        if comes_up(engine, self.over) is False and self._done(engine) < self.over.value:
            yield finding(
                "C17",
                f"{self.name!r} reaches the full sequence length only after {self.over}, but the run ends earlier",
                "use a smaller over=, or train longer",
                [self.name],
            )

    def length(self, done: int) -> int:
        """The length after a number of iterations, steps or epochs, in the unit of ``over``."""
        if done >= self.over.value:
            return self.end
        grown = self.start + (self.end - self.start) * done // int(self.over.value)
        return max(self.start, grown - grown % self.increment)

    @on(Events.STARTED, reads=[], writes=[])
    def check(self, engine: Engine) -> None:
        """Raise an error for a handler that splits the pieces of a sequence again."""
        for update in engine.updates:
            other = engine.overrides.owner_of(TIME_CHUNKS, f"of update {update.name!r}")
            if self.mode == "split" and other is not None:
                raise ValueError(
                    f"{self.name!r}: mode='split' turns the parts of a sequence into separate rows, so {other!r} "
                    "cannot carry a hidden state from one part to the next; use mode='cut'"
                )

    @on(Events.GET_BATCH_COMPLETED, rank=CUT_SEQUENCES, reads=["batch", "step"], writes=["batch"])
    def shorten(self, engine: Engine) -> None:
        """Cut the sequences of the batch, or split them into rows."""
        batch, done, self.current = engine.state.batch, self._done(engine), None
        if batch is None or done >= self.over.value:
            return
        first = next((one for one in tensors_in(batch) if one.dim() > self.dim), None)
        if first is None:
            raise ValueError(
                f"{self.name!r}: dim={self.dim} is out of range for every tensor in the batch; set dim= to the "
                "index of the time dimension"
            )
        whole, length = first.shape[self.dim], self.length(done)
        if length >= whole:
            return
        if self.mode == "split":
            length = self._divisor(whole, length)
        self.current = length
        engine.state.batch = self._changed(batch, first.shape[0], whole, length)

    def _done(self, engine: Engine) -> int:
        """How much of the training is done before this batch, in the unit of `over`."""
        if self.over.unit == "st":
            return engine.updates[0].steps
        state = engine.state
        return max(0, (state.iteration if self.over.unit == "it" else state.epoch) - 1)

    def _divisor(self, whole: int, length: int) -> int:
        found = next((one for one in range(length, self.start - 1, -1) if whole % one == 0), None)
        if found is None:
            raise ValueError(
                f"{self.name!r}: sequences of length {whole} cannot be split into equal parts, because no length from "
                f"{self.start} to {length} divides {whole}; choose a start= that divides {whole}, or use mode='cut'"
            )
        return found

    def _changed(self, value: Any, rows: int, whole: int, length: int) -> Any:
        if not isinstance(value, Tensor):
            return rebuilt(value, lambda part: self._changed(part, rows, whole, length))
        timed = value.dim() > self.dim and value.shape[self.dim] == whole
        if self.mode == "cut":
            return value.narrow(self.dim, 0, length).contiguous() if timed else value
        if not timed or value.shape[0] != rows:
            if value.dim() == 0 or value.shape[0] != rows:
                return value  # it belongs to no sequence
            raise ValueError(
                f"{self.name!r}: the batch holds a tensor of shape {tuple(value.shape)} with values for whole "
                "sequences instead of time steps, so this batch cannot be split; use mode='cut'"
            )
        parts = value.movedim(self.dim, 1)
        parts = parts.reshape(rows * (whole // length), length, *parts.shape[2:])
        return parts.movedim(1, self.dim).contiguous()
