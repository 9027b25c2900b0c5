"""What looks wrong about an evaluation: other weights than those that are trained, modes of training, nothing measured."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, Subset, WeightedRandomSampler

from ..authoring.batches import tensors_in
from ..authoring.devices import is_readable, widened
from ..authoring.functions import names_in
from ..data.extent import known_length
from ..data.loading import draws_at_random
from ..distributed.sharded import is_sharded, local_part
from ..resuming.keys import holds_averages
from .composition import is_meant, is_prepared
from .function_rules import may_store

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = [
    "Averaging", "effect_of_training", "has_other_weights", "note_last_values", "note_scale", "note_trained_call",
    "report_averages_left_out", "report_drawn_samples", "report_dropped_samples", "report_left_in_training",
    "report_nothing_measured", "report_other_scale", "report_other_weights", "report_raw_weights", "report_training_mode",
    "report_untaken_averages", "watch_averages", "watch_weights",
]  # fmt: skip


def note_last_values(engine: Engine, evaluator: Engine, seen: Mapping[str, int], prefix: str) -> None:
    """List metrics that a function has written in each batch of an evaluation, of which the last value counts.

    Args:
        engine: the engine that evaluates.
        evaluator: the evaluator, after its run.
        seen: how often each metric had been written before.
        prefix: of the metrics' names in the engine.
    """
    metrics, batches = evaluator.state.metrics, evaluator.state.completed
    for name in metrics:
        written = metrics.serials[name] - seen.get(name, 0)
        if written < max(2, batches) or metrics.owners.get(name, "user") != "user":
            engine.state.metrics.last_values.discard(prefix + name)
            continue
        engine.state.metrics.last_values.add(prefix + name)
        engine.findings.report(
            "W04",
            f"{prefix + name!r} is written {written} times in an evaluation of {batches} batches. Unless your function "
            "computes the mean, the metric has the value of the last batch, not the mean over the evaluation",
            f"let Metrics compute the mean: evaluator.attach(Metrics({{{name!r}: Average(function)}}))",
            key=prefix + name,
            severity="info",
        )


class _Weights(NamedTuple):
    """A sum of each parameter of an evaluator, and the iteration of the trainer in which they were made."""

    sums: tuple[float, ...]
    iteration: int


_seen: weakref.WeakKeyDictionary[Engine, _Weights] = weakref.WeakKeyDictionary()


_calling_trained: weakref.WeakSet[Engine] = weakref.WeakSet()
"""Evaluators whose forward calls a model of the engine that trains, as where another model judges its outputs."""


def note_trained_call(evaluator: Engine) -> None:
    """Note that the forward of an evaluator has called a model of the engine that runs it."""
    _calling_trained.add(evaluator)


def watch_weights(engine: Engine, evaluator: Engine) -> None:
    """Note the weights of an evaluator that shares none with the engine, so that its evaluations see whether they change."""
    _seen.pop(evaluator, None)
    if engine.training and _shares_nothing(engine, evaluator):
        _seen[evaluator] = _weights_of(engine, evaluator)


def has_other_weights(engine: Engine, evaluator: Engine) -> bool:
    """Whether the weights of an evaluator are neither those of the trainer, nor copied from them, nor changed meanwhile."""
    if not engine.training or not _shares_nothing(engine, evaluator) or is_prepared(evaluator):
        return False
    before = _seen.get(evaluator)
    now = _seen[evaluator] = _weights_of(engine, evaluator)
    own, others = _parameters(evaluator), _parameters(engine)
    if len(own) == len(others) and all(map(_are_equal, own, others)):
        return False
    if before is None:  # after a run, an average or a pruned copy may be meant, whose weights are near
        return not engine.running and _are_alike(own, others) and not _are_near(own, others)
    return before.sums == now.sums and before.iteration < now.iteration


def _are_alike(own: list[Tensor], others: list[Tensor]) -> bool:
    """Whether the parameters have the same shapes: a model that was merged, folded or cut is another one on purpose."""
    return [one.shape for one in own] == [one.shape for one in others]


def _are_near(own: list[Tensor], others: list[Tensor]) -> bool:
    """Whether most matrices are nearer to their counterparts than zeros are, as no new ones would be."""
    pairs = [(a.detach(), b.detach()) for a, b in zip(own, others, strict=True) if a.dim() > 1 and not a.is_meta]
    if not all(_are_comparable(a, b) for a, b in pairs):
        return False
    near = [bool((widened(a) - widened(b)).norm() < widened(b).norm()) for a, b in pairs]
    return sum(near) * 2 > len(near)


def report_other_weights(engine: Engine, evaluator: Engine) -> None:
    """Report an evaluator that has other weights, unless its forward has called the model that is trained."""
    if evaluator not in _calling_trained:
        engine.findings.report(
            "W51",
            f"the evaluator {evaluator!r} shares no parameters with this engine's model, and the evaluator's weights "
            + ("did not change" if engine.running else "differ")
            + ". Its metrics do not describe the model being trained, unless this model makes the evaluator's inputs",
            "build the evaluator on the same module: Engine(update.evaluation(), model=trainer.model); or copy the "
            "weights at EVALUATION_STARTED: evaluator.load_weights(trainer.weights())",
            key=id(evaluator),
            severity="info" if is_meant(evaluator) else None,
        )


def _parameters(engine: Engine) -> list[Tensor]:
    return list(engine.modules.parameters())


def _shares_nothing(engine: Engine, evaluator: Engine) -> bool:
    own, others = _parameters(evaluator), _parameters(engine)
    return bool(own) and bool(others) and set(map(id, own)).isdisjoint(map(id, others))


def _weights_of(engine: Engine, evaluator: Engine) -> _Weights:
    with torch.no_grad():
        own = [local_part(parameter.detach()) for parameter in _parameters(evaluator)]
        sums = tuple(0.0 if part.device.type == "meta" else float(widened(part).sum()) for part in own)
    return _Weights(sums, engine.state.iteration)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return _are_comparable(one, other) and torch.equal(one, other)


def _are_comparable(one: Tensor, other: Tensor) -> bool:
    return not (is_sharded(one) or is_sharded(other)) and one.shape == other.shape and one.device == other.device


def report_nothing_measured(engine: Engine, evaluator: Engine, measured: dict[str, Any]) -> None:
    """Report an evaluation without any metric, of an evaluator in which nothing listens either."""
    if measured or may_store(evaluator):
        return
    if not any(signal.connections for signal in evaluator.signals.all()):
        engine.findings.report(
            "W53",
            f"the evaluator {evaluator!r} measures nothing, because no "
            "handler is attached and no function is connected",
            "attach Metrics to the evaluator, such as Metrics(loss=Average()); Metrics that are attached to the "
            "trainer measure the training",
            key=id(evaluator),
        )


def report_training_mode(engine: Engine, ran: set[nn.Module], meant: set[nn.Module]) -> None:
    """Report modules that were in training mode in the first batch of an evaluation, where that makes a difference.

    Args:
        engine: the evaluator.
        ran: the modules.
        meant: those that are in training mode on purpose, as dropout that estimates an uncertainty is.
    """
    for parts in (ran - meant, ran & meant):
        effects = _effects(engine, parts)
        if effects:
            engine.findings.report(
                "W57",
                f"the module {_and_more(effects)} in training mode in the first batch of an evaluation, so "
                f"{' and '.join(sorted({*effects.values()}))}",
                "do not call train() or eval(), because the engine sets and restores the modes; allow W57 if this is "
                "intended, as it is with Monte Carlo dropout",
                key=parts <= meant,
                severity="info" if parts <= meant else None,
            )


def report_left_in_training(engine: Engine, known: Collection[nn.Module]) -> None:
    """Report modules in training mode at the end of an evaluation whose modes in its first batch are not known."""
    unseen = () if engine.training else (part for _, part in engine.modules.parts() if part not in known)
    effects = _effects(engine, {part for part in unseen if part.training})
    if effects:
        engine.findings.report(
            "W57",
            f"the module {_and_more(effects)} in training mode at the end of an evaluation. If a forward pass "
            f"ran in this mode, {' and '.join(sorted({*effects.values()}))}",
            "do not call train() or eval(), because the engine sets and restores the modes",
            key=False,
        )


def _effects(engine: Engine, parts: set[nn.Module]) -> dict[str, str]:
    """What these modules do in training mode only, by their paths."""
    named = ((path, effect_of_training(part)) for path, part in engine.modules.parts() if part in parts)
    return {path: effect for path, effect in named if effect is not None}


def _and_more(paths: Iterable[str]) -> str:
    first, *others = paths
    return f"{first!r} and {len(others)} more were" if others else f"{first!r} was"


def effect_of_training(part: nn.Module) -> str | None:
    """What a module does in training mode only; None if it does the same in both."""
    rate = getattr(part, "p" if isinstance(part, _DropoutNd) else "dropout", 0.0)
    if isinstance(part, _DropoutNd | nn.RNNBase | nn.MultiheadAttention) and isinstance(rate, float) and rate > 0:
        return "dropout was active"
    if isinstance(part, _NormBase):
        return "batch statistics were used" if part.track_running_stats else None  # without, they are used in both
    own = not type(part).__module__.startswith("torch.")
    return "training-mode code ran" if own and "training" in names_in(type(part).forward) else None


def report_dropped_samples(engine: Engine) -> None:
    """Report a DataLoader that leaves out the last samples of an evaluation, or many of the training."""
    data = engine.feed.current.data
    sampler = getattr(data, "batch_sampler", None)
    by = data if sampler is None else sampler  # it may have no length
    if not isinstance(data, DataLoader) or not getattr(by, "drop_last", False) or not getattr(by, "batch_size", None):
        return
    if (samples := known_length(getattr(by, "sampler", None))) is None:
        return
    dropped = samples % by.batch_size
    last = "the last " * isinstance(by.sampler, SequentialSampler)
    if engine.training and dropped > _MUCH * samples:
        engine.findings.report(
            "W59",
            f"each epoch leaves out {last}{dropped} of {samples} samples, because the DataLoader has drop_last=True",
            "set drop_last=False, or use a smaller batch_size=",
            key=id(data),
        )
    elif dropped and not engine.training:
        engine.findings.report(
            "W59",
            f"the evaluation leaves out {last}{dropped} of {samples} samples, because the "
            "DataLoader has drop_last=True",
            "set drop_last=False; metrics weight a smaller last batch by its size",
            key=id(data),
            severity="warning" if dropped > _MANY * samples else "info",
        )


_MUCH = 0.1  # of the samples of the training
_MANY = 0.02  # of the samples: what makes a difference that is seen


def report_drawn_samples(engine: Engine) -> None:
    """Report an evaluation of samples that are drawn with replacement: some come twice, and others not at all."""
    data = engine.feed.current.data
    if engine.training or not isinstance(data, DataLoader):
        return
    sampler = getattr(data.batch_sampler, "sampler", data.sampler)
    if isinstance(sampler, WeightedRandomSampler | RandomSampler) and sampler.replacement:
        engine.findings.report(
            "W20",
            f"the evaluation draws its samples with replacement ({type(sampler).__name__}), so samples may appear "
            "more than once or not at all",
            "to evaluate each sample once, use DataLoader(dataset, batch_size) without a sampler",
            key=id(data),
        )


class _Scale(NamedTuple):
    """Mean, standard deviation and shape of the first inputs of a training.

    Attributes:
        median: their median.
        span: their standard deviation by their first and last decile, which few large values do not change.
        within: the mean standard deviation within a sample; NaN where a sample has one value.
    """

    mean: float
    spread: float
    median: float
    span: float
    within: float
    shape: tuple[int, ...]


_first_inputs: weakref.WeakKeyDictionary[Engine, Tensor] = weakref.WeakKeyDictionary()
_scales: weakref.WeakKeyDictionary[Engine, _Scale] = weakref.WeakKeyDictionary()
_OTHER_SCALE = 5.0
_DECILES = 2.56  # from the first to the last decile of a normal distribution, in standard deviations
_VALUES = 100_000  # of the inputs, about so many are kept and measured


def note_scale(engine: Engine, batch: Any) -> None:
    """Keep some of a training's first inputs, whose scale `report_other_scale` measures if there is an evaluation."""
    if (inputs := _inputs_of(engine, batch)) is not None:
        _first_inputs[engine] = inputs.clone()


def report_other_scale(evaluator: Engine, batch: Any) -> None:
    """Report inputs of an evaluation that are on another scale than those of the training that runs it."""
    engine = evaluator.findings.parent
    trained = None if engine is None else _scale_of_training(engine)
    inputs = None if trained is None else _inputs_of(evaluator, batch)
    found = None if inputs is None else _scale_of(inputs)
    if trained is None or found is None or found.shape != trained.shape:
        return
    alike = _is_near(found.within, trained.within)  # as in another season of one series
    others = _are_others(found.spread, trained.spread, abs(found.mean - trained.mean), alike=alike)
    if found.span > 0 and trained.span > 0:
        others = others and _are_others(found.span, trained.span, abs(found.median - trained.median), alike=alike)
    if others:
        evaluator.findings.report(
            "W60",
            f"the first evaluation inputs have mean {found.mean:.3g} and standard deviation {found.spread:.3g}, but "
            f"the first training inputs have mean {trained.mean:.3g} and standard deviation {trained.spread:.3g}",
            "if they should be alike, normalize both with the mean and standard deviation of the training inputs",
        )


def _are_others(spread: float, trained: float, distance: float, *, alike: bool) -> bool:
    return not (alike or _is_near(spread, trained)) or distance > _OTHER_SCALE * max(spread, trained)


def _is_near(one: float, other: float) -> bool:
    return other / _OTHER_SCALE <= one <= other * _OTHER_SCALE


def _inputs_of(engine: Engine, batch: Any) -> Tensor | None:
    """Some samples of the inputs of a batch, of shape (N, ...); None where their scale says nothing."""
    update = engine.state.update
    first = next(iter(tensors_in(batch if update.spec.input is None else update.input_in(batch))), None)
    if first is None or not is_readable(first) or not _has_scale(first):
        return None
    return first.detach()[: max(1, _VALUES * len(first) // first.numel())]


def _has_scale(inputs: Tensor) -> bool:
    return inputs.is_floating_point() and inputs.dim() > 1 and inputs.numel() >= 64


def _scale_of_training(engine: Engine) -> _Scale | None:
    inputs = _first_inputs.pop(engine, None)
    scale = None if inputs is None else _scale_of(inputs)
    if scale is not None:
        _scales[engine] = scale
    return _scales.get(engine)


def _scale_of(inputs: Tensor) -> _Scale | None:
    values = inputs.float().flatten()
    spread, mean = (float(one) for one in torch.std_mean(values))
    least, median, most = (
        values[:: max(1, len(values) // _VALUES)].quantile(values.new_tensor([0.1, 0.5, 0.9])).tolist()
    )
    within = float(inputs.float().flatten(1).std(1).mean()) if inputs[0].numel() > 1 else float("nan")
    return (
        _Scale(mean, spread, median, (most - least) / _DECILES, within, tuple(inputs.shape[1:])) if spread > 0 else None
    )


def report_random_samples(engine: Engine) -> None:
    """Report the data of an evaluation whose samples are drawn at random, as those of a training are augmented."""
    data = engine.feed.current.data
    if not engine.training and draws_at_random(data) and not _seeds_itself(data.dataset):
        engine.findings.report(
            "W50",
            f"reading the evaluation samples ({type(data.dataset).__name__}) draws random numbers, as random "
            "augmentation does, so the metrics are those of randomly changed samples",
            "do not apply random transforms to evaluation data; note that two splits of one dataset share its "
            "transform; allow W50 if the samples do not depend on the random numbers",
            key=id(data),
        )


def _seeds_itself(dataset: Any) -> bool:
    """Whether a data set seeds the generators itself, so that a sample is the same each time."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    own = [method for base in type(dataset).__mro__ for name, method in vars(base).items() if name != "__init__"]
    return any("seed" in name for method in own for name in names_in(method))


def report_averages_left_out(engine: Engine, state: Mapping[str, Any]) -> None:
    """Report a whole state of which an evaluator takes the weights, though it holds averages of them, too.

    A trainer that loads such a state may continue training; `report_untaken_averages` reports an evaluation before it does.
    """
    for name, part in state.get("handlers", {}).items():
        if not holds_averages(part):
            continue
        if engine.training:
            _untaken[engine] = name, _versions(engine)
            continue
        engine.findings.report(
            "W56",
            f"the state contains the weight averages of the handler {name!r}, but the weights of the last step are "
            "loaded",
            "to evaluate a checkpoint with its averages, write trainer.test(data, weights=path), with a trainer that "
            "has this handler; or load trainer.weights() instead of the state",
            name,
        )


_untaken: weakref.WeakKeyDictionary[Engine, tuple[str, list[int]]] = weakref.WeakKeyDictionary()


def _versions(engine: Engine) -> list[int]:
    return [parameter._version for parameter in _parameters(engine)]


def report_untaken_averages(evaluator: Engine) -> None:
    """Report an evaluation of weights that a trainer has loaded from a state with averages, and has not trained since."""
    engine = evaluator.findings.parent
    untaken = None if engine is None or engine.running else _untaken.get(engine)
    if engine is None or untaken is None:
        return
    name, versions = untaken
    if versions == _versions(engine):
        evaluator.findings.report(
            "W56",
            "load_weights() has loaded the weights of the last step from a state that also contains the averages of "
            f"the handler {name!r}. The evaluation measures the weights of the last step, not the averages",
            "to evaluate a checkpoint with its averages, write trainer.test(data, weights=path), with this handler attached",
            name,
        )


class Averaging(Protocol):
    """A handler that keeps averages of weights, which evaluations put in place."""

    @property
    def name(self) -> str: ...
    @property
    def engine(self) -> Engine | None: ...
    @property
    def enabled(self) -> bool: ...
    def differs(self, parameters: set[Tensor] | None = None) -> bool:
        """Whether there are averages that are not in place of the weights now, though an evaluation would put them there.

        Only ``parameters`` are compared, if they are given.
        """


_averaging: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_averages(handler: Averaging) -> None:
    """Have runs of evaluators reported that measure weights in place of the averages that this handler keeps of them."""
    _averaging.add(handler)


def report_raw_weights(engine: Engine) -> None:
    """Report a run of an evaluator by itself, of weights of which a handler keeps averages."""
    if engine.training or engine.findings.is_within or not _averaging:
        return
    own = set(_parameters(engine))
    for handler in sorted(_averaging, key=lambda one: str(one.name)):
        trainer = handler.engine
        if trainer is None or not handler.enabled or own.isdisjoint(_parameters(trainer)):
            continue
        if not handler.differs(own):
            continue
        engine.findings.report(
            "W56",
            f"run() on an evaluator measures the weights of the last step, not the averages that {handler.name!r} "
            "keeps",
            "evaluate with the trainer: trainer.evaluate(evaluator, data); or load the averages as the weights: "
            "trainer.load_weights(trainer.weights())",
            handler.name,
        )
