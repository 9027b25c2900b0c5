"""`Metrics` measures each batch and writes the values of an epoch; `handlers.metrics` and `Validation` use it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from signalfire import Attachment, Engine, Events, Handler, Phase, on
from signalfire.authoring import check_function, check_name, samples_in, tensors_in
from signalfire.authoring.batches import hidden_length
from signalfire.core.state import as_number
from signalfire.distributed import Processes
from signalfire.distributed.shards import OF_SHARDS, Shards, VirtualShards
from signalfire.findings import Finding
from signalfire.findings.dropout import is_compiled
from signalfire.findings.loss_graph import Problem
from signalfire.findings.metric_calls import MetricCalls

from .ignored import all_ignored, ignored_class
from .measures import Accuracy, Average, in_float32
from .metric_names import Metric, copied, is_of_loss, named_metrics, output_and_target, plain
from .ranks import PUBLISH
from .torchmetrics import keeps_inputs, load_state_of, merge, merging_nothing, state_of, synced, torchmetrics_in
from .updates import is_balanced, loss_of, only_update, selected_updates, sums_of_loss, takes_logits, targets_in

__all__ = ["Metric", "Metrics", "is_of_loss"]

Inputs = Callable[[Engine], tuple[Any, ...] | Mapping[str, Any]]


class Metrics(Handler):
    """Updates metrics with every batch, and writes the epoch's values to ``state.metrics`` when the epoch completes.

    Attach the handler to an evaluator for validation metrics, or to a trainer for training metrics. During an epoch, the values
    so far are available in ``state.metrics.running``.

    Metrics get half-precision tensors as float32 copies, so rounding does not decide which checkpoint is best. A metric with a
    single value is stored as a Python number.

    For a score that is not a mean over batches, such as F1, pass an object with the methods ``reset``, ``update`` and
    ``compute``. With several processes, it also needs ``state_dict`` and ``merge``, which receives the states of all ranks.

    Args:
        metrics: Metrics by name: an `Average`, an `Accuracy`, any torchmetrics metric, or a function ``(output, target) -> mean
            of the batch``, which is averaged over the samples. If a function ``scores`` returns several values by name, they are
            written as "scores/f1" and so on. Each metric's ``higher_is_better`` gives monitors its direction.
        inputs: Function called as ``inputs(engine)`` that returns the arguments of the metrics, a tuple or a mapping of keyword
            arguments. By default, the arguments are everything that the forward returns and the batch's second element.
        update: Name of the update that is measured; required if there are several.
        named: The same as ``metrics``, as keyword arguments.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.cross_entropy, torch.optim.SGD, lr=0.1)
        >>> evaluator = Engine(update.evaluation(), model=torch.nn.Identity())
        >>> _ = evaluator.attach(Metrics(loss=Average(), accuracy=Accuracy()))
        >>> first = torch.zeros(3, 2), torch.tensor([0, 0, 0])  # scores and classes
        >>> metrics = evaluator.run([first, (torch.zeros(1, 2), torch.tensor([1]))]).metrics
        >>> round(metrics["loss"], 3), metrics["accuracy"]
        (0.693, 0.75)
        >>> class F1:  # not a mean over batches
        ...     higher_is_better = True
        ...
        ...     def __init__(self):
        ...         self.reset()
        ...
        ...     def reset(self):
        ...         self.hits = self.wrong = 0
        ...
        ...     def update(self, output, target):  # of two classes
        ...         self.hits += int((output.argmax(1) & target).sum())
        ...         self.wrong += int((output.argmax(1) != target).sum())
        ...
        ...     def compute(self):
        ...         return 2 * self.hits / (2 * self.hits + self.wrong)
        ...
        ...     def state_dict(self):
        ...         return {"hits": self.hits, "wrong": self.wrong}
        ...
        ...     def merge(self, states):
        ...         self.hits = sum(state["hits"] for state in states)
        ...         self.wrong = sum(state["wrong"] for state in states)
        >>> _ = evaluator.attach(Metrics(f1=F1(), name="scores"))
        >>> scores = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
        >>> data = [(scores, torch.tensor([1, 0, 0])), (scores[:1], torch.tensor([1]))]
        >>> evaluator.run(data).metrics["f1"]
        0.8
    """

    by_shard = True

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
        self.metrics = named_metrics(metrics, named)
        check_function(self, "inputs", inputs, "engine", optional=True)
        self.inputs = inputs or output_and_target
        self.update = check_name(self, "update", update)
        self._placed = False  # whether torchmetrics metrics are on the output's device
        self._counted = False  # whether the samples of a batch were found to be countable
        self._length: int | None = None  # of the tensors of the batch before, if its samples were not
        self._ignored: int | None = None  # the class that the update's loss ignores, if its targets are classes
        self._chances: dict[tuple[Any, ...], _Chance] = {}  # by metric, data and run
        self._looked: set[Average] = set()  # whose functions were looked at
        self._averaging: dict[str, tuple[Problem, Any]] = {}  # by metric, what to report once its value has changed
        self._batches = 0  # of this epoch
        self._of_shard: dict[int, dict[str, Any]] = {}  # the metrics of each shard, where a step has several
        self._by_shard: Attachment | None = None
        self._own_shards: range | None = None  # which this process computes
        self._shared: dict[int, Any] = {}  # what the metrics of all shards refer to: the modules of the engine
        self._use(self.metrics)
        self._widens = any(not isinstance(m, Accuracy) for m in self._of_output)

    def _use(self, metrics: Mapping[str, Any]) -> None:
        """Measure with these metrics from now on."""
        # Not separated with `in`: `==` of two torchmetrics metrics returns a metric, which is truthy.
        self._of_loss = [m for m in metrics.values() if is_of_loss(m)]
        self._of_output = [m for m in metrics.values() if not is_of_loss(m)]
        self._keeping = {id(m) for m in self._of_output if keeps_inputs(m)}

    def findings(self, engine: Engine) -> Iterator[Finding]:
        """Report a mean of losses that are sums."""
        for update in selected_updates(engine, self.update) if self._of_loss else ():
            yield from sums_of_loss(self, update)

    @property
    def names(self) -> list[str]:
        """The names of the values in ``state.metrics``."""
        names = []
        for key, metric in self.metrics.items():
            collection = isinstance(metric, torch.nn.ModuleDict)  # of torchmetrics
            parts = metric.keys() if collection else None
            names += [key] if parts is None else [f"{key}/{part}" for part in parts]
        return names

    @property
    def directions(self) -> dict[str, Literal["min", "max"]]:
        """The values whose direction is known: "max" if greater is better, "min" if smaller is."""
        found: dict[str, Literal["min", "max"]] = {}
        for key, metric in self.metrics.items():
            parts = metric.items() if isinstance(metric, torch.nn.ModuleDict) else None
            for name, one in [(key, metric)] if parts is None else [(f"{key}/{part}", one) for part, one in parts]:
                if isinstance(higher := getattr(one, "higher_is_better", None), bool):
                    found[name] = "max" if higher else "min"
        return found

    def attached(self, engine: Engine) -> None:
        update = only_update(engine, self.update, by=self, does="is measured")
        engine.state.metrics.announce(self.name, self.names, self.directions)
        if self._of_output and update.forward is None:
            raise ValueError(
                f"{self.name!r}: the forward's output is needed for {', '.join(self.names)}, but update "
                f"{update.name!r} is a single function without an output; build the Update with forward= and loss="
            )
        if self._of_loss and update.forward is not None and update.loss_function is None:
            raise ValueError(
                f"{self.name!r}: Average() without a function averages the loss, but update {update.name!r} has no "
                "loss; pass a function to Average()"
            )

    @on(Events.STARTED, phase=Phase.PREPARE, reads=["modules"], writes=[])
    def check_mergeable(self, engine: Engine) -> None:
        """Raise an error for a metric that would cover only one rank of a distributed run."""
        for key, metric in self.metrics.items() if engine.group.data.distributed else ():
            if not torchmetrics_in(metric) and not callable(getattr(metric, "merge", None)):
                raise ValueError(
                    f"{self.name!r}: the metric {key!r} ({type(metric).__name__}) cannot be merged across "
                    f"{engine.group.data.world_size} processes; add a merge(states) method that combines the "
                    "state_dict() of all ranks, or use a torchmetrics metric, which synchronizes itself"
                )

        self._own_shards = None if engine.group.shards is None else engine.group.shards.own
        if self._own_shards is not None:
            self._measure_shards(engine)

    def _measure_shards(self, engine: Engine) -> None:
        """With shards, measure each one, because at UPDATE_COMPLETED the batch and the output of a shard are gone."""
        for key, metric in self.metrics.items():
            if getattr(metric, "carries_over", False):
                raise ValueError(
                    f"{self.name!r}: the metric {key!r} ({type(metric).__name__}) depends on the order of the batches, "
                    "which sharding does not preserve; use Average()"
                )
        self._shared = {id(part): part for root in engine.modules.values() for part in root.modules()}
        if engine.training:
            update = engine.find_update(self.update)
            event = Events.LOSS_COMPUTED if update.forward is None or update.loss_function else Events.FORWARD_COMPLETED
            self._by_shard = engine.connect(event, self.update_metrics, phase=Phase.RECORD)

    @on(Events.STARTED, phase=Phase.PREPARE, reads=[], writes=[])
    def claim_metrics(self, engine: Engine) -> None:
        """Raise an error for a metric object that a handler of a different running engine also updates."""
        self._placed, self._counted, self._length = False, False, None
        for key, metric in self.metrics.items():
            other = _in_use.setdefault(id(metric), self)
            if other is not self:
                raise ValueError(
                    f"{self.name!r}: the metric {key!r} is a {type(metric).__name__} object that another running "
                    "Metrics handler already uses, so each handler would reset the other's counts; build a separate "
                    "object for each handler"
                )

    @on(Events.ENDED, reads=[], writes=[])
    def release_metrics(self, engine: Engine) -> None:
        """Release the metric objects for other runs."""
        if self._by_shard is not None:
            self._by_shard.detach()
            self._by_shard = None
        self._shared = {}
        for metric in self.metrics.values():
            if _in_use.get(id(metric)) is self:
                del _in_use[id(metric)]

    def detached(self, engine: Engine) -> None:
        for key in self.metrics:
            engine.state.metrics.running.pop(key, None)

    @on(Events.EPOCH_STARTED, phase=Phase.PREPARE, reads=[], writes=[])
    def reset_metrics(self, engine: Engine) -> None:
        """Reset the metrics at the start of an epoch."""
        self._placed, self._batches = False, 0
        self._of_shard.clear()
        self._averaging.clear()  # between epochs, what a value is made of may change
        for metric in self.metrics.values():
            if not (engine.training and engine.state.epoch > 1 and getattr(metric, "carries_over", False)):
                metric.reset()

    @on(Events.STARTED, phase=Phase.RECORD, reads=[], writes=["metrics"])
    def publish_running(self, engine: Engine) -> None:
        """Make the values so far available to displays."""
        for key, metric in self.metrics.items():
            if engine.group.shards is None:  # else the shards have values of their own
                engine.state.metrics.running[key] = partial(_current, metric)
            if isinstance(metric, Accuracy) and metric.follows_loss:
                metric.ignore_index = ignored_class(loss_of(engine.find_update(self.update)))

    @on(Events.UPDATE_COMPLETED, phase=Phase.RECORD, reads=["batch", "output", "loss", "modules", "plan"], writes=[])
    def update_metrics(self, engine: Engine) -> None:
        """Update the metrics with this batch after its last backward; a batch in time chunks counts once, as a whole."""
        update = engine.state.update
        if self.update not in (None, update.name) or update.more:
            return
        if engine.state.batch.__class__ is Shards:  # a whole step, whose shards were measured
            return
        if engine.group.shards is not None:
            self._use(self._metrics_of(engine.state.shard))
        if self._of_loss and update.raw_loss is not None:
            size = (samples_in if update.spec.samples is None else update.samples_in)(engine.state.batch)
            if not self._counted:
                self._check_batch(engine)
            ignored = None
            if self._ignored is not None:
                ignored = all_ignored(targets_in(update, engine.state.batch), self._ignored)
            for metric in self._of_loss:
                metric.add(update.raw_loss, size, ignored)
        if self._of_output and update.output is not None:
            self._update_with_output(engine)

    def _metrics_of(self, shard: int) -> dict[str, Any]:
        """The metrics of one shard."""
        if shard not in self._of_shard:
            own = self._of_shard[shard] = deepcopy(self.metrics, dict(self._shared))
            for metric in own.values():
                metric.reset()
        return self._of_shard[shard]

    def _states_of(self, shard: int) -> dict[str, Any]:
        return {key: state_of(metric) for key, metric in self._metrics_of(shard).items()}

    def _check_batch(self, engine: Engine) -> None:
        """Find out whether the loss may ignore targets, and report a batch whose class hides its number of samples."""
        batch, spec = engine.state.batch, engine.state.update.spec
        ignored = ignored_class(loss_of(engine.state.update))
        self._ignored = None if all_ignored(targets_in(engine.state.update, batch), ignored) is None else ignored
        before, self._length = self._length, None if spec.samples is not None else hidden_length(batch)
        self._counted = self._length is None or before not in (None, self._length)
        if self._length is not None and self._counted:
            engine.findings.report(
                "W03",
                f"a batch of class {type(batch).__name__} is counted as one sample. If the {self._length} rows of its "
                f"tensors are samples, averages give it the same weight as the previous batch, which has {before} rows",
                "define __len__ in the class, or pass Update(..., samples=lambda batch: ...)",
                self.name,
            )

    def _update_with_output(self, engine: Engine) -> None:
        update = engine.state.update
        with torch.no_grad():
            inputs = self.inputs(engine)
            if not isinstance(inputs, tuple | list | Mapping):
                raise TypeError(
                    f"{self.name!r}: inputs= returned a {type(inputs).__name__}; expected a tuple of the metrics' arguments, "
                    "such as (output, target), or a mapping of keyword arguments"
                )
            if not self._placed:
                self._place(inputs)
            prepared = self._prepared
            named = {key: prepared(one) for key, one in inputs.items()} if isinstance(inputs, Mapping) else {}
            given = () if named else tuple(map(prepared, inputs))
            size = samples_in(given or named) if update.spec.samples is None else update.samples_in(engine.state.batch)
            self._pass_on(engine, given, named, size)
            self._batches += 1
            if self._averaging:
                self._report_averaging(engine)

    def _pass_on(self, engine: Engine, given: tuple[Any, ...], named: dict[str, Any], size: int) -> None:
        try:
            for metric in self._of_output:
                if isinstance(metric, Average):
                    self._measure(engine, metric, given, named, size)
                elif id(metric) in self._keeping:
                    metric.update(*map(copied, given), **{key: copied(one) for key, one in named.items()})
                else:
                    metric.update(*given, **named)
        except RuntimeError as error:
            if "expected scalar type" in str(error):
                error.add_note(
                    f"{self.name!r}: metrics receive half-precision tensors as float32; if your function combines them "
                    "with other tensors, such as class weights, convert the other tensors to float32"
                )
            raise

    def _prepared(self, item: Any) -> Any:
        """An argument of the metrics. Comparing is exact in half precision, which spares `Accuracy` a copy of the scores."""
        item = item.detach() if isinstance(item, Tensor) else item
        return in_float32(item) if self._widens else item

    def _measure(self, engine: Engine, metric: Average, *batch: Any) -> None:
        """Measure a batch, and look at the first call of the function that does."""
        if metric in self._looked or is_compiled(engine) or engine.group.shards is not None:
            metric.measure(*batch)
            return
        self._looked.add(metric)
        with MetricCalls() as calls:
            metric.measure(*batch)
        (key,) = (key for key, one in self.metrics.items() if one is metric)
        for problem in calls.problems:
            self._report_problem(engine, key, problem)
        if (problem := calls.averages(metric.function, metric.latest)) is not None:
            self._averaging[key] = problem, metric.latest

    def _report_averaging(self, engine: Engine) -> None:
        """Report averaged values that are not means, once there is more than one value."""
        for key, (problem, first) in [*self._averaging.items()] if self._batches > 1 else ():
            latest = self.metrics[key].latest
            if first is None or latest is None or float(latest) != float(first):
                self._report_problem(engine, key, problem)
                del self._averaging[key]
        if self._batches >= _COMPARED:
            self._averaging.clear()

    def _report_problem(
        self, engine: Engine, key: str, problem: Problem, *, severity: Literal["info"] | None = None
    ) -> None:
        code, sentence, way_out = problem
        engine.findings.report(code, f"the metric {key!r}: {sentence}", way_out, self.name, key=key, severity=severity)

    def _place(self, inputs: Any) -> None:
        """Move torchmetrics metrics, with their states, to the device of the output."""
        self._placed = True
        tensors = tensors_in(inputs)
        for metric in self._of_output if tensors else ():
            if torchmetrics_in(metric):
                metric.to(tensors[0].device)

    @on(Events.EPOCH_COMPLETED, phase=Phase.PREPARE, rank=PUBLISH, reads=["step", "processes"], writes=["metrics"])
    def publish(self, engine: Engine) -> None:
        """Write the epoch's values to ``state.metrics``, for monitors and loggers."""
        if engine.group.shards is not None:
            self._merge_shards(engine.group.shards)
        elif engine.group.data.distributed:
            self._merge_ranks(engine.group.data)
        for key, metric in self.metrics.items():
            with synced(metric, engine.group.data):
                value = metric.compute()
            if isinstance(value, Mapping):  # a torchmetrics MetricCollection, or a function that returns several values
                for part, one in value.items():
                    engine.state.metrics[f"{key}/{part}"] = plain(one)
            else:
                value = plain(value)
                engine.state.metrics[key] = value
                self._check_value(engine, key, metric, value)

    def _merge_ranks(self, ranks: Processes) -> None:
        """Merge the metrics of all ranks, except torchmetrics metrics, which merge themselves."""
        merged = [metric for metric in self.metrics.values() if not torchmetrics_in(metric)]
        states = ranks.gather([metric.state_dict() for metric in merged]) if merged else []
        for place, metric in enumerate(merged):
            metric.merge([several[place] for several in states])

    def _merge_shards(self, shards: VirtualShards) -> None:
        """Merge the metrics of all shards, in the order of the shards, into those of the epoch."""
        states = shards.gather([self._states_of(shard) for shard in shards.own])
        for key, metric in self.metrics.items():
            merge(metric, [state[key] for state in states])

    def _check_value(self, engine: Engine, key: str, metric: Any, value: Any) -> None:
        """Report values that the metric cannot have."""
        if isinstance(metric, Accuracy) and (trainer := engine.findings.parent) is not None:
            self._check_chance(engine, trainer, key, metric)
        found = metric.doubt() if isinstance(metric, Average | Accuracy) else None
        of_accuracy = isinstance(value, float) and _ACCURACY.search(key.lower())
        if found is None and of_accuracy and value > 100:
            found = (
                "W04",
                f"its value {value:.4g} is neither a fraction nor a percentage",
                "return the mean of the batch, or use Accuracy",
            )
        if found is not None:
            self._report_problem(engine, key, found, severity=self._severity(engine, found[0], metric))

    def _severity(self, engine: Engine, code: str, metric: Any) -> Literal["info"] | None:
        """Whether a threshold for probabilities is only listed: not every score is a logit, and others than 0.5 were chosen."""
        of_loss = self.inputs is output_and_target and takes_logits(loss_of(engine.find_update(self.update)))
        return None if code != "W05" or (of_loss and metric.threshold == 0.5) else "info"

    def _check_chance(self, engine: Engine, trainer: Engine, key: str, metric: Accuracy) -> None:
        """Report an accuracy that training has never lifted above that of a constant answer."""
        found, planned = metric.most_frequent, trainer.state.max_epochs or 0
        if found is None or not trainer.training:
            return
        share, count = found
        data = engine.feed.current.data
        place = key, id(getattr(data, "limited_data", data)), trainer.snapshots.run_id
        chance = self._chances.setdefault(place, _Chance())
        chance.evaluations += 1
        value, deviation = metric.compute(), (share * (1 - share) / count) ** 0.5
        chance.exceeded = chance.exceeded or value > share + deviation
        chance.best = max(chance.best, value)
        late = trainer.state.epoch >= max(3, planned / 2) and chance.evaluations >= 3
        if late and not chance.exceeded and count >= _ENOUGH_SAMPLES and share <= _MOST_BALANCED:
            engine.findings.report(
                "W64",
                f"in {chance.evaluations} evaluations, {key!r} has not exceeded {chance.best:.3g} (now: {value:.3g}); "
                f"always predicting the most frequent class gives {share:.3g}, with a standard error of {deviation:.2g}",
                "check that each input has the right label and that both datasets number the classes in the same "
                "way; then check the learning rate, weight decay and clipping",
                self.name,
                key=place,
                severity="info" if is_balanced(trainer) else None,
            )

    def state_dict(self) -> dict[str, Any]:
        state = {key: state_of(metric) for key, metric in self.metrics.items()}
        if self._own_shards is not None:
            state[OF_SHARDS] = {str(shard): self._states_of(shard) for shard in self._own_shards}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        state = dict(state)
        self._of_shard.clear()
        for shard, own in state.pop(OF_SHARDS, {}).items():
            for key, metric in self._metrics_of(int(shard)).items():
                load_state_of(metric, own[key])
        if set(state) != set(self.metrics):
            raise ValueError(f"{self.name!r} has the metrics {sorted(self.metrics)}, but the state has {sorted(state)}")
        self._placed = False
        for key, metric in self.metrics.items():
            load_state_of(metric, state[key])


@dataclass
class _Chance:
    """The values of an accuracy in the evaluations of one run on the same data."""

    evaluations: int = 0
    exceeded: bool = False
    best: float = 0.0


_ENOUGH_SAMPLES = 200
_MOST_BALANCED = 0.8  # share of the most frequent class, above which an accuracy says little

_in_use: WeakValueDictionary[int, Metrics] = WeakValueDictionary()
"""The handlers of running engines by the ids of their metrics."""

_COMPARED = 8  # batches in which a value is compared with that of the first
_ACCURACY = re.compile(r"accuracy|(^|[_/])acc$")


def _current(metric: Any) -> float | None:
    """The value so far on this rank, without synchronizing: the other ranks may not call it, and would block this one."""
    with merging_nothing(metric):
        return as_number(metric.compute())
