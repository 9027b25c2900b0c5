"""Gradient norms as metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from signalfire import AnyEvent, Engine, Events, Handler, Interval, Phase, UpdateState, on
from signalfire.checks import check_bool, check_number
from signalfire.interval import check_every, unfiltered

from ._common.parameters import gradients_of, named_parameters, norms
from ._common.ranks import MEASURE_GRADIENTS
from ._common.updates import selected_updates

__all__ = ["GradientNorms"]


class GradientNorms(Handler):
    """Measures the norm of the gradients that a step is made from: unscaled, averaged over the window, before any clip.

    What it measures is written to ``state.metrics`` as "gradient_norm", and for each parameter as "gradient_norm/0.weight"; of
    an engine with several updates, as "gradient_norm/generator" and "gradient_norm/generator/0.weight". The values are
    tensors on the gradients' device, so that measuring does not wait for the device; whoever shows or writes them does.
    A step that is skipped afterwards was measured all the same: its norm may be infinite or NaN.

    Args:
        norm_type: the p of the norm; ``math.inf`` for the largest absolute value.
        per_parameter: whether to measure each parameter's gradient, too.
        every: "10st" measures every tenth optimizer step of each update, "100it" the first step once another 100 iterations
            have begun; or GRADIENTS_READY with a filter, which is counted in iterations.
        update: the name of the update whose gradients are measured; all by default.

    Source:
        The total is what ``torch.nn.utils.clip_grad_norm_`` returns.

    Example:
        >>> GradientNorms(every="10st", per_parameter=True).every
        Interval(value=10, unit='st')
    """

    trains = True
    decides_alike = True

    def __init__(
        self,
        *,
        norm_type: float = 2.0,
        per_parameter: bool = False,
        every: str | Interval | AnyEvent = "1st",
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        interval = check_every(self, every)
        counted = isinstance(interval, Interval) and interval.unit in ("st", "it")
        if not counted and unfiltered(interval) != unfiltered(Events.GRADIENTS_READY):
            raise ValueError(
                f"GradientNorms(every={every!r}): gradients are there when a step is made: '10st', '100it', "
                "or Events.GRADIENTS_READY with a filter"
            )
        self.norm_type = float(check_number(self, "norm_type", norm_type, above=0, infinite=True))
        self.per_parameter = check_bool(self, "per_parameter", per_parameter)
        self.every = interval
        self.update = update
        self.measuring: AnyEvent = Events.GRADIENTS_READY if isinstance(interval, Interval) else interval
        self._reached: dict[str, int] = {}  # by update: the multiple of the interval in iterations that was measured
        self._names: dict[int, str] = {}
        self._announced: dict[str, list[Tensor]] = {}

    def attached(self, engine: Engine) -> None:
        if self.update is not None:
            engine.find_update(self.update)

    @on(Events.STARTED, phase=Phase.PREPARE)
    def announce(self, engine: Engine) -> None:
        """Say which metrics there will be."""
        self._names = {id(parameter): name for name, parameter in named_parameters(engine).items()}
        for update in selected_updates(engine, self.update):
            self._announce(engine, update)

    @on("measuring", phase=Phase.PREPARE, rank=MEASURE_GRADIENTS)
    def measure(self, engine: Engine) -> None:
        """Measure the gradients of the complete window."""
        update = engine.state.update
        if self.update not in (None, update.name) or update.evaluation > 0 or not self._due(engine, update):
            return
        parameters = update.parameters
        if parameters is not self._announced.get(update.name):  # the optimizer was given more of them
            self._announce(engine, update)
        measured = norms(gradients_of(update), self.norm_type)
        metrics = engine.state.metrics
        total = _metric(engine, update)
        if not measured:
            metrics[total] = torch.tensor(0.0)
            return
        device = measured[0].device
        metrics[total] = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in measured]), self.norm_type)
        if self.per_parameter:
            owners = [p for p in parameters if p.grad is not None]
            for parameter, norm in zip(owners, measured, strict=True):
                metrics[f"{total}/{self._name_of(parameter, update)}"] = norm

    def _due(self, engine: Engine, update: UpdateState) -> bool:
        if not isinstance(self.every, Interval):
            return True
        n = int(self.every.value)
        if self.every.unit == "st":
            return n == 1 or (update.steps + 1) % n == 0
        reached = engine.state.iteration // n
        if reached == self._reached.get(update.name, 0):
            return False
        self._reached[update.name] = reached
        return True

    def _announce(self, engine: Engine, update: UpdateState) -> None:
        self._announced[update.name] = update.parameters
        total = _metric(engine, update)
        names = [total]
        if self.per_parameter:
            names += [f"{total}/{self._name_of(parameter, update)}" for parameter in update.parameters]
        engine.state.metrics.announce(self.name, names)

    def _name_of(self, parameter: Tensor, update: UpdateState) -> str:
        """The parameter's name in its module, or its place in the optimizer if it belongs to none of the engine's."""
        name = self._names.get(id(parameter))
        return name or str(next(i for i, one in enumerate(update.parameters) if one is parameter))

    @on(Events.ENDED)
    def forget(self, engine: Engine) -> None:
        """Let go of the parameters."""
        self._names, self._announced = {}, {}

    def state_dict(self) -> dict[str, Any]:
        return {"reached": dict(sorted(self._reached.items()))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._reached = dict(state["reached"])


def _metric(engine: Engine, update: UpdateState) -> str:
    return "gradient_norm" if len(engine.updates) == 1 else f"gradient_norm/{update.name}"
