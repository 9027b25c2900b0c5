"""Data that no run can iterate, and ranks whose data does not fit together: errors before the first epoch."""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from collections.abc import Mapping
from operator import length_hint
from typing import TYPE_CHECKING, Any

from torch.utils.data import Subset, TensorDataset

from ..authoring.batches import tensors_in
from ..authoring.devices import widened
from ..core.events import Lifecycle
from ..core.handler import Service, on
from ..distributed.processes import SameData
from .extent import extent_of
from .streamed import inner

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["DataRefusals", "use_of_data"]


class DataRefusals(Service):
    """Refuses data before it is iterated."""

    essential = True

    def __init__(self) -> None:
        super().__init__(name="data_refusals")

    @on(Lifecycle.LOADING, rank=1)
    def refuse(self, engine: Engine) -> None:
        """Refuse what is wrong with the data of a run, once a loaded state is in place.

        Raises:
            TypeError: for a mapping or a string, of which the keys or letters would be the batches.
            ValueError: for data that never ends in a run that nothing else ends, for ranks with data of different lengths, and
                for worker processes that cannot import what they need.
        """
        source = engine.feed.current
        data = inner(source.data)
        engine.feed.contents = []
        if data is None:
            return
        _refuse_no_batches(data)
        _refuse_endless(engine, data)
        _refuse_unknown_to_workers(data)
        if source.policy == "round_robin" or isinstance(engine.group.data, SameData):
            _compare_ranks(engine, data)


def _refuse_no_batches(data: Any) -> None:
    if isinstance(data, Mapping) and all(isinstance(key, str) for key in data):
        raise TypeError(
            f"run(): the data is a {type(data).__name__}, so iterating over it yields its keys instead of batches; "
            f"pass one of its values, such as data[{next(iter(data), 'train')!r}]"
        )
    if isinstance(data, str | bytes):
        raise TypeError(
            f"run(): the data is the string {data[:40]!r}; pass an iterable of batches, such as a DataLoader"
        )


def _refuse_endless(engine: Engine, data: Any) -> None:
    state = engine.state
    endless = type(data) in (itertools.cycle, itertools.count) or (
        type(data) is itertools.repeat and length_hint(data, -1) < 0
    )
    bounded = state.max_iters or state.max_steps or state.max_seconds
    # A receiver, or a step that the user wrote, may end the run or the epoch.
    may_end = any(one.is_foreign for signal in engine.signals.all() for one in signal.connections) or any(
        update.function is not None for update in engine.updates
    )
    if endless and engine.feed.current.epoch_length is None and not bounded and not may_end:
        raise ValueError(
            f"run(): the data (itertools.{type(data).__name__}) never ends, so the first epoch would never end; pass "
            "epoch_length=, max_iters= or max_steps=, or pass finite data, which is read again in each epoch"
        )


def _refuse_unknown_to_workers(data: Any) -> None:
    """Workers that do not begin as a copy of this process import what they need; what a notebook defined is in no module."""
    if getattr(data, "num_workers", 0) == 0 or hasattr(sys.modules["__main__"], "__file__"):
        return
    if (context := getattr(data, "multiprocessing_context", None)) is not None:
        method = context.get_start_method()
    else:  # asked so that it is not settled by the question
        method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if method == "fork":
        return
    given = [(name, getattr(data, name, None)) for name in ("collate_fn", "worker_init_fn")]
    dataset = getattr(data, "dataset", None)
    while dataset is not None:
        given.append(("dataset", type(dataset)))
        dataset = dataset.dataset if isinstance(dataset, Subset) else None
    for what, one in given:
        if getattr(one, "__module__", None) == "__main__":
            raise ValueError(
                f"run(): the data's {what} ({getattr(one, '__qualname__', one)}) was defined in an interactive "
                f"session, so the {data.num_workers} worker processes (start method {method!r}) cannot import it; move "
                "it into a module, or use DataLoader(num_workers=0)"
            )


def _compare_ranks(engine: Engine, data: Any) -> None:
    """Compare the data of ranks that shard it between them, or that all read it; one collective a run."""
    extent = extent_of(data)
    try:
        content = _fingerprint(data)
    except Exception:  # of data that cannot be read here; it is compared by its extent alone
        content = None
    others = engine.processes.gather((extent, content))
    if any(one != extent for one, _ in others):
        same = isinstance(engine.group.data, SameData)
        lengths = ", ".join(f"rank {rank}: {_in_words(one)}" for rank, (one, _) in enumerate(others))
        raise ValueError(
            f"the data ({type(data).__name__}) is {use_of_data(same)} ranks, but its length differs between them: "
            f"{lengths}; give all ranks the same data"
            + ("" if same else ", or let each rank keep its own data with shard_policy='own'")
        )
    engine.feed.contents = [content for _, content in others]


def use_of_data(same: bool) -> str:
    """What ranks do with their data, which should be the same."""
    return "read by each of the" if same else "sharded over the"


def _in_words(extent: Mapping[str, int]) -> str:
    return ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in extent.items()) or "unknown"


def _fingerprint(data: Any) -> list[Any]:
    """Values that are equal for equal data, as far as they can be read without fetching a sample."""
    if isinstance(data, list | tuple):
        return [float(widened(one).sum()) for one in tensors_in(data[0])[:4] if one.device.type != "meta"]
    dataset = getattr(data, "dataset", None)
    if type(dataset) is Subset:
        return [int(index) for index in list(dataset.indices)[:100]]
    if type(dataset) is TensorDataset:
        return [float(widened(one[:1]).sum()) for one in dataset.tensors]
    return []
