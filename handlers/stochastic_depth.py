"""Stochastic depth: skips residual blocks at random during training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.authoring import Capture, Claim, check_choice, check_function, check_name, check_number

from ._common.draws import Draws
from ._common.hooks import check_matches, check_not_compiled, named_modules
from ._common.parameters import check_patterns, matches
from ._common.ranks import DROP_PATHS
from ._common.updates import only_update

__all__ = ["StochasticDepth"]


class StochasticDepth(Handler):
    """Stochastic depth (drop path): skips residual blocks at random during training, separately for each sample.

    For a block ``x + f(x)``, the output becomes ``x + f(x) / (1 - rate)`` for the samples that keep it, and x for the others.
    The block needs no change: a hook replaces its output y by ``x + (y - x) / (1 - rate)``, where x is its first input. The
    block must be residual, with an output of the same shape as x. A dropped sample also skips an activation that follows the
    addition inside the block. The paper scales the blocks in evaluations; here, evaluations use the unchanged model, which has
    the same mean. Dropped samples are still computed, so no time is saved. Normalization layers inside see all samples, and a
    block that no sample keeps has zero gradients.

    The masks depend on the run's seed, the iteration, the forward within it and the rank, and stay the same when activation
    checkpointing recomputes a block. The hooks are on the blocks only during an update.

    Args:
        blocks: The residual blocks: a path such as "layers.3", a pattern such as "encoder.layers.*", or several. If matches are
            nested, the outermost module is used. Blocks are numbered in the model's order.
        rate: Largest probability that a sample drops a block.
        depth: How the drop rate depends on depth: "linear" gives the l-th of L blocks ``rate * l / L``, as in the paper;
            "uniform" gives all blocks the same.
        schedule: Function from the number of optimizer steps to a factor from 0 to 1 of all rates, such as
            ``lambda step: min(1, step / 1000)``; by default 1.
        update: Name of the update that drops blocks and whose steps count; required if the engine has several.

    Raises:
        ValueError: At the start of a run, if a pattern matches no module, or if the model is compiled, because compiled models
            skip hooks; in the forward, for a block whose output and input differ in shape.

    Source:
        Huang, Sun, Liu, Sedra and Weinberger, "Deep Networks with Stochastic Depth" (ECCV 2016), section 3; the scale while
        training is that of timm's ``DropPath`` and of torchvision's ``stochastic_depth`` with mode "row".

    Example:
        >>> import torch
        >>> from signalfire import Engine, Events, Update
        >>> class Block(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return x + super().forward(x)
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.Sequential(Block(1, 1, bias=False)), seed=0)
        >>> _ = torch.nn.init.ones_(engine.model[0].weight)
        >>> _ = engine.attach(StochasticDepth("0", 0.5))
        >>> @engine.on(Events.FORWARD_COMPLETED)
        ... def show(engine):  # 1 for samples that drop the block, 1 + 1 / 0.5 for others
        ...     print(engine.state.update.output.flatten().tolist())
        >>> _ = engine.run([(torch.ones(6, 1), torch.ones(6, 1))], max_epochs=1)
        [3.0, 1.0, 3.0, 1.0, 1.0, 3.0]
    """

    by_shard = True
    capture = Capture.FORBIDDEN
    trains = True

    def __init__(
        self,
        blocks: str | Sequence[str],
        rate: float = 0.1,
        *,
        depth: Literal["linear", "uniform"] = "linear",
        schedule: Callable[[int], float] | None = None,
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.rate = check_number(self, "rate", rate, above=0, below=1)
        self.depth = check_choice(self, "depth", depth, ("linear", "uniform"))
        self.schedule = check_function(self, "schedule", schedule, "steps", optional=True)
        self.update = check_name(self, "update", update)
        self.blocks = check_patterns(self, "blocks", blocks) or []
        if not self.blocks:
            raise TypeError("StochasticDepth(blocks=None): expected a block path, or a pattern such as 'layers.*'")
        self._found: dict[str, nn.Module] = {}
        self._draws = Draws()
        self._uncalled: set[str] = set()  # blocks that no forward of this run has called

    def attached(self, engine: Engine) -> None:
        update = only_update(engine, self.update, by=self, does="blocks= applies to")
        engine.overrides.claim(Claim("which blocks are dropped"), by=self, target=f"in update {update.name!r}")

    def rates(self, step: int) -> dict[str, float]:
        """The drop rate of each block after a number of optimizer steps, by path; empty before the first run.

        Raises:
            ValueError: If ``schedule`` returns no number from 0 to 1.
        """
        factor = 1.0 if self.schedule is None else self.schedule(step)
        if not isinstance(factor, int | float) or not 0 <= factor <= 1:
            raise ValueError(f"{self.name!r}: schedule({step}) returned {factor!r}; expected a factor from 0 to 1")
        count = len(self._found)
        return {
            path: factor * self.rate * (place / count if self.depth == "linear" else 1)
            for place, path in enumerate(self._found, 1)
        }

    @on(Events.STARTED, phase=Phase.PREPARE, reads=["modules"], writes=[])
    def find_blocks(self, engine: Engine) -> None:
        """Find the blocks."""
        check_not_compiled(self, engine)
        named = named_modules(engine)
        check_matches(self, "blocks", self.blocks, named)
        self._found = {}
        for path, part in named.items():  # a module comes before those inside of it
            inside = any(path.startswith(f"{outer}.") for outer in self._found)
            if not inside and any(matches(path, pattern) for pattern in self.blocks):
                self._found[path] = part
        self._uncalled = set(self._found)
        self._draws.restart()

    @on(Events.UPDATE_STARTED, rank=DROP_PATHS, reads=["step"], writes=["modules"])
    def hook(self, engine: Engine) -> None:
        """Put hooks on the blocks until the update is complete, because the backward may recompute them."""
        update = engine.state.update
        if self.update in (None, update.name):
            engine.regions.enter(self._hooked(self.rates(update.steps)))

    @on(Events.FORWARD_STARTED, phase=Phase.PREPARE, reads=[], writes=[])
    def begin_forward(self, engine: Engine) -> None:
        """Use new masks for this forward."""
        self._draws.begin_forward(self, engine)

    @on(Events.UPDATE_COMPLETED, reads=[], writes=[])
    def check_called(self, engine: Engine) -> None:
        """Raise an error if the first forward has not called a block."""
        if len(engine.updates) > 1 and (self.update is None or len(self._uncalled) < len(self._found)):
            return  # the others belong to other updates
        if self._uncalled and self._draws.begun and self.update in (None, engine.state.update.name):
            path = next(path for path in self._found if path in self._uncalled)
            raise ValueError(
                f"{self.name!r}: the forward did not call block {path!r}, so the block is never dropped; leave this "
                "block out of blocks=, or call the block itself instead of its forward()"
            )

    @on(Events.ENDED, reads=[], writes=[])
    def release(self, engine: Engine) -> None:
        """Release the references to the model; the paths stay, for `rates`."""
        self._found = dict.fromkeys(self._found, _NOTHING)

    def __getstate__(self) -> dict[str, Any]:
        """A copy does not refer to the model."""
        return super().__getstate__() | {"_found": dict.fromkeys(self._found, _NOTHING), "_uncalled": set()}

    @contextmanager
    def _hooked(self, rates: dict[str, float]) -> Iterator[None]:
        with ExitStack() as handles:
            for place, (path, block) in enumerate(self._found.items()):
                if rates[path] > 0 or self._uncalled:
                    hook = _Drop(self, path, place, 1 - rates[path])
                    handles.callback(block.register_forward_hook(hook, with_kwargs=True).remove)
            yield

    def mask(self, inputs: Tensor, place: int, keep: float) -> Tensor:
        """Which samples keep a block, in a shape that broadcasts with its input."""
        drawn = torch.rand(len(inputs), device=inputs.device, generator=self._draws.generator(inputs.device, place))
        return (drawn < keep).view(-1, *[1] * (inputs.dim() - 1))


_NOTHING = nn.Module()


class _Drop:
    """The hook of one block."""

    def __init__(self, handler: StochasticDepth, path: str, place: int, keep: float) -> None:
        self.handler = handler
        self.path = path
        self.place = place
        self.keep = keep

    def __call__(self, block: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        self.handler._uncalled.discard(self.path)
        if not block.training or self.keep == 1:
            return None
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        first = output[0] if isinstance(output, tuple) and output else output
        if not tensors or not isinstance(first, Tensor) or first.shape != tensors[0].shape or first.dim() == 0:
            shapes = [
                tuple(one.shape) if isinstance(one, Tensor) else type(one).__name__ for one in (*tensors[:1], first)
            ]
            raise ValueError(
                f"{self.handler.name!r}: block {self.path!r} is not residual, because its output shape differs from "
                f"its input shape ({' to '.join(map(str, shapes))}); leave this block out of blocks="
            )
        inputs = tensors[0]
        kept = self.handler.mask(inputs, self.place, self.keep)
        result = torch.where(kept, inputs + (first - inputs) / self.keep, inputs)
        return (result, *output[1:]) if isinstance(output, tuple) else result
