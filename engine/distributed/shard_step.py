"""The training step that consists of shards: the same bits, whichever processes compute them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..authoring.randomness import device_generators, reseed
from ..core.recomputation import NO_WEIGHT, Recomputation
from ..core.step import Step
from ..core.update import NO_GRADIENT, UpdateState
from ..core.window import ONE, ZERO, Kept
from .shard_rules import check_handlers
from .shards import Shards, VirtualShards, shard_seed
from .step import DistributedStep
from .sums import RankSum, TreeSum, broadcast

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["ShardedStep"]


class _ShardedRecomputation(Recomputation):
    """A `Recomputation` of shards: its gradients and its losses are those of all processes already."""

    step: ShardedStep

    def average(self, update: UpdateState, losses: list[Kept]) -> None:
        """As the step averages its gradients."""
        self.step.average(update)


class _Held(NamedTuple):
    """What the processes have to know of each other's shards: of most they know it.

    Attributes:
        held: how many losses gave gradients.
        weighted: whether any of these has a weight.
        reason: why the first shard that skips the step does so.
    """

    held: int
    weighted: bool = False
    reason: str | None = None

    @staticmethod
    def of_all(parts: Sequence[_Held]) -> _Held:
        """That of all processes together, with the reason of the first shard that has one."""
        reason = next((one.reason for one in parts if one.reason is not None), None)
        return _Held(sum(one.held for one in parts), any(one.weighted for one in parts), reason)


class _Part:
    """What this process has computed of a step.

    Attributes:
        sums: the sums over its shards: of the gradients, and of `_numbers`.
        held, weighted, reason: as in `_Held`.
    """

    def __init__(self, reason: str | None = None) -> None:
        self.sums = TreeSum()
        self.held = 0
        self.weighted = False
        self.reason = reason

    @property
    def what(self) -> _Held:
        return _Held(self.held, self.weighted, self.reason)


class _Buffers:
    """The buffers of a step: each shard begins with those of the step before, and those of the first shard remain.

    They are found by their names, since a forward may put other tensors in their places.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [module for module in modules if module._buffers]
        self._before = self._taken()
        self._after: list[dict[str, tuple[Tensor, Tensor]]] | None = None

    def begin_shard(self, shard: int) -> None:
        """Put back those of the step before."""
        if shard:
            self._put(self._before)

    def end_shard(self, shard: int) -> None:
        """Keep those of the first shard."""
        if shard == 0:
            self._after = self._taken()

    def end_step(self, *, several: bool) -> None:
        """Leave those of the first shard on all processes."""
        self._put(self._before if self._after is None else self._after)
        if several and self._modules:
            broadcast([buffer for module in self._modules for buffer in module._buffers.values() if buffer is not None])

    def _taken(self) -> list[dict[str, tuple[Tensor, Tensor]]]:
        """The buffers of each module by name, with copies."""
        return [
            {key: (buffer, buffer.clone()) for key, buffer in module._buffers.items() if buffer is not None}
            for module in self._modules
        ]

    def _put(self, taken: Sequence[dict[str, tuple[Tensor, Tensor]]]) -> None:
        for module, buffers in zip(self._modules, taken, strict=True):
            for key, (buffer, value) in buffers.items():
                module._buffers[key] = buffer.copy_(value)


class ShardedStep(DistributedStep):
    """A `Step` of shards: the gradients of each are computed by themselves, and added in a tree."""

    __slots__ = ("generators", "modules", "parameters", "shards")
    recomputation: ClassVar[type[Recomputation]] = _ShardedRecomputation

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        assert isinstance(engine.group.data, VirtualShards)
        check_handlers(engine)
        self.shards = engine.group.data
        self.modules = [part for root in engine.modules.values() for part in root.modules()] if engine.training else []
        self.parameters = [p for part in self.modules for p in part._parameters.values() if p is not None]
        self.generators = device_generators(p.device for p in engine.modules.parameters())

    # ---- gradients ------------------------------------------------------------------------------------------------

    def closes(self, update: UpdateState, iteration: int) -> bool:
        """As `Step` does it; a process that skips the step before its shards takes part in their sum."""
        closes = Step.closes(self, update, iteration)
        if update.skipped is not None:
            self.add_up(update, _Part(update.skipped), [p.grad for p in _trained(update)])
        return closes

    def compute_gradients(self, update: UpdateState, iteration: int, listened: bool) -> None:
        """As `Step` does it, for each shard of this process; then the gradients are those of all shards."""
        self.compute_shards(update, iteration, listened, self.compute_own(update, iteration, listened))

    def let_compute(self, function: Callable[..., None], update: UpdateState, iteration: int, listened: bool) -> None:
        """Let a handler compute the gradients of each shard."""
        compute = partial(function, self.engine, update, self.compute_own(update, iteration, listened))
        self.compute_shards(update, iteration, listened, compute)

    def compute_own(self, update: UpdateState, iteration: int, listened: bool) -> Callable[[], None]:
        """What computes the gradients of one shard."""
        return partial(Step.compute_gradients, self, update, iteration, listened)

    def compute_shards(self, update: UpdateState, iteration: int, listened: bool, compute: Callable[[], None]) -> None:
        """The gradients of all shards, added to those that the window holds."""
        window, parameters, part = update.window, _trained(update), _Part()
        versions = self.versions()
        held, extra_weight, earlier = window.held, window.extra_weight, [p.grad for p in parameters]
        with closing(self.each_shard(iteration, listened)) as shards:
            for there in shards:
                window.held, window.extra_weight = 0, ZERO
                for parameter in parameters:
                    parameter.grad = None
                if there and update.skipped is None:  # a receiver of GET_BATCH_COMPLETED may have skipped it
                    compute()
                part.sums.add(self.take(update, parameters, part))
                update.skipped = None  # the next shard begins as new
        if self.versions() != versions:
            self.refuse_changes(versions)
        window.held, window.extra_weight = held, extra_weight
        self.add_up(update, part, earlier)

    def versions(self) -> list[int]:
        """How often each parameter was changed in place."""
        return [parameter._version for parameter in self.parameters]

    def refuse_changes(self, versions: Sequence[int]) -> None:
        """Raise RuntimeError for a parameter that a forward has changed."""
        places = zip(self.parameters, self.versions(), versions, strict=True)
        changed = next(parameter for parameter, now, before in places if now != before)
        named = ((type(part).__name__, key, p) for part in self.modules for key, p in part._parameters.items())
        names = (f"the parameter {key!r} of a {kind}" for kind, key, p in named if p is changed)
        name = next(names, "a parameter that is no longer in its module")
        raise RuntimeError(
            f"the forward pass changes {name}, so the parameter would change once for each shard of this process "
            "instead of once per step; make the parameter a buffer, or change it at OPTIMIZER_STEP_COMPLETED"
        )

    def take(self, update: UpdateState, parameters: list[Tensor], part: _Part) -> list[Tensor] | None:
        """What a shard adds to the sums; None if it gave no gradient."""
        window = update.window
        part.reason = update.skipped if part.reason is None else part.reason
        if window.held == 0 or update.skipped is not None:
            return None
        part.held += window.held
        part.weighted |= window.extra_weight is not ZERO
        gradients = [p.grad for p in parameters if p.grad is not None and p.grad.layout is torch.strided]
        if len(gradients) < len(parameters):
            self.refuse(update, parameters)
        return [*gradients, _numbers(update)]

    def refuse(self, update: UpdateState, parameters: list[Tensor]) -> None:
        """Raise RuntimeError for a parameter without a dense gradient."""
        place, wanted = next(
            (i, p) for i, p in enumerate(parameters) if p.grad is None or p.grad.layout is not torch.strided
        )
        what = "no gradient" if wanted.grad is None else "a sparse gradient"
        named = (
            (f"{root}.{key}", parameter)
            for root, module in self.engine.modules.items()
            for key, parameter in module.named_parameters()
        )
        name = next((key for key, p in named if p is wanted), f"parameter {place} of update {update.name!r}")
        raise RuntimeError(
            f"shard {self.state.shard} computes {what} for {name}, but each shard must compute a dense gradient for "
            "each trained parameter. If the forward pass does not use a parameter, freeze it with "
            "requires_grad_(False), or train with DistributedDataParallel(find_unused_parameters=True)"
        )

    def add_up(self, update: UpdateState, part: _Part, earlier: list[Tensor | None]) -> None:
        """Make the sums of this process those of all, and add them to what the window held before, which is ``earlier``."""
        over_ranks = self.send(update, part) if self.processes.distributed else None
        parts = self.parts(part, over_ranks)
        of_all = _Held.of_all(parts)
        self.forget_shards(update, earlier)
        if of_all.reason is not None:
            update.skip(of_all.reason)
        if update.skipped is not None or of_all.held == 0:
            return
        sums = part.sums.total() if over_ranks is None else over_ranks.total([one.held > 0 for one in parts])
        assert sums is not None
        self.take_sums(update, sums, of_all)

    def take_sums(self, update: UpdateState, sums: list[Tensor], of_all: _Held) -> None:
        """Add the gradients of all shards to those that the window held before, and note their mean loss."""
        *gradients, numbers = sums
        for parameter, gradient in zip(_trained(update), gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        weight, share, loss, backward = numbers
        dtype = torch.promote_types(torch.float32, gradients[0].dtype)
        update.raw_loss, update.backward_loss = (loss / share).to(dtype), (backward / weight).to(dtype)
        update.window.held += of_all.held
        if of_all.weighted:
            update.window.extra_weight = update.window.extra_weight + (weight - of_all.held)

    def forget_shards(self, update: UpdateState, earlier: list[Tensor | None]) -> None:
        """Leave nothing of the last shard: a step with shards has neither an output nor a weight of its own."""
        update.output, update.weight, update.share = None, ONE, ONE
        update.raw_loss = update.backward_loss = update.skipped = None
        for parameter, gradient in zip(_trained(update), earlier, strict=True):
            parameter.grad = gradient

    def parts(self, part: _Part, over_ranks: RankSum | None) -> list[_Held]:
        """What the processes that compute shards have computed."""
        flagged = self.group.has_question() if over_ranks is None else over_ranks.flagged
        if flagged:
            return self.group.exchange(part.what)
        self.group.sync_skips = False
        return [part.what] if over_ranks is None else [_Held(self.shards.each)] * self.shards.readers

    def send(self, update: UpdateState, part: _Part) -> RankSum:
        """Send the sums of this process, and whether the others have to know more about it."""
        usual = part.what == _Held(len(self.shards.own))
        parameters = _trained(update)
        sums = part.sums.total() or [*map(torch.empty_like, parameters), _no_numbers(parameters)]
        return RankSum(sums, self.processes, flag=not usual or self.group.has_question())

    def backward(self, update: UpdateState) -> None:
        """The backward of one shard, of which nothing is sent."""
        Step.backward(self, update)

    def average(self, update: UpdateState) -> None:
        """Divide the gradients of the window once, by the weights of all of its shards."""
        if update.skipped is not None:
            return
        if update.window.held == 0:
            update.skip(NO_GRADIENT)
        elif not update.window.average(update.parameters):
            update.skip(NO_WEIGHT)

    # ---- shards ---------------------------------------------------------------------------------------------------

    def evaluate(self, update: UpdateState, batch: Any, iteration: int, listened: bool) -> None:
        """As `Step` does it, for each shard of this process."""
        with closing(self.each_shard(iteration, listened)) as shards:
            for there in shards:
                if there:
                    super().evaluate(update, self.state.batch, iteration, listened)
                update.skipped = None

    def each_shard(self, iteration: int, listened: bool) -> Generator[bool]:
        """Go through the shards of this process: each with its batch, its random numbers, and the buffers of the step before.

        Yields whether the shard has a batch. Afterwards, the batch in the state is the list of those of the shards.
        """
        state, shards = self.state, self.shards
        batches = state.batch if self.feed.has_data else Shards([None] * len(shards.own))
        if not isinstance(batches, Shards):
            raise TypeError(
                f"state.batch was set to a {type(batches).__name__} outside a shard's events, but in a step with "
                "shards, state.batch holds one batch for each shard; set state.batch at GET_BATCH_COMPLETED"
            )
        run, seed, buffers = self.engine.current_run, self.engine.seed, _Buffers(self.modules)
        place = 0 if run is None else run.loop.made
        try:
            for index, shard in enumerate(shards.own):
                shards.rank = state.shard = shard
                state.batch = batches[index]
                buffers.begin_shard(shard)
                reseed(shard_seed(seed, iteration, shard, place, state.update.evaluation), self.generators)
                if not batches.prepared and state.batch is not None:
                    self.prepare(iteration, listened)
                    batches[index] = state.batch
                state.update.share = self.feed.share()
                yield state.batch is not None or not self.feed.has_data
                buffers.end_shard(shard)
            batches.prepared = True
            reseed(shard_seed(seed, iteration, None, place, state.update.evaluation), self.generators)
        finally:
            shards.rank = state.shard = 0
            state.batch = batches if self.feed.has_data else None
        buffers.end_step(several=self.processes.distributed)

    def prepare(self, iteration: int, listened: bool) -> None:
        """Emit the events of a batch, where receivers move and transform it."""
        for signal in (self.signals.batch_started, self.signals.batch_completed):
            if listened and signal.due <= iteration:
                signal.emit(self.engine, iteration)


def _trained(update: UpdateState) -> list[Tensor]:
    return [parameter for parameter in update.parameters if parameter.requires_grad]


def _numbers(update: UpdateState) -> Tensor:
    """What is summed beside the gradients: weight, share, the share of the reported loss, the weight of that of the backward."""
    window, share = update.window, update.share
    weight = window.held + window.extra_weight
    assert update.raw_loss is not None
    loss, backward = update.raw_loss.detach(), update.backward_loss.detach()
    if loss.device.type == "cpu":
        numbers = float(weight), float(share), float(loss) * share, float(backward) * float(weight)
        return torch.tensor(numbers, dtype=torch.float64)
    read = [torch.as_tensor(one, dtype=torch.float64, device=loss.device) for one in (weight, share, loss, backward)]
    return torch.stack((read[0], read[1], read[2] * read[1], read[3] * read[0]))


def _no_numbers(parameters: Sequence[Tensor]) -> Tensor:
    return torch.zeros(4, dtype=torch.float64, device=parameters[0].device)
