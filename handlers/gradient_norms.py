"""Gradient norms as metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from signalfire import AnyEvent, Engine, Events, Handler, Interval, Phase, UpdateState, on
from signalfire.authoring import Capture, check_bool, check_every, check_name, check_number, unfiltered

from ._common.parameters import gradients_of, named_parameters, norms
from ._common.ranks import MEASURE_GRADIENTS
from ._common.updates import selected_updates

__all__ = ["GradientNorms"]


class GradientNorms(Handler):
    """Measures gradient norms as metrics: of all gradients, of each layer, or of each parameter, before clipping.

    Norms are measured for each optimizer step, on unscaled gradients averaged over the accumulation window. The metrics in
    ``state.metrics`` are "gradient_norm" (the total), "gradient_norm/0" (the norm of a layer) and "gradient_norm/0.weight" (the
    norm of a parameter); with several updates, "gradient_norm/generator" and "gradient_norm/generator/0.weight". Loggers write
    the norms with the iteration that measured them. The values are tensors on the device, so measuring does not synchronize;
    displaying or logging them does. Steps that are skipped afterwards are also measured, so norms may be infinite or NaN.

    Args:
        norm_type: p of the p-norm; ``math.inf`` for the maximum norm.
        per_parameter: Whether to also measure the gradient of each parameter.
        per_layer: Whether to also measure the joint gradient of each module's own parameters, such as those of each linear layer,
            without those of modules inside it. Parameters of the model itself form the layer "(model)".
        every: Interval between measurements: "10st" measures every tenth optimizer step of each update; "100it" measures the
            first step after every 100 iterations. Alternatively, pass GRADIENTS_READY with a filter, which counts iterations.
        update: Name of the update to measure; all by default.

    Source:
        The total is what ``torch.nn.utils.clip_grad_norm_`` returns.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> model = torch.nn.Linear(2, 1)
        >>> _ = torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
        >>> engine = Engine(update, model=model, seed=0)
        >>> _ = engine.attach(GradientNorms(per_parameter=True, per_layer=True))
        >>> data = [(torch.tensor([[3.0, 4.0]]), torch.tensor([[-1.0]]))]
        >>> metrics = engine.run(data, max_epochs=1).metrics
        >>> # The gradients are (6, 8) and 2.
        >>> {name: round(float(value), 2) for name, value in metrics.items()}
        {'gradient_norm': 10.2, 'gradient_norm/weight': 10.0, 'gradient_norm/bias': 2.0, 'gradient_norm/(model)': 10.2}
    """

    capture = Capture.INSIDE
    trains = True
    decides_alike = True

    def __init__(
        self,
        *,
        norm_type: float = 2.0,
        per_parameter: bool = False,
        per_layer: bool = False,
        every: str | Interval | AnyEvent = "1step",
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        interval = check_every(self, every)
        counted = isinstance(interval, Interval) and interval.unit in ("st", "it")
        if not counted and unfiltered(interval) != unfiltered(Events.GRADIENTS_READY):
            raise ValueError(
                f"GradientNorms(every={every!r}): gradients exist only when the optimizer steps; expected an "
                "interval such as '10st' or '100it', or Events.GRADIENTS_READY with a filter"
            )
        self.norm_type = float(check_number(self, "norm_type", norm_type, above=0, infinite=True))
        self.per_parameter = check_bool(self, "per_parameter", per_parameter)
        self.per_layer = check_bool(self, "per_layer", per_layer)
        self.every = interval
        self.update = check_name(self, "update", update)
        self.measure_event: AnyEvent = Events.GRADIENTS_READY if isinstance(interval, Interval) else interval
        self._reached: dict[str, int] = {}  # by update: the last measured multiple of an interval in iterations
        self._names: dict[int, str] = {}
        self._announced: dict[str, list[Tensor]] = {}

    def attached(self, engine: Engine) -> None:
        engine.find_update(self.update)

    def metric_names(self, engine: Engine) -> list[str]:
        return [_metric(engine, update) for update in selected_updates(engine, self.update)]

    @on(Events.STARTED, phase=Phase.PREPARE, reads=["modules", "optimizer"], writes=["metrics"])
    def announce_metrics(self, engine: Engine) -> None:
        """Announce the names of the metrics."""
        self._names = {id(parameter): name for name, parameter in named_parameters(engine).items()}
        for update in selected_updates(engine, self.update):
            self._announce(engine, update)

    @on(
        "measure_event",
        phase=Phase.PREPARE,
        rank=MEASURE_GRADIENTS,
        reads=["gradients", "optimizer", "step"],
        writes=["metrics"],
    )
    def measure(self, engine: Engine) -> None:
        """Measure the gradients of the accumulation window."""
        update = engine.state.update
        if self.update not in (None, update.name) or update.evaluation > 0 or not self._due(engine, update):
            return
        parameters = update.parameters
        if parameters is not self._announced.get(update.name):  # parameters were added to the optimizer
            self._announce(engine, update)
        measured = norms(gradients_of(update), self.norm_type)
        metrics = engine.state.metrics
        total = _metric(engine, update)
        if not measured:
            metrics[total] = torch.tensor(0.0)
            return
        device = measured[0].device
        metrics[total] = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in measured]), self.norm_type)
        if self.per_parameter or self.per_layer:
            self._measure_parts(engine, update, total, measured)

    def _measure_parts(self, engine: Engine, update: UpdateState, total: str, measured: list[Tensor]) -> None:
        """Write the norms of parameters and of layers, from those of the parameters with gradients."""
        metrics, names = engine.state.metrics, self._names
        layers: dict[str, list[Tensor]] = defaultdict(list)
        owners = [p for p in update.parameters if p.grad is not None]
        for parameter, norm in zip(owners, measured, strict=True):
            if self.per_parameter:
                metrics[f"{total}/{names.get(id(parameter)) or self._name_of(parameter, update)}"] = norm
            if self.per_layer:
                layers[self._layer_of(parameter, update)].append(norm)
        for layer, parts in layers.items():
            joined = torch.stack([part.to(parts[0].device) for part in parts])
            metrics[f"{total}/{layer}"] = torch.linalg.vector_norm(joined, self.norm_type)

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
        if self.per_layer:
            layers = dict.fromkeys(self._layer_of(parameter, update) for parameter in update.parameters)
            names += [f"{total}/{layer}" for layer in layers]
        engine.state.metrics.announce(self.name, names)

    def _name_of(self, parameter: Tensor, update: UpdateState) -> str:
        """The parameter's name in the engine's modules, or its index in the optimizer if it is in none of them."""
        name = self._names.get(id(parameter))
        return name or str(next(i for i, one in enumerate(update.parameters) if one is parameter))

    def _layer_of(self, parameter: Tensor, update: UpdateState) -> str:
        """The path of the module that has the parameter; a parameter outside the modules is a separate layer."""
        name = self._names.get(id(parameter))
        return self._name_of(parameter, update) if name is None else name.rpartition(".")[0] or "(model)"

    @on(Events.ENDED, reads=[], writes=[])
    def release(self, engine: Engine) -> None:
        """Release the references to parameters."""
        self._names, self._announced = {}, {}

    def state_dict(self) -> dict[str, Any]:
        return {"reached": dict(sorted(self._reached.items()))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._reached = dict(state["reached"])


def _metric(engine: Engine, update: UpdateState) -> str:
    return "gradient_norm" if len(engine.updates) == 1 else f"gradient_norm/{update.name}"
