"""What looks wrong with the data of a run: looked at once as it begins, and as its epochs end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from inspect import unwrap
from types import FunctionType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ..authoring.batches import parts, tensors_in
from ..authoring.devices import is_readable, widened
from ..authoring.functions import codes_of, is_users, names_reached, package_of, returns_none
from ..core.update import NO_GRADIENT
from ..data.held_generators import draws_in_workers, held_generators
from ..data.loading import is_plain
from ..data.refusals import use_of_data
from ..data.streamed import inner
from ..distributed.processes import SameData
from .composition import first_batch
from .unsaved import Code

if TYPE_CHECKING:
    from ..core.update import UpdateState
    from ..engine import Engine

__all__ = [
    "check_data", "check_epoch", "check_steps", "note_batches", "report_different", "report_length",
    "report_single_samples", "report_workers", "values_of", "values_of_first_batch",
]  # fmt: skip

_MOST_BATCHES = 200


def check_data(engine: Engine) -> None:
    """Look at the data of a run before its first epoch."""
    feed, safely = engine.feed, engine.findings.look
    source = feed.current
    data = inner(source.data)
    if data is None:
        return
    if feed.contents:
        safely(report_different, engine, data, feed.contents)
    elif source.policy == "own" and engine.processes.distributed and engine.training:
        _check_own(engine, data)
    safely(_report_samples, engine, data)
    safely(report_workers, engine, data)
    if engine.training:
        feed.versions = safely(_versions, data)


def report_different(engine: Engine, data: Any, contents: Sequence[Any]) -> None:
    """Report ranks that should have the same data, and have not."""
    same = isinstance(engine.group.data, SameData)
    if not all(_are_alike(one, contents[0]) for one in contents):
        engine.findings.report(
            "W25",
            f"the data ({type(data).__name__}) is {use_of_data(same)} {engine.processes.world_size} ranks, but the "
            "ranks have different data" + ("" if same else ", and part of it is never used"),
            "give all ranks the same data"
            if same
            else "give all ranks the same data, or let each rank keep its own data with shard_policy='own'",
        )


def _are_alike(one: Any, other: Any) -> bool:
    """Whether two ranks describe the same data: the last digits of sums depend on the processor and the number of threads."""
    if isinstance(one, list | tuple) and type(one) is type(other) and len(one) == len(other):
        return all(map(_are_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9) or (math.isnan(one) and math.isnan(other))
    return bool(repr(one) == repr(other))


def _check_own(engine: Engine, data: Any) -> None:
    """Compare the first batches of ranks that bring their own data; one collective a run."""
    content = engine.findings.look(_tensors_of_first_batch, data)
    others = engine.processes.gather(content)
    if content and all(one == others[0] for one in others):
        engine.findings.report(
            "W70",
            f"with shard_policy='own', each of the {engine.processes.world_size} ranks should have different data, but "
            "the tensors of the first batch are equal on all of them, so they seem to train on the same samples",
            "give each rank its own part of the data, or use shard_policy='auto'",
        )


def _tensors_of_first_batch(data: Any) -> list[Any]:
    """What `values_of` returns of the first batch, if it has a tensor: numbers may only count steps."""
    batch = first_batch(data)
    return values_of(batch) if any(True for _ in tensors_in(batch)) else []


def values_of_first_batch(data: Any) -> list[Any]:
    """What `values_of` returns of its first batch."""
    return values_of(first_batch(data))


def values_of(batch: Any) -> list[Any]:
    """The sums of the tensors of a batch, and its texts and numbers."""
    sums = [one for one in tensors_in(batch) if one.device.type != "meta" and not one.is_complex()]
    return [*(float(widened(one).sum()) for one in sums), *_texts_in(batch)]


def _texts_in(value: Any) -> list[Any]:
    if isinstance(value, str | bytes | int | float):
        return [value]
    found = parts(value)
    return [] if found is None or isinstance(value, Tensor) else [text for one in found[0] for text in _texts_in(one)]


def _report_samples(engine: Engine, data: Any) -> None:
    tensors = isinstance(data, tuple) and len(data) > 1 and all(isinstance(one, Tensor) for one in data)
    whole = tensors and not _are_batches(data)
    samples = _holds_samples(data) or (engine.training and _has_rows(data))
    if whole or samples or (isinstance(data, tuple) and any(isinstance(one, Dataset | DataLoader) for one in data)):
        what = "item of the tuple" if isinstance(data, tuple) else "row" if isinstance(data, Tensor) else "sample"
        _report_as_batches(engine, data, what)


def _report_as_batches(engine: Engine, data: Any, what: str) -> None:
    engine.findings.report(
        "W23",
        f"the data is a {type(data).__name__}, so each {what} is treated as a batch",
        "pass a DataLoader, such as DataLoader(dataset, batch_size=32), or a list of batches",
    )


def report_single_samples(engine: Engine, batch: Any) -> None:
    """Report a data set or a list whose first item is a sample: an input without a dimension for the batch, and one target."""
    data = inner(engine.feed.current.data)
    kinds = list | Dataset if engine.training else Dataset
    known = engine.state.update.function is None and isinstance(data, kinds)  # a step may take single samples
    if not known or not isinstance(batch, list | tuple) or len(batch) < 2:
        return
    inputs, target = batch[:2]
    if isinstance(inputs, Tensor) and _is_sample(inputs, target) and not _is_bag(inputs, data):
        _report_as_batches(engine, data, "sample")


def _is_sample(inputs: Tensor, target: Any) -> bool:
    """Whether inputs and a target are those of one sample."""
    single = isinstance(target, int | float) or (isinstance(target, Tensor) and target.dim() == 0)
    return inputs.dim() in (1, 3) if single else _is_row(inputs, target)


def _is_bag(inputs: Tensor, data: Any) -> bool:
    """Whether another item of a list has an input of another length, as a bag of instances has, which are a batch."""
    others = [parts(one) for one in data[1:3]] if isinstance(data, list) else []
    firsts = [one[0][0] for one in others if one is not None and len(one[0]) > 0]
    return any(isinstance(one, Tensor) and one.shape[:1] != inputs.shape[:1] for one in firsts)


def _is_row(inputs: Tensor, target: Any) -> bool:
    """Whether inputs and targets are vectors of different lengths, as a row of features with a row of targets is."""
    return inputs.dim() == 1 and isinstance(target, Tensor) and target.dim() == 1 and len(inputs) != len(target)


def _holds_samples(data: Any) -> bool:
    """Whether a data set of torch's holds samples; not where all of its tensors have a second dimension of the same length."""
    if not isinstance(data, TensorDataset):
        return False
    several = len(data.tensors) > 1 and max(one.dim() for one in data.tensors) > 2
    return not several or len({one.shape[1:2] for one in data.tensors}) > 1


def _has_rows(data: Any) -> bool:
    """Whether a tensor has rows that are samples; rows of whole numbers may be the indices of batches."""
    return isinstance(data, Tensor) and data.dim() < 3 and data.is_floating_point()


def _are_batches(tensors: tuple[Tensor, ...]) -> bool:
    """Whether the tensors of a tuple are parts of one, as `torch.split` returns them, or at least three that are alike."""
    if len({(one.shape[1:], one.dtype) for one in tensors}) > 1 or tensors[0].dim() < 2:
        return False
    first = tensors[0]
    return len(tensors) > 2 or (is_readable(first) and first._base is not None and first._base is tensors[1]._base)


def report_workers(engine: Engine, data: Any) -> None:
    if not draws_in_workers(data):
        return
    held = held_generators(data, fetching=True) if engine.training else {}
    if held := {place: one for place, one in held.items() if _may_be_drawn_from(data, place)}:
        engine.findings.report(
            "W24",
            f"each worker has its own copy of every random generator in the data ({', '.join(held)}). If your "
            f"data draws from one of these copies without seeding it, all workers draw the same numbers"
            f"{'' if data.persistent_workers else ', repeated in every epoch'}, and a resumed run draws different numbers",
            "draw from torch's, NumPy's or Python's global generators, which are seeded for each sample, or use num_workers=0",
            severity="info" if data.worker_init_fn is not None else None,
        )


def _may_be_drawn_from(loader: Any, place: str) -> bool:
    """Whether a generator may be drawn from in workers: not an attribute that no method uses, or that one makes or seeds."""
    dataset, _, name = place.partition(".")
    kind: Any = type(getattr(loader, "dataset", None))
    if dataset != "dataset" or not name.isidentifier() or package_of(kind) == "torch":
        return True
    own = [vars(base) for base in kind.__mro__ if package_of(base) not in ("torch", "builtins", "typing")]
    codes = codes_of(*(method for methods in own for key, method in methods.items() if key != "__init__"))
    seeds = any({"get_worker_info", "manual_seed"} & {*one.co_names} for one in codes)
    return not seeds and any(name in Code(one).first_read for one in codes)


# ---- as epochs end ------------------------------------------------------------------------------------------------


_written: WeakKeyDictionary[Engine, tuple[ref[Tensor], Tensor | None]] = WeakKeyDictionary()
"""A tensor of the batches that the last epoch has written to, with its values once the next epoch has begun."""


def note_batches(engine: Engine) -> None:
    """Note the batches of a list as an epoch begins: what was changed before that is not changed between two epochs."""
    if engine.feed.versions is not None:
        engine.feed.versions = _versions(engine.feed.current.data)
    tensor = _written[engine][0]() if engine in _written else None
    if tensor is not None:
        _written[engine] = ref(tensor), tensor.detach().clone()


def _versions(data: Any) -> list[tuple[ref[Tensor], int]] | None:
    """The tensors of a list of batches, and how often each was changed in place; None for other data."""
    if not is_plain(data) or len(data) > _MOST_BATCHES:
        return None
    tensors = [one for one in _plain_tensors(data) if not one.requires_grad]  # an optimizer may train them
    return None if any(torch.is_inference(one) for one in tensors) else [(ref(one), one._version) for one in tensors]


def _plain_tensors(value: Any) -> list[Tensor]:
    """The tensors in tuples, lists and dicts: reading an object of another class may do something."""
    if isinstance(value, Tensor):
        return [value]
    kind, found = value.__class__, list[Tensor]()
    for item in value if kind in (dict, list, tuple) else ():
        found += _plain_tensors(value[item] if kind is dict else item)
    return found


def check_epoch(engine: Engine, began: int) -> None:
    """Look at a complete epoch of a run that ``began`` after this iteration, before EPOCH_COMPLETED is emitted."""
    if engine.training:
        engine.findings.look(check_steps, engine, began, whole=False)
        engine.findings.look(_check_versions, engine)


def _check_versions(engine: Engine) -> None:
    """Report batches of a list that an epoch has changed in place, once the next one has changed their values again."""
    feed = engine.feed
    if feed.current.given is not feed.current.data:
        return
    held = {id(one) for one in _plain_tensors(feed.current.data)}  # where batches were replaced, there are others
    if (found := _written.pop(engine, None)) is not None:
        _check_written(engine, found[0](), found[1], held)
    elif feed.versions is not None:
        tensors = [(one(), version) for one, version in feed.versions]
        changed = (one for one, version in tensors if one is not None and id(one) in held and one._version != version)
        if (tensor := next(changed, None)) is not None:
            _written[engine] = ref(tensor), None
        feed.versions = None


def _check_written(engine: Engine, tensor: Tensor | None, before: Tensor | None, held: set[int]) -> None:
    """Report a tensor of the data whose values a second epoch has changed as well."""
    if tensor is None or before is None or id(tensor) not in held or torch.equal(tensor, before):
        return
    engine.findings.report(
        "W28",
        "batches of the data were changed in place, so later epochs read the changed batches",
        "copy a batch before you change it: inputs = inputs.clone()",
    )


def report_length(engine: Engine, more: bool) -> None:
    """Report data that gives another number of batches than its length says: more, or so many as the epoch has."""
    data, length, given = engine.feed.current.data, engine.feed.current.length, engine.state.epoch_iteration
    counted = more and engine.feed.current.given_length  # by run(epoch_length=), which may cut an endless stream
    if length is not None and (more or given != length) and not counted:
        what = "it yields more batches, which are not used" if more else f"it yielded {given} batches"
        engine.findings.report(
            "W21",
            f"the data ({type(data).__name__}) has length {length}, but {what}",
            "correct the __len__ of the data" + ("" if engine.findings.is_within else ", or pass run(epoch_length=)"),
        )


def check_steps(engine: Engine, began: int, *, whole: bool = True) -> None:
    """Report updates that never made a step because what they call returned None: all of them, or one that always does.

    Args:
        engine: the engine.
        began: the iteration after which its run began.
        whole: whether the run is complete; before, a function may still return a loss, as once enough was collected.
    """
    if not engine.training or engine.state.completed - began < 2:  # one batch may be skipped on purpose
        return
    without = [one for one in engine.updates if _has_no_loss(engine, one)]
    if len(without) < len(engine.updates):
        without = [one for one in without if whole and _returns_nothing(one)]
    elif not whole and _skips_at_times(without[0]):
        return
    for update in without[:1]:
        _report_no_loss(engine, update, began)


def _has_no_loss(engine: Engine, update: UpdateState) -> bool:
    """Whether an update made no step for lack of a loss; not one that steps its own optimizer, or skipped the last batch."""
    if update.steps or update.last_skip not in (None, NO_GRADIENT):
        return False
    left_out = update.window.held or update.omitted_in == engine.state.iteration
    return update.raw_loss is None and not left_out and not steps_itself(update)


def _report_no_loss(engine: Engine, update: UpdateState, began: int) -> None:
    state = engine.state
    if state.batch is None and engine.feed.has_data:
        who, way_out = "the data", "return the batch from the dataset or collate_fn"
    elif update.function is not None:
        who, way_out = f"the function {_name(update.function)}", "let it return the loss"
    elif update.output is None:
        who, way_out = f"the forward function {_name(update.forward)}", "return the output from the model's forward"
    else:
        who, way_out = f"the loss {_name(update.loss_function)}", "let it return the loss"
    engine.findings.report(
        "W29",
        f"update {update.name!r} ran no step in {state.completed - began} iterations, because {who} returned None, "
        "which skips the batch",
        way_out,
    )


def _skips_at_times(update: UpdateState) -> bool:
    """Whether what has returned None is a function of the user's that returns something else at another place."""
    nothing = _returns_none(update)
    return any(nothing) and not all(nothing)


def _returns_nothing(update: UpdateState) -> bool:
    """Whether what has returned None is a function of the user's that never returns anything."""
    nothing = _returns_none(update)
    return bool(nothing) and all(nothing)


def steps_itself(update: UpdateState) -> bool:
    """Whether what has returned None makes the steps itself."""
    return names_reached(_function_of(update)) >= {"backward", "step"}


def _returns_none(update: UpdateState) -> list[bool]:
    """Of each place at which a function of the user's returns, whether it returns None; of others, nothing is known."""
    function = _function_of(update)
    return returns_none(function) if is_users(function) else []


def _function_of(update: UpdateState) -> Any:
    """The plain function behind what has returned None."""
    function = update.function or (update.forward if update.output is None else update.spec.loss)
    function = unwrap(getattr(function, "loss", None) or function)
    if not hasattr(function, "__func__") and not isinstance(function, FunctionType):  # an object that is called
        function = getattr(type(function), "forward" if isinstance(function, nn.Module) else "__call__", None)
    return getattr(function, "__func__", function)


def _name(function: Any) -> str:
    return repr(getattr(function, "__qualname__", None) or type(function).__name__)
