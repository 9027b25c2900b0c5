"""Statistics of the weights, and how much a step changes them, as metrics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from signalfire import Engine, Events, Handler, Interval, Phase, UpdateState, on
from signalfire.authoring import Capture, check_bool, check_every, check_name, widened
from signalfire.distributed import is_sharded

from ._common.parameters import check_matches, check_patterns, longest_match, named_parameters
from ._common.updates import selected_updates

__all__ = ["ParameterStatistics"]

KINDS = ("weight_norm", "weight_mean", "weight_sd", "weight_zeros", "update_ratio")


class ParameterStatistics(Handler):
    """Measures the weights as metrics after every n-th optimizer step, and how much the step changed them.

    The metrics in ``state.metrics`` are "weight_norm" (the 2-norm), "weight_mean", "weight_sd" (the standard deviation),
    "weight_zeros" (the share of zeros), and "update_ratio", the norm of the change divided by the norm of the weights before
    it. A ratio of about 1e-3 is usual. With a far larger ratio, training is unstable; with a far smaller one, the model hardly
    learns. Each metric is measured for all weights together and for each parameter, as "weight_norm/0.weight" or, with several
    updates, as "weight_norm/generator/0.weight". The values are tensors on the device, so measuring does not synchronize. For
    gradients, use `GradientNorms`.

    Weights are copied before each measured step. Skipped steps are not measured.

    Args:
        every: Interval between two measurements, in optimizer steps of each update.
        per_parameter: Whether to also measure each parameter.
        parameters: Name patterns of the parameters to measure, such as ``"backbone"`` or ``["*.weight"]``; all by default.
        update: Name of the update to measure; all by default.

    Source:
        The ratio of updates to weights: Karpathy, "CS231n: Neural Networks Part 3", https://cs231n.github.io/neural-networks-3/.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.25)
        >>> engine = Engine(update, model=torch.nn.Linear(1, 1, bias=False))
        >>> _ = torch.nn.init.ones_(engine.model.weight)
        >>> _ = engine.attach(ParameterStatistics(every="1st"))
        >>> metrics = engine.run([(torch.ones(4, 1), torch.zeros(4, 1))], max_epochs=1).metrics
        >>> names = "weight_norm", "update_ratio", "update_ratio/weight"
        >>> [(name, metrics[name].item()) for name in names]
        [('weight_norm', 0.5), ('update_ratio', 0.5), ('update_ratio/weight', 0.5)]
    """

    capture = Capture.FORBIDDEN
    trains = True
    decides_alike = True

    def __init__(
        self,
        *,
        every: str | Interval = "100st",
        per_parameter: bool = True,
        parameters: str | Sequence[str] | None = None,
        update: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.every = check_every(self, every, units=["st"])
        self.per_parameter = check_bool(self, "per_parameter", per_parameter)
        self.parameters = check_patterns(self, "parameters", parameters)
        self.update = check_name(self, "update", update)
        self._names: dict[int, str] = {}
        self._before: dict[str, Tensor] = {}  # by name: the weights before the step under way

    def attached(self, engine: Engine) -> None:
        engine.find_update(self.update)

    def metric_names(self, engine: Engine) -> list[str]:
        return [f"{kind}{_suffix(engine, one)}" for one in selected_updates(engine, self.update) for kind in KINDS]

    @on(Events.STARTED, phase=Phase.PREPARE, reads=["modules"], writes=["metrics"])
    def announce_metrics(self, engine: Engine) -> None:
        """Find the parameters, and announce the names of the metrics."""
        named = named_parameters(engine)
        check_matches(f"{self.name!r}: parameters=", self.parameters or (), named)
        for name, parameter in named.items():
            if is_sharded(parameter):
                raise ValueError(
                    f"{self.name!r}: {name!r} is sharded over the ranks, but this handler does not support "
                    "sharded parameters"
                )
        self._names = {id(parameter): name for name, parameter in named.items()}
        engine.state.metrics.announce(self.name, self.metric_names(engine))

    @on(Events.OPTIMIZER_STEP_STARTED, phase=Phase.RECORD, reads=["step", "optimizer", "weights"], writes=[])
    def copy_weights(self, engine: Engine) -> None:
        """Copy the weights before a step that is to be measured."""
        update = engine.state.update
        self._before = {}
        if self.update in (None, update.name) and (update.steps + 1) % int(self.every.value) == 0:
            self._before = {name: parameter.detach().clone() for name, parameter in self._measured(update).items()}

    @on(Events.OPTIMIZER_STEP_COMPLETED, phase=Phase.RECORD, reads=["step", "optimizer", "weights"], writes=["metrics"])
    def measure(self, engine: Engine) -> None:
        """Measure the weights after the step."""
        update, before = engine.state.update, self._before
        if not before or update.skipped is not None:
            return
        self._before = {}
        after = {name: parameter.detach() for name, parameter in self._measured(update).items() if name in before}
        sums = {name: _sums(before[name], one) for name, one in after.items()}
        suffix, metrics = _suffix(engine, update), engine.state.metrics
        device = next(iter(sums.values())).device
        total = torch.stack([one.to(device) for one in sums.values()]).sum(0)
        groups = {suffix: total}
        if self.per_parameter:
            groups |= {f"{suffix}/{name}": one for name, one in sums.items()}
        for place, one in groups.items():
            for kind, value in zip(KINDS, _statistics(one), strict=True):
                metrics[f"{kind}{place}"] = value

    @on(Events.ENDED, reads=[], writes=[])
    def release(self, engine: Engine) -> None:
        """Release the references to weights."""
        self._names, self._before = {}, {}

    def _measured(self, update: UpdateState) -> dict[str, Tensor]:
        """The parameters of an update by name, or by their index in the optimizer if they are in none of the modules."""
        named = {self._names.get(id(one), str(place)): one for place, one in enumerate(update.parameters)}
        patterns = self.parameters
        return {name: one for name, one in named.items() if patterns is None or longest_match([name], patterns)}


def _sums(before: Tensor, after: Tensor) -> Tensor:
    """The number, sum, sum of squares and zeros of the weights after a step; the sums of squares of the change, and of before."""
    new, old = _real(after), _real(before)
    # torch.tensor(..., device=) would be a copy that the host waits for.
    count = torch.full((), new.numel(), dtype=new.dtype, device=new.device)
    return torch.stack([count, new.sum(), (new**2).sum(), (new == 0).sum(), ((new - old) ** 2).sum(), (old**2).sum()])


def _real(weights: Tensor) -> Tensor:
    """In double precision where the device has it; complex ones as pairs."""
    real = torch.view_as_real(weights) if weights.is_complex() else weights
    return widened(real)


def _statistics(sums: Tensor) -> list[Tensor]:
    count, total, squares, zeros, change, before = sums
    mean = total / count
    values = [
        squares.sqrt(),
        mean,
        (squares / count - mean**2).clamp(min=0).sqrt(),
        zeros / count,
        (change / before).sqrt(),
    ]
    return [value.float() for value in values]


def _suffix(engine: Engine, update: UpdateState) -> str:
    return "" if len(engine.updates) == 1 else f"/{update.name}"
