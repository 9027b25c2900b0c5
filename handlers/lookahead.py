"""Lookahead: slow weights that follow the optimizer's, and replace them every k steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from signalfire import Engine, Events, Finding, Handler, Phase, on
from signalfire.authoring import Claim, check_bool, check_int, check_name, check_number, steps_to_come
from signalfire.distributed import local_part, reshard, spread_like
from signalfire.findings import finding
from signalfire.models.modules import bare_name
from signalfire.runs.interrupts import without_interrupts

from ._common.claims import EVALUATED_WEIGHTS
from ._common.ranks import LOOK_AHEAD, TAKE_LOADED
from ._common.updates import selected_updates

__all__ = ["Lookahead"]


class Lookahead(Handler):
    """Lookahead optimizer: every k steps, moves slow weights toward the current ones and continues from them.

    The slow weights start as a copy of the weights before the first step. After each k-th step
    ``slow = slow + alpha * (weights - slow)``, and then ``weights = slow``. Skipped steps do not count. The optimizer's state,
    such as momentum, is unchanged. Weight averages are updated after the synchronization.

    Evaluations, exports and checkpoints use the optimizer's weights, which equal the slow ones after every k-th step. With
    ``evaluate=True``, evaluations and exports always use the slow weights, as the paper recommends; the weights are restored
    afterwards bit for bit. Slow weights of float16 and bfloat16 parameters are kept in float32.

    Detaching leaves the weights unchanged. If the handler missed steps because it was disabled, or if different weights are
    loaded, the slow weights restart from the current weights.

    Args:
        k: Number of optimizer steps between two synchronizations.
        alpha: Fraction of the distance that the slow weights move, above 0 and at most 1.
        evaluate: Whether evaluations and exports use the slow weights; only one handler can replace the weights there.
        update: Name of the update with slow weights; by default all, each with its own.

    Source:
        Zhang, Lucas, Hinton and Ba, "Lookahead Optimizer: k steps forward, 1 step back" (NeurIPS 2019), Algorithm 1. Some
        implementations copy the slow weights only at the first synchronization, which then does nothing.

    Example:
        >>> from signalfire import Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> trainer = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> _ = trainer.attach(Lookahead(k=2, alpha=0.5))
        >>> before = trainer.model.bias.item()
        >>> _ = trainer.run([(torch.zeros(4, 2), torch.ones(4, 1))], max_steps=2)
        >>> # Halfway between 1 and 0.8 ** 2.
        >>> round((1 - trainer.model.bias.item()) / (1 - before), 2)
        0.82
    """

    trains = True

    def __init__(
        self,
        k: int = 5,
        alpha: float = 0.5,
        *,
        evaluate: bool = False,
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.k = check_int(self, "k", k)
        self.alpha = check_number(self, "alpha", alpha, above=0, most=1)
        self.evaluate = check_bool(self, "evaluate", evaluate)
        self.update = check_name(self, "update", update)
        self.swap_event = Events.EVALUATION_STARTED | Events.CHECKPOINT_SAVING if evaluate else None
        self._slow: dict[str, _Slow] = {}  # by update
        self._swapped = False

    def attached(self, engine: Engine) -> None:
        for update in selected_updates(engine, self.update):
            engine.overrides.claim(Claim("the slow weights"), by=self, target=f"of update {update.name!r}")
        if self.evaluate:
            try:
                engine.overrides.claim(EVALUATED_WEIGHTS, by=self)
            except ValueError as error:
                raise ValueError(f"{error}, or set evaluate=False for one of them") from None

    def findings(self, engine: Engine) -> Iterator[Finding]:
        """Report a run that ends before the first synchronization."""
        for update in selected_updates(engine, self.update):
            to_come = steps_to_come(engine, update)
            if to_come is not None and 0 < update.steps + to_come < self.k:
                yield finding(
                    "C18",
                    f"{self.name!r} synchronizes every {self.k} optimizer steps, but the run takes only "
                    f"{update.steps + to_come} steps",
                    "use a smaller k, train longer, or continue the training in a later run()",
                    [self.name],
                )

    @on(
        Events.STARTED | Events.CHECKPOINT_LOADED,
        reads=["modules", "optimizer", "step", "weights"],
        writes=[],
    )
    def bind(self, engine: Engine) -> None:
        """Find the parameters; slow weights that are new or have missed steps start as copies of the weights."""
        if engine.snapshots.has_loaded_state:
            return  # what the slow weights would begin with is still to be put in place
        for update in selected_updates(engine, self.update):
            slow = self._slow.setdefault(update.name, _Slow())
            slow.bind(_named(engine, update.parameters), update.steps)

    @on(
        Events.OPTIMIZER_STEP_COMPLETED,
        phase=Phase.PREPARE,
        rank=LOOK_AHEAD,
        reads=["optimizer", "step", "weights"],
        writes=["weights"],
    )
    def synchronize(self, engine: Engine) -> None:
        """After every k-th step that was not skipped, move the slow weights and continue from them."""
        update = engine.state.update
        if self.update not in (None, update.name) or update.skipped is not None:
            return
        slow = self._slow[update.name]
        slow.seen += 1
        if slow.seen != update.steps or len(slow.fast) != len(
            update.parameters
        ):  # steps were missed, or a group was added
            slow.bind(_named(engine, update.parameters), update.steps)
        if slow.seen - slow.begun >= self.k:
            slow.synchronize(self.alpha)

    @on("swap_event", phase=Phase.PREPARE, reads=["modules", "optimizer", "weights"], writes=["weights"])
    def swap(self, engine: Engine) -> None:
        """Swap the slow weights in until the evaluation or export is complete."""
        engine.regions.enter(self.in_place())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the slow weights in place of the weights inside the ``with`` block, even with ``evaluate=False``.

        Does nothing before the first run, or after different weights were loaded.

        Raises:
            RuntimeError: If the handler is not attached.
        """
        engine = self.engine
        if engine is None:
            raise RuntimeError(f"{self.name!r}: in_place() needs the modules of an engine; attach the handler first")
        if not engine.running and (loaded := engine.snapshots.loaded_state_of(self.name)) is not None:
            self.load_state_dict(loaded)  # before the run that puts it in place, too
        if self._swapped:
            yield
            return
        roots = list(engine.modules.values())
        reshard(roots)
        pairs: list[tuple[Tensor, Tensor]] = []
        for update in selected_updates(engine, self.update):
            named = _of_modules(engine) | _named(engine, update.parameters)
            slow = self._slow.get(update.name, _Slow())
            pairs += [(named[name], value) for name, value in slow.values.items() if name in named]
        kept = [local_part(parameter.detach()).clone() for parameter, _ in pairs]
        self._swapped = True
        try:
            for parameter, value in pairs:  # through `data`: a pending backward finds the original values again
                local_part(parameter.data).copy_(local_part(spread_like(value, parameter)))
            yield
        finally:
            with without_interrupts():
                reshard(roots)
                for (parameter, _), value in zip(pairs, kept, strict=True):
                    local_part(parameter.data).copy_(value)
                self._swapped = False

    @on(Events.WEIGHTS_LOADED, rank=TAKE_LOADED, reads=["modules", "optimizer", "step", "weights"], writes=[])
    def begin_anew(self, engine: Engine) -> None:
        """Restart from the loaded weights."""
        self._slow = {}
        if engine.running:
            self.bind(engine)

    @on(Events.ENDED, reads=[], writes=[])
    def release(self, engine: Engine) -> None:
        """Drop the references to the parameters."""
        for slow in self._slow.values():
            slow.fast = {}

    def parameter_copies(self) -> Mapping[str, Tensor]:
        return {name: value for slow in self._slow.values() for name, value in slow.values.items()}

    def evaluated_in(self, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """The weights that evaluations used when a state was saved, by name."""
        parts = state.values() if self.evaluate else ()
        return {name: value for part in parts for name, value in part["weights"].items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            name: {"begun": slow.begun, "seen": slow.seen, "weights": dict(slow.values)}
            for name, slow in self._slow.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._slow = {name: _Slow(one["begun"], one["seen"], one["weights"]) for name, one in state.items()}
        if self.engine is not None and self.engine.running:
            for update in selected_updates(self.engine, self.update):
                if update.name in self._slow:
                    slow = self._slow[update.name]
                    slow.bind(_named(self.engine, update.parameters), slow.seen)

    def __getstate__(self) -> dict[str, Any]:
        """A copy is not bound to the parameters."""
        slow = {name: _Slow(one.begun, one.seen, one.values) for name, one in self._slow.items()}
        return super().__getstate__() | {"_slow": slow, "_swapped": False}


class _Slow:
    """The slow weights of one update.

    Attributes:
        begun: The update's optimizer steps when the slow weights were last equal to the weights.
        seen: The steps after the last one that was counted.
        values: The slow weights, by module and name of the parameter.
        fast: The parameters by the same names, within a run.
    """

    def __init__(self, begun: int = 0, seen: int = 0, values: Mapping[str, Tensor] | None = None) -> None:
        self.begun, self.seen = begun, seen
        self.values = {name: value.detach().clone() for name, value in (values or {}).items()}
        self.fast: dict[str, Tensor] = {}

    @torch.no_grad()
    def bind(self, fast: dict[str, Tensor], steps: int) -> None:
        """Take these parameters; after a gap in the steps, and for parameters that are new, begin with their values."""
        if steps != self.seen or not self.values:
            self.begun = self.seen = steps
            self.values = {}
        self.fast = fast
        self.values = {
            name: spread_like(self.values[name].to(parameter.device), parameter)
            if name in self.values
            else _wide(parameter.detach()).clone()
            for name, parameter in fast.items()
        }

    @torch.no_grad()
    def synchronize(self, alpha: float) -> None:
        """Move the slow weights, and copy them into the parameters."""
        fast = [local_part(parameter) for parameter in self.fast.values()]
        slow = [local_part(value) for value in self.values.values()]
        torch._foreach_lerp_(slow, [_wide(one) for one in fast], alpha)
        torch._foreach_copy_(fast, slow)
        self.begun = self.seen


def _of_modules(engine: Engine) -> dict[str, Tensor]:
    return {
        bare_name(name): parameter
        for root, module in engine.modules.items()
        for name, parameter in module.named_parameters(prefix=root)
    }


def _named(engine: Engine, parameters: list[Tensor]) -> dict[str, Tensor]:
    """The parameters by module and name; those outside of all modules by their place in the optimizer."""
    names = {id(parameter): name for name, parameter in _of_modules(engine).items()}
    return {names.get(id(one), f"parameter {place}"): one for place, one in enumerate(parameters)}


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
