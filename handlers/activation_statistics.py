"""Activation statistics as metrics: mean, standard deviation, and dead units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Handler, Interval, Phase, on
from signalfire.authoring import Capture, check_every, check_int, event_of, widened

from ._common.hooks import check_matches, check_not_compiled, named_modules
from ._common.parameters import check_patterns, matches

__all__ = ["ActivationStatistics"]

KINDS = ("activation_mean", "activation_sd", "dead_units")


class ActivationStatistics(Handler):
    """Measures activations every n iterations: mean, standard deviation, and the share of dead units.

    The metrics in ``state.metrics`` are "activation_mean/features.2", "activation_sd/features.2" (the standard deviation) and
    "dead_units/features.2" for each measured module, and "dead_units" for all modules together. A unit is dead if it is zero
    for all measured samples at all positions. With few samples, a unit may be zero by chance; to measure more samples, increase
    ``window``.

    The hooks exist only during measured training iterations. The values are tensors on the device, so measuring does not
    synchronize. In distributed runs, each rank measures its own samples. If a step computes its gradients several times, only
    the first forward is measured.

    Args:
        every: Interval between two measurements, in iterations.
        window: Number of iterations that are measured together, at the end of each interval; at most ``every``.
        modules: Modules to measure: a path such as "encoder", which includes everything inside it, a pattern such as
            ``"*.relu"``, or several. By default, all activation functions that are modules, such as ``nn.ReLU``.
        unit_dim: Dimension of the outputs that holds the units, such as 1 for the channels of sequences (N, C, L). By default,
            dimension 1 for outputs with four or more dimensions, such as images, and the last dimension otherwise.

    Raises:
        ValueError: At the start of a run, if no module is found, or if the model is compiled, because compiled models skip
            hooks. During a forward, if a module's number of units varies.

    Source:
        The share of dead units: Maas, Hannun and Ng, "Rectifier Nonlinearities Improve Neural Network Acoustic Models" (2013).

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> layers = torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)
        >>> model = torch.nn.Sequential(*layers)
        >>> _ = torch.nn.init.zeros_(model[0].weight)
        >>> model[0].bias.data = torch.tensor([1.0, 1.0, 2.0, -8.0])
        >>> engine = Engine(update, model=model, seed=0)
        >>> _ = engine.attach(ActivationStatistics(every="1it"))
        >>> metrics = engine.run([(torch.ones(4, 2), torch.ones(4, 1))], max_epochs=1).metrics
        >>> # The ReLU gives 1, 1, 2 and 0.
        >>> {name: round(float(value), 2) for name, value in metrics.items()}
        {'activation_mean/1': 1.0, 'activation_sd/1': 0.71, 'dead_units/1': 0.25, 'dead_units': 0.25}
    """

    capture = Capture.FORBIDDEN
    trains = True

    def __init__(
        self,
        *,
        every: str | Interval = "100it",
        window: int = 1,
        modules: str | Sequence[str] | None = None,
        unit_dim: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.every = check_every(self, every, units=["it"])
        n = int(self.every.value)
        self.window = check_int(self, "window", window)
        if self.window > n:
            raise ValueError(
                f"ActivationStatistics(window={window!r}): the window is longer than every={str(self.every)!r}; reduce "
                "window="
            )
        self.modules = check_patterns(self, "modules", modules)
        if unit_dim is not None and (isinstance(unit_dim, bool) or not isinstance(unit_dim, int)):
            raise TypeError(f"ActivationStatistics(unit_dim={unit_dim!r}): expected an int, such as 1 or -1")
        self.unit_dim = unit_dim
        in_window = partial(_in_window, n, self.window)
        self.measure_event = Events.FORWARD_STARTED(every=n) if window == 1 else Events.FORWARD_STARTED(when=in_window)
        self.report_event = event_of(self.every)
        self._found: dict[str, nn.Module] = {}
        self._sums: dict[str, Tensor] = {}  # by path: number of values, their sum and their sum of squares
        self._alive: dict[str, Tensor] = {}  # by path: which units were not zero

    def metric_names(self, engine: Engine) -> list[str]:
        return ["dead_units", *(f"{kind}/{path}" for path in self._select(engine) for kind in KINDS)]

    @on(Events.STARTED, phase=Phase.PREPARE, reads=["modules"], writes=["metrics"])
    def find_modules(self, engine: Engine) -> None:
        """Find the modules, and announce the names of the metrics."""
        check_not_compiled(self, engine)
        self._found = self._select(engine)
        if not self._found:
            raise ValueError(
                f"{self.name!r}: the model has no activation modules such as nn.ReLU; choose the modules to measure "
                "with ActivationStatistics(modules=)"
            )
        # Each of several ranks measures its own batches, and a state is the same on all ranks.
        alike = not engine.processes.distributed
        engine.state.metrics.announce(self.name, self.metric_names(engine), saved=alike)

    @on("measure_event", phase=Phase.RECORD, reads=[], writes=["modules"])
    def hook(self, engine: Engine) -> None:
        """Put hooks on the modules for this forward."""
        engine.regions.enter(
            self._hooked()
        )  # receivers of this phase are not called where a step computes gradients again

    @on("report_event", phase=Phase.PREPARE, reads=["step"], writes=["metrics"])
    def report(self, engine: Engine) -> None:
        """Write what was measured, and begin the next window."""
        metrics = engine.state.metrics
        for path, (count, total, squares) in self._sums.items():
            mean = total / count
            metrics[f"activation_mean/{path}"] = mean.float()
            metrics[f"activation_sd/{path}"] = (squares / count - mean**2).clamp(min=0).sqrt().float()
            metrics[f"dead_units/{path}"] = (~self._alive[path]).float().mean()
        if self._alive:
            device = next(iter(self._alive.values())).device
            dead = torch.stack([(~one).sum().to(device) for one in self._alive.values()]).sum()
            metrics["dead_units"] = dead / sum(one.numel() for one in self._alive.values())
        self._sums, self._alive = {}, {}

    @on(Events.ENDED, reads=[], writes=[])
    def release(self, engine: Engine) -> None:
        """Release the references to the model."""
        self._found = {}

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "alive": dict(self._alive)} if self._sums else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums, self._alive = dict(state.get("sums", {})), dict(state.get("alive", {}))

    def __getstate__(self) -> dict[str, Any]:
        """A copy does not refer to the model."""
        return super().__getstate__() | {"_found": {}}

    def _select(self, engine: Engine) -> dict[str, nn.Module]:
        named = named_modules(engine)
        patterns = self.modules
        if patterns is None:
            return {path: part for path, part in named.items() if type(part) in ACTIVATIONS}
        check_matches(self, "modules", patterns, named)
        return {path: part for path, part in named.items() if any(matches(path, pattern) for pattern in patterns)}

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        with ExitStack() as handles:
            for path, module in self._found.items():
                handles.callback(module.register_forward_hook(partial(self._measure, path)).remove)
            yield

    @torch.no_grad()
    def _measure(self, path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        values = output[0] if isinstance(output, tuple) and output else output
        if (
            not module.training
            or not isinstance(values, Tensor)
            or not values.is_floating_point()
            or not values.numel()
        ):
            return
        values = values.detach()
        dim = (1 if values.dim() > 3 else -1) if self.unit_dim is None else self.unit_dim
        if values.dim() < 2:
            values = values.reshape(-1, 1)
        alive = (values != 0).movedim(dim, -1).flatten(0, -2).any(0)
        wide = widened(values)
        count = torch.full((), wide.numel(), dtype=wide.dtype, device=wide.device)
        sums = torch.stack([count, wide.sum(), wide.square().sum()])
        if path in self._sums:
            before = self._alive[path].to(alive.device)
            if before.shape != alive.shape:
                raise ValueError(
                    f"{self.name!r}: {path!r} has {len(before)} units in one output, but {len(alive)} units in a later "
                    "output; set the unit dimension with unit_dim=, or measure other modules"
                )
            sums, alive = sums + self._sums[path].to(sums.device), alive | before
        self._sums[path], self._alive[path] = sums, alive


def _in_window(every: int, window: int, engine: Engine) -> bool:
    """Whether an iteration is among the last ones of an interval."""
    return (engine.state.iteration - 1) % every >= every - window


ACTIVATIONS = frozenset(
    kind
    for kind in vars(nn.modules.activation).values()
    if isinstance(kind, type)
    and issubclass(kind, nn.Module)
    and kind not in (nn.Module, nn.MultiheadAttention, nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin)
)
