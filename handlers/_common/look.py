"""One check of a run by `Guards`: its observations, and the receivers that it connects meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from signalfire import Engine, Events, Phase, UpdateState
from signalfire.core.connection import Connection
from signalfire.core.signals import Signal
from signalfire.findings.dropout import ActiveDropout, is_compiled
from signalfire.updates.optimizers import needs_closure, optimizers_of

from .watching import statistics_of, trained_elsewhere

__all__ = ["LOOKS_AT", "Look", "looking"]

LOOKS_AT = (
    "batch", "output", "loss", "gradients", "trainable", "weights", "buffers", "modes", "modules", "optimizer", "step", "window",
    "bounds", "processes",
)  # fmt: skip
"""The values that a check of a training iteration reads."""


def looking(engine: Engine, owner: str, errors: Collection[str]) -> Callable[..., Any]:
    """`Reports.look`, with a warning if a check fails, because it then cannot find the codes that were to end the run.

    Args:
        engine: The engine.
        owner: Name of the handler.
        errors: The codes that were to end the run.
    """

    def look(function: Callable[..., Any], *arguments: Any) -> Any:
        found = engine.findings.look(function, *arguments)
        if errors and engine.findings.has_failed(function):
            engine.findings.report(
                "W09",
                f"{function.__qualname__} raised an error and was skipped, so the mistakes that this check looks "
                f"for may go undetected despite error={sorted(errors)}",
                "please report the error, which engine.findings.of_run() contains, and describe your data and model",
                owner,
                severity="warning",
            )
        return found

    return look


class Look:
    """One check: its observations, and the receivers that it has connected.

    Attributes:
        iteration: where the check began.
        pending: the updates whose step it has not seen yet.
        seen: by update, the loss, what distinguishes the batch, and the name of the inputs if they contain NaN.
        dropout: whether an evaluation computes dropout; statistics: the values that nothing should change.
        trained: what was trained in an update that was seen.
        in_eval: a part that computed with gradients in eval mode, but was not in it when the run began.
        begun: the updates whose window is empty, until their first backward.
    """

    def __init__(self, engine: Engine, owner: str) -> None:
        self.iteration = engine.state.iteration
        self.pending = {update.name for update in engine.updates}
        self.seen: dict[str, tuple[Tensor, Any, str]] = {}
        self.dropout = ActiveDropout()
        self.statistics = statistics_of(engine)
        self.trained: set[Tensor] = set()
        self.in_eval = ""
        self.begun: set[str] = set()
        self._engine = engine
        self._owner = owner
        self._connections: list[tuple[Signal, Connection]] = []
        self.largest: dict[str, float] = {}
        self._samples: dict[str, tuple[Tensor, int, complex]] = {}
        self._unchanged: set[str] = set()
        self._steps = {update.name: update.steps for update in engine.updates}
        self._calls = dict.fromkeys(self._steps, 0)
        self._made: dict[tuple[str, int], int] = {}  # by update and optimizer, the steps; the open ones below
        self._open: dict[tuple[str, int], int] = {}
        self._hooks: list[Any] = []
        self._incoming: dict[Tensor, Tensor] = {}
        self._compared: dict[Tensor, bool] = {}  # whether the gradient was added to another
        self._elsewhere = {p: p._version for p in trained_elsewhere(engine)} if engine.training else {}
        if engine.training:
            self._hook(engine)

    def _hook(self, engine: Engine) -> None:
        self.begun = {one.name for one in engine.updates if one.window.filled == one.window.held == 0}
        for update in engine.updates:
            for place, one in enumerate(optimizers_of(update.optimizer)):
                key = update.name, place
                self._hooks.append(one.register_step_pre_hook(partial(self._enter, key)))
                self._hooks.append(one.register_step_post_hook(partial(self._count, key)))
        for p in self._elsewhere:
            safely = engine.findings.look
            self._hooks.append(p.register_hook(partial(safely, self._note, p)))
            self._hooks.append(p.register_post_accumulate_grad_hook(partial(safely, self._compare)))

    def _enter(self, key: tuple[str, int], *of_the_step: Any) -> None:
        self._open[key] = self._open.get(key, 0) + 1

    def _count(self, key: tuple[str, int], *of_the_step: Any) -> None:
        """Count a step, in which that of a base class may be another one."""
        self._open[key] -= 1
        if self._open[key] == 0:
            self._made[key] = self._made.get(key, 0) + 1
            self._calls[key[0]] = max(self._calls.get(key[0], 0), self._made[key])

    def _note(self, parameter: Tensor, gradient: Tensor) -> None:
        self._incoming[parameter] = gradient.detach().clone()

    def _compare(self, parameter: Tensor) -> None:
        newest = self._incoming.get(parameter)
        if newest is None or parameter.grad is None:
            return
        if torch.equal(newest, parameter.grad):  # cleared before, perhaps after the backward of another model's loss
            self._compared[parameter] = False
        else:
            self._compared.setdefault(parameter, True)

    def watch(self, name: str, parts: Collection[nn.Module]) -> None:
        """Watch in which mode these parts compute, except where hooks are compiled."""

        def note(part: nn.Module, inputs: Any) -> None:
            if part in parts and not part.training and torch.is_grad_enabled():
                self.in_eval = name

        if parts and not is_compiled(self._engine):
            self._hooks.append(register_module_forward_pre_hook(note))

    def counted(self, engine: Engine) -> list[tuple[UpdateState, int]]:
        """The updates whose optimizer made more steps in this iteration than the engine; each is returned once."""
        calls, self._calls = self._calls, {}
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        found = [(update, calls.get(update.name, 0)) for update in engine.updates]
        own = {update.name: update.steps - self._steps[update.name] for update in engine.updates}
        return [
            (update, made)
            for update, made in found
            if made > sum(own[one.name] for one in engine.updates if one.optimizer is update.optimizer)
        ]

    def stepped(self) -> set[Tensor]:
        """What changed in this iteration, though no optimizer of the engine holds it."""
        return {p for p, version in self._elsewhere.items() if p._version > version}

    def left_over(self, stepped_before: set[Tensor]) -> list[Tensor]:
        """What was used for a step in this iteration and at the look before, with a gradient to which the new one was added."""
        added = [p for p, is_added in self._compared.items() if is_added]
        return [p for p in added if p in stepped_before and p in self.stepped()]

    def sample(self, update: UpdateState) -> None:
        """Note the value of the weight with the largest gradient, in groups whose learning rate is not 0."""
        best: tuple[float, Tensor] | None = None
        for p in _moving(update):
            assert p.grad is not None
            largest = float(p.grad.detach().abs().max())
            if math.isfinite(largest) and largest > (best[0] if best else 0):
                best = largest, p
        if best is not None:
            p = best[1]
            assert p.grad is not None
            place = int(p.grad.detach().abs().argmax())
            self.largest[update.name] = best[0]
            self._samples[update.name] = p, place, p.detach().reshape(-1)[place].item()

    def compare(self, engine: Engine) -> None:
        """Compare the sampled weight right after the step, before anything else changes it."""
        update = engine.state.update
        if update.name in self._samples:
            p, place, before = self._samples.pop(update.name)
            if place < p.numel() and bool(p.detach().reshape(-1)[place].item() == before):
                self._unchanged.add(update.name)

    def unchanged(self, update: UpdateState) -> bool:
        """Whether the step left the sampled weight unchanged; not of optimizers like L-BFGS, which end at an optimum."""
        at_optimum = update.optimizer is not None and needs_closure(update.optimizer)
        found = update.name in self._unchanged and not at_optimum
        self._unchanged.discard(update.name)
        return found

    def connect(
        self, event: Events, receiver: Callable[[Engine], None], phase: Phase = Phase.RECORD, rank: int = 0
    ) -> None:
        """Connect a receiver for the duration of the check."""
        connection = Connection(receiver, phase, rank, None, self._owner)
        signal = self._engine.signal(event)
        signal.add(connection)
        self._connections.append((signal, connection))

    def close(self) -> None:
        """Disconnect everything."""
        for signal, connection in self._connections:
            signal.remove(connection)
        for hook in self._hooks:
            hook.remove()
        self._connections, self._hooks = [], []


class Beginning:
    """Calls a receiver as each of the first iterations starts after a training was resumed or joined, in one run or several.

    Args:
        left: The number of these iterations that are left.
    """

    def __init__(self, left: int) -> None:
        self._left = left
        self._connections: list[tuple[Signal, Connection]] = []

    def open(self, engine: Engine, owner: str, receiver: Callable[[Engine], None], several: int) -> None:
        """Connect the receiver if iterations are left, or for several after a state was loaded."""
        if engine.snapshots.has_loaded_state:
            self._left = several
        if engine.training and self._left > 0:
            signal = engine.signal(Events.ITERATION_STARTED)
            connection = Connection(partial(self._call, receiver), Phase.RECORD, 0, None, owner)
            signal.add(connection)
            self._connections.append((signal, connection))

    def _call(self, receiver: Callable[[Engine], None], engine: Engine) -> None:
        self._left -= 1
        if self._left == 0:
            self.close()
        receiver(engine)

    def close(self) -> None:
        """Disconnect the receiver."""
        for signal, connection in self._connections:
            signal.remove(connection)
        self._connections = []


def _moving(update: UpdateState) -> list[Tensor]:
    """The parameters with a dense gradient in groups whose learning rate is not 0."""
    groups: list[Any] = [] if update.optimizer is None else update.optimizer.param_groups
    own = [p for group in groups if group.get("lr", 1) for p in group["params"] if type(p.grad) is Tensor]
    return [p for p in own if p.grad.layout is torch.strided and p.grad.numel()]
