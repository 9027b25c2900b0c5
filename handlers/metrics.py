"""Metrics over an epoch: averages weighted by batch size, accuracy, torchmetrics metrics and custom functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.batches import samples_in
from signalfire.checks import check_number
from signalfire.state import as_number

from ._common.updates import only_update

__all__ = ["Accuracy", "Average", "Metric", "Metrics"]

Inputs = Callable[[Engine], tuple[Any, ...]]


@runtime_checkable
class Metric(Protocol):
    """The interface of torchmetrics metrics: any object with these three methods."""

    def reset(self) -> None: ...
    def update(self, *inputs: Any) -> None: ...
    def compute(self) -> Any: ...


class Average:
    """The mean of a quantity over all samples: batches are weighted by their size, so a short last batch is exact.

    The values of the batches are kept as tensors on their device, and summed in double precision when the mean is computed: a
    running mean in tensor arithmetic would cost several microseconds per iteration.

    Args:
        function: Function called as ``function(output, target)`` that returns the batch's mean as a scalar tensor or number.
            By default, the update's loss is averaged.

    Example:
        >>> average = Average()
        >>> average.add(torch.tensor(1.0), 30)
        >>> average.add(torch.tensor(4.0), 10)
        >>> average.compute()
        1.75
    """

    _FOLD_AT = 1024  # the number of pending values at which they are added to the sum

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        if function is not None and not callable(function):
            raise TypeError(f"Average({function!r}): expected a function (output, target) -> mean of the batch")
        self.function = function
        self.reset()

    def reset(self) -> None:
        self._clear_pending()
        self._sum = 0.0
        self._weight = 0.0

    def _clear_pending(self) -> None:
        self._values: list[Any] = []
        self._weights: list[float] = []
        self._room = self._FOLD_AT

    def add(self, value: Any, weight: float) -> None:
        """Add a batch's mean, weighted by the batch's size."""
        self._values.append(value.detach() if isinstance(value, Tensor) else value)
        self._weights.append(weight)
        self._room -= 1
        if self._room <= 0:
            self._fold()

    def update(self, *inputs: Any) -> None:
        assert self.function is not None
        self.add(self.function(*inputs), samples_in(inputs))

    def compute(self) -> float:
        """The mean so far; NaN without any sample."""
        self._fold()
        return self._sum / self._weight if self._weight else float("nan")

    def _pending(self) -> list[float]:
        values = self._values
        if not any(isinstance(value, Tensor) for value in values):
            return [float(value) for value in values]
        # `map` with C functions is faster than a loop.
        uniform = set(map(type, values)) == {Tensor} and len(set(map(attrgetter("dtype"), values))) == 1
        if not uniform or set(map(Tensor.dim, values)) != {0}:
            values = [torch.as_tensor(value).double() for value in values]
            if wrong := [tuple(value.shape) for value in values if value.numel() != 1 or value.dim() > 1]:
                raise ValueError(f"Average: a batch's value has shape {max(wrong)}; expected a scalar: take its mean")
            values = [value.reshape(()) for value in values]
        numbers: list[float] = torch.stack(values).double().tolist()
        return numbers

    def _fold(self) -> None:
        # Values are added one by one, so that the sum does not depend on where the folds occur.
        total, weights = self._sum, self._weight
        for value, weight in zip(self._pending(), self._weights, strict=True):
            total += value * weight
            weights += weight
        self._sum, self._weight = total, weights
        self._clear_pending()

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Replace the sums with those of all ranks, given as one `state_dict` per rank."""
        self.reset()
        for state in states:
            self._sum += state["sum"]
            self._weight += state["weight"]

    def state_dict(self) -> dict[str, Any]:
        self._fold()
        return {"sum": self._sum, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        self._sum, self._weight = state["sum"], state["weight"]


class Accuracy:
    """The fraction of samples whose predicted class is the target.

    Takes scores of shape (N, C, ...), of which the largest is the prediction, or predicted classes of the target's shape, and
    integer targets of shape (N, ...). With ``threshold``, the scores have the target's shape, and scores greater than the
    threshold predict class 1.

    Example:
        >>> accuracy = Accuracy()
        >>> accuracy.update(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
        >>> accuracy.compute()
        0.5
    """

    def __init__(self, *, threshold: float | None = None) -> None:
        self.threshold = None if threshold is None else check_number(self, "threshold", threshold)
        self.reset()

    def reset(self) -> None:
        self._correct: list[Tensor] = []
        self._hits = 0
        self._count = 0

    def update(self, output: Tensor, target: Tensor) -> None:
        predicted = output
        if self.threshold is not None:
            predicted = output > self.threshold
        elif output.dim() == target.dim() + 1 and output.shape[1] > 1:
            predicted = output.argmax(1)
        elif output.is_floating_point():
            raise ValueError(
                f"Accuracy: scores of shape {tuple(output.shape)} for targets of shape {tuple(target.shape)} do not "
                "determine the predicted class; give scores of shape (N, C, ...) for targets (N, ...), "
                "or threshold= for one score per target"
            )
        if predicted.shape != target.shape:
            raise ValueError(
                f"Accuracy: an output of shape {tuple(output.shape)} does not match targets of shape "
                f"{tuple(target.shape)}; expected scores (N, C, ...) for targets (N, ...)"
            )
        self._correct.append((predicted == target).sum())
        self._count += target.numel()
        if len(self._correct) >= Average._FOLD_AT:
            self._fold()

    def compute(self) -> float:
        """The fraction of correct samples so far; NaN without any sample."""
        self._fold()
        return self._hits / self._count if self._count else float("nan")

    def _fold(self) -> None:
        if self._correct:
            self._hits += int(torch.stack(self._correct).sum())
            self._correct = []

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Replace the counts with those of all ranks, given as one `state_dict` per rank."""
        self.reset()
        self._hits = sum(state["hits"] for state in states)
        self._count = sum(state["count"] for state in states)

    def state_dict(self) -> dict[str, Any]:
        self._fold()
        return {"hits": self._hits, "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        self._hits, self._count = state["hits"], state["count"]


class Metrics(Handler):
    """Updates metrics with every batch, and writes the epoch's values to ``state.metrics`` when the epoch completes.

    Attach it to an evaluator for validation metrics, or to a trainer for training metrics. During an epoch, the values so
    far are available in ``state.metrics.running``.

    Args:
        metrics: Metrics by name: an `Average`, an `Accuracy`, any torchmetrics metric, or a function
            ``(output, target) -> mean of the batch``, which is averaged over the samples.
        inputs: Function called as ``inputs(engine)`` that returns the arguments of the metrics; by default the output and the
            batch's second element. Needed if the output is a dict, or if the targets are elsewhere.
        update: Name of the update that is measured; required if there are several.
        named: The same as ``metrics``, as keyword arguments.

    Example:
        >>> Metrics(loss=Average(), accuracy=Accuracy()).names
        ['loss', 'accuracy']
    """

    def __init__(
        self,
        metrics: Mapping[str, Any] | None = None,
        *,
        inputs: Inputs | None = None,
        update: str | None = None,
        name: str | None = None,
        **named: Any,
    ) -> None:
        super().__init__(name=name)
        if metrics is not None and not isinstance(metrics, Mapping | torch.nn.ModuleDict):
            kind = type(metrics).__name__
            raise TypeError(f"Metrics({kind}()): a metric needs a name; write Metrics({kind.lower()}={kind}())")
        self.metrics: dict[str, Any] = {**(metrics or {}), **named}
        if not self.metrics:
            raise ValueError("Metrics(): give at least one metric, such as accuracy=Accuracy()")
        for key, metric in self.metrics.items():
            if isinstance(metric, type):
                raise TypeError(f"Metrics({key}={metric.__name__}): expected an instance; write {metric.__name__}()")
            if not isinstance(metric, Metric):
                if not callable(metric):
                    raise TypeError(
                        f"Metrics({key}={metric!r}): expected an object with reset, update and compute, such as a "
                        "torchmetrics metric, or a function (output, target) -> mean of the batch"
                    )
                self.metrics[key] = Average(metric)
        self.inputs = inputs or _output_and_target
        self.update = update
        # Not separated with `in`: `==` of two torchmetrics metrics returns a metric, which is truthy.
        self._of_loss = [m for m in self.metrics.values() if _is_of_loss(m)]
        self._of_output = [m for m in self.metrics.values() if not _is_of_loss(m)]

    @property
    def names(self) -> list[str]:
        """The names of the values in ``state.metrics``."""
        names = []
        for key, metric in self.metrics.items():
            collection = isinstance(metric, torch.nn.ModuleDict)  # of torchmetrics
            parts = metric.keys() if collection else None
            names += [key] if parts is None else [f"{key}/{part}" for part in parts]
        return names

    def attached(self, engine: Engine) -> None:
        update = only_update(engine, self.update, by=self, does="is measured")
        engine.state.metrics.announce(self.name, self.names)
        if self._of_output and update.forward is None:
            raise ValueError(
                f"{self.name!r}: {', '.join(self.names)} need the forward's output, but update {update.name!r} "
                "is a single function without one; build the Update with forward= and loss="
            )
        if self._of_loss and update.forward is not None and update.loss_function is None:
            raise ValueError(
                f"{self.name!r}: Average() without a function averages the loss, but update {update.name!r} has no loss; "
                "give it a function"
            )

    @on(Events.STARTED, phase=Phase.PREPARE, reads=["processes"], writes=[])
    def check_mergeable(self, engine: Engine) -> None:
        """Raise an error for a metric that would cover only one rank of a distributed run."""
        for key, metric in self.metrics.items() if engine.processes.distributed else ():
            if not _torchmetrics(metric) and not callable(getattr(metric, "merge", None)):
                raise ValueError(
                    f"{self.name!r}: the metric {key!r} ({type(metric).__name__}) cannot be merged over "
                    f"{engine.processes.world_size} processes; give it a method merge(states), which loads a list of the "
                    "state_dict() of every rank, or use a torchmetrics metric, which synchronises itself"
                )

    def detached(self, engine: Engine) -> None:
        for key in self.metrics:
            engine.state.metrics.running.pop(key, None)

    @on(Events.EPOCH_STARTED, phase=Phase.PREPARE, reads=[], writes=[])
    def reset_metrics(self, engine: Engine) -> None:
        """Reset the metrics at the start of an epoch."""
        for metric in self.metrics.values():
            metric.reset()

    @on(Events.STARTED, phase=Phase.RECORD, reads=[], writes=["metrics"])
    def publish_running(self, engine: Engine) -> None:
        """Make the values so far available to displays."""
        for key, metric in self.metrics.items():
            engine.state.metrics.running[key] = partial(_current, metric)

    @on(Events.UPDATE_COMPLETED, phase=Phase.RECORD, reads=["batch", "output", "loss"], writes=[])
    def update_metrics(self, engine: Engine) -> None:
        """Update the metrics with this batch after its last backward; a batch in time chunks counts once, as a whole."""
        update = engine.state.update
        if self.update not in (None, update.name) or update.more:
            return
        if self._of_loss and update.raw_loss is not None:
            size = samples_in(engine.state.batch)
            for metric in self._of_loss:
                metric.add(update.raw_loss, size)
        if self._of_output and update.output is not None:
            self._update_with_output(engine)

    def _update_with_output(self, engine: Engine) -> None:
        with torch.no_grad():
            inputs = self.inputs(engine)
            inputs = tuple(item.detach() if isinstance(item, Tensor) else item for item in inputs)
            for metric in self._of_output:
                metric.update(*inputs)

    @on(Events.EPOCH_COMPLETED, phase=Phase.PREPARE, reads=["processes"], writes=["metrics"])
    def publish(self, engine: Engine) -> None:
        """Write the epoch's values to ``state.metrics``, for monitors and loggers."""
        for key, metric in self.metrics.items():
            if engine.processes.distributed and not _torchmetrics(metric):
                metric.merge(engine.processes.gather(metric.state_dict()))
            value = metric.compute()
            if isinstance(value, Mapping):  # a torchmetrics MetricCollection
                for part, one in value.items():
                    engine.state.metrics[f"{key}/{part}"] = one
            else:
                engine.state.metrics[key] = value

    def state_dict(self) -> dict[str, Any]:
        return {key: _state_of(metric) for key, metric in self.metrics.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != set(self.metrics):
            raise ValueError(f"{self.name!r} has the metrics {sorted(self.metrics)}, but the state has {sorted(state)}")
        for key, metric in self.metrics.items():
            _load_state_of(metric, state[key])


def _is_of_loss(metric: Any) -> TypeGuard[Average]:
    return isinstance(metric, Average) and metric.function is None


def _output_and_target(engine: Engine) -> tuple[Any, ...]:
    return engine.state.update.output, engine.state.batch[1]


def _current(metric: Any) -> float | None:
    """The value so far on this rank, without synchronising: the other ranks may not call it, and would block this one."""
    parts = [part for part in _torchmetrics(metric).values() if getattr(part, "_to_sync", False)]
    for part in parts:
        part._to_sync = False
    try:
        return as_number(metric.compute())
    finally:
        for part in parts:
            part._to_sync = True
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                part._computed = None  # otherwise it would be reused as the synchronised value


def _torchmetrics(metric: Any) -> dict[str, Any]:
    """A torchmetrics metric and those inside it (in a collection or wrapper), by path."""
    if not isinstance(metric, torch.nn.Module):
        return {}
    return {path: part for path, part in metric.named_modules() if hasattr(part, "_update_count")}


def _own_values(metric: Any) -> dict[str, Any]:
    """The state that a wrapper (MinMaxMetric, Running) keeps in plain attributes."""
    omitted = {"_computed", "_forward_cache", "_update_count", *metric.metric_state}
    return {k: v for k, v in vars(metric).items() if k not in omitted and isinstance(v, int | float | Tensor)}


def _state_of(metric: Any) -> dict[str, Any]:
    # torchmetrics' own state_dict contains only states marked as persistent.
    if parts := _torchmetrics(metric):
        return {
            path: {"state": dict(m.metric_state), "count": m._update_count, "own": _own_values(m)}
            for path, m in parts.items()
        }
    return metric.state_dict() if hasattr(metric, "state_dict") else {}


def _load_state_of(metric: Any, state: Mapping[str, Any]) -> None:
    if parts := _torchmetrics(metric):
        metric.reset()
        for path, part in parts.items():
            for key, value in state[path]["state"].items():
                setattr(part, key, value)
            part._update_count = state[path]["count"]
            vars(part).update(state[path].get("own", {}))
    elif hasattr(metric, "load_state_dict"):
        metric.load_state_dict(state)
