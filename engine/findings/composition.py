"""What a composition consists of, for `check`: its handlers, metrics, evaluations, data and parameters, before it runs.

Handlers are recognized by attributes: ``evaluator`` and ``data_sets`` (evaluates), ``path``, or ``folder`` and ``filename``
(writes files), ``retention`` (saves states), ``every`` and ``interval_matters`` (does nothing if the interval never comes up),
``clips_gradients``, ``freezes``, and each attribute that is a `Monitor`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset

from ..authoring.functions import is_users, may_log, names_reached
from ..authoring.monitor import Monitor
from ..authoring.randomness import unchanged_random_state
from ..core.connection import Connection
from ..core.events import Events
from ..core.handler import Handler
from ..data.combined import ReloadedData
from ..data.held_generators import set_state, state_of
from ..data.loading import generators_of, skippable
from .other_optimizers import held_by_any_optimizer

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = [
    "Composition", "Evaluation", "first_batch", "in_training", "is_meant", "is_prepared", "own_generators",
    "unchanged_generators",
]  # fmt: skip


@dataclass(frozen=True)
class Evaluation:
    """One data set that a handler evaluates.

    Attributes:
        handler: the handler, which has the attributes ``evaluator`` and ``data_sets``.
        evaluator: the engine that evaluates.
        key: name of the data set, "" if there is only one.
        data: the data set.
    """

    handler: Handler
    evaluator: Engine
    key: str
    data: Any


def in_training(rule: Callable[[Composition], Iterator[Any]]) -> Callable[[Composition], Iterator[Any]]:
    """A rule about what is trained, which finds nothing in an engine that only evaluates."""

    @wraps(rule)
    def of_training(it: Composition) -> Iterator[Any]:
        return rule(it) if it.engine.training else iter(())

    return of_training


class Composition:
    """What is attached to an engine, and its data. The rules of `check` read it, and change nothing.

    Args:
        engine: the engine.
        data: the data of the run; None if it is not known.
        reads_batch: whether the rules may read one batch of it.
    """

    def __init__(self, engine: Engine, data: Any, *, reads_batch: bool) -> None:
        self.engine = engine
        self.data = data
        self.reads_batch = reads_batch

    # ---- handlers and receivers -----------------------------------------------------------------------------------

    @cached_property
    def handlers(self) -> list[Handler]:
        """The enabled handlers."""
        return [handler for handler in self.engine.handlers.values() if handler.enabled]

    @cached_property
    def connections(self) -> list[Connection]:
        """Every connected receiver."""
        return [one for signal in self.engine.signals.all() for one in signal.connections]

    @cached_property
    def functions(self) -> list[Connection]:
        """Users' functions, of which it is not known what they read and write."""
        return [one for one in self.connections if one.owner is None]

    def names_any(self, names: set[str]) -> bool:
        """Whether the code of a function or a handler of the user's names one of these."""
        return any(is_users(one.receiver) and names & names_reached(one.receiver) for one in self.connections)

    def kind_of(self, connection: Connection) -> type[Handler] | None:
        """The class of the handler that a receiver belongs to; None for a function, and for a handler of another engine."""
        handler = None if connection.owner is None else self.engine.handlers.get(connection.owner)
        return None if handler is None else type(handler)

    # ---- metrics --------------------------------------------------------------------------------------------------

    @cached_property
    def monitors(self) -> list[tuple[Handler, Monitor]]:
        """What handlers decide by: their attributes that are a `Monitor`."""
        return [(one, value) for one in self.handlers for value in vars(one).values() if isinstance(value, Monitor)]

    @cached_property
    def produced(self) -> dict[str, str]:
        """Metrics that handlers write, and which handler does."""
        metrics = self.engine.state.metrics
        known = dict.fromkeys(metrics, "") | metrics.owners
        for handler in self.handlers:
            known |= dict.fromkeys(handler.metric_names(self.engine), handler.name)
        return known

    @cached_property
    def may_write_metrics(self) -> bool:
        """Whether a receiver, forward or loss of the user's may write metrics that nobody announces."""
        connections = [one for engine in self.engines for signal in engine.signals.all() for one in signal.connections]
        return any(map(may_log, self.engines)) or any(
            one.writes is None or ("metrics" in one.writes and is_users(one.receiver)) for one in connections
        )

    # ---- evaluations and data -------------------------------------------------------------------------------------

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        """What handlers evaluate, by their attributes ``evaluator`` and ``data_sets``."""
        found = []
        for handler in self.handlers:
            evaluator, data_sets = getattr(handler, "evaluator", None), getattr(handler, "data_sets", None)
            if isinstance(evaluator, type(self.engine)) and isinstance(data_sets, Mapping):
                found += [Evaluation(handler, evaluator, key, data) for key, data in data_sets.items()]
        return found

    @cached_property
    def engines(self) -> list[Engine]:
        """The engine itself, and the evaluators, each once."""
        return list(dict.fromkeys((self.engine, *(one.evaluator for one in self.evaluations))))

    @cached_property
    def first_batch(self) -> Any:
        """The first batch of the data; None where it cannot be read without a trace."""
        if not self.reads_batch:
            return None
        try:
            return first_batch(self.data)
        except Exception as error:
            error.add_note("check() read the first batch of the data, as a run would")
            raise

    # ---- parameters -----------------------------------------------------------------------------------------------

    @cached_property
    def parameters(self) -> dict[Tensor, str]:
        """The model's parameters in the order of registration, by name."""
        found: dict[Tensor, str] = {}
        for root, module in self.engine.modules.items():
            prefix = "" if len(self.engine.modules) == 1 else f"{root}."
            for name, parameter in module.named_parameters():
                found.setdefault(parameter, prefix + name)
        return found

    @cached_property
    def optimized(self) -> dict[Tensor, str]:
        """Parameters that an optimizer holds, or will hold once its factory is called, and the update's name."""
        found: dict[Tensor, str] = {}
        for update in self.engine.updates:
            if update.optimizer is not None:
                own: Any = update.parameters
            elif update.spec.optimizer is None:
                own = ()
            elif update.spec.parameters is None:
                own = self.parameters
            else:
                own = _flat(update.spec.parameters(self.engine))
            found |= dict.fromkeys((one for one in own if isinstance(one, Tensor)), update.name)
        return found

    @cached_property
    def trained_by_user(self) -> set[Tensor]:
        """Parameters that no update trains, but an optimizer of the user's holds, or a hook steps."""
        left = {one for one in self.parameters if one.requires_grad and one not in self.optimized}
        return held_by_any_optimizer(left) | {one for one in left if getattr(one, "_post_accumulate_grad_hooks", None)}

    @cached_property
    def modules(self) -> dict[nn.Module, str]:
        """All submodules by name."""
        return {part: name for root in self.engine.modules.values() for name, part in root.named_modules()}


def first_batch(data: Any) -> Any:
    """The first batch of data that can be iterated again, read in this process; None of other data.

    An iterable of the user's without a length may count or simulate, so that its next pass would be another one. The states of
    random generators are put back, also of those that the dataset holds.
    """
    if data is None or _leaves_a_trace(data):
        return None
    if isinstance(data, list | tuple):
        return data[0] if data else None
    with unchanged_random_state(*generators_of(data)), unchanged_generators(own_generators(data)):
        if not skippable(data):
            return next(iter(data), None)
        if data.batch_sampler is None:
            return data.collate_fn(data.dataset[next(iter(data.sampler))])
        indices = next(iter(data.batch_sampler), None)
        if indices is None:
            return None
        fetch = getattr(data.dataset, "__getitems__", None)
        samples = fetch(indices) if callable(fetch) else [data.dataset[index] for index in indices]
        return data.collate_fn(samples)


def _leaves_a_trace(data: Any) -> bool:
    """Whether reading a batch of data may change what a run reads afterwards, or takes other processes."""
    if isinstance(data, DataLoader):
        streams = isinstance(data.dataset, IterableDataset) and data.num_workers > 0
        return streams or callable(getattr(data, "load_state_dict", None))
    kept = isinstance(data, Iterator | ReloadedData) or callable(getattr(data, "load_state_dict", None))
    return kept or not hasattr(type(data), "__len__")


def own_generators(data: Any, depth: int = 3) -> dict[str, Any]:
    """Random generators that a dataset, or an object among its attributes, holds by itself, by the path to them."""
    found: dict[str, Any] = {}
    todo = [("dataset", getattr(data, "dataset", None), depth)]
    while todo:
        path, value, left = todo.pop()
        if isinstance(value, random.Random | np.random.Generator | np.random.RandomState | torch.Generator):
            found[path] = value
        elif left and not isinstance(value, Tensor | np.ndarray | str | bytes | int | float | None):
            inner = vars(value) if hasattr(value, "__dict__") and not isinstance(value, type) else {}
            todo += [(f"{path}.{key}", one, left - 1) for key, one in inner.items()]
            if isinstance(value, list | tuple) and len(value) <= 32:
                todo += [(f"{path}[{place}]", one, left - 1) for place, one in enumerate(value)]
    return found


@contextmanager
def unchanged_generators(generators: Mapping[str, Any]) -> Iterator[None]:
    """Put the states of these generators back at the end."""
    before = [(one, state_of(one)) for one in generators.values()]
    try:
        yield
    finally:
        for one, state in before:
            set_state(one, state)


def _flat(groups: Any) -> Iterator[Any]:
    """The tensors of parameters, of groups, or of a dict of either for several optimizers."""
    for one in itertools.chain.from_iterable(groups.values()) if isinstance(groups, Mapping) else groups:
        if isinstance(one, Mapping):
            own = one["params"]
            yield from [own] if isinstance(own, Tensor) else own
        elif isinstance(one, tuple):
            yield one[1]
        else:
            yield one


def is_meant(evaluator: Engine) -> bool:
    """Whether an evaluator has another model on purpose: a frozen one, such as a teacher, or torch's average of weights."""
    roots = list(evaluator.modules.values())
    frozen = not any(p.requires_grad for root in roots for p in root.parameters())
    return frozen or any(isinstance(root, AveragedModel) for root in roots)


def is_prepared(evaluator: Engine) -> bool:
    """Whether a function of the user's may load the weights before an evaluation."""
    before = (Events.STARTED, Events.EPOCH_STARTED, Events.EVALUATION_STARTED)
    connected = [one for event in before for one in evaluator.signal(event).connections]
    return any(one.owner is None and is_users(one.receiver) for one in connected)
