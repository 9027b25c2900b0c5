"""Making an iteration of a run again, to find out where a spike came from: the data, one sample of it, or a passing fault."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..authoring.batches import rebuilt, tensors_in
from ..authoring.markup import preformatted
from ..authoring.randomness import set_random_state, unchanged_random_state
from ..core.events import Events
from ..core.update import read_together
from ..data.loading import epochs_of, generators_of, indices_from, set_epochs, skippable
from ..data.streamed import inner
from ..distributed.norms import joined, norm_parts
from ..resuming.past import Place
from ..resuming.saving import gather
from .rehearsal import rehearsal

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["Made", "Remade", "Replay", "SampleInfluence"]


class Made(NamedTuple):
    """What an iteration came to when it was repeated.

    Attributes:
        loss: the mean loss of the window that the iteration completes, or of its batches so far; with shards, of the iteration.
        gradient_norm: the norm of the gradients before anything changes them.
        gradients: the sha256 of these gradients.
        weights: the sha256 of the weights before the step.
    """

    loss: float
    gradient_norm: float
    gradients: str
    weights: str


class Remade(NamedTuple):
    """An iteration repeated several times, and what was recorded of it in the run.

    Attributes:
        iteration: the iteration.
        times: what it came to each time.
        recorded: loss and gradient norm in the run, as `SpikeGuard` has recorded them; empty if it did not.
    """

    iteration: int
    times: list[Made]
    recorded: Mapping[str, float]

    @property
    def verdict(self) -> str:
        """Where the recorded values came from.

        - "transient": repeated, the iteration comes to other values, and to the same ones each time: what was recorded was a
          fault of the hardware, or of something else that does not repeat.
        - "persistent": it comes to what was recorded: the cause is in the data or in the training itself.
        - "not reproducible": it comes to something else each time, so that nothing can be concluded.
        - "not recorded": nothing was recorded to compare with.
        """
        first = self.times[0]
        if not all(all(map(_same, one, first)) for one in self.times):
            return "not reproducible"
        if not self.recorded:
            return "not recorded"
        return (
            "persistent"
            if all(_same(getattr(first, key), value) for key, value in self.recorded.items())
            else "transient"
        )

    def __str__(self) -> str:
        rows = [("in the run", self.recorded.get("loss"), self.recorded.get("gradient_norm"), "")]
        rows += [
            (f"replay {i}", one.loss, one.gradient_norm, one.gradients[:12]) for i, one in enumerate(self.times, 1)
        ]
        lines = [f"iteration {self.iteration}: {self.verdict}", f"{'':<12}{'loss':>12}{'gradient norm':>16}  gradients"]
        lines += [f"{what:<12}{_shown(loss):>12}{_shown(norm):>16}  {digest}" for what, loss, norm, digest in rows]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return preformatted(self)


class SampleInfluence(NamedTuple):
    """What the batch comes to without one sample.

    Attributes:
        sample: the index of the sample in the data set; its place in the batch, from 0, where there is none.
        loss, gradient_norm: those of the batch without the sample.
        influence: by how much leaving it out lowers the logarithms of loss and norm, added up; infinite if it alone makes them
            infinite or NaN. If several samples do, leaving out one of them changes nothing: all have an influence of 0.
    """

    sample: Any
    loss: float
    gradient_norm: float
    influence: float


class Replay:
    """An iteration of an engine's last run, from the states that a handler has kept of it (`SpikeGuard`, `Rewindable`).

    Nothing of the engine is changed: it is run from a kept state up to the iteration, as `tuning.find_learning_rate` does it, and
    put back. Handlers without an effect on the step do not take part, and neither do guards.

    Args:
        engine: the engine; it must not be running, and train in one process.
        iteration: the iteration.

    Raises:
        RuntimeError: during a run, with several processes, or if no state from before the iteration is kept.
        ValueError: for an iteration that the run has not made.

    Example:
        >>> from signalfire import Engine, Update
        >>> from signalfire.handlers import SpikeGuard
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> _ = engine.attach(SpikeGuard("stop"))
        >>> _ = engine.run([(torch.ones(4, 2), torch.ones(4, 1))], max_epochs=3)
        >>> engine.replay(2).run().verdict
        'persistent'
    """

    def __init__(self, engine: Engine, iteration: int) -> None:
        if engine.running:
            raise RuntimeError(f"replay({iteration!r}) was called during a run; call it between runs")
        if engine.processes.distributed:
            raise RuntimeError(
                f"replay({iteration!r}): the engine trains with several processes, but an iteration can be replayed "
                "only in a single-process run"
            )
        if (
            isinstance(iteration, bool)
            or not isinstance(iteration, int)
            or not 1 <= iteration <= engine.state.iteration
        ):
            made = engine.state.iteration
            wanted = f"expected an iteration from 1 to {made}" if made else "the engine has run no iteration yet"
            raise ValueError(f"replay({iteration!r}): {wanted}")
        self.engine = engine
        self.iteration = iteration
        self._from, self._state = engine.past.before(iteration)
        assert engine.feed.source is not None
        self._data = engine.feed.source.given
        self._position: dict[str, Any] | None = None

    def run(self, times: int = 2) -> Remade:
        """Make the iteration again, several times, and compare it with what was recorded of it."""
        if isinstance(times, bool) or not isinstance(times, int) or times < 1:
            raise ValueError(f"replay.run(times={times!r}): expected an int of 1 or more")
        with self._rehearsal():
            made = [self._make(self._state) for _ in range(times)]
        return Remade(self.iteration, made, self.engine.past.recorded.get(self.iteration, {}))

    @property
    def place(self) -> Place:
        """The batch of the iteration."""
        number, index = self._place()
        return Place(number + 1, index)

    @property
    def samples(self) -> list[Any]:
        """The indices of the iteration's samples in the data set, for a DataLoader over a map-style data set.

        With shards, those of all shards, in their order.

        Raises:
            TypeError: for other data.
        """
        data = inner(self._data)
        if not skippable(data):
            raise TypeError(
                f"replay({self.iteration}).samples: the data ({type(data).__name__}) is not a DataLoader over a "
                f"map-style dataset, so its samples have no indices; the batch is {self.place}"
            )
        number, index = self._place()
        position = self._position
        assert position is not None
        generators, epochs = [(one, one.get_state()) for one in generators_of(data)], epochs_of(data)
        try:
            with unchanged_random_state():
                set_random_state(position["random"])
                for (generator, _), state in zip(generators, position["generators"], strict=True):
                    generator.set_state(state)
                set_epochs(data, position["epochs"], position["number"])
                several = 1 if self.engine.group.shards is None else self.engine.group.shards.world_size
                batches = islice(indices_from(data, number), index * several, (index + 1) * several)
                return [one for batch in batches for one in batch]
        finally:
            for generator, state in generators:
                generator.set_state(state)
            set_epochs(data, epochs)

    def rank_samples(self) -> list[SampleInfluence]:
        """The samples of the batch, the most suspicious first: each is left out once, and loss and gradients are computed.

        Raises:
            ValueError: for a batch of one sample.
        """
        with self._rehearsal():
            state = self._state
            if self._from < self.iteration - 1:
                self._continue(state, self.iteration - 1)
                state = gather(self.engine)
            with _batches_of(self.engine, self.iteration) as seen:
                whole = self._make(state)
            parts = []
            for number, count in enumerate([self._count(batch) for batch in seen]):
                for place in range(count):
                    with _batches_of(self.engine, self.iteration, {number: partial(_without, place, count)}):
                        parts.append(self._make(state))
        names = self.samples if skippable(inner(self._data)) else []
        if len(names) != len(parts):  # data without indices, or a dataset of whole batches
            names = list(range(len(parts)))
        found = [
            SampleInfluence(name, part.loss, part.gradient_norm, _influence(whole, part))
            for name, part in zip(names, parts, strict=True)
        ]
        return sorted(found, key=lambda one: -one.influence)

    def _count(self, batch: Any) -> int:
        """The number of samples of a batch, of which each can be left out."""
        count = self.engine.updates[0].samples_in(batch)
        if not any(count in one.shape for one in tensors_in(batch)):
            raise TypeError(
                f"replay({self.iteration}).rank_samples(): the batch has {count} samples, but no tensor has a "
                "dimension of this size, so no sample can be left out"
            )
        if count < 2:
            raise ValueError(
                f"replay({self.iteration}).rank_samples(): the batch has one sample, which cannot be left out"
            )
        return count

    # ---- running up to the iteration ------------------------------------------------------------------------------

    @contextmanager
    def _rehearsal(self) -> Iterator[None]:
        with rehearsal(self.engine, self._data, where=f"replay({self.iteration})"):
            yield

    def _continue(self, state: Mapping[str, Any], until: int) -> None:
        """Run from a state up to an iteration."""
        self.engine.snapshots.load_state_dict(state, goes_back=True)
        self.engine.run(self._data, max_iters=until, epoch_length=self._given_length, check=False)

    @property
    def _given_length(self) -> int | None:
        source = self.engine.feed.source
        return None if source is None else source.given_length

    def _make(self, state: Mapping[str, Any]) -> Made:
        """Run from a state up to the iteration, and note what it comes to."""
        with _Watch(self.engine, self.iteration) as watch:
            self._continue(state, self.iteration)
        return watch.made()

    def _place(self) -> tuple[int, int]:
        """The pass and the index of the batch; this also finds the position at which the pass began."""
        if self._position is None:
            with self._rehearsal():
                self._continue(self._state, self.iteration)
                (self._batch,) = self.engine.feed.places_of([self.iteration])
                self._position = self.engine.feed.current.state_dict()
        return self._batch


class _Watch:
    """Notes loss and gradients of one iteration, and the weights before its step."""

    def __init__(self, engine: Engine, iteration: int) -> None:
        self.engine = engine
        self.iteration = iteration
        self._losses: list[tuple[Tensor, float]] = []
        self._norm = math.nan
        self._gradients = self._weights = ""

    def __enter__(self) -> _Watch:
        connect, first = self.engine.connect, -(10**6)
        gradients, completed = Events.GRADIENTS_READY(once=self.iteration), Events.UPDATE_COMPLETED(once=self.iteration)
        if self.engine.group.shards is not None:
            # Of the step, and not of one of its shards; at UPDATE_COMPLETED, where the window stays open.
            self._attachments = [connect(event, self._note_step, rank=first) for event in (gradients, completed)]
            return self
        self._attachments = [
            connect(Events.LOSS_COMPUTED, self._note_loss, rank=10**6),
            connect(Events.BACKWARD_COMPLETED(once=self.iteration), self._note_gradients, rank=first),
            connect(gradients, self._note_gradients, rank=first),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for attachment in self._attachments:
            attachment.detach()

    def _note_loss(self, engine: Engine) -> None:
        update = engine.state.update
        if update.evaluation == 0 and (loss := update.loss) is not None:
            if update.window.held == 0:
                self._losses.clear()
            self._losses.append((loss.detach(), float(update.weight)))

    def _note_step(self, engine: Engine) -> None:
        update = engine.state.update
        if update.evaluation == 0 and update.window.held > 0 and (loss := update.loss) is not None:
            self._losses = [(loss.detach(), 1.0)]
            self._note_gradients(engine)

    def _note_gradients(self, engine: Engine) -> None:
        update = engine.state.update
        if update.evaluation > 0:
            return
        gradients = [p.grad for p in update.parameters if p.grad is not None]
        self._norm = joined(read_together(norm_parts(gradients))) if gradients else math.nan
        self._gradients = _digest(gradients)
        self._weights = _digest([p for root in engine.modules.values() for p in root.parameters()])

    def made(self) -> Made:
        values = read_together([loss for loss, _ in self._losses])
        numbers = [value * weight for value, (_, weight) in zip(values, self._losses, strict=True) if weight]
        loss = sum(numbers) / sum(weight for _, weight in self._losses) if numbers else math.nan
        return Made(loss, self._norm, self._gradients, self._weights)


@contextmanager
def _batches_of(
    engine: Engine, iteration: int, changes: Mapping[int, Callable[[Any], Any]] = MappingProxyType({})
) -> Iterator[list[Any]]:
    """See the batch of an iteration, or those of its shards, before anything else changes them, and change some by number."""
    seen: list[Any] = []

    def receive(engine: Engine) -> None:
        change = changes.get(len(seen))
        seen.append(engine.state.batch)
        if change is not None:
            engine.state.batch = change(engine.state.batch)

    attachment = engine.connect(Events.GET_BATCH_COMPLETED(once=iteration), receive, rank=-(10**6))
    try:
        yield seen
    finally:
        attachment.detach()


def _without(place: int, count: int, batch: Any) -> Any:
    """A batch of so many samples without one of them; they are along the first dimension of this length."""
    if isinstance(batch, Tensor | np.ndarray):
        if count not in batch.shape:
            return batch
        dim = batch.shape.index(count)
        if isinstance(batch, np.ndarray):
            return np.delete(batch, place, axis=dim)
        return torch.cat([batch.narrow(dim, 0, place), batch.narrow(dim, place + 1, count - place - 1)], dim)
    if isinstance(batch, list | tuple) and len(batch) == count and not tensors_in(batch):  # such as texts
        return type(batch)(one for i, one in enumerate(batch) if i != place)
    return rebuilt(batch, partial(_without, place, count))


def _influence(whole: Made, part: Made) -> float:
    pairs = (whole.loss, part.loss), (whole.gradient_norm, part.gradient_norm)
    if any(math.isfinite(b) and not math.isfinite(a) for a, b in pairs):
        return math.inf
    return sum(math.log(a) - math.log(b) for a, b in pairs if 0 < a < math.inf and 0 < b < math.inf)


def _digest(tensors: list[Tensor]) -> str:
    content = hashlib.sha256()
    for tensor in tensors:
        content.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


def _same(a: object, b: object) -> bool:
    return bool(a == b or (a != a and b != b))  # NaN is what differs from itself


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
