"""What receivers read: attributes of the engine's objects and values of tensors, recorded while a receiver is called."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

import signalfire
import signalfire.handlers
from signalfire import Connection, Engine, Events, Handler, Phase, Signal, Update
from signalfire.authoring.batches import tensors_in
from signalfire.core.connection import Receiver
from signalfire.core.state import State
from signalfire.core.update import UpdateState
from signalfire.core.window import Window
from signalfire.distributed import Processes, Watch, expected_processes
from signalfire.handlers import (
    EMA,
    SWA,
    Average,
    Checkpoint,
    CSVLogger,
    DistributedDataParallel,
    ElasticDataParallel,
    FastDevRun,
    Freezing,
    FullyShardedDataParallel,
    GradientAccumulation,
    Guards,
    LRScheduling,
    Metrics,
    NonFiniteGuard,
    ParameterScheduling,
    Predictions,
    Preemption,
    ProgressBar,
    StragglerDetection,
    TensorBoardLogger,
    TensorParallel,
    Validation,
)
from signalfire.models.modules import Modules
from signalfire.resuming.past import Past
from signalfire.resuming.snapshots import Snapshots
from tests.kit import batches, build, evaluator_of, mlp
from tests.resume_recipes import Recipe, make_sequences, sequences
from tests.watching import COMPOSITIONS, Place, Terminal, meant, place_of

__all__ = ["MORE", "THREADED", "TOGETHER", "Reading", "read_by", "reading"]

PACKAGE = Path(signalfire.__path__[0])  # where its code runs from, which links to the repository
HANDLERS = (
    str(Path(signalfire.handlers.__path__[0])),
    *(str(PACKAGE / name) for name in ("authoring/monitor.py", "authoring/planning.py", "checkpoints", "traces")),
)
"""Whose code reads for a handler."""

ATTRIBUTES: dict[type, dict[str, tuple[str, ...]]] = {
    State: {
        "bounds": (
            "max_epochs",
            "max_iters",
            "max_steps",
            "max_seconds",
            "min_epochs",
            "min_iters",
            "epoch_length",
            "planned",
        ),
        "batch": ("batch",),
        "metrics": ("metrics",),
        "plan": ("plan",),
        "stop": ("stop_reason",),
        "error": ("exception",),
    },
    UpdateState: {
        "output": ("output",),
        "loss": ("loss", "raw_loss", "backward_loss"),
        "loss_weight": ("weight",),
        "step": ("skipped", "steps", "one_step_per_batch"),
        "window": ("window", "sync_gradients"),
        "plan": ("more",),
        "optimizer": ("optimizer", "parameters"),
        "flags": ("read_flags", "read_later", "read_numbers_later"),
    },
    Window: {"window": ("filled", "length", "held", "kept")},
    Engine: {"modules": ("model", "modules"), "device": ("device",), "weights": ("weights",)},
    Modules: {"modules": ("values", "items", "models")},
    Processes: {"processes": ("gather", "any", "broadcast", "barrier", "sum", "collect", "gather_samples", "watch")},
    Watch: {"processes": ("stop", "failed", "explain")},
    Snapshots: {"state": ("take", "state_dict")},
    Past: {"state": ("begin_run", "hold")},
    Optimizer: {"optimizer": ("state", "param_groups")},
    torch.amp.GradScaler: {"scale": ("scale", "unscale_", "update", "_found_inf_per_device", "_per_optimizer_states")},
    nn.Module: {
        "modes": ("training",),
        "modules": ("modules", "named_modules", "children", "named_children", "named_parameters", "get_submodule"),
    },
}
"""Attributes that are things of `signalfire.core.declarations` where a handler reads them, or calls what changes them."""

COLLECTIVES = ("broadcast", "all_reduce", "all_gather_into_tensor")
"""Functions of torch.distributed that handlers call themselves."""

OF_ANY_ENGINE = (Processes, Watch, Optimizer, nn.Module, torch.amp.GradScaler)
"""Classes whose objects no engine owns, or several."""

RATES = {"lr", "momentum", "betas", "initial_lr", "max_lr", "base_momentum", "max_momentum"}
GETTERS = {"grad": "gradients", "requires_grad": "trainable"}
METADATA = {
    "device", "dtype", "shape", "ndim", "is_leaf", "size", "dim", "numel", "data_ptr", "untyped_storage", "layout", "is_sparse",
    "is_floating_point", "is_complex", "data", "grad_fn", "is_cuda", "to", "double", "float", "half",
    "bfloat16", "is_quantized", "is_meta", "stride", "is_contiguous",
    "element_size", "storage_offset", "_version", "is_nested", "__repr__", "__hash__", "requires_grad_", "is_mkldnn", "names",
    "is_shared", "retain_grad", "is_inference",
}  # fmt: skip
OVERWRITES = {"copy_", "zero_", "fill_", "set_", "normal_", "uniform_", "__set__"}


class Group(dict[str, Any]):
    """A parameter group that tells what is read of it."""

    def __init__(self, given: dict[str, Any], reading: Reading) -> None:
        super().__init__(given)
        self.reading = reading

    def _read(self, key: str) -> None:
        if _by_a_handler():
            self.reading.note("optimizer" if key == "params" else "rates" if key in RATES else "groups")

    def __getitem__(self, key: str) -> Any:
        self._read(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read(key)
        return super().get(key, default)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _by_a_handler() -> bool:
    """Whether the function that reads, two frames up, is one of a handler."""
    return sys._getframe(3).f_code.co_filename.startswith(HANDLERS)


class Reading(TorchFunctionMode):
    """Records what the receivers of an engine read.

    Attributes:
        seen: by receiver, the things that it read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Place, set[str]] = defaultdict(set)
        self.watched: dict[int, object] = {}  # what belongs to a watched engine, by its id
        self._thread = threading.get_ident()
        self._connected: dict[Place, Place] = {}  # functions that a receiver connects read on its behalf
        self._stack: list[tuple[Place, dict[int, str], list[Any]]] = []

    def watch(self, engine: Engine) -> None:
        parts = (engine, engine.state, engine.modules, engine.snapshots, engine.past, *engine.updates)
        for part in (*parts, *(update.window for update in engine.updates)):
            self.watched[id(part)] = part
        engine.signals.call_through(self._around)

    def note(self, thing: str) -> None:
        if self._stack and threading.get_ident() == self._thread:
            self.seen[self._stack[-1][0]].add(thing)

    def _around(self, signal: Signal, connection: Connection) -> Receiver:
        handler = getattr(connection.receiver, "__self__", None)
        if connection.owner is None or not isinstance(handler, Handler):
            return connection.call
        kind, method = type(handler), connection.receiver.__name__
        if any(one.method == method for one in kind.subscriptions):
            place = place_of(kind, method)
        elif self._stack:
            place = self._connected.setdefault((kind.__name__, method), self._stack[-1][0])
        else:
            place = self._connected.get((kind.__name__, method), (kind.__name__, method))

        def call(engine: Engine) -> Any:
            for update in engine.updates:
                groups = [] if update.optimizer is None else update.optimizer.param_groups
                groups[:] = [one if isinstance(one, Group) else Group(one, self) for one in groups]
            with torch._C.DisableTorchFunction():
                self._stack.append((place, *_tensors(engine)))
            try:
                with self:
                    return connection.call(engine)
            finally:
                self._stack.pop()

        return call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name == "__get__":
            name = func.__self__.__name__
        known = self._stack[-1][1] if self._stack else {}
        if name in GETTERS:
            if _key(args[0]) in known:
                self.note(GETTERS[name])
        elif name not in METADATA:
            read = args[1:] if name in OVERWRITES else args
            for one in _pytree.tree_leaves((read, kwargs)):
                if isinstance(one, Tensor) and (thing := known.get(_key(one))):
                    self.note(thing)
        result = func(*args, **kwargs)
        if name == "grad" and isinstance(result, Tensor):
            known[_key(result)] = "gradients"
        return result


def _key(value: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        try:
            return value.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):
            return id(value)


def _tensors(engine: Engine) -> tuple[dict[int, str], list[Tensor]]:
    """What lies where in memory, and the tensors themselves: memory that is held is not used for others."""
    update = engine.state.update
    roots = list(engine.modules.values())
    parameters: list[Tensor] = [one for root in roots for one in root.parameters()]
    named: dict[str, list[Tensor]] = {
        "batch": tensors_in(engine.state.batch),
        "output": tensors_in(update.output),
        "loss": [one for one in (update.raw_loss, update.backward_loss) if isinstance(one, Tensor)],
        "buffers": [one for root in roots for one in root.buffers()],
        "weights": parameters,
        "gradients": [one.grad for one in parameters if one.grad is not None],
    }
    found = {_key(one): thing for thing, several in named.items() for one in several if one.numel()}
    return found, [one.detach() for several in named.values() for one in several]


@contextmanager
def reading() -> Iterator[Reading]:
    """Records what the receivers of watched engines read in the block."""
    record = Reading()

    def traced(kind: type, things: dict[str, str]) -> Any:
        plain = kind.__getattribute__

        def read(self: Any, name: str) -> Any:
            owned = kind in OF_ANY_ENGINE or id(self) in record.watched
            if name in things and owned and sys._getframe(1).f_code.co_filename.startswith(HANDLERS):
                record.note(things[name])
            return plain(self, name)  # type: ignore[call-arg]

        return read

    def counted(collective: Callable[..., Any]) -> Callable[..., Any]:
        def communicate(*args: Any, **kwargs: Any) -> Any:
            record.note("processes")
            return collective(*args, **kwargs)

        return communicate

    collectives = {name: getattr(dist, name) for name in COLLECTIVES}
    own = {kind: vars(kind).get("__getattribute__") for kind in ATTRIBUTES}
    gc.collect()
    gc.disable()  # a collection runs what objects of earlier tests do at their end, within any receiver
    try:
        for kind, by_thing in ATTRIBUTES.items():
            names = {name: thing for thing, several in by_thing.items() for name in several}
            kind.__getattribute__ = traced(kind, names)  # type: ignore[method-assign]
        for name, collective in collectives.items():
            setattr(dist, name, counted(collective))
        yield record
    finally:
        gc.enable()
        for name, collective in collectives.items():
            setattr(dist, name, collective)
        for kind, before in own.items():
            if before is None:
                del kind.__getattribute__
            else:
                kind.__getattribute__ = before  # type: ignore[method-assign]


def _note_files(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and _active and str(arguments[0]).startswith(_active[-1][1]):
        _active[-1][0].note("files")


_active: list[tuple[Reading, str]] = []
sys.addaudithook(_note_files)  # it cannot be removed


def place_in(folder: Path, name: str) -> Path:
    """A new folder of a composition; ranks with a Checkpoint share theirs."""
    place = folder / (name if name in SHARING else f"{name} {expected_processes().rank}")
    place.mkdir(exist_ok=name in SHARING)
    return place


def read_by(compositions: Mapping[str, Recipe], folder: Path) -> dict[Place, set[str]]:
    """What the receivers of these compositions read in runs."""
    with reading() as record:
        _active.append((record, str(folder)))
        try:
            for name, recipe in compositions.items():
                place = place_in(folder, name)
                engine = recipe.build(place)
                record.watch(engine)
                with meant():
                    engine.run(recipe.data(), **recipe.bounds)
        finally:
            _active.pop()
    return dict(record.seen)


# ---- compositions in which receivers read what they do not read in those of `watching` ----------------------------------


def adapted(folder: Path) -> Engine:
    model = mlp(5, 8, 1)
    model[0].requires_grad_(False)
    return build(model, EMA(0.9, trained_only=True), Checkpoint(folder, trained_only=True))


def guarded(folder: Path) -> Engine:
    model = mlp(5, 8, 1, nn.BatchNorm1d(8))
    return build(
        model,
        Guards(every="2it"),
        Validation(evaluator_of(model), batches(2, seed=1), prefix="val_"),
        ProgressBar(["loss", "val_loss"], file=Terminal(), interval=0.0),
    )


def _by_the_loss(engine: Engine) -> Tensor:
    assert engine.state.update.raw_loss is not None
    weight: Tensor = engine.state.batch[0].mean() * engine.state.update.raw_loss.detach()
    return weight


def weighted(folder: Path) -> Engine:
    return build(
        mlp(5, 8, 1),
        GradientAccumulation(2, weight=_by_the_loss),
        ParameterScheduling("weight_decay", lambda step: 0.1),
        ProgressBar(file=Terminal(), interval=0.0),
    )


def guarded_evaluation(folder: Path) -> Engine:
    engine = evaluator_of(mlp(5, 8, 1, nn.BatchNorm1d(8)))
    engine.attach(Guards())
    return engine


def outputs(folder: Path) -> Engine:
    engine = Engine(Update.prediction(), model=mlp(5, 8, 1))
    engine.attach(Predictions(targets=True), DistributedDataParallel(timeout=60.0))
    return engine


def unsaved(folder: Path) -> Engine:
    engine = build(
        mlp(5, 8, 1),
        Preemption(exit_status=None),
        Checkpoint(folder, weights_only=True, asynchronous=True, every="1it"),
    )
    engine.connect(Events.ITERATION_COMPLETED(once=3), lambda engine: os.kill(os.getpid(), signal.SIGTERM))
    return engine


def rehearsed(folder: Path) -> Engine:
    model = mlp(5, 8, 1, nn.BatchNorm1d(8))
    return build(
        model,
        FastDevRun(2),
        SWA(1, bn_data=batches(2)),
        Validation(evaluator_of(model), batches(2, seed=1), every="9ep"),
    )


def stopped_in_chunks(folder: Path) -> Engine:
    """The run ends inside a batch."""
    engine = sequences(folder)
    engine.connect(Events.UPDATE_COMPLETED(once=2), lambda engine: engine.terminate("meant"))
    return engine


def resumed_schedule(folder: Path) -> Engine:
    def planned() -> Engine:
        return build(
            mlp(5, 8, 1),
            LRScheduling(partial(CosineAnnealingLR)),
            CSVLogger(folder / "log.csv"),
            TensorBoardLogger(folder / "events"),
            Checkpoint(folder / "saved"),
        )

    first = planned()
    first.connect(Events.ITERATION_COMPLETED(once=6), lambda engine: engine.terminate("meant"))
    first.run(batches(), max_epochs=3)
    engine = planned()
    engine.load_state_dict(first.state_dict())
    return engine


def frozen_in_a_window(folder: Path) -> Engine:
    """Parts are frozen whose gradients an open window holds."""
    engine = build(mlp(5, 8, 1), GradientAccumulation(4))
    engine.run(batches(), max_iters=2)
    engine.attach(Freezing({"0": 2, "1.bias": None}))
    return engine


MORE: dict[str, Recipe] = {
    **{
        one.__name__: Recipe(one, partial(batches, 6), {"max_epochs": 3})
        for one in (guarded, weighted, unsaved, rehearsed, resumed_schedule, frozen_in_a_window, adapted)
    },
    "guarded evaluation": Recipe(guarded_evaluation, partial(batches, 3), {}),
    "stopped in chunks": Recipe(stopped_in_chunks, make_sequences, {"max_epochs": 2}),
}


def replicas(folder: Path) -> Engine:
    """Ranks begin with other weights, and have batches of other sizes."""
    model = mlp(5, 8, 1, nn.BatchNorm1d(8))
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor += expected_processes().rank
    return build(
        model,
        DistributedDataParallel(timeout=60.0),
        Guards(every="2it"),
        Metrics(loss=Average()),
        GradientAccumulation(2),
        Validation(evaluator_of(model), batches(2, seed=1), prefix="val_"),
        Checkpoint(folder, name="saved", every="1it"),
        NonFiniteGuard(),
        StragglerDetection(every="5it"),
    )


def replicas_and_a_thread(folder: Path) -> Engine:
    return build(
        mlp(5, 8, 1),
        DistributedDataParallel(timeout=60.0),
        Checkpoint(folder, name="saved", every="1it", asynchronous=True),
    )


def replicas_failing(folder: Path) -> Engine:
    """The last process fails, and leaves the others."""
    engine = replicas(folder)

    def fail(engine: Engine) -> None:
        raise ValueError("meant")

    if engine.processes.rank == engine.processes.world_size - 1:
        engine.connect(Events.ITERATION_COMPLETED(once=2), fail)
        engine.connect(Events.ENDED, lambda engine: dist.destroy_process_group(), phase=Phase.PERSIST)
    return engine


def shards(folder: Path) -> Engine:
    model = mlp(5, 8, 1)
    return build(
        model,
        FullyShardedDataParallel(timeout=60.0, reduce_every_batch=True),
        GradientAccumulation(2),
        Validation(evaluator_of(model), batches(2, seed=1), prefix="val_"),
    )


def parts(folder: Path) -> Engine:
    """Ranks begin with other random states, and have parts of the layers."""
    torch.manual_seed(expected_processes().rank)
    return build(
        mlp(5, 8, 1, nn.Tanh()),
        TensorParallel({"0": ColwiseParallel(), "2": RowwiseParallel()}, timeout=60.0),
        Metrics(loss=Average()),
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )


def elastic(folder: Path) -> Engine:
    """Ranks begin with other random states."""
    torch.manual_seed(expected_processes().rank)
    norm = nn.BatchNorm1d(8)
    norm.register_buffer("running_mean", torch.full((8,), float(expected_processes().rank)))
    model = nn.Sequential(nn.Linear(5, 8), norm, nn.Linear(8, 1))
    return build(model, ElasticDataParallel(shards=2, timeout=60.0), Metrics(loss=Average()))


_UNEVEN = partial(batches, [4, 3, 4, 4, 2])
TOGETHER: dict[str, Recipe] = {
    **{
        one.__name__: Recipe(one, _UNEVEN, {"max_epochs": 2})
        for one in (replicas, replicas_and_a_thread, shards, parts, elastic)
    },
    "predicted": COMPOSITIONS["predicted"],
    "outputs": Recipe(outputs, partial(batches, 4), {}),
    "replicas_failing": Recipe(replicas_failing, _UNEVEN, {"max_epochs": 2}),  # the last one: a process leaves
}

SHARING = {"replicas", "replicas_and_a_thread", "replicas_failing", "shards"}
"""Compositions of several ranks that write checkpoints."""

THREADED = {"unsaved", "replicas_and_a_thread"}
"""Compositions in which a thread writes files at any moment."""
