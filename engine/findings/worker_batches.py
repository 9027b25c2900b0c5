"""An iterable data set that each worker reads in full: its first batches are then equal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ..authoring.functions import package_of
from ..core.connection import Connection, Phase
from ..core.events import Events, Filter
from ..data.streamed import inner
from .data_checks import values_of

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["WorkerBatches"]

_FIRST = -(10**9)  # a rank before all others


class WorkerBatches:
    """Compares the first two batches of a run, which come from two workers, of data that each worker may read in full."""

    def __init__(self, engine: Engine) -> None:
        self._signal = engine.signal(Events.GET_BATCH_COMPLETED)
        self._first: list[Any] | None = None
        self._connection: Connection | None = None
        data = inner(engine.feed.current.data)
        if isinstance(data, DataLoader) and data.num_workers > 1 and _knows_no_workers(data):
            began = engine.state.completed
            when = Filter(once=frozenset((began + 1, began + 2)))
            self._connection = Connection(self._compare, Phase.PREPARE, _FIRST, when, "findings", internal=True)
            self._signal.add(self._connection)

    def _compare(self, engine: Engine) -> None:
        found = engine.findings.look(values_of, engine.state.batch)
        if self._first is None:
            self._first = found
        elif self._first and self._first == found:
            loader = inner(engine.feed.current.data)
            engine.findings.report(
                "W26",
                f"two workers gave the same first batch, so each of the {loader.num_workers} workers seems to iterate over the "
                f"whole dataset ({type(loader.dataset).__name__}). Each sample then appears {loader.num_workers} times "
                "in an epoch",
                "in __iter__, use torch.utils.data.get_worker_info() to yield only the samples of the current worker",
            )

    def stop(self) -> None:
        """Compare nothing any more."""
        if self._connection is not None:
            self._signal.remove(self._connection)
            self._connection = None


def _knows_no_workers(loader: Any) -> bool:
    """Whether an iterable data set that the user wrote names no worker or rank, and reads from no other iterable."""
    dataset = loader.dataset
    if not isinstance(dataset, IterableDataset):
        return False
    library = package_of(type(dataset)) in ("torch", "torchdata", "webdataset", "datasets", "litdata")
    if library or loader.worker_init_fn is not None:
        return False
    plain, held = (str, bytes, list, tuple, dict, set, range, Tensor), vars(dataset).values()
    if any(hasattr(type(one), "__iter__") and not isinstance(one, plain) for one in held):
        return False
    named = set[str]().union(*map(_names_in_class, type(dataset).__mro__))
    return not any("worker" in name or "rank" in name for name in named)


def _names_in_class(kind: type) -> set[str]:
    """The names that the methods of a class of the user use, and those that functions of its module do which they name."""
    if package_of(kind) in ("torch", "builtins", "typing"):
        return set()
    own = set[str]().union(*map(_names_in, vars(kind).values()))
    module = vars(sys.modules.get(kind.__module__, sys))
    return own.union(*(_names_in(module.get(name)) for name in own))


def _names_in(function: Any) -> set[str]:
    code = getattr(function, "__code__", None)
    return set() if code is None else {*code.co_names, *code.co_freevars, *code.co_varnames}
