"""What a receiver changes and uses: the things of `signalfire.core.declarations`, compared before and after its call."""

from __future__ import annotations

import io
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, ReduceLROnPlateau

from signalfire import Connection, Engine, Events, Handler, Signal, Update
from signalfire.authoring.batches import tensors_in
from signalfire.authoring.randomness import random_state
from signalfire.core.connection import Receiver
from signalfire.distributed import local_part
from signalfire.distributed.processes import lost_another
from signalfire.handlers import (
    EMA,
    L1,
    L2,
    SWA,
    ActivationCheckpointing,
    ActivationStatistics,
    Average,
    Benchmark,
    ChannelsLast,
    Checkpoint,
    Compile,
    CSVLogger,
    Deterministic,
    DeviceStatistics,
    Distillation,
    EarlyStopping,
    Export,
    FastDevRun,
    Freezing,
    GarbageCollection,
    GradientAccumulation,
    GradientClipping,
    Histograms,
    History,
    Lookahead,
    LRScheduling,
    MemorySnapshot,
    Metrics,
    MixedPrecision,
    NEFTune,
    NonFiniteGuard,
    OptimizerStatistics,
    ParameterScheduling,
    ParameterStatistics,
    Penalty,
    Precision32,
    Predictions,
    Preemption,
    ProgressBar,
    ProgressiveResizing,
    Pruning,
    RandomErasing,
    RemoteLogger,
    Reporting,
    Rewindable,
    Seeding,
    SequenceLengthWarmup,
    SpikeGuard,
    StochasticDepth,
    Summary,
    TensorBoardLogger,
    Throughput,
    UpdateFrequency,
    Validation,
    WarmStart,
)
from tests.kit import SGD, batches, build, digest, evaluator_of, mlp
from tests.remote import in_memory
from tests.resume_recipes import RECIPES, Recipe

__all__ = ["COMPOSITIONS", "UNSEEN", "Place", "Watch", "declared", "meant", "watch"]

Place = tuple[str, str]
"""A receiver: the class that declares it, and its method."""

UNSEEN = {"processes", "flags", "scale", "optimizer"}
"""Things that cannot be compared here: what ranks exchange, and what a scaler and a device hold."""


CYCLED = {"params", "momentum", "betas", "max_momentum", "base_momentum"}
"""Fields of optimizers' groups that schedules of rates and of parameters may both write."""


def things(engine: Engine, folder: Path) -> dict[str, Any]:
    """The things of an engine that can be compared, each as text or bytes that differ where they do."""
    state, parameters = engine.state, [p for root in engine.modules.values() for p in root.parameters()]
    modules = [part for root in engine.modules.values() for part in root.modules()]
    buffers = [b for root in engine.modules.values() for b in root.buffers()]
    tensors = tensors_in(state.batch)
    groups = [group for update in engine.updates if update.optimizer for group in update.optimizer.param_groups]
    update = state.update
    return {
        "batch": digest([wide(one) for one in tensors]),
        "device": str({one.device for one in [*tensors, *parameters]}),
        "precision": str([one.dtype for one in [*tensors, *parameters]]) + str(torch.is_autocast_enabled("cpu")),
        "output": digest([wide(one) for one in tensors_in(update.output)]),
        "loss": digest([wide(one) for one in (update.raw_loss, update.backward_loss) if isinstance(one, Tensor)]),
        "loss_weight": repr(update.weight),
        "gradients": digest([None if p.grad is None else wide(p.grad) for p in parameters]),
        "trainable": str([p.requires_grad for p in parameters]),
        "weights": digest([wide(p) for p in parameters]),
        "buffers": digest([wide(one) for one in buffers]),
        "modes": str([part.training for part in modules]),
        "modules": str([id(engine.model), *((id(part), hooks_of(part)) for part in modules)]),
        "rates": str([[value for key, value in group.items() if "lr" in key] for group in groups]),
        "groups": str(
            [[value for key, value in group.items() if key not in CYCLED and "lr" not in key] for group in groups]
        ),
        "step": str([(one.skipped, one.steps, one.one_step_per_batch) for one in engine.updates]),
        "plan": str([[one.name for one in state.plan], update.more]),
        "window": str([(one.window.length, one.window.filled, one.window.held) for one in engine.updates]),
        "metrics": digest([dict(state.metrics.serials), state.metrics.owners, sorted(state.metrics.running)]),
        "stop": str([engine.boundary.stops_now(), engine.boundary.epoch_stop, state.stop_reason]),
        "bounds": str([state.max_epochs, state.max_iters, state.max_steps, state.min_epochs, state.min_iters]),
        "state": str(engine.snapshots.has_loaded_state),
        "error": str([repr(state.exception), getattr(state.exception, "__notes__", [])]),
        "files": written(engine, folder),
        "random": digest(random_state()),
        "signals": str([signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)]),
    }


def hooks_of(module: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for kind in kinds) + ("forward" in vars(module))


def wide(value: Tensor) -> Tensor:
    value = local_part(value.detach())
    return value.double() if value.is_floating_point() else value


def written(engine: Engine, folder: Path) -> str:
    """The files in a folder with their sizes, and what is shown."""
    shown = [handler.file for handler in engine.handlers.values() if isinstance(handler, ProgressBar | History)]
    text = [file.getvalue() for file in shown if isinstance(file, io.StringIO)]
    return str([*sorted((str(one), one.stat().st_size) for one in folder.rglob("*") if one.exists()), text])


class Watch:
    """Calls every receiver of a handler through a comparison.

    Attributes:
        changed: by receiver, the things that differed after it.
    """

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.folder = folder
        self.changed: dict[Place, set[str]] = defaultdict(set)
        self._inner: list[set[str]] = []  # what receivers inside the call have changed
        engine.signals.call_through(self._around)

    def _around(self, signal: Signal, connection: Connection) -> Receiver:
        handler = getattr(connection.receiver, "__self__", None)
        if connection.owner is None or not isinstance(handler, Handler):
            return connection.call
        place = place_of(type(handler), getattr(connection.receiver, "__name__", ""))

        def call(engine: Engine) -> Any:
            before = things(engine, self.folder)
            self._inner.append(set())
            try:
                return connection.call(engine)
            finally:
                inner = self._inner.pop()
                after = things(engine, self.folder)
                changed = {name for name, value in after.items() if value != before[name]}
                self.changed[place] |= changed - inner
                if self._inner:
                    self._inner[-1] |= changed

        return call


def place_of(kind: type, method: str) -> Place:
    """The class among the bases that declares a method's subscriptions; the class itself for a method that it connects."""
    owners = [base for base in kind.__mro__ if hasattr(vars(base).get(method), "_signalfire_subscriptions")]
    return (owners or [kind])[0].__name__, method


def declared(kind: type[Handler]) -> dict[Place, tuple[frozenset[str], frozenset[str]]]:
    """What the receivers of a class declare to read and to write."""
    found: dict[Place, tuple[frozenset[str], frozenset[str]]] = {}
    for one in kind.subscriptions:
        assert one.reads is not None, f"{kind.__name__}.{one.method}"
        assert one.writes is not None, f"{kind.__name__}.{one.method}"
        reads, writes = found.get(place_of(kind, one.method), (frozenset(), frozenset()))
        found[place_of(kind, one.method)] = reads | one.reads, writes | one.writes
    return found


# ---- compositions -----------------------------------------------------------------------------------------------------


def scaled(folder: Path) -> Engine:
    """Gradients are scaled, and overflow at first; a batch is infinite."""
    guard = NonFiniteGuard(patience=1, action="stop")
    engine = build(mlp(5, 8, 1), MixedPrecision("fp16", init_scale=2.0**40), GradientClipping(max_norm=1.0), guard)

    def ruin(engine: Engine) -> None:
        if engine.state.iteration == 9:
            engine.state.batch[0].fill_(float("inf"))

    engine.connect(Events.GET_BATCH_COMPLETED, ruin)
    return engine


class Terminal(io.StringIO):
    """A text file on which bars are drawn."""

    def isatty(self) -> bool:
        return True


def kept(folder: Path) -> Engine:
    """Every way to save; the best weights are put back."""
    model = mlp(5, 8, 1, nn.BatchNorm1d(8))
    stopping = EarlyStopping("loss", mode="min", patience=2, min_delta=9.0, restore_best=True)
    return build(
        model,
        Validation(evaluator_of(model), batches(2, seed=1), sanity=1, at_start=True),
        stopping,
        Checkpoint(folder / "a", on_exception=True, resume=True, name="a"),
        Checkpoint(folder / "b", monitor="loss", mode="min", name="b"),
        Preemption(),
        ProgressBar(file=Terminal(), interval=0.0),
        History(print_epochs=True, file=io.StringIO()),
        SWA(1, lr=0.05, bn_data=batches(2)),
        Seeding(),
        MemorySnapshot(folder / "memory"),
    )


def resumed(folder: Path) -> Engine:
    kept(folder).run(batches(), max_epochs=1)
    return kept(folder)


def shown() -> Engine:
    """A bar that shows all it can, over a run of which two iterations are made."""
    engine = build(mlp(5, 8, 1), ProgressBar(file=Terminal(), interval=0.0, learning_rate=True))
    engine.run(batches(), max_iters=2)
    return engine


def continued(folder: Path) -> Engine:
    return shown()


def reloaded(folder: Path) -> Engine:
    engine = build(mlp(5, 8, 1), ProgressBar(file=Terminal(), interval=0.0, learning_rate=True))
    engine.load_state_dict(shown().state_dict())
    return engine


def interrupted(folder: Path) -> Engine:
    engine = kept(folder)

    def preempt(engine: Engine) -> None:
        if engine.state.iteration == 4:
            engine.boundary.preempt("asked")

    engine.connect(Events.ITERATION_COMPLETED, preempt)
    return engine


def thawing(folder: Path) -> Engine:
    return build(
        mlp(5, 8, 1, nn.BatchNorm1d(8)),
        Freezing({"0": 2, "1": None}),
        GradientAccumulation(2, weight=lambda engine: 1.5),
        EMA(0.5),
        ParameterScheduling("weight_decay", lambda epoch: 0.1 * epoch, every="1ep"),
        LRScheduling(partial(ExponentialLR, gamma=0.9), every="1ep"),
        CSVLogger(folder / "logs" / "log.csv"),
        TensorBoardLogger(folder / "events", every="1it"),
    )


def thawing_again(folder: Path) -> Engine:
    first = thawing(folder)
    first.run(batches(), max_epochs=1, check=False)
    engine = thawing(folder)
    engine.load_state_dict(first.state_dict())
    return engine


def failing(folder: Path) -> Engine:
    engine = resumed(folder)

    def fail(engine: Engine) -> None:
        if engine.state.iteration == 8:
            raise ValueError("meant")

    engine.connect(Events.ITERATION_COMPLETED, fail)
    return engine


def turns(folder: Path) -> Engine:
    """Two updates of one model in turns, of which one accumulates."""
    model = mlp(5, 8, 1)

    def update(name: str, part: nn.Module) -> Update:
        return Update.supervised(nn.functional.mse_loss, SGD, name=name, parameters=lambda engine: part.parameters())

    engine = Engine([update("one", model[0]), update("other", model[1])], model=model, seed=0)
    engine.attach(UpdateFrequency({"other": 2}), GradientAccumulation(2, update="other"))
    return engine


def plateau(folder: Path) -> Engine:
    return build(
        mlp(5, 8, 1),
        Metrics(loss=Average()),
        LRScheduling(
            partial(ReduceLROnPlateau, patience=0, threshold=9.0),
            monitor="loss",
            warmup=partial(LinearLR, start_factor=0.1, total_iters=99),
        ),
    )


def predicted(folder: Path) -> Engine:
    engine = Engine(Update.prediction(), model=mlp(5, 8, 1))
    engine.attach(Predictions(folder / "outputs"))
    return engine


def exported(folder: Path) -> Engine:
    model = mlp(5, 8, 1, nn.BatchNorm1d(8))
    return build(
        model,
        Metrics(train_loss=Average()),
        EMA(0.5),
        Export(folder / "best.safetensors", at="best", monitor="train_loss"),
        Export(folder / "last.safetensors", every="2it", average=False, name="last"),
        Export(folder / "best.pt2", at="best", monitor="train_loss", name="best_program"),
        Export(folder / "last.pt2", name="last_program"),
    )


def warm(folder: Path) -> Engine:
    source = mlp(5, 8, 1, nn.BatchNorm1d(8), seed=7)
    source(torch.randn(4, 5, generator=torch.Generator().manual_seed(1)))
    torch.save(source.state_dict(), folder / "pretrained.pt")
    return build(mlp(5, 8, 1, nn.BatchNorm1d(8)), WarmStart(folder / "pretrained.pt"))


def short(folder: Path) -> Engine:
    return build(mlp(5, 8, 1), FastDevRun(2), Benchmark(), Compile(backend="eager"))


def laid_out(folder: Path) -> Engine:
    """Images, over a run that resumes from the state after its first epoch."""

    def made() -> Engine:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 1))
        return build(model, ChannelsLast(), optimizer=partial(torch.optim.Adam, lr=0.01))

    first, engine = made(), made()
    first.run(batches(6, (2, 4, 4)), max_epochs=1, check=False)
    engine.load_state_dict(first.state_dict())
    return engine


def pruned(folder: Path) -> Engine:
    """Weights are loaded in place of pruned ones."""
    model = mlp(5, 8, 1)
    dense = {"model": {key: value.clone() for key, value in model.state_dict().items()}}
    engine = build(
        model,
        Pruning(0.5, end=6, every=2),
        Freezing({"0": 2}),
        EMA(0.5),
        Lookahead(2),
        GarbageCollection(),
        Throughput(every="2it", warmup=1, waiting=True, flops="count"),
        Summary(),
        DeviceStatistics(every="2it"),
        ActivationCheckpointing(every=1),
        Deterministic(),
        Precision32("high"),
        ParameterStatistics(every="2st"),
        OptimizerStatistics(every="2st"),
        Metrics(loss=Average(), name="reported"),
        Reporting(lambda value, step: False, "loss"),
    )
    engine.connect(Events.ITERATION_COMPLETED(once=9), lambda engine: engine.load_weights(dense))
    return engine


def ahead(folder: Path) -> Engine:
    """Slow weights are evaluated."""
    model = mlp(5, 8, 1)
    validation = Validation(evaluator_of(model), batches(2, seed=1), every="1it")
    return build(model, Lookahead(4, evaluate=True), validation)


class Reading(nn.Module):
    """Embeds tokens, and has residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(9, 6)
        self.block = nn.ReLU()
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.block(self.embed((x.abs() * 4).long().clamp(max=8))).mean(1))
        return output


def noisy(folder: Path) -> Engine:
    """Noise in the forward."""
    return build(
        Reading(),
        NEFTune(mask=lambda batch: batch[0] > 0),
        StochasticDepth("block", 0.5),
        ActivationStatistics(every="2it"),
    )


def erased(folder: Path) -> Engine:
    """Segments of sequences are erased."""
    return build(nn.Sequential(nn.Flatten(), mlp(10, 8, 1)), RandomErasing(1.0))


def logged(folder: Path) -> Engine:
    """Everything that can be logged is, and the model's graph."""
    engine = build(
        mlp(5, 8, 1, nn.BatchNorm1d(8), nn.Dropout(0.5)),
        Histograms(every="2it"),
        TensorBoardLogger(folder / "events", graph=True),
        in_memory(RemoteLogger, folder / "remote"),
        Metrics(train_loss=Average()),
    )
    engine.log.hyperparameters(lr=0.1)

    @engine.on(Events.ITERATION_COMPLETED(every=2))
    def log(engine: Engine) -> None:
        engine.log("value", 1.0)
        engine.log.image("image", torch.zeros(2, 2))
        engine.log.figure("figure", Figure(figsize=(1, 1)))
        engine.log.text("text", "a")

    return engine


def going_back(folder: Path) -> Engine:
    engine = build(mlp(5, 8, 1), Rewindable(every="2it"))
    first = iter([1])

    @engine.on(Events.ITERATION_COMPLETED(once=7))
    def rewind(engine: Engine) -> None:
        if next(first, 0):
            engine.rewind(3)

    return engine


def spiking(folder: Path, policy: Any = "rewind") -> Engine:
    """The loss of one batch is large; the run goes back, and leaves it out."""
    engine = build(
        mlp(5, 8, 1, nn.BatchNorm1d(8)),
        SpikeGuard(policy, window=8, rewind=3, keep=2),
        Metrics(train_loss=Average()),
        CSVLogger(folder / "logs" / "log.csv", every="1it"),
        Checkpoint(folder / "saved", every="1it", keep=1),
    )

    @engine.on(Events.LOSS_COMPUTED)
    def spoil(engine: Engine) -> None:
        update = engine.state.update
        if engine.past.places_of([engine.state.iteration]) == [(3, 3)] and update.loss is not None:
            update.loss = update.loss * 1e6

    return engine


def penalized(folder: Path) -> Engine:
    def penalty(engine: Engine) -> Tensor:
        output: Tensor = engine.state.update.output
        return output.square().mean() * len(engine.state.batch)

    return build(
        mlp(5, 8, 2),
        L1(0.1),
        L2(0.1),
        Penalty(penalty, lambda step: 0.1 * step),
        Distillation(mlp(5, 4, 2)),
        GradientAccumulation(2),
        loss=lambda output, target: nn.functional.mse_loss(output, target.expand(-1, 2)),
    )


def growing(folder: Path) -> Engine:
    """Sequences are longer from step to step, and are resized besides."""
    model = nn.Sequential(nn.AdaptiveAvgPool1d(5), nn.Flatten(), mlp(5, 8, 1))
    return build(
        model, SequenceLengthWarmup(4, 12, over="9st", increment=1, dim=2), ProgressiveResizing(increment=1, final=0.1)
    )


def gone_on(build: Callable[[Path], Engine], folder: Path) -> Engine:
    """A run that resumes from the state after its first epoch."""
    first = build(folder / "first")
    first.run(batches(), max_epochs=1, check=False)
    engine = build(folder)
    engine.load_state_dict(first.state_dict())
    return engine


def going_back_again(folder: Path) -> Engine:
    return gone_on(going_back, folder)


def spiking_again(folder: Path) -> Engine:
    return gone_on(spiking, folder)


def spiking_once(folder: Path) -> Engine:
    return spiking(folder, "stop")


def pruned_later(folder: Path) -> Engine:
    """Weights are pruned that have been trained."""
    engine = build(mlp(5, 8, 1))
    engine.run(batches(), max_iters=2)
    engine.attach(Pruning(0.5))
    return engine


COMPOSITIONS: dict[str, Recipe] = {
    **{name: one for name, one in RECIPES.items() if name != "workers"},
    **{
        one.__name__: Recipe(one, partial(batches, 6), {"max_epochs": 3})
        for one in (
            ahead,
            scaled,
            kept,
            resumed,
            interrupted,
            noisy,
            failing,
            logged,
            going_back,
            spiking,
            spiking_once,
            going_back_again,
            spiking_again,
            penalized,
            thawing,
            thawing_again,
            turns,
            plateau,
            pruned,
            pruned_later,
            warm,
            exported,
        )
    },
    **{
        one.__name__: Recipe(one, partial(batches, 6), {"max_epochs": 3, "max_steps": 14})
        for one in (continued, reloaded)
    },
    "growing sizes": Recipe(growing, partial(batches, 6, (1, 12)), {"max_epochs": 3}),
    "predicted": Recipe(predicted, partial(batches, 3), {}),
    "erased": Recipe(erased, partial(batches, 6, (2, 5)), {"max_epochs": 2}),
    "laid_out": Recipe(laid_out, partial(batches, 6, (2, 4, 4)), {"max_epochs": 3}),
    "short": Recipe(short, partial(batches, 6), {"max_epochs": 3, "epoch_length": 12}),
}


def watch(recipe: Recipe, folder: Path, files_of: Path | None = None) -> dict[Place, set[str]]:
    """What the receivers of a composition have changed in a run; of files, in the folder or in another one."""
    engine = recipe.build(folder)
    watching = Watch(engine, files_of or folder)
    with meant():
        engine.run(recipe.data(), **recipe.bounds)
    return watching.changed


@contextmanager
def meant() -> Iterator[None]:
    """For runs that end with an error which is meant, or that another process ends with one."""
    try:
        yield
    except ValueError as error:
        assert str(error) == "meant"  # noqa: PT017
    except RuntimeError as error:
        assert lost_another(error)  # noqa: PT017
    except SystemExit:
        pass
